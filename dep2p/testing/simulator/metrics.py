"""What a simulation measures: who got which message when, over how many hops, at which price."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from dep2p.gossipsub.effects import Lane
from dep2p.gossipsub.rpc import Message, Rpc
from dep2p.testing.simulator.messages import FORGED_DATA

_NEVER: Final = -1.0
_HOPS_MAX: Final = 255


class MessageRecord:
    """One published message: the time of delivery and the hops at each honest node."""

    __slots__ = ("at", "delivered_at", "hops", "publisher")

    def __init__(self, publisher: int, at: float, nodes: int) -> None:
        self.publisher = publisher
        self.at = at
        self.delivered_at = array("d", [_NEVER]) * nodes
        self.hops = bytearray(nodes)
        """0 where it never came, or at the publisher."""
        self.delivered_at[publisher] = at


@dataclass(slots=True)
class Spread:
    """A distribution in short."""

    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    max: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """All 0 when there are none."""
        ordered = sorted(values)
        if not ordered:
            return cls()

        def at(share: float) -> float:
            return ordered[min(len(ordered) - 1, int(len(ordered) * share))]

        return cls(sum(ordered) / len(ordered), at(0.5), at(0.9), at(0.99), ordered[-1])

    def as_object(self, digits: int = 2) -> dict[str, float]:
        """For JSON, rounded."""
        return {name: round(getattr(self, name), digits) for name in ("mean", "p50", "p90", "p99", "max")}


@dataclass(slots=True)
class Deliveries:
    """What came of the messages, over honest nodes that were up when it was published and long enough after."""

    expected: int = 0
    """Pairs of a message and a node that should have got it; the publisher is none of them."""
    made: int = 0
    latency_ms: Spread = field(default_factory=Spread)
    hops: Spread = field(default_factory=Spread)
    worst_message: float = 1.0
    """The delivery ratio of the message that did worst."""

    @property
    def ratio(self) -> float:
        """Made over expected, 1 when nothing was expected."""
        return self.made / self.expected if self.expected else 1.0


class Metrics:
    """Fed by the world while it runs. ``honest``: nodes with lower numbers are measured, the others only counted."""

    def __init__(self, honest: int, mix: Callable[[bytes], None]) -> None:
        self._honest = honest
        self._mix = mix
        self.records: dict[bytes, MessageRecord] = {}
        self.downs: dict[int, list[tuple[float, float]]] = {}
        """Times (from, to) at which a node was down."""
        self.up_since: dict[int, float] = {}
        """When a node came back last; it has forgotten what it got before."""
        self.copies = 0
        """Messages sent to neighbours, own publishes included, by honest nodes."""
        self.deliveries = 0
        self.delivered_twice = 0
        self.forged_delivered = 0
        """Deliveries of messages that nobody honest published."""
        self.rpcs: dict[str, int] = {}
        """RPCs sent by honest nodes, by what they hold."""
        self.drops: dict[str, int] = {}
        """RPCs that did not arrive, by reason."""
        self.disconnects: dict[str, int] = {}
        """Links that routers gave up: honest peers, sybils."""
        self.publishes_refused = 0

    def published(self, number: int, message: Message, now: float) -> None:
        """An honest node published."""
        if number < self._honest:
            self.records[message.id] = MessageRecord(number, now, self._honest)
            self._mix(b"publish %d %a %a" % (number, message.id, now))

    def delivered(self, number: int, message: Message, sender: int, now: float) -> None:
        """A router handed a message to its app; ``sender`` is -1 for an own one."""
        if number >= self._honest:
            return
        record = self.records.get(message.id)
        if record is None or message.data[:6] == FORGED_DATA:
            self.forged_delivered += 1
            return
        if sender < 0:
            return
        before = record.delivered_at[number]
        if before >= 0.0 and before >= self.up_since.get(number, 0.0):
            self.delivered_twice += 1
            return
        self.deliveries += 1
        record.delivered_at[number] = now
        hops = record.hops[sender] + 1 if sender < self._honest else 1
        record.hops[number] = min(hops, _HOPS_MAX)
        self._mix(b"deliver %d %d %a" % (number, sender, message.id))

    def sent(self, number: int, rpc: Rpc, count: int, lane: Lane) -> None:
        """An honest node sent an RPC to ``count`` neighbours."""
        if number >= self._honest:
            return
        rpcs = self.rpcs
        if lane is Lane.MESSAGE:
            self.copies += count * len(rpc.messages)
            rpcs["messages"] = rpcs.get("messages", 0) + count
            return
        for name in ("ihave", "iwant", "graft", "prune", "idontwant", "subscriptions", "messages"):
            if getattr(rpc, name):
                rpcs[name] = rpcs.get(name, 0) + count

    def dropped(self, reason: str) -> None:
        """An RPC did not arrive."""
        self.drops[reason] = self.drops.get(reason, 0) + 1

    def disconnected(self, number: int, other: int) -> None:
        """A router gave a link up."""
        if number < self._honest:
            whom = "honest peers" if other < self._honest else "sybils"
            self.disconnects[whom] = self.disconnects.get(whom, 0) + 1

    def is_down(self, number: int, start: float, end: float) -> bool:
        """Whether a node was down at some time in between."""
        return any(down < end and up > start for down, up in self.downs.get(number, ()))

    def summary(self, grace_s: float) -> Deliveries:
        """Evaluate. A node counts for a message when it was up from its publication to ``grace_s`` after it."""
        result = Deliveries()
        latencies: list[float] = []
        hops: list[float] = []
        for record in self.records.values():
            expected = made = 0
            for number, at in enumerate(record.delivered_at):
                if number == record.publisher:
                    continue
                if number in self.downs and self.is_down(number, record.at, record.at + grace_s):
                    continue
                expected += 1
                if at >= 0.0:
                    made += 1
                    latencies.append((at - record.at) * 1_000)
                    hops.append(record.hops[number])
            result.expected += expected
            result.made += made
            if expected:
                result.worst_message = min(result.worst_message, made / expected)
        result.latency_ms = Spread.of(latencies)
        result.hops = Spread.of(hops)
        return result
