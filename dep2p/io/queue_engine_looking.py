"""The part of the queue engine that looks at queues, and gives dead letters to their channels again."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Final, Protocol

import trio
from outcome import Value

from dep2p.errors import QueueMessageNotFoundError, StoreError
from dep2p.io.queue_commits import QueueCommits
from dep2p.io.queue_reading import DeadLetter, QueueReader, StoredMessage
from dep2p.protocols.queue.queue import Publish, Queue

_REPLAY_ITEMS: Final = 256
_REPLAY_BYTES: Final = 4_194_304
"""Dead letters are replayed in steps of so many."""


class WaitedFor(Protocol):
    """An engine that counts what is not durable yet."""

    def settled(self, items: int, size: int) -> None:
        """So much does not wait any more."""
        ...


class PublishWaiter:
    """A publisher that waits for its messages to become durable."""

    __slots__ = ("engine", "items", "publish", "size", "task")

    def __init__(self, engine: WaitedFor, items: int, size: int) -> None:
        self.engine = engine
        self.items = items
        self.size = size
        self.task: trio.lowlevel.Task | None = None
        self.publish: Publish | None = None

    def __call__(self, publish: Publish) -> None:
        """The publish is done with, or in doubt; also when nobody waits any more."""
        if self.publish is not None:
            return
        self.publish = publish
        self.engine.settled(self.items, self.size)
        task, self.task = self.task, None
        if task is not None:
            trio.lowlevel.reschedule(task, Value(None))

    async def wait(self) -> list[tuple[int, int]]:
        """Until it was called; gives the ids, or raises why not. Cancelled, the publish goes on: its outcome is not
        known then."""
        if self.publish is None:
            self.task = trio.lowlevel.current_task()

            def abort(_raise_cancel: object) -> trio.lowlevel.Abort:
                self.task = None
                return trio.lowlevel.Abort.SUCCEEDED

            await trio.lowlevel.wait_task_rescheduled(abort)
        else:
            await trio.lowlevel.checkpoint()
        publish = self.publish
        assert publish is not None
        if publish.error is not None:
            raise type(publish.error)(*publish.error.args)
        return publish.points()


class EngineLooking(QueueCommits):
    """`QueueEngine` without publishing and consuming."""

    _reader: QueueReader
    _pending_items: int
    _pending_bytes: int

    @abstractmethod
    async def loaded(self, namespace: str, name: str) -> Queue:
        """The queue, with its state in memory. Raises QueueNotFoundError."""

    @abstractmethod
    def settled(self, items: int, size: int) -> None:
        """For publishes: so much does not wait any more."""

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
        waiters: list[PublishWaiter] = []
        async for row in self._reader.dead_rows(queue, found, ids):
            if not row.meta:
                damaged.append(row.id)
                continue
            waiter = PublishWaiter(self, 1, len(row.body))
            self._pending_items += 1
            self._pending_bytes += waiter.size
            waiters.append(waiter)
            queue.replay(found, row, waiter, self.wall_us())
            self.changed()
            count += 1
            size += waiter.size
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
