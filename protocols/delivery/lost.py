"""Reliable messages that were lost: they failed or expired. Kept within bounds, to look at and to send again. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LostMessage:
    """A message at the end of a try to deliver it that failed."""

    peer: str
    number: int
    """Its number for that receiver."""
    created_us: int
    """Unix microseconds of its acceptance."""
    ended_us: int
    """Unix microseconds of its end."""
    name: str
    topic: str
    """The topic of a reliable publish; empty for a message to one peer."""
    head: bytes
    flags: int
    body: bytes
    ttl_ms: int
    """Its own time to live; 0: that of the node."""
    state: str
    """``failed`` or ``expired``."""
    reason: str
    may_have_been_taken: bool
    """Whether the receiver's handler may have taken it all the same."""

    @property
    def id(self) -> str:
        """The name of the message, as it had in the outbox: the receiver's id and the message's number."""
        return f"{self.peer}:{self.number}"

    @property
    def size_bytes(self) -> int:
        """The bytes that it takes of the bound."""
        return len(self.head) + len(self.body) + len(self.reason)


class LostMessages:
    """The latest lost messages, bounded in items and bytes: the oldest is forgotten first.

    >>> lost = LostMessages(items_max=1, bytes_max=1_000)
    >>> first, second = (LostMessage("ann", n, 0, 0, "orders", "", b"", 0, b"7", 0, "failed", "", True) for n in (1, 2))
    >>> [each.id for each in lost.add(first)], [each.id for each in lost.add(second)]
    ([], ['ann:1'])
    """

    def __init__(self, items_max: int, bytes_max: int) -> None:
        self._items_max = items_max
        self._bytes_max = bytes_max
        self._messages: dict[str, LostMessage] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._messages)

    def add(self, message: LostMessage) -> list[LostMessage]:
        """Keep a message; return those that are forgotten for it. One that is larger than the bound is among them."""
        self.take(message.id)
        self._messages[message.id] = message
        self._bytes += message.size_bytes
        forgotten: list[LostMessage] = []
        while self._messages and (len(self._messages) > self._items_max or self._bytes > self._bytes_max):
            oldest = self.take(next(iter(self._messages)))
            assert oldest is not None
            forgotten.append(oldest)
        return forgotten

    def restore(self, messages: Iterable[LostMessage]) -> list[LostMessage]:
        """Take the messages of an earlier run; return those that the bounds of this one leave no room for."""
        forgotten: list[LostMessage] = []
        for message in sorted(messages, key=lambda each: each.ended_us):
            forgotten += self.add(message)
        return forgotten

    def take(self, message_id: str) -> LostMessage | None:
        """Forget a message and return it; None when it is not there."""
        message = self._messages.pop(message_id, None)
        if message is not None:
            self._bytes -= message.size_bytes
        return message

    def all(self) -> list[LostMessage]:
        """Return all of them, in the order of their ends."""
        return list(self._messages.values())
