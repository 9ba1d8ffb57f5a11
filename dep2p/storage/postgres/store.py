"""A queue store in PostgreSQL: psycopg in the writer's thread, one transaction a batch.

The owner holds an advisory lock; every commit checks its epoch and writes its own number, so that an owner that lost
its connection neither writes over another's work nor takes a commit whose answer was lost for one that failed.
"""

import contextlib
import itertools
import re
import time
import zlib
from collections.abc import Callable
from typing import Final, LiteralString, TypeVar

import psycopg
from psycopg import sql
from psycopg.rows import TupleRow

from dep2p.errors import StoreError, StoreFullError, StoreLockedError, StoreUnknownError
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
from dep2p.storage.postgres.connect import ServerPatience, connect
from dep2p.storage.postgres.schema import SCHEMA_BEFORE, SCHEMA_VERSION, TABLES, TURNS
from dep2p.storage.queue_store import no_wait
from dep2p.storage.sequence_check import check_numbers

RECONNECT_S: Final = 15.0
"""Seconds for which a call waits for a server that went away."""
_PATIENCE: Final = ServerPatience(
    connect_timeout=5, keepalives_idle=5, keepalives_interval=2, keepalives_count=3, tcp_user_timeout=10_000
)
_LOCK_WAIT_S: Final = 2.0
_SIZE_S: Final = 60.0
"""Seconds between two looks at the size of the tables."""
_STARTING: Final = "starting up"
"""A part of the message of a server that is not ready; the driver gives no code for it."""
_TRIM_ROWS: Final = 4_000
"""Messages removed from the log in one commit; more of them go with later ones, so that no commit stalls."""

_TERMS_KEPT: Final = 1_000

T = TypeVar("T")
Db = psycopg.Connection[TupleRow]
Term = tuple[int, int]


class PostgresStore:
    """A queue store in a schema of a database. ``is_synced``: a commit is on the server's disk when it returns."""

    is_durable = True
    _take_number: LiteralString = "update owner set batch = %s where epoch = %s"

    def __init__(self, url: str, *, schema: str = "dep2p", is_synced: bool = True) -> None:
        self._url = url
        self._schema = schema
        self._is_synced = is_synced
        self._db: Db | None = None
        self._is_open = False
        self._term = self._batch = 0
        self._last: dict[int, int] = {}
        """The last number that was ever given, by partition."""
        self._trimmed: dict[int, int] = {}
        self._trims: dict[int, int] = {}
        """The last number that has left the log, for partitions with such messages still in the tables."""
        self._doubt: StoreBatch | None = None
        """The batch that may have been written, under the last number."""
        self._size_bytes = 0
        self._size_s = 0.0
        """The time of the next look at the size."""
        self._commits = self._rows = 0
        self.on_wait = no_wait
        self.location: str = without_password(url)
        """The place of the store, human-readable, without its password."""

    # Life

    def open(self) -> None:
        """Connect, lock, make missing tables. Raises StoreError, StoreLockedError."""
        db = self._connect_first()
        try:
            with db.transaction():
                self._make_tables(db)
                found = self._begin_term(db)
            self._know_partitions(db)
        except psycopg.Error as error:
            db.close()
            raise self._explain(error) from None
        except StoreError:
            db.close()
            raise
        self._term, self._batch = found
        self._db, self._is_open = db, True
        self._look_at_size()

    def _make_tables(self, db: Db) -> None:
        """Make the missing tables. Raises StoreError for tables of another version."""
        if db.execute("select to_regclass(%s)", (f"{self._schema}.owner",)).fetchone() == (None,):
            db.execute(sql.SQL("create schema if not exists {}").format(sql.Identifier(self._schema)))
            db.execute(TABLES)
            db.execute(TURNS)
        version = db.execute("select version from owner").fetchone()
        if version == (SCHEMA_BEFORE,):
            db.execute(TURNS)
        elif version != (SCHEMA_VERSION,):
            raise StoreError(f"the queues in {self.location} are of another dep2p: use its version, or another schema")

    def _begin_term(self, db: Db, holder: str = "", lease_s: float = 0.0) -> Term:
        """Begin a term: return its epoch, and the last batch that was written before. The row's lock is held until the
        end."""
        term, batch = db.execute(
            "update owner set epoch = epoch + 1, holder = %s, lease_s = %s, renewed_at = clock_timestamp() "
            "returning epoch, batch",
            (holder, lease_s),
        ).fetchone() or (0, 0)
        db.execute("insert into terms values(%s, %s, clock_timestamp(), %s)", (term, holder, batch))
        db.execute("delete from terms where epoch <= %s", (term - _TERMS_KEPT,))
        return term, batch

    def _connect_first(self) -> Db:
        """Connect for the first time. Waits for a server that is there and not ready yet, as after the start of the
        machine.

        It also waits a moment for the lock: the server may not know yet that the process with the lock was killed.
        """
        now_s = time.monotonic()
        until_s, lock_until_s = now_s + RECONNECT_S, now_s + _LOCK_WAIT_S
        while True:
            try:
                return self._connect()
            except StoreLockedError:
                if time.monotonic() >= lock_until_s:
                    raise
                time.sleep(0.1)
            except psycopg.Error as error:
                if _STARTING not in str(error) or time.monotonic() >= until_s:
                    raise self._explain(error) from None
                time.sleep(0.1)

    def _know_partitions(self, db: Db) -> None:
        rows = db.execute(
            "select partition, last_seq, trimmed, exists(select 1 from messages m where m.partition = p.partition "
            "and m.seq <= p.trimmed) from partitions p"
        ).fetchall()
        self._last = {partition: last_seq for partition, last_seq, _trimmed, _rest in rows}
        self._trimmed = {partition: trimmed for partition, _last, trimmed, _rest in rows}
        self._trims = {partition: trimmed for partition, _last, trimmed, rest in rows if rest}

    def _connect(self) -> Db:
        db = connect(self._url, application_name="dep2p queues", patience=_PATIENCE)
        try:
            db.execute("select set_config('search_path', quote_ident(%s), false)", (self._schema,))
            db.execute("select set_config('synchronous_commit', %s, false)", ("on" if self._is_synced else "off",))
            self._lock(db)
        except BaseException:
            db.close()
            raise
        return db

    def _lock(self, db: Db) -> None:
        if db.execute("select pg_try_advisory_lock(%s)", (lock_of(self._schema),)).fetchone() != (True,):
            raise StoreLockedError(
                f"the queues in {self.location}, schema {self._schema}, are in use by another process: stop it first"
            )

    def close(self) -> None:
        """Release the lock and disconnect. Idempotent."""
        self._is_open = False
        db, self._db = self._db, None
        if db is not None:
            with contextlib.suppress(psycopg.Error):
                db.close()

    def _call(self, step: Callable[[Db], T]) -> T:
        """Do a step again on a new connection for as long as the server is away."""
        until_s = time.monotonic() + RECONNECT_S
        while True:
            if not self._is_open:
                raise StoreError(f"the queues' store in {self.location} is closed")
            try:
                if self._db is None or self._db.closed:
                    self._db = self._connect()
                return step(self._db)
            except (psycopg.OperationalError, StoreLockedError) as error:
                # The server may not have noticed yet that the old connection, which holds the lock, has gone.
                lost = isinstance(error, StoreLockedError) or self._db is None or self._db.closed
                if not lost or time.monotonic() >= until_s or getattr(error, "is_final", False):
                    explained = error if isinstance(error, StoreError) else self._explain(error)
                    explained.is_away = lost and not getattr(error, "is_final", False)
                    raise explained from None
                time.sleep(0.1)
            except psycopg.Error as error:
                raise self._explain(error) from None

    def _explain(self, error: psycopg.Error) -> StoreError:
        text = " ".join(str(error).split())
        if isinstance(error, (psycopg.errors.DiskFull, psycopg.errors.OutOfMemory)):
            return StoreFullError(f"no room for the queues in {self.location}: {text}. Free some space there")
        explained = StoreError(f"the queues in {self.location}: {text}. Check that the server runs and its address")
        explained.is_about_batch = isinstance(error, (psycopg.IntegrityError, psycopg.DataError))
        return explained

    # Reading

    def load(self) -> dict[str, bytes]:
        """All definitions."""
        return self._call(lambda db: dict(db.execute("select key, value from definitions order by key").fetchall()))

    def load_partition(self, partition: int) -> PartitionRecord:
        """All of a partition but its messages."""
        return self._call(lambda db: self._load_partition(db, partition))

    def _load_partition(self, db: Db, partition: int) -> PartitionRecord:
        of = (partition,)
        row = db.execute("select last_seq, trimmed, items, bytes from partitions where partition = %s", of).fetchone()
        record = PartitionRecord(*row) if row is not None else PartitionRecord()
        if partition in self._trims:  # some of them are being removed
            count, size = db.execute(
                "select count(*), coalesce(sum(length(body)), 0) from messages where partition = %s and seq <= %s",
                (partition, self._trims[partition]),
            ).fetchone() or (0, 0)
            record.messages -= int(count)
            record.bytes -= int(size)
        for channel, ack_floor, delivered_up_to, last in db.execute(
            "select channel, floor, handed_out, coalesce(id, 0) from cursors left join last_dead using (channel) "
            "where partition = %s order by channel",
            of,
        ):
            record.cursors[channel] = Cursor(ack_floor, delivered_up_to)
            record.done[channel] = []
            record.states[channel] = []
            record.last_dead_id[channel] = last
        for channel, ranges in itertools.groupby(
            db.execute("select channel, low, high from done where partition = %s order by channel, low", of).fetchall(),
            key=lambda row: row[0],
        ):
            record.done[channel] = joined((low, high) for _channel, low, high in ranges)
        for state in db.execute("select * from states where partition = %s order by channel, seq", of):
            record.states[state[0]].append(StateRow(*state))
        return record

    def scan(self, partition: int, from_seq: int, *, items_max: int, bytes_max: int) -> list[MessageRow]:
        """Messages from ``from_seq`` on."""
        query = (
            "select partition, seq, meta, body from (select *, sum(length(body)) over (order by seq) as total, "
            "row_number() over (order by seq) as place from (select * from messages where partition = %s and seq >= %s "
            "order by seq limit %s) as next) as summed where total <= %s or place = 1 order by seq"
        )
        from_seq = max(from_seq, self._trimmed.get(partition, 0) + 1)
        values = (partition, from_seq, items_max, bytes_max)
        return self._call(lambda db: [MessageRow(*row) for row in db.execute(query, values, binary=True)])

    def get(self, partition: int, seqs: list[int]) -> list[MessageRow]:
        """These messages."""
        query = "select * from messages where partition = %s and seq = any(%s) order by seq"
        seqs = [seq for seq in seqs if seq > self._trimmed.get(partition, 0)]
        return self._call(lambda db: [MessageRow(*row) for row in db.execute(query, (partition, seqs), binary=True)])

    def scan_dead_letters(self, channel: int, after_id: int, *, items_max: int) -> list[DeadLetterRow]:
        """Dead letters behind an id."""
        query = "select * from dead where channel = %s and id > %s order by id limit %s"
        return self._call(lambda db: [DeadLetterRow(*row) for row in db.execute(query, (channel, after_id, items_max))])

    def count_dead_letters(self, channel: int) -> int:
        """How many dead letters there are."""
        row = self._call(lambda db: db.execute("select count(*) from dead where channel = %s", (channel,)).fetchone())
        return 0 if row is None else int(row[0])

    # Writing

    def check(self, batch: StoreBatch) -> None:
        """Raises what `commit` would raise."""

        check_numbers(batch.appends, self._last)

        def step(db: Db) -> None:
            with db.transaction(force_rollback=True):
                self._write(db, batch)

        self._call(step)

    def commit(self, batch: StoreBatch) -> None:
        """Write the batch in one transaction, with its number."""
        self.on_wait()  # nearly all the time it waits for an answer
        self._commit(batch)
        self._commits += 1
        self._rows += len(batch.appends)

    def tidy_in_s(self) -> float | None:
        """Return when `tidy` has work to do."""
        return 0.0 if self._trims else max(0.0, self._size_s - time.monotonic())

    def tidy(self) -> None:
        """Remove some trimmed messages, or look at the size."""
        if self._trims:
            self._commit(StoreBatch())
        else:
            self._look_at_size()

    def _commit(self, batch: StoreBatch) -> None:
        last = check_numbers(batch.appends, self._last)
        is_again = self._doubt is batch
        if not is_again:
            self._batch += 1  # each number is used once, even for a failed batch
        number, self._doubt = self._batch, None

        def step(db: Db) -> dict[int, int]:
            nonlocal is_again
            if (
                is_again
                and db.execute("select 1 from owner where epoch = %s and batch = %s", (self._term, number)).fetchone()
            ):
                return {**self._trims, **batch.trims}  # the batch was written; only the answer was lost
            was_tried, is_again = is_again, True
            with db.transaction():
                taken = db.execute(self._take_number, (number, self._term))
                if taken.rowcount == 1:
                    return self._write(db, batch)
            if was_tried and self._was_written(db, number):
                return {**self._trims, **batch.trims}
            gone = self._gone(db)
            gone.is_final = True  # type: ignore[attr-defined]  # pyright: ignore
            raise gone

        try:
            self._trims = self._call(step)
        except StoreError as error:
            if is_again and error.is_away:
                self._doubt = batch
                raise StoreUnknownError(f"whether this was written is not known: {error}") from None
            raise
        self._last.update(last)
        for partition, up_to in batch.trims.items():
            self._trimmed[partition] = max(self._trimmed.get(partition, 0), up_to)
            self._last[partition] = max(self._last.get(partition, 0), up_to)
        for partition in batch.partitions_removed:
            for numbers in (self._last, self._trimmed, self._trims):
                numbers.pop(partition, None)

    def _was_written(self, db: Db, number: int) -> bool:
        """Whether a batch was written whose answer was lost. Batches of a later owner are of another term."""
        query = "select batch from terms where epoch > %s order by epoch limit 1"
        return db.execute(query, (self._term,)).fetchone() == (number,)

    def _gone(self, db: Db) -> StoreLockedError:
        return StoreLockedError(f"the queues in {self.location} were taken over by another process")

    def _write(self, db: Db, batch: StoreBatch) -> dict[int, int]:
        """Write a batch. Returns the trims that are not complete."""
        with db.cursor() as cursor:
            for key, value in batch.definitions.items():
                if value is None:
                    cursor.execute("delete from definitions where key = %s", (key,))
                else:
                    cursor.execute(
                        "insert into definitions values(%s, %s) on conflict(key) do update set value = excluded.value",
                        (key, value),
                    )
            if batch.appends:
                self._append(cursor, batch.appends)
            for place, change in batch.cursors.items():
                self._move(cursor, place, change)
            if batch.dead_added:
                cursor.executemany(
                    "insert into dead values(%s,%s,%s,%s,%s,%s,%s,%s,%s) on conflict do nothing", batch.dead_added
                )
                cursor.executemany(
                    "insert into last_dead values(%s,%s) on conflict(channel) do update "
                    "set id = greatest(last_dead.id, excluded.id)",
                    [(row.channel, row.id) for row in batch.dead_added],
                )
            if batch.dead_removed:
                cursor.executemany("delete from dead where channel = %s and id = %s", batch.dead_removed)
            trims = self._trim(cursor, {**self._trims, **batch.trims})
            for partition in batch.partitions_removed:
                trims.pop(partition, None)
                for table in ("messages", "partitions", "cursors", "done", "states"):
                    cursor.execute(
                        sql.SQL("delete from {} where partition = %s").format(sql.Identifier(table)), (partition,)
                    )
            for channel in batch.channels_removed:
                for table in ("cursors", "done", "states", "dead", "last_dead"):
                    cursor.execute(
                        sql.SQL("delete from {} where channel = %s").format(sql.Identifier(table)), (channel,)
                    )

        return trims

    def _trim(self, cursor: psycopg.Cursor[TupleRow], trims: dict[int, int]) -> dict[int, int]:
        left = _TRIM_ROWS
        unfinished: dict[int, int] = {}
        for partition, up_to in trims.items():
            # The number changes at once; the messages are removed as there is time.
            cursor.execute(
                "with bound as (select least(%(s)s, min(seq) + %(n)s - 1) as last from messages "
                "where partition = %(p)s), "
                "gone as (delete from messages using bound where partition = %(p)s and seq <= bound.last "
                "returning length(body) as size) "
                "insert into partitions values(%(p)s, %(s)s, %(s)s, 0, 0) on conflict(partition) do update set "
                "trimmed = greatest(partitions.trimmed, excluded.trimmed), "
                "last_seq = greatest(partitions.last_seq, excluded.last_seq), "
                "items = partitions.items - (select count(*) from gone), "
                "bytes = partitions.bytes - (select coalesce(sum(size), 0) from gone) "
                "returning (select count(*) from gone), (select last from bound)",
                {"p": partition, "s": up_to, "n": left},
            )
            count, reached = cursor.fetchone() or (0, None)
            left = max(0, left - count)
            if reached is not None and reached < up_to:
                unfinished[partition] = up_to
        return unfinished

    def _append(self, cursor: psycopg.Cursor[TupleRow], appends: list[MessageRow]) -> None:
        sums: dict[int, list[int]] = {}
        with cursor.copy("copy messages(partition, seq, meta, body) from stdin (format binary)") as copy:
            copy.set_types(["int8", "int8", "bytea", "bytea"])
            for row in appends:
                copy.write_row(row)
                total = sums.setdefault(row.partition, [0, 0, 0])
                total[0] = row.seq
                total[1] += 1
                total[2] += len(row.body)
        cursor.executemany(
            "insert into partitions values(%s, %s, 0, %s, %s) on conflict(partition) do update set "
            "last_seq = excluded.last_seq, items = partitions.items + excluded.items, "
            "bytes = partitions.bytes + excluded.bytes",
            [(partition, *total) for partition, total in sums.items()],
        )

    def _move(self, cursor: psycopg.Cursor[TupleRow], place: tuple[int, int], change: CursorChange) -> None:
        ack_floor = change.cursor.ack_floor
        cursor.execute(
            "insert into cursors values(%s,%s,%s,%s) on conflict(channel, partition) do update "
            "set floor = excluded.floor, handed_out = excluded.handed_out",
            (*place, ack_floor, change.cursor.delivered_up_to),
        )
        if change.states_removed:
            cursor.execute(
                "delete from states where channel = %s and partition = %s and seq = any(%s)",
                (*place, change.states_removed),
            )
        if change.states_set:
            cursor.executemany(
                "insert into states values(%s,%s,%s,%s,%s,%s) on conflict(channel, partition, seq) do update set "
                "attempts = excluded.attempts, due_us = excluded.due_us, history = excluded.history",
                change.states_set,
            )
        if change.done_added:
            cursor.executemany(
                "insert into done values(%s,%s,%s,%s) on conflict(channel, partition, low) do update "
                "set high = greatest(done.high, excluded.high)",
                [(*place, low, high) for low, high in change.done_added],
            )
        cursor.execute("delete from done where channel = %s and partition = %s and low <= %s", (*place, ack_floor))
        cursor.execute("delete from states where channel = %s and partition = %s and seq <= %s", (*place, ack_floor))

    def _look_at_size(self) -> None:
        """Read the size of the schema's tables."""
        self._size_s = time.monotonic() + _SIZE_S
        query = (
            "select coalesce(sum(pg_total_relation_size(c.oid)), 0) from pg_class c join pg_namespace n "
            "on n.oid = c.relnamespace where n.nspname = %s and c.relkind = 'r'"
        )
        row = self._call(lambda db: db.execute(query, (self._schema,)).fetchone())
        self._size_bytes = 0 if row is None else int(row[0])

    def statistics(self) -> StoreStatistics:
        """Counts since `open`; the size of the schema's tables, a minute old at most."""
        return StoreStatistics(
            bytes_on_disk=self._size_bytes,
            commits=self._commits,
            fsyncs=self._commits if self._is_synced else 0,
            rows_written=self._rows,
        )


def lock_of(schema: str) -> int:
    """Return the number of the advisory lock of a schema's queues."""
    return zlib.crc32(f"dep2p queues {schema}".encode())


def without_password(url: str) -> str:
    """Return an address that may be shown: no user, password or parameters."""
    return re.sub(r"//[^/]*@", "//", url).partition("?")[0]
