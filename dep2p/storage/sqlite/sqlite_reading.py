"""The reading half of a queue store in a file: what is in it, and whether it is as it was written."""

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from dep2p.errors import StoreError
from dep2p.protocols.queues.range_set import joined
from dep2p.protocols.queues.records import Cursor, DeadRow, MessageRow, PartitionRecord, StateRow
from dep2p.storage.sqlite.file import damaged, explain
from dep2p.storage.sqlite.segments import (
    NUMBERS_OF,
    SEQ_MASK,
    Bodies,
    last_of,
    segment_id,
    segment_ids,
    size_up_to,
    span,
)
from dep2p.storage.sqlite.sqlite_rows import DAMAGED_META, row_sum


class SqliteReading:
    """The part of a `SqliteStore` that writes nothing."""

    def __init__(self, path: Path, compress_bytes_min: int) -> None:
        self.path = path
        self._db: sqlite3.Connection | None = None
        self._bodies = Bodies(compress_bytes_min)
        self._last: dict[int, int] = {}
        """The last number that was ever given, by partition."""
        self._trimmed: dict[int, int] = {}
        """Up to where messages have left the log, by partition."""
        self._trims: dict[int, int] = {}
        """The same of those of whose messages some are still in the file."""

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
        if self._trims.get(partition) == SEQ_MASK:  # removed, though some of it is in the file still
            return PartitionRecord()
        try:
            row = db.execute("select items, bytes from partitions where partition = ?", (partition,)).fetchone()
            record = PartitionRecord(self._last.get(partition, 0), self._trimmed.get(partition, 0), *(row or ()))
            count, size = self._sum(db, partition, record.trimmed)  # in segments that are not done as a whole, too
            record.messages = max(0, record.messages - count)
            record.bytes = max(0, record.bytes - size)
            cursors = "select channel, floor, handed_out, sum from cursors where partition = ?"
            for channel, floor, handed_out, total in db.execute(cursors, (partition,)).fetchall():
                self._check_sum(total, (channel, partition, floor, handed_out))
                record.cursors[channel] = Cursor(floor, handed_out)
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
        """The number behind those that a damaged row may hold."""
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

    def scan_dead(self, channel: int, after_id: int, *, items_max: int) -> list[DeadRow]:
        """Dead letters behind an id."""
        found: list[DeadRow] = []
        try:
            for *row, total in self._open_db.execute(
                "select channel, id, partition, seq, died_us, attempts, meta, body, history, sum from dead "
                "where channel = ? and id > ? order by id limit ?",
                (channel, after_id, items_max),
            ):
                letter = DeadRow(*row)
                if total != row_sum(letter[:6], *letter[6:]):
                    letter = letter._replace(meta=DAMAGED_META, body=b"", history=b"")
                found.append(letter)
        except sqlite3.Error as error:
            raise explain(self.path, error) from error
        return found

    def count_dead(self, channel: int) -> int:
        """How many dead letters there are."""
        try:
            row = self._open_db.execute("select count(*) from dead where channel = ?", (channel,)).fetchone()
        except sqlite3.Error as error:
            raise explain(self.path, error) from error
        return int(row[0])

    def _sum(self, db: sqlite3.Connection, partition: int, up_to: int) -> tuple[int, int]:
        """Messages of the file up to a number, and the bytes of their bodies."""
        count = size = 0
        for row in db.execute(NUMBERS_OF, (*segment_ids(partition, 0, up_to), -1)).fetchall():
            items, of = span(*row) or (0, 0)
            if last_of(row) > up_to:  # the last one
                items, of = size_up_to(db.execute("select * from segments where id = ?", (row[0],)).fetchone(), up_to)
            count += items
            size += of
        return count, size
