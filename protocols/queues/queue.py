"""A queue: its partitions and channels, its publishes, and the messages that leave the log. Pure."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final, Protocol

from dep2p.errors import (
    ChannelNotFoundError,
    MessageTooLargeError,
    PartitionMovedError,
    QueueFullError,
    QueueIsDistributedError,
)
from dep2p.protocols.queues.channel import Channel
from dep2p.protocols.queues.deduplication import OnDone, PendingPublish, ProducerDeduplication
from dep2p.protocols.queues.exclusive_channel import ExclusiveChannel, ExclusiveRegistry
from dep2p.protocols.queues.filters import Filter
from dep2p.protocols.queues.message import NewMessage, QueuedMessage, encode_meta, pack_meta
from dep2p.protocols.queues.names import LOGICAL_PARTITIONS, check_name, is_ephemeral, logical_partition
from dep2p.protocols.queues.options import QueueOptions
from dep2p.protocols.queues.ordering.placement import Served, ShardLocation, readable
from dep2p.protocols.queues.ordering.route_table import RouteTable
from dep2p.protocols.queues.partition_log import LogCache, PartitionLog, Read
from dep2p.protocols.queues.records import DeadLetterRow, MessageRow, PartitionRecord, Run

_CHANNELS_MAX: Final = 1_000
_SWEEP_ITEMS: Final = 1_024


_new = tuple[object, ...].__new__
"""A NamedTuple's own constructor costs twice as much."""


class QueueRegistryView(ExclusiveRegistry, Protocol):
    """The registry of all queues, as a queue uses it."""

    cache: LogCache
    trimmable: dict[PartitionLog, "Queue"]
    """Logs whose ack floor may have moved."""
    trims: dict[int, int]
    """By partition: messages up to this number leave the store with the next batch."""
    freed: dict["Queue", None]
    """Queues in which there may be room now."""

    def define_queue(self, queue: "Queue") -> None:
        """Store the definition of a queue."""
        ...

    def new_partition_ids(self, count: int) -> list[int]:
        """Return ids that were never given before."""
        ...

    def new_channel_id(self) -> int:
        """Return an id that was never given before."""
        ...

    def expanded(self, queue: "Queue", ids: Sequence[int]) -> None:
        """Add the new partitions of a queue."""
        ...

    def forget_channel(self, queue: "Queue", channel: Channel) -> None:
        """Forget a channel that was deleted."""
        ...

    def publish(self, queue: "Queue", publish: PendingPublish) -> None:
        """Put a publish into the next batch."""
        ...

    def publish_ephemeral(self, queue: "Queue", publish: PendingPublish) -> None:
        """Publish to an ephemeral queue, at once."""
        ...

    def add_dead_letter(self, queue: "Queue", row: DeadLetterRow) -> None:
        """Put a dead letter into the next batch."""
        ...

    def remove_dead_letter(self, queue: "Queue", channel_id: int, dead_id: int) -> None:
        """Remove a dead letter."""
        ...


class Queue:
    """A queue. Made by `QueueRegistry.create`, or from its stored form; `load` comes before its use."""

    def __init__(
        self,
        registry: QueueRegistryView,
        namespace: str,
        name: str,
        options: QueueOptions,
        partition_ids: Sequence[int],
        routes: RouteTable | None = None,
    ) -> None:
        self.registry = registry
        self.namespace = namespace
        self.name = name
        self.options: QueueOptions = options
        self.partition_ids: tuple[int, ...] = tuple(partition_ids)
        self.is_ephemeral: bool = is_ephemeral(name)
        self.is_paused: bool = False
        self.is_loaded: bool = False
        self.is_deleted: bool = False
        self.counts: Counter[str] = Counter()
        self.channels: dict[str, Channel] = {}
        self.logs: dict[int, PartitionLog] = {}
        self._routes = routes
        self._partition_of: list[int] = []
        self._turn = 0
        self._only: PartitionLog | None = None
        """The log of a queue that has one partition."""
        self.producers: ProducerDeduplication = ProducerDeduplication(
            self.partition_ids[0], self.counts, None if self.is_ephemeral else registry.define
        )
        self.locations: dict[int, ShardLocation] = {}
        """The location of each partition of a distributed queue whose controller this node is; its own logs stay
        empty."""
        self.pending_expansion: dict[int, ShardLocation] = {}
        """Partitions that an expansion is about to add, and their locations."""
        self.made_by = ""
        """The member that made it, by peer id; empty for this node itself."""
        self.serves: Served | None = None
        """The logical partitions that a shard of a distributed queue takes; None for other queues."""

    @property
    def routes(self) -> RouteTable:
        """The route table. It is made when it is first asked for, so that thousands of queues do not slow the start."""
        if self._routes is None:
            self._routes = RouteTable.first(self.partition_ids)
        return self._routes

    @property
    def is_expanded(self) -> bool:
        """Whether the routes differ from those of a new queue."""
        return self._routes is not None and self._routes.version > 1

    def _route(self) -> None:
        self._partition_of = [route.partition for route in self.routes.routes for _lp in range(route.low, route.high)]
        assert len(self._partition_of) == LOGICAL_PARTITIONS

    # Loading

    def load(self, records: Mapping[int, PartitionRecord]) -> None:
        """Load the stored records of each partition (none for a new queue); once."""
        if self.is_loaded:
            return
        self.is_loaded = True
        self._route()
        for partition in self.partition_ids:
            record = records.get(partition) or PartitionRecord()
            log = self.logs[partition] = PartitionLog(
                partition, record, self.registry.cache, is_pinned=self.is_ephemeral
            )
            for channel in self.channels.values():
                known = record if channel.id in record.cursors else None
                channel.add_partition(log, known, log.trimmed)
            self._lower_barriers(log)  # a crash may have undone messages in front of one
        if len(self.partition_ids) == 1:
            self._only = self.logs[self.partition_ids[0]]

    def _lower_barriers(self, log: PartitionLog) -> None:
        """Lower barriers to the last used number: a channel that waits for unused numbers to be done would wait
        forever."""
        if not self.routes.has_barriers or self.locations:  # of a distributed queue, the shards know
            return
        routes = self.routes.lowered(log.id, log.last_used)
        if routes.routes != self.routes.routes:
            self._routes = routes
            self.registry.define_queue(self)
            for channel in self.channels.values():
                channel.wake()

    def expand(self, count: int) -> list[int]:
        """Add so many partitions; return their ids. Ranges are split, and no key loses its order by that.

        Raises ``ValueError`` for too many.
        """
        if self.locations or self.serves is not None:
            raise QueueIsDistributedError(f"the queue {self.name!r} is on several nodes: its controller expands it")
        routes = self.routes.settled([self._trimmed])
        ids: list[int] = self.registry.new_partition_ids(count)
        self._add(ids, routes.expanded(ids, {each: log.last_seq for each, log in self.logs.items()}))
        return ids

    def _add(self, ids: Sequence[int], routes: RouteTable) -> None:
        self._routes = routes
        self._route()
        self._only = None
        self.partition_ids = (*self.partition_ids, *ids)
        self.options = replace(self.options, partitions=len(self.partition_ids))
        for partition in ids:
            log = PartitionLog(partition, PartitionRecord(), self.registry.cache, is_pinned=self.is_ephemeral)
            self.logs[partition] = log
            for channel in self.channels.values():
                channel.add_partition(log, None, 0)
        for channel in self.channels.values():
            if isinstance(channel, ExclusiveChannel):
                channel.set_partitions(self.open_partitions)
            channel.wake()
        self.registry.expanded(self, ids)

    def _trimmed(self, partition: int) -> int:
        return self.logs[partition].trimmed

    # Publishing

    @property
    def items(self) -> int:
        """Messages in the log."""
        if self._only is not None:
            return self._only.items
        return sum(log.items for log in self.logs.values())

    @property
    def size_bytes(self) -> int:
        """Bytes of the messages' bodies."""
        if self._only is not None:
            return self._only.bytes
        return sum(log.bytes for log in self.logs.values())

    def is_full(self, items: int, size: int) -> bool:
        """Whether so much more is too much. An ephemeral queue is never full: it drops messages."""
        if self.is_ephemeral:
            return False
        options, only = self.options, self._only
        if only is not None:
            there, there_bytes = only.items, only.bytes
        else:
            there, there_bytes = self.items, self.size_bytes
        return there + items > options.items_max or (there > 0 and there_bytes + size > options.bytes_max)

    def publish(
        self,
        messages: Sequence[NewMessage],
        on_done: OnDone,
        *,
        wall_us: int,
        publisher: tuple[bytes, int] | None = None,
        publish: PendingPublish | None = None,
    ) -> PendingPublish:
        """Take all of the messages, or raise: QueueFullError, MessageTooLargeError, ``ValueError`` (a delay).

        They are delivered when they are committed. ``publisher``: who publishes, and its number of the first message;
        a publish that was taken before is not taken again, and is done with the same points as the first time:
        ``on_done`` is called with the first one then. ``publish``: the record to use, which calls its own `on_done`.
        """
        if publisher is not None:
            known = self.producers.known(publisher, on_done)
            if known is not None:
                return known
        if self.locations:
            raise QueueIsDistributedError(
                f"the partitions of the queue {self.name!r} are on several nodes: publish to those"
            )
        if self.serves is not None:
            self._require_served(messages)
        self._check(messages)
        if publish is None:
            publish = PendingPublish(on_done)
        if not self.channels and not self.options.hold_without_channel:
            self.counts["dropped_no_channel"] += len(messages)
            publish.finish()
            return publish
        ttl_s = self.options.ttl_s
        expires_us = wall_us + round(ttl_s * 1e6) if ttl_s else 0
        only = self._only
        rows = publish.rows
        for log, group in self._by_partition(messages) if only is None else ((only, messages),):
            seq = first = log.last_seq + 1
            partition = log.id
            for body, attributes, _key, priority, delay_s in group:
                due_us = wall_us + round(delay_s * 1e6) if delay_s else 0
                meta = pack_meta(wall_us, due_us, expires_us, 0, priority)
                if attributes:
                    meta += attributes
                rows.append(_new(MessageRow, (partition, seq, meta, body)))
                log.add(_new(QueuedMessage, (seq, wall_us, due_us, expires_us, 0, priority, attributes, body)))
                seq += 1
            log.last_seq = seq - 1
            publish.runs.append(_new(Run, (partition, first, seq - first)))
        self.counts["published"] += len(messages)
        if publisher is not None:
            self.producers.remember(publisher, publish, len(messages))
        if self.is_ephemeral:
            self._drop_overflow()
            self.registry.publish_ephemeral(self, publish)
        else:
            self.registry.publish(self, publish)
        return publish

    def _check(self, messages: Sequence[NewMessage]) -> None:
        if not messages:
            raise ValueError("nothing to publish")
        size = 0
        bytes_max = self.options.message_bytes_max
        for message in messages:
            body, _attributes, key, priority, delay_s = message
            size += len(body)
            if len(body) <= bytes_max and not delay_s and not priority:
                continue
            if key and self.options.order == "strict" and (delay_s or priority):
                raise ValueError(
                    f"the queue {self.name!r} keeps the order of keys: what has a key has no delay and no priority"
                )
            if len(body) > bytes_max:
                raise MessageTooLargeError(
                    f"a message of {len(message.body)} bytes: the queue {self.name!r} takes at most "
                    f"{self.options.message_bytes_max}"
                )
            if not 0 <= message.delay_s <= self.options.defer_max_s:
                raise ValueError(
                    f"a delay of {message.delay_s:g} s: in the queue {self.name!r} it is 0 to "
                    f"{self.options.defer_max_s:g}"
                )
            if not 0 <= message.priority <= 255:
                raise ValueError(f"a priority of {message.priority}: it is 0 to 255")
        if self.is_full(len(messages), size):
            self.counts["refused_full"] += len(messages)
            raise QueueFullError(
                f"the queue {self.name!r} is full: {self.items} messages of {self.size_bytes} bytes. Consume some, "
                "or raise its items_max or bytes_max"
            )

    def _by_partition(self, messages: Sequence[NewMessage]) -> list[tuple[PartitionLog, list[NewMessage]]]:
        """Divide messages among partitions, in the order given. Those without a key go to one partition, another one
        with each publish."""
        ids = self.partition_ids
        self._turn += 1
        found: list[tuple[PartitionLog, list[NewMessage]]] = []
        for message in messages:
            key = message.key
            partition = self._partition_of[logical_partition(key)] if key else ids[self._turn % len(ids)]
            if not found or found[-1][0].id != partition:
                found.append((self.logs[partition], []))
            found[-1][1].append(message)
        return found

    def _drop_overflow(self) -> None:
        for log in self.logs.values():
            over = 0
            while log.items - over > self.options.items_max:
                over += 1
            if over:
                self.counts["dropped_overflow"] += over
                self._trim(log, log.trimmed + over)

    def shown(self, partition: int, seq: int) -> None:
        """Show the messages of a partition up to a number, which are committed now; `wake` wakes the channels."""
        log = self.logs.get(partition)
        if log is not None and log.visible < seq:
            log.visible = seq

    def wake(self) -> None:
        """Wake the channels for new messages."""
        for channel in self.channels.values():
            if channel.is_ephemeral:
                channel.drop_overflow()
            channel.wake()

    def hidden(self, publish: PendingPublish) -> None:
        """Act on a failed commit: the publish's numbers stay unused."""
        for run in publish.runs:
            log = self.logs.get(run.partition)
            if log is not None:
                log.take_back(range(run.first_seq, run.first_seq + run.items))
                self._lower_barriers(log)

    # Channels

    def has_channel(self, channel: Channel) -> bool:
        """Whether the channel is not deleted."""
        return self.channels.get(channel.name) is channel

    def channel(self, name: str) -> Channel:
        """Return a channel. Raises ChannelNotFoundError."""
        found = self.channels.get(name)
        if found is None:
            known = ", ".join(self.channels) or "none"
            raise ChannelNotFoundError(f"the queue {self.name!r} has no channel {name[:80]!r} (there are: {known})")
        return found

    def create_channel(
        self, name: str, *, from_start: bool = False, filter_text: str = "", exclusive: bool = False
    ) -> Channel:
        """Return a channel, made if it is new: at the end of the log, or at its start. A channel that is there stays as
        it is.

        The first channel always begins at the start: earlier messages were kept for it. Raises
        ``ValueError`` (the name, the filter, too many).
        """
        found = self.channels.get(name)
        if found is not None:
            return found
        check_name(name, "channel")
        if len(self.channels) >= _CHANNELS_MAX:
            raise ValueError(f"the queue {self.name!r} has {_CHANNELS_MAX} channels: no more")
        filter_ = Filter(filter_text) if filter_text else None
        if exclusive and (self.is_ephemeral or is_ephemeral(name)):
            raise ValueError("an exclusive channel is kept: neither it nor its queue may be ephemeral")
        from_start = from_start or not self.channels
        kind = ExclusiveChannel if exclusive else Channel
        channel = self.channels[name] = kind(self, self.registry.new_channel_id(), name, filter_, is_paused=False)
        for log in self.logs.values():
            channel.add_partition(log, None, log.trimmed if from_start else log.last_seq)
        channel.wake()
        self.registry.define_queue(self)
        return channel

    def delete_channel(self, name: str) -> None:
        """Delete a channel with its messages and dead letters; close its consumers. Raises ChannelNotFoundError."""
        channel = self.channel(name)
        del self.channels[name]
        channel.close(f"the channel {name!r} was deleted")
        self.registry.forget_channel(self, channel)
        for log in self.logs.values():
            self.ack_floor_moved(log)
        self.registry.define_queue(self)

    def set_paused(self, paused: bool, channel: str | None = None) -> None:
        """Pause or resume delivery, in one channel or in all. This outlives restarts."""
        if channel is None:
            self.is_paused = paused
        else:
            self.channel(channel).is_paused = paused
        for each in self.channels.values():
            each.wake()
        self.registry.define_queue(self)

    def empty(self) -> int:
        """Drop all messages; return how many were in the log."""
        dropped = self.items
        for channel in self.channels.values():
            channel.skip_all()
        for log in self.logs.values():
            self._trim(log, log.visible)
        return dropped

    # The log's end

    def ack_floor_moved(self, log: PartitionLog) -> None:
        """Act on a channel's higher ack floor: messages that all channels have finished may leave the log."""
        if self.channels:
            self.registry.trimmable[log] = self

    def trim(self, log: PartitionLog) -> None:
        """Remove messages from the log that every channel has finished."""
        if self.channels:
            ack_floor = min(channel.ack_floor(log.id) for channel in self.channels.values())
            if ack_floor > log.trimmed:
                self._trim(log, min(ack_floor, log.visible))

    def _trim(self, log: PartitionLog, up_to: int) -> None:
        for channel in self.channels.values():
            if channel.ack_floor(log.id) < up_to:
                channel.skip_to(log, up_to)
        log.trim(up_to)
        if not self.is_ephemeral:
            self.registry.trims[log.id] = up_to
        if self.routes.has_barriers:
            settled = self.routes.settled([self._trimmed])
            if settled.routes != self.routes.routes:
                self._routes = settled
                self.registry.define_queue(self)
        self.registry.freed[self] = None

    def sweep(self, wall_us: int) -> list[Read]:
        """Drop messages at the front of the log that are too old. Returns the pages that are missing for it."""
        wants: list[Read] = []
        if not self.options.ttl_s:
            return wants
        for log in self.logs.values():
            last = log.trimmed
            while last < log.visible:
                if not log.is_gone(last + 1):
                    message = log.rows.get(last + 1)
                    if message is None:
                        if not log.wanted:
                            log.wanted = last + 1
                            log.wanted_to = log.visible
                            wants.append(Read(log.id, last + 1, _SWEEP_ITEMS, 1 << 20))
                        break
                    if not message.expires_us or message.expires_us > wall_us:
                        break
                    self.counts["expired"] += 1
                    if self.registry.trace is not None:
                        for channel in self.channels.values():
                            channel.report_expired(self.registry.trace, log.id, message)
                last += 1
            if last > log.trimmed:
                self._trim(log, last)
        return wants

    def add_dead_letter(self, channel: Channel, row: DeadLetterRow) -> None:
        """Store a dead letter."""
        channel.dead_items += 1
        self.registry.add_dead_letter(self, row)
        over = row.id - self.options.dead_items_max
        if over > 0:
            self.counts["dead_dropped_overflow"] += 1
            self.registry.remove_dead_letter(self, channel.id, over)

    def replay(self, channel: Channel, row: DeadLetterRow, on_done: OnDone, wall_us: int) -> PendingPublish:
        """Give a dead letter to its channel again, as a new message that no other channel sees.

        The dead letter goes when that is written.
        """
        is_unwritten = self.is_ephemeral or is_ephemeral(channel.name)

        def done(publish: PendingPublish) -> None:
            if publish.is_done and publish.error is None:
                channel.dead_items = max(0, channel.dead_items - 1)
                self.counts["replayed"] += 1
                if is_unwritten:
                    self.registry.remove_dead_letter(self, channel.id, row.id)
            on_done(publish)

        publish = PendingPublish(done)
        log = self.logs.get(row.partition) or next(iter(self.logs.values()))
        seq = log.reserve(1)
        priority, attributes = row.meta[28], row.meta[29:]
        message = QueuedMessage(seq, wall_us, 0, 0, channel.id, priority, attributes, row.body)
        log.add(message)
        publish.rows.append(MessageRow(log.id, seq, encode_meta(message), row.body))
        publish.runs.append(Run(log.id, seq, 1))
        if not is_unwritten:
            publish.replaces = (channel.id, row.id)
        if self.is_ephemeral:
            self.registry.publish_ephemeral(self, publish)
        else:
            self.registry.publish(self, publish)
        return publish

    # Distributed queues: as the controller of partitions, or as one of them (a shard)

    @property
    def open_partitions(self) -> tuple[int, ...]:
        """The partitions that consumers of an exclusive channel may get before their barriers are known."""
        return readable(self.routes, lambda _partition: 0) if self.locations else self.partition_ids

    def set_locations(self, locations: Mapping[int, ShardLocation]) -> None:
        """Set the locations of its partitions; once. Raises ``ValueError`` when the queue is used already."""
        if self.items or self.channels or self.serves is not None:
            raise ValueError(f"the queue {self.name!r} is in use on this node alone: its partitions cannot move")
        self.locations = dict(locations)
        self.registry.define_queue(self)

    def plan_expansion(self, locations: Mapping[int, ShardLocation]) -> None:
        """Plan new partitions. The plan is stored, so that an expansion is completed after a crash, too."""
        self.pending_expansion = dict(locations)
        self.registry.define_queue(self)

    def complete_expansion(self, last_seq: Mapping[int, int]) -> list[int]:
        """Complete an expansion: every shard serves its new range, so the planned partitions are in the table from now
        on.

        ``last_seq``: by partition, the last number that was given in a shard that was narrowed.
        """
        added, self.pending_expansion = self.pending_expansion, {}
        self.locations.update(added)
        self._add(list(added), self.routes.expanded(list(added), last_seq))
        return list(added)

    def passed(self, ack_floors: Mapping[str, Callable[[int], int]]) -> None:
        """Take the ack floors of each channel in the shards: exclusive channels get the partitions whose barriers they
        have passed."""
        for name, ack_floor in ack_floors.items():
            channel = self.channels.get(name)
            if isinstance(channel, ExclusiveChannel):
                channel.set_partitions(readable(self.routes, ack_floor))
        if self.channels and all(name in ack_floors for name in self.channels):
            settled = self.routes.settled(list(ack_floors.values()))
            if settled.routes != self.routes.routes:
                self._routes = settled
                self.registry.define_queue(self)

    def serve(self, low: int, high: int) -> int:
        """Make this queue a shard of that range of logical partitions. Returns the last number so far.

        Raises ``ValueError`` for a queue that cannot be a shard, or for a range that is not inside the present one.
        """
        if len(self.partition_ids) != 1 or self.locations:
            raise ValueError(f"the queue {self.name!r} cannot be a shard of another one")
        wanted = Served(low, high, low, high) if self.serves is None else self.serves.narrowed(low, high)
        if wanted != self.serves:
            self.serves = wanted
            self.registry.define_queue(self)
        return self.logs[self.partition_ids[0]].last_seq

    def _require_served(self, messages: Sequence[NewMessage]) -> None:
        serves = self.serves
        assert serves is not None
        is_strict = self.options.order == "strict"
        off_partition = 0
        for message in messages:
            if not message.key:
                continue
            logical = logical_partition(message.key)
            if not serves.takes(logical, is_strict=is_strict):
                self.counts["refused_moved"] += len(messages)
                raise PartitionMovedError(
                    f"a key of the logical partition {logical} does not belong to {self.name!r} now"
                )
            off_partition += not serves.low <= logical < serves.high
        if off_partition:
            self.counts["published_off_partition"] += off_partition

    # The end

    def close(self, reason: str) -> None:
        """Close the deleted queue."""
        self.is_deleted = True
        for channel in self.channels.values():
            channel.close(reason)
        for log in self.logs.values():
            self.registry.cache.drop(log, list(log.rows))
