"""Items of several peers that wait for one worker: a line for each peer, served in turns. Pure.

An item of one peer waits for one of each other peer, however many they have (RFC 970).
"""

from collections import deque
from typing import Generic, TypeVar

from dep2p.types import PeerId

T = TypeVar("T")


class PeerLines(Generic[T]):
    """A line for each peer that has items."""

    __slots__ = ("_items", "_lines", "_order")

    def __init__(self) -> None:
        self._lines: dict[PeerId, deque[T]] = {}
        self._order: deque[PeerId] = deque()
        """Peers with items, the next one to be served first."""
        self._items = 0

    def __len__(self) -> int:
        return self._items

    def waiting(self, peer: PeerId) -> int:
        """Count the items of a peer."""
        line = self._lines.get(peer)
        return 0 if line is None else len(line)

    def put(self, peer: PeerId, item: T) -> None:
        """Add an item at the end of the peer's line."""
        line = self._lines.get(peer)
        if line is None:
            line = self._lines[peer] = deque()
            self._order.append(peer)
        line.append(item)
        self._items += 1

    def take(self) -> T:
        """Take the next item: the first one of the peer that was served least lately.

        Raises ``IndexError`` when nothing waits.
        """
        peer = self._order.popleft()
        line = self._lines[peer]
        item = line.popleft()
        self._items -= 1
        if line:
            self._order.append(peer)
        else:
            del self._lines[peer]
        return item
