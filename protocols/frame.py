"""The 12-byte frame that every dep2p protocol speaks (docs/spec/frame.md). Sans-I/O.

::

    0        1        2                 4                 8                 12
    +--------+--------+-----------------+-----------------+-----------------+=========
    | ver u8 | type u8|   flags u16     |   req_id u32    |   length u32    | payload
    +--------+--------+-----------------+-----------------+-----------------+=========

All integers are big-endian. Any split of the same bytes gives the same frames.
"""

import struct
from enum import IntEnum, IntFlag
from typing import Final, NamedTuple

from dep2p.errors import ErrorCode, LocalProtocolError, ProtocolError

VERSION: Final = 1
HEADER_BYTES: Final = 12
REQ_ID_MAX: Final = 0xFFFF_FFFF

_HEADER = struct.Struct(">BBHII")
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
    """The bytes of one frame. The caller has checked the payload against the peer's cap."""
    return _HEADER.pack(VERSION, type_, flags, req_id, len(payload)) + payload


def encode_header(type_: int, payload_bytes: int, *, flags: int = 0, req_id: int = 0) -> bytes:
    """The 12 bytes in front of a payload that is written separately, to save a copy of a large one."""
    return _HEADER.pack(VERSION, type_, flags, req_id, payload_bytes)


class FrameDecoder:
    """Turns received bytes into frames.

    ``payload_bytes_max`` is checked as soon as the header is there, before one byte of payload is buffered. After a
    violation :attr:`error` is set, the frames in front of it have been returned, and feeding on is a misuse.
    """

    __slots__ = ("_buffer", "_payload_bytes_max", "_skip_bytes", "error", "error_req_id", "skipped_frames")

    def __init__(self, payload_bytes_max: int) -> None:
        self._payload_bytes_max = payload_bytes_max
        self._buffer = bytearray()
        self._skip_bytes = 0
        self.error: ProtocolError | None = None
        self.error_req_id = 0
        """The req_id of a frame over the cap, so that its sender learns which message was too large; else 0."""
        self.skipped_frames = 0

    @property
    def buffered_bytes(self) -> int:
        """Bytes of an incomplete frame; at most the payload cap plus the header."""
        return len(self._buffer)

    def feed(self, data: bytes | bytearray | memoryview) -> list[Frame]:
        """Take received bytes, give the frames that they complete, in order.

        Raises :class:`LocalProtocolError` when called after an error.
        """
        if self.error is not None:
            raise LocalProtocolError("feed() after a protocol error: close the stream instead")
        buffer = self._buffer
        if buffer or self._skip_bytes:
            return self._feed_buffered(data)
        frames, consumed = self._parse(data)
        if self.error is None and consumed < len(data):
            buffer += memoryview(data)[consumed:]
        return frames

    def _feed_buffered(self, data: bytes | bytearray | memoryview) -> list[Frame]:
        buffer = self._buffer
        if self._skip_bytes:
            skipped = min(self._skip_bytes, len(data))
            self._skip_bytes -= skipped
            data = memoryview(data)[skipped:]
        buffer += data
        if len(buffer) >= HEADER_BYTES:
            length = int.from_bytes(buffer[8:12], "big")
            # Wait for the whole body without parsing again and again, unless the header itself is to be refused.
            if length <= self._payload_bytes_max and len(buffer) < HEADER_BYTES + length and buffer[1] < 0x80:
                if self._header_error(buffer[0], buffer[1], int.from_bytes(buffer[2:4], "big"), length) is None:
                    return []
        frames, consumed = self._parse(buffer)
        if self.error is not None:
            buffer.clear()
        elif consumed == len(buffer):
            buffer.clear()
        elif consumed:
            del buffer[:consumed]
        return frames

    def _parse(self, data: bytes | bytearray | memoryview) -> tuple[list[Frame], int]:
        frames: list[Frame] = []
        append = frames.append
        unpack = _HEADER.unpack_from
        size = len(data)
        position = 0
        length_max = self._payload_bytes_max
        with memoryview(data) as view:
            while size - position >= HEADER_BYTES:
                version, type_, flags, req_id, length = unpack(data, position)
                if version != VERSION or type_ not in _KNOWN_TYPES or flags & ~_KNOWN_FLAGS or length > length_max:
                    error = self._header_error(version, type_, flags, length)
                    if error is not None:
                        self.error = error
                        if error.code == ErrorCode.MESSAGE_TOO_LARGE:
                            self.error_req_id = req_id
                        return frames, size
                    # An extension type: skip its payload without buffering it.
                    self.skipped_frames += 1
                    end = position + HEADER_BYTES + length
                    if end > size:
                        self._skip_bytes = end - size
                        return frames, size
                    position = end
                    continue
                start = position + HEADER_BYTES
                end = start + length
                if end > size:
                    break
                append(Frame(type_, flags, req_id, bytes(view[start:end])))
                position = end
        if size - position and self.error is None and size - position < HEADER_BYTES and data[position] != VERSION:
            # The first byte of a header already tells that the rest is not for us.
            self.error = self._header_error(data[position], 0, 0, 0)
            return frames, size
        return frames, position

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
    """An ERROR frame: u32 code, then UTF-8 text cut to ``text_bytes_max`` at a character's edge.

    ``headers`` is an encoded header map or empty.
    """
    raw = text.encode("utf-8", "replace")
    if len(raw) > text_bytes_max:
        raw = raw[:text_bytes_max].decode("utf-8", "ignore").encode("utf-8")
    flags = HEADERS if headers else 0
    return encode_frame(FrameType.ERROR, headers + _CODE.pack(code) + raw, flags=flags, req_id=req_id)


def decode_error(body: bytes, *, text_bytes_max: int = 1024) -> tuple[int, str]:
    """Code and text of an ERROR frame's body (what follows its headers).

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
