"""The durable queues of one node: the pure core, bound to a store and to time.

One engine for a node and all its realms; a namespace is a realm's id, or "" for what only programs of this machine
reach.
"""

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

import trio

from dep2p.concurrency.contained import run_contained
from dep2p.errors import (
    ChannelNotFoundError,
    Dep2pError,
    ProtocolError,
    QueueExistsError,
    QueueFullError,
    QueueIsDistributedError,
    StoreError,
    StreamClosedError,
)
from dep2p.protocols.queues.channel import Channel
from dep2p.protocols.queues.consumer import ConsumerWindow
from dep2p.protocols.queues.deduplication import PendingPublish
from dep2p.protocols.queues.exclusive_channel import ExclusiveChannel
from dep2p.protocols.queues.message import NewMessage
from dep2p.protocols.queues.names import is_ephemeral
from dep2p.protocols.queues.options import QueueOptions, options_from
from dep2p.protocols.queues.queue import Queue
from dep2p.protocols.queues.registry.registry import QueueRegistry
from dep2p.protocols.queues.wire.exclusive import MEMBER_BYTES
from dep2p.queues.access import Rights
from dep2p.queues.broker.commit_loop import CommitLoop
from dep2p.queues.broker.dead_letters import DeadLetters
from dep2p.queues.broker.exclusive_consumer import BrokerGroupMember
from dep2p.queues.broker.exclusive_port import LocalPort
from dep2p.queues.broker.inspector import QueueInspector
from dep2p.queues.broker.interfaces import AttachedConsumer
from dep2p.queues.broker.local_consumer import LocalConsumer
from dep2p.queues.broker.pending_publish import Pending, WaitedPublish
from dep2p.queues.broker.receive import SimpleReceivers
from dep2p.queues.ordered_consumer import ExclusiveConsumer
from dep2p.queues.types import SubscribeOptions
from dep2p.storage.queue_commit import QueueCommit
from dep2p.storage.queue_store import QueueStore
from dep2p.tracing.event_log import TraceLog

T = TypeVar("T")

logger: logging.Logger = logging.getLogger("dep2p.queues")

_DEFAULTS: Final = SubscribeOptions()
_BYTES_MAX: Final = 67_108_864

OnPublished = Callable[[Sequence[tuple[int, int]], Dep2pError | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBounds:
    """Bounds of a queue engine. Above the bounds of pending messages and bytes, those of all queues that wait to become
    durable, publishers wait, and other members are refused."""

    pending_bytes_max: int = 67_108_864
    pending_items_max: int = 65_536
    queues_max: int = 100_000
    consumers_max: int = 10_000


class QueueEngine:
    """The queues of a node. Everything but `run` may be called while `run` runs in another task of the same trio
    thread.

    Raises, as the name says: QueueNotFoundError, ChannelNotFoundError, QueueExistsError, QueueFullError,
    MessageTooLargeError, StoreFullError, StoreError, and ``ValueError`` for malformed names and options.
    """

    def __init__(
        self,
        store: QueueStore,
        *,
        defaults: QueueOptions | None = None,
        rights: Rights | None = None,
        bounds: EngineBounds | None = None,
        registry: QueueRegistry | None = None,
    ) -> None:
        self.store = store
        self.registry: QueueRegistry = registry or QueueRegistry()
        self.defaults: QueueOptions = defaults or QueueOptions()
        """Options of queues whose maker sets none."""
        self.is_held: Callable[[], bool] = lambda: True
        """Whether no other node can have the store by now: only then may leases be promised without a commit."""
        self._bounds = bounds or EngineBounds()
        self._pending = Pending()
        self._consumers: dict[str, LocalConsumer] = {}
        self._consumer_number = 0
        self._loading: dict[Queue, trio.Event] = {}
        loop = self._loop = CommitLoop(store, self.registry, rights, self._stop_consumers)
        self.commits: QueueCommit = loop.commits
        # The loop's own methods: a call more for each message would be felt.
        self.now: Callable[[], float] = loop.now
        """The clock of deadlines: trio's, in seconds."""
        self.wall_us: Callable[[], int] = loop.wall_us
        """Unix microseconds that never go back in this process."""
        self.changed: Callable[[], None] = loop.changed
        """Wake the loop: there may be changes to commit or messages to deliver."""
        self.when_durable: Callable[[Callable[[], None]], None] = loop.when_durable
        """Call something when all changes until now, except publishes, are durable."""
        self.inspector: QueueInspector = QueueInspector(self)
        """Describes queues and messages."""
        self.dead_letters: DeadLetters = DeadLetters(self, self._pending)
        self.simple: SimpleReceivers = SimpleReceivers(self)
        """The receivers: messages that simple consumers hold, without a subscription."""

    def trace_to(self, log: TraceLog | None) -> None:
        """Write events to this trace from now on; None ends that."""
        self._loop.trace_to(log)

    async def open(self) -> None:
        """Open the store and read the names of its queues; none is loaded. Raises StoreError."""
        await self._loop.open()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Commit, deliver and read until cancelled."""
        await self._loop.run(task_status=task_status)

    def lose(self, error: Dep2pError) -> None:
        """End: another node owns the store. Nothing is written or delivered any more, and all waiters get the error."""
        self._loop.lose(error)

    async def flush(self) -> None:
        """Return when all changes until now are durable, except publishes, whose callers wait themselves.

        Raises StoreError when a write fails now; the loop tries it again.
        """
        await self._loop.flush()

    async def call(self, function: Callable[..., T], *arguments: object) -> T:
        """Run a function in the store's thread, after the work that is there."""
        return await self._loop.call(function, *arguments)

    async def aclose(self) -> None:
        """After `run`: write what was taken, close the store, and end the consumers that are left. Idempotent."""
        await self._loop.aclose()
        for consumer in list(self._consumers.values()):
            consumer.stop_because("this node is closed")

    def _stop_consumers(self, error: Dep2pError) -> None:
        for consumer in list(self._consumers.values()):
            consumer.stop(error)

    @property
    def lost(self) -> Dep2pError | None:
        """The reason why this engine has ended: another node owns the store."""
        return self._loop.lost

    @property
    def consumers_max(self) -> int:
        """The most consumers and receivers at once."""
        return self._bounds.consumers_max

    # Queues

    def queue_names(self, namespace: str) -> list[str]:
        """List the names of a namespace's queues, sorted."""
        return self.registry.names(namespace)

    def namespaces(self) -> list[str]:
        """List the namespaces that have queues."""
        return sorted({namespace: None for namespace, _name in self.registry.queues})

    def options_from(self, given: Mapping[str, object]) -> QueueOptions:
        """Make options: the given ones over the node's defaults."""
        return options_from(given, self.defaults)

    async def create_queue(
        self, namespace: str, name: str, options: QueueOptions | None = None, made_by: str = ""
    ) -> None:
        """Make a queue; durable on return. A queue that is there with the same options stays as it is."""
        if len(self.registry.queues) >= self._bounds.queues_max:
            raise QueueFullError(f"this node keeps {len(self.registry.queues)} queues: no more")
        queue = self.registry.create(namespace, name, options or self.defaults, made_by)
        await self.flush()
        if queue.options.ttl_s and not queue.is_deleted:
            self._loop.expire(queue)

    async def delete_queue(self, namespace: str, name: str) -> None:
        """Delete a queue with all its messages."""
        queue = await self.loaded(namespace, name)
        self.registry.delete(queue)
        await self.flush()

    async def create_channel(
        self,
        namespace: str,
        name: str,
        channel: str,
        *,
        from_start: bool = False,
        filter_text: str = "",
        exclusive: bool = False,
    ) -> None:
        """Make a channel; durable on return. A channel that is there stays as it is.

        Raises ``ValueError`` (name, filter), QueueExistsError when it is there with another filter or strategy.
        """
        queue = await self.loaded(namespace, name)
        _channel(queue, channel, from_start, filter_text, exclusive=exclusive)
        await self.flush()

    async def expand(self, namespace: str, name: str, partitions: int) -> list[int]:
        """Expand a queue to this number of partitions in all. Return the ids of the new ones, when they are durable.

        Raises ``ValueError`` when it has more already, or for too many.
        """
        queue = await self.loaded(namespace, name)
        there = len(queue.partition_ids)
        if partitions < there:
            raise ValueError(f"the queue {name!r} has {there} partitions: it can only get more, not {partitions}")
        added = queue.expand(partitions - there) if partitions > there else []
        await self.flush()
        return added

    async def serve(self, namespace: str, name: str, low: int, high: int) -> int:
        """The queue is a shard of that range of keys of a distributed one from now on; gives the last number it has
        given, when that is durable. Raises ``ValueError`` for more than it has."""
        last_seq = (await self.loaded(namespace, name)).serve(low, high)
        await self.flush()
        return last_seq

    async def delete_channel(self, namespace: str, name: str, channel: str) -> None:
        """Delete a channel with its dead letters."""
        (await self.loaded(namespace, name)).delete_channel(channel)
        await self.flush()

    async def pause(self, namespace: str, name: str, channel: str | None = None) -> None:
        """Pause delivery in one channel or in all."""
        (await self.loaded(namespace, name)).set_paused(True, channel)
        await self.flush()

    async def resume(self, namespace: str, name: str, channel: str | None = None) -> None:
        """Resume delivery."""
        (await self.loaded(namespace, name)).set_paused(False, channel)
        await self.flush()

    async def empty(self, namespace: str, name: str, channel: str | None = None) -> int:
        """Drop the messages that wait; return how many."""
        queue = await self.loaded(namespace, name)
        dropped = queue.empty() if channel is None else queue.channel(channel).skip_all()
        await self.flush()
        return dropped

    async def loaded(self, namespace: str, name: str) -> Queue:
        """Return a queue with its state in memory. Raises QueueNotFoundError."""
        queue = self.registry.find(namespace, name)
        while not queue.is_loaded:
            under_way = self._loading.get(queue)
            if under_way is not None:
                await under_way.wait()
                continue
            done = self._loading[queue] = trio.Event()
            try:
                records = {each: await self.call(self.store.load_partition, each) for each in queue.partition_ids}
                self.registry.at(self.wall_us())
                self.registry.load(queue, records)
                if queue.options.ttl_s:
                    self._loop.expire(queue)
            finally:
                del self._loading[queue]
                done.set()
        return queue

    def load_soon(self, queues: Sequence[tuple[str, str]]) -> None:
        """Load queues, by namespace and name, one after the other, beside everything else."""
        nursery = self._loop.nursery
        if nursery is not None and queues:
            nursery.start_soon(run_contained, partial(self._load_each, queues), "loading the queues of a member")

    async def _load_each(self, queues: Sequence[tuple[str, str]]) -> None:
        for namespace, name in queues:
            try:
                await self.loaded(namespace, name)
            except (
                Dep2pError
            ) as error:  # deleted meanwhile, or a store that cannot read now: its own callers hear of it
                logger.debug("the queue %r was not loaded: %s", name, error)

    # Publishing

    async def publish(
        self,
        namespace: str,
        name: str,
        messages: Sequence[NewMessage],
        *,
        timeout_s: float | None = None,
        publisher: tuple[bytes, int] | None = None,
    ) -> list[tuple[int, int]]:
        """Publish all messages or none. Return the ids, as (partition, seq), when all are durable.

        Waits for room, at most ``timeout_s`` seconds (forever when None; 0 does not wait), then raises QueueFullError.
        Cancelled, it may or may not have been taken: with a ``publisher`` it can be repeated without harm.
        """
        queue = self.registry.queues.get((namespace, name))
        if queue is None or not queue.is_loaded:
            queue = await self.loaded(namespace, name)
        items = len(messages)
        size = len(messages[0][0]) if items == 1 else sum([len(message[0]) for message in messages])
        publish = WaitedPublish(self._pending, items, size)
        deadline: float | None = None
        while True:
            try:
                self._take(queue, messages, size, publish.repeats, publisher, publish)
                break
            except QueueFullError:
                if deadline is None:
                    deadline = float("inf") if timeout_s is None else trio.current_time() + timeout_s
                if trio.current_time() >= deadline or (
                    items > queue.options.items_max or size > queue.options.bytes_max
                ):
                    raise
                with trio.move_on_at(deadline):
                    await self._loop.room.park()
                if queue.is_deleted:
                    queue = await self.loaded(namespace, name)
        return await publish.wait()

    def _take(
        self,
        queue: Queue,
        messages: Sequence[NewMessage],
        size: int,
        on_done: Callable[[PendingPublish], None],
        publisher: tuple[bytes, int] | None,
        publish: PendingPublish | None = None,
    ) -> None:
        if self._loop.is_closing:
            self._loop.require_open()
        bounds, pending = self._bounds, self._pending
        if pending.items >= bounds.pending_items_max or (
            pending.bytes and pending.bytes + size > bounds.pending_bytes_max
        ):
            raise QueueFullError("too much is waiting to become durable on this node")
        pending.items += len(messages)
        pending.bytes += size
        try:
            queue.publish(messages, on_done, wall_us=self.wall_us(), publisher=publisher, publish=publish)
        except BaseException:
            pending.items -= len(messages)
            pending.bytes -= size
            raise
        if not self.commits.is_kicked:
            self.commits.kick()

    def publish_soon(
        self,
        namespace: str,
        name: str,
        messages: Sequence[NewMessage],
        publisher: tuple[bytes, int] | None,
        on_done: OnPublished,
    ) -> None:
        """Like `publish` without waiting: raises QueueFullError at once, and calls ``on_done`` when it is durable."""
        queue = self.registry.find(namespace, name)
        nursery = self._loop.nursery
        if nursery is None:
            self._loop.require_open()
            raise StreamClosedError("the queues are closed")
        if not queue.is_loaded:
            nursery.start_soon(self._load_and_publish, namespace, name, messages, publisher, on_done)
            return
        size = sum([len(message.body) for message in messages])
        pending = self._pending
        is_notified = False

        def done(publish: PendingPublish) -> None:
            nonlocal is_notified
            if is_notified:
                return
            is_notified = True
            pending.items -= len(messages)
            pending.bytes -= size
            error = publish.error
            if error is None:
                on_done(publish.points(), None)
            else:
                on_done((), error if isinstance(error, Dep2pError) else StoreError(str(error)))

        self._take(queue, messages, size, done, publisher)

    async def _load_and_publish(
        self,
        namespace: str,
        name: str,
        messages: Sequence[NewMessage],
        publisher: tuple[bytes, int] | None,
        on_done: OnPublished,
    ) -> None:
        try:
            await self.loaded(namespace, name)
            self.publish_soon(namespace, name, messages, publisher, on_done)
        except Dep2pError as error:
            on_done((), error)
        except ValueError as error:
            on_done((), ProtocolError(str(error)))
        except Exception:  # of one publisher: the queues of all others go on
            logger.exception("a publish to %r failed", name)
            on_done((), StoreError("an internal error: the log of the broker has it"))

    # Consuming

    async def subscribe(
        self,
        namespace: str,
        name: str,
        channel: str,
        options: SubscribeOptions = _DEFAULTS,
        *,
        msg_timeout_s: float | None = None,
        owner: str = "local",
        member: bytes = b"",
    ) -> LocalConsumer:
        """Open a consumer of a channel, which is made when it is new. The caller closes it.

        ``options.max_in_flight`` may be 0 until `LocalConsumer.set_ready`. ``msg_timeout_s`` is the queue's when
        None. ``owner``: human-readable. With a ``member`` the channel is exclusive, and the consumer (a
        `BrokerGroupMember`) is one link of that member. ``options.of_distributed``: it is of a distributed queue,
        whose controller alone makes and deletes channels: one that is not there is none that is new, unless it is
        ephemeral. Raises ChannelNotFoundError then. Raises QueueIsDistributedError, ``ValueError`` (name, filter),
        QueueExistsError when the channel is there with another filter than a given one, or is shared where an
        exclusive one is wanted, or the other way round.
        """
        if len(self._consumers) >= self._bounds.consumers_max:
            raise QueueFullError(f"{len(self._consumers)} consumers are connected: no more")
        queue = await self.loaded(namespace, name)
        if queue.locations and not options.of_distributed:
            raise QueueIsDistributedError(
                f"the partitions of the queue {name!r} are on several nodes: consume from those"
            )
        is_new = channel not in queue.channels
        if is_new and options.of_distributed and not is_ephemeral(channel):
            queue.channel(channel)
        found = _channel(queue, channel, options.from_start, options.filter, exclusive=bool(member))
        if is_new:
            await self.flush()
        timeout_s = queue.options.msg_timeout_s if msg_timeout_s is None else msg_timeout_s
        self._consumer_number += 1
        name = f"{owner} #{self._consumer_number}"
        timeout_s = min(timeout_s, queue.options.msg_timeout_max_s)
        size = options.bytes_max or _BYTES_MAX
        consumer: LocalConsumer
        if isinstance(found, ExclusiveChannel):
            consumer = BrokerGroupMember(
                self, found, name, member, ConsumerWindow(options.max_in_flight, size, timeout_s)
            )
        else:
            consumer = LocalConsumer(self, found, name, ConsumerWindow(options.max_in_flight, size, timeout_s))
        self._loop.require_open()
        if queue.is_deleted or queue.channels.get(channel) is not found:
            raise ChannelNotFoundError(f"the channel {channel!r} was deleted just now")
        found.attach(consumer.core)
        self._consumers[consumer.consumer_id] = consumer
        self.changed()
        return consumer

    async def subscribe_exclusive(
        self,
        namespace: str,
        name: str,
        channel: str,
        options: SubscribeOptions = _DEFAULTS,
    ) -> ExclusiveConsumer:
        """Open a consumer of an exclusive channel, for a program of this node. The caller closes it."""
        kept = await self.subscribe(
            namespace,
            name,
            channel,
            options,
            member=secrets.token_bytes(MEMBER_BYTES),
        )
        assert isinstance(kept, BrokerGroupMember)
        if self._loop.nursery is None:
            await kept.aclose()
            raise StreamClosedError("the queues are closed")
        port = LocalPort(kept, self.when_durable)
        self._loop.nursery.start_soon(run_contained, port.run, "a consumer of an exclusive channel")
        return port.consumer

    def detach(self, channel: Channel, consumer: AttachedConsumer) -> None:
        """Release the messages of a consumer that is gone."""
        self._consumers.pop(consumer.consumer_id, None)
        self.registry.at(self.wall_us())
        consumer.detach(trio.current_time())
        queue = self.registry.queues.get((channel.queue.namespace, channel.queue.name))
        if queue is not None and is_ephemeral(channel.name) and not channel.consumers and queue.has_channel(channel):
            queue.delete_channel(channel.name)
            if queue.is_ephemeral and not queue.channels:
                self.registry.delete(queue)
        self.changed()

    # Reporting

    def statistics(self) -> dict[str, Any]:
        """Counts of all queues, and of the store."""
        store = self.store.statistics()
        return {
            "queues": len(self.registry.queues),
            "loaded": sum(queue.is_loaded for queue in self.registry.queues.values()),
            "consumers": len(self._consumers),
            "pending_items": self._pending.items,
            "pending_bytes": self._pending.bytes,
            "cached_bytes": self.registry.cache.bytes,
            "bytes_on_disk": store.bytes_on_disk,
            "commits": store.commits,
            "fsyncs": store.fsyncs,
            "rows_written": store.rows_written,
            "problem": self.commits.error_text or self._loop.read_problem,
        }


def _channel(queue: Queue, name: str, from_start: bool, filter_text: str, *, exclusive: bool) -> Channel:
    """Return the channel. A filter that is given must be the channel's own, or the consumer would get messages that it
    did not ask for."""
    found = queue.create_channel(name, from_start=from_start, filter_text=filter_text, exclusive=exclusive)
    if found.is_exclusive != exclusive:
        raise QueueExistsError(
            f"the channel {name!r} of {queue.name!r} is "
            + ("exclusive: consume it so, too (--fifo)" if found.is_exclusive else "shared, not exclusive")
            + "; this is chosen when a channel is made and stays so: take another channel, or delete this one first"
        )
    has = found.filter.text if found.filter is not None else ""
    if filter_text and has != filter_text:
        raise QueueExistsError(
            f"the channel {name!r} of {queue.name!r} is there with "
            + (f"the filter {has!r}" if has else "no filter")
            + ": take another channel, or delete this one first"
        )
    return found
