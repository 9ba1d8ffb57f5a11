"""Measurements of a simulation: when each node got each message, over how many hops, and how many copies that took."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from dep2p.gossipsub.effects import Lane
from dep2p.gossipsub.rpc import Rpc, RpcMessage
from dep2p.protocols.timing.percentile import percentile
from dep2p.testing.simulator.messages import FORGED_DATA

_NEVER: Final = -1.0
_HOPS_MAX: Final = 255


class MessageRecord:
    """One published message: the time of delivery and the hops at each honest node."""

    __slots__ = ("at", "delivered_at", "hops", "publisher")

    def __init__(self, publisher: int, at: float, nodes: int) -> None:
        self.publisher: int = publisher
        self.at: float = at
        self.delivered_at: array[float] = array("d", [_NEVER]) * nodes
        self.hops: bytearray = bytearray(nodes)
        """Hops at each node; 0 where the message never came, or at the publisher."""
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
        """Summarize the values; all fields are 0 when there are none."""
        ordered = sorted(values)
        if not ordered:
            return cls()
        p50, p90, p99 = (percentile(ordered, share) for share in (0.5, 0.9, 0.99))
        return cls(sum(ordered) / len(ordered), p50, p90, p99, ordered[-1])

    def as_object(self, digits: int = 2) -> dict[str, float]:
        """Return the fields, rounded, for JSON."""
        return {name: round(getattr(self, name), digits) for name in ("mean", "p50", "p90", "p99", "max")}


@dataclass(slots=True)
class Deliveries:
    """Deliveries of the messages to honest nodes that were up when a message was published and long enough after."""

    expected: int = 0
    """Pairs of a message and a node that should have got it; the publisher is none of them."""
    made: int = 0
    latency_ms: Spread = field(default_factory=Spread)
    hops: Spread = field(default_factory=Spread)
    worst_message: float = 1.0
    """The delivery ratio of the message that did worst."""

    @property
    def ratio(self) -> float:
        """Deliveries made over those expected, 1 when none was expected."""
        return self.made / self.expected if self.expected else 1.0


class Metrics:
    """Counts of the world while it runs. ``honest``: nodes with lower numbers are measured, the others only counted."""

    def __init__(self, honest: int, mix: Callable[[bytes], None]) -> None:
        self._honest = honest
        self._mix = mix
        self.records: dict[bytes, MessageRecord] = {}
        self.downs: dict[int, list[tuple[float, float]]] = {}
        """Times (from, to) at which a node was down."""
        self.up_since: dict[int, float] = {}
        """The virtual time at which a node came back last; it has forgotten everything that it got before."""
        self.copies: int = 0
        """Messages sent to neighbours, own publishes included, by honest nodes."""
        self.deliveries: int = 0
        self.delivered_twice: int = 0
        self.forged_delivered: int = 0
        """Deliveries of messages that no honest node published."""
        self.rpcs: dict[str, int] = {}
        """RPCs sent by honest nodes, by their content."""
        self.drops: dict[str, int] = {}
        """RPCs that did not arrive, by reason."""
        self.disconnects: dict[str, int] = {}
        """Links that routers gave up: to honest peers, to sybils."""
        self.publishes_refused = 0

    def published(self, number: int, message: RpcMessage, now: float) -> None:
        """Note that an honest node published."""
        if number < self._honest:
            self.records[message.id] = MessageRecord(number, now, self._honest)
            self._mix(b"publish %d %a %a" % (number, message.id, now))

    def delivered(self, number: int, message: RpcMessage, sender: int, now: float) -> None:
        """Note that a router handed a message to its app; ``sender`` is -1 for an own one."""
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
        """Count an RPC that an honest node sent to ``count`` neighbours."""
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
        """Count an RPC that did not arrive."""
        self.drops[reason] = self.drops.get(reason, 0) + 1

    def disconnected(self, number: int, other: int) -> None:
        """Count a link that a router gave up."""
        if number < self._honest:
            whom = "honest peers" if other < self._honest else "sybils"
            self.disconnects[whom] = self.disconnects.get(whom, 0) + 1

    def is_down(self, number: int, start: float, end: float) -> bool:
        """Whether a node was down at some time in between."""
        return any(down < end and up > start for down, up in self.downs.get(number, ()))

    def summary(self, grace_s: float, *, node: int | None = None, publisher: int | None = None) -> Deliveries:
        """Evaluate the deliveries. A node counts for a message when it was up from its publication to ``grace_s`` after
        it.

        ``node``: what one node got. ``publisher``: the messages of one.
        """
        result = Deliveries()
        latencies: list[float] = []
        hops: list[float] = []
        for record in self.records.values():
            if publisher is not None and record.publisher != publisher:
                continue
            expected = made = 0
            for number, at in enumerate(record.delivered_at):
                if number == record.publisher or node not in (None, number):
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
