"""The router: one pure core over all parts. Events in, effects out; it knows neither bytes nor sockets nor clocks."""

from collections.abc import Callable
from typing import ClassVar

from dep2p.errors import TooManyTopicsError
from dep2p.gossipsub import reasons
from dep2p.gossipsub.effects import Disconnect, Effect, ResetStream
from dep2p.gossipsub.events import (
    ConfigureTopic,
    Event,
    Join,
    JoinMatching,
    Leave,
    LeaveMatching,
    Malformed,
    PeerDown,
    PeerUp,
    Publish,
    RpcReceived,
    SendDropped,
    SetAppScore,
    SetBlacklist,
    SetDirect,
    StreamAccepted,
    StreamDown,
    StreamUp,
    TopicAppeared,
    Validated,
    Verdict,
)
from dep2p.gossipsub.gossip.gossip import Gossip
from dep2p.gossipsub.gossip.idontwant import IDontWant
from dep2p.gossipsub.inbound import Inbound
from dep2p.gossipsub.mesh.direct_peers import Direct
from dep2p.gossipsub.mesh.fanout import Fanout
from dep2p.gossipsub.mesh.mesh import Mesh
from dep2p.gossipsub.mesh.peer_exchange import PeerExchange
from dep2p.gossipsub.options import RouterOptions
from dep2p.gossipsub.params import GossipParams
from dep2p.gossipsub.peers import Streams
from dep2p.gossipsub.publish_limits import PublishRate
from dep2p.gossipsub.publisher import Publisher
from dep2p.gossipsub.rpc import Rpc
from dep2p.gossipsub.signing.policy import MessageSigning, Seqnos
from dep2p.gossipsub.state.router_state import PeerState, RouterState
from dep2p.gossipsub.subscriptions import Subscriptions
from dep2p.gossipsub.topic_names import check_topic_name
from dep2p.gossipsub.tracing.libp2p_events import AddPeer, GraftPeer, JoinTopic, LeaveTopic, Trace
from dep2p.types import PeerId, Rng

_BACKOFF_SWEEP_TICKS = 15


class Router:
    """GossipSub for one network.

    - ``own``, ``identity``: this node's peer id as text and as multihash bytes.
    - ``signing``: how messages are made and checked.
    - ``now``: the time at which it starts, of the clock that all later ``now`` come from.
    """

    __slots__ = (
        "_core",
        "_direct",
        "_fanout",
        "_gossip",
        "_has_graylisted",
        "_heartbeat_at",
        "_idontwant",
        "_inbound",
        "_mesh",
        "_publisher",
        "_streams",
        "_subscriptions",
        "receive",
    )

    receive: Callable[[PeerId, Rpc, float], list[Effect]]
    """`receive(peer, rpc, now)` is `handle(RpcReceived(peer, rpc), now)` without the event object."""

    def __init__(
        self,
        own: PeerId,
        identity: bytes,
        *,
        params: GossipParams,
        signing: MessageSigning,
        rng: Rng,
        now: float,
        options: RouterOptions | None = None,
    ) -> None:
        options = options or RouterOptions()
        core = self._core = RouterState(own, identity, params, options, rng, now)
        px = PeerExchange(core, options.record_of)
        self._mesh = Mesh(core, px)
        self._gossip = Gossip(core)
        self._idontwant = IDontWant(core)
        self._fanout = Fanout(core, self._gossip)
        rate = options.publish_rate or PublishRate(params.publish_rate_per_s, params.publish_burst, now)
        self._publisher = Publisher(
            core,
            self._fanout,
            self._idontwant,
            signing.compose,
            Seqnos(signing.seqno_start),
            rate,
            signing.compose_with_headers,
        )
        self._subscriptions = Subscriptions(
            core, self._mesh, options.subscription_filter, self._publisher.on_reachable, self._publisher.on_pattern
        )
        self._fanout.imply = self._subscriptions.imply
        self._streams = Streams(core, self._mesh, self._subscriptions)
        self._direct = Direct(core)
        self._inbound = Inbound(
            core,
            self._mesh,
            self._gossip,
            self._idontwant,
            self._subscriptions,
            self._publisher.seqnos,
            signing,
        )
        self.receive = self._inbound.receive
        self._has_graylisted = False
        self._heartbeat_at = now + params.heartbeat_initial_delay_s

    # The core's shape ------------------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event and return the effects.

        Raises, with nothing done: for `Publish` what :meth:`Publisher.publish` names, for `Join` ``ValueError`` (the
        name) and :class:`TooManyTopicsError`. Other events never raise.
        """
        if isinstance(event, RpcReceived):
            return self.receive(event.peer, event.rpc, now)
        try:
            self._HANDLERS[type(event)](self, event, now)
        except BaseException:
            self._core.out.take()
            raise
        return self._core.out.take()

    def verdict(self, ticket: int, verdict: Verdict, now: float) -> list[Effect]:
        """`handle(Validated(ticket, verdict), now)` without the event object."""
        self._inbound.on_verdict(ticket, verdict, now)
        return self._core.out.take()

    def next_deadline(self) -> float | None:
        """When `on_deadline` wants to be called."""
        deadline = self._heartbeat_at
        for other in (
            self._core.validating.next_deadline(),
            self._streams.next_deadline(),
            self._publisher.next_deadline(),
        ):
            if other is not None and other < deadline:
                deadline = other
        return deadline

    def on_deadline(self, now: float) -> list[Effect]:
        """Do what is due. Early or repeated calls do nothing."""
        self._streams.reopen(now)
        self._publisher.expire(now)
        self._inbound.expire(now)
        if now >= self._heartbeat_at:
            interval = self._core.params.heartbeat_interval_s
            self._heartbeat_at += interval
            if self._heartbeat_at <= now:
                self._core.count("heartbeats missed", int((now - self._heartbeat_at) / interval) + 1)
                self._heartbeat_at = now + interval
            self._heartbeat(now)
        return self._core.out.take()

    # What can be asked -----------------------------------------------------------------------------------------------

    def topics(self) -> list[str]:
        """Joined topics."""
        return [topic.name for topic in self._core.topics.values() if topic.joined]

    def is_joined(self, topic: str) -> bool:
        """Whether the topic is joined, by itself or by a pattern."""
        known = self._core.topics.get(topic)
        return known is not None and known.joined

    def matched(self) -> list[str]:
        """The topics that are joined because a pattern matches, and for nothing else."""
        return self._core.matched.names()

    def has_seen(self, message_id: bytes) -> bool:
        """Whether a message was taken, or judged, within the time that is remembered."""
        return message_id in self._core.seen.times

    def mark_seen(self, message_id: bytes, now: float) -> None:
        """Note that a message came another way than by pub/sub: copies that come by pub/sub are duplicates."""
        self._core.seen.add(message_id, now)
        self._core.settled(message_id)

    def peers(self, topic: str | None = None) -> list[PeerId]:
        """Return the connected peers, or a topic's subscribers."""
        if topic is None:
            return list(self._core.peers)
        known = self._core.topics.get(topic)
        peers = dict.fromkeys(known.peers) if known is not None else {}
        if len(self._core.patterns) and not (known is not None and known.pattern is not None):
            peers.update(dict.fromkeys(self._subscriptions.would_take(topic)))
        return list(peers)

    def mesh(self, topic: str) -> list[PeerId]:
        """Return the peers in the mesh of a topic."""
        known = self._core.topics.get(topic)
        return list(known.mesh) if known is not None else []

    def scores(self) -> dict[PeerId, float]:
        """Return the score of each connected peer."""
        return {peer: state.stats.score for peer, state in self._core.peers.items()}

    def trace(self, *, on: bool, rpcs: bool = True, implied: bool = True) -> list[Trace]:
        """Make trace events from now on, or none any more; without ``rpcs`` none for RPCs that come and go.

        Without ``implied``, no `DeliverMessage` where a `Deliver` says it or for the node's own messages, no `SendRpc`.
        Returns the events that a trace has to begin with: the peers, the joined topics, the meshes.
        """
        core = self._core
        core.trace(on=on, rpcs=rpcs, implied=implied)
        state: list[Trace] = [AddPeer(peer, each.protocol) for peer, each in core.peers.items() if each.writable]
        for topic in core.topics.values():
            if topic.joined:
                state.append(JoinTopic(topic.name))
                state += [GraftPeer(peer, topic.name) for peer in topic.mesh]
        return state

    @property
    def last_seqno(self) -> int:
        """The last sequence number in use: keep it on disk where the clock is not trusted."""
        return self._publisher.seqnos.last

    def counters(self) -> dict[str, int]:
        """Return the counts so far; drops are ``drop: reason``, refused messages ``rejected: reason``."""
        core = self._core
        return {
            **core.counts,
            "duplicates": core.duplicates,
            "seen evicted": core.seen.evicted,
            "mcache evicted": core.mcache.evicted,
            "backoffs evicted": core.backoffs.evicted,
            "wanted evicted": core.wanted.evicted,
        }

    def sizes(self) -> dict[str, int]:
        """How full each bounded part is."""
        core = self._core
        return {
            "peers": len(core.peers),
            "topics": len(core.topics),
            "patterns": len(core.patterns),
            "matched topics": len(core.matched),
            "seen": len(core.seen),
            "mcache": len(core.mcache),
            "mcache bytes": core.mcache.payload_bytes,
            "backoffs": len(core.backoffs),
            "promises": len(core.promises),
            "wanted": len(core.wanted),
            "validating": len(core.validating),
            "scored": len(core.scores),
            "pending publishes": self._publisher.pending,
            "unwanted": sum(len(state.unwanted) for state in core.peers.values()),
        }

    # Events ----------------------------------------------------------------------------------------------------------

    def _on_validated(self, event: Validated, now: float) -> None:
        self._inbound.on_verdict(event.ticket, event.verdict, now)

    def _on_publish(self, event: Publish, now: float) -> None:
        self._publisher.publish(event, now)

    def _on_received(self, event: RpcReceived, now: float) -> None:
        self._core.out.effects = self.receive(event.peer, event.rpc, now)

    def _on_peer_up(self, event: PeerUp, now: float) -> None:
        self._streams.on_peer_up(event)

    def _on_peer_down(self, event: PeerDown, now: float) -> None:
        self._streams.on_peer_down(event.peer, now)

    def _on_stream_up(self, event: StreamUp, now: float) -> None:
        self._streams.on_stream_up(event, now)

    def _on_stream_accepted(self, event: StreamAccepted, now: float) -> None:
        self._subscriptions.on_stream_accepted(event)

    def _on_stream_down(self, event: StreamDown, now: float) -> None:
        self._streams.on_stream_down(event.peer, now)

    def _on_send_dropped(self, event: SendDropped, now: float) -> None:
        self._streams.on_send_dropped(event)

    def _on_malformed(self, event: Malformed, now: float) -> None:
        core = self._core
        core.count("drop: malformed rpc")
        state = core.peers.get(event.peer)
        if state is not None:
            core.scores.misbehaved(state.stats)
        core.out.effects.append(ResetStream(event.peer, event.detail))

    def _on_join(self, event: Join, now: float) -> None:
        core = self._core
        check_topic_name(event.topic, core.params.topic_bytes_max, has_patterns=core.has_patterns)
        known = core.topics.get(event.topic)
        if known is not None and known.joined and event.topic not in core.matched:
            known.delivers = event.deliver
            return
        if sum(1 for topic in core.topics.values() if topic.joined) - len(core.matched) >= core.params.topics_max:
            raise TooManyTopicsError(
                f"this node is in {core.params.topics_max} topics already: leave one, or raise topics_max"
            )
        topic = core.topic(event.topic)
        topic.delivers = event.deliver
        if topic.joined:
            core.matched.remove(event.topic)
            return
        topic.joined = True
        if core.tracing:
            core.out.effects.append(JoinTopic(event.topic))
        self._subscriptions.announce(event.topic, subscribe=True)
        if len(core.patterns):
            self._subscriptions.imply(topic, now)
        self._mesh.join(topic, now)

    def _on_join_matching(self, event: JoinMatching, now: float) -> None:
        self._subscriptions.join_matching(event.pattern, now)

    def _on_leave_matching(self, event: LeaveMatching, now: float) -> None:
        self._subscriptions.leave_matching(event.pattern)

    def _on_appeared(self, event: TopicAppeared, now: float) -> None:
        core = self._core
        topic = core.topics.get(event.topic)
        if topic is None or not topic.joined:
            self._subscriptions.appear(event.topic, core.own, now)

    def _on_leave(self, event: Leave, now: float) -> None:
        core = self._core
        topic = core.topics.get(event.topic)
        if topic is None or not topic.joined or event.topic in core.matched:
            return
        if core.own_patterns.match(event.topic) and core.matched.add(event.topic, core.own):
            topic.delivers = True
            topic.used_tick = core.tick
            return
        topic.joined = False
        topic.delivers = False
        if core.tracing:
            core.out.effects.append(LeaveTopic(event.topic))
        self._subscriptions.announce(event.topic, subscribe=False)
        self._mesh.leave(topic, now)
        core.release(topic)

    def _on_configure(self, event: ConfigureTopic, now: float) -> None:
        core = self._core
        topic = core.topic(event.topic)
        topic.inline = event.inline
        topic.external = event.external
        topic.is_configured = event.inline is not None or event.external
        if event.score is not None:
            core.scores.configure(event.topic, event.score)
            topic.counts_deliveries = core.scores.counts_deliveries(event.topic)
            core.watches_duplicates = core.watches_duplicates or topic.counts_deliveries
        core.release(topic)

    def _on_app_score(self, event: SetAppScore, now: float) -> None:
        state = self._core.peers.get(event.peer)
        if state is not None:
            self._core.scores.set_app(state.stats, event.value)

    def _on_direct(self, event: SetDirect, now: float) -> None:
        self._direct.set_direct(event)

    def _on_blacklist(self, event: SetBlacklist, now: float) -> None:
        self._streams.set_blacklist(event, now)

    # The heartbeat ---------------------------------------------------------------------------------------------------

    def _heartbeat(self, now: float) -> None:
        """In go's order; see docs/explanation/gossipsub.md."""
        core = self._core
        core.tick += 1
        if core.tick % _BACKOFF_SWEEP_TICKS == 0:
            core.backoffs.sweep(now)
        core.seen.sweep(now)
        for peer, count in core.promises.broken(now).items():
            state = core.peers.get(peer)
            if state is not None:
                core.count("broken promise", count)
                core.scores.misbehaved(state.stats, count)
        if core.scores.refresh(now) < core.thresholds.graylist or self._has_graylisted:
            self._hint_at_graylisted()
        if core.gater is not None:
            core.gater.decay(now)
        self._start_peers_anew(now)
        self._direct.tick()
        if core.deliveries:
            self._forget_deliveries(now)
        maintain, emit = self._mesh.maintain, self._gossip.emit
        has_patterns = len(core.patterns) > 0
        for topic in list(core.topics.values()):
            if has_patterns and (topic.joined or topic.fanout_last is not None) and core.mcache.gossip_ids(topic.name):
                self._subscriptions.imply(topic, now)
            if topic.joined:
                maintain(topic, now)
                emit(topic, topic.mesh)
            elif topic.fanout_last is not None:
                self._fanout.maintain(topic, now)
        if len(core.own_patterns):
            self._subscriptions.tend_matched()
        if core.wanted.by_id:
            self._gossip.retry(now)
        self._streams.retry()
        core.mcache.shift()

    def _start_peers_anew(self, now: float) -> None:
        core = self._core
        still_busy: dict[PeerId, PeerState] = {}
        has_unwanted = False
        for peer, state in core.busy.items():
            if state.early_grafts:
                self._mesh.refuse_early_grafts(state, now)
            if state.stale_tick is not None:
                self._subscriptions.sweep_stale(state)
            state.ihave_rpcs = state.asked_ids = state.iwant_ids = state.idontwant_ids = 0
            state.pruned_topics.clear()
            if state.unwanted:
                self._idontwant.age(state)
                if state.unwanted:
                    has_unwanted = True
            if state.unwanted or state.early_grafts or state.stale_tick is not None:
                still_busy[peer] = state
        core.busy = still_busy
        core.has_unwanted = has_unwanted

    def _hint_at_graylisted(self) -> None:
        """Hint once at each peer that falls below the graylist threshold."""
        core = self._core
        graylist = core.thresholds.graylist
        self._has_graylisted = False
        for state in core.peers.values():
            if state.stats.score >= graylist or state.direct:
                state.is_graylisted = False
                continue
            self._has_graylisted = True
            if not state.is_graylisted:
                state.is_graylisted = True
                core.out.effects.append(Disconnect(state.peer, reasons.GRAYLISTED))

    def _forget_deliveries(self, now: float) -> None:
        """Forget after a heartbeat which peers delivered a message: copies count for milliseconds only."""
        core = self._core
        horizon = now - core.params.heartbeat_interval_s
        over = [mid for mid in core.deliveries if core.seen.times.get(mid, 0.0) <= horizon]
        for message_id in over:
            del core.deliveries[message_id]

    _HANDLERS: ClassVar[dict[type, Callable[..., None]]] = {
        Publish: _on_publish,
        RpcReceived: _on_received,
        Validated: _on_validated,
        JoinMatching: _on_join_matching,
        LeaveMatching: _on_leave_matching,
        TopicAppeared: _on_appeared,
        PeerUp: _on_peer_up,
        PeerDown: _on_peer_down,
        StreamUp: _on_stream_up,
        StreamDown: _on_stream_down,
        StreamAccepted: _on_stream_accepted,
        SendDropped: _on_send_dropped,
        Malformed: _on_malformed,
        Join: _on_join,
        Leave: _on_leave,
        ConfigureTopic: _on_configure,
        SetAppScore: _on_app_score,
        SetDirect: _on_direct,
        SetBlacklist: _on_blacklist,
    }
