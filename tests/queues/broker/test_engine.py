"""The engine on real stores: restarts, full disks, failing stores, clocks that jump, bounds. Bug reports by name."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import trio
import trio.testing

from dep2p.errors import NotInFlightError, QueueFullError, StoreError, StoreFullError, StoreLockedError
from dep2p.protocols.queues.message import NewMessage
from dep2p.protocols.queues.options import QueueOptions
from dep2p.protocols.queues.records import MessageRow, StoreBatch
from dep2p.protocols.queues.wire.frames import DeliveryResult, Settle
from dep2p.queues.access import Access, Rights
from dep2p.queues.broker.engine import EngineBounds, QueueEngine
from dep2p.queues.broker.local_consumer import LocalConsumer
from dep2p.queues.settings import QueueSettings
from dep2p.queues.types import MessageDelivery, SubscribeOptions
from dep2p.storage.memory import MemoryStore
from dep2p.storage.sqlite.store import SqliteStore
from tests.queues.nodes import running_engine


class PersistentMemoryStore(MemoryStore):
    """Outlives the engines that open it, as a server does. ``trouble`` is called before each commit."""

    def __init__(self) -> None:
        super().__init__()
        self.trouble: Callable[[StoreBatch], None] = lambda _batch: None

    def commit(self, batch: StoreBatch) -> None:
        self.trouble(batch)
        super().commit(batch)


def messages(*bodies: bytes, delay_s: float = 0.0) -> list[NewMessage]:
    return [NewMessage(body, delay_s=delay_s) for body in bodies]


async def test_a_restart_keeps_the_due_time(autojump_clock: trio.testing.MockClock) -> None:
    """nsqio/nsq#1107, #674, #871: deferred messages were delivered at once after a restart."""
    store = PersistentMemoryStore()
    async with running_engine(store) as engine:
        await engine.create_queue("", "jobs")
        await engine.create_channel("", "jobs", "c")
        await engine.publish("", "jobs", messages(b"later", delay_s=100.0))
    async with running_engine(store) as engine, await engine.subscribe("", "jobs", "c") as consumer:
        began = trio.current_time()
        [delivery] = await consumer.receive()
        assert delivery.body == b"later"
        assert 95 < trio.current_time() - began <= 101


async def test_what_was_in_flight_comes_back_after_a_restart(autojump_clock: trio.testing.MockClock) -> None:
    """nsqio/nsq#1386, #755; procrastinate#740: nothing acknowledged is lost, nothing is stuck."""
    store = PersistentMemoryStore()
    engine = QueueEngine(store)
    await engine.open()
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.run)
        await engine.create_queue("", "jobs")
        consumer = await engine.subscribe("", "jobs", "c", SubscribeOptions(max_in_flight=2))
        await engine.publish("", "jobs", messages(b"done", b"in flight"))
        done, _held = await consumer.receive()
        await consumer.confirm([DeliveryResult(Settle.FINISH, done.partition, done.seq)])
        nursery.cancel_scope.cancel()  # neither closed nor drained: as kill -9
    async with running_engine(store) as engine, await engine.subscribe("", "jobs", "c") as again:
        [delivery] = await again.receive()
        assert (delivery.body, delivery.attempts) == (b"in flight", 2)
        again.finish([(delivery.partition, delivery.seq)])
        assert await engine.publish("", "jobs", messages(b"new")) == [(delivery.partition, delivery.seq + 1)]


async def test_an_acknowledged_message_does_not_come_back(autojump_clock: trio.testing.MockClock) -> None:
    """redis/redis#7105, #5433: acknowledged messages came back after a restart."""
    store = PersistentMemoryStore()
    async with running_engine(store) as engine:
        await engine.create_queue("", "jobs")
        async with await engine.subscribe("", "jobs", "c", SubscribeOptions(max_in_flight=9)) as consumer:
            await engine.publish("", "jobs", messages(*[b"%d" % number for number in range(9)]))
            got = await consumer.receive()
            for each in got[1::2]:  # above the ack floor, with holes
                consumer.finish([(each.partition, each.seq)])
            await engine.flush()
    async with (
        running_engine(store) as engine,
        await engine.subscribe("", "jobs", "c", SubscribeOptions(max_in_flight=9)) as consumer,
    ):
        assert [each.body for each in await consumer.receive()] == [b"0", b"2", b"4", b"6", b"8"]


async def test_expired_and_new_messages_come_in_one_call(autojump_clock: trio.testing.MockClock) -> None:
    """redis/redis#14402: claiming what has timed out took a call of its own."""
    async with running_engine() as engine:
        await engine.create_queue("", "jobs", QueueOptions(msg_timeout_s=5))
        async with (
            await engine.subscribe("", "jobs", "c") as slow,
            await engine.subscribe("", "jobs", "c", SubscribeOptions(max_in_flight=0)) as other,
        ):
            await engine.publish("", "jobs", messages(b"old"))
            await slow.receive()
            slow.set_ready(0)
            await trio.sleep(6)
            await engine.publish("", "jobs", messages(b"new"))
            other.set_ready(5)
            got = [await other.receive() for _ in range(1)]
            assert sorted(each.body for batch in got for each in batch) == [b"new", b"old"]
            assert engine.registry.find("", "jobs").channel("c").counts["timed_out"] == 1


async def test_messages_time_out_with_no_consumer_left(autojump_clock: trio.testing.MockClock) -> None:
    """nsqio/nsq#390: messages stuck in flight after a client's error."""
    async with running_engine() as engine:
        await engine.create_queue("", "jobs", QueueOptions(msg_timeout_s=5, requeue_on_disconnect=False))
        async with await engine.subscribe("", "jobs", "c") as consumer:
            await engine.publish("", "jobs", messages(b"x"))
            await consumer.receive()
        await trio.sleep(4)
        assert (await engine.inspector.summary("", "jobs")).in_flight == 1
        await trio.sleep(2)
        assert (await engine.inspector.summary("", "jobs")).in_flight == 0


async def test_a_poison_message_ends_as_a_dead_letter(autojump_clock: trio.testing.MockClock) -> None:
    """nsqio/nsq#974, pgmq#274; NSQite: attempts are counted although the process dies in each."""
    store = PersistentMemoryStore()
    for attempt in range(1, 4):
        engine = QueueEngine(store)
        await engine.open()
        async with trio.open_nursery() as nursery:
            await nursery.start(engine.run)
            if attempt == 1:
                await engine.create_queue("", "jobs", QueueOptions(max_attempts=3))
            consumer = await engine.subscribe("", "jobs", "c")
            if attempt == 1:
                await engine.publish("", "jobs", messages(b"poison"))
            [delivery] = await consumer.receive()
            assert delivery.attempts == attempt
            nursery.cancel_scope.cancel()
    async with running_engine(store) as engine, await engine.subscribe("", "jobs", "c") as consumer:
        with trio.move_on_after(1) as scope:
            await consumer.receive()
        assert scope.cancelled_caught
        [letter] = await engine.dead_letters.page("", "jobs", "c")
        assert (letter.message.body, letter.attempts) == (b"poison", 3)
        assert await engine.dead_letters.replay("", "jobs", "c", None) == 1
        [delivery] = await consumer.receive()
        assert (delivery.body, delivery.attempts) == (b"poison", 1)


def _reject(consumer: LocalConsumer, got: Sequence[MessageDelivery]) -> None:
    consumer.apply([DeliveryResult(Settle.REJECT, each.partition, each.seq) for each in got])


async def _make_dead_letters(engine: QueueEngine, consumer: LocalConsumer, count: int) -> None:
    await engine.publish("", "jobs", messages(*[b"%d" % number for number in range(count)]))
    while count:
        got = await consumer.receive()
        count -= len(got)
        _reject(consumer, got)
    await engine.flush()


@pytest.mark.parametrize("channel", ["c", "c#ephemeral"])
async def test_a_replay_that_finds_no_room_says_so_and_loses_no_letter(
    channel: str, autojump_clock: trio.testing.MockClock
) -> None:
    """It told how many were replayed, and the letters of an ephemeral channel were gone."""
    store = PersistentMemoryStore()

    def full(batch: StoreBatch) -> None:
        if batch.appends:
            raise StoreFullError("no room: free some space")

    async with running_engine(store) as engine:
        await engine.create_queue("", "jobs")
        async with await engine.subscribe("", "jobs", channel, SubscribeOptions(max_in_flight=9)) as consumer:
            await _make_dead_letters(engine, consumer, 3)
            store.trouble = full
            with pytest.raises(StoreFullError, match="no room"):
                await engine.dead_letters.replay("", "jobs", channel, None)
            assert len(await engine.dead_letters.page("", "jobs", channel)) == 3
            queue = engine.registry.find("", "jobs")
            assert (queue.channel(channel).dead_items, queue.counts["replayed"]) == (3, 0)
            assert engine.statistics()["pending_items"] == 0
            store.trouble = lambda _batch: None
            assert await engine.dead_letters.replay("", "jobs", channel, None) == 3
            assert await engine.dead_letters.page("", "jobs", channel) == []
            assert (queue.channel(channel).dead_items, queue.counts["replayed"]) == (0, 3)
            assert len(await consumer.receive()) == 3


async def test_a_replay_does_not_run_after_letters_that_die_again(autojump_clock: trio.testing.MockClock) -> None:
    async with running_engine() as engine:
        await engine.create_queue("", "jobs")
        async with await engine.subscribe("", "jobs", "c", SubscribeOptions(max_in_flight=900)) as consumer:
            await _make_dead_letters(engine, consumer, 900)

            async def reject_all() -> None:
                while True:
                    _reject(consumer, await consumer.receive())

            async with trio.open_nursery() as nursery:
                nursery.start_soon(reject_all)
                assert await engine.dead_letters.replay("", "jobs", "c", None) == 900
                await trio.testing.wait_all_tasks_blocked()
                nursery.cancel_scope.cancel()
        assert engine.registry.find("", "jobs").channel("c").dead_items == 900


async def test_a_queue_without_consumers_is_bounded(autojump_clock: trio.testing.MockClock) -> None:
    """nsqio/nsq#302: a topic without consumers grew until the disk was full."""
    async with running_engine() as engine:
        await engine.create_queue("", "jobs", QueueOptions(items_max=10))
        await engine.publish("", "jobs", messages(*[b"x"] * 10))
        with pytest.raises(QueueFullError, match="items_max"):
            await engine.publish("", "jobs", messages(b"more"), timeout_s=5)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.publish, "", "jobs", messages(b"waits"))
            await trio.sleep(5)
            async with await engine.subscribe("", "jobs", "c") as consumer:
                [first] = await consumer.receive()
                consumer.finish([(first.partition, first.seq)])
                await trio.sleep(1)
        assert (await engine.inspector.summary("", "jobs")).messages == 10


async def test_what_waits_to_become_durable_is_bounded(autojump_clock: trio.testing.MockClock) -> None:
    store = PersistentMemoryStore()
    peaks: list[int] = []
    async with running_engine(store, bounds=EngineBounds(pending_bytes_max=1_500)) as engine:
        await engine.create_queue("", "jobs")
        done: list[int] = []
        store.trouble = lambda _batch: peaks.append(engine.statistics()["pending_bytes"])

        async def publish(number: int) -> None:
            await engine.publish("", "jobs", messages(bytes(600)))
            done.append(number)

        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(publish, number)
            await trio.testing.wait_all_tasks_blocked()
        assert len(done) == 20
        assert engine.statistics()["pending_bytes"] == 0
    assert max(peaks) == 1_200  # two of 600


async def test_a_cancelled_publish_can_be_repeated_without_harm(autojump_clock: trio.testing.MockClock) -> None:
    async with running_engine() as engine:
        await engine.create_queue("", "jobs")
        with trio.CancelScope() as scope:
            scope.cancel()
            await engine.publish("", "jobs", messages(b"once"), publisher=(bytes(16), 1))
        [point] = await engine.publish("", "jobs", messages(b"once"), publisher=(bytes(16), 1))
        assert point == (1, 1)
        assert (await engine.inspector.summary("", "jobs")).messages == 1
        assert engine.statistics()["pending_items"] == 0


async def test_a_full_store_refuses_publishes_and_nothing_else(autojump_clock: trio.testing.MockClock) -> None:
    store = PersistentMemoryStore()

    def full(batch: StoreBatch) -> None:
        if batch.appends:
            raise StoreFullError("no room: free some space")

    async with running_engine(store) as engine:
        await engine.create_queue("", "jobs")
        await engine.publish("", "jobs", messages(b"1", b"2", b"3"))
        async with await engine.subscribe("", "jobs", "c", SubscribeOptions(max_in_flight=3)) as consumer:
            store.trouble = full
            with pytest.raises(StoreFullError, match="no room"):
                await engine.publish("", "jobs", messages(b"4"))
            got = await consumer.receive()
            assert [each.body for each in got] == [b"1", b"2", b"3"]
            consumer.finish([(each.partition, each.seq) for each in got])
            await engine.flush()
            store.trouble = lambda _batch: None
            await engine.publish("", "jobs", messages(b"5"))
            [last] = await consumer.receive()
            assert last.body == b"5"


async def test_a_flush_in_one_batch_with_a_publish_that_finds_no_room_returns(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """It waited until something else was to be written: a replay, a new channel, an acknowledgement hung."""
    store = PersistentMemoryStore()

    def full(batch: StoreBatch) -> None:
        if batch.appends:
            raise StoreFullError("no room: free some space")

    async with running_engine(store) as engine:
        await engine.create_queue("", "jobs")
        store.trouble = full
        failures: list[Exception | None] = []
        engine.publish_soon("", "jobs", messages(b"1"), None, lambda _points, error: failures.append(error))
        with trio.fail_after(10):
            await engine.flush()
        assert [type(each) for each in failures] == [StoreFullError]


async def test_a_store_that_comes_back_goes_on_by_itself(autojump_clock: trio.testing.MockClock) -> None:
    store = PersistentMemoryStore()

    def away(_batch: StoreBatch) -> None:
        raise StoreError("the server is away: start it")

    async with running_engine(store) as engine:
        await engine.create_queue("", "jobs")
        await engine.publish("", "jobs", messages(b"1"))
        async with await engine.subscribe("", "jobs", "c") as consumer:
            [first] = await consumer.receive()
            store.trouble = away
            with pytest.raises(StoreError, match="away"):
                await engine.publish("", "jobs", messages(b"2"))
            consumer.finish([(first.partition, first.seq)])
            await trio.sleep(20)
            assert engine.statistics()["problem"]
            store.trouble = lambda _batch: None
            await trio.sleep(10)
            assert not engine.statistics()["problem"]
            await engine.publish("", "jobs", messages(b"3"))
            [third] = await consumer.receive()
            assert third.body == b"3"
            await engine.flush()
    async with running_engine(store) as engine, await engine.subscribe("", "jobs", "c") as consumer:
        [third] = await consumer.receive()
        assert third.body == b"3"  # the acknowledgement of the first was not lost


async def test_a_clock_set_back_an_hour_delays_nothing(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_engine() as engine:
        await engine.create_queue("", "jobs")
        await engine.publish("", "jobs", messages(b"later", delay_s=10.0))
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() - 3_600)
        began = trio.current_time()
        async with await engine.subscribe("", "jobs", "c", SubscribeOptions(max_in_flight=2)) as consumer:
            await engine.publish("", "jobs", messages(b"later still", delay_s=20.0))
            [first] = await consumer.receive()
            [second] = await consumer.receive()
        assert (first.body, second.body) == (b"later", b"later still")
        assert trio.current_time() - began < 25
        assert first.published_us <= second.published_us


async def test_a_consumer_cannot_settle_what_others_hold(autojump_clock: trio.testing.MockClock) -> None:
    async with running_engine() as engine:
        await engine.create_queue("", "jobs")
        await engine.publish("", "jobs", messages(b"x"))
        async with await engine.subscribe("", "jobs", "c") as holder, await engine.subscribe("", "jobs", "c") as other:
            batches: list[tuple[int, int]] = []
            with trio.move_on_after(1):
                [delivery] = await holder.receive()
                batches.append((delivery.partition, delivery.seq))
            if not batches:
                holder, other = other, holder
                [delivery] = await holder.receive()
                batches.append((delivery.partition, delivery.seq))
            assert other.finish(batches) == batches
            assert other.apply([DeliveryResult(Settle.TOUCH, *batches[0])]).refused
            assert holder.finish(batches) == []
            assert holder.finish(batches) == batches  # twice


async def test_a_store_that_cannot_be_read_is_told_once_and_read_when_it_can(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """It was logged twice a second, and the node's status said that all was well."""

    class Unreadable(PersistentMemoryStore):
        is_ill = False

        def scan(self, partition: int, from_seq: int, *, items_max: int, bytes_max: int) -> list[MessageRow]:
            if self.is_ill:
                raise StoreError("the disk is ill")
            return super().scan(partition, from_seq, items_max=items_max, bytes_max=bytes_max)

        def count_dead_letters(self, channel: int) -> int:
            if self.is_ill:
                raise StoreError("the disk is ill")
            return super().count_dead_letters(channel)

    store = Unreadable()
    async with running_engine(store) as engine:
        await engine.create_queue("", "jobs")
        async with await engine.subscribe("", "jobs", "c", SubscribeOptions(max_in_flight=2)) as consumer:
            await _make_dead_letters(engine, consumer, 2)
        await engine.publish("", "jobs", messages(b"x"))
    store.is_ill = True
    async with running_engine(store) as engine, await engine.subscribe("", "jobs", "c") as consumer:
        await trio.sleep(30)
        assert caplog.text.count("cannot read messages: the disk is ill") == 1
        assert engine.statistics()["problem"] == "the disk is ill"
        with pytest.raises(StoreError):
            await engine.inspector.summary("", "jobs")
        store.is_ill = False
        assert [each.body for each in await consumer.receive()] == [b"x"]
        assert engine.statistics()["problem"] == ""
        assert (await engine.inspector.summary("", "jobs")).dead == 2  # asked again, not taken for none


@pytest.mark.parametrize("key", ["queue//jobs", "ids", "publisher/1/00", "access//jobs"])
@pytest.mark.parametrize("value", [b"", b"\xff", b"\xa0", b"\x80", b"\x01", b"\x82\x01\x02", b"\xa1\x61a\x01"])
async def test_a_damaged_definition_is_an_error_that_names_it(
    key: str, value: bytes, autojump_clock: trio.testing.MockClock
) -> None:
    """A KeyError or TypeError came out, and the store was left open."""
    closed: list[None] = []

    class Closed(PersistentMemoryStore):
        location = "the place"

        def close(self) -> None:
            closed.append(None)

    store = Closed()
    store.commit(StoreBatch(definitions={key: value}))
    engine = QueueEngine(store, rights=Rights(Access(), "members"))
    if (key, value) in (("ids", b"\x82\x01\x02"), ("access//jobs", b"\xa0")):
        await engine.open()  # that is what they look like
        return
    with pytest.raises(StoreError, match=rf"the place are damaged.*{key}"):
        await engine.open()
    assert closed


def test_a_setting_that_no_backend_knows() -> None:
    with pytest.raises(ValueError, match="mysql"):
        QueueSettings(store="mysql://x").make_store(None)


@pytest.mark.real
def test_sqlite_full_disk_and_two_engines(tmp_path: Path) -> None:
    async def main() -> None:
        store = SqliteStore(tmp_path / "queues.sqlite")
        async with running_engine(store) as engine:
            with pytest.raises(StoreLockedError):
                await QueueEngine(SqliteStore(tmp_path / "queues.sqlite")).open()
            await engine.create_queue("", "jobs")
            await engine.publish("", "jobs", messages(b"before"))
            async with await engine.subscribe("", "jobs", "c", SubscribeOptions(max_in_flight=1_000)) as consumer:
                await consumer.receive()
                await engine.call(store.limit_pages, 1)
                with pytest.raises(StoreFullError):
                    for _ in range(200):
                        await engine.publish("", "jobs", messages(bytes(65_536)))
                consumer.set_ready(0)
                # Finishing goes on, and makes room.
                for key in list(consumer.core.held):
                    assert consumer.finish([key]) == []
                await engine.flush()
                await engine.call(store.limit_pages, 1 << 30)
                await engine.publish("", "jobs", messages(b"after"))

    trio.run(main)


async def test_late_results_are_refused_and_harmless(autojump_clock: trio.testing.MockClock) -> None:
    async with running_engine() as engine:
        await engine.create_queue("", "jobs", QueueOptions(msg_timeout_s=1))
        await engine.publish("", "jobs", messages(b"x"))
        async with await engine.subscribe("", "jobs", "c") as consumer:
            [delivery] = await consumer.receive()
            consumer.set_ready(0)
            await trio.sleep(2)
            key = (delivery.partition, delivery.seq)
            assert consumer.finish([key]) == [key]
            channel = engine.registry.find("", "jobs").channel("c")
            with pytest.raises(NotInFlightError):
                channel.requeue(consumer.core, key, 0, "", trio.current_time())
            consumer.set_ready(1)
            [again] = await consumer.receive()
            assert again.attempts == 2
