"""Own publishes: checked before anything is sent, to the mesh, a fanout, or all subscribers."""

from typing import Final

from dep2p.errors import MessageTooLargeError, NoPeersSubscribedError, NotInRealmError
from dep2p.gossipsub.effects import Deliver, Lane, PublishAccepted, PublishExpired
from dep2p.gossipsub.events import Publish
from dep2p.gossipsub.gossip.idontwant import IDontWant
from dep2p.gossipsub.headers import NO_HEADERS
from dep2p.gossipsub.mesh.fanout import Fanout
from dep2p.gossipsub.publish_limits import PendingPublishes, PublishRate
from dep2p.gossipsub.random_choice import sample
from dep2p.gossipsub.rpc import Rpc, RpcMessage
from dep2p.gossipsub.signing.policy import Compose, ComposeWithHeaders, Seqnos
from dep2p.gossipsub.state.router_state import PeerState, RouterState, TopicState
from dep2p.gossipsub.topic_names import check_topic_name
from dep2p.gossipsub.tracing.libp2p_events import DeliverMessage, PublishMessage
from dep2p.types import PeerId

_MESSAGE: Final = Lane.MESSAGE  # looking up a member of an enumeration costs as much as a small call


class Publisher:
    """Turns a publish into a message and its recipients."""

    __slots__ = ("_compose", "_compose_with_headers", "_core", "_fanout", "_idontwant", "_pending", "_rate", "seqnos")

    def __init__(
        self,
        core: RouterState,
        fanout: Fanout,
        idontwant: IDontWant,
        compose: Compose,
        seqnos: Seqnos,
        rate: PublishRate,
        compose_with_headers: ComposeWithHeaders | None = None,
    ) -> None:
        self._core = core
        self._fanout = fanout
        self._idontwant = idontwant
        self._compose = compose
        self._compose_with_headers = compose_with_headers
        self.seqnos: Seqnos = seqnos
        self._pending = PendingPublishes(core.params)
        self._rate = rate

    @property
    def pending(self) -> int:
        """Publishes that wait for a peer."""
        return len(self._pending)

    def publish(self, event: Publish, now: float) -> None:
        """Publish, or raise before anything has happened.

        Raises :class:`MessageTooLargeError`, :class:`RateLimitedError`, :class:`NoPeersSubscribedError`,
        :class:`NotInRealmError` for headers on a wire without a place for them, and
        ``ValueError`` for a topic name that is empty or too long.
        """
        core = self._core
        topic = core.topics.get(event.topic)
        if topic is None:
            topic = self._new_topic(event.topic)
        elif topic.pattern is not None:
            check_topic_name(event.topic, core.params.topic_bytes_max, has_patterns=True)
        if event.headers is not NO_HEADERS and self._compose_with_headers is None:
            raise NotInRealmError("headers need a realm: a message of libp2p's public network has no place for them")
        size = len(event.data) + event.headers.size_bytes
        if size > core.params.message_bytes_max:
            with_headers = f" with {event.headers.size_bytes} bytes of headers" if event.headers.size_bytes else ""
            raise MessageTooLargeError(
                f"a message of {len(event.data)} bytes{with_headers}: at most {core.params.message_bytes_max} can be "
                "published"
            )
        self._rate.check(now)
        targets = self._targets(topic, now) if topic is not None else {}
        queued = False
        if not targets:
            if event.if_no_peers == "error":
                self._release(topic)
                raise NoPeersSubscribedError(f"no peer is subscribed to {event.topic!r}: nothing was sent")
            if event.if_no_peers == "queue":
                self._pending.check(size)
                queued = True
        if event.headers is NO_HEADERS:
            message = self._compose(event.topic, event.data, self.seqnos.next())
        else:
            message = self._with_headers(event)
        if message.id in core.seen.times:
            # Only content ids get here: this very content was published or received already.
            core.count("publish of what was seen")
            self._release(topic)
            core.out.effects.append(PublishAccepted(event.ref, message, ()))
            return
        self._rate.take()
        core.seen.add(message.id, now)
        if core.tracing:
            core.out.effects.append(PublishMessage(message))
            if core.traces_implied:
                core.out.effects.append(DeliverMessage(message, None))
        core.count("published")
        if queued:
            self._pending.add(message, event.ref, now)
            core.out.effects.append(PublishAccepted(event.ref, message, (), queued=True))
        else:
            self._send(message, event.ref, targets)
        if topic is not None and topic.delivers and core.params.emit_self:
            core.out.effects.append(Deliver(message, None))

    def _new_topic(self, name: str) -> TopicState | None:
        """Check the name of a topic that no peer is in; return the topic when peers' patterns match it."""
        core = self._core
        check_topic_name(name, core.params.topic_bytes_max, has_patterns=core.has_patterns)
        return core.topic(name) if core.patterns.match(name) else None

    def _with_headers(self, event: Publish) -> RpcMessage:
        assert self._compose_with_headers is not None  # `publish` has checked it
        return self._compose_with_headers(event.topic, event.data, self.seqnos.next(), event.headers)

    def _targets(self, topic: TopicState, now: float) -> dict[PeerId, PeerState]:
        """Return the receivers of an own publish: the mesh, filled up to D while it is thin, and peers that get
        everything."""
        core = self._core
        params = core.params
        threshold = core.thresholds.publish
        if params.flood_publish:
            if not topic.joined:
                topic.fanout_last = now
                if topic.implied != core.patterns_version:
                    self._fanout.imply(topic, now)
            return {
                peer: state
                for peer, state in topic.peers.items()
                if state.writable and (state.direct or state.stats.score >= threshold)
            }
        if not topic.joined:
            return {**self._fanout.use(topic, now), **topic.extra}
        targets = {**topic.mesh, **topic.extra}
        missing = params.d - len(topic.mesh)
        if len(topic.mesh) < params.d_lo or not targets:
            others = [
                state
                for peer, state in topic.peers.items()
                if peer not in targets and state.writable and state.is_gossip and state.stats.score >= threshold
            ]
            for state in sample(others, max(missing, 1), core.rng):
                targets[state.peer] = state
        return targets

    def _send(self, message: RpcMessage, ref: int, targets: dict[PeerId, PeerState]) -> None:
        core = self._core
        core.mcache.put(message)
        message_id = message.id
        peers = tuple(peer for peer, state in targets.items() if message_id not in state.unwanted)
        core.out.effects.append(PublishAccepted(ref, message, peers))
        if peers:
            core.out.send(peers, Rpc((message,)), _MESSAGE)
        if core.params.idontwant_on_publish and len(message.data) >= core.params.idontwant_bytes_min:
            topic = core.topics.get(message.topic)
            if topic is not None:
                self._idontwant.note(topic, message_id)
                self._idontwant.flush()

    def _release(self, topic: TopicState | None) -> None:
        if topic is not None:
            self._core.release(topic)

    def on_reachable(self, topic: TopicState, now: float) -> None:
        """Send the publishes that wait for a first peer of the topic."""
        for ref, message in self._pending.take(topic.name):
            targets = self._targets(topic, now)
            self._send(message, ref, targets)

    def on_pattern(self, now: float) -> None:
        """Send the publishes that wait for a first peer, where a peer's new pattern matches their topics."""
        for name in self._pending.topics():
            if self._core.patterns.match(name):
                self._fanout.imply(self._core.topic(name), now)

    def next_deadline(self) -> float | None:
        """When a queued publish has waited too long."""
        return self._pending.next_deadline()

    def expire(self, now: float) -> None:
        """Give up queued publishes that found no peer."""
        core = self._core
        for ref, message in self._pending.expired(now):
            core.count("drop: publish without peers")
            core.out.effects.append(PublishExpired(ref, message))
