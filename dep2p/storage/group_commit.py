"""Group commit: changes that come while one batch is written are the next batch. No linger timer; one worker thread.

The queues and reliable delivery use it. Reasons and figures: docs/decisions/0015-queue-stores.md.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Generic, Protocol, Self, TypeVar

import trio

from dep2p.concurrency.wait_queue import Sleeper
from dep2p.errors import NotOwnerError, StoreError, StoreFullError, StoreUnknownError
from dep2p.protocols.timing.backoff import Backoff
from dep2p.storage.writer_thread import WriterThread

logger: logging.Logger = logging.getLogger("dep2p.storage")

BACKOFF: Final = Backoff(first_s=0.1, max_s=5.0)
_HANGS_S: Final = 5.0
"""A commit that takes longer is logged."""
_SLOW_BUCKETS_S: Final = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)

T = TypeVar("T")


class Batch(Protocol):
    """Changes that are written in one atomic step."""

    @property
    def is_empty(self) -> bool: ...

    @property
    def groups(self) -> Sequence[int]:
        """The number of rows of each message, or run of messages, that may fail without the others."""
        ...

    def part(self, positions: Sequence[int]) -> Self:
        """Return a batch with the groups at these positions, and nothing else."""
        ...


B = TypeVar("B", bound=Batch)
B_contra = TypeVar("B_contra", bound=Batch, contravariant=True)


class BatchStore(Protocol[B_contra]):
    """Takes batches. Every method blocks and is called in one thread at a time."""

    @property
    def location(self) -> str: ...

    def commit(self, batch: B_contra, /) -> None:
        """Write all of it, durable on return, or nothing. Raises StoreError."""
        ...

    def check(self, batch: B_contra, /) -> None:
        """Raise what `commit` of the batch would raise; write nothing."""
        ...

    def close(self) -> None: ...


class BatchOwner(Protocol[B]):
    """The owner of changes to write, such as `QueueRegistry`. Every method is called on the trio thread."""

    @property
    def has_changes(self) -> bool: ...

    def take_changes(self, *, with_publishes: bool = True) -> B:
        """Return all changes; without ``with_publishes`` no new messages."""
        ...

    def committed(self, batch: B, /) -> None: ...

    def uncertain(self, batch: B, error: Exception, /) -> None:
        """Report that it is not known whether the batch was written: the same batch is committed again until that is
        certain."""
        ...

    def failed(self, batch: B, error: Exception, /, *, publishes: list[int] | None = None) -> None:
        """Report that a batch was not written. ``publishes``: the positions of the groups to give up (all by default);
        the rest of the batch goes into the next one."""
        ...


class GroupCommit(Generic[B]):
    """Writes an owner's batches to its store, one after the other, in a worker thread of its own.

    ``before``: called before a batch is taken when there is nothing to write yet, and while one is written: what it
    changes is in the next. ``after``: called when one is done with. ``is_busy``: whether ``before`` has much to do.
    """

    def __init__(
        self,
        store: BatchStore[B],
        owner: BatchOwner[B],
        *,
        before: Callable[[], None] = lambda: None,
        after: Callable[[], None] = lambda: None,
        is_busy: Callable[[], bool] = lambda: False,
    ) -> None:
        self.store = store
        self._writer = WriterThread("dep2p.commit")
        self.counters: Counter[str] = Counter()
        self.commit_seconds: Counter[float] = Counter()
        """Commits by upper bound of their seconds; the rest is under infinity."""
        self.problem: str = ""
        """The present problem of the store, human-readable; "" when it works."""
        self._owner = owner
        self._before = before
        self._after = after
        self._is_busy = is_busy
        self._limiter = trio.CapacityLimiter(1)
        self._kicked = trio.Event()
        self._sleeper = Sleeper()
        self.is_kicked: bool = False
        self._done = trio.Event()
        self._is_writing = False
        self._started_s = 0.0
        self._is_closed = False
        self._is_full = False
        self._doubtful: B | None = None
        """The batch that the store was writing when it went away; it goes before all others."""

    def kick(self) -> None:
        """Ask for a commit. Cheap: call it for every change."""
        if not self.is_kicked:
            self.is_kicked = True
            self._sleeper.wake()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Write until cancelled; `aclose` writes the rest. Raises NotOwnerError when another node owns the store."""
        task_status.started()
        failures = 0
        while True:
            if not self.is_kicked and not self._is_due:  # changes by `before` need no kick
                await self._rest()
            self.is_kicked = False
            if not self._is_due:  # else it is called while that is written
                self._before()
            if not self._is_due:
                self._notify_done()
                continue
            if await self._write_one():
                failures = 0
                # Tasks that waited for the commit get a step each (in any order, hence two turns). Their publishes and
                # results go with the new deliveries into one commit instead of two.
                await trio.lowlevel.checkpoint()
                await trio.lowlevel.checkpoint()
            else:
                # What must not be lost (acknowledgements, attempts) stays in line; it is tried again forever.
                self.kick()
                failures += 1
                await trio.sleep(BACKOFF.after(failures))

    @property
    def error_text(self) -> str:
        """Return `problem`, or that a disk or server does not answer: there is no error yet then."""
        took_s = trio.current_time() - self._started_s if self._is_writing else 0.0
        if self.problem or took_s < _HANGS_S:
            return self.problem
        return f"{self.store.location} does not answer: a commit has been under way for {took_s:.0f} s"

    @property
    def _is_due(self) -> bool:
        return self._doubtful is not None or self._owner.has_changes

    async def _rest(self) -> None:
        """Wait until there are changes to write."""
        await self._sleeper.wait()

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
                self.note_error(error)
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
            self._notify_done()
        return may_go_on

    def note_error(self, error: StoreError) -> None:
        if self.problem != str(error):
            self.problem = str(error)
            logger.error("%s", error)

    def note_health(self) -> None:
        if self.problem:
            logger.info("the store works again")
            self.problem = ""

    def _count(self, batch: B, took_s: float) -> None:
        self.note_health()
        if took_s >= _HANGS_S:
            logger.warning("a commit took %.1f s: all callers waited for %s", took_s, self.store.location)
        if not batch.is_empty:
            self.counters["commits"] += 1
            self.counters["messages_committed"] += sum(batch.groups)
            self._time(took_s)

    async def _commit(self, batch: B) -> None:
        try:
            self._limiter.acquire_on_behalf_of_nowait(self)
        except trio.WouldBlock:
            await self._limiter.acquire_on_behalf_of(self)
        try:
            if self._is_busy():
                await self._writer.run(partial(self._commit_to_store, batch), self._before)
            else:
                self._before()
                await self._writer.run(partial(self._commit_to_store, batch))
        finally:
            self._limiter.release_on_behalf_of(self)

    def _commit_to_store(self, batch: B) -> None:
        """Write a batch. Raises only StoreError: any other error comes from an item of the batch, which the store
        cannot encode. It must not end the commits of all others."""
        try:
            self.store.commit(batch)
        except StoreError:
            raise
        except Exception as error:
            logger.exception("a batch could not be encoded for the store")
            unwritable = StoreError(f"this message cannot be written: {type(error).__name__}: {error}")
            unwritable.is_about_batch = True
            raise unwritable from error

    async def _save_what_can_be(self, batch: B, error: StoreError) -> bool:
        """Write the batch without its bad publishes: one bad publish must not fail others, and a full disk must not
        stop acknowledgements."""
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

    async def _find_bad(self, batch: B) -> list[int]:
        """Find the publishes that cannot be written: tries halves, in a step that is undone each time."""

        async def bad_of(positions: list[int]) -> list[int]:
            try:
                await trio.to_thread.run_sync(self.store.check, batch.part(positions), limiter=self._limiter)
            except Exception:  # an error of any type: see `_commit_to_store`
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

    def _notify_done(self) -> None:
        self._done.set()
        self._done = trio.Event()

    async def flush(self) -> None:
        """Wait until all earlier changes are written."""
        while self._is_due or self._is_writing:
            done = self._done
            self.kick()
            await done.wait()

    async def read(self, function: Callable[[], T]) -> T:
        """Call a function in the worker thread, between two commits. Raises what it raises."""
        return await trio.to_thread.run_sync(function, limiter=self._limiter)

    async def aclose(self) -> None:
        """Write the rest and close the store, also when the caller is cancelled."""
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
            await self._close_store()

    async def abandon(self) -> None:
        """Close the store without writing the rest: another node owns it, or nothing was begun."""
        self._is_closed = True
        with trio.CancelScope(shield=True):
            await self._close_store()

    async def _close_store(self) -> None:
        await self.read(self.store.close)
        self._writer.close()
