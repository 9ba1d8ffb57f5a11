"""The destinations of a producer's messages: brokers, and what is known of each. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from dep2p.protocols.queues.names import logical_partition
from dep2p.protocols.queues.ordering.route_table import RouteTable


class Kind(Enum):
    """The kind of a message. A broker may take only some kinds."""

    NORMAL = auto()
    ORDERED = auto()
    """It has an order key."""
    DELAYED = auto()
    """It has an order key and a delay: messages behind it would wait, or overtake it."""
    TRANSACTIONAL = auto()
    """It has one attempt: its producer decides what comes after a failure."""


ALL_KINDS = frozenset(Kind)


@dataclass(slots=True)
class Candidate:
    """A broker that takes messages: a partition, or a node that has the queue."""

    id: int
    accepts: frozenset[Kind] = ALL_KINDS
    paused_until: float = 0.0
    """The broker's flow control: the producer sends it nothing before this time."""
    failures: int = 0
    """Failures since it last worked."""
    avoided_until: float = 0.0
    """It has failed: until this time the producer prefers others."""


@dataclass(slots=True)
class RouteCache:
    """The latest route table that was seen, and the state of each of its candidates."""

    table: RouteTable | None = None
    candidates: dict[int, Candidate] = field(default_factory=dict[int, Candidate])
    _turn: int = 0

    @property
    def version(self) -> int:
        """The version of the table; 0 before the first one."""
        return 0 if self.table is None else self.table.version

    def take(self, table: RouteTable, accepts: Mapping[int, Iterable[Kind]] | None = None) -> bool:
        """Use a route table, unless it is older than the one in use. Returns whether it is in use.

        ``accepts``: the kinds that a partition takes, all by default.
        """
        if table.version < self.version:
            return False
        self.table = table
        before, self.candidates = self.candidates, {}
        for route in table.routes:
            if route.partition not in self.candidates:
                kinds = frozenset((accepts or {}).get(route.partition, ALL_KINDS))
                known = before.get(route.partition)
                self.candidates[route.partition] = (
                    Candidate(route.partition, kinds) if known is None else replace(known, accepts=kinds)
                )
        return True

    def candidate_of(self, key: str) -> Candidate:
        """Return the candidate of an order key. Raises ``ValueError`` when there is no route table."""
        if self.table is None:
            raise ValueError("there is no route table yet")
        return self.candidates[self.table.of(logical_partition(key)).partition]

    def rotation(self, now: float, first: Candidate | None = None) -> list[Candidate]:
        """All candidates in the order in which they are tried: ``first``, or the next in turn; avoided ones last."""
        each = list(self.candidates.values())
        if first is None:
            self._turn = (self._turn + 1) % len(each)
            start = self._turn
        else:
            start = each.index(first)
        rotated = each[start:] + each[:start]
        return sorted(rotated, key=lambda one: one.avoided_until > now)
