"""One yamux stream without I/O: its windows, its unsent and received bytes, and its reader."""

import logging
from collections import deque
from typing import Protocol

from dep2p.errors import LocalProtocolError, StreamClosedError
from dep2p.host.interface import EndCallback, ReceiveCallback
from dep2p.host.resources.scopes import Account
from dep2p.host.yamux.frames import WINDOW_INITIAL_BYTES

logger: logging.Logger = logging.getLogger("dep2p.host")

RECEIVE_WINDOW_MAX_BYTES = 16_777_216
"""Bytes to which one stream's receive window grows at most, as in go-yamux and rust-yamux: 80 MB/s over 200 ms."""
RECEIVE_WINDOW_NEAR_BYTES = 1_048_576
"""Bytes to which it grows whatever the round trip takes; beyond that the reader has to take half of it within two."""
WINDOW_GROWTH_BUDGET_BYTES = 33_554_432
"""Bytes by which all streams of a connection may grow their windows together."""
BUFFERED_BYTES_MAX = 67_108_864
"""Received bytes that wait for their readers, of all streams of a connection: 256 streams with full initial windows."""
DISCARD_BYTES_MAX = 262_144
"""Bytes that a peer may send to a stream that was closed here before the stream is reset."""
SLOW_CREDIT_BYTES = 16_384
"""Bytes taken from which on credit is granted though half of the window is not used up,"""
SLOW_CREDIT_S = 1.0
"""when so many seconds have passed: it shows the sender on a slow link that its bytes arrive."""
_JOIN_BYTES_MAX = 4_096  # writes up to this size are joined; larger ones are kept as they are, without a copy


class _Core(Protocol):
    """The session as its streams see it (`dep2p.host.yamux.session.YamuxCore`)."""

    def schedule(self, stream: "StreamState") -> None: ...
    def send_fin(self, stream: "StreamState") -> None: ...
    def send_reset(self, stream: "StreamState", count: str = "resets_out") -> None: ...
    def send_credit(self, stream: "StreamState", *, may_grow: bool) -> None: ...
    def now_s(self) -> float: ...
    def buffered(self, stream: "StreamState", size: int) -> bool: ...
    def unbuffered(self, stream: "StreamState", size: int) -> None: ...
    def charge_to(self, stream: "StreamState", account: Account) -> None: ...

    counts: dict[str, int]
    unsent_bytes: int


class StreamState:
    """The state of one stream. Subclasses override `on_sent` and `on_readable` to wake tasks."""

    __slots__ = (
        "_on_data",
        "_on_end",
        "_queue",
        "_taken",
        "account",
        "awaits_ack",
        "buffer",
        "consumed_bytes",
        "core",
        "credited_at_s",
        "discarded_bytes",
        "error",
        "fin_sent",
        "granted_bytes",
        "id",
        "is_discarding",
        "is_paused",
        "is_scheduled",
        "read_ended",
        "receive_credit",
        "receive_window",
        "send_window",
        "unsent_bytes",
        "write_ended",
    )

    def __init__(self, core: _Core, stream_id: int) -> None:
        self.core: _Core = core
        self.id: int = stream_id
        self.error: StreamClosedError | None = None
        self.awaits_ack: bool = False
        self.account: Account | None = None
        """The account of its unread bytes, when that is not the connection's."""
        # sending
        self.send_window: int = WINDOW_INITIAL_BYTES
        self.granted_bytes: int = 0
        """Room that the peer has granted beyond the initial window."""
        self.unsent_bytes: int = 0
        self.is_scheduled: bool = False
        self.write_ended: bool = False
        self.fin_sent: bool = False
        self._queue: deque[bytes | bytearray] = deque()
        self._taken = 0  # bytes of the first chunk that were sent
        # receiving
        self.receive_window: int = WINDOW_INITIAL_BYTES
        self.receive_credit: int = WINDOW_INITIAL_BYTES
        self.consumed_bytes: int = 0
        self.credited_at_s: float = -1.0
        """When credit was granted last, or its first bytes were taken; negative before."""
        self.buffer: bytearray = bytearray()
        self.read_ended: bool = False
        self.is_paused: bool = False
        self.is_discarding: bool = False
        self.discarded_bytes: int = 0
        self._on_data: ReceiveCallback | None = None
        self._on_end: EndCallback | None = None

    def on_sent(self) -> None:
        """Note that bytes were handed on for sending, or that the stream failed."""

    def on_readable(self) -> None:
        """Note that bytes, the peer's half-close or a failure can be read."""

    # Sending

    @property
    def sent_bytes(self) -> int:
        """Bytes that were handed on for sending: those for which the peer's window was used."""
        return WINDOW_INITIAL_BYTES + self.granted_bytes - self.send_window

    @property
    def moved_bytes(self) -> int:
        """Bytes that were sent, and those that the peer has made room for: what it grants beyond all that it may have
        read and the widest window says nothing of its reading."""
        return self.sent_bytes + min(self.granted_bytes, self.sent_bytes + RECEIVE_WINDOW_MAX_BYTES)

    def enqueue(self, data: bytes | bytearray | memoryview) -> None:
        """Take bytes for sending. Raises StreamClosedError."""
        if self.write_ended or self.error is not None:
            raise self.write_error()
        if type(data) is memoryview:
            data = bytes(data)  # its length may be counted in larger items
        size = len(data)
        if not size:
            return
        queue = self._queue
        if size <= _JOIN_BYTES_MAX:
            last = queue[-1] if queue else None
            if type(last) is bytearray and len(last) < 65_536:
                last += data
            else:
                queue.append(bytearray(data))
        else:
            queue.append(data if type(data) is bytes else bytes(data))
        self.unsent_bytes += size
        self.core.unsent_bytes += size
        if not self.is_scheduled and self.send_window:
            self.core.schedule(self)

    def write_error(self) -> StreamClosedError:
        """Return why nothing can be written."""
        return StreamClosedError("the stream is closed for writing" if self.error is None else str(self.error))

    def take_into(self, out: memoryview) -> None:
        """Move the next ``len(out)`` unsent bytes to ``out``; the caller has checked them and the window."""
        queue, taken, position, size = self._queue, self._taken, 0, len(out)
        self.unsent_bytes -= size
        self.core.unsent_bytes -= size
        self.send_window -= size
        while position < size:
            chunk = queue[0]
            part = min(len(chunk) - taken, size - position)
            if part == len(chunk):
                out[position : position + part] = chunk
            else:
                with memoryview(chunk) as view:
                    out[position : position + part] = view[taken : taken + part]
            position += part
            taken += part
            if taken == len(chunk):
                queue.popleft()
                taken = 0
        self._taken = taken

    def end_writing(self) -> None:
        """Half-close: FIN goes out after what is queued. Idempotent."""
        if self.write_ended or self.error is not None:
            return
        self.write_ended = True
        if not self.unsent_bytes:
            self.core.send_fin(self)

    # Receiving

    def deliver(self, data: memoryview) -> None:
        """Take received bytes, already checked against the window."""
        if self._on_data is not None and not self.is_paused:
            if self._push(data) and self.error is None:
                self.consume(len(data))
        elif self.is_discarding:
            self._discard(len(data))
        elif self.core.buffered(self, len(data)):
            self.buffer += data
            self.on_readable()
        else:
            self.reset_state("the connection holds too many unread bytes", "resets_buffer_full")

    def _push(self, data: memoryview) -> bool:
        on_data = self._on_data
        if on_data is None:
            return False
        try:
            on_data(data)
        except Exception:
            self.core.counts["receiver_failures"] += 1
            logger.exception("the receiver of stream %d failed; the stream is reset", self.id)
            self.reset_state("the receiver failed")
            return False
        return True

    def _discard(self, size: int) -> None:
        self.discarded_bytes += size
        if self.discarded_bytes > DISCARD_BYTES_MAX // 2:
            self.reset_state("the peer sends to a stream that was closed here", "resets_no_reader")

    def consume(self, size: int) -> None:
        """Note that the reader took ``size`` bytes: grant credit once half of the window was taken, or a little after
        a second."""
        consumed = self.consumed_bytes = self.consumed_bytes + size
        if consumed < SLOW_CREDIT_BYTES or self.read_ended or self.error is not None:
            return
        if consumed * 2 >= self.receive_window:
            self.core.send_credit(self, may_grow=True)
        else:
            now = self.core.now_s()
            if self.credited_at_s < 0:
                self.credited_at_s = now
            elif now - self.credited_at_s >= SLOW_CREDIT_S:
                self.core.send_credit(self, may_grow=False)

    def take_received(self, size_max: int) -> bytes:
        """Return up to ``size_max`` buffered bytes, for pull mode."""
        buffer = self.buffer
        if size_max >= len(buffer):
            data = bytes(buffer)
            self.buffer = bytearray()
        else:
            with memoryview(buffer) as view:
                data = bytes(view[:size_max])
            del buffer[:size_max]
        self.core.unbuffered(self, len(data))
        self.consume(len(data))
        return data

    def set_receiver(self, on_data: ReceiveCallback, on_end: EndCallback) -> None:
        """Switch to push mode. Raises LocalProtocolError when there is a receiver already."""
        if self._on_data is not None:
            raise LocalProtocolError("the stream has a receiver already")
        self._on_data, self._on_end = on_data, on_end
        self._push_buffered()

    @property
    def has_receiver(self) -> bool:
        return self._on_data is not None

    def pause_receiving(self) -> None:
        """Push mode: keep what arrives, within the window, and grant no more."""
        self.is_paused = True

    def resume_receiving(self) -> None:
        """Undo `pause_receiving`."""
        if self.is_paused:
            self.is_paused = False
            if self._on_data is not None:
                self._push_buffered()

    def _push_buffered(self) -> None:
        while self.buffer and not self.is_paused:
            data = self.buffer
            self.buffer = bytearray()
            self.core.unbuffered(self, len(data))
            if not self._push(memoryview(data)):
                return
            self.consume(len(data))
        if (self.read_ended and not self.is_paused) or self.error is not None:
            self._finish_receiving()

    def end_reading(self) -> None:
        """Note that the peer has half-closed."""
        self.read_ended = True
        if not self.buffer and not self.is_paused:
            self._finish_receiving()
        self.on_readable()

    def _finish_receiving(self) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            try:
                on_end(None if self.read_ended else self.error)
            except Exception:
                self.core.counts["receiver_failures"] += 1
                logger.exception("the end callback of stream %d failed", self.id)

    def discard_input(self) -> None:
        """Drop what is buffered and what still comes; a peer that sends on and on is reset."""
        self.is_discarding = True
        self.core.unbuffered(self, len(self.buffer))
        self.buffer = bytearray()
        self.is_paused = False
        if self._on_data is not None:
            self._on_data = None
            if self.read_ended:
                self._finish_receiving()

    # Ending

    def reset_state(self, reason: str, count: str = "resets_out") -> None:
        """Abort both directions, telling the peer. Idempotent."""
        if self.error is None:
            self.core.send_reset(self, count)
            self.fail(StreamClosedError(reason))

    def fail(self, error: StreamClosedError) -> None:
        """End both directions without telling the peer; what is buffered either way is dropped. Idempotent."""
        if self.error is None:
            self.core.unbuffered(self, len(self.buffer))
            self.buffer = bytearray()
            self.read_ended = False
            self.connection_lost(error)

    def connection_lost(self, error: StreamClosedError) -> None:
        """`fail`, but what came of a stream that the peer had ended is whole and can still be read."""
        if self.error is not None:
            return
        self.error = error
        self._queue.clear()
        self.core.unsent_bytes -= self.unsent_bytes
        self.unsent_bytes = 0
        if not self.read_ended:
            self.buffer = bytearray()
        if not self.buffer:
            self._finish_receiving()
        self.on_sent()
        self.on_readable()
