"""A queue: its partitions and channels, what publishers say, and what leaves the log. Pure."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

from dep2p.errors import ChannelNotFoundError, MessageTooLargeError, QueueFullError
from dep2p.protocols.queue.channel import Channel
from dep2p.protocols.queue.filters import Filter
from dep2p.protocols.queue.log import PartitionLog, Read
from dep2p.protocols.queue.message import Message, NewMessage, encode_meta, pack_meta
from dep2p.protocols.queue.names import LOGICAL_PARTITIONS, check_name, is_ephemeral, logical_partition, ranges
from dep2p.protocols.queue.options import QueueOptions
from dep2p.protocols.queue.records import DeadRow, MessageRow, PartitionRecord

_PUBLISHERS_MAX: Final = 1_024
"""Of a queue, whose last publishes are remembered."""
_PUBLISHES_REMEMBERED: Final = 64
"""Of one publisher: more than it has in flight."""
_CHANNELS_MAX: Final = 1_000
_SWEEP_ITEMS: Final = 1_024


_new = tuple[object, ...].__new__
"""A NamedTuple's own constructor costs twice as much."""


@lru_cache(maxsize=64)
def _partition_of(count: int) -> tuple[int, ...]:
    """The partition of each logical one, of a queue that has so many."""
    found = tuple(index for index, each in enumerate(ranges(count)) for _lp in each)
    assert len(found) == LOGICAL_PARTITIONS
    return found


class Run(NamedTuple):
    """Messages of one publish with numbers in a row."""

    partition: int
    first_seq: int
    items: int


class Publish:
    """One publish: all of it, or nothing. Done when it is committed."""

    __slots__ = ("error", "is_done", "on_done", "publisher", "replaces", "rows", "runs")

    def __init__(self, on_done: "Callable[[Publish], None]") -> None:
        self.on_done = on_done
        """Called when `is_done` is set; before, too, for each time that the outcome is in doubt."""
        self.runs: list[Run] = []
        self.rows: list[MessageRow] = []
        self.publisher = b""
        """Who has published it, if that is remembered."""
        self.replaces: tuple[int, int] | None = None
        """A dead letter (channel, id) that goes when this comes: in the same step."""
        self.is_done = False
        self.error: Exception | None = None

    def points(self) -> list[tuple[int, int]]:
        """(partition, seq) of each message, in the order given."""
        if len(self.runs) == 1:
            partition, first, items = self.runs[0]
            return [(partition, first)] if items == 1 else [(partition, first + n) for n in range(items)]
        return [(run.partition, run.first_seq + n) for run in self.runs for n in range(run.items)]

    def doubt(self, error: Exception) -> None:
        """Whether it is committed is not known for now; `finish` comes later."""
        self.error = error
        self.on_done(self)

    def finish(self, error: Exception | None = None) -> None:
        """It is committed, or not."""
        self.is_done = True
        self.error = error
        self.on_done(self)


class _Publisher:
    """What a publisher has published lately: a publish that is sent again is known by its first number."""

    __slots__ = ("last", "recent")

    def __init__(self) -> None:
        self.last = 0
        self.recent: OrderedDict[int, Publish | list[Run]] = OrderedDict()
        """By the first number. An empty list: it was not written, and is taken when it is sent again."""


class Queue:
    """Made by `QueueBook.create`, or from what the store has; `load` before it is used."""

    def __init__(
        self, book: Any, namespace: str, name: str, options: QueueOptions, partition_ids: Sequence[int]
    ) -> None:
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
        self._partition_of = _partition_of(len(self.partition_ids))
        self._turn = 0
        self._only: PartitionLog | None = None
        """The log of a queue that has one partition."""
        self._publishers: OrderedDict[bytes, _Publisher] = OrderedDict()

    # Loading

    def load(self, records: Mapping[int, PartitionRecord]) -> None:
        """Take what the store has of each partition (nothing for a new one); once."""
        if self.is_loaded:
            return
        self.is_loaded = True
        for partition in self.partition_ids:
            record = records.get(partition) or PartitionRecord()
            log = self.logs[partition] = PartitionLog(partition, record, self.book.cache, is_pinned=self.is_ephemeral)
            if len(self.partition_ids) == 1:
                self._only = log
            for channel in self.channels.values():
                known = record if channel.id in record.cursors else None
                channel.add_partition(log, known, log.trimmed)

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
        options, there = self.options, self.items
        return there + items > options.items_max or (there > 0 and self.size_bytes + size > options.bytes_max)

    def publish(
        self,
        messages: Sequence[NewMessage],
        on_done: Callable[[Publish], None],
        *,
        wall_us: int,
        publisher: tuple[bytes, int] | None = None,
    ) -> Publish:
        """Take all of the messages, or raise: QueueFullError, MessageTooLargeError, ``ValueError`` (a delay).

        They are delivered when they are committed. ``publisher``: who publishes, and its number of the first message;
        a publish that was taken before is not taken again, and is done with the same points as the first time.
        """
        if publisher is not None:
            known = self._known(publisher, on_done)
            if known is not None:
                return known
        size = self._check(messages)
        if self.is_full(len(messages), size):
            self.counts["refused_full"] += len(messages)
            raise QueueFullError(
                f"the queue {self.name!r} is full: {self.items} messages of {self.size_bytes} bytes. Consume some, "
                "or raise its items_max or bytes_max"
            )
        publish = Publish(on_done)
        if not self.channels and not self.options.hold_without_channel:
            self.counts["dropped_no_channel"] += len(messages)
            publish.finish()
            return publish
        ttl_us = round(self.options.ttl_s * 1e6)
        expires_us = wall_us + ttl_us if ttl_us else 0
        only = self._only
        for log, group in self._by_partition(messages) if only is None else ((only, messages),):
            first = log.reserve(len(group))
            partition, rows = log.id, publish.rows
            for seq, (body, attributes, _key, priority, delay_s) in enumerate(group, first):
                due_us = wall_us + round(delay_s * 1e6) if delay_s else 0
                meta = pack_meta(wall_us, due_us, expires_us, 0, priority)
                if attributes:
                    meta += attributes
                rows.append(_new(MessageRow, (partition, seq, meta, body)))
                log.add(_new(Message, (seq, wall_us, due_us, expires_us, 0, priority, attributes, body)))
            publish.runs.append(Run(partition, first, len(group)))
        self.counts["published"] += len(messages)
        if publisher is not None:
            self._remember(publisher, publish, len(messages))
        if self.is_ephemeral:
            self._drop_overflow()
            self.book.publish_ephemeral(self, publish)
        else:
            self.book.publish(self, publish)
        return publish

    def _check(self, messages: Sequence[NewMessage]) -> int:
        if not messages:
            raise ValueError("nothing to publish")
        size = 0
        options = self.options
        for message in messages:
            body, _attributes, _key, priority, delay_s = message
            size += len(body)
            if len(body) <= options.message_bytes_max and not delay_s and 0 <= priority <= 255:
                continue
            if len(body) > options.message_bytes_max:
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
        return size

    def _by_partition(self, messages: Sequence[NewMessage]) -> list[tuple[PartitionLog, list[NewMessage]]]:
        """Runs in the order given; those without a key go to one partition, another one with each publish."""
        ids = self.partition_ids
        self._turn += 1
        found: list[tuple[PartitionLog, list[NewMessage]]] = []
        for message in messages:
            index = self._partition_of[logical_partition(message.key)] if message.key else self._turn % len(ids)
            if not found or found[-1][0].id != ids[index]:
                found.append((self.logs[ids[index]], []))
            found[-1][1].append(message)
        return found

    def _known(self, publisher: tuple[bytes, int], on_done: Callable[[Publish], None]) -> Publish | None:
        name, number = publisher
        known = self._publishers.get(name)
        if known is None:
            return None
        before = known.recent.get(number)
        if before == []:  # it was not written then
            return None
        if before is None:
            if number > known.last:
                return None
            raise ValueError(f"publish {number} comes after {known.last} of the same publisher, and is not remembered")
        self.counts["deduplicated"] += 1
        if isinstance(before, Publish) and not before.is_done:
            first_done = before.on_done

            def both(publish: Publish) -> None:
                first_done(publish)
                on_done(publish)

            before.on_done = both
            return before
        again = Publish(on_done)
        again.runs = list(before.runs if isinstance(before, Publish) else before)
        again.finish()
        return again

    def _remember(self, publisher: tuple[bytes, int], publish: Publish, count: int) -> None:
        name, number = publisher
        known = self._publishers.get(name)
        if known is None:
            if len(self._publishers) >= _PUBLISHERS_MAX:
                gone, _old = self._publishers.popitem(last=False)
                if not self.is_ephemeral:
                    self.book.define(self.publisher_key(gone), None)
            known = self._publishers[name] = _Publisher()
        else:
            self._publishers.move_to_end(name)  # the quietest one is forgotten first
        known.recent[number] = publish
        known.last = max(known.last, number + count - 1)
        publish.publisher = name
        while len(known.recent) > _PUBLISHES_REMEMBERED:
            known.recent.popitem(last=False)

    def remembered(self, name: bytes, written: Mapping[Publish, None]) -> list[object] | None:
        """What the store shall keep of a publisher: only what is written, or just being written."""
        known = self._publishers.get(name)
        if known is None:
            return None
        last = known.last
        runs: list[object] = []
        for number, each in known.recent.items():
            if isinstance(each, Publish) and not each.is_done and each not in written:
                last = min(last, number - 1)
                runs.append((number, ()))
            else:
                of: list[Run] = each.runs if isinstance(each, Publish) else each
                runs.append((number, tuple(tuple(run) for run in of)))
        return [last, runs]

    def forget_publish(self, publish: Publish) -> None:
        """It was not committed: sent again, it is taken again."""
        for known in self._publishers.values():
            for number, each in list(known.recent.items()):
                if each is publish:
                    known.recent[number] = []

    def restore_publisher(self, name: bytes, last: int, recent: Mapping[int, list[Run]]) -> None:
        """What the store has of a publisher."""
        known = self._publishers[name] = _Publisher()
        known.last = last
        known.recent.update(recent)

    def publisher_key(self, name: bytes) -> str:
        """Of the definition that tells of a publisher."""
        return f"publisher/{self.partition_ids[0]}/{name.hex()}"

    def publisher_keys(self) -> list[str]:
        """The keys of all definitions about publishers."""
        return [self.publisher_key(name) for name in self._publishers]

    def _drop_overflow(self) -> None:
        for log in self.logs.values():
            over = 0
            while log.items - over > self.options.items_max:
                over += 1
            if over:
                self.counts["dropped_overflow"] += over
                self._trim(log, log.trimmed + over)

    def shown(self, publish: Publish) -> None:
        """The publish is committed: its messages are there; `wake` tells the channels."""
        for partition, first, items in publish.runs:
            log = self.logs.get(partition)
            if log is not None and log.visible < first + items - 1:
                log.visible = first + items - 1

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

    # Channels

    def channel(self, name: str) -> Channel:
        """Raises ChannelNotFoundError."""
        found = self.channels.get(name)
        if found is None:
            known = ", ".join(self.channels) or "none"
            raise ChannelNotFoundError(f"the queue {self.name!r} has no channel {name[:80]!r} (there are: {known})")
        return found

    def create_channel(self, name: str, *, from_start: bool = False, filter_text: str = "") -> Channel:
        """The channel, made if it is new: at the end of the log, or at its start.

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
        from_start = from_start or not self.channels
        channel = self.channels[name] = Channel(self, self.book.new_channel_id(), name, filter_, is_paused=False)
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
            for seq in list(log.rows):
                self.book.cache.drop(log, seq)
