"""Frames of queues between nodes: round trips, vectors of docs/spec/queue.md, refusal of what no encoder makes."""

import pytest

from dep2p.errors import ProtocolError
from dep2p.protocols.queues.wire import exclusive as fenced
from dep2p.protocols.queues.wire import frames as wire
from dep2p.protocols.queues.wire.frames import Delivered, DeliveryResult, Point, Settle, Settled, WireMessage
from dep2p.protocols.wire.frame import FrameDecoder


def payload_of(frame: bytes, type_: int, req_id: int) -> bytes:
    (decoded,) = FrameDecoder(1 << 20).feed(frame)
    assert (decoded.type, decoded.flags, decoded.req_id) == (type_, 0, req_id)
    return decoded.payload


MESSAGES = [WireMessage(b"", b"first"), WireMessage(b"\xa1\x61\x70\x05", b""), WireMessage(b"", bytes(range(256)))]


def test_publish_and_published() -> None:
    frame = wire.encode_publish(7, "jobs", bytes(16), 41, MESSAGES)
    batch = wire.decode_publish(payload_of(frame, wire.PUBLISH, 7))
    assert batch == ("jobs", bytes(16), 41, MESSAGES)
    points = [Point(1, 1), Point(2, 1 << 39), Point(1, 2)]
    assert wire.decode_published(payload_of(wire.encode_published(7, points), wire.PUBLISHED, 7)) == points


def test_deliver() -> None:
    deliveries = [
        Delivered(3, 9, 1, 1_700_000_000_000_000, 60_000, b"", b"body"),
        Delivered(3, 10, 65_535, 0, 0, b"\xa0", b""),
    ]
    frame = wire.encode_deliver(5, deliveries)
    assert wire.decode_deliver(payload_of(frame, wire.DELIVER, 5)) == deliveries


def test_more_attempts_than_fit_are_told_as_the_most_that_fit() -> None:
    frame = wire.encode_deliver(5, [Delivered(3, 9, 1_000_000, 0, 0, b"", b"")])
    assert wire.decode_deliver(payload_of(frame, wire.DELIVER, 5))[0].attempts == 65_535


def test_settle_and_settled() -> None:
    results = [
        DeliveryResult(Settle.FINISH, 1, 2),
        DeliveryResult(Settle.REQUEUE, 1, 3, 5_000, "the reason"),
        DeliveryResult(Settle.REJECT, 1, 4, 0, "é" * 300),
    ]
    ticket, decoded = wire.decode_settle(payload_of(wire.encode_settle(5, 77, results), wire.SETTLE, 5))
    assert ticket == 77
    assert decoded[:2] == results[:2]
    assert decoded[2].reason == "é" * 100  # cut at a character's edge
    settled = Settled(77, [(1, 2, 7)], [(1, 3, 60_000), (1, 4, 1)])
    assert wire.decode_settled(payload_of(wire.encode_settled(5, settled), wire.SETTLED, 5)) == settled


def test_ready_and_refused() -> None:
    assert wire.decode_ready(payload_of(wire.encode_ready(5, 64, 1 << 20), wire.READY, 5)) == (64, 1 << 20)
    frame = wire.encode_refused(wire.REFUSED, 5, 6, "full", 50)
    assert wire.decode_refused(payload_of(frame, wire.REFUSED, 5)) == (6, 50, "full")


FRAMES = [
    (wire.encode_publish(7, "jobs", bytes(16), 41, MESSAGES), wire.decode_publish),
    (wire.encode_published(7, [Point(1, 1)]), wire.decode_published),
    (wire.encode_deliver(5, [Delivered(3, 9, 1, 5, 6, b"\xa0", b"body")]), wire.decode_deliver),
    (wire.encode_settle(5, 77, [DeliveryResult(Settle.REQUEUE, 1, 3, 5_000, "why")]), wire.decode_settle),
    (wire.encode_settled(5, Settled(1, [(1, 2, 7)], [(1, 3, 60_000)])), wire.decode_settled),
    (wire.encode_ready(5, 64, 1 << 20), wire.decode_ready),
]


@pytest.mark.parametrize(("frame", "decode"), FRAMES)
def test_every_cut_and_every_extra_byte_is_refused(frame: bytes, decode: object) -> None:
    assert callable(decode)
    payload = frame[12:]
    for end in range(len(payload)):
        with pytest.raises(ProtocolError):
            decode(payload[:end])
    with pytest.raises(ProtocolError):
        decode(payload + b"\0")


def test_counts_over_the_bound_are_refused_before_anything_is_made() -> None:
    head = b"\x04jobs\x00" + bytes(8)
    with pytest.raises(ProtocolError, match="entries"):
        wire.decode_publish(head + b"\xff\xff\xff\xff")
    with pytest.raises(ProtocolError, match="entries"):
        wire.decode_deliver(b"\xff\xff\xff\xff")
    with pytest.raises(ProtocolError, match="kind"):
        wire.decode_settle(wire.encode_settle(5, 0, [DeliveryResult(9, 1, 1)])[12:])


def test_vector_of_a_publish() -> None:
    frame = wire.encode_publish(1, "jobs", bytes(range(16)), 1, [WireMessage(b"", b"hello")])
    assert frame.hex() == (
        "01400000000000010000002d"  # version, PUBLISH, flags, req_id, length
        "046a6f6273"  # queue
        "10000102030405060708090a0b0c0d0e0f"  # publisher
        "0000000000000001"  # first number
        "00000001"  # messages
        "0000"  # attributes
        "00000005"
        "68656c6c6f"
    )


def test_frames_of_exclusive_channels() -> None:
    held = ((1, 7), (3, 0), (0xFFFF_FFFF, (1 << 64) - 1))
    beat = fenced.encode_heartbeat(5, 9, 4, held)
    assert fenced.decode_heartbeat(payload_of(beat, fenced.HEARTBEAT, 5)) == (9, 4, held)
    lease = fenced.WireLease(9, 30_000, 5, 2, held)
    assert fenced.decode_lease(payload_of(fenced.encode_lease(5, lease), fenced.LEASE, 5)) == lease
    assert fenced.decode_unlock(payload_of(fenced.encode_unlock(5, 1, 7), fenced.UNLOCK, 5)) == (1, 7)
    results = [DeliveryResult(Settle.FINISH, 1, 2), DeliveryResult(Settle.REQUEUE, 1, 3, 5_000, "the reason")]
    settle = payload_of(fenced.encode_fenced_settle(5, 7, 77, results), fenced.FENCED_SETTLE, 5)
    assert fenced.decode_fenced_settle(settle) == (7, 77, results)
    deliveries = [Delivered(1, 9, 1, 0, 60_000, b"", b"body"), Delivered(1, 10, 2, 0, 0, b"\xa0", b"")]
    deliver = payload_of(fenced.encode_fenced_deliver(5, 7, deliveries), fenced.FENCED_DELIVER, 5)
    assert fenced.decode_fenced_deliver(deliver) == (7, deliveries)
    for decode, payload in (
        (fenced.decode_heartbeat, payload_of(beat, fenced.HEARTBEAT, 5)),
        (fenced.decode_lease, payload_of(fenced.encode_lease(5, lease), fenced.LEASE, 5)),
        (fenced.decode_unlock, bytes(12)),
        (fenced.decode_fenced_settle, settle),
        (fenced.decode_fenced_deliver, deliver),
    ):
        for cut in range(len(payload)):
            with pytest.raises(ProtocolError):
                decode(payload[:cut])
        with pytest.raises(ProtocolError):
            decode(payload + b"x")


def test_what_no_encoder_of_exclusive_frames_makes_is_refused() -> None:
    mixed = [DeliveryResult(Settle.FINISH, 1, 2), DeliveryResult(Settle.FINISH, 2, 2)]
    others = [Delivered(1, 9, 1, 0, 0, b"", b""), Delivered(2, 9, 1, 0, 0, b"", b"")]
    one = [DeliveryResult(Settle.FINISH, 1, 2)]
    for decode, frame in (
        (fenced.decode_heartbeat, fenced.encode_heartbeat(5, 0, 0, ())),
        (fenced.decode_heartbeat, fenced.encode_heartbeat(5, 1, 0, ((1, 1), (1, 2)))),
        (fenced.decode_heartbeat, fenced.encode_heartbeat(5, 1, 0, [(n, 1) for n in range(1_025)])),
        (fenced.decode_fenced_settle, fenced.encode_fenced_settle(5, 7, 0, mixed)),
        (fenced.decode_fenced_settle, fenced.encode_fenced_settle(5, 0, 0, one)),
        (fenced.decode_fenced_deliver, fenced.encode_fenced_deliver(5, 7, others)),
    ):
        (decoded,) = FrameDecoder(1 << 20).feed(frame)
        with pytest.raises(ProtocolError):
            decode(decoded.payload)
