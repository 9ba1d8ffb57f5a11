"""A queue: its partitions and channels, what publishers say, and what leaves the log. Pure."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from dep2p.errors import (
    ChannelNotFoundError,
    MessageTooLargeError,
    QueueFullError,
    QueuePlacedError,
)
from dep2p.protocols.queues.channel import Channel
from dep2p.protocols.queues.deduplication import Publish, Publishers, Run
from dep2p.protocols.queues.exclusive_channel import ExclusiveChannel
from dep2p.protocols.queues.filters import Filter
from dep2p.protocols.queues.message import Message, NewMessage, encode_meta, pack_meta
from dep2p.protocols.queues.names import LOGICAL_PARTITIONS, check_name, is_ephemeral, logical_partition
from dep2p.protocols.queues.options import QueueOptions
from dep2p.protocols.queues.ordering.route_table import RouteTable
from dep2p.protocols.queues.partition_log import PartitionLog, Read
from dep2p.protocols.queues.placed import PlacedParts
from dep2p.protocols.queues.records import DeadRow, MessageRow, PartitionRecord

_CHANNELS_MAX: Final = 1_000
_SWEEP_ITEMS: Final = 1_024


__all__ = ["Publish", "Queue", "Run"]

_new = tuple[object, ...].__new__
"""A NamedTuple's own constructor costs twice as much."""


class Queue(PlacedParts, Publishers):
    """Made by `QueueBook.create`, or from what the store has; `load` before it is used."""

    def __init__(
        self,
        book: Any,
        namespace: str,
        name: str,
        options: QueueOptions,
        partition_ids: Sequence[int],
        routes: RouteTable | None = None,
    ) -> None:
        PlacedParts.__init__(self)
        Publishers.__init__(self)
        self.book = book
        """The `QueueBook`; untyped, since type checkers know this folder under two names and would see two classes."""
        self.namespace = namespace
        self.name = name
        self.options = options
        self.partition_ids = tuple(partition_ids)
        self.is_ephemeral = is_ephemeral(name)
        self.is_paused = False
        self.is_loaded = False
        self.is_deleted = False
        self.counts: Counter[str] = Counter()
        self.channels: dict[str, Channel] = {}
        self.logs: dict[int, PartitionLog] = {}
        self._routes = routes
        self._partition_of: list[int] = []
        self._turn = 0
        self._only: PartitionLog | None = None
        """The log of a queue that has one partition."""

    @property
    def routes(self) -> RouteTable:
        """Where each key goes. Made when it is first asked for: thousands of queues hold no start up."""
        if self._routes is None:
            self._routes = RouteTable.first(self.partition_ids)
        return self._routes

    @property
    def is_expanded(self) -> bool:
        """Whether the routes are others than those of a new queue."""
        return self._routes is not None and self._routes.version > 1

    def _route(self) -> None:
        self._partition_of = [route.partition for route in self.routes.routes for _lp in range(route.low, route.high)]
        assert len(self._partition_of) == LOGICAL_PARTITIONS

    # Loading

    def load(self, records: Mapping[int, PartitionRecord]) -> None:
        """Take what the store has of each partition (nothing for a new one); once."""
        if self.is_loaded:
            return
        self.is_loaded = True
        self._route()
        for partition in self.partition_ids:
            record = records.get(partition) or PartitionRecord()
            log = self.logs[partition] = PartitionLog(partition, record, self.book.cache, is_pinned=self.is_ephemeral)
            for channel in self.channels.values():
                known = record if channel.id in record.cursors else None
                channel.add_partition(log, known, log.trimmed)
            self._lower_barriers(log)  # a crash may have taken back what was in front of one
        if len(self.partition_ids) == 1:
            self._only = self.logs[self.partition_ids[0]]

    def _lower_barriers(self, log: PartitionLog) -> None:
        """Numbers at the end of a log are not used after all: who waits for them to be done would wait for ever."""
        if not self.routes.has_barriers or self.places:  # of a placed queue, the shares know
            return
        routes = self.routes.lowered(log.id, log.last_used)
        if routes.routes != self.routes.routes:
            self._routes = routes
            self.book.define_queue(self)
            for channel in self.channels.values():
                channel.wake()

    def expand(self, count: int) -> list[int]:
        """So many partitions more; gives their ids. Ranges are split, and no key loses its order by that.

        Raises ``ValueError`` for too many.
        """
        if self.places or self.serves is not None:
            raise QueuePlacedError(f"the queue {self.name!r} is on several nodes: its home expands it")
        routes = self.routes.settled([self._trimmed])
        ids: list[int] = self.book.new_partition_ids(count)
        self._add(ids, routes.expanded(ids, {each: log.last_seq for each, log in self.logs.items()}))
        return ids

    def _add(self, ids: Sequence[int], routes: RouteTable) -> None:
        self._routes = routes
        self._route()
        self._only = None
        self.partition_ids = (*self.partition_ids, *ids)
        self.options = replace(self.options, partitions=len(self.partition_ids))
        for partition in ids:
            log = PartitionLog(partition, PartitionRecord(), self.book.cache, is_pinned=self.is_ephemeral)
            self.logs[partition] = log
            for channel in self.channels.values():
                channel.add_partition(log, None, 0)
        for channel in self.channels.values():
            if isinstance(channel, ExclusiveChannel):
                channel.set_partitions(self.open_partitions)
            channel.wake()
        self.book.expanded(self, ids)

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
        """Bytes of their bodies."""
        if self._only is not None:
            return self._only.bytes
        return sum(log.bytes for log in self.logs.values())

    def is_full(self, items: int, size: int) -> bool:
        """Whether so much more is too much. An ephemeral queue is never full: it drops."""
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
        on_done: Callable[[Any], None],
        *,
        wall_us: int,
        publisher: tuple[bytes, int] | None = None,
        publish: Publish | None = None,
    ) -> Publish:
        """Take all of the messages, or raise: QueueFullError, MessageTooLargeError, ``ValueError`` (a delay).

        They are delivered when they are committed. ``publisher``: who publishes, and its number of the first message;
        a publish that was taken before is not taken again, and is done with the same points as the first time:
        ``on_done`` is called with the first one then. ``publish``: the record to use, which calls its own `on_done`.
        """
        if publisher is not None:
            known = self._known(publisher, on_done)
            if known is not None:
                return known
        if self.places:
            raise QueuePlacedError(f"the partitions of the queue {self.name!r} are on several nodes: publish to those")
        if self.serves is not None:
            self._require_served(messages)
        self._check(messages)
        if publish is None:
            publish = Publish(on_done)
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
                log.add(_new(Message, (seq, wall_us, due_us, expires_us, 0, priority, attributes, body)))
                seq += 1
            log.last_seq = seq - 1
            publish.runs.append(_new(Run, (partition, first, seq - first)))
        self.counts["published"] += len(messages)
        if publisher is not None:
            self._remember(publisher, publish, len(messages))
        if self.is_ephemeral:
            self._drop_overflow()
            self.book.publish_ephemeral(self, publish)
        else:
            self.book.publish(self, publish)
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
        """Runs in the order given; those without a key go to one partition, another one with each publish."""
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
        """Messages of a partition up to a number are committed: they are there; `wake` tells the channels."""
        log = self.logs.get(partition)
        if log is not None and log.visible < seq:
            log.visible = seq

    def wake(self) -> None:
        """There are new messages."""
        for channel in self.channels.values():
            if channel.is_ephemeral:
                channel.drop_overflow()
            channel.wake()

    def hidden(self, publish: Publish) -> None:
        """The publish was not committed: its numbers stay unused."""
        for run in publish.runs:
            log = self.logs.get(run.partition)
            if log is not None:
                log.take_back(range(run.first_seq, run.first_seq + run.items))
                self._lower_barriers(log)

    # Channels

    def channel(self, name: str) -> Channel:
        """Raises ChannelNotFoundError."""
        found = self.channels.get(name)
        if found is None:
            known = ", ".join(self.channels) or "none"
            raise ChannelNotFoundError(f"the queue {self.name!r} has no channel {name[:80]!r} (there are: {known})")
        return found

    def create_channel(
        self, name: str, *, from_start: bool = False, filter_text: str = "", exclusive: bool = False
    ) -> Channel:
        """The channel, made if it is new: at the end of the log, or at its start. One that is there stays as it is.

        The first channel always begins at the start: what was published before it was kept for it. Raises
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
        channel = self.channels[name] = kind(self, self.book.new_channel_id(), name, filter_, is_paused=False)
        for log in self.logs.values():
            channel.add_partition(log, None, log.trimmed if from_start else log.last_seq)
        channel.wake()
        self.book.define_queue(self)
        return channel

    def delete_channel(self, name: str) -> None:
        """With what waits in it and its dead letters; its consumers are closed. Raises ChannelNotFoundError."""
        channel = self.channel(name)
        del self.channels[name]
        channel.close(f"the channel {name!r} was deleted")
        self.book.forget_channel(self, channel)
        for log in self.logs.values():
            self.floor_moved(log)
        self.book.define_queue(self)

    def set_paused(self, paused: bool, channel: str | None = None) -> None:
        """Deliver nothing from now on, in one channel or in all, or go on; kept over restarts."""
        if channel is None:
            self.is_paused = paused
        else:
            self.channel(channel).is_paused = paused
        for each in self.channels.values():
            each.wake()
        self.book.define_queue(self)

    def empty(self) -> int:
        """Drop everything; gives how many messages were in the log."""
        dropped = self.items
        for channel in self.channels.values():
            channel.skip_all()
        for log in self.logs.values():
            self._trim(log, log.visible)
        return dropped

    # The log's end

    def floor_moved(self, log: PartitionLog) -> None:
        """Some channel has done more: what all have done may leave the log."""
        if self.channels:
            self.book.trimmable[log] = self

    def trim(self, log: PartitionLog) -> None:
        """What every channel has done leaves the log."""
        if self.channels:
            floor = min(channel.floor(log.id) for channel in self.channels.values())
            if floor > log.trimmed:
                self._trim(log, min(floor, log.visible))

    def _trim(self, log: PartitionLog, up_to: int) -> None:
        for channel in self.channels.values():
            if channel.floor(log.id) < up_to:
                channel.skip_to(log, up_to)
        log.trim(up_to)
        if not self.is_ephemeral:
            self.book.trims[log.id] = up_to
        if self.routes.has_barriers:
            settled = self.routes.settled([self._trimmed])
            if settled.routes != self.routes.routes:
                self._routes = settled
                self.book.define_queue(self)
        self.book.freed[self] = None

    def sweep(self, wall_us: int) -> list[Read]:
        """Drop what is too old at the front of the log. Gives the pages that are missing for it."""
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
                    if self.book.trace is not None:
                        for channel in self.channels.values():
                            channel.tell_expired(self.book.trace, log.id, message)
                last += 1
            if last > log.trimmed:
                self._trim(log, last)
        return wants

    def bury(self, channel: Channel, row: DeadRow) -> None:
        """A dead letter."""
        channel.dead_items += 1
        self.book.bury(self, row)
        over = row.id - self.options.dead_items_max
        if over > 0:
            self.counts["dead_dropped_overflow"] += 1
            self.book.unbury(self, channel.id, over)

    def replay(self, channel: Channel, row: DeadRow, on_done: Callable[[Publish], None], wall_us: int) -> Publish:
        """A dead letter is given to its channel again, as a new message that no other channel sees.

        It is gone when that is written.
        """
        is_unwritten = self.is_ephemeral or is_ephemeral(channel.name)

        def done(publish: Publish) -> None:
            if publish.is_done and publish.error is None:
                channel.dead_items = max(0, channel.dead_items - 1)
                self.counts["replayed"] += 1
                if is_unwritten:
                    self.book.unbury(self, channel.id, row.id)
            on_done(publish)

        publish = Publish(done)
        log = self.logs.get(row.partition) or next(iter(self.logs.values()))
        seq = log.reserve(1)
        priority, attributes = row.meta[28], row.meta[29:]
        message = Message(seq, wall_us, 0, 0, channel.id, priority, attributes, row.body)
        log.add(message)
        publish.rows.append(MessageRow(log.id, seq, encode_meta(message), row.body))
        publish.runs.append(Run(log.id, seq, 1))
        if not is_unwritten:
            publish.replaces = (channel.id, row.id)
        if self.is_ephemeral:
            self.book.publish_ephemeral(self, publish)
        else:
            self.book.publish(self, publish)
        return publish

    def close(self, reason: str) -> None:
        """The queue is deleted."""
        self.is_deleted = True
        for channel in self.channels.values():
            channel.close(reason)
        for log in self.logs.values():
            self.book.cache.drop(log, list(log.rows))
