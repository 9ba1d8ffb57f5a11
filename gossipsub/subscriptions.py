"""Subscriptions of peers, filtered and capped; ours, announced."""

import re
from collections.abc import Callable

from dep2p.gossipsub.effects import Lane
from dep2p.gossipsub.mesh import Mesh
from dep2p.gossipsub.rpc import Rpc, Subscription
from dep2p.gossipsub.state import Core, PeerState, TopicState
from dep2p.types import PeerId

SubscriptionFilter = Callable[[str], bool]
"""Whether peers' subscriptions to a topic are of interest."""


def allow_topics(*names: str) -> SubscriptionFilter:
    """Only these topics."""
    allowed = frozenset(names)
    return lambda topic: topic in allowed


def allow_pattern(pattern: str) -> SubscriptionFilter:
    """Only topics that match the whole regular expression. Keep it simple: peers choose what it is run on."""
    matches = re.compile(pattern).fullmatch
    return lambda topic: matches(topic) is not None


class Subscriptions:
    """Who is subscribed to what."""

    __slots__ = ("_core", "_filter", "_mesh", "_on_reachable")

    def __init__(
        self,
        core: Core,
        mesh: Mesh,
        subscription_filter: SubscriptionFilter | None,
        on_reachable: Callable[[TopicState, float], None],
    ) -> None:
        self._core = core
        self._mesh = mesh
        self._filter = subscription_filter
        self._on_reachable = on_reachable
        """Called when a topic has got a peer that can be sent to."""

    def on_subscriptions(self, state: PeerState, items: tuple[Subscription, ...], now: float) -> None:
        """A peer tells of its interest; the last word on a topic in one RPC counts."""
        last = {item.topic: item.subscribe for item in items}
        for name, subscribe in last.items():
            if subscribe:
                self._subscribe(state, name, now)
            else:
                self.unsubscribe(state, name)

    def _subscribe(self, state: PeerState, name: str, now: float) -> None:
        core = self._core
        params = core.params
        if name in state.topics:
            return
        size = len(name.encode("utf-8", "surrogatepass"))
        if self._filter is not None and not self._filter(name):
            core.count("drop: subscription filtered")
            return
        if (
            size > params.topic_bytes_max
            or len(state.topics) >= params.topics_per_peer_max
            or state.topic_bytes + size > params.topic_bytes_per_peer_max
        ):
            core.count("drop: subscription over the cap")
            return
        topic = core.topic(name)
        topic.peers[state.peer] = state
        state.topics[name] = topic
        state.topic_bytes += size
        if state.writable:
            self.reachable(topic, state, now)

    def reachable(self, topic: TopicState, state: PeerState, now: float) -> None:
        """A subscriber can be sent to from now on."""
        self._core.attach_extra(topic, state)
        self._mesh.greet(topic, state, now)
        self._on_reachable(topic, now)

    def unsubscribe(self, state: PeerState, name: str) -> None:
        """A peer left a topic: nothing of it stays."""
        core = self._core
        topic = state.topics.pop(name, None)
        if topic is None:
            # It may be in the mesh without a subscription, by a graft that came first.
            topic = core.topics.get(name)
            if topic is not None:
                core.detach(topic, state)
            return
        state.topic_bytes -= len(name.encode("utf-8", "surrogatepass"))
        del topic.peers[state.peer]
        core.detach(topic, state)
        core.release(topic)

    def forget(self, state: PeerState) -> None:
        """The peer is gone."""
        for name in list(state.topics):
            self.unsubscribe(state, name)
        for topic in self._core.topics.values():
            self._core.detach(topic, state)

    def announce(self, name: str, *, subscribe: bool) -> None:
        """Tell everybody that we joined or left a topic."""
        peers = tuple(peer for peer, state in self._core.peers.items() if state.writable)
        if peers:
            self._core.out.send(peers, Rpc(subscriptions=(Subscription(name, subscribe),)), Lane.CONTROL)

    def hello(self, peer: PeerId) -> None:
        """Tell one peer of everything that we joined."""
        joined = tuple(Subscription(topic.name, True) for topic in self._core.topics.values() if topic.joined)
        if joined:
            self._core.out.send((peer,), Rpc(subscriptions=joined), Lane.CONTROL)

    def say_unsubscribed(self, peer: PeerId, name: str) -> None:
        """Tell one peer again that we left a topic, unless we are back in it."""
        topic = self._core.topics.get(name)
        if topic is None or not topic.joined:
            self._core.out.send((peer,), Rpc(subscriptions=(Subscription(name, False),)), Lane.CONTROL)
