"""Connected peers and our stream to each. This node's topics are announced on every new stream; a lost one is asked for
again."""

from typing import Final

from dep2p.gossipsub.effects import Disconnect, OpenStream
from dep2p.gossipsub.events import PeerUp, SendDropped, SetBlacklist, StreamUp, Version
from dep2p.gossipsub.mesh.mesh import Mesh
from dep2p.gossipsub.rpc import Prune
from dep2p.gossipsub.state.router_state import PeerState, RouterState
from dep2p.gossipsub.subscriptions import Subscriptions
from dep2p.gossipsub.tracing.libp2p_events import AddPeer, DropRpc, RemovePeer
from dep2p.types import PeerId

REOPEN_INITIAL_S: Final = 0.1
REOPEN_MAX_S: Final = 10.0
REOPEN_TRIES_MAX: Final = 4


class _Retry:
    """Announcements to a peer that its full queue did not take."""

    __slots__ = ("grafts", "hello", "prunes", "unsubscribed")

    def __init__(self) -> None:
        self.hello = False
        self.unsubscribed: dict[str, None] = {}
        self.grafts: dict[str, None] = {}
        self.prunes: dict[str, Prune] = {}


class Streams:
    """The connected peers and our streams to them. A stream can end and open again while its peer stays connected."""

    __slots__ = ("_core", "_mesh", "_reopen_at", "_retries", "_subscriptions")

    def __init__(self, core: RouterState, mesh: Mesh, subscriptions: Subscriptions) -> None:
        self._core = core
        self._mesh = mesh
        self._subscriptions = subscriptions
        self._reopen_at: dict[PeerId, float] = {}
        self._retries: dict[PeerId, _Retry] = {}

    def on_peer_up(self, event: PeerUp) -> None:
        """Add a peer. A second event may make it outbound and, until its stream is open, change its version."""
        core = self._core
        known = core.peers.get(event.peer)
        if known is not None:
            known.outbound = known.outbound or event.outbound
            if not known.writable:
                known.version = event.version
                known.is_gossip = event.version > Version.FLOODSUB
            return
        if event.peer in core.blocked_peers:
            core.out.effects.append(Disconnect(event.peer, "blacklisted"))
            return
        if len(core.peers) >= core.params.peers_max:
            core.count("drop: too many peers")
            core.out.effects.append(Disconnect(event.peer, "too many peers"))
            return
        stats = core.scores.connect(event.peer, event.ips)
        state = PeerState(event.peer, event.identity, event.version, outbound=event.outbound, stats=stats)
        state.direct = event.peer in core.direct
        if core.gater is not None:
            state.source = core.gater.connect(event.ips[0] if event.ips else event.peer)
        core.peers[event.peer] = state
        core.by_identity[event.identity] = state

    def on_peer_down(self, peer: PeerId, now: float) -> None:
        """Forget everything about a peer but a bad score."""
        core = self._core
        state = core.peers.pop(peer, None)
        core.busy.pop(peer, None)
        if state is None:
            return
        if core.by_identity.get(state.identity) is state:
            del core.by_identity[state.identity]
        self._lose_stream(state)
        self._subscriptions.forget(state)
        core.promises.excuse(peer)
        core.scores.disconnect(peer, now)
        if core.gater is not None and state.source is not None:
            core.gater.disconnect(state.source, now)
        self._reopen_at.pop(peer, None)

    def set_blacklist(self, event: SetBlacklist, now: float) -> None:
        """Block a peer, which counts as gone at once, connected or not; or unblock it, and it has to connect again."""
        core = self._core
        if event.blocked:
            core.blocked_peers[event.peer] = None
            core.blocked_authors[event.identity] = None
            if event.peer in core.peers:
                self.on_peer_down(event.peer, now)
                core.out.effects.append(Disconnect(event.peer, "blacklisted"))
        else:
            core.blocked_peers.pop(event.peer, None)
            core.blocked_authors.pop(event.identity, None)

    def on_stream_up(self, event: StreamUp, now: float) -> None:
        """Say hello and graft, since the peer may have lost all that an earlier stream carried."""
        core = self._core
        state = core.peers.get(event.peer)
        if state is None:
            core.count("stream of an unknown peer")
            return
        was_writable = state.writable
        state.writable = True
        state.protocol = event.protocol
        state.reopen_tries = 0
        self._reopen_at.pop(event.peer, None)
        self._retries.pop(event.peer, None)
        if core.tracing:
            core.out.effects.append(AddPeer(event.peer, event.protocol))
        self._subscriptions.hello(state)
        for topic in list(state.topics.values()):
            if was_writable and event.peer in topic.mesh:
                core.out.graft(event.peer, topic.name)
        self._mesh.resume(state, now)
        self._mesh.take_early_grafts(state, now)
        for topic in list(state.topics.values()):
            self._subscriptions.reachable(topic, state, now)

    def on_stream_down(self, peer: PeerId, now: float) -> None:
        """Ask for another stream after a pause; give the peer up after some tries."""
        core = self._core
        state = core.peers.get(peer)
        if state is None:
            return
        self._lose_stream(state)
        for topic in core.topics.values():
            if peer in topic.mesh:
                state.lost_meshes[topic.name] = None
            core.detach(topic, state)
        if state.reopen_tries >= REOPEN_TRIES_MAX:
            core.count("stream given up")
            core.out.effects.append(Disconnect(peer, "no stream to it can be opened"))
            return
        pause = min(REOPEN_INITIAL_S * 2.0**state.reopen_tries, REOPEN_MAX_S)
        state.reopen_tries += 1
        self._reopen_at[peer] = now + pause * (0.5 + 0.5 * core.rng.random())

    def _lose_stream(self, state: PeerState) -> None:
        if state.writable and self._core.tracing:
            self._core.out.effects.append(RemovePeer(state.peer))
        state.writable = False
        self._retries.pop(state.peer, None)

    def next_deadline(self) -> float | None:
        """When the next stream is to be asked for."""
        return min(self._reopen_at.values()) if self._reopen_at else None

    def reopen(self, now: float) -> None:
        """Ask for the streams whose pause is over."""
        for peer in [peer for peer, at in self._reopen_at.items() if at <= now]:
            del self._reopen_at[peer]
            self._core.out.effects.append(OpenStream(peer))

    def on_send_dropped(self, event: SendDropped) -> None:
        """Count an RPC that a full queue dropped, score the peer, and repeat the control messages that it must get."""
        core = self._core
        state = core.peers.get(event.peer)
        core.count("drop: peer queue full")
        if core.tracing:
            core.out.effects.append(DropRpc(event.peer, event.rpc))
        if state is None:
            return
        core.scores.was_slow(state.stats)
        rpc = event.rpc
        if rpc.iwant:
            core.promises.excuse(event.peer)
            for message_id in rpc.iwant:
                core.wanted.unanswered(message_id)
        if not (rpc.subscriptions or rpc.graft or rpc.prune):
            return
        retry = self._retries.setdefault(event.peer, _Retry())
        for item in rpc.subscriptions:
            if item.subscribe:
                retry.hello = True
            else:
                retry.unsubscribed[item.topic] = None
        for name in rpc.graft:
            retry.grafts[name] = None
        for prune in rpc.prune:
            retry.prunes[prune.topic] = prune

    def retry(self) -> None:
        """Repeat at the heartbeat the announcements that a full queue dropped, as far as they still hold."""
        if not self._retries:
            return
        core = self._core
        retries, self._retries = self._retries, {}
        for peer, retry in retries.items():
            state = core.peers.get(peer)
            if state is None or not state.writable:
                continue
            if retry.hello:
                self._subscriptions.hello(state)
            for name in retry.unsubscribed:
                self._subscriptions.say_unsubscribed(peer, name)
            for name in retry.grafts:
                topic = core.topics.get(name)
                if topic is not None and peer in topic.mesh:
                    core.out.graft(peer, name)
            for name, prune in retry.prunes.items():
                topic = core.topics.get(name)
                if topic is None or peer not in topic.mesh:
                    core.out.prune(peer, prune)
