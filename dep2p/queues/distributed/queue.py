"""Queues whose partitions are on several nodes, as their publishers and consumers see them.

A message goes straight to its partition's node, by a table that is kept here and asked for anew when that node says
that a key has moved. So the controller may be away while messages are published and consumed.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import trio
from msgspec import UNSET

from dep2p.concurrency.exception_groups import open_nursery_unwrapped
from dep2p.errors import (
    Dep2pError,
    PartitionMovedError,
    QueueNotFoundError,
    QueuePartlyPublishedError,
    RequestTimeoutError,
)
from dep2p.protocols.queues.admin import AdminRequest, CreateChannel, DescribeRoute, R
from dep2p.protocols.queues.names import message_id
from dep2p.protocols.queues.ordering.key_queues import key_of
from dep2p.protocols.queues.ordering.placement import Placement, ShardLocation
from dep2p.protocols.queues.wire.frames import WireMessage
from dep2p.protocols.timing.backoff import Backoff
from dep2p.queues.consumer import Consumer
from dep2p.queues.distributed.consumer import DistributedConsumer
from dep2p.queues.distributed.interfaces import MemberQueues
from dep2p.queues.distributed.shard_client import away
from dep2p.queues.distributed.simple_consumer import DistributedSimpleConsumer
from dep2p.queues.remote.abandoned_receives import Receivings, Start
from dep2p.queues.types import UNREACHABLE_ERRORS, SubscribeOptions

logger: logging.Logger = logging.getLogger("dep2p.queues")

_OFF_PARTITION_AFTER_S: Final = 2.0
"""The time for which a best-effort message is offered to its own node, before it goes to another one."""
_LATE_S: Final = 0.5
"""After this time messages that are not taken count as waiting, and the log says so."""
_AWAY_S: Final = 5.0
"""The time for which a failed node is not tried first again."""
_NOWHERE: Final = (0, 0)
_BACKOFF: Final = Backoff(first_s=0.05, max_s=1.0)


@dataclass(frozen=True, slots=True)
class QueueNodes:
    """Access of a distributed queue to its nodes."""

    controllers: Callable[[], Sequence[str]]
    """Return the nodes that may be the controller, the present one first."""
    controller: MemberQueues
    at: Callable[[str], MemberQueues]
    """Return the queues of a node, by its id."""
    is_up: Callable[[str], bool]
    """Whether a node is connected."""


@dataclass(slots=True)
class _PublishRound:
    """One try to publish messages, by one table."""

    used: Placement
    messages: Sequence[WireMessage]
    points: list[tuple[int, int]]
    """For each message its partition and its place there, or `_NOWHERE`; shared by all rounds."""
    deadline: float
    moved: list[int] = field(default_factory=list[int])
    """Indices of messages whose keys have moved to another partition."""
    errors: list[Exception] = field(default_factory=list[Exception])


class DistributedQueue:
    """A queue whose partitions are on several nodes. Made by `QueueService.distributed`."""

    def __init__(
        self,
        name: str,
        nodes: QueueNodes,
        counters: Counter[str],
        receivings: Receivings,
        start: Start,
    ) -> None:
        self.name = name
        self.simple: DistributedSimpleConsumer = DistributedSimpleConsumer(self, nodes.at, receivings, start)
        self.waiting: int = 0
        """Messages in key queues for nodes that are away."""
        self._controllers = nodes.controllers
        self._controller = nodes.controller
        self._at = nodes.at
        self._is_up = nodes.is_up
        self._counters = counters
        self._start = start
        self._placement: Placement | None = None
        self._refreshing = trio.Lock()
        self._turn = 0
        self._away_until: dict[str, float] = {}
        self._reported_away: dict[str, None] = {}

    async def placement(self, other_than: Placement | None = None) -> Placement:
        """Return the known placement, or ask the controller when that is still ``other_than``.

        Raises QueueNotFoundError when the controller has it no more, or as a local queue; ProtocolError for a table
        that cannot be.
        """
        if self._placement is not None and self._placement is not other_than:
            return self._placement  # also while another caller waits for the controller
        async with self._refreshing:
            if self._placement is None or self._placement is other_than:
                placement = (await self._controller.ask(DescribeRoute(queue=self.name, brief=True))).placement
                if placement is UNSET:
                    raise QueueNotFoundError(f"the queue {self.name!r} is on several nodes no more: it was made anew")
                # One request at a time: a lower version is of a queue that was made anew.
                self._placement = Placement.of_controller(placement, self.name, *self._controllers())
            return self._placement

    async def ask_controller(self, request: AdminRequest[R]) -> R:
        """Carry out an administrative request at the controller."""
        return await self._controller.ask(request)

    def is_off_partition(self, key: str, partition: int) -> bool:
        """Whether a message that was published to that partition belongs to another one."""
        return self._placement is not None and self._placement.is_off_partition(key, partition)

    # Publishing

    async def publish_batch(self, messages: Sequence[WireMessage], timeout_s: float | None) -> list[tuple[int, int]]:
        """Publish messages; return the ids when all are durable. All messages without a key go to one partition, and so
        do those of one key: each group is taken as a whole or not at all.

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
        todo = list(range(len(messages)))
        used = await self.placement()
        tries = 0
        while True:
            publish_round = _PublishRound(used, messages, points, deadline)
            async with trio.open_nursery() as nursery:
                for candidates, group in self._groups(used, messages, todo).items():
                    nursery.start_soon(self._publish_group, publish_round, candidates, group)
            if publish_round.errors:
                raise publish_round.errors[0]
            if not publish_round.moved:
                return
            todo = sorted(publish_round.moved)
            before, used = used, await self.placement(used)
            if used.version == before.version:  # an expansion is under way: its table is stored last
                tries += 1
                retry_s = _BACKOFF.after(tries)
                if trio.current_time() + retry_s >= deadline:
                    raise RequestTimeoutError(
                        f"the queue {self.name!r} is being expanded, and one of its nodes is away"
                    )
                await trio.sleep(retry_s)

    def _groups(
        self, used: Placement, messages: Sequence[WireMessage], todo: Sequence[int]
    ) -> dict[tuple[int, ...], list[int]]:
        """Group the indices of messages that have the same candidate partitions. The messages of one key stay together,
        in their order."""
        self._turn += 1
        groups: dict[tuple[int, ...], list[int]] = {}
        for index in todo:
            candidates = tuple(used.candidates(key_of(messages[index].attributes), self._turn, self._is_away))
            groups.setdefault(candidates, []).append(index)
        return groups

    def _is_away(self, node: str) -> bool:
        return not self._is_up(node) and trio.current_time() < self._away_until.get(node, 0.0)

    async def _publish_group(
        self, publish_round: _PublishRound, candidates: Sequence[int], group: Sequence[int]
    ) -> None:
        used, messages, deadline = publish_round.used, publish_round.messages, publish_round.deadline
        bodies = [messages[index] for index in group]
        for tried, partition in enumerate(candidates, 1):
            location = used.locations[partition]
            left_s = deadline - trio.current_time()
            is_last = tried == len(candidates)
            patience_s = None if deadline == float("inf") else max(0.0, left_s)
            if not is_last:
                patience_s = min(_OFF_PARTITION_AFTER_S, max(0.0, left_s))
            try:
                if self._is_up(location.node):
                    # A shard is a local queue: never a table of its own, which could lead back here.
                    found = await self._at(location.node).publish_to_broker(location.shard, bodies, patience_s)
                else:
                    found = await self._publish_late(location, partition, bodies, patience_s, is_strict=used.is_strict)
            except PartitionMovedError:
                publish_round.moved.extend(group)
                return
            except UNREACHABLE_ERRORS as error:
                if is_last:
                    publish_round.errors.append(away(error, self.name, partition, location.node))
                    return
                self._away_until[location.node] = trio.current_time() + _AWAY_S
                continue
            except (Dep2pError, ValueError) as error:
                publish_round.errors.append(error)
                return
            if self._reported_away.pop(location.node, 0) is None:
                logger.info("the node %s of the queue %r is back", location.node, self.name)
            for index, (_local, seq) in zip(group, found, strict=True):
                publish_round.points[index] = (partition, seq)
                if used.is_off_partition(key_of(messages[index].attributes), partition):
                    self._counters["distributed_sent_off_partition"] += 1
            return

    async def _publish_late(
        self,
        location: ShardLocation,
        partition: int,
        bodies: Sequence[WireMessage],
        timeout_s: float | None,
        *,
        is_strict: bool,
    ) -> list[tuple[int, int]]:
        """Publish to a node without a connection: it may take a moment, or until the node is back."""
        found: list[tuple[int, int]] = []
        self.waiting += len(bodies)
        try:
            async with open_nursery_unwrapped() as nursery:
                nursery.start_soon(self._report_away, location.node, partition, len(bodies), is_strict)
                found = await self._at(location.node).publish_to_broker(location.shard, bodies, timeout_s)
                nursery.cancel_scope.cancel()
        finally:
            self.waiting -= len(bodies)
        return found

    async def _report_away(self, node: str, partition: int, items: int, is_strict: bool) -> None:
        await trio.sleep(_LATE_S)
        if is_strict:
            self._counters["distributed_waited_in_key_queue"] += items
        if node not in self._reported_away:
            self._reported_away[node] = None
            what = "wait in their key queues" if is_strict else "go to other nodes"
            logger.warning(
                "the node %s of partition %d of the queue %r cannot be reached: messages %s",
                node,
                partition,
                self.name,
                what,
            )

    # Publishing under numbers

    async def destinations(self, messages: Sequence[WireMessage], *, is_stale: bool) -> list[str]:
        """Return the destination of each message for `publish_sequenced`, as a text that may be kept.

        All messages of a key have one destination, and those without a key have one, too. ``is_stale``: the known table
        is old, since a destination from it did not take a message.
        """
        used = await self.placement(self._placement if is_stale else None)
        self._turn += 1
        found: list[str] = []
        for message in messages:
            partition = used.candidates(key_of(message.attributes), self._turn, self._is_away)[0]
            found.append(" ".join((str(partition), *used.locations[partition])))
        return found

    async def publish_sequenced(
        self, destination: str, messages: Sequence[WireMessage], publisher: tuple[bytes, int]
    ) -> list[tuple[int, int]]:
        """Publish all messages or none to one of `destinations`: only that node knows the producer's numbers.

        Raises PartitionMovedError when a key has moved, and nothing was taken; ``ValueError`` for a bad destination.
        """
        partition, location = _parse_destination(destination)
        try:
            found = await self._at(location.node).publish_sequenced(location.shard, messages, publisher)
        except UNREACHABLE_ERRORS as error:
            self._away_until[location.node] = trio.current_time() + _AWAY_S
            raise away(error, self.name, partition, location.node) from error
        if self._placement is not None and partition in self._placement.locations:
            used = self._placement
            self._counters["distributed_sent_off_partition"] += sum(
                used.is_off_partition(key_of(message.attributes), partition) for message in messages
            )
        return [(partition, seq) for _local, seq in found]

    # Consuming

    async def open_consumer(
        self,
        channel: str,
        options: SubscribeOptions,
    ) -> Consumer:
        """Open a consumer of all partitions, or of those that the controller assigns to it."""
        await self.placement()
        await self._controller.ask(
            CreateChannel(
                queue=self.name,
                channel=channel,
                from_start=options.from_start,
                filter=options.filter,
                exclusive=options.exclusive,
            )
        )
        of_distributed = replace(options, of_distributed=True)
        token = await self._controller.open_subscription(
            self.name, channel, replace(of_distributed, max_in_flight=1, bytes_max=None)
        )

        async def open_shard(partition: int, ready: int) -> Consumer:
            used = await self.placement()
            if partition not in used.locations:
                used = await self.placement(used)
            location = used.locations.get(partition)
            if location is None:
                raise PartitionMovedError(
                    f"the controller of {self.name!r} has said nothing of the partition {partition} yet"
                )
            return await self._at(location.node).open_subscription(
                location.shard, channel, replace(of_distributed, max_in_flight=ready)
            )

        async def partitions() -> tuple[int, ...]:
            return (await self.placement(self._placement)).partitions

        consumer = DistributedConsumer(self.name, channel, options.max_in_flight, token, open_shard, partitions)
        self._start(consumer.run)
        return consumer


def _parse_destination(text: str) -> tuple[int, ShardLocation]:
    partition, *location = text.split(" ")
    if not (partition.isascii() and partition.isdigit()) or len(location) != 2:
        raise ValueError(f"{text[:80]!r} is no destination of a queue on several nodes")
    return int(partition), ShardLocation(*location)
