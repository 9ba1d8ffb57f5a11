"""Pub/sub of one network: the shell around the router. It performs effects and decides nothing about them."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import trio

from dep2p.arguments import as_bytes, check_text
from dep2p.concurrency.deadlines import DeadlineTimer
from dep2p.errors import (
    ProtocolError,
)
from dep2p.gossipsub.effects import (
    Deliver,
    Dial,
    Disconnect,
    Effect,
    HoldPeer,
    Lane,
    OpenStream,
    PublishAccepted,
    PublishExpired,
    ResetStream,
    Send,
    TopicMatched,
    TopicsNotJoined,
    TopicUnmatched,
    Validate,
)
from dep2p.gossipsub.events import (
    Event,
    Join,
    Leave,
    LeaveMatching,
    Malformed,
    SendDropped,
    SetAppScore,
    SetBlacklist,
    SetDirect,
    TopicAppeared,
    Verdict,
)
from dep2p.gossipsub.headers import NO_HEADERS, MessageHeaders, message_headers, reply_wanted
from dep2p.gossipsub.options import RouterOptions
from dep2p.gossipsub.params import RPC_OVERHEAD_BYTES, GossipParams
from dep2p.gossipsub.reasons import MISUSES
from dep2p.gossipsub.router import Router
from dep2p.gossipsub.rpc import IHave, PeerInfo, Rpc
from dep2p.gossipsub.rpc import RpcMessage as RouterMessage
from dep2p.gossipsub.signing.policy import MessageSigning
from dep2p.gossipsub.topic_types import (
    BUFFER_BYTES,
    BUFFER_ITEMS,
    GiveAnswer,
    OnFull,
    OnNoPeers,
    PublishResult,
    TopicMessage,
    TopicQuestion,
)
from dep2p.gossipsub.tracing.libp2p_events import TRACE_TYPES, TraceBuffer
from dep2p.host.interface import Host
from dep2p.identity import Identity
from dep2p.limits import Limits
from dep2p.links.fairness import Fairness
from dep2p.protocols.realm.statement import TopicGroup
from dep2p.pubsub.patterns import PatternSubscriptions
from dep2p.pubsub.peer_links import PeerTurns, PubSubLinks
from dep2p.pubsub.peers import Neighbours
from dep2p.pubsub.publisher import Publishing
from dep2p.pubsub.rpc_sender import RpcSender
from dep2p.pubsub.send_queue import PeerQueue
from dep2p.pubsub.subscription import Subscription
from dep2p.pubsub.topic import SharedTopic, Topic
from dep2p.pubsub.trace_sink import RouterTrace, depths_of
from dep2p.pubsub.types import GroupReaders, ReliableTopics, TopicStatus
from dep2p.pubsub.validation import Validation
from dep2p.pubsub.wire_formats import Wire
from dep2p.traces.schema import Depth
from dep2p.tracing.event_log import TraceLog
from dep2p.types import PeerId, RealmId, Rng, parse_peer_id, peer_id_bytes, peer_id_from_bytes

logger: logging.Logger = logging.getLogger("dep2p.io")

_AUTHORS_CACHED_MAX: Final = 4_096
_NAMED_TTL_S: Final = 600.0
_PUBLIC_LINE: Final = PeerId("peers of public pub/sub")
"""The line in which all of them wait for a turn among the members: strangers can be as many as they like."""
_MEMBER_MESSAGE_WORK: Final = 1
"""The cost of a member's message, for its turns: a quarter of the real one. Messages have turns of their own when they
are validated, and a node that reads them late gets more copies: with the real cost, a burst among ten nodes brought
twice as many."""
_PUBLIC_MESSAGE_WORK: Final = 6
_MALFORMED_WORK: Final = 256
_BUSY_MAX_S: Final = 1.5
"""Seconds, of the three heartbeats that announce a message, in which a busy node may ignore IHAVE."""


def params_from(limits: Limits) -> GossipParams:
    """Return the router's parameters for the node's limits."""
    sent_bytes = limits.message_bytes_max + 1_024 + RPC_OVERHEAD_BYTES
    return GossipParams(
        message_bytes_max=limits.message_bytes_max,
        rpc_bytes_max=max(1_064_960, sent_bytes),
        publish_rate_per_s=limits.pubsub_publish_per_s,
        publish_burst=max(1, limits.pubsub_publish_burst),
        topics_max=max(1, limits.pubsub_topics_max),
        matched_topics_max=limits.pubsub_matched_topics_max,
        # The shell holds peers back long before; these only bound what one huge RPC may bring.
        validation_max=8_192,
        validation_per_topic_max=8_192,
    )


def _within_limits(params: GossipParams, limits: Limits) -> GossipParams:
    """Let a node ask for no more at once than it can judge at once: peers are held back at half of that, and an answer
    that is being read may bring the other half."""
    return replace(
        params, iwant_ids_per_rpc_max=min(params.iwant_ids_per_rpc_max, max(1, limits.pubsub_validating_max // 2))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PubSubNetwork:
    """One network: its neighbours, its wire and its rules.

    ``realm_id``: None for the public network. In ``options``, ``publish_rate`` is shared with the node's other
    networks, ``tracing`` keeps the router's events, and `PubSub` sets ``record_of``.
    """

    neighbours: Neighbours
    wire: Wire
    params: GossipParams
    realm_id: RealmId | None = None
    options: RouterOptions = field(default_factory=RouterOptions)
    fairness: Fairness = field(default_factory=Fairness)
    """Turns of the node's members; all peers of the public network take one member's turns together."""


class PubSub:
    """Pub/sub of one realm, or of the public network. Everything but `run` may be called while `run` runs."""

    def __init__(self, host: Host, identity: Identity, limits: Limits, network: PubSubNetwork, *, rng: Rng) -> None:
        wire, tracing = network.wire, network.options.tracing
        params = _within_limits(network.params, limits)
        self.realm_id: RealmId | None = network.realm_id
        self.params = params
        self._own = identity.peer_id
        self._host = host
        self._limits = limits
        self._wire = wire
        self._decode = wire.codec.decode
        self._message_work = _PUBLIC_MESSAGE_WORK if network.realm_id is None else _MEMBER_MESSAGE_WORK
        self.counters_by_name: Counter[str] = Counter()
        self.traces: TraceBuffer | None = TraceBuffer(limits.pubsub_trace_items_max) if tracing else None
        self._router = Router(
            identity.peer_id,
            peer_id_bytes(identity.peer_id),
            params=params,
            signing=MessageSigning(
                compose=wire.codec.compose,
                seqno_start=time.time_ns(),
                policy=wire.policy,
                is_external=True,
                compose_with_headers=wire.compose_with_headers,
            ),
            rng=rng,
            now=trio.current_time(),
            options=replace(network.options, record_of=host.signed_record),
        )
        self._trace = RouterTrace(self._router, self.traces)
        self._topics: dict[str, SharedTopic] = {}
        self._patterns = PatternSubscriptions(self, self.counters_by_name, params.matched_topics_max)
        self._authors: dict[bytes, PeerId] = {}
        self._timer = DeadlineTimer(self._on_time)
        self._bursts_at_s = float("-inf")
        self._wall_offset_s = time.time() - trio.current_time()
        """Seconds since 1970 at the zero of trio's clock; looked at again with each heartbeat."""
        self._holds: dict[object, None] = {}
        self._released = trio.lowlevel.ParkingLot()
        self.on_handled: Callable[[TopicMessage], None] | None = None
        """Called for each message of others that an app here has handled."""
        self.on_unread: Callable[[TopicMessage], None] | None = None
        """Called for each message of others that no app here was subscribed to."""
        self.on_subscribed: Callable[[str], None] | None = None
        """Called with the topic of each new subscription of this node."""
        self.reliable: ReliableTopics | None = None
        """Publishes reliably; None on the public network."""
        self.groups: GroupReaders | None = None
        """Which readers of a group get a message; None on the public network."""
        self.give_answer: GiveAnswer | None = None
        """Sends answers to authors that wait for some; None on the public network."""
        self._busy_since_s = self._busy_until_s = float("-inf")
        self._links = PubSubLinks(
            self,
            host,
            network.neighbours,
            wire,
            limits,
            self.counters_by_name,
            PeerTurns(network.fairness, _PUBLIC_LINE if network.realm_id is None else None),
        )
        self._sending = RpcSender(self._links, wire, self._send_dropped)
        self._send = self._sending.send
        self._publishing = Publishing(self, self._router, self._links, limits, params, self.counters_by_name)
        self._validation = Validation(
            self,
            self.counters_by_name,
            wire.check_signature,
            lambda message, peer: self.public_message(message, peer, trio.current_time()),
            items_max=limits.pubsub_validating_max,
            on_held=self._hold_for_validation,
        )

    # Life

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._validation.run)
                nursery.start_soon(self._timer.run)
                self.schedule_deadline()
                await self._links.run(nursery, task_status=task_status)
        finally:
            self._patterns.end()
            for state in list(self._topics.values()):
                state.end()
            self._topics.clear()

    async def drain(self) -> None:
        """Wait until published messages have gone to the transport, at most ``Limits.drain_timeout_s``."""
        with trio.move_on_after(self._limits.drain_timeout_s):
            while self._links.has_unsent:  # noqa: ASYNC110  (many queues; once in a life)
                await trio.sleep(0.01)

    async def leave_all(self) -> None:
        """Leave every topic, and announce that to the neighbours."""
        for pattern in self._patterns.patterns():
            self.handle(LeaveMatching(pattern))
        self._patterns.end()
        for state in list(self._topics.values()):
            state.end()
            del self._topics[state.name]
            self.handle(Leave(state.name))
        await self.drain()

    def _on_time(self, now: float) -> float | None:
        self.perform(self._router.on_deadline(now), now)
        if now >= self._bursts_at_s:
            self._bursts_at_s = now + self.params.heartbeat_interval_s
            self._wall_offset_s = time.time() - now
            self._announce_bursts()
        return self._router.next_deadline()

    def _announce_bursts(self) -> None:
        """Offer what neighbours may have dropped to them: those in the mesh hear of no messages by gossip."""
        for peer, by_topic in self._links.take_bursts():
            self.counters_by_name["bursts_announced"] += 1
            for topic, ids in by_topic.items():
                self._send(Send((peer,), Rpc(ihave=(IHave(topic, tuple(ids)),)), Lane.GOSSIP))

    def schedule_deadline(self) -> None:
        """Schedule the router's deadline, which may be earlier now."""
        deadline = self._router.next_deadline()
        if deadline is not None:
            self._timer.schedule(deadline)

    # Topics

    async def join(self, name: str) -> Topic:
        """Join a topic, or get another handle of it.

        Raises ``ValueError`` (the name), TooManyTopicsError, or NotInRealmError when this does not run.
        """
        await trio.lowlevel.checkpoint()
        state = self._topics.get(name)
        if state is None or not state.handles:  # it may be joined for a pattern only
            self.handle(Join(name))
        if state is None:
            state = self._shared_topic(name)
        state.handles += 1
        return Topic(self, state)

    def leave(self, state: SharedTopic) -> None:
        """Give up one handle; the last one leaves the topic."""
        state.handles -= 1
        if state.handles == 0 and self._topics.get(state.name) is state:
            self._validation.by_topic.pop(state.name, None)
            self.handle(Leave(state.name))
            if self._router.is_joined(state.name):
                state.close_own()  # a pattern goes on with it
            else:
                self._forget_topic(state.name)

    def _shared_topic(self, name: str) -> SharedTopic:
        state = self._topics[name] = SharedTopic(self, name)
        if len(self._patterns):
            self._patterns.attach(state)
        return state

    def _forget_topic(self, name: str) -> None:
        state = self._topics.pop(name, None)
        if state is not None:
            state.end()

    @property
    def topics_by_name(self) -> Mapping[str, SharedTopic]:
        """The joined topics."""
        return self._topics

    def subscribe_pattern(
        self,
        pattern: str,
        *,
        buffer_items: int = BUFFER_ITEMS,
        buffer_bytes: int = BUFFER_BYTES,
        on_full: OnFull = "drop_oldest",
        group: str | None = None,
    ) -> Subscription:
        """Subscribe to every topic that matches a pattern, those of now and those to come: ``sensors.*.temp``,
        ``sensors.>``. The other arguments are those of :meth:`dep2p.pubsub.topic.Topic.subscribe`.

        Messages of neighbours and of this node's own programs come, each once. Entering it raises ``ValueError`` on the
        public network, and TooManyTopicsError above 32 patterns.
        """
        return self._patterns.make(pattern, buffer_items, buffer_bytes, on_full, group)

    def topics(self) -> list[TopicStatus]:
        """The joined topics, in the order of joining."""
        return [
            TopicStatus(
                state.name,
                self.realm_id,
                peers=len(self._router.peers(state.name)),
                mesh=len(self._router.mesh(state.name)),
                subscriptions=len(state.subscriptions),
                buffered_items=sum(len(one) for one in state.subscriptions),
                by_pattern=not state.handles,
            )
            for state in self._topics.values()
        ]

    def topic_names(self) -> list[str]:
        """The names of the joined topics."""
        return list(self._topics)

    def depths(self) -> list[Depth]:
        """Return the queues to neighbours, for snapshots of traces."""
        return depths_of(self._links.stats())

    def has_joined(self, name: str) -> bool:
        """Whether the topic is joined, by a handle or by a pattern."""
        return name in self._topics

    def has_handle(self, name: str) -> bool:
        """Whether a handle holds the topic."""
        state = self._topics.get(name)
        return state is not None and state.handles > 0

    def peers(self, topic: str | None = None) -> list[PeerId]:
        """List the neighbours, or those of them that are subscribed to a topic."""
        return self._router.peers(topic)

    def mesh(self, topic: str) -> list[PeerId]:
        """List the neighbours with which this node exchanges every message of the topic."""
        return self._router.mesh(topic)

    def scores(self) -> dict[PeerId, float]:
        """The router's opinion of each neighbour."""
        return self._router.scores()

    @property
    def validators(self) -> Validation:
        return self._validation

    def set_direct(self, peer: PeerId, direct: bool = True) -> None:
        """Always send everything to a peer, and keep connected to it; or end that."""
        self.handle(SetDirect(peer, direct))

    def block(self, peer: PeerId, blocked: bool = True) -> None:
        """Take nothing from a peer, neither as neighbour nor as author; unblocked, it has to connect again."""
        self.handle(SetBlacklist(peer, peer_id_bytes(peer), blocked))

    def set_app_score(self, peer: PeerId, value: float) -> None:
        """Set the app's own opinion of a neighbour, a part of its score (P5)."""
        self.handle(SetAppScore(peer, value))

    # Publishing

    async def publish(
        self,
        topic: str,
        body: bytes,
        *,
        wait: bool = True,
        on_no_peers: OnNoPeers = "error",
        origin: object | None = None,
        headers: Mapping[str, object] | None = None,
    ) -> PublishResult:
        """See :meth:`dep2p.pubsub.topic.Topic.publish`; the topic need not be joined.

        ``origin``: the handle that publishes, whose own subscriptions do not get it; None when there is none.
        """
        if type(topic) is not str:
            check_text(topic, "a topic name")
        checked = NO_HEADERS if headers is None else self.checked_headers(headers)
        if topic in self._validation.by_topic:
            body = as_bytes(body, "the message")
            author = self._own if self._wire.has_signatures else None
            await self._validation.judge_own(topic, body, author, checked)
        if topic not in self._topics and len(self._patterns) and self._patterns.matches(topic):
            self.handle(TopicAppeared(topic))
        if wait and self._holds:
            await self._wait_for_local_readers(topic, origin)
        return await self._publishing.publish(
            topic, body, wait=wait, on_no_peers=on_no_peers, origin=origin, headers=checked
        )

    def checked_headers(self, headers: Mapping[str, object]) -> MessageHeaders:
        """Check and encode headers for a publish. Raises ``ValueError``, `WrongTypeError`."""
        if isinstance(headers, MessageHeaders):
            return headers
        return message_headers(headers, bytes_max=self._limits.headers_bytes_max)

    def deliver_local(self, message: RouterMessage, origin: object | None) -> int:
        """Give a publish of ``origin`` to the other subscriptions of this node; return their number."""
        state = self._topics.get(message.topic)
        if state is None or self.params.emit_self:  # the router delivers them itself then
            return 0
        for one in state.subscriptions:
            if origin is None or one.origin is not origin or one.group is not None:
                break
        else:  # the usual case: no list is made for it
            return 0
        readers = self._local_readers(message.topic, origin)
        if state.groups:
            chosen = state.chosen(message.id, self.groups)
            readers = [one for one in readers if one in chosen]
        if readers:
            now = trio.current_time()
            delivered = self.public_message(message, None, now)
            self.counters_by_name["messages_delivered_local"] += 1
            self._trace.delivered_locally(message, len(readers), now)
            for subscription in readers:
                subscription.put_local(delivered)
        return len(readers)

    def has_local_readers(self, topic: str, origin: object | None) -> bool:
        """Whether a subscription of this node gets what ``origin`` publishes to the topic."""
        return bool(self._local_readers(topic, origin))

    def _local_readers(self, topic: str, origin: object | None) -> list[Subscription]:
        state = self._topics.get(topic)
        if state is None or not state.subscriptions:
            return []
        # A group may have given this message to the handle that publishes it: the other readers do not know of handles.
        return [
            one for one in state.subscriptions if origin is None or one.origin is not origin or one.group is not None
        ]

    async def _wait_for_local_readers(self, topic: str, origin: object | None) -> None:
        """Until no subscription with the policy "pause" is full. One that is full holds this network: see `hold`."""
        while any(one.holds_publishers for one in self._local_readers(topic, origin)):
            self.counters_by_name["publishes_delayed_local_reader"] += 1
            await self._released.park()

    def space_found(self) -> None:
        """Act on a queue that has shrunk. Called by the links."""
        self._publishing.space_found()

    def received_all(self) -> None:
        """Act on the last RPC of one read. Called by the links."""
        self._sending.flush()

    # From neighbours

    def receive(self, peer: PeerId, payload: bytes, *, is_old: bool = False) -> int:
        """Take one RPC; ``is_old``: on a stream that another one has replaced. Called by the links.

        Returns its cost; see `Rpc.work`.
        """
        now = trio.current_time()
        try:
            rpc = self._decode(payload)
        except ProtocolError as error:
            self.malformed(peer, str(error))
            return _MALFORMED_WORK
        work = rpc.work(self._message_work)
        queue = self._links.queue_of(peer)
        if queue is not None:
            if queue.has_messages:
                self._spare(queue, rpc)
            if rpc.iwant:
                self.counters_by_name["messages_dropped_by_peer"] += queue.count_dropped(rpc.iwant)
        if rpc.ihave and now < self._busy_until_s and now - self._busy_since_s < _BUSY_MAX_S:
            # Most of the announced messages wait here already; the next heartbeats announce the others again.
            self.counters_by_name["ihave_passed_over_busy"] += len(rpc.ihave)
            rpc = replace(rpc, ihave=())
        if is_old and (rpc.subscriptions or rpc.graft or rpc.prune):
            # The new stream has said what holds now; messages are as good as ever.
            self.counters_by_name["rpcs_of_replaced_streams"] += 1
            rpc = replace(rpc, subscriptions=(), graft=(), prune=())
        effects = self._router.receive(peer, rpc, now)
        if effects:
            self.perform(effects, now)
        return work

    def _spare(self, queue: PeerQueue, rpc: Rpc) -> None:
        """Drop messages for a peer that sends or announces them itself: most copies of a burst end here."""
        for message in rpc.messages:
            if queue.discard(message.id):
                self.counters_by_name["copies_spared"] += 1
        for message_id in rpc.idontwant:
            if queue.discard(message_id):
                self.counters_by_name["copies_spared"] += 1

    def malformed(self, peer: PeerId, detail: str) -> None:
        """Act on bytes that are no RPC. Called by the links."""
        self.counters_by_name["rpcs_malformed"] += 1
        self.handle(Malformed(peer, detail))

    def judged(self, ticket: int, verdict: Verdict) -> None:
        """Take a verdict of the validation."""
        now = trio.current_time()
        self.perform(self._router.verdict(ticket, verdict, now), now)

    def hold(self, who: object) -> None:
        """Take nothing from any neighbour until `release`."""
        if not self._holds:
            self.counters_by_name["receiving_paused"] += 1
            now = trio.current_time()
            if now >= self._busy_until_s + self.params.mcache_windows * self.params.heartbeat_interval_s:
                # Not sooner: else a message that three heartbeats announce could meet a pause each time.
                self._busy_since_s = now
            self._busy_until_s = now + self.params.heartbeat_interval_s
        self._holds[who] = None
        self._links.is_held = True

    def _hold_for_validation(self, held: bool) -> None:
        if held:
            self.hold(self._validation)
        else:
            self.release(self._validation)

    def release(self, who: object) -> None:
        """End the hold of ``who``."""
        self._holds.pop(who, None)
        self._released.unpark_all()
        if not self._holds and self._links.is_held:
            self._links.is_held = False
            self._links.process_waiting()

    def public_message(self, message: RouterMessage, peer: PeerId | None, now: float) -> TopicMessage:
        """Return a message in the form for apps. ``now``: when it came, on trio's clock."""
        author = message.author
        sender: PeerId | None = None
        if author:
            sender = self._authors.get(author)
            if sender is None:
                if len(self._authors) >= _AUTHORS_CACHED_MAX:
                    self._authors.clear()
                sender = self._authors[author] = peer_id_from_bytes(author)
        seqno = int.from_bytes(message.seqno, "big") if message.seqno else None
        made = TopicMessage(
            message.topic, message.data, sender, seqno, message.id, peer, message.headers, now + self._wall_offset_s
        )
        if message.headers is NO_HEADERS or self.give_answer is None or sender is None:
            return made
        wanted = reply_wanted(message.headers, now)
        return made if wanted is None else TopicQuestion(made, sender, wanted, self.give_answer)

    # Effects

    def handle(self, event: Event) -> None:
        """Give the router an event, and perform its effects."""
        now = trio.current_time()
        self.perform(self._router.handle(event, now), now)

    def perform(self, effects: list[Effect], now: float) -> None:
        """Perform effects of the router."""
        trace = self._trace
        traced = trace.kinds
        for effect in effects:
            kind = type(effect)
            if kind in traced:
                trace.pending += (effect, now)
                if len(trace.pending) >= trace.pending_max:
                    trace.flush()
            if kind is Send:
                self._send(effect)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
            elif kind is Deliver:
                self._deliver(effect, now)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
            elif kind is Validate:
                self._validate(effect)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
            elif kind is PublishAccepted:
                self._publishing.published = effect  # type: ignore[assignment]  # pyright: ignore[reportAttributeAccessIssue]
            elif kind not in TRACE_TYPES:
                self._perform_other(effect, now)

    def _perform_other(self, effect: Effect, now: float) -> None:
        match effect:
            case OpenStream(peer):
                self._links.open(peer)
            case ResetStream(peer, _):
                self._links.reset_inbound(peer)
            case HoldPeer(peer, seconds):
                self.counters_by_name["peers_held_control_rate"] += 1
                self._links.hold_for(peer, seconds)
            case Disconnect(peer, reason):
                self.counters_by_name[f"disconnect_hints_{reason.replace(' ', '_')}"] += 1
                logger.info("%s is of no use to pub/sub: %s", peer, reason)
                if reason in MISUSES:
                    self._links.disconnect(peer)
                # While the connection lives the router tries on, with pauses of up to half a minute.
                self._links.open(peer)
            case TopicMatched(topic):
                if topic not in self._topics:
                    self._shared_topic(topic)
            case TopicUnmatched(topic):
                self._forget_topic(topic)
            case TopicsNotJoined(count):
                self._patterns.not_joined(count)
            case PublishExpired(_, message):
                logger.warning("a publish to %r found no peer in time: dropped", message.topic)
            case Dial(peer, info):
                if peer is not None:
                    self._links.dial(peer)
                elif info is not None:
                    self._dial_named(info)
            case _:
                pass

    def _dial_named(self, info: PeerInfo) -> None:
        """Dial a peer that a trusted neighbour named when it pruned us, at the addresses that this node knows.

        The peer's signed record adds the addresses that it signed. Other addresses of a PRUNE are ignored.
        """
        try:
            peer = parse_peer_id(peer_id_from_bytes(info.peer))
        except ValueError:
            self.counters_by_name["px_peers_malformed"] += 1
            return
        if info.record:
            try:
                self._host.add_signed_record(peer, info.record, ttl_s=_NAMED_TTL_S)
                self.counters_by_name["px_records_taken"] += 1
            except ProtocolError as error:
                self.counters_by_name["px_records_refused"] += 1
                logger.debug("the record of %s that a neighbour passed on does not hold: %s", peer, error)
        self.counters_by_name["px_peers_dialed"] += 1
        self._links.dial(peer)

    def trace_to(self, log: TraceLog | None) -> None:
        """Give the router's events to a node's trace; None ends that."""
        self._trace.to(log)

    def _send_dropped(self, peer: PeerId, rpc: Rpc, lane: Lane) -> None:
        self.counters_by_name[f"rpcs_dropped_{lane.name.lower()}_queue_full"] += 1
        if lane == Lane.MESSAGE:
            self.counters_by_name["messages_dropped_queue_full"] += len(rpc.messages)
            if self._publishing.dropping is not None:
                self._publishing.dropping[peer] = None
        self.handle(SendDropped(peer, rpc))

    def gossip_dropped(self, peer: PeerId, rpc: Rpc) -> None:
        """Act on gossip that made room for a message. Called by the queues."""
        self._send_dropped(peer, rpc, Lane.GOSSIP)

    def _validate(self, validate: Validate) -> None:
        message = validate.message
        if self._wire.check_now(message) is not None:
            self.counters_by_name["rejected_invalid_mac"] += 1
            self.judged(validate.ticket, Verdict.BAD_SIGNATURE)
            return
        has_signature = self._wire.has_signatures and validate.authenticate
        self._validation.put(validate.ticket, message, validate.peer, has_signature=has_signature)

    def _deliver(self, deliver: Deliver, now: float) -> None:
        state = self._topics.get(deliver.message.topic)
        if state is None or not state.subscriptions:
            self.counters_by_name["messages_without_subscription"] += 1
            if self.on_unread is not None:
                self.on_unread(self.public_message(deliver.message, deliver.peer, now))
            return
        message = self.public_message(deliver.message, deliver.peer, now)
        if state.groups:
            self._deliver_chosen(state, message)
            return
        self.counters_by_name["messages_delivered"] += 1
        for subscription in tuple(state.subscriptions):
            subscription.put(message)

    def _deliver_chosen(self, state: SharedTopic, message: TopicMessage) -> None:
        """Deliver a message of a topic that has groups here."""
        chosen = state.chosen(message.id, self.groups)
        if not chosen:
            # Another reader of the group has it: as far as its author is concerned, this node is done with it.
            self.message_handled(message)
            return
        self.counters_by_name["messages_delivered"] += 1
        for subscription in chosen:
            subscription.put(message)

    def has_seen(self, message_id: bytes) -> bool:
        """Whether a message was taken, or judged, within the time that the node remembers."""
        return self._router.has_seen(message_id)

    def deliver_direct(
        self, topic: str, sender: PeerId, seqno: int, message_id: bytes, body: bytes, headers: MessageHeaders
    ) -> None:
        """Deliver a message that its author has sent straight to us; copies of it are duplicates. Called by reliable
        delivery."""
        now = trio.current_time()
        self._router.mark_seen(message_id, now)
        self._trace.delivered_directly(message_id, topic, body, sender, now)
        came_at_s = now + self._wall_offset_s
        message = TopicMessage(topic, body, sender, seqno, message_id, sender, headers, came_at_s)
        state = self._topics.get(topic)
        self.counters_by_name["messages_delivered_direct"] += 1
        if state is not None and state.groups:
            self._deliver_chosen(state, message)
            return
        for subscription in tuple(state.subscriptions) if state is not None else ():
            subscription.put(message)

    def has_subscription(self, topic: str) -> bool:
        """Whether this node has a subscription to the topic."""
        state = self._topics.get(topic)
        return state is not None and bool(state.subscriptions)

    def join_group(self, group: TopicGroup) -> None:
        """Read in a group. Raises ``ValueError`` when this node reads in too many. Called by subscriptions."""
        if self.groups is not None:
            self.groups.join(group)

    def leave_group(self, group: TopicGroup) -> None:
        """End one reading in a group. Called by subscriptions."""
        if self.groups is not None:
            self.groups.leave(group)

    def subscription_opened(self, topic: str) -> None:
        """Report that an app reads the topic. Called by subscriptions."""
        if self.on_subscribed is not None:
            self.on_subscribed(topic)

    def message_handled(self, message: TopicMessage) -> None:
        """Report that an app came back for the next message. Called by subscriptions."""
        if self.on_handled is not None:
            self.on_handled(message)

    def count_lagged(self, policy: OnFull) -> None:
        """Count a lag. Called by subscriptions."""
        self.counters_by_name[f"messages_dropped_buffer_full_{policy}"] += 1

    # Counts

    def counters(self) -> dict[str, int]:
        """Monotonic counts by name; each drop has its reason in its name."""
        total = dict(self.counters_by_name)
        for name, count in self._router.counters().items():
            total["router_" + name.replace(": ", "_").replace(" ", "_")] = count
        total.update(self._links.write_counts())
        if self.traces is not None:
            total["trace_events_dropped_buffer_full"] = self.traces.dropped
        return total

    def problems(self) -> tuple[str, ...]:
        """Say of which neighbours nothing is read for now, and why; at most eight."""
        return self._links.problems()

    def stats(self) -> dict[str, object]:
        """The present state: topics, how full the bounded parts are, and each neighbour's queue."""
        return {
            "topics": self.topics(),
            "groups": {} if self.groups is None else self.groups.stats(),
            "sizes": self._router.sizes(),
            "validating": len(self._validation),
            "is_held": self._links.is_held,
            "peers": self._links.stats(),
        }
