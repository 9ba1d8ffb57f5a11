"""The subscriptions of peers, filtered and capped, and the announcement of this node's own."""

from collections.abc import Callable
from typing import Final

from dep2p.errors import TooManyTopicsError
from dep2p.gossipsub.effects import Lane, TopicMatched, TopicsNotJoined, TopicUnmatched
from dep2p.gossipsub.events import StreamAccepted
from dep2p.gossipsub.mesh.mesh import Mesh
from dep2p.gossipsub.options import SubscriptionFilter
from dep2p.gossipsub.patterns import has_wildcard, pattern_tokens
from dep2p.gossipsub.rpc import Prune, Rpc, SubscriptionChange
from dep2p.gossipsub.state.router_state import PeerState, RouterState, TopicState
from dep2p.gossipsub.topic_names import check_topic_length
from dep2p.gossipsub.tracing.libp2p_events import JoinTopic, LeaveTopic
from dep2p.types import PeerId

STALE_TICKS: Final = 3
"""Heartbeats within which a peer has to repeat its subscriptions on a new stream. One is not enough: a full queue
delays them."""
UNHEARD_LEAVES_MAX: Final = 256
PATTERNS_PER_PEER_MAX: Final = 32
"""Patterns of one peer, and of this node: each topic is compared with all of them."""
DECLINED_MAX: Final = 256
"""Topics that one peer declines, and those that this node declines to one peer in a heartbeat."""


def allow_topics(*names: str) -> SubscriptionFilter:
    """Make a filter that takes only these topics."""
    allowed = frozenset(names)
    return lambda topic: topic in allowed


class Subscriptions:
    """The subscriptions of all peers, and our own."""

    __slots__ = ("_core", "_filter", "_mesh", "_on_pattern", "_on_reachable")

    def __init__(
        self,
        core: RouterState,
        mesh: Mesh,
        subscription_filter: SubscriptionFilter | None,
        on_reachable: Callable[[TopicState, float], None],
        on_pattern: Callable[[float], None],
    ) -> None:
        self._core = core
        self._mesh = mesh
        self._filter = subscription_filter
        self._on_reachable = on_reachable
        """Called when a topic has got a peer that can be sent to."""
        self._on_pattern = on_pattern
        """Called when a pattern has got one."""

    def on_subscriptions(self, state: PeerState, items: tuple[SubscriptionChange, ...], now: float) -> None:
        """Take a peer's subscriptions and unsubscriptions; the last word on a topic in one RPC counts."""
        last = {item.topic: item.subscribe for item in items}
        for name, subscribe in last.items():
            if subscribe:
                self._subscribe(state, name, now)
            else:
                self.unsubscribe(state, name)

    def _subscribe(self, state: PeerState, name: str, now: float, *, is_implied: bool = False) -> None:
        core = self._core
        params = core.params
        if name in state.topics:
            self._renew(state, name)
            return
        if core.has_patterns and has_wildcard(name) and not self._may_hold(state, name):
            core.count("drop: subscription to a pattern")
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
        if not is_implied and topic.pattern is None and not topic.joined and len(core.own_patterns):
            self.appear(name, state.peer, now)

    def _may_hold(self, state: PeerState, pattern: str) -> bool:
        """Whether a name with wildcards is a pattern, and the peer has room for one."""
        try:
            pattern_tokens(pattern)
        except ValueError:
            return False
        return sum(topic.pattern is not None for topic in state.topics.values()) < PATTERNS_PER_PEER_MAX

    # Patterns --------------------------------------------------------------------------------------------------------

    def imply(self, topic: TopicState, now: float) -> None:
        """Take the peers whose patterns match a topic for its subscribers. They join it when something of it comes."""
        core = self._core
        topic.implied = core.patterns_version
        for pattern in core.patterns.match(topic.name):
            for peer, state in list(pattern.peers.items()):
                if peer not in topic.peers and state.writable and state.declined.get(topic.name, 0.0) <= now:
                    self._subscribe(state, topic.name, now, is_implied=True)

    def would_take(self, name: str) -> list[PeerId]:
        """The peers whose patterns match a topic."""
        return list(dict.fromkeys(peer for pattern in self._core.patterns.match(name) for peer in pattern.peers))

    def on_declined(self, state: PeerState, prunes: tuple[Prune, ...], now: float) -> None:
        """Note topics that a peer does not take although its pattern matches: it prunes them without being in them."""
        core = self._core
        for prune in prunes:
            if prune.topic not in state.topics and state.peer in self.would_take(prune.topic):
                if len(state.declined) >= DECLINED_MAX:
                    del state.declined[next(iter(state.declined))]
                state.declined[prune.topic] = now + min(float(prune.backoff_s), core.params.backoff_max_s)

    def appear(self, name: str, peer: PeerId, now: float) -> TopicState | None:
        """Join a topic that is there, if a pattern of this node matches its name and it has a place. ``peer``: who
        brought it up. Return it, or None."""
        core = self._core
        if has_wildcard(name) or not core.own_patterns.match(name):
            return None
        if not core.matched.add(name, peer):
            core.count("drop: topic over the pattern limit")
            self._decline(name, peer)
            return None
        topic = core.topic(name)
        topic.joined = topic.delivers = True
        topic.used_tick = core.tick
        if core.tracing:
            core.out.effects.append(JoinTopic(name))
        core.out.effects.append(TopicMatched(name))
        self.announce(name, subscribe=True)
        self._mesh.join(topic, now)
        return topic

    def _decline(self, name: str, peer: PeerId) -> None:
        """Tell a peer that this node does not take a topic for now; a bounded number in a heartbeat."""
        state = self._core.peers.get(peer)
        if state is None or not state.writable or name in state.pruned_topics:
            return
        if len(state.pruned_topics) >= DECLINED_MAX:
            self._core.count("drop: answer to a flood of topics")
            return
        state.pruned_topics[name] = None
        self._core.busy[peer] = state
        backoff_s = int(self._core.params.prune_backoff_s)
        rpc = Rpc(subscriptions=(SubscriptionChange(name, False),), prune=(Prune(name, backoff_s),))
        self._core.out.send((peer,), rpc, Lane.CONTROL)

    def join_matching(self, pattern: str, now: float) -> None:
        """Begin a pattern of this node. Raises ``ValueError``, and TooManyTopicsError above 32 patterns."""
        core = self._core
        check_topic_length(pattern, core.params.topic_bytes_max)
        tokens = pattern_tokens(pattern)
        if not core.has_patterns:
            raise ValueError(f"{pattern[:80]!r}: topics of this network have no patterns")
        known = core.topics.get(pattern)
        if known is not None and known.is_own_pattern:
            return
        if len(core.own_patterns) >= PATTERNS_PER_PEER_MAX:
            raise TooManyTopicsError(f"this node has {PATTERNS_PER_PEER_MAX} patterns already: end one")
        core.own_patterns.add(tokens, pattern)
        core.topic(pattern).is_own_pattern = True
        self.announce(pattern, subscribe=True)
        for topic in list(core.topics.values()):
            if topic.peers and topic.pattern is None and not topic.joined:
                self.appear(topic.name, next(iter(topic.peers)), now)

    def leave_matching(self, pattern: str) -> None:
        """End a pattern of this node, and leave the topics that only it matched."""
        core = self._core
        topic = core.topics.get(pattern)
        if topic is None or not topic.is_own_pattern:
            return
        topic.is_own_pattern = False
        core.own_patterns.remove(pattern_tokens(pattern))
        self.announce(pattern, subscribe=False)
        core.release(topic)
        for name in core.matched.names():
            if not core.own_patterns.match(name):
                self._leave_matched(core.topics[name])

    def tend_matched(self) -> None:
        """Leave topics that only patterns hold and that had no message for long. Runs at the heartbeat."""
        core = self._core
        for name in core.matched.names():
            topic = core.topics[name]
            if core.mcache.gossip_ids(name):
                topic.used_tick = core.tick
            elif core.tick - topic.used_tick >= core.params.matched_topic_idle_ticks:
                takers = dict.fromkeys(self.would_take(name))
                if all(peer in takers for peer in topic.peers):
                    self._leave_matched(topic)
        refused = core.matched.take_refused()
        if refused:
            core.out.effects.append(TopicsNotJoined(refused))

    def _leave_matched(self, topic: TopicState) -> None:
        """Without PRUNE: a message that follows brings the node back."""
        core = self._core
        core.matched.remove(topic.name)
        topic.joined = topic.delivers = False
        if core.tracing:
            core.out.effects.append(LeaveTopic(topic.name))
        self.announce(topic.name, subscribe=False)
        for state in list(topic.mesh.values()):
            core.drop_from_mesh(topic, state)
        core.out.effects.append(TopicUnmatched(topic.name))
        core.release(topic)

    # Streams ---------------------------------------------------------------------------------------------------------

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
        if topic.pattern is not None:
            self._core.patterns_version += 1
            self._on_pattern(now)
            return
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
        said = [
            SubscriptionChange(topic.name, True)
            for topic in self._core.topics.values()
            if topic.joined or topic.is_own_pattern
        ]
        said += [SubscriptionChange(name, False) for name in state.unheard_leaves]
        state.unheard_leaves.clear()
        if said:
            self._core.out.send((state.peer,), Rpc(subscriptions=tuple(said)), Lane.CONTROL)

    def say_unsubscribed(self, peer: PeerId, name: str) -> None:
        """Tell one peer again that we left a topic, unless we are back in it."""
        topic = self._core.topics.get(name)
        if topic is None or not (topic.joined or topic.is_own_pattern):
            self._core.out.send((peer,), Rpc(subscriptions=(SubscriptionChange(name, False),)), Lane.CONTROL)
