"""The consumers of an exclusive channel as its broker sees them: coordinator and pull locks together. Pure.

Each heartbeat of a consumer lists the partitions that it holds and wants. A free lock goes to the consumer to which the
partition is assigned. A lock is free when its holder has released it, or was silent for a lease. Grants are stored
first; `activated` says so, and then the consumer is notified.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from dep2p.encoding.shapes import list_of, row_of
from dep2p.errors import ProtocolError
from dep2p.protocols.queues.ordering.coordinator import Coordinator, GroupMember
from dep2p.protocols.queues.ordering.partition_locks import Lock, PartitionLocks

_DRIFT: Final = 1.01
"""The factor by which the broker waits longer than a consumer's lease: clocks do not run alike, and handlers take a
moment to be cancelled."""
MEMBERS_MAX: Final = 1_024
MEMBER_BYTES: Final = 16


class Lease(NamedTuple):
    """A message to a consumer."""

    beat: int
    """The heartbeat that this answers: the lease counts from its sending. 0: sent unasked, it renews nothing."""
    lease_s: float
    serial: int
    """Rises with each lease that a consumer gets over one link; heartbeats say which they have seen."""
    version: int
    """The version of the assignment."""
    assigned: tuple[tuple[int, int], ...]
    """Each partition of this consumer, and the epoch under which it holds it; 0: not yet."""


class Granted(NamedTuple):
    """The consumer holds a partition, as soon as this is stored (`Group.activated`)."""

    lock: Lock


class Freed(NamedTuple):
    """A lock is over: its deliveries go back."""

    lock: Lock


class SendLease(NamedTuple):
    """Send a lease to a consumer."""

    member: bytes
    lease: Lease


Effect = Granted | Freed | SendLease


class _Restored(NamedTuple):
    locks: dict[int, Lock]
    epochs: dict[int, int]
    version: int
    members: dict[bytes, GroupMember]
    assignment: dict[bytes, list[int]]
    value: list[object]


class Group:
    """A consumer group. Time is an argument: ``now`` monotonic seconds, ``wall_us`` Unix microseconds for displays."""

    def __init__(self, partitions: Sequence[int], lease_s: float) -> None:
        self.lease_s = lease_s
        self.locks: PartitionLocks = PartitionLocks()
        self.coordinator: Coordinator = Coordinator(partitions)
        self.effects: list[Effect] = []
        """Effects that the owner performs in order, and clears."""
        self.is_changed: bool = False
        """Whether the owner has to store what `to_value` returns; the owner clears it."""
        self._inactive: dict[int, int] = {}
        """Partition to epoch of grants that are not known to be stored."""
        self._wants: dict[int, bytes] = {}
        self._notified: dict[bytes, int] = {}
        """The version that each member got last."""
        self._serials: dict[bytes, int] = {}
        self._notified_at: dict[int, int] = {}
        """By partition the serial of the lease that gave its holder the lock."""
        self._wall_us = 0
        self._restored: _Restored | None = None

    # The stored form

    def to_value(self) -> list[object]:
        """Return the stored form; `restore` reads it."""
        if self._restored is not None:
            return self._restored.value
        coordinator = self.coordinator
        members = [
            [member, each.label, each.since_us, list(coordinator.assignment.get(member, ()))]
            for member, each in coordinator.members.items()
        ]
        locks = [[lock.partition, lock.epoch, lock.holder, lock.since_us] for lock in self.locks.all()]
        return [coordinator.version, members, locks, [list(each) for each in self.locks.epochs().items()]]

    def restore(self, value: object) -> None:
        """Restore the stored state; every consumer counts as just heard of. Raises ProtocolError."""
        try:
            stored = row_of(value, 4)
            version, members, locks, epochs = stored
            known: dict[bytes, GroupMember] = {}
            assignment: dict[bytes, list[int]] = {}
            for member, label, since_us, partitions in (row_of(each, 4) for each in list_of(members)):
                known[_bytes(member)] = GroupMember(str(label), _number(since_us), 0.0)
                assignment[_bytes(member)] = [_number(each) for each in list_of(partitions)]
            held = {
                _number(partition): Lock(_number(partition), _number(epoch), _bytes(holder), _number(since_us))
                for partition, epoch, holder, since_us in (row_of(each, 4) for each in list_of(locks))
            }
            pairs = (row_of(each, 2) for each in list_of(epochs))
            given = {_number(partition): _number(epoch) for partition, epoch in pairs}
            self._restored = _Restored(held, given, _number(version), known, assignment, stored)
        except (TypeError, ValueError) as error:
            raise ProtocolError(f"no group of consumers: {error}") from None

    def _awake(self, now: float) -> None:
        """Start the leases of an earlier process, whose monotonic time is lost, at the first look at a clock."""
        if self._restored is None:
            return
        locks, epochs, version, members, assignment, _value = self._restored
        self._restored = None
        until = now + self.lease_s * _DRIFT
        for member in members.values():
            member.until = until
        self.locks.restore(locks, epochs, until)
        self.coordinator.restore(version, members, assignment)

    # From consumers

    def attached(self, member: bytes) -> None:
        """Take a consumer's new link: messages over the old one have come, or never will."""
        self._serials.pop(member, None)
        for lock in self.locks.all():
            if lock.holder == member:
                self._notified_at.pop(lock.partition, None)

    def heartbeat(
        self,
        member: bytes,
        label: str,
        beat: int,
        seen: int,
        held: Mapping[int, int],
        now: float,
        wall_us: int,
    ) -> None:
        """Take a heartbeat. ``seen``: the last serial that the consumer got. ``held``: partition to epoch; 0: it wants
        the partition, and works on nothing of an earlier epoch. Raises ``ValueError`` when there are too many."""
        self._awake(now)
        self._wall_us = wall_us
        coordinator = self.coordinator
        if member not in coordinator.members and len(coordinator.members) >= MEMBERS_MAX:
            raise ValueError(f"{MEMBERS_MAX} consumers are in this channel: no more")
        until = now + self.lease_s * _DRIFT
        before = coordinator.version
        if coordinator.heartbeat(member, label, until, wall_us):
            self.is_changed = True
        self.locks.renew(member, until)
        if coordinator.version != before:
            self._reassigned()
        if seen == self._serials.get(member, 0):
            for lock in self.locks.all():
                if (
                    lock.holder == member
                    and lock.partition not in held
                    and not coordinator.owns(member, lock.partition)
                ):
                    self._free(lock)  # it has released the lock, and the message was lost
        for partition, epoch in held.items():
            if not epoch:
                self._want(member, partition, seen)
        self._notify(member, beat)

    def unlock(self, member: bytes, partition: int, epoch: int, wall_us: int) -> None:
        """Take a handover: the consumer works on nothing of the partition, and all results came before this."""
        self._wall_us = wall_us
        lock = self.locks.of(partition)
        if lock is not None and lock.epoch == epoch and lock.holder == member:
            self._free(lock)

    def leave(self, member: bytes, wall_us: int) -> None:
        """Remove a consumer that goes and has nothing in work."""
        self._wall_us = wall_us
        self._wants = {partition: each for partition, each in self._wants.items() if each != member}
        self._forget(member)
        was_there = self.coordinator.leave(member)
        for lock in self.locks.all():
            if lock.holder == member:
                self._free(lock)
        if was_there:
            self.is_changed = True
            self._reassigned()

    def activated(self, lock: Lock) -> bool:
        """Note that a grant is stored. Returns whether it still counts; then its holder was notified."""
        if self._inactive.get(lock.partition) != lock.epoch:
            return False
        del self._inactive[lock.partition]
        self._notify(lock.holder, 0)
        return True

    # From the queue, and from time

    def set_partitions(self, partitions: Sequence[int]) -> None:
        """Set the partitions of the queue."""
        before = self.coordinator.version
        self.coordinator.set_partitions(partitions)
        if self.coordinator.version != before:
            self.is_changed = True
            self._reassigned()

    def next_deadline(self) -> float | None:
        """Return when `on_deadline` has work to do."""
        if self._restored is not None:
            return float("-inf")
        known = [each for each in (self.locks.next_deadline(), self.coordinator.next_deadline()) if each is not None]
        return min(known, default=None)

    def on_deadline(self, now: float, wall_us: int) -> None:
        """Remove the consumers that were silent for a lease, with their locks."""
        self._awake(now)
        self._wall_us = wall_us
        over = self.coordinator.expired(now)
        for member in over:
            self._wants = {partition: each for partition, each in self._wants.items() if each != member}
            self._forget(member)
        expired = self.locks.expired(now)
        if over or expired:
            self.is_changed = True
        for lock in expired:
            self._over(lock)
        if over:
            self._reassigned()
        for lock in expired:
            self._serve(lock.partition)

    # Inside

    def _reassigned(self) -> None:
        coordinator = self.coordinator
        self._wants = {
            partition: member for partition, member in self._wants.items() if coordinator.owns(member, partition)
        }
        for lock in self.locks.all():
            # A lock that its holder never learned of needs no handing over.
            if lock.partition in self._inactive and not coordinator.owns(lock.holder, lock.partition):
                self._free(lock)
        for member in coordinator.members:
            if self._notified.get(member) != coordinator.version and member in self._notified:
                self._notify(member, 0)

    def _forget(self, member: bytes) -> None:
        self._notified.pop(member, None)
        self._serials.pop(member, None)

    def _over(self, lock: Lock) -> None:
        self._inactive.pop(lock.partition, None)
        self._notified_at.pop(lock.partition, None)
        self.effects.append(Freed(lock))

    def _want(self, member: bytes, partition: int, seen: int) -> None:
        if not self.coordinator.owns(member, partition):
            return
        lock = self.locks.of(partition)
        if lock is not None and lock.holder == member:
            if partition in self._inactive or self._notified_at.get(partition, 0) > seen:
                return  # the next lease reports it
            # The holder works on nothing there: messages of the old epoch, received or not, come again.
            self._over(lock)
        self._wants[partition] = member
        self._serve(partition, regrant=True)

    def _free(self, lock: Lock) -> None:
        if self.locks.release(lock.partition, lock.epoch) is not None:
            self.is_changed = True
            self._over(lock)
            self._serve(lock.partition)

    def _serve(self, partition: int, *, regrant: bool = False) -> None:
        """Give a free partition to the consumer that waits for it."""
        member = self._wants.get(partition)
        if member is None:
            return
        lock = self.locks.of(partition)
        if lock is not None and not (regrant and lock.holder == member):
            return
        del self._wants[partition]
        granted = self.locks.grant(partition, member, self.coordinator.members[member].until, self._wall_us)
        self._inactive[partition] = granted.epoch
        self.is_changed = True
        self.effects.append(Granted(granted))

    def _notify(self, member: bytes, beat: int) -> None:
        coordinator = self.coordinator
        if member not in coordinator.members:
            return
        serial = self._serials[member] = self._serials.get(member, 0) + 1
        assigned: list[tuple[int, int]] = []
        for partition in coordinator.assignment.get(member, ()):
            lock = self.locks.of(partition)
            is_its = lock is not None and lock.holder == member and partition not in self._inactive
            if is_its:
                self._notified_at.setdefault(partition, serial)
            assigned.append((partition, lock.epoch if is_its and lock is not None else 0))
        self._notified[member] = coordinator.version
        self.effects.append(SendLease(member, Lease(beat, self.lease_s, serial, coordinator.version, tuple(assigned))))


def _number(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a whole number from 0 on")
    return value


def _bytes(value: object) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError(f"{value!r} is no name of a consumer")
    return value
