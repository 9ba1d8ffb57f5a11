"""Direct peers: always sent to, never in a mesh, never ignored."""

from dep2p.gossipsub.effects import Dial
from dep2p.gossipsub.events import SetDirect
from dep2p.gossipsub.state.router_state import RouterState


class Direct:
    """Peers that the app wants a fixed link to."""

    __slots__ = ("_core",)

    def __init__(self, core: RouterState) -> None:
        self._core = core

    def set_direct(self, event: SetDirect) -> None:
        """Both nodes should name each other, or the other one may prune and score us as usual."""
        core = self._core
        state = core.peers.get(event.peer)
        if event.direct:
            core.direct[event.peer] = None
        else:
            core.direct.pop(event.peer, None)
        if state is None:
            if event.direct:
                core.out.effects.append(Dial(event.peer))
            return
        state.direct = event.direct
        for topic in state.topics.values():
            if event.direct:
                core.detach(topic, state)
                core.attach_extra(topic, state)
            elif state.is_gossip:
                topic.extra.pop(event.peer, None)

    def tick(self) -> None:
        """Every `direct_connect_ticks`, and once soon after the start: try direct peers that are away."""
        core = self._core
        ticks = core.params.direct_connect_ticks
        if ticks and core.tick % ticks == min(1, ticks - 1):
            for peer in core.direct:
                if peer not in core.peers:
                    core.out.effects.append(Dial(peer))
