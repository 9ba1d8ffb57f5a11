"""The stores on servers, which die under load: nothing that was acknowledged is lost, nothing is written twice."""

import logging
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from dep2p.errors import StoreError, StoreLockedError
from dep2p.protocols.queue.records import Cursor, CursorChange, DeadRow, MessageRow, StateRow, StoreBatch
from dep2p.storage.interface import QueueStore
from dep2p.storage.memory import MemoryStore
from tests.services import servers

pytestmark = pytest.mark.real

Make = Callable[[], QueueStore]


@pytest.fixture(scope="module", params=["postgres", "redis"])
def server(request: pytest.FixtureRequest) -> Iterator[servers.Server]:
    made = servers.postgres() if request.param == "postgres" else servers.redis()
    made.start()
    yield made
    made.remove()


@pytest.fixture
def make(server: servers.Server, request: pytest.FixtureRequest) -> Make:
    name = f"t{abs(hash(request.node.name))}"

    def one() -> QueueStore:
        from dep2p.storage.postgres import PostgresStore
        from dep2p.storage.redis import RedisStore

        made: QueueStore
        if server.url.startswith("redis"):
            made = RedisStore(server.url, prefix=name + ":")
        else:
            made = PostgresStore(server.url, schema=name)
        request.addfinalizer(made.close)
        return made

    return one


def _row(seq: int) -> MessageRow:
    return MessageRow(1, seq, b"m", b"body%d" % seq)


def _busy_batches() -> list[StoreBatch]:
    letters = [DeadRow(3, n, 1, n, 1_000 + n, 5, b"m", b"b%d" % n, b"h") for n in range(1, 4)]
    states = [StateRow(7, 1, seq, 2, 5, b"why") for seq in (2, 9)]
    return [
        StoreBatch(definitions={"a": b"1", "b": b"\x00"}, appends=[_row(n) for n in range(1, 21)], groups=[20]),
        StoreBatch(cursors={(7, 1): CursorChange(Cursor(0, 9), [(3, 5), (7, 7)], states)}, dead_added=letters),
        StoreBatch(cursors={(7, 1): CursorChange(Cursor(0, 9), [(6, 6)], [], [2]), (3, 1): CursorChange(Cursor())}),
        StoreBatch(definitions={"b": None}, trims={1: 5}, dead_removed=[(3, 2), (3, 99)]),
        StoreBatch(cursors={(7, 1): CursorChange(Cursor(8, 12))}, appends=[_row(21)], groups=[1]),
    ]


def _seen(store: QueueStore) -> list[object]:
    rows = store.scan(1, 1, items_max=100, bytes_max=1 << 20)
    letters = store.scan_dead(3, 0, items_max=9)
    some = store.scan(1, 7, items_max=2, bytes_max=1 << 20), store.get(1, [99, 8, 2, 7])
    return [store.load(), store.load_partition(1), rows, letters, store.count_dead(3), some]


def test_it_keeps_what_the_reference_keeps_also_reopened(make: Make) -> None:
    reference, tried = MemoryStore(), make()
    tried.open()
    for batch in _busy_batches():
        reference.commit(batch)
        tried.commit(batch)
        assert _seen(tried) == _seen(reference)
    tried.close()
    tried = make()
    tried.open()
    assert _seen(tried) == _seen(reference)
    for batch in (StoreBatch(channels_removed=[3]), StoreBatch(partitions_removed=[1])):
        reference.commit(batch)
        tried.commit(batch)
        assert _seen(tried) == _seen(reference)


def test_a_batch_is_written_whole_or_not_at_all(make: Make) -> None:
    store = make()
    store.open()
    store.commit(StoreBatch(appends=[_row(1), _row(2)], groups=[2]))
    bad = StoreBatch(definitions={"a": b"1"}, appends=[_row(3), _row(2)], groups=[1, 1])
    for attempt in (store.check, store.commit):
        with pytest.raises(StoreError) as raised:
            attempt(bad)
        assert raised.value.is_about_batch
    assert store.load() == {}
    assert [row.seq for row in store.scan(1, 1, items_max=9, bytes_max=99)] == [1, 2]


def test_two_owners_are_refused(make: Make) -> None:
    first, second = make(), make()
    first.open()
    with pytest.raises(StoreLockedError, match="another process"):
        second.open()
    first.commit(StoreBatch(appends=[_row(1)], groups=[1]))
    first.close()
    third = make()
    third.open()
    assert third.load_partition(1).last_seq == 1


def test_a_server_killed_under_load_loses_nothing_acknowledged(make: Make, server: servers.Server) -> None:
    store = make()
    store.open()

    def restart() -> None:
        server.stop(signal.SIGKILL if server.url.startswith("redis") else signal.SIGQUIT)
        server.start()

    killer: threading.Thread | None = None
    seq = 0
    for seq in range(1, 1_500):
        store.commit(StoreBatch(appends=[_row(seq)], groups=[1]))
        if seq == 200:
            killer = threading.Thread(target=restart)
            killer.start()
        if seq > 300 and killer is not None and not killer.is_alive():
            break
    assert killer is not None
    killer.join(30)
    store.commit(StoreBatch(appends=[_row(seq + 1)], groups=[1]))
    assert [row.seq for row in store.scan(1, 1, items_max=9_999, bytes_max=1 << 30)] == list(range(1, seq + 2))


def test_a_password_is_in_no_text(caplog: pytest.LogCaptureFixture) -> None:
    from dep2p.storage.postgres import PostgresStore
    from dep2p.storage.redis import RedisStore

    caplog.set_level(logging.DEBUG)
    port = servers.free_port()
    for store in (
        PostgresStore(f"postgresql://me:hush@127.0.0.1:{port}/x"),
        RedisStore(f"redis://me:hush@127.0.0.1:{port}/0"),
    ):
        with pytest.raises(StoreError) as raised:
            store.open()
        assert "hush" not in str(raised.value) + caplog.text
