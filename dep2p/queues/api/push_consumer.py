"""The push consumer: calls a handler for each message of a channel, in normal or FIFO mode, and settles for it.

The shell of `dep2p.protocols.queues.clients.push_consumer`, which decides; docs/howto/consumers.md shows how to use it.
"""

import logging
import math
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Final, NoReturn

import trio

from dep2p.errors import Dep2pError
from dep2p.protocols.queues.admin import DescribeQueue
from dep2p.protocols.queues.attributes import readable_attributes
from dep2p.protocols.queues.clients.process_queue import Phase, ProcessQueueEntry
from dep2p.protocols.queues.clients.push_consumer import (
    Arrived,
    CancelHandler,
    Effect,
    Outcome,
    PushCore,
    ResultOutcome,
    SendResult,
    StartHandler,
    failure_of,
)
from dep2p.protocols.queues.clients.settings import ConsumerSettings
from dep2p.protocols.queues.wire.frames import DeliveryResult, Settle
from dep2p.queues.api.broker import QueueBroker
from dep2p.queues.consumer import Consumer, QueueMessage
from dep2p.queues.types import MessageDelivery, SubscribeOptions

logger: logging.Logger = logging.getLogger("dep2p.io")

_RECEIVE_ITEMS: Final = 256
_CONFIRMERS: Final = 4
"""Rounds of results that are on their way to the queue at once."""
_CONFIRM_ITEMS: Final = 1_024

Handler = Callable[["PushedMessage"], Awaitable[None]]


class PushedMessage(QueueMessage):
    """The message that a handler gets. The consumer settles it: return when it is done, raise when it did not work.

    Raise RejectMessage for one that can never work, and RetryMessage to say when it shall be tried again.
    """

    __slots__ = ("_entry",)

    def __init__(self, consumer: Consumer, delivery: MessageDelivery, entry: ProcessQueueEntry) -> None:
        super().__init__(consumer, delivery)
        self._entry = entry

    @property
    def attempts(self) -> int:
        """The number of this try, from 1."""
        return self._entry.attempts

    @property
    def is_redelivered(self) -> bool:
        """Whether an earlier try failed: it may have been worked on."""
        return self._entry.attempts > 1

    async def _settle(self, kind: Settle, delay_s: float = 0.0, reason: str = "", *, durable: bool = False) -> NoReturn:
        await trio.lowlevel.checkpoint()
        raise RuntimeError(
            "the consumer settles this message: return when it is done; raise RejectMessage, RetryMessage or any other "
            "exception when it is not"
        )

    async def touch(self) -> float:
        """Not needed: the message is renewed while the handler runs. Returns its ``deadline_s``."""
        await trio.lowlevel.checkpoint()
        return self.deadline_s


class _Item:
    """A delivery, with its handler's message and scope; the core carries it."""

    __slots__ = ("delivery", "message", "scope")

    def __init__(self, delivery: MessageDelivery) -> None:
        self.delivery = delivery
        self.message: PushedMessage | None = None
        self.scope: trio.CancelScope | None = None


def _item(entry: ProcessQueueEntry) -> _Item:
    """The delivery of an entry of the core."""
    assert isinstance(entry.item, _Item)
    return entry.item


class PushConsumer:
    """Made by ``queue.consumer(…)``; runs as long as its ``async with`` block."""

    def __init__(
        self, broker: QueueBroker, queue: str, channel: str, handler: Handler, settings: ConsumerSettings
    ) -> None:
        self.queue = queue
        self.channel = channel
        self.settings = settings
        self.error: Dep2pError | None = None
        """Why it ended before its block: the queue was deleted, or another error that no retry mends."""
        self._broker = broker
        self._handler = handler
        self._core: PushCore | None = None
        self._consumer: Consumer | None = None
        self._starts: deque[ProcessQueueEntry] = deque()
        self._workers = 0
        self._idle_workers = trio.lowlevel.ParkingLot()
        self._nursery: trio.Nursery | None = None
        self._results: deque[SendResult] = deque()
        self._idle_confirmers = trio.lowlevel.ParkingLot()
        self._renewals: list[ProcessQueueEntry] = []
        self._renewing = trio.lowlevel.ParkingLot()
        self._timer = trio.CancelScope()
        self._timer_at: float | None = None
        self._room = trio.lowlevel.ParkingLot()
        self._quiet = trio.lowlevel.ParkingLot()
        self.counts: Counter[str] = Counter()

    @property
    def running(self) -> int:
        """The number of handlers that run."""
        return 0 if self._core is None else self._core.running

    @property
    def cached(self) -> int:
        """The number of messages that it holds."""
        return 0 if self._core is None else self._core.items

    def statistics(self) -> dict[str, float]:
        """Counts since it began (`PushCore.counts`), and what is here now."""
        return {**self.flow_counts(), **self.flow_values()}

    flow_kind = "consumer"
    handovers = None

    @property
    def is_over(self) -> bool:
        """Whether it handles nothing more."""
        return self._nursery is None

    def flow_counts(self) -> dict[str, int]:
        """Return its counts since it began."""
        return {} if self._core is None else {**self._core.counts, **self.counts}

    def flow_values(self) -> dict[str, float]:
        """Return the gauges of this moment: running handlers, messages and bytes held, results on their way."""
        core = self._core
        if core is None:
            return {}
        return {
            "running": core.running,
            "cached": core.items,
            "cached_bytes": core.bytes,
            "settling": core.settling,
        }

    # Life

    @asynccontextmanager
    async def working(self) -> AsyncGenerator["PushConsumer", None]:
        """Consume while the block runs. When it is left, handlers that run may finish (`drain_timeout_s`) and what was
        not begun goes back at once; when the block is cancelled, so are they."""
        consumer = await self._open()
        failed: Exception | None = None
        try:
            async with consumer:
                async with trio.open_nursery() as nursery:
                    self._nursery = nursery
                    if self._broker.flows is not None:
                        self._broker.flows.add(self)
                    nursery.start_soon(self._receive_all, consumer)
                    nursery.start_soon(self._keep_time)
                    nursery.start_soon(self._renew_all, consumer)
                    if self.settings.mode == "fifo":
                        for _ in range(_CONFIRMERS):
                            nursery.start_soon(self._confirm_all, consumer)
                    try:
                        yield self
                    except Exception as error:  # raised as it is, not in the nursery's group
                        failed = error
                    await self._drain(consumer)
                    nursery.cancel_scope.cancel()
        finally:
            self._nursery = None
        if failed is not None:
            raise failed
        if self.error is not None:
            raise self.error

    async def _open(self) -> Consumer:
        settings = self.settings
        # The queue's settings come first: nothing is delivered before the mode and the limits are known.
        info = await self._broker.ask(DescribeQueue(queue=self.queue))
        attempts_max = settings.max_attempts
        if attempts_max is None:
            attempts_max = info.options.max_attempts
        self._core = PushCore(
            settings.mode,
            concurrency=settings.concurrency,
            items_max=settings.items_max,
            bytes_max=settings.cache_bytes,
            attempts_max=attempts_max,
            backoff=settings.retry,
        )
        consumer = await self._broker.open_consumer(
            self.queue,
            self.channel,
            SubscribeOptions(
                max_in_flight=settings.items_max,
                from_start=settings.from_start,
                bytes_max=settings.cache_bytes,
                filter=settings.filter,
                exclusive=settings.mode == "fifo",
            ),
        )
        consumer.on_lost = self._lost_all
        if consumer.is_exclusive:
            consumer.on_revoke = self._revoked
        self._consumer = consumer
        return consumer

    async def _drain(self, consumer: Consumer) -> None:
        core = self._core
        assert core is not None
        consumer.set_ready(0)  # otherwise released messages come again at once
        self._do(core.stop(trio.current_time()))
        with trio.move_on_after(self.settings.drain_timeout_s):
            while not core.is_idle:
                await self._quiet.park()
        if not core.is_idle:
            self.counts["cancelled_at_the_end"] += core.running
            logger.warning(
                "the consumer of %r, channel %r, ends with %d handlers that did not finish within %g s: they are "
                "cancelled, and their messages go to others",
                self.queue,
                self.channel,
                core.running,
                self.settings.drain_timeout_s,
            )

    def _fail(self, error: Dep2pError) -> None:
        self.error = self.error or error
        if self._nursery is not None:
            self._nursery.cancel_scope.cancel()

    # Effects

    def _do(self, effects: Iterable[Effect]) -> None:
        given_back: list[DeliveryResult] = []
        for effect in effects:
            if isinstance(effect, StartHandler):
                self._start(effect.entry)
            elif isinstance(effect, SendResult):
                if effect.confirmed:
                    self._results.append(effect)
                    self._idle_confirmers.unpark()
                else:
                    given_back.append(_result(effect))
            elif isinstance(effect, CancelHandler):
                scope = _item(effect.entry).scope
                if scope is not None:
                    scope.cancel()
            else:
                self._renewals += effect.entries
                self._renewing.unpark()
        if given_back and self._consumer is not None:
            self._consumer.settle(given_back)
        core = self._core
        assert core is not None
        if core.room_items:
            self._room.unpark()
        if core.is_idle:
            self._quiet.unpark_all()
        at = core.next_deadline()
        if at is not None and (self._timer_at is None or at < self._timer_at):
            self._timer.cancel()

    def _start(self, entry: ProcessQueueEntry) -> None:
        self._starts.append(entry)
        if self._idle_workers:
            self._idle_workers.unpark()
        elif self._workers < self.settings.concurrency and self._nursery is not None:
            self._workers += 1
            self._nursery.start_soon(self._work)

    # Tasks

    async def _receive_all(self, consumer: Consumer) -> None:
        core = self._core
        assert core is not None
        try:
            while True:
                while not core.room_items:
                    await self._room.park()
                deliveries = await consumer.receive(min(core.room_items, _RECEIVE_ITEMS))
                now = trio.current_time()
                self._do(core.arrived([_arrived(each, core.is_fifo) for each in deliveries], now))
        except Dep2pError as error:
            if not core.is_stopping:
                self._fail(error)

    async def _keep_time(self) -> None:
        core = self._core
        assert core is not None
        while True:
            with trio.CancelScope() as self._timer:
                self._timer_at = core.next_deadline()
                await trio.sleep_until(math.inf if self._timer_at is None else self._timer_at)
            self._do(core.on_time(trio.current_time()))

    async def _work(self) -> None:
        core, consumer = self._core, self._consumer
        assert core is not None
        assert consumer is not None
        while True:
            while not self._starts:
                await self._idle_workers.park()
            entry = self._starts.popleft()
            outcome, reason, delay_s = await self._handle(entry)
            if outcome is Outcome.CANCELLED or entry.phase is Phase.GONE:  # this delivery has no result
                consumer.drop(_item(entry).delivery)
            self._do(core.handled(entry, outcome, trio.current_time(), reason=reason, delay_s=delay_s))

    async def _handle(self, entry: ProcessQueueEntry) -> tuple[Outcome, str, float | None]:
        await trio.lowlevel.checkpoint()  # a handler may have none
        item = _item(entry)
        if entry.phase is Phase.GONE:  # lost before its handler began
            return Outcome.CANCELLED, "", None
        assert self._consumer is not None
        message = item.message = PushedMessage(self._consumer, item.delivery, entry)
        message.deadline_s = entry.deadline
        item.scope = message.scope()
        message.move_deadline(entry.deadline)  # it may have been renewed since it was delivered
        try:
            with item.scope:
                await self._handler(message)
                return Outcome.DONE, "", None
        except Exception as error:
            outcome, reason, delay_s, was_meant = failure_of(error)
            if not was_meant:
                logger.warning(
                    "the handler of message %s of %r, channel %r, failed at try %d",
                    message.id,
                    self.queue,
                    self.channel,
                    entry.attempts,
                    exc_info=True,
                )
            return outcome, reason, delay_s
        finally:
            item.scope = None
        return Outcome.CANCELLED, "", None

    async def _confirm_all(self, consumer: Consumer) -> None:
        core = self._core
        assert core is not None
        while True:
            while not self._results:
                await self._idle_confirmers.park()
            sends = [self._results.popleft() for _ in range(min(len(self._results), _CONFIRM_ITEMS))]
            open_ = [send for send in sends if send.entry.phase is Phase.SETTLING]
            if not open_:
                continue
            try:
                settled = await consumer.confirm([_result(send) for send in open_])
                refused = {(partition, seq): None for partition, seq, _code in settled.refused}
            except Dep2pError as error:
                # The connection is gone: a result that is still owed is sent when the message comes again.
                logger.debug("results of %r were not confirmed: %s", self.queue, error)
                refused = None
            now = trio.current_time()
            for send in open_:
                outcome = ResultOutcome.FAILED
                if refused is not None:
                    key = (send.entry.partition, send.entry.seq)
                    outcome = ResultOutcome.NOT_HELD if key in refused else ResultOutcome.CONFIRMED
                self._do(core.result_sent(send.entry, outcome, now))

    async def _renew_all(self, consumer: Consumer) -> None:
        core = self._core
        assert core is not None
        while True:
            while not self._renewals:
                await self._renewing.park()
            entries = [entry for entry in self._renewals[:_CONFIRM_ITEMS] if entry.phase is not Phase.GONE]
            del self._renewals[:_CONFIRM_ITEMS]
            if not entries:
                continue
            try:
                settled = await consumer.confirm(
                    [DeliveryResult(Settle.TOUCH, each.partition, each.seq) for each in entries]
                )
            except Dep2pError as error:  # lost with its connection; `on_lost` has informed the core
                logger.debug("messages of %r were not renewed: %s", self.queue, error)
                continue
            now = trio.current_time()
            left_ms = {(partition, seq): ms for partition, seq, ms in settled.touched}
            for entry in entries:
                ms = left_ms.get((entry.partition, entry.seq))
                if ms is None:
                    self._do(core.lost(entry, now))
                else:
                    self._do(core.renewed(entry, now + ms / 1000, now))
                    message = _item(entry).message
                    if message is not None and entry.phase is not Phase.GONE:
                        message.move_deadline(entry.deadline)

    def _revoked(self, partition: int) -> None:
        """Act on a partition that is another consumer's soon, or already: running handlers may finish, or their scopes
        cancel them."""
        core = self._core
        if core is not None and self._nursery is not None:
            self._do(core.stop_partition(partition, trio.current_time()))

    def _lost_all(self) -> None:
        core = self._core
        if core is not None and self._nursery is not None:
            self._do(core.lost_all(trio.current_time()))


def _arrived(delivery: MessageDelivery, needs_key: bool) -> Arrived:
    item = _Item(delivery)
    key = readable_attributes(delivery.attributes).key if needs_key else ""
    return Arrived(
        delivery.partition, delivery.seq, key, len(delivery.body), delivery.attempts, delivery.deadline_s, item
    )


def _result(send: SendResult) -> DeliveryResult:
    entry = send.entry
    return DeliveryResult(
        send.fate, entry.partition, entry.seq, min(round(entry.delay_s * 1000), 0xFFFF_FFFF), entry.reason
    )
