"""Items of several peers that wait for one worker: taken in turns, and bounded for each peer. Pure.

A peer may have as many items waiting as there is free space left. So one peer alone gets half of the space, two get a
third each, and however many press, some space is free for one that comes (dynamic thresholds: Choudhury and Hahne,
IEEE/ACM Transactions on Networking 6(2), 1998). Above that the owner holds the peer back.
"""

from collections import deque
from typing import Final, Generic, TypeVar

from dep2p.types import PeerId

ITEMS_PER_PEER_MIN: Final = 8
"""Items that a peer may have waiting, however little space is free: a peer is not held back for each item anew."""
T = TypeVar("T")


class PeerLines(Generic[T]):
    """A line for each peer. ``space``: items that may wait together before peers are held back."""

    __slots__ = ("_items", "_lines", "_order", "_space", "held")

    def __init__(self, space: int) -> None:
        self._space = space
        self._lines: dict[PeerId, deque[T]] = {}
        self._order: deque[PeerId] = deque()
        """Peers with items, the next one to be served first."""
        self._items = 0
        self.held: dict[PeerId, None] = {}
        """Peers to take nothing from for now."""

    def __len__(self) -> int:
        return self._items

    def waiting(self, peer: PeerId) -> int:
        """Count the items of a peer."""
        line = self._lines.get(peer)
        return 0 if line is None else len(line)

    def put(self, peer: PeerId, item: T, *, at_work: int = 0) -> bool:
        """Add an item; return whether to hold the peer back from now on.

        ``at_work``: items that were taken and are not done, which use space, too.
        """
        line = self._lines.get(peer)
        if line is None:
            line = self._lines[peer] = deque()
            self._order.append(peer)
        line.append(item)
        self._items += 1
        if peer in self.held or len(line) <= self._share(at_work):
            return False
        self.held[peer] = None
        return True

    def take(self, *, at_work: int = 0) -> tuple[T, PeerId | None]:
        """Take the next item, and the peer that is to be held back no longer, if any.

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
        if peer in self.held and 2 * len(line) <= self._share(at_work):
            del self.held[peer]
            return item, peer
        return item, None

    def _share(self, at_work: int) -> int:
        return max(ITEMS_PER_PEER_MIN, self._space - self._items - at_work)
