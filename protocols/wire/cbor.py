"""CBOR from a stranger: walked before it is decoded, so that hostile lengths, depth and tags cost nothing.

Stricter than header maps (`headers.py`): the caller says how deep and how wide the value may be.
"""

import cbor2

from dep2p.encoding.cbor import Bounds, item_end
from dep2p.errors import ProtocolError


def encode_canonical(value: object) -> bytes:
    """Encode a value made of maps, lists, text, bytes, integers, booleans and None as canonical CBOR."""
    return cbor2.dumps(value, canonical=True)


def decode_bounded(data: bytes, what: str, *, depth_max: int, entries_max: int) -> object:
    """Decode exactly one CBOR item.

    ``entries_max`` bounds the entries of each map or list, ``depth_max`` how deep they nest; ``what`` names the value
    in errors. Definite lengths only; no tags, no floats, no simple values but true, false and null.

    Raises :class:`ProtocolError`.
    """
    end = item_end(data, 0, len(data), Bounds(depth_max, entries_max), what)
    if end != len(data):
        raise ProtocolError(f"{what}: {len(data) - end} bytes after its end")
    try:
        decoded: object = cbor2.loads(data)
    except Exception as error:  # cbor2 leaks UnicodeDecodeError, TypeError and others on hostile input
        raise ProtocolError(f"{what} is not CBOR: {type(error).__name__}") from None
    return decoded
