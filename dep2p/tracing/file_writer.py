"""The files of a trace: frames appended, files rolled, old ones removed. Called in a worker thread, one at a time."""

import fcntl
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import zstandard

from dep2p.traces.files import FRAME_EVENTS, SUFFIX, FileName, encode_frame, parse_file_name, partition_of
from dep2p.traces.salvage import salvage
from dep2p.traces.schema import SCHEMA_VERSION, DroppedEvent, TraceEvent
from dep2p.tracing.settings import TraceSettings

logger: logging.Logger = logging.getLogger("dep2p.trace")

_LEVEL: Final = 1
"""The level of zstd: takes three quarters of the time of level 3 on these lines, and no more bytes."""


class TraceFiles:
    """The files of one run of a node. Only `open` raises ``OSError``: other failed writes are counted."""

    def __init__(
        self,
        directory: Path,
        node: str,
        start_ns: int,
        settings: TraceSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``clock``: seconds, for the time after which a file is complete."""
        self.directory = directory
        self.counters: Counter[str] = Counter()
        self.error: str = ""
        """The error of the last write; empty when it succeeded."""
        self._node = node
        self._start_ns = start_ns
        self._settings = settings
        self._clock = clock
        self._compressor = zstandard.ZstdCompressor(level=_LEVEL)
        self._file: _Growing | None = None
        self._number = 0
        self._seq = 0
        self._lost: Counter[str] = Counter()

    @property
    def events(self) -> int:
        """The number of events written in this run."""
        return self._seq

    @property
    def growing(self) -> Path | None:
        """The file that is written now, by the name that it will have."""
        return None if self._file is None else self._file.path

    def open(self, first_t_us: int) -> None:
        """Make the directory, complete files of an earlier run, make room, and begin the first file.

        ``first_t_us``: the time of the event that comes first. Raises ``OSError``.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        found = salvage(self.directory, self._node)
        if found.finished or found.emptied:
            logger.info(
                "finished %d trace files of a run that was killed; %d bytes were of no whole frame",
                len(found.finished),
                found.cut_bytes,
            )
        self.counters["files_salvaged"] += len(found.finished)
        self._remove_old()
        self._file = self._open_file(first_t_us)

    def write(self, events: Sequence[TraceEvent], lost: Mapping[str, int], now_us: int) -> None:
        """Append events, and the number of lost ones before them; complete the file when it is time."""
        self._lost.update(lost)
        if self._file is not None and self._clock() - self._file.opened_s >= self._settings.roll_s:
            self._complete()
        for start in range(0, len(events), FRAME_EVENTS):
            self._write_frame(events[start : start + FRAME_EVENTS])
        if self._lost:
            t_us = events[-1].t if events else now_us
            node = self._node
            reported = Counter(self._lost)
            self._lost.clear()
            if self._write_frame(
                [DroppedEvent(SCHEMA_VERSION, node, 0, t_us, n, reason) for reason, n in reported.items()]
            ):
                self.counters["drops_reported"] += sum(reported.values())
            else:
                self._lost.clear()  # the event about lost events does not count as one
                self._lost.update(reported)

    def finish(self) -> None:
        """Complete the file. Nothing is written after that."""
        self._complete()

    def _write_frame(self, events: Sequence[TraceEvent]) -> bool:
        """Number events and append them as one frame; return False, and count them, when that failed."""
        seq = self._seq
        for event in events:
            event.seq = seq
            seq += 1
        frame = encode_frame(events, self._compressor)
        try:
            if self._file is None:
                self._file = self._open_file(events[0].t)
            self._file.append(frame)
        except OSError as error:
            self._failed(error, events)
            return False
        self._seq = seq
        self.counters["events"] += len(events)
        self.counters["bytes"] += len(frame)
        if self.error:
            logger.warning("the trace in %s is written again; %d events were lost", self.directory, self._lost_on_disk)
            self.error = ""
        if self._file.size_bytes >= self._settings.roll_bytes:
            self._complete()
        return True

    @property
    def _lost_on_disk(self) -> int:
        return self.counters["events_dropped_write_failed"]

    def _failed(self, error: OSError, events: Sequence[TraceEvent]) -> None:
        reason = error.strerror or str(error)
        if not self.error:
            logger.warning(
                "cannot write the trace in %s (%s): its events are lost until that works again",
                self.directory,
                reason,
            )
        self.error = reason
        self.counters["write_errors"] += 1
        count = sum(not isinstance(event, DroppedEvent) for event in events)
        self.counters["events_dropped_write_failed"] += count
        self._lost[f"write failed: {reason}"] += count
        if self._file is not None and self._file.is_torn:
            self._complete()  # readers stop at a torn end, so nothing may follow it

    def _open_file(self, first_t_us: int) -> "_Growing":
        file = _Growing(
            self.directory / partition_of(first_t_us) / FileName(self._node, self._start_ns, self._number).on_disk,
            self._clock(),
        )
        self._number += 1
        return file

    def _complete(self) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        try:
            if file.finish():
                self.counters["files"] += 1
        except OSError as error:
            self.counters["write_errors"] += 1
            logger.warning("cannot complete the trace file %s: %s", file.path, error.strerror or error)
        self._remove_old()

    def _remove_old(self) -> None:
        """Remove old files for the size and the age. The next growing file has its room, too."""
        settings = self._settings
        try:
            found = self._complete_files()
        except OSError as error:
            self.counters["write_errors"] += 1
            logger.warning("cannot list the trace files in %s: %s", self.directory, error.strerror or error)
            return
        total = sum(size for _, _, size, _ in found)
        oldest_s = time.time() - settings.age_max_s if settings.age_max_s else float("-inf")
        for _, path, size, modified_s in found:
            if total <= settings.disk_bytes_max - settings.roll_bytes and modified_s >= oldest_s:
                continue
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                logger.warning("cannot remove the old trace file %s: %s", path, error.strerror or error)
                continue
            total -= size
            self.counters["files_removed"] += 1
            self.counters["bytes_removed"] += size
            for empty in (path.parent, path.parent.parent):
                try:
                    empty.rmdir()
                except OSError:
                    break

    def _complete_files(self) -> list[tuple[tuple[int, int], Path, int, float]]:
        """List the node's files, of all its runs, oldest first, with size and time."""
        found: list[tuple[tuple[int, int], Path, int, float]] = []
        for path in self.directory.glob(f"date=*/hour=*/*{SUFFIX}"):
            name = parse_file_name(path.name)
            if name is not None and name.node == self._node:
                try:
                    state = path.stat()
                except FileNotFoundError:
                    continue
                found.append(((name.start_ns, name.number), path, state.st_size, state.st_mtime))
        return sorted(found)


class _Growing:
    """A file while it grows, under a hidden name, locked so that `salvage` knows that its writer lives."""

    def __init__(self, path: Path, opened_s: float) -> None:
        """Raises ``OSError``."""
        self.path = path
        self.opened_s = opened_s
        self.size_bytes = 0
        self.is_torn = False
        self._hidden = path.with_name("." + path.name)
        self._descriptor = -1
        while True:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                self._descriptor = os.open(self._hidden, flags, 0o644)
            except FileNotFoundError:
                continue  # another node has removed the empty directory at this moment
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            if self._is_there():
                return
            os.close(self._descriptor)  # another process took the file for an abandoned one, and removed it

    def _is_there(self) -> bool:
        try:
            return os.stat(self._hidden).st_ino == os.fstat(self._descriptor).st_ino
        except FileNotFoundError:
            return False

    def append(self, frame: bytes) -> None:
        """Add a whole frame, or nothing. Raises ``OSError``."""
        view = memoryview(frame)
        try:
            while view:
                view = view[os.write(self._descriptor, view) :]
        except OSError:
            try:
                os.ftruncate(self._descriptor, self.size_bytes)
            except OSError:
                self.is_torn = True
            raise
        self.size_bytes += len(frame)

    def finish(self) -> bool:
        """Give the file its name, once its bytes are on the disk. An empty one is removed; that returns False. Raises
        ``OSError``."""
        try:
            if not self.size_bytes:
                self._hidden.unlink(missing_ok=True)
                return False
            os.fsync(self._descriptor)
            os.replace(self._hidden, self.path)
            return True
        finally:
            os.close(self._descriptor)
