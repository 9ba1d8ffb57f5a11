"""IDONTWANT (v1.2): tell mesh peers of a large message that was accepted, so that they do not send it too.

Never before it is accepted: peers that believe it keep their copies back, so a forged copy would keep the true one out.
"""

from collections.abc import Collection
from itertools import islice
from typing import Final

from dep2p.gossipsub.effects import Lane
from dep2p.gossipsub.events import Version
from dep2p.gossipsub.rpc import Rpc
from dep2p.gossipsub.state.router_state import PeerState, RouterState, TopicState
from dep2p.types import PeerId

IDS_PER_RPC: Final = 10
"""go-libp2p reads no more ids from one RPC."""


class IDontWant:
    """Sends, takes and forgets IDONTWANT."""

    __slots__ = ("_core", "pending")

    def __init__(self, core: RouterState) -> None:
        self._core = core
        self.pending: dict[tuple[PeerId, ...], list[bytes]] = {}
        """Ids that `flush` announces, by the peers that hear of them."""

    def note(
        self, topic: TopicState, message_id: bytes, sender: PeerId | None = None, others: Collection[PeerId] = ()
    ) -> None:
        """Note that a large message was accepted and is kept: `flush` tells the mesh, but for those that sent it."""
        peers = tuple(
            [
                peer
                for peer, state in topic.mesh.items()
                if state.version >= Version.V1_2 and peer != sender and peer not in others
            ]
        )
        if peers:
            self.pending.setdefault(peers, []).append(message_id)

    def flush(self) -> None:
        """Tell of everything noted."""
        pending, self.pending = self.pending, {}
        for peers, ids in pending.items():
            for start in range(0, len(ids), IDS_PER_RPC):
                self._core.out.send(peers, Rpc(idontwant=tuple(ids[start : start + IDS_PER_RPC])), Lane.CONTROL)

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
