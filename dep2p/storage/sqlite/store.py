"""The embedded queue store: one SQLite file, WAL, one connection in one worker thread.

Why one connection and inline checkpoints, and what it measures: docs/decisions/0015-queue-stores.md.
"""

import contextlib
import errno
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Literal

from dep2p.errors import StoreError, StoreFullError
from dep2p.protocols.queues.records import (
    CursorChange,
    MessageRow,
    StoreBatch,
    StoreStatistics,
)
from dep2p.storage.queue_store import nobody_waits
from dep2p.storage.sequence_check import check_numbers
from dep2p.storage.sqlite.file import explain, open_file
from dep2p.storage.sqlite.segments import (
    INSERT,
    NUMBERS_OF,
    SEQ_MASK,
    Segment,
    last_of,
    segment_ids,
    span,
)
from dep2p.storage.sqlite.sqlite_reading import SqliteReading
from dep2p.storage.sqlite.sqlite_rows import row_sum
from dep2p.storage.sqlite.wal import log_of

Sync = Literal["always", "interval", "never"]
"""When a commit is on disk: before it returns; at most ``SYNC_INTERVAL_S`` later; or when the system thinks so."""

logger = logging.getLogger("dep2p.storage")

SYNC_INTERVAL_S: Final = 1.0
_TRIM_ROWS: Final = 4_000
"""Messages removed from the log in one commit; more of them go with later ones, so that no commit stalls."""
_TRIM_ROWS_IDLE: Final = 1_000
"""The same between commits, where somebody may come any moment."""
_SPACE_S: Final = 5.0
"""So long after a trim it is looked at what the file has more than it needs."""
_FREE_PAGES_MIN: Final = 2_048
_FREE_PAGES_STEP: Final = 256
"""16 MiB of free pages stay in the file, or a quarter of it; what is more goes back to the system, 2 MiB at a time."""


class SqliteStore(SqliteReading):
    """A queue store in a file. ``compress_bytes_min``: bodies from this size on are compressed; 0: none."""

    is_durable = True

    def __init__(self, path: Path, *, sync: Sync = "always", compress_bytes_min: int = 4_096) -> None:
        super().__init__(path, compress_bytes_min)
        self.place = str(path)
        self.sync: Sync = sync
        self._is_unsynced = False
        self._synced_s = 0.0
        self._space_s: float | None = None
        """When to look at the free space."""
        self._commits = self._fsyncs = self._rows = 0
        self.on_wait = nobody_waits

    # Life

    def open(self) -> None:
        """Create or migrate the file, lock it, check it. Raises StoreError, StoreLockedError."""
        self._db = open_file(self.path, is_synced=self.sync == "always")
        try:
            self._know_partitions(self._db)
        except BaseException as error:
            self._db.close()
            self._db = None
            if isinstance(error, sqlite3.Error):
                raise explain(self.path, error) from error
            raise

    def _know_partitions(self, db: sqlite3.Connection) -> None:
        for partition, last_seq, trimmed, total in db.execute(
            "select partition, last_seq, trimmed, sum from partitions"
        ):
            self._check_sum(total, (partition, last_seq, trimmed))
            self._last[partition], self._trimmed[partition] = last_seq, trimmed
        for partition, trimmed in self._trimmed.items():
            # A trim that was cut short by the end of an earlier run goes on.
            oldest = db.execute(NUMBERS_OF, (*segment_ids(partition, 0, trimmed), 1)).fetchone()
            if oldest is not None and last_of(oldest) <= trimmed:
                self._trims[partition] = trimmed
        self._space_s = time.monotonic() + _SPACE_S

    def close(self) -> None:
        """Fold the log into the file, and give it back. Idempotent."""
        db, self._db = self._db, None
        if db is not None:
            with contextlib.suppress(sqlite3.Error):
                db.execute("pragma wal_checkpoint(truncate)")
            with contextlib.suppress(sqlite3.Error):
                db.close()

    # Writing

    def check(self, batch: StoreBatch) -> None:
        """Raises what `commit` would raise."""
        last = check_numbers(batch.appends, self._last)
        self._step(lambda db: self._write(db, batch, last), keep=False)

    def commit(self, batch: StoreBatch) -> None:
        """One transaction."""
        last = check_numbers(batch.appends, self._last)
        trims = self._step(lambda db: self._write(db, batch, last), keep=True)
        self._last.update(last)
        for partition, up_to in batch.trims.items():
            self._trimmed[partition] = max(self._trimmed.get(partition, 0), up_to)
            self._last[partition] = max(self._last.get(partition, 0), up_to)
        for partition in batch.partitions_removed:
            self._last[partition] = self._trimmed[partition] = self._trims[partition] = SEQ_MASK
        self._set_trims(trims)
        if batch.trims or batch.partitions_removed or batch.channels_removed:
            self._space_s = time.monotonic() + _SPACE_S
        self._commits += 1
        self._rows += len(batch.appends)
        if self.sync == "always":
            self._fsyncs += 1
        elif self.sync == "interval":
            self._is_unsynced = True
            if time.monotonic() - self._synced_s >= SYNC_INTERVAL_S:
                try:
                    self._fsync()
                except StoreError as error:  # it is written, and `tidy` tries again: failed, it would come twice
                    logger.error("%s", error)

    def _set_trims(self, trims: dict[int, int]) -> None:
        before, self._trims = self._trims, trims
        for partition, up_to in before.items():
            if up_to == SEQ_MASK and partition not in trims:  # it was removed, and is gone now
                del self._last[partition], self._trimmed[partition]

    # What can wait

    def tidy_in_s(self) -> float | None:
        """When `tidy` has something to do."""
        if self._trims:
            return 0.0
        times = [self._synced_s + SYNC_INTERVAL_S] if self._is_unsynced else []
        if self._space_s is not None:
            times.append(self._space_s)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def tidy(self) -> None:
        """One of: remove some of what was trimmed; fsync; give some free space back."""
        now_s = time.monotonic()
        if self._trims:
            self._set_trims(self._step(lambda db: self._trim(db, self._trims, _TRIM_ROWS_IDLE), keep=True))
            self._space_s = now_s + _SPACE_S
        elif self._is_unsynced and now_s >= self._synced_s + SYNC_INTERVAL_S:
            self._fsync()
        elif self._space_s is not None and now_s >= self._space_s:
            self._space_s = now_s if self._give_back(self._open_db) else None

    def _give_back(self, db: sqlite3.Connection) -> bool:
        """Whether there is more to give back."""
        try:
            free = int(db.execute("pragma freelist_count").fetchone()[0])
            pages = int(db.execute("pragma page_count").fetchone()[0])
            if free <= max(_FREE_PAGES_MIN, pages // 4):
                return False
            db.execute(f"pragma incremental_vacuum({_FREE_PAGES_STEP})").fetchall()
            # A file that was made without it has nothing to give.
            return int(db.execute("pragma freelist_count").fetchone()[0]) < free
        except sqlite3.Error as error:
            raise explain(self.path, error) from error

    def _step(self, write: Callable[[sqlite3.Connection], dict[int, int]], *, keep: bool) -> dict[int, int]:
        db = self._open_db
        try:
            db.execute("begin immediate")
            try:
                trims = write(db)
                if keep:
                    self.on_wait()
                db.execute("commit" if keep else "rollback")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    db.execute("rollback")
                raise
        except sqlite3.Error as error:
            raise explain(self.path, error, is_commit=keep) from error
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise StoreFullError(f"no room for the queues' file {self.path}: free some space") from error
            raise StoreError(f"the queues' file {self.path}: {error}") from error
        return trims

    def _fsync(self) -> None:
        try:
            with contextlib.suppress(FileNotFoundError), log_of(self.path).open("rb") as file:
                os.fsync(file.fileno())
                self._fsyncs += 1
        except OSError as error:
            raise StoreError(f"the queues' file {self.path}: {error}. Check the disk; it is tried again") from error
        self._is_unsynced = False
        self._synced_s = time.monotonic()

    def _write(self, db: sqlite3.Connection, batch: StoreBatch, last: dict[int, int]) -> dict[int, int]:
        """``last``: the new last numbers. Gives the trims that are not through."""
        if batch.definitions:
            self._define(db, batch.definitions)
        if batch.appends:
            self._append(db, batch.appends)
        if batch.cursors:
            self._move(db, batch.cursors)
        if batch.dead_added:
            db.executemany(
                "insert into dead values(?,?,?,?,?,?,?,?,?,?)",
                [(*row, row_sum(row[:6], *row[6:])) for row in batch.dead_added],
            )
            db.executemany(
                "insert into last_dead values(?,?) on conflict(channel) do update set id = max(id, excluded.id)",
                [(row.channel, row.id) for row in batch.dead_added],
            )
        if batch.dead_removed:
            db.executemany("delete from dead where channel = ? and id = ?", batch.dead_removed)
        for partition, up_to in batch.trims.items():
            trimmed = max(self._trimmed.get(partition, 0), up_to)
            last_seq = max(last.get(partition) or self._last.get(partition, 0), up_to)
            self._number(db, partition, last_seq, trimmed, 0, 0)
        for partition in batch.partitions_removed:
            self._number(db, partition, SEQ_MASK, SEQ_MASK, 0, 0)
            for table in ("cursors", "done", "states"):
                db.execute(f"delete from {table} where partition = ?", (partition,))
        removed = dict.fromkeys(batch.partitions_removed, SEQ_MASK)
        trims = self._trim(db, {**self._trims, **batch.trims, **removed}, _TRIM_ROWS)
        for channel in batch.channels_removed:
            for table in ("cursors", "done", "states", "dead", "last_dead"):
                db.execute(f"delete from {table} where channel = ?", (channel,))
        return trims

    def _number(
        self, db: sqlite3.Connection, partition: int, last_seq: int, trimmed: int, items: int, size: int
    ) -> None:
        """How far a partition is, and what comes to its messages and bytes."""
        db.execute(
            "insert into partitions values(?,?,?,?,?,?) on conflict(partition) do update set "
            "last_seq = excluded.last_seq, trimmed = excluded.trimmed, sum = excluded.sum, "
            "items = items + excluded.items, bytes = bytes + excluded.bytes",
            (partition, last_seq, trimmed, items, size, row_sum((partition, last_seq, trimmed))),
        )

    def _define(self, db: sqlite3.Connection, definitions: dict[str, bytes | None]) -> None:
        db.executemany(
            "insert or replace into definitions values(?,?,?)",
            [(key, value, row_sum((), key, value)) for key, value in definitions.items() if value is not None],
        )
        db.executemany(
            "delete from definitions where key = ?", [(key,) for key, value in definitions.items() if value is None]
        )

    def _append(self, db: sqlite3.Connection, appends: list[MessageRow]) -> None:
        by_partition: dict[int, list[MessageRow]] = {}
        for row in appends:
            others = by_partition.get(row[0])
            if others is None:
                by_partition[row[0]] = [row]
            else:
                others.append(row)
        segments: list[Segment] = []
        for partition, rows in by_partition.items():
            made = list(self._bodies.pack(partition, rows))
            size = sum([each.body_bytes for each in made])
            self._number(db, partition, rows[-1][1], self._trimmed.get(partition, 0), len(rows), size)
            segments += made
        # With each statement the interpreter's lock changes hands, and the event loop wants it, too.
        if len(segments) == 1:
            db.execute(INSERT, segments[0])
        else:
            db.executemany(INSERT, segments)

    def _move(self, db: sqlite3.Connection, cursors: dict[tuple[int, int], CursorChange]) -> None:
        places = [(*key, change.cursor.floor, change.cursor.handed_out) for key, change in cursors.items()]
        db.executemany("insert or replace into cursors values(?,?,?,?,?)", _summed(places))
        removed = [(*key, seq) for key, change in cursors.items() for seq in change.states_removed]
        if removed:
            db.executemany("delete from states where channel = ? and partition = ? and seq = ?", removed)
        states = [state for change in cursors.values() for state in change.states_set]
        if states:
            db.executemany(
                "insert or replace into states values(?,?,?,?,?,?,?)",
                [(*state, row_sum(state[:5], state[5])) for state in states],
            )
        done = [(*key, low, high) for key, change in cursors.items() for low, high in change.done_added]
        if done:
            db.executemany(
                "insert into done values(?,?,?,?,?) on conflict do update set high = excluded.high, sum = excluded.sum "
                "where excluded.high > high",
                _summed(done),
            )
        passed = [(*key, change.cursor.floor) for key, change in cursors.items()]
        # What the floor has passed is forgotten.
        db.executemany("delete from done where channel = ? and partition = ? and low <= ?", passed)
        db.executemany("delete from states where channel = ? and partition = ? and seq <= ?", passed)

    def _trim(self, db: sqlite3.Connection, trims: dict[int, int], rows_max: int) -> dict[int, int]:
        """Remove about so many messages at most, by whole segments; gives the trims that are not through.

        A partition that was removed is trimmed as a whole, up to `SEQ_MASK`: a very large one takes many steps, too.
        """
        left = rows_max
        unfinished: dict[int, int] = {}
        for partition, up_to in trims.items():
            if left <= 0:
                unfinished[partition] = up_to
                continue
            passed: list[Sequence[int]] = []
            count = size = 0
            for row in db.execute(NUMBERS_OF, (*segment_ids(partition, 0, up_to), left + 1)):
                if last_of(row) > up_to:
                    break
                if count >= left:
                    unfinished[partition] = up_to
                    break
                items, of = span(*row) or (0, 0)
                passed.append(row)
                count += items
                size += of
            if passed:
                db.execute("delete from segments where id between ? and ?", (passed[0][0], passed[-1][0]))
                db.execute(
                    "update partitions set items = max(0, items - ?), bytes = max(0, bytes - ?) where partition = ?",
                    (count, size, partition),
                )
                left -= max(count, len(passed))
            if up_to == SEQ_MASK and partition not in unfinished:
                db.execute("delete from partitions where partition = ?", (partition,))
        return unfinished

    # Watching

    def limit_pages(self, pages: int) -> int:
        """Cap the file at so many pages, at least what it has now, as a full disk would; gives the cap before."""
        db = self._open_db
        before = int(db.execute("pragma max_page_count").fetchone()[0])
        db.execute(f"pragma max_page_count={pages or 1}")
        return before

    def statistics(self) -> StoreStatistics:
        """Counts since `open`, and the size on disk."""
        size = 0
        for suffix in ("", "-wal"):
            with contextlib.suppress(OSError):
                size += self.path.with_name(self.path.name + suffix).stat().st_size
        return StoreStatistics(
            bytes_on_disk=size,
            commits=self._commits,
            fsyncs=self._fsyncs,
            rows_written=self._rows,
            bodies_compressed=self._bodies.compressed,
            compressed_from_bytes=self._bodies.from_bytes,
            compressed_to_bytes=self._bodies.to_bytes,
        )


def _summed(rows: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return [(*row, row_sum(row)) for row in rows]
