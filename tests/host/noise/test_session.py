"""Noise sessions over sockets and other connections, against themselves and against py-libp2p's own."""

from typing import Any

import pytest
import trio
import trio.testing
from libp2p.abc import IRawConnection, ISecureConn, ISecureTransport
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_static_pair
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.peer.id import ID
from libp2p.security.exceptions import HandshakeFailure
from libp2p.security.noise.transport import Transport as StockNoise

from dep2p.host.noise.codec import NONCE_MAX
from dep2p.host.noise.session import NoiseTransport

RawPair = tuple[IRawConnection, IRawConnection]


async def read_exactly(session: ISecureConn, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        data += await session.read(size - len(data))
    return bytes(data)


async def test_both_directions_carry_bytes_whole(raw_pair: RawPair, secured: Any) -> None:
    one, other = await secured(raw_pair)
    data = bytes(range(256)) * 4_096
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.write, data)
            nursery.start_soon(other.write, data[::-1])
            assert await read_exactly(other, len(data)) == data
            assert await read_exactly(one, len(data)) == data[::-1]
    assert one.get_remote_peer() == other.get_local_peer()
    assert one.get_remote_public_key() == other.get_local_private_key().get_public_key()


async def test_read_gives_what_there_is_up_to_the_size(raw_pair: RawPair, secured: Any) -> None:
    one, other = await secured(raw_pair)
    await one.write(b"abcdef")
    assert (await other.read(2), await other.read(0), await other.read(100)) == (b"ab", b"", b"cdef")


@pytest.mark.parametrize("stock_dials", [True, False])
async def test_it_speaks_with_the_noise_of_py_libp2p(stock_dials: bool, raw_pair: RawPair) -> None:
    keys, other_keys = create_new_key_pair(), create_new_key_pair()
    ours = NoiseTransport(keys)
    stock = StockNoise(other_keys, create_static_pair().private_key)
    dialer: ISecureTransport = stock if stock_dials else ours
    listener: ISecureTransport = ours if stock_dials else stock
    expected = ID.from_pubkey((keys if stock_dials else other_keys).public_key)
    sessions: list[ISecureConn] = []

    async def answer() -> None:
        sessions.append(await listener.secure_inbound(raw_pair[1]))

    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer)
            dialed = await dialer.secure_outbound(raw_pair[0], expected)
        data = bytes(range(256)) * 512
        async with trio.open_nursery() as nursery:
            nursery.start_soon(dialed.write, data)
            nursery.start_soon(sessions[0].write, data[::-1])
            assert await read_exactly(sessions[0], len(data)) == data
            assert await read_exactly(dialed, len(data)) == data[::-1]


async def test_another_peer_than_the_expected_one_closes_the_connection(raw_pair: RawPair) -> None:
    wrong = ID.from_pubkey(create_new_key_pair().public_key)
    failed: list[str] = []

    async def answer() -> None:
        with pytest.raises(HandshakeFailure):
            await NoiseTransport(create_new_key_pair()).secure_inbound(raw_pair[1])
        failed.append("other side")

    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer)
            with pytest.raises(HandshakeFailure, match="as expected"):
                await NoiseTransport(create_new_key_pair()).secure_outbound(raw_pair[0], wrong)
    assert failed == ["other side"]


@pytest.mark.parametrize(
    "hostile",
    [
        b"",
        b"\x00",
        b"\x00\x00",
        b"\x00\x05abc",
        b"\xff\xff" + bytes(100),
        b"\x00\x20" + bytes(32),
        b"\x00\x20" + 32 * b"a",
    ],
)
async def test_a_hostile_handshake_is_a_clean_failure(hostile: bytes, raw_pair: RawPair) -> None:
    if hostile:
        await raw_pair[0].write(hostile)
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:

            async def give_up() -> None:
                await trio.testing.wait_all_tasks_blocked(0.05)
                await raw_pair[0].close()

            nursery.start_soon(give_up)
            with pytest.raises(HandshakeFailure):
                await NoiseTransport(create_new_key_pair()).secure_inbound(raw_pair[1])


@pytest.mark.parametrize("wire", [b"\x00\x03abc", b"\x00\x20" + bytes(32)])
async def test_a_malformed_message_closes_the_session(wire: bytes, raw_pair: RawPair, secured: Any) -> None:
    _, other = await secured(raw_pair)
    await raw_pair[0].write(wire)
    with trio.fail_after(5), pytest.raises(ConnectionClosedError, match="Noise message"):
        await other.read(1)
    with pytest.raises(ConnectionClosedError):
        await other.read(1)
    with pytest.raises(ConnectionClosedError):
        await other.write(b"x")


async def test_the_end_of_the_connection_is_an_error_of_read(raw_pair: RawPair, secured: Any) -> None:
    one, other = await secured(raw_pair)
    await one.write(b"bye")
    await one.close()
    await one.close()
    assert await other.read(10) == b"bye"
    with trio.fail_after(5), pytest.raises(ConnectionClosedError):
        await other.read(10)
    with pytest.raises(ConnectionClosedError):
        await one.write(b"x")
    with pytest.raises(ConnectionClosedError):
        await one.read(1)


async def test_used_up_nonces_are_an_error_of_write(raw_pair: RawPair, secured: Any) -> None:
    one, _ = await secured(raw_pair)
    one._sealer.nonce = NONCE_MAX
    with pytest.raises(ConnectionClosedError, match="nonces"):
        await one.write(b"x")


async def test_a_cancelled_write_on_a_socket_tears_nothing(sockets: RawPair, secured: Any) -> None:
    one, other = await secured(sockets)
    data = bytes(range(256)) * 16_384  # far more than the socket takes
    with trio.move_on_after(0.02) as scope:
        await one.write(data)
    assert scope.cancelled_caught
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.write, b"after")
            assert await read_exactly(other, len(data) + 5) == data + b"after"


async def test_a_cancelled_write_on_another_connection_closes_the_session(lockstep: RawPair, secured: Any) -> None:
    one, _ = await secured(lockstep)
    with trio.move_on_after(0.02) as scope:  # nobody reads, and this kind of connection buffers nothing
        await one.write(b"torn")
    assert scope.cancelled_caught
    with pytest.raises(ConnectionClosedError):
        await one.write(b"after")


def nothing(_out: memoryview) -> int:
    return 0


async def test_another_file_with_the_number_of_a_closed_socket_is_never_written(sockets: RawPair, secured: Any) -> None:
    one, _ = await secured(sockets)
    await sockets[0].close()  # behind the session's back
    assert one.can_send_now
    assert not one.send_now(b"x")
    with pytest.raises(ConnectionClosedError):
        await one.send(nothing)
