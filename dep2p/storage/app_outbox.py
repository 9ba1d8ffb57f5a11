"""Publishing inside the app's own database transaction: a row in the app's database now, a message in the queue soon.

``publish_in`` writes a row with the app's connection: it is there if, and only if, the app's transaction commits. The
relay takes rows, numbers them in the same database, publishes each batch under its number, and removes it. A batch that
was published and not removed (a crash between the two) is published again under the same number, which the queue
answers with the ids of the first time: every committed row becomes exactly one message. Why not one transaction over
both: docs/decisions/0021-client-flows.md.

Numbers are known to the node that took them. So the destination of a batch for a queue on several nodes is kept beside
its number, and it changes only when nothing was taken there: its keys have moved away, or the node was never reached.
"""

import inspect
import logging
import re
import secrets
import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, Protocol, Unpack

from msgspec import convert

from dep2p.arguments import as_bytes
from dep2p.errors import (
    Dep2pError,
    MessageTooLargeError,
    OverloadedError,
    PartitionMovedError,
    PeerNotFoundError,
    ProtocolError,
    QueueAccessError,
    QueueFullError,
    QueueIsDistributedError,
    QueueNotFoundError,
    StoreLockedError,
)
from dep2p.protocols.queues.attributes import encode_options
from dep2p.protocols.queues.names import check_name
from dep2p.protocols.queues.options import MessageOptions
from dep2p.protocols.queues.wire.frames import PUBLISHER_BYTES, WireMessage
from dep2p.protocols.timing.backoff import Backoff

logger: logging.Logger = logging.getLogger("dep2p.io")

DEFAULT_TABLE: Final = "dep2p_outbox"
_TABLE: Final = re.compile(r"[a-z_][a-z0-9_]{0,39}")
_BATCH_ITEMS: Final = 256
_BATCH_BYTES: Final = 262_144
RELAY_RETRY: Final = Backoff(0.1, 10.0)
"""Delays between the tries of a relay."""
_BUSY_TIMEOUT_S: Final = 5.0
_REFUSED: Final = (MessageTooLargeError, ProtocolError, QueueAccessError, QueueNotFoundError, ValueError)
"""The broker refuses at least one message of the batch; another try would meet the same."""
_DISTRIBUTED_MAX: Final = 1_024
"""Queues that are known to be on several nodes; for others the relay asks again."""
_ERROR_CHARS: Final = 500

_SQLITE: Final = (
    "create table if not exists {t} (id integer primary key autoincrement, queue text not null, "
    "attributes blob not null, body blob not null, batch integer, error text, destination text not null default '')",
    "create table if not exists {t}_relay (one integer primary key check (one = 1), publisher blob not null, "
    "next integer not null, owner blob not null)",
)
_POSTGRES: Final = (
    "create table if not exists {t} (id bigint generated always as identity primary key, queue text not null, "
    "attributes bytea not null, body bytea not null, batch bigint, error text, destination text not null default '')",
    "create table if not exists {t}_relay (one integer primary key check (one = 1), publisher bytea not null, "
    "next bigint not null, owner bytea not null)",
)


class _Dialect(NamedTuple):
    tables: tuple[str, ...]
    mark: str
    """The placeholder of a parameter in a statement."""
    lock: str
    """Ends the statement that reads the relay's row: no other transaction changes the row until this one ends."""


_DIALECTS: Final = {
    "sqlite3": _Dialect(_SQLITE, "?", ""),
    "psycopg": _Dialect(_POSTGRES, "%s", " for update"),
}


class SqlCursor(Protocol):
    """The part of a cursor of `sqlite3` or `psycopg` that the outbox uses."""

    @property
    def description(self) -> Sequence[Sequence[object]] | None: ...

    def fetchone(self) -> object: ...

    def fetchall(self) -> Sequence[object]: ...


class SqlConnection(Protocol):
    """A connection of `sqlite3` or `psycopg` (not an asynchronous one)."""

    @property
    def execute(self) -> Callable[..., SqlCursor]:
        """Takes a statement, and its values."""
        ...


def create_outbox(connection: SqlConnection, *, table: str = DEFAULT_TABLE) -> None:
    """Make the outbox's two tables in the app's database, if they are not there; in the connection's transaction.
    Tables of an earlier version get what they lack.

    ``connection``: of `sqlite3` or `psycopg`. Raises ``ValueError`` (another kind of connection, the table's name), and
    what the database raises.
    """
    dialect = _dialect(connection)
    for statement in dialect.tables:
        connection.execute(statement.format(t=_checked(table)))
    columns = [column[0] for column in connection.execute(f"select * from {table} limit 0").description or ()]
    if "destination" not in columns:
        connection.execute(f"alter table {table} add column destination text not null default ''")


def publish_in(
    connection: SqlConnection,
    queue: str,
    body: bytes,
    *,
    table: str = DEFAULT_TABLE,
    **options: Unpack[MessageOptions],
) -> None:
    """Publish when, and only when, the connection's transaction commits. Blocks as the connection does; any thread.

    The app commits or rolls back itself; `create_outbox` has made the tables before. A relay (``queues.relay(…)``)
    that runs on the same database then puts the message into the queue, exactly once, in the order of these calls
    within a transaction. ``options`` are those of :class:`MessageOptions`.

    Raises ``ValueError`` (a name, options, another kind of connection), and what the database raises.
    """
    check_name(queue)
    body = as_bytes(body, "the body")
    dialect = _dialect(connection)
    try:
        attributes = encode_options(**options)
    except MessageTooLargeError as error:
        raise ValueError(f"the attributes do not fit: {error}") from None
    mark = dialect.mark
    connection.execute(
        f"insert into {_checked(table)} (queue, attributes, body) values ({mark}, {mark}, {mark})",
        (queue, attributes, body),
    )


def _dialect(connection: SqlConnection) -> _Dialect:
    module = type(connection).__module__.partition(".")[0]
    if inspect.iscoroutinefunction(getattr(connection, "execute", None)):
        raise ValueError("an asynchronous connection: give one of sqlite3.connect or psycopg.connect")
    for each in type(connection).__mro__:
        found = _DIALECTS.get(each.__module__.partition(".")[0])
        if found is not None:
            return found
    raise ValueError(f"a connection of {module!r}: those of sqlite3 and psycopg are known")


def _checked(table: str) -> str:
    if not _TABLE.fullmatch(table):
        raise ValueError(f"the table name {table[:60]!r} is not allowed: 1 to 40 small letters, digits and underscores")
    return table


@dataclass(frozen=True, slots=True)
class RelayBatch:
    """Messages of one queue that a relay publishes together."""

    number: int
    """The sequence number of its first message, by which the queue recognizes a batch that is sent again."""
    queue: str
    destination: str
    """The only node that the batch may be sent to; "" for a queue on one node, which needs no destination."""
    ids: list[int]
    """The rows of the messages."""
    messages: list[WireMessage]


class OutboxDatabase:
    """The relay's connection. Every method blocks, and is called by one worker thread at a time."""

    def __init__(self, address: str | Path, table: str) -> None:
        self._address = str(address)
        self._table = _checked(table)
        self._owner = secrets.token_bytes(16)
        self._has_claimed = False
        self._db: SqlConnection | None = None
        self._transaction: Callable[[], AbstractContextManager[object]] = nullcontext
        self._close: Callable[[], None] = _nothing
        self._mark = "?"
        self._lock = ""
        self.publisher: bytes = b""
        """The name under which the queues know the outbox's numbers."""

    @property
    def _is_postgres(self) -> bool:
        return self._address.startswith(("postgres://", "postgresql://"))

    def open(self) -> None:
        """Connect, and make the tables.

        The first call takes the outbox over from a relay that had it before. A later one, after `close`, leaves it to
        the relay that has it now.
        """
        if self._is_postgres:
            from dep2p.storage.postgres.connect import connect

            server = connect(self._address, application_name="dep2p outbox relay")
            self._db, self._transaction, self._close = server, server.transaction, server.close
        else:
            file = sqlite3.connect(
                self._address, isolation_level=None, check_same_thread=False, timeout=_BUSY_TIMEOUT_S
            )
            self._db, self._transaction, self._close = file, lambda: _Transaction(file), file.close
        dialect = _dialect(self._db)
        self._mark, self._lock = dialect.mark, dialect.lock
        with self._step():
            create_outbox(self._db, table=self._table)
            self._run(
                f"insert into {self._table}_relay (one, publisher, next, owner) values (1, ?, 1, ?) "
                f"on conflict (one) do {'nothing' if self._has_claimed else 'update set owner = excluded.owner'}",
                secrets.token_bytes(PUBLISHER_BYTES),
                self._owner,
            )
            row = self._run(f"select publisher from {self._table}_relay where one = 1").fetchone()
            (self.publisher,) = convert(row, tuple[bytes])
        self._has_claimed = True

    def close(self) -> None:
        """Idempotent."""
        self._db = None
        close, self._close = self._close, _nothing
        close()

    def step(self, done: RelayBatch | None) -> RelayBatch | None:
        """Remove what was published, and take the next batch: one transaction. Raises StoreLockedError when another
        relay has taken over."""
        if done is None and not self._has_work():
            return None
        with self._step():
            number = self._claim()
            if done is not None:
                self._run(f"delete from {self._table} where batch = ?", done.number)
            return self._unfinished() or self._new(number)

    def set_apart(self, batch: RelayBatch, error: str) -> None:
        """Act on a refusal: a single message stays in the table with its error; the messages of a larger batch go one
        by one."""
        if len(batch.ids) > 1:
            self._renumber([([each], batch.destination) for each in batch.ids])
            return
        with self._step():
            self._claim()
            self._run(
                f"update {self._table} set batch = null, destination = '', error = ? where id = ?",
                error[:_ERROR_CHARS],
                batch.ids[0],
            )

    def send_to(self, batch: RelayBatch, destinations: Sequence[str]) -> list[int]:
        """Send a batch that was not taken to new destinations. The messages of one destination become a batch of their
        own. Returns the batches' numbers."""
        groups: dict[str, list[int]] = {}
        for each, destination in zip(batch.ids, destinations, strict=True):
            groups.setdefault(destination, []).append(each)
        return self._renumber([(ids, destination) for destination, ids in groups.items()])

    def _renumber(self, batches: Sequence[tuple[Sequence[int], str]]) -> list[int]:
        """Give batches new numbers, higher than all before, in their order."""
        numbers: list[int] = []
        with self._step():
            number = self._claim()
            for ids, destination in batches:
                numbers.append(number)
                for each in ids:
                    self._run(
                        f"update {self._table} set batch = ?, destination = ? where id = ?", number, destination, each
                    )
                number += len(ids)
            self._run(f"update {self._table}_relay set next = ? where one = 1", number)
        return numbers

    def _has_work(self) -> bool:
        return self._run(f"select 1 from {self._table} where error is null limit 1").fetchone() is not None

    def _claim(self) -> int:
        """Return the next number. Raises StoreLockedError when another relay has the outbox."""
        row = self._run(f"select next, owner from {self._table}_relay where one = 1{self._lock}").fetchone()
        number, owner = (0, b"") if row is None else convert(row, tuple[int, bytes])
        if owner != self._owner:
            raise StoreLockedError(
                f"another relay has taken the outbox {self._table!r} over: only one at a time publishes what is in it"
            )
        return number

    def _unfinished(self) -> RelayBatch | None:
        """Return the batch that was taken, and perhaps published, before a crash: it goes again, under the same
        number."""
        found = self._run(
            f"select id, queue, attributes, body, batch, destination from {self._table} where batch = "
            f"(select min(batch) from {self._table}) order by id"
        ).fetchall()
        rows = convert(found, list[tuple[int, str, bytes, bytes, int, str]])
        return _batch([_Row(*row[:4]) for row in rows], rows[0][4], rows[0][5]) if rows else None

    def _new(self, number: int) -> RelayBatch | None:
        found = self._run(
            f"select id, queue, attributes, body from {self._table} where batch is null and error is null "
            "order by id limit ?",
            _BATCH_ITEMS,
        ).fetchall()
        rows = [_Row(*row) for row in convert(found, list[tuple[int, str, bytes, bytes]])]
        if not rows:
            return None
        taken: list[_Row] = []
        size = 0
        for row in rows:
            if row.queue != rows[0].queue:
                continue
            size += len(row.attributes) + len(row.body)
            if taken and size > _BATCH_BYTES:
                break
            taken.append(row)
        for row in taken:
            self._run(f"update {self._table} set batch = ?, destination = '' where id = ?", number, row.id)
        self._run(f"update {self._table}_relay set next = ? where one = 1", number + len(taken))
        return _batch(taken, number, "")

    @property
    def waiting(self) -> tuple[int, int]:
        """Count the rows that wait, and the rows that were refused."""
        found = self._run(f"select count(*), count(error) from {self._table}").fetchone()
        rows, refused = convert(found, tuple[int, int])
        return rows - refused, refused

    def _step(self) -> AbstractContextManager[object]:
        return self._transaction()

    def _run(self, statement: str, *values: object) -> SqlCursor:
        assert self._db is not None, "the outbox is open"
        return self._db.execute(statement.replace("?", self._mark), values)


def _nothing() -> None:
    """Do nothing: the outbox is closed."""


class _Row(NamedTuple):
    """A message in the outbox."""

    id: int
    queue: str
    attributes: bytes
    body: bytes


class _Transaction:
    """A transaction of SQLite. It writes from the beginning, so that nothing it has read is old."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __enter__(self) -> None:
        self._db.execute("begin immediate")

    def __exit__(self, kind: object, *_: object) -> None:
        self._db.execute("commit" if kind is None else "rollback")


def _batch(rows: Sequence[_Row], number: int, destination: str) -> RelayBatch:
    return RelayBatch(
        number,
        rows[0].queue,
        destination,
        [row.id for row in rows],
        [WireMessage(row.attributes, row.body) for row in rows],
    )


class NumberedBroker(Protocol):
    """The broker of a relay: see `dep2p.queues.api.broker.QueueBroker`."""

    def publish_sequenced(
        self, name: str, messages: Sequence[WireMessage], publisher: tuple[bytes, int], destination: str = ""
    ) -> Awaitable[list[tuple[int, int]]]:
        """Publish all or none, under a number that counts once."""
        ...

    def destinations(
        self, name: str, messages: Sequence[WireMessage], *, is_stale: bool = False
    ) -> Awaitable[list[str]]:
        """Return the destination of each message; "" for a queue on one node."""
        ...


@dataclass(frozen=True, slots=True)
class OutboxWork:
    """The steps of a relay at its database, `OutboxDatabase`, each in a thread."""

    publisher: Callable[[], bytes]
    """Returns the name under which the queues know the outbox's numbers."""
    set_apart: Callable[[RelayBatch, str], Awaitable[None]]
    send_to: Callable[[RelayBatch, Sequence[str]], Awaitable[list[int]]]


class RelayFlow:
    """The steps of a relay with one batch, on any event loop: of a node, or of a client."""

    def __init__(self, broker: NumberedBroker, work: OutboxWork) -> None:
        self.counts: Counter[str] = Counter()
        self.problem: str = ""
        self._broker = broker
        self._work = work
        self._distributed: dict[str, None] = {}
        """Queues that the relay knows to be on several nodes."""
        self._unreached: dict[int, None] = {}
        """Numbers of batches that never reached their node: they may go to another one."""

    async def publish(self, batch: RelayBatch) -> RelayBatch | None:
        """Publish a batch. Returns it when it is in the queue; None when it was refused and set apart, or has new
        destinations."""
        try:
            if not await self._took(batch):
                return None
        except (OverloadedError, QueueFullError):
            raise
        except _REFUSED as error:
            await self._work.set_apart(batch, f"{type(error).__name__}: {error}")
            if len(batch.ids) == 1:
                self.counts["refused"] += 1
                logger.error(
                    "the queue %r refuses message %d of the outbox, which stays there with its error: %s",
                    batch.queue,
                    batch.ids[0],
                    error,
                )
            return None
        self.counts["published"] += len(batch.ids)
        return batch

    async def _took(self, batch: RelayBatch) -> bool:
        """Whether the queue took the batch; when not, the batch has new destinations."""
        was_unreached = batch.number in self._unreached
        self._unreached.pop(batch.number, None)
        why: Dep2pError
        try:
            if not batch.destination and batch.queue in self._distributed:
                raise QueueIsDistributedError(f"the queue {batch.queue!r} is on several nodes")
            publisher = (self._work.publisher(), batch.number)
            await self._broker.publish_sequenced(batch.queue, batch.messages, publisher, batch.destination)
            return True
        except (QueueIsDistributedError, PartitionMovedError) as error:
            why = error
        except QueueNotFoundError as error:
            if not batch.destination:
                raise
            why = error  # the queue may have been made anew
        except PeerNotFoundError as error:
            if not was_unreached:
                raise
            self._unreached[batch.number] = None
            why = error
        await self._redirect(batch, why)
        return False

    async def _redirect(self, batch: RelayBatch, why: Dep2pError) -> None:
        """Choose new destinations. Raises ``why`` when they stay the same: in strict order, or while a queue is being
        expanded."""
        is_stale = isinstance(why, PartitionMovedError | QueueNotFoundError)
        found = await self._broker.destinations(batch.queue, batch.messages, is_stale=is_stale)
        self._distributed.pop(batch.queue, None)
        if any(found):
            while len(self._distributed) >= _DISTRIBUTED_MAX:
                del self._distributed[next(iter(self._distributed))]
            self._distributed[batch.queue] = None
        if all(each == batch.destination for each in found):
            raise why
        numbers = await self._work.send_to(batch, found)
        self._unreached.pop(batch.number, None)
        self._unreached.update(dict.fromkeys(numbers))
        if batch.destination:
            self.counts["redirected"] += len(batch.ids)

    def report(self, problem: str) -> None:
        """Log a reason why nothing goes on, once."""
        if self.problem != problem:
            self.problem = problem
            logger.warning("%s", problem)
