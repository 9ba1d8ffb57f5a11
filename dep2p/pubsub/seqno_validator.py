"""A validator against replays: per author, only growing sequence numbers pass.

A message that is replayed within ``seen_ttl_s`` is a duplicate anyway; this also stops one that is replayed later.
Add it to a topic with ``topic.add_validator(SeqnoValidator())`` where order is wanted or the messages of one author
take one path: of two messages that overtook each other it ignores the earlier one. kubo runs it by default.
Authors must number monotonically, also across restarts, as dep2p does.
"""

from dep2p.gossipsub.events import Verdict
from dep2p.gossipsub.topic_types import TopicMessage
from dep2p.types import PeerId


class SeqnoValidator:
    """Remembers the highest seqno of each author. It forgets the authors first that were silent longest.

    ``authors_max``: how many authors it remembers.
    """

    __slots__ = ("_authors_max", "_highest")

    def __init__(self, authors_max: int = 65_536) -> None:
        """Raises ``ValueError`` for an ``authors_max`` below 1."""
        if authors_max < 1:
            raise ValueError("authors_max must be at least 1")
        self._highest: dict[PeerId, int] = {}
        self._authors_max = authors_max

    def __len__(self) -> int:
        return len(self._highest)

    def __call__(self, message: TopicMessage) -> Verdict:
        """IGNORE a seqno that is not above the author's highest; ACCEPT the rest, own publishes among them."""
        if message.sender is None or message.seqno is None:
            return Verdict.ACCEPT
        highest = self._highest
        known = highest.pop(message.sender, None)
        if known is not None and message.seqno <= known:
            highest[message.sender] = known
            return Verdict.IGNORE
        if known is None and len(highest) >= self._authors_max:
            self._evict()
        highest[message.sender] = message.seqno
        return Verdict.ACCEPT

    def _evict(self) -> None:
        oldest: list[PeerId] = []
        for author in self._highest:
            oldest.append(author)
            if len(oldest) * 16 >= self._authors_max:
                break
        for author in oldest:
            del self._highest[author]
