"""The contract of a queue store. One test-suite, which every backend passes: tests/storage/test_store_contract.py."""

from collections.abc import Callable
from typing import Protocol

from dep2p.protocols.queues.records import DeadLetterRow, MessageRow, PartitionRecord, StoreBatch, StoreStatistics


def no_wait() -> None:
    """The initial `QueueStore.on_wait`: does nothing."""


class QueueStore(Protocol):
    """Keeps queues. Every method blocks and is called by one worker thread at a time; errors are `StoreError`s.

    A store is owned by one process: `open` takes a lock and raises when another has it.
    """

    on_wait: Callable[[], None]
    """Called in a `commit`, in its thread, when it only waits for the disk or a server."""

    @property
    def is_durable(self) -> bool:
        """Whether committed changes outlive the process."""
        ...

    @property
    def location(self) -> str:
        """The place of the store, human-readable, without a password."""
        ...

    def open(self) -> None:
        """Create or migrate the store, lock it, and check that it is sound. Raises StoreError with the next step."""
        ...

    def close(self) -> None:
        """Close the store. Idempotent."""
        ...

    def load(self) -> dict[str, bytes]:
        """Return all definitions by key. Cheap: thousands of queues must not slow a start down."""
        ...

    def load_partition(self, partition: int) -> PartitionRecord:
        """Return a partition without its messages; an empty record for one that was never written."""
        ...

    def scan(self, partition: int, from_seq: int, *, items_max: int, bytes_max: int) -> list[MessageRow]:
        """Return messages from ``from_seq`` on in rising order; at least one if there is any, however large.

        A damaged one comes with empty meta, as dead letters do: the core reports it and passes it by.
        """
        ...

    def get(self, partition: int, seqs: list[int]) -> list[MessageRow]:
        """Return these messages, in rising order, without those that are gone."""
        ...

    def scan_dead_letters(self, channel: int, after_id: int, *, items_max: int) -> list[DeadLetterRow]:
        """Return dead letters in the order of id."""
        ...

    def count_dead_letters(self, channel: int) -> int:
        """Count the dead letters of a channel."""
        ...

    def commit(self, batch: StoreBatch) -> None:
        """Write the batch in one atomic step, durable on return as the store's ``sync`` says.

        A number of a message is taken once, also when its message has long been trimmed: else it is an error about the
        batch. Of a large trim, messages leave the store in bounded steps, and are not seen any more at once. Raises
        StoreFullError (nothing was written; acks alone may still fit), StoreUnknownError (it may have been written:
        committed again, the very same batch is written once), StoreError (nothing was written).
        """
        ...

    def check(self, batch: StoreBatch) -> None:
        """Raise what `commit` of the batch would raise; write nothing."""
        ...

    def tidy_in_s(self) -> float | None:
        """Return in how many seconds to call `tidy`, unless there is a commit before; None: not at all.

        May be called from another thread, while no other call is under way.
        """
        ...

    def tidy(self) -> None:
        """Do a bounded step of deferrable work: remove trimmed messages, fsync, give space back. Raises StoreError."""
        ...

    def statistics(self) -> StoreStatistics:
        """Return counts since `open`, and the size on disk as last seen: from any thread, and without waiting."""
        ...
