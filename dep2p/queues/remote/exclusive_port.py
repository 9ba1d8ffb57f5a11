"""The connection of an exclusive consumer to the broker of another member: a link."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import trio

from dep2p.errors import Dep2pError, QueueConsumerClosedError, StreamClosedError
from dep2p.limits import Limits
from dep2p.protocols.queues.ordering.consumer_group import Lease
from dep2p.protocols.queues.ordering.group_member import Heartbeat
from dep2p.protocols.queues.wire import exclusive as fenced
from dep2p.protocols.queues.wire.frames import Delivered, DeliveryResult, Settled
from dep2p.queues.ordered_consumer import ExclusiveConsumer
from dep2p.queues.remote.broker_directory import BrokerRoute
from dep2p.queues.remote.consumer import RemoteConsumer
from dep2p.queues.types import MessageDelivery

_TICKET_MAX: Final = 0xFFFF_FFFF


class RemotePort(RemoteConsumer):
    """A port over a link that is opened again when it is lost. `run` keeps it connected."""

    def __init__(
        self,
        broker_route: BrokerRoute,
        queue: str,
        channel: str,
        options: dict[str, object],
        limits: Limits,
        counters: Counter[str],
        member: bytes,
    ) -> None:
        super().__init__(broker_route, queue, channel, {**options, "x": member}, limits, counters)
        self.consumer: ExclusiveConsumer = ExclusiveConsumer(self, queue, channel, member, self.max_in_flight)
        self.consumer.counters = counters
        self._waiting: dict[int, Callable[[Settled | None], None]] = {}
        self._is_subscribed = False

    async def run_all(self) -> None:
        """Run the link, and the consumer's own timers."""
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
        self, epoch: int, results: Sequence[DeliveryResult], on_settled: Callable[[Settled | None], None] | None
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

    # From the link

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
                MessageDelivery(
                    partition, seq, attempts, published_us, now + timeout_ms / 1000, attributes, body, epoch
                )
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
