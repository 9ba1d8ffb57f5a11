"""The contract of a queue store. One test-suite, which every backend passes: tests/storage/test_store_contract.py."""

from collections.abc import Callable
from typing import Protocol

from dep2p.protocols.queues.records import DeadRow, MessageRow, PartitionRecord, StoreBatch, StoreStatistics


def nobody_waits() -> None:
    """What `QueueStore.on_wait` is at first."""


class QueueStore(Protocol):
    """Keeps queues. Every method blocks and is called by one worker thread at a time; errors are `StoreError`s.

    A store is owned by one process: `open` takes a lock and raises when another has it.
    """

    on_wait: Callable[[], None]
    """Called in a `commit`, in its thread, when all that is left of it is to wait for the disk or a server."""

    @property
    def is_durable(self) -> bool:
        """Whether what was committed outlives the process."""
        ...

    @property
    def place(self) -> str:
        """Where it is, for people: without a password."""
        ...

    def open(self) -> None:
        """Create or migrate what is kept, lock it, and check that it is sound. Raises StoreError with what to do."""
        ...

    def close(self) -> None:
        """Give everything back. Idempotent."""
        ...

    def load(self) -> dict[str, bytes]:
        """All definitions by key. Cheap: thousands of queues must not slow a start down."""
        ...

    def load_partition(self, partition: int) -> PartitionRecord:
        """All of a partition but its messages; an empty record for one that was never written."""
        ...

    def scan(self, partition: int, from_seq: int, *, items_max: int, bytes_max: int) -> list[MessageRow]:
        """Messages from ``from_seq`` on in rising order; at least one if there is any, however large.

        One that is damaged comes with empty meta, as dead letters do: the core tells, and passes it by.
        """
        ...

    def get(self, partition: int, seqs: list[int]) -> list[MessageRow]:
        """These messages, in rising order; those that are gone are left out."""
        ...

    def scan_dead(self, channel: int, after_id: int, *, items_max: int) -> list[DeadRow]:
        """Dead letters in the order of id."""
        ...

    def count_dead(self, channel: int) -> int:
        """How many dead letters a channel has."""
        ...

    def commit(self, batch: StoreBatch) -> None:
        """Write all of it in one atomic step, durable on return as the store's ``sync`` says.

        A number of a message is taken once, also when its message has long been trimmed: else it is an error about the
        batch. Of a large trim, messages leave the store in bounded steps, and are not seen any more at once. Raises
        StoreFullError (nothing was written; acks alone may still fit), StoreUnknownError (it may have been written:
        committed again, the very same batch is written once), StoreError (nothing was written).
        """
        ...

    def check(self, batch: StoreBatch) -> None:
        """Raises what `commit` of it would raise; writes nothing."""
        ...

    def tidy_in_s(self) -> float | None:
        """In how many seconds, if nothing is committed till then, `tidy` shall be called; None: nothing waits.

        May be called from another thread, while no other call is under way.
        """
        ...

    def tidy(self) -> None:
        """A bounded step of what can wait: removing what was trimmed, fsync, giving space back. Raises StoreError."""
        ...

    def statistics(self) -> StoreStatistics:
        """Counts since `open`, and the size on disk, as last looked at: from any thread, and without waiting."""
        ...
