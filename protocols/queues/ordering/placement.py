"""Partitions of one queue on several nodes: where each is, where a message goes, and what may be read. Pure.

A placed queue has its name, route table and consumers on its home; each partition is a queue of its own (a share), with
one log, on any node. The share serves a range of logical partitions and refuses keys that have moved away: so the last
number that it gives when it is narrowed is a barrier, whatever publishers with an older table still send.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

from dep2p.errors import ProtocolError
from dep2p.protocols.queues.names import check_name, logical_partition
from dep2p.protocols.queues.ordering.route_table import RouteTable
from dep2p.types import parse_peer_id

NAME_CHARS_MAX: Final = 40
"""Of a placed queue's name: its shares' names are longer, and have at most 64."""
_HOME_CHARS: Final = 8
_PARTITION_MAX: Final = (1 << 63) - 1
_NODE_CHARS_MAX: Final = 128
_SHARE: Final = re.compile(rf"[^#]+\.[0-9]+\.([1-9A-HJ-NP-Za-km-z]{{{_HOME_CHARS}}})", re.ASCII)


class Place(NamedTuple):
    """Where a partition is."""

    node: str
    """Peer id."""
    share: str
    """The name of the queue there."""


class Served(NamedTuple):
    """The logical partitions of a share. Both ranges without their ends."""

    low: int
    high: int
    first_low: int
    first_high: int
    """What it began with: between the two is what has moved away since."""

    def narrowed(self, low: int, high: int) -> "Served":
        """Raises ``ValueError`` when that is more than it has."""
        if not self.low <= low < high <= self.high:
            raise ValueError(f"a share of {self.low} to {self.high} cannot serve {low} to {high}: it only gets less")
        return self._replace(low=low, high=high)

    def takes(self, logical: int, *, is_strict: bool) -> bool:
        """Whether a message with a key of that logical partition may be published here.

        A best-effort queue takes messages of other partitions whose nodes are away, but never what has moved: it would
        get behind the barrier.
        """
        if self.low <= logical < self.high:
            return True
        return not is_strict and not self.first_low <= logical < self.first_high


class Placement:
    """One version of a placed queue's table, as publishers and consumers have it."""

    def __init__(self, routes: RouteTable, places: Mapping[int, Place], order: str) -> None:
        """Raises ``ValueError`` when a partition has no place."""
        self.routes = routes
        self.places = dict(places)
        self.is_strict = order == "strict"
        self.partitions = tuple(sorted(ranges_of(routes)))
        missing = [each for each in self.partitions if each not in self.places]
        if missing:
            raise ValueError(f"the partition {missing[0]} has no place")

    @property
    def version(self) -> int:
        """Of the route table."""
        return self.routes.version

    def partition_of(self, key: str) -> int:
        """Where an order key belongs."""
        return self.routes.of(logical_partition(key)).partition

    def is_elsewhere(self, key: str, partition: int) -> bool:
        """Whether a message was put where its key does not belong."""
        return bool(key) and self.partition_of(key) != partition

    def candidates(self, key: str, turn: int, is_away: Callable[[str], bool]) -> list[int]:
        """Where to publish a message, the best first. In strict order a key has one place, away or not."""
        if key and self.is_strict:
            return [self.partition_of(key)]
        at = self.partitions.index(self.partition_of(key)) if key else turn % len(self.partitions)
        rotated = [*self.partitions[at:], *self.partitions[:at]]
        up = [each for each in rotated if not is_away(self.places[each].node)]
        return up + [each for each in rotated if each not in up]

    def to_value(self) -> dict[str, Any]:
        """Plain values; `from_value` reads them."""
        return {
            "table": self.routes.to_value(),
            "places": [[partition, *place] for partition, place in sorted(self.places.items())],
            "order": "strict" if self.is_strict else "best_effort",
        }

    @classmethod
    def from_value(cls, value: Mapping[str, Any]) -> "Placement":
        """Raises ProtocolError for what is none: types, ranges, a partition twice, or one without a place."""
        try:
            order = value["order"]
            if order not in ("strict", "best_effort"):
                raise ValueError("its order is not known")
            routes, places = RouteTable.from_value(value["table"]), places_from(value["places"])
            found = cls(routes, places, order)
            if len(places) != len(found.partitions):
                raise ValueError("a place of no partition")
            return found
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"no placement: {error}") from None

    @classmethod
    def of_home(cls, value: Mapping[str, Any], queue: str, *homes: str) -> "Placement":
        """As another node gave it, who may want anything: the shares of that queue of that home (or of those that
        are homes in turn, since they share a store), and nothing else.

        Raises ProtocolError.
        """
        found = cls.from_value(value)
        try:
            for partition, (node, share) in found.places.items():
                if len(node) > _NODE_CHARS_MAX:
                    raise ValueError("a node that is no peer id")
                parse_peer_id(node)
                if partition > _PARTITION_MAX or share not in [share_name(queue, partition, home) for home in homes]:
                    raise ValueError(f"{share[:80]!r} is no partition of the queue {queue[:80]!r} at {homes[0]}")
        except ValueError as error:
            raise ProtocolError(f"no placement: {error}") from None
        return found


def places_from(value: object) -> dict[int, Place]:
    """By partition. Raises ``ValueError``, ``TypeError``."""
    found: dict[int, Place] = {}
    for partition, node, share in cast(list[list[object]], value):
        if not isinstance(partition, int) or not isinstance(node, str) or not isinstance(share, str):
            raise ValueError("a place is a partition, a node and a name")
        if partition in found:
            raise ValueError(f"two places of the partition {partition}")
        found[partition] = Place(node, share)
    return found


def ranges_of(routes: RouteTable) -> dict[int, tuple[int, int]]:
    """The range of each partition: expansion only splits, so that each has one. Raises ``ValueError`` otherwise."""
    found: dict[int, tuple[int, int]] = {}
    for route in routes.routes:
        if route.partition in found:
            raise ValueError(f"the partition {route.partition} has two ranges")
        found[route.partition] = (route.low, route.high)
    return found


def narrowed_by(routes: RouteTable, added: Sequence[int]) -> tuple[dict[int, tuple[int, int]], dict[int, int]]:
    """What an expansion does: the new range of each partition whose range changes or begins, and nothing else yet.

    The second: of which older partition each new one's range was, for people.
    """
    before, after = ranges_of(routes), ranges_of(routes.expanded(added, {}))
    changed = {each: after[each] for each in after if after[each] != before.get(each)}
    origin = {each: routes.of(after[each][0]).partition for each in added}
    return changed, origin


def readable(routes: RouteTable, floor: Callable[[int], int]) -> tuple[int, ...]:
    """The partitions whose barriers a channel has passed; ``floor``: up to where it has done everything in each."""
    return tuple(
        partition
        for partition in sorted(ranges_of(routes))
        if all(route.is_readable(partition, floor) for route in routes.routes if route.partition == partition)
    )


def nodes_for(count: int, nodes: Sequence[str]) -> list[str]:
    """One for each of so many partitions, in turn."""
    return [nodes[index % len(nodes)] for index in range(count)]


def share_name(queue: str, partition: int, home: str) -> str:
    """The home's peer id is in it: queues of two homes may have one name and be on one node.

    Raises ``ValueError`` for a name that is too long, or that of an ephemeral queue.
    """
    check_name(queue)
    if len(queue) > NAME_CHARS_MAX or "#" in queue:
        raise ValueError(f"the name {queue!r} of a queue on several nodes: at most {NAME_CHARS_MAX} characters, no '#'")
    return f"{queue}.{partition}.{home[-_HOME_CHARS:]}"


def is_share_of(name: str, home: str) -> bool:
    """Whether a queue of that name is a partition of a placed queue of that home."""
    found = _SHARE.fullmatch(name)
    return found is not None and found[1] == home[-_HOME_CHARS:]
