"""The event loop works while a batch is written: what is committed is delivered, what is given out is worked on."""

import threading
from pathlib import Path

import trio
import trio.testing

from dep2p.protocols.queues.message import NewMessage
from dep2p.protocols.queues.records import StoreBatch
from dep2p.queues.types import SubscribeOptions
from dep2p.storage.sqlite.store import SqliteStore
from tests.queues.nodes import running_engine

BOUND_S = 60


class StepByStep(SqliteStore):
    """Each commit waits until it may, once `begin` was called."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.batches: list[StoreBatch] = []
        self._may = threading.Semaphore(0)
        self._token: trio.lowlevel.TrioToken | None = None
        self._entered = trio.Event()

    def begin(self) -> None:
        """From now on."""
        self._token = trio.lowlevel.current_trio_token()

    async def entered(self) -> StoreBatch:
        """The batch of the next commit, which is under way then."""
        with trio.fail_after(BOUND_S):
            await self._entered.wait()
        self._entered = trio.Event()
        await trio.testing.wait_all_tasks_blocked(0.01)  # what is done meanwhile is done
        return self.batches[-1]

    def let_pass(self, count: int = 1) -> None:
        self._may.release(count)

    def commit(self, batch: StoreBatch) -> None:
        if self._token is not None:
            self.batches.append(batch)
            self._token.run_sync_soon(lambda: self._entered.set())
            assert self._may.acquire(timeout=BOUND_S)
        super().commit(batch)


async def test_what_is_committed_is_handed_out_and_consumed_while_the_next_batch_is_written(tmp_path: Path) -> None:
    """Writer and event loop waited for each other: a message cost the sum of both."""
    store = StepByStep(tmp_path / "queues.sqlite")
    async with running_engine(store) as engine, trio.open_nursery() as nursery:
        await engine.create_queue("", "jobs")
        async with await engine.subscribe("", "jobs", "c", SubscribeOptions(max_in_flight=1)) as consumer:
            await engine.flush()
            store.begin()

            def publish(body: bytes) -> None:
                nursery.start_soon(engine.publish, "", "jobs", [NewMessage(body)])

            publish(b"a")
            assert [row.body for row in (await store.entered()).appends] == [b"a"]
            publish(b"b")
            await trio.testing.wait_all_tasks_blocked(0.01)
            store.let_pass()
            batch = await store.entered()
            assert ([row.body for row in batch.appends], batch.cursors) == ([b"b"], {})
            [channel] = engine.registry.find("", "jobs").channels.values()
            assert channel.in_flight == 1  # looked at and assigned while that is written
            publish(b"c")
            await trio.testing.wait_all_tasks_blocked(0.01)
            store.let_pass()
            batch = await store.entered()
            assert ([row.body for row in batch.appends], len(batch.cursors)) == ([b"c"], 1)
            publish(b"d")
            await trio.testing.wait_all_tasks_blocked(0.01)
            store.let_pass()
            batch = await store.entered()
            assert [row.body for row in batch.appends] == [b"d"]
            with trio.fail_after(BOUND_S):  # the delivery is durable, and "d" is not yet
                [delivery] = await consumer.receive()
            assert delivery.body == b"a"
            consumer.finish([(delivery.partition, delivery.seq)])
            store.let_pass(1_000)
            with trio.fail_after(BOUND_S):
                for body in (b"b", b"c", b"d"):
                    [delivery] = await consumer.receive()
                    assert delivery.body == body
                    consumer.finish([(delivery.partition, delivery.seq)])
                await engine.flush()
        assert channel.ack_floor(delivery.partition) == 4


async def test_a_delivery_that_waits_for_the_next_batch_is_not_given_to_who_is_gone(tmp_path: Path) -> None:
    """Its message goes to the next consumer as one that was not tried."""
    store = StepByStep(tmp_path / "queues.sqlite")
    async with running_engine(store) as engine, trio.open_nursery() as nursery:
        await engine.create_queue("", "jobs")
        first = await engine.subscribe("", "jobs", "c", SubscribeOptions(max_in_flight=1))
        await engine.flush()
        store.begin()
        nursery.start_soon(engine.publish, "", "jobs", [NewMessage(b"a")])
        await store.entered()
        store.let_pass()
        assert (await store.entered()).cursors  # it is being delivered
        await first.aclose()
        store.let_pass(1_000)
        async with await engine.subscribe("", "jobs", "c", SubscribeOptions(max_in_flight=1)) as second:
            with trio.fail_after(BOUND_S):
                [delivery] = await second.receive()
            assert (delivery.body, delivery.attempts) == (b"a", 1)
