"""Peer exchange: who is named in a PRUNE, and whom to dial when we are pruned."""

from dep2p.gossipsub.effects import Dial
from dep2p.gossipsub.events import Version
from dep2p.gossipsub.options import RecordOf
from dep2p.gossipsub.random_choice import sample
from dep2p.gossipsub.rpc import PeerInfo, Prune
from dep2p.gossipsub.state.router_state import PeerState, RouterState, TopicState


class PeerExchange:
    """Offers only peers of good standing; takes only from peers above `accept_px`."""

    __slots__ = ("_core", "_record_of")

    def __init__(self, core: RouterState, record_of: RecordOf) -> None:
        self._core = core
        self._record_of = record_of

    def offer(self, topic: TopicState, to: PeerState) -> tuple[PeerInfo, ...]:
        """Peers of the topic to name to a peer that we prune for want of room."""
        core = self._core
        if not core.params.px_send or to.version < Version.V1_1 or to.stats.score < 0:
            return ()
        candidates = [
            state
            for state in topic.peers.values()
            if state is not to and state.is_gossip and not state.direct and state.stats.score >= 0
        ]
        chosen = sample(candidates, core.params.px_peers_max, core.rng)
        return tuple(PeerInfo(state.identity, self._record_of(state.peer)) for state in chosen)

    def take(self, prune: Prune, sender: PeerState) -> None:
        """Hint at dialing peers that a trusted neighbour named."""
        core = self._core
        if sender.stats.score < core.thresholds.accept_px:
            core.count("px refused", len(prune.peers))
            return
        named = list(prune.peers[: core.params.px_peers_max])
        unknown = [info for info in named if info.peer not in core.by_identity and info.peer != core.identity]
        for info in sample(unknown, core.params.px_dials_max, core.rng):
            core.out.effects.append(Dial(None, info))
