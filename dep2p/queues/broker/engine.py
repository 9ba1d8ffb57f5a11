"""The durable queues of one node: the pure core, bound to a store and to time.

One engine for a node and all its realms; a namespace is a realm's id, or "" for what only programs of this machine
reach.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import trio

from dep2p.errors import (
    ChannelNotFoundError,
    Dep2pError,
    QueueExistsError,
    QueueFullError,
    QueuePlacedError,
    StoreError,
    StreamClosedError,
)
from dep2p.protocols.queues.channel import Channel
from dep2p.protocols.queues.exclusive_channel import ExclusiveChannel
from dep2p.protocols.queues.message import NewMessage
from dep2p.protocols.queues.names import is_ephemeral
from dep2p.protocols.queues.options import QueueOptions, options_from
from dep2p.protocols.queues.queue import Publish, Queue
from dep2p.protocols.queues.registry import QueueBook
from dep2p.protocols.queues.wire_exclusive import MEMBER_BYTES
from dep2p.queues.access import Rights
from dep2p.queues.broker.exclusive_consumer import KeptMember
from dep2p.queues.broker.inspector import DeadLetter, QueueReader, StoredMessage
from dep2p.queues.broker.local_consumer import LocalConsumer
from dep2p.queues.broker.queue_engine_looking import EngineLooking, Pending, WaitedPublish
from dep2p.queues.broker.receive import SimpleReceivers
from dep2p.queues.ordered_consumer import ExclusiveConsumer
from dep2p.queues.remote.exclusive_port import LocalPort
from dep2p.storage.queue_store import QueueStore

_BYTES_MAX: Final = 67_108_864

OnPublished = Callable[[Sequence[tuple[int, int]], Dep2pError | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBounds:
    """What waits to become durable, of all queues together; above it publishers wait, and members are refused."""

    pending_bytes_max: int = 67_108_864
    pending_items_max: int = 65_536
    queues_max: int = 100_000
    consumers_max: int = 10_000


class QueueEngine(EngineLooking):
    """Everything but `run` may be called while `run` runs in another task of the same trio thread.

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
        book: QueueBook | None = None,
    ) -> None:
        super().__init__(store, book or QueueBook(), rights)
        self.defaults = defaults or QueueOptions()
        """For queues whose maker says nothing else."""
        self._bounds = bounds or EngineBounds()
        self._pending = Pending()
        self._consumers: dict[str, LocalConsumer] = {}
        self._consumer_number = 0
        self._loading: dict[Queue, trio.Event] = {}
        self._reader = QueueReader(self)
        self.simple = SimpleReceivers(self)
        """What was received by calls, without a subscription."""

    async def aclose(self) -> None:
        """Also ends the consumers that are left."""
        await super().aclose()
        for consumer in list(self._consumers.values()):
            consumer.stop_because("this node is closed")

    def lose(self, error: Dep2pError) -> None:
        super().lose(error)
        for consumer in list(self._consumers.values()):
            consumer.stop(error)

    @property
    def consumers_max(self) -> int:
        """Consumers at once, and askers that receive by calls."""
        return self._bounds.consumers_max

    # Room

    # Queues

    def queue_names(self, namespace: str) -> list[str]:
        """Sorted."""
        return self.book.names(namespace)

    def namespaces(self) -> list[str]:
        """Those with queues."""
        return sorted({namespace: None for namespace, _name in self.book.queues})

    def options_from(self, given: Mapping[str, object]) -> QueueOptions:
        """Over the node's defaults."""
        return options_from(given, self.defaults)

    async def create_queue(
        self, namespace: str, name: str, options: QueueOptions | None = None, made_by: str = ""
    ) -> None:
        """Durable on return. One that is there with the same options is left as it is."""
        if len(self.book.queues) >= self._bounds.queues_max:
            raise QueueFullError(f"this node keeps {len(self.book.queues)} queues: no more")
        queue = self.book.create(namespace, name, options or self.defaults, made_by)
        await self.flush()
        if queue.options.ttl_s and not queue.is_deleted:
            self._ttl_queues[queue] = None
            self._timer.cancel()

    async def delete_queue(self, namespace: str, name: str) -> None:
        """With all that is in it."""
        queue = await self.loaded(namespace, name)
        self.book.delete(queue)
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
        """Durable on return. One that is there is left as it is.

        Raises ``ValueError`` (name, filter), QueueExistsError when it is there with another filter or strategy.
        """
        queue = await self.loaded(namespace, name)
        _channel(queue, channel, from_start, filter_text, exclusive=exclusive)
        await self.flush()

    async def expand(self, namespace: str, name: str, partitions: int) -> list[int]:
        """So many partitions in all from now on; returns the ids of the new ones, when they are durable.

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
        """The queue is a share of that range of keys of a placed one from now on; gives the last number it has given,
        when that is durable. Raises ``ValueError`` for more than it has."""
        last_seq = (await self.loaded(namespace, name)).serve(low, high)
        await self.flush()
        return last_seq

    async def delete_channel(self, namespace: str, name: str, channel: str) -> None:
        """With its dead letters."""
        (await self.loaded(namespace, name)).delete_channel(channel)
        await self.flush()

    async def pause(self, namespace: str, name: str, channel: str | None = None) -> None:
        """Deliver nothing, in one channel or in all."""
        (await self.loaded(namespace, name)).set_paused(True, channel)
        await self.flush()

    async def resume(self, namespace: str, name: str, channel: str | None = None) -> None:
        """Deliver again."""
        (await self.loaded(namespace, name)).set_paused(False, channel)
        await self.flush()

    async def empty(self, namespace: str, name: str, channel: str | None = None) -> int:
        """Drop what waits; gives how many messages."""
        queue = await self.loaded(namespace, name)
        dropped = queue.empty() if channel is None else queue.channel(channel).skip_all()
        await self.flush()
        return dropped

    async def loaded(self, namespace: str, name: str) -> Queue:
        """The queue, with its state in memory. Raises QueueNotFoundError."""
        queue = self.book.find(namespace, name)
        while not queue.is_loaded:
            under_way = self._loading.get(queue)
            if under_way is not None:
                await under_way.wait()
                continue
            done = self._loading[queue] = trio.Event()
            try:
                records = {each: await self.call(self.store.load_partition, each) for each in queue.partition_ids}
                self.book.at(self.wall_us())
                self.book.load(queue, records)
                if queue.options.ttl_s:
                    self._ttl_queues[queue] = None
            finally:
                del self._loading[queue]
                done.set()
        return queue

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
        """All or none; returns the ids, as (partition, seq), when all are durable.

        Waits for room, at most ``timeout_s`` seconds (for ever when None; 0 does not wait), then raises QueueFullError.
        Cancelled, it may or may not have been taken: with a ``publisher`` it can be repeated without harm.
        """
        queue = self.book.queues.get((namespace, name))
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
                    await self._room.park()
                if queue.is_deleted:
                    queue = await self.loaded(namespace, name)
        return await publish.wait()

    def _take(
        self,
        queue: Queue,
        messages: Sequence[NewMessage],
        size: int,
        on_done: Callable[[Publish], None],
        publisher: tuple[bytes, int] | None,
        publish: Publish | None = None,
    ) -> None:
        if self._closing:
            self._require_open()
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
        queue = self.book.find(namespace, name)
        nursery = self._nursery
        if nursery is None:
            self._require_open()
            raise StreamClosedError("the queues are closed")
        if not queue.is_loaded:
            nursery.start_soon(self._load_and_publish, namespace, name, messages, publisher, on_done)
            return
        size = sum([len(message.body) for message in messages])
        pending = self._pending
        is_told = False

        def done(publish: Publish) -> None:
            nonlocal is_told
            if is_told:
                return
            is_told = True
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

    # Consuming

    async def subscribe(
        self,
        namespace: str,
        name: str,
        channel: str,
        *,
        max_in_flight: int = 1,
        bytes_max: int | None = None,
        from_start: bool = False,
        filter_text: str = "",
        msg_timeout_s: float | None = None,
        owner: str = "local",
        member: bytes = b"",
        of_placed: bool = False,
    ) -> LocalConsumer:
        """A consumer of a channel, which is made when it is new. The caller closes it.

        ``max_in_flight`` may be 0 until `LocalConsumer.set_ready`. ``msg_timeout_s`` is the queue's when None.
        ``owner`` is for people. With a ``member`` the channel is exclusive, and the consumer (a `KeptMember`) is one
        link of that member. ``of_placed``: it is of a placed queue, whose home alone makes and deletes channels: one
        that is not there is none that is new, unless it is ephemeral. Raises ChannelNotFoundError then.
        Raises QueuePlacedError, ``ValueError`` (name, filter), QueueExistsError when the channel is there with another
        filter than a given one, or is shared where an exclusive one is wanted, or the other way round.
        """
        if len(self._consumers) >= self._bounds.consumers_max:
            raise QueueFullError(f"{len(self._consumers)} consumers are connected: no more")
        queue = await self.loaded(namespace, name)
        if queue.places and not of_placed:
            raise QueuePlacedError(f"the partitions of the queue {name!r} are on several nodes: consume from those")
        is_new = channel not in queue.channels
        if is_new and of_placed and not is_ephemeral(channel):
            queue.channel(channel)
        found = _channel(queue, channel, from_start, filter_text, exclusive=bool(member))
        if is_new:
            await self.flush()
        timeout_s = queue.options.msg_timeout_s if msg_timeout_s is None else msg_timeout_s
        self._consumer_number += 1
        name = f"{owner} #{self._consumer_number}"
        timeout_s = min(timeout_s, queue.options.msg_timeout_max_s)
        size = bytes_max or _BYTES_MAX
        consumer: LocalConsumer
        if isinstance(found, ExclusiveChannel):
            consumer = KeptMember(
                self, found, name, member, max_in_flight=max_in_flight, bytes_max=size, msg_timeout_s=timeout_s
            )
        else:
            consumer = LocalConsumer(
                self, found, name, max_in_flight=max_in_flight, bytes_max=size, msg_timeout_s=timeout_s
            )
        self._require_open()
        if queue.is_deleted or queue.channels.get(channel) is not found:
            raise ChannelNotFoundError(f"the channel {channel!r} was deleted just now")
        found.attach(consumer.core)
        self._consumers[consumer.core.id] = consumer
        self.changed()
        return consumer

    async def subscribe_exclusive(
        self,
        namespace: str,
        name: str,
        channel: str,
        *,
        max_in_flight: int = 1,
        bytes_max: int | None = None,
        from_start: bool = False,
        filter_text: str = "",
        of_placed: bool = False,
    ) -> ExclusiveConsumer:
        """A consumer of an exclusive channel, for a program of this node. The caller closes it."""
        kept = await self.subscribe(
            namespace,
            name,
            channel,
            max_in_flight=max_in_flight,
            bytes_max=bytes_max,
            from_start=from_start,
            filter_text=filter_text,
            member=secrets.token_bytes(MEMBER_BYTES),
            of_placed=of_placed,
        )
        assert isinstance(kept, KeptMember)
        if self._nursery is None:
            await kept.aclose()
            raise StreamClosedError("the queues are closed")
        port = LocalPort(kept, self.when_durable)
        self._nursery.start_soon(port.run)
        return port.consumer

    def detach(self, channel: Channel, consumer: LocalConsumer) -> None:
        """A consumer is gone: what it held goes to others."""
        self._consumers.pop(consumer.core.id, None)
        self.book.at(self.wall_us())
        consumer.detach(trio.current_time())
        queue = channel.queue
        if is_ephemeral(channel.name) and not channel.consumers and queue.channels.get(channel.name) is channel:
            queue.delete_channel(channel.name)
            if queue.is_ephemeral and not queue.channels and not queue.is_deleted:
                self.book.delete(queue)
        self.changed()

    # Telling

    def statistics(self) -> dict[str, Any]:
        """Counts of all queues, and of the store."""
        store = self.store.statistics()
        return {
            "queues": len(self.book.queues),
            "loaded": sum(queue.is_loaded for queue in self.book.queues.values()),
            "consumers": len(self._consumers),
            "pending_items": self._pending.items,
            "pending_bytes": self._pending.bytes,
            "cached_bytes": self.book.cache.bytes,
            "bytes_on_disk": store.bytes_on_disk,
            "commits": store.commits,
            "fsyncs": store.fsyncs,
            "rows_written": store.rows_written,
            "problem": self.commits.trouble or self.read_problem,
        }


__all__ = ["DeadLetter", "EngineBounds", "QueueEngine", "StoredMessage"]


def _channel(queue: Queue, name: str, from_start: bool, filter_text: str, *, exclusive: bool) -> Channel:
    """The channel; a filter that is given is the channel's own, or the consumer would get what it did not ask for."""
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
