"""Peers that announced a message and were asked for it. The message must come in time, from any peer."""

from collections import deque

from dep2p.types import PeerId


class Promises:
    """Open promises by message id. All last equally long, so they end in the order in which they were made.

    `by_id` is read in the hot path; change it only here.
    """

    __slots__ = ("_followup_s", "_queue", "by_id")

    def __init__(self, followup_s: float) -> None:
        self.by_id: dict[bytes, dict[PeerId, float]] = {}
        self._queue: deque[tuple[float, bytes, PeerId]] = deque()
        self._followup_s = followup_s

    def __len__(self) -> int:
        return len(self.by_id)

    def add(self, peer: PeerId, message_id: bytes, now: float) -> None:
        """Note that the peer was asked for an id that it announced. An open promise keeps its deadline."""
        peers = self.by_id.setdefault(message_id, {})
        if peer not in peers:
            end = now + self._followup_s
            peers[peer] = end
            self._queue.append((end, message_id, peer))

    def fulfilled(self, message_id: bytes) -> None:
        """Release every peer that promised this message: it came, valid or not."""
        self.by_id.pop(message_id, None)

    def excuse(self, peer: PeerId) -> None:
        """Drop the promises of a peer, since this node dropped its RPC or could not send the request."""
        for message_id in [message_id for message_id, peers in self.by_id.items() if peer in peers]:
            peers = self.by_id[message_id]
            del peers[peer]
            if not peers:
                del self.by_id[message_id]

    def broken(self, now: float) -> dict[PeerId, int]:
        """Take out the promises whose time is over. Return how many each peer broke."""
        counts: dict[PeerId, int] = {}
        queue = self._queue
        while queue and queue[0][0] <= now:
            end, message_id, peer = queue.popleft()
            peers = self.by_id.get(message_id)
            if peers is None or peers.get(peer) != end:
                continue
            del peers[peer]
            if not peers:
                del self.by_id[message_id]
            counts[peer] = counts.get(peer, 0) + 1
        return counts
