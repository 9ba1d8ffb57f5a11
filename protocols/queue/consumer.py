"""A consumer of a channel: what it holds, and how much more it takes."""

from collections.abc import Callable
from typing import NamedTuple

from dep2p.protocols.queue.message import Message


class Delivery(NamedTuple):
    """A message handed to a consumer."""

    partition: int
    message: Message
    attempts: int
    """1 at the first time."""
    deadline: float
    """On the clock of `now`: it goes to others then, unless it was touched."""


class Held:
    """A message in the hands of a consumer."""

    __slots__ = ("attempts", "deadline", "first", "message", "size")

    def __init__(self, message: Message, attempts: int, now: float, deadline: float) -> None:
        self.message = message
        self.attempts = attempts
        self.first = now
        self.deadline = deadline
        self.size = len(message.body)


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
        self.staged.append(Delivery(partition, message, attempts, deadline))

    def drop(self, key: tuple[int, int]) -> Held | None:
        """It is not held any more."""
        held = self.held.pop(key, None)
        if held is not None:
            self.held_bytes -= held.size
        return held

    def next_deadline(self) -> float | None:
        """Of what is held."""
        for held in self.held.values():
            return held.deadline
        return None
