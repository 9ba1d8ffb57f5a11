"""The coordinator of an exclusive channel: its consumers, and the partitions of each. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dep2p.protocols.queues.ordering.assignment import Strategy, assign_partitions


@dataclass(slots=True)
class GroupMember:
    """A consumer that is online."""

    label: str
    """For displays."""
    since_us: int
    """Unix microseconds."""
    until: float
    """Monotonic seconds: without a heartbeat the consumer counts as gone then."""


class Coordinator:
    """The coordinator. Every change of the assignment raises `version`."""

    def __init__(self, partitions: Sequence[int]) -> None:
        self.version: int = 0
        self.members: dict[bytes, GroupMember] = {}
        """The members in the order in which they joined."""
        self.assignment: dict[bytes, tuple[int, ...]] = {}
        self.partitions: tuple[int, ...] = tuple(partitions)

    def restore(
        self, version: int, members: Mapping[bytes, GroupMember], assignment: Mapping[bytes, Sequence[int]]
    ) -> None:
        """Restore the stored state."""
        self.version = version
        self.members = dict(members)
        self.assignment = {member: tuple(assignment.get(member, ())) for member in members}
        self._reassign()

    def heartbeat(self, member: bytes, label: str, until: float, wall_us: int) -> bool:
        """Note that a member is online until then at least. Returns whether it has just joined."""
        known = self.members.get(member)
        if known is not None:
            known.until = max(known.until, until)
            known.label = label
            return False
        self.members[member] = GroupMember(label, wall_us, until)
        self._reassign()
        return True

    def leave(self, member: bytes) -> bool:
        """Remove a member; return False when it was not there."""
        if self.members.pop(member, None) is None:
            return False
        self._reassign()
        return True

    def expired(self, now: float) -> list[bytes]:
        """Remove and return the members that were silent for too long."""
        over = [member for member, each in self.members.items() if each.until <= now]
        for member in over:
            del self.members[member]
        if over:
            self._reassign()
        return over

    def set_partitions(self, partitions: Sequence[int]) -> None:
        """Set the partitions of the route table."""
        self.partitions = tuple(partitions)
        self._reassign()

    def owns(self, member: bytes, partition: int) -> bool:
        """Whether a partition is assigned to a member."""
        return partition in self.assignment.get(member, ())

    def _reassign(self) -> None:
        found = assign_partitions(Strategy.EXCLUSIVE, self.partitions, list(self.members), self.assignment)
        if found != self.assignment:
            self.assignment = found
            self.version += 1

    def next_deadline(self) -> float | None:
        """Return when `expired` would return a member."""
        return min((each.until for each in self.members.values()), default=None)
