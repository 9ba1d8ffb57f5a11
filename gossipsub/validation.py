"""Messages whose validators are at work: bounded in items and bytes, per topic too, each with a deadline."""

from collections import deque
from typing import Final

from dep2p.gossipsub.params import GossipParams
from dep2p.gossipsub.rpc import Message
from dep2p.types import PeerId

OTHERS_MAX: Final = 64
"""Further senders remembered of one message under validation."""

DIFFERING_MAX: Final = 4
"""Differing copies kept of one message under validation."""


class PendingMessage:
    """A message that waits for its verdict, and who else sent it meanwhile."""

    __slots__ = ("_differing", "deadline", "message", "others", "peer", "ticket")

    def __init__(self, ticket: int, message: Message, peer: PeerId, deadline: float) -> None:
        self.ticket = ticket
        self.message = message
        self.peer = peer
        self.deadline = deadline
        self.others: dict[PeerId, Message | None] = {}
        """Further senders; None for the same copy, else the differing one: if this one is forged, that may be true."""
        self._differing = 0

    def note(self, peer: PeerId, message: Message) -> None:
        """The peer sent a copy too. A few differing ones are kept, of a peer the first."""
        if peer == self.peer or peer in self.others or len(self.others) >= OTHERS_MAX:
            return
        if message == self.message:
            self.others[peer] = None
        elif self._differing < DIFFERING_MAX:
            self._differing += 1
            self.others[peer] = message


class ValidationQueue:
    """What is out for validation. `by_id` is read in the hot path; change it only here."""

    __slots__ = ("_by_ticket", "_bytes", "_ends", "_params", "_per_topic", "_ticket", "by_id")

    def __init__(self, params: GossipParams) -> None:
        self._params = params
        self.by_id: dict[bytes, PendingMessage] = {}
        self._by_ticket: dict[int, PendingMessage] = {}
        self._per_topic: dict[str, int] = {}
        self._bytes = 0
        self._ticket = 0
        self._ends: deque[tuple[float, int]] = deque()

    def __len__(self) -> int:
        return len(self._by_ticket)

    def start(self, message: Message, peer: PeerId, now: float) -> PendingMessage | None:
        """Take a message in; None when there is no room."""
        params = self._params
        size = len(message.data)
        in_topic = self._per_topic.get(message.topic, 0)
        if (
            len(self._by_ticket) >= params.validation_max
            or in_topic >= params.validation_per_topic_max
            or (self._bytes and self._bytes + size > params.validation_bytes_max)
        ):
            return None
        self._ticket += 1
        pending = PendingMessage(self._ticket, message, peer, now + params.validation_timeout_s)
        self.by_id[message.id] = pending
        self._by_ticket[self._ticket] = pending
        self._per_topic[message.topic] = in_topic + 1
        self._bytes += size
        self._ends.append((pending.deadline, self._ticket))
        return pending

    def finish(self, ticket: int) -> PendingMessage | None:
        """Take a message out; None when it is not here any more: too late, or answered already."""
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
        self._bytes -= len(message.data)
        return pending

    def next_deadline(self) -> float | None:
        """When the first of them is too late."""
        ends = self._ends
        while ends and ends[0][1] not in self._by_ticket:
            ends.popleft()
        return ends[0][0] if ends else None

    def expired(self, now: float) -> list[PendingMessage]:
        """Take out those that are too late."""
        late: list[PendingMessage] = []
        ends = self._ends
        while ends and ends[0][0] <= now:
            pending = self.finish(ends.popleft()[1])
            if pending is not None:
                late.append(pending)
        return late
