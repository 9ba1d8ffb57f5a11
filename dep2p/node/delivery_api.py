"""Reliable messages of a node: the verbs."""

from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from typing import Any, Literal, overload

from dep2p.delivery.receipts import Receipt
from dep2p.delivery.service import Delivery
from dep2p.delivery.topic_delivery import TopicPublish
from dep2p.messaging.service import Messaging
from dep2p.node.messaging_api import RealmChoice
from dep2p.pubsub.types import WaitFor
from dep2p.types import Headers, PeerId


class DeliveryVerbs(ABC):
    """Each picks the realm and does the rest there."""

    _only_delivery: Delivery | None = None
    """When the node is in just one realm: on every message's way."""

    @abstractmethod
    def messaging(self, realm: RealmChoice = None) -> Messaging: ...

    @abstractmethod
    def delivery(self, realm: RealmChoice = None) -> Delivery: ...

    async def publish_reliably(
        self,
        topic: str,
        data: bytes,
        critical_peers: Sequence[PeerId] | None = None,
        wait_for: WaitFor = "all",
        realm: RealmChoice = None,
    ) -> TopicPublish:
        """Publish without joining the topic; see :meth:`Topic.publish` with ``reliable``."""
        topics = self.delivery(realm).topics
        assert topics is not None  # every realm has pub/sub
        return await topics.publish(topic, data, critical_peers, wait_for, wait=True)

    @overload
    def send(
        self,
        peer: PeerId,
        name: str,
        data: bytes,
        *,
        reliable: Literal[True],
        headers: Headers | None = None,
        wait: bool = True,
        realm: RealmChoice = None,
    ) -> Coroutine[Any, Any, Receipt]: ...

    @overload
    def send(
        self,
        peer: PeerId,
        name: str,
        data: bytes,
        *,
        reliable: Literal[False] = False,
        headers: Headers | None = None,
        wait: bool = True,
        realm: RealmChoice = None,
    ) -> Coroutine[Any, Any, None]: ...

    def send(
        self,
        peer: PeerId,
        name: str,
        data: bytes,
        *,
        reliable: bool = False,
        headers: Headers | None = None,
        wait: bool = True,
        realm: RealmChoice = None,
    ) -> Coroutine[Any, Any, Receipt | None]:
        """Send to the handler of notifies ``name``; ``reliable``: it is taken once, or the receipt says why not.

        See :meth:`Delivery.send`, and :meth:`Messaging.notify` for what is not reliable.
        """
        if reliable:
            delivery = self._only_delivery if realm is None else None
            return (delivery or self.delivery(realm)).send(peer, name, data, headers=headers, wait=wait)
        return self.messaging(realm).notify(peer, name, data, headers=headers)
