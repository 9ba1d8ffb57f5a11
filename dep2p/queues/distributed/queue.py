"""Queues whose partitions are on several nodes, as their publishers and consumers see them.

A message goes straight to its partition's node, by a table that is kept here and asked for anew when that node says
that a key has moved. So the home may be away while messages are published and consumed.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import trio

from dep2p.errors import (
    Dep2pError,
    QueueMovedError,
    QueueNotFoundError,
    QueuePartlyPublishedError,
    RequestTimeoutError,
)
from dep2p.protocols.queues.ordering.key_queues import key_of
from dep2p.protocols.queues.ordering.placement import Place, Placement
from dep2p.protocols.queues.wire import WireMessage
from dep2p.queues.consumer import Consumer
from dep2p.queues.distributed.consumer import PlacedConsumer
from dep2p.queues.distributed.queue_placed_rows import away
from dep2p.queues.distributed.shard_client import AWAY
from dep2p.queues.distributed.simple_consumer import PlacedSimple
from dep2p.queues.remote.abandoned_receives import Receivings, Start
from dep2p.queues.types import message_id

if TYPE_CHECKING:
    from dep2p.queues.service.realm_queues import RealmQueues

logger = logging.getLogger("dep2p.queues")

_ELSEWHERE_AFTER_S: Final = 2.0
"""So long a best-effort message is offered to its own node, before it goes to another one."""
_LATE_S: Final = 0.5
"""What is not taken by then waits, and that is said."""
_AWAY_S: Final = 5.0
"""A node that failed is not tried first again for so long."""
_NOWHERE: Final = (0, 0)
_RETRY_FIRST_S: Final = 0.05
_RETRY_MAX_S: Final = 1.0


class HomeQueues(Protocol):
    """The queues of the home."""

    async def ask(self, op: str, fields: Mapping[str, object]) -> dict[str, Any]:
        """An administrative request."""
        ...

    async def open_subscription(
        self,
        name: str,
        channel: str,
        *,
        max_in_flight: int,
        from_start: bool,
        bytes_max: int | None,
        filter_text: str,
        exclusive: bool,
        of_placed: bool,
    ) -> Consumer:
        """A consumer of that queue itself."""
        ...


class PlacedQueue:
    """One such queue. Made by `QueueService.placed`."""

    def __init__(
        self,
        name: str,
        homes: Callable[[], Sequence[str]],
        home: HomeQueues,
        at: Callable[[str], "RealmQueues"],
        is_up: Callable[[str], bool],
        counters: Counter[str],
        receivings: Receivings,
        start: Start,
    ) -> None:
        self.name = name
        self.simple = PlacedSimple(self, at, receivings, start)
        self.waiting = 0
        """Messages in line for nodes that are away."""
        self._homes = homes
        self._home = home
        self._at = at
        self._is_up = is_up
        self._counters = counters
        self._start = start
        self._placement: Placement | None = None
        self._refreshing = trio.Lock()
        self._turn = 0
        self._away_until: dict[str, float] = {}
        self._told_away: dict[str, None] = {}

    async def placement(self, other_than: Placement | None = None) -> Placement:
        """What is known, or what the home says when that is still ``other_than``.

        Raises QueueNotFoundError when the home has it no more, or as a plain queue; ProtocolError for a table that
        cannot be.
        """
        if self._placement is not None and self._placement is not other_than:
            return self._placement  # also while the home, which somebody else asks, does not answer
        async with self._refreshing:
            if self._placement is None or self._placement is other_than:
                answer = await self._home.ask("route", {"queue": self.name, "brief": True})
                if "placement" not in answer:
                    raise QueueNotFoundError(f"the queue {self.name!r} is on several nodes no more: it was made anew")
                # One request at a time: a lower version is of a queue that was made anew.
                self._placement = Placement.of_home(answer["placement"], self.name, *self._homes())
            return self._placement

    async def ask_home(self, op: str, fields: Mapping[str, object]) -> dict[str, Any]:
        """An administrative request."""
        return await self._home.ask(op, fields)

    def is_elsewhere(self, key: str, partition: int) -> bool:
        """Whether a message that was published to that partition belongs to another one."""
        return self._placement is not None and self._placement.is_elsewhere(key, partition)

    # Publishing

    async def publish_batch(self, messages: Sequence[WireMessage], timeout_s: float | None) -> list[tuple[int, int]]:
        """Returns the ids when all are durable. All messages without a key go to one partition, and those of a key do,
        too: each of these groups is taken as a whole or not at all.

        Raises QueuePartlyPublishedError when some were taken, and others not.
        """
        points: list[tuple[int, int]] = [_NOWHERE] * len(messages)
        try:
            await self._publish_all(messages, timeout_s, points)
        except Dep2pError as error:
            taken = {index: message_id(*point) for index, point in enumerate(points) if point is not _NOWHERE}
            if not taken:
                raise
            raise QueuePartlyPublishedError(
                f"{len(taken)} of {len(messages)} messages are in the queue {self.name!r}, the others are not: {error}",
                taken,
            ) from error
        return points

    async def _publish_all(
        self, messages: Sequence[WireMessage], timeout_s: float | None, points: list[tuple[int, int]]
    ) -> None:
        deadline = float("inf") if timeout_s is None else trio.current_time() + timeout_s
        errors: list[Exception] = []
        todo = list(range(len(messages)))
        used = await self.placement()
        retry_s = _RETRY_FIRST_S
        while True:
            moved: list[int] = []
            async with trio.open_nursery() as nursery:
                for candidates, group in self._groups(used, messages, todo).items():
                    nursery.start_soon(
                        self._publish_group, used, candidates, messages, group, points, moved, errors, deadline
                    )
            if errors:
                raise errors[0]
            if not moved:
                return
            todo = sorted(moved)
            before, used = used, await self.placement(used)
            if used.version == before.version:  # an expansion is under way: its table is stored last
                if trio.current_time() + retry_s >= deadline:
                    raise RequestTimeoutError(
                        f"the queue {self.name!r} is being expanded, and one of its nodes is away"
                    )
                await trio.sleep(retry_s)
                retry_s = min(2 * retry_s, _RETRY_MAX_S)

    def _groups(
        self, used: Placement, messages: Sequence[WireMessage], todo: Sequence[int]
    ) -> dict[tuple[int, ...], list[int]]:
        """What goes together: all of a key do, in their order."""
        self._turn += 1
        groups: dict[tuple[int, ...], list[int]] = {}
        for index in todo:
            candidates = tuple(used.candidates(key_of(messages[index].attributes), self._turn, self._is_away))
            groups.setdefault(candidates, []).append(index)
        return groups

    def _is_away(self, node: str) -> bool:
        return not self._is_up(node) and trio.current_time() < self._away_until.get(node, 0.0)

    async def _publish_group(
        self,
        used: Placement,
        candidates: Sequence[int],
        messages: Sequence[WireMessage],
        group: Sequence[int],
        points: list[tuple[int, int]],
        moved: list[int],
        errors: list[Exception],
        deadline: float,
    ) -> None:
        bodies = [messages[index] for index in group]
        for tried, partition in enumerate(candidates, 1):
            place = used.places[partition]
            left_s = deadline - trio.current_time()
            is_last = tried == len(candidates)
            patience_s = None if deadline == float("inf") else max(0.0, left_s)
            if not is_last:
                patience_s = min(_ELSEWHERE_AFTER_S, max(0.0, left_s))
            try:
                if self._is_up(place.node):
                    # A share is a plain queue: never a table of its own, which could lead back here.
                    found = await self._at(place.node).publish_plain(place.share, bodies, patience_s)
                else:
                    found = await self._publish_late(place, partition, bodies, patience_s, is_strict=used.is_strict)
            except QueueMovedError:
                moved.extend(group)
                return
            except AWAY as error:
                if is_last:
                    errors.append(away(error, self.name, partition, place.node))
                    return
                self._away_until[place.node] = trio.current_time() + _AWAY_S
                continue
            except (Dep2pError, ValueError) as error:
                errors.append(error)
                return
            if self._told_away.pop(place.node, 0) is None:
                logger.info("the node %s of the queue %r is back", place.node, self.name)
            for index, (_local, seq) in zip(group, found, strict=True):
                points[index] = (partition, seq)
                if used.is_elsewhere(key_of(messages[index].attributes), partition):
                    self._counters["placed_sent_elsewhere"] += 1
            return

    async def _publish_late(
        self, place: Place, partition: int, bodies: Sequence[WireMessage], timeout_s: float | None, *, is_strict: bool
    ) -> list[tuple[int, int]]:
        """To a node without a connection: it may take a moment, or until the node is back."""
        found: list[tuple[int, int]] = []
        errors: list[Exception] = []
        self.waiting += len(bodies)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._tell, place.node, partition, len(bodies), is_strict)
                try:
                    found = await self._at(place.node).publish_plain(place.share, bodies, timeout_s)
                except Exception as error:  # raised as it is, not in the nursery's group
                    errors.append(error)
                nursery.cancel_scope.cancel()
        finally:
            self.waiting -= len(bodies)
        if errors:
            raise errors[0]
        return found

    async def _tell(self, node: str, partition: int, items: int, is_strict: bool) -> None:
        await trio.sleep(_LATE_S)
        if is_strict:
            self._counters["placed_waited_in_line"] += items
        if node not in self._told_away:
            self._told_away[node] = None
            what = "wait in line" if is_strict else "go to other nodes"
            logger.warning(
                "the node %s of partition %d of the queue %r cannot be reached: messages %s",
                node,
                partition,
                self.name,
                what,
            )

    # Publishing under numbers

    async def destinations(self, messages: Sequence[WireMessage], *, is_stale: bool) -> list[str]:
        """Where each message is to be published with `publish_numbered`, as a text that may be kept.

        All messages of a key have one destination, and those without a key have one, too. ``is_stale``: the table that
        is known here is old, since a destination that it gave did not take a message.
        """
        used = await self.placement(self._placement if is_stale else None)
        self._turn += 1
        found: list[str] = []
        for message in messages:
            partition = used.candidates(key_of(message.attributes), self._turn, self._is_away)[0]
            found.append(" ".join((str(partition), *used.places[partition])))
        return found

    async def publish_numbered(
        self, destination: str, messages: Sequence[WireMessage], publisher: tuple[bytes, int]
    ) -> list[tuple[int, int]]:
        """To one of `destinations`, and nowhere else: only there its numbers are known. All or none.

        Raises QueueMovedError when a key has moved, and nothing was taken; ``ValueError`` for no destination.
        """
        partition, place = _parse_destination(destination)
        try:
            found = await self._at(place.node).publish_numbered(place.share, messages, publisher)
        except AWAY as error:
            self._away_until[place.node] = trio.current_time() + _AWAY_S
            raise away(error, self.name, partition, place.node) from error
        if self._placement is not None and partition in self._placement.places:
            used = self._placement
            self._counters["placed_sent_elsewhere"] += sum(
                used.is_elsewhere(key_of(message.attributes), partition) for message in messages
            )
        return [(partition, seq) for _local, seq in found]

    # Consuming

    async def open_consumer(
        self,
        channel: str,
        *,
        max_in_flight: int,
        from_start: bool,
        bytes_max: int | None,
        filter_text: str,
        exclusive: bool,
    ) -> Consumer:
        """A consumer of all partitions, or of those that the home allocates to it."""
        await self.placement()
        wanted: dict[str, object] = {"queue": self.name, "channel": channel, "from_start": from_start}
        if filter_text:
            wanted["filter"] = filter_text
        if exclusive:
            wanted["exclusive"] = True
        await self._home.ask("create_channel", wanted)
        token = await self._home.open_subscription(
            self.name,
            channel,
            max_in_flight=1,
            from_start=from_start,
            bytes_max=None,
            filter_text=filter_text,
            exclusive=exclusive,
            of_placed=True,
        )

        async def open_share(partition: int, ready: int) -> Consumer:
            used = await self.placement()
            if partition not in used.places:
                used = await self.placement(used)
            place = used.places.get(partition)
            if place is None:
                raise QueueMovedError(f"the home of {self.name!r} has told nothing of the partition {partition} yet")
            return await self._at(place.node).open_subscription(
                place.share,
                channel,
                max_in_flight=ready,
                from_start=from_start,
                bytes_max=bytes_max,
                filter_text=filter_text,
                exclusive=exclusive,
                of_placed=True,
            )

        async def partitions() -> tuple[int, ...]:
            return (await self.placement(self._placement)).partitions

        consumer = PlacedConsumer(self.name, channel, max_in_flight, token, open_share, partitions)
        self._start(consumer.run)
        return consumer


def _parse_destination(text: str) -> tuple[int, Place]:
    partition, *place = text.split(" ")
    if not (partition.isascii() and partition.isdigit()) or len(place) != 2:
        raise ValueError(f"{text[:80]!r} is no destination of a queue on several nodes")
    return int(partition), Place(*place)
