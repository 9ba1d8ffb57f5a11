"""RPCs as they come in: the hot path of a node.

Order of checks: known neighbour, graylist → gater → seen? → topic joined, size, blacklist, policy, own message →
MAC and signature → app validators → mark seen → deliver and forward. Then control: IHAVE, IWANT, GRAFT, PRUNE,
IDONTWANT.
"""

import logging
from dataclasses import replace
from typing import Final

from dep2p.gossipsub import reasons
from dep2p.gossipsub.effects import Deliver, Disconnect, Effect, HoldPeer, Lane, ResetStream, Send, Validate
from dep2p.gossipsub.events import Verdict
from dep2p.gossipsub.gossip.gossip import Gossip
from dep2p.gossipsub.gossip.idontwant import IDontWant
from dep2p.gossipsub.mesh.mesh import Mesh
from dep2p.gossipsub.rpc import Rpc, RpcMessage
from dep2p.gossipsub.signing.policy import MessageSigning, Seqnos, policy_violation
from dep2p.gossipsub.state.router_state import PeerState, RouterState, TopicState
from dep2p.gossipsub.subscriptions import Subscriptions
from dep2p.gossipsub.tracing.libp2p_events import DeliverMessage, DuplicateMessage, RecvRpc, RejectedMessage, SendRpc
from dep2p.gossipsub.validation import PendingValidation
from dep2p.types import PeerId

_logger = logging.getLogger("dep2p.gossipsub")

FLOOD_FAULTS: Final = 4.0
"""Faults (P7) that a flood of control messages counts as; they count squared."""

_ACCEPT: Final = Verdict.ACCEPT  # looking up a member of an enumeration costs as much as a small call
_MESSAGE: Final = Lane.MESSAGE
_REASON_OF_VERDICT = {
    Verdict.IGNORE: reasons.VALIDATION_IGNORED,
    Verdict.REJECT: reasons.VALIDATION_FAILED,
    Verdict.THROTTLED: reasons.VALIDATION_THROTTLED,
    Verdict.BAD_SIGNATURE: reasons.INVALID_SIGNATURE,
}


class Inbound:
    """Takes RPCs and verdicts."""

    __slots__ = (
        "_authenticate",
        "_core",
        "_external",
        "_gossip",
        "_graylist",
        "_idontwant",
        "_mesh",
        "_out",
        "_peers",
        "_policy",
        "_rejected",
        "_seen",
        "_seqnos",
        "_subscriptions",
    )

    def __init__(
        self,
        core: RouterState,
        mesh: Mesh,
        gossip: Gossip,
        idontwant: IDontWant,
        subscriptions: Subscriptions,
        seqnos: Seqnos,
        signing: MessageSigning,
    ) -> None:
        self._core = core
        # Short ways to what every RPC needs; none of it is ever replaced.
        self._out = core.out
        self._peers = core.peers
        self._seen = core.seen.times
        self._rejected = core.seen.rejected
        self._graylist = core.thresholds.graylist
        self._mesh = mesh
        self._gossip = gossip
        self._idontwant = idontwant
        self._subscriptions = subscriptions
        self._seqnos = seqnos
        self._policy = signing.policy
        self._authenticate = signing.authenticate
        self._external = signing.is_external

    def receive(self, peer: PeerId, rpc: Rpc, now: float) -> list[Effect]:
        """One RPC of one peer."""
        core = self._core
        out = self._out
        state = self._peers.get(peer)
        if state is None:
            core.count("drop: rpc of an unknown peer")
            return out.take()
        if core.traces_rpcs:
            out.effects.append(RecvRpc(peer, rpc))
        if rpc.subscriptions or rpc.graft or rpc.prune:
            rpc = self._within_rate(state, rpc, now)
            if rpc.subscriptions:
                self._subscriptions.on_subscriptions(state, rpc.subscriptions, now)
        if state.stats.score < self._graylist and not state.direct:
            core.count("drop: rpc of a graylisted peer")
            return out.take()
        messages = rpc.messages
        is_quiet = True
        if messages and (state.source is None or self._passes_gater(state, now)):
            seen = self._seen
            for message in messages:
                if message.id in seen:
                    core.duplicates += 1
                    if core.watches_duplicates or self._rejected:
                        self._duplicate(state, message, now)
                else:
                    is_quiet = False
                    self._new(state, message, now, rpc)
            if self._idontwant.pending:
                self._idontwant.flush()
        if rpc.ihave or rpc.iwant or rpc.graft or rpc.prune or rpc.idontwant:
            self._control(state, rpc, now)
        elif is_quiet and not (core.watches_duplicates or rpc.subscriptions):
            return []  # nothing but duplicates, the most frequent RPC: it has no effects
        return out.take() if out.effects or out.grafts or out.prunes else []

    def _within_rate(self, state: PeerState, rpc: Rpc, now: float) -> Rpc:
        """Return the RPC without the subscriptions, grafts and prunes that no debt covers; hold back its sender.

        A neighbour whose flood goes on misbehaves (P7), and loses its stream.
        """
        wanted = len(rpc.subscriptions) + len(rpc.graft) + len(rpc.prune)
        excess = state.control.take(wanted, now)
        if excess is None:
            return rpc
        core = self._core
        core.count("peer held: control rate")
        core.out.effects.append(HoldPeer(state.peer, excess.hold_s))
        if excess.is_flood:
            core.count("stream reset: control flood")
            core.scores.misbehaved(state.stats, FLOOD_FAULTS)
            core.out.effects.append(ResetStream(state.peer, reasons.CONTROL_FLOOD))
            core.out.effects.append(Disconnect(state.peer, reasons.CONTROL_FLOOD))
        left = excess.taken
        if left == wanted:
            return rpc
        core.count("drop: control flood", wanted - left)
        core.scores.misbehaved(state.stats)
        subscriptions = rpc.subscriptions[:left]
        left -= len(subscriptions)
        graft = rpc.graft[:left]
        left -= len(graft)
        return replace(rpc, subscriptions=subscriptions, graft=graft, prune=rpc.prune[:left])

    def _control(self, state: PeerState, rpc: Rpc, now: float) -> None:
        if len(self._core.own_patterns):
            for name in (*rpc.graft, *[item.topic for item in rpc.ihave]):
                topic = self._core.topics.get(name)
                if topic is None or not topic.joined:
                    self._subscriptions.appear(name, state.peer, now)
        if rpc.prune and len(self._core.patterns):
            self._subscriptions.on_declined(state, rpc.prune, now)
        if rpc.ihave:
            self._gossip.on_ihave(state, rpc.ihave, now)
        if rpc.iwant:
            self._gossip.on_iwant(state, rpc.iwant)
        if rpc.graft:
            self._mesh.on_graft(state, rpc.graft, now)
        if rpc.prune:
            self._mesh.on_prune(state, rpc.prune, now)
        if rpc.idontwant:
            self._idontwant.on_idontwant(state, rpc.idontwant)

    def _passes_gater(self, state: PeerState, now: float) -> bool:
        core = self._core
        if core.gater is None or state.source is None or core.gater.accepts(state.source, now):
            return True
        core.count("drop: peer gated")
        return False

    def _duplicate(self, state: PeerState, message: RpcMessage, now: float) -> None:
        """A further copy of what was judged already."""
        core = self._core
        seen = core.seen
        if core.tracing:
            core.out.effects.append(DuplicateMessage(message, state.peer))
        if state.source is not None:
            state.source.duplicate += 1.0
        if message.id in seen.rejected:
            core.scores.invalid(state.stats, message.topic)
        elif core.deliveries:
            delivered = core.deliveries.get(message.id)
            if delivered is not None and state.peer not in delivered:
                if now - seen.times[message.id] <= core.scores.delivery_window_s(message.topic):
                    delivered[state.peer] = None
                    core.scores.near_first(state.stats, message.topic)
        if seen.refreshes:
            seen.touch(message.id, now)

    def _new(self, state: PeerState, message: RpcMessage, now: float, rpc: Rpc) -> None:
        """The first copy, or one of what may still be judged."""
        core = self._core
        topic = core.topics.get(message.topic)
        if topic is None or not topic.joined:
            topic = self._subscriptions.appear(message.topic, state.peer, now) if len(core.own_patterns) else None
            if topic is None:
                core.count("drop: message of a topic not joined")
                return
        pending = core.validating.by_id.get(message.id)
        if pending is not None:
            core.duplicates += 1
            pending.note(state.peer, message, is_trusted=state.peer in topic.mesh)
            if core.watches_duplicates:
                if core.tracing:
                    core.out.effects.append(DuplicateMessage(message, state.peer))
                if state.source is not None:
                    state.source.duplicate += 1.0
            return
        reason = self._violation(message)
        if reason is not None:
            self._reject(state, message, reason)
            return
        if self._authenticate is not None and not self._external:
            reason = self._authenticate(message)
            if reason is not None:
                self._reject(state, message, reason)
                return
        if not self._external and self._is_own(message):
            self._refuse_own(state, message, now)
            return
        if self._external or topic.external:
            self._validate_externally(state, message, now)
            return
        if core.gater is not None:
            core.gater.validated()
        if topic.inline is not None:
            verdict = self._run_inline(topic, state, message)
            if verdict is not Verdict.ACCEPT:
                self._refuse(state, message, verdict, now)
                return
        self._accept(topic, state, message, now, rpc)

    def _violation(self, message: RpcMessage) -> str | None:
        core = self._core
        if len(message.data) > core.params.message_bytes_max:
            return reasons.TOO_LARGE
        if message.author in core.blocked_authors:
            return reasons.BLACKLISTED_SOURCE
        reason = policy_violation(self._policy, message)
        if reason is not None:
            return reason
        if (
            message.author == self._core.identity
            and message.author
            and int.from_bytes(message.seqno, "big") >= self._seqnos.first
        ):
            return reasons.SELF_ORIGIN
        return None

    def _is_own(self, message: RpcMessage) -> bool:
        return bool(message.author) and message.author == self._core.identity

    def _refuse_own(self, state: PeerState | None, message: RpcMessage, now: float) -> None:
        """Published before a restart, and authentic: an honest neighbour may well have kept it."""
        self._core.count("own message of an earlier run")
        self._refuse(state, message, Verdict.IGNORE, now)

    def _run_inline(self, topic: TopicState, state: PeerState, message: RpcMessage) -> Verdict:
        if topic.inline is None:
            return Verdict.ACCEPT
        try:
            return topic.inline(state.peer, message)
        except Exception:
            _logger.exception("the validator of topic %r failed: its message is ignored", topic.name)
            self._core.count("validator failed")
            return Verdict.IGNORE

    def _validate_externally(self, state: PeerState, message: RpcMessage, now: float) -> PendingValidation | None:
        core = self._core
        pending = core.validating.start(message, state.peer, now)
        if pending is None:
            # Our fault, not the peer's: what it promised is forgiven, and a further copy may come through.
            core.promises.excuse(state.peer)
            core.wanted.unanswered(message.id)
            if core.gater is not None:
                core.gater.throttled(now)
            self._reject(state, message, reasons.VALIDATION_QUEUE_FULL)
            return None
        core.promises.fulfilled(message.id)
        if core.gater is not None:
            core.gater.validated()
        core.out.effects.append(Validate(pending.ticket, message, state.peer, self._external))
        return pending

    def on_verdict(self, ticket: int, verdict: Verdict, now: float) -> None:
        """An external validator has answered; too late or twice is nothing."""
        pending = self._core.validating.finish(ticket)
        if pending is None:
            self._core.count("verdict too late")
            return
        self._finish(pending, verdict, now)
        if self._idontwant.pending:
            self._idontwant.flush()

    def expire(self, now: float) -> None:
        """Validators that took too long have ignored their message, but a further copy may be tried."""
        for pending in self._core.validating.expired(now):
            self._core.count("validation timeout")
            self._finish(pending, Verdict.THROTTLED, now)

    def _finish(self, pending: PendingValidation, verdict: Verdict, now: float) -> None:
        core = self._core
        message = pending.message
        topic = core.topics.get(message.topic)
        state = core.peers.get(pending.peer)
        if verdict is _ACCEPT:
            if message.author == core.identity and message.author:
                self._refuse_own(state, message, now)
                return
            if topic is not None and topic.inline is not None and state is not None:
                verdict = self._run_inline(topic, state, message)
        if verdict is not _ACCEPT:
            self._refuse(state, message, verdict, now)
            self._judge_others(pending, verdict, now)
            return
        if topic is None or not topic.joined:
            core.count("drop: message of a topic not joined")
            core.seen.add(message.id, now)
            return
        self._accept(topic, state, message, now, None, pending)
        for peer, copy in pending.others.items():
            other = core.peers.get(peer)
            delivered = core.deliveries.get(message.id)
            if copy is None and other is not None and delivered is not None and peer not in delivered:
                delivered[peer] = None
                core.scores.near_first(other.stats, message.topic)

    def _judge_others(self, pending: PendingValidation, verdict: Verdict, now: float) -> None:
        """Blame the peers that sent the same bad copy, too. Another copy under the id of a forged one is validated
        next."""
        core = self._core
        if verdict is not Verdict.REJECT and verdict is not Verdict.BAD_SIGNATURE:
            return
        retried: PendingValidation | None = None
        for peer, copy in pending.others.items():
            state = core.peers.get(peer)
            if state is None:
                continue
            if copy is None or verdict is Verdict.REJECT:
                core.scores.invalid(state.stats, pending.message.topic)
            elif retried is None:
                retried = self._validate_externally(state, copy, now)
            else:
                retried.note(peer, copy, is_trusted=True)
        if verdict is Verdict.BAD_SIGNATURE:
            self._recover(pending, retried, now)

    def _recover(self, pending: PendingValidation, retried: PendingValidation | None, now: float) -> None:
        """A forged copy was judged. The true one may be with peers whose copies were not kept: they do not send it
        again on their own, so they are asked, at the latest when no kept copy is left."""
        if retried is not None:
            retried.unkept.update(pending.unkept)
            return
        message = pending.message
        if pending.unkept:
            self._gossip.recover(message.topic, message.id, pending.unkept, now)
        elif message.id in self._core.wanted.by_id:
            self._gossip.ask_next(message.id, now)

    def _accept(
        self,
        topic: TopicState,
        state: PeerState | None,
        message: RpcMessage,
        now: float,
        rpc: Rpc | None,
        pending: PendingValidation | None = None,
    ) -> None:
        """Mark seen, deliver, forward. ``state`` is None when the sender has gone meanwhile."""
        core = self._core
        effects = core.out.effects
        message_id = message.id
        core.seen.add(message_id, now)
        if core.promises.by_id or core.wanted.by_id:
            core.settled(message_id)
        peer = pending.peer if pending is not None else None
        if state is not None:
            peer = state.peer
            if core.scores.enabled:
                core.scores.first(state.stats, topic.name)
                if topic.counts_deliveries:
                    core.deliveries[message_id] = {peer: None}
            if state.source is not None:
                state.source.deliver += 1.0
        if core.tracing and (core.traces_implied or not topic.delivers):
            effects.append(DeliverMessage(message, peer))
        if topic.delivers:
            effects.append(Deliver(message, peer))
        core.mcache.put(message)
        mesh = topic.mesh
        if len(message.data) >= core.params.idontwant_bytes_min and len(mesh) > (peer in mesh):  # others besides it
            self._idontwant.note(topic, message_id, peer, () if pending is None else pending.others)
        author = core.by_identity.get(message.author)
        targets = [
            other for other, other_state in mesh.items() if other_state is not state and other_state is not author
        ]
        if core.has_unwanted:
            targets = [other for other in targets if message_id not in mesh[other].unwanted]
        if topic.extra:
            targets += [
                other
                for other, other_state in topic.extra.items()
                if other_state is not state
                and other_state is not author
                and other not in mesh
                and message_id not in other_state.unwanted
            ]
        if pending is not None and pending.others:
            targets = [other for other in targets if other not in pending.others]
        if targets:
            if rpc is None or not _holds_one_message_only(rpc):
                rpc = Rpc((message,))
            peers = tuple(targets)
            effects.append(Send(peers, rpc, _MESSAGE))
            if core.out.tracing:
                effects.append(SendRpc(peers, rpc))

    def _refuse(self, state: PeerState | None, message: RpcMessage, verdict: Verdict, now: float) -> None:
        """A validator said no."""
        core = self._core
        if verdict is Verdict.REJECT or verdict is Verdict.IGNORE:
            core.seen.add(message.id, now, rejected=verdict is Verdict.REJECT)
            core.settled(message.id)
        elif verdict is Verdict.THROTTLED:
            if core.gater is not None:
                core.gater.throttled(now)
            if state is not None:
                core.promises.excuse(state.peer)
            core.wanted.unanswered(message.id)
        if state is None:
            core.count(f"rejected: {_REASON_OF_VERDICT[verdict]}")
            return
        self._reject(state, message, _REASON_OF_VERDICT[verdict])

    def _reject(self, state: PeerState, message: RpcMessage, reason: str) -> None:
        """Count, trace and, where it is the forwarder's fault, score."""
        core = self._core
        core.count(f"rejected: {reason}")
        if core.tracing:
            core.out.effects.append(RejectedMessage(message, state.peer, reason))
        if reason in reasons.PUNISHED:
            core.scores.invalid(state.stats, message.topic)
            if state.source is not None:
                state.source.reject += 1.0
        elif state.source is not None and reason == reasons.VALIDATION_IGNORED:
            state.source.ignore += 1.0


def _holds_one_message_only(rpc: Rpc) -> bool:
    """Then it can go on as it is: nothing to build, and its encoding is known."""
    return len(rpc.messages) == 1 and not (
        rpc.subscriptions or rpc.ihave or rpc.iwant or rpc.graft or rpc.prune or rpc.idontwant
    )
