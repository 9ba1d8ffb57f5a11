"""Nobody waits for a timer, or forever, where the engine itself has something to do."""

import errno
import os
import threading
from pathlib import Path

import pytest
import trio
import trio.testing

from dep2p.errors import StoreError, StoreFullError
from dep2p.protocols.queues.consumer import ChannelConsumer, ConsumerWindow
from dep2p.protocols.queues.message import NewMessage
from dep2p.protocols.queues.records import DeadLetterRow, MessageRow, StoreBatch
from dep2p.queues.broker.engine import QueueEngine
from dep2p.queues.types import SubscribeOptions
from dep2p.storage.memory import MemoryStore
from dep2p.storage.sqlite.store import SqliteStore
from tests.protocols.queues.world import Taker, World
from tests.queues.nodes import running_engine


@pytest.mark.parametrize("max_in_flight", [1, 2])
async def test_the_next_message_needs_no_timer(autojump_clock: trio.testing.MockClock, max_in_flight: int) -> None:
    engine = QueueEngine(MemoryStore())
    await engine.open()
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.run)
        await engine.create_queue("", "jobs")
        consumer = await engine.subscribe("", "jobs", "work", SubscribeOptions(max_in_flight=max_in_flight))
        await engine.publish("", "jobs", [NewMessage(b"x")] * 20)
        began_s = trio.current_time()
        taken = 0
        while taken < 20:
            messages = await consumer.receive()
            taken += len(messages)
            consumer.finish([(message.partition, message.seq) for message in messages])
        assert trio.current_time() == began_s  # the clock jumps only when all wait
        nursery.cancel_scope.cancel()
    await engine.aclose()


@pytest.mark.parametrize("is_late", [False, True])
def test_queues_deleted_while_a_page_of_theirs_is_read_take_no_turn_from_others(is_late: bool) -> None:
    world = World()
    kept = world.create("kept")
    world.channel(kept)
    world.publish(kept, *[b"x" * 500] * 20)
    for number in range(20):
        doomed = world.create(f"doomed{number}")
        world.channel(doomed)
        world.publish(doomed, b"x", b"y")
    world.crash()  # nothing is in memory
    channel = world.queue("kept").channel("work")
    for number in range(20):
        doomed = world.queue(f"doomed{number}")
        consumer = ChannelConsumer(
            "a",
            ConsumerWindow(5, 1 << 30, 9.0),
            on_deliver=lambda _deliveries: None,
            on_closed=lambda _reason: None,
        )
        doomed.channel("work").attach(consumer)
        reads = world.registry.pump(world.now, world.wall_us)
        assert reads
        world.registry.delete(doomed)
        if is_late:
            world.registry.pump(world.now, world.wall_us)
        for read in reads:
            rows = world.store.scan(read.partition, read.from_seq, items_max=read.items_max, bytes_max=read.bytes_max)
            world.registry.loaded(read, rows)
    world.settle()
    assert len(world.consumer(channel).finish_all()) == 20


def _staged_twice() -> tuple[World, Taker, StoreBatch]:
    """A message whose time is over while its delivery is written, and that goes to the same consumer again."""
    world = World()
    queue = world.create()
    taker = world.consumer(world.channel(queue), msg_timeout_s=1.0)
    world.publish(queue, b"x", settle=False)
    published = world.registry.take_changes()
    world.store.commit(published)
    world.registry.committed(published)
    world.registry.pump(world.now, world.wall_us)
    batch = world.registry.take_changes()
    world.now += 2
    world.registry.on_deadline(world.now, world.wall_us)
    world.registry.pump(world.now, world.wall_us)
    return world, taker, batch


@pytest.mark.parametrize("is_written", [True, False])
def test_what_timed_out_while_its_hand_out_was_written_is_handed_out_once(is_written: bool) -> None:
    world, taker, batch = _staged_twice()
    if is_written:
        world.store.commit(batch)
        world.registry.committed(batch, hold=True)
        world.registry.deliver()
    else:
        world.registry.failed(batch, StoreError("ill"))
    world.settle()
    assert [delivery.attempts for delivery in taker.got] == [2]


def test_an_interval_whose_fsync_fails_has_been_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SqliteStore(tmp_path / "queues.sqlite", sync="interval")
    store.open()
    batch = StoreBatch(
        dead_added=[DeadLetterRow(1, 1, 1, 1, 5, 1, bytes(29), b"b", b"")],
        appends=[MessageRow(1, 1, bytes(29), b"x")],
        groups=[1],
    )

    def fail(_fd: int) -> None:
        raise OSError(errno.EIO, "ill")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        store.commit(batch)
        with pytest.raises(StoreError):
            store.tidy()
    assert len(store.scan(1, 1, items_max=9, bytes_max=99)) == 1
    store.tidy()
    assert store.tidy_in_s() != 0.0
    store.close()


class FullStore(SqliteStore):
    """Has room for acknowledgements only, when told so."""

    is_full = False

    def commit(self, batch: StoreBatch) -> None:
        if self.is_full and batch.appends:
            raise StoreFullError("no room")
        super().commit(batch)


@pytest.mark.parametrize("publishers", [0, 1, 3])
async def test_publishers_that_try_again_at_once_on_a_full_disk_do_not_stop_acknowledgements(
    tmp_path: Path, publishers: int
) -> None:
    store = FullStore(tmp_path / "queues.sqlite")
    engine = QueueEngine(store)
    await engine.open()
    refused = 0

    async def publish_again_and_again() -> None:
        nonlocal refused
        while True:
            with pytest.raises(StoreFullError):
                await engine.publish("", "jobs", [NewMessage(b"x")])
            refused += 1

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await nursery.start(engine.run)
            await engine.create_queue("", "jobs")
            consumer = await engine.subscribe("", "jobs", "work", SubscribeOptions(max_in_flight=10))
            await engine.publish("", "jobs", [NewMessage(b"x")] * 10)
            held: list[tuple[int, int]] = []
            while len(held) < 10:
                held += [(message.partition, message.seq) for message in await consumer.receive()]
            store.is_full = True
            for _ in range(publishers):
                nursery.start_soon(publish_again_and_again)
            while publishers and not refused:  # noqa: ASYNC110  (a thread, not a time)
                await trio.sleep(0.001)
            consumer.finish(held)
            await engine.flush()
            if publishers:
                before = refused
                while refused < before + 3:  # noqa: ASYNC110
                    await trio.sleep(0.001)
            nursery.cancel_scope.cancel()
        await engine.aclose()


async def test_a_store_that_does_not_answer_is_told_before_there_is_an_error(
    tmp_path: Path, mock_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that hangs, and a disk, give no error: all there was to see was that nothing went on."""
    store = HangingStore(tmp_path / "queues.sqlite")
    async with running_engine(store) as engine, trio.open_nursery() as nursery:
        await engine.create_queue("", "jobs")
        store.hangs(trio.lowlevel.current_trio_token())
        nursery.start_soon(engine.publish, "", "jobs", [NewMessage(b"x")])
        await store.entered.wait()
        mock_clock.jump(4.0)
        assert engine.statistics()["problem"] == ""
        mock_clock.jump(3.0)
        assert "does not answer: a commit has been under way for 7 s" in engine.statistics()["problem"]
        store.may_go_on.set()
        await engine.flush()
        assert engine.statistics()["problem"] == ""
    assert "a commit took 7.0 s" in caplog.text


class HangingStore(SqliteStore):
    """Its commits stop, from `hangs` until ``may_go_on``."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.entered = trio.Event()
        self.may_go_on = threading.Event()
        self._token: trio.lowlevel.TrioToken | None = None

    def hangs(self, token: trio.lowlevel.TrioToken) -> None:
        self._token = token

    def commit(self, batch: StoreBatch) -> None:
        if self._token is not None:
            self._token.run_sync_soon(lambda: self.entered.set())
            assert self.may_go_on.wait(60)
        super().commit(batch)
