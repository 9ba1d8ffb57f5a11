"""IDONTWANT (v1.2): tell mesh peers of a large message before it is validated, so that they do not send it too."""

from itertools import islice
from typing import Final

from dep2p.gossipsub.effects import Lane
from dep2p.gossipsub.events import Version
from dep2p.gossipsub.rpc import Rpc
from dep2p.gossipsub.state import Core, PeerState, TopicState

IDS_PER_RPC: Final = 10
"""go-libp2p reads no more ids from one RPC."""


class IDontWant:
    """Sends, takes and forgets IDONTWANT."""

    __slots__ = ("_core", "pending")

    def __init__(self, core: Core) -> None:
        self._core = core
        self.pending: dict[str, list[bytes]] = {}
        """What `flush` is to tell of, by topic."""

    def note(self, topic: TopicState, message_id: bytes) -> None:
        """A large new message came; `flush` tells the mesh."""
        self.pending.setdefault(topic.name, []).append(message_id)

    def flush(self, sender: PeerState | None) -> None:
        """Tell the mesh of everything noted, except who sent it."""
        core = self._core
        pending, self.pending = self.pending, {}
        for name, ids in pending.items():
            topic = core.topics.get(name)
            if topic is None:
                continue
            peers = tuple(
                peer for peer, state in topic.mesh.items() if state is not sender and state.version >= Version.V1_2
            )
            if not peers:
                continue
            for start in range(0, len(ids), IDS_PER_RPC):
                core.out.send(peers, Rpc(idontwant=tuple(ids[start : start + IDS_PER_RPC])), Lane.CONTROL)

    def on_idontwant(self, state: PeerState, ids: tuple[bytes, ...]) -> None:
        """Remember what a peer does not want, within its cap for a heartbeat."""
        core = self._core
        params = core.params
        room = params.idontwant_ids_max - state.idontwant_ids
        if len(ids) > room:
            core.count("drop: idontwant flood", len(ids) - room)
        until = core.tick + params.idontwant_ticks
        unwanted = state.unwanted
        core.busy[state.peer] = state
        core.has_unwanted = True
        id_bytes_max = params.message_id_bytes_max
        for message_id in islice(ids, room):
            state.idontwant_ids += 1
            if len(message_id) <= id_bytes_max and message_id not in unwanted:
                unwanted[message_id] = until

    def age(self, state: PeerState) -> None:
        """Forget what is over; ids are in the order in which they came."""
        tick = self._core.tick
        over: list[bytes] = []
        for message_id, until in state.unwanted.items():
            if until > tick:
                break
            over.append(message_id)
        if len(over) == len(state.unwanted):
            state.unwanted.clear()
            return
        for message_id in over:
            del state.unwanted[message_id]
