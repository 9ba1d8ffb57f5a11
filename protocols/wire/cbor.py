"""CBOR from a stranger: walked before it is decoded, so that hostile lengths, depth and tags cost nothing.

Stricter than header maps (`headers.py`): the caller says how deep and how wide the value may be.
"""

from typing import Final, cast

import cbor2

from dep2p.errors import ProtocolError

_FLOAT_WIDTHS: Final = range(25, 28)


def encode_canonical(value: object) -> bytes:
    """The canonical CBOR of a value made of maps, lists, text, bytes, integers, booleans and None."""
    return cbor2.dumps(value, canonical=True)


def decode_bounded(data: bytes, what: str, *, depth_max: int, entries_max: int) -> object:
    """Decode exactly one CBOR item.

    ``entries_max`` bounds the entries of each map or list, ``depth_max`` how deep they nest; ``what`` names the value
    in errors. Definite lengths only; no tags, no floats. Raises :class:`ProtocolError`.
    """
    end = _walk(data, 0, depth_max, entries_max, what)
    if end != len(data):
        raise ProtocolError(f"{what}: {len(data) - end} bytes after its end")
    try:
        return cast(object, cbor2.loads(data))
    except Exception as error:  # cbor2 leaks UnicodeDecodeError, TypeError and others on hostile input
        raise ProtocolError(f"{what} is not CBOR: {type(error).__name__}") from None


def _walk(data: bytes, position: int, depth_left: int, entries_max: int, what: str) -> int:
    limit = len(data)
    if position >= limit:
        raise ProtocolError(f"{what} is cut off")
    initial = data[position]
    major, info = initial >> 5, initial & 0x1F
    position += 1
    if info < 24:
        argument = info
    elif info <= 27:
        width = 1 << (info - 24)
        if position + width > limit:
            raise ProtocolError(f"{what} is cut off")
        argument = int.from_bytes(data[position : position + width], "big")
        position += width
    else:
        raise ProtocolError(f"{what} uses an indefinite or reserved CBOR length")
    if major <= 1:
        return position
    if major == 7:
        if info in _FLOAT_WIDTHS:
            raise ProtocolError(f"{what} holds a floating-point number")
        return position
    if major in (2, 3):
        if argument > limit - position:
            raise ProtocolError(f"{what} is cut off")
        return position + argument
    if major == 6:
        raise ProtocolError(f"{what} uses a CBOR tag")
    if depth_left == 0:
        raise ProtocolError(f"{what} is nested too deeply")
    if argument > entries_max:
        raise ProtocolError(f"{what} has {argument} entries: at most {entries_max} are taken here")
    for _ in range(argument * 2 if major == 5 else argument):
        position = _walk(data, position, depth_left - 1, entries_max, what)
    return position
