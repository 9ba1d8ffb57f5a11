"""Two yamux sessions without any I/O."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from dep2p.host.yamux.session import YamuxCore
from dep2p.host.yamux.stream_state import StreamState


class Recorder:
    """The owner of a core: notes what it is told."""

    def __init__(self) -> None:
        self.pongs: list[int] = []
        self.go_aways: list[int] = []
        self.stuck: list[str] = []
        self.outputs = 0
        self.clock_s = 0.0
        self.rtt_s_min = 0.0

    def on_output(self) -> None:
        self.outputs += 1

    def on_inbound_stream(self) -> None:
        pass

    def on_acknowledged(self) -> None:
        pass

    def on_pong(self, value: int) -> None:
        self.pongs.append(value)

    def on_go_away(self, code: int) -> None:
        self.go_aways.append(code)

    def on_stuck(self, reason: str) -> None:
        self.stuck.append(reason)

    def now_s(self) -> float:
        return self.clock_s


class End:
    """A core with its owner."""

    def __init__(self, *, is_initiator: bool, streams_max: int = 1_024, backlog_max: int = 256) -> None:
        self.owner = Recorder()
        self.core: YamuxCore[StreamState] = YamuxCore(
            self.owner,
            StreamState,
            is_initiator=is_initiator,
            streams_max=streams_max,
            accept_backlog_max=backlog_max,
        )

    def output(self, room: int = 65_519) -> bytes:
        """All that the core wants to send now."""
        buffer = memoryview(bytearray(room))
        parts: list[bytes] = []
        while size := self.core.send_queue.fill(buffer):
            parts.append(bytes(buffer[:size]))
        return b"".join(parts)

    def feed(self, data: bytes, step: float = math.inf) -> None:
        """Give the core ``data``, ``step`` bytes at a time."""
        view = memoryview(data)
        while view:
            size = int(min(step, len(view)))
            self.core.receive(view[:size])
            view = view[size:]


class Ends:
    """Two cores back to back."""

    def __init__(self, **options: Any) -> None:
        self.one = End(is_initiator=True, **options)
        self.other = End(is_initiator=False, **options)

    def pump(self, step: float = math.inf) -> None:
        """Carry bytes both ways until neither has any."""
        while self.one.core.send_queue.has_output or self.other.core.send_queue.has_output:
            self.other.feed(self.one.output(), step)
            self.one.feed(self.other.output(), step)

    def stream(self) -> tuple[StreamState, StreamState]:
        """A stream opened by the first end, and its other side."""
        mine = self.one.core.open_stream()
        self.pump()
        theirs = self.other.core.accept_stream()
        self.pump()
        assert theirs is not None
        return mine, theirs


@pytest.fixture
def ends() -> Ends:
    return Ends()


@pytest.fixture(scope="session")
def make_ends() -> Callable[..., Ends]:
    return Ends
