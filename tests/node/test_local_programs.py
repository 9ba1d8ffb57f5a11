"""Programs of one node reach each other by every pattern, as members of the realm do."""

from pathlib import Path

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from dep2p import (
    Lagged,
    Limits,
    Node,
    NoHandlerError,
    NoPeersSubscribedError,
    Notification,
    NotInRealmError,
    Realm,
    Request,
    Topic,
)
from dep2p.errors import PublishRefusedError, TopicNotFoundError
from dep2p.messaging.message_stream import MessageStream
from dep2p.sessions.service import Session
from dep2p.testing import MemoryNetwork
from tests.pubsub.nodes import joined, pubsub_nodes, take, take_items


async def test_a_request_to_the_own_id_reaches_the_own_handler(autojump_clock: MockClock) -> None:
    async with pubsub_nodes(1) as (node,):

        @node.on_request("greet")
        async def greet(request: Request) -> bytes:
            assert request.peer == node.peer_id
            return b"hello " + request.body

        assert await node.request(node.peer_id, "greet", b"me", timeout_s=5) == b"hello me"
        big = bytes(900_000)
        assert await node.request(node.peer_id, "greet", big) == b"hello " + big
        with pytest.raises(NoHandlerError):
            await node.request(node.peer_id, "nothing", b"")


async def test_requests_at_once_keep_to_the_handlers_concurrency(autojump_clock: MockClock) -> None:
    at_work = most = 0
    async with pubsub_nodes(1) as (node,):

        @node.on_request("slow", concurrency=3)
        async def slow(request: Request) -> bytes:
            nonlocal at_work, most
            at_work += 1
            most = max(most, at_work)
            await trio.sleep(1)
            at_work -= 1
            return request.body

        async def ask(number: int) -> None:
            assert await node.request(node.peer_id, "slow", b"%d" % number) == b"%d" % number

        async with trio.open_nursery() as nursery:
            for number in range(10):
                nursery.start_soon(ask, number)
        assert most == 3


async def test_notifies_arrive_in_order(autojump_clock: MockClock) -> None:
    got: list[bytes] = []
    async with pubsub_nodes(1) as (node,):

        @node.on_notify("seen")
        async def seen(notification: Notification) -> None:
            got.append(notification.body)

        for number in range(1_000):
            await node.notify(node.peer_id, "seen", b"%d" % number)
        await trio.sleep(1)
        assert got == [b"%d" % number for number in range(1_000)]


async def test_a_reliable_message_waits_for_its_handler(autojump_clock: MockClock) -> None:
    async with pubsub_nodes(1) as (node,):
        got: list[bytes] = []
        receipt = await node.send(node.peer_id, "news", b"1", reliable=True)
        await trio.sleep(3)
        assert not receipt.has_ended

        @node.on_notify("news")
        async def news(notification: Notification) -> None:
            got.append(notification.body)

        await receipt.wait()
        for number in range(2, 200):
            await node.send(node.peer_id, "news", b"%d" % number, reliable=True)
        await node.delivery().flush()
        assert got == [b"%d" % number for number in range(1, 200)]
        assert node.delivery().outbox() == []


async def test_a_durable_outbox_and_the_memory_of_what_was_handled_are_one_nodes(tmp_path: Path) -> None:
    """On the real clock: the disk takes real time. What was handled is not handled again after a restart."""
    network, realm, got = MemoryNetwork(), Realm.generate("team"), list[bytes]()
    identity = network.host().identity
    for start in range(2):
        async with Node.open(
            realm, host=network.host(identity), identity=identity, outbox="disk", data_dir=tmp_path
        ) as node:

            @node.on_notify("news")
            async def news(notification: Notification) -> None:
                got.append(notification.body)

            for number in range(20):
                await node.send(node.peer_id, "news", b"%d" % (20 * start + number), reliable=True)
            with trio.fail_after(60):
                await node.delivery().flush()
    assert got == [b"%d" % number for number in range(40)]


async def test_a_stream_goes_both_ways(autojump_clock: MockClock) -> None:
    async with pubsub_nodes(1) as (node,):

        @node.on_stream("double")
        async def double(stream: MessageStream) -> None:
            async for item in stream:
                await stream.send(item * 2)
            await stream.send_eof()

        async with node.stream(node.peer_id, "double") as stream:
            for item in (b"x", bytes(2_000_000)):
                await stream.send(item)
            await stream.send_eof()
            assert [item async for item in stream] == [b"xx", bytes(4_000_000)]


async def test_an_ordered_session(autojump_clock: MockClock) -> None:
    async def count(session: Session) -> None:
        for number in range(500):
            await session.push(b"%d" % number)

    async with pubsub_nodes(1) as (node,):
        node.sessions.serve("count", count)
        async with node.sessions.open(node.peer_id, "count") as session:
            assert [int(push.body) async for push in session] == list(range(500))


async def test_other_handles_of_a_topic_hear_a_publish_and_its_own_does_not(autojump_clock: MockClock) -> None:
    async with pubsub_nodes(1) as (node,):
        writer, reader = await node.join("chat"), await node.join("chat")
        async with writer.subscribe() as own, reader.subscribe() as others:
            result = await writer.publish(b"hi")
            assert (result.sent_to, result.local_subscriptions, result.queued) == ((), 1, False)
            with trio.fail_after(5):
                message = await anext(others)
            assert not isinstance(message, Lagged)
            assert (message.body, message.sender, message.id) == (b"hi", node.peer_id, result.id)
            assert message.seqno == result.seqno and message.received_from is None
            assert len(own) == 0
            assert (await node.publish("chat", b"to all here")).local_subscriptions == 2
            assert await take(own, 1) == await take(others, 1) == [b"to all here"]


async def test_a_publish_that_no_other_program_hears_is_refused_as_before(autojump_clock: MockClock) -> None:
    async with pubsub_nodes(1) as (node,):
        topic = await node.join("chat")
        async with topic.subscribe():
            with pytest.raises(NoPeersSubscribedError):
                await topic.publish(b"to nobody but itself")
        with pytest.raises(NoPeersSubscribedError):
            await node.publish("chat", b"no subscription is open")
        with pytest.raises(NoPeersSubscribedError):
            await topic.publish(b"nor for a reliable one", reliable=True)


async def test_members_and_local_programs_hear_each_message_once(autojump_clock: MockClock) -> None:
    async with pubsub_nodes(3) as nodes:
        topics = await joined(nodes)
        here = await nodes[0].join("chat")
        async with here.subscribe() as local, topics[1].subscribe() as near, topics[2].subscribe() as far:
            for number in range(50):
                result = await topics[0].publish(b"%d" % number)
                assert result.local_subscriptions == 1 and result.sent_to
            expected = [b"%d" % number for number in range(50)]
            assert await take(local, 50) == await take(near, 50) == await take(far, 50) == expected
            await trio.sleep(5)
            assert len(local) == len(near) == len(far) == 0


async def test_a_validator_judges_what_local_programs_get(autojump_clock: MockClock) -> None:
    async with pubsub_nodes(1) as (node,):
        writer, reader = await node.join("chat"), await node.join("chat")
        reader.add_validator(lambda message: message.body != b"bad")
        async with reader.subscribe() as messages:
            with pytest.raises(PublishRefusedError):
                await writer.publish(b"bad")
            await writer.publish(b"good")
            assert await take(messages, 1) == [b"good"]
            assert len(messages) == 0


async def test_a_reliable_publish_is_acknowledged_by_the_local_program(autojump_clock: MockClock) -> None:
    got: list[tuple[str, bytes]] = []
    may_return = trio.Event()

    async def consume(name: str, topic: Topic, *, task_status: trio.TaskStatus[None]) -> None:
        async with topic.subscribe() as messages:
            task_status.started()
            async for message in messages:
                assert not isinstance(message, Lagged)
                got.append((name, message.body))
                await may_return.wait()

    async with pubsub_nodes(2) as nodes, trio.open_nursery() as nursery:
        topics = await joined(nodes)
        await nursery.start(consume, "here", await nodes[0].join("chat"))
        await nursery.start(consume, "there", topics[1])
        publish = await topics[0].publish(b"important", reliable=True)
        assert set(publish.missing) == {nodes[0].peer_id, nodes[1].peer_id}
        await trio.sleep(1)
        assert publish.acknowledged_by == ()  # no program has come back for the next message
        may_return.set()
        with trio.fail_after(30):
            await publish.wait()
        await trio.sleep(60)
        assert sorted(got) == [("here", b"important"), ("there", b"important")]
        nursery.cancel_scope.cancel()


async def test_a_full_local_subscription_holds_publishers_or_says_what_it_lost(autojump_clock: MockClock) -> None:
    async with pubsub_nodes(1) as (node,):
        writer, reader = await node.join("chat"), await node.join("chat")
        async with reader.subscribe(buffer_items=4, on_full="pause") as messages:
            sent = 0

            async def publish_all() -> None:
                nonlocal sent
                for number in range(100):
                    await writer.publish(b"%d" % number)
                    sent += 1

            async with trio.open_nursery() as nursery:
                nursery.start_soon(publish_all)
                await wait_all_tasks_blocked()
                assert sent == 4
                assert await take(messages, 100) == [b"%d" % number for number in range(100)]
            for number in range(6):
                await writer.publish(b"%d" % number, wait=False)
            assert await take_items(messages, 5) == [b"0", b"1", b"2", b"3", 2]


async def test_nothing_is_reached_in_a_realm_that_was_left(autojump_clock: MockClock) -> None:
    async with pubsub_nodes(1) as (node,):
        topic = await node.join("chat")

        @node.on_request("greet")
        async def greet(request: Request) -> bytes:
            await trio.sleep(3600)
            return b""

        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                with pytest.raises(Exception) as caught:
                    await node.request(node.peer_id, "greet", b"", timeout_s=7200)
                assert "realm" in str(caught.value) or "member" in str(caught.value)

            nursery.start_soon(ask)
            await trio.sleep(1)
            await node.leave_realm(None)
            with pytest.raises(NotInRealmError):
                await node.request(node.peer_id, "greet", b"")
            with pytest.raises((TopicNotFoundError, NotInRealmError)):
                await topic.publish(b"x")


async def test_the_node_itself_is_no_member_connection_and_no_peer(autojump_clock: MockClock) -> None:
    async with pubsub_nodes(2) as (node, other):
        await joined([node, other])

        @node.on_request("x")
        async def answer(request: Request) -> bytes:
            return b""

        await node.request(node.peer_id, "x", b"")
        assert {connection.peer for connection in node.host.connections()} == {other.peer_id}
        assert [member.peer for member in node.membership().members()] == [other.peer_id]


async def test_realms_of_one_node_stay_apart(autojump_clock: MockClock) -> None:
    host = MemoryNetwork().host()
    red, blue = Realm.generate("red"), Realm.generate("blue")
    async with Node.open(red, host=host, identity=host.identity, limits=Limits()) as node:
        await node.join_realm(blue)

        @node.on_request("colour", realm="red")
        async def colour(request: Request) -> bytes:
            return b"red"

        assert await node.request(node.peer_id, "colour", b"", realm="red") == b"red"
        with pytest.raises(NoHandlerError):
            await node.request(node.peer_id, "colour", b"", realm="blue")
