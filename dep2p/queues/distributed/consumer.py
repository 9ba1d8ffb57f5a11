"""A consumer of a queue whose partitions are on several nodes: a consumer of each shard, as one.

In an exclusive channel the controller says which partitions are this consumer's. A shard's own lock decides who gets
its messages, so a wrong or old answer of the controller costs time, never order. A consumer that hands a shard over
finishes its work there and leaves; the next one waits there already, and has the shard at once.
"""

import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import trio

from dep2p.errors import ChannelNotFoundError, Dep2pError, QueueConsumerClosedError, QueueNotFoundError
from dep2p.protocols.queues.wire.frames import DeliveryResult, QueueCode, Settle, Settled
from dep2p.protocols.timing.backoff import Backoff
from dep2p.queues.client_metrics import Handovers
from dep2p.queues.consumer import BATCH_ITEMS, Consumer
from dep2p.queues.ordered_consumer import ExclusiveConsumer, PartitionHold
from dep2p.queues.types import MessageDelivery

logger: logging.Logger = logging.getLogger("dep2p.queues")

_BACKOFF: Final = Backoff(first_s=0.1, max_s=5.0)
_CHECK_S: Final = 5.0
"""How often a shared channel's consumer asks for partitions that were added."""


class _ShardSubscription:
    """The subscription to one partition, on its node."""

    def __init__(self, owner: "DistributedConsumer", partition: int) -> None:
        self.partition = partition
        self.consumer: Consumer | None = None
        self.is_retiring: bool = False
        self.inbox = 0
        """Messages of this partition that wait in the owner's inbox."""
        self.taken: trio.Event = trio.Event()
        self._scope = trio.CancelScope()
        self._owner = owner
        self._local = 0
        self._began_s: float | None = trio.current_time()
        self.retired_s: float = 0.0

    def _until_retired(self) -> trio.CancelScope:
        self._scope = trio.CancelScope()
        if self.is_retiring:
            self._scope.cancel()
        return self._scope

    def local(self, delivery: MessageDelivery) -> MessageDelivery:
        """Return a delivery with the number that the shard's node gives to the partition."""
        return delivery._replace(partition=self._local)

    @property
    def local_partition(self) -> int:
        """The number that the shard's node gives to the partition; 0 until a message came from it."""
        return self._local

    async def run(self, open_shard: Callable[[int, int], Awaitable[Consumer]]) -> None:
        """Consume the partition until it is handed over."""
        failures = 0
        while not self.is_retiring:
            consumer: Consumer | None = None
            try:
                with self._until_retired():
                    consumer = await open_shard(self.partition, self._owner.ready_each())
                if consumer is None:
                    return
                failures = 0
                async with consumer:
                    self.consumer = consumer
                    consumer.on_revoke = self._on_revoke
                    if isinstance(consumer, ExclusiveConsumer):
                        consumer.on_assigned = self._on_assigned
                        self._on_assigned()
                    with self._until_retired():
                        await self._receive(consumer)
                    if isinstance(consumer, ExclusiveConsumer):
                        await consumer.drain()
            except ChannelNotFoundError as error:  # channels are made in all partitions before the first consumer comes
                self._owner.ended(f"its channel was deleted ({error})")
            except (Dep2pError, ValueError) as error:  # an error of one node stops one partition only
                self._owner.counters["shards_lost"] += 1
                logger.info("partition %d of %r: %s", self.partition, self._owner.queue, error)
            finally:
                self.consumer = None
                if isinstance(consumer, ExclusiveConsumer):
                    self._owner.counters.update(consumer.counters)
            if not self.is_retiring:
                self._owner.revoked(self, notified=True)
                failures += 1
                with self._until_retired():
                    await trio.sleep(_BACKOFF.after(failures))

    async def _receive(self, consumer: Consumer) -> None:
        while True:
            deliveries = await consumer.receive(1 if consumer.is_exclusive else BATCH_ITEMS)
            self._local = deliveries[0].partition
            self.taken = trio.Event()
            self._owner.arrived(self, deliveries)
            while self.inbox:
                await self.taken.wait()

    def _on_revoke(self, _partition: int) -> None:
        self._owner.revoked(self, notified=True)

    def _on_assigned(self) -> None:
        consumer = self.consumer
        if self._began_s is not None and isinstance(consumer, ExclusiveConsumer) and consumer.partitions():
            self._owner.handovers.taken.add(trio.current_time() - self._began_s)
            self._began_s = None

    def retire(self) -> None:
        """Begin to hand the partition over: take nothing more from it."""
        self.is_retiring = True
        self.retired_s = trio.current_time()
        self._owner.revoked(self, notified=True)
        self._scope.cancel()


class DistributedConsumer(Consumer):
    """Made by `DistributedQueue.open_consumer`; `run` keeps it at work.

    ``max_in_flight`` is divided among the partitions that it has, and each may have one message at least.
    """

    max_in_flight: int

    def __init__(
        self,
        queue: str,
        channel: str,
        max_in_flight: int,
        token: Consumer,
        open_shard: Callable[[int, int], Awaitable[Consumer]],
        partitions: Callable[[], Awaitable[tuple[int, ...]]],
    ) -> None:
        self.queue = queue
        self.channel = channel
        self.max_in_flight = max_in_flight
        self.is_exclusive: bool = isinstance(token, ExclusiveConsumer)
        self.error: Dep2pError | None = None
        self.counters: Counter[str] = Counter()
        self.handovers: Handovers = Handovers()
        self._token = token
        self._open_shard = open_shard
        self._partitions = partitions
        self._shards: dict[int, _ShardSubscription] = {}
        self._running: dict[_ShardSubscription, None] = {}
        self._inbox: deque[tuple[_ShardSubscription, MessageDelivery]] = deque()
        self._arrived = trio.lowlevel.ParkingLot()
        self._wake = trio.Event()
        self._scope = trio.CancelScope()

    # Life

    async def run(self) -> None:
        """Run until it is closed, or its queue or channel is deleted."""
        token = self._token
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    if isinstance(token, ExclusiveConsumer):
                        token.on_assigned = self._on_assigned
                    nursery.start_soon(self._watch, token)
                    while self.error is None:
                        self._wake = trio.Event()
                        await self._follow(nursery)
                        with trio.move_on_after(float("inf") if self.is_exclusive else _CHECK_S):
                            await self._wake.wait()
        finally:
            self._close(QueueConsumerClosedError("the consumer was closed"))
            with trio.CancelScope(shield=True):
                await token.aclose()

    async def _watch(self, token: Consumer) -> None:
        """Watch the subscription at the controller, which sends no messages and may end the consumer."""
        try:
            while True:
                await token.receive()
        except Dep2pError as error:
            self._close(error)

    def _on_assigned(self) -> None:
        self._wake.set()

    async def _follow(self, nursery: trio.Nursery) -> None:
        """Begin with new partitions, and hand over those of other consumers."""
        token = self._token
        if isinstance(token, ExclusiveConsumer):
            if not token.core.is_joined:
                return
            wanted = token.core.assigned
        else:
            try:
                wanted = await self._partitions()
            except QueueNotFoundError as error:
                self.ended(str(error))
                return
            except Dep2pError as error:
                self.counters["owner_checks_failed"] += 1
                logger.info("the partitions of %r are not known: %s", self.queue, error)
                wanted = tuple(self._shards)
            if any(each not in wanted for each in self._shards):  # a queue never loses partitions
                self.ended("the queue was deleted, and made anew")
                return
        for partition in [each for each in self._shards if each not in wanted]:
            self._shards.pop(partition).retire()
        for partition in wanted:
            is_leaving = any(each.partition == partition for each in self._running)
            if partition not in self._shards and not is_leaving:
                shard = self._shards[partition] = _ShardSubscription(self, partition)
                self._running[shard] = None
                nursery.start_soon(self._run_shard, shard)
        self.set_ready(self.max_in_flight)

    async def _run_shard(self, shard: _ShardSubscription) -> None:
        try:
            await shard.run(self._open_shard)
        finally:
            del self._running[shard]
            self._wake.set()
            if shard.retired_s and self.is_exclusive:
                self.handovers.given.add(trio.current_time() - shard.retired_s)

    async def aclose(self) -> None:
        """Close. Messages that were not settled go to other consumers at once: no handler may work on them any more."""
        if self.error is None:
            while self._inbox:
                self._release(*self._inbox.popleft())
            self._close(QueueConsumerClosedError("the consumer was closed"))
            for shard in list(self._running):
                shard.is_retiring = True
                if shard.consumer is not None:
                    await shard.consumer.aclose()
            await self._token.aclose()
            self._scope.cancel()
        await trio.lowlevel.checkpoint()

    def ended(self, why: str) -> None:
        """End: queue or channel are gone."""
        self._close(QueueConsumerClosedError(f"the consumer of {self.queue!r} is over: {why}"))

    def _close(self, error: Dep2pError) -> None:
        if self.error is None:
            self.error = error
            self._inbox.clear()
            self._wake.set()
            self._arrived.unpark_all()
            if not isinstance(error, QueueConsumerClosedError) or error.args != ("the consumer was closed",):
                self._scope.cancel()
            if self.on_lost is not None:
                self.on_lost()

    # From the shards

    def ready_each(self) -> int:
        """The number of messages that each shard may give without a result."""
        return max(1, self.max_in_flight // max(1, len(self._shards))) if self.max_in_flight else 0

    def arrived(self, shard: _ShardSubscription, deliveries: Sequence[MessageDelivery]) -> None:
        """Take messages of a shard."""
        shard.inbox += len(deliveries)
        self._inbox.extend((shard, each._replace(partition=shard.partition)) for each in deliveries)
        self._arrived.unpark_all()

    def revoked(self, shard: _ShardSubscription, *, notified: bool) -> None:
        """Act on a revoked partition: start nothing more of it, and release messages that the app has not seen."""
        kept: deque[tuple[_ShardSubscription, MessageDelivery]] = deque()
        for each in self._inbox:
            if each[0] is shard:
                self._release(*each)
            else:
                kept.append(each)
        self._inbox = kept
        if notified and self.on_revoke is not None and self.error is None:
            try:
                self.on_revoke(shard.partition)
            except Exception:
                logger.exception("on_revoke of the consumer of %r failed", self.queue)

    def _release(self, shard: _ShardSubscription, delivery: MessageDelivery) -> None:
        self._left(shard)
        if shard.consumer is not None:
            shard.consumer.settle([DeliveryResult(Settle.RELEASE, shard.local_partition, delivery.seq)])

    def _left(self, shard: _ShardSubscription) -> None:
        shard.inbox -= 1
        if not shard.inbox:
            shard.taken.set()

    # For the app

    async def receive(self, items_max: int = BATCH_ITEMS) -> list[MessageDelivery]:
        await trio.lowlevel.checkpoint()
        while True:
            found: list[MessageDelivery] = []
            while self._inbox and len(found) < items_max:
                shard, delivery = self._inbox.popleft()
                self._left(shard)
                local = shard.local(delivery)
                if shard.consumer is not None and shard.consumer.holds(local.partition, local.seq, local.epoch):
                    found.append(delivery)
                elif shard.consumer is not None:
                    shard.consumer.drop(local)
            if found:
                return found
            if self.error is not None:
                raise self.error.with_traceback(None)
            await self._arrived.park()

    def _of(self, partition: int) -> _ShardSubscription | None:
        """Return the subscription that works on messages of a partition: the old one, while it hands over, before the
        new one."""
        for shard in self._running:
            if shard.partition == partition and shard.consumer is not None:
                return shard
        return None

    def _sorted(
        self, results: Sequence[DeliveryResult]
    ) -> tuple[dict[_ShardSubscription, list[DeliveryResult]], list[tuple[int, int, int]]]:
        found: dict[_ShardSubscription, list[DeliveryResult]] = {}
        refused: list[tuple[int, int, int]] = []
        for result in results:
            shard = self._of(result.partition)
            if shard is None:
                refused.append((result.partition, result.seq, int(QueueCode.NOT_IN_FLIGHT)))
            else:
                found.setdefault(shard, []).append(result._replace(partition=shard.local_partition))
        return found, refused

    def settle(self, results: Sequence[DeliveryResult]) -> list[tuple[int, int, int]]:
        by_shard, refused = self._sorted(results)
        for shard, each in by_shard.items():
            assert shard.consumer is not None
            refused += [(shard.partition, seq, code) for _local, seq, code in shard.consumer.settle(each)]
        return refused

    async def confirm(self, results: Sequence[DeliveryResult]) -> Settled:
        by_shard, refused = self._sorted(results)
        touched: list[tuple[int, int, int]] = []
        errors: list[Dep2pError] = []

        async def confirm(shard: _ShardSubscription, each: list[DeliveryResult]) -> None:
            assert shard.consumer is not None
            try:
                settled = await shard.consumer.confirm(each)
            except Dep2pError as error:
                errors.append(error)
                return
            refused.extend((shard.partition, seq, code) for _local, seq, code in settled.refused)
            touched.extend((shard.partition, seq, left_ms) for _local, seq, left_ms in settled.touched)

        async with trio.open_nursery() as nursery:
            for shard, each in by_shard.items():
                nursery.start_soon(confirm, shard, each)
        if errors:
            raise errors[0]
        return Settled(0, refused, touched)

    def holds(self, partition: int, seq: int, epoch: int = 0) -> bool:
        shard = self._of(partition)
        return (
            shard is not None and shard.consumer is not None and shard.consumer.holds(shard.local_partition, seq, epoch)
        )

    def scope(self, delivery: MessageDelivery) -> trio.CancelScope:
        shard = self._of(delivery.partition)
        if shard is None or shard.consumer is None:
            scope = trio.CancelScope()
            scope.cancel()
            return scope
        return shard.consumer.scope(shard.local(delivery))

    def limit_s(self, delivery: MessageDelivery) -> float:
        shard = self._of(delivery.partition)
        if shard is None or shard.consumer is None:
            return float("-inf")
        return shard.consumer.limit_s(shard.local(delivery))

    def drop(self, delivery: MessageDelivery) -> None:
        shard = self._of(delivery.partition)
        if shard is not None and shard.consumer is not None:
            shard.consumer.drop(shard.local(delivery))

    def partitions(self) -> dict[int, PartitionHold]:
        """Return the partitions that it holds now, in an exclusive channel."""
        found: dict[int, PartitionHold] = {}
        for shard in self._running:
            if isinstance(shard.consumer, ExclusiveConsumer):
                for hold in shard.consumer.partitions().values():
                    found[shard.partition] = hold._replace(
                        partition=shard.partition, is_draining=hold.is_draining or shard.is_retiring
                    )
        return found

    flow_kind = "consumer"

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes."""
        return self.error is not None

    def flow_counts(self) -> dict[str, int]:
        """Return its counts since it began."""
        total = Counter(self.counters)
        for shard in self._running:
            if isinstance(shard.consumer, ExclusiveConsumer):
                total.update(shard.consumer.counters)
        return dict(total)

    def flow_values(self) -> dict[str, float]:
        """Return the gauges of this moment: the number of partitions."""
        return {"partitions": len(self.partitions())}

    def set_ready(self, max_in_flight: int) -> None:
        self.max_in_flight = max_in_flight
        ready = self.ready_each()
        for shard in self._running:
            if shard.consumer is not None and not shard.is_retiring and shard.consumer.max_in_flight != ready:
                shard.consumer.set_ready(ready)
