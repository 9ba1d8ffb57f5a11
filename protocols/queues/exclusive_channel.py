"""A channel whose partitions have one consumer at a time, and whose messages of one key come one after the other. Pure.

Of each key one message is in flight at most: its consumer may work on all its messages at once. A strict queue gives a
failed message again before the next of its key; a best-effort one takes it out of its line. A partition that was added
is not read before everything that its keys have in older ones is done (`RouteTable`).
"""

from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

from dep2p.errors import LockLostError, QueueExistsError
from dep2p.protocols.queues.channel import Channel, ChannelQueue, ChannelRegistry
from dep2p.protocols.queues.consumer import ChannelConsumer, ChannelDelivery, ConsumerWindow, HeldMessage
from dep2p.protocols.queues.cursor import PartitionCursor
from dep2p.protocols.queues.filters import Filter
from dep2p.protocols.queues.message import QueuedMessage
from dep2p.protocols.queues.names import logical_partition
from dep2p.protocols.queues.ordering.consumer_group import Freed, Granted, Group, Lease
from dep2p.protocols.queues.ordering.key_queues import KeyQueues, key_of
from dep2p.protocols.queues.ordering.partition_locks import Lock
from dep2p.protocols.queues.ordering.route_table import RouteTable
from dep2p.protocols.queues.partition_log import PartitionLog, Read
from dep2p.protocols.queues.records import PartitionRecord, StateRow
from dep2p.protocols.timing.backoff import Backoff

_SHARE_ITEMS: Final = 32
"""Messages of a partition that are delivered before it is another one's turn."""
_WAITING_MAX: Final = 65_536
"""Messages of one partition that wait behind the heads of their key queues; with more, the channel reads nothing
further."""
_BACKOFF: Final = Backoff(first_s=0.1, max_s=30.0)
"""Delays of a message that failed, when its consumer names none; doubled each time."""


class ExclusiveChannelConsumer(ChannelConsumer):
    """A member of the channel's group, over one link."""

    held: dict[tuple[int, int], HeldMessage]
    held_bytes: int

    def __init__(
        self,
        consumer_id: str,
        member: bytes,
        window: ConsumerWindow,
        *,
        on_deliver: Callable[[list[ChannelDelivery]], None],
        on_closed: Callable[[str], None],
        on_lease: Callable[[Lease], None],
    ) -> None:
        super().__init__(consumer_id, window, on_deliver=on_deliver, on_closed=on_closed)
        self.member = member
        self.on_lease = on_lease
        self.epochs: dict[int, int] = {}
        """The epoch of each partition that it gets messages from."""

    def assign(self, partition: int, message: QueuedMessage, attempts: int, now: float) -> None:
        deadline = now + self.msg_timeout_s
        held = self.held[(partition, message.seq)] = HeldMessage(message, attempts, now, deadline)
        self.held_bytes += held.size
        self.staged.append(ChannelDelivery(partition, message, attempts, deadline, self.epochs[partition]))

    def adopt(self, before: "ExclusiveChannelConsumer") -> None:
        """Take over the messages that the same member holds from its last link."""
        self.held, self.held_bytes, self._capped = before.held, before.held_bytes, before._capped
        before.held, before.held_bytes, before._capped = {}, 0, []


class ExclusiveRegistry(ChannelRegistry, Protocol):
    """The registry, as an exclusive channel uses it: it stores the locks, too."""

    def define(self, key: str, value: object | None) -> None:
        """Put a small value into the next batch; None removes it."""
        ...

    def when_committed(self, call: Callable[[], None]) -> None:
        """Call when all definitions until now are committed."""
        ...


class ExclusiveQueue(ChannelQueue, Protocol):
    """The queue, as an exclusive channel uses it."""

    @property
    def registry(self) -> ExclusiveRegistry: ...

    @property
    def routes(self) -> RouteTable: ...

    @property
    def open_partitions(self) -> tuple[int, ...]: ...

    def has_channel(self, channel: Channel) -> bool:
        """Whether the channel is not deleted."""
        ...


class ExclusiveChannel(Channel):
    """An exclusive channel. Made by `Queue.create_channel`."""

    is_exclusive = True
    queue: ExclusiveQueue

    def __init__(
        self, queue: ExclusiveQueue, channel_id: int, name: str, filter_: Filter | None, *, is_paused: bool
    ) -> None:
        super().__init__(queue, channel_id, name, filter_, is_paused=is_paused)
        self.group: Group = Group(queue.open_partitions, queue.options.lease_s)
        self._is_strict = queue.options.order == "strict"
        self._attached: dict[bytes, ExclusiveChannelConsumer] = {}
        self._served: dict[int, ExclusiveChannelConsumer] = {}
        """The consumer that each partition is served to."""
        self._key_queues: dict[int, KeyQueues] = {}
        self._now = 0.0

    @property
    def store_key(self) -> str:
        """Return the key of the group's definition in the store."""
        return f"group/{self.id}"

    def add_partition(self, log: PartitionLog, record: PartitionRecord | None, ack_floor: int) -> None:
        self._key_queues[log.id] = KeyQueues()
        super().add_partition(log, record, ack_floor)

    def set_partitions(self, partitions: tuple[int, ...]) -> None:
        """Set the partitions of the queue."""
        self.group.set_partitions(partitions)
        self._perform()

    # Members

    def attach(self, consumer: ChannelConsumer) -> None:
        """Attach a member's link, its first or another one."""
        if not isinstance(consumer, ExclusiveChannelConsumer):
            raise QueueExistsError(f"the channel {self.name!r} is exclusive: consume it so, in a subscription")
        before = self._attached.get(consumer.member)
        if before is not None:
            self._detach(before)
        self.group.attached(consumer.member)
        super().attach(consumer)
        self._attached[consumer.member] = consumer
        for old in list(self.consumers.values()):
            if old is not consumer and isinstance(old, ExclusiveChannelConsumer) and old.member == consumer.member:
                consumer.adopt(old)
                del self.consumers[old.id]

    def heartbeat(
        self, consumer: ExclusiveChannelConsumer, beat: int, seen: int, held: dict[int, int], now: float
    ) -> None:
        """See `Group.heartbeat`."""
        if self._attached.get(consumer.member) is consumer:
            self._now = now
            wall_us = self.queue.registry.wall_us
            self.group.heartbeat(consumer.member, consumer.id, beat, seen, held, now, wall_us)
            self.queue.registry.active[self] = None
            self._perform()

    def unlock(self, consumer: ExclusiveChannelConsumer, partition: int, epoch: int) -> None:
        """See `Group.unlock`."""
        self.group.unlock(consumer.member, partition, epoch, self.queue.registry.wall_us)
        self._perform()

    def leave(self, consumer: ExclusiveChannelConsumer, now: float) -> None:
        """Remove a member that goes and has nothing in work: its messages go to others at once."""
        if self._attached.get(consumer.member) is not consumer:
            return
        self._now = now
        self._detach(consumer)
        self.group.leave(consumer.member, self.queue.registry.wall_us)
        self._perform()
        self.consumers.pop(consumer.id, None)

    def detach(self, consumer: ChannelConsumer, now: float) -> None:
        """Detach a lost link. The member may work on: its messages stay with it until its lease is over, or until it
        comes back."""
        if isinstance(consumer, ExclusiveChannelConsumer) and self._attached.get(consumer.member) is consumer:
            self._now = now
            self._detach(consumer)

    def _detach(self, consumer: ExclusiveChannelConsumer) -> None:
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
        registry = self.queue.registry
        group = self.group
        while group.effects:
            effects, group.effects = group.effects, []
            for effect in effects:
                if isinstance(effect, Freed):
                    self._take_back(effect.lock)
                elif isinstance(effect, Granted):
                    # The lock is stored before the consumer learns of it: an epoch that a crash undoes could be given
                    # twice.
                    registry.when_committed(partial(self._activate, effect.lock))
                else:
                    consumer = self._attached.get(effect.member)
                    if consumer is not None:
                        consumer.on_lease(effect.lease)
        for partition, consumer in list(self._served.items()):
            if not group.coordinator.owns(consumer.member, partition):
                del self._served[partition]  # it has to hand over: no more messages go there
        if group.is_changed:
            group.is_changed = False
            if self.queue.has_channel(self):
                registry.define(self.store_key, group.to_value())

    def _activate(self, lock: Lock) -> None:
        if not self.queue.has_channel(self) or not self.group.activated(lock):
            return
        consumer = self._attached.get(lock.holder)
        if consumer is not None:
            self._served[lock.partition] = consumer
            consumer.epochs[lock.partition] = lock.epoch
        self._perform()
        self.wake()

    def _take_back(self, lock: Lock) -> None:
        """Put messages back that were delivered under a lock that is over, in their order."""
        partition = lock.partition
        served = self._served.pop(partition, None)
        if served is not None:
            served.epochs.pop(partition, None)
        for consumer in list(self.consumers.values()):
            if not isinstance(consumer, ExclusiveChannelConsumer) or consumer.member != lock.holder:
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

    def holder(self, partition: int, epoch: int) -> ExclusiveChannelConsumer:
        """Return the consumer that may settle messages of a partition under that epoch. Raises LockLostError."""
        if self._is_fenced(partition, epoch):
            raise LockLostError(
                f"results of epoch {epoch} for partition {partition} come too late: the consumer has lost the partition"
            )
        lock = self.group.locks.of(partition)
        for consumer in self.consumers.values():
            if isinstance(consumer, ExclusiveChannelConsumer) and lock is not None and consumer.member == lock.holder:
                return consumer
        raise LockLostError(f"no consumer holds the partition {partition}")

    def _is_fenced(self, partition: int, epoch: int) -> bool:
        return not self.group.locks.is_current(partition, epoch)

    # Delivering

    def pump(self, now: float, wall_us: int) -> list[Read]:
        self.is_awake = False
        self._now = now
        self._undefer(now)
        if self.is_paused or self.queue.is_paused:
            return []
        wants: dict[int, Read] = {}
        served = [
            (self._positions[each], consumer) for each, consumer in self._served.items() if each in self._positions
        ]
        start = self._turn % len(served) if served else 0
        self._turn += 1
        moved = True
        while moved:
            moved = False
            for position, consumer in served[start:] + served[:start]:
                moved = self._serve(position, consumer, now, wall_us, wants) or moved
        return list(wants.values())

    def _serve(
        self,
        position: PartitionCursor,
        consumer: ExclusiveChannelConsumer,
        now: float,
        wall_us: int,
        wants: dict[int, Read],
    ) -> bool:
        """Deliver messages of one partition; return whether there were any."""
        ready = self._key_queues[position.log.id].ready
        count = 0
        while count < _SHARE_ITEMS and consumer.room > 0:
            while not ready and self._look_in(position, _SHARE_ITEMS, now, wall_us, wants)[1]:
                pass
            if not ready:
                break
            seq = ready.popleft()
            if not self._is_open(position.log.id, seq):
                continue
            message = position.log.rows.get(seq)
            if message is None:
                ready.appendleft(seq)
                self._want(position, seq, wants)
                break
            self._deliver(position, message, consumer, now)
            count += 1
        return count > 0

    def _is_blocked(self, position: PartitionCursor, message: QueuedMessage) -> bool:
        key_queues = self._key_queues[position.log.id]
        if key_queues.waiting >= _WAITING_MAX:
            return True
        routes = self.queue.routes
        if not routes.has_barriers:
            return False
        key = key_of(message.attributes)
        return bool(key) and not routes.of(logical_partition(key)).is_readable(position.log.id, self.ack_floor)

    def _takes_turn(self, position: PartitionCursor, message: QueuedMessage, state: StateRow | None) -> bool:
        key = key_of(message.attributes)
        if not key or message.due_us or (not self._is_strict and state is not None and state.due_us):
            return True
        return self._key_queues[position.log.id].join(message.seq, key)

    def _make_ready(self, partition: int, message: QueuedMessage) -> None:
        self._key_queues[partition].ready.append(message.seq)

    def _make_ready_unseen(self, key: tuple[int, int]) -> None:
        self._key_queues[key[0]].ready.append(key[1])

    def _put_back(self, key: tuple[int, int]) -> None:
        self._key_queues[key[0]].ready.appendleft(key[1])

    # Results

    def requeue(self, consumer: ChannelConsumer, key: tuple[int, int], delay_s: float, reason: str, now: float) -> None:
        held = consumer.held.get(key)
        if held is not None and delay_s <= 0:
            delay_s = _BACKOFF.after(held.attempts)
        super().requeue(consumer, key, delay_s, reason, now)

    def _back(
        self, key: tuple[int, int], held: HeldMessage, now: float, delay_s: float, reason: str, *, front: bool = False
    ) -> None:
        if not self._is_strict and not front and self._key_queues[key[0]].is_head(key[1]):
            if not self._is_used_up(held.attempts):
                self.counts["left_key_queue"] += 1
            self._pass_on(key[0], key[1])
        super()._back(key, held, now, delay_s, reason, front=front)

    def _done(self, position: PartitionCursor, seq: int) -> None:
        super()._done(position, seq)
        self._pass_on(position.log.id, seq)

    def _pass_on(self, partition: int, seq: int) -> None:
        """Make the next message of a key the head, when one leaves its key queue."""
        key_queues = self._key_queues[partition]
        after = key_queues.leave(seq)
        while after and not self._is_open(partition, after):
            after = key_queues.leave(after)
        if after:
            key_queues.ready.append(after)
            self.wake()

    # Messages that leave the log

    def skip_to(self, log: PartitionLog, up_to: int) -> None:
        super().skip_to(log, up_to)
        for seq in self._key_queues[log.id].heads_up_to(self.ack_floor(log.id)):
            self._pass_on(log.id, seq)

    def skip_all(self) -> int:
        for key_queues in self._key_queues.values():
            key_queues.clear()
        return super().skip_all()

    # Time

    def next_deadline(self) -> float | None:
        deadlines = [each for each in (super().next_deadline(), self.group.next_deadline()) if each is not None]
        return min(deadlines, default=None)

    def on_deadline(self, now: float) -> None:
        self._now = now
        super().on_deadline(now)
        self.group.on_deadline(now, self.queue.registry.wall_us)
        self._perform()

    def close(self, reason: str) -> None:
        super().close(reason)
        self._attached.clear()
        self._served.clear()
