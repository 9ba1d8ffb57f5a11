"""Every handshake of a host gives the same result however its bytes are split, and loses nothing that follows it.

A network may end a read at any byte, and a peer may send the first bytes of what comes next in the same segment as the
end of a handshake. go-libp2p does so with its first WebSocket frame: 18 of 20 dials failed.
"""

import base64
import hashlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
import trio.testing
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.io.abc import ReadWriteCloser
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb import circuit_pb2
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, StopMessage

from dep2p.encoding.length_prefixed import encode_length_prefixed, read_length_prefixed
from dep2p.host.addresses import parse_address
from dep2p.host.connections.upgrade import new_upgrader, upgrade_inbound, upgrade_outbound
from dep2p.host.counters import Counters
from dep2p.host.interface import ByteStream
from dep2p.host.multistream import encode_message, respond, select
from dep2p.host.transports import websocket
from dep2p.host.transports.relay.client import RelayClient
from dep2p.host.transports.relay.messages import HOP, STOP
from dep2p.host.transports.relay.server import RelayServer
from dep2p.host.transports.websocket import WebSocketStream
from dep2p.limits import Limits
from dep2p.testing import MemoryHost, MemoryNetwork
from dep2p.types import PeerId, peer_id_bytes

HEADER = b"\x13/multistream/1.0.0\n"
JOINED = 1_000_000
LIMITS = Limits(handshake_timeout_s=30.0, stream_open_timeout_s=30.0)


class Wire(ReadWriteCloser):
    """One end of a connection in memory. The first ``split`` bytes arrive alone, or all that can arrive at once."""

    def __init__(self, split: int) -> None:
        self.split = split
        self.arrived = bytearray()
        self._taken = 0
        self._ended = False
        self._changed = trio.Event()
        self.other: Wire = self

    @property
    def stream(self) -> "Wire":
        """As the socket of py-libp2p's TCP stream."""
        return self

    async def read(self, n: int | None = None) -> bytes:
        while not self.arrived and not self._ended:
            await self._changed.wait()
        await trio.testing.wait_all_tasks_blocked()
        size = len(self.arrived) if n is None or n < 0 else min(n, len(self.arrived))
        if self.split == 1:
            size = min(1, size)
        elif self._taken < self.split:
            size = min(size, self.split - self._taken)
        data = bytes(self.arrived[:size])
        del self.arrived[:size]
        self._taken += size
        return data

    async def write(self, data: bytes) -> None:
        self.other.arrived += data
        self.other.notify()
        await trio.lowlevel.checkpoint()

    def notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def close(self) -> None:
        self.other._ended = True
        self.other.notify()

    aclose = close

    def get_remote_address(self) -> tuple[str, int] | None:
        return None


def wire_pair(split: int) -> tuple[Wire, Wire]:
    one, other = Wire(split), Wire(split)
    one.other, other.other = other, one
    return one, other


async def both(first: Callable[[], Awaitable[Any]], second: Callable[[], Awaitable[Any]]) -> list[Any]:
    results: list[Any] = [None, None]

    async def run(index: int, call: Callable[[], Awaitable[Any]]) -> None:
        results[index] = await call()

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, 0, first)
            nursery.start_soon(run, 1, second)
    return results


class _Stream:
    """The part of a byte stream that multistream needs, over a wire."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def write_nowait(self, data: bytes | bytearray | memoryview, *, urgent: bool = False) -> None:
        self._wire.other.arrived += data
        self._wire.other.notify()

    async def read(self, max_bytes: int = 65_536) -> bytes:
        return await self._wire.read(max_bytes)


async def read_all(wire: Any, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = await wire.read(size - len(data))
        assert more, f"{size - len(data)} bytes were lost"
        data += more
    return data


# multistream-select

_PROPOSALS = HEADER + encode_message("/unknown/1") + encode_message("/wanted/1")


@pytest.mark.parametrize("split", [*range(1, len(_PROPOSALS) + 2), JOINED])
async def test_a_responder_takes_no_byte_of_what_follows_the_proposals(split: int) -> None:
    one, other = wire_pair(split)
    _Stream(one).write_nowait(_PROPOSALS + b"first bytes")
    agreed = await respond(_Stream(other), ("/wanted/1",), timeout_s=30)
    assert agreed == "/wanted/1"
    assert await read_all(other, 11) == b"first bytes"


@pytest.mark.parametrize("split", [*range(1, 35), JOINED])
async def test_an_initiator_takes_no_byte_of_what_follows_the_answer(split: int) -> None:
    one, other = wire_pair(split)
    _Stream(other).write_nowait(HEADER + encode_message("/wanted/1") + b"first bytes")
    await select(_Stream(one), "/wanted/1", timeout_s=30)
    assert await read_all(one, 11) == b"first bytes"


# WebSocket

_ADDRESS = parse_address("/ip4/192.0.2.1/tcp/4001/ws")
_FRAMES = b"\x82\x05hello\x82\x00\x89\x01p\x82\x06 world"
_MASKED = b"\x82\x85\0\0\0\0hello\x82\x80\0\0\0\0\x89\x81\0\0\0\0p\x82\x86\0\0\0\0 world"


def _dialled(monkeypatch: pytest.MonkeyPatch, wire: Wire) -> None:
    async def connect(_address: object) -> Wire:
        return wire

    monkeypatch.setattr(websocket, "connect_tcp", connect)


def _answer(request: bytes) -> bytes:
    (key,) = [line.split(b": ")[1] for line in request.split(b"\r\n") if line.lower().startswith(b"sec-websocket-key")]
    accept = base64.b64encode(hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
    return (
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Accept: " + accept + b"\r\n\r\n"
    )


@pytest.mark.parametrize("split", [*range(1, 160), JOINED])
async def test_frames_in_the_segment_of_the_101_are_read(split: int, monkeypatch: pytest.MonkeyPatch) -> None:
    client, server = wire_pair(split)
    server.split = JOINED
    _dialled(monkeypatch, client)

    async def serve() -> None:
        request = b""
        while b"\r\n\r\n" not in request:
            request += await server.read()
        await server.write(_answer(request) + _FRAMES)

    async def dial() -> bytes:
        return await read_all(await WebSocketStream.connect(_ADDRESS), 11)

    assert (await both(dial, serve))[0] == b"hello world"


@pytest.mark.parametrize("split", [*range(1, 220), JOINED])
async def test_frames_in_the_segment_of_the_request_are_read(split: int) -> None:
    client, server = wire_pair(split)
    await client.write(
        b"GET / HTTP/1.1\r\nHost: 192.0.2.1:4001\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n" + _MASKED
    )

    async def serve() -> bytes:
        return await read_all(await WebSocketStream.accept(server), 11)  # type: ignore[arg-type]

    with trio.fail_after(60):
        assert await serve() == b"hello world"


async def test_a_flood_of_frames_without_data_ends_the_websocket(autojump_clock: trio.testing.MockClock) -> None:
    client, server = wire_pair(JOINED)
    _, accepted = await both(
        lambda: client.write(
            b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        ),
        lambda: WebSocketStream.accept(server),  # type: ignore[arg-type]
    )
    await client.write(b"\x89\x80\0\0\0\0" * 100 + b"\x82\x81\0\0\0\0x")
    assert await accepted.read() == b"x"
    for frame in (b"\x89\x80\0\0\0\0", b"\x8a\x80\0\0\0\0", b"\x82\x80\0\0\0\0"):
        await client.write(frame * 500)
    with pytest.raises(Exception, match="empty frames"):
        await accepted.read()


# The whole upgrade: multistream, Noise, multistream, yamux


def upgrades(split: int, *, over_websocket: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    client, server = wire_pair(split)
    keys = [create_new_key_pair(bytes([number]) * 32) for number in (1, 2)]
    dialler, listener = (new_upgrader(key, LIMITS, Counters()) for key in keys)
    peer = PeerId(str(ID.from_pubkey(keys[1].public_key)))
    _dialled(monkeypatch, client)

    async def dial() -> Any:
        raw = await WebSocketStream.connect(_ADDRESS) if over_websocket else client
        return await upgrade_outbound(dialler, raw, peer)

    async def accept() -> Any:
        raw = await WebSocketStream.accept(server) if over_websocket else server  # type: ignore[arg-type]
        return await upgrade_inbound(listener, raw)

    return dial, accept


async def echoes(dialled: Any, accepted: Any) -> None:
    one, other = dialled.muxer._yamux, accepted.muxer._yamux
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.start)
        nursery.start_soon(other.start)
        sent = await one.open_stream()
        await sent.write(b"hello")
        received = await other.accept_stream()
        assert await read_all(received, 5) == b"hello"
        one.fail("done")
        other.fail("done")


@pytest.mark.parametrize("over_websocket", [False, True])
@pytest.mark.parametrize("start", [1, 101, 201, 301, 401, 501, 601])
async def test_an_upgrade_split_at_any_byte_gives_the_same_connection(
    start: int, over_websocket: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for split in [*range(start, start + 100, 3 if over_websocket else 1), JOINED]:
        dial, accept = upgrades(split, over_websocket=over_websocket, monkeypatch=monkeypatch)
        dialled, accepted = await both(dial, accept)
        assert dialled.channel_binding == accepted.channel_binding
        if split in (start, JOINED):
            await echoes(dialled, accepted)


# Relay


def relay_with_target(network: MemoryNetwork) -> tuple[MemoryHost, MemoryHost]:
    middle, target = network.host(), network.host()
    RelayServer(middle, Counters(), timeout_s=30.0)
    return middle, target


async def reserve(middle: MemoryHost, target: MemoryHost) -> None:
    stream = await (await target.dial(middle.peer_id, [middle.addr])).open_stream(HOP)
    stream.write_nowait(encode_length_prefixed(HopMessage(type=HopMessage.RESERVE).SerializeToString()))
    assert HopMessage.FromString(await read_length_prefixed(stream, 4_096)).status == circuit_pb2.OK


async def send_split(stream: ByteStream, data: bytes, split: int) -> None:
    for part in (data[:split], data[split:]):
        if part:
            stream.write_nowait(part)
            await trio.testing.wait_all_tasks_blocked()


async def test_a_circuit_carries_what_came_with_its_connect_and_its_answer(
    autojump_clock: trio.testing.MockClock,
) -> None:
    network = MemoryNetwork()
    middle, target = relay_with_target(network)
    ask = HopMessage(type=HopMessage.CONNECT)
    ask.peer.id = peer_id_bytes(target.peer_id)
    connect = encode_length_prefixed(ask.SerializeToString()) + b"from the dialler"
    answer = encode_length_prefixed(StopMessage(type=StopMessage.STATUS, status=circuit_pb2.OK).SerializeToString())
    carried: list[bytes] = []
    split = 0

    async def serve(stream: ByteStream) -> None:
        await read_length_prefixed(stream, 4_096)
        await send_split(stream, answer + b"from the target", split)
        carried.append(await read_all(stream, 16))

    target.set_stream_handler(STOP, serve)
    await reserve(middle, target)
    for split in range(len(connect) + 1):
        connection = await network.host().dial(middle.peer_id, [middle.addr])
        stream = await connection.open_stream(HOP)
        with trio.fail_after(20):
            await send_split(stream, connect, split)
            status = HopMessage.FromString(await read_length_prefixed(stream, 4_096))
            assert status.status == circuit_pb2.OK
            assert await read_all(stream, 15) == b"from the target"
        await trio.testing.wait_all_tasks_blocked()
        await connection.close()
        await trio.sleep(1)
    assert carried == [b"from the dialler"] * (len(connect) + 1)


async def test_a_client_of_a_relay_takes_what_came_with_the_connect(autojump_clock: trio.testing.MockClock) -> None:
    network = MemoryNetwork()
    middle, target = relay_with_target(network)
    accepted: list[bytes] = []

    async def accept(raw: ReadWriteCloser, _addr: str, _prepare: None) -> None:
        accepted.append(await read_all(raw, 16))

    client = RelayClient(target, Counters(), accept, lambda _peer: (HOP,), reserves=True, timeout_s=30.0)
    connection = await target.dial(middle.peer_id, [middle.addr])
    await client.reserve(connection)
    ask = StopMessage(type=StopMessage.CONNECT)
    ask.peer.id = peer_id_bytes(network.host().peer_id)
    connect = encode_length_prefixed(ask.SerializeToString()) + b"from the dialler"
    for split in range(len(connect) + 1):
        stream = await middle.connections(target.peer_id)[0].open_stream(STOP)
        await send_split(stream, connect, split)
        answer = StopMessage.FromString(await read_length_prefixed(stream, 4_096))
        assert answer.status == circuit_pb2.OK
        await trio.testing.wait_all_tasks_blocked()
        stream.reset()
    assert accepted == [b"from the dialler"] * (len(connect) + 1)
