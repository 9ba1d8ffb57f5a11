"""The nodes of which one keeps a member's queues, as that member knows them, and which of them to ask now. Pure.

What is told of a later term counts, whoever tells it; an owner that does not answer is tried again between the others.
"""

from collections.abc import Sequence
from typing import Final

NODES_MAX: Final = 16
"""Nodes of one set that are remembered; those that were named first stay."""
AWAY_S: Final = 3.0
"""A node that did not answer is not asked for so long, while there are others."""
STANDBY_S: Final = 0.5
"""The same for one that answered that it is not the owner."""


class Keepers:
    """Known under the node that was named first."""

    def __init__(self, *nodes: str) -> None:
        self.first: str = nodes[0]
        self.owner: str = ""
        """As last told; empty: not known, or there is none."""
        self.epoch = 0
        """Of the latest term that was heard of."""
        self._nodes: dict[str, float] = dict.fromkeys(nodes[:NODES_MAX], 0.0)
        """Until when each is better not asked."""
        self._last: str = self.first

    @property
    def nodes(self) -> tuple[str, ...]:
        """All that are known, the named ones first."""
        return tuple(self._nodes)

    @property
    def is_set(self) -> bool:
        """Whether there is another one to go to."""
        return len(self._nodes) > 1

    def at(self, now: float) -> str:
        """Whom to ask: the owner, else the one that answered last, else another one.

        Those that failed or refused come behind those that did not, and each after the others: whoever asks as seldom
        as a node is away would meet the same one again and again.
        """
        if not self.is_set:
            return self.first
        ranked: list[str] = [*([self.owner] if self.owner else []), self._last, *self._nodes]
        return min(ranked, key=lambda node: self._nodes[node])

    def pause_s(self, now: float) -> float:
        """For how long that one is better not asked yet."""
        return max(0.0, self._nodes[self.at(now)] - now) if self.is_set else 0.0

    def add(self, nodes: Sequence[str]) -> None:
        """Named by the user."""
        for node in nodes:
            if node not in self._nodes and len(self._nodes) < NODES_MAX:
                self._nodes[node] = 0.0

    def told(self, owner: str, epoch: int, nodes: Sequence[str]) -> bool:
        """Somebody of the set says who has it; whether it is another one than before. What is of an older term is
        late news, and does not count."""
        if epoch < self.epoch:
            return False
        self.add([*nodes, *([owner] if owner else [])])
        if owner not in self._nodes:
            owner = ""
        is_new = bool(owner) and owner != self.owner
        if epoch > self.epoch and owner:
            self._nodes[owner] = 0.0  # whatever it was before, it is there now
        self.epoch = epoch
        self.owner = owner
        return is_new

    def refused(self, by: str, owner: str, epoch: int, nodes: Sequence[str], now: float) -> None:
        """A node of the set says that it is not the owner."""
        self.told("" if owner == by else owner, epoch, nodes)
        if by in self._nodes:
            self._nodes[by] = max(self._nodes[by], now + STANDBY_S)

    def failed(self, node: str, now: float) -> None:
        """It did not answer, or could not be reached."""
        if node in self._nodes:
            self._nodes[node] = now + AWAY_S

    def worked(self, node: str) -> None:
        """It has answered as an owner does."""
        if node in self._nodes:
            self._last = node
            self._nodes[node] = 0.0
