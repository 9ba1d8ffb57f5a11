"""Scripted attackers: sybils that harm the honest nodes that they are linked to.

Each attack makes nodes that look to honest routers like any other peer. docs/explanation/attacks.md tells how each one
works, what stops it, and what was measured.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Final, Literal, Protocol

from dep2p.gossipsub.effects import Deliver, Effect, Lane, Send
from dep2p.gossipsub.events import Event, PeerDown, StreamUp
from dep2p.gossipsub.router import Router
from dep2p.gossipsub.rpc import IHave, Rpc, RpcMessage, SubscriptionChange
from dep2p.testing.simulator.messages import FORGED_DATA, FORGED_SIGNATURE
from dep2p.testing.simulator.world import SimulatedNode, World
from dep2p.types import PeerId

_RETURN_S: Final = 5.0
"""Seconds after which a sybil that was thrown out dials again."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A sybil's view of the simulation: the world, its number, the topic, and when the attack begins."""

    world: World
    number: int
    topic: str
    start: float
    """The virtual time of the first publish."""
    end: float
    """The virtual time of the last publish."""
    rng: Random
    victims: int
    """Count of honest nodes, which have the lowest numbers."""
    sybils: range
    """The numbers of all sybils: they belong to one attacker, who needs no network between them."""
    publishers: tuple[int, ...]
    target: int | None
    """The node that the attack is aimed at, if any."""
    forge: Callable[[bytes, str, bytes, bytes], RpcMessage]
    """Author, topic, data, seqno → a message in that author's name with a signature that is not its own."""


class Sybil(ABC):
    """The common part of all sybils: subscribe, and dial again when thrown out."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.linked: dict[PeerId, None] = {}
        """Peers with an open stream."""

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Greet every neighbour; come back after a while."""
        if isinstance(event, StreamUp):
            self.linked[event.peer] = None
            hello = Rpc(subscriptions=(SubscriptionChange(self.stage.topic, True),))
            return [Send((event.peer,), hello, Lane.CONTROL), *self.meet(event.peer, now)]
        if isinstance(event, PeerDown):
            self.linked.pop(event.peer, None)
            world = self.stage.world
            other = world.numbers[event.peer]
            world.call(now + _RETURN_S, partial(_dial, world, self.stage.number, other))
        return []

    def meet(self, peer: PeerId, now: float) -> list[Effect]:
        """Return messages to send after the hello."""
        return []

    @abstractmethod
    def receive(self, peer: PeerId, rpc: Rpc, now: float) -> list[Effect]:
        """Take an RPC of an honest peer."""

    def tip(self, message: RpcMessage, now: float) -> list[Effect]:
        """Take a message that another sybil has seen first."""
        return []

    def tip_all(self, message: RpcMessage, now: float) -> None:
        """Pass a message to every sybil at once."""
        world = self.stage.world
        for number in self.stage.sybils:
            world.call(now, partial(_tip, world, number, message))

    def next_deadline(self) -> float | None:
        """Return None; sybils with a rhythm override this."""
        return None

    def on_deadline(self, now: float) -> list[Effect]:
        """Do nothing; sybils with a rhythm override this."""
        return []


def _dial(world: World, number: int, other: int, now: float) -> None:
    world.dial(number, other)


def _tip(world: World, number: int, message: RpcMessage, now: float) -> None:
    sybil = world.nodes[number]
    if isinstance(sybil, Sybil):
        world.perform(number, sybil.tip(message, now), now)


class ColdBootSybil(Sybil):
    """A sybil that is in every mesh from the first moment and forwards nothing, but keeps all other rules: it grafts
    again when it may."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self._graft_at: dict[PeerId, float] = {}
        self._next: float = 0.0

    def meet(self, peer: PeerId, now: float) -> list[Effect]:
        """Graft the peer at once."""
        return [Send((peer,), Rpc(graft=(self.stage.topic,)), Lane.CONTROL)]

    def receive(self, peer: PeerId, rpc: Rpc, now: float) -> list[Effect]:
        """Swallow everything; remember when a backoff ends."""
        for prune in rpc.prune:
            self._graft_at[peer] = now + (prune.backoff_s or 60) + 0.5
        return []

    def next_deadline(self) -> float | None:
        """Return the time one second from now."""
        self._next = self.stage.world.agenda.now + 1.0
        return self._next

    def on_deadline(self, now: float) -> list[Effect]:
        """Graft where the backoff is over."""
        due = [peer for peer, at in self._graft_at.items() if at <= now]
        for peer in due:
            del self._graft_at[peer]
        targets = tuple(peer for peer in due if peer in self.linked)
        return [Send(targets, Rpc(graft=(self.stage.topic,)), Lane.CONTROL)] if targets else []


class CovertSybil:
    """A perfect peer, with an honest node's router, until all sybils go silent at once: from then on it forwards
    nothing.

    It stays in its meshes, and neither announces messages nor answers peers that ask for them.
    """

    def __init__(self, stage: Stage, router: Router) -> None:
        self._router = router
        self._flash_at = stage.start + (stage.end - stage.start) / 3

    def _play(self, effects: list[Effect], now: float) -> list[Effect]:
        if now < self._flash_at:
            return [effect for effect in effects if not isinstance(effect, Deliver)]
        return [effect for effect in effects if isinstance(effect, Send) and effect.lane is Lane.CONTROL]

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Act as the router would, or take it silently."""
        return self._play(self._router.handle(event, now), now)

    def receive(self, peer: PeerId, rpc: Rpc, now: float) -> list[Effect]:
        """Act as the router would, or take it silently."""
        return self._play(self._router.receive(peer, rpc, now), now)

    def next_deadline(self) -> float | None:
        """Return the router's deadline."""
        return self._router.next_deadline()

    def on_deadline(self, now: float) -> list[Effect]:
        """Act as the router would, or take it silently."""
        return self._play(self._router.on_deadline(now), now)


class GraftFloodSybil(Sybil):
    """Grafts four times a second, whatever the backoff, and forwards nothing."""

    _INTERVAL_S: Final = 0.25

    def receive(self, peer: PeerId, rpc: Rpc, now: float) -> list[Effect]:
        """Swallow everything."""
        return []

    def next_deadline(self) -> float | None:
        """Return the time a quarter of a second from now."""
        return self.stage.world.agenda.now + self._INTERVAL_S

    def on_deadline(self, now: float) -> list[Effect]:
        """Graft every neighbour."""
        if not self.linked:
            return []
        return [Send(tuple(self.linked), Rpc(graft=(self.stage.topic,)), Lane.CONTROL)]


class MessageSpamSybil(Sybil):
    """Sends forged messages all the time, and an altered copy of every real one to all its peers.

    The altered copy has the real one's id and author, so that a node that does not check first would take the real one
    for a duplicate of it.
    """

    _INTERVAL_S: Final = 0.1

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self._count = 0
        self._altered: dict[bytes, None] = {}

    def meet(self, peer: PeerId, now: float) -> list[Effect]:
        """Graft at once, to get real messages early."""
        return [Send((peer,), Rpc(graft=(self.stage.topic,)), Lane.CONTROL)]

    def receive(self, peer: PeerId, rpc: Rpc, now: float) -> list[Effect]:
        """Send an altered copy of each new message."""
        effects: list[Effect] = []
        for message in rpc.messages:
            if message.id not in self._altered and message.signature != FORGED_SIGNATURE:
                self._altered[message.id] = None
                copy = self.stage.forge(message.author, message.topic, FORGED_DATA + message.data, message.seqno)
                effects.append(Send(tuple(self.linked), Rpc((copy,)), Lane.MESSAGE))
        return effects

    def next_deadline(self) -> float | None:
        """Return the time a tenth of a second from now."""
        return self.stage.world.agenda.now + self._INTERVAL_S

    def on_deadline(self, now: float) -> list[Effect]:
        """Send a message in the name of some honest node."""
        if not self.linked:
            return []
        self._count += 1
        author = self.stage.world.identities[self.stage.rng.randrange(self.stage.victims)]
        seqno = (1 << 60 | self.stage.number << 24 | self._count).to_bytes(8, "big")
        message = self.stage.forge(author, self.stage.topic, FORGED_DATA, seqno)
        return [Send(tuple(self.linked), Rpc((message,)), Lane.MESSAGE)]


class EarlyForgerySybil(Sybil):
    """The first sybil that sees a real message tells all others, and each sends an altered copy to all its peers.

    Most honest nodes get such a copy, under the real one's id, before the real one. A node that announces a message
    before it has checked it then keeps the real one out.
    """

    _seen: dict[bytes, None]

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self._seen = {}

    def meet(self, peer: PeerId, now: float) -> list[Effect]:
        """Graft at once, to get real messages early."""
        return [Send((peer,), Rpc(graft=(self.stage.topic,)), Lane.CONTROL)]

    def receive(self, peer: PeerId, rpc: Rpc, now: float) -> list[Effect]:
        """Pass new messages on to the other sybils."""
        for message in rpc.messages:
            if message.id not in self._seen and message.signature != FORGED_SIGNATURE:
                self.tip_all(message, now)
        return []

    def tip(self, message: RpcMessage, now: float) -> list[Effect]:
        """Send an altered copy before the real message arrives."""
        if message.id in self._seen or not self.linked:
            return []
        self._seen[message.id] = None
        # Different copies: a node keeps only a few of them while it checks the first.
        data = FORGED_DATA + b"%d " % self.stage.number + message.data
        copy = self.stage.forge(message.author, message.topic, data[: len(message.data)], message.seqno)
        return [Send(tuple(self.linked), Rpc((copy,)), Lane.MESSAGE)]


class TargetEclipseSybil(ColdBootSybil):
    """All but a few sybils surround one node; the few listen in the rest of the network.

    The node's neighbours forward nothing to it and announce everything, so that it asks them and waits in vain.
    """

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self._announced: dict[bytes, None] = {}

    def receive(self, peer: PeerId, rpc: Rpc, now: float) -> list[Effect]:
        """Swallow everything, and pass new messages on to the other sybils."""
        for message in rpc.messages:
            if message.id not in self._announced:
                self.tip_all(message, now)
        return super().receive(peer, rpc, now)

    def tip(self, message: RpcMessage, now: float) -> list[Effect]:
        """Announce a message to the target that will not be sent."""
        if message.id in self._announced:
            return []
        self._announced[message.id] = None
        if self.stage.target is None:
            return []
        target = self.stage.world.peers[self.stage.target]
        if target not in self.linked:
            return []
        return [Send((target,), Rpc(ihave=(IHave(message.topic, (message.id,)),)), Lane.GOSSIP)]


class CensorSybil:
    """A perfect peer, with an honest node's router, but for the messages of one publisher: it neither forwards nor
    announces them."""

    def __init__(self, stage: Stage, router: Router) -> None:
        self._router = router
        self._censored = b"" if stage.target is None else stage.world.identities[stage.target]
        self._ids: dict[bytes, None] = {}

    def _play(self, effects: list[Effect]) -> list[Effect]:
        played: list[Effect] = []
        for effect in effects:
            if isinstance(effect, Send):
                rpc = self._without(effect.rpc)
                if rpc != Rpc():
                    played.append(Send(effect.peers, rpc, effect.lane))
            elif not isinstance(effect, Deliver):
                played.append(effect)
        return played

    def _without(self, rpc: Rpc) -> Rpc:
        messages = tuple(message for message in rpc.messages if message.author != self._censored)
        ihave = tuple(IHave(item.topic, tuple(one for one in item.ids if one not in self._ids)) for item in rpc.ihave)
        return replace(rpc, messages=messages, ihave=tuple(item for item in ihave if item.ids))

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Act as the router would, without those messages."""
        return self._play(self._router.handle(event, now))

    def receive(self, peer: PeerId, rpc: Rpc, now: float) -> list[Effect]:
        """Act as the router would, without those messages."""
        for message in rpc.messages:
            if message.author == self._censored:
                self._ids[message.id] = None
        return self._play(self._router.receive(peer, rpc, now))

    def next_deadline(self) -> float | None:
        """Return the router's deadline."""
        return self._router.next_deadline()

    def on_deadline(self, now: float) -> list[Effect]:
        """Act as the router would, without those messages."""
        return self._play(self._router.on_deadline(now))


# Attacks -------------------------------------------------------------------------------------------------------------


class SybilNode(SimulatedNode, Protocol):
    """A sybil in the place of a node."""

    def receive(self, peer: PeerId, rpc: Rpc, now: float, /) -> list[Effect]:
        """Take an RPC."""
        ...


def random_links(stage: Stage, degree: int) -> list[int]:
    """Choose ``degree`` honest nodes at random."""
    chosen: dict[int, None] = {}
    while len(chosen) < min(degree, stage.victims):
        chosen[stage.rng.randrange(stage.victims)] = None
    return list(chosen)


_LISTENERS_OF: Final = 20
"""One in so many sybils listens in the rest of the network while the others surround the target."""


def _around_target(stage: Stage, degree: int) -> list[int]:
    if stage.target is None or stage.number % _LISTENERS_OF == 0:
        return random_links(stage, degree)
    return [stage.target]


def _target_and_others(stage: Stage, degree: int) -> list[int]:
    others = random_links(stage, degree)
    return others if stage.target is None else list(dict.fromkeys([stage.target, *others]))[:degree]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """An attack: how to make its sybils, and whom they dial. Give one of your own as ``Scenario(attack=…)``.

    - ``make``: makes a sybil; called with its stage, and with what makes an honest node's router for sybils that play
      one. Usually a subclass of `Sybil`.
    - ``links``: the numbers of the honest nodes that a sybil dials; called with its stage and
      ``Scenario.sybil_degree``.
    - ``target``: the aim of the attack besides the network: one node, the messages of one publisher, or nothing.
    - ``joins``: the sybil plays a router, and joins the topic as an honest node does.
    - ``message_bytes_min``, ``validation_s_min``: below these the attack has no point; smaller values of the scenario
      are raised to them.
    """

    summary: str
    make: Callable[[Stage, Callable[[], Router]], SybilNode]
    links: Callable[[Stage, int], Sequence[int]] = random_links
    target: Literal["node", "publisher"] | None = None
    joins: bool = False
    message_bytes_min: int = 0
    validation_s_min: float = 0.0


def _alone(kind: Callable[[Stage], SybilNode]) -> Callable[[Stage, Callable[[], Router]], SybilNode]:
    """A sybil without a router."""
    return lambda stage, _make_router: kind(stage)


ATTACKS: Final[Mapping[str, Attack]] = {
    "cold-boot-eclipse": Attack(
        summary="sybils fill the meshes while the network boots, and forward nothing", make=_alone(ColdBootSybil)
    ),
    "covert-flash": Attack(
        summary="sybils behave well until a third of the messages is published, then forward nothing",
        make=lambda stage, make_router: CovertSybil(stage, make_router()),
        joins=True,
    ),
    "graft-flood": Attack(
        summary="sybils graft four times a second, whatever the backoff", make=_alone(GraftFloodSybil)
    ),
    "message-spam": Attack(
        summary="sybils send forged messages, and altered copies of real ones, with bad signatures",
        make=_alone(MessageSpamSybil),
    ),
    "early-forgery": Attack(
        summary="sybils send altered copies of real messages, which arrive before the real ones",
        make=_alone(EarlyForgerySybil),
        message_bytes_min=2_048,
        validation_s_min=0.005,
    ),
    "target-eclipse": Attack(
        summary="sybils surround one node, forward nothing to it and announce everything",
        make=_alone(TargetEclipseSybil),
        links=_around_target,
        target="node",
    ),
    "publisher-censorship": Attack(
        summary="sybils are perfect peers, but neither forward nor announce the messages of one publisher",
        make=lambda stage, make_router: CensorSybil(stage, make_router()),
        links=_target_and_others,
        target="publisher",
        joins=True,
    ),
}
"""The attacks by name."""
