"""What a consumer of a queue is, wherever the queue is kept, and the messages that it hands to an app."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Self

import trio

from dep2p.errors import NotInFlightError
from dep2p.protocols.queues.wire import Result, Settle, Settled
from dep2p.queues.types import Attributes, Delivery, decode_attributes, message_id
from dep2p.types import Headers

BATCH_ITEMS: Final = 64


class Consumer(ABC):
    """Takes messages of one channel. For one trio task, except that settling may be done from any.

    A message that was received is *held* until it is settled, its time is over, or the consumer ends. When the
    consumer ends, or the connection to the queue does, what is held goes to others at once.
    """

    queue: str
    channel: str
    max_in_flight: int
    on_lost: Callable[[], None] | None = None
    """Called when everything that is held was lost at once: the connection is gone, or the consumer over."""
    on_revoke: Callable[[int], None] | None = None
    """Of an exclusive one: called with a partition that is to be handed over, or is lost: start nothing more of it, and
    release what was received and not started."""
    is_exclusive = False
    """Whether it has partitions of its own, and the messages of a key come one after the other."""

    @abstractmethod
    async def receive(self, items_max: int = BATCH_ITEMS) -> list[Delivery]:
        """At least one message, at most ``items_max``.

        Raises QueueConsumerClosedError when the queue or channel was deleted or the consumer closed, and what makes
        a subscription impossible (QueueAccessError, NotMemberError …).
        """

    @abstractmethod
    def settle(self, results: Sequence[Result]) -> list[tuple[int, int, int]]:
        """Say what became of held messages; returns at once, and gives those that it does not hold.

        Results are written soon and not waited for: one that is lost in a crash brings its message again.
        """

    @abstractmethod
    async def confirm(self, results: Sequence[Result]) -> Settled:
        """The same, and wait until it is durable. With the new time of each touched message."""

    @abstractmethod
    def holds(self, partition: int, seq: int, epoch: int = 0) -> bool:
        """Whether this consumer has that message, as far as it knows. ``epoch``: that of its delivery."""

    def scope(self, delivery: Delivery) -> trio.CancelScope:
        """For work on a delivery: ends when it is not this consumer's any more, as far as time tells."""
        return trio.CancelScope(deadline=delivery.deadline_s)

    def limit_s(self, delivery: Delivery) -> float:
        """Until when a delivery may be worked on whatever is touched, on trio's clock."""
        return float("inf")

    def drop(self, delivery: Delivery) -> None:
        """Nobody works on that delivery any more, and it has no result: its time was over, or it was lost."""
        return

    @abstractmethod
    def set_ready(self, max_in_flight: int) -> None:
        """How many messages may be held from now on; 0 takes no more. Held ones stay."""

    @abstractmethod
    async def aclose(self) -> None:
        """Give back what is held. Idempotent."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        with trio.CancelScope(shield=True):
            await self.aclose()


class QueueMessage:
    """A message that a consumer holds. Settle it once: finish, requeue, release or reject."""

    __slots__ = ("_attributes", "_consumer", "_delivery", "_scopes", "deadline_s")

    def __init__(self, consumer: Consumer, delivery: Delivery) -> None:
        self._consumer = consumer
        self._delivery = delivery
        self._attributes: Attributes | None = None
        self._scopes: list[trio.CancelScope] = []
        self.deadline_s = delivery.deadline_s
        """``trio.current_time()`` at which it goes to another consumer."""

    @property
    def body(self) -> bytes:
        """What was published."""
        return self._delivery.body

    @property
    def id(self) -> str:
        """16 hex digits; the same for every channel and every delivery, and never given again on its node."""
        return message_id(self._delivery.partition, self._delivery.seq)

    @property
    def attempts(self) -> int:
        """1 at the first delivery. Above it, an earlier delivery came to no good end: it may have been worked on."""
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
        """For filters."""
        return self.attributes.tags

    @property
    def priority(self) -> int:
        """Higher is delivered first."""
        return self.attributes.priority

    @property
    def headers(self) -> Headers:
        """The app's own."""
        return self.attributes.headers

    @property
    def expired(self) -> bool:
        """Its time is over, or it was lost with its connection: somebody else has it, or will. Stop working on it."""
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
        """It is done. With ``durable``, return when it cannot come back. Raises NotInFlightError."""
        await self._settle(Settle.FINISH, durable=durable)

    async def requeue(self, delay_s: float = 0.0, reason: str = "") -> None:
        """It did not work: deliver it again, after ``delay_s``. Raises NotInFlightError."""
        await self._settle(Settle.REQUEUE, delay_s, reason)

    async def release(self) -> None:
        """Give it back untried: the attempt does not count. Raises NotInFlightError."""
        await self._settle(Settle.RELEASE)

    async def reject(self, reason: str = "") -> None:
        """It can never work: to the dead letters at once. Raises NotInFlightError."""
        await self._settle(Settle.REJECT, reason=reason)

    async def touch(self) -> float:
        """Work goes on: the time begins anew. Returns the new ``deadline_s``. Raises NotInFlightError."""
        delivery = self._delivery
        self._require_held()
        settled = await self._consumer.confirm([Result(Settle.TOUCH, delivery.partition, delivery.seq)])
        self._refuse(settled.refused)
        left_ms = settled.touched[0][2] if settled.touched else 0
        self.move_deadline(trio.current_time() + left_ms / 1000)
        return self.deadline_s

    def move_deadline(self, deadline_s: float) -> None:
        """It was renewed: it is held until then, and its scopes end then."""
        self.deadline_s = deadline_s
        for scope in self._scopes:
            scope.deadline = min(deadline_s, self._consumer.limit_s(self._delivery))

    async def _settle(self, kind: Settle, delay_s: float = 0.0, reason: str = "", *, durable: bool = False) -> None:
        delivery = self._delivery
        self._require_held()
        result = Result(kind, delivery.partition, delivery.seq, round(delay_s * 1000), reason)
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

    def __init__(self, consumer: Consumer) -> None:
        self.consumer = consumer
        """For whole batches: `Consumer.receive`, `Consumer.settle`."""
        self._next: deque[Delivery] = deque()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> QueueMessage:
        consumer = self.consumer
        while True:
            while self._next:
                delivery = self._next.popleft()
                if consumer.holds(delivery.partition, delivery.seq, delivery.epoch):
                    return QueueMessage(consumer, delivery)
                consumer.drop(delivery)  # its time was over before anybody looked at it
            # What waits in an exclusive consumer can still be handed over untried.
            self._next.extend(await consumer.receive(1 if consumer.is_exclusive else BATCH_ITEMS))
