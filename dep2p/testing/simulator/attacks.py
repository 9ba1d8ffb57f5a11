"""Scripted attackers: what sybils do to the honest nodes that they are linked to.

Each attack makes nodes that look to honest routers like any other peer. docs/explanation/attacks.md tells how each one
works, what stops it, and what was measured.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Final

from dep2p.gossipsub.effects import Deliver, Effect, Lane, Send
from dep2p.gossipsub.events import Event, PeerDown, StreamUp
from dep2p.gossipsub.router import Router
from dep2p.gossipsub.rpc import Message, Rpc, Subscription
from dep2p.testing.simulator.messages import FORGED_DATA, FORGED_SIGNATURE
from dep2p.testing.simulator.world import World
from dep2p.types import PeerId

_RETURN_S: Final = 5.0
"""A sybil that was thrown out dials again after this time."""


@dataclass(frozen=True, slots=True)
class Stage:
    """What a sybil knows of the play: the world, its number, the topic, and when the attack begins."""

    world: World
    number: int
    topic: str
    start: float
    """The virtual time of the first publish."""
    end: float
    """That of the last one."""
    rng: Random
    victims: int
    """Honest nodes have the numbers below."""
    forge: Callable[[bytes, str, bytes, bytes], Message]
    """Author, topic, data, seqno → a message in that author's name with a signature that is not its own."""


class Sybil(ABC):
    """The part of a peer that all sybils play: subscribed, and back again when thrown out."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.linked: dict[PeerId, None] = {}
        """Peers with an open stream."""

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Hello to everybody; come back after a while."""
        if isinstance(event, StreamUp):
            self.linked[event.peer] = None
            hello = Rpc(subscriptions=(Subscription(self.stage.topic, True),))
            return [Send((event.peer,), hello, Lane.CONTROL), *self.meet(event.peer, now)]
        if isinstance(event, PeerDown):
            self.linked.pop(event.peer, None)
            world = self.stage.world
            other = world.numbers[event.peer]
            world.call(now + _RETURN_S, partial(_dial, world, self.stage.number, other))
        return []

    def meet(self, peer: PeerId, now: float) -> list[Effect]:
        """What to say after the hello."""
        return []

    @abstractmethod
    def receive(self, peer: PeerId, rpc: Rpc, now: float) -> list[Effect]:
        """An RPC of an honest peer."""

    def next_deadline(self) -> float | None:
        """Sybils with a rhythm override this."""
        return None

    def on_deadline(self, now: float) -> list[Effect]:
        """Its time has come."""
        return []


def _dial(world: World, number: int, other: int, now: float) -> None:
    world.dial(number, other)


class ColdBootSybil(Sybil):
    """In every mesh from the first moment, forwards nothing, keeps all other rules: grafts again when it may."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self._graft_at: dict[PeerId, float] = {}
        self._next: float = 0.0

    def meet(self, peer: PeerId, now: float) -> list[Effect]:
        """Graft at once."""
        return [Send((peer,), Rpc(graft=(self.stage.topic,)), Lane.CONTROL)]

    def receive(self, peer: PeerId, rpc: Rpc, now: float) -> list[Effect]:
        """Swallow everything; remember when a backoff ends."""
        for prune in rpc.prune:
            self._graft_at[peer] = now + (prune.backoff_s or 60) + 0.5
        return []

    def next_deadline(self) -> float | None:
        """Once a second."""
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
    """A perfect peer, with a router like everybody's, until all sybils go silent at once: then it forwards nothing.

    It stays in its meshes, and neither tells of messages nor answers who asks for them.
    """

    def __init__(self, stage: Stage, router: Router) -> None:
        self._router = router
        self._flash_at = stage.start + (stage.end - stage.start) / 3

    def _play(self, effects: list[Effect], now: float) -> list[Effect]:
        if now < self._flash_at:
            return [effect for effect in effects if not isinstance(effect, Deliver)]
        return [effect for effect in effects if isinstance(effect, Send) and effect.lane is Lane.CONTROL]

    def handle(self, event: Event, now: float) -> list[Effect]:
        """As the router would, or silently."""
        return self._play(self._router.handle(event, now), now)

    def receive(self, peer: PeerId, rpc: Rpc, now: float) -> list[Effect]:
        """As the router would, or silently."""
        return self._play(self._router.receive(peer, rpc, now), now)

    def next_deadline(self) -> float | None:
        """The router's."""
        return self._router.next_deadline()

    def on_deadline(self, now: float) -> list[Effect]:
        """As the router would, or silently."""
        return self._play(self._router.on_deadline(now), now)


class GraftFloodSybil(Sybil):
    """Grafts four times a second, whatever the backoff, and forwards nothing."""

    _INTERVAL_S: Final = 0.25

    def receive(self, peer: PeerId, rpc: Rpc, now: float) -> list[Effect]:
        """Swallow everything."""
        return []

    def next_deadline(self) -> float | None:
        """Four times a second."""
        return self.stage.world.agenda.now + self._INTERVAL_S

    def on_deadline(self, now: float) -> list[Effect]:
        """Graft everybody."""
        if not self.linked:
            return []
        return [Send(tuple(self.linked), Rpc(graft=(self.stage.topic,)), Lane.CONTROL)]


class MessageSpamSybil(Sybil):
    """Sends forged messages all the time, and an altered copy of every real one to all its peers.

    The altered copy has the real one's id and author, so that who does not check first would hold the real one for a
    duplicate of it.
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
        """Alter what is new."""
        effects: list[Effect] = []
        for message in rpc.messages:
            if message.id not in self._altered and message.signature != FORGED_SIGNATURE:
                self._altered[message.id] = None
                copy = self.stage.forge(message.author, message.topic, FORGED_DATA + message.data, message.seqno)
                effects.append(Send(tuple(self.linked), Rpc((copy,)), Lane.MESSAGE))
        return effects

    def next_deadline(self) -> float | None:
        """Ten times a second."""
        return self.stage.world.agenda.now + self._INTERVAL_S

    def on_deadline(self, now: float) -> list[Effect]:
        """A message in the name of some honest node."""
        if not self.linked:
            return []
        self._count += 1
        author = self.stage.world.identities[self.stage.rng.randrange(self.stage.victims)]
        seqno = (1 << 60 | self.stage.number << 24 | self._count).to_bytes(8, "big")
        message = self.stage.forge(author, self.stage.topic, FORGED_DATA, seqno)
        return [Send(tuple(self.linked), Rpc((message,)), Lane.MESSAGE)]


ATTACKS: Final[Mapping[str, str]] = {
    "cold-boot-eclipse": "sybils fill the meshes while the network boots, and forward nothing",
    "covert-flash": "sybils behave well until a third of the messages is published, then forward nothing",
    "graft-flood": "sybils graft four times a second, whatever the backoff",
    "message-spam": "sybils send forged messages, and altered copies of real ones, with bad signatures",
}
"""Name → what happens."""


def make_sybil(attack: str, stage: Stage, make_router: Callable[[], Router]) -> "Sybil | CovertSybil":
    """A sybil of an attack. ``make_router``: for attacks that play an honest peer."""
    if attack == "covert-flash":
        return CovertSybil(stage, make_router())
    kinds: dict[str, type[ColdBootSybil] | type[GraftFloodSybil] | type[MessageSpamSybil]] = {
        "cold-boot-eclipse": ColdBootSybil,
        "graft-flood": GraftFloodSybil,
        "message-spam": MessageSpamSybil,
    }
    return kinds[attack](stage)
