"""The effects of one call. Grafts and prunes for one peer become one RPC; everything else keeps its order."""

from dep2p.gossipsub.effects import Effect, Lane, Send
from dep2p.gossipsub.rpc import Prune, Rpc
from dep2p.gossipsub.tracing.libp2p_events import SendRpc
from dep2p.types import PeerId


class EffectBuffer:
    """Collects effects until `take`. Hot paths append to `effects` themselves."""

    __slots__ = ("effects", "grafts", "prunes", "tracing")

    def __init__(self, *, tracing: bool) -> None:
        self.effects: list[Effect] = []
        self.tracing: bool = tracing
        """Whether to trace each RPC."""
        self.grafts: dict[PeerId, list[str]] = {}
        self.prunes: dict[PeerId, list[Prune]] = {}

    def send(self, peers: tuple[PeerId, ...], rpc: Rpc, lane: Lane) -> None:
        """Queue an RPC for some peers."""
        self.effects.append(Send(peers, rpc, lane))
        if self.tracing:
            self.effects.append(SendRpc(peers, rpc))

    def graft(self, peer: PeerId, topic: str) -> None:
        """Tell a peer at the end of this call that it is in our mesh."""
        self.grafts.setdefault(peer, []).append(topic)

    def prune(self, peer: PeerId, prune: Prune, *, is_known: bool = True) -> None:
        """Tell a peer at the end of this call that it is not in our mesh.

        ``is_known``: the peer is subscribed. Its topics come first, since js-libp2p reads no further than the first
        topic that it has not joined.
        """
        prunes = self.prunes.setdefault(peer, [])
        if is_known:
            prunes.insert(0, prune)
        else:
            prunes.append(prune)

    def take(self) -> list[Effect]:
        """Return everything collected since the last call."""
        if self.grafts or self.prunes:
            self._flush()
        effects = self.effects
        self.effects = []
        return effects

    def _flush(self) -> None:
        grafts, prunes = self.grafts, self.prunes
        self.grafts, self.prunes = {}, {}
        for peer, topics in grafts.items():
            self.send((peer,), Rpc(graft=tuple(topics), prune=tuple(prunes.pop(peer, ()))), Lane.CONTROL)
        for peer, items in prunes.items():
            self.send((peer,), Rpc(prune=tuple(items)), Lane.CONTROL)
