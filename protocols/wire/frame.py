"""The 12-byte frame that every dep2p protocol speaks (docs/spec/frame.md). Sans-I/O.

::

    0        1        2                 4                 8                 12
    +--------+--------+-----------------+-----------------+-----------------+=========
    | ver u8 | type u8|   flags u16     |   req_id u32    |   length u32    | payload
    +--------+--------+-----------------+-----------------+-----------------+=========

All integers are big-endian. The same bytes give the same frames however they are split.
"""

import struct
from enum import IntEnum, IntFlag
from typing import Final, NamedTuple

from dep2p.errors import ErrorCode, LocalProtocolError, ProtocolError

VERSION: Final = 1
HEADER_BYTES: Final = 12
REQ_ID_MAX: Final = 0xFFFF_FFFF

HEADER: Final = struct.Struct(">BBHII")
"""Version, type, flags, req_id, payload bytes. For code that packs thousands in a loop; else use `encode_header`."""
_CODE = struct.Struct(">I")


class FrameType(IntEnum):
    """Frame types. An unknown type with the high bit set is skipped, any other unknown one is an error."""

    REQUEST = 0x01
    RESPONSE = 0x02
    NOTIFY = 0x03
    STREAM_DATA = 0x04
    STREAM_END = 0x05
    ERROR = 0x06
    CANCEL = 0x07
    ACK = 0x10
    ACK_REQUEST = 0x11
    ACK_REQUESTS = 0x12
    GOSSIP = 0x20
    PUSH = 0x30
    PUSH_ACK = 0x31
    RESUME = 0x32


class FrameFlag(IntFlag):
    """Flag bits of a frame."""

    COMPRESSED = 0x0001
    ENCRYPTED = 0x0002
    FINAL = 0x0004
    HEADERS = 0x0008


COMPRESSED: Final = 0x0001
ENCRYPTED: Final = 0x0002
FINAL: Final = 0x0004
HEADERS: Final = 0x0008
# Plain integers: IntFlag arithmetic costs a microsecond in the hot path.

_QUEUE_TYPES = range(0x40, 0x60)
_KNOWN_TYPES: Final = frozenset({*(int(t) for t in FrameType), *_QUEUE_TYPES})
_KNOWN_FLAGS: Final = COMPRESSED | FINAL | HEADERS


class Frame(NamedTuple):
    """One frame. ``type`` and ``flags`` are plain integers, see :class:`FrameType` and :class:`FrameFlag`."""

    type: int
    flags: int
    req_id: int
    payload: bytes


def encode_frame(type_: int, payload: bytes, *, flags: int = 0, req_id: int = 0) -> bytes:
    """Encode one frame. The caller has checked the payload against the peer's cap."""
    return HEADER.pack(VERSION, type_, flags, req_id, len(payload)) + payload


def encode_header(type_: int, payload_bytes: int, *, flags: int = 0, req_id: int = 0) -> bytes:
    """Encode the 12 bytes in front of a payload that is written separately, to save a copy of a large one."""
    return HEADER.pack(VERSION, type_, flags, req_id, payload_bytes)


_LARGE_BYTES: Final = 4_096
_TEXT_BYTES_MAX: Final = 1_024
"""Bytes of an error's text. Every receiver takes a longer one for a violation, whatever this side's limit is."""
_new_frame = tuple[object, ...].__new__  # NamedTuple's own constructor costs twice as much


class FrameDecoder:
    """Turns received bytes into frames.

    ``payload_bytes_max`` is checked as soon as the header is there, before one byte of payload is buffered. After a
    violation :attr:`error` is set, the frames in front of it have been returned, and feeding on is a misuse.
    """

    __slots__ = (
        "_large",
        "_large_bytes",
        "_payload_bytes_max",
        "_rest",
        "_skip_bytes",
        "error",
        "error_req_id",
        "skipped_frames",
    )

    def __init__(self, payload_bytes_max: int) -> None:
        self._payload_bytes_max = payload_bytes_max
        self._rest: bytes = b""  # the start of a frame; less than a small frame
        self._large = bytearray()  # the start of a large frame, whose header has been checked
        self._large_bytes: int = 0
        self._skip_bytes: int = 0
        self.error: ProtocolError | None = None
        self.error_req_id: int = 0
        """The req_id of a frame over the cap, which tells its sender which message was too large; else 0."""
        self.skipped_frames: int = 0

    @property
    def buffered_bytes(self) -> int:
        """Bytes of an incomplete frame; at most the payload cap plus the header."""
        return len(self._rest) + len(self._large)

    def feed(self, data: bytes | bytearray | memoryview) -> list[Frame]:
        """Take received bytes; return the frames that they complete, in order.

        Raises :class:`LocalProtocolError` when called after an error.
        """
        if self.error is not None:
            raise LocalProtocolError("feed() after a protocol error: close the stream instead")
        frames: list[Frame] = []
        if self._large_bytes:
            large = self._large
            missing = self._large_bytes - len(large)
            if len(data) < missing:
                large += data
                return frames
            view = memoryview(data)
            large += view[:missing]
            _, type_, flags, req_id, _ = HEADER.unpack_from(large)
            with memoryview(large) as whole:
                frames.append(Frame(type_, flags, req_id, bytes(whole[HEADER_BYTES:])))
            self._large = bytearray()
            self._large_bytes = 0
            data = view[missing:]
        elif self._skip_bytes:
            skipped = min(self._skip_bytes, len(data))
            self._skip_bytes -= skipped
            data = memoryview(data)[skipped:]
        if len(data):
            self._parse(data, frames)
        return frames

    def _parse(self, data: bytes | bytearray | memoryview, frames: list[Frame]) -> None:
        # One copy of all, then slices of bytes: cheaper than a memoryview per frame, and frames keep no buffer alive.
        data = b"".join((self._rest, data)) if self._rest else bytes(data)
        self._rest = b""
        append = frames.append
        unpack = HEADER.unpack_from
        size = len(data)
        last = size - HEADER_BYTES
        position = 0
        length_max = self._payload_bytes_max
        while position <= last:
            version, type_, flags, req_id, length = unpack(data, position)
            start = position + HEADER_BYTES
            end = start + length
            if version != VERSION or type_ not in _KNOWN_TYPES or flags & ~_KNOWN_FLAGS or length > length_max:
                error = self._header_error(version, type_, flags, length)
                if error is not None:
                    self.error = error
                    if error.code == ErrorCode.MESSAGE_TOO_LARGE:
                        self.error_req_id = req_id
                    return
                # An extension type: skip its payload without buffering it.
                self.skipped_frames += 1
                if end > size:
                    self._skip_bytes = end - size
                    return
                position = end
                continue
            if end > size:
                if length > _LARGE_BYTES:
                    self._large += memoryview(data)[position:]
                    self._large_bytes = HEADER_BYTES + length
                    return
                break
            append(_new_frame(Frame, (type_, flags, req_id, data[start:end])))
            position = end
        if position < size:
            if position > last and data[position] != VERSION:
                # The first byte of a header already tells that the rest is not for us.
                self.error = self._header_error(data[position], 0, 0, 0)
                return
            self._rest = data[position:]

    def _header_error(self, version: int, type_: int, flags: int, length: int) -> ProtocolError | None:
        if version != VERSION:
            return ProtocolError(f"frame version {version}: this side speaks {VERSION}", ErrorCode.UNSUPPORTED_VERSION)
        if length > self._payload_bytes_max:
            return ProtocolError(
                f"frame of {length} bytes: at most {self._payload_bytes_max} are taken here",
                ErrorCode.MESSAGE_TOO_LARGE,
            )
        if type_ >= 0x80:
            return None
        if type_ not in _KNOWN_TYPES:
            return ProtocolError(f"unknown frame type 0x{type_:02x}")
        if flags & ENCRYPTED:
            return ProtocolError("flag ENCRYPTED is reserved")
        if flags & ~_KNOWN_FLAGS:
            return ProtocolError(f"unknown frame flags 0x{flags:04x}")
        return None


def encode_error(code: int, text: str, *, req_id: int = 0, headers: bytes = b"", text_bytes_max: int = 1024) -> bytes:
    """Encode an ERROR frame: u32 code, then UTF-8 text cut to ``text_bytes_max`` (1,024 at most) at a character's edge.

    ``headers`` is an encoded header map or empty.
    """
    raw = text.encode("utf-8", "replace")
    text_bytes_max = min(text_bytes_max, _TEXT_BYTES_MAX)
    if len(raw) > text_bytes_max:
        raw = raw[:text_bytes_max].decode("utf-8", "ignore").encode("utf-8")
    flags = HEADERS if headers else 0
    return encode_frame(FrameType.ERROR, headers + _CODE.pack(code) + raw, flags=flags, req_id=req_id)


def decode_error(body: bytes, *, text_bytes_max: int = 1024) -> tuple[int, str]:
    """Decode code and text of an ERROR frame's body (behind its headers).

    Raises :class:`ProtocolError` when it is shorter than the code, longer than allowed, or no UTF-8.
    """
    if len(body) < _CODE.size:
        raise ProtocolError("ERROR frame without a code")
    if len(body) - _CODE.size > text_bytes_max:
        raise ProtocolError(f"ERROR text of {len(body) - _CODE.size} bytes: at most {text_bytes_max} are allowed")
    try:
        text = body[_CODE.size :].decode("utf-8")
    except UnicodeDecodeError:
        raise ProtocolError("ERROR text is not UTF-8") from None
    return int(_CODE.unpack_from(body)[0]), text
