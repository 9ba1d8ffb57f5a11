"""A logical stream of items, one libp2p stream each (docs/spec/messaging.md). Pure: both sides run this machine.

The opener sends REQUEST (name, headers, first data), the other side accepts by an empty RESPONSE or refuses by ERROR.
Then both send items, each in one or more STREAM_DATA parts of which the last has FINAL, and end by STREAM_END.
CANCEL says that its sender reads no more items; ERROR aborts both ways. All frames carry the one req_id of the REQUEST.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from dep2p.errors import (
    ErrorCode,
    LocalProtocolError,
    MessageTooLargeError,
    ProtocolError,
    RequestTimeoutError,
    WireError,
    error_from_wire,
)
from dep2p.limits import Limits
from dep2p.protocols.timing.stall import StallTimer
from dep2p.protocols.wire.compression import Compression, Zstd
from dep2p.protocols.wire.frame import (
    COMPRESSED,
    FINAL,
    HEADERS,
    Frame,
    FrameType,
    decode_error,
    encode_error,
    encode_frame,
    encode_header,
)
from dep2p.protocols.wire.headers import HeaderKey, HeaderMap, header_uint
from dep2p.protocols.wire.payload import PayloadReader, compressed_body, required_name

REQ_ID: Final = 1
PART_BYTES: Final = 262_144
"""Bytes of a part. Larger items are sent in parts, so that the other side never buffers more of an unfinished frame."""
PART_BYTES_MIN: Final = 1_024
"""Bytes of every part but the last, at least, decompressed: so an item cannot consist of a million parts."""

_REQUEST: Final = int(FrameType.REQUEST)
_RESPONSE: Final = int(FrameType.RESPONSE)
_DATA: Final = int(FrameType.STREAM_DATA)
_END: Final = int(FrameType.STREAM_END)
_ERROR: Final = int(FrameType.ERROR)
_CANCEL: Final = int(FrameType.CANCEL)


@dataclass(frozen=True, slots=True)
class StreamOpened:
    """Effect, accepting side: the opener's REQUEST. Answer by `accept` or `refuse`."""

    name: str
    data: bytes
    headers: HeaderMap


@dataclass(frozen=True, slots=True)
class Accepted:
    """Effect, opening side: the other side takes the stream."""


@dataclass(frozen=True, slots=True)
class Item:
    """Effect: one whole item came."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Ended:
    """Effect: the peer will send no more items."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """Effect: the peer reads no more items of ours."""


@dataclass(frozen=True, slots=True)
class Aborted:
    """Effect: the stream is over, both ways. Send ``frame`` first unless it is empty; then close."""

    error: WireError
    frame: bytes = b""


StreamEffect = StreamOpened | Accepted | Item | Ended | Stopped | Aborted
State = Literal["idle", "opening", "open", "aborted"]


class StreamMachine:
    """State of one stream, for either side.

    ===========  ===========================================  =======================================
    state        opener                                       acceptor
    ===========  ===========================================  =======================================
    ``idle``     `open` → ``opening``                         REQUEST → ``opening``, `StreamOpened`
    ``opening``  RESPONSE → ``open``; ERROR → ``aborted``     `accept` → ``open``; `refuse` → ``aborted``
    ``open``     STREAM_DATA, STREAM_END, CANCEL both ways; ERROR or `abort` → ``aborted``
    ===========  ===========================================  =======================================
    """

    __slots__ = (
        "_compression",
        "_deadline",
        "_error_text_bytes_max",
        "_is_opener",
        "_item_bytes_max",
        "_limits",
        "_part_bytes",
        "_parts",
        "_parts_bytes",
        "_payloads",
        "_stall",
        "_zstd",
        "discards",
        "items_received",
        "peer_ended",
        "peer_stopped",
        "sent_end",
        "sent_stop",
        "state",
    )

    def __init__(self, limits: Limits, zstd: Zstd | None, *, is_opener: bool) -> None:
        """``zstd`` is None when the peer did not offer compression."""
        self._limits = limits
        self._is_opener = is_opener
        self._zstd = zstd
        self._compression = None if zstd is None else Compression(zstd, limits.compress_bytes_min)
        self._payloads = PayloadReader(limits, zstd)
        self._item_bytes_max = limits.stream_item_bytes_max
        self._error_text_bytes_max = limits.error_text_bytes_max
        self._part_bytes = max(PART_BYTES_MIN, min(PART_BYTES, limits.message_bytes_max))
        self._parts: list[bytes] = []
        self._parts_bytes = 0
        self._deadline: float | None = None
        self._stall: StallTimer | None = None
        self.state: State = "idle"
        self.peer_ended: bool = False
        self.peer_stopped: bool = False
        self.sent_end: bool = False
        self.sent_stop: bool = False
        self.items_received: int = 0
        self.discards: bool = False
        """Whether the app takes no items any more: later ones are empty, and cost nothing."""

    # This side

    def open(self, head: bytes, data: bytes, now: float) -> bytes:
        """Return the REQUEST that opens the stream; ``head`` is the encoded header map. Raises MessageTooLargeError."""
        if self.state != "idle" or not self._is_opener:
            raise LocalProtocolError(f"open() in state {self.state}")
        if len(data) > self._limits.message_bytes_max:
            raise MessageTooLargeError(
                f"first data of {len(data)} bytes: at most {self._limits.message_bytes_max} are allowed"
            )
        self.state = "opening"
        self._deadline = now + self._limits.stream_open_timeout_s
        flags, body = compressed_body(self._compression, data)
        return encode_frame(_REQUEST, head + body, flags=flags | HEADERS, req_id=REQ_ID)

    def accept(self) -> bytes:
        """Return the RESPONSE by which the acceptor takes the stream."""
        if self.state != "opening" or self._is_opener:
            raise LocalProtocolError(f"accept() in state {self.state}")
        self.state = "open"
        return encode_frame(_RESPONSE, b"", req_id=REQ_ID)

    def parts(self, item: bytes) -> list[tuple[bytes, bytes | memoryview]]:
        """Return one item as header and payload of each of its frames. Raises MessageTooLargeError,
        LocalProtocolError."""
        if self.state != "open" or self.sent_end:
            raise LocalProtocolError("the stream takes no items: it is not open, or was ended by this side")
        size = len(item)
        if size > self._item_bytes_max:
            raise MessageTooLargeError(f"item of {size} bytes: at most {self._item_bytes_max} are allowed")
        if size <= self._part_bytes:
            return [self._part(item, FINAL)]
        view = memoryview(item)
        step = self._part_bytes
        return [
            self._part(view[start : start + step], FINAL if start + step >= size else 0)
            for start in range(0, size, step)
        ]

    def _part(self, data: bytes | memoryview, final: int) -> tuple[bytes, bytes | memoryview]:
        flags, body = compressed_body(self._compression, data)
        return encode_header(_DATA, len(body), flags=flags | final, req_id=REQ_ID), body

    def end(self) -> bytes:
        """Return the STREAM_END that half-closes this side."""
        if self.state != "open" or self.sent_end:
            raise LocalProtocolError(f"end() in state {self.state}")
        self.sent_end = True
        return encode_frame(_END, b"", req_id=REQ_ID)

    def stop(self) -> bytes:
        """Return the CANCEL by which the peer sends no more items; b"" when there is nothing to stop."""
        if self.state != "open" or self.sent_stop or self.peer_ended:
            return b""
        self.sent_stop = True
        return encode_frame(_CANCEL, b"", req_id=REQ_ID)

    def abort(self, code: ErrorCode, text: str, *, headers: bytes = b"") -> bytes:
        """Return the ERROR that ends both ways, or refuses an opening stream; b"" when it is over already."""
        if self.state == "aborted":
            return b""
        self.state = "aborted"
        self._deadline = self._stall = None
        return encode_error(code, text, req_id=REQ_ID, headers=headers, text_bytes_max=self._error_text_bytes_max)

    # The peer's side

    def handle(self, frames: Iterable[Frame], now: float) -> list[StreamEffect]:
        """Take received frames. After `Aborted` no more are taken."""
        effects: list[StreamEffect] = []
        for frame in frames:
            if self.state == "aborted":
                break
            try:
                effect = self._frame(frame)
            except ProtocolError as error:
                effects.append(Aborted(error, self.abort(error.code, str(error))))
                break
            if effect is not None:
                effects.append(effect)
        return effects

    def violated(self, error: ProtocolError) -> Aborted | None:
        """End by a violation that the frame decoder met; None when the stream is over already."""
        if self.state == "aborted":
            return None
        return Aborted(error, self.abort(error.code, str(error)))

    def _frame(self, frame: Frame) -> StreamEffect | None:
        type_ = frame.type
        if type_ == _ERROR and self.state != "idle":
            return self._error(frame)
        if frame.req_id != REQ_ID:
            raise ProtocolError(f"req_id {frame.req_id} on a stream: it is {REQ_ID}")
        if self.state == "open" and type_ == _DATA:
            return self._data(frame)
        if self.state == "open" and type_ == _END:
            return self._end(frame)
        if self.state == "open" and type_ == _CANCEL:
            return self._stop(frame)
        if self.state == "idle" and type_ == _REQUEST and not self._is_opener:
            headers, body = self._payloads.read(frame)
            name = required_name(headers)
            self.state = "opening"
            self._deadline = None
            return StreamOpened(name, body, headers)
        if self.state == "opening" and type_ == _RESPONSE and self._is_opener:
            self._payloads.read(frame)  # nothing in it has a meaning yet
            self.state = "open"
            self._deadline = None
            return Accepted()
        raise ProtocolError(f"frame type 0x{type_:02x} is not allowed on a stream in state {self.state}")

    def _data(self, frame: Frame) -> Item | None:
        if self.peer_ended:
            raise ProtocolError("STREAM_DATA after STREAM_END")
        flags = frame.flags
        if flags & HEADERS:
            raise ProtocolError("flag HEADERS is not allowed on STREAM_DATA")
        if self.discards:
            self._parts.clear()
            self._parts_bytes = 0
            return Item(b"") if flags & FINAL else None
        if flags & COMPRESSED:
            if self._zstd is None:
                raise ProtocolError("flag COMPRESSED without zstd having been offered")
            part = self._zstd.decompress(frame.payload)
        else:
            part = frame.payload
        size = self._parts_bytes + len(part)
        if size > self._item_bytes_max:
            raise ProtocolError(
                f"an item over {self._item_bytes_max} bytes is not taken here", ErrorCode.MESSAGE_TOO_LARGE
            )
        if not flags & FINAL:
            if len(part) < PART_BYTES_MIN:
                raise ProtocolError(f"a part under {PART_BYTES_MIN} bytes that is not the last")
            self._parts.append(part)
            self._parts_bytes = size
            return None
        self.items_received += 1
        self._stall = None
        if not self._parts:
            return Item(part)
        self._parts.append(part)
        item = b"".join(self._parts)
        self._parts.clear()
        self._parts_bytes = 0
        return Item(item)

    def _end(self, frame: Frame) -> Ended:
        if frame.flags or frame.payload:
            raise ProtocolError("STREAM_END with flags or a payload")
        if self.peer_ended:
            raise ProtocolError("STREAM_END twice")
        if self._parts and not self.discards:
            raise ProtocolError("STREAM_END within an item")
        self.peer_ended = True
        self._stall = None
        return Ended()

    def _stop(self, frame: Frame) -> Stopped:
        if frame.flags or frame.payload or self.peer_stopped:
            raise ProtocolError("CANCEL twice, or with flags or a payload")
        self.peer_stopped = True
        return Stopped()

    def _error(self, frame: Frame) -> Aborted:
        if frame.flags & ~HEADERS or frame.req_id not in (0, REQ_ID):
            raise ProtocolError("ERROR with a foreign req_id or flags that it cannot have")
        headers, body = self._payloads.read_error(frame)
        code, text = decode_error(body)
        self.state = "aborted"
        self._deadline = self._stall = None
        return Aborted(error_from_wire(code, text, header_uint(headers, HeaderKey.RETRY_AFTER_MS) or 0))

    # Time

    @property
    def buffered_bytes(self) -> int:
        """The bytes of an unfinished item."""
        return self._parts_bytes

    def expect_request(self, now: float) -> None:
        """Start the time limit of the opener's REQUEST (acceptor)."""
        self._deadline = now + self._limits.stream_open_timeout_s

    def expect_item(self, now: float, progress: int = 0) -> None:
        """Start the time limit of the next item: the first and the later ones have their own.

        It runs while nothing moves: ``progress`` changes with each byte of the stream, in either direction. See
        `StallTimer`.
        """
        limits = self._limits
        timeout_s = limits.stream_item_timeout_s if self.items_received else limits.stream_first_item_timeout_s
        self._stall = StallTimer(timeout_s, now, progress)

    def expect_nothing(self) -> None:
        """End the time limit: the app waits no more."""
        if self.state == "open":
            self._stall = None

    def next_deadline(self) -> float | None:
        """Return when `on_deadline` has work to do."""
        return self._deadline if self._stall is None else self._stall.check_at_s

    def on_deadline(self, now: float, progress: int = 0) -> list[StreamEffect]:
        """End the stream when nothing came, and nothing of ours went. ``progress``: as for `expect_item`."""
        if self._stall is not None:
            if not self._stall.is_stalled(now, progress):
                return []
        elif self._deadline is None or now < self._deadline:
            return []
        what = "the stream was not opened in time" if self.state in ("idle", "opening") else "no item came in time"
        return [Aborted(RequestTimeoutError(what), self.abort(ErrorCode.TIMEOUT, what))]
