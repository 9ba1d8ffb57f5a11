"""CBOR (RFC 8949): `CborReader` reads canonical CBOR in one pass, `item_end` bounds an item before it is decoded.

Strict reading gives every value one encoding only, so a signature over bytes is a signature over the value.
"""

from dataclasses import dataclass
from typing import Final

from dep2p.errors import ProtocolError

UINT: Final = 0
BYTES: Final = 2
TEXT: Final = 3
ARRAY: Final = 4
MAP: Final = 5

_SKIP_DEPTH_MAX: Final = 8
_FLOAT_WIDTHS: Final = range(25, 28)
_SIMPLE: Final = range(20, 23)
"""False, true, null. Not undefined, and none of the numbered ones: cbor2 makes objects of its own of those."""


def head(major: int, value: int) -> bytes:
    """The shortest head of a major type with its length or value."""
    top = major << 5
    if value < 24:
        return bytes((top | value,))
    if value < 0x100:
        return bytes((top | 24, value))
    if value < 0x1_0000:
        return bytes((top | 25,)) + value.to_bytes(2, "big")
    if value < 0x1_0000_0000:
        return bytes((top | 26,)) + value.to_bytes(4, "big")
    return bytes((top | 27,)) + value.to_bytes(8, "big")


def encode_bytes(value: bytes) -> bytes:
    """A byte string."""
    return head(BYTES, len(value)) + value


def encode_text(value: str) -> bytes:
    """A text string. Raises ``ValueError`` for text that UTF-8 cannot encode."""
    raw = value.encode("utf-8")
    return head(TEXT, len(raw)) + raw


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of `item_end`: how deep arrays and maps nest, how many entries each has, whether floats may occur."""

    depth_max: int
    entries_max: int
    floats: bool = False


def item_end(data: bytes, position: int, limit: int, bounds: Bounds, what: str) -> int:
    """Return where the item that starts at ``position`` ends, without decoding it. ``what`` names the data in errors.

    Raises :class:`ProtocolError` for an item over ``limit`` or ``bounds``, for indefinite lengths, tags, and simple
    values but true, false and null.
    """
    if position >= limit:
        raise ProtocolError(f"{what}: cut off or over the limit")
    initial = data[position]
    major, info = initial >> 5, initial & 0x1F
    position += 1
    if info < 24:
        argument = info
    elif info <= 27:
        width = 1 << (info - 24)
        if position + width > limit:
            raise ProtocolError(f"{what}: cut off or over the limit")
        argument = int.from_bytes(data[position : position + width], "big")
        position += width
    else:
        raise ProtocolError(f"{what}: an indefinite or reserved CBOR length")
    if major <= 1:
        return position
    if major == 7:
        _check_simple(info, bounds, what)
        return position
    if major in (BYTES, TEXT):
        if argument > limit - position:
            raise ProtocolError(f"{what}: cut off or over the limit")
        return position + argument
    if major == 6:
        raise ProtocolError(f"{what}: a CBOR tag")
    if bounds.depth_max == 0:
        raise ProtocolError(f"{what}: nested too deeply")
    if argument > bounds.entries_max:
        raise ProtocolError(f"{what}: {argument} entries, at most {bounds.entries_max} are taken here")
    inner = Bounds(bounds.depth_max - 1, bounds.entries_max, bounds.floats)
    for _ in range(argument * 2 if major == MAP else argument):
        position = item_end(data, position, limit, inner, what)
    return position


def _check_simple(info: int, bounds: Bounds, what: str) -> None:
    if info in _FLOAT_WIDTHS:
        if not bounds.floats:
            raise ProtocolError(f"{what}: a floating-point number")
    elif info not in _SIMPLE:
        raise ProtocolError(f"{what}: a simple value that is neither true, false nor null")


class CborReader:
    """Reads one value after another. Every method raises :class:`ProtocolError` for anything but what it names."""

    __slots__ = ("_end", "data", "position")

    def __init__(self, data: bytes) -> None:
        self.data: bytes = data
        self.position: int = 0
        self._end = len(data)

    def _argument(self, major: int, what: str) -> int:
        data, position = self.data, self.position
        if position >= self._end:
            raise ProtocolError("the message is cut off")
        initial = data[position]
        if initial >> 5 != major:
            raise ProtocolError(f"the message has another type where {what} belongs")
        info = initial & 0x1F
        if info < 24:
            self.position = position + 1
            return info
        if info > 27:
            raise ProtocolError("the message uses an indefinite or reserved CBOR length")
        width = 1 << (info - 24)
        position += 1
        if position + width > self._end:
            raise ProtocolError("the message is cut off")
        value = int.from_bytes(data[position : position + width], "big")
        # Anything that fits a shorter head must use it.
        if value < 24 if width == 1 else value < 1 << (4 * width):
            raise ProtocolError("the message holds a number in more bytes than needed")
        self.position = position + width
        return value

    def uint(self) -> int:
        """An unsigned integer."""
        return self._argument(UINT, "a number")

    def integer(self) -> int:
        """An integer, which may be negative."""
        if self.position < self._end and self.data[self.position] >> 5 == 1:
            return -1 - self._argument(1, "a number")
        return self._argument(UINT, "a number")

    def bytes_(self, bytes_max: int) -> bytes:
        """A byte string of at most that length."""
        size = self._argument(BYTES, "bytes")
        start = self.position
        if size > bytes_max or size > self._end - start:
            raise ProtocolError(f"the message holds {size} bytes where at most {bytes_max} are allowed, or is cut off")
        self.position = start + size
        return self.data[start : start + size]

    def text(self, bytes_max: int) -> str:
        """A text string of at most that many UTF-8 bytes."""
        size = self._argument(TEXT, "text")
        start = self.position
        if size > bytes_max or size > self._end - start:
            raise ProtocolError(
                f"the message holds {size} bytes of text, at most {bytes_max} are allowed, or is cut off"
            )
        self.position = start + size
        try:
            return self.data[start : start + size].decode("utf-8")
        except UnicodeDecodeError:
            raise ProtocolError("the message holds text that is not UTF-8") from None

    def array(self, items_max: int) -> int:
        """The head of an array: how many items follow."""
        count = self._argument(ARRAY, "a list")
        if count > items_max or count > self._end - self.position:
            raise ProtocolError(f"the message holds a list of {count}: at most {items_max} are taken")
        return count

    def exact_array(self, items: int) -> None:
        """The head of an array of that many items."""
        if self._argument(ARRAY, "a list") != items:
            raise ProtocolError(f"the message has another list where one of {items} belongs")

    def map(self, entries_max: int) -> int:
        """The head of a map: how many pairs follow."""
        count = self._argument(MAP, "a map")
        if count > entries_max or 2 * count > self._end - self.position:
            raise ProtocolError(f"the message holds a map of {count}: at most {entries_max} are taken")
        return count

    def boolean(self) -> bool:
        """True or false."""
        if self.position < self._end:
            initial = self.data[self.position]
            if initial in (0xF4, 0xF5):
                self.position += 1
                return initial == 0xF5
        raise ProtocolError("the message has another type where true or false belongs")

    def skip(self, depth: int = 0) -> None:
        """A value of any kind: of an extension that this version does not know."""
        if self.position >= self._end:
            raise ProtocolError("the message is cut off")
        major = self.data[self.position] >> 5
        if major == 7:
            self.boolean()
            return
        if major not in (UINT, 1, BYTES, TEXT, ARRAY, MAP):
            raise ProtocolError("the message uses a CBOR tag")
        argument = self._argument(major, "a value")
        if major <= 1:
            return
        if argument > self._end - self.position:
            raise ProtocolError("the message is cut off")
        if major in (BYTES, TEXT):
            self.position += argument
            return
        if depth >= _SKIP_DEPTH_MAX:
            raise ProtocolError("the message is nested too deeply")
        for _ in range(argument * 2 if major == MAP else argument):
            self.skip(depth + 1)

    def finish(self) -> None:
        """Check that nothing follows."""
        if self.position != self._end:
            raise ProtocolError(f"{self._end - self.position} bytes after the message's end")
