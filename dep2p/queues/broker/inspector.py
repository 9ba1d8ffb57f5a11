"""Read-only views of the queues of this node."""

from typing import Final, NamedTuple, TypedDict

from dep2p.errors import ProtocolError
from dep2p.protocols.queues.admin import (
    ChannelConsumers,
    ChannelInfo,
    ConsumerInfo,
    KeyRange,
    LockInfo,
    PartitionInfo,
    QueueAccess,
    QueueInfo,
    QueueRoute,
    QueueSummary,
    RangeBarrier,
)
from dep2p.protocols.queues.channel import Channel
from dep2p.protocols.queues.exclusive_channel import ExclusiveChannel
from dep2p.protocols.queues.message import QueuedMessage, damaged, decode_row, is_damaged
from dep2p.protocols.queues.names import is_ephemeral
from dep2p.protocols.queues.ordering.assignment import Strategy, assign_partitions
from dep2p.protocols.queues.partition_log import PartitionLog
from dep2p.protocols.queues.queue import Queue
from dep2p.protocols.queues.records import MessageRow
from dep2p.queues.broker.interfaces import EngineCore

_PAGE_ITEMS: Final = 256
_NAME_DIGITS: Final = 8
"""Hex digits shown of a member's name. A peer that knows the whole name could speak for that consumer."""
_LOOKED_AT_MAX: Final = 100_000
"""Messages that one peek at a channel reads to find some that are not done."""


class _Numbers(TypedDict):
    name: str
    messages: int
    bytes: int
    in_flight: int
    deferred: int
    dead: int
    channel_count: int
    consumers: int
    is_paused: bool
    counts: dict[str, int]


class StoredMessage(NamedTuple):
    """A message of a log, human-readable."""

    partition: int
    seq: int
    published_us: int
    due_us: int
    attempts: int
    state: str
    attributes: bytes
    body: bytes


class QueueInspector:
    """Describes the queues of one engine."""

    def __init__(self, engine: EngineCore) -> None:
        self._engine = engine
        self._counted: dict[int, None] = {}
        """Channels whose dead letters of earlier runs were counted."""

    async def summary(self, namespace: str, name: str) -> QueueSummary:
        """The queue in numbers."""
        return QueueSummary(**await self._numbers(namespace, name))

    async def info(self, namespace: str, name: str, access: QueueAccess) -> QueueInfo:
        """The queue in numbers, with options and channels."""
        numbers = await self._numbers(namespace, name)
        queue = self._engine.registry.find(namespace, name)
        channels = tuple(_channel(channel) for channel in queue.channels.values())
        return QueueInfo(**numbers, options=queue.options, access=access, channels=channels)

    async def _numbers(self, namespace: str, name: str) -> "_Numbers":
        queue = await self._engine.loaded(namespace, name)
        channels = list(queue.channels.values())
        for channel in channels:
            await self._count_dead_letters(queue, channel)
        return {
            "name": name,
            "messages": queue.items,
            "bytes": queue.size_bytes,
            "in_flight": sum(channel.in_flight for channel in channels),
            "deferred": sum(channel.deferred for channel in channels),
            "dead": sum(channel.dead_items for channel in channels),
            "channel_count": len(channels),
            "consumers": sum(len(channel.consumers) for channel in channels),
            "is_paused": queue.is_paused,
            "counts": dict(queue.counts),
        }

    async def route(self, namespace: str, name: str) -> QueueRoute:
        """The route table."""
        queue = await self._engine.loaded(namespace, name)
        routes = queue.routes
        return QueueRoute(
            version=routes.version,
            partitions=tuple(
                PartitionInfo(partition=log.id, messages=log.items, bytes=log.bytes, last_seq=log.visible)
                for log in queue.logs.values()
            ),
            routes=tuple(
                KeyRange(
                    low=route.low,
                    high=route.high,
                    partition=route.partition,
                    after=tuple(RangeBarrier(partition=each.partition, up_to=each.end_seq) for each in route.after),
                )
                for route in routes.routes
            ),
        )

    async def group(self, namespace: str, name: str, channel: str) -> ChannelConsumers:
        """The consumers of a channel, and the holder of each partition."""
        queue = await self._engine.loaded(namespace, name)
        found = queue.channel(channel)
        if not isinstance(found, ExclusiveChannel):
            names = [consumer.id.encode() for consumer in found.consumers.values()]
            shared = assign_partitions(Strategy.SHARED, queue.partition_ids, names, {})
            consumers = tuple(
                ConsumerInfo(
                    consumer=consumer.id,
                    partitions=tuple(shared[consumer.id.encode()]),
                    in_flight=len(consumer.held),
                )
                for consumer in found.consumers.values()
            )
            return ChannelConsumers(exclusive=False, consumers=consumers, locks=())
        coordinator, now = found.group.coordinator, self._engine.now()
        held = {consumer.id: len(consumer.held) for consumer in found.consumers.values()}
        return ChannelConsumers(
            exclusive=True,
            version=coordinator.version,
            lease_s=found.group.lease_s,
            consumers=tuple(
                ConsumerInfo(
                    consumer=member.label,
                    member=name.hex()[:_NAME_DIGITS],
                    partitions=tuple(coordinator.assignment.get(name, ())),
                    in_flight=held.get(member.label, 0),
                    since_s=member.since_us / 1e6,
                    lease_left_s=round(max(0.0, member.until - now), 3),
                )
                for name, member in coordinator.members.items()
            ),
            locks=tuple(
                LockInfo(
                    partition=lock.partition,
                    epoch=lock.epoch,
                    member=lock.holder.hex()[:_NAME_DIGITS],
                    consumer=coordinator.members[lock.holder].label if lock.holder in coordinator.members else "",
                    since_s=lock.since_us / 1e6,
                )
                for lock in found.group.locks.all()
            ),
        )

    async def _count_dead_letters(self, queue: Queue, channel: Channel) -> None:
        if channel.id in self._counted or is_ephemeral(channel.name) or queue.is_ephemeral:
            return
        self._counted[channel.id] = None
        if not channel.last_dead_id:
            return
        try:
            await self._engine.flush()
            channel.dead_items = await self._engine.call(self._engine.store.count_dead_letters, channel.id)
        except BaseException:  # also when the asker is gone: the next one counts
            del self._counted[channel.id]
            raise

    async def peek(
        self, namespace: str, name: str, channel: str | None = None, *, items_max: int, bytes_max: int = 1 << 20
    ) -> list[StoredMessage]:
        """The oldest messages of the log, or those that a channel has not done."""
        queue = await self._engine.loaded(namespace, name)
        found: list[StoredMessage] = []
        chosen = None if channel is None else queue.channel(channel)
        size = 0
        for log in queue.logs.values():
            after = log.trimmed if chosen is None else max(log.trimmed, chosen.ack_floor(log.id))
            looked_at = 0
            while len(found) < items_max and size < bytes_max and looked_at < _LOOKED_AT_MAX:
                messages = await self._page(log, after + 1, min(_PAGE_ITEMS, items_max), bytes_max)
                if not messages:
                    break
                for message in messages:
                    after = message.seq
                    looked_at += 1
                    if chosen is not None and chosen.is_done(log.id, message.seq):
                        continue
                    found.append(stored_message(log.id, message, chosen))
                    size += len(message.body)
                    if len(found) >= items_max or size >= bytes_max:
                        break
        return found

    async def read_log(
        self, namespace: str, name: str, *, after: tuple[int, int] | None, items_max: int, bytes_max: int = 1 << 20
    ) -> list[StoredMessage]:
        """Messages of the log, partition by partition."""
        queue = await self._engine.loaded(namespace, name)
        if after is not None and after[0] not in queue.logs:
            raise ValueError("that position is of another queue")
        for log in queue.logs.values():
            if after is not None and log.id < after[0]:
                continue
            start = log.trimmed if after is None or log.id != after[0] else max(after[1], log.trimmed)
            messages = await self._page(log, start + 1, items_max, bytes_max)
            if messages:
                return [stored_message(log.id, message, None) for message in messages]
        return []

    async def _page(self, log: PartitionLog, from_seq: int, items_max: int, bytes_max: int) -> list[QueuedMessage]:
        if log.is_pinned:
            found = [log.rows[seq] for seq in sorted(log.rows) if from_seq <= seq <= log.visible]
            return found[:items_max]
        rows = await self._engine.call(self._scan, log.id, from_seq, items_max, bytes_max)
        return [readable(row) for row in rows if row.seq <= log.visible]

    def _scan(self, partition: int, from_seq: int, items_max: int, bytes_max: int) -> list[MessageRow]:
        return self._engine.store.scan(partition, from_seq, items_max=items_max, bytes_max=bytes_max)


def _channel(channel: Channel) -> ChannelInfo:
    counts = channel.counts
    deferred = channel.deferred
    return ChannelInfo(
        name=channel.name,
        ready=max(0, channel.depth - deferred),
        in_flight=channel.in_flight,
        deferred=deferred,
        dead=channel.dead_items,
        consumers=len(channel.consumers),
        consumer_names=tuple(consumer.id for consumer in list(channel.consumers.values())[:100]),
        is_paused=channel.is_paused,
        filter="" if channel.filter is None else channel.filter.text,
        exclusive=channel.is_exclusive,
        delivered=counts["delivered"],
        finished=counts["finished"],
        requeued=counts["requeued"],
        timed_out=counts["timed_out"],
        counts=dict(counts),
    )


def stored_message(partition: int, message: QueuedMessage, channel: Channel | None) -> StoredMessage:
    attempts, state = 0, "damaged" if is_damaged(message) else ""
    if channel is not None:
        attempts = channel.attempts_of(partition, message.seq)
        if any((partition, message.seq) in consumer.held for consumer in channel.consumers.values()):
            state = "in flight"
    return StoredMessage(
        partition,
        message.seq,
        message.published_us,
        message.due_us,
        attempts,
        state,
        message.attributes,
        message.body,
    )


def readable(row: MessageRow) -> QueuedMessage:
    """Decode a stored message; a damaged one becomes a stand-in that displays can show."""
    try:
        return decode_row(row)
    except ProtocolError:
        return damaged(row.seq)
