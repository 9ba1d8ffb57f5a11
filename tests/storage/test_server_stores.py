"""The stores on servers, which die under load: nothing that was acknowledged is lost, nothing is written twice."""

import itertools
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from typing import cast

import psycopg
import pytest
import redis
import trio

from dep2p.errors import StoreError
from dep2p.protocols.queues.message import NewMessage
from dep2p.protocols.queues.records import Cursor, CursorChange, DeadLetterRow, MessageRow, StateRow, StoreBatch
from dep2p.queues.broker.engine import QueueEngine
from dep2p.queues.types import SubscribeOptions
from dep2p.storage.memory import MemoryStore
from dep2p.storage.postgres.store import PostgresStore
from dep2p.storage.queue_store import QueueStore
from dep2p.storage.redis.store import RedisStore
from tests.queues.nodes import running_engine
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
    letters = [DeadLetterRow(3, n, 1, n, 1_000 + n, 5, b"m", b"b%d" % n, b"h") for n in range(1, 4)]
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
    letters = store.scan_dead_letters(3, 0, items_max=9)
    some = store.scan(1, 7, items_max=2, bytes_max=1 << 20), store.get(1, [99, 8, 2, 7])
    return [store.load(), store.load_partition(1), rows, letters, store.count_dead_letters(3), some]


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
    caplog.set_level(logging.DEBUG)
    port = servers.free_port()
    for store in (
        PostgresStore(f"postgresql://me:hush@127.0.0.1:{port}/x"),
        RedisStore(f"redis://me:hush@127.0.0.1:{port}/0"),
    ):
        with pytest.raises(StoreError) as raised:
            store.open()
        assert "hush" not in str(raised.value) + caplog.text


@pytest.mark.timeout(180)
def test_an_engine_whose_server_is_killed_under_load_goes_on_and_loses_nothing(
    make: Make, server: servers.Server
) -> None:
    acked: dict[bytes, None] = {}
    came: dict[bytes, int] = {}
    progress = trio.lowlevel.ParkingLot()

    async def publish(engine: QueueEngine, name: int) -> None:
        for number in itertools.count():
            body = b"%d %d" % (name, number)
            try:
                await engine.publish("", "jobs", [NewMessage(body)])
            except StoreError:
                await trio.sleep(0.05)
            else:
                acked[body] = None
                progress.unpark_all()

    async def consume(engine: QueueEngine) -> None:
        async with await engine.subscribe(
            "", "jobs", "c", SubscribeOptions(max_in_flight=50, from_start=True)
        ) as consumer:
            while True:
                got = await consumer.receive()
                for each in got:
                    came[each.body] = came.get(each.body, 0) + 1
                consumer.finish([(each.partition, each.seq) for each in got])
                progress.unpark_all()

    async def more_acked() -> None:
        wanted = len(acked) + 100
        await until(lambda: len(acked) >= wanted)

    async def until(is_so: Callable[[], bool]) -> None:
        while not is_so():
            await progress.park()

    def restart() -> None:
        server.stop(signal.SIGKILL if server.url.startswith("redis") else signal.SIGQUIT)
        server.start()

    async def main() -> None:
        with trio.fail_after(160):
            async with running_engine(make()) as engine:
                await engine.create_queue("", "jobs")
                async with trio.open_nursery() as consuming:
                    consuming.start_soon(consume, engine)
                    async with trio.open_nursery() as publishing:
                        for name in range(8):
                            publishing.start_soon(publish, engine, name)
                        for _ in range(3):
                            await more_acked()
                            await trio.to_thread.run_sync(restart)
                        await more_acked()
                        publishing.cancel_scope.cancel()
                    await until(lambda: all(body in came for body in acked))
                    await engine.flush()
                    consuming.cancel_scope.cancel()
                assert not engine.statistics()["problem"]
                assert max(came.values()) == 1  # nobody let go of anything: nothing came twice

    trio.run(main)


def test_a_server_that_is_still_starting_is_waited_for(
    make: Make, server: servers.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the start of a machine both come up together: the node gave up at once."""
    refusals: list[int] = []

    def refuse_first(real: Callable[..., object], error: Exception) -> Callable[..., object]:
        def connect(*arguments: object, **options: object) -> object:
            if len(refusals) < 3:
                refusals.append(1)
                raise error
            return real(*arguments, **options)

        return connect

    if server.url.startswith("redis"):
        starting: Exception = redis.BusyLoadingError("Redis is loading the dataset in memory")
        monkeypatch.setattr(
            redis.Redis, "info", refuse_first(cast("Callable[..., object]", redis.Redis.info), starting)
        )  # pyright: ignore
    else:
        starting = psycopg.OperationalError("FATAL:  the database system is starting up")
        monkeypatch.setattr(psycopg, "connect", refuse_first(psycopg.connect, starting))
    store = make()
    store.open()
    assert len(refusals) == 3
    store.commit(StoreBatch(appends=[_row(1)], groups=[1]))


def test_a_redis_that_may_drop_keys_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    server = servers.redis()
    server.start()
    try:
        client = redis.Redis.from_url(server.url)
        for policy, is_notified in (("noeviction", False), ("allkeys-lru", True)):
            client.config_set("maxmemory", "500mb")
            client.config_set("maxmemory-policy", policy)
            caplog.clear()
            store = RedisStore(server.url)
            store.open()
            store.close()
            assert ("may drop the queues" in caplog.text) is is_notified
        client.close()
    finally:
        server.remove()
