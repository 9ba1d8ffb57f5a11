"""The part of a `Queue` that knows of several nodes: as the home of partitions, or as one of them (a share). Pure."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dep2p.errors import QueueMovedError
from dep2p.protocols.queues.exclusive_channel import ExclusiveChannel
from dep2p.protocols.queues.message import NewMessage
from dep2p.protocols.queues.names import logical_partition
from dep2p.protocols.queues.options import QueueOptions
from dep2p.protocols.queues.ordering.placement import Place, Served, readable
from dep2p.protocols.queues.ordering.route_table import RouteTable
from dep2p.protocols.queues.partition_log import PartitionLog


class PlacedParts:
    """Mixed into `Queue`."""

    book: Any
    name: str
    options: QueueOptions
    partition_ids: tuple[int, ...]
    channels: dict[str, Any]
    logs: dict[int, PartitionLog]
    counts: Counter[str]
    _routes: RouteTable | None

    def __init__(self) -> None:
        self.places: dict[int, Place] = {}
        """Where each partition is, of a queue on several nodes; its own logs stay empty then."""
        self.growing: dict[int, Place] = {}
        """Partitions that an expansion is about to add there."""
        self.made_by = ""
        """The member that made it, by peer id; empty for this node itself."""
        self.serves: Served | None = None
        """What a share of such a queue takes."""

    @property
    def routes(self) -> RouteTable:
        """See `Queue`."""
        raise NotImplementedError

    @property
    def items(self) -> int:
        """See `Queue`."""
        raise NotImplementedError

    def _add(self, ids: Sequence[int], routes: RouteTable) -> None:
        raise NotImplementedError

    @property
    def open_partitions(self) -> tuple[int, ...]:
        """Those that consumers of an exclusive channel may be given before anything is known of barriers."""
        return readable(self.routes, lambda _partition: 0) if self.places else self.partition_ids

    def place(self, places: Mapping[int, Place]) -> None:
        """Its partitions are there; once. Raises ``ValueError`` when it is used already."""
        if self.items or self.channels or self.serves is not None:
            raise ValueError(f"the queue {self.name!r} is in use on this node alone: its partitions cannot move")
        self.places = dict(places)
        self.book.define_queue(self)

    def plan_growth(self, places: Mapping[int, Place]) -> None:
        """These partitions are to be added; kept, so that what was begun is ended after a crash, too."""
        self.growing = dict(places)
        self.book.define_queue(self)

    def grow(self, last_seq: Mapping[int, int]) -> list[int]:
        """Every share serves its new range: the planned partitions are in the table from now on.

        ``last_seq``: by partition, the last number that was given in a share that was narrowed.
        """
        added, self.growing = self.growing, {}
        self.places.update(added)
        self._add(list(added), self.routes.expanded(list(added), last_seq))
        return list(added)

    def passed(self, floors: Mapping[str, Callable[[int], int]]) -> None:
        """How far each channel is in the shares: exclusive ones get the partitions whose barriers they have passed."""
        for name, floor in floors.items():
            channel = self.channels.get(name)
            if isinstance(channel, ExclusiveChannel):
                channel.set_partitions(readable(self.routes, floor))
        if self.channels and all(name in floors for name in self.channels):
            settled = self.routes.settled(list(floors.values()))
            if settled.routes != self.routes.routes:
                self._routes = settled
                self.book.define_queue(self)

    def serve(self, low: int, high: int) -> int:
        """This queue is a share of that range of logical partitions, from now on. Gives the last number so far.

        Raises ``ValueError`` for a queue that is none, or for more than it has.
        """
        if len(self.partition_ids) != 1 or self.places:
            raise ValueError(f"the queue {self.name!r} cannot be a share of another one")
        wanted = Served(low, high, low, high) if self.serves is None else self.serves.narrowed(low, high)
        if wanted != self.serves:
            self.serves = wanted
            self.book.define_queue(self)
        return self.logs[self.partition_ids[0]].last_seq

    def _require_served(self, messages: Sequence[NewMessage]) -> None:
        serves = self.serves
        assert serves is not None
        is_strict = self.options.order == "strict"
        elsewhere = 0
        for message in messages:
            if not message.key:
                continue
            logical = logical_partition(message.key)
            if not serves.takes(logical, is_strict=is_strict):
                self.counts["refused_moved"] += len(messages)
                raise QueueMovedError(f"a key of the logical partition {logical} does not belong to {self.name!r} now")
            elsewhere += not serves.low <= logical < serves.high
        if elsewhere:
            self.counts["published_elsewhere"] += elsewhere
