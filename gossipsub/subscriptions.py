"""The subscriptions of peers, filtered and capped, and the announcement of this node's own."""

from collections.abc import Callable
from typing import Final

from dep2p.gossipsub.effects import Lane
from dep2p.gossipsub.events import StreamAccepted
from dep2p.gossipsub.mesh.mesh import Mesh
from dep2p.gossipsub.options import SubscriptionFilter
from dep2p.gossipsub.rpc import Rpc, SubscriptionChange
from dep2p.gossipsub.state.router_state import PeerState, RouterState, TopicState
from dep2p.types import PeerId

STALE_TICKS: Final = 3
"""Heartbeats within which a peer has to repeat its subscriptions on a new stream. One is not enough: a full queue
delays them."""
UNHEARD_LEAVES_MAX: Final = 256


def allow_topics(*names: str) -> SubscriptionFilter:
    """Make a filter that takes only these topics."""
    allowed = frozenset(names)
    return lambda topic: topic in allowed


class Subscriptions:
    """The subscriptions of all peers, and our own."""

    __slots__ = ("_core", "_filter", "_mesh", "_on_reachable")

    def __init__(
        self,
        core: RouterState,
        mesh: Mesh,
        subscription_filter: SubscriptionFilter | None,
        on_reachable: Callable[[TopicState, float], None],
    ) -> None:
        self._core = core
        self._mesh = mesh
        self._filter = subscription_filter
        self._on_reachable = on_reachable
        """Called when a topic has got a peer that can be sent to."""

    def on_subscriptions(self, state: PeerState, items: tuple[SubscriptionChange, ...], now: float) -> None:
        """Take a peer's subscriptions and unsubscriptions; the last word on a topic in one RPC counts."""
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
            self._renew(state, name)
            return
        if state.stale and state.stale_tick is None:
            self._doubt(state)
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
        if name in state.early_grafts:
            del state.early_grafts[name]
            self._mesh.on_graft(state, (name,), now)
        if state.writable:
            self.reachable(topic, state, now)

    def on_stream_accepted(self, event: StreamAccepted) -> None:
        """Doubt a peer's earlier subscriptions, since it opened a new stream: a restarted one may be in fewer topics,
        and its mesh is empty."""
        state = self._core.peers.get(event.peer)
        if state is None or not state.topics:
            return
        state.stale = dict.fromkeys(state.topics)
        state.stale_tick = None
        if event.says_hello:
            self._doubt(state)

    def _doubt(self, state: PeerState) -> None:
        core = self._core
        state.stale_tick = core.tick + STALE_TICKS
        core.busy[state.peer] = state

    def _renew(self, state: PeerState, name: str) -> None:
        """Take a known subscription that is said again on a new stream: the peer may not have us in its mesh any
        more."""
        if name not in state.stale:
            return
        if state.stale_tick is None:
            self._doubt(state)
        del state.stale[name]
        topic = state.topics[name]
        if state.writable and state.peer in topic.mesh:
            self._core.out.graft(state.peer, name)

    def sweep_stale(self, state: PeerState) -> None:
        """End the subscriptions that a new stream did not repeat in time. Runs at the heartbeat."""
        if state.stale_tick is None or self._core.tick < state.stale_tick:
            return
        stale, state.stale, state.stale_tick = state.stale, {}, None
        for name in stale:
            self._core.count("subscription ended by a new stream")
            self.unsubscribe(state, name)

    def reachable(self, topic: TopicState, state: PeerState, now: float) -> None:
        """Note that messages can be sent to a subscriber from now on."""
        self._core.attach_extra(topic, state)
        self._mesh.greet(topic, state, now)
        self._on_reachable(topic, now)

    def unsubscribe(self, state: PeerState, name: str) -> None:
        """Forget everything about a peer's subscription to a topic that it left."""
        core = self._core
        topic = state.topics.pop(name, None)
        state.early_grafts.pop(name, None)
        state.stale.pop(name, None)
        if topic is None:
            return
        state.topic_bytes -= len(name.encode("utf-8", "surrogatepass"))
        del topic.peers[state.peer]
        core.detach(topic, state)
        core.release(topic)

    def forget(self, state: PeerState) -> None:
        """Forget the subscriptions of a peer that is gone."""
        for name in list(state.topics):
            self.unsubscribe(state, name)
        for topic in self._core.topics.values():
            self._core.detach(topic, state)

    def announce(self, name: str, *, subscribe: bool) -> None:
        """Announce to every peer that we joined or left a topic."""
        peers: list[PeerId] = []
        for peer, state in self._core.peers.items():
            state.unheard_leaves.pop(name, None)
            if state.writable:
                peers.append(peer)
            elif not subscribe and len(state.unheard_leaves) < UNHEARD_LEAVES_MAX:
                state.unheard_leaves[name] = None
        if peers:
            self._core.out.send(tuple(peers), Rpc(subscriptions=(SubscriptionChange(name, subscribe),)), Lane.CONTROL)

    def hello(self, state: PeerState) -> None:
        """Tell one peer of everything that we joined, and of what we left while it could not hear it."""
        said = [SubscriptionChange(topic.name, True) for topic in self._core.topics.values() if topic.joined]
        said += [SubscriptionChange(name, False) for name in state.unheard_leaves]
        state.unheard_leaves.clear()
        if said:
            self._core.out.send((state.peer,), Rpc(subscriptions=tuple(said)), Lane.CONTROL)

    def say_unsubscribed(self, peer: PeerId, name: str) -> None:
        """Tell one peer again that we left a topic, unless we are back in it."""
        topic = self._core.topics.get(name)
        if topic is None or not topic.joined:
            self._core.out.send((peer,), Rpc(subscriptions=(SubscriptionChange(name, False),)), Lane.CONTROL)
