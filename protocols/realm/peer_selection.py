"""Which members a node stays connected to when there are too many for all (docs/spec/realm.md §6). Pure.

Each node prefers others by a hash of both ids: every node has other favourites, so a large realm becomes a random graph
and nobody the hub, and the choice survives restarts.
"""

import hashlib
from typing import Final

from dep2p.types import PeerId

KEPT_MAX: Final = 64


class KeepChoice:
    """The favourites among the members that have addresses."""

    def __init__(self, own: PeerId, *, kept_max: int = KEPT_MAX) -> None:
        self._own = own
        self._kept_max = kept_max
        self._candidates: dict[PeerId, bytes] = {}
        self._kept: dict[PeerId, bytes] = {}

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._kept

    def add(self, peer: PeerId) -> tuple[list[PeerId], list[PeerId]]:
        """A member has addresses. Gives the peers to keep and the peers to let go from now on."""
        if peer in self._candidates:
            return [], []
        rank = hashlib.sha256(f"{self._own}|{peer}".encode()).digest()
        self._candidates[peer] = rank
        if len(self._kept) < self._kept_max:
            self._kept[peer] = rank
            return [peer], []
        if not self._kept:
            return [], []
        worst = max(self._kept, key=self._kept.__getitem__)
        if rank >= self._kept[worst]:
            return [], []
        del self._kept[worst]
        self._kept[peer] = rank
        return [peer], [worst]

    def discard(self, peer: PeerId) -> tuple[list[PeerId], list[PeerId]]:
        """A member left, expired or lost its addresses. Gives the peers to keep and to let go from now on."""
        self._candidates.pop(peer, None)
        if self._kept.pop(peer, None) is None:
            return [], []
        waiting = [candidate for candidate in self._candidates if candidate not in self._kept]
        if not waiting:
            return [], [peer]
        best = min(waiting, key=self._candidates.__getitem__)
        self._kept[best] = self._candidates[best]
        return [best], [peer]
