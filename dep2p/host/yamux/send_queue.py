"""The send queue of a yamux session: control frames first, then one quantum of each stream in turn."""

from collections import deque
from collections.abc import Callable

from dep2p.host.yamux.frames import DATA, FIN, HEADER, HEADER_BYTES, VERSION, WINDOW_UPDATE, encode_header
from dep2p.host.yamux.stream_state import StreamState

CONTROL_BYTES_MAX = 262_144
"""Control frames that wait because the peer does not read."""
QUANTUM_BYTES = 65_507
"""Bytes that one stream may send before the next one's turn: with its header exactly one full Noise message."""
FRESH_BYTES_MAX = 16_384
"""A stream that becomes ready with no more than this goes before the streams that have been sending all along."""
_FRAGMENT_BYTES_MIN = 1_024  # a shorter rest of a buffer is left empty rather than filled with a fragment


def _nothing_waits() -> None:
    """In the place of a callback of a closed queue, which shall not keep its session."""


def _nothing_ends(_stream: StreamState) -> None:
    """The same."""


class YamuxSendQueue:
    """The frames to send of one session. ``on_output`` is called when there is something where there was nothing,
    ``on_fin`` when a stream's FIN has left."""

    __slots__ = ("_control", "_fresh", "_on_fin", "_on_output", "_ring", "bytes_out", "frames_out", "is_closed")

    def __init__(self, on_output: Callable[[], None], on_fin: Callable[[StreamState], None]) -> None:
        self.frames_out: int = 0
        self.bytes_out: int = 0
        self.is_closed: bool = False
        self._on_output = on_output
        self._on_fin = on_fin
        self._control = bytearray()
        self._fresh: deque[StreamState] = deque()
        self._ring: deque[StreamState] = deque()

    @property
    def has_output(self) -> bool:
        return bool(self._control or self._ring or self._fresh)

    @property
    def control_bytes(self) -> int:
        """Bytes of the frames without a body that wait."""
        return len(self._control)

    @property
    def has_data(self) -> bool:
        """True when bytes of a stream wait to be sent that the peer's window allows."""
        return bool(self._ring or self._fresh)

    def send_control(self, kind: int, flags: int, stream_id: int, length: int) -> bool:
        """Queue a frame without a body; False when too many wait already, because the peer does not read."""
        if self.is_closed:
            return True
        control = self._control
        if len(control) >= CONTROL_BYTES_MAX:
            return False
        was_silent = not (control or self._ring or self._fresh)
        control += encode_header(kind, flags, stream_id, length)
        if was_silent:
            self._on_output()
        return True

    def take_control(self) -> bytes:
        """Take all queued control frames, to go before the bytes that the caller sends next."""
        if not self._control:
            return b""
        frames = bytes(self._control)
        self._control.clear()
        self.frames_out += len(frames) // HEADER_BYTES
        self.bytes_out += len(frames)
        return frames

    def count_sent(self, size: int) -> None:
        """Count a frame of ``size`` bytes that was sent without `fill`."""
        self.frames_out += 1
        self.bytes_out += size

    def schedule(self, stream: StreamState) -> None:
        """Give the stream a turn: it has bytes to send and a window for them."""
        if self.is_closed or stream.is_scheduled:
            return
        was_silent = not (self._control or self._ring or self._fresh)
        stream.is_scheduled = True
        (self._fresh if stream.unsent_bytes <= FRESH_BYTES_MAX else self._ring).append(stream)
        if was_silent:
            self._on_output()

    def unschedule(self, stream: StreamState) -> None:
        """Take back the stream's turn."""
        if stream.is_scheduled:
            (self._fresh if stream in self._fresh else self._ring).remove(stream)
            stream.is_scheduled = False

    def close(self) -> None:
        """Drop everything, now and later."""
        self.is_closed = True
        self._on_output, self._on_fin = _nothing_waits, _nothing_ends
        self._control.clear()
        self._fresh.clear()
        self._ring.clear()

    def fill(self, out: memoryview) -> int:
        """Write the next frames to the start of ``out``; return how many bytes, 0 when nothing can be sent now."""
        position, room = 0, len(out)
        control = self._control
        if control:
            position = min(len(control), room) // HEADER_BYTES * HEADER_BYTES
            out[:position] = control[:position]
            del control[:position]
            self.frames_out += position // HEADER_BYTES
        fresh, ring = self._fresh, self._ring
        fresh_until = room // 2 if ring else room  # so that small messages cannot starve bulk streams
        while ring or fresh:
            left = room - position - HEADER_BYTES
            queue = fresh if fresh and (position < fresh_until or not ring) else ring
            stream = queue[0]
            size = min(stream.unsent_bytes, stream.send_window, QUANTUM_BYTES)
            if left < size:
                if left < _FRAGMENT_BYTES_MIN:
                    break
                size = left
            queue.popleft()
            stream.is_scheduled = False
            start = position + HEADER_BYTES
            stream.take_into(out[start : start + size])
            HEADER.pack_into(out, position, VERSION, DATA, 0, stream.id, size)
            position = start + size
            self.frames_out += 1
            if stream.write_ended and not stream.unsent_bytes:
                # FIN in a frame of its own: js-libp2p takes the flags of a DATA frame before its body, and drops that.
                if room - position >= HEADER_BYTES:
                    HEADER.pack_into(out, position, VERSION, WINDOW_UPDATE, FIN, stream.id, 0)
                    position += HEADER_BYTES
                    self.frames_out += 1
                else:
                    control += encode_header(WINDOW_UPDATE, FIN, stream.id, 0)
                self._on_fin(stream)
            elif stream.unsent_bytes and stream.send_window:
                stream.is_scheduled = True
                ring.append(stream)
            stream.on_sent()
        self.bytes_out += position
        return position
