"""The file of the router's trace events: NDJSON in the form of libp2p's JSON tracer."""

import json
import logging
import time
from collections import Counter
from pathlib import Path
from typing import Final, TextIO

import trio

from dep2p.gossipsub.tracing.libp2p_events import Trace, TraceBuffer, trace_to_json
from dep2p.types import PeerId

_INTERVAL_S: Final = 0.25
_EVENTS_PER_WRITE: Final = 8_192

logger: logging.Logger = logging.getLogger("dep2p.io")


class TraceFile:
    """Appends a node's trace events to a file, a few times a second, in a worker thread.

    Several buffers (one per realm) may feed one file. When it cannot be written, events are dropped and counted.
    """

    def __init__(self, path: Path, own: PeerId) -> None:
        self.path = path
        self.counters: Counter[str] = Counter()
        self._own = own
        self._buffers: dict[TraceBuffer, float] = {}
        self._file: TextIO | None = None

    def add(self, buffer: TraceBuffer) -> None:
        """Write the events of this buffer, too. Its times are trio's."""
        self._buffers[buffer] = time.time() - trio.current_time()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Write until cancelled, then the buffered events. Raises ``OSError`` when the file cannot be opened."""
        self._file = await trio.to_thread.run_sync(self._open)
        task_status.started()
        try:
            while True:
                await trio.sleep(_INTERVAL_S)
                await self._write_all()
        finally:
            with trio.CancelScope(shield=True):
                await self._write_all()
                self._file.close()

    def _open(self) -> TextIO:
        return self.path.open("a", encoding="utf-8")

    async def remove(self, buffer: TraceBuffer) -> None:
        """Remove a buffer that gets no more events, after its last ones are written."""
        if buffer in self._buffers:
            await self._write_all()
            self._buffers.pop(buffer, None)

    async def _write_all(self) -> None:
        for buffer, wall_offset_s in list(self._buffers.items()):
            events = buffer.drain()
            for start in range(0, len(events), _EVENTS_PER_WRITE):
                part = events[start : start + _EVENTS_PER_WRITE]
                try:
                    await trio.to_thread.run_sync(self._write, part, wall_offset_s)
                    self.counters["trace_events_written"] += len(part)
                except OSError as error:
                    if not self.counters["trace_events_dropped_write_failed"]:
                        logger.warning("cannot write the trace %s (%s): trying on, in silence", self.path, error)
                    self.counters["trace_events_dropped_write_failed"] += len(part)

    def _write(self, events: list[tuple[float, Trace]], wall_offset_s: float) -> None:
        lines: list[str] = []
        for at, event in events:
            timestamp_ns = int((at + wall_offset_s) * 1e9)
            lines += [json.dumps(line, separators=(",", ":")) for line in trace_to_json(event, self._own, timestamp_ns)]
        if self._file is not None:
            self._file.write("\n".join(lines) + "\n")
            self._file.flush()
