"""What a producer knows of the places that a queue's messages can go to. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from dep2p.protocols.queues.names import logical_partition
from dep2p.protocols.queues.ordering.route_table import RouteTable


class Kind(Enum):
    """Of a message; a place takes some of them."""

    NORMAL = auto()
    ORDERED = auto()
    """It has an order key."""
    DELAYED = auto()
    """It has an order key and a delay: those behind it would wait, or overtake it."""
    TRANSACTIONAL = auto()
    """It has one attempt: its producer decides what comes after a failure."""


ALL_KINDS = frozenset(Kind)


@dataclass(slots=True)
class Candidate:
    """A place that takes messages: a partition, or a node that has the queue."""

    id: int
    accepts: frozenset[Kind] = ALL_KINDS
    paused_until: float = 0.0
    """Told so by it (flow control): nothing is sent before."""
    failures: int = 0
    """Since it last worked."""
    avoided_until: float = 0.0
    """It has failed: until then others are preferred."""


@dataclass(slots=True)
class RouteCache:
    """The latest route table that was seen, and the state of each of its candidates."""

    table: RouteTable | None = None
    candidates: dict[int, Candidate] = field(default_factory=dict[int, Candidate])
    _turn: int = 0

    @property
    def version(self) -> int:
        """0: none was seen yet."""
        return 0 if self.table is None else self.table.version

    def take(self, table: RouteTable, accepts: Mapping[int, Iterable[Kind]] | None = None) -> bool:
        """Use a route table; one that is older than the one in use is ignored. Gives whether it was taken.

        ``accepts``: the kinds that a partition takes, all where nothing is said.
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

    def home(self, key: str) -> Candidate:
        """Where an order key belongs. Raises ``ValueError`` when there is no route table."""
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
