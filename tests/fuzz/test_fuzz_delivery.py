"""Hostile frames into both cores of reliable delivery: only protocol errors, bounded memory, nothing handled twice."""

import random
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from dep2p.errors import ProtocolError
from dep2p.protocols.delivery.receiver import ReceiveWindow
from dep2p.protocols.delivery.sender import DeliveryPolicy, Outgoing, SendWindow
from dep2p.protocols.delivery.states import ENDS, DeliveryState
from dep2p.protocols.delivery.wire import (
    NUMBER_MAX,
    WINDOW_MAX,
    Ack,
    Hello,
    decode_ack,
    decode_batch,
    decode_hello,
    encode_ack,
    encode_batch,
    encode_hello,
)
from dep2p.protocols.wire.frame import FrameDecoder, FrameType, encode_frame
from dep2p.protocols.wire.headers import HeaderKey, HeaderReader, encode_headers
from tests.protocols.delivery.world import FOLLOWS

pytestmark = pytest.mark.fuzz

FuzzRounds = Callable[[], Iterator[random.Random]]
EPOCH = b"12345678"
HEAD = encode_headers({HeaderKey.NAME: "news"})
_EDGES = [0, 1, 2, 3, 9, WINDOW_MAX, WINDOW_MAX + 1, 2**31, NUMBER_MAX - 1, NUMBER_MAX]


def number(rng: random.Random) -> int:
    return rng.choice(_EDGES) if rng.random() < 0.4 else rng.randrange(40)


def hostile_ack(rng: random.Random) -> bytes:
    ranges = [(number(rng), number(rng)) for _ in range(rng.randrange(4))]
    rejected = [(number(rng), "why" * rng.randrange(90)) for _ in range(rng.randrange(3))]
    frame = encode_ack(Ack(number(rng), ranges, rejected))
    if rng.random() < 0.2:
        payload = bytearray(frame[12:])
        if payload:
            payload[rng.randrange(len(payload))] = rng.randrange(256)
        frame = encode_frame(FrameType.ACK, bytes(payload[: rng.randrange(len(payload) + 1)]))
    return frame


def test_any_acknowledgement_ends_messages_rightly_or_is_refused(fuzz_rounds: FuzzRounds) -> None:
    for rng in fuzz_rounds():
        states: dict[int, DeliveryState] = {}

        def on_state(message: Outgoing, states: dict[int, DeliveryState] = states) -> None:
            assert message.state in FOLLOWS[states.get(message.number, DeliveryState.CREATED)]
            states[message.number] = message.state

        window = SendWindow(EPOCH, DeliveryPolicy(ack_timeout_s=1.0, age_max_s=50.0), on_state)
        now = 0.0
        for _ in range(rng.randrange(1, 60)):
            now += rng.choice([0.0, 0.1, 1.5])
            match rng.randrange(6):
                case 0:
                    message = Outgoing(b"", 0, b"x", now)
                    message.number = window.reserve()
                    window.add(message)
                case 1:
                    window.link_up(now)
                case 2:
                    window.link_down()
                case 3:
                    window.take(now, 100)
                case 4:
                    window.on_deadline(now)
                case _:
                    before = dict(window.unsettled)
                    [frame] = FrameDecoder(1 << 20).feed(hostile_ack(rng))
                    try:
                        window.on_ack(decode_ack(frame), now)
                    except ProtocolError:
                        assert window.unsettled == before
        assert all((number in window.unsettled) is (state not in ENDS) for number, state in states.items())


def hostile_message(rng: random.Random) -> bytes:
    if rng.random() < 0.7:
        return encode_frame(FrameType.ACK_REQUEST, rng.randbytes(rng.randrange(14)), req_id=number(rng))
    frame = b"".join(
        encode_batch(number(rng), HEAD, [rng.randbytes(rng.randrange(5)) for _ in range(rng.randrange(5))])
    )
    payload = bytearray(frame[12:])
    if rng.random() < 0.5:
        payload[rng.randrange(len(payload))] = rng.randrange(256)
        payload = payload[: rng.randrange(len(payload) + 1)]
    return frame[:8] + len(payload).to_bytes(4, "big") + payload


@pytest.mark.parametrize("is_bytewise", [False, True])
def test_any_frames_leave_the_receiver_bounded_and_handle_nothing_twice(
    fuzz_rounds: FuzzRounds, is_bytewise: bool
) -> None:
    for rng in fuzz_rounds():
        window = ReceiveWindow(EPOCH)
        handled: dict[int, None] = {}
        working: list[int] = []
        raw = b"".join(
            encode_hello(Hello(EPOCH if rng.random() < 0.95 else b"x" * 8, number(rng)))
            if rng.random() < 0.3
            else hostile_message(rng)
            for _ in range(rng.randrange(1, 60))
        )
        decoder = FrameDecoder(1 << 20)
        pieces = [raw[at : at + 1] for at in range(len(raw))] if is_bytewise else [raw]
        with suppress(ProtocolError):
            for frame in [frame for piece in pieces for frame in decoder.feed(piece)]:
                if frame.type == FrameType.ACK_REQUESTS:
                    _headers, bodies = decode_batch(frame, HeaderReader(100).split)
                    numbers = range(frame.req_id, frame.req_id + len(bodies))
                elif frame.req_id:
                    numbers = range(frame.req_id, frame.req_id + 1)
                else:
                    numbers = range(0)
                    window.on_hello(decode_hello(frame))
                for one in numbers:
                    if window.begin(one) == "handle":
                        assert one not in handled
                        working.append(one)
                if working and rng.random() < 0.6:
                    one = working.pop(rng.randrange(len(working)))
                    match rng.randrange(3):
                        case 0:
                            window.reject(one, "no")
                        case 1:
                            window.abandon(one)
                        case _:
                            handled[one] = None
                            window.finish(one)
        floor, done = window.dump()
        assert all(low > floor for low, _high in done + window.dump_rejected())
        assert sum(high - low + 1 for low, high in done) <= 60 * 4
        again = ReceiveWindow(EPOCH, floor=floor, done=done)
        with suppress(ProtocolError):
            for one in handled:
                assert again.begin(one) == "handled"
