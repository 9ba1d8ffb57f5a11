"""Interest in connections: the parts of a node that need a connection to a peer."""

from dep2p.types import PeerId


class ConnectionInterest:
    """Counts interest in peers by the name of the part that has it: the realms of a node, the node itself,
    discovery."""

    def __init__(self) -> None:
        self._by_peer: dict[PeerId, dict[str, None]] = {}

    def add(self, peer: PeerId, by: str) -> None:
        """Note that ``by`` needs the connection. Idempotent."""
        self._by_peer.setdefault(peer, {})[by] = None

    def remove(self, peer: PeerId, by: str | None) -> bool:
        """Note that ``by`` no longer needs the connection, or, for None, that nothing does. Return True when no
        interest is left."""
        interested = self._by_peer.get(peer, {})
        if by is not None:
            interested.pop(by, None)
            if interested:
                return False
        self._by_peer.pop(peer, None)
        return True
