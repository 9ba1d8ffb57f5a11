"""The embedded queue store: one SQLite file, WAL, one connection in one worker thread.

Why one connection and inline checkpoints, and what it measures: docs/decisions/0015-queue-stores.md.
"""

import contextlib
import errno
import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal

import zstandard

from dep2p.errors import StoreError, StoreFullError, StoreLockedError
from dep2p.protocols.queue.records import (
    Cursor,
    CursorChange,
    DeadRow,
    MessageRow,
    PartitionRecord,
    StateRow,
    StoreBatch,
    StoreStatistics,
)
from dep2p.storage.sqlite_schema import MIGRATIONS, SCHEMA_VERSION

Sync = Literal["always", "interval", "never"]
"""When a commit is on disk: before it returns; with the first commit ``SYNC_INTERVAL_S`` after the last fsync
(so the last commits before a pause when the system thinks so); or always when the system thinks so."""

SYNC_INTERVAL_S: Final = 1.0
_SEQ_BITS: Final = 40
"""The id of a row of messages is its partition and, in these bits, its number: appending costs a third so."""
_SEQ_MASK: Final = (1 << _SEQ_BITS) - 1
_ROWS_AT_ONCE: Final = (64, 8, 1)
"""Messages in one statement: with each the interpreter's lock changes hands, and the event loop wants it too."""
_INSERTS: Final = {many: f"insert into messages values {','.join(['(?,?,?,?)'] * many)}" for many in _ROWS_AT_ONCE}
_TRIM_ROWS: Final = 4_000
"""Messages removed from the log in one commit; more of them go with later ones, so that no commit stalls."""
_PAGE_BYTES: Final = 8_192
_CHECKPOINT_PAGES: Final = 512
"""Folded into the file after 4 MiB: larger steps save nothing, and make a commit now and then wait for 30 ms."""
_QUICK_CHECK_BYTES_MAX: Final = 67_108_864
"""Up to this size a file is checked as a whole when its last owner did not close it."""
_BODY_BYTES_MAX: Final = 1 << 30


class SqliteStore:
    """A queue store in a file. ``compress_bytes_min``: bodies from this size on are compressed; 0: none."""

    is_durable = True

    def __init__(self, path: Path, *, sync: Sync = "always", compress_bytes_min: int = 4_096) -> None:
        self.path = path
        self.place = str(path)
        self.sync: Sync = sync
        self._compress_bytes_min = compress_bytes_min
        self._db: sqlite3.Connection | None = None
        self._compressor = zstandard.ZstdCompressor(level=1)
        self._decompressor = zstandard.ZstdDecompressor()
        self._trims: dict[int, int] = {}
        self._trimmed: dict[int, int] = {}
        self._synced_s = 0.0
        self._commits = self._fsyncs = self._rows = 0
        self._packed = self._packed_from = self._packed_to = 0

    # Life

    def open(self) -> None:
        """Create or migrate the file, lock it, check it. Raises StoreError, StoreLockedError."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
            self._db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, timeout=0.5)
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"cannot open the queues' file {self.path}: {error}. Check path and rights") from error
        try:
            self._prepare(self._db)
        except BaseException as error:
            self._db.close()
            self._db = None
            if isinstance(error, sqlite3.Error):
                raise self._explain(error) from error
            raise

    def _prepare(self, db: sqlite3.Connection) -> None:
        db.execute(f"pragma page_size={_PAGE_BYTES}")  # of a new file
        db.execute("pragma locking_mode=exclusive")
        db.execute("pragma auto_vacuum=incremental")
        db.execute("pragma journal_mode=wal")
        db.execute(f"pragma synchronous={'full' if self.sync == 'always' else 'normal'}")
        db.execute(f"pragma wal_autocheckpoint={_CHECKPOINT_PAGES}")
        db.execute("pragma cache_size=-16384")
        db.execute("begin immediate")  # the lock, for as long as the file is open
        version = int(db.execute("pragma user_version").fetchone()[0])
        if version > SCHEMA_VERSION:
            db.execute("rollback")
            raise StoreError(
                f"the queues' file {self.path} was written by a newer dep2p (schema {version}, this one knows "
                f"{SCHEMA_VERSION}): start that version again, or move the file away to begin with empty queues"
            )
        if version:
            self._check_pages(db, version)  # before anything is written
        for script in MIGRATIONS[version:]:
            for statement in script.split(";"):
                if statement.strip():
                    db.execute(statement)
        db.execute(f"pragma user_version={SCHEMA_VERSION}")
        db.execute("update owner set clean = 0")
        db.execute("commit")
        self._trimmed = dict(db.execute("select partition, trimmed from partitions"))
        for partition, trimmed in self._trimmed.items():
            # A trim that was cut short by the end of an earlier run goes on.
            oldest = _oldest(db, partition)
            if oldest is not None and oldest <= trimmed:
                self._trims[partition] = trimmed

    def _check_pages(self, db: sqlite3.Connection, version: int) -> None:
        was_clean = version > 1 and bool(db.execute("select clean from owner").fetchone()[0])
        if not was_clean and self.path.stat().st_size <= _QUICK_CHECK_BYTES_MAX:
            found = db.execute("pragma quick_check(1)").fetchone()[0]
            if found != "ok":
                db.execute("rollback")
                raise self._damaged(str(found))

    def _damaged(self, detail: str) -> StoreError:
        return StoreError(
            f"the queues' file {self.path} is damaged ({detail}): nothing was changed. Stop here, copy it, and bring "
            "back a backup, or read what can be read with `sqlite3 FILE .recover`; moved away, queues begin empty"
        )

    def _explain(self, error: sqlite3.Error) -> StoreError:
        name = str(getattr(error, "sqlite_errorname", ""))
        if name.startswith("SQLITE_FULL") or "disk is full" in str(error):
            return StoreFullError(
                f"no room for the queues' file {self.path}: publishes are refused, acknowledgements still work. Free "
                "some space"
            )
        if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
            return StoreLockedError(
                f"the queues' file {self.path} is in use by another process: stop the daemon of that directory first"
            )
        if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
            return self._damaged(str(error))
        if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")):
            return StoreError(f"cannot write the queues' file {self.path}: {error}. Check the rights of its directory")
        if name.startswith("SQLITE_CONSTRAINT"):
            refused = StoreError(f"the queues' file {self.path} does not take this: {error}")
            refused.is_about_batch = True
            return refused
        return StoreError(f"the queues' file {self.path}: {error}")

    def close(self) -> None:
        """Fold the log into the file, and give it back. Idempotent."""
        db, self._db = self._db, None
        if db is not None:
            with contextlib.suppress(sqlite3.Error):
                db.execute("update owner set clean = 1")
            with contextlib.suppress(sqlite3.Error):
                db.execute("pragma wal_checkpoint(truncate)")
            with contextlib.suppress(sqlite3.Error):
                db.close()

    # Reading

    @property
    def _open_db(self) -> sqlite3.Connection:
        if self._db is None:
            raise StoreError(f"the queues' file {self.path} is closed")
        return self._db

    def load(self) -> dict[str, bytes]:
        """All definitions."""
        try:
            return dict(self._open_db.execute("select key, value from definitions order by key"))
        except sqlite3.Error as error:
            raise self._explain(error) from error

    def load_partition(self, partition: int) -> PartitionRecord:
        """All of a partition but its messages."""
        db = self._open_db
        try:
            row = db.execute(
                "select last_seq, trimmed, items, bytes from partitions where partition = ?", (partition,)
            ).fetchone()
            record = PartitionRecord(*row) if row is not None else PartitionRecord()
            if partition in self._trims:  # some of them are on their way out
                count, size = self._sum(db, partition, self._trims[partition])
                record.messages -= count
                record.bytes -= size
            cursors = "select channel, floor, handed_out from cursors where partition = ?"
            for channel, floor, handed_out in db.execute(cursors, (partition,)).fetchall():
                record.cursors[channel] = Cursor(floor, handed_out)
                record.done[channel] = _merged(
                    db.execute(
                        "select low, high from done where channel = ? and partition = ? order by low",
                        (channel, partition),
                    )
                )
                record.states[channel] = [
                    StateRow(channel, partition, *state)
                    for state in db.execute(
                        "select seq, attempts, due_us, history from states where channel = ? and partition = ? "
                        "order by seq",
                        (channel, partition),
                    )
                ]
                last = db.execute("select id from last_dead where channel = ?", (channel,)).fetchone()
                record.last_dead_id[channel] = 0 if last is None else int(last[0])
        except sqlite3.Error as error:
            raise self._explain(error) from error
        return record

    def scan(self, partition: int, from_seq: int, *, items_max: int, bytes_max: int) -> list[MessageRow]:
        """Messages from ``from_seq`` on."""
        from_seq = max(from_seq, self._trimmed.get(partition, 0) + 1)
        found: list[MessageRow] = []
        size = 0
        try:
            for row_id, packed, meta, body in self._open_db.execute(
                "select id, packed, meta, body from messages where id between ? and ? order by id limit ?",
                (_id(partition, from_seq), _id(partition, _SEQ_MASK), items_max),
            ):
                row = MessageRow(partition, row_id & _SEQ_MASK, meta, self._unpack(packed, body))
                size += len(row.body)
                if found and size > bytes_max:
                    break
                found.append(row)
        except sqlite3.Error as error:
            raise self._explain(error) from error
        return found

    def get(self, partition: int, seqs: list[int]) -> list[MessageRow]:
        """These messages."""
        trimmed = self._trimmed.get(partition, 0)
        found: list[MessageRow] = []
        try:
            for seq in sorted(seqs):
                row = self._open_db.execute(
                    "select packed, meta, body from messages where id = ?", (_id(partition, seq),)
                ).fetchone()
                if row is not None and seq > trimmed:
                    found.append(MessageRow(partition, seq, row[1], self._unpack(row[0], row[2])))
        except sqlite3.Error as error:
            raise self._explain(error) from error
        return found

    def scan_dead(self, channel: int, after_id: int, *, items_max: int) -> list[DeadRow]:
        """Dead letters behind an id."""
        try:
            return [
                DeadRow(channel, *row)
                for row in self._open_db.execute(
                    "select id, partition, seq, died_us, attempts, meta, body, history from dead "
                    "where channel = ? and id > ? order by id limit ?",
                    (channel, after_id, items_max),
                )
            ]
        except sqlite3.Error as error:
            raise self._explain(error) from error

    def count_dead(self, channel: int) -> int:
        """How many dead letters there are."""
        try:
            row = self._open_db.execute("select count(*) from dead where channel = ?", (channel,)).fetchone()
        except sqlite3.Error as error:
            raise self._explain(error) from error
        return int(row[0])

    # Writing

    def check(self, batch: StoreBatch) -> None:
        """Raises what `commit` would raise."""
        self._step(lambda db: self._write(db, batch), keep=False)

    def commit(self, batch: StoreBatch) -> None:
        """One transaction."""
        self._step(lambda db: self._write(db, batch), keep=True)
        for partition, up_to in batch.trims.items():
            self._trims[partition] = self._trimmed[partition] = up_to
        for partition in batch.partitions_removed:
            self._trims.pop(partition, None)
            self._trimmed.pop(partition, None)
        self._commits += 1
        self._rows += len(batch.appends)
        if self.sync == "always":
            self._fsyncs += 1
        elif self.sync == "interval":
            now_s = time.monotonic()
            if now_s - self._synced_s >= SYNC_INTERVAL_S:
                self._synced_s = now_s
                self._fsync()

    def _step(self, write: Callable[[sqlite3.Connection], None], *, keep: bool) -> None:
        db = self._open_db
        try:
            db.execute("begin immediate")
            try:
                write(db)
                db.execute("commit" if keep else "rollback")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    db.execute("rollback")
                raise
        except sqlite3.Error as error:
            raise self._explain(error) from error
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise StoreFullError(f"no room for the queues' file {self.path}: free some space") from error
            raise StoreError(f"the queues' file {self.path}: {error}") from error

    def _fsync(self) -> None:
        wal = self.path.with_name(self.path.name + "-wal")
        with contextlib.suppress(FileNotFoundError), wal.open("rb") as file:
            os.fsync(file.fileno())
            self._fsyncs += 1

    def _write(self, db: sqlite3.Connection, batch: StoreBatch) -> None:
        if batch.definitions:
            self._define(db, batch.definitions)
        if batch.appends:
            self._append(db, batch.appends)
        if batch.cursors:
            self._move(db, batch.cursors)
        if batch.dead_added:
            db.executemany("insert into dead values(?,?,?,?,?,?,?,?,?)", batch.dead_added)
            db.executemany(
                "insert into last_dead values(?,?) on conflict(channel) do update set id = max(id, excluded.id)",
                [(row.channel, row.id) for row in batch.dead_added],
            )
        if batch.dead_removed:
            db.executemany("delete from dead where channel = ? and id = ?", batch.dead_removed)
        for partition, up_to in batch.trims.items():
            db.execute(
                "insert into partitions values(?,?,?,0,0) on conflict(partition) do update set "
                "trimmed = max(trimmed, excluded.trimmed), last_seq = max(last_seq, excluded.last_seq)",
                (partition, up_to, up_to),
            )
        self._trim(db, {**self._trims, **batch.trims})
        for partition in batch.partitions_removed:
            db.execute("delete from messages where id between ? and ?", (_id(partition, 0), _id(partition, _SEQ_MASK)))
            for table in ("partitions", "cursors", "done", "states"):
                db.execute(f"delete from {table} where partition = ?", (partition,))
        for channel in batch.channels_removed:
            for table in ("cursors", "done", "states", "dead", "last_dead"):
                db.execute(f"delete from {table} where channel = ?", (channel,))

    def _define(self, db: sqlite3.Connection, definitions: dict[str, bytes | None]) -> None:
        db.executemany(
            "insert or replace into definitions values(?,?)",
            [(key, value) for key, value in definitions.items() if value is not None],
        )
        db.executemany(
            "delete from definitions where key = ?", [(key,) for key, value in definitions.items() if value is None]
        )

    def _append(self, db: sqlite3.Connection, appends: list[MessageRow]) -> None:
        least = self._compress_bytes_min
        rows: list[int | bytes] = []
        sums: dict[int, list[int]] = {}
        for partition, seq, meta, body in appends:
            size = len(body)
            packed, kept = 0, body
            if least and size >= least:
                smaller = self._compressor.compress(body)
                if len(smaller) < size:
                    packed, kept = 1, smaller
                    self._packed += 1
                    self._packed_from += size
                    self._packed_to += len(smaller)
            rows += (partition << _SEQ_BITS | seq, packed, meta, kept)
            total = sums.get(partition)
            if total is None:
                sums[partition] = [seq, 1, size]
            else:
                total[0] = seq
                total[1] += 1
                total[2] += size
        at = 0
        for many in _ROWS_AT_ONCE:
            wanted = 4 * many
            while len(rows) - at >= wanted:
                db.execute(_INSERTS[many], rows[at : at + wanted])
                at += wanted
        db.executemany(
            "insert into partitions values(?,?,0,?,?) on conflict(partition) do update set "
            "last_seq = excluded.last_seq, items = items + excluded.items, bytes = bytes + excluded.bytes",
            [(partition, *total) for partition, total in sums.items()],
        )

    def _move(self, db: sqlite3.Connection, cursors: dict[tuple[int, int], CursorChange]) -> None:
        db.executemany(
            "insert or replace into cursors values(?,?,?,?)",
            [(*key, change.cursor.floor, change.cursor.handed_out) for key, change in cursors.items()],
        )
        removed = [(*key, seq) for key, change in cursors.items() for seq in change.states_removed]
        if removed:
            db.executemany("delete from states where channel = ? and partition = ? and seq = ?", removed)
        states = [state for change in cursors.values() for state in change.states_set]
        if states:
            db.executemany("insert or replace into states values(?,?,?,?,?,?)", states)
        done = [(*key, low, high) for key, change in cursors.items() for low, high in change.done_added]
        if done:
            db.executemany(
                "insert into done values(?,?,?,?) on conflict do update set high = max(high, excluded.high)", done
            )
        passed = [(*key, change.cursor.floor) for key, change in cursors.items()]
        # What the floor has passed is forgotten.
        db.executemany("delete from done where channel = ? and partition = ? and low <= ?", passed)
        db.executemany("delete from states where channel = ? and partition = ? and seq <= ?", passed)

    def _trim(self, db: sqlite3.Connection, trims: dict[int, int]) -> None:
        left = _TRIM_ROWS
        for partition, up_to in trims.items():
            if left <= 0:
                return
            oldest = _oldest(db, partition)
            if oldest is None or oldest > up_to:
                self._trims.pop(partition, None)
                continue
            end = min(up_to, oldest + left - 1)
            self._forget(db, partition, end)
            left -= end - oldest + 1

    def _forget(self, db: sqlite3.Connection, partition: int, end: int) -> None:
        count, size = self._sum(db, partition, end)
        db.execute("delete from messages where id between ? and ?", (_id(partition, 0), _id(partition, end)))
        db.execute(
            "update partitions set items = items - ?, bytes = bytes - ? where partition = ?", (count, size, partition)
        )

    def _sum(self, db: sqlite3.Connection, partition: int, end: int) -> tuple[int, int]:
        """Messages up to a number, and the bytes of their bodies."""
        count = size = 0
        for packed, body in db.execute(
            "select packed, case packed when 0 then length(body) else body end from messages where id between ? and ?",
            (_id(partition, 0), _id(partition, end)),
        ):
            count += 1
            size += body if not packed else len(self._unpack(1, body))
        return count, size

    def _unpack(self, packed: int, body: bytes) -> bytes:
        if not packed:
            return body
        try:
            return self._decompressor.decompress(body, max_output_size=_BODY_BYTES_MAX)
        except zstandard.ZstdError as error:
            raise self._damaged(f"a body cannot be unpacked: {error}") from None

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
            bodies_compressed=self._packed,
            compressed_from_bytes=self._packed_from,
            compressed_to_bytes=self._packed_to,
        )


def _id(partition: int, seq: int) -> int:
    return partition << _SEQ_BITS | min(seq, _SEQ_MASK)


def _oldest(db: sqlite3.Connection, partition: int) -> int | None:
    """The lowest number that is still in the log."""
    found = db.execute(
        "select min(id) from messages where id between ? and ?", (_id(partition, 0), _id(partition, _SEQ_MASK))
    ).fetchone()[0]
    return None if found is None else int(found) & _SEQ_MASK


def _merged(rows: "sqlite3.Cursor") -> list[tuple[int, int]]:
    """Ranges that touch or overlap become one."""
    found: list[tuple[int, int]] = []
    for low, high in rows:
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(high, found[-1][1]))
        else:
            found.append((low, high))
    return found
