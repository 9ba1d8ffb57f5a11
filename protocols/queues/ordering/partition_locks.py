"""Pull locks: one holder for each partition of a channel at a time, and a number that orders the holders.

The number (fencing epoch) rises with each grant and is stored before a consumer learns of it. Every result carries it,
so that a late result of a former holder is refused.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Lock(NamedTuple):
    """A grant."""

    partition: int
    epoch: int
    holder: bytes
    since_us: int
    """Unix microseconds, for displays."""


class PartitionLocks:
    """The locks of one channel. Times are monotonic seconds; a lock is over at ``until`` unless it was renewed."""

    def __init__(self) -> None:
        self._locks: dict[int, Lock] = {}
        self._until: dict[int, float] = {}
        self._epochs: dict[int, int] = {}
        """The last epoch of each partition, also of partitions without a holder."""

    def restore(self, locks: Mapping[int, Lock], epochs: Mapping[int, int], until: float) -> None:
        """Restore the stored locks. Their holders may still work, so each lock counts as renewed just now."""
        self._locks = dict(locks)
        self._until = dict.fromkeys(locks, until)
        self._epochs = {**{each.partition: each.epoch for each in locks.values()}, **epochs}

    def of(self, partition: int) -> Lock | None:
        """Return the lock of a partition, or None."""
        return self._locks.get(partition)

    def all(self) -> list[Lock]:
        """Return all locks that are held, by partition."""
        return [self._locks[each] for each in sorted(self._locks)]

    def epochs(self) -> dict[int, int]:
        """The last epoch that was given in each partition."""
        return dict(self._epochs)

    def is_current(self, partition: int, epoch: int) -> bool:
        """Check an epoch: whether a result with it counts."""
        lock = self._locks.get(partition)
        return lock is not None and lock.epoch == epoch

    def grant(self, partition: int, holder: bytes, until: float, wall_us: int) -> Lock:
        """Give a lock. The caller has made sure that no other consumer holds it. Raises ``ValueError`` otherwise."""
        before = self._locks.get(partition)
        if before is not None and before.holder != holder:
            raise ValueError(f"the partition {partition} is held by another consumer")
        epoch = self._epochs[partition] = self._epochs.get(partition, 0) + 1
        lock = self._locks[partition] = Lock(partition, epoch, holder, wall_us)
        self._until[partition] = until
        return lock

    def renew(self, holder: bytes, until: float) -> None:
        """Renew all locks of a holder."""
        for partition, lock in self._locks.items():
            if lock.holder == holder:
                self._until[partition] = max(self._until[partition], until)

    def release(self, partition: int, epoch: int) -> Lock | None:
        """Release a lock for its holder. Returns None when it was over already."""
        if not self.is_current(partition, epoch):
            return None
        del self._until[partition]
        return self._locks.pop(partition)

    def expired(self, now: float) -> list[Lock]:
        """Free and return the locks whose time is over."""
        over = [self._locks[each] for each, until in self._until.items() if until <= now]
        for lock in over:
            del self._locks[lock.partition], self._until[lock.partition]
        return over

    def next_deadline(self) -> float | None:
        """Return when `expired` would return a lock."""
        return min(self._until.values(), default=None)
