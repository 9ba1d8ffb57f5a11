"""Group commit: whatever came while one batch was written is the next one. No linger timer; one worker thread.

Why and how fast: docs/decisions/0015-queue-stores.md.
"""

import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol, TypeVar

import trio

from dep2p.errors import NotOwnerError, StoreError, StoreFullError, StoreUnknownError
from dep2p.protocols.queues.records import StoreBatch
from dep2p.storage.queue_store import QueueStore
from dep2p.storage.writer_thread import WriterThread

logger = logging.getLogger("dep2p.storage")

_RETRY_FIRST_S: Final = 0.1
_RETRY_MAX_S: Final = 5.0
_HANGS_S: Final = 5.0
"""A commit that takes longer is said."""
_SLOW_BUCKETS_S: Final = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)

T = TypeVar("T")


class BatchOwner(Protocol):
    """Who has what is to be written (`QueueBook` is one). Every method is called on the trio thread."""

    @property
    def has_changes(self) -> bool: ...

    def take_changes(self, *, with_publishes: bool = True) -> StoreBatch: ...

    def committed(self, batch: StoreBatch) -> None: ...

    def uncertain(self, batch: StoreBatch, error: Exception) -> None:
        """Whether it was written is not known: the same batch is committed again until that is certain."""
        ...

    def failed(self, batch: StoreBatch, error: Exception, *, publishes: "list[int] | None" = None) -> None: ...


class GroupCommit:
    """Writes an owner's batches to its store, one after the other, in a worker thread of its own.

    ``before``: called before a batch is taken when there is nothing to write yet, and while one is written: what it
    changes is in the next. ``after``: called when one is done with. ``is_busy``: whether ``before`` has much to do.
    """

    def __init__(
        self,
        store: QueueStore,
        owner: BatchOwner,
        *,
        before: Callable[[], None] = lambda: None,
        after: Callable[[], None] = lambda: None,
        is_busy: Callable[[], bool] = lambda: False,
    ) -> None:
        self.store = store
        self._writer = WriterThread("dep2p.commit")
        store.on_wait = self._writer.tell_waiting
        self.counters: Counter[str] = Counter()
        self.commit_seconds: Counter[float] = Counter()
        """How many commits took at most so long; the rest is under infinity."""
        self.problem = ""
        """What is wrong with the store now, for people; "" when it is well."""
        self._owner = owner
        self._before = before
        self._after = after
        self._is_busy = is_busy
        self._limiter = trio.CapacityLimiter(1)
        self._kicked = trio.Event()
        self._asleep: trio.lowlevel.Task | None = None
        self.is_kicked = False
        self._done = trio.Event()
        self._is_writing = False
        self._started_s = 0.0
        self._is_closed = False
        self._is_full = False
        self._doubtful: StoreBatch | None = None
        """The store went away while it wrote this one; it goes before all others."""

    def kick(self) -> None:
        """There is something to write. Cheap: call it for every change."""
        if not self.is_kicked:
            self.is_kicked = True
            task, self._asleep = self._asleep, None
            if task is not None:
                trio.lowlevel.reschedule(task)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled; `aclose` writes what is left. Raises NotOwnerError when another node has the store."""
        task_status.started()
        retry_s = _RETRY_FIRST_S
        while True:
            if not self.is_kicked and not self._is_due:  # what `before` has changed in a commit is due without a kick
                await self._rest()
            self.is_kicked = False
            if not self._is_due:  # else it is called while that is written
                self._before()
            if not self._is_due:
                self._tell_done()
                continue
            if await self._write_one():
                retry_s = _RETRY_FIRST_S
                # Who waited for it has a step each (in any order, hence two turns): what they publish and finish now
                # goes together with what is handed out now, in one commit instead of two.
                await trio.lowlevel.checkpoint()
                await trio.lowlevel.checkpoint()
            else:
                # What must not be lost (acknowledgements, attempts) stays in line; it is tried again for ever.
                self.kick()
                await trio.sleep(retry_s)
                retry_s = min(retry_s * 2, _RETRY_MAX_S)

    @property
    def trouble(self) -> str:
        """`problem`, or that a disk or server does not answer: there is no error yet then."""
        took_s = trio.current_time() - self._started_s if self._is_writing else 0.0
        if self.problem or took_s < _HANGS_S:
            return self.problem
        return f"{self.store.place} does not answer: a commit has been under way for {took_s:.0f} s"

    @property
    def _is_due(self) -> bool:
        return self._doubtful is not None or self._owner.has_changes

    async def _rest(self) -> None:
        """Until there is something to write; the store does meanwhile what can wait."""
        wait_s = self.store.tidy_in_s()
        while not self.is_kicked:
            with trio.move_on_after(float("inf") if wait_s is None else wait_s):
                await self._sleep()
                return
            try:
                with trio.CancelScope(shield=True):
                    await self.read(self.store.tidy)
                wait_s = self.store.tidy_in_s()
                self._is_well()
            except NotOwnerError:
                raise
            except StoreError as error:
                self.counters["tidies_failed"] += 1
                self._is_ill(error)
                wait_s = _RETRY_MAX_S

    async def _sleep(self) -> None:
        self._asleep = trio.lowlevel.current_task()

        def abort(_raise_cancel: object) -> trio.lowlevel.Abort:
            self._asleep = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    async def _write_one(self) -> bool:
        owner = self._owner
        # Where there is no room for messages, acknowledgements go alone every other time: publishers that try again at
        # once would fail each of their batches.
        is_alone, self._is_full = self._is_full, False
        batch, self._doubtful = self._doubtful or owner.take_changes(with_publishes=not is_alone), None
        self._is_writing = True
        started_s = self._started_s = trio.current_time()
        may_go_on = True
        with trio.CancelScope(shield=True):
            error: StoreError | None = None
            if not batch.is_empty:
                try:
                    await self._commit(batch)
                except StoreError as raised:
                    error = raised
            if error is None:
                self._count(batch, trio.current_time() - started_s)
                owner.committed(batch)
                if batch.is_empty:
                    self._before()
            elif isinstance(error, NotOwnerError):
                self.counters["commits_failed"] += 1
                self._is_writing = False
                owner.failed(batch, error)
                raise error
            else:
                self.counters["commits_failed"] += 1
                self._is_full = isinstance(error, StoreFullError) and not is_alone
                self._is_ill(error)
                if isinstance(error, StoreUnknownError):
                    self._doubtful = batch
                    self.counters["commits_in_doubt"] += 1
                    owner.uncertain(batch, error)
                    may_go_on = False
                else:
                    may_go_on = await self._save_what_can_be(batch, error)
        self._is_writing = False
        self._after()
        if not self.is_kicked and not self._is_due:
            self._tell_done()
        return may_go_on

    def _is_ill(self, error: StoreError) -> None:
        if self.problem != str(error):
            self.problem = str(error)
            logger.error("%s", error)

    def _is_well(self) -> None:
        if self.problem:
            logger.info("the store works again")
            self.problem = ""

    def _count(self, batch: StoreBatch, took_s: float) -> None:
        self._is_well()
        if took_s >= _HANGS_S:
            logger.warning("a commit took %.1f s: everybody waited for %s", took_s, self.store.place)
        if not batch.is_empty:
            self.counters["commits"] += 1
            self.counters["messages_committed"] += len(batch.appends)
            self._time(took_s)

    async def _commit(self, batch: StoreBatch) -> None:
        try:
            self._limiter.acquire_on_behalf_of_nowait(self)
        except trio.WouldBlock:
            await self._limiter.acquire_on_behalf_of(self)
        try:
            if self._is_busy():
                await self._writer.run(partial(self.store.commit, batch), self._before)
            else:
                self._before()
                await self._writer.run(partial(self.store.commit, batch))
        finally:
            self._limiter.release_on_behalf_of(self)

    async def _save_what_can_be(self, batch: StoreBatch, error: StoreError) -> bool:
        """One bad publish must not fail its neighbours; a full disk must not stop acknowledgements."""
        bad = list(range(len(batch.groups)))
        if batch.groups and not isinstance(error, StoreFullError) and error.is_about_batch:
            bad = await self._find_bad(batch)
            self.counters["batches_split"] += 1
        self.counters["publishes_failed"] += len(bad)
        self._owner.failed(batch, error, publishes=bad)
        # Without them the rest (acknowledgements, who waits in a flush) may pass at once; when there was nothing to
        # give up, only time can help.
        self.kick()
        return bool(bad)

    async def _find_bad(self, batch: StoreBatch) -> list[int]:
        """Which publishes cannot be written: tried by halves, in a step that is undone each time."""
        starts: list[int] = []
        at = 0
        for count in batch.groups:
            starts.append(at)
            at += count

        def rows(positions: list[int]) -> StoreBatch:
            part = StoreBatch()
            for position in positions:
                part.appends += batch.appends[starts[position] : starts[position] + batch.groups[position]]
                part.groups.append(batch.groups[position])
            return part

        async def bad_of(positions: list[int]) -> list[int]:
            try:
                await trio.to_thread.run_sync(self.store.check, rows(positions), limiter=self._limiter)
            except StoreError:
                if len(positions) == 1:
                    return positions
                half = len(positions) // 2
                return await bad_of(positions[:half]) + await bad_of(positions[half:])
            return []

        return await bad_of(list(range(len(batch.groups))))

    def _time(self, took_s: float) -> None:
        for bound in _SLOW_BUCKETS_S:
            if took_s <= bound:
                self.commit_seconds[bound] += 1
                return
        self.commit_seconds[float("inf")] += 1

    def _tell_done(self) -> None:
        self._done.set()
        self._done = trio.Event()

    async def flush(self) -> None:
        """Until everything that was changed before is written."""
        while self._is_due or self._is_writing:
            done = self._done
            self.kick()
            await done.wait()

    async def read(self, function: Callable[[], T]) -> T:
        """Call in the worker thread, between two commits. Raises what it raises."""
        return await trio.to_thread.run_sync(function, limiter=self._limiter)

    async def aclose(self) -> None:
        """Write what is left, and close the store; whoever cancels."""
        if self._is_closed:
            return
        self._is_closed = True
        with trio.CancelScope(shield=True):
            try:
                for _ in range(1_000):
                    self._before()
                    if not self._is_due or not await self._write_one():
                        break
            except NotOwnerError as error:
                logger.warning("what was not acknowledged is not written: %s", error)
            await self._let_go()

    async def abandon(self) -> None:
        """Close the store without writing what is left: it is another node's, or nothing was begun."""
        self._is_closed = True
        with trio.CancelScope(shield=True):
            await self._let_go()

    async def _let_go(self) -> None:
        await self.read(self.store.close)
        self._writer.close()
