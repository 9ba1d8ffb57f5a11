"""Consuming from another member's queue: a subscription that finds its connection again."""

from collections import Counter, deque
from collections.abc import Sequence
from typing import Final

import trio

from dep2p.errors import (
    ChannelNotFoundError,
    Dep2pError,
    NotMemberError,
    NotOwnerError,
    OverloadedError,
    ProtocolError,
    ProtocolNotSupportedError,
    QueueAccessError,
    QueueConsumerClosedError,
    QueueExistsError,
    QueueIsDistributedError,
    QueueNotFoundError,
    StreamClosedError,
)
from dep2p.limits import Limits
from dep2p.protocols.queues.wire import frames as wire
from dep2p.protocols.queues.wire.exclusive import WireLease
from dep2p.protocols.queues.wire.frames import Delivered, DeliveryResult, QueueCode, Settle, Settled
from dep2p.protocols.timing.backoff import Backoff
from dep2p.protocols.wire.cbor import encode_canonical
from dep2p.protocols.wire.frame import encode_frame
from dep2p.queues.consumer import BATCH_ITEMS, Consumer
from dep2p.queues.remote.broker_directory import BrokerRoute
from dep2p.queues.remote.link import LinkAnswer, QueueLink
from dep2p.queues.types import MessageDelivery

_BACKOFF: Final = Backoff(first_s=0.05, max_s=5.0)
_BACKOFF_OF_SET: Final = Backoff(first_s=0.05, max_s=1.0)
"""Between tries at a failover group."""
_FATAL: Final = (
    NotMemberError,
    ProtocolNotSupportedError,
    QueueAccessError,
    QueueExistsError,
    QueueNotFoundError,
    QueueIsDistributedError,
    ChannelNotFoundError,
    QueueConsumerClosedError,
    ProtocolError,
)
"""Errors that another try would meet again."""
_OF_A_START: Final = (NotMemberError, ProtocolNotSupportedError)
_TICKET_MAX: Final = 0xFFFF_FFFF


class _Confirmation:
    """A caller that waits for the answer to results."""

    __slots__ = ("done", "settled")

    def __init__(self) -> None:
        self.done = trio.Event()
        self.settled: Settled | None = None


class RemoteConsumer(Consumer):
    """A consumer of another member's queue. Made by `RemoteQueues.consume`; `run` keeps it connected.

    When the connection is lost, the member gives what was held to others; here it counts as not held from then on,
    and the subscription is made again as soon as the member can be reached.
    """

    max_in_flight: int

    def __init__(
        self,
        broker_route: BrokerRoute,
        queue: str,
        channel: str,
        options: dict[str, object],
        limits: Limits,
        counters: Counter[str],
    ) -> None:
        self.queue = queue
        self.channel = channel
        self.max_in_flight = int(str(options["n"]))
        self.subscribed: trio.Event = trio.Event()
        """Set by the first answer to the subscription, good or bad."""
        self._life = trio.CancelScope()
        self._broker_route = broker_route
        self._options = options
        self._limits = limits
        self._counters = counters
        self._link: QueueLink | None = None
        self._req_id = 0
        self._inbox: deque[MessageDelivery] = deque()
        self._held: dict[tuple[int, int], float] = {}
        """The deadline of each message that was delivered and not settled."""
        self._results: list[DeliveryResult] = []
        self._confirming: _Confirmation | None = None
        self._tickets: dict[int, _Confirmation] = {}
        self._next_ticket = 1
        self._wake = trio.Event()
        self._arrived = trio.Event()
        self._lost = trio.Event()
        self.error: Dep2pError | None = None
        self.refusal: OverloadedError | None = None
        """The broker's last refusal; the consumer tries again, since the reason may end."""
        self._was_subscribed = False

    # For the app

    async def receive(self, items_max: int = BATCH_ITEMS) -> list[MessageDelivery]:
        while not self._inbox:
            if self.error is not None:
                raise self.error.with_traceback(None)
            self._arrived = trio.Event()
            await self._arrived.wait()
        await trio.lowlevel.checkpoint()
        inbox = self._inbox
        if len(inbox) <= items_max:
            taken = list(inbox)
            inbox.clear()
            return taken
        return [inbox.popleft() for _ in range(items_max)]

    def settle(self, results: Sequence[DeliveryResult]) -> list[tuple[int, int, int]]:
        refused: list[tuple[int, int, int]] = []
        for result in results:
            key = result.partition, result.seq
            held = key in self._held if result.kind == Settle.TOUCH else self._held.pop(key, None) is not None
            if held:
                self._results.append(result)
            else:
                refused.append((*key, QueueCode.NOT_IN_FLIGHT))
        self._wake.set()
        return refused

    async def confirm(self, results: Sequence[DeliveryResult]) -> Settled:
        refused = self.settle(results)
        if len(refused) == len(results):
            await trio.lowlevel.checkpoint()
            return Settled(0, refused, [])
        if self._confirming is None:
            self._confirming = _Confirmation()
        confirmation = self._confirming
        await confirmation.done.wait()
        settled = confirmation.settled
        if settled is None:
            raise StreamClosedError(
                f"the connection to {self._broker_route.peer} was lost before it confirmed: the messages may come again"
            )
        mine = {(result.partition, result.seq): None for result in results}
        now = trio.current_time()
        for partition, seq, left_ms in settled.touched:
            if (partition, seq) in self._held:
                self._held[partition, seq] = now + left_ms / 1000
        return Settled(
            settled.ticket,
            refused + [each for each in settled.refused if each[:2] in mine],
            [each for each in settled.touched if each[:2] in mine],
        )

    def holds(self, partition: int, seq: int, epoch: int = 0) -> bool:
        return self._held.get((partition, seq), 0.0) > trio.current_time()

    def set_ready(self, max_in_flight: int) -> None:
        self.max_in_flight = max_in_flight
        self._options["n"] = max_in_flight
        link = self._link
        if link is not None and link.error is None:
            link.put(wire.encode_ready(self._req_id, max_in_flight, self._bytes_max))

    @property
    def _bytes_max(self) -> int:
        return int(str(self._options["b"]))

    async def aclose(self) -> None:
        if self.error is None:
            self._flush()
            link = self._link
            if link is not None and link.error is None:
                link.remove(self._req_id)
                link.put(encode_frame(wire.UNSUBSCRIBE, b"", req_id=self._req_id))
            self._close(QueueConsumerClosedError("the consumer was closed"))
        self._life.cancel()
        await trio.lowlevel.checkpoint()

    # The connection

    async def run(self) -> None:
        """Keep it subscribed, until it is closed or no other try can help."""
        failures = 0
        try:
            with self._life:
                while True:
                    try:
                        await self._subscribe()
                        failures = 0
                        self.subscribed.set()
                        self._was_subscribed = True
                        await self._send_results()
                    except _FATAL as error:
                        # A node that has just started may not know its members or protocols yet.
                        # Nor when there are others.
                        is_able = self._was_subscribed or self._broker_route.is_set
                        if not (is_able and isinstance(error, _OF_A_START)):
                            self._close(error)
                            return
                        self._counters["consumers_reconnecting"] += 1
                        self._forget(error)
                    except Dep2pError as error:
                        self.refusal = error if isinstance(error, OverloadedError) else None
                        if self._broker_route.is_here:
                            self._close(error)
                            return
                        self._counters["consumers_reconnecting"] += 1
                        self._forget(error)
                    if self.error is not None:
                        return
                    failures += 1
                    backoff = _BACKOFF_OF_SET if self._broker_route.is_set else _BACKOFF
                    await trio.sleep(max(backoff.after(failures), self._broker_route.pause_s))
        finally:
            self._close(QueueConsumerClosedError("the consumer was closed"))

    async def _subscribe(self) -> None:
        link = await self._broker_route.get(trio.current_time() + self._limits.dial_timeout_s)
        req_id = link.new_id()
        answered = trio.Event()
        answers: list[LinkAnswer] = []

        def on_answer(answer: LinkAnswer) -> None:
            answers.append(answer)
            answered.set()

        link.expect(req_id, on_answer)
        self._lost = trio.Event()
        self._link, self._req_id = link, req_id
        link.add(req_id, self)  # messages may come with the answer, in one read
        try:
            link.put(encode_frame(wire.SUBSCRIBE, encode_canonical(self._options), req_id=req_id))
            with trio.fail_after(self._limits.request_timeout_s):
                await answered.wait()
        except trio.TooSlowError:
            link.remove(req_id)
            self._broker_route.failover_group.failed(link.peer, trio.current_time())
            raise StreamClosedError(f"{link.peer} did not answer to a subscription") from None
        finally:
            link.forget(req_id)
        error = answers[0].error
        if isinstance(error, NotOwnerError):
            self._broker_route.refused(link, error)
        if error is not None:
            link.remove(req_id)
            raise error
        self._broker_route.failover_group.worked(link.peer)

    async def _send_results(self) -> None:
        """Write results, those of one moment together, until the subscription is lost."""
        while not self._lost.is_set() and self.error is None:
            if self._results:
                self._flush()
            self._wake = trio.Event()
            await self._wake.wait()
        if self.error is None:
            raise StreamClosedError("the link was lost")

    def _flush(self) -> None:
        link = self._link
        if link is None or link.error is not None or not self._results:
            return
        results, self._results = self._results, []
        ticket = 0
        if self._confirming is not None:
            ticket, self._next_ticket = self._next_ticket, self._next_ticket % _TICKET_MAX + 1
            self._tickets[ticket], self._confirming = self._confirming, None
        while len(results) > wire.BATCH_ITEMS_MAX:
            part, results = results[: wire.BATCH_ITEMS_MAX], results[wire.BATCH_ITEMS_MAX :]
            link.put(wire.encode_settle(self._req_id, 0, part))
        link.put(wire.encode_settle(self._req_id, ticket, results))

    # From the link

    def deliver(self, messages: list[Delivered]) -> None:
        """Take messages."""
        now = trio.current_time()
        for partition, seq, attempts, published_us, timeout_ms, attributes, body in messages:
            deadline_s = now + timeout_ms / 1000
            self._held[partition, seq] = deadline_s
            self._inbox.append(MessageDelivery(partition, seq, attempts, published_us, deadline_s, attributes, body))
        if len(self._held) > 2 * self.max_in_flight + wire.BATCH_ITEMS_MAX:
            self._expire(now)
        self._arrived.set()

    def _expire(self, now: float) -> None:
        """Drop messages whose time is over: other consumers have them by now."""
        for key in [key for key, deadline_s in self._held.items() if deadline_s <= now]:
            del self._held[key]

    def deliver_fenced(self, epoch: int, messages: list[Delivered]) -> None:
        """Refuse: a broker must not send this to a consumer of this kind."""
        raise ProtocolError("FENCED_DELIVER to a consumer that shares its channel")

    def lease(self, lease: WireLease) -> None:
        """Refuse: a broker must not send this to a consumer of this kind."""
        raise ProtocolError("LEASE to a consumer that shares its channel")

    def settled(self, settled: Settled) -> None:
        """Take the answer to results: taken, or some of them refused."""
        confirmation = self._tickets.pop(settled.ticket, None)
        if confirmation is not None:
            confirmation.settled = settled
            confirmation.done.set()
        self._counters["results_refused"] += len(settled.refused)

    def ended(self, error: Dep2pError) -> None:
        """Act on the end of the subscription by the member. When another node is the broker now, it goes on there."""
        link = self._link
        if isinstance(error, NotOwnerError) and link is not None:
            self._broker_route.refused(link, error)
            self.lost(error)
        else:
            self._close(error)

    def lost(self, error: Dep2pError) -> None:
        """Act on a lost link."""
        self._forget(error)
        self._lost.set()
        self._wake.set()

    def _forget(self, _error: Dep2pError) -> None:
        self._link = None
        self._held.clear()
        self._inbox.clear()
        self._results.clear()
        confirming = [*self._tickets.values(), *([] if self._confirming is None else [self._confirming])]
        self._tickets.clear()
        self._confirming = None
        for confirmation in confirming:
            confirmation.done.set()
        if self.on_lost is not None:
            self.on_lost()

    def _close(self, error: Dep2pError) -> None:
        if self.error is None:
            self.error = error
            self._forget(error)
            self._arrived.set()
            self._wake.set()
            self.subscribed.set()
