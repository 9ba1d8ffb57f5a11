"""A channel whose partitions have one consumer at a time, and whose messages of one key come one after the other. Pure.

Of each key one message is in flight at most: its consumer may work on all that it gets at once. A strict queue gives a
failed message again before the next of its key; a best-effort one takes it out of its line. A partition that was added
is not read before everything that its keys have in older ones is done (`RouteTable`).
"""

from collections.abc import Callable
from typing import Any, Final

from dep2p.errors import LockLostError, QueueExistsError
from dep2p.protocols.queues.channel import Channel
from dep2p.protocols.queues.consumer import Consumer, Delivery, Held
from dep2p.protocols.queues.cursor import Place
from dep2p.protocols.queues.filters import Filter
from dep2p.protocols.queues.message import Message
from dep2p.protocols.queues.names import logical_partition
from dep2p.protocols.queues.ordering.consumer_group import Freed, Granted, Group, Lease
from dep2p.protocols.queues.ordering.key_queues import Lines, key_of
from dep2p.protocols.queues.ordering.partition_locks import Lock
from dep2p.protocols.queues.partition_log import PartitionLog, Read
from dep2p.protocols.queues.records import StateRow

_SHARE_ITEMS: Final = 32
"""Of a partition, before it is another one's turn."""
_WAITING_MAX: Final = 65_536
"""Messages of one partition behind the heads of their lines; with more, nothing further is looked at."""
_BACKOFF_FIRST_S: Final = 0.1
_BACKOFF_MAX_S: Final = 30.0
"""Of a message that failed, when its consumer names no delay; doubled each time."""


class ExclusiveConsumer(Consumer):
    """A member of the channel's group, over one link."""

    def __init__(
        self,
        consumer_id: str,
        member: bytes,
        *,
        max_in_flight: int,
        bytes_max: int,
        msg_timeout_s: float,
        on_deliver: Callable[[list[Delivery]], None],
        on_closed: Callable[[str], None],
        on_lease: Callable[[Lease], None],
    ) -> None:
        super().__init__(
            consumer_id,
            max_in_flight=max_in_flight,
            bytes_max=bytes_max,
            msg_timeout_s=msg_timeout_s,
            on_deliver=on_deliver,
            on_closed=on_closed,
        )
        self.member = member
        self.on_lease = on_lease
        self.epochs: dict[int, int] = {}
        """Of the partitions that it is served from."""

    def assign(self, partition: int, message: Message, attempts: int, now: float) -> None:
        deadline = now + self.msg_timeout_s
        held = self.held[(partition, message.seq)] = Held(message, attempts, now, deadline)
        self.held_bytes += held.size
        self.staged.append(Delivery(partition, message, attempts, deadline, self.epochs[partition]))

    def adopt(self, before: "ExclusiveConsumer") -> None:
        """What the same member holds from over its last link."""
        self.held, self.held_bytes, self._capped = before.held, before.held_bytes, before._capped
        before.held, before.held_bytes, before._capped = {}, 0, []


class ExclusiveChannel(Channel):
    """Made by `Queue.create_channel`."""

    is_exclusive = True

    def __init__(self, queue: Any, channel_id: int, name: str, filter_: Filter | None, *, is_paused: bool) -> None:
        super().__init__(queue, channel_id, name, filter_, is_paused=is_paused)
        self.group = Group(queue.open_partitions, queue.options.lease_s)
        self._is_strict = queue.options.order == "strict"
        self._attached: dict[bytes, ExclusiveConsumer] = {}
        self._served: dict[int, ExclusiveConsumer] = {}
        """By partition."""
        self._lines: dict[int, Lines] = {}
        self._now = 0.0

    @property
    def store_key(self) -> str:
        """Of the definition that tells of the group."""
        return f"group/{self.id}"

    def add_partition(self, log: PartitionLog, record: Any, floor: int) -> None:
        self._lines[log.id] = Lines()
        super().add_partition(log, record, floor)

    def set_partitions(self, partitions: tuple[int, ...]) -> None:
        """The queue has others now."""
        self.group.set_partitions(partitions)
        self._perform()

    # Members

    def attach(self, consumer: Consumer) -> None:
        """A member has a link now, its first or another one."""
        if not isinstance(consumer, ExclusiveConsumer):
            raise QueueExistsError(f"the channel {self.name!r} is exclusive: consume it so, in a subscription")
        before = self._attached.get(consumer.member)
        if before is not None:
            self._detach(before)
        self.group.attached(consumer.member)
        super().attach(consumer)
        self._attached[consumer.member] = consumer
        for old in list(self.consumers.values()):
            if old is not consumer and isinstance(old, ExclusiveConsumer) and old.member == consumer.member:
                consumer.adopt(old)
                del self.consumers[old.id]

    def heartbeat(self, consumer: ExclusiveConsumer, beat: int, seen: int, held: dict[int, int], now: float) -> None:
        """See `Group.heartbeat`."""
        if self._attached.get(consumer.member) is consumer:
            self._now = now
            wall_us = self.queue.book.wall_us
            self.group.heartbeat(consumer.member, consumer.id, beat, seen, held, now, wall_us)
            self.queue.book.active[self] = None
            self._perform()

    def unlock(self, consumer: ExclusiveConsumer, partition: int, epoch: int) -> None:
        """See `Group.unlock`."""
        self.group.unlock(consumer.member, partition, epoch, self.queue.book.wall_us)
        self._perform()

    def leave(self, consumer: ExclusiveConsumer, now: float) -> None:
        """The member goes, and has nothing in work: what it holds goes to others at once."""
        if self._attached.get(consumer.member) is not consumer:
            return
        self._now = now
        self._detach(consumer)
        self.group.leave(consumer.member, self.queue.book.wall_us)
        self._perform()
        self.consumers.pop(consumer.id, None)

    def detach(self, consumer: Consumer, now: float) -> None:
        """Its link is lost, and it may work on: what it holds stays its own until its lease is over, or until it comes
        back."""
        if isinstance(consumer, ExclusiveConsumer) and self._attached.get(consumer.member) is consumer:
            self._now = now
            self._detach(consumer)

    def _detach(self, consumer: ExclusiveConsumer) -> None:
        del self._attached[consumer.member]
        consumer.is_gone = True
        consumer.max_in_flight = 0
        consumer.epochs.clear()
        for partition in [each for each, served in self._served.items() if served is consumer]:
            del self._served[partition]
        if not consumer.held:
            self.consumers.pop(consumer.id, None)

    # Effects of the group

    def _perform(self) -> None:
        book = self.queue.book
        group = self.group
        while group.effects:
            effects, group.effects = group.effects, []
            for effect in effects:
                if isinstance(effect, Freed):
                    self._take_back(effect.lock)
                elif isinstance(effect, Granted):
                    # Nobody is told before it is stored: an epoch that a crash takes back could be given twice.
                    book.when_committed(lambda lock=effect.lock: self._activate(lock))
                else:
                    consumer = self._attached.get(effect.member)
                    if consumer is not None:
                        consumer.on_lease(effect.lease)
        for partition, consumer in list(self._served.items()):
            if not group.coordinator.owns(consumer.member, partition):
                del self._served[partition]  # it is to hand over: nothing more goes there
        if group.is_changed:
            group.is_changed = False
            if self.queue.channels.get(self.name) is self:
                book.define(self.store_key, group.to_value())

    def _activate(self, lock: Lock) -> None:
        if self.queue.channels.get(self.name) is not self or not self.group.activated(lock):
            return
        consumer = self._attached.get(lock.holder)
        if consumer is not None:
            self._served[lock.partition] = consumer
            consumer.epochs[lock.partition] = lock.epoch
        self._perform()
        self.wake()

    def _take_back(self, lock: Lock) -> None:
        """What was handed out under a lock that is over goes back, in its order."""
        partition = lock.partition
        served = self._served.pop(partition, None)
        if served is not None:
            served.epochs.pop(partition, None)
        for consumer in list(self.consumers.values()):
            if not isinstance(consumer, ExclusiveConsumer) or consumer.member != lock.holder:
                continue
            consumer.staged = [each for each in consumer.staged if each.partition != partition]
            for key in sorted((each for each in consumer.held if each[0] == partition), reverse=True):
                held = consumer.drop(key)
                assert held is not None
                if held.is_out:
                    self.counts["requeued_consumer_gone"] += 1
                    self._back(key, held, self._now, 0.0, "its consumer lost the partition", front=True)
                else:
                    self._release(key, held)
            self._settled(consumer)
        self.wake()

    # Fencing

    def holder(self, partition: int, epoch: int) -> ExclusiveConsumer:
        """Who may settle messages of a partition with results of that epoch. Raises LockLostError."""
        if self._is_fenced(partition, epoch):
            raise LockLostError(
                f"results of epoch {epoch} for partition {partition} come too late: the consumer has lost the partition"
            )
        lock = self.group.locks.of(partition)
        for consumer in self.consumers.values():
            if isinstance(consumer, ExclusiveConsumer) and lock is not None and consumer.member == lock.holder:
                return consumer
        raise LockLostError(f"nobody holds the partition {partition}")

    def _is_fenced(self, partition: int, epoch: int) -> bool:
        return not self.group.locks.is_current(partition, epoch)

    # Handing out

    def pump(self, now: float, wall_us: int) -> list[Read]:
        self.is_awake = False
        self._now = now
        self._undefer(now)
        if self.is_paused or self.queue.is_paused:
            return []
        wants: dict[int, Read] = {}
        served = [(self._places[each], consumer) for each, consumer in self._served.items() if each in self._places]
        start = self._turn % len(served) if served else 0
        self._turn += 1
        moved = True
        while moved:
            moved = False
            for place, consumer in served[start:] + served[:start]:
                moved = self._serve(place, consumer, now, wall_us, wants) or moved
        return list(wants.values())

    def _serve(
        self, place: Place, consumer: ExclusiveConsumer, now: float, wall_us: int, wants: dict[int, Read]
    ) -> bool:
        """Hand out one share; gives whether anything was."""
        ready = self._lines[place.log.id].ready
        count = 0
        while count < _SHARE_ITEMS and consumer.room > 0:
            while not ready and self._look_in(place, _SHARE_ITEMS, now, wall_us, wants)[1]:
                pass
            if not ready:
                break
            seq = ready.popleft()
            if not self._is_open(place.log.id, seq):
                continue
            message = place.log.rows.get(seq)
            if message is None:
                ready.appendleft(seq)
                self._want(place, seq, wants)
                break
            self._hand_out(place, message, consumer, now)
            count += 1
        return count > 0

    def _is_blocked(self, place: Place, message: Message) -> bool:
        lines = self._lines[place.log.id]
        if lines.waiting >= _WAITING_MAX:
            return True
        routes = self.queue.routes
        if not routes.has_barriers:
            return False
        key = key_of(message.attributes)
        return bool(key) and not routes.of(logical_partition(key)).is_readable(place.log.id, self.floor)

    def _takes_turn(self, place: Place, message: Message, state: StateRow | None) -> bool:
        key = key_of(message.attributes)
        if not key or message.due_us or (not self._is_strict and state is not None and state.due_us):
            return True
        return self._lines[place.log.id].join(message.seq, key)

    def _make_ready(self, partition: int, message: Message) -> None:
        self._lines[partition].ready.append(message.seq)

    def _make_ready_unseen(self, key: tuple[int, int]) -> None:
        self._lines[key[0]].ready.append(key[1])

    def _put_back(self, key: tuple[int, int]) -> None:
        self._lines[key[0]].ready.appendleft(key[1])

    # Results

    def requeue(self, consumer: Consumer, key: tuple[int, int], delay_s: float, reason: str, now: float) -> None:
        held = consumer.held.get(key)
        if held is not None and delay_s <= 0:
            delay_s = min(_BACKOFF_MAX_S, _BACKOFF_FIRST_S * 2 ** min(held.attempts - 1, 16))
        super().requeue(consumer, key, delay_s, reason, now)

    def _back(
        self, key: tuple[int, int], held: Held, now: float, delay_s: float, reason: str, *, front: bool = False
    ) -> None:
        if not self._is_strict and not front and self._lines[key[0]].is_head(key[1]):
            if not self._is_used_up(held.attempts):
                self.counts["left_its_line"] += 1
            self._pass_on(key[0], key[1])
        super()._back(key, held, now, delay_s, reason, front=front)

    def _done(self, place: Place, seq: int) -> None:
        super()._done(place, seq)
        self._pass_on(place.log.id, seq)

    def _pass_on(self, partition: int, seq: int) -> None:
        """It is out of its line: the next one of its key is the head."""
        lines = self._lines[partition]
        after = lines.leave(seq)
        while after and not self._is_open(partition, after):
            after = lines.leave(after)
        if after:
            lines.ready.append(after)
            self.wake()

    # What leaves the log

    def skip_to(self, log: PartitionLog, up_to: int) -> None:
        super().skip_to(log, up_to)
        for seq in self._lines[log.id].heads_up_to(self.floor(log.id)):
            self._pass_on(log.id, seq)

    def skip_all(self) -> int:
        for lines in self._lines.values():
            lines.clear()
        return super().skip_all()

    # Time

    def next_deadline(self) -> float | None:
        deadlines = [each for each in (super().next_deadline(), self.group.next_deadline()) if each is not None]
        return min(deadlines, default=None)

    def on_deadline(self, now: float) -> None:
        self._now = now
        super().on_deadline(now)
        self.group.on_deadline(now, self.queue.book.wall_us)
        self._perform()

    def close(self, reason: str) -> None:
        super().close(reason)
        self._attached.clear()
        self._served.clear()
