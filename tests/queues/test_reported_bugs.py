"""Bug reports against other queues, as behaviour of ours. The whole table is in docs/explanation/queues.md."""

import shutil
import sqlite3
import threading
from pathlib import Path
from random import Random

import pytest
import trio
import trio.testing

from dep2p.errors import NotInFlightError, StoreError
from dep2p.limits import Limits
from dep2p.protocols.queues.message import NewMessage
from dep2p.protocols.queues.options import QueueOptions
from dep2p.protocols.queues.records import DeadLetterRow, MessageRow, StoreBatch
from dep2p.protocols.queues.wire.frames import DeliveryResult, Settle
from dep2p.queues.broker.engine import QueueEngine
from dep2p.queues.consumer import Messages
from dep2p.queues.types import SubscribeOptions
from dep2p.storage.memory import MemoryStore
from dep2p.storage.sqlite.store import SqliteStore
from tests.messaging.nodes import REALM
from tests.queues.nodes import queue_sides, running_engine

Clock = trio.testing.MockClock


class PersistentMemoryStore(MemoryStore):
    """Outlives the engines that open it, as a server does; a record of it can be damaged."""

    damaged_seq = 0

    def scan(self, partition: int, from_seq: int, *, items_max: int, bytes_max: int) -> list[MessageRow]:
        rows = super().scan(partition, from_seq, items_max=items_max, bytes_max=bytes_max)
        return [row._replace(meta=b"?") if row.seq == self.damaged_seq else row for row in rows]

    def scan_dead_letters(self, channel: int, after_id: int, *, items_max: int) -> list[DeadLetterRow]:
        rows = super().scan_dead_letters(channel, after_id, items_max=items_max)
        return [row._replace(meta=b"", body=b"") if row.id == self.damaged_seq else row for row in rows]


def numbered(count: int, first: int = 0) -> list[NewMessage]:
    return [NewMessage(b"%d" % number) for number in range(first, first + count)]


def _sqlite_rows(count: int) -> list[StoreBatch]:
    return [StoreBatch(appends=[MessageRow(1, seq, b"m" * 40, b"%d" % seq)], groups=[1]) for seq in range(1, count + 1)]


async def test_10_the_scope_of_a_message_ends_with_its_time(autojump_clock: Clock) -> None:
    """(10: nsqio/go-nsq#172, #266, nsqio/pynsq#205) A handler could not know that its message had timed out."""
    async with running_engine() as engine:
        await engine.create_queue("", "jobs", QueueOptions(msg_timeout_s=5))
        async with await engine.subscribe("", "jobs", "c") as consumer:
            await engine.publish("", "jobs", numbered(1))
            message = await anext(Messages(consumer))
            began = trio.current_time()
            with message.scope() as scope:
                await trio.sleep_forever()
            assert scope.cancelled_caught
            assert trio.current_time() - began == pytest.approx(5, abs=0.1)
            assert message.expired
            with pytest.raises(NotInFlightError):
                await message.finish()


async def test_13_a_damaged_record_costs_that_record_and_no_other(
    autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """(13: nsqio/nsq#1514, #1491, go-diskqueue#28) A bad record cost the whole file behind it."""
    store = PersistentMemoryStore()
    async with running_engine(store) as engine:
        await engine.create_queue("", "jobs")
        await engine.create_channel("", "jobs", "c")
        await engine.publish("", "jobs", numbered(9))
    store.damaged_seq = 4
    async with (
        running_engine(store) as engine,
        await engine.subscribe("", "jobs", "c", SubscribeOptions(max_in_flight=9)) as consumer,
    ):
        peeked = await engine.inspector.peek("", "jobs", items_max=5)
        assert [(each.body, each.state) for each in peeked[2:]] == [(b"2", ""), (b"", "damaged"), (b"4", "")]
        exported = await engine.inspector.read_log("", "jobs", after=None, items_max=9)
        assert [each.state for each in exported] == ["", "", "", "damaged", *[""] * 5]
        got: list[bytes] = []
        while len(got) < 8:
            got += [each.body for each in await consumer.receive()]
        assert got == [b"0", b"1", b"2", b"4", b"5", b"6", b"7", b"8"]
        assert engine.registry.find("", "jobs").counts["dropped_damaged"] == 1
        assert "message 4 of partition 1 is damaged" in caplog.text
        assert await engine.publish("", "jobs", numbered(1)) == [(1, 10)]


async def test_13_a_damaged_dead_letter_is_told_and_the_others_are_replayed(autojump_clock: Clock) -> None:
    store = PersistentMemoryStore()
    async with running_engine(store) as engine:
        await engine.create_queue("", "jobs")
        async with await engine.subscribe("", "jobs", "c", SubscribeOptions(max_in_flight=9)) as consumer:
            await engine.publish("", "jobs", numbered(3))
            got = await consumer.receive()
            await consumer.confirm([DeliveryResult(Settle.REJECT, each.partition, each.seq) for each in got])
            store.damaged_seq = 2
            letters = await engine.dead_letters.page("", "jobs", "c")
            assert [(each.id, each.message.state) for each in letters] == [(1, ""), (2, "damaged"), (3, "")]
            with pytest.raises(StoreError, match=r"1 dead letters .* damaged in memory .*\(2\); 2 others"):
                await engine.dead_letters.replay("", "jobs", "c", None)
            assert [each.body for each in await consumer.receive()] == [b"0", b"2"]
            assert [each.id for each in await engine.dead_letters.page("", "jobs", "c")] == [2]
            assert await engine.dead_letters.delete("", "jobs", "c", [2]) == 1


@pytest.mark.parametrize("cut_bytes", [1, 3_000, 20_000])
def test_13_a_torn_tail_costs_no_commit_before_it(cut_bytes: int, tmp_path: Path) -> None:
    """The same, for what the file system lost at its end: whole commits go, the newest first, and work goes on."""
    store = SqliteStore(tmp_path / "queues.sqlite")
    store.open()
    for batch in _sqlite_rows(40):
        store.commit(batch)
    (tmp_path / "after").mkdir()
    for name in ("queues.sqlite", "queues.sqlite-wal"):  # as a power failure leaves it: not closed
        shutil.copy(tmp_path / name, tmp_path / "after" / name)
    store.close()
    log = tmp_path / "after" / "queues.sqlite-wal"
    with log.open("r+b") as file:
        file.truncate(log.stat().st_size - cut_bytes)
    again = SqliteStore(tmp_path / "after" / "queues.sqlite")
    again.open()
    seqs = [row.seq for row in again.scan(1, 1, items_max=100, bytes_max=1 << 20)]
    assert 30 <= len(seqs) < 40
    assert seqs == list(range(1, len(seqs) + 1))
    assert again.load_partition(1).last_seq == seqs[-1]
    again.commit(_sqlite_rows(len(seqs) + 1)[-1])
    again.close()


def test_13_a_damaged_file_is_told_and_left_as_it_is(tmp_path: Path) -> None:
    """The same, for a page in the middle: it is neither skipped in silence nor overwritten."""
    path = tmp_path / "queues.sqlite"
    store = SqliteStore(path)
    store.open()
    store.commit(StoreBatch(appends=[MessageRow(1, seq, b"m" * 40, b"x" * 900) for seq in range(1, 101)], groups=[100]))
    store.close()
    with sqlite3.connect(path) as db:
        page_bytes = int(db.execute("pragma page_size").fetchone()[0])
        pages = int(db.execute("pragma page_count").fetchone()[0])
    db.close()
    content = bytearray(path.read_bytes())
    for page in range(pages - 5, pages):
        content[page * page_bytes : page * page_bytes + 64] = b"\xff" * 64
    path.write_bytes(content)
    with pytest.raises(StoreError, match="damaged"):
        SqliteStore(path).open()
    assert path.read_bytes()[100:] == content[100:]  # all but the header, where SQLite counts who opened it


async def test_17_a_second_delivery_says_so_and_has_the_same_id(autojump_clock: Clock) -> None:
    """(17: qunarcorp/qmq#137) Duplicates after a consumer's restart came as a surprise."""
    async with running_engine() as engine:
        await engine.create_queue("", "jobs")
        async with await engine.subscribe("", "jobs", "c") as consumer:
            await engine.publish("", "jobs", numbered(1))
            first = await anext(Messages(consumer))
            assert (first.attempts, first.is_redelivered) == (1, False)
        async with await engine.subscribe("", "jobs", "c") as consumer:
            second = await anext(Messages(consumer))
            assert (second.attempts, second.is_redelivered, second.id) == (2, True, first.id)


async def test_20_a_handler_that_touches_keeps_its_message_up_to_the_maximum(autojump_clock: Clock) -> None:
    """(20: apache/rocketmq-clients#1198) A handle expired in the middle of its handler, and nobody said so."""
    async with running_engine() as engine:
        await engine.create_queue("", "jobs", QueueOptions(msg_timeout_s=5, msg_timeout_max_s=20))
        async with (
            await engine.subscribe("", "jobs", "c") as slow,
            await engine.subscribe("", "jobs", "c", SubscribeOptions(max_in_flight=0)) as other,
        ):
            await engine.publish("", "jobs", numbered(1))
            message = await anext(Messages(slow))
            other.set_ready(1)
            slow.set_ready(0)
            began = trio.current_time()
            with message.scope() as scope:
                while True:
                    await trio.sleep(4)
                    await message.touch()
            assert scope.cancelled_caught
            assert trio.current_time() - began == pytest.approx(20, abs=0.1)
            [again] = await other.receive()
            assert again.attempts == 2


async def test_22_what_a_consumer_finishes_while_it_stops_does_not_come_again(autojump_clock: Clock) -> None:
    """(22: apache/rocketmq#2085, rocketmq-clients#1353) A shutdown dropped what was in flight."""
    async with queue_sides() as [broker, other]:
        await broker.queues.create("jobs")
        await broker.queues.publish_many("jobs", [b"%d" % number for number in range(10)])
        async with other.at(broker).consume("jobs", "c", max_in_flight=4) as messages:
            held = [await anext(messages) for _ in range(4)]
            messages.consumer.set_ready(0)  # take no more
            await trio.sleep(10)  # the handlers end their work
            for message in held:
                await message.finish()  # not waited for: closing sends it
        async with broker.queues.consume("jobs", "c", max_in_flight=10) as messages:
            rest = [await anext(messages) for _ in range(6)]
            assert [each.body for each in rest] == [b"4", b"5", b"6", b"7", b"8", b"9"]
            assert not any(each.is_redelivered for each in rest)
            for message in rest:
                await message.finish(durable=True)
        await trio.sleep(1)  # what was sent has come
        assert (await broker.queues.info("jobs")).messages == 0


async def test_22_results_of_a_node_that_stops_at_once_are_sent_before(autojump_clock: Clock) -> None:
    """The same for a whole node: its connections end right after its consumer was closed."""
    async with queue_sides() as [broker, other]:
        await broker.queues.create("jobs")
        await broker.queues.publish_many("jobs", [b"1", b"2", b"3"])
        async with other.at(broker).consume("jobs", "c", max_in_flight=3) as messages:
            for _ in range(3):
                await (await anext(messages)).finish()
        await other.service.drain()
        await other.cut(broker)
        await trio.sleep(1)
        assert (await broker.queues.info("jobs")).messages == 0


async def test_22_a_broker_that_stops_takes_the_results_of_what_it_has_handed_out(autojump_clock: Clock) -> None:
    """The same for the node that keeps the queue: no more is delivered, and the wait for results is bounded."""
    async with queue_sides(limits=Limits(drain_timeout_s=10)) as [broker, other]:
        await broker.queues.create("jobs")
        await broker.queues.publish_many("jobs", [b"done", b"late", b"not yet"])
        async with other.at(broker).consume("jobs", "c", max_in_flight=2) as messages:
            done, late = [await anext(messages) for _ in range(2)]

            async def work() -> None:
                await trio.sleep(5)
                await done.finish()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(work)
                began = trio.current_time()
                await broker.service.drain()
                assert trio.current_time() - began == pytest.approx(10, abs=0.1)
            channel = broker.engine.registry.find(REALM, "jobs").channel("c")
            assert (channel.counts["delivered"], channel.counts["finished"]) == (2, 1)
            with trio.fail_after(1):
                await late.finish()
                await broker.service.drain()  # nothing is held any more


async def test_22_closing_is_bounded_and_keeps_what_was_finished(autojump_clock: Clock) -> None:
    """(22: apache/rocketmq-clients#1308) A consumer that never ends holds no shutdown up."""
    store = PersistentMemoryStore()
    async with running_engine(store) as engine:
        await engine.create_queue("", "jobs")
        consumer = await engine.subscribe("", "jobs", "c", SubscribeOptions(max_in_flight=3))
        await engine.publish("", "jobs", numbered(3))
        got = await consumer.receive(2)  # one is finished, one is in hand, one was never received
        consumer.finish([(got[0].partition, got[0].seq)])
        with trio.fail_after(1):
            await consumer.aclose()
            await engine.aclose()
    async with (
        running_engine(store) as engine,
        await engine.subscribe("", "jobs", "c", SubscribeOptions(max_in_flight=3)) as consumer,
    ):
        again: list[tuple[bytes, int]] = []
        while len(again) < 2:
            again += [(each.body, each.attempts) for each in await consumer.receive()]
        assert again == [(b"1", 2), (b"2", 1)]


async def test_31_the_ack_floor_never_goes_back_over_restarts(autojump_clock: Clock) -> None:
    """(31: redis/redis#7105, #5433) Acknowledged messages came back after a restart or failover."""
    store = PersistentMemoryStore()
    ack_floors: list[int] = []
    finished: dict[bytes, None] = {}
    for start in range(6):
        engine = QueueEngine(store)
        await engine.open()
        async with trio.open_nursery() as nursery:
            await nursery.start(engine.run)
            if start == 0:
                await engine.create_queue("", "jobs", QueueOptions(max_attempts=0))
                await engine.create_channel("", "jobs", "c")
            await engine.publish("", "jobs", numbered(5, 5 * start))
            consumer = await engine.subscribe("", "jobs", "c", SubscribeOptions(max_in_flight=50))
            got = await consumer.receive(50)
            assert not [each.body for each in got if each.body in finished]
            done = got[start % 2 :: 2]  # with holes, so that there are results above the ack floor
            consumer.finish([(each.partition, each.seq) for each in done])
            finished |= dict.fromkeys(each.body for each in done)
            await engine.flush()
            ack_floors.append(next(iter(store.load_partition(1).cursors.values())).ack_floor)
            nursery.cancel_scope.cancel()  # neither closed nor drained: as kill -9
    assert ack_floors == sorted(ack_floors)
    assert ack_floors[-1] > ack_floors[0]


async def test_35_leases_come_back_by_themselves_while_their_holder_hangs(autojump_clock: Clock) -> None:
    """(35: procrastinate#740, #1408, PR#1344) Jobs stayed "doing" forever, also the one that rescues others."""
    async with running_engine() as engine:
        await engine.create_queue("", "jobs", QueueOptions(msg_timeout_s=5))
        async with await engine.subscribe("", "jobs", "c") as hung, await engine.subscribe("", "jobs", "c") as alive:
            await engine.publish("", "jobs", numbered(2))
            await hung.receive()
            [own] = await alive.receive()
            alive.finish([(own.partition, own.seq)])
            hung.set_ready(0)  # it does nothing from now on; nor does anybody else but wait
            [rescued] = await alive.receive()
            assert (rescued.seq, rescued.attempts) != (own.seq, 1)
            assert rescued.attempts == 2
            alive.finish([(rescued.partition, rescued.seq)])
            await engine.flush()
            assert (await engine.inspector.summary("", "jobs")).in_flight == 0


def test_38_the_file_is_bounded_over_cycles(tmp_path: Path) -> None:
    """(38: persist-queue#77) Acknowledged rows were never deleted: without any call, ours leave and their room is used
    again."""
    path = tmp_path / "queues.sqlite"
    rng = Random(38)
    cycles, cycle_bytes, log_bytes = 40, 400 * 4_000, 4_000 * 4_096
    sizes: list[int] = []

    def measure() -> None:
        sizes.append(sum(each.stat().st_size for each in tmp_path.iterdir()))

    async def main() -> None:
        async with running_engine(SqliteStore(path, sync="never")) as engine:
            await engine.create_queue("", "jobs")
            async with await engine.subscribe("", "jobs", "c", SubscribeOptions(max_in_flight=500)) as consumer:
                for _ in range(cycles):
                    await engine.publish("", "jobs", [NewMessage(rng.randbytes(4_000)) for _ in range(400)])
                    left = 400
                    while left:
                        got = await consumer.receive(500)
                        consumer.finish([(each.partition, each.seq) for each in got])
                        left -= len(got)
                    await engine.flush()
                    measure()
            assert (await engine.inspector.summary("", "jobs")).messages == 0

    trio.run(main)
    assert max(sizes) < 3 * cycle_bytes + 2 * log_bytes < cycles * cycle_bytes
    assert path.stat().st_size < 3 * cycle_bytes  # closed: its write-ahead log is folded in


class _SlowDisk(SqliteStore):
    """Its commits of messages wait until they may end."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.may_end = threading.Event()

    def commit(self, batch: StoreBatch) -> None:
        super().commit(batch) if not batch.appends else self._late(batch)

    def _late(self, batch: StoreBatch) -> None:
        assert self.may_end.wait(30)
        super().commit(batch)


def test_40_a_publish_returns_after_its_commit_and_not_sooner(tmp_path: Path) -> None:
    """(40: nats-io/nats-server#7564) Acknowledged writes were lost: they were on the disk two minutes later."""
    store = _SlowDisk(tmp_path / "queues.sqlite")

    async def main() -> None:
        async with running_engine(store) as engine:
            await engine.create_queue("", "jobs")
            await engine.create_channel("", "jobs", "c")
            done: list[object] = []

            async def publish() -> None:
                done.append(await engine.publish("", "jobs", numbered(1)))

            async with trio.open_nursery() as nursery, await engine.subscribe("", "jobs", "c") as consumer:
                nursery.start_soon(publish)
                await trio.testing.wait_all_tasks_blocked(0.05)
                assert not done
                assert not consumer.core.held  # nor is it delivered
                store.may_end.set()
                await consumer.receive()
            assert done

    trio.run(main)


@pytest.mark.parametrize(("sync", "level"), [("always", 2), ("interval", 1), ("never", 1)])
def test_40_each_commit_is_synced_unless_asked_otherwise(sync: str, level: int, tmp_path: Path) -> None:
    """The same: ``full`` (2) syncs the log at each commit; the knob is `QueueSettings.sync`, "always" by default."""
    path = tmp_path / "queues.sqlite"
    store = SqliteStore(path) if sync == "always" else SqliteStore(path, sync=sync)  # type: ignore[arg-type]  # pyright: ignore
    store.open()
    assert store._open_db.execute("pragma synchronous").fetchone()[0] == level  # pyright: ignore[reportPrivateUsage]
    store.close()
