"""A TCP proxy that breaks links on purpose: for tests of real programs over loopback.

::

    async with FaultProxy.open() as proxy:
        port = await proxy.forward("127.0.0.1", real_port)   # programs connect to this port instead
        proxy.cut()          # connections are reset, new ones refused
        proxy.hold()         # or: everything stays open, and nothing passes
        proxy.delay_s = 0.1  # or: everything comes later
        proxy.bytes_per_s = 10_000
        proxy.resume()       # nothing of all that any more
"""

import socket
import struct
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import trio

_CHUNK_BYTES = 65_536
_QUEUE_CHUNKS_MAX = 64


class _ProxyPipe:
    """One connection, both ways."""

    def __init__(self, near: trio.SocketStream, far: trio.SocketStream) -> None:
        self.near = near
        self.far = far
        self.scope = trio.CancelScope()


class FaultProxy:
    """Forwards connections of loopback to loopback, with faults that apply to all of them. Made by :meth:`open`.

    Each direction of a connection keeps at most 4 MiB on its way; a sender that is faster is held back, as on a wire.
    """

    def __init__(self, nursery: trio.Nursery) -> None:
        self.delay_s: float = 0.0
        """Seconds by which each byte arrives later, in order; for bytes that are read from now on."""
        self.bytes_per_s: float = 0.0
        """Bytes a second at most in each direction of each connection; 0 for no limit."""
        self.counters: Counter[str] = Counter()
        """Counts named ``connections``, ``refused``, ``cut`` and ``bytes``."""
        self._nursery = nursery
        self._pipes: dict[_ProxyPipe, None] = {}
        self._is_cut = False
        self._flowing = trio.Event()
        self._flowing.set()

    @classmethod
    @asynccontextmanager
    async def open(cls) -> AsyncGenerator["FaultProxy", None]:
        """A proxy without ports yet; leaving the block closes everything."""
        async with trio.open_nursery() as nursery:
            proxy = cls(nursery)
            yield proxy
            nursery.cancel_scope.cancel()

    async def forward(self, host: str, port: int, *, listen_host: str = "127.0.0.1", listen_port: int = 0) -> int:
        """Listen on a port (0: any free one) and carry its connections to ``host``, ``port``; return the port.

        Raises ``OSError`` when it cannot listen.
        """
        [listener] = await trio.open_tcp_listeners(listen_port, host=listen_host)
        bound: int = listener.socket.getsockname()[1]

        async def carry(near: trio.SocketStream) -> None:
            await self._carry(near, host, port)

        self._nursery.start_soon(trio.serve_listeners, carry, [listener])
        return bound

    @property
    def connections(self) -> int:
        """Connections that are open now."""
        return len(self._pipes)

    # Faults

    def cut(self) -> None:
        """Reset every connection, and refuse new ones, until `resume`."""
        self._is_cut = True
        self.counters["cut"] += len(self._pipes)
        for pipe in list(self._pipes):
            _reset(pipe.near)
            _reset(pipe.far)
            pipe.scope.cancel()

    def hold(self) -> None:
        """Let nothing pass, with every connection still open, until `resume`: as an unplugged cable."""
        if self._flowing.is_set():
            self._flowing = trio.Event()

    def resume(self) -> None:
        """Undo `cut`, `hold`, `delay_s` and `bytes_per_s`."""
        self._is_cut = False
        self.delay_s = self.bytes_per_s = 0.0
        self._flowing.set()

    # Carrying

    async def _carry(self, near: trio.SocketStream, host: str, port: int) -> None:
        if self._is_cut:
            self.counters["refused"] += 1
            _reset(near)
            return
        try:
            far = await trio.open_tcp_stream(host, port)
        except OSError:
            self.counters["refused"] += 1
            _reset(near)
            return
        pipe = _ProxyPipe(near, far)
        self._pipes[pipe] = None
        self.counters["connections"] += 1
        try:
            with pipe.scope:
                async with near, far, trio.open_nursery() as nursery:
                    nursery.start_soon(self._pump, near, far, pipe)
                    nursery.start_soon(self._pump, far, near, pipe)
        finally:
            del self._pipes[pipe]

    async def _pump(self, source: trio.SocketStream, sink: trio.SocketStream, pipe: _ProxyPipe) -> None:
        """Read, wait as the faults demand, write; a half-close passes, an error ends both ways."""
        send, receive = trio.open_memory_channel[tuple[float, bytes]](_QUEUE_CHUNKS_MAX)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write, receive, sink)
                async with send:
                    while data := await source.receive_some(_CHUNK_BYTES):
                        await send.send((trio.current_time() + self.delay_s, data))
        except* (trio.BrokenResourceError, trio.ClosedResourceError):
            pipe.scope.cancel()

    async def _write(self, receive: trio.MemoryReceiveChannel[tuple[float, bytes]], sink: trio.SocketStream) -> None:
        async with receive:
            async for due, data in receive:
                await trio.sleep_until(due)
                await self._flowing.wait()
                await sink.send_all(data)
                self.counters["bytes"] += len(data)
                if self.bytes_per_s:
                    await trio.sleep(len(data) / self.bytes_per_s)
        await sink.send_eof()


def _reset(stream: trio.SocketStream) -> None:
    """Close the stream so that the other end gets a reset, not an end."""
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stream.socket.close()
