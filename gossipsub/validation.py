"""Messages whose validators are at work: bounded in items and bytes, per topic too, each with a deadline."""

from collections import deque
from typing import Final

from dep2p.gossipsub.params import GossipParams
from dep2p.gossipsub.rpc import RpcMessage
from dep2p.types import PeerId

OTHERS_MAX: Final = 64
"""Further senders remembered of one message under validation."""

DIFFERING_MAX: Final = 4
"""Differing copies kept of one message under validation."""


class PendingValidation:
    """A message that waits for its verdict, and the peers that sent it meanwhile."""

    __slots__ = ("_differing", "deadline", "message", "others", "peer", "ticket", "unkept")

    def __init__(self, ticket: int, message: RpcMessage, peer: PeerId, deadline: float) -> None:
        self.ticket: int = ticket
        self.message: RpcMessage = message
        self.peer: PeerId = peer
        self.deadline: float = deadline
        self.others: dict[PeerId, RpcMessage | None] = {}
        """Further senders. The value is None for the same copy, else the differing copy: it may be true when this one
        is forged."""
        self.unkept: dict[PeerId, None] = {}
        """Senders of further differing copies: too many to keep, and one of them may be the true one."""
        self._differing = 0

    def note(self, peer: PeerId, message: RpcMessage, *, is_trusted: bool) -> None:
        """Note that the peer sent a copy too. A few differing copies are kept, of each peer the first.

        ``is_trusted``: a mesh peer. There are few of those, and it is remembered however many others there are.
        """
        if peer == self.peer or peer in self.others or peer in self.unkept:
            return
        if not is_trusted and len(self.others) + len(self.unkept) >= OTHERS_MAX:
            return
        if message == self.message:
            self.others[peer] = None
        elif self._differing < DIFFERING_MAX:
            self._differing += 1
            self.others[peer] = message
        else:
            self.unkept[peer] = None


class ValidationQueue:
    """The messages that wait for their validators. `by_id` is read in the hot path; change it only here."""

    __slots__ = ("_by_ticket", "_bytes", "_ends", "_params", "_per_topic", "_ticket", "by_id")

    def __init__(self, params: GossipParams) -> None:
        self._params = params
        self.by_id: dict[bytes, PendingValidation] = {}
        self._by_ticket: dict[int, PendingValidation] = {}
        self._per_topic: dict[str, int] = {}
        self._bytes = 0
        self._ticket = 0
        self._ends: deque[tuple[float, int]] = deque()

    def __len__(self) -> int:
        return len(self._by_ticket)

    def start(self, message: RpcMessage, peer: PeerId, now: float) -> PendingValidation | None:
        """Take a message in. Return None when there is no room."""
        params = self._params
        size = len(message.data) + message.headers.size_bytes
        in_topic = self._per_topic.get(message.topic, 0)
        if (
            len(self._by_ticket) >= params.validation_max
            or in_topic >= params.validation_per_topic_max
            or (self._bytes and self._bytes + size > params.validation_bytes_max)
        ):
            return None
        self._ticket += 1
        pending = PendingValidation(self._ticket, message, peer, now + params.validation_timeout_s)
        self.by_id[message.id] = pending
        self._by_ticket[self._ticket] = pending
        self._per_topic[message.topic] = in_topic + 1
        self._bytes += size
        self._ends.append((pending.deadline, self._ticket))
        return pending

    def finish(self, ticket: int) -> PendingValidation | None:
        """Take a message out. Return None when it is not here any more: too late, or answered already."""
        pending = self._by_ticket.pop(ticket, None)
        if pending is None:
            return None
        message = pending.message
        del self.by_id[message.id]
        left = self._per_topic[message.topic] - 1
        if left:
            self._per_topic[message.topic] = left
        else:
            del self._per_topic[message.topic]
        self._bytes -= len(message.data) + message.headers.size_bytes
        return pending

    def next_deadline(self) -> float | None:
        """Return when the first of the messages is too late."""
        ends = self._ends
        while ends and ends[0][1] not in self._by_ticket:
            ends.popleft()
        return ends[0][0] if ends else None

    def expired(self, now: float) -> list[PendingValidation]:
        """Take out the messages that are too late."""
        late: list[PendingValidation] = []
        ends = self._ends
        while ends and ends[0][0] <= now:
            pending = self.finish(ends.popleft()[1])
            if pending is not None:
                late.append(pending)
        return late
