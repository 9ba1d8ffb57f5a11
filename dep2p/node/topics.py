"""The node's methods about topics that need no handle of one."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from dep2p.arguments import checks_arguments
from dep2p.control_api.replies import RealmSummary, TopicPeers, TopicSummary
from dep2p.delivery.receipts import TopicPublish
from dep2p.delivery.service import ReliableDelivery
from dep2p.gossipsub.patterns import has_wildcard
from dep2p.gossipsub.topic_types import (
    BUFFER_BYTES,
    BUFFER_ITEMS,
    Acknowledgement,
    OnFull,
    OnNoPeers,
    PublishedMany,
    WaitFor,
)
from dep2p.node.summaries import topic_peers, topic_summaries
from dep2p.pubsub.publish_all import publish_all
from dep2p.pubsub.service import PubSub
from dep2p.pubsub.subscription import Subscription
from dep2p.pubsub.topic import Topic
from dep2p.realm.credentials import RealmChoice
from dep2p.types import Headers, PeerId


class HasTopics(Protocol):
    """The node, as these methods use it."""

    def realms(self) -> list[RealmSummary]: ...
    def pubsub(self, realm: RealmChoice = None, *, public: bool = False) -> PubSub: ...
    def all_pubsubs(self) -> list[PubSub]: ...
    def delivery(self, realm: RealmChoice = None) -> ReliableDelivery: ...
    async def join(self, topic: str, *, realm: RealmChoice = None, public: bool = False) -> Topic: ...


@checks_arguments
class NodeTopics:
    """The part of :class:`dep2p.node.node.Node` about topics."""

    async def publish_from(
        self: HasTopics,
        topic: str,
        messages: AsyncIterator[bytes],
        *,
        on_no_peers: OnNoPeers = "error",
        headers: Headers | None = None,
        realm: RealmChoice = None,
        public: bool = False,
    ) -> PublishedMany:
        """Publish messages in order, each as soon as ``messages`` gives it and as fast as they are taken.

        Raises as :meth:`publish`; messages before the one that failed are published then. What ``messages`` raises
        ends the call, too.
        """
        return await publish_all(self.pubsub(realm, public=public), topic, messages, on_no_peers, headers)

    @asynccontextmanager
    async def subscribe(
        self: HasTopics,
        topic: str,
        *,
        buffer_items: int = BUFFER_ITEMS,
        buffer_bytes: int = BUFFER_BYTES,
        on_full: OnFull = "drop_oldest",
        group: str | None = None,
        realm: RealmChoice = None,
        public: bool = False,
    ) -> AsyncGenerator[Subscription, None]:
        """Join a topic and read it while the block runs; see :meth:`Topic.subscribe`. Raises NotInRealmError,
        TooManyTopicsError.

        Of a pattern (``sensors.*.temp``, ``sensors.>``), in a realm, those of every topic that matches, also of topics
        that come later; a :class:`MatchedTopicsFull` item says that more match than the node may be in.
        """
        if has_wildcard(topic):
            if public:
                raise ValueError(
                    f"{topic[:80]!r} is a pattern: patterns match topics of realms. join(…) takes it as a name"
                )
            async with self.pubsub(realm).subscribe_pattern(
                topic, buffer_items=buffer_items, buffer_bytes=buffer_bytes, on_full=on_full, group=group
            ) as matching:
                yield matching
            return
        async with (
            await self.join(topic, realm=realm, public=public) as joined,
            joined.subscribe(
                buffer_items=buffer_items, buffer_bytes=buffer_bytes, on_full=on_full, group=group
            ) as messages,
        ):
            yield messages

    def topics(self: HasTopics) -> list[TopicSummary]:
        """The joined topics, in counts: those of all realms, then those of the public network."""
        names = {realm.realm_id: realm.name for realm in self.realms()}
        return [
            each
            for pubsub in self.all_pubsubs()
            for each in topic_summaries(pubsub, None if pubsub.realm_id is None else names.get(pubsub.realm_id, ""))
        ]

    def topic_peers(self: HasTopics, topic: str, *, realm: RealmChoice = None, public: bool = False) -> TopicPeers:
        """The neighbours that are in a topic, those in the mesh, and their scores.

        Raises TopicNotFoundError when neither this node nor a neighbour is in it.
        """
        return topic_peers(self.pubsub(realm, public=public), topic)

    async def publish_reliably(
        self: HasTopics,
        topic: str,
        body: bytes,
        *,
        critical_peers: Sequence[PeerId] | None = None,
        wait_for: WaitFor = "all",
        ttl_s: float | None = None,
        headers: Headers | None = None,
        realm: RealmChoice = None,
    ) -> TopicPublish:
        """Publish without joining the topic; see :meth:`Topic.publish` with ``reliable``."""
        topics = self.delivery(realm).topics
        assert topics is not None  # every realm has pub/sub
        by = Acknowledgement(critical_peers, wait_for, ttl_s)
        return await topics.publish(topic, body, by, wait=True, headers=headers)
