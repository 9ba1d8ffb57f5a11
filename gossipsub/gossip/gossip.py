"""Lazy gossip: IHAVE to peers outside the mesh, IWANT for what they tell us, and answers to theirs."""

from collections.abc import Iterable

from dep2p.gossipsub.effects import Lane
from dep2p.gossipsub.random_choice import sample, shuffle
from dep2p.gossipsub.rpc import IHave, Rpc, RpcMessage
from dep2p.gossipsub.state.router_state import PeerState, RouterState, TopicState
from dep2p.types import PeerId


class Gossip:
    """The gossip half of the router, with its caps per peer and heartbeat."""

    __slots__ = ("_core",)

    def __init__(self, core: RouterState) -> None:
        self._core = core

    def emit(self, topic: TopicState, without: dict[PeerId, PeerState]) -> None:
        """Announce the topic's last messages to some peers that are not in ``without``."""
        core = self._core
        ids = core.mcache.gossip_ids(topic.name)
        if not ids:
            return
        threshold = core.thresholds.gossip
        candidates = [
            peer
            for peer, state in topic.peers.items()
            if peer not in without
            and state.writable
            and state.is_gossip
            and not state.direct
            and state.stats.score >= threshold
        ]
        if not candidates:
            return
        params = core.params
        count = max(params.d_lazy, int(params.gossip_factor * len(candidates)))
        if not count:
            return
        chosen = sample(candidates, count, core.rng)
        if len(ids) <= params.ihave_ids_max:
            core.out.send(tuple(chosen), Rpc(ihave=(IHave(topic.name, tuple(ids)),)), Lane.GOSSIP)
            return
        for peer in chosen:
            # Another part for each peer, so that together they hear of everything.
            shuffle(ids, core.rng)
            part = tuple(ids[: params.ihave_ids_max])
            core.out.send((peer,), Rpc(ihave=(IHave(topic.name, part),)), Lane.GOSSIP)

    def on_ihave(self, state: PeerState, items: tuple[IHave, ...], now: float) -> None:
        """Ask for what we have not seen; one of the ids, at random, becomes a promise."""
        core = self._core
        params = core.params
        if state.stats.score < core.thresholds.gossip:
            core.count("drop: gossip of a low score")
            return
        state.ihave_rpcs += 1
        core.busy[state.peer] = state
        if state.ihave_rpcs > params.ihave_rpcs_max:
            core.count("drop: ihave flood")
            return
        room = params.ihave_ids_max - state.asked_ids
        if room <= 0:
            core.count("drop: ihave flood")
            return
        ids = self._askable(state, items, now)
        if not ids:
            return
        shuffle(ids, core.rng)
        if len(ids) > room:
            core.count("drop: ihave flood", len(ids) - room)
            del ids[room:]
        self._ask(state, ids, now)

    def _askable(self, state: PeerState, items: tuple[IHave, ...], now: float) -> list[bytes]:
        """Return the ids that this peer can be asked for now. Where another peer is being asked, note this one as a
        spare."""
        core = self._core
        seen = core.seen.times
        validating = core.validating.by_id
        wanted = core.wanted
        id_bytes_max = core.params.message_id_bytes_max
        latest = now - core.params.iwant_retry_s
        found: dict[bytes, None] = {}
        for item in items:
            topic = core.topics.get(item.topic)
            if topic is None or not topic.joined:
                continue
            for message_id in item.ids:
                if message_id in seen or len(message_id) > id_bytes_max:
                    continue
                known = wanted.by_id.get(message_id)
                if message_id in validating:
                    if known is not None:
                        known.note(state.peer)
                elif known is None or known.asked_at <= latest:
                    wanted.want(message_id, item.topic)
                    found[message_id] = None
                else:
                    known.note(state.peer)
                    core.count("iwant spared")
        return list(found)

    def _ask(self, state: PeerState, ids: list[bytes], now: float) -> None:
        """Send IWANTs; the first id of each becomes a promise."""
        core = self._core
        wanted = core.wanted
        for message_id in ids:
            if message_id in wanted.by_id:
                wanted.asked(message_id, state.peer, now)
        state.asked_ids += len(ids)
        core.busy[state.peer] = state
        per_rpc = core.params.iwant_ids_per_rpc_max
        for start in range(0, len(ids), per_rpc):
            core.promises.add(state.peer, ids[start], now)
            core.out.send((state.peer,), Rpc(iwant=tuple(ids[start : start + per_rpc])), Lane.GOSSIP)

    def ask_next(self, message_id: bytes, now: float) -> None:
        """Ask the next peer that announced a message, when there is one."""
        choices = self._spares(message_id)
        if choices:
            self._ask(max(choices, key=_score), [message_id], now)

    def _spares(self, message_id: bytes) -> list[PeerState]:
        core = self._core
        wanted = core.wanted.by_id.get(message_id)
        if wanted is None:
            return []
        found = [core.peers.get(peer) for peer in wanted.spares]
        threshold, ids_max = core.thresholds.gossip, core.params.ihave_ids_max
        return [
            state
            for state in found
            if state is not None and state.writable and state.stats.score >= threshold and state.asked_ids < ids_max
        ]

    def recover(self, topic: str, message_id: bytes, peers: Iterable[PeerId], now: float) -> None:
        """Ask again for a message of which no kept copy is true; ``peers`` sent copies that were not kept."""
        core = self._core
        wanted = core.wanted.want(message_id, topic)
        known = core.topics.get(topic)
        mesh = known.mesh if known is not None else {}
        found = [state for state in map(core.peers.get, peers) if state is not None]
        # Forgers are many and first; mesh peers with a good score are the ones that most probably have the true one.
        found.sort(key=lambda state: (state.peer in mesh, state.stats.score), reverse=True)
        for state in found:
            wanted.note(state.peer)
        self.ask_next(message_id, now)

    def retry(self, now: float) -> None:
        """Ask others for messages that did not come, twice as many peers after each try; then give them up. Runs at the
        heartbeat."""
        core = self._core
        params = core.params
        by_peer: dict[PeerId, list[bytes]] = {}
        for message_id in core.wanted.overdue(now - params.iwant_retry_s, core.peers):
            if message_id in core.validating.by_id:
                continue
            wanted = core.wanted.by_id[message_id]
            topic = core.topics.get(wanted.topic)
            choices = self._spares(message_id) if topic is not None and topic.joined else []
            if not choices:
                if wanted.asked_at <= now - params.iwant_followup_s:
                    core.wanted.settled(message_id)
                continue
            for state in sample(choices, 1 << min(max(0, wanted.tries - 1), 3), core.rng):
                by_peer.setdefault(state.peer, []).append(message_id)
        for peer, ids in by_peer.items():
            core.count("iwant repeated to others", len(ids))
            self._ask(core.peers[peer], ids, now)

    def on_iwant(self, state: PeerState, ids: tuple[bytes, ...]) -> None:
        """Send the messages that are asked for: each a few times at most, and none that the peer said it has."""
        core = self._core
        params = core.params
        if state.stats.score < core.thresholds.gossip:
            core.count("drop: gossip of a low score")
            return
        room = params.iwant_ids_max - state.iwant_ids
        if len(ids) > room:
            core.count("drop: iwant flood", len(ids) - room)
            ids = ids[:room]
        state.iwant_ids += len(ids)
        core.busy[state.peer] = state
        found: dict[bytes, RpcMessage] = {}
        for message_id in ids:
            message = core.mcache.get(message_id)
            if message is None or message_id in found or message_id in state.unwanted:
                continue
            if core.mcache.count_transmission(message_id, state.peer) > params.gossip_retransmissions:
                core.count("drop: iwant repeated")
                continue
            found[message_id] = message
        if found:
            core.count("iwant answered", len(found))
            core.out.send((state.peer,), Rpc(messages=tuple(found.values())), Lane.MESSAGE)


def _score(state: PeerState) -> float:
    return state.stats.score
