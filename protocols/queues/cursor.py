"""A channel's position in one partition: finished messages, delivered ones, changes to commit. Pure."""

from dep2p.protocols.queues.partition_log import PartitionLog
from dep2p.protocols.queues.range_set import Ranges, as_ranges
from dep2p.protocols.queues.records import Cursor, CursorChange, StateRow


class PartitionCursor:
    """The position of a channel in one partition."""

    __slots__ = ("change", "cursor", "done", "log", "read", "states", "undelivered")

    def __init__(self, log: PartitionLog, cursor: Cursor) -> None:
        self.log: PartitionLog = log
        self.cursor: Cursor = cursor
        self.read: int = cursor.ack_floor + 1
        """The next message to look at."""
        self.done: Ranges = Ranges()
        """Finished numbers above the ack floor."""
        self.states: dict[int, StateRow] = {}
        self.undelivered: dict[int, None] = {}
        """Ready messages that were never delivered; in rising order."""
        self.change: CursorChange | None = None

    def is_done(self, seq: int) -> bool:
        """Whether the channel has finished a message."""
        return seq <= self.cursor.ack_floor or seq in self.done

    def take_change(self, change: CursorChange) -> CursorChange:
        """Return the change to commit, complete, and begin without one."""
        self.change = None
        change.cursor = Cursor(self.cursor.ack_floor, self.cursor.delivered_up_to)
        ack_floor = change.cursor.ack_floor
        if change.done_added:
            numbers = sorted(low for low, _high in change.done_added if low > ack_floor)
            change.done_added = as_ranges(numbers)
        if change.states_set:
            last: dict[int, StateRow] = {}
            for state in change.states_set:
                last[state.seq] = state
            change.states_set = [state for state in last.values() if self.states.get(state.seq) is state]
        return change

    def skip_all(self) -> None:
        """Mark everything in the partition as done."""
        self.done.clear()
        self.states.clear()
        self.undelivered.clear()
        self.cursor.ack_floor = self.cursor.delivered_up_to = self.log.visible
        self.read = self.log.visible + 1

    def skip_to(self, up_to: int) -> None:
        """Mark everything up to a number as done."""
        self.done.drop_up_to(up_to)
        ack_floor = self.cursor.ack_floor = self.done.take_after(up_to)
        self.cursor.delivered_up_to = max(self.cursor.delivered_up_to, ack_floor)
        for seq in [each for each in self.states if each <= ack_floor]:
            del self.states[seq]  # the store forgets rows below the ack floor by itself
        for seq in [each for each in self.undelivered if each <= ack_floor]:
            del self.undelivered[seq]
        self.read = max(self.read, ack_floor + 1)
