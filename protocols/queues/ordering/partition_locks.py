"""Pull locks: one holder for each partition of a channel at a time, and a number that tells later holders from earlier.

The number (fencing epoch) rises with each grant and is stored before anybody is told of it. Every result carries it, so
that one of a holder whose time is over is refused, however late it comes.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Lock(NamedTuple):
    """A grant."""

    partition: int
    epoch: int
    holder: bytes
    since_us: int
    """Unix microseconds, for people."""


class PartitionLocks:
    """Of one channel. Times are monotonic seconds; a lock is over at ``until`` unless it was renewed."""

    def __init__(self) -> None:
        self._locks: dict[int, Lock] = {}
        self._until: dict[int, float] = {}
        self._epochs: dict[int, int] = {}
        """The last that was given, also of partitions that nobody holds."""

    def restore(self, locks: Mapping[int, Lock], epochs: Mapping[int, int], until: float) -> None:
        """What was stored: who held a lock may still work, so that it is taken as renewed just now."""
        self._locks = dict(locks)
        self._until = dict.fromkeys(locks, until)
        self._epochs = {**{each.partition: each.epoch for each in locks.values()}, **epochs}

    def of(self, partition: int) -> Lock | None:
        """Who holds it."""
        return self._locks.get(partition)

    def all(self) -> list[Lock]:
        """Everything that is held, by partition."""
        return [self._locks[each] for each in sorted(self._locks)]

    def epochs(self) -> dict[int, int]:
        """The last that was given in each partition."""
        return dict(self._epochs)

    def is_current(self, partition: int, epoch: int) -> bool:
        """The fencing check: whether a result with that epoch counts."""
        lock = self._locks.get(partition)
        return lock is not None and lock.epoch == epoch

    def grant(self, partition: int, holder: bytes, until: float, wall_us: int) -> Lock:
        """The caller has made sure that nobody else holds it. Raises ``ValueError`` otherwise."""
        before = self._locks.get(partition)
        if before is not None and before.holder != holder:
            raise ValueError(f"the partition {partition} is held by another consumer")
        epoch = self._epochs[partition] = self._epochs.get(partition, 0) + 1
        lock = self._locks[partition] = Lock(partition, epoch, holder, wall_us)
        self._until[partition] = until
        return lock

    def renew(self, holder: bytes, until: float) -> None:
        """All that a holder has."""
        for partition, lock in self._locks.items():
            if lock.holder == holder:
                self._until[partition] = max(self._until[partition], until)

    def release(self, partition: int, epoch: int) -> Lock | None:
        """By its holder. None: it was over already."""
        if not self.is_current(partition, epoch):
            return None
        del self._until[partition]
        return self._locks.pop(partition)

    def expired(self, now: float) -> list[Lock]:
        """Those whose time is over; they are free from now on."""
        over = [self._locks[each] for each, until in self._until.items() if until <= now]
        for lock in over:
            del self._locks[lock.partition], self._until[lock.partition]
        return over

    def next_deadline(self) -> float | None:
        """When `expired` would give something."""
        return min(self._until.values(), default=None)
