"""Streams of the in-memory network: windows, half-close, resets."""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

import trio

from dep2p.errors import StreamClosedError
from dep2p.host.interface import EndCallback, ReceiveCallback

if TYPE_CHECKING:
    from dep2p.testing.memory.network import MemoryConnection

WINDOW_BYTES: Final = 262_144
_CHUNK_BYTES: Final = 65_536
_CREDIT_BYTES: Final = WINDOW_BYTES // 2
"""Window is given back in pieces of at least this size, as Yamux does: else it falls apart into ever smaller ones."""
_WRITE_HIGH_BYTES: Final = 262_144


class MemoryStream:
    """One end of a stream; implements ``dep2p.host.interface.ByteStream``."""

    def __init__(self, connection: "MemoryConnection", protocol: str) -> None:
        self._connection = connection
        self._protocol = protocol
        self.twin: MemoryStream
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._window_bytes = WINDOW_BYTES
        self._consumed_bytes = 0  # and not given back yet
        self._end_wanted = False
        self._write_closed = False
        self._inbox = bytearray()
        self._read_ended = False
        self._error: StreamClosedError | None = None
        self._on_data: ReceiveCallback | None = None
        self._on_end: EndCallback | None = None
        self._end_told = False
        self._paused = False
        self._dropping = False
        self._lot = trio.lowlevel.ParkingLot()

    @property
    def connection(self) -> "MemoryConnection":
        return self._connection

    @property
    def protocol(self) -> str:
        return self._protocol

    @property
    def unsent_bytes(self) -> int:
        return self._unsent_bytes

    @property
    def is_write_closed(self) -> bool:
        return self._write_closed or self._error is not None

    def write_nowait(self, data: bytes | bytearray | memoryview, *, urgent: bool = False) -> None:
        if self._error is not None:
            raise self._error
        if self._write_closed:
            raise StreamClosedError("this side of the stream is closed for writing")
        if len(data):
            self._unsent.append(memoryview(bytes(data)))
            self._unsent_bytes += len(data)
            self._flush()

    def _flush(self) -> None:
        while self._unsent and self._window_bytes > 0:
            data = self._next_chunk(min(self._window_bytes, _CHUNK_BYTES))
            self._window_bytes -= len(data)
            self._unsent_bytes -= len(data)
            self._post(partial(self.twin.take, data))
        if self._end_wanted and not self._unsent:
            self._end_wanted = False
            self._post(lambda: self.twin.take_end())
        self._lot.unpark_all()

    def _next_chunk(self, room: int) -> bytes:
        pieces: list[memoryview] = []
        while self._unsent and room > 0:
            piece = self._unsent.popleft()
            if len(piece) > room:
                self._unsent.appendleft(piece[room:])
                piece = piece[:room]
            pieces.append(piece)
            room -= len(piece)
        return b"".join(pieces)

    def _post(self, deliver: Callable[[], None]) -> None:
        self._connection.post(deliver)

    async def drain(self, low_bytes: int = 0) -> None:
        await trio.lowlevel.checkpoint()
        while self._unsent_bytes > low_bytes:
            if self._error is not None:
                raise self._error
            await self._lot.park()
        if self._error is not None:
            raise self._error

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        self.write_nowait(data)
        await self.drain(_WRITE_HIGH_BYTES)

    async def read(self, max_bytes: int = 65_536) -> bytes:
        await trio.lowlevel.checkpoint()
        while not self._inbox:
            if self._error is not None:
                raise self._error
            if self._read_ended:
                return b""
            await self._lot.park()
        data = bytes(self._inbox[:max_bytes])
        del self._inbox[:max_bytes]
        self._credit(len(data))
        return data

    def _credit(self, count: int) -> None:
        self._consumed_bytes += count
        if self._consumed_bytes >= _CREDIT_BYTES:
            consumed, self._consumed_bytes = self._consumed_bytes, 0
            self._post(lambda: self.twin.grant(consumed))

    def grant(self, count: int) -> None:
        """The other end consumed ``count`` bytes."""
        self._window_bytes += count
        self._flush()

    def take(self, data: bytes) -> None:
        """Bytes arrived from the other end."""
        if self._error is not None:
            return
        if self._dropping:
            self._credit(len(data))
            return
        if self._on_data is not None and not self._paused:
            self._credit(len(data))
            self._on_data(data)
            return
        self._inbox += data
        self._lot.unpark_all()

    def take_end(self) -> None:
        """The other end half-closed."""
        self._read_ended = True
        self._lot.unpark_all()
        self._tell_end()
        self._forget_if_done()

    def set_receiver(self, on_data: ReceiveCallback, on_end: EndCallback) -> None:
        self._on_data = on_data
        self._on_end = on_end
        self._push_inbox()

    def pause_receiving(self) -> None:
        self._paused = True

    def resume_receiving(self) -> None:
        self._paused = False
        self._push_inbox()

    def _push_inbox(self) -> None:
        while self._inbox and self._on_data is not None and not self._paused:
            data = bytes(self._inbox[:_CHUNK_BYTES])
            del self._inbox[:_CHUNK_BYTES]
            self._credit(len(data))
            self._on_data(data)
        self._tell_end()

    def _tell_end(self) -> None:
        if self._on_end is None or self._end_told:
            return
        if self._error is not None:
            self._end_told = True
            self._on_end(self._error)
        elif self._read_ended and not self._inbox:
            self._end_told = True
            self._on_end(None)

    async def close_write(self) -> None:
        await trio.lowlevel.checkpoint()
        self._close_write_nowait()

    def _close_write_nowait(self) -> None:
        if self._write_closed or self._error is not None:
            return
        self._write_closed = True
        self._end_wanted = True
        self._flush()
        self._forget_if_done()

    async def close(self) -> None:
        self._close_write_nowait()
        self._dropping = True
        self._end_told = True
        if self._inbox:
            self._credit(len(self._inbox))
            self._inbox.clear()
        await trio.lowlevel.cancel_shielded_checkpoint()

    def reset(self) -> None:
        if self._error is None:
            self._post(lambda: self.twin.fail(StreamClosedError("the peer reset the stream")))
            self._end_told = True  # who resets knows
            self.fail(StreamClosedError("the stream was reset on this side"))

    def fail(self, error: StreamClosedError) -> None:
        """End both directions with an error. Idempotent."""
        if self._error is not None:
            return
        self._error = error
        self._unsent.clear()
        self._unsent_bytes = 0
        self._inbox.clear()
        self._lot.unpark_all()
        self._tell_end()
        self._connection.streams.pop(self, None)

    def _forget_if_done(self) -> None:
        if self._write_closed and self._read_ended:
            self._connection.streams.pop(self, None)
