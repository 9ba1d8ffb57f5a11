"""Frames, whole and byte by byte, into every core of messaging: only protocol errors, bounded memory."""

import random
import struct
from collections.abc import Callable, Iterator

import pytest

from dep2p.errors import ProtocolError
from dep2p.limits import Limits
from dep2p.protocols.messaging.admission import PeerLoad
from dep2p.protocols.messaging.notify import NotifyInbox
from dep2p.protocols.messaging.request import Abandon, Begin, Requester, RequestPolicy, Responder
from dep2p.protocols.messaging.stream import StreamMachine
from dep2p.protocols.wire.compression import Zstd
from dep2p.protocols.wire.frame import Frame, FrameDecoder, FrameType, encode_error, encode_frame
from dep2p.protocols.wire.headers import encode_headers
from dep2p.protocols.wire.payload import PayloadReader

pytestmark = pytest.mark.fuzz

FuzzRounds = Callable[[], Iterator[random.Random]]

LIMITS = Limits(message_bytes_max=2_000, headers_bytes_max=200, stream_item_bytes_max=5_000, handlers_per_peer_max=20)
ZSTD = Zstd(LIMITS.message_bytes_max)
CAP = LIMITS.message_bytes_max + LIMITS.headers_bytes_max

_VALUES: list[object] = ["echo", "", 0, 1, 2**31, 2**40, -1, True, None, b"x", "x" * 150, [1, 2], {"a": 1}, 1.5]


def hostile_payload(rng: random.Random) -> bytes:
    match rng.randrange(8):
        case 0:
            return rng.randbytes(rng.randrange(60))
        case 1:
            return bytes(rng.choice([0, 1_024, 2_000, 2_200]))
        case 2:
            return ZSTD.compress(bytes(rng.choice([0, 10, 2_000, 2_001, 100_000])))
        case 3:
            return struct.pack(">I", rng.choice([0, 1, 5, 8, 11, 12, 2**32 - 1])) + rng.randbytes(rng.randrange(20))
        case 4:
            return b""
        case _:
            own: dict[int, object] = {rng.randrange(7): rng.choice(_VALUES) for _ in range(rng.randrange(4))}
            if rng.random() < 0.7:
                own[1] = "echo"
            head = encode_headers(own, {"k": rng.choice(_VALUES)} if rng.random() < 0.2 else None)
            body = ZSTD.compress(bytes(500)) if rng.random() < 0.3 else rng.randbytes(rng.randrange(30))
            return head + body


def hostile_frame(rng: random.Random) -> bytes:
    choice = rng.random()
    if choice < 0.03:
        return rng.randbytes(rng.randrange(30))
    if choice < 0.06:
        return encode_error(rng.randrange(13), "text", req_id=rng.randrange(4))
    payload = hostile_payload(rng)
    version = 1 if rng.random() < 0.99 else rng.randrange(256)
    type_ = rng.choice([*FrameType, 0x40, 0x80, 0xFF]) if rng.random() < 0.98 else rng.randrange(256)
    flags = rng.choice([0, 0, 1, 4, 5, 8, 8, 8, 9, 12, 13]) if rng.random() < 0.98 else rng.getrandbits(16)
    length = len(payload) if rng.random() < 0.99 else rng.getrandbits(32)
    data = bytearray(struct.pack(">BBHII", version, type_, flags, rng.randrange(4), length) + payload)
    if rng.random() < 0.05 and data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def plausible_frame(rng: random.Random) -> bytes:
    """Return a frame that a correct peer might send, so that machines come further than their first state."""
    head = encode_headers({1: "echo", 2: rng.choice([0, 5, 1_000])})
    req_id = rng.randrange(1, 4)
    match rng.randrange(7):
        case 0:
            return encode_frame(FrameType.REQUEST, head, flags=8, req_id=req_id)
        case 1:
            return encode_frame(FrameType.RESPONSE, b"r", req_id=req_id)
        case 2:
            return encode_frame(FrameType.NOTIFY, head + b"n", flags=8)
        case 3:
            return encode_frame(FrameType.CANCEL, b"", req_id=req_id)
        case 4:
            return encode_frame(FrameType.STREAM_DATA, bytes(1_024), flags=rng.choice([0, 4]), req_id=1)
        case 5:
            return encode_frame(FrameType.STREAM_END, b"", req_id=1)
        case _:
            return encode_frame(FrameType.STREAM_DATA, ZSTD.compress(bytes(1_500)), flags=5, req_id=1)


def batches(rng: random.Random, data: bytes) -> Iterator[list[Frame]]:
    """Decode it whole or in small pieces, and check that both give the same."""
    whole = FrameDecoder(CAP)
    expected = whole.feed(data)
    decoder = FrameDecoder(CAP)
    got: list[Frame] = []
    at = 0
    step_max = rng.choice([1, 3, 50, len(data) + 1])
    while at < len(data) and decoder.error is None:
        step = rng.randrange(1, step_max + 1)
        frames = decoder.feed(data[at : at + step])
        assert decoder.buffered_bytes <= CAP + 12
        got += frames
        yield frames
        at += step
    assert got == expected
    assert str(decoder.error) == str(whole.error)


def run_requester(rng: random.Random, data: bytes) -> None:
    core: Requester[int] = Requester(PayloadReader(LIMITS, rng.choice([None, ZSTD])), in_flight_max=10)
    for token in range(3):
        core.start(token, 1.0)
    answered: list[int] = []
    for frames in batches(rng, data):
        answered += [token for token, _ in core.handle(frames, 0.0)]
        if core.violation is not None or core.link_error is not None:
            break
    assert sorted(answered + core.close()) == [0, 1, 2]


def run_responder(rng: random.Random, data: bytes) -> None:
    load = PeerLoad(LIMITS)
    core = Responder(
        PayloadReader(LIMITS, rng.choice([None, ZSTD])), {"echo": RequestPolicy()}, load, default_timeout_s=1.0
    )
    running: dict[int, object] = {}
    now = 0.0
    for frames in batches(rng, data):
        effects = [*core.handle(frames, now), *core.on_deadline(now)]
        for effect in effects:
            match effect:
                case Begin(job):
                    running[id(job)] = job
                case Abandon(job):
                    assert id(job) in running
                    core.finish(job)
                    del running[id(job)]
                case _:
                    pass
        assert load.jobs == len(running) <= LIMITS.handlers_per_peer_max
        now += 0.01
        if core.violation is not None:
            break


def run_inbox(rng: random.Random, data: bytes) -> None:
    core = NotifyInbox(PayloadReader(LIMITS, rng.choice([None, ZSTD])), items_max=10, bytes_max=10_000)
    for frames in batches(rng, data):
        core.handle([frame for frame in frames if frame.type == FrameType.NOTIFY], 0.0)
    while len(core):
        item = core.take()
        assert item is None or len(item[1]) <= LIMITS.message_bytes_max
    assert core.queued_bytes == 0


def run_stream(rng: random.Random, data: bytes) -> None:
    machine = StreamMachine(LIMITS, rng.choice([None, ZSTD]), is_opener=rng.random() < 0.5)
    opener = StreamMachine(LIMITS, None, is_opener=True)
    head = encode_headers({1: "sync"})
    if rng.random() < 0.8:
        decoder = FrameDecoder(CAP)
        if rng.random() < 0.5:
            machine = StreamMachine(LIMITS, rng.choice([None, ZSTD]), is_opener=False)
            machine.handle(decoder.feed(opener.open(head, b"", 0.0)), 0.0)
            machine.accept()
        else:
            machine = StreamMachine(LIMITS, rng.choice([None, ZSTD]), is_opener=True)
            machine.open(head, b"", 0.0)
            machine.handle(decoder.feed(encode_frame(FrameType.RESPONSE, b"", req_id=1)), 0.0)
    for frames in batches(rng, data):
        machine.handle(frames, 0.0)
        assert machine.buffered_bytes <= LIMITS.stream_item_bytes_max
        if machine.state == "aborted":
            break


@pytest.mark.parametrize("run", [run_requester, run_responder, run_inbox, run_stream])
def test_hostile_frames_give_only_protocol_errors(
    run: Callable[[random.Random, bytes], None], fuzz_rounds: FuzzRounds
) -> None:
    for rng in fuzz_rounds():
        hostile_share = rng.choice([0.05, 0.3, 1.0])
        data = b"".join(
            hostile_frame(rng) if rng.random() < hostile_share else plausible_frame(rng)
            for _ in range(rng.randrange(1, 12))
        )
        run(rng, data)


def test_random_bytes_give_only_protocol_errors(fuzz_rounds: FuzzRounds) -> None:
    for rng in fuzz_rounds():
        data = rng.randbytes(rng.randrange(200))
        for _ in batches(rng, data):
            pass
        for read in (PayloadReader(LIMITS, ZSTD).read, PayloadReader(LIMITS, None).read):
            try:
                read(Frame(1, rng.randrange(16), 1, data))
            except ProtocolError:
                continue
