"""All queues of one store, the next changes to commit, and the deliveries that follow. Pure.

The owner publishes and settles through `Queue` and `Channel`, calls `pump` to assign ready messages, takes a batch with
`take_changes`, writes it, and says `committed` or `failed`. Only then are publishes done and deliveries delivered.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from dep2p.errors import ProtocolError, QueueExistsError, QueueNotFoundError
from dep2p.protocols.queues.channel import Channel
from dep2p.protocols.queues.consumer import ChannelConsumer, ChannelDelivery
from dep2p.protocols.queues.deduplication import PendingPublish, PublishedQueue
from dep2p.protocols.queues.exclusive_channel import ExclusiveChannel
from dep2p.protocols.queues.message import damaged as damaged_message
from dep2p.protocols.queues.message import decode_row
from dep2p.protocols.queues.names import check_name, is_ephemeral
from dep2p.protocols.queues.options import QueueOptions, options_as_dict
from dep2p.protocols.queues.partition_log import PAGE_BYTES, LogCache, PartitionLog, Read
from dep2p.protocols.queues.queue import Queue
from dep2p.protocols.queues.records import DeadLetterRow, MessageRow, PartitionRecord, Run, StoreBatch
from dep2p.protocols.queues.registry.codec import (
    QueueDefinition,
    decode_ids,
    decode_producer,
    decode_queue,
    decode_value,
    queue_value,
)
from dep2p.protocols.queues.registry.makers import QueueMakers
from dep2p.protocols.queues.trace_hooks import QueueTrace
from dep2p.protocols.wire.cbor import encode_canonical

CACHE_BYTES: Final = 67_108_864
QueueKey = tuple[str, str]
"""Namespace and name."""
_COMMIT_ROWS: Final = 2_000
_COMMIT_BYTES: Final = 8_388_608
_EPHEMERAL_DEAD_LETTERS_MAX: Final = 10_000


class _Taken:
    """The parts of a batch that do not go to the store."""

    __slots__ = ("calls", "deleted", "deliveries", "publishers", "publishes")

    def __init__(self) -> None:
        self.deleted: list[PendingPublish] = []
        """Publishes of queues that were deleted meanwhile: nothing of them is written."""
        self.publishers: dict[str, None] = {}
        """The keys of the producers' definitions for these publishes."""
        self.publishes: list[PendingPublish] = []
        self.deliveries: list[tuple[ChannelConsumer, list[ChannelDelivery]]] = []
        self.calls: list[Callable[[], None]] = []


class QueueRegistry:
    """The queues of one store."""

    def __init__(self, *, cache_bytes: int = CACHE_BYTES) -> None:
        self.queues: dict[QueueKey, Queue] = {}
        self.makers: QueueMakers = QueueMakers()
        """The queues that members made."""
        self.pending_deletions: dict[tuple[str, str, str], str] = {}
        """By namespace, shard and channel ("": the shard itself): the node on which it has to be deleted."""
        self.cache: LogCache = LogCache(cache_bytes)
        self.wall_us: int = 0
        """Unix microseconds, as last set by `pump` or `at`."""
        self.trace: QueueTrace | None = None
        """Records the states of messages."""
        self.counts: Counter[str] = Counter()
        self.awake: dict[Channel, None] = {}
        self.active: dict[Channel, None] = {}
        """Channels with deadlines: those with consumers or deferred messages."""
        self.changed: dict[tuple[Channel, int], None] = {}
        self.staged: dict[ChannelConsumer, None] = {}
        self.starved: dict[Channel, None] = {}
        """Channels that wait until others have got their pages."""
        self.out: list[tuple[ChannelConsumer, list[ChannelDelivery]]] = []
        """Deliveries that are committed and held."""
        self._reading: dict[PartitionLog, None] = {}
        self.trimmable: dict[PartitionLog, Queue] = {}
        self.trims: dict[int, int] = {}
        self.freed: dict[Queue, None] = {}
        """Queues in which there may be room now; the owner clears it."""
        self._definitions: dict[str, bytes | None] = {}
        """Small values by key, for the next batch; None removes one."""
        self._next_partition = 1
        self._next_channel = 1
        self._publishers: dict[int, list[tuple[bytes, int, dict[int, list[Run]]]]] = {}
        """Stored producers of queues that are not loaded yet, by first partition."""
        self._publishes: list[PendingPublish] = []
        self._dead_added: dict[tuple[int, int], DeadLetterRow] = {}
        self._dead_removed: list[tuple[int, int]] = []
        self._partitions_removed: list[int] = []
        self._channels_removed: list[int] = []
        self._taken: dict[int, _Taken] = {}
        self._calls: list[Callable[[], None]] = []
        self._queue_of: dict[int, Queue] = {}
        """The loaded queues by partition."""
        self._ephemeral_dead_letters: dict[int, dict[int, DeadLetterRow]] = {}

    # Definitions in the store

    def restore(self, definitions: Mapping[str, bytes]) -> None:
        """Read the definitions of the stored queues. It is cheap: it loads none of them. Raises ProtocolError for a
        damaged one."""
        options: dict[bytes, QueueOptions] = {}
        exclusive: dict[int, ExclusiveChannel] = {}
        groups: dict[str, bytes] = {}
        for key, raw in definitions.items():
            if key.startswith("group/"):
                groups[key] = raw  # when their channels are known
            else:
                self._restore_one(key, raw, options, exclusive)
        for key, raw in groups.items():
            self._restore_one(key, raw, options, exclusive)

    def _restore_one(
        self, key: str, raw: bytes, options: dict[bytes, QueueOptions], exclusive: dict[int, ExclusiveChannel]
    ) -> None:
        try:
            self._restore(key, raw, options, exclusive)
        except (ProtocolError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise ProtocolError(f"the store's definition {key[:120]!r} is damaged ({error})") from None

    def _restore(
        self, key: str, raw: bytes, options: dict[bytes, QueueOptions], exclusive: dict[int, ExclusiveChannel]
    ) -> None:
        kind, _, rest = key.partition("/")
        if kind == "ids":
            partition, channel_id = decode_ids(raw, key)
            self._next_partition = max(self._next_partition, partition)
            self._next_channel = max(self._next_channel, channel_id)
        elif kind == "queue":
            namespace, _, name = rest.rpartition("/")
            self._restore_queue(namespace, name, decode_queue(raw, key, options), exclusive)
        elif kind == "left":
            namespace, shard, name = rest.split("/")
            self.pending_deletions[namespace, shard, name] = str(decode_value(raw, key))
        elif kind == "group":
            channel = exclusive.get(int(rest))
            if channel is not None:
                channel.group.restore(decode_value(raw, key))
        elif kind == "publisher":
            partition_text, _, publisher = rest.partition("/")
            last, recent = decode_producer(raw, key)
            self._publishers.setdefault(int(partition_text), []).append((bytes.fromhex(publisher), last, recent))

    def _restore_queue(
        self, namespace: str, name: str, known: QueueDefinition, exclusive: dict[int, ExclusiveChannel]
    ) -> None:
        queue = Queue(self, namespace, name, known.options, known.partitions, known.routes)
        self.queues[(namespace, name)] = queue
        queue.is_paused = known.is_paused
        queue.locations = known.locations
        queue.pending_expansion = known.pending_expansion
        queue.made_by = known.made_by
        self.makers.add(queue)
        queue.serves = known.serves
        for each in known.channels:
            kind = ExclusiveChannel if each.is_exclusive else Channel
            channel = queue.channels[each.name] = kind(queue, each.id, each.name, each.filter, is_paused=each.is_paused)
            if isinstance(channel, ExclusiveChannel):
                exclusive[each.id] = channel

    def define(self, key: str, value: object | None) -> None:
        """Put a small value into the next batch; None removes it."""
        self._definitions[key] = None if value is None else encode_canonical(value)

    def set_pending_deletion(self, namespace: str, shard: str, channel: str, node: str | None) -> None:
        """Remember a deletion on a node that is unreachable; None: it is done."""
        if node is None:
            if self.pending_deletions.pop((namespace, shard, channel), None) is not None:
                self.define(f"left/{namespace}/{shard}/{channel}", None)
        else:
            self.pending_deletions[namespace, shard, channel] = node
            self.define(f"left/{namespace}/{shard}/{channel}", node)

    def define_queue(self, queue: Queue) -> None:
        """Store the definition of a queue with the next batch."""
        if queue.is_ephemeral or queue.is_deleted:
            return
        self.define(f"queue/{queue.namespace}/{queue.name}", queue_value(queue))
        self.define("ids", [self._next_partition, self._next_channel])

    # Queues

    def new_partition_ids(self, count: int) -> list[int]:
        """Return ids that were never given before."""
        self._next_partition += count
        return list(range(self._next_partition - count, self._next_partition))

    def expanded(self, queue: Queue, ids: Sequence[int]) -> None:
        """Add the new partitions of a queue."""
        self._queue_of.update(dict.fromkeys(ids, queue))
        self.define_queue(queue)

    def when_committed(self, call: Callable[[], None]) -> None:
        """Call when all definitions until now are committed."""
        self._calls.append(call)

    def new_channel_id(self) -> int:
        """Return an id that was never given before."""
        self._next_channel += 1
        return self._next_channel - 1

    def find(self, namespace: str, name: str) -> Queue:
        """Return a queue. Raises QueueNotFoundError."""
        found = self.queues.get((namespace, name))
        if found is None:
            raise QueueNotFoundError(f"there is no queue {name[:80]!r} here: make it first (`dep2p queue create`)")
        return found

    def names(self, namespace: str) -> list[str]:
        """Return the names of a namespace's queues, sorted."""
        return sorted(name for space, name in self.queues if space == namespace)

    def create(self, namespace: str, name: str, options: QueueOptions, made_by: str = "") -> Queue:
        """Make a queue, or return the one that is there with the same options (and maybe more partitions).

        ``made_by``: the peer id of another member that makes it.
        Raises QueueExistsError when it is there with others, ``ValueError`` for the name.
        """
        check_name(name)
        found = self.queues.get((namespace, name))
        if found is not None:
            if options.partitions < found.options.partitions:
                options = replace(options, partitions=found.options.partitions)  # it was expanded since
            if found.options != options:
                there = options_as_dict(found.options)
                differing = [key for key, value in options_as_dict(options).items() if there[key] != value]
                raise QueueExistsError(f"the queue {name!r} is there with another {', '.join(differing)}")
            return found
        ids = self.new_partition_ids(options.partitions)
        queue = self.queues[(namespace, name)] = Queue(self, namespace, name, options, ids)
        queue.made_by = made_by
        self.makers.add(queue)
        self.load(queue, {})
        self.define_queue(queue)
        return queue

    def load(self, queue: Queue, records: Mapping[int, PartitionRecord]) -> None:
        """Load the stored records of a queue's partitions, before its use."""
        if queue.is_loaded:
            return
        queue.load(records)
        self._queue_of.update(dict.fromkeys(queue.logs, queue))
        for channel in queue.channels.values():
            if channel.is_exclusive:
                self.active[channel] = None  # leases of an earlier run end
        for publisher, last, recent in self._publishers.pop(queue.partition_ids[0], ()):
            queue.producers.restore(publisher, last, recent)

    def delete(self, queue: Queue) -> None:
        """Delete a queue with all its messages; close its consumers."""
        del self.queues[(queue.namespace, queue.name)]
        self.makers.remove(queue)
        queue.close(f"the queue {queue.name!r} was deleted")
        for channel in queue.channels.values():
            self.forget_channel(queue, channel)
        for partition in queue.partition_ids:
            self._queue_of.pop(partition, None)
            self.trims.pop(partition, None)
        for log in queue.logs.values():
            self._reading.pop(log, None)  # its page may be on the way: ignore it
        self.freed[queue] = None
        if not queue.is_ephemeral:
            self._partitions_removed += queue.partition_ids
            self.define(f"queue/{queue.namespace}/{queue.name}", None)
            for key in queue.producers.keys():
                self.define(key, None)

    def forget_channel(self, queue: Queue, channel: Channel) -> None:
        """Forget a channel that was deleted."""
        for partition in queue.partition_ids:
            self.changed.pop((channel, partition), None)
        self._ephemeral_dead_letters.pop(channel.id, None)
        self.starved.pop(channel, None)
        if not queue.is_ephemeral and not is_ephemeral(channel.name):
            self._channels_removed.append(channel.id)
            if isinstance(channel, ExclusiveChannel):
                self.define(channel.store_key, None)

    # From queues

    def publish(self, queue: Queue, publish: PendingPublish) -> None:
        """Put a publish into the next batch."""
        publish.queue = queue
        self._publishes.append(publish)

    def publish_ephemeral(self, queue: Queue, publish: PendingPublish) -> None:
        """Publish to an ephemeral queue, at once: there is nothing to write."""
        publish.rows = []
        for partition, first, items in publish.runs:
            queue.shown(partition, first + items - 1)
        if self.trace is not None:
            self.trace.published(queue, publish.runs)
        queue.wake()
        publish.finish()

    def add_dead_letter(self, queue: Queue, row: DeadLetterRow) -> None:
        """Put a dead letter into the next batch."""
        channel = next((each for each in queue.channels.values() if each.id == row.channel), None)
        if queue.is_ephemeral or (channel is not None and is_ephemeral(channel.name)):
            letters = self._ephemeral_dead_letters.setdefault(row.channel, {})
            letters[row.id] = row
            if len(letters) > _EPHEMERAL_DEAD_LETTERS_MAX:
                del letters[next(iter(letters))]
            return
        self._dead_added[(row.channel, row.id)] = row

    def remove_dead_letter(self, queue: Queue, channel_id: int, dead_id: int) -> None:
        """Remove a dead letter."""
        if self._ephemeral_dead_letters.get(channel_id, {}).pop(dead_id, None) is None:
            self._dead_added.pop((channel_id, dead_id), None)
            if not queue.is_ephemeral:
                self._dead_removed.append((channel_id, dead_id))

    def ephemeral_dead_letters(self, channel_id: int) -> list[DeadLetterRow]:
        """Return the dead letters of an ephemeral channel, which no store has, in the order of id."""
        return list(self._ephemeral_dead_letters.get(channel_id, {}).values())

    # Time, and delivering

    def at(self, wall_us: int) -> None:
        """Set the wall clock's time, which histories and due times use."""
        self.wall_us = wall_us

    def pump(self, now: float, wall_us: int) -> list[Read]:
        """Assign ready messages, queue by queue. Returns the pages that are missing for it: read them, then call
        `loaded`."""
        self.wall_us = wall_us
        wants: list[Read] = []
        if self.starved and self._may_read_more():
            starved, self.starved = self.starved, {}
            for each in starved:
                each.wake()
        for _ in range(len(self.awake)):
            channel = next(iter(self.awake), None)
            if channel is None:
                break
            del self.awake[channel]
            wants += channel.pump(now, wall_us)
        return wants

    def may_read(self, log: PartitionLog) -> bool:
        """Whether a page may be asked for: pages for half of the cache at most are under way."""
        if log.id not in self._queue_of or not self._may_read_more():
            return False
        self._reading[log] = None
        return True

    def _may_read_more(self) -> bool:
        for log in [each for each in self._reading if not each.wanted]:
            del self._reading[log]
        return len(self._reading) < max(1, self.cache.bytes_max // (2 * PAGE_BYTES))

    def loaded(self, read: Read, rows: Sequence[MessageRow]) -> list[ProtocolError]:
        """Take a page. Returns the errors of its damaged messages, which are dropped."""
        damaged: list[ProtocolError] = []
        queue = self._queue_of.get(read.partition)
        if queue is None:
            return damaged
        log = queue.logs[read.partition]
        up_to, log.wanted = log.wanted_to, 0
        for row in rows:
            if row.seq > log.trimmed and not log.is_gone(row.seq):
                try:
                    message = decode_row(row)
                except ProtocolError as error:
                    damaged.append(error)
                    message = damaged_message(row.seq)
                self.cache.put(log, message)
        queue.counts["dropped_damaged"] += len(damaged)
        # Numbers in front of and between the messages of the page belong to messages that are gone.
        reached = read.from_seq - 1
        missing: list[int] = []
        for row in rows:
            missing += range(reached + 1, row.seq)
            reached = row.seq
        if not rows:  # messages that came after the request are not missing
            missing += range(read.from_seq, up_to + 1)
        for channel in queue.channels.values():
            for seq in missing:
                channel.gone(log, seq)
            channel.wake()
        return damaged

    def next_deadline(self) -> float | None:
        """Return when `on_deadline` has work to do."""
        found: float | None = None
        for channel in list(self.active):
            deadline = channel.next_deadline()
            if deadline is None:
                if not channel.consumers:
                    del self.active[channel]
            elif found is None or deadline < found:
                found = deadline
        return found

    def on_deadline(self, now: float, wall_us: int) -> None:
        """Take back messages that were not settled in time."""
        self.wall_us = wall_us
        for channel in list(self.active):
            deadline = channel.next_deadline()
            if deadline is not None and deadline <= now:
                channel.on_deadline(now)

    # Batches

    @property
    def has_changes(self) -> bool:
        """Whether `take_changes` would return any change."""
        return bool(
            self._publishes
            or self.staged
            or self._calls
            or self.changed
            or self._definitions
            or self._dead_added
            or self._dead_removed
            or self.trims
            or self.trimmable
            or self._partitions_removed
            or self._channels_removed
        )

    def take_changes(self, *, with_publishes: bool = True) -> StoreBatch:
        """Return the next batch to commit: at most about 2,000 new messages or 8 MiB of them, and all other changes."""
        for log, queue in self.trimmable.items():
            if not queue.is_deleted:
                queue.trim(log)
        self.trimmable.clear()
        batch = StoreBatch()
        taken = _Taken()
        size = count = 0
        appends, groups, publishes = batch.appends, batch.groups, taken.publishes
        for publish in self._publishes if with_publishes else ():
            made = publish.rows
            if count and (len(appends) + len(made) > _COMMIT_ROWS or size > _COMMIT_BYTES):
                break
            count += 1
            if publish.queue.is_deleted:
                taken.deleted.append(publish)
                continue
            if len(made) == 1:
                appends.append(made[0])
                size += len(made[0][3])
            else:
                appends += made
                size += sum([len(row[3]) for row in made])
            groups.append(len(made))
            publishes.append(publish)
            if publish.replaces is not None:
                batch.dead_removed.append(publish.replaces)
        del self._publishes[:count]
        for channel, partition in self.changed:
            change = channel.take_change(partition)
            if change is not None and not channel.queue.is_ephemeral and not is_ephemeral(channel.name):
                batch.cursors[(channel.id, partition)] = change
        self.changed.clear()
        for consumer in self.staged:
            if consumer.staged:
                deliveries, consumer.staged = consumer.staged, []
                taken.deliveries.append((consumer, deliveries))
        self.staged.clear()
        batch.definitions, self._definitions = self._definitions, {}
        batch.dead_added, self._dead_added = list(self._dead_added.values()), {}
        batch.dead_removed += self._dead_removed
        self._dead_removed = []
        batch.trims, self.trims = self.trims, {}
        batch.partitions_removed, self._partitions_removed = self._partitions_removed, []
        batch.channels_removed, self._channels_removed = self._channels_removed, []
        taken.calls, self._calls = self._calls, []
        self._take_publishers(batch, taken)
        self._taken[id(batch)] = taken
        return batch

    def _take_publishers(self, batch: StoreBatch, taken: _Taken) -> None:
        """Put the producers' memory of these publishes into the same batch, never into an earlier one."""
        reported: dict[tuple[PublishedQueue, bytes], None] = {}
        written: dict[PendingPublish, None] = {}
        for publish in taken.publishes:
            if publish.publisher:
                reported[(publish.queue, publish.publisher)] = None
                written[publish] = None
        for queue, name in reported:
            remembered = queue.producers.remembered(name, written)
            if remembered is not None:
                key = queue.producers.key(name)
                batch.definitions[key] = encode_canonical(remembered)
                taken.publishers[key] = None

    def committed(self, batch: StoreBatch, *, hold: bool = False) -> None:
        """Take the success of a batch: it is durable. Publishes are done, and deliveries go out; with ``hold`` only at
        the next `deliver`."""
        taken = self._taken.pop(id(batch))
        last = {row[0]: row[1] for row in batch.appends}  # each partition's rise
        shown: dict[Queue, None] = {}
        for partition, seq in last.items():
            queue = self._queue_of.get(partition)
            if queue is not None:
                queue.shown(partition, seq)
                shown[queue] = None
        for publish in taken.publishes:
            publish.rows = []
            if publish.queue.is_deleted:
                publish.finish(QueueNotFoundError(f"the queue {publish.queue.name!r} was deleted"))
            else:
                if self.trace is not None:
                    self.trace.published(publish.queue, publish.runs)
                publish.finish()
        for queue in shown:
            queue.wake()
        for call in taken.calls:
            call()
        self._give_up_deleted(taken)
        self.out += taken.deliveries
        if not hold:
            self.deliver()

    def _give_up_deleted(self, taken: _Taken) -> None:
        for publish in taken.deleted:
            publish.rows = []
            publish.finish(QueueNotFoundError("its queue was deleted"))

    def deliver(self) -> None:
        """Give held deliveries to their consumers, now that they are committed."""
        out, self.out = self.out, []
        for consumer, deliveries in out:
            still_held: list[ChannelDelivery] = []
            for delivery in deliveries:
                held = consumer.held.get((delivery[0], delivery[1][0]))
                # Otherwise its time was over (it may be on its way to the same consumer again), or its consumer went.
                if held is not None and held.attempts == delivery[2]:
                    held.is_out = True
                    still_held.append(delivery)
            if still_held:
                consumer.on_deliver(still_held)

    def uncertain(self, batch: StoreBatch, error: Exception) -> None:
        """Report that it is not known whether a batch was written, to its publishes: the same batch comes again, to
        `committed` or `failed`."""
        for publish in self._taken[id(batch)].publishes:
            publish.doubt(error)

    def refuse(self, error: Exception) -> None:
        """Give up the publishes that are in no batch yet."""
        refused, self._publishes = self._publishes, []
        for publish in refused:
            self._give_up(publish, error)

    def _give_up(self, publish: PendingPublish, error: Exception) -> None:
        publish.queue.hidden(publish)
        publish.queue.producers.forget(publish)
        publish.rows = []
        publish.finish(error)

    def failed(self, batch: StoreBatch, error: Exception, *, publishes: Sequence[int] | None = None) -> None:
        """Take the failure of a batch. ``publishes``: the positions of those to give up (all by default). The rest of
        the batch goes into the next one, and deliveries wait for that."""
        taken = self._taken.pop(id(batch))
        given_up = range(len(taken.publishes)) if publishes is None else publishes
        again: list[PendingPublish] = []
        for position, publish in enumerate(taken.publishes):
            if position in given_up:
                self._give_up(publish, error)
            else:
                again.append(publish)
        self._publishes[:0] = again
        self._give_up_deleted(taken)
        self._calls[:0] = taken.calls
        for key in taken.publishers:  # written again with the publishes that go again
            del batch.definitions[key]
        self._definitions = {**batch.definitions, **self._definitions}
        self._dead_added = {**{(row.channel, row.id): row for row in batch.dead_added}, **self._dead_added}
        replaced = {publish.replaces: None for publish in taken.publishes if publish.replaces is not None}
        self._dead_removed[:0] = [each for each in batch.dead_removed if each not in replaced]
        self.trims = {**batch.trims, **self.trims}
        self._partitions_removed[:0] = batch.partitions_removed
        self._channels_removed[:0] = batch.channels_removed
        by_id = {channel.id: channel for queue in self.queues.values() for channel in queue.channels.values()}
        for (channel_id, partition), change in batch.cursors.items():
            channel = by_id.get(channel_id)
            if channel is not None:
                channel.give_back(partition, change)
        for consumer, deliveries in taken.deliveries:
            held = [each for each in deliveries if consumer.holds(each)]
            if held:
                consumer.staged[:0] = held
                self.staged[consumer] = None
