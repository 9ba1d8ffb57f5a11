"""A small network of routers under virtual time: a heap, fixed link delays, optional loss. No bytes, no crypto."""

import hashlib
import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from dep2p.gossipsub.effects import Deliver, Dial, Disconnect, Effect, OpenStream, PublishAccepted, Send, Validate
from dep2p.gossipsub.events import (
    Event,
    Join,
    PeerDown,
    PeerUp,
    Publish,
    RpcReceived,
    StreamUp,
    Validated,
    Verdict,
    Version,
)
from dep2p.gossipsub.options import RouterOptions
from dep2p.gossipsub.params import GossipParams
from dep2p.gossipsub.router import Router
from dep2p.gossipsub.rpc import Rpc, RpcMessage, SubscriptionChange
from dep2p.gossipsub.scoring.params import ScoreParams
from dep2p.gossipsub.signing.policy import MessageSigning
from dep2p.gossipsub.topic_types import TopicMessage
from dep2p.types import PeerId, peer_id_from_bytes


def peer(number: int) -> PeerId:
    return PeerId(f"n{number}")


def identity(number: int) -> bytes:
    return b"id-%d" % number


def composer(author: bytes) -> Callable[[str, bytes, bytes], RpcMessage]:
    """Unsigned messages with an id as the realm wire has them, and a signature that is only there."""

    def compose(topic: str, data: bytes, seqno: bytes) -> RpcMessage:
        message_id = hashlib.sha256(author + seqno).digest()[:16]
        return RpcMessage(message_id, author, seqno, topic, data, b"signed")

    return compose


def make_router(number: int = 0, *, seed: int = 1, now: float = 0.0, **options: object) -> Router:
    """A router of its own, for tests of one node. ``options``: fields of `MessageSigning` and `RouterOptions`."""
    params = options.pop("params", GossipParams())
    signing: dict[str, object] = {"compose": composer(identity(number)), "seqno_start": 1_000}
    names = [field.name for field in fields(MessageSigning)]
    signing |= {name: options.pop(name) for name in names if name in options}
    return Router(
        peer(number),
        identity(number),
        params=params,  # type: ignore[arg-type]
        signing=MessageSigning(**signing),  # type: ignore[arg-type]
        rng=random.Random(seed),
        now=now,
        options=RouterOptions(**options),  # type: ignore[arg-type]
    )


def connect(router: Router, number: int, now: float, *topics: str, **options: object) -> list[Effect]:
    """Bring a peer up with an open stream and subscriptions. The effects of all of it."""
    effects = router.handle(PeerUp(peer(number), identity(number), **options), now)  # type: ignore[arg-type]
    effects += router.handle(StreamUp(peer(number)), now)
    if topics:
        subscriptions = tuple(SubscriptionChange(topic, True) for topic in topics)
        effects += router.handle(RpcReceived(peer(number), Rpc(subscriptions=subscriptions)), now)
    return effects


def sends(effects: Sequence[Effect], to: PeerId | None = None) -> list[Rpc]:
    """The RPCs sent, all of them or those to one peer."""
    return [effect.rpc for effect in effects if isinstance(effect, Send) and (to is None or to in effect.peers)]


def run_until(router: Router, until: float) -> list[Effect]:
    """Let the router's deadlines pass."""
    effects: list[Effect] = []
    while (deadline := router.next_deadline()) is not None and deadline <= until:
        effects += router.on_deadline(deadline)
    return effects


def message_from(number: int, seqno: int, topic: str = "t", data: bytes = b"data") -> RpcMessage:
    """A message as another node would publish it."""
    return composer(identity(number))(topic, data, seqno.to_bytes(8, "big"))


def public_message(message: RpcMessage) -> TopicMessage:
    """A message as validators of apps see it."""
    sender = peer_id_from_bytes(message.author)
    return TopicMessage(message.topic, message.data, sender, int.from_bytes(message.seqno, "big"), message.id, sender)


def inline(validator: Callable[[TopicMessage], Verdict]) -> Callable[[PeerId, RpcMessage], Verdict]:
    """A validator of apps as one that runs inside the router."""
    return lambda _peer, message: validator(public_message(message))


@dataclass
class Network:
    """Nodes 0 to n-1."""

    seed: int = 1
    loss: float = 0.0
    bytes_per_s: float = 0.0
    """Bytes a second of a link: a message takes its size's time longer than control; 0 means no limit."""
    now: float = 0.0
    copies: int = 0
    events: int = 0
    sequence: int = 0

    def __post_init__(self) -> None:
        self.heap: list[tuple[float, int, int, Event | None]] = []
        self.routers: list[Router] = []
        self.latency: list[dict[int, float]] = []
        self.delivered: dict[bytes, dict[int, float]] = {}
        self.rng = random.Random(self.seed)
        self.digest = hashlib.sha256()
        self.verdict: Callable[[RpcMessage], Verdict] = lambda message: Verdict.ACCEPT

    def add(
        self, count: int, params: GossipParams | None = None, scores: ScoreParams | None = None, **options: object
    ) -> None:
        for _ in range(count):
            number = len(self.routers)
            start = self.now + self.rng.random()
            router = make_router(
                number,
                seed=self.rng.randrange(1 << 30),
                now=start,
                params=params or GossipParams(),
                scores=scores,
                **options,
            )
            self.routers.append(router)
            self.latency.append({})
            self.schedule(router.next_deadline() or 0.0, number, None)

    def link(self, degree: int, low_s: float = 0.01, high_s: float = 0.15) -> None:
        """A random graph: each node dials half of ``degree`` others."""
        for number in range(len(self.routers)):
            dialed = 0
            while dialed < degree // 2:
                other = self.rng.randrange(len(self.routers))
                if other == number or other in self.latency[number]:
                    if len(self.latency[number]) >= len(self.routers) - 1:
                        break
                    continue
                self.dial(number, other, self.rng.uniform(low_s, high_s))
                dialed += 1

    def dial(self, number: int, other: int, delay_s: float) -> None:
        self.latency[number][other] = self.latency[other][number] = delay_s
        for me, they, outbound in ((number, other, True), (other, number, False)):
            self.schedule(self.now, me, PeerUp(peer(they), identity(they), Version.V1_2, outbound))
            self.schedule(self.now, me, StreamUp(peer(they), "/meshsub/1.2.0"))

    def cut(self, number: int, other: int) -> None:
        del self.latency[number][other], self.latency[other][number]
        self.schedule(self.now, number, PeerDown(peer(other)))
        self.schedule(self.now, other, PeerDown(peer(number)))

    def schedule(self, at: float, number: int, event: Event | None) -> None:
        self.sequence += 1
        heapq.heappush(self.heap, (at, self.sequence, number, event))

    def join_all(self, topic: str) -> None:
        for number in range(len(self.routers)):
            self.schedule(self.now, number, Join(topic))

    def publish(self, at: float, number: int, topic: str, data: bytes) -> None:
        self.schedule(at, number, Publish(topic, data, if_no_peers="ignore"))

    def run(self, until: float) -> None:
        while self.heap and self.heap[0][0] <= until:
            self.now, _, number, event = heapq.heappop(self.heap)
            self.events += 1
            router = self.routers[number]
            if event is None:
                effects = router.on_deadline(self.now)
                self.schedule(router.next_deadline() or 0.0, number, None)
            elif isinstance(event, RpcReceived):
                effects = router.receive(event.peer, event.rpc, self.now)
            else:
                effects = router.handle(event, self.now)
            for effect in effects:
                self.perform(number, effect)
        self.now = until

    def perform(self, number: int, effect: Effect) -> None:
        if isinstance(effect, Send):
            links = self.latency[number]
            event = RpcReceived(peer(number), effect.rpc)
            is_message = bool(effect.rpc.messages)
            for name in effect.peers:
                other = int(name[1:])
                delay_s = links.get(other)
                if delay_s is None:
                    continue
                if is_message:
                    self.copies += len(effect.rpc.messages)
                    if self.loss and self.rng.random() < self.loss:
                        continue
                if self.bytes_per_s:
                    delay_s += sum(len(message.data) for message in effect.rpc.messages) / self.bytes_per_s
                self.schedule(self.now + delay_s, other, event)
        elif isinstance(effect, Deliver):
            self.delivered.setdefault(effect.message.id, {})[number] = self.now
            self.digest.update(b"%d %r %.9f;" % (number, effect.message.id, self.now))
        elif isinstance(effect, PublishAccepted):
            self.delivered.setdefault(effect.message.id, {})[number] = self.now
        elif isinstance(effect, Validate):
            self.schedule(self.now + 0.02, number, Validated(effect.ticket, self.verdict(effect.message)))
        elif isinstance(effect, OpenStream):
            self.schedule(self.now, number, StreamUp(effect.peer))
        else:
            assert not isinstance(effect, Dial | Disconnect), effect


def merge_rpcs(rpcs: Sequence[Rpc]) -> Rpc:
    """All parts of some RPCs for one peer in one, in order."""
    if len(rpcs) == 1:
        return rpcs[0]
    return Rpc(
        messages=tuple([item for rpc in rpcs for item in rpc.messages]),
        subscriptions=tuple([item for rpc in rpcs for item in rpc.subscriptions]),
        ihave=tuple([item for rpc in rpcs for item in rpc.ihave]),
        iwant=tuple([item for rpc in rpcs for item in rpc.iwant]),
        graft=tuple([item for rpc in rpcs for item in rpc.graft]),
        prune=tuple([item for rpc in rpcs for item in rpc.prune]),
        idontwant=tuple([item for rpc in rpcs for item in rpc.idontwant]),
    )
