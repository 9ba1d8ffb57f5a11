"""The connection of an exclusive consumer to the broker of this node itself."""

from collections.abc import Callable, Sequence
from typing import Final

import trio

from dep2p.errors import Dep2pError, QueueConsumerClosedError
from dep2p.protocols.queues.ordering.group_member import Heartbeat
from dep2p.protocols.queues.wire.frames import DeliveryResult, Settled
from dep2p.queues.broker.exclusive_consumer import BrokerGroupMember
from dep2p.queues.ordered_consumer import ExclusiveConsumer

_RECEIVE_ITEMS: Final = 256


class LocalPort:
    """A port to the engine of this node."""

    def __init__(self, member: BrokerGroupMember, when_durable: Callable[[Callable[[], None]], None]) -> None:
        self._member = member
        self._when_durable = when_durable
        self.consumer: ExclusiveConsumer = ExclusiveConsumer(
            self, member.queue, member.channel, member.member.member, member.max_in_flight
        )
        member.on_lease = self.consumer.lease_arrived

    async def run(self) -> None:
        """Run until the consumer is closed, here or by the deletion of its queue or channel."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._receive, nursery.cancel_scope)
            self.consumer.linked()
            await self.consumer.run()
            nursery.cancel_scope.cancel()
        await self.leave()

    async def _receive(self, scope: trio.CancelScope) -> None:
        try:
            while True:
                self.consumer.arrived(await self._member.receive(_RECEIVE_ITEMS))
        except Dep2pError as error:
            self.consumer.close(error)
        scope.cancel()

    def heartbeat(self, beat: Heartbeat) -> bool:
        """See `Port`."""
        try:
            self._member.heartbeat(beat.beat, beat.seen, beat.held)
        except ValueError as error:  # too many consumers
            self.consumer.close(QueueConsumerClosedError(str(error)))
        return True

    def unlock(self, partition: int, epoch: int) -> None:
        """See `Port`."""
        self._member.unlock(partition, epoch)

    def send_results(
        self, epoch: int, results: Sequence[DeliveryResult], on_settled: Callable[[Settled | None], None] | None
    ) -> bool:
        """See `Port`."""
        settled = self._member.apply_fenced(epoch, results)
        self.consumer.counters["results_refused"] += len(settled.refused)
        if on_settled is not None:
            self._when_durable(lambda: on_settled(settled))
        return True

    def ready(self, max_in_flight: int) -> None:
        """See `Port`."""
        self._member.set_ready(max_in_flight)

    async def leave(self) -> None:
        """See `Port`."""
        self._member.is_leaving = True
        await self._member.aclose()
