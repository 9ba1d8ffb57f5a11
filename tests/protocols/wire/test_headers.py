"""Header maps: what the app sends comes back; hostile CBOR is refused before it is decoded."""

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dep2p.errors import ProtocolError
from dep2p.protocols.wire.headers import (
    HeaderKey,
    HeaderReader,
    app_headers,
    decode_headers,
    encode_headers,
    header_uint,
    headers_end,
)

scalar = st.one_of(
    st.text(max_size=20), st.binary(max_size=20), st.integers(-(2**63), 2**63 - 1), st.booleans(), st.none()
)
app_strategy = st.dictionaries(st.text(max_size=10), st.one_of(scalar, st.lists(scalar, max_size=4)), max_size=8)


@given(
    st.dictionaries(st.sampled_from([int(key) for key in HeaderKey]), st.integers(0, 0xFFFF_FFFF), max_size=4),
    app_strategy,
    st.binary(),
)
def test_headers_and_body_come_back_whole(own: dict[int, int], app: dict[str, object], body: bytes) -> None:
    encoded = encode_headers(dict(own), app)
    reader = HeaderReader(16_384)
    for _ in range(2):  # decoded, then from memory
        headers, rest = reader.split(encoded + body)
        assert rest == body
        assert {key: value for key, value in headers.items() if isinstance(key, int)} == own
        assert app_headers(headers) == app


@given(st.binary(max_size=60))
def test_arbitrary_bytes_are_split_or_refused_and_never_raise_anything_else(data: bytes) -> None:
    reader = HeaderReader(100)
    try:
        headers, rest = reader.split(data)
    except ProtocolError:
        return
    assert data.endswith(rest)
    assert isinstance(headers, dict)


@pytest.mark.parametrize(
    "hostile",
    [
        b"",
        b"\xbf\x01\x02\xff",  # indefinite map
        b"\xa1\x01\x7f\x61a\xff",  # indefinite text
        b"\xa1\x01\xc0\x61a",  # tag
        b"\xa1\x01\xd8\x20\x61a",  # tag
        b"\xa1\x01",  # cut off
        b"\xba\xff\xff\xff\xff",  # four billion entries
        b"\xbb" + b"\xff" * 8,
        b"\xa1\x01\x9b" + b"\xff" * 8,
        b"\xa1\x01\x81\x81\x81\x81\x01",  # too deep
        b"\xa1\x01\x5a\xff\xff\xff\xff",  # four billion bytes
        b"\xa1\x01\x1c",  # reserved length
        b"\x83\x01\x02\x03",  # an array is no map
        b"\x61a",
        b"\xa1\x01\x61\xff",  # text that is no UTF-8
        b"\xa1\x80\x01",  # a list as key
        b"\xa1\xf5\x01",  # a boolean as key
    ],
)
def test_hostile_cbor_is_a_violation(hostile: bytes) -> None:
    with pytest.raises(ProtocolError):
        HeaderReader(16_384).split(hostile + bytes(10) if hostile and hostile[0] not in (0xA1,) else hostile)


def test_headers_over_the_limit_are_refused_without_decoding() -> None:
    encoded = encode_headers({}, {"a": bytes(100)})
    assert headers_end(encoded, 0, len(encoded)) == len(encoded)
    with pytest.raises(ProtocolError):
        HeaderReader(len(encoded) - 1).split(encoded)


def test_more_than_64_entries_cannot_be_sent_or_received() -> None:
    app = {f"k{index:03}": index for index in range(65)}
    with pytest.raises(ValueError, match="at most 64"):
        encode_headers({}, app)
    with pytest.raises(ProtocolError):
        HeaderReader(16_384).split(cbor2.dumps(app))


@pytest.mark.parametrize("value", [{"a": {"b": {"c": {"d": 1}}}}, {"a": object()}, {"a": 2**80}])
def test_values_that_cannot_travel_are_refused_at_the_sender(value: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="headers"):
        encode_headers({}, value)


def test_the_memory_of_maps_is_small_and_never_mixes_them_up() -> None:
    reader = HeaderReader(1_000)
    maps = [encode_headers({}, {"n": index}) for index in range(50)]
    for _ in range(3):
        for index, encoded in enumerate(maps):
            headers, rest = reader.split(encoded + b"x")
            assert headers == {"n": index}
            assert rest == b"x"


def test_typed_access_refuses_wrong_types() -> None:
    headers = decode_headers(cbor2.dumps({1: "name", 2: 5, 3: -1, 4: 2**33, 5: b"x", 6: True}))
    assert header_uint(headers, 2) == 5
    assert header_uint(headers, 9) is None
    for key in (1, 3, 4, 5, 6):
        with pytest.raises(ProtocolError):
            header_uint(headers, key)
