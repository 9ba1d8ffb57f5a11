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
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import trio

from dep2p.errors import (
    Dep2pError,
    MessageTooLargeError,
    OverloadedError,
    PeerNotFoundError,
    ProtocolError,
    QueueAccessError,
    QueueFullError,
    QueueMovedError,
    QueueNotFoundError,
    QueuePlacedError,
    StoreLockedError,
)
from dep2p.protocols.queues.clients.backoff import Backoff
from dep2p.protocols.queues.names import check_name
from dep2p.protocols.queues.wire import ATTRIBUTES_BYTES_MAX, PUBLISHER_BYTES, WireMessage
from dep2p.queues.types import Attributes, encode_attributes
from dep2p.types import Headers

if TYPE_CHECKING:
    from dep2p.queues.api.queues import Queues

logger = logging.getLogger("dep2p.io")

DEFAULT_TABLE: Final = "dep2p_outbox"
_TABLE: Final = re.compile(r"[a-z_][a-z0-9_]{0,39}")
_BATCH_ITEMS: Final = 256
_BATCH_BYTES: Final = 262_144
_RETRY: Final = Backoff(0.1, 10.0)
_BUSY_TIMEOUT_S: Final = 5.0
_REFUSED: Final = (MessageTooLargeError, ProtocolError, QueueAccessError, QueueNotFoundError, ValueError)
"""For one message of a batch, at least; another try would meet the same."""
_PLACED_MAX: Final = 1_024
"""Queues that are known to be on several nodes; the others are found out again."""
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
    """Of a parameter."""
    lock: str
    """Behind the reading of the relay's row: nobody else changes it until the transaction ends."""


_DIALECTS: Final = {
    "sqlite3": _Dialect(_SQLITE, "?", ""),
    "psycopg": _Dialect(_POSTGRES, "%s", " for update"),
}


def create_outbox(connection: Any, *, table: str = DEFAULT_TABLE) -> None:
    """Make the outbox's two tables in the app's database, if they are not there; in the connection's transaction.
    Tables of an earlier version get what they lack.

    ``connection``: of `sqlite3` or `psycopg`. Raises ``ValueError`` (another kind of connection, the table's name), and
    what the database raises.
    """
    dialect = _dialect(connection)
    for statement in dialect.tables:
        connection.execute(statement.format(t=_checked(table)))
    columns = [column[0] for column in connection.execute(f"select * from {table} limit 0").description]
    if "destination" not in columns:
        connection.execute(f"alter table {table} add column destination text not null default ''")


def publish_in(
    connection: Any,
    queue: str,
    body: bytes,
    *,
    order_key: str = "",
    tags: Sequence[str] = (),
    priority: int = 0,
    delay_s: float = 0.0,
    headers: Headers | None = None,
    table: str = DEFAULT_TABLE,
) -> None:
    """Publish when, and only when, the connection's transaction commits. Blocks as the connection does; any thread.

    The app commits or rolls back itself; `create_outbox` has made the tables before. A relay (``queues.relay(…)``)
    that runs on the same database then puts the message into the queue, exactly once, in the order of these calls
    within a transaction. Raises ``ValueError`` (a name, attributes, another kind of connection), and what the database
    raises.
    """
    check_name(queue)
    dialect = _dialect(connection)
    attributes = encode_attributes(
        Attributes(order_key, tuple(tags), priority, dict(headers or {}), round(delay_s * 1000))
    )
    if len(attributes) > ATTRIBUTES_BYTES_MAX:
        raise ValueError(f"{len(attributes)} bytes of attributes: at most {ATTRIBUTES_BYTES_MAX}")
    mark = dialect.mark
    connection.execute(
        f"insert into {_checked(table)} (queue, attributes, body) values ({mark}, {mark}, {mark})",
        (queue, attributes, bytes(body)),
    )


def _dialect(connection: Any) -> _Dialect:
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
class _Batch:
    number: int
    """Of its first message, for the queue."""
    queue: str
    destination: str
    """Where it was sent, or is to be sent, and nowhere else; "": to the queue, which is on one node."""
    ids: list[int]
    messages: list[WireMessage]


class _OutboxDatabase:
    """The relay's connection. Every method blocks, and is called by one worker thread at a time."""

    def __init__(self, address: str | Path, table: str) -> None:
        self._address = str(address)
        self._table = _checked(table)
        self._owner = secrets.token_bytes(16)
        self._db: Any = None
        self._mark = "?"
        self._lock = ""
        self.publisher = b""

    @property
    def _is_postgres(self) -> bool:
        return self._address.startswith(("postgres://", "postgresql://"))

    def open(self) -> None:
        """Connect, make the tables, and take the outbox over from a relay that had it before."""
        if self._is_postgres:
            import psycopg

            self._db = psycopg.connect(self._address, autocommit=True)
        else:
            self._db = sqlite3.connect(
                self._address, isolation_level=None, check_same_thread=False, timeout=_BUSY_TIMEOUT_S
            )
        dialect = _dialect(self._db)
        self._mark, self._lock = dialect.mark, dialect.lock
        with self._step():
            create_outbox(self._db, table=self._table)
            self._run(
                f"insert into {self._table}_relay (one, publisher, next, owner) values (1, ?, 1, ?) "
                "on conflict (one) do update set owner = excluded.owner",
                secrets.token_bytes(PUBLISHER_BYTES),
                self._owner,
            )
            row = self._run(f"select publisher from {self._table}_relay where one = 1").fetchone()
            self.publisher = bytes(row[0])

    def close(self) -> None:
        """Idempotent."""
        if self._db is not None:
            db, self._db = self._db, None
            db.close()

    def step(self, done: _Batch | None) -> _Batch | None:
        """Remove what was published, and take the next batch: one transaction. Raises StoreLockedError when another
        relay has taken over."""
        if done is None and not self._has_work():
            return None
        with self._step():
            number = self._claim()
            if done is not None:
                self._run(f"delete from {self._table} where batch = ?", done.number)
            return self._unfinished() or self._new(number)

    def set_apart(self, batch: _Batch, error: str) -> None:
        """The queue refuses it: a single message stays in the table with its error, others go one by one."""
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

    def send_to(self, batch: _Batch, destinations: Sequence[str]) -> list[int]:
        """It was not taken, and goes there: what has one destination is a batch of its own now. Gives their numbers."""
        groups: dict[str, list[int]] = {}
        for each, destination in zip(batch.ids, destinations, strict=True):
            groups.setdefault(destination, []).append(each)
        return self._renumber([(ids, destination) for destination, ids in groups.items()])

    def _renumber(self, batches: Sequence[tuple[Sequence[int], str]]) -> list[int]:
        """New numbers, higher than all before, in that order."""
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
        """The next number, if this relay still has the outbox."""
        row = self._run(f"select next, owner from {self._table}_relay where one = 1{self._lock}").fetchone()
        if row is None or bytes(row[1]) != self._owner:
            raise StoreLockedError(
                f"another relay has taken the outbox {self._table!r} over: only one at a time publishes what is in it"
            )
        return int(row[0])

    def _unfinished(self) -> _Batch | None:
        """What was taken and perhaps published before a crash: again, under the same number."""
        rows = self._run(
            f"select id, queue, attributes, body, batch, destination from {self._table} where batch = "
            f"(select min(batch) from {self._table}) order by id"
        ).fetchall()
        return _batch(rows, int(rows[0][4]), str(rows[0][5])) if rows else None

    def _new(self, number: int) -> _Batch | None:
        rows = self._run(
            f"select id, queue, attributes, body from {self._table} where batch is null and error is null "
            "order by id limit ?",
            _BATCH_ITEMS,
        ).fetchall()
        if not rows:
            return None
        taken: list[Any] = []
        size = 0
        for row in rows:
            if row[1] != rows[0][1]:
                continue
            size += len(row[2]) + len(row[3])
            if taken and size > _BATCH_BYTES:
                break
            taken.append(row)
        for row in taken:
            self._run(f"update {self._table} set batch = ?, destination = '' where id = ?", number, row[0])
        self._run(f"update {self._table}_relay set next = ? where one = 1", number + len(taken))
        return _batch(taken, number, "")

    @property
    def waiting(self) -> tuple[int, int]:
        """Rows that wait, and rows that were refused."""
        row = self._run(f"select count(*), count(error) from {self._table}").fetchone()
        return int(row[0]) - int(row[1]), int(row[1])

    def _step(self) -> Any:
        return self._db.transaction() if self._is_postgres else _Transaction(self._db)

    def _run(self, statement: str, *values: object) -> Any:
        return self._db.execute(statement.replace("?", self._mark), values)


class _Transaction:
    """Of SQLite: it writes from the beginning, so that nothing it has read is old."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __enter__(self) -> None:
        self._db.execute("begin immediate")

    def __exit__(self, kind: object, *_: object) -> None:
        self._db.execute("commit" if kind is None else "rollback")


def _batch(rows: Sequence[Any], number: int, destination: str) -> _Batch:
    return _Batch(
        number,
        str(rows[0][1]),
        destination,
        [int(row[0]) for row in rows],
        [WireMessage(bytes(row[2]), bytes(row[3])) for row in rows],
    )


class OutboxRelay:
    """Made by ``queues.relay(…)``; works as long as its ``async with`` block."""

    def __init__(self, place: "Queues", address: str | Path, *, table: str, poll_s: float) -> None:
        if not 0.001 <= poll_s <= 3_600:
            raise ValueError(f"poll_s is {poll_s}: it is 0.001 to 3,600")
        self.counts: Counter[str] = Counter()
        """``published`` (batches after a crash count, too), ``refused``, ``failed``, and ``redirected``: messages that
        were given another node of a queue on several."""
        self.problem = ""
        """Why nothing goes on now, for people; "" when it does."""
        self._place = place
        self._database = _OutboxDatabase(address, table)
        self._poll_s = poll_s
        self._limiter = trio.CapacityLimiter(1)
        self._wake = trio.Event()
        self._quiet = trio.Event()
        self._placed: dict[str, None] = {}
        """Queues on several nodes, as far as known."""
        self._untried: dict[int, None] = {}
        """Numbers of batches that never reached the node that they are for: they may go to another one."""

    def wake(self) -> None:
        """Something was committed just now: do not wait for the next look."""
        self._wake.set()

    async def flush(self) -> None:
        """Until nothing waits in the outbox that was committed before."""
        self._quiet = trio.Event()
        self.wake()
        await self._quiet.wait()

    @asynccontextmanager
    async def working(self) -> AsyncGenerator["OutboxRelay", None]:
        """Publish what is committed while the block runs; what is left then is published by the next relay."""
        failed: Exception | None = None
        try:
            await self._call(self._database.open)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._run)
                try:
                    yield self
                except Exception as error:  # raised as it is, not in the nursery's group
                    failed = error
                nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                await self._call(self._database.close)
        if failed is not None:
            raise failed

    async def _run(self) -> None:
        done: _Batch | None = None
        failures = 0
        while True:
            self._wake = trio.Event()
            quiet = self._quiet
            try:
                batch = await self._call(self._database.step, done)
                done = None
                if batch is None:
                    quiet.set()
                    self.problem, failures = "", 0
                    with trio.move_on_after(self._poll_s):
                        await self._wake.wait()
                    continue
                done = await self._publish(batch)
                self.problem, failures = "", 0
            except StoreLockedError as error:
                self._tell(str(error))
                return
            except Exception as error:  # the database's own, whichever it is
                failures += 1
                self._tell(f"the outbox waits: {type(error).__name__}: {error}")
                self.counts["failed"] += 1
                await trio.sleep(_RETRY.after(failures))
                if not isinstance(error, Dep2pError):
                    await self._reconnect()

    async def _reconnect(self) -> None:
        try:
            await self._call(self._database.close)
            await self._call(self._database.open)
        except Exception as error:
            self._tell(f"the outbox's database cannot be reached: {type(error).__name__}: {error}")

    async def _publish(self, batch: _Batch) -> _Batch | None:
        """Gives the batch when it is in the queue; None when it was refused and set apart, or has new destinations."""
        try:
            if not await self._took(batch):
                return None
        except (OverloadedError, QueueFullError):
            raise
        except _REFUSED as error:
            await self._call(self._database.set_apart, batch, f"{type(error).__name__}: {error}")
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

    async def _took(self, batch: _Batch) -> bool:
        """Whether the queue took it; when not, it has new destinations."""
        was_untried = batch.number in self._untried
        self._untried.pop(batch.number, None)
        why: Dep2pError
        try:
            if not batch.destination and batch.queue in self._placed:
                raise QueuePlacedError(f"the queue {batch.queue!r} is on several nodes")
            publisher = (self._database.publisher, batch.number)
            await self._place.publish_numbered(batch.queue, batch.messages, publisher, batch.destination)
            return True
        except (QueuePlacedError, QueueMovedError) as error:
            why = error
        except QueueNotFoundError as error:
            if not batch.destination:
                raise
            why = error  # the queue may have been made anew
        except PeerNotFoundError as error:
            if not was_untried:
                raise
            self._untried[batch.number] = None
            why = error
        await self._send_elsewhere(batch, why)
        return False

    async def _send_elsewhere(self, batch: _Batch, why: Dep2pError) -> None:
        """Raises ``why`` when the destination stays the same: in strict order, or while a queue is being expanded."""
        is_stale = isinstance(why, QueueMovedError | QueueNotFoundError)
        found = await self._place.destinations(batch.queue, batch.messages, is_stale=is_stale)
        self._placed.pop(batch.queue, None)
        if any(found):
            while len(self._placed) >= _PLACED_MAX:
                del self._placed[next(iter(self._placed))]
            self._placed[batch.queue] = None
        if all(each == batch.destination for each in found):
            raise why
        numbers = await self._call(self._database.send_to, batch, found)
        self._untried.pop(batch.number, None)
        self._untried.update(dict.fromkeys(numbers))
        if batch.destination:
            self.counts["redirected"] += len(batch.ids)

    def _tell(self, problem: str) -> None:
        if self.problem != problem:
            self.problem = problem
            logger.warning("%s", problem)

    async def _call(self, function: Any, *arguments: Any) -> Any:
        return await trio.to_thread.run_sync(function, *arguments, limiter=self._limiter)
