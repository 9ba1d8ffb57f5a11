"""The inbox of notifies: order, bounds, and what may not come."""

import pytest

from dep2p.errors import ErrorCode, ProtocolError
from dep2p.limits import Limits
from dep2p.protocols.messaging.notify import NotifyInbox
from dep2p.protocols.wire.compression import Zstd
from dep2p.protocols.wire.frame import COMPRESSED, FINAL, HEADERS, Frame, FrameType
from dep2p.protocols.wire.headers import encode_headers
from dep2p.protocols.wire.payload import PayloadReader


def inbox(items_max: int = 10, bytes_max: int = 10_000) -> NotifyInbox:
    return NotifyInbox(PayloadReader(Limits(), None), items_max=items_max, bytes_max=bytes_max)


def notify(body: bytes, name: str = "n") -> Frame:
    return Frame(FrameType.NOTIFY, HEADERS, 0, encode_headers({1: name}) + body)


def test_notifies_come_out_in_the_order_they_came_in() -> None:
    core = inbox()
    core.handle([notify(b"1", "a"), notify(b"2", "b")], 0.0)
    core.handle([notify(b"3", "a")], 0.0)
    taken = [core.take() for _ in range(4)]
    assert taken == [({1: "a"}, b"1"), ({1: "b"}, b"2"), ({1: "a"}, b"3"), None]
    assert core.queued_bytes == 0


def test_full_by_items_pauses_and_half_empty_resumes() -> None:
    core = inbox(items_max=4)
    core.handle([notify(b"x")] * 3, 0.0)
    assert not core.must_pause
    core.handle([notify(b"x")], 0.0)
    assert core.must_pause
    core.take()
    assert not core.may_resume
    core.take()
    assert core.may_resume


def test_full_by_bytes_pauses_too() -> None:
    core = inbox(bytes_max=1_000)
    core.handle([notify(bytes(1_000))], 0.0)
    assert core.must_pause
    assert not core.may_resume
    core.take()
    assert core.may_resume


def test_empty_notifies_count_for_memory() -> None:
    core = inbox(items_max=1_000_000, bytes_max=6_400)
    core.handle([notify(b"")] * 100, 0.0)
    assert core.must_pause


def test_clearing_reports_how_many_were_dropped() -> None:
    core = inbox()
    core.handle([notify(b"x")] * 3, 0.0)
    assert core.clear() == 3
    assert len(core) == core.queued_bytes == 0


def test_what_cannot_be_decompressed_is_a_violation_when_it_is_taken() -> None:
    zstd = Zstd(1_000)
    core = NotifyInbox(PayloadReader(Limits(), zstd), items_max=10, bytes_max=1_000_000)
    head = encode_headers({1: "n"})
    flags = HEADERS | COMPRESSED
    core.handle(
        [
            Frame(FrameType.NOTIFY, flags, 0, head + zstd.compress(bytes(1_000))),
            Frame(FrameType.NOTIFY, flags, 0, head + zstd.compress(bytes(1_001))),
        ],
        0.0,
    )
    assert core.queued_bytes < 300
    assert core.take() == ({1: "n"}, bytes(1_000))
    assert core.violation is None
    assert core.take() is None
    assert core.violation is not None and core.violation.code == ErrorCode.MESSAGE_TOO_LARGE


@pytest.mark.parametrize(
    "frame",
    [
        Frame(FrameType.NOTIFY, HEADERS, 5, encode_headers({1: "n"})),
        Frame(FrameType.NOTIFY, 0, 0, b"x"),
        Frame(FrameType.NOTIFY, HEADERS, 0, encode_headers({2: 5})),
        Frame(FrameType.NOTIFY, HEADERS | FINAL, 0, encode_headers({1: "n"})),
        Frame(FrameType.NOTIFY, HEADERS | COMPRESSED, 0, encode_headers({1: "n"}) + b"x"),
    ],
)
def test_a_malformed_notify_is_a_violation_that_keeps_earlier_ones(frame: Frame) -> None:
    core = inbox()
    core.handle([notify(b"1"), frame, notify(b"2")], 0.0)
    assert core.take() == ({1: "n"}, b"1")
    assert core.violation is None
    assert core.take() is None
    assert isinstance(core.violation, ProtocolError)
