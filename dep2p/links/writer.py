"""The sending half of a link: frames of many tasks become few writes (docs/decisions/0005-links-and-batching.md)."""

from collections import deque
from collections.abc import Callable
from typing import Final

import trio
from outcome import Error, Value

from dep2p.concurrency.wait_queue import Sleeper, suspend
from dep2p.errors import StreamClosedError
from dep2p.host.interface import ByteStream
from dep2p.limits import Limits

_JOIN_BYTES: Final = 262_144
"""About the bytes up to which pieces are joined; also the bytes in the stream above which the writer waits."""
_LOW_BYTES: Final = 65_536
_OWN_WRITE_BYTES: Final = 32_768
"""Bytes of a piece from which on it is written by itself: a second write is cheaper than copying it."""

YIELD_BYTES: Final = 65_536
"""Bytes that wait, after which a task that only sends lets the writer run."""


class LinkOutput:
    """Frames that wait for the one writer task of a link, bounded in items and bytes.

    `put` takes a frame at once, whatever the bounds: callers that can wait ask `is_full` and await `wait_for_space`
    first. The writer runs once per scheduler tick, however many frames were put meanwhile.
    """

    __slots__ = (
        "_bytes_max",
        "_closed",
        "_items_max",
        "_on_low",
        "_pieces",
        "_promised_bytes",
        "_promised_items",
        "_sleeper",
        "_stream",
        "_waiters",
        "items",
        "waiting_bytes",
        "writes",
    )

    def __init__(self, stream: ByteStream, limits: Limits, on_low: Callable[[], None]) -> None:
        """``on_low`` is called by the writer whenever nothing waits any more."""
        self._stream = stream
        self._items_max = limits.link_out_items_max
        self._bytes_max = limits.link_out_bytes_max
        self._on_low = on_low
        self._pieces: list[bytes | memoryview] = []
        self._waiters: deque[tuple[trio.lowlevel.Task, int]] = deque()
        self._promised_items = 0  # admitted callers that have not put their frames yet
        self._promised_bytes = 0
        self._sleeper = Sleeper()
        self._closed: StreamClosedError | None = None
        self.items: int = 0
        self.waiting_bytes: int = 0
        self.writes: int = 0
        """Writes to the stream so far: frames per write show how well batching works."""

    @property
    def is_full(self) -> bool:
        """Whether the next caller must wait: a bound is reached, admitted callers included, or others wait."""
        return (
            self.items + self._promised_items >= self._items_max
            or self.waiting_bytes + self._promised_bytes >= self._bytes_max
            or bool(self._waiters)
        )

    @property
    def is_over_bounds(self) -> bool:
        """Whether frames that could not wait are over a bound."""
        return self.items >= self._items_max or self.waiting_bytes >= self._bytes_max

    def put(self, pieces: tuple[bytes | memoryview, ...], size: int) -> None:
        """Take one frame in pieces of ``size`` bytes together. Raises StreamClosedError."""
        if self._closed is not None:
            raise StreamClosedError(str(self._closed))
        self._pieces += pieces
        self.items += 1
        self.waiting_bytes += size
        if self._sleeper.task is not None:
            self._sleeper.wake()

    def put_urgent(self, frame: bytes) -> None:
        """Send a small frame from this very step if nothing is in front of it, else like `put`."""
        if self._sleeper.task is not None and not self._pieces and not self._stream.unsent_bytes:
            self.writes += 1
            self._stream.write_nowait(frame, urgent=True)
        else:
            self.put((frame,), len(frame))

    async def wait_for_space(self, size: int) -> None:
        """Wait in line until a frame of ``size`` bytes may be put. The caller puts it in the same step, or nothing.

        Raises StreamClosedError.
        """
        if not self.is_full:
            return
        waiter = (trio.lowlevel.current_task(), size)
        self._waiters.append(waiter)
        await suspend(lambda: self._waiters.remove(waiter))
        self._promised_items -= 1
        self._promised_bytes -= size
        if self._waiters:
            self._sleeper.wake()  # this caller may put nothing: the writer admits the next ones then

    def close(self, error: StreamClosedError) -> None:
        """Take no more frames; `run` still writes the waiting ones, and then returns. Idempotent."""
        if self._closed is None:
            self._closed = error
            while self._waiters:
                trio.lowlevel.reschedule(self._waiters.popleft()[0], Error(StreamClosedError(str(error))))
            self._sleeper.wake()

    def discard(self) -> None:
        """Drop waiting frames: the link is over."""
        self._pieces = []
        self.items = self.waiting_bytes = 0

    async def run(self) -> None:
        """Write until `close`, and until everything is handed over. Raises StreamClosedError when the stream ends."""
        stream = self._stream
        while True:
            if not self._pieces:
                if self._closed is not None:
                    return
                self._admit()
                await self._sleeper.wait()
                continue
            await self._write_all()
            self._admit()
            if stream.unsent_bytes > _JOIN_BYTES:
                await stream.drain(_LOW_BYTES)
            if not self._pieces:
                self._on_low()

    async def _write_all(self) -> None:
        pieces, self._pieces = self._pieces, []
        self.items = 0
        if self.waiting_bytes <= _JOIN_BYTES:
            self.waiting_bytes = 0
            self.writes += 1
            self._stream.write_nowait(b"".join(pieces), urgent=True)
        else:
            await self._write_much(pieces)

    async def _write_much(self, pieces: list[bytes | memoryview]) -> None:
        joined: list[bytes | memoryview] = []
        joined_bytes = 0
        for piece in pieces:
            size = len(piece)
            if joined and (size >= _OWN_WRITE_BYTES or joined_bytes + size > _JOIN_BYTES):
                await self._write(b"".join(joined))
                joined.clear()
                joined_bytes = 0
            if size >= _OWN_WRITE_BYTES:
                await self._write(piece)
            else:
                joined.append(piece)
                joined_bytes += size
        if joined:
            await self._write(b"".join(joined))

    async def _write(self, data: bytes | memoryview) -> None:
        self.writes += 1
        self.waiting_bytes = max(0, self.waiting_bytes - len(data))
        self._stream.write_nowait(data)
        if self._stream.unsent_bytes > _JOIN_BYTES:
            await self._stream.drain(_LOW_BYTES)

    def _admit(self) -> None:
        waiters = self._waiters
        while (
            waiters
            and self.items + self._promised_items < self._items_max
            and self.waiting_bytes + self._promised_bytes < self._bytes_max
        ):
            task, size = waiters.popleft()
            self._promised_items += 1
            self._promised_bytes += size
            trio.lowlevel.reschedule(task, Value(None))
