"""Publish/subscribe without a network, for tests of the control API."""

from collections import Counter
from collections.abc import Mapping

import trio

from dep2p.control_api.replies import TopicSummary
from dep2p.errors import NoPeersSubscribedError, RateLimitedError
from dep2p.gossipsub.headers import message_headers
from dep2p.gossipsub.topic_types import OnFull, OnNoPeers, PublishResult, TopicMessage
from dep2p.protocols.realm.statement import TopicGroup
from dep2p.pubsub.subscription import Subscription
from dep2p.types import PeerId, RealmId


class FakeTopic:
    """A handle of a joined topic; its subscriptions are the library's own."""

    def __init__(self, pubsub: "FakePubSub", name: str) -> None:
        self._pubsub = pubsub
        self.name = name
        self.realm_id = pubsub.realm_id
        self.is_joined = True

    def subscribe(
        self, *, buffer_items: int, buffer_bytes: int, on_full: OnFull, group: str | None = None
    ) -> Subscription:
        named = None if group is None else TopicGroup(self.name, group)
        return Subscription(self._pubsub, buffer_items, buffer_bytes, on_full, group=named)

    async def publish(self, body: bytes, *, wait: bool, on_no_peers: OnNoPeers) -> PublishResult:
        return await self._pubsub.publish(self.name, body, wait=wait, on_no_peers=on_no_peers, origin=self)

    async def leave(self) -> None:
        await trio.lowlevel.checkpoint()
        if self.is_joined:
            self.is_joined = False
            self._pubsub.handles[self.name] -= 1


class FakePubSub:
    """Pub/sub of one realm. The peers are subscribed to every topic but those that start with "empty"."""

    def __init__(self, realm_id: RealmId | None, *subscribed: PeerId) -> None:
        self.realm_id = realm_id
        self._subscribed = subscribed
        self.handles: Counter[str] = Counter()
        self.subscriptions: dict[Subscription, None] = {}
        self.held: list[Subscription] = []
        self.published: list[tuple[str, bytes, OnNoPeers]] = []
        self.published_headers: list[dict[str, object]] = []
        self.let_go = trio.Event()
        self.let_go.set()

    async def publish(
        self,
        topic: str,
        data: bytes,
        *,
        wait: bool,
        on_no_peers: OnNoPeers,
        headers: Mapping[str, object] | None = None,
        origin: object | None = None,
    ) -> PublishResult:
        assert wait
        await trio.lowlevel.checkpoint()
        await self.let_go.wait()
        empty = topic.startswith("empty")
        if empty and on_no_peers == "error":
            raise NoPeersSubscribedError(f"no peer is subscribed to {topic!r}")
        if data == b"too much":
            raise RateLimitedError("slow down", 250)
        self.published.append((topic, data, on_no_peers))
        self.published_headers.append(dict(headers or {}))
        message_id = len(self.published).to_bytes(2, "big")
        return PublishResult(message_id, () if empty else self._subscribed, empty and on_no_peers == "queue", ())

    def has_joined(self, name: str) -> bool:
        return self.handles[name] > 0

    def peers(self, topic: str) -> list[PeerId]:
        return [] if topic.startswith("empty") else list(self._subscribed)

    def mesh(self, topic: str) -> list[PeerId]:
        return self.peers(topic)[:1]

    def scores(self) -> dict[PeerId, float]:
        return {self._subscribed[0]: 1.25, PeerId("somebody else"): -3.0}

    def topics(self, realm: str | None) -> list[TopicSummary]:
        buffered = sum(map(len, self.subscriptions))
        return [
            TopicSummary(
                topic=name,
                realm=realm,
                realm_id=self.realm_id,
                peers=2,
                mesh=1,
                subscriptions=len(self.subscriptions),
                buffered_items=buffered,
            )
            for name, handles in self.handles.items()
            if handles
        ]

    def deliver(
        self, data: bytes, number: int = 1, topic: str = "chat", headers: Mapping[str, object] | None = None
    ) -> None:
        """A message of the first peer, brought by the second, for every subscription."""
        author, via = self._subscribed
        for subscription in list(self.subscriptions):
            message_id = number.to_bytes(2, "big")
            given = message_headers(headers)
            subscription.put(TopicMessage(topic, data, author, number, message_id, via, given, 1_700_000_000.5))

    def open_subscription(self, subscription: Subscription) -> None:
        self.subscriptions[subscription] = None

    def close_subscription(self, subscription: Subscription) -> None:
        self.subscriptions.pop(subscription, None)

    def subscription_full(self, subscription: Subscription) -> None:
        self.held.append(subscription)

    def subscription_low(self, subscription: Subscription) -> None:
        self.held.remove(subscription)

    def message_handled(self, message: TopicMessage) -> None:
        """Nobody waits for it here."""

    def count_lagged(self, policy: OnFull) -> None: ...
