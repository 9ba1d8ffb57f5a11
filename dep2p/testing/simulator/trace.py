"""The trace of a simulation: the files that live nodes would have written, one or more for each node and run."""

from pathlib import Path
from types import TracebackType
from typing import Final, Self

import zstandard

from dep2p.gossipsub.tracing.libp2p_events import DropRpc, RecvRpc, SendRpc, Trace
from dep2p.gossipsub.tracing.schema_events import trace_events
from dep2p.traces.files import FRAME_EVENTS, ZSTD_LEVEL, FileName, GrowingFile
from dep2p.traces.schema import SCHEMA_VERSION, NodeStartEvent, NodeStopEvent, TraceEvent
from dep2p.types import PeerId

TRACE_EPOCH_NS: Final = 1_577_836_800 * 1_000_000_000
"""Virtual time 0 in traces: 2020-01-01T00:00:00Z, the same for all runs."""

_HOUR_US: Final = 3_600_000_000


class TraceDir:
    """Writes the events of all nodes into a directory, which is made, in the format of `dep2p.traces.files`.

    The files appear when the simulation is complete: use it as a context manager. With ``rpcs`` False the events of
    sent, received and dropped RPCs are left out, which are nine tenths of the bytes. Raises ``OSError``.
    """

    def __init__(self, directory: Path, *, rpcs: bool = True) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.rpcs = rpcs
        self.events: int = 0
        self.paths: list[Path] = []
        self._compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
        self._runs: dict[PeerId, _SimulatedRun] = {}
        self._files: list[GrowingFile] = []
        self._last_us = TRACE_EPOCH_NS // 1000

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            for node in list(self._runs):
                self.stopped(node, self._last_us / 1e6 - TRACE_EPOCH_NS / 1e9, "end of the simulation")
            self.paths += [file.finish(sync=False) for file in self._files]
            return
        for file in self._files:
            file.abandon()

    def write(self, trace: Trace, own: PeerId, now: float) -> None:
        """Write one effect of a node's router; the first one starts the node's run."""
        t_us = _micros(now)
        self._last_us = max(self._last_us, t_us)
        if not self.rpcs and isinstance(trace, SendRpc | RecvRpc | DropRpc):
            return
        run = self._runs.get(own)
        if run is None:
            run = self._runs[own] = _SimulatedRun(own, t_us)
            self._put(run, NodeStartEvent(SCHEMA_VERSION, own, 0, t_us, "simulation"))
        for event in trace_events(trace, own, run.seq, t_us):
            self._put(run, event)

    def stopped(self, own: PeerId, now: float, reason: str | None) -> None:
        """End a node's run; without a ``reason`` it was killed and had no time to say so. Nothing happens when it has
        no run."""
        run = self._runs.pop(own, None)
        if run is None:
            return
        if reason is not None:
            self._put(run, NodeStopEvent(SCHEMA_VERSION, own, run.seq, _micros(now), reason))
        self._flush(run)

    def _put(self, run: "_SimulatedRun", event: TraceEvent) -> None:
        if run.hour != event.t // _HOUR_US:
            self._flush(run)
            run.hour, run.file = event.t // _HOUR_US, None
        run.pending.append(event)
        run.seq += 1
        self.events += 1
        if len(run.pending) >= FRAME_EVENTS:
            self._flush(run)

    def _flush(self, run: "_SimulatedRun") -> None:
        if not run.pending:
            return
        if run.file is None:
            run.file = GrowingFile(
                self.directory, FileName(run.node, run.start_us * 1000, run.number), run.pending[0].t
            )
            run.number += 1
            self._files.append(run.file)
        run.file.append(run.pending, self._compressor)
        run.pending.clear()


class _SimulatedRun:
    __slots__ = ("file", "hour", "node", "number", "pending", "seq", "start_us")

    def __init__(self, node: PeerId, start_us: int) -> None:
        self.node = node
        self.start_us = start_us
        self.hour = start_us // _HOUR_US
        self.number = 0
        self.seq = 0
        self.pending: list[TraceEvent] = []
        self.file: GrowingFile | None = None


def _micros(now: float) -> int:
    return TRACE_EPOCH_NS // 1000 + round(now * 1e6)
