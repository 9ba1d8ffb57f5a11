"""Messages that were asked for (IWANT) and have not come: one peer at a time is asked for each."""

from collections.abc import Container

from dep2p.types import PeerId

SPARES_MAX = 16
"""Further announcers remembered for one message."""


class Wanted:
    """One message that this node waits for."""

    __slots__ = ("asked", "asked_at", "spares", "topic", "tries")

    def __init__(self, topic: str) -> None:
        self.topic: str = topic
        self.asked: dict[PeerId, None] = {}
        self.asked_at: float = float("-inf")
        """When a peer was asked last."""
        self.tries: int = 0
        """How often one or more peers were asked."""
        self.spares: dict[PeerId, None] = {}
        """Peers that announced it and were not asked yet."""

    def note(self, peer: PeerId) -> None:
        """Note a peer that announced the message while another one is being asked."""
        if peer not in self.asked and len(self.spares) < SPARES_MAX:
            self.spares[peer] = None


class WantedMessages:
    """By message id, bounded in items and bytes of ids; the oldest go first.

    `by_id` is read in the hot path; change it only here.
    """

    __slots__ = ("_bytes", "_bytes_max", "_items_max", "by_id", "evicted")

    def __init__(self, items_max: int, bytes_max: int) -> None:
        self.by_id: dict[bytes, Wanted] = {}
        self._items_max = items_max
        self._bytes_max = bytes_max
        self._bytes = 0
        self.evicted: int = 0
        """Messages forgotten before their time: they may be asked of several peers at once."""

    def __len__(self) -> int:
        return len(self.by_id)

    def want(self, message_id: bytes, topic: str) -> Wanted:
        """The entry of a message, made when it is new."""
        wanted = self.by_id.get(message_id)
        if wanted is None:
            while self.by_id and (
                len(self.by_id) >= self._items_max or self._bytes + len(message_id) > self._bytes_max
            ):
                self.settled(next(iter(self.by_id)))
                self.evicted += 1
            wanted = self.by_id[message_id] = Wanted(topic)
            self._bytes += len(message_id)
        return wanted

    def asked(self, message_id: bytes, peer: PeerId, now: float) -> None:
        """Note that the peer is being asked."""
        wanted = self.by_id[message_id]
        wanted.asked[peer] = None
        wanted.spares.pop(peer, None)
        if now != wanted.asked_at:
            wanted.tries += 1
        wanted.asked_at = now

    def settled(self, message_id: bytes) -> None:
        """Forget a message that came and was judged, or is not wanted any more."""
        if self.by_id.pop(message_id, None) is not None:
            self._bytes -= len(message_id)

    def unanswered(self, message_id: bytes) -> None:
        """Let a message be asked for again at once, since the request was lost or the answer could not be taken."""
        wanted = self.by_id.get(message_id)
        if wanted is not None:
            wanted.asked_at = float("-inf")

    def overdue(self, asked_before: float, peers: Container[PeerId]) -> list[bytes]:
        """Return the messages last asked for at ``asked_before`` or earlier, or only of peers that are not in
        ``peers``."""
        return [
            message_id
            for message_id, wanted in self.by_id.items()
            if wanted.asked_at <= asked_before or not any(peer in peers for peer in wanted.asked)
        ]
