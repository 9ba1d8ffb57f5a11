"""The coordinator of an exclusive channel: which consumers are online, and which partitions are whose. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dep2p.protocols.queues.ordering.assignment import Strategy, allocate


@dataclass(slots=True)
class Member:
    """A consumer that is online."""

    label: str
    """For people."""
    since_us: int
    """Unix microseconds."""
    until: float
    """Monotonic seconds: without a heartbeat it counts as gone then."""


class Coordinator:
    """Every change of the allocation raises `version`."""

    def __init__(self, partitions: Sequence[int]) -> None:
        self.version = 0
        self.members: dict[bytes, Member] = {}
        """In the order in which they joined."""
        self.assignment: dict[bytes, tuple[int, ...]] = {}
        self.partitions = tuple(partitions)

    def restore(self, version: int, members: Mapping[bytes, Member], assignment: Mapping[bytes, Sequence[int]]) -> None:
        """What was stored."""
        self.version = version
        self.members = dict(members)
        self.assignment = {member: tuple(assignment.get(member, ())) for member in members}
        self._allocate()

    def heartbeat(self, member: bytes, label: str, until: float, wall_us: int) -> bool:
        """It is online until then at least. Gives whether it has joined just now."""
        known = self.members.get(member)
        if known is not None:
            known.until = max(known.until, until)
            known.label = label
            return False
        self.members[member] = Member(label, wall_us, until)
        self._allocate()
        return True

    def leave(self, member: bytes) -> bool:
        """It is gone; False when it was not there."""
        if self.members.pop(member, None) is None:
            return False
        self._allocate()
        return True

    def expired(self, now: float) -> list[bytes]:
        """Those that have not been heard of in time; they are gone now."""
        over = [member for member, each in self.members.items() if each.until <= now]
        for member in over:
            del self.members[member]
        if over:
            self._allocate()
        return over

    def set_partitions(self, partitions: Sequence[int]) -> None:
        """The route table has others now."""
        self.partitions = tuple(partitions)
        self._allocate()

    def owns(self, member: bytes, partition: int) -> bool:
        """Whether a partition is allocated to a member."""
        return partition in self.assignment.get(member, ())

    def _allocate(self) -> None:
        found = allocate(Strategy.EXCLUSIVE, self.partitions, list(self.members), self.assignment)
        if found != self.assignment:
            self.assignment = found
            self.version += 1

    def next_deadline(self) -> float | None:
        """When `expired` would give something."""
        return min((each.until for each in self.members.values()), default=None)
