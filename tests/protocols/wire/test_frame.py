"""The frame codec: any split of the bytes gives the same frames, and each hostile field is refused."""

import itertools
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dep2p.errors import ErrorCode, LocalProtocolError, ProtocolError
from dep2p.protocols.wire.frame import (
    COMPRESSED,
    ENCRYPTED,
    FINAL,
    HEADERS,
    Frame,
    FrameDecoder,
    FrameType,
    decode_error,
    encode_error,
    encode_frame,
    encode_header,
)

CAP = 1_000
TYPES = [int(type_) for type_ in FrameType] + [0x40, 0x5F]

frames_strategy = st.lists(
    st.builds(
        Frame,
        type=st.sampled_from(TYPES),
        flags=st.sampled_from([0, COMPRESSED, FINAL, HEADERS, COMPRESSED | HEADERS | FINAL]),
        req_id=st.integers(0, 0xFFFF_FFFF),
        payload=st.binary(max_size=60),
    ),
    max_size=12,
)


def encoded(frames: list[Frame]) -> bytes:
    return b"".join(encode_frame(f.type, f.payload, flags=f.flags, req_id=f.req_id) for f in frames)


def extension(payload: bytes, type_: int = 0x80, flags: int = 0xFFF0) -> bytes:
    return struct.pack(">BBHII", 1, type_, flags, 7, len(payload)) + payload


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


@given(frames_strategy, st.lists(st.integers(0, 10_000), max_size=20))
def test_any_split_gives_the_same_frames(frames: list[Frame], places: list[int]) -> None:
    decoder = FrameDecoder(CAP)
    got = [frame for piece in cut(encoded(frames), places) for frame in decoder.feed(piece)]
    assert got == frames
    assert decoder.error is None
    assert decoder.buffered_bytes == 0


@given(frames_strategy, st.sampled_from([bytes, bytearray, memoryview]))
def test_decode_of_encode_is_the_same_for_each_buffer_type(
    frames: list[Frame], kind: type[bytes] | type[bytearray] | type[memoryview]
) -> None:
    got = FrameDecoder(CAP).feed(kind(encoded(frames)))
    assert got == frames
    assert all(type(frame.payload) is bytes for frame in got)


@given(st.binary(max_size=80), st.lists(st.integers(0, 200), max_size=10))
def test_arbitrary_bytes_split_anywhere_give_the_same_frames_and_the_same_verdict(
    data: bytes, places: list[int]
) -> None:
    whole = FrameDecoder(20)
    expected = whole.feed(data)
    pieces = FrameDecoder(20)
    got: list[Frame] = []
    for piece in cut(data, places):
        if pieces.error is None:
            got += pieces.feed(piece)
    assert got == expected
    assert str(pieces.error) == str(whole.error)


@pytest.mark.parametrize("size", [0, 1, 2, 3])
def test_extension_types_are_skipped_wherever_they_are_split(size: int) -> None:
    payload = bytes(range(200))
    data = encode_frame(1, b"a", req_id=1) + extension(payload) + encode_frame(2, b"b", req_id=1)
    decoder = FrameDecoder(CAP)
    step = size or len(data)
    got = [frame for at in range(0, len(data), step) for frame in decoder.feed(data[at : at + step])]
    assert [frame.payload for frame in got] == [b"a", b"b"]
    assert decoder.skipped_frames == 1
    assert decoder.error is None


def test_an_extension_frame_is_skipped_without_being_buffered() -> None:
    decoder = FrameDecoder(CAP)
    data = extension(bytes(CAP))
    for at in range(0, len(data), 100):
        assert decoder.feed(data[at : at + 100]) == []
        assert decoder.buffered_bytes <= 12


@pytest.mark.parametrize(
    ("header", "code"),
    [
        (struct.pack(">BBHII", 0, 1, 0, 1, 0), ErrorCode.UNSUPPORTED_VERSION),
        (struct.pack(">BBHII", 2, 1, 0, 1, 0), ErrorCode.UNSUPPORTED_VERSION),
        (struct.pack(">BBHII", 255, 0x80, 0, 1, 0), ErrorCode.UNSUPPORTED_VERSION),
        (struct.pack(">BBHII", 1, 0, 0, 1, 0), ErrorCode.INVALID_REQUEST),
        (struct.pack(">BBHII", 1, 0x08, 0, 1, 0), ErrorCode.INVALID_REQUEST),
        (struct.pack(">BBHII", 1, 0x3F, 0, 1, 0), ErrorCode.INVALID_REQUEST),
        (struct.pack(">BBHII", 1, 0x60, 0, 1, 0), ErrorCode.INVALID_REQUEST),
        (struct.pack(">BBHII", 1, 0x7F, 0, 1, 0), ErrorCode.INVALID_REQUEST),
        (struct.pack(">BBHII", 1, 1, ENCRYPTED, 1, 0), ErrorCode.INVALID_REQUEST),
        (struct.pack(">BBHII", 1, 1, 0x0010, 1, 0), ErrorCode.INVALID_REQUEST),
        (struct.pack(">BBHII", 1, 1, 0x8000, 1, 0), ErrorCode.INVALID_REQUEST),
        (struct.pack(">BBHII", 1, 1, 0, 1, CAP + 1), ErrorCode.MESSAGE_TOO_LARGE),
        (struct.pack(">BBHII", 1, 1, 0, 1, 0xFFFF_FFFF), ErrorCode.MESSAGE_TOO_LARGE),
        (struct.pack(">BBHII", 1, 0x90, 0, 1, CAP + 1), ErrorCode.MESSAGE_TOO_LARGE),
    ],
)
@pytest.mark.parametrize("step", [1, 5, 12])
def test_each_hostile_field_is_refused_by_its_header_alone(header: bytes, code: ErrorCode, step: int) -> None:
    decoder = FrameDecoder(CAP)
    good = encode_frame(3, b"before")
    data = good + header
    got: list[Frame] = []
    for at in range(0, len(data), step):
        if decoder.error is None:
            got += decoder.feed(data[at : at + step])
    assert [frame.payload for frame in got] == [b"before"]
    assert isinstance(decoder.error, ProtocolError)
    assert decoder.error.code == code
    assert decoder.buffered_bytes == 0
    with pytest.raises(LocalProtocolError):
        decoder.feed(b"more")


def test_a_frame_of_exactly_the_cap_passes_and_one_byte_more_names_its_req_id() -> None:
    decoder = FrameDecoder(CAP)
    assert len(decoder.feed(encode_frame(1, bytes(CAP), req_id=5))) == 1
    assert decoder.feed(encode_frame(1, bytes(CAP + 1), req_id=77)) == []
    assert decoder.error is not None
    assert decoder.error_req_id == 77


def test_an_incomplete_frame_is_all_that_is_ever_buffered() -> None:
    decoder = FrameDecoder(CAP)
    data = encode_frame(1, bytes(CAP)) * 3
    most = 0
    for at in range(0, len(data), 7):
        decoder.feed(data[at : at + 7])
        most = max(most, decoder.buffered_bytes)
    assert most <= CAP + 12


def test_known_bytes() -> None:
    assert encode_frame(FrameType.REQUEST, b"hi", flags=HEADERS, req_id=0x01020304).hex() == (
        "0101000801020304000000026869"
    )
    assert encode_header(FrameType.CANCEL, 0, req_id=9) == encode_frame(FrameType.CANCEL, b"", req_id=9)


@given(st.integers(0, 0xFFFF_FFFF), st.text(max_size=300))
def test_an_error_comes_back_with_its_code_and_as_much_text_as_fits(code: int, text: str) -> None:
    (frame,) = FrameDecoder(CAP).feed(encode_error(code, text, req_id=3, text_bytes_max=100))
    got_code, got_text = decode_error(frame.payload, text_bytes_max=100)
    assert (frame.type, frame.req_id, got_code) == (FrameType.ERROR, 3, code)
    clean = text.encode("utf-8", "replace").decode()
    assert clean.startswith(got_text)
    assert len(got_text.encode()) > 96 or got_text == clean


@pytest.mark.parametrize("body", [b"", b"\0\0\0", struct.pack(">I", 1) + b"\xff", struct.pack(">I", 1) + bytes(1025)])
def test_a_malformed_error_payload_is_a_violation(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_error(body)


def test_no_limit_of_this_side_makes_an_error_that_receivers_refuse() -> None:
    (frame,) = FrameDecoder(10_000).feed(encode_error(3, "x" * 5_000, req_id=3, text_bytes_max=4_096))
    assert decode_error(frame.payload) == (3, "x" * 1_024)
