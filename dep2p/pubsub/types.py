"""The types that apps and pub/sub exchange."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from dep2p.gossipsub.events import Verdict
from dep2p.gossipsub.topic_types import Acknowledgement, PublishResult, TopicMessage
from dep2p.protocols.realm.statement import TopicGroup
from dep2p.types import PeerId, RealmId


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
    by_pattern: bool = False
    """Whether the node is in it only because a pattern matches."""


ValidatorVerdict = Verdict | bool | None
"""True and None accept, False rejects."""

TopicValidator = Callable[[TopicMessage], ValidatorVerdict] | Callable[[TopicMessage], Awaitable[ValidatorVerdict]]
"""Judges a message of others before it is delivered and forwarded. An exception means IGNORE, and is logged."""


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


class GroupReaders(Protocol):
    """The groups of a realm's topics, as pub/sub uses them (`dep2p.services.topic_groups`)."""

    def join(self, group: TopicGroup) -> None:
        """Note one more subscription in a group. Raises ``ValueError``."""
        ...

    def leave(self, group: TopicGroup) -> None:
        """Note the end of one subscription in a group."""
        ...

    def is_ours(self, group: TopicGroup, message_id: bytes) -> bool:
        """Whether this node delivers a message to its subscriptions in a group."""
        ...

    def stats(self) -> dict[str, int]:
        """Return the readers of each group that this node reads in."""
        ...


class ReliableTopics(Protocol):
    """Reliable publishing, as topics use it."""

    async def publish(
        self,
        topic: str,
        body: bytes,
        by: Acknowledgement,
        wait: bool,
        *,
        origin: object | None = None,
        headers: Mapping[str, object] | None = None,
    ) -> ReliablePublish:
        """``origin``: the handle that publishes; its own subscriptions do not hear it."""
        ...
