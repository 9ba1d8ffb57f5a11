"""`decode_bounded` refuses what its text says that it refuses, and decodes the rest."""

import math
from typing import Any

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dep2p.encoding.shapes import is_mapping, is_sequence
from dep2p.errors import ProtocolError
from dep2p.protocols.wire.cbor import decode_bounded, encode_canonical


def decode(data: bytes, depth_max: int = 2, entries_max: int = 4) -> object:
    return decode_bounded(data, "a value", depth_max=depth_max, entries_max=entries_max)


@pytest.mark.parametrize(
    ("what", "data"),
    [
        ("two items", b"\x01\x02"),
        ("nothing", b""),
        ("an item that is cut off", b"\x82\x01"),
        ("an indefinite list", b"\x9f\x01\xff"),
        ("an indefinite map", b"\xbf\x01\x02\xff"),
        ("indefinite text", b"\x7f\x61a\xff"),
        ("indefinite bytes", b"\x5f\x41a\xff"),
        ("a lone break", b"\xff"),
        ("a tag", cbor2.dumps(cbor2.CBORTag(1, 2))),
        ("a big number", cbor2.dumps(2**64)),
        ("a date", b"\xc0\x74" + b"2013-03-21T20:04:00Z"),
        ("a half float", b"\xf9\x3c\x00"),
        ("a float", b"\xfa\x47\xc3\x50\x00"),
        ("a double", cbor2.dumps(1.1)),
        ("infinity", cbor2.dumps(math.inf)),
        ("undefined", b"\xf7"),
        ("a simple value", b"\xf0"),
        ("a simple value in two bytes", b"\xf8\xff"),
        ("a reserved simple value", b"\xf8\x18"),
        ("simple values inside", b"\x82\xf7\xe0"),
        ("three levels", b"\x81\x81\x81\x01"),
        ("five entries", b"\x85\x01\x02\x03\x04\x05"),
        ("a map of five", cbor2.dumps({n: n for n in range(5)})),
        ("four billion entries", b"\x9a\xff\xff\xff\xff"),
        ("text that is no UTF-8", b"\x62\xc3\x28"),
        ("half a surrogate pair", b"\x63\xed\xa0\x80"),
        ("a reserved length", b"\x1c"),
    ],
)
def test_each_thing_that_its_text_names_is_refused(what: str, data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data)
    with pytest.raises(ProtocolError):
        decode(b"\x81" + data, depth_max=3)


@given(st.binary(max_size=60))
def test_any_bytes_are_refused_or_give_plain_values(data: bytes) -> None:
    try:
        value = decode(data)
    except ProtocolError:
        return
    plain(value, 2)


def plain(value: Any, depth: int) -> None:
    """Nothing but maps, lists, text, bytes, integers, booleans and None, within the bounds."""
    parts: list[Any] = []
    if is_mapping(value):
        parts = [*value.keys(), *value.values()]
    elif is_sequence(value):
        parts = [*value]
    if is_mapping(value) or is_sequence(value):
        assert depth > 0 and len(parts) <= (8 if is_mapping(value) else 4)
        for part in parts:
            plain(part, depth - 1)
    else:
        assert value is None or isinstance(value, bool | int | str | bytes), value


def test_what_is_encoded_comes_back() -> None:
    value = {1: [True, False, None, -(2**63)], "text": {2: b"bytes"}}
    assert decode(encode_canonical(value)) == value
