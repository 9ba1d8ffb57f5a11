"""Group commit over a queue store, which also has deferrable work, and may be in memory."""

from collections.abc import Callable
from typing import TypeVar

import trio

from dep2p.errors import NotOwnerError, StoreError
from dep2p.protocols.queues.records import StoreBatch
from dep2p.storage.group_commit import BACKOFF, BatchOwner, GroupCommit
from dep2p.storage.queue_store import QueueStore

T = TypeVar("T")


class QueueCommit(GroupCommit[StoreBatch]):
    """Lets the store tidy up while there is nothing to write. A store in memory needs no thread."""

    def __init__(
        self,
        store: QueueStore,
        owner: BatchOwner[StoreBatch],
        *,
        before: Callable[[], None],
        after: Callable[[], None],
        is_busy: Callable[[], bool],
    ) -> None:
        super().__init__(store, owner, before=before, after=after, is_busy=is_busy)
        self._queue_store = store
        store.on_wait = self._writer.notify_waiting

    async def _rest(self) -> None:
        store = self._queue_store
        wait_s = store.tidy_in_s()
        while not self.is_kicked:
            with trio.move_on_after(float("inf") if wait_s is None else wait_s):
                await self._sleeper.wait()
                return
            try:
                with trio.CancelScope(shield=True):
                    await self.read(store.tidy)
                wait_s = store.tidy_in_s()
                self.note_health()
            except NotOwnerError:
                raise
            except StoreError as error:
                self.counters["tidies_failed"] += 1
                self.note_error(error)
                wait_s = BACKOFF.max_s

    async def _commit(self, batch: StoreBatch) -> None:
        if self._queue_store.is_durable:
            await super()._commit(batch)
        else:
            self._commit_to_store(batch)
            self._before()
            await trio.lowlevel.checkpoint()

    async def read(self, function: Callable[[], T]) -> T:
        """Call a function in the worker thread, between two commits. Raises what it raises."""
        if self._queue_store.is_durable:
            return await super().read(function)
        await trio.lowlevel.checkpoint()
        return function()
