"""Public pub/sub against go-libp2p's GossipSub."""

from collections.abc import Callable
from contextlib import AsyncExitStack

import pytest
import trio

from dep2p import Identity, MessageTooLargeError, Node, Subscription, Topic, TopicMessage
from dep2p.types import PeerId
from tests.interop.go_daemon import GoDaemon, GoStream, go_daemon

pytestmark = [pytest.mark.interop, pytest.mark.real, pytest.mark.timeout(240)]

OVERHEAD_BYTES = (1 + 3) + (2 + 38) + (1 + 3) + (2 + 8) + (2 + 4) + (2 + 64)
"""Bytes of an RPC beside those of its message: the message's own tag and length, the author, tag and length of the
data, seqno, the topic "chat", the signature."""


async def until(is_true: Callable[[], bool]) -> None:
    while not is_true():  # noqa: ASYNC110 - another process does it
        await trio.sleep(0.01)


async def meshed(topic: Topic, go: GoDaemon, ours: Node) -> None:
    """Both sides know each other as subscribers, and ours has go in its mesh."""
    await until(lambda: go.peer in topic.mesh())
    while ours.peer_id not in await go.topic_peers(topic.name):  # noqa: ASYNC110
        await trio.sleep(0.02)
    await trio.sleep(0.2)  # go says nothing of its mesh: the graft is on its way


async def collect(messages: Subscription, found: dict[bytes, None], count: int) -> None:
    async for message in messages:
        assert isinstance(message, TopicMessage), message
        found[message.body] = None
        if len(found) >= count:
            return


async def collect_go(stream: GoStream, found: dict[bytes, None], count: int) -> None:
    while len(found) < count:
        found[(await stream.next()).data] = None


async def test_messages_both_ways_with_author_and_number() -> None:
    async with go_daemon() as go, Node.open(public_pubsub=True) as ours:
        topic = await ours.join("chat", public=True)
        at_go = await go.subscribe("chat")
        await ours.host.dial(go.peer, [go.addr()])
        await meshed(topic, go, ours)
        async with topic.subscribe() as messages:
            result = await topic.publish(b"from ours")
            got = await at_go.next()
            assert (got.data, got.topics) == (b"from ours", ("chat",))
            assert int.from_bytes(got.seqno, "big") == result.seqno
            await go.publish("chat", b"from go")
            message = await anext(messages)
            assert isinstance(message, TopicMessage)
            assert (message.body, message.sender) == (b"from go", go.peer)


@pytest.mark.parametrize("count", [1_000, 10_000])
async def test_a_burst_of_ours_arrives_whole_at_go(count: int) -> None:
    """go drops what finds its 32 places full, and says nothing: the pace keeps them from being full."""
    async with go_daemon() as go, Node.open(public_pubsub=True) as ours:
        topic = await ours.join("chat", public=True)
        async with go.counting("chat") as found:
            await ours.host.dial(go.peer, [go.addr()])
            await meshed(topic, go, ours)
            dropped = 0
            for number in range(count):
                dropped += len((await topic.publish(b"%d" % number)).dropped)
            with trio.move_on_after(60):
                await until(lambda: found.value >= count)
        assert dropped == 0
        assert found.value == count
        assert ours.counters()["public_pubsub_writes_paced"] > 0


@pytest.mark.parametrize("count", [1_000, 10_000])
async def test_a_burst_of_go_arrives_whole_at_ours(count: int) -> None:
    async with go_daemon() as go, Node.open(public_pubsub=True) as ours:
        topic = await ours.join("chat", public=True)
        await go.subscribe("chat")
        await ours.host.dial(go.peer, [go.addr()])
        await meshed(topic, go, ours)
        found: dict[bytes, None] = {}
        async with topic.subscribe(buffer_items=count) as messages, trio.open_nursery() as nursery:
            nursery.start_soon(collect, messages, found, count)
            for number in range(count):
                await go.publish("chat", b"%d" % number)
            with trio.move_on_after(60):
                await until(lambda: len(found) >= count)
            nursery.cancel_scope.cancel()
        assert len(found) == count


async def test_the_largest_message_that_fits_arrives_and_a_byte_more_is_refused_at_once() -> None:
    size = 1_048_576 - OVERHEAD_BYTES
    async with go_daemon() as go, Node.open(public_pubsub=True) as ours:
        topic = await ours.join("chat", public=True)
        at_go = await go.subscribe("chat")
        await ours.host.dial(go.peer, [go.addr()])
        await meshed(topic, go, ours)
        with pytest.raises(MessageTooLargeError, match="peers read at most 1048576"):
            await topic.publish(bytes(size + 1))
        await topic.publish(bytes(size))
        assert (await at_go.next()).data == bytes(size)
        async with topic.subscribe() as messages:
            await go.publish("chat", bytes(size))
            message = await anext(messages)
            assert isinstance(message, TopicMessage) and message.body == bytes(size)
            assert len((await at_go.next()).data) == size  # go's own subscriber gets what go publishes, too
        # The stream is still the same, and works.
        await topic.publish(b"after")
        assert (await at_go.next()).data == b"after"


async def test_go_restarts_and_is_a_neighbour_again() -> None:
    async with Node.open(public_pubsub=True) as ours:
        topic = await ours.join("chat", public=True)
        for round_number in range(3):
            async with go_daemon() as go:
                at_go = await go.subscribe("chat")
                await go.connect(ours.peer_id, [ours.listen_addrs()[0].rpartition("/p2p/")[0]])
                await meshed(topic, go, ours)
                async with topic.subscribe() as messages:
                    await topic.publish(b"round %d" % round_number)
                    assert (await at_go.next()).data == b"round %d" % round_number
                    await go.publish("chat", b"answer")
                    message = await anext(messages)
                    assert isinstance(message, TopicMessage) and message.body == b"answer"
            await until(lambda: not topic.peers())


async def test_ours_restarts_with_the_same_identity_and_is_go_s_neighbour_again() -> None:
    identity = Identity.generate()
    async with go_daemon() as go:
        at_go = await go.subscribe("chat")
        for round_number in range(3):
            async with Node.open(public_pubsub=True, identity=identity) as ours:
                topic = await ours.join("chat", public=True)
                await ours.host.dial(go.peer, [go.addr()])
                await meshed(topic, go, ours)
                await topic.publish(b"round %d" % round_number)
                assert (await at_go.next()).data == b"round %d" % round_number


async def test_a_mesh_of_three_and_three_delivers_everything_to_all() -> None:
    async with AsyncExitStack() as stack:
        gos = [await stack.enter_async_context(go_daemon()) for _ in range(3)]
        ours = [await stack.enter_async_context(Node.open(public_pubsub=True)) for _ in range(3)]
        topics = [await node.join("chat", public=True) for node in ours]
        at_go = [await go.subscribe("chat") for go in gos]
        for number, node in enumerate(ours):
            for go in gos:
                await node.host.dial(go.peer, [go.addr()])
            for other in ours[:number]:
                await node.host.dial(other.peer_id, other.listen_addrs())
        await until(lambda: all(len(topic.peers()) == 5 for topic in topics))
        await trio.sleep(2.5)
        found: list[dict[bytes, None]] = [{} for _ in range(6)]
        subscriptions = [await stack.enter_async_context(topic.subscribe(buffer_items=1_000)) for topic in topics]
        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(collect, subscriptions[number], found[number], 100)
                nursery.start_soon(collect_go, at_go[number], found[3 + number], 120)
            for number in range(20):
                for index in range(3):
                    await topics[index].publish(b"ours %d %d" % (index, number))
                    await gos[index].publish("chat", b"go %d %d" % (index, number))
            with trio.move_on_after(30):
                await until(lambda: all(len(one) >= 100 for one in found[:3]) and all(len(o) >= 120 for o in found[3:]))
            nursery.cancel_scope.cancel()
        assert [len(one) for one in found] == [100, 100, 100, 120, 120, 120]


@pytest.mark.parametrize("transport", ["quic"])
async def test_pubsub_over_quic(transport: str) -> None:
    async with (
        go_daemon(listen="/ip4/127.0.0.1/udp/0/quic-v1") as go,
        Node.open(public_pubsub=True, listen=["/ip4/127.0.0.1/udp/0/quic-v1"]) as ours,
    ):
        topic = await ours.join("chat", public=True)
        at_go = await go.subscribe("chat")
        await ours.host.dial(PeerId(go.peer), [go.addr("/quic-v1")])
        await meshed(topic, go, ours)
        async with topic.subscribe() as messages:
            await topic.publish(b"over quic")
            assert (await at_go.next()).data == b"over quic"
            await go.publish("chat", b"back")
            message = await anext(messages)
            assert isinstance(message, TopicMessage) and message.body == b"back"
