"""A consumer of a queue whose partitions are on several nodes: a consumer of each share, as one.

In an exclusive channel the home says which partitions are this consumer's. A share's own lock decides who gets its
messages, so a wrong or old answer of the home costs time, never order: who is to hand a share over finishes what is in
work there, then leaves it, and the next one, which waits there already, has it at once.
"""

import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import trio

from dep2p.errors import ChannelNotFoundError, Dep2pError, QueueConsumerClosedError, QueueNotFoundError
from dep2p.protocols.queues.wire import QueueCode, Result, Settle, Settled
from dep2p.queues.client_metrics import Handovers
from dep2p.queues.consumer import BATCH_ITEMS, Consumer
from dep2p.queues.ordered_consumer import ExclusiveConsumer, PartitionHold
from dep2p.queues.types import Delivery

logger = logging.getLogger("dep2p.queues")

_RETRY_FIRST_S: Final = 0.1
_RETRY_MAX_S: Final = 5.0
_LOOK_S: Final = 5.0
"""How often a shared channel's consumer asks for partitions that were added."""


class _Share:
    """One partition, on its node."""

    def __init__(self, owner: "PlacedConsumer", partition: int) -> None:
        self.partition = partition
        self.consumer: Consumer | None = None
        self.is_retiring = False
        self.inbox = 0
        """What of it waits in the owner's inbox."""
        self.taken = trio.Event()
        self._scope = trio.CancelScope()
        self._owner = owner
        self._local = 0
        self._began_s: float | None = trio.current_time()
        self.retired_s = 0.0

    def _until_retired(self) -> trio.CancelScope:
        self._scope = trio.CancelScope()
        if self.is_retiring:
            self._scope.cancel()
        return self._scope

    def local(self, delivery: Delivery) -> Delivery:
        """As the share's consumer knows it."""
        return delivery._replace(partition=self._local)

    @property
    def local_partition(self) -> int:
        """Of the share on its node; 0 until something came from it."""
        return self._local

    async def run(self, open_share: Callable[[int, int], Awaitable[Consumer]]) -> None:
        """Until it is handed over."""
        retry_s = _RETRY_FIRST_S
        while not self.is_retiring:
            consumer: Consumer | None = None
            try:
                with self._until_retired():
                    consumer = await open_share(self.partition, self._owner.ready_each())
                if consumer is None:
                    return
                retry_s = _RETRY_FIRST_S
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
            except (Dep2pError, ValueError) as error:  # whatever its node does: it is one partition's trouble
                self._owner.counters["shares_lost"] += 1
                logger.info("partition %d of %r: %s", self.partition, self._owner.queue, error)
            finally:
                self.consumer = None
                if isinstance(consumer, ExclusiveConsumer):
                    self._owner.counters.update(consumer.counters)
            if not self.is_retiring:
                self._owner.revoked(self, told=True)
                with self._until_retired():
                    await trio.sleep(retry_s)
                retry_s = min(2 * retry_s, _RETRY_MAX_S)

    async def _receive(self, consumer: Consumer) -> None:
        while True:
            deliveries = await consumer.receive(1 if consumer.is_exclusive else BATCH_ITEMS)
            self._local = deliveries[0].partition
            self.taken = trio.Event()
            self._owner.arrived(self, deliveries)
            while self.inbox:
                await self.taken.wait()

    def _on_revoke(self, _partition: int) -> None:
        self._owner.revoked(self, told=True)

    def _on_assigned(self) -> None:
        consumer = self.consumer
        if self._began_s is not None and isinstance(consumer, ExclusiveConsumer) and consumer.partitions():
            self._owner.handovers.taken.add(trio.current_time() - self._began_s)
            self._began_s = None

    def retire(self) -> None:
        """It is to be handed over: nothing more is taken from it."""
        self.is_retiring = True
        self.retired_s = trio.current_time()
        self._owner.revoked(self, told=True)
        self._scope.cancel()


class PlacedConsumer(Consumer):
    """Made by `PlacedQueue.open_consumer`; `run` keeps it at work.

    ``max_in_flight`` is divided among the partitions that it has, and each may have one message at least.
    """

    def __init__(
        self,
        queue: str,
        channel: str,
        max_in_flight: int,
        token: Consumer,
        open_share: Callable[[int, int], Awaitable[Consumer]],
        partitions: Callable[[], Awaitable[tuple[int, ...]]],
    ) -> None:
        self.queue = queue
        self.channel = channel
        self.max_in_flight = max_in_flight
        self.is_exclusive = isinstance(token, ExclusiveConsumer)
        self.error: Dep2pError | None = None
        self.counters: Counter[str] = Counter()
        self.handovers = Handovers()
        self._token = token
        self._open_share = open_share
        self._partitions = partitions
        self._shares: dict[int, _Share] = {}
        self._running: dict[_Share, None] = {}
        self._inbox: deque[tuple[_Share, Delivery]] = deque()
        self._arrived = trio.lowlevel.ParkingLot()
        self._wake = trio.Event()
        self._scope = trio.CancelScope()

    # Life

    async def run(self) -> None:
        """Until it is closed, or its queue or channel is deleted."""
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
                        with trio.move_on_after(float("inf") if self.is_exclusive else _LOOK_S):
                            await self._wake.wait()
        finally:
            self._close(QueueConsumerClosedError("the consumer was closed"))
            with trio.CancelScope(shield=True):
                await token.aclose()

    async def _watch(self, token: Consumer) -> None:
        """The home sends no messages; it may end the consumer."""
        try:
            while True:
                await token.receive()
        except Dep2pError as error:
            self._close(error)

    def _on_assigned(self) -> None:
        self._wake.set()

    async def _follow(self, nursery: trio.Nursery) -> None:
        """Begin with what is new, and hand over what is somebody else's."""
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
                self.counters["looks_failed"] += 1
                logger.info("the partitions of %r are not known: %s", self.queue, error)
                wanted = tuple(self._shares)
            if any(each not in wanted for each in self._shares):  # a queue only gets more of them
                self.ended("the queue was deleted, and made anew")
                return
        for partition in [each for each in self._shares if each not in wanted]:
            self._shares.pop(partition).retire()
        for partition in wanted:
            is_leaving = any(each.partition == partition for each in self._running)
            if partition not in self._shares and not is_leaving:
                share = self._shares[partition] = _Share(self, partition)
                self._running[share] = None
                nursery.start_soon(self._run_share, share)
        self.set_ready(self.max_in_flight)

    async def _run_share(self, share: _Share) -> None:
        try:
            await share.run(self._open_share)
        finally:
            del self._running[share]
            self._wake.set()
            if share.retired_s and self.is_exclusive:
                self.handovers.given.add(trio.current_time() - share.retired_s)

    async def aclose(self) -> None:
        """What is held goes to others at once: nobody may work on it any more."""
        if self.error is None:
            while self._inbox:
                self._release(*self._inbox.popleft())
            self._close(QueueConsumerClosedError("the consumer was closed"))
            for share in list(self._running):
                share.is_retiring = True
                if share.consumer is not None:
                    await share.consumer.aclose()
            await self._token.aclose()
            self._scope.cancel()
        await trio.lowlevel.checkpoint()

    def ended(self, why: str) -> None:
        """Nothing more can come: queue or channel are gone."""
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

    # From the shares

    def ready_each(self) -> int:
        """How many messages of one share may be held."""
        return max(1, self.max_in_flight // max(1, len(self._shares))) if self.max_in_flight else 0

    def arrived(self, share: _Share, deliveries: Sequence[Delivery]) -> None:
        """Messages."""
        share.inbox += len(deliveries)
        self._inbox.extend((share, each._replace(partition=share.partition)) for each in deliveries)
        self._arrived.unpark_all()

    def revoked(self, share: _Share, *, told: bool) -> None:
        """Start nothing more of it; what nobody has seen is given back untried."""
        kept: deque[tuple[_Share, Delivery]] = deque()
        for each in self._inbox:
            if each[0] is share:
                self._release(*each)
            else:
                kept.append(each)
        self._inbox = kept
        if told and self.on_revoke is not None and self.error is None:
            try:
                self.on_revoke(share.partition)
            except Exception:
                logger.exception("on_revoke of the consumer of %r failed", self.queue)

    def _release(self, share: _Share, delivery: Delivery) -> None:
        self._left(share)
        if share.consumer is not None:
            share.consumer.settle([Result(Settle.RELEASE, share.local_partition, delivery.seq)])

    def _left(self, share: _Share) -> None:
        share.inbox -= 1
        if not share.inbox:
            share.taken.set()

    # For the app

    async def receive(self, items_max: int = BATCH_ITEMS) -> list[Delivery]:
        await trio.lowlevel.checkpoint()
        while True:
            found: list[Delivery] = []
            while self._inbox and len(found) < items_max:
                share, delivery = self._inbox.popleft()
                self._left(share)
                local = share.local(delivery)
                if share.consumer is not None and share.consumer.holds(local.partition, local.seq, local.epoch):
                    found.append(delivery)
                elif share.consumer is not None:
                    share.consumer.drop(local)
            if found:
                return found
            if self.error is not None:
                raise self.error.with_traceback(None)
            await self._arrived.park()

    def _of(self, partition: int) -> _Share | None:
        """Whose messages of that partition are in work: the one that hands over comes before the one that takes."""
        for share in self._running:
            if share.partition == partition and share.consumer is not None:
                return share
        return None

    def _sorted(self, results: Sequence[Result]) -> tuple[dict[_Share, list[Result]], list[tuple[int, int, int]]]:
        found: dict[_Share, list[Result]] = {}
        refused: list[tuple[int, int, int]] = []
        for result in results:
            share = self._of(result.partition)
            if share is None:
                refused.append((result.partition, result.seq, int(QueueCode.NOT_IN_FLIGHT)))
            else:
                found.setdefault(share, []).append(result._replace(partition=share.local_partition))
        return found, refused

    def settle(self, results: Sequence[Result]) -> list[tuple[int, int, int]]:
        by_share, refused = self._sorted(results)
        for share, each in by_share.items():
            assert share.consumer is not None
            refused += [(share.partition, seq, code) for _local, seq, code in share.consumer.settle(each)]
        return refused

    async def confirm(self, results: Sequence[Result]) -> Settled:
        by_share, refused = self._sorted(results)
        touched: list[tuple[int, int, int]] = []
        errors: list[Dep2pError] = []

        async def confirm(share: _Share, each: list[Result]) -> None:
            assert share.consumer is not None
            try:
                settled = await share.consumer.confirm(each)
            except Dep2pError as error:
                errors.append(error)
                return
            refused.extend((share.partition, seq, code) for _local, seq, code in settled.refused)
            touched.extend((share.partition, seq, left_ms) for _local, seq, left_ms in settled.touched)

        async with trio.open_nursery() as nursery:
            for share, each in by_share.items():
                nursery.start_soon(confirm, share, each)
        if errors:
            raise errors[0]
        return Settled(0, refused, touched)

    def holds(self, partition: int, seq: int, epoch: int = 0) -> bool:
        share = self._of(partition)
        return (
            share is not None and share.consumer is not None and share.consumer.holds(share.local_partition, seq, epoch)
        )

    def scope(self, delivery: Delivery) -> trio.CancelScope:
        share = self._of(delivery.partition)
        if share is None or share.consumer is None:
            scope = trio.CancelScope()
            scope.cancel()
            return scope
        return share.consumer.scope(share.local(delivery))

    def limit_s(self, delivery: Delivery) -> float:
        share = self._of(delivery.partition)
        if share is None or share.consumer is None:
            return float("-inf")
        return share.consumer.limit_s(share.local(delivery))

    def drop(self, delivery: Delivery) -> None:
        share = self._of(delivery.partition)
        if share is not None and share.consumer is not None:
            share.consumer.drop(share.local(delivery))

    def partitions(self) -> dict[int, PartitionHold]:
        """What it has now, in an exclusive channel."""
        found: dict[int, PartitionHold] = {}
        for share in self._running:
            if isinstance(share.consumer, ExclusiveConsumer):
                for hold in share.consumer.partitions().values():
                    found[share.partition] = hold._replace(
                        partition=share.partition, is_draining=hold.is_draining or share.is_retiring
                    )
        return found

    flow_kind = "consumer"

    @property
    def is_over(self) -> bool:
        """Nothing more comes."""
        return self.error is not None

    def flow_counts(self) -> dict[str, int]:
        """Since it began."""
        total = Counter(self.counters)
        for share in self._running:
            if isinstance(share.consumer, ExclusiveConsumer):
                total.update(share.consumer.counters)
        return dict(total)

    def flow_values(self) -> dict[str, float]:
        """Of this moment."""
        return {"partitions": len(self.partitions())}

    def set_ready(self, max_in_flight: int) -> None:
        self.max_in_flight = max_in_flight
        ready = self.ready_each()
        for share in self._running:
            if share.consumer is not None and not share.is_retiring and share.consumer.max_in_flight != ready:
                share.consumer.set_ready(ready)
