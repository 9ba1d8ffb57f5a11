"""Group commit of reliable delivery: whatever came during one commit is the next one."""

import logging
from collections import Counter
from collections.abc import Callable

import trio

from dep2p.errors import StoreError
from dep2p.storage.delivery_store import DeliveryBatch, DeliveryStore, InboxRow, LaneRow, OutboxRow, StoredDelivery

logger = logging.getLogger("dep2p.io")

_RETRY_S = 1.0
"""After a failed commit of what must not be lost (settled messages, what was handled)."""


class _Pending:
    """One commit to be, and who waits for it."""

    def __init__(self) -> None:
        self.batch = DeliveryBatch()
        self.accepted: list[Callable[[], None]] = []
        self.refused: list[Callable[[], None]] = []
        self.removed: list[Callable[[], None]] = []
        self.done = trio.Event()
        self.error: StoreError | None = None


class Journal:
    """Writes to a `DeliveryStore` in a worker thread of its own. Over a store in memory everything is done at once."""

    def __init__(self, store: DeliveryStore) -> None:
        self.store = store
        self.is_durable = store.is_durable
        self.counters: Counter[str] = Counter()
        self._pending = _Pending()
        self._kicked = trio.Event()
        self._limiter = trio.CapacityLimiter(1)
        self._idle = trio.Event()
        self._idle.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled; `aclose` writes what is pending then."""
        task_status.started()
        while True:
            await self._kicked.wait()
            await self._commit()

    async def aclose(self) -> None:
        """Write what is pending, and close the store; whoever cancels."""
        with trio.CancelScope(shield=True):
            if self._kicked.is_set():
                pending, self._pending = self._pending, _Pending()
                try:
                    await trio.to_thread.run_sync(self.store.commit, pending.batch, limiter=self._limiter)
                except StoreError as error:
                    logger.error("%s", error)
                    pending.error = error
                for tell in pending.accepted + pending.removed if pending.error is None else pending.refused:
                    tell()
                pending.done.set()
            await trio.to_thread.run_sync(self.store.close, limiter=self._limiter)

    async def _commit(self) -> None:
        pending, self._pending = self._pending, _Pending()
        self._kicked = trio.Event()
        try:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(self.store.commit, pending.batch, limiter=self._limiter)
        except StoreError as error:
            self.counters["commits_failed"] += 1
            pending.error = error
            for refuse in pending.refused:
                refuse()
            pending.done.set()
            await self._commit_again(pending, error)
        else:
            self.counters["commits"] += 1
            for tell in pending.accepted + pending.removed:
                tell()
        pending.done.set()
        if not self._kicked.is_set():
            self._idle.set()

    async def _commit_again(self, pending: _Pending, error: StoreError) -> None:
        """Those that wanted to send are told; what was settled or handled goes into the next commit."""
        logger.error("%s", error)
        batch, following = pending.batch, self._pending.batch
        following.removed[:0] = batch.removed
        self._pending.removed[:0] = pending.removed
        following.lanes = {**batch.lanes, **following.lanes}
        following.inboxes = {**batch.inboxes, **following.inboxes}
        if following.removed or following.inboxes:
            try:
                await trio.sleep(_RETRY_S)
            finally:  # also for `aclose`, which tries once more
                self._kick()

    def _kick(self) -> None:
        self._kicked.set()
        if self._idle.is_set():
            self._idle = trio.Event()

    async def load(self, realm: str) -> StoredDelivery:
        """What is kept of a realm. Raises StoreError."""
        return await trio.to_thread.run_sync(self.store.load, realm, limiter=self._limiter)

    async def add(self, row: OutboxRow, lane: LaneRow, accept: Callable[[], None], refuse: Callable[[], None]) -> None:
        """Return when the row is on disk; ``accept`` is called then, in the order of the calls, else ``refuse``.

        Raises StoreError: it is not accepted. Cancelled, it may be accepted all the same.
        """
        pending = self._pending
        pending.batch.added.append(row)
        pending.batch.lanes[(row.realm, row.peer)] = lane
        pending.accepted.append(accept)
        pending.refused.append(refuse)
        self._kick()
        await pending.done.wait()
        if pending.error is not None:
            raise type(pending.error)(str(pending.error))

    def remove(self, realm: str, peer: str, number: int, removed: Callable[[], None] | None = None) -> None:
        """A message has ended; ``removed`` is called when that is on disk. Else it may come back after a crash."""
        self._pending.batch.removed.append((realm, peer, number))
        if removed is not None:
            self._pending.removed.append(removed)
        self._kick()

    async def note_handled(self, realm: str, peer: str, row: InboxRow) -> bool:
        """Return when it is on disk; False when that failed and is tried again."""
        pending = self._pending
        self.note_soon(realm, peer, row)
        await pending.done.wait()
        return pending.error is None

    def note_soon(self, realm: str, peer: str, row: InboxRow) -> None:
        """Into the next commit, without waiting for it."""
        self._pending.batch.inboxes[(realm, peer)] = row
        self._kick()

    async def flush(self) -> None:
        """Wait until nothing is to be written."""
        if self.is_durable:
            await self._idle.wait()
