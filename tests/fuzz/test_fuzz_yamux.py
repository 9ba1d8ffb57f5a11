"""Hostile bytes to a yamux session: only ProtocolError comes out, all is bounded, and any split is the same."""

import random
from collections.abc import Callable, Iterator

import pytest

from dep2p.errors import ProtocolError, StreamClosedError
from dep2p.host.yamux.frames import HEADER, WINDOW_INITIAL_BYTES
from dep2p.host.yamux.session import YamuxCore
from dep2p.host.yamux.stream_state import RECEIVE_WINDOW_MAX_BYTES, StreamState

pytestmark = pytest.mark.fuzz

FuzzRounds = Callable[[], Iterator[random.Random]]
STREAMS_MAX = 8
BACKLOG_MAX = 4


class Side:
    """A session under attack, with an app that reads some streams, is pushed others, and forgets the rest."""

    def __init__(self, is_initiator: bool) -> None:
        self.core: YamuxCore[StreamState] = YamuxCore(
            self, StreamState, is_initiator=is_initiator, streams_max=STREAMS_MAX, accept_backlog_max=BACKLOG_MAX
        )
        self.told: list[object] = []
        self.accepted: list[StreamState] = []
        self.received: dict[int, bytearray] = {}
        self.error: str | None = None
        for _ in range(3):
            self.core.open_stream().enqueue(b"hello")

    def on_output(self) -> None: ...

    def on_inbound_stream(self) -> None:
        if len(self.accepted) < 5:
            stream = self.core.accept_stream()
            if stream is not None:
                self.accepted.append(stream)
                kind = stream.id // 2 % 3
                if kind == 0:
                    got = self.received.setdefault(stream.id, bytearray())
                    stream.set_receiver(got.extend, self.told.append)
                elif kind == 1:
                    stream.set_receiver(lambda _data: stream.reset_state("enough"), self.told.append)

    def on_acknowledged(self) -> None: ...

    def on_pong(self, value: int) -> None:
        self.told.append(value)

    def on_go_away(self, code: int) -> None:
        self.told.append(code)

    def on_stuck(self, reason: str) -> None:
        self.told.append(reason)

    @property
    def rtt_s_min(self) -> float:
        return 1.0  # windows grow

    def now_s(self) -> float:
        return 0.0

    def attack(self, wire: bytes, steps: Iterator[int]) -> None:
        view = memoryview(wire)
        try:
            while view:
                step = next(steps)
                self.core.receive(view[:step])
                view = view[step:]
        except ProtocolError as error:
            self.error = str(error)

    def outcome(self) -> object:
        """Everything that can be seen from outside."""
        buffer = memoryview(bytearray(65_519))
        sent = [bytes(buffer[:size]) for size in iter(lambda: self.core.send_queue.fill(buffer), 0)]
        streams = {
            number: (stream.send_window, stream.receive_credit, bytes(stream.buffer), stream.read_ended)
            for number, stream in self.core.streams.items()
        }
        # How much of a body came after its stream was reset from within the receiver does depend on the split.
        counts = {name: count for name, count in self.core.counts.items() if name != "bytes_of_ended_streams"}
        return self.error, streams, self.received, counts, b"".join(sent), [str(what) for what in self.told]

    def check_bounds(self) -> None:
        core = self.core
        assert len(core.streams) <= STREAMS_MAX
        assert 0 <= core.buffered_bytes <= STREAMS_MAX * RECEIVE_WINDOW_MAX_BYTES
        assert 0 <= core.grown_bytes
        for stream in core.streams.values():
            assert 0 <= stream.receive_credit <= stream.receive_window
            assert len(stream.buffer) + stream.receive_credit <= stream.receive_window


def frame(rng: random.Random) -> bytes:
    """One frame, mostly a plausible one."""
    kind = rng.choice((0, 0, 0, 1, 1, 2, 3)) if rng.random() < 0.98 else rng.randrange(256)
    flags = rng.choice((0, 0, 0, 1, 1, 2, 4, 8, 5)) if rng.random() < 0.95 else rng.randrange(65_536)
    stream_id = rng.randrange(1, 14) if rng.random() < 0.98 else rng.choice((0, 2**32 - 1, rng.randrange(2**32)))
    if kind in (2, 3) and rng.random() < 0.9:
        stream_id = 0
    length = rng.choice((0, 1, 5, 100, 1_000)) if rng.random() < 0.97 else rng.choice((WINDOW_INITIAL_BYTES, 2**32 - 1))
    version = 0 if rng.random() < 0.995 else rng.randrange(256)
    body = b""
    if kind == 0:
        body = rng.randbytes(length if length <= WINDOW_INITIAL_BYTES else 10)
    return HEADER.pack(version, kind, flags, stream_id, length) + body


def ones() -> Iterator[int]:
    while True:
        yield 1


def some(rng: random.Random) -> Iterator[int]:
    while True:
        yield rng.randrange(1, 400)


def test_a_session(fuzz_rounds: FuzzRounds) -> None:
    for rng in fuzz_rounds():
        is_initiator = rng.random() < 0.5
        wire = b"".join(frame(rng) for _ in range(rng.randrange(1, 30)))
        if rng.random() < 0.2:
            wire = wire[: rng.randrange(len(wire) + 1)] + rng.randbytes(20)
        whole, by_byte, split = Side(is_initiator), Side(is_initiator), Side(is_initiator)
        whole.attack(wire, iter([len(wire)]))
        split.attack(wire, some(rng))
        assert split.error == whole.error
        if len(wire) < WINDOW_INITIAL_BYTES // 2:  # above it, when credit is granted depends on the split
            by_byte.attack(wire, ones())
            outcome = whole.outcome()
            assert split.outcome() == outcome
            assert by_byte.outcome() == outcome
        for side in (whole, split, by_byte):
            side.check_bounds()
        whole.core.fail("over")
        assert not whole.core.streams
        for stream in whole.accepted:
            with pytest.raises(StreamClosedError):
                stream.enqueue(b"x") if stream.error is not None else stream.reset_state("x")
                stream.enqueue(b"x")
