"""What pub/sub gives to apps and takes from them."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from dep2p.gossipsub.events import Verdict
from dep2p.types import PeerId, RealmId

OnFull = Literal["drop_oldest", "drop_newest", "pause"]
"""What a full subscription buffer does: forget its oldest messages, refuse the newest, or hold back all peers."""

OnNoPeers = Literal["error", "queue", "ok"]
"""What a publish does while nobody is subscribed: raise NoPeersSubscribedError, wait in a queue, or go to nobody."""


@dataclass(slots=True)
class Message:
    """A message of a topic."""

    topic: str
    data: bytes
    sender: PeerId | None
    """Its author, whose signature holds; None on a network that does not sign."""
    seqno: int | None
    """Grows with each message of its author; None on a network that does not sign."""
    id: bytes
    received_from: PeerId | None
    """The neighbour that sent the first copy; None for this node's own message."""


@dataclass(frozen=True, slots=True)
class Lagged:
    """A gap: so many messages were dropped here, because the subscription's buffer was full."""

    count: int


@dataclass(frozen=True, slots=True)
class PublishResult:
    """What happened to a publish."""

    id: bytes
    """The message's id, as receivers see it."""
    sent_to: tuple[PeerId, ...]
    """The neighbours whose queues took it; they carry it on to the others."""
    queued: bool
    """It waits for a first peer; sent later, or dropped and counted after ``pending_publish_ttl_s``."""
    dropped: tuple[PeerId, ...]
    """Neighbours that did not get it: their queues were full, and they are too slow to be waited for."""
    seqno: int | None = None
    """Grows with each message of this node; None on a network that does not sign."""


@dataclass(frozen=True, slots=True)
class TopicStatus:
    """A joined topic at this moment."""

    name: str
    realm_id: RealmId | None
    """None on the public network."""
    peers: int
    """Neighbours that are subscribed."""
    mesh: int
    subscriptions: int
    """Open subscriptions on this node."""
    buffered_items: int
    """Messages that wait in their buffers."""


ValidatorVerdict = Verdict | bool | None
"""True and None accept, False rejects."""

TopicValidator = Callable[[Message], ValidatorVerdict] | Callable[[Message], Awaitable[ValidatorVerdict]]
"""Judges a message of others before it is delivered and forwarded. An exception means IGNORE, and is logged."""

WaitFor = Literal["all", "any"]
"""Which of the critical peers must acknowledge a reliable publish."""


class ReliablePublish(Protocol):
    """A reliable publish: what pub/sub did with it, and the acknowledgements."""

    @property
    def result(self) -> PublishResult:
        """What pub/sub did with it."""
        ...

    @property
    def acknowledged_by(self) -> tuple[PeerId, ...]:
        """The critical peers whose app has handled it so far."""
        ...

    @property
    def missing(self) -> dict[PeerId, str]:
        """The critical peers that have not, each with its state or the reason of its failure."""
        ...

    async def wait(self) -> None:
        """Until all (or any) of them have. Raises DeliveryFailedError when that cannot be any more."""
        ...


class ReliableTopics(Protocol):
    """What makes publishes reliable."""

    async def publish(
        self, topic: str, data: bytes, critical_peers: Sequence[PeerId] | None, wait_for: WaitFor, wait: bool
    ) -> ReliablePublish: ...
