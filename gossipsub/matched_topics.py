"""The topics that a node is in because a pattern of its own matches them: their shares and their bound. Pure.

A neighbour can make up names without end. Each holds at most four times the places that are free, so that one cannot
keep the names of others out.
"""

from typing import Final

from dep2p.types import PeerId

SHARE_OF_FREE: Final = 4
REFUSED_MAX: Final = 1_024
"""Refused names that are remembered, so that each counts once."""


class MatchedTopics:
    """Which neighbour brought up each topic, and the names that found no place."""

    __slots__ = ("_by_peer", "_refused", "_topics", "items_max", "refused_new")

    def __init__(self, items_max: int) -> None:
        self.items_max: int = items_max
        self._topics: dict[str, PeerId] = {}
        self._by_peer: dict[PeerId, int] = {}
        self._refused: dict[str, None] = {}
        self.refused_new: int = 0
        """Refused names since `take_refused`."""

    def __len__(self) -> int:
        return len(self._topics)

    def __contains__(self, name: str) -> bool:
        return name in self._topics

    def names(self) -> list[str]:
        """List the topics."""
        return list(self._topics)

    def add(self, name: str, peer: PeerId) -> bool:
        """Give a new topic a place; False when its neighbour, or the node, has none left. ``peer``: who brought it up,
        or this node."""
        free = self.items_max - len(self._topics)
        if free <= 0 or self._by_peer.get(peer, 0) >= SHARE_OF_FREE * free:
            if name not in self._refused:
                self.refused_new += 1
                if len(self._refused) >= REFUSED_MAX:
                    del self._refused[next(iter(self._refused))]
                self._refused[name] = None
            return False
        self._topics[name] = peer
        self._by_peer[peer] = self._by_peer.get(peer, 0) + 1
        self._refused.pop(name, None)
        return True

    def remove(self, name: str) -> None:
        """Free the place of a topic, where it has one."""
        peer = self._topics.pop(name, None)
        if peer is not None:
            left = self._by_peer[peer] - 1
            if left:
                self._by_peer[peer] = left
            else:
                del self._by_peer[peer]

    def take_refused(self) -> int:
        """Return how many names were refused since the last call; a name counts again when it is not remembered."""
        count, self.refused_new = self.refused_new, 0
        return count
