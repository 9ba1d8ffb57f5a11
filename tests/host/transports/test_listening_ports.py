"""TCP dials leave from the listener's port, which nevertheless belongs to one host."""

import socket
from typing import Any

import pytest
import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.id import ID

from dep2p.errors import ListenError, PeerNotFoundError, ProtocolError
from dep2p.host.addresses import parse_address
from dep2p.host.noise.handshake import BothDialedError, NoiseHandshake
from dep2p.host.transports.listening_ports import ListeningPorts
from dep2p.identity import Identity

pytestmark = pytest.mark.real

EVERYWHERE = "/ip4/0.0.0.0/tcp/0"
ELSEWHERE = "/ip4/127.0.0.2/tcp/0"
"""Another address of this machine: to the kernel another one than that which a dial leaves from."""


def port_of(host: Any) -> int:
    return parse_address(host.listen_addrs()[0]).port


def listening(host: str = "127.0.0.1") -> socket.socket:
    sock = socket.socket()
    sock.bind((host, 0))
    sock.listen()
    return sock


async def test_a_dial_leaves_from_the_port_of_the_listener(open_host: Any) -> None:
    async with open_host(listen=[EVERYWHERE]) as one, open_host(listen=[ELSEWHERE]) as other:
        connection = await one.dial(other.peer_id, other.listen_addrs())
        assert connection.listening_port == port_of(one)
        (seen,) = other.connections(one.peer_id)
        assert seen.remote_addr == f"/ip4/127.0.0.1/tcp/{port_of(one)}"
        assert seen.listening_port is None
        await one.ping(other.peer_id)


async def test_a_dial_to_this_machines_own_address_leaves_from_another_port(open_host: Any) -> None:
    async with open_host(listen=[EVERYWHERE]) as one, open_host() as other:
        connection = await one.dial(other.peer_id, other.listen_addrs())
        assert connection.listening_port is None
        assert other.connections(one.peer_id)[0].remote_addr != f"/ip4/127.0.0.1/tcp/{port_of(one)}"


async def test_a_listener_of_another_interface_lends_no_port(open_host: Any) -> None:
    async with open_host(listen=[ELSEWHERE]) as one, open_host(listen=["/ip4/127.0.0.3/tcp/0"]) as other:
        connection = await one.dial(other.peer_id, other.listen_addrs())  # which leaves from 127.0.0.1
        assert connection.listening_port is None


async def test_the_port_stays_the_hosts_own_while_dials_leave_from_it(open_host: Any) -> None:
    async with open_host(listen=[EVERYWHERE]) as one, open_host(listen=[ELSEWHERE]) as other:
        await one.dial(other.peer_id, other.listen_addrs())
        for taken in (f"/ip4/0.0.0.0/tcp/{port_of(one)}", f"/ip4/127.0.0.1/tcp/{port_of(one)}"):
            with pytest.raises(ListenError, match="taken by another process"):
                async with open_host(listen=[taken]):
                    pass
        with socket.socket() as sharing, pytest.raises(OSError, match="in use"):
            sharing.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            sharing.bind(("0.0.0.0", port_of(one)))


async def test_a_host_listens_again_on_the_port_that_its_dials_have_left_from(open_host: Any) -> None:
    async with open_host(listen=[ELSEWHERE]) as other:
        async with open_host(listen=[EVERYWHERE]) as one:
            await one.dial(other.peer_id, other.listen_addrs())
            again = f"/ip4/0.0.0.0/tcp/{port_of(one)}"
        async with open_host(listen=[again]) as one:
            await one.dial(other.peer_id, other.listen_addrs())


async def test_a_target_that_the_port_is_connected_to_is_dialed_from_another_one() -> None:
    with listening() as listener, listening("127.0.0.2") as target:
        ports = ListeningPorts()
        ports.add(trio.socket.from_stdlib_socket(listener))
        address = parse_address(f"/ip4/127.0.0.2/tcp/{target.getsockname()[1]}")
        first = await ports.connect(address)
        assert first is not None and first[1] == listener.getsockname()[1]
        assert await ports.connect(address) is None
        await first[0].close()


async def test_a_name_is_dialed_from_the_port_of_the_listener() -> None:
    with listening() as listener, listening("127.0.0.2") as target:
        ports = ListeningPorts()
        ports.add(trio.socket.from_stdlib_socket(listener))
        found = await ports.connect(parse_address(f"/dns4/127.0.0.2/tcp/{target.getsockname()[1]}"))
        assert found is not None and found[1] == listener.getsockname()[1]
        await found[0].close()


async def test_a_refused_dial_is_an_error_and_not_tried_from_another_port(open_host: Any) -> None:
    with listening("127.0.0.2") as target:
        address = f"/ip4/127.0.0.2/tcp/{target.getsockname()[1]}"
    async with open_host(listen=[EVERYWHERE]) as one:
        with pytest.raises(PeerNotFoundError, match="refused"):
            await one.dial(Identity.generate().peer_id, [address])


def test_two_initiators_know_that_both_have_dialed() -> None:
    keys = create_new_key_pair(), create_new_key_pair()
    peers = [ID.from_pubkey(pair.public_key) for pair in keys]
    one = NoiseHandshake(keys[0], create_new_key_pair().private_key, is_initiator=True, expected_peer=peers[1])
    other = NoiseHandshake(keys[1], create_new_key_pair().private_key, is_initiator=True, expected_peer=peers[0])
    first = one.start()
    with pytest.raises(BothDialedError):
        other.receive(first)
    with pytest.raises(ProtocolError) as caught:
        one.receive(first + b"x")
    assert not isinstance(caught.value, BothDialedError)


async def test_after_a_simultaneous_open_the_peer_is_dialed_once_more_from_another_port(open_host: Any) -> None:
    """The target acts as an initiator, as the peer does when both connection requests have crossed."""
    asked: list[int] = []

    async def act(stream: trio.SocketStream) -> None:
        asked.append(stream.socket.getpeername()[1])
        await stream.send_all(b"\x13/multistream/1.0.0\n\x07/noise\n\x00\x20" + bytes(range(1, 33)))
        async for _data in stream:
            pass

    with listening("127.0.0.2") as target:
        async with open_host(listen=[EVERYWHERE]) as one, trio.open_nursery() as nursery:
            server = trio.SocketListener(trio.socket.from_stdlib_socket(target))
            nursery.start_soon(trio.serve_listeners, act, [server])
            with pytest.raises(PeerNotFoundError, match="both sides have dialed"):
                await one.dial(Identity.generate().peer_id, [f"/ip4/127.0.0.2/tcp/{target.getsockname()[1]}"])
            nursery.cancel_scope.cancel()
            assert len(asked) == 2 and asked[0] == port_of(one) and asked[1] != port_of(one)
            assert one.counters()["dial_simultaneous_open"] == 1
