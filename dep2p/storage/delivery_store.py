"""What reliable delivery keeps: messages that are on their way, and which ones of other senders were handled.

One `DeliveryStore` for a node, shared by its realms: in memory, or SQLite in the data directory, where a message is
accepted only when it is on disk. Decision: docs/decisions/0012-reliable-delivery.md.
"""

import contextlib
import itertools
import os
import sqlite3
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from dep2p.errors import StoreError, StoreFullError, StoreLockedError
from dep2p.protocols.delivery.wire import as_ranges

SCHEMA_VERSION: Final = 2
_RANGE: Final = struct.Struct(">II")


class OutboxRow(NamedTuple):
    """A message that was accepted and has not ended."""

    realm: str
    peer: str
    number: int
    created_us: int
    """Unix microseconds."""
    name: str
    """For people; it is in ``head`` too."""
    topic: str
    """Of a message for a topic; empty for a direct one."""
    head: bytes
    flags: int
    body: bytes


class LaneRow(NamedTuple):
    """The numbering of one receiver."""

    epoch: bytes
    next_number: int


class InboxRow(NamedTuple):
    """What was handled of one sender's numbering."""

    epoch: bytes
    floor: int
    done: list[tuple[int, int]]
    rejected: list[tuple[int, int]]


@dataclass(slots=True)
class DeliveryBatch:
    """One atomic step."""

    added: list[OutboxRow] = field(default_factory=list[OutboxRow])
    removed: list[tuple[str, str, int]] = field(default_factory=list[tuple[str, str, int]])
    """(realm, peer, number)."""
    lanes: dict[tuple[str, str], LaneRow] = field(default_factory=dict[tuple[str, str], LaneRow])
    """By (realm, peer)."""
    inboxes: dict[tuple[str, str], InboxRow] = field(default_factory=dict[tuple[str, str], InboxRow])
    """By (realm, peer)."""


@dataclass(slots=True)
class StoredDelivery:
    """What a realm had at the last commit."""

    rows: list[OutboxRow] = field(default_factory=list[OutboxRow])
    """By peer and number, rising."""
    lanes: dict[str, LaneRow] = field(default_factory=dict[str, LaneRow])
    inboxes: dict[str, InboxRow] = field(default_factory=dict[str, InboxRow])


class DeliveryStore(Protocol):
    """Blocking; used by one thread at a time."""

    @property
    def is_durable(self) -> bool:
        """Whether it outlives the process."""
        ...

    def load(self, realm: str) -> StoredDelivery:
        """What is kept of a realm. Raises StoreError."""
        ...

    def commit(self, batch: DeliveryBatch) -> None:
        """Write all of it, durable on return, or nothing. Raises StoreError, StoreFullError."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class MemoryDeliveryStore:
    """Keeps nothing beyond the process: the service's own tables are all there is."""

    is_durable = False

    def load(self, realm: str) -> StoredDelivery:
        """Nothing."""
        return StoredDelivery()

    def commit(self, batch: DeliveryBatch) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""


_SCHEMA: Final = """
create table if not exists outbox(
    realm text not null, peer text not null, number integer not null, created_us integer not null,
    name text not null, topic text not null, head blob not null, flags integer not null, body blob not null,
    primary key (realm, peer, number)) without rowid;
create table if not exists lanes(
    realm text not null, peer text not null, epoch blob not null, next_number integer not null,
    primary key (realm, peer)) without rowid;
create table if not exists inboxes(
    realm text not null, peer text not null, epoch blob not null, floor integer not null, done blob not null,
    rejected blob not null default x'',
    primary key (realm, peer)) without rowid;
"""


_ROWS_AT_ONCE: Final = (64, 16, 4, 1)
_INSERT: Final = {
    count: f"insert into outbox values {','.join(['(?,?,?,?,?,?,?,?,?)'] * count)}" for count in _ROWS_AT_ONCE
}


def _pack(ranges: list[tuple[int, int]]) -> bytes:
    return b"".join([_RANGE.pack(*each) for each in ranges])


def _unpack(packed: bytes) -> list[tuple[int, int]]:
    return [(low, high) for low, high in _RANGE.iter_unpack(packed)]


class SqliteDeliveryStore:
    """One file, WAL, fsync at each commit, locked for this process.

    Raises :class:`StoreError` when it cannot be opened: nothing is ever deleted or made anew over a damaged file.
    """

    is_durable = True

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=0.5)
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"cannot open the outbox {path}: {error}") from error
        try:
            self._prepare()
        except BaseException as error:
            self._db.close()
            if isinstance(error, sqlite3.Error):
                raise self._explain(error) from error
            raise

    def _prepare(self) -> None:
        db = self._db
        db.execute("pragma locking_mode=exclusive")
        db.execute("pragma journal_mode=wal")
        db.execute("pragma synchronous=full")
        db.execute("pragma wal_autocheckpoint=4000")
        db.execute("begin immediate")  # takes the lock now, for as long as it is open
        version = db.execute("pragma user_version").fetchone()[0]
        if version > SCHEMA_VERSION:
            db.execute("rollback")
            raise StoreError(
                f"the outbox {self.path} was written by a newer dep2p (schema {version}; this one knows "
                f"{SCHEMA_VERSION}): start that version, or let it send what is left and move the file away"
            )
        for statement in _SCHEMA.split(";"):
            if statement.strip():
                db.execute(statement)
        if version == 1:  # it kept what was rejected among what is done
            db.execute("alter table inboxes add column rejected blob not null default x''")
        db.execute(f"pragma user_version={SCHEMA_VERSION}")
        db.execute("commit")

    def _explain(self, error: sqlite3.Error) -> StoreError:
        name = getattr(error, "sqlite_errorname", "")
        if name.startswith("SQLITE_FULL"):
            return StoreFullError(f"no room for the outbox {self.path}: free some space, then send again")
        if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
            return StoreLockedError(f"the outbox {self.path} is in use by another process: stop that one first")
        if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
            return StoreError(
                f"the outbox {self.path} is damaged ({error}): move it away to begin with an empty one; what it held "
                "can often be read with `sqlite3 FILE .recover`"
            )
        return StoreError(f"the outbox {self.path}: {error}")

    def load(self, realm: str) -> StoredDelivery:
        """What is kept of a realm."""
        found = StoredDelivery()
        try:
            for row in self._db.execute(
                "select realm, peer, number, created_us, name, topic, head, flags, body from outbox "
                "where realm = ? order by peer, number",
                (realm,),
            ):
                found.rows.append(OutboxRow(*row))
            for peer, epoch, next_number in self._db.execute(
                "select peer, epoch, next_number from lanes where realm = ?", (realm,)
            ):
                found.lanes[peer] = LaneRow(epoch, next_number)
            for peer, epoch, floor, done, rejected in self._db.execute(
                "select peer, epoch, floor, done, rejected from inboxes where realm = ?", (realm,)
            ):
                found.inboxes[peer] = InboxRow(epoch, floor, _unpack(done), _unpack(rejected))
        except (sqlite3.Error, struct.error) as error:
            raise (
                self._explain(error)
                if isinstance(error, sqlite3.Error)
                else StoreError(f"the outbox {self.path} is damaged ({error}): move it away to begin with an empty one")
            ) from error
        return found

    def commit(self, batch: DeliveryBatch) -> None:
        """One transaction."""
        db = self._db
        try:
            db.execute("begin immediate")
            try:
                # Removed first: what ends was accepted by an earlier batch, and its number may be used anew.
                self._remove(batch.removed)
                self._add(batch.added)
                if batch.lanes:
                    db.executemany(
                        "insert or replace into lanes values(?,?,?,?)",
                        [(*key, row.epoch, row.next_number) for key, row in batch.lanes.items()],
                    )
                if batch.inboxes:
                    db.executemany(
                        "insert or replace into inboxes(realm, peer, epoch, floor, done, rejected) values(?,?,?,?,?,?)",
                        [
                            (*key, row.epoch, row.floor, _pack(row.done), _pack(row.rejected))
                            for key, row in batch.inboxes.items()
                        ],
                    )
                db.execute("commit")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    db.execute("rollback")
                raise
        except sqlite3.Error as error:
            raise self._explain(error) from error

    # Many rows in one statement: Python gives the interpreter away and asks for it again at each.

    def _remove(self, removed: list[tuple[str, str, int]]) -> None:
        by_lane: dict[tuple[str, str], list[int]] = {}
        for realm, peer, number in removed:
            by_lane.setdefault((realm, peer), []).append(number)
        for lane, numbers in by_lane.items():
            for low, high in as_ranges(numbers):
                self._db.execute(
                    "delete from outbox where realm=? and peer=? and number between ? and ?", (*lane, low, high)
                )

    def _add(self, added: list[OutboxRow]) -> None:
        at = 0
        while at < len(added):
            count = next(count for count in _ROWS_AT_ONCE if count <= len(added) - at)
            self._db.execute(_INSERT[count], [*itertools.chain.from_iterable(added[at : at + count])])
            at += count

    def limit_pages(self, pages: int) -> int:
        """Cap the file at so many pages, at least what it has now, as a full disk would; gives the cap before."""
        before = int(self._db.execute("pragma max_page_count").fetchone()[0])
        self._db.execute(f"pragma max_page_count={pages or 1}")
        return before

    def close(self) -> None:
        """Also folds the log into the file."""
        with contextlib.suppress(sqlite3.Error):
            self._db.close()
