"""Reliable messages between nodes in memory: handlers, receipts, outages, restarts, topics."""

import sqlite3
from contextlib import AsyncExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from dep2p import Node, Realm
from dep2p.delivery.receipts import Receipt
from dep2p.errors import (
    DeliveryExpiredError,
    DeliveryFailedError,
    DeliveryQueueFullError,
    HandlerError,
    MessageTooLargeError,
    NoPeersSubscribedError,
    NotInRealmError,
    StoreError,
    StoreLockedError,
)
from dep2p.gossipsub.topic_types import Lagged, TopicMessage
from dep2p.limits import Limits
from dep2p.protocols.delivery.states import DeliveryState, DeliveryStatus
from dep2p.protocols.delivery.wire import Ack, Hello, encode_ack, encode_hello
from dep2p.protocols.messaging.incoming import Notification
from dep2p.storage.delivery_store import DeliveryBatch, InboxRow, SqliteDeliveryStore
from dep2p.testing import MemoryNetwork
from tests.pubsub.nodes import host_of, joined, pubsub_nodes, take, until


async def _send(a: Node, b: Node, data: bytes, **options: Any) -> Receipt:
    return await a.send(b.peer_id, "news", data, reliable=True, **options)


def _count(node: Node, name: str) -> int:
    return node.counters().get(f"delivery_{name}", 0)


async def test_a_message_is_acknowledged_when_its_handler_has_returned(autojump_clock: MockClock) -> None:
    async with pubsub_nodes(2) as (a, b):
        may_return = trio.Event()
        got: list[Notification] = []

        @b.on_notify("news")
        async def take_it(notification: Notification) -> None:
            got.append(notification)
            await may_return.wait()

        receipt = await _send(a, b, b"hi", headers={"kind": "greeting"})
        await trio.sleep(60)  # far longer than the ack timeout: the receiver says that it is at work
        assert receipt.state is DeliveryState.DELIVERED
        assert receipt.tries == 1
        assert [(n.peer, n.name, n.body, n.headers) for n in got] == [(a.peer_id, "news", b"hi", {"kind": "greeting"})]
        may_return.set()
        await receipt.wait()
        assert receipt.has_ended
        assert a.delivery().outbox() == []


async def test_giving_up_a_wait_gives_up_neither_the_message_nor_the_wait_of_another(autojump_clock: MockClock) -> None:
    async with pubsub_nodes(2) as (a, b):
        may_return = trio.Event()

        @b.on_notify("news")
        async def take_it(notification: Notification) -> None:
            await may_return.wait()

        receipt = await _send(a, b, b"hi")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(receipt.wait)
            with trio.move_on_after(1) as scope:
                await receipt.wait()
            assert scope.cancelled_caught and not receipt.has_ended
            may_return.set()
        assert receipt.state is DeliveryState.ACKNOWLEDGED


async def test_rejections_say_why(autojump_clock: MockClock) -> None:
    async with pubsub_nodes(2) as (a, b):

        @b.on_notify("open")
        async def open_error(notification: Notification) -> None:
            raise HandlerError("the stock is empty")

        @b.on_notify("secret")
        async def secret_error(notification: Notification) -> None:
            raise RuntimeError("a password")

        for name, words in (("open", "the stock is empty"), ("secret", "the handler failed")):
            receipt = await a.send(b.peer_id, name, b"", reliable=True)
            with pytest.raises(DeliveryFailedError, match=words):
                await receipt.wait()
            assert receipt.state is DeliveryState.FAILED
            assert "password" not in receipt.reason
        assert _count(b, "messages_rejected") == _count(a, "messages_failed") == 2


async def test_a_reliable_publish_that_came_while_nobody_read_the_topic_reaches_the_app_that_comes(
    autojump_clock: MockClock,
) -> None:
    async with pubsub_nodes(2) as nodes:
        topics = await joined(nodes)  # both stay in the topic: pub/sub brings the message, and no app reads it
        published = await topics[0].publish(b"1", reliable=True, critical_peers=[nodes[1].peer_id])
        await trio.sleep(30)
        async with topics[1].subscribe() as messages:
            with trio.fail_after(10):
                assert await take(messages, 1) == [b"1"]
            with trio.move_on_after(0.1):
                await anext(messages)
        with trio.fail_after(10):
            await published.wait()


@pytest.mark.parametrize("away_s", [0.1, 3, 60, 290])
async def test_an_app_that_starts_within_the_age_gets_its_messages_in_order_when_its_handler_is_there(
    autojump_clock: MockClock, away_s: float
) -> None:
    async with pubsub_nodes(2) as (a, b):
        receipts = [await _send(a, b, b"%d" % number) for number in range(200)]
        await trio.sleep(away_s)
        assert {receipt.state for receipt in receipts} <= {DeliveryState.SENDING, DeliveryState.DELIVERED}
        got: list[bytes] = []

        @b.on_notify("news")
        async def take_it(notification: Notification) -> None:
            got.append(notification.body)

        receipts.append(await _send(a, b, b"200"))
        with trio.fail_after(5):
            for receipt in receipts:
                await receipt.wait()
        assert got == [b"%d" % number for number in range(201)]
        assert {receipt.tries for receipt in receipts} == {1}
        assert _count(b, "messages_left_no_handler") == 200


async def test_a_message_that_no_app_takes_expires_and_says_so(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with pubsub_nodes(2) as (a, b):
        receipts = [await a.send(b.peer_id, name, b"", reliable=True) for name in ("nobody", "nobody", "nothing")]
        for receipt in receipts:
            with trio.fail_after(310), pytest.raises(DeliveryExpiredError, match="no program there took it"):
                await receipt.wait()
        waits = [record.getMessage() for record in caplog.records if "waits at its sender" in record.getMessage()]
        assert [text.split("has a ")[1] for text in waits] == [
            "handler of notifies 'nobody'",
            "handler of notifies 'nothing'",
        ]
        assert a.delivery().outbox() == []


async def test_a_member_that_names_many_handlers_fills_no_log(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with pubsub_nodes(2) as (a, b):
        for number in range(900):
            await a.send(b.peer_id, f"name {number}", b"", reliable=True)
        await trio.sleep(20)
        lines = [record for record in caplog.records if "waits at its sender" in record.getMessage()]
        assert 16 <= len(lines) <= 20
        assert _count(b, "messages_left_no_handler") >= 900


async def test_an_app_that_subscribes_late_gets_the_reliable_publish_it_was_critical_for(
    autojump_clock: MockClock,
) -> None:
    async with pubsub_nodes(2) as (a, b):
        topic = await a.join("prices")
        published = await topic.publish(b"1", reliable=True, critical_peers=[b.peer_id])
        await trio.sleep(60)
        async with (await b.join("prices")).subscribe() as reader:
            message = await anext(reader)
            assert isinstance(message, TopicMessage) and message.body == b"1"
            with trio.move_on_after(0.1):
                await anext(reader)
        with trio.fail_after(10):
            await published.wait()


async def test_an_app_that_is_just_starting_gets_the_message_also_while_others_are_acknowledged(
    autojump_clock: MockClock,
) -> None:
    async with pubsub_nodes(2) as (a, b):
        got: list[bytes] = []

        async def take_it(notification: Notification) -> None:
            got.append(notification.body)

        b.on_notify("busy")(take_it)
        receipt = await _send(a, b, b"early")
        async with trio.open_nursery() as nursery:

            async def others() -> None:
                while True:
                    await (await a.send(b.peer_id, "busy", b"", reliable=True)).wait()
                    await trio.sleep(0.5)

            nursery.start_soon(others)
            await trio.sleep(3)
            b.on_notify("news")(take_it)
            with trio.fail_after(10):
                await receipt.wait()
            nursery.cancel_scope.cancel()
        assert got.count(b"early") == 1


async def test_many_arrive_in_order_and_once_while_the_connection_is_cut_again_and_again(
    autojump_clock: MockClock,
) -> None:
    async with pubsub_nodes(2) as (a, b):
        got: list[int] = []

        @b.on_notify("news")
        async def take_it(notification: Notification) -> None:
            got.append(int(notification.body))
            if len(got) % 50 == 0:
                await trio.sleep(0.05)

        async def cut() -> None:
            while len(got) < 3_000:
                await trio.sleep(0.31)
                await host_of(a).disconnect(b.peer_id)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(cut)
            for number in range(3_000):
                await _send(a, b, b"%d" % number)
            await a.delivery().flush()
        assert got == list(range(3_000))
        assert _count(a, "messages_acknowledged") == 3_000
        assert _count(a, "messages_retried") > 0


async def test_a_peer_that_is_away_gets_its_messages_when_it_comes(autojump_clock: MockClock) -> None:
    network, realm = MemoryNetwork(), Realm.generate("team")
    host = network.host()
    async with pubsub_nodes(1, network=network, realm=realm) as (a,):
        network.remove(host.peer_id)
        receipts = [await a.send(host.peer_id, "news", b"%d" % n, reliable=True) for n in range(5)]
        await trio.sleep(100)
        assert {receipt.state for receipt in receipts} == {DeliveryState.CREATED}
        assert {item.last_error != "" for item in a.delivery().outbox()} == {True}
        back = network.host(host.identity)
        got: list[bytes] = []
        async with Node.open(realm, host=back, identity=back.identity) as b:

            @b.on_notify("news")
            async def take_it(notification: Notification) -> None:
                got.append(notification.body)

            before = trio.current_time()
            await b.connect(a.listen_addrs()[0])
            for receipt in receipts:
                await receipt.wait()
            assert trio.current_time() - before < 1.0, "the peer's coming should wake the outbox"
        assert got == [b"%d" % n for n in range(5)]


async def test_what_is_never_acknowledged_expires_or_fails(autojump_clock: MockClock) -> None:
    network = MemoryNetwork()
    away = network.host()
    network.remove(away.peer_id)
    async with pubsub_nodes(1, network=network) as (a,):
        receipt = await a.send(away.peer_id, "news", b"", reliable=True)
        with pytest.raises(DeliveryExpiredError, match="age"):
            await receipt.wait()
        assert trio.current_time() == pytest.approx(300.0, abs=1.0)
        assert _count(a, "messages_expired") == 1


async def test_the_statuses_are_one_ordered_stream(autojump_clock: MockClock) -> None:
    async with pubsub_nodes(2) as (a, b):

        @b.on_notify("news")
        async def take_it(notification: Notification) -> None:
            await trio.sleep(3)

        async with a.delivery().statuses() as statuses:
            first, second = await _send(a, b, b"1"), await _send(a, b, b"2")
            await a.delivery().flush()
            seen: list[tuple[str, DeliveryState]] = []
            with trio.move_on_after(1):
                async for status in statuses:
                    assert isinstance(status, DeliveryStatus)
                    seen.append((status.id, status.state))
        for receipt in (first, second):
            assert [state for id_, state in seen if id_ == receipt.id] == [
                DeliveryState.CREATED,
                DeliveryState.SENDING,
                DeliveryState.DELIVERED,
                DeliveryState.ACKNOWLEDGED,
            ]
        assert not isinstance(seen[0], Lagged)


async def test_a_full_outbox_holds_senders_or_refuses(autojump_clock: MockClock) -> None:
    limits = Limits(delivery_queue_items_max=3)
    async with pubsub_nodes(2, limits=limits) as (a, b):
        may_return = trio.Event()

        @b.on_notify("news")
        async def take_it(notification: Notification) -> None:
            await may_return.wait()

        for _ in range(3):
            await _send(a, b, b"")
        with pytest.raises(DeliveryQueueFullError, match="delivery_queue_items_max"):
            await _send(a, b, b"", wait=False)
        with trio.move_on_after(10) as scope:
            await _send(a, b, b"cancelled")
        assert scope.cancelled_caught
        async with trio.open_nursery() as nursery:
            for n in range(10):
                nursery.start_soon(_send, a, b, b"%d" % n)
            await trio.sleep(1)
            assert len(a.delivery().outbox()) == 3
            may_return.set()
        await a.delivery().flush()
        assert _count(a, "messages_acknowledged") == 13
        assert _count(a, "messages_refused_queue_full") == 1


async def test_bad_input_is_refused_before_anything_is_kept(autojump_clock: MockClock) -> None:
    async with pubsub_nodes(2) as (a, b):
        with pytest.raises(MessageTooLargeError):
            await _send(a, b, bytes(2_000_000))
        with pytest.raises(ValueError, match="name"):
            await a.send(b.peer_id, "", b"", reliable=True)
        assert a.delivery().outbox() == []
    with pytest.raises(NotInRealmError):
        a.delivery()
    host = MemoryNetwork().host()
    with pytest.raises(ValueError, match="data_dir"):
        async with Node.open(host=host, identity=host.identity, outbox="disk"):
            pass


async def test_dropping_by_request(autojump_clock: MockClock) -> None:
    network = MemoryNetwork()
    away = network.host()
    network.remove(away.peer_id)
    async with pubsub_nodes(1, network=network) as (a,):
        first = await a.send(away.peer_id, "news", b"1", reliable=True)
        second = await a.send(away.peer_id, "news", b"2", reliable=True)
        assert a.delivery().drop(first.id) == 1
        assert (first.state, first.reason) == (DeliveryState.FAILED, "dropped by request")
        assert [item.id for item in a.delivery().outbox()] == [second.id]
        assert a.delivery().drop() == 1
        assert a.delivery().drop() == 0


async def test_after_a_crash_of_the_sender_what_it_accepted_is_delivered_once(tmp_path: Path) -> None:
    network, realm = MemoryNetwork(), Realm.generate("team")
    got: list[bytes] = []
    receiver, sender = network.host(), network.host()
    async with Node.open(realm, host=receiver, identity=receiver.identity) as b:

        @b.on_notify("news")
        async def take_it(notification: Notification) -> None:
            got.append(notification.body)

        for life in range(3):
            host = sender if not life else network.host(sender.identity)
            async with Node.open(realm, host=host, identity=host.identity, data_dir=tmp_path) as a:
                if life < 2:  # the receiver cannot be reached
                    network.partition(a.peer_id, b.peer_id)
                    for n in range(10):
                        await a.send(b.peer_id, "news", b"%d" % (10 * life + n), reliable=True)
                    assert len(a.delivery().outbox()) == 10 * (life + 1)
                else:
                    network.heal()
                    await a.connect(b.listen_addrs()[0])
                    await a.delivery().flush()
                host.kill()
            network.heal()
    assert got == [b"%d" % n for n in range(20)]


async def test_after_a_restart_of_the_receiver_nothing_is_handled_twice(tmp_path: Path) -> None:
    network, realm = MemoryNetwork(), Realm.generate("team")
    got: list[int] = []
    identity = network.host().identity

    async def take_it(notification: Notification) -> None:
        got.append(int(notification.body))

    async with AsyncExitStack() as stack:
        host = network.host()
        a = await stack.enter_async_context(Node.open(realm, host=host, identity=host.identity))
        sent = 0
        for _ in range(4):
            again = network.host(identity)
            async with Node.open(realm, host=again, identity=identity, data_dir=tmp_path) as b:
                b.on_notify("news")(take_it)
                await b.connect(a.listen_addrs()[0])
                for _ in range(100):
                    await a.send(b.peer_id, "news", b"%d" % sent, reliable=True)
                    sent += 1
                wanted = sent - 50
                await until(lambda wanted=wanted: len(got) >= wanted)  # type: ignore[misc]
                again.kill()
        final = network.host(identity)
        async with Node.open(realm, host=final, identity=identity, data_dir=tmp_path) as b:
            b.on_notify("news")(take_it)
            await b.connect(a.listen_addrs()[0])
            await a.delivery().flush()
    assert sorted(got) == list(range(sent))


def test_the_outbox_reports_what_is_wrong_with_it(tmp_path: Path) -> None:
    path = tmp_path / "delivery.sqlite"
    store = SqliteDeliveryStore(path)
    with pytest.raises(StoreLockedError, match="in use by another"):
        SqliteDeliveryStore(path)
    store.close()
    path.write_bytes(b"this is no database at all, is it?" * 100)
    with pytest.raises(StoreError, match="move it away"):
        SqliteDeliveryStore(path)
    assert path.read_bytes().startswith(b"this is no database")
    directory = tmp_path / "file"
    directory.write_text("")
    with pytest.raises(StoreError, match="cannot open"):
        SqliteDeliveryStore(directory / "delivery.sqlite")


def test_what_was_rejected_is_on_disk_as_such_also_in_an_outbox_of_the_first_schema(tmp_path: Path) -> None:
    path = tmp_path / "delivery.sqlite"
    with closing(sqlite3.connect(path)) as old:
        old.executescript(
            "create table inboxes(realm text not null, peer text not null, epoch blob not null, floor integer not null,"
            " done blob not null, primary key (realm, peer)) without rowid;"
            "insert into inboxes values('r', 'old', x'01', 7, x'0000000900000009'); pragma user_version=1;"
        )
    rows = {"old": InboxRow(b"\x01", 7, [(9, 9)], []), "new": InboxRow(b"\x02", 1, [(3, 4)], [(2, 2), (5, 6)])}
    store = SqliteDeliveryStore(path)
    store.commit(DeliveryBatch(inboxes={("r", "new"): rows["new"]}))
    store.close()
    store = SqliteDeliveryStore(path)
    assert store.load("r").inboxes == rows
    store.close()


async def test_a_full_disk_refuses_and_later_accepts(tmp_path: Path) -> None:
    network = MemoryNetwork()
    async with pubsub_nodes(1, network=network) as (b,):
        host = network.host()
        async with Node.open(b.realm(), host=host, identity=host.identity, data_dir=tmp_path) as a:
            got: list[bytes] = []

            @b.on_notify("news")
            async def take_it(notification: Notification) -> None:
                got.append(notification.body)

            await a.connect(b.listen_addrs()[0])
            await (await _send(a, b, b"before")).wait()
            store = a.delivery().context.journal.store
            assert isinstance(store, SqliteDeliveryStore)
            pages = store.limit_pages(0)
            with pytest.raises(StoreError, match="no room"):
                for _ in range(100):
                    await _send(a, b, bytes(100_000))
            store.limit_pages(pages)
            await (await _send(a, b, b"after")).wait()
            assert got[0] == b"before"
            assert got[-1] == b"after"


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ([encode_ack(Ack(handled=[(1, 1)]))], "from a receiver|on a delivery link"),
        ([encode_hello(Hello(b"12345678", 0)), encode_hello(Hello(b"87654321", 0))], "another epoch"),
        ([encode_hello(Hello(b"12345678", 0))[:12] + b"short"], ""),
    ],
)
async def test_a_hostile_sender_loses_its_link_only(autojump_clock: MockClock, frames: list[bytes], words: str) -> None:
    async with pubsub_nodes(2) as (a, b):
        got: list[bytes] = []

        @b.on_notify("news")
        async def take_it(notification: Notification) -> None:
            got.append(notification.body)

        await until(lambda: a.membership().verified_connection(b.peer_id) is not None)
        connection = await a.membership().connect(b.peer_id)
        stream = await connection.open_stream(b.delivery().context.protocol)
        received = bytearray()
        ended = trio.Event()
        stream.set_receiver(received.extend, lambda _error: ended.set())
        stream.write_nowait(b"".join(frames))
        if words:
            with trio.fail_after(10):
                await ended.wait()
        await (await _send(a, b, b"still served")).wait()
        assert got == [b"still served"]


# Topics


async def test_critical_peers_acknowledge_what_their_apps_have_handled(autojump_clock: MockClock) -> None:
    async with pubsub_nodes(3) as nodes:
        topics = await joined(nodes)
        async with topics[1].subscribe() as first, topics[2].subscribe() as second:
            receipt = await topics[0].publish(
                b"important", reliable=True, critical_peers=[nodes[1].peer_id, nodes[2].peer_id]
            )
            assert await take(first, 1) == await take(second, 1) == [b"important"]
            await trio.sleep(0.5)
            assert receipt.acknowledged_by == ()  # both have it, neither came back for the next one
            with trio.move_on_after(0.1):
                await anext(first)
            await until(lambda: receipt.acknowledged_by == (nodes[1].peer_id,))
            assert list(receipt.missing) == [nodes[2].peer_id]
            with trio.move_on_after(0.1):
                await anext(second)
            await receipt.wait()
        assert _count(nodes[1], "topic_messages_delivered_direct") == 0


async def test_who_did_not_get_it_by_pubsub_gets_it_directly_and_once(autojump_clock: MockClock) -> None:
    async with pubsub_nodes(2) as nodes:
        topics = await joined(nodes)
        # Published without a subscriber: pub/sub brings it to no peer.
        await topics[1].leave()
        await until(lambda: not topics[0].peers())
        receipt = await topics[0].publish(b"early", reliable=True, critical_peers=[nodes[1].peer_id])
        await trio.sleep(12)  # past the gossip about it
        again = await nodes[1].join("chat")
        async with again.subscribe() as messages:
            assert await take(messages, 1, within_s=30) == [b"early"]
            with trio.move_on_after(20):
                pytest.fail(f"a second copy: {await anext(messages)}")
            await receipt.wait()
        assert _count(nodes[1], "topic_messages_delivered_direct") == 1


async def test_who_did_not_get_it_by_pubsub_gets_it_directly_also_while_others_are_acknowledged(
    autojump_clock: MockClock,
) -> None:
    async with pubsub_nodes(2) as nodes:
        topics = await joined(nodes)

        @nodes[1].on_notify("busy")
        async def busy(notification: Notification) -> None: ...

        del busy
        await topics[1].leave()
        await until(lambda: not topics[0].peers())
        async with trio.open_nursery() as nursery:

            async def others() -> None:
                while True:
                    await (await nodes[0].send(nodes[1].peer_id, "busy", b"", reliable=True)).wait()
                    await trio.sleep(0.5)

            nursery.start_soon(others)
            receipt = await topics[0].publish(b"early", reliable=True, critical_peers=[nodes[1].peer_id])
            await trio.sleep(12)  # past the gossip about it
            again = await nodes[1].join("chat")
            async with again.subscribe() as messages:
                assert await take(messages, 1, within_s=60) == [b"early"]
                with trio.move_on_after(20):
                    pytest.fail(f"a second copy: {await anext(messages)}")
                await receipt.wait()
            nursery.cancel_scope.cancel()


async def test_any_critical_peer_is_enough_when_so_asked(autojump_clock: MockClock) -> None:
    network = MemoryNetwork()
    away = network.host()
    network.remove(away.peer_id)
    async with pubsub_nodes(2, network=network) as nodes:
        topics = await joined(nodes)
        topics[0].critical_peers = [nodes[1].peer_id, away.peer_id]
        async with topics[1].subscribe() as messages, trio.open_nursery() as nursery:

            async def read() -> None:
                async for _ in messages:
                    pass

            nursery.start_soon(read)
            receipt = await topics[0].publish(b"x", reliable=True, wait_for="any")
            with trio.fail_after(5):
                await receipt.wait()
            strict = await topics[0].publish(b"x", reliable=True)
            with pytest.raises(DeliveryExpiredError):
                await strict.wait()
            nursery.cancel_scope.cancel()


async def test_a_slow_app_costs_no_tries(autojump_clock: MockClock) -> None:
    async with pubsub_nodes(2) as nodes:
        topics = await joined(nodes)
        async with topics[1].subscribe() as messages:
            receipt = await topics[0].publish(b"x", reliable=True)
            await trio.sleep(120)
            assert receipt.missing == {nodes[1].peer_id: "delivered"}
            await take(messages, 1)
        await receipt.wait()


async def test_a_critical_peer_that_does_not_read_the_topic_has_not_acknowledged(autojump_clock: MockClock) -> None:
    async with pubsub_nodes(2) as nodes:
        topics = await joined(nodes)
        receipt = await topics[0].publish(b"x", reliable=True)
        with pytest.raises(DeliveryExpiredError, match="no program there took it"):
            await receipt.wait()
        with pytest.raises(NoPeersSubscribedError, match="no peer is critical"):
            await topics[0].publish(b"x", reliable=True, critical_peers=[])
