"""A channel: an independent cursor over a queue's partitions, with what is in flight, deferred and done. Pure.

Every message up to the ack floor of a partition is done; above it only exceptions are kept (`PartitionCursor`). Nothing
here grows with the backlog: a channel looks at messages in a window ahead of what it delivers.
"""

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Sequence
from typing import Final, Protocol

from dep2p.errors import NotInFlightError
from dep2p.protocols.queues.consumer import ChannelConsumer, ChannelDelivery, HeldMessage
from dep2p.protocols.queues.cursor import PartitionCursor
from dep2p.protocols.queues.failure_history import add_failure
from dep2p.protocols.queues.filters import Filter
from dep2p.protocols.queues.message import QueuedMessage, encode_meta
from dep2p.protocols.queues.names import is_ephemeral
from dep2p.protocols.queues.options import QueueOptions
from dep2p.protocols.queues.partition_log import PartitionLog, Read
from dep2p.protocols.queues.range_set import Ranges
from dep2p.protocols.queues.records import Cursor, CursorChange, DeadLetterRow, PartitionRecord, StateRow
from dep2p.protocols.queues.trace_hooks import OVERDUE, QueueTrace

EPHEMERAL_BACKLOG_MAX: Final = 10_000
"""Messages that wait in an ephemeral channel at most, as nsqd's mem-queue-size."""
_WINDOW_ITEMS: Final = 1_024
"""Messages that a channel looks ahead of its deliveries, at least."""
_SHARE_ITEMS: Final = 32
"""Messages of a partition that are delivered before it is another one's turn."""
_DEFERRED_MAX: Final = 1_000_000
"""Deferred messages in memory; a channel with more looks no further ahead until some are due."""
_PLAIN: Final = (0, 0, 0, 0)
"""The values of due_us, expires_us, only_channel and priority of a message that has no options."""

_new = tuple[object, ...].__new__
"""A NamedTuple's own constructor costs twice as much."""


class ChannelRegistry(Protocol):
    """The registry of all queues, as a channel uses it. ``wall_us``: Unix microseconds, as the owner set them last."""

    wall_us: int
    trace: QueueTrace | None
    awake: dict["Channel", None]
    """Channels that may have something to deliver."""
    active: dict["Channel", None]
    """Channels with deadlines."""
    changed: dict[tuple["Channel", int], None]
    """Channels and partitions with something to commit."""
    staged: dict[ChannelConsumer, None]
    """Consumers with deliveries that are not committed."""
    starved: dict["Channel", None]
    """Channels that wait until others have got their pages."""

    def may_read(self, log: PartitionLog) -> bool:
        """Whether a page may be asked for."""
        ...


class ChannelQueue(Protocol):
    """The queue, as its channels use it."""

    namespace: str
    name: str
    options: QueueOptions
    partition_ids: tuple[int, ...]
    is_ephemeral: bool
    is_paused: bool

    @property
    def registry(self) -> ChannelRegistry: ...

    def ack_floor_moved(self, log: PartitionLog) -> None:
        """Act on a higher ack floor: messages that all channels have finished may leave the log."""
        ...

    def add_dead_letter(self, channel: "Channel", row: DeadLetterRow) -> None:
        """Keep a dead letter."""
        ...


class Channel:
    """A channel of a queue. Made by `Queue.create_channel`."""

    is_exclusive = False
    """Whether each partition has one consumer at a time, and each key an order."""

    def __init__(
        self, queue: ChannelQueue, channel_id: int, name: str, filter_: Filter | None, *, is_paused: bool
    ) -> None:
        self.queue = queue
        self.id = channel_id
        self.name = name
        self.filter = filter_
        self.is_ephemeral: bool = is_ephemeral(name)
        self.is_paused = is_paused
        self.consumers: dict[str, ChannelConsumer] = {}
        self.counts: Counter[str] = Counter()
        self.last_dead_id: int = 0
        self.dead_items = 0
        self.is_awake: bool = False
        self._positions: dict[int, PartitionCursor] = {}
        self._ready: deque[tuple[int, int]] = deque()
        self._urgent: list[tuple[int, int, int, int]] = []
        """Heap of (-priority, order, partition, seq) of ready messages with a priority."""
        self._deferred: list[tuple[float, int, int, int]] = []
        """Heap of (due, published_us, partition, seq)."""
        self._deferred_valid: dict[tuple[int, int], float] = {}
        self._order = itertools.count()
        self._turn = 0

    # Partitions

    def add_partition(self, log: PartitionLog, record: PartitionRecord | None, ack_floor: int) -> None:
        """Add a partition: from its stored record, or, when it is new, from behind ``ack_floor``."""
        cursor = None if record is None else record.cursors.get(self.id)
        if record is None or cursor is None:
            position = self._positions[log.id] = PartitionCursor(log, Cursor(ack_floor, ack_floor))
            self._touch(position)
            return
        position = self._positions[log.id] = PartitionCursor(log, cursor)
        position.done = Ranges(record.done.get(self.id, ()))
        for state in record.states.get(self.id, ()):
            position.states[state.seq] = state
        self.last_dead_id = max(self.last_dead_id, record.last_dead_id.get(self.id, 0))
        self.wake()

    def wake(self) -> None:
        """Mark the channel: there may be messages to deliver."""
        if not self.is_awake:
            self.is_awake = True
            self.queue.registry.awake[self] = None

    # Done

    def _done(self, position: PartitionCursor, seq: int) -> None:
        cursor, done = position.cursor, position.done
        change = position.change or self._touch(position)
        if position.states and position.states.pop(seq, None) is not None:
            change.states_removed.append(seq)
        if seq == cursor.ack_floor + 1:
            ack_floor = cursor.ack_floor = done.take_after(seq) if done.items else seq
            if cursor.delivered_up_to < ack_floor:
                cursor.delivered_up_to = ack_floor
            self.queue.ack_floor_moved(position.log)
        elif seq > cursor.ack_floor and done.add(seq):
            change.done_added.append((seq, seq))
        if position.undelivered:
            position.undelivered.pop(seq, None)

    def _touch(self, position: PartitionCursor) -> CursorChange:
        change = position.change
        if change is None:
            change = position.change = CursorChange(position.cursor)
            self.queue.registry.changed[(self, position.log.id)] = None
        return change

    def _set_state(self, position: PartitionCursor, seq: int, attempts: int, due_us: int, history: bytes) -> None:
        state = position.states[seq] = StateRow(self.id, position.log.id, seq, attempts, due_us, history)
        self._touch(position).states_set.append(state)

    def take_change(self, partition: int) -> CursorChange | None:
        """Return the changes to commit that were not taken before."""
        position = self._positions.get(partition)
        if position is None or position.change is None:
            return None
        return position.take_change(position.change)

    def give_back(self, partition: int, change: CursorChange) -> None:
        """Put a change, whose commit has failed, into the next one."""
        position = self._positions.get(partition)
        if position is None:
            return
        self._touch(position).prepend(change)

    # Consumers

    def attach(self, consumer: ChannelConsumer) -> None:
        """Attach a consumer: it takes messages from now on. Raises ``ValueError`` when its id is attached already."""
        if consumer.id in self.consumers:
            raise ValueError(f"a consumer {consumer.id!r} is attached already")
        self.consumers[consumer.id] = consumer
        self.queue.registry.active[self] = None
        self.wake()

    def set_ready(self, consumer: ChannelConsumer, max_in_flight: int) -> None:
        """Set the number of messages that a consumer may hold; 0 pauses it."""
        consumer.max_in_flight = max_in_flight
        self.wake()

    def detach(self, consumer: ChannelConsumer, now: float) -> None:
        """Detach a consumer: its messages go to others at once, unless the queue's options say otherwise."""
        if self.consumers.get(consumer.id) is not consumer:
            return
        if self.queue.options.requeue_on_disconnect or self.queue.is_ephemeral:
            del self.consumers[consumer.id]
            consumer.staged = []
            # Each goes to the front, so that their order stays. `held` is in the order of deadlines.
            for key in sorted(consumer.held, reverse=True):
                held = consumer.drop(key)
                assert held is not None
                if not held.is_out:  # it never saw it
                    self._release(key, held)
                else:
                    self.counts["requeued_consumer_gone"] += 1
                    self._back(key, held, now, 0.0, "its consumer was gone", front=True)
        else:
            consumer.max_in_flight = 0
            consumer.is_gone = True
            if not consumer.held:
                del self.consumers[consumer.id]
        self.wake()

    # Ready messages

    def _is_first_missing(self) -> bool:
        """Whether the first ready message has left the memory."""
        if self._urgent:
            partition, seq = self._urgent[0][2:]
        elif self._ready:
            partition, seq = self._ready[0]
        else:
            return False
        return seq not in self._positions[partition].log.rows

    def _next_ready(self) -> tuple[int, int] | None:
        """Take out the next ready message and return its key."""
        while self._urgent:
            _priority, _order, partition, seq = heapq.heappop(self._urgent)
            if self._is_open(partition, seq):
                return partition, seq
        ready, positions = self._ready, self._positions
        while ready:
            key = ready.popleft()
            partition, seq = key
            position = positions.get(partition)
            # As `_is_open`: it is asked for each message.
            if position is not None and seq > position.cursor.ack_floor and seq > position.log.trimmed:
                if not (position.done.items and seq in position.done) and not (
                    position.log.holes and position.log.is_gone(seq)
                ):
                    return key
        return None

    def _put_back(self, key: tuple[int, int]) -> None:
        self._ready.appendleft(key)

    def _is_open(self, partition: int, seq: int) -> bool:
        position = self._positions.get(partition)
        return (
            position is not None
            and seq > position.cursor.ack_floor
            and seq not in position.done
            and not position.log.is_gone(seq)
        )

    # Looking ahead

    def _look_ahead(self, now: float, wall_us: int, wants: dict[int, Read] | None) -> bool:
        """Look at further messages until the window is full; return whether some became ready."""
        credit = sum(each.room for each in self.consumers.values() if each.room > 0)
        window = max(_WINDOW_ITEMS, credit)
        positions = list(self._positions.values())
        found = False
        # Each partition has its share of the free window, so that a long one does not keep the others away.
        while (free := window - len(self._ready) - len(self._urgent)) > 0:
            share = min(_SHARE_ITEMS, -(-free // len(positions)))
            moved = False
            for position in positions:
                became_ready, looked = self._look_in(position, share, now, wall_us, wants if credit else None)
                found = found or became_ready
                moved = moved or looked
            if not moved:
                break
        return found

    def _look_in(
        self, position: PartitionCursor, most: int, now: float, wall_us: int, wants: dict[int, Read] | None
    ) -> tuple[bool, bool]:
        """Look at messages until so many are ready. Returns whether one became ready, and whether it looked at any."""
        log = position.log
        start = position.read
        ready = 0
        is_plain = self.filter is None and not self.is_exclusive
        if is_plain and not position.states and not log.holes:
            ready = self._look_plainly(position, most)
        while ready < most and position.read <= log.visible and len(self._deferred) < _DEFERRED_MAX:
            seq = position.read
            if seq <= position.cursor.ack_floor:  # the store had no such message
                position.read = position.cursor.ack_floor + 1
                continue
            if (position.done.items and seq in position.done) or seq <= log.trimmed or (log.holes and log.is_gone(seq)):
                position.read += 1
                self._mark_gone(position, seq)
                continue
            message = log.rows.get(seq)
            if message is None:
                if wants is not None:
                    self._want(position, seq, wants)
                break
            if self.is_exclusive and self._is_blocked(position, message):
                break
            position.read += 1
            ready += self._look_at(position, message, now, wall_us)
        return ready > 0, position.read > start

    def _look_plainly(self, position: PartitionCursor, most: int) -> int:
        """Do as `_look_in` and `_look_at`, for nearly all messages: those without attributes and without a state."""
        log, cursor, start = position.log, position.cursor, position.read
        if start <= max(cursor.ack_floor, cursor.delivered_up_to, log.trimmed, position.done.last):
            return 0
        rows, undelivered, ready, partition = log.rows, position.undelivered, self._ready, log.id
        seq, end = start, min(log.visible + 1, start + most)
        while seq < end:
            message = rows.get(seq)
            if message is None or message[2:6] != _PLAIN:
                break
            undelivered[seq] = None
            ready.append((partition, seq))
            seq += 1
        position.read = seq
        return seq - start

    def _mark_gone(self, position: PartitionCursor, seq: int) -> None:
        """Mark a number as done for all consumers: it was never used, or its message has left the log."""
        if seq not in position.done and seq > position.cursor.ack_floor:
            self._done(position, seq)

    def _look_at(self, position: PartitionCursor, message: QueuedMessage, now: float, wall_us: int) -> bool:
        seq = message.seq
        if message.expires_us and message.expires_us <= wall_us:
            self.counts["expired"] += 1
            if self.queue.registry.trace is not None:
                self.report_expired(self.queue.registry.trace, position.log.id, message)
            self._done(position, seq)
            return False
        if message.only_channel and message.only_channel != self.id:
            self._done(position, seq)
            return False
        if self.filter is not None and not self.filter.matches(message.attributes) and not message.only_channel:
            self.counts["filtered"] += 1
            self._done(position, seq)
            return False
        state = position.states.get(seq)
        if state is None and seq <= position.cursor.delivered_up_to and not message.due_us:
            # Delivered by an earlier run, which ended before it was settled.
            state = position.states[seq] = StateRow(self.id, position.log.id, seq, 1, 0, b"")
            self._set_state(position, seq, 1, 0, b"")
            self.counts["recovered"] += 1
        if state is not None and self._is_used_up(state.attempts):
            self._die(position, message, state.attempts, state.history, "its deliveries were used up")
            return False
        if state is None and not message.due_us:
            position.undelivered[seq] = None
        if self.is_exclusive and not self._takes_turn(position, message, state):
            return False
        due_us = message.due_us if state is None else state.due_us
        if due_us > wall_us:
            self._defer(position.log.id, message, now + (due_us - wall_us) / 1e6)
            return False
        self._make_ready(position.log.id, message)
        return True

    def _is_blocked(self, position: PartitionCursor, message: QueuedMessage) -> bool:
        """Whether an exclusive channel must not read a partition further for now."""
        return False

    def _takes_turn(self, position: PartitionCursor, message: QueuedMessage, state: StateRow | None) -> bool:
        """Whether an exclusive channel may deliver a message before any other of its key is done."""
        return True

    def _make_ready(self, partition: int, message: QueuedMessage) -> None:
        if message.priority:
            heapq.heappush(self._urgent, (-message.priority, next(self._order), partition, message.seq))
        else:
            self._ready.append((partition, message.seq))

    def _make_ready_unseen(self, key: tuple[int, int]) -> None:
        self._ready.append(key)

    def _defer(self, partition: int, message: QueuedMessage, due: float) -> None:
        key = (partition, message.seq)
        self._deferred_valid[key] = due
        heapq.heappush(self._deferred, (due, message.published_us, partition, message.seq))
        self.queue.registry.active[self] = None

    def _undefer(self, now: float) -> None:
        deferred = self._deferred
        while deferred and deferred[0][0] <= now:
            due, _published, partition, seq = heapq.heappop(deferred)
            if self._deferred_valid.get((partition, seq)) != due:
                continue
            del self._deferred_valid[(partition, seq)]
            if self._is_open(partition, seq):
                message = self._positions[partition].log.rows.get(seq)
                if message is not None:
                    self._make_ready(partition, message)
                else:
                    self._make_ready_unseen((partition, seq))

    def _want(self, position: PartitionCursor, seq: int, wants: dict[int, Read]) -> None:
        log = position.log
        if not log.wanted and not log.is_pinned:
            if not self.queue.registry.may_read(log):
                self.queue.registry.starved[self] = None
                return
            wants[log.id] = log.want(seq)

    # Delivering

    def pump(self, now: float, wall_us: int) -> list[Read]:
        """Assign ready messages to the consumers that have room, fairly. Returns the pages that are missing for it."""
        self.is_awake = False
        self._undefer(now)
        if self.is_paused or self.queue.is_paused:
            return []
        wants: dict[int, Read] = {}
        # Pages of ready messages come first: pages further ahead would push them out of the cache again and again.
        self._look_ahead(now, wall_us, None if self._is_first_missing() else wants)
        hungry = [each for each in self.consumers.values() if each.room > 0]
        if not hungry:
            return []
        turn = self._turn
        # Each consumer gets a run of ready messages: its results come together, and the ack floor moves with them.
        share = len(self._ready) // len(hungry)
        given = 0
        while hungry:
            index = turn % len(hungry)
            consumer = hungry[index]
            count = self._deliver_run(consumer, max(1, share - given), now)
            if not count:
                key = self._next_ready()
                if key is None:
                    if not self._look_ahead(now, wall_us, wants):
                        break
                    continue
                position = self._positions[key[0]]
                message = position.log.rows.get(key[1])
                if message is None:
                    self._put_back(key)
                    self._want(position, key[1], wants)
                    break
                self._deliver(position, message, consumer, now)
                count = 1
            given += count
            if consumer.room <= 0:
                hungry.pop(index)
                turn, given = index, 0
            elif given >= share:
                turn, given = turn + 1, 0
        self._turn = turn + 1 if given else turn
        return list(wants.values())

    def _deliver_run(self, consumer: ChannelConsumer, most: int, now: float) -> int:
        """Do as `_deliver`, while the cursor alone says what was delivered: nearly always. Returns how many."""
        ready = self._ready
        if not ready or self._urgent:
            return 0
        partition = ready[0][0]
        position = self._positions.get(partition)
        if position is None or position.states or position.log.holes:
            return 0
        rows, undelivered, cursor = position.log.rows, position.undelivered, position.cursor
        above = max(cursor.ack_floor, position.log.trimmed, position.done.last)
        held_of, staged, trace = consumer.held, consumer.staged, self.queue.registry.trace
        deadline = now + consumer.msg_timeout_s
        size = count = 0
        room_bytes = consumer.bytes_max - consumer.held_bytes
        most = min(most, consumer.max_in_flight - len(held_of))
        while count < most and ready and size < room_bytes:
            key = ready[0]
            seq = key[1]
            message = rows.get(seq)
            if (
                message is None
                or message[2]
                or key[0] != partition
                or seq <= above
                or next(iter(undelivered), 0) != seq
            ):
                break
            del ready[0], undelivered[seq]
            held_of[key] = held = HeldMessage(message, 1, now, deadline)
            size += held.size
            staged.append(_new(ChannelDelivery, (partition, message, 1, deadline, 0)))
            count += 1
            if trace is not None:
                trace.delivered(self, partition, message, consumer.id, 1)
        if count:
            delivered_up_to = next(iter(undelivered), position.read) - 1
            if delivered_up_to > cursor.delivered_up_to:
                cursor.delivered_up_to = delivered_up_to
            self._touch(position)
            consumer.held_bytes += size
            consumer.delivered += count
            self.counts["delivered"] += count
            self.queue.registry.staged[consumer] = None
        return count

    def _deliver(
        self, position: PartitionCursor, message: QueuedMessage, consumer: ChannelConsumer, now: float
    ) -> None:
        seq = message.seq
        state = position.states.get(seq)
        undelivered = position.undelivered
        if state is None and not message.due_us and undelivered and next(iter(undelivered)) == seq:
            # In order: the cursor alone says that it was delivered.
            del undelivered[seq]
            cursor = position.cursor
            delivered_up_to = next(iter(undelivered), position.read) - 1
            if delivered_up_to > cursor.delivered_up_to:
                cursor.delivered_up_to = delivered_up_to
            attempts = 1
            if position.change is None:
                self._touch(position)
        else:
            undelivered.pop(seq, None)
            before = self._attempts_before(position, seq, state)
            attempts = before + 1
            self._set_state(position, seq, attempts, 0, b"" if state is None else state.history)
        self.counts["delivered"] += 1
        if attempts > 1:
            self.counts["redelivered"] += 1
        consumer.delivered += 1
        consumer.assign(position.log.id, message, attempts, now)
        trace = self.queue.registry.trace
        if trace is not None:
            trace.delivered(self, position.log.id, message, consumer.id, attempts)
        if len(consumer.staged) == 1:
            self.queue.registry.staged[consumer] = None

    def _attempts_before(self, position: PartitionCursor, seq: int, state: StateRow | None) -> int:
        return 0 if state is None else state.attempts

    # Settling

    def finish(self, consumer: ChannelConsumer, keys: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Finish messages. Returns those that the consumer does not hold."""
        refused: list[tuple[int, int]] = []
        positions, held_of, trace = self._positions, consumer.held, self.queue.registry.trace
        for key in keys:
            held = held_of.pop(key, None)
            if held is None:
                refused.append(key)
                continue
            consumer.held_bytes -= held.size
            if trace is not None:
                trace.settled(self, "finished", key[0], held)
            self._done(positions[key[0]], key[1])
        self.counts["finished"] += len(keys) - len(refused)
        if refused:
            self.counts["refused_not_in_flight"] += len(refused)
        self._settled(consumer)
        return refused

    def requeue(self, consumer: ChannelConsumer, key: tuple[int, int], delay_s: float, reason: str, now: float) -> None:
        """Deliver a message again, after ``delay_s`` (cut to the queue's ``delay_max_s``). Raises NotInFlightError."""
        held = self._drop(consumer, key)
        self.counts["requeued"] += 1
        self._back(key, held, now, min(max(0.0, delay_s), self.queue.options.delay_max_s), reason)
        self._settled(consumer)

    def release(self, consumer: ChannelConsumer, key: tuple[int, int]) -> None:
        """Release a message: the attempt does not count. Raises NotInFlightError."""
        held = self._drop(consumer, key)
        self.counts["released"] += 1
        self._release(key, held)
        self._settled(consumer)

    def reject(self, consumer: ChannelConsumer, key: tuple[int, int], reason: str) -> None:
        """Make a message that can never work a dead letter at once. Raises NotInFlightError."""
        held = self._drop(consumer, key)
        self.counts["rejected"] += 1
        position = self._positions[key[0]]
        wall_us = self.queue.registry.wall_us
        if self.queue.registry.trace is not None:
            self.queue.registry.trace.settled(self, "rejected", key[0], held, reason)
        history = add_failure(self._history(position, key[1]), wall_us, held.attempts, reason or "rejected")
        self._die(position, held.message, held.attempts, history, reason or "rejected")
        self._settled(consumer)

    def touch(self, consumer: ChannelConsumer, key: tuple[int, int], now: float) -> float:
        """Begin a message's time anew; return the new deadline. Raises NotInFlightError."""
        held = consumer.held.get(key)
        if held is None:
            raise self._not_in_flight(key)
        consumer.touch(key, held, now, held.first + self.queue.options.msg_timeout_max_s)
        self.counts["touched"] += 1
        return held.deadline

    def _drop(self, consumer: ChannelConsumer, key: tuple[int, int]) -> HeldMessage:
        held = consumer.drop(key)
        if held is None:
            self.counts["refused_not_in_flight"] += 1
            raise self._not_in_flight(key)
        return held

    def _not_in_flight(self, key: tuple[int, int]) -> NotInFlightError:
        return NotInFlightError(
            f"message {key[1]} of partition {key[0]} is not held by this consumer: its time was over, it was settled "
            "before, or another consumer has it"
        )

    def _settled(self, consumer: ChannelConsumer) -> None:
        if not consumer.held and not consumer.max_in_flight and consumer.is_gone:
            self.consumers.pop(consumer.id, None)
        if consumer.max_in_flight:
            self.wake()

    def _release(self, key: tuple[int, int], held: HeldMessage) -> None:
        if self.queue.registry.trace is not None:
            self.queue.registry.trace.settled(self, "released", key[0], held)
        if not self._is_open(*key):  # it was too old, and has left the log
            return
        position = self._positions[key[0]]
        self._set_state(position, key[1], held.attempts - 1, 0, self._history(position, key[1]))
        self._put_back(key)
        self.wake()

    def _back(
        self, key: tuple[int, int], held: HeldMessage, now: float, delay_s: float, reason: str, *, front: bool = False
    ) -> None:
        """Deliver a message again, or make it a dead letter when its deliveries are used up."""
        if self.queue.registry.trace is not None:
            state = "timed_out" if reason is OVERDUE else "requeued"
            self.queue.registry.trace.settled(self, state, key[0], held, reason)
        if not self._is_open(*key):  # it was too old, and has left the log
            return
        position = self._positions[key[0]]
        registry = self.queue.registry
        history = add_failure(self._history(position, key[1]), registry.wall_us, held.attempts, reason)
        if self._is_used_up(held.attempts):
            self._die(position, held.message, held.attempts, history, reason or "requeued")
            return
        due_us = registry.wall_us + round(delay_s * 1e6) if delay_s else 0
        self._set_state(position, key[1], held.attempts, due_us, history)
        if delay_s:
            self._defer(key[0], held.message, now + delay_s)
        elif front:
            self._put_back(key)
        else:
            self._make_ready(key[0], held.message)
        self.wake()

    def _is_used_up(self, attempts: int) -> bool:
        most = self.queue.options.max_attempts
        return bool(most) and attempts >= most

    def _history(self, position: PartitionCursor, seq: int) -> bytes:
        state = position.states.get(seq)
        return b"" if state is None else state.history

    def _die(
        self, position: PartitionCursor, message: QueuedMessage, attempts: int, history: bytes, reason: str
    ) -> None:
        wall_us = self.queue.registry.wall_us
        self._done(position, message.seq)
        trace = self.queue.registry.trace
        if trace is not None:
            state = "dead" if self.queue.options.dead_letters else "dropped"
            trace.ended(self, state, position.log.id, message, reason)
        if not self.queue.options.dead_letters:
            self.counts["dropped_attempts_used_up"] += 1
            return
        self.counts["dead"] += 1
        self.last_dead_id += 1
        row = DeadLetterRow(
            self.id,
            self.last_dead_id,
            position.log.id,
            message.seq,
            wall_us,
            attempts,
            encode_meta(message),
            message.body,
            history or add_failure(b"", wall_us, attempts, reason),
        )
        self.queue.add_dead_letter(self, row)

    def report_expired(self, trace: QueueTrace, partition: int, message: QueuedMessage) -> None:
        """Report a message that is too old to the trace, when the channel has not finished it yet."""
        if self._is_open(partition, message.seq):
            trace.ended(self, "expired", partition, message)

    # Time

    def next_deadline(self) -> float | None:
        """Return when `on_deadline` has work to do."""
        found = self._deferred[0][0] if self._deferred else None
        for consumer in self.consumers.values():
            deadline = consumer.next_deadline()
            if deadline is not None and (found is None or deadline < found):
                found = deadline
        return found

    def on_deadline(self, now: float) -> None:
        """Take back messages that were not settled in time. Due ones become ready at the next `pump`."""
        for consumer in list(self.consumers.values()):
            while (key := consumer.overdue(now)) is not None:
                held = consumer.drop(key)
                assert held is not None
                if consumer.staged:
                    consumer.staged = [each for each in consumer.staged if (each.partition, each.message.seq) != key]
                self.counts["timed_out"] += 1
                self._back(key, held, now, 0.0, OVERDUE)
            self._settled(consumer)
        if self._deferred and self._deferred[0][0] <= now:
            self.wake()

    def close(self, reason: str) -> None:
        """Close the deleted channel."""
        consumers, self.consumers = list(self.consumers.values()), {}
        for consumer in consumers:
            consumer.held.clear()
            consumer.staged = []
            consumer.on_closed(reason)
        self.queue.registry.active.pop(self, None)
        self.queue.registry.awake.pop(self, None)

    # Counts

    def ack_floor(self, partition: int) -> int:
        """The ack floor of a partition: everything up to it is done."""
        return self._positions[partition].cursor.ack_floor

    def is_done(self, partition: int, seq: int) -> bool:
        """Whether a message is done here."""
        return self._positions[partition].is_done(seq)

    def attempts_of(self, partition: int, seq: int) -> int:
        """Count the deliveries so far of a message that is not done."""
        position = self._positions[partition]
        for consumer in self.consumers.values():
            held = consumer.held.get((partition, seq))
            if held is not None:
                return held.attempts
        state = position.states.get(seq)
        return 0 if state is None else state.attempts

    @property
    def in_flight(self) -> int:
        """Messages that consumers hold."""
        return sum(len(each.held) for each in self.consumers.values())

    @property
    def deferred(self) -> int:
        """Messages that wait for their time, as far as they were looked at."""
        return len(self._deferred_valid)

    @property
    def depth(self) -> int:
        """Messages that are not done and that no consumer holds."""
        total = 0
        for position in self._positions.values():
            start = max(position.cursor.ack_floor, position.log.trimmed)
            total += max(0, position.log.visible - start - position.done.items)
        return max(0, total - self.in_flight)

    def skip_all(self) -> int:
        """Drop all messages that wait or are in flight; return how many."""
        dropped = self.depth + self.in_flight
        for consumer in self.consumers.values():
            consumer.held.clear()
            consumer.held_bytes = 0
            consumer.staged = []
        self._ready.clear()
        self._urgent.clear()
        self._deferred.clear()
        self._deferred_valid.clear()
        for position in self._positions.values():
            position.skip_all()
            self._touch(position)
            self.queue.ack_floor_moved(position.log)
        self.counts["emptied"] += dropped
        return dropped

    def gone(self, log: PartitionLog, seq: int) -> None:
        """Mark a message as done that the store does not have."""
        self._mark_gone(self._positions[log.id], seq)

    def drop_overflow(self) -> None:
        """Drop the oldest messages of an ephemeral channel that are too many for memory. It has no claim on the log."""
        most = max(1, EPHEMERAL_BACKLOG_MAX // len(self._positions))
        for position in self._positions.values():
            over = position.log.visible - position.cursor.ack_floor - most
            if over > 0:
                self.counts["dropped_overflow"] += over
                self.skip_to(position.log, position.cursor.ack_floor + over)

    def skip_to(self, log: PartitionLog, up_to: int) -> None:
        """Forget the messages up to a number: they have left the log, or are too many."""
        position = self._positions[log.id]
        if up_to <= position.cursor.ack_floor:
            return
        position.skip_to(up_to)
        self._touch(position)
        self.queue.ack_floor_moved(log)
