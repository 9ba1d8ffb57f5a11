"""Looking into the queues of this node without taking anything."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from dep2p.errors import ProtocolError
from dep2p.protocols.queues.channel import Channel
from dep2p.protocols.queues.exclusive_channel import ExclusiveChannel
from dep2p.protocols.queues.failure_history import failures_of
from dep2p.protocols.queues.message import Message, damaged, decode_row, is_damaged
from dep2p.protocols.queues.names import is_ephemeral
from dep2p.protocols.queues.options import options_as_dict
from dep2p.protocols.queues.ordering.assignment import Strategy, allocate
from dep2p.protocols.queues.partition_log import PartitionLog
from dep2p.protocols.queues.queue import Queue
from dep2p.protocols.queues.records import DeadRow, MessageRow

if TYPE_CHECKING:
    from dep2p.queues.broker.engine import QueueEngine

_PAGE_ITEMS: Final = 256
_NAME_DIGITS: Final = 8
"""Of a member's name: who knew all of it could speak for that consumer."""
_LOOKED_AT_MAX: Final = 100_000
"""Messages that one look at a channel goes through to find some that are not done."""


class StoredMessage(NamedTuple):
    """A message of a log, for people."""

    partition: int
    seq: int
    published_us: int
    due_us: int
    attempts: int
    state: str
    attributes: bytes
    body: bytes


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that a channel has given up."""

    id: int
    died_us: int
    attempts: int
    reasons: tuple[str, ...]
    message: StoredMessage


class QueueReader:
    """The reading half of an engine."""

    def __init__(self, engine: "QueueEngine") -> None:
        self._engine = engine
        self._counted: dict[int, None] = {}
        """Channels whose dead letters of earlier runs were counted."""

    async def summary(self, namespace: str, name: str) -> dict[str, Any]:
        """What a queue holds, in numbers."""
        queue = await self._engine.loaded(namespace, name)
        channels = list(queue.channels.values())
        for channel in channels:
            await self._count_dead(queue, channel)
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

    async def info(self, namespace: str, name: str) -> dict[str, Any]:
        """The same with options and channels."""
        summary = await self.summary(namespace, name)
        queue = self._engine.book.find(namespace, name)
        return {
            **summary,
            "options": options_as_dict(queue.options),
            "channels": [_channel(channel) for channel in queue.channels.values()],
        }

    async def route(self, namespace: str, name: str) -> dict[str, Any]:
        """The route table."""
        queue = await self._engine.loaded(namespace, name)
        routes = queue.routes
        return {
            "version": routes.version,
            "partitions": [
                {"partition": log.id, "messages": log.items, "bytes": log.bytes, "last_seq": log.visible}
                for log in queue.logs.values()
            ],
            "routes": [
                {
                    "low": route.low,
                    "high": route.high,
                    "partition": route.partition,
                    "after": [{"partition": each.partition, "up_to": each.end_seq} for each in route.after],
                }
                for route in routes.routes
            ],
        }

    async def group(self, namespace: str, name: str, channel: str) -> dict[str, Any]:
        """The consumers of a channel, and who holds which partition."""
        queue = await self._engine.loaded(namespace, name)
        found = queue.channel(channel)
        if not isinstance(found, ExclusiveChannel):
            names = [consumer.id.encode() for consumer in found.consumers.values()]
            shared = allocate(Strategy.SHARED, queue.partition_ids, names, {})
            consumers = [
                {
                    "consumer": consumer.id,
                    "partitions": list(shared[consumer.id.encode()]),
                    "in_flight": len(consumer.held),
                }
                for consumer in found.consumers.values()
            ]
            return {"exclusive": False, "consumers": consumers, "locks": []}
        coordinator, now = found.group.coordinator, self._engine.now()
        held = {consumer.id: len(consumer.held) for consumer in found.consumers.values()}
        return {
            "exclusive": True,
            "version": coordinator.version,
            "lease_s": found.group.lease_s,
            "consumers": [
                {
                    "consumer": member.label,
                    "member": name.hex()[:_NAME_DIGITS],
                    "partitions": list(coordinator.assignment.get(name, ())),
                    "in_flight": held.get(member.label, 0),
                    "since_s": member.since_us / 1e6,
                    "lease_left_s": round(max(0.0, member.until - now), 3),
                }
                for name, member in coordinator.members.items()
            ],
            "locks": [
                {
                    "partition": lock.partition,
                    "epoch": lock.epoch,
                    "member": lock.holder.hex()[:_NAME_DIGITS],
                    "consumer": coordinator.members[lock.holder].label if lock.holder in coordinator.members else "",
                    "since_s": lock.since_us / 1e6,
                }
                for lock in found.group.locks.all()
            ],
        }

    async def _count_dead(self, queue: Queue, channel: Channel) -> None:
        if channel.id in self._counted or is_ephemeral(channel.name) or queue.is_ephemeral:
            return
        self._counted[channel.id] = None
        if not channel.last_dead_id:
            return
        try:
            await self._engine.flush()
            channel.dead_items = await self._engine.call(self._engine.store.count_dead, channel.id)
        except BaseException:  # also when the one who asks goes: the next one counts
            del self._counted[channel.id]
            raise

    async def peek(
        self, namespace: str, name: str, channel: str | None, *, items_max: int, bytes_max: int
    ) -> list[StoredMessage]:
        """The oldest messages of the log, or those that a channel has not done."""
        queue = await self._engine.loaded(namespace, name)
        found: list[StoredMessage] = []
        chosen = None if channel is None else queue.channel(channel)
        size = 0
        for log in queue.logs.values():
            after = log.trimmed if chosen is None else max(log.trimmed, chosen.floor(log.id))
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
                    found.append(_stored(log.id, message, chosen))
                    size += len(message.body)
                    if len(found) >= items_max or size >= bytes_max:
                        break
        return found

    async def read_log(
        self, namespace: str, name: str, *, after: tuple[int, int] | None, items_max: int, bytes_max: int
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
                return [_stored(log.id, message, None) for message in messages]
        return []

    async def _page(self, log: PartitionLog, from_seq: int, items_max: int, bytes_max: int) -> list[Message]:
        if log.is_pinned:
            found = [log.rows[seq] for seq in sorted(log.rows) if from_seq <= seq <= log.visible]
            return found[:items_max]
        rows = await self._engine.call(self._scan, log.id, from_seq, items_max, bytes_max)
        return [_readable(row) for row in rows if row.seq <= log.visible]

    def _scan(self, partition: int, from_seq: int, items_max: int, bytes_max: int) -> list[MessageRow]:
        return self._engine.store.scan(partition, from_seq, items_max=items_max, bytes_max=bytes_max)

    # Dead letters

    async def dead_letters(
        self, namespace: str, name: str, channel: str, *, after_id: int, items_max: int
    ) -> list[DeadLetter]:
        """Oldest first."""
        queue = await self._engine.loaded(namespace, name)
        found = queue.channel(channel)
        rows = await self._dead_page(queue, found, after_id, items_max)
        return [_dead_letter(row) for row in rows]

    async def dead_rows(self, queue: Queue, channel: Channel, ids: Sequence[int] | None) -> AsyncIterator[DeadRow]:
        """All dead letters that are there now, or those with these ids. What dies meanwhile does not come."""
        wanted = None if ids is None else dict.fromkeys(sorted(ids))
        last = channel.last_dead_id
        after = 0
        while True:
            if wanted is not None:
                left = [each for each in wanted if each > after]
                if not left:
                    return
                after = left[0] - 1
            rows = await self._dead_page(queue, channel, after, _PAGE_ITEMS)
            if not rows:
                return
            for row in rows:
                after = row.id
                if after > last:
                    return
                if wanted is None or row.id in wanted:
                    yield row

    async def _dead_page(self, queue: Queue, channel: Channel, after: int, items_max: int) -> list[DeadRow]:
        if queue.is_ephemeral or is_ephemeral(channel.name):
            rows = [row for row in self._engine.book.ephemeral_dead(channel.id) if row.id > after]
            return rows[:items_max]
        await self._engine.flush()
        return await self._engine.call(self._scan_dead, channel.id, after, items_max)

    def _scan_dead(self, channel_id: int, after: int, items_max: int) -> list[DeadRow]:
        return self._engine.store.scan_dead(channel_id, after, items_max=items_max)


def _channel(channel: Channel) -> dict[str, Any]:
    counts = channel.counts
    deferred = channel.deferred
    return {
        "name": channel.name,
        "ready": max(0, channel.depth - deferred),
        "in_flight": channel.in_flight,
        "deferred": deferred,
        "dead": channel.dead_items,
        "consumers": len(channel.consumers),
        "consumer_names": [consumer.id for consumer in list(channel.consumers.values())[:100]],
        "is_paused": channel.is_paused,
        "filter": "" if channel.filter is None else channel.filter.text,
        "exclusive": channel.is_exclusive,
        "delivered": counts["delivered"],
        "finished": counts["finished"],
        "requeued": counts["requeued"],
        "timed_out": counts["timed_out"],
        "counts": dict(counts),
    }


def _stored(partition: int, message: Message, channel: Channel | None) -> StoredMessage:
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


def _readable(row: MessageRow) -> Message:
    """For people a damaged one has its place, too."""
    try:
        return decode_row(row)
    except ProtocolError:
        return damaged(row.seq)


def _dead_letter(row: DeadRow) -> DeadLetter:
    message = _readable(MessageRow(row.partition, row.seq, row.meta, row.body))
    reasons = tuple(failure.reason for failure in failures_of(row.history))
    return DeadLetter(row.id, row.died_us, row.attempts, reasons, _stored(row.partition, message, None))
