"""A consumer of a queue that this node keeps."""

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import trio

from dep2p.errors import Dep2pError, NotInFlightError, QueueConsumerClosedError
from dep2p.protocols.queues import consumer as core
from dep2p.protocols.queues.channel import Channel
from dep2p.protocols.queues.wire import QueueCode, Result, Settle, Settled
from dep2p.queues.consumer import BATCH_ITEMS, Consumer
from dep2p.queues.types import Delivery

if TYPE_CHECKING:
    from dep2p.queues.broker.engine import QueueEngine

_FINISH = int(Settle.FINISH)
_REQUEUE = int(Settle.REQUEUE)
_TOUCH = int(Settle.TOUCH)
_RELEASE = int(Settle.RELEASE)


_new = tuple[object, ...].__new__
"""A NamedTuple's own constructor costs twice as much."""


class LocalConsumer(Consumer):
    """Made by `QueueEngine.subscribe`."""

    def __init__(
        self,
        engine: "QueueEngine",
        channel: Channel,
        consumer_id: str,
        *,
        max_in_flight: int,
        bytes_max: int,
        msg_timeout_s: float,
    ) -> None:
        self.queue = channel.queue.name
        self.channel = channel.name
        self.max_in_flight = max_in_flight
        self.core: core.Consumer = core.Consumer(
            consumer_id,
            max_in_flight=max_in_flight,
            bytes_max=bytes_max,
            msg_timeout_s=msg_timeout_s,
            on_deliver=self._on_deliver,
            on_closed=self.stop_because,
        )
        self.error: Dep2pError | None = None
        self._engine = engine
        self._channel = channel
        self._inbox: deque[core.Delivery] = deque()
        self._waiting: deque[trio.lowlevel.Task] = deque()
        """Who waits in `receive`: a parking lot costs as much as all the rest of it."""

    @property
    def msg_timeout_s(self) -> float:
        """How long a message is held at most."""
        return self.core.msg_timeout_s

    def _on_deliver(self, deliveries: list[core.Delivery]) -> None:
        self._inbox.extend(deliveries)
        if self._waiting:
            trio.lowlevel.reschedule(self._waiting.popleft())

    def stop_because(self, reason: str) -> None:
        """Nothing more comes."""
        self.stop(QueueConsumerClosedError(f"the consumer of {self.queue!r} is over: {reason}"))

    def stop(self, error: Dep2pError) -> None:
        """The same, and this is told."""
        if self.error is None:
            self.error = error
            self._inbox.clear()
            while self._waiting:
                trio.lowlevel.reschedule(self._waiting.popleft())
            if self.on_lost is not None:
                self.on_lost()

    async def receive(self, items_max: int = BATCH_ITEMS) -> list[Delivery]:
        inbox, held = self._inbox, self.core.held
        if inbox or self.error is not None:  # else it waits anyway
            await trio.lowlevel.checkpoint()
        while True:
            taken: list[Delivery] = []
            while inbox and len(taken) < items_max:
                partition, message, attempts, deadline, _epoch = inbox.popleft()
                seq = message[0]
                now_held = held.get((partition, seq))
                if now_held is not None and now_held.attempts == attempts:  # else its time was over before it was taken
                    fields = (partition, seq, attempts, message[1], deadline, message[6], message[7], 0)
                    taken.append(_new(Delivery, fields))
            if taken:
                if inbox and self._waiting:  # somebody else takes the rest
                    trio.lowlevel.reschedule(self._waiting.popleft())
                return taken
            if self.error is not None:
                raise self.error.with_traceback(None)
            await self._wait()

    async def _wait(self) -> None:
        task = trio.lowlevel.current_task()
        self._waiting.append(task)

        def abort(_raise_cancel: object) -> trio.lowlevel.Abort:
            self._waiting.remove(task)
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    def settle(self, results: Sequence[Result]) -> list[tuple[int, int, int]]:
        return self.apply(results).refused

    def finish(self, keys: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Many at once, by (partition, seq); gives those that it does not hold."""
        refused = self._channel.finish(self.core, keys)
        self._engine.changed()
        return refused

    def apply(self, results: Sequence[Result]) -> Settled:
        """`settle`, with the new times of what was touched."""
        return self.apply_for(self.core, results)

    def apply_for(self, consumer: core.Consumer, results: Sequence[Result]) -> Settled:
        """The same for what ``consumer`` holds."""
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

    async def confirm(self, results: Sequence[Result]) -> Settled:
        settled = self.apply(results)
        if any(result.kind != Settle.TOUCH for result in results) and len(settled.refused) < len(results):
            await self._engine.flush()
        else:
            await trio.lowlevel.checkpoint()
        return settled

    def when_durable(self, call: Callable[[], None]) -> None:
        """Call when everything that was said until now is durable; never, when the engine is over before that."""
        self._engine.when_durable(call)

    def holds(self, partition: int, seq: int, epoch: int = 0) -> bool:
        return (partition, seq) in self.core.held

    def set_ready(self, max_in_flight: int) -> None:
        self.max_in_flight = max_in_flight
        self._channel.set_ready(self.core, max_in_flight)
        self._engine.changed()

    def detach(self, now: float) -> None:
        """From its channel: what it holds goes to others."""
        self._channel.detach(self.core, now)

    async def aclose(self) -> None:
        if self.error is None:
            # What was delivered but never received was not tried: the last one first, so that their order stays.
            for delivery in reversed(self._inbox):
                with contextlib.suppress(NotInFlightError):
                    self._channel.release(self.core, (delivery.partition, delivery.message.seq))
            self.stop_because("it was closed")
            self._engine.detach(self._channel, self)
        await trio.lowlevel.checkpoint()
