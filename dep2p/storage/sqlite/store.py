"""The embedded queue store: one SQLite file, WAL, one connection in one worker thread.

Why one connection and inline checkpoints, and what it measures: docs/decisions/0015-queue-stores.md.
"""

import contextlib
import errno
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, Literal

from dep2p.errors import StoreError, StoreFullError
from dep2p.protocols.queues.range_set import joined
from dep2p.protocols.queues.records import (
    Cursor,
    CursorChange,
    DeadLetterRow,
    MessageRow,
    PartitionRecord,
    StateRow,
    StoreBatch,
    StoreStatistics,
)
from dep2p.storage.queue_store import no_wait
from dep2p.storage.sequence_check import check_numbers
from dep2p.storage.sqlite.file import damaged, explain, open_file
from dep2p.storage.sqlite.schema import DAMAGED_META, row_sum
from dep2p.storage.sqlite.segments import (
    INSERT,
    NUMBERS_OF,
    SEQ_MASK,
    Bodies,
    Segment,
    last_of,
    segment_id,
    segment_ids,
    size_up_to,
    span,
)
from dep2p.storage.sqlite.wal import log_of

Sync = Literal["always", "interval", "never"]
"""When a commit is on disk: before it returns; at most ``SYNC_INTERVAL_S`` later; or when the system decides."""

logger: logging.Logger = logging.getLogger("dep2p.storage")

SYNC_INTERVAL_S: Final = 1.0
_TRIM_ROWS: Final = 4_000
"""Messages removed from the log in one commit; more of them go with later ones, so that no commit stalls."""
_TRIM_ROWS_IDLE: Final = 1_000
"""The same between commits, when a reader may come at any moment."""
_SPACE_S: Final = 5.0
"""Seconds after a trim until the store looks at the file's free space."""
_FREE_PAGES_MIN: Final = 2_048
_FREE_PAGES_STEP: Final = 256
"""Free pages that stay in the file: 16 MiB, or a quarter of it. The rest goes back to the system, 2 MiB at a time."""


class SqliteStore:
    """A queue store in a file. ``compress_bytes_min``: bodies from this size on are compressed; 0: none."""

    is_durable = True

    def __init__(self, path: Path, *, sync: Sync = "always", compress_bytes_min: int = 4_096) -> None:
        self.path = path
        self._db: sqlite3.Connection | None = None
        self._bodies = Bodies(compress_bytes_min)
        self._last: dict[int, int] = {}
        """The last number that was ever given, by partition."""
        self._trimmed: dict[int, int] = {}
        """The last number that has left the log, by partition."""
        self._trims: dict[int, int] = {}
        """The same for partitions with such messages still in the file."""
        self.location: str = str(path)
        self.sync: Sync = sync
        self._is_unsynced = False
        self._synced_s = 0.0
        self._space_s: float | None = None
        """The time of the next look at the free space."""
        self._commits = self._fsyncs = self._rows = 0
        self.on_wait = no_wait

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
            # A trim that the end of an earlier run cut short goes on.
            oldest = db.execute(NUMBERS_OF, (*segment_ids(partition, 0, trimmed), 1)).fetchone()
            if oldest is not None and last_of(oldest) <= trimmed:
                self._trims[partition] = trimmed
        self._space_s = time.monotonic() + _SPACE_S

    def close(self) -> None:
        """Fold the log into the file, and close it. Idempotent."""
        db, self._db = self._db, None
        if db is not None:
            with contextlib.suppress(sqlite3.Error):
                db.execute("pragma wal_checkpoint(truncate)")
            with contextlib.suppress(sqlite3.Error):
                db.close()

    # Reading

    def _check_sum(self, total: object, numbers: tuple[object, ...], *blobs: object) -> None:
        if total != row_sum(numbers, *blobs):
            raise damaged(self.path, f"a record with the numbers {', '.join(map(str, numbers))[:80]} is not as it was")

    @property
    def _open_db(self) -> sqlite3.Connection:
        if self._db is None:
            raise StoreError(f"the queues' file {self.path} is closed")
        return self._db

    def load(self) -> dict[str, bytes]:
        """All definitions."""
        try:
            found: dict[str, bytes] = {}
            for key, value, total in self._open_db.execute("select key, value, sum from definitions order by key"):
                self._check_sum(total, (), key, value)
                found[key] = value
        except sqlite3.Error as error:
            raise explain(self.path, error) from error
        return found

    def load_partition(self, partition: int) -> PartitionRecord:
        """All of a partition but its messages."""
        db = self._open_db
        if self._trims.get(partition) == SEQ_MASK:  # the partition was removed, though some of it is still in the file
            return PartitionRecord()
        try:
            row = db.execute("select items, bytes from partitions where partition = ?", (partition,)).fetchone()
            record = PartitionRecord(self._last.get(partition, 0), self._trimmed.get(partition, 0), *(row or ()))
            count, size = self._sum(db, partition, record.trimmed)  # also those in segments that stay
            record.messages = max(0, record.messages - count)
            record.bytes = max(0, record.bytes - size)
            cursors = "select channel, floor, handed_out, sum from cursors where partition = ?"
            for channel, ack_floor, delivered_up_to, total in db.execute(cursors, (partition,)).fetchall():
                self._check_sum(total, (channel, partition, ack_floor, delivered_up_to))
                record.cursors[channel] = Cursor(ack_floor, delivered_up_to)
                record.done[channel] = joined(self._done(db, channel, partition))
                record.states[channel] = self._states(db, channel, partition)
                last = db.execute("select id from last_dead where channel = ?", (channel,)).fetchone()
                record.last_dead_id[channel] = 0 if last is None else int(last[0])
        except sqlite3.Error as error:
            raise explain(self.path, error) from error
        return record

    def _done(self, db: sqlite3.Connection, channel: int, partition: int) -> Iterable[tuple[int, int]]:
        for low, high, total in db.execute(
            "select low, high, sum from done where channel = ? and partition = ? order by low", (channel, partition)
        ):
            self._check_sum(total, (channel, partition, low, high))
            yield low, high

    def _states(self, db: sqlite3.Connection, channel: int, partition: int) -> list[StateRow]:
        found: list[StateRow] = []
        for *row, total in db.execute(
            "select channel, partition, seq, attempts, due_us, history, sum from states "
            "where channel = ? and partition = ? order by seq",
            (channel, partition),
        ):
            self._check_sum(total, tuple(row[:5]), row[5])
            found.append(StateRow(*row))
        return found

    def scan(self, partition: int, from_seq: int, *, items_max: int, bytes_max: int) -> list[MessageRow]:
        """Messages from ``from_seq`` on."""
        from_seq = max(from_seq, self._trimmed.get(partition, 0) + 1)
        found: list[MessageRow] = []
        size = 0
        try:
            for row in self._messages(self._open_db, partition, from_seq):
                size += len(row[3])
                if found and size > bytes_max:
                    break
                found.append(row)
                if len(found) >= items_max:
                    break
        except sqlite3.Error as error:
            raise explain(self.path, error) from error
        return found

    def _messages(self, db: sqlite3.Connection, partition: int, from_seq: int) -> Iterator[MessageRow]:
        lowest, highest = segment_ids(partition, from_seq, SEQ_MASK)
        holds = db.execute(
            "select max(id) from segments where id between ? and ?", (segment_id(partition, 0), lowest)
        ).fetchone()[0]
        for row in db.execute(
            "select * from segments where id between ? and ? order by id", (lowest if holds is None else holds, highest)
        ):
            yield from self._bodies.unpack(row, from_seq, self._end_of(db, partition, row))

    def _end_of(self, db: sqlite3.Connection, partition: int, row: Sequence[object]) -> int:
        """Return the number behind those that a damaged row may hold."""
        if span(*row[:4]) is not None:
            return SEQ_MASK
        following = db.execute(
            "select min(id) from segments where id > ? and id <= ?", (row[0], segment_id(partition, SEQ_MASK))
        ).fetchone()[0]
        return self._last.get(partition, 0) + 1 if following is None else int(following) & SEQ_MASK

    def get(self, partition: int, seqs: list[int]) -> list[MessageRow]:
        """These messages."""
        trimmed = self._trimmed.get(partition, 0)
        found: list[MessageRow] = []
        try:
            for seq in sorted(seqs):
                if seq > trimmed:
                    row = next(self._messages(self._open_db, partition, seq), None)
                    if row is not None and row.seq == seq:
                        found.append(row)
        except sqlite3.Error as error:
            raise explain(self.path, error) from error
        return found

    def scan_dead_letters(self, channel: int, after_id: int, *, items_max: int) -> list[DeadLetterRow]:
        """Dead letters behind an id."""
        found: list[DeadLetterRow] = []
        try:
            for *row, total in self._open_db.execute(
                "select channel, id, partition, seq, died_us, attempts, meta, body, history, sum from dead "
                "where channel = ? and id > ? order by id limit ?",
                (channel, after_id, items_max),
            ):
                letter = DeadLetterRow(*row)
                if total != row_sum(letter[:6], *letter[6:]):
                    letter = letter._replace(meta=DAMAGED_META, body=b"", history=b"")
                found.append(letter)
        except sqlite3.Error as error:
            raise explain(self.path, error) from error
        return found

    def count_dead_letters(self, channel: int) -> int:
        """How many dead letters there are."""
        try:
            row = self._open_db.execute("select count(*) from dead where channel = ?", (channel,)).fetchone()
        except sqlite3.Error as error:
            raise explain(self.path, error) from error
        return int(row[0])

    def _sum(self, db: sqlite3.Connection, partition: int, up_to: int) -> tuple[int, int]:
        """Count the messages of the file up to a number, and the bytes of their bodies."""
        count = size = 0
        for row in db.execute(NUMBERS_OF, (*segment_ids(partition, 0, up_to), -1)).fetchall():
            items, of = span(*row) or (0, 0)
            if last_of(row) > up_to:  # the last one
                items, of = size_up_to(db.execute("select * from segments where id = ?", (row[0],)).fetchone(), up_to)
            count += items
            size += of
        return count, size

    # Writing

    def check(self, batch: StoreBatch) -> None:
        """Raises what `commit` would raise."""
        last = check_numbers(batch.appends, self._last)
        self._step(lambda db: self._write(db, batch, last), keep=False)

    def commit(self, batch: StoreBatch) -> None:
        """Write the batch in one transaction."""
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
                except StoreError as error:  # the batch is written, and `tidy` tries again
                    logger.error("%s", error)

    def _set_trims(self, trims: dict[int, int]) -> None:
        before, self._trims = self._trims, trims
        for partition, up_to in before.items():
            if up_to == SEQ_MASK and partition not in trims:  # the partition was removed, and is gone now
                del self._last[partition], self._trimmed[partition]

    # Deferrable work

    def tidy_in_s(self) -> float | None:
        """Return when `tidy` has work to do."""
        if self._trims:
            return 0.0
        times = [self._synced_s + SYNC_INTERVAL_S] if self._is_unsynced else []
        if self._space_s is not None:
            times.append(self._space_s)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def tidy(self) -> None:
        """Do one of these: remove some trimmed messages; fsync; give some free space back."""
        now_s = time.monotonic()
        if self._trims:
            self._set_trims(self._step(lambda db: self._trim(db, self._trims, _TRIM_ROWS_IDLE), keep=True))
            self._space_s = now_s + _SPACE_S
        elif self._is_unsynced and now_s >= self._synced_s + SYNC_INTERVAL_S:
            self._fsync()
        elif self._space_s is not None and now_s >= self._space_s:
            self._space_s = now_s if self._release(self._open_db) else None

    def _release(self, db: sqlite3.Connection) -> bool:
        """Give free space back. Returns whether there is more."""
        try:
            free = int(db.execute("pragma freelist_count").fetchone()[0])
            pages = int(db.execute("pragma page_count").fetchone()[0])
            if free <= max(_FREE_PAGES_MIN, pages // 4):
                return False
            db.execute(f"pragma incremental_vacuum({_FREE_PAGES_STEP})").fetchall()
            # A file that was made without auto-vacuum has nothing to give.
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
        """Write a batch. ``last``: the new last numbers. Returns the trims that are not complete."""
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
        """Write the numbers of a partition, and change the counts of its messages and bytes."""
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
        places = [(*key, change.cursor.ack_floor, change.cursor.delivered_up_to) for key, change in cursors.items()]
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
        passed = [(*key, change.cursor.ack_floor) for key, change in cursors.items()]
        # The store deletes rows below the ack floor.
        db.executemany("delete from done where channel = ? and partition = ? and low <= ?", passed)
        db.executemany("delete from states where channel = ? and partition = ? and seq <= ?", passed)

    def _trim(self, db: sqlite3.Connection, trims: dict[int, int], rows_max: int) -> dict[int, int]:
        """Remove about so many messages at most, by whole segments; return the trims that are not complete.

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
        """Cap the file at so many pages, at least its present ones, as a full disk would. Returns the cap before."""
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
