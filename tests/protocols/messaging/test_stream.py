"""The stream machine: opening, items in parts, half-close each way, aborts, time limits."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dep2p.errors import (
    ErrorCode,
    HandlerError,
    LocalProtocolError,
    MessageTooLargeError,
    NoHandlerError,
    ProtocolError,
    RequestTimeoutError,
)
from dep2p.limits import Limits
from dep2p.protocols.messaging.stream import (
    PART_BYTES_MIN,
    Aborted,
    Accepted,
    Ended,
    Item,
    Stopped,
    StreamEffect,
    StreamMachine,
    StreamOpened,
)
from dep2p.protocols.wire.compression import Zstd
from dep2p.protocols.wire.frame import (
    COMPRESSED,
    FINAL,
    HEADERS,
    Frame,
    FrameDecoder,
    FrameType,
    encode_error,
    encode_frame,
)
from dep2p.protocols.wire.headers import encode_headers

LIMITS = Limits(
    message_bytes_max=4_096,
    stream_item_bytes_max=20_000,
    stream_open_timeout_s=10.0,
    stream_first_item_timeout_s=10.0,
    stream_item_timeout_s=60.0,
    compress_bytes_min=1_000,
)
HEAD = encode_headers({1: "sync"})


def machine(*, opener: bool, zstd: bool = False) -> StreamMachine:
    return StreamMachine(LIMITS, Zstd(LIMITS.message_bytes_max) if zstd else None, is_opener=opener)


def feed(to: StreamMachine, data: bytes, now: float = 0.0) -> list[StreamEffect]:
    return to.handle(FrameDecoder(1_000_000).feed(data), now)


def item_bytes(sender: StreamMachine, item: bytes) -> bytes:
    return b"".join(header + bytes(payload) for header, payload in sender.parts(item))


def opened(zstd: bool = False) -> tuple[StreamMachine, StreamMachine]:
    a, b = machine(opener=True, zstd=zstd), machine(opener=False, zstd=zstd)
    (effect,) = feed(b, a.open(HEAD, b"first", 0.0))
    assert effect == StreamOpened("sync", b"first", {1: "sync"})
    assert feed(a, b.accept()) == [Accepted()]
    return a, b


def aborted(effects: list[StreamEffect]) -> Aborted:
    assert isinstance(effects[-1], Aborted), effects
    return effects[-1]


@given(
    st.lists(st.one_of(st.binary(max_size=50), st.builds(os.urandom, st.integers(0, 20_000))), max_size=6),
    st.booleans(),
)
def test_items_come_out_as_they_were_sent_in_parts_and_compressed(items: list[bytes], zstd: bool) -> None:
    a, b = opened(zstd)
    data = b"".join(item_bytes(a, item) for item in items) + a.end()
    assert feed(b, data) == [*[Item(item) for item in items], Ended()]
    assert b.buffered_bytes == 0


def test_a_compressible_item_travels_smaller() -> None:
    a, b = opened(zstd=True)
    data = item_bytes(a, b"abc" * 5_000)
    assert len(data) < 2_000
    assert feed(b, data) == [Item(b"abc" * 5_000)]


def test_each_side_ends_on_its_own() -> None:
    a, b = opened()
    assert feed(b, a.end()) == [Ended()]
    assert feed(a, item_bytes(b, b"still")) == [Item(b"still")]
    assert feed(a, b.end()) == [Ended()]
    with pytest.raises(LocalProtocolError):
        a.parts(b"x")
    with pytest.raises(LocalProtocolError):
        a.end()


def test_cancel_stops_one_direction_only() -> None:
    a, b = opened()
    assert feed(b, a.stop()) == [Stopped()]
    assert b.peer_stopped and not a.peer_stopped
    assert a.stop() == b""
    assert feed(b, item_bytes(a, b"x")) == [Item(b"x")]
    assert feed(a, b.end()) == [Ended()]


def test_a_refused_stream_reports_why() -> None:
    a, b = machine(opener=True), machine(opener=False)
    feed(b, a.open(HEAD, b"", 0.0))
    effect = aborted(feed(a, b.abort(ErrorCode.NO_HANDLER, "nobody here")))
    assert type(effect.error) is NoHandlerError and str(effect.error) == "nobody here"
    assert effect.frame == b""
    assert a.state == b.state == "aborted"
    assert a.abort(ErrorCode.UNKNOWN, "again") == b""


def test_an_error_in_the_middle_aborts_after_the_items_before_it() -> None:
    a, b = opened()
    data = item_bytes(b, b"one") + b.abort(ErrorCode.HANDLER_FAILED, "boom")
    item, effect = feed(a, data)
    assert item == Item(b"one")
    assert isinstance(effect, Aborted) and type(effect.error) is HandlerError
    assert feed(a, encode_frame(FrameType.STREAM_DATA, b"late", flags=FINAL, req_id=1)) == []


def test_items_and_first_data_over_the_limit_are_not_sent() -> None:
    a, _ = opened()
    with pytest.raises(MessageTooLargeError):
        a.parts(bytes(20_001))
    with pytest.raises(MessageTooLargeError):
        machine(opener=True).open(HEAD, bytes(4_097), 0.0)


def data_frame(size: int, flags: int = 0) -> bytes:
    return encode_frame(FrameType.STREAM_DATA, bytes(size), flags=flags, req_id=1)


def test_reassembly_is_bounded_while_the_parts_come() -> None:
    _, b = opened()
    assert feed(b, data_frame(4_096) * 4) == []
    assert b.buffered_bytes == 16_384
    effect = aborted(feed(b, data_frame(4_096)))
    assert isinstance(effect.error, ProtocolError)
    assert effect.error.code == ErrorCode.MESSAGE_TOO_LARGE
    assert FrameDecoder(10_000).feed(effect.frame)[0].payload[:4] == bytes([0, 0, 0, 7])


@pytest.mark.parametrize(
    "frame",
    [
        data_frame(PART_BYTES_MIN - 1),
        data_frame(0),
        encode_frame(FrameType.STREAM_DATA, b"x", flags=FINAL, req_id=2),
        encode_frame(FrameType.STREAM_DATA, b"x", flags=FINAL),
        data_frame(5, FINAL | HEADERS),
        data_frame(5, FINAL | COMPRESSED),
        encode_frame(FrameType.STREAM_END, b"x", req_id=1),
        encode_frame(FrameType.STREAM_END, b"", flags=FINAL, req_id=1),
        encode_frame(FrameType.STREAM_END, b"", req_id=1) * 2,
        encode_frame(FrameType.STREAM_END, b"", req_id=1) + data_frame(5, FINAL),
        data_frame(PART_BYTES_MIN) + encode_frame(FrameType.STREAM_END, b"", req_id=1),
        encode_frame(FrameType.CANCEL, b"x", req_id=1),
        encode_frame(FrameType.CANCEL, b"", req_id=1) * 2,
        encode_frame(FrameType.REQUEST, HEAD, flags=HEADERS, req_id=1),
        encode_frame(FrameType.RESPONSE, b"", req_id=1),
        encode_frame(FrameType.NOTIFY, HEAD, flags=HEADERS),
        encode_frame(FrameType.ERROR, b"\0", req_id=1),
        encode_frame(FrameType.ERROR, b"\0\0\0\1", req_id=5),
        encode_frame(FrameType.ERROR, b"\0\0\0\1", flags=FINAL, req_id=1),
    ],
)
def test_what_is_not_allowed_on_an_open_stream_aborts_it_with_an_error_frame(frame: bytes) -> None:
    _, b = opened()
    effect = aborted(feed(b, frame))
    assert isinstance(effect.error, ProtocolError)
    assert FrameDecoder(10_000).feed(effect.frame)[0].type == FrameType.ERROR
    assert b.state == "aborted"


@pytest.mark.parametrize(
    ("opener", "frame"),
    [
        (False, data_frame(5, FINAL)),
        (False, encode_frame(FrameType.RESPONSE, b"", req_id=1)),
        (False, encode_error(1, "x", req_id=1)),
        (False, encode_frame(FrameType.REQUEST, HEAD, flags=HEADERS, req_id=2)),
        (False, encode_frame(FrameType.REQUEST, b"no name", req_id=1)),
        (True, data_frame(5, FINAL)),
        (True, encode_frame(FrameType.STREAM_END, b"", req_id=1)),
        (True, encode_frame(FrameType.REQUEST, HEAD, flags=HEADERS, req_id=1)),
    ],
)
def test_what_is_not_allowed_while_opening_aborts(opener: bool, frame: bytes) -> None:
    core = machine(opener=opener)
    if opener:
        core.open(HEAD, b"", 0.0)
    assert isinstance(aborted(feed(core, frame)).error, ProtocolError)


def test_a_violation_of_the_frame_itself_aborts_once() -> None:
    _, b = opened()
    effect = b.violated(ProtocolError("bad", ErrorCode.UNSUPPORTED_VERSION))
    assert effect is not None and effect.frame
    assert b.violated(ProtocolError("bad")) is None


def test_the_first_and_the_later_items_have_their_own_time_limits() -> None:
    a, b = opened()
    assert b.next_deadline() is None
    b.expect_item(100.0)
    assert b.next_deadline() == 105.0  # a look at what has moved
    assert b.on_deadline(105.0) == []
    assert b.next_deadline() == 110.0
    feed(b, item_bytes(a, b"1"), 105.0)
    assert b.next_deadline() is None
    b.expect_item(106.0)
    assert b.on_deadline(165.9) == []
    effect = aborted(b.on_deadline(166.0))
    assert type(effect.error) is RequestTimeoutError
    assert isinstance(aborted(feed(a, effect.frame)).error, RequestTimeoutError)


def test_what_moves_in_either_direction_begins_the_time_limit_anew() -> None:
    _, b = opened()
    b.expect_item(0.0, 0)
    at = 0.0
    for progress in range(1, 100):
        at = b.next_deadline() or at
        assert b.on_deadline(at, progress) == []
    assert at > 400.0
    assert b.on_deadline(at + 9.9, 99) == []
    assert isinstance(aborted(b.on_deadline(at + 10.0, 99)).error, RequestTimeoutError)


def test_a_stream_that_is_not_answered_or_not_asked_for_in_time_is_over() -> None:
    a, b = machine(opener=True), machine(opener=False)
    a.open(HEAD, b"", 0.0)
    assert a.next_deadline() == 10.0
    assert isinstance(aborted(a.on_deadline(10.0)).error, RequestTimeoutError)
    b.expect_request(5.0)
    assert isinstance(aborted(b.on_deadline(15.0)).error, RequestTimeoutError)


@given(
    st.lists(
        st.builds(
            Frame,
            st.integers(1, 7),
            st.sampled_from([0, FINAL, HEADERS, COMPRESSED]),
            st.sampled_from([0, 1, 2]),
            st.sampled_from([b"", HEAD, bytes(2_000), b"\0\0\0\1x"]),
        )
    )
)
def test_any_frames_in_any_order_give_effects_and_never_an_exception(frames: list[Frame]) -> None:
    for core in (machine(opener=False), opened()[0], opened()[1]):
        effects = core.handle(frames, 0.0)
        assert sum(isinstance(effect, Aborted) for effect in effects) <= 1
        assert core.buffered_bytes <= LIMITS.stream_item_bytes_max


def test_a_side_that_takes_no_items_any_more_decompresses_none() -> None:
    a, b = opened(zstd=True)
    b.discards = True
    bomb = Frame(FrameType.STREAM_DATA, COMPRESSED | FINAL, 1, b"not even zstd")
    assert b.handle([bomb], 0.0) == [Item(b"")]
    assert feed(b, item_bytes(a, os.urandom(20_000)) + a.end()) == [Item(b""), Ended()]
    assert b.buffered_bytes == 0
