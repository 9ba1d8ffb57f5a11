"""The simulated world: nodes, links between them, and the loop that lets time pass."""

import heapq
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from random import Random
from typing import Any, Final, Protocol

from dep2p.errors import Dep2pError, ProtocolError
from dep2p.gossipsub.codecs.interface import Codec
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
from dep2p.gossipsub.events import Event, Malformed, PeerDown, PeerUp, StreamUp, Validated, Verdict, Version
from dep2p.gossipsub.rpc import Rpc
from dep2p.testing.simulator.calendar import BUCKETS_PER_S, NO_SENDER, Agenda, entry_time
from dep2p.testing.simulator.messages import authenticate
from dep2p.testing.simulator.metrics import Metrics
from dep2p.testing.simulator.topology import Latency
from dep2p.testing.simulator.trace import TraceDir
from dep2p.types import PeerId, peer_id_from_bytes

PROTOCOL: Final = "/meshsub/1.2.0"
_ED25519_PREFIX: Final = bytes([0x00, 0x24, 0x08, 0x01, 0x12, 0x20])


Receive = Callable[[PeerId, Rpc, float], list[Effect]]
"""Takes an RPC; its arguments are the sender, the RPC and the time."""


class SimulatedNode(Protocol):
    """A participant: a `Router`, or a node that pretends to be one. RPCs go to a function of type `Receive`."""

    def handle(self, event: Event, now: float, /) -> list[Effect]:
        """Take any other event."""
        ...

    def next_deadline(self) -> float | None:
        """Return when `on_deadline` is to be called; None for never."""
        ...

    def on_deadline(self, now: float, /) -> list[Effect]:
        """Do what is due."""
        ...


class DownNode:
    """A stand-in for a node that is down: it swallows everything."""

    def receive(self, peer: PeerId, rpc: Rpc, now: float, /) -> list[Effect]:
        """Lose the RPC."""
        return []

    def handle(self, event: Event, now: float, /) -> list[Effect]:
        """Lose the event."""
        return []

    def next_deadline(self) -> float | None:
        """Return None: there is nothing to do."""
        return None

    def on_deadline(self, now: float, /) -> list[Effect]:
        """Do nothing; it is never called."""
        return []


DOWN: Final = DownNode()


def identity_of(number: int) -> bytes:
    """Return the multihash bytes of a node's peer id; they look like those of an Ed25519 key."""
    return _ED25519_PREFIX + sha256(b"dep2p simulated node %d" % number).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Conditions on links and nodes: latency and loss of links, time of a validation; ``wire`` encodes each RPC, None
    none."""

    latency: Latency
    loss: float = 0.0
    validation_s: float = 0.0
    wire: Codec | None = None


class World:
    """Nodes by number. Every event is put on the agenda and happens in `run`."""

    def __init__(
        self,
        conditions: Conditions,
        *,
        metrics: Metrics,
        agenda: Agenda,
        rng: Random,
        trace: TraceDir | None = None,
    ) -> None:
        self.metrics = metrics
        self.agenda = agenda
        self.rng = rng
        self.latency: Latency = conditions.latency
        self.loss: float = conditions.loss
        self.validation_s: float = conditions.validation_s
        self.nodes: list[SimulatedNode] = []
        self.peers: list[PeerId] = []
        self.identities: list[bytes] = []
        self.numbers: dict[PeerId, int] = {}
        self.by_identity: dict[bytes, int] = {}
        self.links: list[dict[PeerId, tuple[float, int]]] = []
        """The links of each node: delay in seconds and number of the peer at the other end."""
        self.dialed: dict[tuple[int, int], float] = {}
        """Every link that was ever made, as (dialer, dialed): its delay."""
        self._receive: list[Receive] = []
        self._timers: list[int] = []
        """The number of the timer that counts, for each node: a restarted node ignores the timers of its earlier
        self."""
        self._wire = conditions.wire
        self._trace = trace

    # Nodes and links -------------------------------------------------------------------------------------------------

    def add(self) -> int:
        """Add a place for a node that is still down. Return the place's number."""
        number = len(self.nodes)
        identity = identity_of(number)
        peer = peer_id_from_bytes(identity)
        self.nodes.append(DOWN)
        self.peers.append(peer)
        self.identities.append(identity)
        self.numbers[peer] = number
        self.by_identity[identity] = number
        self.links.append({})
        self._receive.append(DOWN.receive)
        self._timers.append(0)
        return number

    def start(self, number: int, node: SimulatedNode, receive: Receive) -> None:
        """Put a node into its place now. ``receive`` takes its RPCs."""
        self.nodes[number] = node
        self._receive[number] = receive
        self._timers[number] += 1
        self._set_timer(number)

    def stop(self, number: int, *, crash: bool = False) -> None:
        """Take a node out; its links are cut with `cut`. A crash leaves a trace that just ends."""
        if self._trace is not None:
            self._trace.stopped(self.peers[number], self.agenda.now, None if crash else "left")
        self.nodes[number] = DOWN
        self._receive[number] = DOWN.receive
        self._timers[number] += 1

    def is_up(self, number: int) -> bool:
        """Whether a node is in its place."""
        return self.nodes[number] is not DOWN

    def dial(self, dialer: int, other: int) -> None:
        """Link two nodes now, when both are up and not linked yet. The dialed one notices one latency later."""
        if not (self.is_up(dialer) and self.is_up(other)) or self.peers[other] in self.links[dialer]:
            return
        key = (dialer, other)
        delay_s = self.dialed.get(key) or self.dialed.get((other, dialer)) or self.latency.draw(self.rng)
        self.dialed[key] = delay_s
        now = self.agenda.now
        self.links[dialer][self.peers[other]] = (delay_s, other)
        self.links[other][self.peers[dialer]] = (delay_s, dialer)
        for number, peer, outbound, at in ((dialer, other, True, now), (other, dialer, False, now + delay_s)):
            self.post(at, number, PeerUp(self.peers[peer], self.identities[peer], Version.V1_2, outbound))
            self.post(at, number, StreamUp(self.peers[peer], PROTOCOL))

    def cut(self, number: int, other: int, *, noticed_s: float = 0.0) -> None:
        """End a link now; both ends notice after ``noticed_s``. An RPC under way still arrives, and is lost."""
        if self.links[number].pop(self.peers[other], None) is None:
            return
        self.links[other].pop(self.peers[number], None)
        at = self.agenda.now + noticed_s
        self.post(at, number, PeerDown(self.peers[other]))
        self.post(at, other, PeerDown(self.peers[number]))

    # Putting things on the agenda ------------------------------------------------------------------------------------

    def post(self, at: float, number: int, event: Event) -> None:
        """Let a node handle an event at a time."""
        self.agenda.put((at, number, NO_SENDER, event))

    def call(self, at: float, action: Callable[[float], None]) -> None:
        """Call ``action`` at a time with that time; it changes the world."""
        self.agenda.put((at, -1, NO_SENDER, action))

    def _set_timer(self, number: int) -> None:
        deadline = self.nodes[number].next_deadline()
        if deadline is not None:
            self.agenda.put((deadline, number, NO_SENDER, self._timers[number]))

    # Time ------------------------------------------------------------------------------------------------------------

    def run(self, until: float, on_progress: Callable[[float], None] | None = None) -> None:
        """Run all entries that are due before ``until``."""
        agenda = self.agenda
        receive = self._receive
        perform = self.perform
        while (bucket := agenda.open(until)) is not None:
            for at, number, sender, what in bucket:
                agenda.now = at
                if sender:
                    effects = receive[number](sender, what, at)
                else:
                    effects = self._take(number, what, at)
                if effects:
                    perform(number, effects, at)
            agenda.close()
            if on_progress is not None:
                on_progress(agenda.now)
        agenda.now = max(agenda.now, until)

    def _take(self, number: int, what: Any, now: float) -> list[Effect]:
        """Act on a timer (its number), a change of the world, or an event of a node."""
        if type(what) is int:
            if what != self._timers[number]:
                return []
            effects = self.nodes[number].on_deadline(now)
            self._set_timer(number)
            return effects
        if number < 0:
            what(now)
            return []
        try:
            return self.nodes[number].handle(what, now)
        except Dep2pError:
            self.metrics.publishes_refused += 1
            return []

    def perform(self, number: int, effects: list[Effect], now: float) -> None:
        """Perform the effects of a node."""
        buckets = self.agenda.buckets
        metrics = self.metrics
        for effect in effects:
            if isinstance(effect, Send):
                rpc, peers, lane = effect.rpc, effect.peers, effect.lane
                metrics.sent(number, rpc, len(peers), lane)
                if self._wire is not None or (self.loss and lane is not Lane.CONTROL):
                    self._send_slowly(number, peers, rpc, lane, now)
                    continue
                links = self.links[number]
                sender = self.peers[number]
                for peer in peers:
                    link = links.get(peer)
                    if link is None:
                        metrics.dropped("no link")
                        continue
                    at = now + link[0]
                    key = int(at * BUCKETS_PER_S)
                    bucket = buckets.get(key)
                    if bucket is None:
                        buckets[key] = [(at, link[1], sender, rpc)]
                        heapq.heappush(self.agenda.keys, key)
                    elif key == self.agenda.opened:
                        insort(bucket, (at, link[1], sender, rpc), key=entry_time)
                    else:
                        bucket.append((at, link[1], sender, rpc))
            elif isinstance(effect, Deliver):
                deliverer = self.numbers[effect.peer] if effect.peer is not None else -1
                metrics.delivered(number, effect.message, deliverer, now)
            else:
                self._perform_rare(number, effect, now)

    def _send_slowly(self, number: int, peers: tuple[PeerId, ...], rpc: Rpc, lane: Lane, now: float) -> None:
        """Send with loss or a codec. Control is never lost: a stream carries it, and a full queue repeats it."""
        links = self.links[number]
        sender = self.peers[number]
        loses = self.loss if lane is not Lane.CONTROL else 0.0
        payloads = self._wire.encode(rpc) if self._wire is not None else []
        for peer in peers:
            link = links.get(peer)
            if link is None:
                self.metrics.dropped("no link")
            elif loses and self.rng.random() < loses:
                self.metrics.dropped("lost")
            elif self._wire is None:
                self.agenda.put((now + link[0], link[1], sender, rpc))
            else:
                for payload in payloads:
                    self._put_payload(now + link[0], link[1], sender, payload, self._wire)

    def _put_payload(self, at: float, number: int, sender: PeerId, payload: bytes, wire: Codec) -> None:
        try:
            self.agenda.put((at, number, sender, wire.decode(payload)))
        except ProtocolError as error:
            self.post(at, number, Malformed(sender, str(error)))

    def _perform_rare(self, number: int, effect: Effect, now: float) -> None:
        if isinstance(effect, PublishAccepted):
            self.metrics.published(number, effect.message, now)
        elif isinstance(effect, Validate):
            forged = effect.authenticate and authenticate(effect.message) is not None
            verdict = Verdict.BAD_SIGNATURE if forged else Verdict.ACCEPT
            self.post(now + self.validation_s, number, Validated(effect.ticket, verdict))
        elif isinstance(effect, Disconnect):
            self._disconnect(number, effect)
        elif isinstance(effect, OpenStream):
            self.post(now, number, StreamUp(effect.peer, PROTOCOL))
        elif isinstance(effect, Dial):
            other = self._dialable(effect)
            if other is not None:
                self.dial(number, other)
        elif isinstance(effect, PublishExpired | ResetStream | HoldPeer | Send | Deliver):
            return
        elif isinstance(effect, TopicMatched | TopicUnmatched | TopicsNotJoined):
            return  # scenarios have no patterns
        elif self._trace is not None:
            self._trace.write(effect, self.peers[number], now)

    def _disconnect(self, number: int, effect: Disconnect) -> None:
        other = self.numbers.get(effect.peer)
        if other is None:
            return
        self.metrics.disconnected(number, other)
        self.cut(number, other)

    def _dialable(self, effect: Dial) -> int | None:
        if effect.peer is not None:
            return self.numbers.get(effect.peer)
        return self.by_identity.get(effect.info.peer) if effect.info is not None else None
