"""The consumer's side of an exclusive channel: its lease, its partitions, and how it hands them over. Pure.

A lease counts from the sending of its heartbeat, on this consumer's own clock. So, however slow the network is, it is
over here before the broker gives the partition to another. Handing over has an order: nothing more is pulled, handlers
that run finish, results are sent, and only then the lock is given back.
"""

from enum import Enum
from typing import Final, NamedTuple

from dep2p.protocols.queues.ordering.consumer_group import Lease

_BEATS_MAX: Final = 64
"""Heartbeats whose answers still count."""
_BEATS_PER_LEASE: Final = 6


class MemberState(Enum):
    """The state of a partition, for this consumer."""

    WANTED = "wanted"
    """Assigned; another consumer may hold it."""
    HELD = "held"
    DRAINING = "draining"
    """Assigned to another consumer: work here ends, then the lock is released."""
    RECONNECTED = "reconnected"
    """The link was lost: work here ends, then the lock is taken anew, and lost messages come again."""
    ENDING = "ending"
    """The lock was lost: work here must end."""


class Heartbeat(NamedTuple):
    """A heartbeat to send to the broker."""

    beat: int
    seen: int
    """The serial of the last lease that came over this link."""
    held: tuple[tuple[int, int], ...]
    """Partition and epoch; epoch 0: wanted."""


class Revoked(NamedTuple):
    """Take no more messages of this partition, and release those that were not started. Running handlers may finish."""

    partition: int


class Lost(NamedTuple):
    """Stop the handlers of this partition: their results do not count any more."""

    partition: int
    epoch: int


class Unlock(NamedTuple):
    """Release the lock: all messages of the partition are done, and their results were sent before this."""

    partition: int
    epoch: int


class Beat(NamedTuple):
    """Send a heartbeat now."""


Effect = Revoked | Lost | Unlock | Beat


class Hold:
    """A partition, as this consumer knows it."""

    __slots__ = ("epoch", "open", "since", "state", "wanted_at")

    def __init__(self) -> None:
        self.state: MemberState = MemberState.WANTED
        self.epoch: int = 0
        self.since: float = 0.0
        self.wanted_at: float | None = None
        """The time of the assignment, until the partition is held for the first time."""
        self.open: int = 0
        """Deliveries that are in work here."""


class MemberCore:
    """The state of one consumer. The owner performs and clears `effects` after each call."""

    def __init__(self) -> None:
        self.lease_end: float = float("-inf")
        """The end of the lease: no work after it."""
        self.lease_s: float = 0.0
        self.version: int = 0
        self.holds: dict[int, Hold] = {}
        self.effects: list[Effect] = []
        self.taken_s: list[float] = []
        """Waiting times of partitions that came to be held since the owner's last look; the owner clears it."""
        self.is_joined: bool = False
        """Whether the broker has answered once."""
        self._assigned: dict[int, None] = {}
        self._sent: dict[int, float] = {}
        self._beat = 0
        self._seen = 0
        self._over: dict[int, int] = {}
        """By partition: the last epoch that is over here. Messages of it come too late."""
        self._open: dict[tuple[int, int], int] = {}
        """By partition and epoch: deliveries in work."""

    @property
    def assigned(self) -> tuple[int, ...]:
        """The partitions that the broker's last lease assigned to it."""
        return tuple(self._assigned)

    # Heartbeats

    @property
    def heartbeat_s(self) -> float:
        """Seconds between heartbeats; before the first answer one is due at once."""
        return self.lease_s / _BEATS_PER_LEASE

    def beat(self, now: float) -> Heartbeat:
        """Return the heartbeat to send now. The lease of its answer counts from ``now``."""
        self._beat += 1
        self._sent[self._beat] = now
        while len(self._sent) > _BEATS_MAX:
            del self._sent[next(iter(self._sent))]
        held: list[tuple[int, int]] = []
        for partition, hold in self.holds.items():
            if hold.state is MemberState.WANTED:
                held.append((partition, 0))
            elif hold.state is not MemberState.ENDING:
                held.append((partition, hold.epoch))
        return Heartbeat(self._beat, self._seen, tuple(held))

    def on_lease(self, lease: Lease, now: float) -> None:
        """Take a lease of the broker."""
        self.on_deadline(now)
        self.is_joined = True
        self.lease_s = lease.lease_s
        sent = self._sent.get(lease.beat)
        if sent is not None:
            self.lease_end = max(self.lease_end, sent + lease.lease_s)
            for beat in [each for each in self._sent if each <= lease.beat]:
                del self._sent[beat]
        self._seen = lease.serial
        self.version = lease.version
        self._assigned = dict.fromkeys(partition for partition, _epoch in lease.assigned)
        for partition, epoch in lease.assigned:
            self._assign(partition, epoch, now)
        for partition in [each for each in self.holds if each not in self._assigned]:
            self._take_away(partition)
        if self.lease_end <= now:
            self._lose_all()

    def _assign(self, partition: int, epoch: int, now: float) -> None:
        hold = self.holds.get(partition)
        if hold is None:
            hold = self.holds[partition] = Hold()
            hold.wanted_at = now
            hold.open = self._still_open(partition)
            hold.state = MemberState.ENDING if hold.open else MemberState.WANTED
            if not hold.open:
                self.effects.append(Beat())
        if hold.state is MemberState.WANTED:
            if epoch > self._over.get(partition, 0):
                hold.state, hold.epoch, hold.since = MemberState.HELD, epoch, now
                if hold.wanted_at is not None:
                    self.taken_s.append(now - hold.wanted_at)
                    hold.wanted_at = None
        elif hold.state in (MemberState.HELD, MemberState.RECONNECTED) and epoch != hold.epoch:
            self._lose(partition, hold)

    def _still_open(self, partition: int) -> int:
        return sum(count for (each, _epoch), count in self._open.items() if each == partition)

    def _take_away(self, partition: int) -> None:
        hold = self.holds[partition]
        if hold.state is MemberState.WANTED:
            del self.holds[partition]
        elif hold.state in (MemberState.HELD, MemberState.RECONNECTED):
            hold.state = MemberState.DRAINING
            self.effects.append(Revoked(partition))
            self._look(partition)

    def link_lost(self) -> None:
        """Take the loss of the link. Locks and lease stay; messages on their way may be lost."""
        self._sent.clear()
        self._seen = 0
        for partition, hold in list(self.holds.items()):
            if hold.state is MemberState.HELD:
                hold.state = MemberState.RECONNECTED
                self.effects.append(Revoked(partition))
                self._look(partition)

    # Work

    def epoch_of(self, partition: int, now: float) -> int:
        """Return the epoch under which a delivery of the partition may be taken now; 0: none may."""
        hold = self.holds.get(partition)
        if hold is None or hold.state is not MemberState.HELD or now >= self.lease_end:
            return 0
        return hold.epoch

    def opened(self, partition: int, epoch: int) -> None:
        """Count a delivery that was taken."""
        key = (partition, epoch)
        self._open[key] = self._open.get(key, 0) + 1
        hold = self.holds.get(partition)
        if hold is not None:
            hold.open += 1

    def closed(self, partition: int, epoch: int) -> None:
        """Count a delivery as ended: its result is on its way, or it was stopped."""
        key = (partition, epoch)
        left = self._open.get(key, 0) - 1
        if left > 0:
            self._open[key] = left
        else:
            self._open.pop(key, None)
        hold = self.holds.get(partition)
        if hold is not None:
            hold.open = max(0, hold.open - 1)
            self._look(partition)

    def _look(self, partition: int) -> None:
        """Do the next step of a handover, if it can be done."""
        hold = self.holds[partition]
        if hold.open or hold.state in (MemberState.WANTED, MemberState.HELD):
            return
        if hold.state is not MemberState.ENDING:
            self._over[partition] = hold.epoch
        if hold.state is MemberState.DRAINING:
            self.effects.append(Unlock(partition, hold.epoch))
        if partition in self._assigned:
            hold.state, hold.epoch = MemberState.WANTED, 0
            self.effects.append(Beat())
        else:
            del self.holds[partition]

    # Losing

    def next_deadline(self) -> float | None:
        """When `on_deadline` has something to do."""
        live = any(hold.state not in (MemberState.WANTED, MemberState.ENDING) for hold in self.holds.values())
        return self.lease_end if live else None

    def on_deadline(self, now: float) -> None:
        """Act on time: the lease may be over."""
        if now >= self.lease_end:
            self._lose_all()

    def _lose_all(self) -> None:
        for partition, hold in list(self.holds.items()):
            if hold.state not in (MemberState.WANTED, MemberState.ENDING):
                self._lose(partition, hold)

    def _lose(self, partition: int, hold: Hold) -> None:
        self._over[partition] = hold.epoch
        self.effects.append(Lost(partition, hold.epoch))
        hold.state = MemberState.ENDING
        self._look(partition)
