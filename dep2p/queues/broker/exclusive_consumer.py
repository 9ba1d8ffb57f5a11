"""A consumer of an exclusive channel at the node that keeps the queue: what it may have, and whose results count."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import trio

from dep2p.errors import LockLostError
from dep2p.protocols.queues.exclusive_channel import ExclusiveChannel, ExclusiveConsumer
from dep2p.protocols.queues.ordering.consumer_group import Lease
from dep2p.protocols.queues.wire import QueueCode, Result, Settled
from dep2p.queues.broker.local_consumer import LocalConsumer
from dep2p.queues.consumer import BATCH_ITEMS
from dep2p.queues.types import Delivery

if TYPE_CHECKING:
    from dep2p.queues.broker.engine import QueueEngine


class KeptMember(LocalConsumer):
    """Made by `QueueEngine.subscribe` with a member's name."""

    def __init__(
        self,
        engine: "QueueEngine",
        channel: ExclusiveChannel,
        consumer_id: str,
        member: bytes,
        *,
        max_in_flight: int,
        bytes_max: int,
        msg_timeout_s: float,
    ) -> None:
        super().__init__(
            engine,
            channel,
            consumer_id,
            max_in_flight=max_in_flight,
            bytes_max=bytes_max,
            msg_timeout_s=msg_timeout_s,
        )
        self.core = self.member = ExclusiveConsumer(
            consumer_id,
            member,
            max_in_flight=max_in_flight,
            bytes_max=bytes_max,
            msg_timeout_s=msg_timeout_s,
            on_deliver=self._on_deliver,
            on_closed=self.stop_because,
            on_lease=self._on_lease,
        )
        self.on_lease: Callable[[Lease], None] = lambda _lease: None
        """Set by who tells the consumer."""
        self.is_leaving = False
        """It says itself that it goes: then nothing is in work there, and others need not wait for its lease."""
        self._exclusive = channel

    def _on_lease(self, lease: Lease) -> None:
        self.on_lease(lease)

    async def receive(self, items_max: int = BATCH_ITEMS) -> list[Delivery]:
        inbox, held, epochs = self._inbox, self.member.held, self.member.epochs
        await trio.lowlevel.checkpoint()
        while True:
            taken: list[Delivery] = []
            while inbox and len(taken) < items_max:
                partition, message, attempts, deadline, epoch = inbox.popleft()
                seq = message.seq
                # Else it has lost the partition since, or the message's time was over.
                if epochs.get(partition) == epoch and (partition, seq) in held:
                    taken.append(
                        Delivery(
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
            await self._wait()

    def heartbeat(self, beat: int, seen: int, held: Sequence[tuple[int, int]]) -> None:
        """It is there. Raises ``ValueError`` when the channel has too many consumers."""
        engine = self._engine
        if not engine.is_held():
            return  # an answer would promise a lease that another node may be giving to somebody else
        engine.book.at(engine.wall_us())
        self._exclusive.heartbeat(self.member, beat, seen, dict(held), engine.now())
        engine.changed()

    def unlock(self, partition: int, epoch: int) -> None:
        """It hands a partition over."""
        self._engine.book.at(self._engine.wall_us())
        self._exclusive.unlock(self.member, partition, epoch)
        self._engine.changed()

    def apply_fenced(self, epoch: int, results: Sequence[Result]) -> Settled:
        """Results for messages of one partition that were delivered under that epoch."""
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
