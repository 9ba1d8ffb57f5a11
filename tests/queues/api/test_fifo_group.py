"""FIFO consumers of one group on several nodes: they come, go and lose links, and every key keeps its order."""

from collections import defaultdict
from random import Random

import pytest
import trio
import trio.testing

from dep2p.protocols.timing.backoff import Backoff
from dep2p.queues.api.push_consumer import PushedMessage
from dep2p.queues.api.queues import Queues
from tests.queues.nodes import queue_sides

Clock = trio.testing.MockClock

KEYS = 20


class Group:
    """The state that all handlers of a group share; it checks every rule about order."""

    def __init__(self, seed: int, *, fails: float = 0.0) -> None:
        self.rng = Random(seed)
        self.next: dict[str, int] = defaultdict(int)
        self.busy: dict[str, None] = {}
        self.repeats = 0
        self.handled = 0
        self.by_consumer: dict[str, int] = defaultdict(int)
        self._fails = fails
        self._changed = trio.Event()

    def handler(self, name: str) -> object:
        """Return the handler of one consumer."""

        async def handle(message: PushedMessage) -> None:
            key, number = message.key, int(message.body)
            assert key not in self.busy, f"two handlers of {key}"
            self.busy[key] = None
            try:
                await trio.sleep(self.rng.choice((0.0, 0.1, 1.0)))
            finally:
                del self.busy[key]
            if self.rng.random() < self._fails:
                raise OSError("not now")
            expected = self.next[key]
            assert expected - 1 <= number <= expected, f"{key}: {number} where {expected} is next"
            if number == expected:
                self.next[key] += 1
                self.handled += 1
            else:
                self.repeats += 1
            self.by_consumer[name] += 1
            self._changed.set()

        return handle

    async def until(self, count: int) -> None:
        with trio.fail_after(7_200):
            while self.handled < count:
                self._changed = trio.Event()
                await self._changed.wait()


async def _produce(queues: Queues, rounds: int, *, first: int = 0, pause_s: float = 0.0) -> None:
    async with queues.producer("orders", order="strict", close_timeout_s=600.0) as producer:
        for number in range(first, first + rounds):
            for key in range(KEYS):
                await producer.send(b"%d" % number, key=f"key {key}")
            await trio.sleep(pause_s)


async def _consume(queues: Queues, group: Group, name: str, task_status: trio.TaskStatus[trio.CancelScope]) -> None:
    with trio.CancelScope() as scope:
        async with queues.consumer(
            "orders",
            "billing",
            group.handler(name),  # type: ignore[arg-type]  # pyright: ignore
            mode="fifo",
            max_attempts=0,
            retry=Backoff(0.2, 1.0),
        ):
            task_status.started(scope)
            await trio.sleep_forever()


@pytest.mark.parametrize("order", ["strict", "best_effort"])
async def test_a_group_keeps_the_order_of_every_key(autojump_clock: Clock, order: str) -> None:
    """Four consumers on four nodes, of which one joins late, one leaves, one loses its link again and again, while
    handlers fail and partitions are added."""
    rounds = 60
    async with queue_sides(5) as (broker, *others):
        await broker.queues.create("orders", {"partitions": 2, "order": order})
        group = Group(11, fails=0.05)
        async with trio.open_nursery() as nursery:
            scopes = [
                await nursery.start(_consume, side.at(broker), group, f"c{index}")
                for index, side in enumerate(others[:3])
            ]
            nursery.start_soon(lambda: _produce(others[3].at(broker), rounds, pause_s=0.4))
            await group.until(100)
            await nursery.start(_consume, others[3].at(broker), group, "late")
            await broker.queues.expand("orders", 6)
            await group.until(150)
            scopes[0].cancel()
            for done in (200, 250, 300):
                await group.until(done)
                await others[1].cut(broker)
            await group.until(rounds * KEYS)
            nursery.cancel_scope.cancel()
        assert dict(group.next) == {f"key {key}": rounds for key in range(KEYS)}
        assert group.by_consumer["late"], "the late one never had a partition"


async def test_24_the_order_of_a_key_holds_over_an_expansion(autojump_clock: Clock) -> None:
    """(24: alibaba/rocketmq#401) With more queues, a key's later messages overtook its earlier ones."""
    async with queue_sides(2) as (broker, asker):
        await broker.queues.create("orders", {"partitions": 1})
        group = Group(3)
        await broker.queues.create_channel("orders", "billing", exclusive=True)
        await _produce(asker.at(broker), 5)  # a backlog in the one partition
        await broker.queues.expand("orders", 4)
        async with trio.open_nursery() as nursery:
            for name in ("a", "b", "c"):
                await nursery.start(_consume, asker.at(broker), group, name)
            # After them come those in the new partitions, which may be read only when the old one is done.
            nursery.start_soon(lambda: _produce(asker.at(broker), 5, first=5))
            await group.until(10 * KEYS)
            nursery.cancel_scope.cancel()
        assert group.repeats == 0


async def test_27_the_partitions_of_a_consumer_that_leaves_go_on_at_once(autojump_clock: Clock) -> None:
    """(27: apache/rocketmq-client-go#1220) The lock was not released: the next one waited for 60 s."""
    async with queue_sides(3) as (broker, first, second):
        await broker.queues.create("orders", {"partitions": 4})
        group = Group(4)
        async with trio.open_nursery() as nursery:
            leaving = await nursery.start(_consume, first.at(broker), group, "first")
            await nursery.start(_consume, second.at(broker), group, "second")
            await _produce(first.at(broker), 2)
            await group.until(2 * KEYS)
            began = trio.current_time()
            leaving.cancel()
            await _produce(first.at(broker), 1, first=2)
            await group.until(3 * KEYS)
            assert trio.current_time() - began < 5.0, "the partitions waited for a lease to end"
            nursery.cancel_scope.cancel()
