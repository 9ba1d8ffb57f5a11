"""Lazy gossip: IHAVE to peers outside the mesh, IWANT for what they tell us, and answers to theirs."""

from dep2p.gossipsub.effects import Lane
from dep2p.gossipsub.random_choice import sample, shuffle
from dep2p.gossipsub.rpc import IHave, Message, Rpc
from dep2p.gossipsub.state import Core, PeerState, TopicState
from dep2p.types import PeerId


class Gossip:
    """The gossip half of the router, with its caps per peer and heartbeat."""

    __slots__ = ("_core",)

    def __init__(self, core: Core) -> None:
        self._core = core

    def emit(self, topic: TopicState, without: dict[PeerId, PeerState]) -> None:
        """Tell some peers that are not in ``without`` of the topic's last messages."""
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
        wanted = self._unseen(items)
        if not wanted:
            return
        ids = list(wanted)
        shuffle(ids, core.rng)
        if len(ids) > room:
            core.count("drop: ihave flood", len(ids) - room)
            del ids[room:]
        state.asked_ids += len(ids)
        core.promises.add(state.peer, ids[0], now)
        core.out.send((state.peer,), Rpc(iwant=tuple(ids)), Lane.GOSSIP)

    def _unseen(self, items: tuple[IHave, ...]) -> dict[bytes, None]:
        core = self._core
        seen = core.seen.times
        validating = core.validating.by_id
        id_bytes_max = core.params.message_id_bytes_max
        wanted: dict[bytes, None] = {}
        for item in items:
            topic = core.topics.get(item.topic)
            if topic is None or not topic.joined:
                continue
            for message_id in item.ids:
                if message_id not in seen and message_id not in validating and len(message_id) <= id_bytes_max:
                    wanted[message_id] = None
        return wanted

    def on_iwant(self, state: PeerState, ids: tuple[bytes, ...]) -> None:
        """Send what is asked for, each message a few times at most, and nothing that the peer said it has."""
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
        found: dict[bytes, Message] = {}
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
