"""In which order members are served when they ask for more than a node can do at once: round robin by member. Pure.

A member that is alone is served at once. While others use the node, too, a member that sends more than a turn at once
waits in a line of its own, and the lines are served in rounds, one turn of each member in a round. This is fair
queueing (Nagle, RFC 970) with turns of bounded work in place of packets.
"""

from collections import deque
from typing import Final, Generic, TypeVar

from dep2p.types import PeerId

UNITS_PER_TURN: Final = 64
"""Work of one turn while others are active; a request is 4 units, a notification 1. Some 16 requests or 64
notifications are about one millisecond of a node."""
UNITS_ALONE: Final = 2_048
"""Work of one turn of a member that is alone: local programs wait for one such turn at most, some 15 ms. One read of
64 KiB brings about 1,000 small notifications: fewer units would make them wait in line for nothing."""
UNITS_PER_S: Final = 16_000.0
"""A member below this rate needs no turn; about a third of a node."""
SHARED_S: Final = 1.0
"""So long after the last work of another member, the node counts as shared."""
BUSY_S: Final = 0.02
"""So long after its last work, a member that has no line counts as one that is being slowed by those that have."""
_NEVER: Final = float("-inf")
T = TypeVar("T")


class TurnOrder(Generic[T]):
    """Which member's turn it is, and for how much work. Items are opaque; times are seconds of the caller's clock."""

    __slots__ = ("_last", "_last_at", "_lines", "_other", "_other_at", "_tokens")

    def __init__(self) -> None:
        self._last: PeerId | None = None
        self._last_at = _NEVER
        self._other: PeerId | None = None
        """The member that was active last besides `_last`: two are enough to know whether a member is alone."""
        self._other_at = _NEVER
        self._lines: dict[PeerId, deque[T]] = {}
        self._tokens: dict[PeerId, tuple[float, float]] = {}
        """Units that a member may do without a turn, and when they were computed; empty while a member is alone."""

    def __bool__(self) -> bool:
        """Whether anything waits for a turn."""
        return bool(self._lines)

    def note(self, member: PeerId, now: float) -> bool:
        """The member is active: whether the node is shared with another one."""
        if member != self._last:
            if self._last is not None:
                self._other, self._other_at = self._last, self._last_at
            self._last = member
        self._last_at = now
        if now - self._other_at <= SHARED_S:
            return True
        if self._tokens:
            self._tokens.clear()
        return False

    def is_shared(self, member: PeerId, now: float) -> bool:
        """Whether another member was active a moment ago."""
        at = self._other_at if member == self._last else self._last_at
        return now - at <= SHARED_S

    def spend(self, member: PeerId, units: int, now: float) -> bool:
        """Whether the member may do this much work without a turn, while the node is shared. Takes it then."""
        if member in self._lines:
            return False
        tokens, at = self._tokens.get(member, (float(UNITS_PER_TURN), now))
        tokens = min(float(UNITS_PER_TURN), tokens + (now - at) * UNITS_PER_S)
        if tokens < units:
            self._tokens[member] = (tokens, now)
            return False
        self._tokens[member] = (tokens - units, now)
        return True

    def wait(self, member: PeerId, item: T) -> None:
        """Put an item at the end of the member's line."""
        line = self._lines.get(member)
        if line is None:
            line = self._lines[member] = deque()
        line.append(item)

    def withdraw(self, member: PeerId, item: T) -> None:
        """Take an item out of its line, if it is there."""
        line = self._lines.get(member)
        if line is not None and item in line:
            line.remove(item)
            if not line:
                del self._lines[member]

    def next_round(self, now: float) -> list[tuple[PeerId, T, int]]:
        """The member, first item and units of work of each line. An item with more work waits again."""
        is_shared = len(self._lines) > 1 or any(self.is_shared(member, now) for member in self._lines)
        units = UNITS_PER_TURN if is_shared else UNITS_ALONE
        turns: list[tuple[PeerId, T, int]] = []
        for member in list(self._lines):
            line = self._lines[member]
            turns.append((member, line.popleft(), units))
            if not line:
                del self._lines[member]
        return turns

    def slows_others(self, now: float) -> bool:
        """Whether a member is active that has no line: rounds make it wait, so they need pauses."""
        return (self._last not in self._lines and now - self._last_at <= BUSY_S) or (
            self._other is not None and self._other not in self._lines and now - self._other_at <= BUSY_S
        )
