"""Attacks of peers that hold no secret: keys, half-open connections, yamux floods, failed proofs, QUIC Initials."""

import os
import socket
import ssl
import time
from collections.abc import Callable
from typing import Protocol

import trio

from bench.hostile.raw_client import HEADER_MESSAGE, RawConnection
from bench.hostile.stage import Stage, in_parallel, repeat, send_wrong_proofs
from dep2p.encoding.protobuf import encode_field
from dep2p.encoding.varint import encode_varint
from dep2p.host.yamux.frames import DATA, PING, RST, SYN, WINDOW_UPDATE, encode_header
from dep2p.protocols.realm.handshake import AUTH_PROTOCOL

_IDENTIFY = "/ipfs/id/1.0.0"
_PING = "/ipfs/ping/1.0.0"
_PRIME_BITS = 9_941
"""2**9941 - 1 is a prime: a careless parser needs seconds to see that."""
_FRAMES = 256
"""Frames in one write of a flood."""
_STREAMS = 330
_SILENT_STREAMS = 64
"""Streams of a half-open connection whose negotiation has begun, so that the others wait behind them."""
_WINDOW_PIECES = 16
_PIECE = encode_varint(16_383) + bytes(16_382)
_PAUSE_S = 0.01


async def rsa_keys(stage: Stage) -> None:
    """Handshakes whose identity is an RSA private key with a huge prime."""
    payload = encode_field(1, _rsa_private_key()) + encode_field(2, bytes(64))

    async def once() -> None:
        async with trio.open_nursery() as nursery:
            connection = await RawConnection.dial(nursery, stage.address, payload=payload)
            stage.counts["keys"] += 1
            await connection.close()
            nursery.cancel_scope.cancel()

    await in_parallel(stage, min(4, stage.connections), once)


def _rsa_private_key() -> bytes:
    """``PublicKey{RSA, PKCS#1 private key}``."""
    prime = 2**_PRIME_BITS - 1
    body = b"".join(
        _der(2, n.to_bytes(n.bit_length() // 8 + 1, "big")) for n in (0, prime * 3, 5, 7, prime, 3, 1, 1, 1)
    )
    return b"\x08\x00" + encode_field(2, _der(0x30, body))


def _der(tag: int, content: bytes) -> bytes:
    if len(content) < 0x80:
        return bytes((tag, len(content))) + content
    size = len(content).to_bytes(2, "big")
    return bytes((tag, 0x82)) + size + content


async def half_open(stage: Stage) -> None:
    """Connections full of streams that never finish their negotiation."""

    async def hold(nursery: trio.Nursery) -> None:
        connection = await RawConnection.dial(nursery, stage.address)
        stage.counts["connections"] += 1
        for number in range(_STREAMS):
            stream = connection.new_stream()
            await connection.send(encode_header(WINDOW_UPDATE, SYN, stream.id, 0))
            if number < _SILENT_STREAMS:
                await stream.send(HEADER_MESSAGE[:6])
                continue
            for _ in range(_WINDOW_PIECES):
                await connection.send(encode_header(DATA, 0, stream.id, len(_PIECE)) + _PIECE)
                stage.counts["sent_kib"] += 16
        await connection.wait_closed()

    async def once() -> None:
        async with trio.open_nursery() as nursery:
            await hold(nursery)
            nursery.cancel_scope.cancel()

    await in_parallel(stage, stage.connections, once)


async def idle_connections(stage: Stage) -> None:
    """As many connections as the node takes, each upgraded and then silent."""

    async def once() -> None:
        async with trio.open_nursery() as nursery:
            connection = await RawConnection.dial(nursery, stage.address)
            stage.counts["connections"] += 1
            await connection.wait_closed()
            nursery.cancel_scope.cancel()

    await in_parallel(stage, stage.connections, once)


async def _flood(stage: Stage, name: str, make: "Callable[[], _Frames]") -> None:
    async def once() -> None:
        async with trio.open_nursery() as nursery:
            connection = await RawConnection.dial(nursery, stage.address)
            frames = make()
            while not connection.is_closed:
                await connection.send(frames.next(connection))
                stage.counts[name] += _FRAMES
            nursery.cancel_scope.cancel()

    await in_parallel(stage, 2, once)


class _Frames(Protocol):
    """Bytes of `_FRAMES` yamux frames of one kind."""

    def next(self, connection: RawConnection) -> bytes: ...


class _Resets:
    """Streams that open and are reset at once."""

    def next(self, connection: RawConnection) -> bytes:
        first, connection._next_id = connection._next_id, connection._next_id + _FRAMES  # pyright: ignore[reportPrivateUsage]
        return b"".join(
            encode_header(WINDOW_UPDATE, SYN, stream_id, 0) + encode_header(WINDOW_UPDATE, RST, stream_id, 0)
            for stream_id in range(first, first + _FRAMES, 2)
        )


class _Empty:
    """Frames that say nothing: empty DATA, windows of 0, pings, all on one stream."""

    _bytes = b""

    def next(self, connection: RawConnection) -> bytes:
        if not self._bytes:
            opened = connection.new_stream()
            kinds = ((DATA, 0, opened.id), (WINDOW_UPDATE, 0, opened.id), (PING, SYN, 0))
            self._bytes = b"".join(encode_header(*kinds[n % 3], 0) for n in range(_FRAMES))
            return encode_header(WINDOW_UPDATE, SYN, opened.id, 0) + self._bytes
        return self._bytes


async def yamux_resets(stage: Stage) -> None:
    """SYN and RST without end."""
    await _flood(stage, "frames", _Resets)


async def yamux_empty(stage: Stage) -> None:
    """Empty frames without end."""
    await _flood(stage, "frames", _Empty)


async def yamux_dribble(stage: Stage) -> None:
    """Answers that are taken a byte at a time."""

    async def once() -> None:
        async with trio.open_nursery() as nursery:
            connection = await RawConnection.dial(nursery, stage.address)
            stream = await connection.open_stream(_PING)
            stream.is_kept = stream.is_crediting = False
            nursery.start_soon(stream.send, bytes(8_000_000))
            grant = encode_header(WINDOW_UPDATE, 0, stream.id, 1) * _FRAMES
            while not connection.is_closed and not stream.is_ended:
                await connection.send(grant)
                stage.counts["frames"] += _FRAMES
            nursery.cancel_scope.cancel()

    await in_parallel(stage, 2, once)


async def failed_proofs(stage: Stage) -> None:
    """Handshakes of the realm with random proofs, from the address that honest members use, too."""

    async def once() -> None:
        async with trio.open_nursery() as nursery:
            connection = await RawConnection.dial(nursery, stage.address)
            await send_wrong_proofs(stage, connection, 12)
            nursery.cancel_scope.cancel()

    await in_parallel(stage, 2, once)


async def identify(stage: Stage) -> None:
    """A stranger asks who the node is, and looks for the id of the realm in all that it answers."""

    async def once() -> None:
        async with trio.open_nursery() as nursery:
            connection = await RawConnection.dial(nursery, stage.address)
            for _ in range(16):
                stream = await connection.open_stream(_IDENTIFY)
                said = b""
                while data := await stream.receive_some():
                    said += data
                stage.counts["answers"] += bool(said)
                stage.counts["answers_with_realm_id"] += stage.realm.realm_id.encode() in said
            for protocol in (AUTH_PROTOCOL, "/dep2p/none/1.0.0"):
                stream = await connection.open_stream(protocol)
                stream.take(b"")
                await trio.sleep(_PAUSE_S)
            nursery.cancel_scope.cancel()

    await repeat(stage, once)


async def quic_initials(stage: Stage) -> None:
    """First packets of QUIC handshakes that never go on, each from a new connection id."""
    from aioquic.quic.configuration import QuicConfiguration
    from aioquic.quic.connection import QuicConnection

    host, port = stage.others[0].split("/")[2], int(stage.others[0].split("/")[4])
    configuration = QuicConfiguration(is_client=True, alpn_protocols=["libp2p"], verify_mode=ssl.CERT_NONE)
    with trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        await udp.connect((host, port))
        while True:
            for _ in range(20):
                quic = QuicConnection(configuration=configuration)
                quic.connect((host, port), now=time.time())
                junk = (
                    b"\xc0\x00\x00\x00\x01\x08"
                    + os.urandom(8)
                    + b"\x08"
                    + os.urandom(8)
                    + b"\x00\x44\x00"
                    + bytes(1_175)
                )
                for datagram in (quic.datagrams_to_send(time.time())[0][0], junk):
                    await udp.send(datagram)
                    stage.counts["datagrams"] += 1
            await trio.sleep(_PAUSE_S)
