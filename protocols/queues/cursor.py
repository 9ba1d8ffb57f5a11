"""What a channel knows of each partition: its cursor, what is done, what is to be committed. Pure.

Every message up to the floor of a partition is done; above it only exceptions are kept.
"""

import itertools
from collections import Counter, deque
from typing import Any, Final

from dep2p.protocols.queues.consumer import Consumer
from dep2p.protocols.queues.filters import Filter
from dep2p.protocols.queues.names import is_ephemeral
from dep2p.protocols.queues.partition_log import PartitionLog
from dep2p.protocols.queues.range_set import Ranges, as_ranges
from dep2p.protocols.queues.records import Cursor, CursorChange, PartitionRecord, StateRow

EPHEMERAL_BACKLOG_MAX: Final = 10_000
"""Messages that wait in an ephemeral channel, as nsqd's mem-queue-size."""


class Place:
    """A channel in one partition."""

    __slots__ = ("change", "cursor", "done", "log", "read", "states", "unhanded")

    def __init__(self, log: PartitionLog, cursor: Cursor) -> None:
        self.log = log
        self.cursor = cursor
        self.read = cursor.floor + 1
        """The next message to look at."""
        self.done = Ranges()
        """Done above the floor."""
        self.states: dict[int, StateRow] = {}
        self.unhanded: dict[int, None] = {}
        """Looked at and ready, never handed out; in rising order."""
        self.change: CursorChange | None = None


class ChannelPlaces:
    """The part of a `Channel` that is kept."""

    is_exclusive = False
    """Whether each partition has one consumer at a time, and each key an order."""

    def __init__(self, queue: Any, channel_id: int, name: str, filter_: Filter | None, *, is_paused: bool) -> None:
        self.queue = queue
        """The `Queue`; untyped, since type checkers know this folder under two names and would see two classes."""
        self.id = channel_id
        self.name = name
        self.filter = filter_
        self.is_ephemeral = is_ephemeral(name)
        self.is_paused = is_paused
        self.consumers: dict[str, Consumer] = {}
        self.counts: Counter[str] = Counter()
        self.last_dead_id: int = 0
        self.dead_items = 0
        self.is_awake = False
        self._places: dict[int, Place] = {}
        self._ready: deque[tuple[int, int]] = deque()
        self._urgent: list[tuple[int, int, int, int]] = []
        """Heap of (-priority, order, partition, seq): ready ones with a priority."""
        self._deferred: list[tuple[float, int, int, int]] = []
        """Heap of (due, published_us, partition, seq)."""
        self._deferred_valid: dict[tuple[int, int], float] = {}
        self._order = itertools.count()
        self._turn = 0

    # Partitions

    def add_partition(self, log: PartitionLog, record: PartitionRecord | None, floor: int) -> None:
        """Look at a partition too: from what the store has, or, new, from behind ``floor``."""
        cursor = None if record is None else record.cursors.get(self.id)
        if record is None or cursor is None:
            place = self._places[log.id] = Place(log, Cursor(floor, floor))
            self._touch(place)
            return
        place = self._places[log.id] = Place(log, cursor)
        place.done = Ranges(record.done.get(self.id, ()))
        for state in record.states.get(self.id, ()):
            place.states[state.seq] = state
        self.last_dead_id = max(self.last_dead_id, record.last_dead_id.get(self.id, 0))
        self.wake()

    def wake(self) -> None:
        """There may be something to hand out."""
        if not self.is_awake:
            self.is_awake = True
            self.queue.book.awake[self] = None

    # Done

    def _done(self, place: Place, seq: int) -> None:
        cursor, done = place.cursor, place.done
        change = place.change or self._touch(place)
        if place.states and place.states.pop(seq, None) is not None:
            change.states_removed.append(seq)
        if seq == cursor.floor + 1:
            floor = cursor.floor = done.take_after(seq) if done.items else seq
            if cursor.handed_out < floor:
                cursor.handed_out = floor
            self.queue.floor_moved(place.log)
        elif seq > cursor.floor and done.add(seq):
            change.done_added.append((seq, seq))
        if place.unhanded:
            place.unhanded.pop(seq, None)

    def _touch(self, place: Place) -> CursorChange:
        change = place.change
        if change is None:
            change = place.change = CursorChange(place.cursor)
            self.queue.book.changed[(self, place.log.id)] = None
        return change

    def _set_state(self, place: Place, seq: int, attempts: int, due_us: int, history: bytes) -> None:
        state = place.states[seq] = StateRow(self.id, place.log.id, seq, attempts, due_us, history)
        self._touch(place).states_set.append(state)

    def take_change(self, partition: int) -> CursorChange | None:
        """What is to be committed, and was not taken before."""
        place = self._places.get(partition)
        if place is None or place.change is None:
            return None
        change, place.change = place.change, None
        change.cursor = Cursor(place.cursor.floor, place.cursor.handed_out)
        floor = change.cursor.floor
        if change.done_added:
            numbers = sorted(low for low, _high in change.done_added if low > floor)
            change.done_added = as_ranges(numbers)
        if change.states_set:
            last: dict[int, StateRow] = {}
            for state in change.states_set:
                last[state.seq] = state
            change.states_set = [state for state in last.values() if place.states.get(state.seq) is state]
        return change

    def give_back(self, partition: int, change: CursorChange) -> None:
        """The commit of a change has failed: it belongs to the next one."""
        place = self._places.get(partition)
        if place is None:
            return
        now = self._touch(place)
        now.done_added[:0] = [(seq, seq) for low, high in change.done_added for seq in range(low, high + 1)]
        now.states_set[:0] = change.states_set
        now.states_removed[:0] = change.states_removed

    # Watching

    def floor(self, partition: int) -> int:
        """Everything up to it is done."""
        return self._places[partition].cursor.floor

    def is_done(self, partition: int, seq: int) -> bool:
        """Whether a message is done here."""
        place = self._places[partition]
        return seq <= place.cursor.floor or seq in place.done

    def attempts_of(self, partition: int, seq: int) -> int:
        """Deliveries so far of a message that is not done."""
        place = self._places[partition]
        for consumer in self.consumers.values():
            held = consumer.held.get((partition, seq))
            if held is not None:
                return held.attempts
        state = place.states.get(seq)
        return 0 if state is None else state.attempts

    @property
    def in_flight(self) -> int:
        """Messages in the hands of consumers."""
        return sum(len(each.held) for each in self.consumers.values())

    @property
    def deferred(self) -> int:
        """Messages that wait for their time, as far as they were looked at."""
        return len(self._deferred_valid)

    @property
    def depth(self) -> int:
        """Messages that are not done and in nobody's hands."""
        total = 0
        for place in self._places.values():
            start = max(place.cursor.floor, place.log.trimmed)
            total += max(0, place.log.visible - start - place.done.items)
        return max(0, total - self.in_flight)

    def skip_all(self) -> int:
        """Everything that waits or is in flight is dropped; gives how many."""
        dropped = self.depth + self.in_flight
        for consumer in self.consumers.values():
            consumer.held.clear()
            consumer.held_bytes = 0
            consumer.staged = []
        self._ready.clear()
        self._urgent.clear()
        self._deferred.clear()
        self._deferred_valid.clear()
        for place in self._places.values():
            place.done.clear()
            place.states.clear()
            place.unhanded.clear()
            place.cursor.floor = place.cursor.handed_out = place.log.visible
            place.read = place.log.visible + 1
            self._touch(place)
            self.queue.floor_moved(place.log)
        self.counts["emptied"] += dropped
        return dropped

    def gone(self, log: PartitionLog, seq: int) -> None:
        """The store has no message of this number: nobody waits for it."""
        place = self._places[log.id]
        if seq > place.cursor.floor and seq not in place.done:
            self._done(place, seq)

    def drop_overflow(self) -> None:
        """An ephemeral channel has no claim on the log: what is too much for memory is dropped, the oldest first."""
        most = max(1, EPHEMERAL_BACKLOG_MAX // len(self._places))
        for place in self._places.values():
            over = place.log.visible - place.cursor.floor - most
            if over > 0:
                self.counts["dropped_overflow"] += over
                self.skip_to(place.log, place.cursor.floor + over)

    def skip_to(self, log: PartitionLog, up_to: int) -> None:
        """Messages up to a number are nobody's business any more: they have left the log, or are too many."""
        place = self._places[log.id]
        if up_to <= place.cursor.floor:
            return
        place.done.drop_up_to(up_to)
        floor = place.cursor.floor = place.done.take_after(up_to)
        place.cursor.handed_out = max(place.cursor.handed_out, floor)
        for seq in [each for each in place.states if each <= floor]:
            del place.states[seq]  # the store forgets by itself what the floor has passed
        for seq in [each for each in place.unhanded if each <= floor]:
            del place.unhanded[seq]
        place.read = max(place.read, floor + 1)
        self._touch(place)
        self.queue.floor_moved(log)
