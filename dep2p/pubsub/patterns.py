"""Subscriptions to patterns: one subscription gets the messages of every topic that its pattern matches."""

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Final, Protocol

import trio

from dep2p.gossipsub.events import Event, JoinMatching, LeaveMatching
from dep2p.gossipsub.patterns import PatternSet, pattern_tokens
from dep2p.gossipsub.topic_types import OnFull, TopicMessage
from dep2p.protocols.realm.statement import TopicGroup
from dep2p.pubsub.subscription import Subscription
from dep2p.pubsub.topic import SharedTopic, group_of
from dep2p.types import RealmId

logger: logging.Logger = logging.getLogger("dep2p.io")

_SAY_INTERVAL_S: Final = 60.0


class MatchingNetwork(Protocol):
    """A network's pub/sub, as its pattern subscriptions use it."""

    @property
    def topics_by_name(self) -> Mapping[str, SharedTopic]:
        """The joined topics."""
        ...

    def handle(self, event: Event) -> None: ...
    def hold(self, who: object) -> None: ...
    def release(self, who: object) -> None: ...
    def message_handled(self, message: TopicMessage) -> None: ...
    @property
    def realm_id(self) -> RealmId | None: ...
    def join_group(self, group: TopicGroup) -> None: ...
    def leave_group(self, group: TopicGroup) -> None: ...
    def subscription_opened(self, topic: str) -> None: ...
    def count_lagged(self, policy: OnFull) -> None: ...


class PatternSubscriptions:
    """All of one network. The router joins the topics; here the subscriptions are attached to them."""

    def __init__(self, pubsub: MatchingNetwork, counters: Counter[str], topics_max: int) -> None:
        self._pubsub = pubsub
        self._counters = counters
        self._topics_max = topics_max
        self._by_pattern: dict[str, dict[Subscription, None]] = {}
        self._index: PatternSet[dict[Subscription, None]] = PatternSet()
        self._is_over = False
        self._say_at_s = float("-inf")
        self._not_said = 0

    def __len__(self) -> int:
        return len(self._by_pattern)

    def make(
        self, pattern: str, buffer_items: int, buffer_bytes: int, on_full: OnFull, group: str | None
    ) -> Subscription:
        """Make a subscription, which begins when it is entered. Raises ``ValueError``."""
        pattern_tokens(pattern)
        named = None if group is None else group_of(pattern, group, self._pubsub.realm_id)
        owner = _PatternOwner(self, self._pubsub, pattern)
        return Subscription(owner, buffer_items, buffer_bytes, on_full, group=named)

    def matches(self, topic: str) -> bool:
        """Whether an open subscription's pattern matches a topic."""
        return bool(self._index.match(topic))

    def attach(self, topic: SharedTopic) -> None:
        """Give a topic that was just joined to the subscriptions whose patterns match it."""
        matching = self._index.match(topic.name)
        for subscriptions in matching:
            for subscription in subscriptions:
                topic.matched_subscriptions[subscription] = None
                topic.add(subscription)
        if matching:
            self._pubsub.subscription_opened(topic.name)

    def open(self, pattern: str, subscription: Subscription) -> None:
        """Begin a subscription. Raises ``ValueError``, TooManyTopicsError."""
        subscriptions = self._by_pattern.get(pattern)
        if subscriptions is None:
            tokens = pattern_tokens(pattern)
            subscriptions = self._by_pattern[pattern] = {}
            self._index.add(tokens, subscriptions)
            subscriptions[subscription] = None
            try:
                self._pubsub.handle(JoinMatching(pattern))
            except BaseException:
                self._forget(pattern)
                raise
        subscriptions[subscription] = None
        only: PatternSet[None] = PatternSet()
        only.add(pattern_tokens(pattern), None)
        for topic in list(self._pubsub.topics_by_name.values()):
            if subscription not in topic.subscriptions and only.match(topic.name) == [None]:
                topic.matched_subscriptions[subscription] = None
                topic.add(subscription)
                self._pubsub.subscription_opened(topic.name)

    def close(self, pattern: str, subscription: Subscription) -> None:
        """End a subscription; the last one of a pattern leaves its topics."""
        for topic in self._pubsub.topics_by_name.values():
            topic.remove(subscription)
            topic.matched_subscriptions.pop(subscription, None)
        subscriptions = self._by_pattern.get(pattern)
        if subscriptions is None or subscriptions.pop(subscription, subscription) is subscription:
            return
        if not subscriptions:
            self._forget(pattern)
            if not self._is_over:
                self._pubsub.handle(LeaveMatching(pattern))

    def _forget(self, pattern: str) -> None:
        del self._by_pattern[pattern]
        self._index.remove(pattern_tokens(pattern))

    def not_joined(self, count: int) -> None:
        """Say that further topics match and are not joined."""
        self._counters["matching_topics_not_joined"] += count
        for subscriptions in self._by_pattern.values():
            for subscription in subscriptions:
                subscription.put_topics_full(count, self._topics_max)
        self._not_said += count
        now = trio.current_time()
        if now >= self._say_at_s:
            self._say_at_s = now + _SAY_INTERVAL_S
            logger.warning(
                "%d more topics match the patterns of this node, which is in at most %d for all patterns together: it "
                "has not joined them. pubsub_matched_topics_max in [limits] raises that; said once in %.0f s",
                self._not_said,
                self._topics_max,
                _SAY_INTERVAL_S,
            )
            self._not_said = 0

    def end(self) -> None:
        """End all: the network was left."""
        self._is_over = True
        for subscriptions in list(self._by_pattern.values()):
            for subscription in list(subscriptions):
                subscription.close()

    def patterns(self) -> list[str]:
        """The patterns of open subscriptions."""
        return list(self._by_pattern)


class _PatternOwner:
    """A pattern, as its subscription uses it."""

    def __init__(self, patterns: PatternSubscriptions, pubsub: MatchingNetwork, pattern: str) -> None:
        self._patterns = patterns
        self._pubsub = pubsub
        self._pattern = pattern

    def open_subscription(self, subscription: Subscription) -> None:
        if subscription.group is not None:
            self._pubsub.join_group(subscription.group)
        try:
            self._patterns.open(self._pattern, subscription)
        except BaseException:
            if subscription.group is not None:
                self._pubsub.leave_group(subscription.group)
            raise

    def close_subscription(self, subscription: Subscription) -> None:
        self._patterns.close(self._pattern, subscription)
        if subscription.group is not None:
            self._pubsub.leave_group(subscription.group)

    def subscription_full(self, subscription: Subscription) -> None:
        self._pubsub.hold(subscription)

    def subscription_low(self, subscription: Subscription) -> None:
        self._pubsub.release(subscription)

    def message_handled(self, message: TopicMessage) -> None:
        self._pubsub.message_handled(message)

    def count_lagged(self, policy: OnFull) -> None:
        self._pubsub.count_lagged(policy)
