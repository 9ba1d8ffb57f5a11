"""PublishesToTopics messages while an app gives them, and counts what became of them."""

from collections.abc import AsyncIterator, Mapping
from typing import Protocol

from dep2p.gossipsub.topic_types import OnNoPeers, PublishedMany, PublishResult


class PublishesToTopics(Protocol):
    """The pub/sub of one network."""

    async def publish(
        self, topic: str, body: bytes, /, *, wait: bool, on_no_peers: OnNoPeers, headers: Mapping[str, object] | None
    ) -> PublishResult: ...


class PublishTally:
    """Counts of the messages of one call."""

    def __init__(self) -> None:
        self.messages: int = 0
        self._bytes = 0
        self._queued = 0
        self._dropped = 0
        self._peers = 0
        self._local_subscriptions = 0

    def add(self, body: bytes, result: PublishResult) -> None:
        """Count a message that was published."""
        self.messages += 1
        self._bytes += len(body)
        self._queued += result.queued
        self._dropped += len(result.dropped)
        local = result.local_subscriptions
        self._local_subscriptions = local if self.messages == 1 else min(self._local_subscriptions, local)
        if not result.queued:
            sent_to = len(result.sent_to)
            self._peers = sent_to if self.messages - self._queued == 1 else min(self._peers, sent_to)

    def total(self) -> PublishedMany:
        """The outcome of the call."""
        return PublishedMany(
            self.messages, self._bytes, self._queued, self._dropped, self._peers, self._local_subscriptions
        )


async def publish_all(
    pubsub: PublishesToTopics,
    topic: str,
    messages: AsyncIterator[bytes],
    on_no_peers: OnNoPeers,
    headers: Mapping[str, object] | None,
) -> PublishedMany:
    """Publish messages in order. Raises what `publish` and ``messages`` raise."""
    tally = PublishTally()
    async for body in messages:
        tally.add(body, await pubsub.publish(topic, body, wait=True, on_no_peers=on_no_peers, headers=headers))
    return tally.total()
