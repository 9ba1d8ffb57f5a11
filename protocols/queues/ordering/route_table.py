"""The route table of a queue: ranges of the 1,024 logical partitions, and which partition has each. Versioned. Pure.

Expansion only splits ranges (renumbering 2 to 4 would move 768 of 1,024, splitting moves 512). What moves has a
barrier: in the new partition it is readable for a channel only when the channel has done everything that was in the
old one at that time; so the order of a key holds across an expansion.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from dep2p.encoding.shapes import list_of, row_of
from dep2p.errors import ProtocolError
from dep2p.protocols.queues.names import LOGICAL_PARTITIONS, ranges

_BARRIERS_MAX: Final = 10
"""Barriers in front of a range: a range can be halved no more often."""


class Barrier(NamedTuple):
    """A barrier: everything in a partition up to a number is done first."""

    partition: int
    end_seq: int


class Route(NamedTuple):
    """A range of logical partitions, and the partition of its messages."""

    low: int
    high: int
    """Exclusive."""
    partition: int
    after: tuple[Barrier, ...] = ()
    """Oldest first."""

    def is_readable(self, partition: int, ack_floor: Callable[[int], int]) -> bool:
        """Whether a channel may read messages of the range from a partition, which has the range now or had it before.

        ``ack_floor``: up to where the channel has done everything in a partition.
        """
        for barrier in self.after:
            if barrier.partition == partition:
                return True
            if ack_floor(barrier.partition) < barrier.end_seq:
                return False
        return True


class RouteTable:
    """One version of the table. Raises ``ValueError`` when the routes do not cover each logical partition exactly
    once."""

    def __init__(self, version: int, routes: Sequence[Route]) -> None:
        at = 0
        for route in routes:
            if route.low != at or route.high <= route.low:
                raise ValueError(f"the route table does not cover the logical partitions from {at} on")
            at = route.high
        if at != LOGICAL_PARTITIONS or version < 1:
            raise ValueError(f"the route table ends at {at}, with version {version}")
        self.version = version
        self.routes: tuple[Route, ...] = tuple(routes)
        self.has_barriers: bool = any(route.after for route in routes)
        self._lows = [route.low for route in routes]

    @classmethod
    def first(cls, partitions: Sequence[int]) -> "RouteTable":
        """Make the table of a new queue: equal ranges in the order of its partitions."""
        shares = ranges(len(partitions))
        return cls(1, [Route(each.start, each.stop, p) for each, p in zip(shares, partitions, strict=True)])

    def of(self, logical: int) -> Route:
        """Return the route of a logical partition. Raises ``ValueError`` for one that is not from 0 to 1,023."""
        if not 0 <= logical < LOGICAL_PARTITIONS:
            raise ValueError(f"there is no logical partition {logical}: they are 0 to {LOGICAL_PARTITIONS - 1}")
        return self.routes[bisect_right(self._lows, logical) - 1]

    def expanded(self, added: Sequence[int], last_seq: Mapping[int, int]) -> "RouteTable":
        """Return the next version: each new partition takes the upper half of the widest range.

        ``last_seq``: by partition, the last number that was given so far; no message may be published by the old
        version after it was asked. Raises ``ValueError`` (a partition that is there already, too many).
        """
        used = {route.partition: None for route in self.routes}
        if len(used) + len(added) > LOGICAL_PARTITIONS:
            raise ValueError(f"a queue has at most {LOGICAL_PARTITIONS} partitions")
        routes = list(self.routes)
        for partition in added:
            if partition in used:
                raise ValueError(f"the partition {partition} is in the route table already")
            used[partition] = None
            at = max(range(len(routes)), key=lambda index: (routes[index].high - routes[index].low, -index))
            low, high, old, after = routes[at]
            middle = (low + high) // 2
            # A range that this same expansion split off has no messages of its own to wait for.
            barrier = (Barrier(old, last_seq[old]),) if last_seq.get(old) else ()
            routes[at : at + 1] = [Route(low, middle, old, after), Route(middle, high, partition, after + barrier)]
        return RouteTable(self.version + 1, routes)

    def settled(self, ack_floors: Sequence[Callable[[int], int]]) -> "RouteTable":
        """Return the same version without the barriers that every channel has passed (each one's ``ack_floor``)."""
        kept: list[Route] = []
        for route in self.routes:
            open_ = [
                each
                for each in route.after
                if not all(ack_floor(each.partition) >= each.end_seq for ack_floor in ack_floors)
            ]
            kept.append(route._replace(after=tuple(open_)))
        return RouteTable(self.version, kept)

    def lowered(self, partition: int, last_seq: int) -> "RouteTable":
        """Return the same version for a partition that turns out to have no message after ``last_seq``: no barrier is
        higher, since no consumer would ever pass it."""
        kept: list[Route] = []
        for route in self.routes:
            after = [
                Barrier(partition, min(last_seq, each.end_seq)) if each.partition == partition else each
                for each in route.after
            ]
            kept.append(route._replace(after=tuple(each for each in after if each.end_seq)))
        return RouteTable(self.version, kept)

    def to_value(self) -> list[object]:
        """Return the stored form; `from_value` reads it."""
        routes = [[r.low, r.high, r.partition, [list(barrier) for barrier in r.after]] for r in self.routes]
        return [self.version, routes]

    @classmethod
    def from_value(cls, value: object) -> "RouteTable":
        """Decode a route table. Raises ProtocolError."""
        try:
            version, given = row_of(value, 2)
            routes: list[Route] = []
            for low, high, partition, after in (row_of(each, 4) for each in list_of(given)):
                barriers = [Barrier(*map(_number, list_of(each))) for each in list_of(after)]
                if len(barriers) > _BARRIERS_MAX:
                    raise ValueError("too many barriers")
                routes.append(Route(_number(low), _number(high), _number(partition), tuple(barriers)))
            return cls(_number(version), routes)
        except (TypeError, ValueError) as error:
            raise ProtocolError(f"no route table: {error}") from None


def _number(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a whole number from 0 on")
    return value
