"""Backoffs: times until which a pruned peer must not graft, and this node must not graft it. Bounded over all
topics."""

from dep2p.types import PeerId


class Backoffs:
    """Ends of backoffs by topic and peer."""

    __slots__ = ("_by_topic", "_count", "_items_max", "_slack_s", "evicted")

    def __init__(self, items_max: int, slack_s: float) -> None:
        self._by_topic: dict[str, dict[PeerId, float]] = {}
        self._count = 0
        self._items_max = items_max
        self._slack_s = slack_s
        self.evicted: int = 0
        """Backoffs forgotten before their time."""

    def __len__(self) -> int:
        return self._count

    def set(self, topic: str, peer: PeerId, until: float) -> None:
        """Set the end of a backoff; a later end that is set already stays."""
        ends = self._by_topic.get(topic)
        known = ends.get(peer) if ends is not None else None
        if ends is None or known is None:
            if self._count >= self._items_max:
                self._evict_one()
            self._count += 1
            self._by_topic.setdefault(topic, {})[peer] = until
        elif until > known:
            ends[peer] = until

    def end(self, topic: str, peer: PeerId) -> float:
        """Return when the backoff ends, 0 when there is none. No slack: this judges a peer's graft."""
        ends = self._by_topic.get(topic)
        return ends.get(peer, 0.0) if ends else 0.0

    def of_topic(self, topic: str) -> dict[PeerId, float] | None:
        """Return the topic's backoffs for `blocked`, or None when there are none: one look-up serves many
        candidates."""
        return self._by_topic.get(topic)

    def blocked(self, ends: dict[PeerId, float] | None, peer: PeerId, now: float) -> bool:
        """Whether we must not graft this peer yet, slack included."""
        return ends is not None and peer in ends and ends[peer] + self._slack_s > now

    def sweep(self, now: float) -> None:
        """Forget backoffs that are over, slack included, and topics without any."""
        horizon = now - self._slack_s
        for topic, ends in list(self._by_topic.items()):
            for peer in [peer for peer, end in ends.items() if end <= horizon]:
                del ends[peer]
                self._count -= 1
            if not ends:
                del self._by_topic[topic]

    def _evict_one(self) -> None:
        topic, ends = next(iter(self._by_topic.items()))
        del ends[next(iter(ends))]
        self._count -= 1
        self.evicted += 1
        if not ends:
            del self._by_topic[topic]
