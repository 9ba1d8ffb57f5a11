"""The interface of a consumer, the same for queues of this node and of others, and the messages that it gives to an
app."""

import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Self, cast

import trio

from dep2p.arguments import WrongTypeError, check_number, checks_arguments, unchecked
from dep2p.errors import NotInFlightError
from dep2p.protocols.queues.attributes import Attributes, decode_attributes
from dep2p.protocols.queues.names import message_id
from dep2p.protocols.queues.wire.frames import DeliveryResult, Settle, Settled
from dep2p.queues.types import MessageDelivery
from dep2p.types import Headers

BATCH_ITEMS: Final = 64
_DELAY_MAX_MS: Final = 0xFFFF_FFFF
"""The longest delay of a result in milliseconds: its field in the frame has 32 bits. The broker cuts delays to
``delay_max_s`` of the queue."""
_DELAY_MAX_S: Final = _DELAY_MAX_MS / 1000


class Consumer(ABC):
    """Takes messages of one channel. For one trio task, except that settling may be done from any.

    A message that was received is *held* until it is settled, its time is over, or the consumer ends. When the consumer
    ends, or the connection to the queue does, held messages go to others at once.
    """

    queue: str
    channel: str
    max_in_flight: int
    on_lost: Callable[[], None] | None = None
    """Called when all held messages were lost at once: the connection is gone, or the consumer is over."""
    on_revoke: Callable[[int], None] | None = None
    """Called by an exclusive consumer with a partition that it has to hand over or has lost. Start nothing more of that
    partition, and release messages that were received and not started."""
    is_exclusive = False
    """Whether it has partitions of its own, in which the messages of a key come one after the other."""

    @abstractmethod
    async def receive(self, items_max: int = BATCH_ITEMS) -> list[MessageDelivery]:
        """Wait for messages: at least one, at most ``items_max``.

        Raises QueueConsumerClosedError when the queue or channel was deleted or the consumer closed, and what makes
        a subscription impossible (QueueAccessError, NotMemberError …).
        """

    @abstractmethod
    def settle(self, results: Sequence[DeliveryResult]) -> list[tuple[int, int, int]]:
        """Report the results of held messages. Returns at once, with those that it does not hold.

        Results are written soon and not waited for: one that is lost in a crash brings its message again.
        """

    @abstractmethod
    async def confirm(self, results: Sequence[DeliveryResult]) -> Settled:
        """Report results, and wait until they are durable. Returns the new time of each touched message, too."""

    @abstractmethod
    def holds(self, partition: int, seq: int, epoch: int = 0) -> bool:
        """Whether this consumer has that message, as far as it knows. ``epoch``: that of its delivery."""

    def scope(self, delivery: MessageDelivery) -> trio.CancelScope:
        """Return a scope for work on a delivery: it ends when the delivery is not this consumer's any more, as far as
        time tells."""
        return trio.CancelScope(deadline=delivery.deadline_s)

    def limit_s(self, delivery: MessageDelivery) -> float:
        """The time on trio's clock until which a delivery may be worked on, whatever is touched."""
        return float("inf")

    def drop(self, delivery: MessageDelivery) -> None:
        """Stop counting a delivery that has no result: its time was over, or it was lost."""
        return

    @abstractmethod
    def set_ready(self, max_in_flight: int) -> None:
        """Set the number of messages that may be held; 0 takes no more. Those that are held stay."""

    @abstractmethod
    async def aclose(self) -> None:
        """Release the held messages and close. Idempotent."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        with trio.CancelScope(shield=True):
            await self.aclose()


def _for_frame(delay_s: object, reason: object) -> tuple[int, str]:
    """Fit a delay and a reason into a frame of results: one that could not be written would end the link for all."""
    check_number(delay_s, "delay_s")
    if not isinstance(reason, str):
        raise WrongTypeError(f"reason must be text (str), not {type(reason).__name__}")
    delay_ms = round(max(0.0, min(cast(float, delay_s), _DELAY_MAX_S)) * 1000)
    return delay_ms, reason.encode("utf-8", "replace").decode()  # often an error's text, with arbitrary characters


@checks_arguments
class QueueMessage:
    """A message that a consumer holds. Settle it once: finish, requeue, release or reject."""

    __slots__ = ("_attributes", "_consumer", "_delivery", "_scopes", "deadline_s")

    def __init__(self, consumer: Consumer, delivery: MessageDelivery) -> None:
        self._consumer = consumer
        self._delivery = delivery
        self._attributes: Attributes | None = None
        self._scopes: list[trio.CancelScope] = []
        self.deadline_s: float = delivery.deadline_s
        """``trio.current_time()`` at which it goes to another consumer."""

    @property
    def queue(self) -> str:
        """The queue's name."""
        return self._consumer.queue

    @property
    def channel(self) -> str:
        """The channel's name."""
        return self._consumer.channel

    @property
    def body(self) -> bytes:
        """The body, as the producer published it."""
        return self._delivery.body

    @property
    def id(self) -> str:
        """16 hex digits; the same for every channel and every delivery, and never given again on its node."""
        return message_id(self._delivery.partition, self._delivery.seq)

    @property
    def attempts(self) -> int:
        """The number of this delivery, from 1. Above 1 an earlier delivery did not finish: the message may have been
        worked on."""
        return self._delivery.attempts

    @property
    def is_redelivered(self) -> bool:
        """Whether this is not the first delivery."""
        return self._delivery.attempts > 1

    @property
    def published_s(self) -> float:
        """When it was published, Unix seconds of the node that keeps the queue."""
        return self._delivery.published_us / 1e6

    @property
    def attributes(self) -> Attributes:
        """Key, tags, priority and headers."""
        if self._attributes is None:
            self._attributes = decode_attributes(self._delivery.attributes)
        return self._attributes

    @property
    def key(self) -> str:
        """The order key; empty when there is none."""
        return self.attributes.key

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags, for filters."""
        return self.attributes.tags

    @property
    def priority(self) -> int:
        """The priority; higher ones are delivered first."""
        return self.attributes.priority

    @property
    def headers(self) -> Headers:
        """The app's own headers."""
        return self.attributes.headers

    @property
    def expired(self) -> bool:
        """Whether its time is over, or it was lost with its connection: another consumer gets it. Stop working on
        it."""
        delivery = self._delivery
        is_held = self._consumer.holds(delivery.partition, delivery.seq, delivery.epoch)
        return trio.current_time() >= self.deadline_s or not is_held

    def scope(self) -> trio.CancelScope:
        """A cancel scope that ends when the message's time does, and moves when it is touched::

        with message.scope() as scope:
            await work(message.body)
        if not scope.cancelled_caught:
            await message.finish()
        """
        scope = self._consumer.scope(self._delivery)
        scope.deadline = min(scope.deadline, self.deadline_s)
        self._scopes.append(scope)
        return scope

    async def finish(self, *, durable: bool = False) -> None:
        """Report success. With ``durable``, return when the message cannot come back. Raises NotInFlightError."""
        await self._settle(Settle.FINISH, durable=durable)

    @unchecked
    async def requeue(self, delay_s: float = 0.0, reason: str = "") -> None:
        """Report a failure: deliver the message again, after ``delay_s``. Raises NotInFlightError."""
        await self._settle(Settle.REQUEUE, delay_s, reason)

    async def release(self) -> None:
        """Release the message: the attempt does not count. Raises NotInFlightError."""
        await self._settle(Settle.RELEASE)

    @unchecked
    async def reject(self, reason: str = "") -> None:
        """Report that the message can never work: it becomes a dead letter at once. Raises NotInFlightError."""
        await self._settle(Settle.REJECT, reason=reason)

    async def touch(self) -> float:
        """Begin the message's time anew, while work goes on. Returns the new ``deadline_s``. Raises
        NotInFlightError."""
        delivery = self._delivery
        self._require_held()
        settled = await self._consumer.confirm([DeliveryResult(Settle.TOUCH, delivery.partition, delivery.seq)])
        self._refuse(settled.refused)
        left_ms = settled.touched[0][2] if settled.touched else 0
        self.move_deadline(trio.current_time() + left_ms / 1000)
        return self.deadline_s

    def move_deadline(self, deadline_s: float) -> None:
        """Take a new deadline of a renewed message: its scopes end then."""
        self.deadline_s = deadline_s
        for scope in self._scopes:
            scope.deadline = min(deadline_s, self._consumer.limit_s(self._delivery))

    async def _settle(self, kind: Settle, delay_s: float = 0.0, reason: str = "", *, durable: bool = False) -> None:
        delivery = self._delivery
        self._require_held()
        delay_ms = 0
        if delay_s != 0.0 or reason != "":
            delay_ms, reason = _for_frame(delay_s, reason)
        result = DeliveryResult(kind, delivery.partition, delivery.seq, delay_ms, reason)
        if durable:
            self._refuse((await self._consumer.confirm([result])).refused)
        else:
            refused = self._consumer.settle([result])
            await trio.lowlevel.checkpoint()
            self._refuse(refused)

    def _require_held(self) -> None:
        # After its time it may be here again as another delivery, which this one must not settle.
        if self.expired:
            self._consumer.drop(self._delivery)
            self._refuse([(self._delivery.partition, self._delivery.seq, 0)])

    def _refuse(self, refused: Sequence[tuple[int, int, int]]) -> None:
        if refused:
            raise NotInFlightError(
                f"the message {self.id} is not held here any more: its time was over, or it was settled before"
            )


class Messages:
    """An async iterator over a consumer's messages; made by ``queue.consume(…)``."""

    def __init__(self, consumer: Consumer, count: int | None = None) -> None:
        """``count``: the iterator ends after so many messages, which can be settled until the block ends."""
        self.consumer = consumer
        """The consumer, for whole batches: `Consumer.receive`, `Consumer.settle`."""
        self._left = sys.maxsize if count is None else count
        self._next: deque[MessageDelivery] = deque()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> QueueMessage:
        consumer = self.consumer
        while True:
            while self._next:
                delivery = self._next.popleft()
                if consumer.holds(delivery.partition, delivery.seq, delivery.epoch):
                    self._left -= 1
                    if not self._left:
                        consumer.set_ready(0)
                    return QueueMessage(consumer, delivery)
                consumer.drop(delivery)  # its time was over before it was received
            if self._left <= 0:
                raise StopAsyncIteration
            # Messages that wait in an exclusive consumer can still be handed over without an attempt.
            self._next.extend(await consumer.receive(1 if consumer.is_exclusive else min(BATCH_ITEMS, self._left)))
