"""Unsigned LEB128 varints, as protobuf, multiformats and libp2p use them."""

from typing import Final

from dep2p.errors import ProtocolError

VARINT_BYTES_MAX: Final = 10
"""The longest varint of a number below 2**64."""
_UINT64_MAX: Final = (1 << 64) - 1


def encode_varint(value: int) -> bytes:
    """The shortest form of an unsigned number below 2**64.

    >>> encode_varint(300).hex()
    'ac02'
    """
    if value < 0x80:
        return bytes((value,))
    if value < 0x4000:
        return bytes((value & 0x7F | 0x80, value >> 7))
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def find_varint(
    data: bytes | bytearray, position: int, end: int, bytes_max: int = VARINT_BYTES_MAX
) -> tuple[int, int] | None:
    """Return (value, its end); None when the varint is not complete yet.

    Raises :class:`ProtocolError` for one of more than ``bytes_max`` bytes or 64 bits.
    """
    value = shift = 0
    for index in range(position, min(end, position + bytes_max)):
        byte = data[index]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value > _UINT64_MAX:
                raise ProtocolError("a number above 64 bits")
            return value, index + 1
        shift += 7
    if end - position >= bytes_max:
        raise ProtocolError(f"a number in more than {bytes_max} bytes")
    return None


def read_varint(data: bytes, position: int, end: int) -> tuple[int, int]:
    """Return (value, its end). Raises :class:`ProtocolError`, also for a varint that is cut off."""
    found = find_varint(data, position, end)
    if found is None:
        raise ProtocolError("a number is cut off")
    return found
