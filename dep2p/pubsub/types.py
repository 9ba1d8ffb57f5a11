"""The types that apps and pub/sub exchange."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from dep2p.gossipsub.events import Verdict
from dep2p.types import PeerId, RealmId

OnFull = Literal["drop_oldest", "drop_newest", "pause"]
"""A full subscription buffer: it drops its oldest messages, refuses the newest, or holds back all peers."""

OnNoPeers = Literal["error", "queue", "ok"]
"""A publish while no peer is subscribed: it raises NoPeersSubscribedError, waits in a queue, or is sent to no peer."""


@dataclass(slots=True)
class PubSubMessage:
    """A message of a topic."""

    topic: str
    body: bytes
    sender: PeerId | None
    """The author, whose signature holds; None on a network that does not sign."""
    seqno: int | None
    """The author's number for the message, which rises; None on a network that does not sign."""
    id: bytes
    received_from: PeerId | None
    """The neighbour that sent the first copy; None for a message that was published on this very node."""


@dataclass(frozen=True, slots=True)
class Lagged:
    """A gap: so many messages were dropped here, because the subscription's buffer was full."""

    count: int


@dataclass(frozen=True, slots=True)
class PublishResult:
    """The outcome of a publish."""

    id: bytes
    """The message's id, as receivers see it."""
    sent_to: tuple[PeerId, ...]
    """The neighbours whose queues took the message; they forward it to others."""
    queued: bool
    """Whether it waits for a first peer. It is sent later, or dropped and counted after ``pending_publish_ttl_s``."""
    dropped: tuple[PeerId, ...]
    """Neighbours that did not get it: their queues were full, and they are too slow."""
    seqno: int | None = None
    """This node's number for the message, which rises; None on a network that does not sign."""
    local_subscriptions: int = 0
    """Subscriptions of this very node that it was given to."""


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

TopicValidator = Callable[[PubSubMessage], ValidatorVerdict] | Callable[[PubSubMessage], Awaitable[ValidatorVerdict]]
"""Judges a message of others before it is delivered and forwarded. An exception means IGNORE, and is logged."""

WaitFor = Literal["all", "any"]
"""The critical peers that must acknowledge a reliable publish."""


class ReliablePublish(Protocol):
    """A reliable publish: the result of pub/sub, and the acknowledgements."""

    @property
    def result(self) -> PublishResult:
        """The outcome of its publish over pub/sub."""
        ...

    @property
    def acknowledged_by(self) -> tuple[PeerId, ...]:
        """The critical peers whose app has handled it so far."""
        ...

    @property
    def missing(self) -> dict[PeerId, str]:
        """The critical peers that have not handled it, each with its state or the reason of its failure."""
        ...

    async def wait(self) -> None:
        """Wait until all (or any) of them have. Raises DeliveryFailedError when that is not possible any more."""
        ...


class ReliableTopics(Protocol):
    """Reliable publishing, as topics use it."""

    async def publish(
        self,
        topic: str,
        body: bytes,
        critical_peers: Sequence[PeerId] | None,
        wait_for: WaitFor,
        wait: bool,
        *,
        origin: object | None = None,
    ) -> ReliablePublish:
        """``origin``: the handle that publishes; its own subscriptions do not hear it."""
        ...
