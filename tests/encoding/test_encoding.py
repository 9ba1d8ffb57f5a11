"""Varints, length prefixes and bounded CBOR: one form of each value, and no input that costs more than its bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dep2p.encoding.cbor import Bounds, head, item_end
from dep2p.encoding.length_prefixed import LengthPrefixedDecoder, encode_length_prefixed, read_length_prefixed
from dep2p.encoding.varint import encode_varint, find_varint, read_varint
from dep2p.errors import ProtocolError, StreamClosedError


class Stream:
    """Gives its bytes in small pieces, then the end."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    async def read(self, max_bytes: int = 65_536) -> bytes:
        piece, self.data = self.data[: min(2, max_bytes)], self.data[min(2, max_bytes) :]
        return piece


@given(st.integers(0, 2**64 - 1))
def test_a_number_survives_in_its_shortest_form(value: int) -> None:
    encoded = encode_varint(value)
    assert read_varint(encoded + b"\xff", 0, len(encoded) + 1) == (value, len(encoded))
    assert len(encoded) == max(1, -(-value.bit_length() // 7))
    for cut in range(len(encoded)):
        assert find_varint(encoded, 0, cut) is None
        with pytest.raises(ProtocolError):
            read_varint(encoded, 0, cut)


@pytest.mark.parametrize("data", [b"\xff" * 9 + b"\x02", b"\x80" * 10 + b"\x01", b"\x80" * 50])
def test_a_number_above_64_bits_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        find_varint(data, 0, len(data))


async def test_a_read_takes_one_message_and_not_a_byte_more() -> None:
    stream = Stream(encode_length_prefixed(b"x" * 300) + b"rest")
    assert await read_length_prefixed(stream, 300) == b"x" * 300
    assert stream.data == b"rest"


async def test_a_read_refuses_what_is_too_long_before_it_reads_it() -> None:
    stream = Stream(encode_length_prefixed(b"x" * 301))
    with pytest.raises(ProtocolError, match="301"):
        await read_length_prefixed(stream, 300)
    assert stream.data == b"x" * 301
    with pytest.raises(ProtocolError):
        await read_length_prefixed(Stream(b"\xff" * 100), 300)
    with pytest.raises(StreamClosedError):
        await read_length_prefixed(Stream(b"\x05abc"), 300)


@given(st.lists(st.binary(max_size=300), max_size=5), st.integers(1, 50))
def test_any_split_gives_the_same_messages(messages: list[bytes], step: int) -> None:
    data = b"".join(map(encode_length_prefixed, messages))
    decoder = LengthPrefixedDecoder(300)
    found = [one for at in range(0, len(data), step) for one in decoder.feed(data[at : at + step])]
    assert found == messages and decoder.buffered_bytes == 0


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "cut off"),
        (head(2, 10), "cut off"),
        (head(4, 4), "entries"),
        (head(4, 1) + head(4, 1) + head(4, 1), "nested"),
        (b"\xc0\x00", "tag"),
        (b"\x9f\xff", "indefinite"),
        (b"\xf9\x3c\x00", "floating"),
    ],
)
def test_an_item_out_of_bounds_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        item_end(data, 0, len(data), Bounds(depth_max=2, entries_max=3), "data")


def test_an_item_ends_where_its_bytes_end() -> None:
    item = head(5, 1) + b"\x61k" + b"\xf9\x3c\x00"
    assert item_end(item + b"more", 0, len(item) + 4, Bounds(1, 1, floats=True), "data") == len(item)
