"""The asking and the answering side of a link, each alone."""

import struct

import pytest

from dep2p.errors import (
    ErrorCode,
    HandlerError,
    MessageTooLargeError,
    NoHandlerError,
    NotMemberError,
    OverloadedError,
    ProtocolError,
    RateLimitedError,
    RemoteError,
    RequestTimeoutError,
    TopicNotFoundError,
    WireError,
)
from dep2p.limits import Limits
from dep2p.protocols.messaging.admission import PeerLoad, Refusal
from dep2p.protocols.messaging.request import Abandon, Begin, Requester, SendAnswer
from dep2p.protocols.wire.compression import Zstd
from dep2p.protocols.wire.frame import (
    COMPRESSED,
    FINAL,
    HEADERS,
    REQ_ID_MAX,
    Frame,
    FrameType,
    encode_error,
)
from dep2p.protocols.wire.headers import encode_headers
from dep2p.protocols.wire.payload import PayloadReader, retry_after_headers
from tests.protocols.messaging.request_frames import (
    LIMITS,
    begun,
    one_frame,
    request_frame,
    requester,
    responder,
    response,
)

# The asking side


def test_answers_reach_the_one_who_asked_in_any_order() -> None:
    core = requester()
    ids = [core.start(f"task{index}", 10.0) for index in range(3)]
    assert ids == [1, 2, 3]
    answers = core.handle([response(3, b"c"), response(1, b"a")], 0.0)
    assert answers == [("task2", b"c"), ("task0", b"a")]
    assert core.in_flight == 1


def test_req_ids_wrap_around_past_0_and_past_those_in_flight() -> None:
    core = requester(last_id=REQ_ID_MAX - 2)
    assert [core.start("x", 1.0) for _ in range(3)] == [REQ_ID_MAX - 1, REQ_ID_MAX, 1]
    core = requester(last_id=0)
    assert [core.start("x", 1.0) for _ in range(3)] == [1, 2, 3]
    core.handle([response(2)], 0.0)
    core._last_id = REQ_ID_MAX - 1  # pyright: ignore[reportPrivateUsage]
    assert [core.start("x", 1.0) for _ in range(3)] == [REQ_ID_MAX, 2, 4]


def test_late_and_unknown_answers_are_dropped_and_counted() -> None:
    core = requester()
    req_id = core.start("a", 10.0)
    assert core.give_up(req_id)
    assert not core.give_up(req_id)
    assert core.handle([response(req_id), response(99), one_frame(encode_error(1, "x", req_id=98))], 0.0) == []
    assert core.unmatched == 3
    assert core.violation is None


def test_deadlines_expire_each_request_at_its_time_and_only_then() -> None:
    core = requester()
    assert core.next_deadline() is None
    first = core.start("late", 5.0)
    second = core.start("soon", 2.0)
    assert core.next_deadline() == 2.0
    assert core.on_deadline(1.9) == []
    assert core.on_deadline(2.0) == [(second, "soon")]
    assert core.next_deadline() == 5.0
    assert core.on_deadline(9.0) == [(first, "late")]
    assert core.next_deadline() is None


def test_a_deadline_whose_request_was_answered_is_a_check_that_finds_nothing() -> None:
    core = requester()
    core.start("a", 2.0)
    core.start("b", 5.0)
    core.handle([response(1)], 1.0)
    assert core.on_deadline(2.0) == []
    assert core.next_deadline() == 5.0


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (1, RemoteError),
        (2, ProtocolError),
        (3, HandlerError),
        (4, RequestTimeoutError),
        (5, NotMemberError),
        (6, NoHandlerError),
        (7, MessageTooLargeError),
        (8, RateLimitedError),
        (9, TopicNotFoundError),
        (10, ProtocolError),
        (11, OverloadedError),
        (0, RemoteError),
        (12, RemoteError),
        (0xFFFF_FFFF, RemoteError),
    ],
)
def test_each_error_code_becomes_its_exception(code: int, kind: type[WireError]) -> None:
    core = requester()
    core.start("a", 10.0)
    headers = retry_after_headers(250) if code == 8 else b""
    ((token, error),) = core.handle([one_frame(encode_error(code, "why", req_id=1, headers=headers))], 0.0)
    assert token == "a"
    assert type(error) is kind
    assert str(error) == "why"
    if isinstance(error, RateLimitedError):
        assert error.retry_after_ms == 250
    if isinstance(error, ProtocolError):
        assert error.code == code


def test_a_text_that_is_longer_than_messages_may_be_is_an_answer() -> None:
    core: Requester[str] = Requester(PayloadReader(Limits(message_bytes_max=10), None), in_flight_max=3)
    req_id = core.start("a", 10.0)
    ((token, error),) = core.handle([one_frame(encode_error(6, "why " * 50, req_id=req_id))], 0.0)
    assert token == "a" and str(error) == "why " * 50
    assert core.violation is None


def test_an_error_about_the_link_ends_it_after_what_came_before() -> None:
    core = requester()
    core.start("a", 1.0)
    core.start("b", 1.0)
    answers = core.handle([response(1, b"x"), one_frame(encode_error(5, "stranger")), response(2, b"y")], 0.0)
    assert answers == [("a", b"x")]
    assert isinstance(core.link_error, NotMemberError)
    assert core.close() == ["b"]
    assert core.close() == []


@pytest.mark.parametrize(
    "frame",
    [
        Frame(FrameType.REQUEST, HEADERS, 2, encode_headers({1: "echo"})),
        Frame(FrameType.NOTIFY, HEADERS, 0, encode_headers({1: "echo"})),
        Frame(FrameType.CANCEL, 0, 2, b""),
        Frame(FrameType.STREAM_DATA, 0, 2, b""),
        Frame(FrameType.GOSSIP, 0, 0, b""),
        Frame(FrameType.RESPONSE, FINAL, 2, b""),
        Frame(FrameType.RESPONSE, COMPRESSED, 2, b"x"),
        Frame(FrameType.RESPONSE, HEADERS, 2, b"\xff"),
        Frame(FrameType.RESPONSE, HEADERS, 2, b""),
        Frame(FrameType.ERROR, 0, 2, b"\0"),
        Frame(FrameType.ERROR, COMPRESSED, 2, b"\0\0\0\1"),
        Frame(FrameType.ERROR, FINAL, 2, b"\0\0\0\1"),
        Frame(FrameType.ERROR, HEADERS, 2, encode_headers({4: "soon"}) + struct.pack(">I", 8)),
    ],
)
def test_what_the_answering_side_may_not_send_is_a_violation_that_keeps_earlier_answers(frame: Frame) -> None:
    core = requester()
    core.start("a", 1.0)
    core.start("b", 1.0)
    assert core.handle([response(1, b"x"), frame], 0.0) == [("a", b"x")]
    assert isinstance(core.violation, ProtocolError)
    assert core.close() == ["b"]


def test_a_full_requester_says_so() -> None:
    core = requester(in_flight_max=2)
    core.start("a", 1.0)
    assert not core.is_full
    core.start("b", 1.0)
    assert core.is_full
    core.give_up(1)
    assert not core.is_full


# The answering side


def test_a_request_begins_with_its_data_headers_and_deadline() -> None:
    core = responder()
    (job,) = begun(core.handle([request_frame(7, body=b"data", timeout_ms=1_500)], 100.0))
    assert (job.req_id, job.name, job.data, job.deadline) == (7, "echo", b"data", 101.5)
    (job,) = begun(core.handle([request_frame(8, timeout_ms=None)], 100.0))
    assert job.deadline == 130.0
    assert core.in_flight == 2


def test_a_finished_job_is_wanted_once_and_frees_its_id() -> None:
    core = responder()
    (job,) = begun(core.handle([request_frame(7)], 0.0))
    assert core.finish(job)
    assert begun(core.handle([request_frame(7)], 0.0))


def test_a_cancelled_job_is_abandoned_and_its_answer_is_not_wanted() -> None:
    load = PeerLoad(LIMITS)
    core = responder(load=load)
    (job,) = begun(core.handle([request_frame(7)], 0.0))
    (effect,) = core.handle([Frame(FrameType.CANCEL, 0, 7, b"")], 0.0)
    assert isinstance(effect, Abandon) and effect.job is job
    assert load.jobs == 1  # its handler still runs: cancelling does not let a peer run more of them
    assert not core.finish(job)
    assert load.jobs == 0
    assert core.handle([Frame(FrameType.CANCEL, 0, 7, b"")], 0.0) == []
    assert core.violation is None


def test_a_reused_id_after_cancel_is_another_job() -> None:
    core = responder()
    (old,) = begun(core.handle([request_frame(7)], 0.0))
    core.handle([Frame(FrameType.CANCEL, 0, 7, b"")], 0.0)
    (new,) = begun(core.handle([request_frame(7)], 0.0))
    assert not core.finish(old)
    assert core.finish(new)


def test_a_duplicate_id_in_flight_is_a_violation() -> None:
    core = responder()
    effects = core.handle([request_frame(7), request_frame(7)], 0.0)
    assert len(effects) == 1
    assert core.violation is not None and core.violation.code == ErrorCode.INVALID_REQUEST


def refusal_of(effects: list[Begin | Abandon | SendAnswer]) -> Frame:
    (effect,) = effects
    assert isinstance(effect, SendAnswer)
    return one_frame(effect.frame)


def test_each_refusal_has_its_code() -> None:
    core = responder()
    frame = refusal_of(core.handle([request_frame(1, name="nobody")], 0.0))
    assert frame.payload[:4] == struct.pack(">I", ErrorCode.NO_HANDLER)
    frame = refusal_of(core.handle([request_frame(2, timeout_ms=0)], 0.0))
    assert frame.payload[:4] == struct.pack(">I", ErrorCode.TIMEOUT)
    begun(core.handle([request_frame(index) for index in (3, 4, 5)], 0.0))
    frame = refusal_of(core.handle([request_frame(6)], 0.0))
    assert frame.payload[:4] == struct.pack(">I", ErrorCode.OVERLOADED)
    core.is_draining = True
    assert refusal_of(core.handle([request_frame(7)], 0.0)).payload[:4] == struct.pack(">I", ErrorCode.OVERLOADED)
    assert core.refused == {"NO_HANDLER": 1, "TIMEOUT": 1, "OVERLOADED": 2}


def test_a_rate_limited_request_is_reported_when_to_come_back() -> None:
    core = responder()
    (job,) = begun(core.handle([request_frame(1, name="slow")], 0.0))
    core.finish(job)
    frame = refusal_of(core.handle([request_frame(2, name="slow")], 0.25))
    asking = requester()
    asking.start("a", 9.0)
    asking.start("b", 9.0)
    ((_, error),) = asking.handle([frame], 0.25)
    assert isinstance(error, RateLimitedError)
    assert 750 <= error.retry_after_ms <= 752


def test_jobs_past_their_deadline_are_abandoned_and_answered_by_timeout() -> None:
    core = responder()
    short, long = begun(core.handle([request_frame(1, timeout_ms=100), request_frame(2, timeout_ms=900)], 0.0))
    assert core.next_deadline() == 0.1
    assert core.on_deadline(0.05) == []
    abandon, answer = core.on_deadline(0.1)
    assert isinstance(abandon, Abandon) and abandon.job is short
    assert isinstance(answer, SendAnswer)
    assert one_frame(answer.frame).payload[:4] == struct.pack(">I", ErrorCode.TIMEOUT)
    assert core.next_deadline() == 0.9
    assert core.finish(long)
    assert not core.finish(short)
    assert core.next_deadline() is None


def test_the_end_of_the_link_abandons_everything() -> None:
    core = responder()
    jobs = begun(core.handle([request_frame(1), request_frame(2)], 0.0))
    effects = core.close("gone")
    assert [effect.job for effect in effects if isinstance(effect, Abandon)] == jobs
    assert not any(core.finish(job) for job in jobs)


def test_a_job_refused_after_all_gets_its_error_only_while_it_is_wanted() -> None:
    core = responder()
    (job,) = begun(core.handle([request_frame(1)], 0.0))
    assert core.refuse(job, Refusal(ErrorCode.OVERLOADED, "full")) is not None
    (job,) = begun(core.handle([request_frame(1)], 0.0))
    core.close("gone")
    assert core.refuse(job, Refusal(ErrorCode.OVERLOADED, "full")) is None


@pytest.mark.parametrize(
    "frame",
    [
        request_frame(0),
        Frame(FrameType.REQUEST, 0, 1, b"no headers"),
        Frame(FrameType.REQUEST, HEADERS, 1, b""),
        Frame(FrameType.REQUEST, HEADERS, 1, encode_headers({2: 5})),
        Frame(FrameType.REQUEST, HEADERS, 1, encode_headers({1: 5})),
        Frame(FrameType.REQUEST, HEADERS, 1, encode_headers({1: "echo", 2: "soon"})),
        Frame(FrameType.REQUEST, HEADERS, 1, encode_headers({1: "echo", 2: -1})),
        Frame(FrameType.REQUEST, HEADERS, 1, encode_headers({1: "echo", 2: 2**40})),
        request_frame(1, flags=FINAL),
        request_frame(1, flags=COMPRESSED),
        request_frame(1, body=bytes(1_001)),
        Frame(FrameType.RESPONSE, 0, 1, b""),
        Frame(FrameType.ERROR, 0, 1, b"\0\0\0\1"),
        Frame(FrameType.STREAM_END, 0, 1, b""),
        Frame(FrameType.CANCEL, 0, 0, b""),
        Frame(FrameType.CANCEL, 0, 1, b"x"),
        Frame(FrameType.CANCEL, FINAL, 1, b""),
    ],
)
def test_what_the_asking_side_may_not_send_is_a_violation_that_keeps_earlier_requests(frame: Frame) -> None:
    core = responder()
    assert len(begun(core.handle([request_frame(9), frame], 0.0))) == 1
    assert isinstance(core.violation, ProtocolError)


class CountingZstd(Zstd):
    """Counts what it decompresses."""

    __slots__ = ("decompressed",)

    def __init__(self, body_bytes_max: int) -> None:
        super().__init__(body_bytes_max)
        self.decompressed = 0

    def decompress(self, body: bytes) -> bytes:
        self.decompressed += 1
        return super().decompress(body)


def test_answers_that_no_one_waits_for_are_not_decompressed() -> None:
    zstd = CountingZstd(LIMITS.message_bytes_max)
    asking: Requester[str] = Requester(PayloadReader(LIMITS, zstd), in_flight_max=10)
    wanted = asking.start("caller", 10.0)
    bomb = zstd.compress(bytes(LIMITS.message_bytes_max))
    frames = [Frame(FrameType.RESPONSE, COMPRESSED, req_id, bomb) for req_id in (7, 8, wanted, 9)]
    assert asking.handle(frames, 1.0) == [("caller", bytes(LIMITS.message_bytes_max))]
    assert (asking.unmatched, zstd.decompressed, asking.violation) == (3, 1, None)
