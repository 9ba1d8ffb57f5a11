"""A consumer of a queue that this node stores."""

import contextlib
from collections import deque
from collections.abc import Callable, Sequence

import trio

from dep2p.concurrency.wait_queue import WaitQueue
from dep2p.errors import Dep2pError, NotInFlightError, QueueConsumerClosedError
from dep2p.protocols.queues import consumer as core
from dep2p.protocols.queues.channel import Channel
from dep2p.protocols.queues.wire.frames import DeliveryResult, QueueCode, Settle, Settled
from dep2p.queues.broker.interfaces import ConsumerEngine
from dep2p.queues.consumer import BATCH_ITEMS, Consumer
from dep2p.queues.types import MessageDelivery

_FINISH = int(Settle.FINISH)
_REQUEUE = int(Settle.REQUEUE)
_TOUCH = int(Settle.TOUCH)
_RELEASE = int(Settle.RELEASE)


_new = tuple[object, ...].__new__
"""A NamedTuple's own constructor costs twice as much."""


class LocalConsumer(Consumer):
    """Made by `QueueEngine.subscribe`."""

    max_in_flight: int

    def __init__(
        self,
        engine: ConsumerEngine,
        channel: Channel,
        consumer_id: str,
        window: core.ConsumerWindow,
    ) -> None:
        self.queue: str = channel.queue.name
        self.channel: str = channel.name
        self.max_in_flight = window.max_in_flight
        self.core: core.ChannelConsumer = core.ChannelConsumer(
            consumer_id,
            window,
            on_deliver=self._on_deliver,
            on_closed=self.stop_because,
        )
        self.error: Dep2pError | None = None
        self._engine = engine
        self._channel = channel
        self._inbox: deque[core.ChannelDelivery] = deque()
        self._waiting = WaitQueue()
        """The tasks in `receive`."""

    @property
    def consumer_id(self) -> str:
        """Unique in its engine."""
        return self.core.id

    @property
    def msg_timeout_s(self) -> float:
        """The longest time that a message is held, in seconds."""
        return self.core.msg_timeout_s

    def _on_deliver(self, deliveries: list[core.ChannelDelivery]) -> None:
        self._inbox.extend(deliveries)
        if self._waiting:
            self._waiting.wake()

    def stop_because(self, reason: str) -> None:
        """End the consumer for a reason: nothing more comes."""
        self.stop(QueueConsumerClosedError(f"the consumer of {self.queue!r} is over: {reason}"))

    def stop(self, error: Dep2pError) -> None:
        """End the consumer with an error for the caller."""
        if self.error is None:
            self.error = error
            self._inbox.clear()
            self._waiting.wake_all()
            if self.on_lost is not None:
                self.on_lost()

    async def receive(self, items_max: int = BATCH_ITEMS) -> list[MessageDelivery]:
        inbox, held = self._inbox, self.core.held
        if inbox or self.error is not None:  # otherwise it waits anyway
            await trio.lowlevel.checkpoint()
        while True:
            taken: list[MessageDelivery] = []
            while inbox and len(taken) < items_max:
                partition, message, attempts, deadline, _epoch = inbox.popleft()
                seq = message[0]
                now_held = held.get((partition, seq))
                if now_held is not None and now_held.attempts == attempts:  # otherwise its time was over
                    fields = (partition, seq, attempts, message[1], deadline, message[6], message[7], 0)
                    taken.append(_new(MessageDelivery, fields))
            if taken:
                if inbox and self._waiting:  # another waiter takes the rest
                    self._waiting.wake()
                return taken
            if self.error is not None:
                raise self.error.with_traceback(None)
            await self._waiting.wait()

    def settle(self, results: Sequence[DeliveryResult]) -> list[tuple[int, int, int]]:
        return self.apply(results).refused

    def finish(self, keys: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Finish many messages at once, by (partition, seq); return those that it does not hold."""
        refused = self._channel.finish(self.core, keys)
        self._engine.changed()
        return refused

    def apply(self, results: Sequence[DeliveryResult]) -> Settled:
        """Settle messages; return those refused, and the new times of touched ones."""
        return self.apply_for(self.core, results)

    def apply_for(self, consumer: core.ChannelConsumer, results: Sequence[DeliveryResult]) -> Settled:
        """Settle messages that ``consumer`` holds."""
        channel = self._channel
        finished: list[tuple[int, int]] = []
        refused: list[tuple[int, int, int]] = []
        touched: list[tuple[int, int, int]] = []
        now = self._engine.now()
        for kind, partition, seq, delay_ms, reason in results:
            key = (partition, seq)
            if kind == _FINISH:
                finished.append(key)
                continue
            try:
                if kind == _REQUEUE:
                    channel.requeue(consumer, key, delay_ms / 1000, reason, now)
                elif kind == _TOUCH:
                    deadline = channel.touch(consumer, key, now)
                    touched.append((partition, seq, max(0, round((deadline - now) * 1000))))
                elif kind == _RELEASE:
                    channel.release(consumer, key)
                else:
                    channel.reject(consumer, key, reason)
            except NotInFlightError:
                refused.append((partition, seq, QueueCode.NOT_IN_FLIGHT))
        if finished:
            refused += [(*key, int(QueueCode.NOT_IN_FLIGHT)) for key in channel.finish(consumer, finished)]
        self._engine.changed()
        return Settled(0, refused, touched)

    async def confirm(self, results: Sequence[DeliveryResult]) -> Settled:
        settled = self.apply(results)
        if any(result.kind != Settle.TOUCH for result in results) and len(settled.refused) < len(results):
            await self._engine.flush()
        else:
            await trio.lowlevel.checkpoint()
        return settled

    def when_durable(self, call: Callable[[], None]) -> None:
        """Call when all changes until now are durable; never, when the engine ends before that."""
        self._engine.when_durable(call)

    def holds(self, partition: int, seq: int, epoch: int = 0) -> bool:
        return (partition, seq) in self.core.held

    def set_ready(self, max_in_flight: int) -> None:
        self.max_in_flight = max_in_flight
        self._channel.set_ready(self.core, max_in_flight)
        self._engine.changed()

    def detach(self, now: float) -> None:
        """Leave the channel: its messages go to others."""
        self._channel.detach(self.core, now)

    async def aclose(self) -> None:
        if self.error is None:
            # Messages that were never received have had no attempt: the last one first, so that their order stays.
            for delivery in reversed(self._inbox):
                with contextlib.suppress(NotInFlightError):
                    self._channel.release(self.core, (delivery.partition, delivery.message.seq))
            self.stop_because("it was closed")
            self._engine.detach(self._channel, self)
        await trio.lowlevel.checkpoint()
