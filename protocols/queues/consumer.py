"""A consumer of a channel: what it holds, and how much more it takes."""

import heapq
from collections.abc import Callable
from typing import NamedTuple

from dep2p.protocols.queues.message import Message

_new = tuple[object, ...].__new__
"""A NamedTuple's own constructor costs twice as much."""


class Delivery(NamedTuple):
    """A message handed to a consumer."""

    partition: int
    message: Message
    attempts: int
    """1 at the first time."""
    deadline: float
    """On the clock of `now`: it goes to others then, unless it was touched."""
    epoch: int = 0
    """Under which lock, in an exclusive channel: results carry it."""


class Held:
    """A message in the hands of a consumer."""

    __slots__ = ("attempts", "deadline", "first", "is_out", "message", "size")

    def __init__(self, message: Message, attempts: int, now: float, deadline: float) -> None:
        self.message = message
        self.attempts = attempts
        self.first = now
        self.deadline = deadline
        self.size = len(message[7])
        self.is_out = False
        """The consumer has seen it."""


class Consumer:
    """Attached to one channel by `Channel.attach`."""

    def __init__(
        self,
        consumer_id: str,
        *,
        max_in_flight: int,
        bytes_max: int,
        msg_timeout_s: float,
        on_deliver: Callable[[list[Delivery]], None],
        on_closed: Callable[[str], None],
    ) -> None:
        self.id = consumer_id
        self.max_in_flight = max_in_flight
        """0 pauses it."""
        self.bytes_max = bytes_max
        self.msg_timeout_s = msg_timeout_s
        self.on_deliver = on_deliver
        """Called when deliveries may be handed out: their attempts are committed."""
        self.on_closed = on_closed
        """Called with the reason when queue or channel is deleted."""
        self.held: dict[tuple[int, int], Held] = {}
        """By (partition, seq), in the order of their deadlines."""
        self.held_bytes = 0
        self._capped: list[tuple[float, tuple[int, int]]] = []
        """Heap of those whose deadline is nearer than their place in `held` says."""
        self.staged: list[Delivery] = []
        """Assigned, but not committed yet."""
        self.delivered = 0
        self.is_gone = False
        """Its program is gone, but what it held stays its own until its time is over."""

    @property
    def room(self) -> int:
        """How many more it takes."""
        if self.held and self.held_bytes >= self.bytes_max:
            return 0
        return self.max_in_flight - len(self.held)

    def assign(self, partition: int, message: Message, attempts: int, now: float) -> None:
        """Hold a message, and stage its delivery."""
        deadline = now + self.msg_timeout_s
        held = self.held[(partition, message.seq)] = Held(message, attempts, now, deadline)
        self.held_bytes += held.size
        self.staged.append(_new(Delivery, (partition, message, attempts, deadline, 0)))

    def holds(self, delivery: Delivery) -> bool:
        """Whether just this delivery is in its hands: not taken back, nor handed to it once more since."""
        held = self.held.get((delivery.partition, delivery.message.seq))
        return held is not None and held.attempts == delivery.attempts

    def drop(self, key: tuple[int, int]) -> Held | None:
        """It is not held any more."""
        held = self.held.pop(key, None)
        if held is not None:
            self.held_bytes -= held.size
        return held

    def touch(self, key: tuple[int, int], held: Held, now: float, latest: float) -> None:
        """Its time begins anew; it ends at ``latest`` at the latest."""
        del self.held[key]
        self.held[key] = held
        held.deadline = now + self.msg_timeout_s
        if latest < held.deadline:
            held.deadline = latest
            if len(self._capped) > 2 * len(self.held) + 16:
                self._prune()
            heapq.heappush(self._capped, (latest, key))

    def hold_until(self, key: tuple[int, int], held: Held, deadline: float) -> None:
        """It is held until then, however long the others are; for a consumer that says so of everything it holds."""
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
        """Something whose time is over."""
        first = self._first()
        return None if first is None or first[1] > now else first[0]

    def next_deadline(self) -> float | None:
        """Of what is held."""
        first = self._first()
        return None if first is None else first[1]
