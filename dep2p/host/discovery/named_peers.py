"""The peers that discovery has named lately."""

from typing import Final

from dep2p.host.interface import PeerDiscovered
from dep2p.types import PeerId

NAMED_S: Final = 3_600.0
"""Seconds for which a name is kept that no source repeats. Sources repeat the names of peers that are there."""


class NamedPeers:
    """The latest `PeerDiscovered` of each peer, at most ``peers_max``: the one named longest ago gives way. Pure.

    ``now`` is in seconds, of any clock that does not go back.
    """

    def __init__(self, peers_max: int) -> None:
        self._peers_max = peers_max
        self._named: dict[PeerId, tuple[float, PeerDiscovered]] = {}
        """When each was named last, and how; the latest last."""

    def note(self, event: PeerDiscovered, now: float) -> None:
        """A source has named a peer, perhaps again."""
        self._named.pop(event.peer, None)
        self._expire(now)
        if len(self._named) >= self._peers_max:
            del self._named[next(iter(self._named))]
        self._named[event.peer] = (now, event)

    def events(self, now: float) -> list[PeerDiscovered]:
        """Return what was named within the last hour, the latest last."""
        self._expire(now)
        return [event for _, event in self._named.values()]

    def _expire(self, now: float) -> None:
        while self._named:
            first = next(iter(self._named))
            if self._named[first][0] > now - NAMED_S:
                return
            del self._named[first]
