"""A consumer of an exclusive channel at the broker: its partitions, and the results that count."""

from collections.abc import Callable, Sequence

import trio

from dep2p.errors import LockLostError
from dep2p.protocols.queues.consumer import ChannelConsumer, ConsumerWindow
from dep2p.protocols.queues.exclusive_channel import ExclusiveChannel, ExclusiveChannelConsumer
from dep2p.protocols.queues.ordering.consumer_group import Lease
from dep2p.protocols.queues.wire.frames import DeliveryResult, QueueCode, Settled
from dep2p.queues.broker.interfaces import ConsumerEngine
from dep2p.queues.broker.local_consumer import LocalConsumer
from dep2p.queues.consumer import BATCH_ITEMS
from dep2p.queues.types import MessageDelivery


class BrokerGroupMember(LocalConsumer):
    """Made by `QueueEngine.subscribe` with a member's name."""

    def __init__(
        self,
        engine: ConsumerEngine,
        channel: ExclusiveChannel,
        consumer_id: str,
        member: bytes,
        window: ConsumerWindow,
    ) -> None:
        super().__init__(engine, channel, consumer_id, window)
        self.member: ExclusiveChannelConsumer = ExclusiveChannelConsumer(
            consumer_id,
            member,
            window,
            on_deliver=self._on_deliver,
            on_closed=self.stop_because,
            on_lease=self._on_lease,
        )
        self.core: ChannelConsumer = self.member
        self.on_lease: Callable[[Lease], None] = lambda _lease: None
        """Called with each lease for the consumer; its link sets it."""
        self.is_leaving = False
        """Whether the consumer has said that it leaves: then it works on nothing, and others need not wait for its
        lease."""
        self._exclusive = channel

    def _on_lease(self, lease: Lease) -> None:
        self.on_lease(lease)

    async def receive(self, items_max: int = BATCH_ITEMS) -> list[MessageDelivery]:
        inbox, held, epochs = self._inbox, self.member.held, self.member.epochs
        await trio.lowlevel.checkpoint()
        while True:
            taken: list[MessageDelivery] = []
            while inbox and len(taken) < items_max:
                partition, message, attempts, deadline, epoch = inbox.popleft()
                seq = message.seq
                # Otherwise it has lost the partition since, or the message's time was over.
                if epochs.get(partition) == epoch and (partition, seq) in held:
                    taken.append(
                        MessageDelivery(
                            partition,
                            seq,
                            attempts,
                            message.published_us,
                            deadline,
                            message.attributes,
                            message.body,
                            epoch,
                        )
                    )
            if taken:
                return taken
            if self.error is not None:
                raise self.error.with_traceback(None)
            await self._waiting.wait()

    def heartbeat(self, beat: int, seen: int, held: Sequence[tuple[int, int]]) -> None:
        """Take a heartbeat. Raises ``ValueError`` when the channel has too many consumers."""
        engine = self._engine
        if not engine.is_held():
            return  # an answer would promise a lease that another node may be giving to another consumer
        engine.registry.at(engine.wall_us())
        self._exclusive.heartbeat(self.member, beat, seen, dict(held), engine.now())
        engine.changed()

    def unlock(self, partition: int, epoch: int) -> None:
        """Free a partition that the consumer hands over."""
        self._engine.registry.at(self._engine.wall_us())
        self._exclusive.unlock(self.member, partition, epoch)
        self._engine.changed()

    def apply_fenced(self, epoch: int, results: Sequence[DeliveryResult]) -> Settled:
        """Apply results for messages of one partition that were delivered under that epoch."""
        try:
            holder = self._exclusive.holder(results[0].partition, epoch)
        except LockLostError:
            self._exclusive.counts["refused_lock_lost"] += len(results)
            return Settled(0, [(each.partition, each.seq, int(QueueCode.LOCK_LOST)) for each in results], [])
        return self.apply_for(holder, results)

    def detach(self, now: float) -> None:
        if self.is_leaving:
            self._exclusive.leave(self.member, now)
        else:
            self._exclusive.detach(self.member, now)

    async def aclose(self) -> None:
        if self.error is None:
            self.stop_because("it was closed")
            self._engine.detach(self._channel, self)
        await trio.lowlevel.checkpoint()
