"""One end of a stream in memory. Bytes pass in steps of the connection's task, never in the writer's own step.

So a receiver is never called from within a call that it made itself, as on a real connection. A receiver that pauses,
or that reads slowly, leaves all but ``WINDOW_BYTES`` with the sender, whose `drain` waits.
"""

from collections import deque
from collections.abc import Callable
from typing import Final

import trio

from dep2p.errors import LocalProtocolError, StreamClosedError
from dep2p.host.interface import Connection, EndCallback, ReceiveCallback

WINDOW_BYTES: Final = 262_144
"""Bytes that one end keeps for a reader that has not read them."""
STEP_BYTES: Final = 65_536
"""Bytes that one stream moves before it is another one's turn."""
WRITE_HIGH_BYTES: Final = 262_144
"""`write` waits while more than this is unsent."""


class LoopbackStream:
    """The `dep2p.host.interface.ByteStream` of one end; its docstrings hold here."""

    def __init__(
        self,
        connection: Connection,
        protocol: str,
        *,
        schedule: Callable[["LoopbackStream"], None],
        on_done: Callable[["LoopbackStream"], None],
    ) -> None:
        """``schedule`` asks for a call of `move`; ``on_done`` is called once, when both directions have ended."""
        self.connection = connection
        self.protocol = protocol
        self.other: LoopbackStream
        """The other end; set once, before either end is used."""
        self.is_scheduled: bool = False
        """For the connection: whether a call of `move` is due."""
        self._schedule = schedule
        self._on_done = on_done
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self.sent_bytes: int = 0
        self._write_closed = False
        self._end_passed = False
        self._received: deque[memoryview] = deque()
        self._received_bytes = 0
        self._read_ended = False
        self._is_discarding = False
        self._error: StreamClosedError | None = None
        self._on_data: ReceiveCallback | None = None
        self._on_end: EndCallback | None = None
        self._paused = False
        self._is_done = False
        self._changed = trio.lowlevel.ParkingLot()

    def __repr__(self) -> str:
        return f"<loopback stream {self.protocol}>"

    # Writing

    @property
    def unsent_bytes(self) -> int:
        return self._unsent_bytes

    @property
    def granted_bytes(self) -> int:
        return self.sent_bytes - self.other.waiting_bytes

    @property
    def waiting_bytes(self) -> int:
        """Bytes that have come and that were not read."""
        return self._received_bytes

    @property
    def is_write_closed(self) -> bool:
        return self._write_closed or self._error is not None

    def write_nowait(self, data: bytes | bytearray | memoryview, *, urgent: bool = False) -> None:
        del urgent  # the connection's task is the next step in any case
        if self._error is not None:
            raise StreamClosedError(str(self._error))
        if self._write_closed:
            raise StreamClosedError("the stream is closed for writing")
        if len(data):
            self._unsent.append(memoryview(data if type(data) is bytes else bytes(data)))
            self._unsent_bytes += len(data)
            self._schedule(self)

    async def drain(self, low_bytes: int = 0) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        while self._error is None and self._unsent_bytes > low_bytes:
            await self._changed.park()
        if self._error is not None:
            raise StreamClosedError(str(self._error))

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        self.write_nowait(data)
        if self._unsent_bytes > WRITE_HIGH_BYTES:
            await self.drain(WRITE_HIGH_BYTES // 2)
        else:
            await trio.lowlevel.checkpoint_if_cancelled()

    async def close_write(self) -> None:
        self._close_write()
        await trio.lowlevel.checkpoint_if_cancelled()

    def _close_write(self) -> None:
        if not self._write_closed and self._error is None:
            self._write_closed = True
            self._schedule(self)

    def move(self) -> bool:
        """For the connection: pass on at most `STEP_BYTES`, then the end. True when more can pass at once."""
        if self._error is not None:
            return False
        other = self.other
        room = min(STEP_BYTES, other.room_bytes)
        while self._unsent and room > 0:
            piece = self._unsent.popleft()
            if len(piece) > room:
                self._unsent.appendleft(piece[room:])
                piece = piece[:room]
            room -= len(piece)
            self._unsent_bytes -= len(piece)
            self.sent_bytes += len(piece)
            other.take(piece)
            if self._error is not None:  # the receiver reset the stream  # pyright: ignore[reportUnnecessaryComparison]
                return False
            if other.room_bytes == 0:
                break
        self._changed.unpark_all()
        if self._unsent:
            return other.room_bytes > 0
        if self._write_closed and not self._end_passed:
            self._end_passed = True
            other.take_end()
            self._end_if_done()
        return False

    # Reading

    @property
    def room_bytes(self) -> int:
        """Bytes that this end takes now."""
        if self._is_discarding or (self._on_data is not None and not self._paused):
            return WINDOW_BYTES
        return max(0, WINDOW_BYTES - self._received_bytes)

    def take(self, piece: memoryview) -> None:
        """For the other end: bytes for this one."""
        if self._is_discarding:
            return
        if self._on_data is not None and not self._paused and not self._received:
            self._on_data(piece)
            return
        self._received.append(piece)
        self._received_bytes += len(piece)
        self._changed.unpark_all()

    def take_end(self) -> None:
        """For the other end: no more bytes follow."""
        self._read_ended = True
        self._changed.unpark_all()
        self._report_end()
        self._end_if_done()

    async def read(self, max_bytes: int = 65_536) -> bytes:
        if self._on_data is not None:
            raise LocalProtocolError("read() cannot be used after set_receiver()")
        if max_bytes <= 0:
            return b""
        while not self._received:
            if self._error is not None:
                raise StreamClosedError(str(self._error))
            if self._is_discarding:
                raise StreamClosedError("the stream was closed on this side")
            if self._read_ended:
                return b""
            await self._changed.park()
        await trio.lowlevel.checkpoint_if_cancelled()
        return b"".join(self._taken(max_bytes))

    def _taken(self, bytes_max: int) -> list[memoryview]:
        pieces: list[memoryview] = []
        while self._received and bytes_max > 0:
            piece = self._received.popleft()
            if len(piece) > bytes_max:
                self._received.appendleft(piece[bytes_max:])
                piece = piece[:bytes_max]
            bytes_max -= len(piece)
            self._received_bytes -= len(piece)
            pieces.append(piece)
        self._let_other_move()
        return pieces

    def _let_other_move(self) -> None:
        other = self.other
        if other.unsent_bytes and self._error is None:
            self._schedule(other)

    def set_receiver(self, on_data: ReceiveCallback, on_end: EndCallback) -> None:
        self._on_data, self._on_end = on_data, on_end
        self._push_received()

    def pause_receiving(self) -> None:
        self._paused = True

    def resume_receiving(self) -> None:
        self._paused = False
        self._push_received()

    def _push_received(self) -> None:
        while self._received and self._on_data is not None and not self._paused:
            for piece in self._taken(STEP_BYTES):
                self._on_data(piece)
        self._let_other_move()
        self._report_end()

    def _report_end(self) -> None:
        if self._on_end is None or self._received:
            return
        if self._error is not None or self._read_ended:
            on_end, self._on_end = self._on_end, None
            on_end(self._error)

    # The end

    async def close(self) -> None:
        self._close_write()
        self._is_discarding = True
        self._on_end = None
        self._received.clear()
        self._received_bytes = 0
        self._let_other_move()
        self._changed.unpark_all()
        await trio.lowlevel.checkpoint_if_cancelled()

    def reset(self) -> None:
        if self._error is None and not self._is_done:
            self._on_end = None  # the caller of reset knows
            self.fail(StreamClosedError("the stream was reset on this side"))
            self.other.fail(StreamClosedError("the peer reset the stream"))

    def fail(self, error: StreamClosedError) -> None:
        """End both directions of this end. Idempotent."""
        if self._error is not None or self._is_done:
            return
        self._error = error
        self._unsent.clear()
        self._received.clear()
        self._unsent_bytes = self._received_bytes = 0
        self._changed.unpark_all()
        self._report_end()
        self._end_if_done()

    def _end_if_done(self) -> None:
        if not self._is_done and (self._error is not None or (self._end_passed and self._read_ended)):
            self._is_done = True
            self._on_done(self)
