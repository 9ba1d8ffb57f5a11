"""Partitions of one queue on several nodes: their locations, the routes of messages, and the partitions that may be
read. Pure.

A distributed queue has its name, route table and consumers on its controller; each partition is a queue of its own (a
shard), with one log, on any node. The shard serves a range of logical partitions and refuses keys that have moved away:
so the last number that it gives when it is narrowed is a barrier, whatever publishers with an older table still send.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from dep2p.encoding.shapes import list_of, row_of
from dep2p.errors import ProtocolError
from dep2p.protocols.queues.names import check_name, logical_partition
from dep2p.protocols.queues.ordering.route_table import RouteTable
from dep2p.types import parse_peer_id

NAME_CHARS_MAX: Final = 40
"""Characters of a distributed queue's name: the names of its shards are longer, and have at most 64."""
_CONTROLLER_CHARS: Final = 8
_PARTITION_MAX: Final = (1 << 63) - 1
_NODE_CHARS_MAX: Final = 128
_SHARD: Final = re.compile(rf"[^#]+\.[0-9]+\.([1-9A-HJ-NP-Za-km-z]{{{_CONTROLLER_CHARS}}})", re.ASCII)


class ShardLocation(NamedTuple):
    """The location of a partition."""

    node: str
    """Peer id."""
    shard: str
    """The name of the queue there."""


class Served(NamedTuple):
    """The logical partitions of a shard. Both ranges exclude their ends."""

    low: int
    high: int
    first_low: int
    first_high: int
    """The range that it began with. The keys between the two ranges have moved away since."""

    def narrowed(self, low: int, high: int) -> "Served":
        """Return a smaller range. Raises ``ValueError`` for a range that is not inside the present one."""
        if not self.low <= low < high <= self.high:
            raise ValueError(f"a shard of {self.low} to {self.high} cannot serve {low} to {high}: it only gets less")
        return self._replace(low=low, high=high)

    def takes(self, logical: int, *, is_strict: bool) -> bool:
        """Whether a message with a key of that logical partition may be published here.

        A best-effort queue takes messages of other partitions whose nodes are away, but never those of keys that have
        moved: they would get behind the barrier.
        """
        if self.low <= logical < self.high:
            return True
        return not is_strict and not self.first_low <= logical < self.first_high


class Placement:
    """One version of a distributed queue's table, as publishers and consumers have it."""

    def __init__(self, routes: RouteTable, locations: Mapping[int, ShardLocation], order: str) -> None:
        """Raises ``ValueError`` when a partition has no location."""
        self.routes = routes
        self.locations: dict[int, ShardLocation] = dict(locations)
        self.is_strict: bool = order == "strict"
        self.partitions: tuple[int, ...] = tuple(sorted(ranges_of(routes)))
        missing = [each for each in self.partitions if each not in self.locations]
        if missing:
            raise ValueError(f"the partition {missing[0]} has no place")

    @property
    def version(self) -> int:
        """The version of the route table."""
        return self.routes.version

    def partition_of(self, key: str) -> int:
        """Return the partition of an order key."""
        return self.routes.of(logical_partition(key)).partition

    def is_off_partition(self, key: str, partition: int) -> bool:
        """Whether a message was published to another partition than its key's."""
        return bool(key) and self.partition_of(key) != partition

    def candidates(self, key: str, turn: int, is_away: Callable[[str], bool]) -> list[int]:
        """Return the partitions to which a message may be published, the best first. In strict order a key has one,
        away or not."""
        if key and self.is_strict:
            return [self.partition_of(key)]
        at = self.partitions.index(self.partition_of(key)) if key else turn % len(self.partitions)
        rotated = [*self.partitions[at:], *self.partitions[:at]]
        up = [each for each in rotated if not is_away(self.locations[each].node)]
        return up + [each for each in rotated if each not in up]

    def to_value(self) -> dict[str, object]:
        """Return plain values; `from_value` reads them."""
        return {
            "table": self.routes.to_value(),
            "places": [[partition, *location] for partition, location in sorted(self.locations.items())],
            "order": "strict" if self.is_strict else "best_effort",
        }

    @classmethod
    def from_value(cls, value: Mapping[str, object]) -> "Placement":
        """Decode a placement. Raises ProtocolError for wrong types or ranges, a partition twice, or one without a
        location."""
        try:
            order = value["order"]
            if not isinstance(order, str) or order not in ("strict", "best_effort"):
                raise ValueError("its order is not known")
            routes, locations = RouteTable.from_value(value["table"]), locations_from(value["places"])
            found = cls(routes, locations, order)
            if len(locations) != len(found.partitions):
                raise ValueError("a place of no partition")
            return found
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"no placement: {error}") from None

    @classmethod
    def of_controller(cls, value: Mapping[str, object], queue: str, *controllers: str) -> "Placement":
        """Decode the placement that another node sent, which is not trusted: only shards of that queue of that
        controller (or of the controllers that take turns on one store) are allowed.

        Raises ProtocolError.
        """
        found = cls.from_value(value)
        try:
            for partition, (node, shard) in found.locations.items():
                if len(node) > _NODE_CHARS_MAX:
                    raise ValueError("a node that is no peer id")
                parse_peer_id(node)
                if partition > _PARTITION_MAX or shard not in [
                    shard_name(queue, partition, controller) for controller in controllers
                ]:
                    raise ValueError(f"{shard[:80]!r} is no partition of the queue {queue[:80]!r} at {controllers[0]}")
        except ValueError as error:
            raise ProtocolError(f"no placement: {error}") from None
        return found


def locations_from(value: object) -> dict[int, ShardLocation]:
    """Decode locations by partition. Raises ``ValueError``, ``TypeError``."""
    found: dict[int, ShardLocation] = {}
    for partition, node, shard in (row_of(each, 3) for each in list_of(value)):
        if not isinstance(partition, int) or not isinstance(node, str) or not isinstance(shard, str):
            raise ValueError("a place is a partition, a node and a name")
        if partition in found:
            raise ValueError(f"two places of the partition {partition}")
        found[partition] = ShardLocation(node, shard)
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
    """Return the new range of each partition whose range an expansion changes or begins.

    The second mapping gives, for displays, the older partition that had each new one's range.
    """
    before, after = ranges_of(routes), ranges_of(routes.expanded(added, {}))
    changed = {each: after[each] for each in after if after[each] != before.get(each)}
    origin = {each: routes.of(after[each][0]).partition for each in added}
    return changed, origin


def readable(routes: RouteTable, ack_floor: Callable[[int], int]) -> tuple[int, ...]:
    """Return the partitions whose barriers a channel has passed. ``ack_floor``: the channel's ack floor in each."""
    return tuple(
        partition
        for partition in sorted(ranges_of(routes))
        if all(route.is_readable(partition, ack_floor) for route in routes.routes if route.partition == partition)
    )


def nodes_for(count: int, nodes: Sequence[str]) -> list[str]:
    """Return a node for each of so many partitions, in turn."""
    return [nodes[index % len(nodes)] for index in range(count)]


def shard_name(queue: str, partition: int, controller: str) -> str:
    """Return the name of a shard. It has the start of the controller's peer id: queues of two controllers may have one
    name and be on one node.

    Raises ``ValueError`` for a name that is too long, or that of an ephemeral queue.
    """
    check_name(queue)
    if len(queue) > NAME_CHARS_MAX or "#" in queue:
        raise ValueError(f"the name {queue!r} of a queue on several nodes: at most {NAME_CHARS_MAX} characters, no '#'")
    return f"{queue}.{partition}.{controller[-_CONTROLLER_CHARS:]}"


def is_shard_of(name: str, controller: str) -> bool:
    """Whether a queue of that name is a partition of a distributed queue of that controller."""
    found = _SHARD.fullmatch(name)
    return found is not None and found[1] == controller[-_CONTROLLER_CHARS:]
