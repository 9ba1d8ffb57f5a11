"""The part of the protobuf wire format that libp2p uses: https://protobuf.dev/programming-guides/encoding/"""

from typing import Final

from dep2p.encoding.varint import encode_varint, read_varint
from dep2p.errors import ProtocolError

VARINT: Final = 0
FIXED64: Final = 1
LENGTH: Final = 2
FIXED32: Final = 5


def encode_field(number: int, value: bytes) -> bytes:
    """A length-delimited field; its number is below 16."""
    return bytes((number << 3 | LENGTH,)) + encode_varint(len(value)) + value


def encode_uint(number: int, value: int) -> bytes:
    """A number; its field's number is below 16. Zero is left out, as proto3 does."""
    return bytes((number << 3 | VARINT,)) + encode_varint(value) if value else b""


def encode_fixed64(number: int, value: int) -> bytes:
    """A number of eight bytes; its field's number is below 16."""
    return bytes((number << 3 | FIXED64,)) + value.to_bytes(8, "little")


class ProtoReader:
    """Goes over the fields of one message: after `next()`, `number` and `wire_type` tell of the field.

    Every method raises :class:`ProtocolError` for bytes that are no protobuf.
    """

    __slots__ = ("data", "end", "is_canonical", "number", "position", "wire_type")

    def __init__(self, data: bytes, start: int, end: int) -> None:
        self.data: bytes = data
        self.position: int = start
        self.end: int = end
        self.number: int = 0
        self.wire_type: int = 0
        self.is_canonical: bool = True
        """No number so far used more bytes than needed."""

    def next(self) -> bool:
        """Go to the next field; False at the end."""
        if self.position >= self.end:
            return False
        tag = self.data[self.position]
        if tag < 0x80:
            self.position += 1
        else:
            tag = self._varint()
        self.number = tag >> 3
        self.wire_type = tag & 7
        if not 0 < self.number < 1 << 29:
            raise ProtocolError("the message holds a field number that is not allowed")
        return True

    def _varint(self) -> int:
        start = self.position
        value, self.position = read_varint(self.data, start, self.end)
        if self.position - start > 1 and not self.data[self.position - 1]:
            self.is_canonical = False
        return value

    def uint(self) -> int:
        """The field's number."""
        if self.wire_type != VARINT:
            raise ProtocolError("the message has another wire type where a number belongs")
        return self._varint()

    def fixed64(self) -> int:
        """The field's number of eight bytes."""
        if self.wire_type != FIXED64:
            raise ProtocolError("the message has another wire type where a number of eight bytes belongs")
        start = self.position
        self.skip()
        return int.from_bytes(self.data[start : self.position], "little")

    def span(self, bytes_max: int) -> tuple[int, int]:
        """Return where the field's bytes start and end."""
        if self.wire_type != LENGTH:
            raise ProtocolError("the message has another wire type where bytes belong")
        position = self.position
        if position < self.end and self.data[position] < 0x80:  # most are that short
            size = self.data[position]
            start = position + 1
        else:
            size = self._varint()
            start = self.position
        if size > bytes_max or size > self.end - start:
            raise ProtocolError(f"the message holds {size} bytes where at most {bytes_max} are allowed, or is cut off")
        self.position = start + size
        return start, start + size

    def bytes_(self, bytes_max: int) -> bytes:
        """The field's bytes."""
        start, end = self.span(bytes_max)
        return self.data[start:end]

    def text(self, bytes_max: int) -> str:
        """The field's text."""
        try:
            return self.bytes_(bytes_max).decode("utf-8")
        except UnicodeDecodeError:
            raise ProtocolError("the message holds text that is not UTF-8") from None

    def sub(self) -> "ProtoReader":
        """A reader of the message that the field holds."""
        start, end = self.span(self.end)
        return ProtoReader(self.data, start, end)

    def skip(self) -> None:
        """Skip an unknown field."""
        if self.wire_type == VARINT:
            self._varint()
        elif self.wire_type == LENGTH:
            self.span(self.end)
        elif self.wire_type in (FIXED64, FIXED32):
            self.position += 8 if self.wire_type == FIXED64 else 4
            if self.position > self.end:
                raise ProtocolError("the message is cut off")
        else:
            raise ProtocolError("the message uses a wire type that is not allowed")
