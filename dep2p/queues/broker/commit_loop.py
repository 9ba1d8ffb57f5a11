"""The engine's clockwork: one task commits, hands out and reads; whatever was said during a commit is in the next."""

import copy
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import trio

from dep2p.errors import Dep2pError, NotOwnerError, ProtocolError, StoreError, StreamClosedError
from dep2p.protocols.queues.partition_log import Read
from dep2p.protocols.queues.queue import Queue
from dep2p.protocols.queues.records import MessageRow, StoreBatch
from dep2p.protocols.queues.registry import QueueBook
from dep2p.queues.access import Rights
from dep2p.queues.trace_events import TracedQueues
from dep2p.storage.group_commit import GroupCommit
from dep2p.storage.queue_store import QueueStore
from dep2p.tracing.event_log import TraceLog

logger = logging.getLogger("dep2p.queues")

T = TypeVar("T")
_RETRY_S: Final = 0.5
"""After a store has failed to read."""
_SWEEP_S: Final = 1.0
_LOOK_AT_DEADLINES_S: Final = 0.02
_LOOK_AT_CLOCK_S: Final = 0.001
"""How often it is looked whether the machine's clock has moved."""


class _Commits(GroupCommit):
    """A store in memory needs no thread."""

    async def _commit(self, batch: StoreBatch) -> None:
        if self.store.is_durable:
            await super()._commit(batch)
        else:
            self.store.commit(batch)
            self._before()
            await trio.lowlevel.checkpoint()

    async def read(self, function: Callable[[], T]) -> T:
        if self.store.is_durable:
            return await super().read(function)
        await trio.lowlevel.checkpoint()
        return function()


class _Flush:
    """Somebody who waits until what was said before is durable."""

    __slots__ = ("done", "error")

    def __init__(self) -> None:
        self.done = trio.Event()
        self.error: Exception | None = None


class QueueCommits:
    """What `QueueEngine` is built on: a book of queues, its store, and time."""

    def __init__(self, store: QueueStore, book: QueueBook, rights: Rights | None) -> None:
        self.store = store
        self.book = book
        self.commits = _Commits(
            store, self, before=self._before, after=self._after, is_busy=lambda: bool(book.out or book.awake)
        )
        self._rights = rights
        self.read_problem = ""
        """Why messages cannot be read now, for people; "" when they can."""
        self.is_held: Callable[[], bool] = lambda: True
        """Whether no other node can have the store by now: only then may leases be promised without a commit."""
        self.lost: Dep2pError | None = None
        """Why this engine is over: another node has the store."""
        self._nursery: trio.Nursery | None = None
        self._closing = False
        self._room = trio.lowlevel.ParkingLot()
        self._durable: list[Callable[[], None]] = []
        """To be called when what was said until now is durable."""
        self._flushes: list[_Flush] = []
        self._waiting_for: dict[int, tuple[list[Callable[[], None]], list[_Flush]]] = {}
        """By batch that is being written."""
        self._clock_s: Callable[[], float] = trio.current_time
        self._looked_s = float("-inf")
        self._offset_s = float("-inf")
        self._timer = trio.CancelScope()
        self._ttl_queues: dict[Queue, None] = {}

    def trace_to(self, log: TraceLog | None) -> None:
        """Give what happens from now on to a trace; None ends that."""
        self.book.trace = None if log is None else TracedQueues(log)

    # Life

    async def open(self) -> None:
        """Open the store and know its queues; none is loaded. Raises StoreError."""
        definitions = await self.call(self._open)
        self.book.at(self.wall_us())
        try:
            self.book.restore(definitions)
            if self._rights is not None:
                self._rights.restore(definitions)
        except (ProtocolError, ValueError) as error:
            await self.call(self.store.close)
            raise StoreError(
                f"the queues in {self.store.place} are damaged: {error}. Nothing was changed: bring back a backup, or "
                "move them away to begin with none"
            ) from error
        if self._rights is not None:
            self._rights.save = self._define

    def _open(self) -> dict[str, bytes]:
        self.store.open()
        try:
            return self.store.load()
        except BaseException:
            self.store.close()
            raise

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Commit, hand out and read until cancelled."""
        try:
            self._clock_s = trio.lowlevel.current_clock().current_time
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self._commit)
                task_status.started()
                await self._keep_time()
        finally:
            self._nursery = None
            self._closing = True

    async def _commit(self) -> None:
        try:
            await self.commits.run()
        except NotOwnerError as error:
            self.lose(error)  # before anything is cancelled, so that all are told why
            raise

    async def aclose(self) -> None:
        """After `run`: write what was taken, and close the store. Idempotent."""
        self._closing = True
        await self.commits.aclose()

    def lose(self, error: Dep2pError) -> None:
        """Another node has the store. Nothing is written or handed out any more, and whoever waits is told."""
        self._closing = True
        self.lost = error
        for flush in [*self._flushes, *(each for _calls, flushes in self._waiting_for.values() for each in flushes)]:
            flush.error = error
            flush.done.set()
        self._flushes.clear()
        self._waiting_for.clear()
        self._durable.clear()
        self.book.out.clear()
        self.book.refuse(error)
        if self._rights is not None:
            self._rights.save = lambda _key, _value: None
        self._room.unpark_all()

    def _require_open(self) -> None:
        if self.lost is not None:
            raise copy.copy(self.lost)
        if self._closing:
            raise StreamClosedError("the queues are closed")

    async def call(self, function: Callable[..., T], *arguments: object) -> T:
        """Run in the store's thread, after what is under way there."""
        return await self.commits.read(lambda: function(*arguments))

    def now(self) -> float:
        """Of deadlines: trio's clock."""
        return trio.current_time()

    def wall_us(self) -> int:
        """Unix microseconds that never go back in this process, whatever is done to the machine's clock."""
        now = self._clock_s()
        if not 0.0 <= now - self._looked_s < _LOOK_AT_CLOCK_S:
            self._looked_s = now
            offset_s = time.time() - now
            if offset_s > self._offset_s:
                self._offset_s = offset_s
        return int((self._offset_s + now) * 1e6)

    # Time

    async def _keep_time(self) -> None:
        while True:
            deadline = self.book.next_deadline()
            if self._ttl_queues:
                deadline = min(float("inf") if deadline is None else deadline, trio.current_time() + _SWEEP_S)
            with trio.CancelScope(deadline=float("inf") if deadline is None else deadline) as self._timer:
                await trio.sleep_forever()
            now = trio.current_time()
            self.book.on_deadline(now, self.wall_us())
            self._sweep()
            if self.book.has_changes or self.book.awake:
                self.commits.kick()
            await trio.lowlevel.checkpoint()

    def _sweep(self) -> None:
        for queue in list(self._ttl_queues):
            if queue.is_deleted:
                del self._ttl_queues[queue]
            else:
                self._read_soon(queue.sweep(self.wall_us()))

    def changed(self) -> None:
        """There may be something to commit or to hand out."""
        self.commits.kick()

    # What the group commit asks

    def _before(self) -> None:
        # Here, too, and not only when it is committed: consumers work while the next batch is written.
        self.book.deliver()
        reads = self.book.pump(trio.current_time(), self.wall_us())
        if reads:
            self._read_soon(reads)
        self._look_at_deadlines()  # here, too: what became deferred by being read needs no commit

    def _look_at_deadlines(self) -> None:
        # They may have come nearer: looked at soon, not at each of thousands of commits a second.
        soon = trio.current_time() + _LOOK_AT_DEADLINES_S
        if self._timer.deadline > soon:
            self._timer.deadline = soon

    def _after(self) -> None:
        self._look_at_deadlines()
        self.book.freed.clear()
        if self._room:
            self._room.unpark_all()

    @property
    def has_changes(self) -> bool:
        """See `BatchOwner`."""
        return bool(self._durable or self._flushes or self.book.has_changes)

    def take_changes(self, *, with_publishes: bool = True) -> StoreBatch:
        """See `BatchOwner`."""
        batch = self.book.take_changes(with_publishes=with_publishes)
        self._waiting_for[id(batch)] = self._durable, self._flushes
        self._durable, self._flushes = [], []
        return batch

    def committed(self, batch: StoreBatch) -> None:
        """See `BatchOwner`."""
        durable, flushes = self._waiting_for.pop(id(batch))
        self.book.committed(batch, hold=True)
        for call in durable:
            call()
        for flush in flushes:
            flush.done.set()
        if self.book.awake or self.book.out:
            self.commits.kick()

    def failed(self, batch: StoreBatch, error: Exception, *, publishes: Sequence[int] | None = None) -> None:
        """See `BatchOwner`."""
        durable, flushes = self._waiting_for.pop(id(batch))
        self._durable[:0] = durable
        if batch.groups:
            self._flushes[:0] = flushes  # without the publishes it may pass
        else:
            for flush in flushes:
                flush.error = error
                flush.done.set()
        self.book.failed(batch, error, publishes=publishes)

    def uncertain(self, batch: StoreBatch, error: Exception) -> None:
        """See `BatchOwner`."""
        _durable, flushes = self._waiting_for[id(batch)]
        for flush in [*flushes, *self._flushes]:
            flush.error = error
            flush.done.set()
        flushes.clear()
        self._flushes.clear()
        self.book.uncertain(batch, error)
        self.book.refuse(StoreError(f"nothing was taken of this: before it, {error}"))

    def _read_soon(self, reads: Sequence[Read]) -> None:
        nursery = self._nursery
        for read in reads:
            if nursery is None:
                self._unread(read)
            else:
                nursery.start_soon(self._read, read)

    async def _read(self, read: Read) -> None:
        try:
            rows = await self.call(self._scan, read)
        except StoreError as error:
            if self.read_problem != str(error):  # it is tried twice a second
                self.read_problem = str(error)
                logger.error("cannot read messages: %s", error)
            await trio.sleep(_RETRY_S)
            self._unread(read)
        else:
            self.read_problem = ""
            for damage in self.book.loaded(read, rows):
                logger.error("%s and was dropped: the others are delivered. Check the disk", damage)
        self.commits.kick()

    def _scan(self, read: Read) -> list[MessageRow]:
        return self.store.scan(read.partition, read.from_seq, items_max=read.items_max, bytes_max=read.bytes_max)

    def _unread(self, read: Read) -> None:
        """A page did not come: asked for again when its channels are looked at again."""
        for queue in self.book.queues.values():
            log = queue.logs.get(read.partition)
            if log is not None:
                log.wanted = 0
                for channel in queue.channels.values():
                    channel.wake()

    async def flush(self) -> None:
        """Return when everything that was said until now is durable, but for publishes, whose callers know.

        Raises StoreError when it cannot be written now; it is tried again then.
        """
        self._require_open()
        flush = _Flush()
        self._flushes.append(flush)
        self.commits.kick()
        await flush.done.wait()
        if isinstance(flush.error, NotOwnerError):
            raise copy.copy(flush.error)
        if flush.error is not None:
            raise StoreError(str(flush.error)) from flush.error

    def when_durable(self, call: Callable[[], None]) -> None:
        """Call when everything that was said until now, but for publishes, is durable."""
        self._durable.append(call)
        self.commits.kick()

    def _define(self, key: str, value: object | None) -> None:
        self.book.define(key, value)
        self.commits.kick()
