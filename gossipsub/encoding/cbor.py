"""The little CBOR that the realm wire needs: canonical, definite, no tags, no floats. Read strictly, in one pass.

Strict reading gives every value one encoding only, so a signature over bytes is a signature over the value.
"""

from typing import Final

from dep2p.errors import ProtocolError

UINT: Final = 0
BYTES: Final = 2
TEXT: Final = 3
ARRAY: Final = 4
MAP: Final = 5

_SKIP_DEPTH_MAX: Final = 8


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


class CborReader:
    """Reads one value after another. Every method raises :class:`ProtocolError` for anything but what it names."""

    __slots__ = ("_end", "data", "position")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0
        self._end = len(data)

    def _argument(self, major: int, what: str) -> int:
        data, position = self.data, self.position
        if position >= self._end:
            raise ProtocolError("the RPC is cut off")
        initial = data[position]
        if initial >> 5 != major:
            raise ProtocolError(f"the RPC has another type where {what} belongs")
        info = initial & 0x1F
        if info < 24:
            self.position = position + 1
            return info
        if info > 27:
            raise ProtocolError("the RPC uses an indefinite or reserved CBOR length")
        width = 1 << (info - 24)
        position += 1
        if position + width > self._end:
            raise ProtocolError("the RPC is cut off")
        value = int.from_bytes(data[position : position + width], "big")
        # Anything that fits a shorter head must use it.
        if value < 24 if width == 1 else value < 1 << (4 * width):
            raise ProtocolError("the RPC holds a number in more bytes than needed")
        self.position = position + width
        return value

    def uint(self) -> int:
        """An unsigned integer."""
        return self._argument(UINT, "a number")

    def bytes_(self, bytes_max: int) -> bytes:
        """A byte string of at most that length."""
        size = self._argument(BYTES, "bytes")
        start = self.position
        if size > bytes_max or size > self._end - start:
            raise ProtocolError(f"the RPC holds {size} bytes where at most {bytes_max} are allowed, or is cut off")
        self.position = start + size
        return self.data[start : start + size]

    def text(self, bytes_max: int) -> str:
        """A text string of at most that many UTF-8 bytes."""
        size = self._argument(TEXT, "text")
        start = self.position
        if size > bytes_max or size > self._end - start:
            raise ProtocolError(f"the RPC holds text of {size} bytes, at most {bytes_max} are allowed, or is cut off")
        self.position = start + size
        try:
            return self.data[start : start + size].decode("utf-8")
        except UnicodeDecodeError:
            raise ProtocolError("the RPC holds text that is not UTF-8") from None

    def array(self, items_max: int) -> int:
        """The head of an array: how many items follow."""
        count = self._argument(ARRAY, "a list")
        if count > items_max or count > self._end - self.position:
            raise ProtocolError(f"the RPC holds a list of {count}: at most {items_max} are taken")
        return count

    def exact_array(self, items: int) -> None:
        """The head of an array of that many items."""
        if self._argument(ARRAY, "a list") != items:
            raise ProtocolError(f"the RPC has another list where one of {items} belongs")

    def map(self, entries_max: int) -> int:
        """The head of a map: how many pairs follow."""
        count = self._argument(MAP, "a map")
        if count > entries_max or 2 * count > self._end - self.position:
            raise ProtocolError(f"the RPC holds a map of {count}: at most {entries_max} are taken")
        return count

    def boolean(self) -> bool:
        """True or false."""
        if self.position < self._end:
            initial = self.data[self.position]
            if initial in (0xF4, 0xF5):
                self.position += 1
                return initial == 0xF5
        raise ProtocolError("the RPC has another type where true or false belongs")

    def skip(self, depth: int = 0) -> None:
        """Any value: of an extension that this version does not know."""
        if self.position >= self._end:
            raise ProtocolError("the RPC is cut off")
        major = self.data[self.position] >> 5
        if major == 7:
            self.boolean()
            return
        if major not in (UINT, 1, BYTES, TEXT, ARRAY, MAP):
            raise ProtocolError("the RPC uses a CBOR tag")
        argument = self._argument(major, "a value")
        if major <= 1:
            return
        if argument > self._end - self.position:
            raise ProtocolError("the RPC is cut off")
        if major in (BYTES, TEXT):
            self.position += argument
            return
        if depth >= _SKIP_DEPTH_MAX:
            raise ProtocolError("the RPC is nested too deeply")
        for _ in range(argument * 2 if major == MAP else argument):
            self.skip(depth + 1)

    def finish(self) -> None:
        """Nothing may follow."""
        if self.position != self._end:
            raise ProtocolError(f"{self._end - self.position} bytes after the RPC's end")
