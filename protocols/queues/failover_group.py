"""The nodes of a failover group as one member knows them, and the one to ask now. Pure.

News of a later term counts, from any node. An owner that does not answer is asked again between the others.
"""

from collections.abc import Sequence
from typing import Final

NODES_MAX: Final = 16
"""Nodes of one group that are remembered; those that the user named first stay."""
AWAY_S: Final = 3.0
"""A node that did not answer is not asked for so long, while there are others."""
STANDBY_S: Final = 0.5
"""The same for a node that answered that it is not the owner."""


class FailoverGroup:
    """A failover group, known by the node that was named first."""

    def __init__(self, *nodes: str) -> None:
        self.first: str = nodes[0]
        self.owner: str = ""
        """The owner as last heard; empty: not known, or there is none."""
        self.term: int = 0
        """The number of the latest known term."""
        self._nodes: dict[str, float] = dict.fromkeys(nodes[:NODES_MAX], 0.0)
        """For each node the time until which the others are preferred."""
        self._last: str = self.first

    @property
    def nodes(self) -> tuple[str, ...]:
        """All known nodes, those that the user named first."""
        return tuple(self._nodes)

    @property
    def is_set(self) -> bool:
        """Whether there is another node to ask."""
        return len(self._nodes) > 1

    def at(self, now: float) -> str:
        """Return the node to ask: the owner, else the one that answered last, else another one.

        Nodes that failed or refused come behind the others, and each in turn. Otherwise a caller that asks rarely would
        meet the same unreachable node again and again.
        """
        if not self.is_set:
            return self.first
        ranked: list[str] = [*([self.owner] if self.owner else []), self._last, *self._nodes]
        return min(ranked, key=lambda node: self._nodes[node])

    def pause_s(self, now: float) -> float:
        """Seconds until that node should be asked again."""
        return max(0.0, self._nodes[self.at(now)] - now) if self.is_set else 0.0

    def add(self, nodes: Sequence[str]) -> None:
        """Add nodes that the user named."""
        for node in nodes:
            if node not in self._nodes and len(self._nodes) < NODES_MAX:
                self._nodes[node] = 0.0

    def notified(self, owner: str, term: int, nodes: Sequence[str]) -> bool:
        """Take news of the owner from a node of the group. Returns whether the owner changed. News of an older term
        is late, and does not count."""
        if term < self.term:
            return False
        self.add([*nodes, *([owner] if owner else [])])
        if owner not in self._nodes:
            owner = ""
        is_new = bool(owner) and owner != self.owner
        if term > self.term and owner:
            self._nodes[owner] = 0.0  # it has answered now, whatever it did before
        self.term = term
        self.owner = owner
        return is_new

    def refused(self, by: str, owner: str, term: int, nodes: Sequence[str], now: float) -> None:
        """Note that a node of the group says that it is not the owner."""
        self.notified("" if owner == by else owner, term, nodes)
        if by in self._nodes:
            self._nodes[by] = max(self._nodes[by], now + STANDBY_S)

    def failed(self, node: str, now: float) -> None:
        """Note that a node did not answer, or could not be reached."""
        if node in self._nodes:
            self._nodes[node] = now + AWAY_S

    def worked(self, node: str) -> None:
        """Note that a node has answered as the owner."""
        if node in self._nodes:
            self._last = node
            self._nodes[node] = 0.0
