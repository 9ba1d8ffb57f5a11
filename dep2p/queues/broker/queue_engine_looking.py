"""The part of the queue engine that looks at queues, and gives dead letters to their channels again."""

import copy
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Final, cast

import trio
from outcome import Value

from dep2p.errors import QueueMessageNotFoundError, StoreError
from dep2p.protocols.queues.queue import Publish, Queue
from dep2p.queues.broker.commit_loop import QueueCommits
from dep2p.queues.broker.inspector import DeadLetter, QueueReader, StoredMessage

_REPLAY_ITEMS: Final = 256
_REPLAY_BYTES: Final = 4_194_304
"""Dead letters are replayed in steps of so many."""


class Pending:
    """What is not durable yet."""

    __slots__ = ("bytes", "items")

    def __init__(self) -> None:
        self.items = 0
        self.bytes = 0


class _Woken:
    """What a task that waited is sent: one for all of them, since trio's own may be used once each."""

    __slots__ = ()

    def unwrap(self) -> None:
        """Nothing."""


_WOKEN: Final = cast("Value[None]", _Woken())


def _told(publish: "WaitedPublish") -> None:
    """It is done with, or in doubt; also when nobody waits any more."""
    if publish.is_told:
        return
    publish.is_told = True
    pending = publish.pending
    pending.items -= publish.items
    pending.bytes -= publish.size
    task, publish.task = publish.task, None
    if task is not None:
        trio.lowlevel.reschedule(task, _WOKEN)


class WaitedPublish(Publish):
    """A publish, and who waits for it to become durable: one object, and few calls, since it is made for each message.

    It was added to ``pending`` when it was taken; that ends when it is told."""

    __slots__ = ("is_told", "items", "pending", "size", "task")

    def __init__(self, pending: Pending, items: int, size: int) -> None:
        super().__init__(_told)
        self.pending = pending
        self.items = items
        self.size = size
        self.is_told = False
        self.task: trio.lowlevel.Task | None = None

    def repeats(self, publish: Publish) -> None:
        """Another one stands for it, which is done with, or in doubt."""
        if not self.is_told:
            self.runs, self.error = publish.runs, publish.error
            _told(self)

    def _abort(self, _raise_cancel: object) -> trio.lowlevel.Abort:
        self.task = None
        return trio.lowlevel.Abort.SUCCEEDED

    async def wait(self) -> list[tuple[int, int]]:
        """Until it was told; gives the ids, or raises why not. Cancelled, the publish goes on: its outcome is not
        known then."""
        if not self.is_told:
            self.task = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(self._abort)
        else:
            await trio.lowlevel.checkpoint()
        if self.error is not None:
            raise copy.copy(self.error)
        return self.points()


class EngineLooking(QueueCommits):
    """`QueueEngine` without publishing and consuming."""

    _reader: QueueReader
    _pending: Pending

    @abstractmethod
    async def loaded(self, namespace: str, name: str) -> Queue:
        """The queue, with its state in memory. Raises QueueNotFoundError."""

    # Looking

    async def summary(self, namespace: str, name: str) -> dict[str, Any]:
        """What a queue holds, in numbers."""
        return await self._reader.summary(namespace, name)

    async def info(self, namespace: str, name: str) -> dict[str, Any]:
        """The same with options and channels."""
        return await self._reader.info(namespace, name)

    async def route(self, namespace: str, name: str) -> dict[str, Any]:
        """The route table."""
        return await self._reader.route(namespace, name)

    async def group(self, namespace: str, name: str, channel: str) -> dict[str, Any]:
        """The consumers of a channel, and who holds which partition."""
        return await self._reader.group(namespace, name, channel)

    async def peek(
        self, namespace: str, name: str, channel: str | None = None, *, items_max: int, bytes_max: int = 1 << 20
    ) -> list[StoredMessage]:
        """The oldest messages of the log, or those that a channel has not done."""
        return await self._reader.peek(namespace, name, channel, items_max=items_max, bytes_max=bytes_max)

    async def read_log(
        self, namespace: str, name: str, *, after: tuple[int, int] | None, items_max: int, bytes_max: int = 1 << 20
    ) -> list[StoredMessage]:
        """Messages of the log, partition by partition."""
        return await self._reader.read_log(namespace, name, after=after, items_max=items_max, bytes_max=bytes_max)

    async def dead_letters(
        self, namespace: str, name: str, channel: str, *, after_id: int = 0, items_max: int = 100
    ) -> list[DeadLetter]:
        """Oldest first."""
        return await self._reader.dead_letters(namespace, name, channel, after_id=after_id, items_max=items_max)

    async def replay(self, namespace: str, name: str, channel: str, ids: Sequence[int] | None) -> int:
        """Give dead letters (all that are there now, or these) to their channel again; returns how many.

        Raises StoreError (StoreFullError) when they cannot be written: those that were not are dead letters still.
        """
        queue = await self.loaded(namespace, name)
        found = queue.channel(channel)
        count = size = 0
        damaged: list[int] = []
        waiters: list[WaitedPublish] = []
        async for row in self._reader.dead_rows(queue, found, ids):
            if not row.meta:
                damaged.append(row.id)
                continue
            waiter = WaitedPublish(self._pending, 1, len(row.body))
            self._pending.items += 1
            self._pending.bytes += len(row.body)
            waiters.append(waiter)
            queue.replay(found, row, waiter.repeats, self.wall_us())
            self.changed()
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
                f"{len(damaged)} dead letters of channel {channel!r} are damaged in {self.store.place} and were not "
                f"replayed ({', '.join(map(str, damaged[:10]))}); {count} others were. Check the disk, and remove them"
            )
        return count

    async def forget_dead(self, namespace: str, name: str, channel: str, ids: Sequence[int] | None) -> int:
        """Drop dead letters (all, or these); returns how many."""
        queue = await self.loaded(namespace, name)
        found = queue.channel(channel)
        count = 0
        async for row in self._reader.dead_rows(queue, found, ids):
            self.book.unbury(queue, found.id, row.id)
            found.dead_items = max(0, found.dead_items - 1)
            count += 1
        if ids is not None and not count:
            raise QueueMessageNotFoundError(f"channel {channel!r} has none of these dead letters")
        await self.flush()
        return count
