"""A neighbour that restarts while its old connection is silently dead, and pairs that dial each other at once."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from dep2p import Node, NoPeersSubscribedError, Realm, Topic
from dep2p.host.connections.duplicates import elect, is_idle
from dep2p.testing import MemoryConnection, MemoryHost, MemoryNetwork
from dep2p.types import PeerId
from tests.pubsub.nodes import host_of, joined, pubsub_nodes, until

REALM = Realm.generate("team")


async def gets(reader: Topic, writer: Topic, *, within_s: float) -> float:
    """Seconds until something that the one publishes reaches the other."""
    started = trio.current_time()
    async with reader.subscribe() as messages, trio.open_nursery() as nursery:

        async def publish() -> None:
            while True:
                await writer.publish(b"tick", on_no_peers="ok")
                await trio.sleep(0.02)

        nursery.start_soon(publish)
        with trio.fail_after(within_s):
            await anext(messages)
        nursery.cancel_scope.cancel()
    return trio.current_time() - started


@asynccontextmanager
async def restarted(network: MemoryNetwork, old: Node, known: Node) -> AsyncGenerator[Node, None]:
    """The node again with the same identity, after a power cut that its neighbours have not noticed."""
    identity = host_of(old).identity
    host_of(old).vanish()
    host = network.host(identity)
    async with Node.open(REALM, host=host, identity=identity, bootstrap=known.listen_addrs()) as node:
        yield node


@pytest.mark.parametrize("topics_before", ["same", "none"])
async def test_a_neighbour_that_restarts_over_a_half_open_link_has_pubsub_both_ways_within_a_second(
    autojump_clock: MockClock, topics_before: str
) -> None:
    network = MemoryNetwork(latency_s=0.02)
    async with pubsub_nodes(2, network=network, realm=REALM) as (a, b):
        ta = await a.join("chat")
        if topics_before == "same":
            await joined([a, b])
        await until(lambda: bool(a.host.connections(b.peer_id)))
        async with restarted(network, b, a) as again:
            tb = await again.join("chat")
            await until(lambda: len(again.host.connections(a.peer_id)) == 1)
            assert len(a.host.connections(b.peer_id)) == 2  # the old one is not noticed yet
            started = trio.current_time()
            await gets(tb, ta, within_s=1.0)
            await gets(ta, tb, within_s=1.0)
            assert trio.current_time() - started < 1.0
            await until(lambda: len(a.host.connections(b.peer_id)) == 1, within_s=5.0)
            assert ta.mesh() == [b.peer_id] and tb.mesh() == [a.peer_id]


async def test_ten_restarts_in_a_row_are_never_refused(autojump_clock: MockClock) -> None:
    network = MemoryNetwork(latency_s=0.02)
    async with pubsub_nodes(2, network=network, realm=REALM) as (a, b):
        ta, _ = await joined([a, b])
        node = b
        async with trio.open_nursery() as nursery:
            for _ in range(10):
                ready = trio.Event()

                async def live(old: Node, ready: trio.Event) -> None:
                    nonlocal node
                    async with restarted(network, old, a) as node:
                        ready.set()
                        await trio.sleep_forever()

                nursery.start_soon(live, node, ready)
                await ready.wait()
                tb = await node.join("chat")
                await gets(tb, ta, within_s=2.0)
            nursery.cancel_scope.cancel()


async def test_requests_to_a_restarted_peer_take_the_new_connection_at_once(autojump_clock: MockClock) -> None:
    network = MemoryNetwork(latency_s=0.02)
    async with pubsub_nodes(2, network=network, realm=REALM) as (a, b):

        @b.on_request("hi")
        async def hi(_request: object) -> bytes:
            return b"old"

        await until(lambda: bool(a.host.connections(b.peer_id)))
        assert (await a.request(b.peer_id, "hi", b"")) == b"old"
        async with restarted(network, b, a) as again:

            @again.on_request("hi")
            async def hi_again(_request: object) -> bytes:
                return b"new"

            await until(lambda: len(again.host.connections(a.peer_id)) == 1)
            await trio.sleep(0.3)  # the handshake of the realm
            with trio.fail_after(0.5):
                assert (await a.request(b.peer_id, "hi", b"")) == b"new"


async def test_a_request_that_waits_on_the_dead_connection_fails_within_seconds(autojump_clock: MockClock) -> None:
    network = MemoryNetwork(latency_s=0.02)
    async with pubsub_nodes(2, network=network, realm=REALM) as (a, b), trio.open_nursery() as nursery:

        @b.on_request("hi")
        async def hi(_request: object) -> bytes:
            await trio.sleep_forever()
            return b""

        await until(lambda: bool(a.host.connections(b.peer_id)))
        ended = trio.Event()

        async def ask() -> None:
            with pytest.raises(Exception, match="connection"):
                await a.request(b.peer_id, "hi", b"", timeout_s=60.0)
            ended.set()

        nursery.start_soon(ask)
        await trio.sleep(1.0)
        async with restarted(network, b, a):
            with trio.fail_after(3.0):
                await ended.wait()


async def test_reliable_messages_reach_a_restarted_peer_at_once(autojump_clock: MockClock) -> None:
    network = MemoryNetwork(latency_s=0.02)
    async with pubsub_nodes(2, network=network, realm=REALM) as (a, b):
        got: list[bytes] = []

        @b.on_notify("job")
        async def job(notification: object) -> None:
            got.append(b"old")

        await until(lambda: bool(a.host.connections(b.peer_id)))
        await (await a.send(b.peer_id, "job", b"1", reliable=True)).wait()
        async with restarted(network, b, a) as again:
            receipt = await a.send(b.peer_id, "job", b"2", reliable=True)  # goes to the dead connection

            @again.on_notify("job")
            async def job_again(notification: object) -> None:
                got.append(b"new")

            await until(lambda: len(again.host.connections(a.peer_id)) == 1)
            with trio.fail_after(1.0):
                await receipt.wait()
        assert got == [b"old", b"new"]


# Two connections of one pair ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("latency_s", [0.001, 0.05, 0.2])
async def test_two_nodes_that_dial_each_other_at_once_settle_on_one_connection(
    autojump_clock: MockClock, latency_s: float
) -> None:
    network = MemoryNetwork(latency_s=latency_s)
    hosts = [network.host(), network.host()]
    one, other = hosts
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.dial, other.peer_id, [other.addr])
        nursery.start_soon(other.dial, one.peer_id, [one.addr])
    assert [len(host.connections()) for host in hosts] == [2, 2]
    await trio.sleep(5.0)
    assert [len(host.connections()) for host in hosts] == [1, 1]
    (left,), (right,) = one.connections(), other.connections()
    assert left.twin is right
    assert left.direction == ("outbound" if one.peer_id < other.peer_id else "inbound")
    assert not left.is_superseded and not right.is_superseded


async def test_what_an_app_does_on_the_surplus_connection_ends_first(autojump_clock: MockClock) -> None:
    network = MemoryNetwork()
    one, other = sorted((network.host(), network.host()), key=lambda host: host.peer_id)

    async def serve(_stream: object) -> None:
        await trio.sleep_forever()

    for host in (one, other):
        host.set_stream_handler("/dep2p/app/x/stream/1.0.0", serve)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.dial, other.peer_id, [other.addr])
        nursery.start_soon(other.dial, one.peer_id, [one.addr])
    (surplus,) = [connection for connection in one.connections() if connection.direction == "inbound"]
    stream = await surplus.open_stream("/dep2p/app/x/stream/1.0.0")
    await trio.sleep(30.0)
    assert not surplus.is_closed and surplus.is_superseded
    stream.reset()
    await trio.sleep(1.0)
    assert surplus.is_closed and len(one.connections()) == 1


def end(host: MemoryHost, direction: str, remote_addr: str = "/ip4/127.0.0.1/tcp/1") -> object:
    made = MemoryConnection(host, host, direction)  # type: ignore[arg-type]
    made.remote_addr = remote_addr
    return made


async def test_both_sides_of_a_pair_elect_the_same_connection(autojump_clock: MockClock) -> None:
    network = MemoryNetwork()
    host = network.host()
    small, large = PeerId("1"), PeerId("zzz")
    dialed, taken = end(host, "outbound"), end(host, "inbound")
    for pair in ((dialed, taken), (taken, dialed)):
        assert elect(*pair, small) is dialed  # type: ignore[type-var]
        assert elect(*pair, large) is taken  # type: ignore[type-var]
    relayed = end(host, "outbound", "/ip4/127.0.0.1/tcp/1/p2p/x/p2p-circuit")
    assert elect(relayed, taken, small) is taken  # type: ignore[type-var]
    newer = end(host, "inbound")
    assert elect(newer, taken, small) is newer  # type: ignore[type-var]


@pytest.mark.parametrize(
    ("protocol", "idle"),
    [
        ("/dep2p/app/x/pubsub/1.0.0", True),
        ("/dep2p/app/x/delivery/1.0.0", True),
        ("/dep2p/app/x/session/1.0.0", True),
        ("/dep2p/realm/x/members/1.0.0", True),
        ("/meshsub/1.2.0", True),
        ("", True),
        ("/dep2p/app/x/msg/1.0.0", False),
        ("/dep2p/app/x/stream/1.0.0", False),
        ("/dep2p/app/x/queue/1.0.0", False),
    ],
)
def test_streams_that_move_by_themselves_keep_no_surplus_connection(protocol: str, idle: bool) -> None:
    class Fake:
        def open_protocols(self) -> list[str]:
            return [protocol]

    assert is_idle(Fake()) is idle  # type: ignore[arg-type]


@pytest.mark.parametrize("public", [False, True])
async def test_no_mesh_goes_over_a_connection_that_a_relay_limits(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, public: bool
) -> None:
    make = MemoryConnection.__init__

    def limited(self: MemoryConnection, *args: Any) -> None:
        make(self, *args)
        self.is_limited = True

    network = MemoryNetwork()
    async with pubsub_nodes(2, network=network, realm=REALM, public_pubsub=True) as (a, b):
        topics = [await node.join("chat", public=public) for node in (a, b)]
        await until(lambda: all(topic.mesh() for topic in topics))
        monkeypatch.setattr(MemoryConnection, "__init__", limited)
        await a.host.disconnect(b.peer_id)
        await until(lambda: bool(a.host.connections(b.peer_id)))
        await trio.sleep(5.0)
        assert [topic.mesh() for topic in topics] == [[], []]
        with pytest.raises(NoPeersSubscribedError):
            await topics[0].publish(b"into the void")
        # The next connection is a direct one, and carries the mesh.
        monkeypatch.setattr(MemoryConnection, "__init__", make)
        await a.host.disconnect(b.peer_id)
        await until(lambda: all(topic.mesh() for topic in topics))
