"""The connection to a server is cut around a commit: written once, whatever was heard of it; or told that it is not
known, until it is."""

from collections.abc import Iterator

import pytest
import trio

from dep2p.errors import StoreError, StoreUnknownError
from dep2p.protocols.queues.message import NewMessage
from dep2p.protocols.queues.records import Cursor, CursorChange, MessageRow, StoreBatch
from dep2p.protocols.queues.wire.frames import DeliveryResult, Settle
from dep2p.queues.broker.engine import QueueEngine
from dep2p.queues.broker.local_consumer import LocalConsumer
from dep2p.queues.types import SubscribeOptions
from dep2p.storage.factory import open_url
from dep2p.storage.postgres import store as postgres
from dep2p.storage.queue_store import QueueStore
from dep2p.storage.redis import store as redis
from tests.queues.nodes import running_engine
from tests.services import servers
from tests.services.cutting_proxy import CuttingProxy

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]

MARKER = b"cut-me-here"


@pytest.fixture(params=["postgres", "redis"])
def server(request: pytest.FixtureRequest) -> Iterator[servers.Server]:
    made = servers.postgres() if request.param == "postgres" else servers.redis()
    made.start()
    yield made
    made.remove()


@pytest.fixture
def proxy(server: servers.Server) -> Iterator[CuttingProxy]:
    made = CuttingProxy(server.url)
    yield made
    made.close()


def _store(url: str) -> QueueStore:
    return open_url(url, "always")


def _cut(proxy: CuttingProxy, *, is_written: bool, refuse: bool = False) -> None:
    """At the next commit: when the server says that it is done, or before it hears of it."""
    is_redis = proxy.url.startswith("redis")
    if is_written:
        # PostgreSQL: the answer to COMMIT; Redis: any answer to the step that holds the message.
        proxy.cut_after(MARKER, b"" if is_redis else b"COMMIT", refuse=refuse)
    else:
        proxy.cut_before(MARKER, refuse=refuse)


def _batch(seq: int) -> StoreBatch:
    return StoreBatch(
        appends=[MessageRow(1, seq, b"m", MARKER + b"%d" % seq)],
        groups=[1],
        cursors={(7, 1): CursorChange(Cursor(seq - 1, seq))},
    )


@pytest.mark.parametrize("is_written", [True, False])
def test_a_lost_answer_is_found_out_and_the_batch_written_once(proxy: CuttingProxy, is_written: bool) -> None:
    store = _store(proxy.url)
    store.open()
    store.commit(_batch(1))
    for seq in range(2, 6):
        _cut(proxy, is_written=is_written)
        store.commit(_batch(seq))
    assert proxy.cuts == 4
    assert [row.seq for row in store.scan(1, 1, items_max=99, bytes_max=1 << 20)] == [1, 2, 3, 4, 5]
    record = store.load_partition(1)
    assert (record.last_seq, record.messages, record.cursors[7]) == (5, 5, Cursor(4, 5))
    store.close()


@pytest.mark.parametrize("is_written", [True, False])
def test_away_for_longer_the_outcome_is_not_known_and_the_same_batch_is_written_once(
    proxy: CuttingProxy, is_written: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was told to have failed, also when it was stored."""
    for module in (postgres, redis):
        monkeypatch.setattr(module, "RECONNECT_S", 0.3)
    store = _store(proxy.url)
    store.open()
    store.commit(_batch(1))
    _cut(proxy, is_written=is_written, refuse=True)
    doubtful = _batch(2)
    for _ in range(2):
        with pytest.raises(StoreUnknownError, match="not known"):
            store.commit(doubtful)
    proxy.is_refusing = False
    store.commit(doubtful)
    proxy.is_refusing = True
    store.close()
    proxy.is_refusing = False
    store = _store(proxy.url)
    store.open()
    assert [row.seq for row in store.scan(1, 1, items_max=99, bytes_max=1 << 20)] == [1, 2]
    store.close()


def test_away_before_anything_was_sent_it_has_failed(proxy: CuttingProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (postgres, redis):
        monkeypatch.setattr(module, "RECONNECT_S", 0.3)
    store = _store(proxy.url)
    store.open()
    _cut(proxy, is_written=True, refuse=True)
    with pytest.raises(StoreUnknownError):
        store.commit(_batch(1))
    with pytest.raises(StoreError) as raised:
        store.commit(_batch(2))
    assert not isinstance(raised.value, StoreUnknownError)
    store.close()


@pytest.mark.parametrize("is_written", [True, False])
def test_a_publisher_is_reported_that_it_is_not_known_and_nothing_is_lost_or_doubled(
    proxy: CuttingProxy, is_written: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (postgres, redis):
        monkeypatch.setattr(module, "RECONNECT_S", 0.3)

    async def publish(engine: QueueEngine, body: bytes, number: int) -> tuple[int, int]:
        [point] = await engine.publish("", "jobs", [NewMessage(body)], publisher=(bytes(16), number))
        return point

    async def receive(consumer: LocalConsumer, count: int) -> list[bytes]:
        bodies: list[bytes] = []
        while len(bodies) < count:
            got = await consumer.receive()
            bodies += [each.body for each in got]
            await consumer.confirm([DeliveryResult(Settle.FINISH, each.partition, each.seq) for each in got])
        return bodies

    async def main() -> None:
        with trio.fail_after(100):
            async with running_engine(_store(proxy.url)) as engine:
                await engine.create_queue("", "jobs")
                async with await engine.subscribe("", "jobs", "c", SubscribeOptions(max_in_flight=9)) as consumer:
                    first = await publish(engine, b"first", 1)
                    assert await receive(consumer, 1) == [b"first"]
                    _cut(proxy, is_written=is_written, refuse=True)
                    with pytest.raises(StoreUnknownError):
                        await publish(engine, MARKER, 2)
                    with pytest.raises(StoreError):  # it waits behind, and is certainly not there
                        await engine.publish("", "jobs", [NewMessage(b"refused")])
                    with pytest.raises(StoreError):
                        await engine.flush()
                    assert engine.statistics()["problem"]
                    assert engine.statistics()["pending_items"] == 0
                    proxy.is_refusing = False
                    # The same again: not taken twice, and answered when the store is back.
                    second = await publish(engine, MARKER, 2)
                    third = await publish(engine, b"third", 3)
                    assert await receive(consumer, 2) == [MARKER, b"third"]
                    assert first < second < third
                    await engine.flush()
                    assert not engine.statistics()["problem"]
            async with running_engine(_store(proxy.url)) as engine:
                summary = await engine.inspector.summary("", "jobs")
                assert (summary.messages, summary.dead) == (0, 0)
                assert await publish(engine, b"third", 3) == third

    trio.run(main)


def test_statistics_ask_no_server(server: servers.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """They did, on the event loop's thread: `/metrics`, and all else, stood still while the server was away."""
    store = _store(server.url)
    store.open()
    store.commit(_batch(1))

    def asked(_step: object) -> None:
        raise AssertionError("the server was asked")

    with monkeypatch.context() as patched:
        patched.setattr(store, "_call", asked)
        statistics = store.statistics()
        with pytest.raises(AssertionError):
            store.count_dead_letters(1)
    assert statistics.commits == 1
    assert statistics.bytes_on_disk > 0
    store.close()
