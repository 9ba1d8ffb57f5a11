"""Raw trio TCP with length-framed messages: the floor of anything built on trio sockets."""

import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial

import trio

from bench.sides.interface import Arrivals, DialTimes, Send

_LENGTH_BYTES = 4


class _Frames:
    """Frames of a 4-byte length and a body over one socket."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._received = bytearray()

    async def send(self, data: bytes) -> None:
        await self._stream.send_all(len(data).to_bytes(_LENGTH_BYTES, "big") + data)

    async def receive(self) -> bytes | None:
        """The next body; None at the end."""
        received = self._received
        while True:
            if len(received) >= _LENGTH_BYTES:
                end = _LENGTH_BYTES + int.from_bytes(received[:_LENGTH_BYTES], "big")
                if len(received) >= end:
                    body = bytes(received[_LENGTH_BYTES:end])
                    del received[:end]
                    return body
            chunk = await self._stream.receive_some(65_536)
            if not chunk:
                return None
            received += chunk


class TCPServer:
    """Answers each frame with the same bytes."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.arrivals = Arrivals()

    async def answer(self, stream: trio.SocketStream) -> None:
        """Serve one connection."""
        frames = _Frames(stream)
        while (data := await frames.receive()) is not None:
            await frames.send(data)


class TCPClient:
    """One connection; one request at a time, because there is nothing that pairs answers with requests."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._frames = _Frames(stream)

    async def request(self, data: bytes) -> bytes:
        """The next frame after ours."""
        await self._frames.send(data)
        answer = await self._frames.receive()
        if answer is None:
            raise EOFError("the server closed the connection")
        return answer

    @asynccontextmanager
    async def open_notify(self) -> AsyncGenerator[Send, None]:
        """The same frames, not counted."""
        yield self._frames.send

    @asynccontextmanager
    async def open_bulk(self) -> AsyncGenerator[Send, None]:
        """The same frames, not counted."""
        yield self._frames.send


class TCPSide:
    """Sockets and nothing else: no identity, no encryption, no multiplexing."""

    @asynccontextmanager
    async def serve(self, secret: str) -> AsyncGenerator[TCPServer, None]:
        """Listen on a free loopback port."""
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        port: int = listeners[0].socket.getsockname()[1]
        server = TCPServer(str(port))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(trio.serve_listeners, server.answer, listeners))
            yield server
            nursery.cancel_scope.cancel()

    @asynccontextmanager
    async def connect(self, secret: str, address: str, *, listen: bool = True) -> AsyncGenerator[TCPClient, None]:
        """Connect to ``address``, a port."""
        async with await trio.open_tcp_stream("127.0.0.1", int(address)) as stream:
            yield TCPClient(stream)

    async def dial_fresh(self, secret: str, address: str) -> DialTimes:
        """A socket's connect and one round trip."""
        began_s = time.monotonic()
        async with self.connect(secret, address) as client:
            usable_s = time.monotonic()
            await client.request(b"first")
            return DialTimes((usable_s - began_s) * 1_000, (time.monotonic() - began_s) * 1_000)
