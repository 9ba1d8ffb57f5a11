"""The two ways of an exclusive consumer to its keeper: this node itself, or a link to another member."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import trio

from dep2p.errors import Dep2pError, QueueConsumerClosedError, StreamClosedError
from dep2p.limits import Limits
from dep2p.protocols.queues import wire_exclusive as fenced
from dep2p.protocols.queues.ordering.consumer_group import Lease
from dep2p.protocols.queues.ordering.group_member import Heartbeat
from dep2p.protocols.queues.wire import Delivered, Result, Settled
from dep2p.queues.broker.exclusive_consumer import KeptMember
from dep2p.queues.ordered_consumer import ExclusiveConsumer
from dep2p.queues.remote.broker_directory import Way
from dep2p.queues.remote.consumer import RemoteConsumer
from dep2p.queues.types import Delivery

_RECEIVE_ITEMS: Final = 256
_TICKET_MAX: Final = 0xFFFF_FFFF


class LocalPort:
    """To the engine of this node."""

    def __init__(self, member: KeptMember, when_durable: Callable[[Callable[[], None]], None]) -> None:
        self._member = member
        self._when_durable = when_durable
        self.consumer = ExclusiveConsumer(
            self, member.queue, member.channel, member.member.member, member.max_in_flight
        )
        member.on_lease = self.consumer.lease_arrived

    async def run(self) -> None:
        """Until the consumer is closed, here or by the deletion of its queue or channel."""
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
        self, epoch: int, results: Sequence[Result], on_settled: Callable[[Settled | None], None] | None
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


class RemotePort(RemoteConsumer):
    """Over a link that is found again when it is lost. `run` keeps it connected."""

    def __init__(
        self,
        way: Way,
        queue: str,
        channel: str,
        options: dict[str, object],
        limits: Limits,
        counters: Counter[str],
        member: bytes,
    ) -> None:
        super().__init__(way, queue, channel, {**options, "x": member}, limits, counters)
        self.consumer = ExclusiveConsumer(self, queue, channel, member, self.max_in_flight)
        self.consumer.counters = counters
        self._waiting: dict[int, Callable[[Settled | None], None]] = {}
        self._is_subscribed = False

    async def run_all(self) -> None:
        """The link, and the consumer's own time."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.consumer.run)
            await self.run()
            self.consumer.close(self.error or QueueConsumerClosedError("the consumer was closed"))
            nursery.cancel_scope.cancel()

    # Port

    def heartbeat(self, beat: Heartbeat) -> bool:
        """See `Port`."""
        return self._put(lambda req_id: fenced.encode_heartbeat(req_id, beat.beat, beat.seen, beat.held))

    def unlock(self, partition: int, epoch: int) -> None:
        """See `Port`."""
        self._put(lambda req_id: fenced.encode_unlock(req_id, partition, epoch))

    def send_results(
        self, epoch: int, results: Sequence[Result], on_settled: Callable[[Settled | None], None] | None
    ) -> bool:
        """See `Port`."""
        ticket = 0
        if on_settled is not None:
            ticket, self._next_ticket = self._next_ticket, self._next_ticket % _TICKET_MAX + 1
        if not self._put(lambda req_id: fenced.encode_fenced_settle(req_id, epoch, ticket, results)):
            return False
        if on_settled is not None:
            self._waiting[ticket] = on_settled
        return True

    def ready(self, max_in_flight: int) -> None:
        """See `Port`."""
        self.set_ready(max_in_flight)

    async def leave(self) -> None:
        """See `Port`."""
        await self.aclose()

    def _put(self, encode: Callable[[int], bytes]) -> bool:
        link = self._link
        if link is None or link.error is not None or not self._is_subscribed:
            return False
        link.put(encode(self._req_id))
        return True

    # What the link tells

    async def _send_results(self) -> None:
        self._is_subscribed = True
        self.consumer.linked()
        await self._lost.wait()
        if self.error is None:
            raise StreamClosedError("the link was lost")

    def deliver_fenced(self, epoch: int, messages: list[Delivered]) -> None:
        now = trio.current_time()
        self.consumer.arrived(
            [
                Delivery(partition, seq, attempts, published_us, now + timeout_ms / 1000, attributes, body, epoch)
                for partition, seq, attempts, published_us, timeout_ms, attributes, body in messages
            ]
        )

    def lease(self, lease: fenced.WireLease) -> None:
        self.consumer.lease_arrived(
            Lease(lease.beat, lease.lease_ms / 1000, lease.serial, lease.version, lease.assigned)
        )

    def settled(self, settled: Settled) -> None:
        on_settled = self._waiting.pop(settled.ticket, None)
        if on_settled is not None:
            on_settled(settled)
        self._counters["results_refused"] += len(settled.refused)

    def ended(self, error: Dep2pError) -> None:
        super().ended(error)
        self._lost.set()
        if self.error is not None:
            self._life.cancel()

    def _forget(self, error: Dep2pError) -> None:
        super()._forget(error)
        was_subscribed, self._is_subscribed = self._is_subscribed, False
        waiting, self._waiting = self._waiting, {}
        for call in waiting.values():
            call(None)
        if was_subscribed:
            self.consumer.link_lost()
