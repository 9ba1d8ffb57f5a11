"""Fanout: who gets our publishes to a topic that we have not joined."""

from collections.abc import Callable

from dep2p.gossipsub.gossip.gossip import Gossip
from dep2p.gossipsub.random_choice import sample
from dep2p.gossipsub.state.router_state import PeerState, RouterState, TopicState
from dep2p.types import PeerId


def _imply_nothing(_topic: TopicState, _now: float) -> None:
    """For a router whose subscriptions are not there yet."""


class Fanout:
    """A few peers per topic, kept while it is published to."""

    __slots__ = ("_core", "_gossip", "imply")

    def __init__(self, core: RouterState, gossip: Gossip) -> None:
        self._core = core
        self.imply: Callable[[TopicState, float], None] = _imply_nothing
        """Takes peers whose patterns match a topic for its subscribers."""
        self._gossip = gossip

    def use(self, topic: TopicState, now: float) -> dict[PeerId, PeerState]:
        """The topic's fanout for a publish, filled up when it is thin."""
        topic.fanout_last = now
        if topic.implied != self._core.patterns_version:
            self.imply(topic, now)
        if len(topic.fanout) < self._core.params.d_lo or not topic.fanout:
            self._fill(topic)
        return topic.fanout

    def _fill(self, topic: TopicState) -> None:
        core = self._core
        threshold = core.thresholds.publish
        wanted = max(core.params.d, 1) - len(topic.fanout)
        choices = [
            state
            for peer, state in topic.peers.items()
            if peer not in topic.fanout
            and state.writable
            and state.is_gossip
            and not state.direct
            and state.stats.score >= threshold
        ]
        for state in sample(choices, wanted, core.rng):
            topic.fanout[state.peer] = state

    def maintain(self, topic: TopicState, now: float) -> None:
        """The heartbeat: forget it when it is not used, else keep it full and tell others of its messages."""
        core = self._core
        last = topic.fanout_last
        if last is None:
            return
        if now - last > core.params.fanout_ttl_s:
            topic.fanout = {}
            topic.fanout_last = None
            core.release(topic)
            return
        threshold = core.thresholds.publish
        for state in [state for state in topic.fanout.values() if state.stats.score < threshold]:
            del topic.fanout[state.peer]
        if len(topic.fanout) < core.params.d:
            self._fill(topic)
        self._gossip.emit(topic, topic.fanout)
