"""Faults of stock py-libp2p: one small test for each containment in dep2p/host.

A test that fails here after an upgrade of py-libp2p means that the upstream behaviour has changed: look up the row in
docs/explanation/py-libp2p-traps.md and see whether the containment is still needed.
"""

# pyright: reportPrivateUsage=false

import inspect
import logging
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.rsa import RSAPublicKey
from libp2p.network import swarm as upstream_swarm
from libp2p.network.config import ConnectionConfig
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.network.exceptions import SwarmException
from libp2p.network.swarm import Swarm
from libp2p.peer.peerinfo import PeerInfo
from libp2p.relay.circuit_v2.protocol import CircuitV2Protocol
from libp2p.stream_muxer.muxer_multistream import MuxerMultistream
from libp2p.transport.quic.connection import QUICConnection
from libp2p.transport.quic.listener import QUICListener
from libp2p.transport.quic.security import PeerAuthenticator
from libp2p.transport.quic.stream import QUICStream
from libp2p.transport.tcp import tcp
from multiaddr import Multiaddr

pytestmark = [
    pytest.mark.usefixtures("stock_hosts_leave_nothing"),
    pytest.mark.real,
    pytest.mark.filterwarnings("ignore"),  # stock hosts leave sockets and deprecated calls behind
]

LOOPBACK = Multiaddr("/ip4/127.0.0.1/tcp/0")
CONFIG: dict[str, Any] = {"min_connections": 0, "low_watermark": 0}


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    """py-libp2p logs through the root logger, and what is provoked here at length."""
    root = logging.getLogger()
    before = root.level
    root.setLevel(logging.CRITICAL + 1)
    yield
    root.setLevel(before)


@asynccontextmanager
async def stock_host(**config: Any) -> AsyncGenerator[Any, None]:
    host = new_host(key_pair=create_new_key_pair(), connection_config=ConnectionConfig(**(CONFIG | config)))
    with trio.fail_after(20):
        async with host.run([LOOPBACK]):
            try:
                yield host
            finally:
                with trio.CancelScope(shield=True):  # pyright: ignore[reportCallIssue]
                    await host.close()


def info(host: Any, *addrs: Multiaddr) -> PeerInfo:
    return PeerInfo(host.get_id(), list(addrs) or host.get_transport_addrs())


async def test_connect_waits_a_quarter_of_a_second() -> None:
    async with stock_host() as one, stock_host() as other:
        started_s = trio.current_time()
        await one.connect(info(other))
        assert trio.current_time() - started_s > 0.2


async def test_one_address_per_transport_class_is_dialled_and_the_peer_is_then_blocked() -> None:
    async with stock_host() as one, stock_host() as other:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            dead = Multiaddr(f"/ip4/127.0.0.1/tcp/{sock.getsockname()[1]}")
        one.get_network().retry_config.max_retries = 0
        with pytest.raises(SwarmException):
            await one.connect(info(other, dead, *other.get_transport_addrs()))
        with pytest.raises(SwarmException, match="negative cache"):
            await one.connect(info(other))


async def test_self_connect_is_silent() -> None:
    async with stock_host() as one:
        await one.connect(info(one))


async def test_tcp_port_is_shared_silently() -> None:
    async with stock_host() as one:
        other = new_host(key_pair=create_new_key_pair(), connection_config=ConnectionConfig(**CONFIG))
        taken = one.get_transport_addrs()[0]
        async with other.run([taken]):
            assert other.get_transport_addrs() == [taken]
            await other.close()


async def test_listen_failure_is_swallowed() -> None:
    host = new_host(key_pair=create_new_key_pair(), connection_config=ConnectionConfig(**CONFIG))
    async with host.run([Multiaddr("/ip4/192.0.2.1/tcp/0")]):
        assert host.get_transport_addrs() == []
        await host.close()


async def test_raising_stream_handler_takes_the_whole_swarm_down() -> None:
    with pytest.raises(BaseExceptionGroup) as caught:
        async with stock_host() as one, stock_host() as other:

            async def handler(stream: Any) -> None:
                raise RuntimeError("a bug of the app")

            other.set_stream_handler("/bug/1", handler)
            await one.connect(info(other))
            with suppress(Exception):  # what the peer sees of it varies
                await one.new_stream(other.get_id(), ["/bug/1"])
            await trio.sleep(3)
    assert caught.group_contains(RuntimeError, match="a bug of the app")


async def test_inbound_connection_keeps_its_slot_after_its_end() -> None:
    async with stock_host() as one, stock_host() as other:
        await one.connect(info(other))
        await one.disconnect(other.get_id())
        await trio.sleep(0.3)  # its own fixed sleeps
        assert other.get_network().get_connections() == []
        assert other.get_network()._inbound_limiter.borrowed_tokens == 1


async def test_ping_is_whole_milliseconds() -> None:
    from libp2p.host.ping import PingService

    async with stock_host() as one, stock_host() as other:
        await one.connect(info(other))
        times = await PingService(one).ping(other.get_id(), ping_amt=1)
        assert all(isinstance(time, int) for time in times)


async def test_handler_set_later_is_not_pushed() -> None:
    async with stock_host() as one, stock_host() as other:
        await one.connect(info(other))
        await trio.sleep(0.2)

        async def handler(stream: Any) -> None:
            """Never called."""

        other.set_stream_handler("/late/1", handler)
        await trio.sleep(0.4)
        assert "/late/1" not in one.get_peerstore().get_protocols(other.get_id())


def test_defaults_dial_known_peers_without_being_asked() -> None:
    assert ConnectionConfig().low_watermark > 0
    assert upstream_swarm._HAPPY_EYEBALLS_DELAY > 0
    assert upstream_swarm.MAX_ADDRS_PER_PEER == 2


@pytest.mark.parametrize(
    ("where", "what"),
    [
        (Swarm._do_handle_inbound_connection, "await self.manager.wait_finished()"),
        (tcp._set_reuse_flags, "SO_REUSEPORT"),
        (tcp.TCPListener, "spawn_system_task"),
        (MuxerMultistream.new_conn, "Yamux("),
        (SwarmConn, "trio.sleep(0.1)"),
        (CircuitV2Protocol._handle_reserve, "peer_id = ID(msg.peer.id)"),
        (QUICListener._create_socket, "SO_REUSEPORT"),
        (
            PeerAuthenticator.verify_peer_certificate,
            "    public_key.verify(signature_payload, signature)\n",
        ),
        (RSAPublicKey.from_bytes, "RSA.import_key(key_bytes)"),
        (QUICStream.handle_data_received, "dropping {len(data)} bytes"),
        (QUICConnection._handle_connection_terminated, "await stream.close()"),
    ],
    ids=lambda value: getattr(value, "__qualname__", "-"),
)
def test_upstream_source_still_does_it(where: Any, what: str) -> None:
    """For behaviour that takes long, or a second machine, to show."""
    assert what in inspect.getsource(where)
