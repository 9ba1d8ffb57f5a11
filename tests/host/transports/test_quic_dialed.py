"""QUIC dials leave from the listener's socket, and both kinds of connection share it."""

import socket
from typing import Any

import pytest
import trio

from dep2p.errors import PeerNotFoundError, StreamClosedError
from dep2p.host.addresses import parse_address
from dep2p.host.transports.quic_dialed import DialedConnections, destination_id
from dep2p.identity import Identity

QUIC = "/ip4/127.0.0.1/udp/0/quic-v1"
QUIC6 = "/ip6/::1/udp/0/quic-v1"


def port_of(host: Any) -> int:
    return parse_address(host.listen_addrs()[0]).port


async def answered(host: Any, peer: Any) -> None:
    """Wait until the peer answers over whichever connection is in use: of two the surplus one is closed."""
    while True:
        try:
            stream = await (await host.dial(peer)).open_stream("/echo/1")
            await stream.write(b"hello")
            assert await stream.read() == b"hello"
            return
        except StreamClosedError:
            await trio.lowlevel.checkpoint()


@pytest.mark.parametrize(
    ("datagram", "connection_id"),
    [
        (b"", b""),
        (b"\x40", b""),
        (b"\x40abcdefghij", b"abcdefgh"),
        (b"\xc0\0\0\0\1", b""),
        (b"\xc0\0\0\0\1\x03abcdef", b"abc"),
        (b"\xc0\0\0\0\1\xffabc", b"abc"),
    ],
)
def test_the_connection_id_of_any_datagram(datagram: bytes, connection_id: bytes) -> None:
    assert destination_id(datagram) == connection_id


def test_without_dialed_connections_every_datagram_is_the_listeners() -> None:
    assert DialedConnections().find(b"\x40abcdefghij", ("192.0.2.1", 1)) is None


@pytest.mark.real
@pytest.mark.parametrize("listen", [QUIC, QUIC6, "/ip4/0.0.0.0/udp/0/quic-v1"])
async def test_a_dial_leaves_from_the_socket_of_the_listener(open_host: Any, listen: str) -> None:
    target = QUIC6 if listen == QUIC6 else QUIC
    async with open_host(listen=[listen]) as one, open_host(listen=[target]) as other:
        connection = await one.dial(other.peer_id, other.listen_addrs())
        assert connection.listening_port == port_of(one)
        stream = await connection.open_stream("/echo/1")
        await stream.write(b"x" * 100_000)
        await stream.close_write()
        received = b""
        while data := await stream.read():
            received += data
        assert received == b"x" * 100_000
        (seen,) = other.connections(one.peer_id)
        assert parse_address(seen.remote_addr).port == port_of(one)


@pytest.mark.real
async def test_a_listener_of_the_other_family_dials_from_another_socket(open_host: Any) -> None:
    async with open_host(listen=[QUIC6]) as one, open_host(listen=[QUIC]) as other:
        connection = await one.dial(other.peer_id, other.listen_addrs())
        assert connection.listening_port is None
        await one.ping(other.peer_id)


@pytest.mark.real
async def test_both_may_dial_each_other_between_the_same_two_sockets(open_host: Any) -> None:
    async with open_host(listen=[QUIC]) as one, open_host(listen=[QUIC]) as other:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.dial, other.peer_id, other.listen_addrs())
            nursery.start_soon(other.dial, one.peer_id, one.listen_addrs())
        for host, peer in ((one, other), (other, one)):
            await answered(host, peer.peer_id)


@pytest.mark.real
async def test_a_peer_that_was_dialed_is_dialed_again_between_the_same_sockets(open_host: Any) -> None:
    async with open_host(listen=[QUIC]) as one, open_host(listen=[QUIC]) as other:
        for _ in range(3):
            connection = await one.dial(other.peer_id, other.listen_addrs())
            await one.ping(other.peer_id)
            await connection.close()


@pytest.mark.real
async def test_a_dial_from_the_listeners_socket_proves_the_peer(open_host: Any) -> None:
    async with open_host(listen=[QUIC]) as one, open_host(listen=[QUIC]) as other:
        stranger = Identity.generate().peer_id
        with pytest.raises(PeerNotFoundError):
            await one.dial(stranger, [addr.partition("/p2p/")[0] for addr in other.listen_addrs()])
        assert not one.connections()


@pytest.mark.real
async def test_datagrams_of_the_dialed_address_that_are_no_packets_harm_nothing(
    open_host: Any, eventually: Any
) -> None:
    async with open_host(listen=[QUIC]) as one, open_host(listen=[QUIC]) as other:
        connection = await one.dial(other.peer_id, other.listen_addrs())
        for size in (1, 8, 64, 1_200):
            assert await other._transports.send_random(parse_address(one.listen_addrs()[0]), size)
        stream = await connection.open_stream("/echo/1")
        await stream.write(b"hello")
        assert await stream.read() == b"hello"


@pytest.mark.real
async def test_random_datagrams_leave_from_the_listeners_socket(open_host: Any) -> None:
    with socket.socket(type=socket.SOCK_DGRAM) as target:
        target.bind(("127.0.0.1", 0))
        target.settimeout(5)
        address = parse_address(f"/ip4/127.0.0.1/udp/{target.getsockname()[1]}/quic-v1")
        async with open_host(listen=[QUIC]) as one:
            assert await one._transports.send_random(address, 64)
            data, sender = await trio.to_thread.run_sync(target.recvfrom, 100)
            assert len(data) == 64 and not data[0] & 0xC0
            assert sender == ("127.0.0.1", port_of(one))
        async with open_host() as one:
            assert not await one._transports.send_random(address, 64)
