"""Items of several peers that wait for one worker: a line for each peer, served in turns. Pure.

An item of one peer waits for one of each other peer, however many they have (RFC 970). Items of one author keep the
order in which they came, whichever peers brought them: the turn of an item takes the oldest one of its author.
"""

from collections import deque
from collections.abc import Hashable
from typing import Final, Generic, TypeVar

from dep2p.types import PeerId

T = TypeVar("T")
_SERVED_MAX: Final = 64
"""Served items that a line may hold beside as many as wait there, before they are taken out."""


class _Entry(Generic[T]):
    """An item that waits, in the line of its peer and in that of its author."""

    __slots__ = ("author", "item", "peer")

    def __init__(self, peer: PeerId, author: Hashable, item: T) -> None:
        self.peer = peer
        self.author = author
        self.item: T | None = item
        """None once it was served."""


class PeerLines(Generic[T]):
    """A line for each peer that has items. An item is never None.

    >>> lines = PeerLines[str]()
    >>> lines.put(PeerId("ann"), "ann", "first"), lines.put(PeerId("bob"), "ann", "second")
    (None, None)
    >>> lines.take(), lines.take()
    ('first', 'second')
    """

    __slots__ = ("_author", "_authors", "_items", "_lines", "_order", "_peer", "_run", "_waiting")

    def __init__(self) -> None:
        self._run: deque[T] = deque()
        """All items, while one peer brought all of them, of one author: the usual case, in a third of the time."""
        self._peer: PeerId = PeerId("")
        self._author: Hashable = None
        self._lines: dict[PeerId, deque[_Entry[T]]] = {}
        self._authors: dict[Hashable, deque[_Entry[T]]] = {}
        self._order: deque[PeerId] = deque()
        """Peers with lines, the next one to be served first."""
        self._waiting: dict[PeerId, int] = {}
        self._items = 0

    def __len__(self) -> int:
        return self._items or len(self._run)

    def waiting(self, peer: PeerId) -> int:
        """Count the items of a peer."""
        if self._run:
            return len(self._run) if peer == self._peer else 0
        return self._waiting.get(peer, 0)

    def put(self, peer: PeerId, author: Hashable, item: T) -> None:
        """Add an item at the end of the peer's line, and behind all of its author."""
        run = self._run
        if run:
            if peer == self._peer and author == self._author:
                run.append(item)
                return
            for earlier in run:
                self._put_in_line(self._peer, self._author, earlier)
            run.clear()
        elif not self._items:
            self._peer, self._author = peer, author
            run.append(item)
            return
        self._put_in_line(peer, author, item)

    def _put_in_line(self, peer: PeerId, author: Hashable, item: T) -> None:
        entry = _Entry(peer, author, item)
        line = self._lines.get(peer)
        if line is None:
            line = self._lines[peer] = deque()
            self._order.append(peer)
        line.append(entry)
        of_author = self._authors.get(author)
        if of_author is None:
            of_author = self._authors[author] = deque()
        of_author.append(entry)
        waiting = self._waiting[peer] = self._waiting.get(peer, 0) + 1
        self._items += 1
        if len(line) > 2 * waiting + _SERVED_MAX:
            self._lines[peer] = deque([each for each in line if each.item is not None])

    def take(self) -> T:
        """Take the next item: the oldest of the author whose item is the first in the line of the peer that was served
        least lately.

        Raises ``IndexError`` when nothing waits.
        """
        if self._run:
            return self._run.popleft()
        while True:
            peer = self._order.popleft()
            line = self._lines[peer]
            while line and line[0].item is None:
                line.popleft()
            if line:
                break
            del self._lines[peer]
        of_author = self._authors[line[0].author]
        oldest = of_author.popleft()
        if not of_author:
            del self._authors[oldest.author]
        item, oldest.item = oldest.item, None
        assert item is not None
        self._items -= 1
        left = self._waiting[oldest.peer] - 1
        if left:
            self._waiting[oldest.peer] = left
        else:
            del self._waiting[oldest.peer]
        if line[0] is oldest:
            line.popleft()
        if peer in self._waiting:
            self._order.append(peer)
        else:
            del self._lines[peer]
        return item
