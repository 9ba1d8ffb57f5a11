"""go-libp2p's daemon, p2pd, driven by its control protocol: protobuf messages behind their lengths on a Unix socket."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import base58
import pytest
import trio
from multiaddr import Multiaddr

from dep2p.encoding.protobuf import encode_field
from dep2p.encoding.varint import encode_varint
from dep2p.types import PeerId

READER = Path(__file__).parent / "go_reader.py"
FIRST = ["nice", "-n", "-10"] if os.geteuid() == 0 else []
P2PD = Path(__file__).parent / "go" / "p2pd"

_IDENTIFY, _CONNECT, _STREAM_OPEN, _DHT, _LIST_PEERS, _DISCONNECT, _PUBSUB = 0, 1, 2, 4, 5, 7, 8
_GET_TOPICS, _PEERS_OF_TOPIC, _PUBLISH, _SUBSCRIBE = 0, 1, 2, 3
_FIND_PEER, _FIND_PROVIDERS, _PROVIDE = 0, 2, 8
_BEGIN, _VALUE = 0, 1
_CID_V1_RAW = b"\x01\x55"
"""In front of a multihash: a CID of version 1 of raw bytes."""

Fields = list[tuple[int, int | bytes]]


class GoError(Exception):
    """The daemon refused a request."""


@dataclass(frozen=True)
class GoMessage:
    """A message that the daemon's subscriber got."""

    author: bytes
    data: bytes
    seqno: bytes
    topics: tuple[str, ...]


def number(field: int, value: int) -> bytes:
    """A varint field."""
    return encode_varint(field << 3) + encode_varint(value)


def parse(data: bytes) -> Fields:
    """The fields of a protobuf message, varints and bytes."""
    fields: Fields = []
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        tag = varint()
        if tag & 7 == 0:
            fields.append((tag >> 3, varint()))
        else:
            assert tag & 7 == 2, f"wire type {tag & 7}"
            size = varint()
            fields.append((tag >> 3, data[at : at + size]))
            at += size
    return fields


def blobs(fields: Fields, field: int) -> list[bytes]:
    """Every value of a bytes field."""
    return [value for key, value in fields if key == field and isinstance(value, bytes)]


class GoStream:
    """A connection to the daemon: requests and answers, or a stream that it carries."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._rest = bytearray()

    async def receive(self, count: int) -> bytes:
        """So many bytes."""
        while len(self._rest) < count:
            data = await self.stream.receive_some(65_536)
            assert data, "the daemon has closed the connection"
            self._rest += data
        taken = bytes(self._rest[:count])
        del self._rest[:count]
        return taken

    async def message(self) -> Fields:
        """One message behind its length."""
        size = shift = 0
        while True:
            byte = (await self.receive(1))[0]
            size |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return parse(await self.receive(size))

    async def next(self) -> GoMessage:
        """The next message of a subscription."""
        fields = await self.message()
        author, data, seqno = (b"".join(blobs(fields, field)) for field in (1, 2, 3))
        return GoMessage(author, data, seqno, tuple(topic.decode() for topic in blobs(fields, 4)))


class GoCount:
    """How many distinct messages a subscriber of the daemon has got."""

    def __init__(self) -> None:
        self.value = 0
        self.is_subscribed = trio.Event()

    async def read(self, stream: trio.abc.ReceiveStream) -> None:
        """Follow what the process prints."""
        rest = b""
        async for data in stream:
            *whole, rest = (rest + data).split(b"\n")
            if whole:
                self.value = int(whole[-1])
                self.is_subscribed.set()


class GoDaemon:
    """One running daemon."""

    def __init__(self, socket: str) -> None:
        self._socket = socket
        self._open: list[trio.SocketStream] = []
        self.peer = PeerId("")
        self.addrs: list[str] = []

    async def call(self, kind: int, *parts: bytes) -> tuple[Fields, GoStream]:
        """Send a request; the answer, and the connection that stays open. Raises GoError."""
        stream = await trio.open_unix_socket(self._socket)
        self._open = [one for one in self._open if one.socket.fileno() >= 0]
        self._open.append(stream)
        request = number(1, kind) + b"".join(parts)
        await stream.send_all(encode_varint(len(request)) + request)
        connection = GoStream(stream)
        answer = await connection.message()
        if (1, 1) in answer:
            await stream.aclose()
            raise GoError(b"".join(blobs(parse(b"".join(blobs(answer, 2))), 1)).decode())
        return answer, connection

    async def ask(self, kind: int, *parts: bytes) -> Fields:
        """Send a request, and close the connection after its answer."""
        answer, connection = await self.call(kind, *parts)
        await connection.stream.aclose()
        return answer

    def close(self) -> None:
        """Close what is open."""
        for stream in self._open:
            stream.socket.close()

    async def identify(self) -> None:
        """Learn its peer id and addresses."""
        answer = parse(b"".join(blobs(await self.ask(_IDENTIFY), 4)))
        self.peer = PeerId(base58.b58encode(b"".join(blobs(answer, 1))).decode())
        self.addrs = [str(Multiaddr(raw)) for raw in blobs(answer, 2)]

    def addr(self, with_part: str = "/tcp/", without: str = "/ws") -> str:
        """An address with this part, with its peer id."""
        return next(a for a in self.addrs if with_part in a and without not in a) + f"/p2p/{self.peer}"

    async def connect(self, peer: PeerId, addrs: Sequence[str]) -> None:
        """Dial a peer."""
        body = encode_field(1, base58.b58decode(peer))
        for addr in addrs:
            body += encode_field(2, Multiaddr(addr).to_bytes())
        await self.ask(_CONNECT, encode_field(2, body + number(3, 10)))

    async def disconnect(self, peer: PeerId) -> None:
        """Close the connections to a peer."""
        await self.ask(_DISCONNECT, encode_field(7, encode_field(1, base58.b58decode(peer))))

    async def peers(self) -> list[str]:
        """Connected peers."""
        found = blobs(await self.ask(_LIST_PEERS), 6)
        return [base58.b58encode(blobs(parse(raw), 1)[0]).decode() for raw in found]

    async def topic_peers(self, topic: str) -> list[str]:
        """Its neighbours that are subscribed to a topic."""
        answer = await self.ask(_PUBSUB, encode_field(8, number(1, _PEERS_OF_TOPIC) + encode_field(2, topic.encode())))
        return [base58.b58encode(raw).decode() for raw in blobs(parse(b"".join(blobs(answer, 7))), 2)]

    async def publish(self, topic: str, data: bytes) -> None:
        """Publish a message."""
        body = number(1, _PUBLISH) + encode_field(2, topic.encode()) + encode_field(3, data)
        await self.ask(_PUBSUB, encode_field(8, body))

    async def subscribe(self, topic: str) -> GoStream:
        """Subscribe; the messages come on the connection."""
        body = number(1, _SUBSCRIBE) + encode_field(2, topic.encode())
        return (await self.call(_PUBSUB, encode_field(8, body)))[1]

    @asynccontextmanager
    async def counting(self, topic: str) -> AsyncGenerator["GoCount", None]:
        """Subscribe in a process of its own, and count distinct messages."""
        process = await trio.lowlevel.open_process(
            [*FIRST, sys.executable, str(READER), self._socket, topic],
            stdout=subprocess.PIPE,
        )
        count = GoCount()
        try:
            async with trio.open_nursery() as nursery:
                assert process.stdout is not None
                nursery.start_soon(count.read, process.stdout)
                await count.is_subscribed.wait()
                yield count
                nursery.cancel_scope.cancel()
        finally:
            process.kill()
            with trio.CancelScope(shield=True):
                await process.wait()
                if process.stdout is not None:
                    await process.stdout.aclose()

    async def open_stream(self, peer: PeerId, protocol: str) -> GoStream:
        """Open a stream to a peer."""
        body = encode_field(1, base58.b58decode(peer)) + encode_field(2, protocol.encode()) + number(3, 10)
        return (await self.call(_STREAM_OPEN, encode_field(3, body)))[1]

    async def find_peer(self, peer: PeerId) -> list[str]:
        """The addresses of a peer, out of the DHT."""
        answer = await self.ask(_DHT, encode_field(5, number(1, _FIND_PEER) + encode_field(2, base58.b58decode(peer))))
        found = blobs(parse(b"".join(blobs(answer, 5))), 2)
        return [str(Multiaddr(raw)) for info in found for raw in blobs(parse(info), 2)]

    async def provide(self, multihash: bytes) -> None:
        """Announce itself in the DHT as a provider."""
        await self.ask(_DHT, encode_field(5, number(1, _PROVIDE) + encode_field(3, _CID_V1_RAW + multihash)))

    async def find_providers(self, multihash: bytes) -> dict[str, list[str]]:
        """The providers that the DHT names, with their addresses."""
        body = number(1, _FIND_PROVIDERS) + encode_field(3, _CID_V1_RAW + multihash) + number(6, 8) + number(7, 10)
        answer, connection = await self.call(_DHT, encode_field(5, body))
        assert (1, _BEGIN) in parse(b"".join(blobs(answer, 5)))
        found: dict[str, list[str]] = {}
        while (1, _VALUE) in (fields := await connection.message()):
            for info in blobs(fields, 2):
                peer = base58.b58encode(b"".join(blobs(parse(info), 1))).decode()
                found[peer] = [str(Multiaddr(raw)) for raw in blobs(parse(info), 2)]
        await connection.stream.aclose()
        return found


@asynccontextmanager
async def go_daemon(
    *options: str, listen: str = "/ip4/127.0.0.1/tcp/0", key: Path | None = None
) -> AsyncGenerator[GoDaemon, None]:
    """A daemon with GossipSub; skips where it is not installed.

    It runs before other processes of a busy machine where that is allowed: go drops, without a word, what its
    subscriber does not take at once.
    """
    if not P2PD.exists():
        pytest.skip("go-libp2p's daemon is not installed: run `make interop-peer`")
    folder = tempfile.mkdtemp(prefix="p2pd")
    socket = f"{folder}/control"
    arguments = [*FIRST, str(P2PD), "-listen", f"/unix{socket}", "-hostAddrs", listen, "-pubsub", *options]
    if key is not None:
        arguments += ["-id", str(key)]
    process = await trio.lowlevel.open_process(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    daemon = GoDaemon(socket)
    try:
        with trio.fail_after(30):
            while True:
                try:
                    await daemon.identify()
                    break
                except OSError:
                    assert process.poll() is None, f"p2pd ended with {process.returncode}"
                    await trio.sleep(0.05)
        yield daemon
    finally:
        daemon.close()
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()
        shutil.rmtree(folder, ignore_errors=True)
