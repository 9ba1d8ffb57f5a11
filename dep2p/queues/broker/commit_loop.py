"""The engine's main loop: one task commits, delivers and reads. Changes that come during a commit are in the next
one."""

import copy
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeVar

import trio

from dep2p.concurrency.contained import run_contained
from dep2p.errors import Dep2pError, NotOwnerError, ProtocolError, StoreError, StreamClosedError
from dep2p.protocols.queues.partition_log import Read
from dep2p.protocols.queues.queue import Queue
from dep2p.protocols.queues.records import MessageRow, StoreBatch
from dep2p.protocols.queues.registry.registry import QueueRegistry
from dep2p.queues.access import Rights
from dep2p.queues.trace_events import TracedQueues
from dep2p.storage.queue_commit import QueueCommit
from dep2p.storage.queue_store import QueueStore
from dep2p.tracing.event_log import TraceLog

logger: logging.Logger = logging.getLogger("dep2p.queues")

T = TypeVar("T")
_RETRY_S: Final = 0.5
"""The pause after a store has failed to read."""
_SWEEP_S: Final = 1.0
_LOOK_AT_DEADLINES_S: Final = 0.02
_LOOK_AT_CLOCK_S: Final = 0.001
"""Seconds between two checks whether the machine's clock has moved."""


class _Flush:
    """A caller that waits until earlier changes are durable."""

    __slots__ = ("done", "error")

    def __init__(self) -> None:
        self.done = trio.Event()
        self.error: Exception | None = None


class CommitLoop:
    """A registry of queues, bound to a store and to time.

    Everything but `run` may be called while `run` runs in another task of the same trio thread.
    """

    def __init__(
        self,
        store: QueueStore,
        registry: QueueRegistry,
        rights: Rights | None,
        on_lost: Callable[[Dep2pError], None],
    ) -> None:
        """``on_lost`` is called when another node owns the store."""
        self.store = store
        self.registry = registry
        self.commits: QueueCommit = QueueCommit(
            store, self, before=self._before, after=self._after, is_busy=lambda: bool(registry.out or registry.awake)
        )
        self._rights = rights
        self._on_lost = on_lost
        self.read_problem: str = ""
        """The reason why messages cannot be read now, human-readable; "" when they can."""
        self.lost: Dep2pError | None = None
        """The reason why this engine has ended: another node owns the store."""
        self.nursery: trio.Nursery | None = None
        """The nursery of its tasks, while it runs."""
        self.is_closing: bool = False
        self.room: trio.lowlevel.ParkingLot = trio.lowlevel.ParkingLot()
        """Publishers that wait for room."""
        self._durable: list[Callable[[], None]] = []
        """Calls for when all changes until now are durable."""
        self._flushes: list[_Flush] = []
        self._waiting_for: dict[int, tuple[list[Callable[[], None]], list[_Flush]]] = {}
        """The same calls by the batch that is being written."""
        self._clock_s: Callable[[], float] = trio.current_time
        self._checked_s = float("-inf")
        self._offset_s = float("-inf")
        self._timer = trio.CancelScope()
        self._ttl_queues: dict[Queue, None] = {}

    def trace_to(self, log: TraceLog | None) -> None:
        """Write events to this trace from now on; None ends that."""
        self.registry.trace = None if log is None else TracedQueues(log)

    # Life

    async def open(self) -> None:
        """Open the store and read the names of its queues; none is loaded. Raises StoreError."""
        definitions = await self.call(self._open)
        self.registry.at(self.wall_us())
        try:
            self.registry.restore(definitions)
            if self._rights is not None:
                self._rights.restore(definitions)
        except (ProtocolError, ValueError) as error:
            await self.call(self.store.close)
            raise StoreError(
                f"the queues in {self.store.location} are damaged: {error}. Nothing was changed: "
                "bring back a backup, or move them away to begin with none"
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
        """Commit, deliver and read until cancelled."""
        try:
            self._clock_s = trio.lowlevel.current_clock().current_time
            async with trio.open_nursery() as nursery:
                self.nursery = nursery
                nursery.start_soon(self._commit)
                task_status.started()
                await self._keep_time()
        finally:
            self.nursery = None
            self.is_closing = True

    async def _commit(self) -> None:
        try:
            await self.commits.run()
        except NotOwnerError as error:
            self.lose(error)  # before anything is cancelled, so that all waiters get the reason
            raise

    async def aclose(self) -> None:
        """Write the pending changes after `run`, and close the store. Idempotent."""
        self.is_closing = True
        await self.commits.aclose()

    def lose(self, error: Dep2pError) -> None:
        """End: another node owns the store. Nothing is written or delivered any more, and all waiters get the error."""
        self.is_closing = True
        self.lost = error
        for flush in [*self._flushes, *(each for _calls, flushes in self._waiting_for.values() for each in flushes)]:
            flush.error = error
            flush.done.set()
        self._flushes.clear()
        self._waiting_for.clear()
        self._durable.clear()
        self.registry.out.clear()
        self.registry.refuse(error)
        if self._rights is not None:
            self._rights.save = lambda _key, _value: None
        self.room.unpark_all()
        self._on_lost(error)

    def require_open(self) -> None:
        """Raises StreamClosedError, or the error that ended the engine."""
        if self.lost is not None:
            raise copy.copy(self.lost)
        if self.is_closing:
            raise StreamClosedError("the queues are closed")

    async def call(self, function: Callable[..., T], *arguments: object) -> T:
        """Run a function in the store's thread, after the work that is there."""
        return await self.commits.read(lambda: function(*arguments))

    def now(self) -> float:
        """Return the time that deadlines use: trio's clock, in seconds."""
        return trio.current_time()

    def wall_us(self) -> int:
        """Unix microseconds that never go back in this process, whatever is done to the machine's clock."""
        now = self._clock_s()
        if not 0.0 <= now - self._checked_s < _LOOK_AT_CLOCK_S:
            self._checked_s = now
            offset_s = time.time() - now
            if offset_s > self._offset_s:
                self._offset_s = offset_s
        return int((self._offset_s + now) * 1e6)

    # Time

    async def _keep_time(self) -> None:
        while True:
            deadline = self.registry.next_deadline()
            if self._ttl_queues:
                deadline = min(float("inf") if deadline is None else deadline, trio.current_time() + _SWEEP_S)
            with trio.CancelScope(deadline=float("inf") if deadline is None else deadline) as self._timer:
                await trio.sleep_forever()
            now = trio.current_time()
            self.registry.on_deadline(now, self.wall_us())
            self._sweep()
            if self.registry.has_changes or self.registry.awake:
                self.commits.kick()
            await trio.lowlevel.checkpoint()

    def _sweep(self) -> None:
        for queue in list(self._ttl_queues):
            if queue.is_deleted:
                del self._ttl_queues[queue]
            else:
                self._read_soon(queue.sweep(self.wall_us()))

    def expire(self, queue: Queue) -> None:
        """Drop messages of a queue when they get too old."""
        self._ttl_queues[queue] = None
        self._timer.cancel()

    def changed(self) -> None:
        """Wake the loop: there may be changes to commit or messages to deliver."""
        self.commits.kick()

    # For the group commit

    def _before(self) -> None:
        # Here, too, and not only after the commit: consumers work while the next batch is written.
        self.registry.deliver()
        reads = self.registry.pump(trio.current_time(), self.wall_us())
        if reads:
            self._read_soon(reads)
        self._look_at_deadlines()  # here, too: messages that became deferred by being read need no commit

    def _look_at_deadlines(self) -> None:
        # Deadlines may be earlier now. The loop looks at them soon, not at each of thousands of commits a second.
        soon = trio.current_time() + _LOOK_AT_DEADLINES_S
        if self._timer.deadline > soon:
            self._timer.deadline = soon

    def _after(self) -> None:
        self._look_at_deadlines()
        self.registry.freed.clear()
        if self.room:
            self.room.unpark_all()

    @property
    def has_changes(self) -> bool:
        """See `BatchOwner`."""
        return bool(self._durable or self._flushes or self.registry.has_changes)

    def take_changes(self, *, with_publishes: bool = True) -> StoreBatch:
        """See `BatchOwner`."""
        batch = self.registry.take_changes(with_publishes=with_publishes)
        self._waiting_for[id(batch)] = self._durable, self._flushes
        self._durable, self._flushes = [], []
        return batch

    def committed(self, batch: StoreBatch) -> None:
        """See `BatchOwner`."""
        durable, flushes = self._waiting_for.pop(id(batch))
        self.registry.committed(batch, hold=True)
        for call in durable:
            try:
                call()
            except Exception:  # an error of one waiter must not end the commits of all queues
                logger.exception("telling a caller that its results are on disk failed")
        for flush in flushes:
            flush.done.set()
        if self.registry.awake or self.registry.out:
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
        self.registry.failed(batch, error, publishes=publishes)

    def uncertain(self, batch: StoreBatch, error: Exception) -> None:
        """See `BatchOwner`."""
        _durable, flushes = self._waiting_for[id(batch)]
        for flush in [*flushes, *self._flushes]:
            flush.error = error
            flush.done.set()
        flushes.clear()
        self._flushes.clear()
        self.registry.uncertain(batch, error)
        self.registry.refuse(StoreError(f"nothing was taken of this: before it, {error}"))

    def _read_soon(self, reads: Sequence[Read]) -> None:
        nursery = self.nursery
        for read in reads:
            if nursery is None:
                self._unread(read)
            else:
                nursery.start_soon(run_contained, partial(self._read, read), "reading stored messages")

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
            for damage in self.registry.loaded(read, rows):
                logger.error("%s and was dropped: the others are delivered. Check the disk", damage)
        self.commits.kick()

    def _scan(self, read: Read) -> list[MessageRow]:
        return self.store.scan(read.partition, read.from_seq, items_max=read.items_max, bytes_max=read.bytes_max)

    def _unread(self, read: Read) -> None:
        """Ask again for a page that could not be read, when its channels are looked at next."""
        for queue in self.registry.queues.values():
            log = queue.logs.get(read.partition)
            if log is not None:
                log.wanted = 0
                for channel in queue.channels.values():
                    channel.wake()

    async def flush(self) -> None:
        """Return when all changes until now are durable, except publishes, whose callers wait themselves.

        Raises StoreError when a write fails now; the loop tries it again.
        """
        self.require_open()
        flush = _Flush()
        self._flushes.append(flush)
        self.commits.kick()
        await flush.done.wait()
        if isinstance(flush.error, NotOwnerError):
            raise copy.copy(flush.error)
        if flush.error is not None:
            raise StoreError(str(flush.error)) from flush.error

    def when_durable(self, call: Callable[[], None]) -> None:
        """Call when all changes until now, except publishes, are durable."""
        self._durable.append(call)
        self.commits.kick()

    def _define(self, key: str, value: object | None) -> None:
        self.registry.define(key, value)
        self.commits.kick()
