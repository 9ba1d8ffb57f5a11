"""A consumer of a channel: the messages that it holds, and how many more it takes."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from dep2p.protocols.queues.message import QueuedMessage

_new = tuple[object, ...].__new__
"""A NamedTuple's own constructor costs twice as much."""


class ChannelDelivery(NamedTuple):
    """A message handed to a consumer."""

    partition: int
    message: QueuedMessage
    attempts: int
    """The number of this delivery, from 1."""
    deadline: float
    """On the clock of `now`: the message goes to others then, unless it was touched."""
    epoch: int = 0
    """The epoch of the lock in an exclusive channel: results carry it."""


@dataclass(frozen=True, slots=True)
class ConsumerWindow:
    """The most that a consumer holds, and for how long."""

    max_in_flight: int
    """Messages that it may hold; 0 pauses it."""
    bytes_max: int
    """Bytes of the messages that it may hold; it gets one message over the limit."""
    msg_timeout_s: float
    """Seconds after which a message that it holds goes to others."""


class HeldMessage:
    """A message that a consumer holds."""

    __slots__ = ("attempts", "deadline", "first", "is_out", "message", "size")

    def __init__(self, message: QueuedMessage, attempts: int, now: float, deadline: float) -> None:
        self.message: QueuedMessage = message
        self.attempts: int = attempts
        self.first: float = now
        self.deadline: float = deadline
        self.size: int = len(message[7])
        self.is_out: bool = False
        """Whether the consumer has seen it."""


class ChannelConsumer:
    """A consumer; `Channel.attach` attaches it to one channel."""

    def __init__(
        self,
        consumer_id: str,
        window: ConsumerWindow,
        *,
        on_deliver: Callable[[list[ChannelDelivery]], None],
        on_closed: Callable[[str], None],
    ) -> None:
        self.id = consumer_id
        self.max_in_flight: int = window.max_in_flight
        """Messages that it may hold; 0 pauses it."""
        self.bytes_max: int = window.bytes_max
        self.msg_timeout_s: float = window.msg_timeout_s
        self.on_deliver = on_deliver
        """Called when deliveries may be delivered: their attempts are committed."""
        self.on_closed = on_closed
        """Called with the reason when queue or channel is deleted."""
        self.held: dict[tuple[int, int], HeldMessage] = {}
        """By (partition, seq), in the order of their deadlines."""
        self.held_bytes: int = 0
        self._capped: list[tuple[float, tuple[int, int]]] = []
        """Heap of messages whose deadline is earlier than their place in `held` says."""
        self.staged: list[ChannelDelivery] = []
        """Deliveries that are not committed yet."""
        self.delivered = 0
        self.is_gone = False
        """Whether its program is gone; its messages stay with it until their time is over."""

    @property
    def room(self) -> int:
        """The number of messages that it can still take."""
        if self.held and self.held_bytes >= self.bytes_max:
            return 0
        return self.max_in_flight - len(self.held)

    def assign(self, partition: int, message: QueuedMessage, attempts: int, now: float) -> None:
        """Hold a message, and stage its delivery."""
        deadline = now + self.msg_timeout_s
        held = self.held[(partition, message.seq)] = HeldMessage(message, attempts, now, deadline)
        self.held_bytes += held.size
        self.staged.append(_new(ChannelDelivery, (partition, message, attempts, deadline, 0)))

    def holds(self, delivery: ChannelDelivery) -> bool:
        """Whether it holds just this delivery: it was not taken back, nor delivered to it once more since."""
        held = self.held.get((delivery.partition, delivery.message.seq))
        return held is not None and held.attempts == delivery.attempts

    def drop(self, key: tuple[int, int]) -> HeldMessage | None:
        """Remove a message that is not held any more."""
        held = self.held.pop(key, None)
        if held is not None:
            self.held_bytes -= held.size
        return held

    def touch(self, key: tuple[int, int], held: HeldMessage, now: float, latest: float) -> None:
        """Begin a message's time anew, until ``latest`` at most."""
        del self.held[key]
        self.held[key] = held
        held.deadline = now + self.msg_timeout_s
        if latest < held.deadline:
            held.deadline = latest
            if len(self._capped) > 2 * len(self.held) + 16:
                self._prune()
            heapq.heappush(self._capped, (latest, key))

    def hold_until(self, key: tuple[int, int], held: HeldMessage, deadline: float) -> None:
        """Hold a message until then, however long the others are held; for a consumer that does so for each message."""
        held.deadline = deadline
        if len(self._capped) > 2 * len(self.held) + 16:
            self._prune()
        heapq.heappush(self._capped, (deadline, key))

    def _prune(self) -> None:
        self._capped = [(self.held[each].deadline, each) for at, each in self._capped if self._is_at(each, at)]
        heapq.heapify(self._capped)

    def _is_at(self, key: tuple[int, int], deadline: float) -> bool:
        held = self.held.get(key)
        return held is not None and held.deadline == deadline

    def _first(self) -> tuple[tuple[int, int], float] | None:
        while self._capped and not self._is_at(self._capped[0][1], self._capped[0][0]):
            heapq.heappop(self._capped)
        for key, held in self.held.items():
            if self._capped and self._capped[0][0] < held.deadline:
                return self._capped[0][1], self._capped[0][0]
            return key, held.deadline
        return None

    def overdue(self, now: float) -> tuple[int, int] | None:
        """Return a message whose time is over, or None."""
        first = self._first()
        return None if first is None or first[1] > now else first[0]

    def next_deadline(self) -> float | None:
        """Return the earliest deadline of the messages that it holds; None without any."""
        first = self._first()
        return None if first is None else first[1]
