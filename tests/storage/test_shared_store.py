"""Several owners of one schema in PostgreSQL, one after the other: who has it, and what of the others is refused."""

# pyright: reportPrivateUsage=false

import time
from collections.abc import Callable, Iterator

import psycopg
import pytest

from dep2p.errors import NotOwnerError, StoreError, StoreLockedError
from dep2p.protocols.queues.records import MessageRow, StoreBatch
from dep2p.storage import shared_store as failover
from dep2p.storage.factory import open_shared
from dep2p.storage.postgres import shared_store as postgres_shared
from dep2p.storage.postgres import store as postgres
from dep2p.storage.postgres.shared_store import OwnedPostgresStore, PostgresStores
from dep2p.storage.postgres.store import PostgresStore
from tests.services import servers
from tests.services.cutting_proxy import CuttingProxy

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]

LEASE_S = 0.6
MARKER = b"cut-me-here"


@pytest.fixture(scope="module")
def server() -> Iterator[servers.Server]:
    made = servers.postgres()
    made.start()
    yield made
    made.remove()


Nodes = Callable[..., PostgresStores]


@pytest.fixture
def nodes(server: servers.Server, request: pytest.FixtureRequest) -> Nodes:
    """Nodes of one set, by name."""
    schema = f"t{abs(hash(request.node.name))}"

    def make(peer: str, *, lease_s: float = LEASE_S, url: str = "") -> PostgresStores:
        made = PostgresStores(url or server.url, peer, schema=schema, lease_s=lease_s)
        request.addfinalizer(made.close)
        return made

    return make


def _batch(seq: int) -> StoreBatch:
    return StoreBatch(appends=[MessageRow(1, seq, b"m", MARKER + b"%d" % seq)], groups=[1])


_taken: list[OwnedPostgresStore] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while _taken:
        _taken.pop().close()


def _take(node: PostgresStores) -> OwnedPostgresStore:
    store = node.store(node.look())
    _taken.append(store)
    store.open()
    return store


def _seqs(store: OwnedPostgresStore) -> list[int]:
    return [row.seq for row in store.scan(1, 1, items_max=99, bytes_max=1 << 20)]


def _wait_until_free(node: PostgresStores) -> None:
    until_s = time.monotonic() + 30
    while not node.look().is_free:
        assert time.monotonic() < until_s
        time.sleep(0.02)


def test_the_next_one_has_it_at_once_when_the_owner_closes_in_good_order(nodes: Nodes) -> None:
    a, b = nodes("a", lease_s=3_600.0), nodes("b")
    first = _take(a)
    first.commit(_batch(1))
    seen = b.look()
    assert (seen.peer, seen.is_free, seen.lease_s) == ("a", False, 3_600.0)
    assert abs(seen.since_unix_s - time.time()) < 60
    first.close()
    assert b.look().is_free
    second = _take(b)
    assert second.term == first.term + 1
    assert _seqs(second) == [1]
    second.commit(_batch(2))
    assert a.look().nodes == ("a", "b")
    second.close()


def test_an_owner_that_renews_keeps_it_and_one_that_does_not_is_replaced_and_refused(nodes: Nodes) -> None:
    a, b = nodes("a"), nodes("b")
    first = _take(a)
    seen = b.look()
    for _ in range(12):  # two leases, with nothing to write
        time.sleep(LEASE_S / 6)
        if first.tidy_in_s() == 0.0:
            first.tidy()
        assert not b.look().is_free
        assert first.is_held()
    with pytest.raises(NotOwnerError):
        b.store(seen).open()  # not while its owner renews
    first.commit(_batch(1))
    _wait_until_free(b)
    assert not first.is_held()  # it knows before anybody else does
    second = _take(b)
    second.commit(_batch(2))
    with pytest.raises(NotOwnerError, match="b's by now") as raised:
        first.commit(_batch(2))
    assert (raised.value.owner, raised.value.term, raised.value.nodes) == ("b", second.term, ("a", "b"))
    with pytest.raises(NotOwnerError):
        first.tidy()  # a renewal is a commit, too
    assert not first.is_held()
    first.close()  # takes nothing from the new one
    assert not a.look().is_free
    assert _seqs(second) == [1, 2]
    second.close()


def test_of_two_that_want_it_one_gets_it(nodes: Nodes) -> None:
    a, b, c = nodes("a"), nodes("b"), nodes("c")
    seen = b.look(), c.look()
    assert seen[0].is_free
    assert seen[1].is_free
    second = b.store(seen[0])
    second.open()
    third = c.store(seen[1])
    with pytest.raises(NotOwnerError, match="b's by now"):
        third.open()
    second.commit(_batch(1))
    assert a.look().peer == "b"
    second.close()


def test_an_owner_that_stopped_inside_a_transaction_is_cut_off(nodes: Nodes) -> None:
    a, b = nodes("a"), nodes("b")
    first = _take(a)
    first.commit(_batch(1))
    db = first._db
    assert db is not None
    db.execute("select set_config('idle_in_transaction_session_timeout', '0', false)")  # the claim alone must do
    db.execute("begin")
    db.execute("update owner set batch = batch + 1")  # as a commit begins; it holds the row's lock now
    _wait_until_free(b)
    second = _take(b)
    second.commit(_batch(2))
    assert _seqs(second) == [1, 2]
    with pytest.raises(NotOwnerError):
        first.commit(_batch(2))
    second.close()


def test_an_owner_that_stopped_inside_a_transaction_is_ended_by_the_server_too(nodes: Nodes) -> None:
    first = _take(nodes("a", lease_s=0.3))
    db = first._db
    assert db is not None
    db.execute("begin")
    db.execute("update owner set batch = batch + 1")
    time.sleep(1.0)
    with pytest.raises(psycopg.Error):
        db.execute("select 1")
    first.commit(_batch(1))  # nobody else came: it goes on over a new connection
    first.close()


@pytest.fixture
def proxy(server: servers.Server) -> Iterator[CuttingProxy]:
    made = CuttingProxy(server.url)
    yield made
    made.close()


@pytest.mark.parametrize("is_written", [True, False])
def test_a_connection_that_is_lost_and_back_within_the_lease_costs_nothing(
    nodes: Nodes, proxy: CuttingProxy, is_written: bool
) -> None:
    a, b = nodes("a", lease_s=30.0, url=proxy.url), nodes("b")
    first = _take(a)
    for seq in range(1, 4):
        if is_written:
            proxy.cut_after(MARKER, b"COMMIT")
        else:
            proxy.cut_before(MARKER)
        first.commit(_batch(seq))
    assert proxy.cuts == 3
    assert _seqs(first) == [1, 2, 3]
    assert (b.look().peer, b.look().term) == ("a", first.term)
    first.close()


@pytest.mark.parametrize("is_written", [True, False])
def test_whether_the_last_batch_of_an_owner_that_was_replaced_is_written_is_known(
    nodes: Nodes, proxy: CuttingProxy, is_written: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer was lost, and before it came back, another one had the store and had written more."""
    monkeypatch.setattr(postgres, "RECONNECT_S", 0.2)
    a, b = nodes("a", url=proxy.url), nodes("b")
    first = _take(a)
    first.commit(_batch(1))
    if is_written:
        proxy.cut_after(MARKER, b"COMMIT", refuse=True)
    else:
        proxy.cut_before(MARKER, refuse=True)
    doubtful = _batch(2)
    with pytest.raises(StoreError, match="not known"):
        first.commit(doubtful)
    _wait_until_free(b)
    second = _take(b)
    assert _seqs(second) == ([1, 2] if is_written else [1])
    last = 3 if is_written else 2
    second.commit(_batch(last))
    proxy.is_refusing = False
    if is_written:
        first.commit(doubtful)  # it is there
        with pytest.raises(NotOwnerError):
            first.commit(_batch(3))
    else:
        with pytest.raises(NotOwnerError):
            first.commit(doubtful)
    assert _seqs(second) == list(range(1, last + 1))
    second.close()


def test_the_clocks_of_the_nodes_do_not_matter(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = nodes("a", lease_s=3_600.0), nodes("b")
    first = _take(a)
    real = failover.boot_s
    for by_s in (-1e7, 1e7):
        monkeypatch.setattr(postgres_shared, "boot_s", lambda by_s=by_s: real() + by_s)
        monkeypatch.setattr(time, "time", lambda by_s=by_s: by_s)
        seen = b.look()
        assert not seen.is_free
        assert seen.silent_s < 60
        with pytest.raises(NotOwnerError):
            b.store(seen).open()
    first.close()


def test_a_node_of_no_set_and_a_set_keep_each_other_out(
    nodes: Nodes, server: servers.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "_LOCK_WAIT_S", 0.2)
    a, b = nodes("a"), nodes("b")
    lone = PostgresStore(server.url, schema=a._schema)
    lone.open()
    with pytest.raises(StoreLockedError, match="without \\[queues\\] standby: stop it first"):
        a.look()
    lone.commit(_batch(1))
    lone.close()
    seen = a.look()
    assert seen.is_free  # there was no lease to wait for
    with pytest.raises(StoreLockedError, match="in use by another process"):
        PostgresStore(server.url, schema=a._schema).open()  # while one of the set only is on standby, too
    first = a.store(seen)
    first.open()
    b.look()
    first.close()
    a.close()
    with pytest.raises(StoreLockedError):
        PostgresStore(server.url, schema=a._schema).open()
    b.close()
    lone = PostgresStore(server.url, schema=a._schema)
    lone.open()
    assert [row.seq for row in lone.scan(1, 1, items_max=9, bytes_max=999)] == [1]
    lone.close()


def test_a_store_of_before_is_brought_over_with_all_that_is_in_it(nodes: Nodes, server: servers.Server) -> None:
    a = nodes("a")
    old = PostgresStore(server.url, schema=a._schema)
    old.open()
    old.commit(_batch(1))
    old.close()
    with psycopg.connect(server.url, autocommit=True) as db:
        db.execute(f"set search_path = {a._schema}".encode())
        db.execute("alter table owner drop column holder, drop column renewed_at, drop column lease_s")
        db.execute("drop table terms, nodes")
        db.execute("update owner set version = 1")
    first = _take(a)
    assert _seqs(first) == [1]
    first.commit(_batch(2))
    first.close()
    with psycopg.connect(server.url, autocommit=True) as db:
        db.execute(f"update {a._schema}.owner set version = 99".encode())
    a.close()
    with pytest.raises(StoreError, match="of another dep2p"):
        a.look()


def test_only_postgresql_can_be_shared() -> None:
    for url in ("auto", "memory", "/tmp/x.sqlite", "redis://localhost/0"):
        with pytest.raises(ValueError, match='set store = "postgresql://…"'):
            open_shared(url, "always", "a")
    with pytest.raises(ValueError, match="malformed"):
        open_shared("postgresql://me:p@ss@host/x", "always", "a")
