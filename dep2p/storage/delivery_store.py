"""The store of reliable delivery: messages on their way, and the handled messages of other senders.

One `DeliveryStore` for a node, shared by its realms: in memory, or SQLite in the data directory, where a message is
accepted only when it is on disk. Decision: docs/decisions/0012-reliable-delivery.md.
"""

import contextlib
import itertools
import os
import sqlite3
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal, NamedTuple, Protocol

from dep2p.errors import StoreError, StoreFullError, StoreLockedError
from dep2p.protocols.delivery.lost import LostMessage
from dep2p.protocols.delivery.wire import as_ranges

SCHEMA_VERSION: Final = 4
_RANGE: Final = struct.Struct(">II")


class OutboxRow(NamedTuple):
    """A message that was accepted and has not ended."""

    realm: str
    peer: str
    number: int
    created_us: int
    """Unix microseconds."""
    name: str
    """For displays; it is in ``head`` too."""
    topic: str
    """The topic of a message; empty for a direct one."""
    head: bytes
    flags: int
    body: bytes
    ttl_ms: int = 0
    """Milliseconds from acceptance until it expires; 0: the node's setting."""


class SendWindowRow(NamedTuple):
    """The numbering of one receiver."""

    epoch: bytes
    next_number: int


class InboxRow(NamedTuple):
    """The handled messages of one sender, by its numbering."""

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
    lost: list[tuple[str, LostMessage]] = field(default_factory=list[tuple[str, LostMessage]])
    """Messages that were lost, each with its realm."""
    forgotten: list[tuple[str, str, int]] = field(default_factory=list[tuple[str, str, int]])
    """Lost messages that are not kept any more: (realm, peer, number)."""
    windows: dict[tuple[str, str], SendWindowRow] = field(default_factory=dict[tuple[str, str], SendWindowRow])
    """By (realm, peer)."""
    inboxes: dict[tuple[str, str], InboxRow] = field(default_factory=dict[tuple[str, str], InboxRow])
    """By (realm, peer)."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to write: a numbering is written with a message."""
        return not (self.added or self.removed or self.inboxes or self.lost or self.forgotten)

    @property
    def groups(self) -> list[int]:
        """The groups: each message may fail without the others."""
        return [1] * len(self.added)

    def part(self, positions: Sequence[int]) -> "DeliveryBatch":
        """Return a batch with the messages at these positions, and nothing else."""
        added = [self.added[position] for position in positions]
        return DeliveryBatch(
            added=added, windows={(row.realm, row.peer): self.windows[row.realm, row.peer] for row in added}
        )


@dataclass(slots=True)
class StoredDelivery:
    """The state of a realm at the last commit."""

    rows: list[OutboxRow] = field(default_factory=list[OutboxRow])
    """By peer and number, rising."""
    windows: dict[str, SendWindowRow] = field(default_factory=dict[str, SendWindowRow])
    inboxes: dict[str, InboxRow] = field(default_factory=dict[str, InboxRow])
    lost: list[LostMessage] = field(default_factory=list[LostMessage])


class DeliveryStore(Protocol):
    """A store of reliable delivery. It blocks; one thread at a time uses it."""

    @property
    def is_durable(self) -> bool:
        """Whether the store outlives the process."""
        ...

    @property
    def location(self) -> str:
        """The place of the store, human-readable."""
        ...

    def load(self, realm: str) -> StoredDelivery:
        """Return the state of a realm. Raises StoreError."""
        ...

    def commit(self, batch: DeliveryBatch) -> None:
        """Write all of it, durable on return, or nothing. Raises StoreError, StoreFullError."""
        ...

    def check(self, batch: DeliveryBatch) -> None:
        """Raise what `commit` of the batch would raise; write nothing."""
        ...

    def close(self) -> None:
        """Close the store."""
        ...


class MemoryDeliveryStore:
    """A store that keeps nothing beyond the process: the service's own tables are the only state."""

    is_durable = False
    location = "memory"

    def load(self, realm: str) -> StoredDelivery:
        """Return an empty state."""
        return StoredDelivery()

    def commit(self, batch: DeliveryBatch) -> None:
        """Do nothing."""

    def check(self, batch: DeliveryBatch) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


_SCHEMA: Final = """
create table if not exists outbox(
    realm text not null, peer text not null, number integer not null, created_us integer not null,
    name text not null, topic text not null, head blob not null, flags integer not null, body blob not null,
    ttl_ms integer not null default 0,
    primary key (realm, peer, number)) without rowid;
create table if not exists lost(
    realm text not null, peer text not null, number integer not null, created_us integer not null,
    ended_us integer not null, name text not null, topic text not null, head blob not null, flags integer not null,
    body blob not null, ttl_ms integer not null, state text not null, reason text not null,
    may_have_been_taken integer not null default 1,
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
    count: "insert into outbox(realm, peer, number, created_us, name, topic, head, flags, body, ttl_ms) values "
    + ",".join(["(?,?,?,?,?,?,?,?,?,?)"] * count)
    for count in _ROWS_AT_ONCE
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
        self.location: str = str(path)
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
        db.execute("begin immediate")  # takes the lock, for as long as the file is open
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
        if version == 1:  # that version kept rejected numbers among the done ones
            db.execute("alter table inboxes add column rejected blob not null default x''")
        if "ttl_ms" not in {row[1] for row in db.execute("pragma table_info(outbox)")}:  # of schema 1 or 2
            db.execute("alter table outbox add column ttl_ms integer not null default 0")
        if "may_have_been_taken" not in {row[1] for row in db.execute("pragma table_info(lost)")}:  # of schema 3
            db.execute("alter table lost add column may_have_been_taken integer not null default 1")
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
        """Return the state of a realm."""
        found = StoredDelivery()
        try:
            for row in self._db.execute(
                "select realm, peer, number, created_us, name, topic, head, flags, body, ttl_ms from outbox "
                "where realm = ? order by peer, number",
                (realm,),
            ):
                found.rows.append(OutboxRow(*row))
            for peer, epoch, next_number in self._db.execute(
                "select peer, epoch, next_number from lanes where realm = ?", (realm,)
            ):
                found.windows[peer] = SendWindowRow(epoch, next_number)
            for peer, epoch, floor, done, rejected in self._db.execute(
                "select peer, epoch, floor, done, rejected from inboxes where realm = ?", (realm,)
            ):
                found.inboxes[peer] = InboxRow(epoch, floor, _unpack(done), _unpack(rejected))
            for row in self._db.execute(
                "select peer, number, created_us, ended_us, name, topic, head, flags, body, ttl_ms, state, reason, "
                "may_have_been_taken from lost where realm = ? order by ended_us",
                (realm,),
            ):
                lost = LostMessage(*row)
                found.lost.append(replace(lost, may_have_been_taken=bool(lost.may_have_been_taken)))
        except (sqlite3.Error, struct.error) as error:
            raise (
                self._explain(error)
                if isinstance(error, sqlite3.Error)
                else StoreError(f"the outbox {self.path} is damaged ({error}): move it away to begin with an empty one")
            ) from error
        return found

    def commit(self, batch: DeliveryBatch) -> None:
        """Write the batch in one transaction."""
        self._write(batch, "commit")

    def check(self, batch: DeliveryBatch) -> None:
        """Write the batch in one transaction that is undone."""
        self._write(batch, "rollback")

    def _write(self, batch: DeliveryBatch, end: Literal["commit", "rollback"]) -> None:
        db = self._db
        try:
            db.execute("begin immediate")
            try:
                # Removals come first: an earlier batch accepted those messages, and their numbers may be used anew.
                self._remove(batch.removed)
                self._add(batch.added)
                self._write_lost(batch)
                if batch.windows:
                    db.executemany(
                        "insert or replace into lanes values(?,?,?,?)",
                        [(*key, row.epoch, row.next_number) for key, row in batch.windows.items()],
                    )
                if batch.inboxes:
                    db.executemany(
                        "insert or replace into inboxes(realm, peer, epoch, floor, done, rejected) values(?,?,?,?,?,?)",
                        [
                            (*key, row.epoch, row.floor, _pack(row.done), _pack(row.rejected))
                            for key, row in batch.inboxes.items()
                        ],
                    )
                db.execute(end)
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    db.execute("rollback")
                raise
        except (sqlite3.DataError, sqlite3.InterfaceError, sqlite3.ProgrammingError):
            raise  # an error of one row: the journal finds it, and writes the others
        except sqlite3.Error as error:
            raise self._explain(error) from error

    # Many rows in one statement: Python releases and takes the interpreter's lock at each.

    def _remove(self, removed: list[tuple[str, str, int]]) -> None:
        by_window: dict[tuple[str, str], list[int]] = {}
        for realm, peer, number in removed:
            by_window.setdefault((realm, peer), []).append(number)
        for window, numbers in by_window.items():
            for low, high in as_ranges(numbers):
                self._db.execute(
                    "delete from outbox where realm=? and peer=? and number between ? and ?", (*window, low, high)
                )

    def _write_lost(self, batch: DeliveryBatch) -> None:
        if batch.forgotten:
            self._db.executemany("delete from lost where realm=? and peer=? and number=?", batch.forgotten)
        if batch.lost:
            self._db.executemany(
                "insert or replace into lost(realm, peer, number, created_us, ended_us, name, topic, head, flags, "
                "body, ttl_ms, state, reason, may_have_been_taken) values(?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
                [
                    (realm, *(getattr(message, name) for name in LostMessage.__dataclass_fields__))
                    for realm, message in batch.lost
                ],
            )

    def _add(self, added: list[OutboxRow]) -> None:
        at = 0
        while at < len(added):
            count = next(count for count in _ROWS_AT_ONCE if count <= len(added) - at)
            self._db.execute(_INSERT[count], [*itertools.chain.from_iterable(added[at : at + count])])
            at += count

    def limit_pages(self, pages: int) -> int:
        """Cap the file at so many pages, at least its present ones, as a full disk would. Returns the cap before."""
        before = int(self._db.execute("pragma max_page_count").fetchone()[0])
        self._db.execute(f"pragma max_page_count={pages or 1}")
        return before

    def close(self) -> None:
        """Close the file; this folds the log into it."""
        with contextlib.suppress(sqlite3.Error):
            self._db.close()
