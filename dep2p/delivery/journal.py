"""The stored state of reliable delivery: accepted messages, those that have ended, and the handled numbers of each
sender."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import trio

from dep2p.errors import StoreError
from dep2p.protocols.delivery.lost import LostMessage
from dep2p.storage.delivery_store import (
    DeliveryBatch,
    DeliveryStore,
    InboxRow,
    OutboxRow,
    SendWindowRow,
    StoredDelivery,
)
from dep2p.storage.group_commit import GroupCommit

logger: logging.Logger = logging.getLogger("dep2p.io")


class _PendingCommit:
    """One commit, and the tasks that wait for it."""

    def __init__(self) -> None:
        self.batch = DeliveryBatch()
        self.additions: list[_Addition] = []
        """One entry for each row of ``batch.added``."""
        self.removed: list[Callable[[], None]] = []
        self.done = trio.Event()
        self.error: Exception | None = None


@dataclass(slots=True, eq=False)
class _Addition:
    """A row of the outbox on its way to disk."""

    commit: _PendingCommit
    """The commit that writes it; another one when its first batch failed because of other rows."""
    accept: Callable[[], None]
    refuse: Callable[[], None]
    error: Exception | None = None


class _Changes:
    """The pending changes, and those that are being written: the owner of the batches of a `GroupCommit`."""

    def __init__(self) -> None:
        self.pending = _PendingCommit()
        self._taken = _PendingCommit()

    @property
    def has_changes(self) -> bool:
        return not self.pending.batch.is_empty

    def take_changes(self, *, with_publishes: bool = True) -> DeliveryBatch:
        """Return all pending changes; without ``with_publishes`` no new messages."""
        self._taken, self.pending = self.pending, _PendingCommit()
        taken = self._taken
        if not with_publishes:
            self._put_back(range(len(taken.additions)))
            taken.additions, taken.batch.added, taken.batch.windows = [], [], {}
        return taken.batch

    def committed(self, batch: DeliveryBatch) -> None:
        """Take the success of a batch: it is on disk."""
        for notify in [*(addition.accept for addition in self._taken.additions), *self._taken.removed]:
            notify()
        self._taken.done.set()

    def uncertain(self, batch: DeliveryBatch, error: Exception) -> None:
        """Do nothing: only stores on servers are uncertain, and the outbox has none."""

    def failed(self, batch: DeliveryBatch, error: Exception, *, publishes: list[int] | None = None) -> None:
        """Take the failure of a batch: nothing was written. Refuse the additions at the positions ``publishes``; write
        the rest once more."""
        taken = self._taken
        refused = range(len(taken.additions)) if publishes is None else publishes
        for position in refused:
            addition = taken.additions[position]
            addition.error = error
            addition.refuse()
        given_up = set(refused)
        self._put_back([at for at in range(len(taken.additions)) if at not in given_up])
        following = self.pending
        following.batch.removed[:0] = batch.removed
        following.removed[:0] = taken.removed
        following.batch.lost[:0] = batch.lost
        following.batch.forgotten[:0] = batch.forgotten
        if isinstance(error, StoreError) and error.is_about_batch and not given_up:
            logger.error("what was handled of %d senders could not be written: %s", len(batch.inboxes), error)
        else:
            following.batch.inboxes = {**batch.inboxes, **following.batch.inboxes}
        taken.error = error
        taken.done.set()

    def _put_back(self, positions: "range | list[int]") -> None:
        """Put additions of the batch into the next one, before others."""
        taken, following = self._taken, self.pending
        additions = [taken.additions[at] for at in positions]
        for addition in additions:
            addition.commit = following
        following.additions[:0] = additions
        following.batch.added[:0] = [taken.batch.added[at] for at in positions]
        following.batch.windows = {**taken.batch.windows, **following.batch.windows}


class Journal:
    """Writes to a `DeliveryStore` in a worker thread. A store in memory is written at once."""

    def __init__(self, store: DeliveryStore) -> None:
        self.store = store
        self.is_durable: bool = store.is_durable
        self._changes = _Changes()
        self._commits: GroupCommit[DeliveryBatch] = GroupCommit(store, self._changes)

    @property
    def counters(self) -> Counter[str]:
        """The counts ``commits`` and ``commits_failed``."""
        return self._commits.counters

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until cancelled; `aclose` writes the pending changes then."""
        await self._commits.run(task_status=task_status)

    async def aclose(self) -> None:
        """Write the pending changes and close the store, also when the caller is cancelled."""
        await self._commits.aclose()

    async def load(self, realm: str) -> StoredDelivery:
        """Load the stored state of a realm. Raises StoreError."""
        return await self._commits.read(lambda: self.store.load(realm))

    async def add(
        self, row: OutboxRow, window: SendWindowRow, accept: Callable[[], None], refuse: Callable[[], None]
    ) -> None:
        """Return when the row is on disk; ``accept`` is called then, in the order of the calls, else ``refuse``.

        Raises StoreError when it is not accepted. When the caller is cancelled, it may be accepted all the same.
        """
        pending = self._changes.pending
        addition = _Addition(pending, accept, refuse)
        pending.batch.added.append(row)
        pending.batch.windows[(row.realm, row.peer)] = window
        pending.additions.append(addition)
        self._commits.kick()
        await pending.done.wait()
        while addition.commit is not pending:
            pending = addition.commit
            await pending.done.wait()
        error = addition.error
        if error is not None:
            raise type(error)(str(error))

    def remove(
        self,
        realm: str,
        peer: str,
        number: int,
        removed: Callable[[], None] | None = None,
        *,
        lost: LostMessage | None = None,
    ) -> None:
        """Remove a message that has ended; ``removed`` is called when that is on disk. Before that a crash may bring it
        back. In the same step ``lost`` is kept among the lost messages."""
        pending = self._changes.pending
        pending.batch.removed.append((realm, peer, number))
        if lost is not None:
            pending.batch.lost.append((realm, lost))
        if removed is not None:
            pending.removed.append(removed)
        self._commits.kick()

    def forget_lost(self, realm: str, messages: Iterable[LostMessage]) -> None:
        """Keep these lost messages no more."""
        pending = self._changes.pending
        keys = [(realm, message.peer, message.number) for message in messages]
        if keys:
            pending.batch.lost = [
                (of, each) for of, each in pending.batch.lost if (of, each.peer, each.number) not in keys
            ]
            pending.batch.forgotten += keys
            self._commits.kick()

    async def note_handled(self, realm: str, peer: str, row: InboxRow) -> bool:
        """Write a receive window. Returns when it is on disk; False when that failed and is tried again."""
        pending = self._changes.pending
        self.note_soon(realm, peer, row)
        await pending.done.wait()
        return pending.error is None

    def note_soon(self, realm: str, peer: str, row: InboxRow) -> None:
        """Write a receive window with the next commit, without waiting for it."""
        self._changes.pending.batch.inboxes[(realm, peer)] = row
        self._commits.kick()

    async def flush(self) -> None:
        """Wait until nothing has to be written."""
        if self.is_durable:
            await self._commits.flush()
            await trio.lowlevel.checkpoint()
