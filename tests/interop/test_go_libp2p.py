"""Hosts and nodes against go-libp2p: WebSocket, relays both ways."""

import os

import pytest
import trio

from dep2p import Node, NoPeersSubscribedError, Realm, Request
from dep2p.host.host import HostOptions, LibP2PHost
from dep2p.host.interface import ByteStream
from dep2p.identity import Identity
from tests.interop.go_daemon import GoDaemon, go_daemon
from tests.interop.test_go_pubsub import until

pytestmark = [pytest.mark.interop, pytest.mark.real, pytest.mark.timeout(120)]


async def test_twenty_of_twenty_dials_of_a_websocket_listener_succeed() -> None:
    async with (
        go_daemon(listen="/ip4/127.0.0.1/tcp/0/ws") as go,
        LibP2PHost.open(Identity.generate(), listen=[]) as ours,
    ):
        for _ in range(20):
            connection = await ours.dial(go.peer, [go.addr("/ws", without="/quic")])
            assert connection.peer == go.peer
            await ours.ping(go.peer)
            await ours.disconnect(go.peer)


async def reserved(node: Node, relay: GoDaemon) -> str:
    """Wait for a reservation; the node's address through the relay."""
    await node.host.dial(relay.peer, [relay.addr()])
    await until(lambda: any("/p2p-circuit" in addr for addr in node.listen_addrs()))
    return next(addr for addr in node.listen_addrs() if "/p2p-circuit" in addr)


async def test_a_go_relay_with_its_default_limit_carries_requests_and_no_mesh() -> None:
    realm = Realm.generate("team")
    async with (
        go_daemon("-relayService", "-forceReachabilityPublic") as relay,
        Node.open(realm, relay="client", listen=[]) as target,
        Node.open(realm, relay="client", listen=[]) as dialer,
    ):

        @target.on_request("echo")
        async def echo(request: Request) -> bytes:
            return request.body

        topics = [await node.join("chat") for node in (target, dialer)]
        connection = await dialer.host.dial(target.peer_id, [await reserved(target, relay)])
        assert connection.is_limited
        assert await dialer.request(target.peer_id, "echo", b"through go") == b"through go"
        await trio.sleep(1.5)  # more than a heartbeat
        assert [topic.mesh() for topic in topics] == [[], []]
        with pytest.raises(NoPeersSubscribedError):
            await topics[1].publish(b"into the void")
        assert not connection.is_closed
        with pytest.raises(Exception, match=r"connection|closed|relay carries"):
            for _ in range(4):
                await dialer.request(target.peer_id, "echo", os.urandom(50_000), timeout_s=10)
        await until(lambda: connection.is_closed)
        assert dialer.host.counters()["relay_limit_reached"] >= 1


async def test_go_dials_through_a_relay_of_ours() -> None:
    async with (
        LibP2PHost.open(
            Identity.generate(), listen=["/ip4/127.0.0.1/tcp/0"], options=HostOptions(relay="server")
        ) as relay,
        LibP2PHost.open(Identity.generate(), listen=[], options=HostOptions(relay="client")) as target,
        go_daemon() as go,
    ):
        await target.dial(relay.peer_id, relay.listen_addrs())
        await until(lambda: any("/p2p-circuit" in addr for addr in target.listen_addrs()))
        through = next(addr for addr in target.listen_addrs() if "/p2p-circuit" in addr)
        await go.connect(target.peer_id, [through.removesuffix(f"/p2p/{target.peer_id}")])
        (connection,) = target.connections(go.peer)
        assert "/p2p-circuit" in connection.remote_addr
        assert await target.ping(go.peer) > 0


@pytest.mark.parametrize("dialer", ["go", "ours"])
async def test_megabytes_over_quic_come_back_whole(dialer: str) -> None:
    """quic-go takes the windows that this node grants, which move with what was read."""
    listen = "/ip4/127.0.0.1/udp/0/quic-v1"

    async def echo(stream: ByteStream) -> None:
        while data := await stream.read():
            await stream.write(data)
        await stream.close()

    sent = os.urandom(3_000_000)
    async with go_daemon(listen=listen) as go, LibP2PHost.open(Identity.generate(), listen=[listen]) as ours:
        ours.set_stream_handler("/echo/1", echo)
        if dialer == "go":
            await go.connect(ours.peer_id, [ours.listen_addrs()[0].removesuffix(f"/p2p/{ours.peer_id}")])
        else:
            await ours.dial(go.peer, [go.addr("/quic-v1")])
        await until(lambda: bool(ours.connections(go.peer)))
        (connection,) = ours.connections(go.peer)
        assert "/quic-v1" in connection.remote_addr
        with trio.fail_after(10):  # our side of the handshake may end before go's
            while ours.peer_id not in await go.peers():  # noqa: ASYNC110  (it is another process)
                await trio.sleep(0.01)
        stream = await go.open_stream(ours.peer_id, "/echo/1")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.stream.send_all, sent)
            assert await stream.receive(len(sent)) == sent
        assert ours.counters().get("resources_ended_connection", 0) == 0
