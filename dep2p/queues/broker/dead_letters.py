"""Dead letters of the queues of this node: listed, given to their channel again, or deleted."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Final

from dep2p.errors import QueueMessageNotFoundError, StoreError
from dep2p.protocols.queues.channel import Channel
from dep2p.protocols.queues.failure_history import failures_of
from dep2p.protocols.queues.names import is_ephemeral
from dep2p.protocols.queues.queue import Queue
from dep2p.protocols.queues.records import DeadLetterRow, MessageRow
from dep2p.queues.broker.inspector import StoredMessage, readable, stored_message
from dep2p.queues.broker.interfaces import EngineCore
from dep2p.queues.broker.pending_publish import Pending, WaitedPublish

_REPLAY_ITEMS: Final = 256
_REPLAY_BYTES: Final = 4_194_304
"""Bytes of one step of a replay."""
PAGE_ITEMS: Final = 256


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that a channel has given up."""

    id: int
    died_us: int
    attempts: int
    reasons: tuple[str, ...]
    message: StoredMessage


class DeadLetters:
    """The dead letters of one engine."""

    def __init__(self, engine: EngineCore, pending: Pending) -> None:
        """``pending``: messages that are not durable yet, of all queues; a replay adds to them."""
        self._engine = engine
        self._pending = pending

    async def page(
        self, namespace: str, name: str, channel: str, *, after_id: int = 0, items_max: int = 100
    ) -> list[DeadLetter]:
        """List dead letters, oldest first."""
        queue = await self._engine.loaded(namespace, name)
        found = queue.channel(channel)
        rows = await self._dead_page(queue, found, after_id, items_max)
        return [_dead_letter(row) for row in rows]

    async def _rows(self, queue: Queue, channel: Channel, ids: Sequence[int] | None) -> AsyncIterator[DeadLetterRow]:
        """Yield all dead letters that are there now, or those with these ids. Later ones do not come."""
        wanted = None if ids is None else dict.fromkeys(sorted(ids))
        last = channel.last_dead_id
        after = 0
        while True:
            if wanted is not None:
                left = [each for each in wanted if each > after]
                if not left:
                    return
                after = left[0] - 1
            rows = await self._dead_page(queue, channel, after, PAGE_ITEMS)
            if not rows:
                return
            for row in rows:
                after = row.id
                if after > last:
                    return
                if wanted is None or row.id in wanted:
                    yield row

    async def _dead_page(self, queue: Queue, channel: Channel, after: int, items_max: int) -> list[DeadLetterRow]:
        if queue.is_ephemeral or is_ephemeral(channel.name):
            rows = [row for row in self._engine.registry.ephemeral_dead_letters(channel.id) if row.id > after]
            return rows[:items_max]
        await self._engine.flush()
        return await self._engine.call(self._scan_dead_letters, channel.id, after, items_max)

    def _scan_dead_letters(self, channel_id: int, after: int, items_max: int) -> list[DeadLetterRow]:
        return self._engine.store.scan_dead_letters(channel_id, after, items_max=items_max)

    async def replay(self, namespace: str, name: str, channel: str, ids: Sequence[int] | None) -> int:
        """Give dead letters (all that are there now, or those with these ids) to their channel again; return how many.

        Raises StoreError (StoreFullError) when they cannot be written: the rest stay dead letters.
        """
        queue = await self._engine.loaded(namespace, name)
        found = queue.channel(channel)
        count = size = 0
        damaged: list[int] = []
        waiters: list[WaitedPublish] = []
        async for row in self._rows(queue, found, ids):
            if not row.meta:
                damaged.append(row.id)
                continue
            waiter = WaitedPublish(self._pending, 1, len(row.body))
            self._pending.items += 1
            self._pending.bytes += len(row.body)
            waiters.append(waiter)
            queue.replay(found, row, waiter.repeats, self._engine.wall_us())
            self._engine.changed()
            count += 1
            size += len(row.body)
            if len(waiters) >= _REPLAY_ITEMS or size >= _REPLAY_BYTES:
                for each in waiters:
                    await each.wait()
                waiters, size = [], 0
        if ids is not None and not count and not damaged:
            raise QueueMessageNotFoundError(f"channel {channel!r} has none of these dead letters")
        for each in waiters:
            await each.wait()
        if damaged:
            raise StoreError(
                f"{len(damaged)} dead letters of channel {channel!r} are damaged in {self._engine.store.location} "
                f"and were not replayed ({', '.join(map(str, damaged[:10]))}); {count} others were. Check the disk, "
                "and remove them"
            )
        return count

    async def delete(self, namespace: str, name: str, channel: str, ids: Sequence[int] | None) -> int:
        """Drop dead letters (all, or those with these ids); return how many."""
        queue = await self._engine.loaded(namespace, name)
        found = queue.channel(channel)
        count = 0
        async for row in self._rows(queue, found, ids):
            self._engine.registry.remove_dead_letter(queue, found.id, row.id)
            found.dead_items = max(0, found.dead_items - 1)
            count += 1
        if ids is not None and not count:
            raise QueueMessageNotFoundError(f"channel {channel!r} has none of these dead letters")
        await self._engine.flush()
        return count


def _dead_letter(row: DeadLetterRow) -> DeadLetter:
    message = readable(MessageRow(row.partition, row.seq, row.meta, row.body))
    reasons = tuple(failure.reason for failure in failures_of(row.history))
    return DeadLetter(row.id, row.died_us, row.attempts, reasons, stored_message(row.partition, message, None))
