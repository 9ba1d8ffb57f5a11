"""The mesh of each topic: the few peers that get every message in full at once."""

from collections.abc import Iterable
from typing import Final

from dep2p.gossipsub.events import Version
from dep2p.gossipsub.mesh.peer_exchange import PeerExchange
from dep2p.gossipsub.random_choice import sample, shuffle
from dep2p.gossipsub.rpc import Prune
from dep2p.gossipsub.state.router_state import PeerState, RouterState, TopicState

EARLY_GRAFT_TICKS: Final = 2
"""Heartbeats that the subscription behind a graft may be late: a full queue repeats it at the sender's heartbeat."""


class Mesh:
    """Grafts and prunes, at the wish of peers and by the heartbeat."""

    __slots__ = ("_core", "_px")

    def __init__(self, core: RouterState, px: PeerExchange) -> None:
        self._core = core
        self._px = px

    # What we do ------------------------------------------------------------------------------------------------------

    def candidates(self, topic: TopicState, now: float) -> list[PeerState]:
        """Peers that may be grafted now."""
        core = self._core
        ends = core.backoffs.of_topic(topic.name)
        mesh = topic.mesh
        return [
            state
            for peer, state in topic.peers.items()
            if peer not in mesh
            and state.writable
            and state.is_gossip
            and not state.direct
            and state.stats.score >= 0
            and not (ends and core.backoffs.blocked(ends, peer, now))
        ]

    def graft(self, topic: TopicState, state: PeerState, now: float) -> None:
        """Take a peer into the mesh and tell it."""
        self._core.add_to_mesh(topic, state, now)
        self._core.out.graft(state.peer, topic.name)

    def prune(self, topic: TopicState, state: PeerState, now: float, backoff_s: float, *, px: bool) -> None:
        """Take a peer out of the mesh and tell it."""
        self._core.drop_from_mesh(topic, state)
        self._refuse(topic, state, now, backoff_s, px=px)

    def _refuse(self, topic: TopicState, state: PeerState, now: float, backoff_s: float, *, px: bool) -> None:
        """Send PRUNE and set the backoff on both ends."""
        core = self._core
        core.backoffs.set(topic.name, state.peer, now + backoff_s)
        if state.version >= Version.V1_1:
            prune = Prune(topic.name, int(backoff_s + 0.999), self._px.offer(topic, state) if px else ())
        else:
            prune = Prune(topic.name)
        core.out.prune(state.peer, prune, is_known=state.peer in topic.peers)

    def join(self, topic: TopicState, now: float) -> None:
        """Fill the mesh of a topic that was just joined: from its fanout first."""
        core = self._core
        ends = core.backoffs.of_topic(topic.name)
        for peer, state in topic.fanout.items():
            fits = state.is_gossip and not state.direct and state.stats.score >= 0
            if fits and len(topic.mesh) < core.params.d and not core.backoffs.blocked(ends, peer, now):
                self.graft(topic, state, now)
        topic.fanout = {}
        topic.fanout_last = None
        self._fill(topic, core.params.d, now)

    def leave(self, topic: TopicState, now: float) -> None:
        """Prune every peer, with the short backoff."""
        for state in list(topic.mesh.values()):
            self.prune(topic, state, now, self._core.params.unsubscribe_backoff_s, px=True)

    def greet(self, topic: TopicState, state: PeerState, now: float) -> None:
        """Graft a peer that subscribed or has become writable at once when the mesh is thin, not at the next
        heartbeat."""
        core = self._core
        if not topic.joined or len(topic.mesh) >= core.params.d_lo or state.peer in topic.mesh:
            return
        if not core.params.graft_on_subscribe:
            return
        if not state.writable or not state.is_gossip or state.direct or state.stats.score < 0:
            return
        if not core.backoffs.blocked(core.backoffs.of_topic(topic.name), state.peer, now):
            self.graft(topic, state, now)

    def _fill(self, topic: TopicState, size: int, now: float) -> None:
        wanted = size - len(topic.mesh)
        if wanted > 0:
            for state in sample(self.candidates(topic, now), wanted, self._core.rng):
                self.graft(topic, state, now)

    # What peers ask --------------------------------------------------------------------------------------------------

    def on_graft(self, state: PeerState, names: Iterable[str], now: float) -> None:
        """Take or refuse a peer that wants to be in our mesh. A topic that we have not joined is not answered: that
        would tell of it."""
        core = self._core
        params = core.params
        for name in names:
            topic = core.topics.get(name)
            if topic is None or not topic.joined:
                core.count("graft of a topic not joined")
                continue
            if state.peer in topic.mesh:
                continue
            if state.peer not in topic.peers:
                # Its subscription may be late; without one it is no subscriber and has no place in the mesh.
                core.count("graft without a subscription")
                self._keep_early(state, name)
                continue
            if state.direct:
                self._answer(topic, state, now, px=False)
                continue
            end = core.backoffs.end(name, state.peer)
            if end > now:
                core.count("graft in backoff")
                core.scores.misbehaved(state.stats)
                if now < end - params.prune_backoff_s + params.graft_flood_threshold_s:
                    core.scores.misbehaved(state.stats)
                self._answer(topic, state, now, px=False)
            elif state.stats.score < 0:
                core.count("graft with a bad score")
                self._answer(topic, state, now, px=False)
            elif not state.writable:
                core.count("graft without a stream to answer on")
                self._keep_early(state, name)
            elif len(topic.mesh) >= params.d_hi and not state.outbound:
                self._answer(topic, state, now, px=True)
            else:
                core.add_to_mesh(topic, state, now)

    def _keep_early(self, state: PeerState, name: str) -> None:
        """Keep a graft until the peer's subscription and our stream to it are there; the heartbeat refuses it
        otherwise."""
        state.early_grafts.setdefault(name, self._core.tick)
        self._core.busy[state.peer] = state

    def take_early_grafts(self, state: PeerState, now: float) -> None:
        """Answer the early grafts of a peer, since our stream to it is open."""
        if state.early_grafts:
            names, state.early_grafts = state.early_grafts, {}
            self.on_graft(state, names, now)

    def refuse_early_grafts(self, state: PeerState, now: float) -> None:
        """Refuse early grafts of a peer that has not subscribed since, so that it learns that it is not in the mesh.
        Runs at the heartbeat."""
        core = self._core
        for name, tick in list(state.early_grafts.items()):
            topic = core.topics.get(name)
            if topic is None or not topic.joined or state.peer in topic.mesh:
                del state.early_grafts[name]
            elif state.writable and core.tick - tick >= EARLY_GRAFT_TICKS:
                del state.early_grafts[name]
                self._answer(topic, state, now, px=False)

    def resume(self, state: PeerState, now: float) -> None:
        """Bring both ends to the same view after our stream to the peer was lost and is open again. It may still have
        us in its meshes: graft or prune."""
        core = self._core
        names, state.lost_meshes = state.lost_meshes, {}
        for name in names:
            topic = core.topics.get(name)
            if topic is None or not topic.joined or state.peer in topic.mesh or state.peer not in topic.peers:
                continue
            blocked = core.backoffs.blocked(core.backoffs.of_topic(name), state.peer, now)
            if state.direct or not state.is_gossip:
                continue
            if state.stats.score >= 0 and not blocked and len(topic.mesh) < core.params.d_hi:
                self.graft(topic, state, now)
            else:
                self._refuse(topic, state, now, core.params.prune_backoff_s, px=False)

    def _answer(self, topic: TopicState, state: PeerState, now: float, *, px: bool) -> None:
        """Refuse a graft, once per topic and heartbeat: otherwise a flood of grafts would become a flood of prunes."""
        if topic.name in state.pruned_topics:
            self._core.count("drop: answer to a graft flood")
            self._core.backoffs.set(topic.name, state.peer, now + self._core.params.prune_backoff_s)
            return
        state.pruned_topics[topic.name] = None
        self._core.busy[state.peer] = state
        self._refuse(topic, state, now, self._core.params.prune_backoff_s, px=px)

    def on_prune(self, state: PeerState, prunes: Iterable[Prune], now: float) -> None:
        """Take a peer out of our mesh at its wish. Its backoff is clamped: the field is any 64-bit number."""
        core = self._core
        params = core.params
        for prune in prunes:
            topic = core.topics.get(prune.topic)
            if topic is None or not topic.joined:
                continue
            core.drop_from_mesh(topic, state)
            state.lost_meshes.pop(topic.name, None)
            backoff_s = min(float(prune.backoff_s), params.backoff_max_s) if prune.backoff_s else params.prune_backoff_s
            core.backoffs.set(topic.name, state.peer, now + backoff_s)
            if prune.peers:
                self._px.take(prune, state)

    # The heartbeat ---------------------------------------------------------------------------------------------------

    def maintain(self, topic: TopicState, now: float) -> None:
        """Bring one mesh back within its bounds, in go's order: bad scores, too few or many, outbound, better."""
        core = self._core
        params = core.params
        mesh = topic.mesh
        outbound = 0
        bad: list[PeerState] = []
        for state in mesh.values():
            if state.stats.score < 0:
                bad.append(state)
            elif state.outbound:
                outbound += 1
        for state in bad:
            self.prune(topic, state, now, params.prune_backoff_s, px=False)
        size = len(mesh)
        if size < params.d_lo:
            self._fill(topic, params.d, now)
        elif size >= params.d_hi and size > params.d:
            self._shrink(topic, now)
        elif outbound < params.d_out and size >= params.d_lo:
            choices = [state for state in self.candidates(topic, now) if state.outbound]
            for state in sample(choices, params.d_out - outbound, core.rng):
                self.graft(topic, state, now)
        ticks = params.opportunistic_graft_ticks
        if ticks and core.tick % ticks == 0 and core.scores.enabled and len(mesh) > 1:
            self._graft_better(topic, now)

    def _shrink(self, topic: TopicState, now: float) -> None:
        """Prune the mesh down to D; the best scored peers and enough outbound ones stay."""
        core = self._core
        params = core.params
        states = list(topic.mesh.values())
        shuffle(states, core.rng)
        states.sort(key=_score, reverse=True)
        best, rest = states[: params.d_score], states[params.d_score :]
        shuffle(rest, core.rng)
        kept = best + rest[: params.d - len(best)]
        missing = params.d_out - sum(1 for state in kept if state.outbound)
        if missing > 0:
            spare = [state for state in rest[params.d - len(best) :] if state.outbound][:missing]
            replaceable = [state for state in kept[len(best) :] if not state.outbound]
            for state, gone in zip(spare, reversed(replaceable), strict=False):
                kept[kept.index(gone)] = state
        staying = {state.peer: None for state in kept}
        for state in states:
            if state.peer not in staying:
                self.prune(topic, state, now, params.prune_backoff_s, px=True)

    def _graft_better(self, topic: TopicState, now: float) -> None:
        scores = sorted(state.stats.score for state in topic.mesh.values())
        median = scores[len(scores) // 2]
        if median >= self._core.thresholds.opportunistic_graft:
            return
        better = [state for state in self.candidates(topic, now) if state.stats.score > median]
        for state in sample(better, self._core.params.opportunistic_graft_peers, self._core.rng):
            self.graft(topic, state, now)
            self._core.count("opportunistic graft")


def _score(state: PeerState) -> float:
    return state.stats.score
