"""An inline validator against replays: per author, only growing sequence numbers pass.

Use it where messages of one author take one path, or order is wanted: a message that overtook an earlier one makes
the earlier one ignored. kubo runs it by default. Authors must number monotonically, also across restarts.
"""

from dep2p.gossipsub.events import Verdict
from dep2p.gossipsub.rpc import Message
from dep2p.types import PeerId


class SeqnoValidator:
    """Remembers the highest seqno of each author; the authors that were silent longest are forgotten first."""

    __slots__ = ("_authors_max", "_highest")

    def __init__(self, authors_max: int = 65_536) -> None:
        if authors_max < 1:
            raise ValueError("authors_max must be at least 1")
        self._highest: dict[bytes, int] = {}
        self._authors_max = authors_max

    def __len__(self) -> int:
        return len(self._highest)

    def __call__(self, peer: PeerId, message: Message) -> Verdict:
        """IGNORE what is not above the author's highest, ACCEPT the rest; REJECT a seqno that has not 8 bytes."""
        if len(message.seqno) != 8:
            return Verdict.REJECT
        seqno = int.from_bytes(message.seqno, "big")
        highest = self._highest
        known = highest.pop(message.author, None)
        if known is not None and seqno <= known:
            highest[message.author] = known
            return Verdict.IGNORE
        if known is None and len(highest) >= self._authors_max:
            self._evict()
        highest[message.author] = seqno
        return Verdict.ACCEPT

    def _evict(self) -> None:
        oldest: list[bytes] = []
        for author in self._highest:
            oldest.append(author)
            if len(oldest) * 16 >= self._authors_max:
                break
        for author in oldest:
            del self._highest[author]
