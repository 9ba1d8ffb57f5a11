"""A queue store in PostgreSQL that several nodes share: one owns it, the others take it when it is silent for a lease.

The row of the owner has its lease, by the server's clock; the row's lock and the epoch in it decide which node is
first, and refuse the others. The advisory lock is shared here: it only keeps out nodes of no failover group.
"""

import contextlib
from typing import Final, LiteralString

import psycopg
from psycopg.rows import TupleRow

from dep2p.errors import NotOwnerError, StoreError, StoreLockedError
from dep2p.protocols.queues.records import StoreBatch
from dep2p.storage.postgres.store import Db, PostgresStore, lock_of, without_password
from dep2p.storage.shared_store import LEASE_S, NODES_MAX, StoreOwner, boot_s, held_until_s

_RENEWALS_PER_LEASE: Final = 5
_CLAIM_LOCK_S: Final = 1.0
"""Seconds. The server cuts off a connection that holds the row's lock for longer and has not renewed for a lease."""
_CLAIM_TRIES: Final = 3
_SEEN_S: Final = 10.0
"""Seconds between two notes of the owner about which nodes of the group are there."""
_LOOK_TIMEOUT_S: Final = 5.0

_READ_LEASE: Final = """
select epoch, holder, lease_s, extract(epoch from clock_timestamp() - renewed_at)::float8,
    coalesce((select extract(epoch from since)::float8 from terms where terms.epoch = owner.epoch), 0),
    array(select peer from nodes where seen_at > clock_timestamp() - interval '1 day' order by seen_at desc limit %s)
from owner
"""
_BE_SEEN: Final = """
insert into nodes values(%s, clock_timestamp()) on conflict(peer) do update set seen_at = excluded.seen_at
"""
_HOLDERS: Final = """
select pg_terminate_backend(activity.pid) from pg_locks locks join pg_stat_activity activity on activity.pid = locks.pid
where locks.relation = 'owner'::regclass and activity.datname = current_database()
    and locks.mode = 'RowExclusiveLock' and locks.granted and activity.usename = current_user
    and activity.pid <> pg_backend_pid() and activity.xact_start < clock_timestamp() - %s * interval '1 second'
"""


def _owner_of(row: TupleRow | None) -> StoreOwner:
    term, holder, lease_s, silent_s, since_s, nodes = row or (0, "", 0.0, 0.0, 0.0, [])
    return StoreOwner(
        term=term,
        peer=holder,
        silent_s=silent_s,
        lease_s=lease_s,
        since_unix_s=since_s,
        nodes=tuple(sorted(nodes)),
    )


class OwnedPostgresStore(PostgresStore):
    """The store in one term of one owner. Made by `PostgresStores.store`."""

    _take_number: LiteralString = "update owner set batch = %s, renewed_at = clock_timestamp() where epoch = %s"

    def __init__(self, url: str, peer: str, seen: StoreOwner, *, schema: str, is_synced: bool, lease_s: float) -> None:
        super().__init__(url, schema=schema, is_synced=is_synced)
        self._peer = peer
        self._seen = seen
        self._lease_s = lease_s
        self._renewed_s = self._until_s = 0.0

    @property
    def term(self) -> int:
        """The number of this term; 0 before `open`."""
        return self._term

    def is_held(self) -> bool:
        """See `OwnedStore`."""
        return boot_s() < self._until_s

    def open(self) -> None:
        asked_s = boot_s()
        super().open()
        self._renewed(asked_s)

    def _renewed(self, asked_s: float) -> None:
        self._renewed_s = asked_s
        self._until_s = held_until_s(asked_s, self._lease_s)

    def _lock(self, db: Db) -> None:
        share(db, self._schema, self.location)
        # The server cuts off a connection that stops inside a transaction, too.
        db.execute(
            "select set_config('idle_in_transaction_session_timeout', %s, false)", (str(round(self._lease_s * 1000)),)
        )

    def _begin_term(self, db: Db, holder: str = "", lease_s: float = 0.0) -> tuple[int, int]:
        self._take_lock(db)
        now = _owner_of(db.execute(_READ_LEASE, (NODES_MAX,)).fetchone())
        if now.term != self._seen.term or not now.is_free:
            raise self._other(now)
        db.execute(_BE_SEEN, (self._peer,))
        return super()._begin_term(db, self._peer, self._lease_s)

    def _take_lock(self, db: Db) -> None:
        """Take the lock of the owner's row. A connection that stopped with it is cut off: the server then undoes its
        transaction."""
        db.execute("select set_config('lock_timeout', %s, true)", (str(round(_CLAIM_LOCK_S * 1000)),))
        for tried in range(1, _CLAIM_TRIES + 1):
            try:
                with db.transaction():  # inside the outer transaction: without the lock only this one is undone
                    db.execute("select epoch from owner for update")
                return
            except psycopg.errors.LockNotAvailable:
                if tried == _CLAIM_TRIES:
                    raise
                now = _owner_of(db.execute(_READ_LEASE, (NODES_MAX,)).fetchone())
                if now.term != self._seen.term or not now.is_free:
                    raise self._other(now) from None
                db.execute(_HOLDERS, (2 * _CLAIM_LOCK_S,))

    def _other(self, now: StoreOwner) -> NotOwnerError:
        return NotOwnerError(
            f"the queues in {self.location} are {now.peer or 'no node'}'s by now (term {now.term})",
            now.peer,
            now.term,
            now.nodes,
        )

    def _gone(self, db: Db) -> StoreLockedError:
        self._until_s = 0.0
        return self._other(_owner_of(db.execute(_READ_LEASE, (NODES_MAX,)).fetchone()))

    def _commit(self, batch: StoreBatch) -> None:
        asked_s = boot_s()
        super()._commit(batch)
        self._renewed(asked_s)

    def tidy_in_s(self) -> float | None:
        other_s = super().tidy_in_s()
        return self._renewal_in_s if other_s is None else min(self._renewal_in_s, other_s)

    def tidy(self) -> None:
        if self._renewal_in_s:
            super().tidy()
        else:
            self._commit(StoreBatch())

    @property
    def _renewal_in_s(self) -> float:
        return max(0.0, self._renewed_s + self._lease_s / _RENEWALS_PER_LEASE - boot_s())

    def close(self) -> None:
        """Close; other nodes can take the store at once."""
        db, was_open = self._db, self._is_open
        if was_open and db is not None and not db.closed:
            with contextlib.suppress(psycopg.Error):
                db.execute("select set_config('lock_timeout', '1000', false)")
                db.execute("update owner set holder = '' where epoch = %s", (self._term,))
        super().close()


class PostgresStores:
    """The store of a failover group, as one of them sees it."""

    blocks = True

    def __init__(
        self, url: str, peer: str, *, schema: str = "dep2p", is_synced: bool = True, lease_s: float = LEASE_S
    ) -> None:
        self._url = url
        self._peer = peer
        self._schema = schema
        self._is_synced = is_synced
        self._lease_s = lease_s
        self._db: Db | None = None
        self._seen_s = float("-inf")
        self.location: str = without_password(url)

    def store(self, seen: StoreOwner) -> OwnedPostgresStore:
        """See `SharedStores`."""
        return OwnedPostgresStore(
            self._url, self._peer, seen, schema=self._schema, is_synced=self._is_synced, lease_s=self._lease_s
        )

    def look(self) -> StoreOwner:
        """See `SharedStores`."""
        try:
            if self._db is None or self._db.closed:
                self._db = self._connect()
            if boot_s() >= self._seen_s + _SEEN_S:
                self._db.execute(_BE_SEEN, (self._peer,))
                self._seen_s = boot_s()
            return _owner_of(self._db.execute(_READ_LEASE, (NODES_MAX,)).fetchone())
        except psycopg.Error as error:
            self.close()
            text = f"the queues in {self.location}: {' '.join(str(error).split())}"
            raise StoreError(f"{text}. Check that the server runs and its address") from None
        except StoreError:
            self.close()
            raise

    def _connect(self) -> Db:
        """Connect, and make the missing tables: the first node of the group does that."""
        reader = _LeaseReader(self._url, schema=self._schema, is_synced=self._is_synced)
        db = reader.connect()
        try:
            with db.transaction():
                db.execute("select pg_advisory_xact_lock(%s)", (lock_of(self._schema) ^ 1,))
                reader.make_tables(db)
            db.execute("select set_config('statement_timeout', %s, false)", (str(round(_LOOK_TIMEOUT_S * 1000)),))
        except BaseException:
            db.close()
            raise
        return db

    def close(self) -> None:
        """See `SharedStores`."""
        db, self._db = self._db, None
        if db is not None:
            with contextlib.suppress(psycopg.Error):
                db.close()


class _LeaseReader(PostgresStore):
    """Connections that own nothing."""

    def connect(self) -> Db:
        return self._connect_first()

    def make_tables(self, db: Db) -> None:
        self._make_tables(db)

    def _lock(self, db: Db) -> None:
        share(db, self._schema, self.location)


def share(db: Db, schema: str, location: str) -> None:
    """Keep out nodes of no failover group. Raises StoreLockedError when one of them is there."""
    if db.execute("select pg_try_advisory_lock_shared(%s)", (lock_of(schema),)).fetchone() != (True,):
        raise StoreLockedError(
            f"the queues in {location}, schema {schema}, are in use by a node without [queues] standby: stop it first"
        )
