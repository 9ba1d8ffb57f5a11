"""The calls on the queues of one broker: this node, or another member."""

from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from pathlib import Path
from typing import Final, Unpack

from msgspec import convert

from dep2p.arguments import checks_arguments, unchecked
from dep2p.protocols.queues.admin import (
    AccessChange,
    ChannelConsumers,
    ChannelLocks,
    CreateChannel,
    CreateQueue,
    DeadLetterInfo,
    DeleteChannel,
    DeleteDeadLetters,
    DeleteQueue,
    DescribeQueue,
    DescribeRoute,
    EmptyQueue,
    ExpandQueue,
    ExportMessages,
    ListConsumers,
    ListDeadLetters,
    ListLocks,
    ListQueues,
    MessageInfo,
    OptionValue,
    PauseQueue,
    PeekMessages,
    PendingDeletion,
    QueueExpanded,
    QueueInfo,
    QueueRoute,
    QueueSummary,
    ReplayDeadLetters,
    ResumeQueue,
)
from dep2p.protocols.queues.attributes import encode_options
from dep2p.protocols.queues.clients.producer import Order
from dep2p.protocols.queues.clients.push_consumer import Mode
from dep2p.protocols.queues.clients.settings import ConsumerOptions, ConsumerSettings, ProducerOptions, ProducerSettings
from dep2p.protocols.queues.names import message_id
from dep2p.protocols.queues.options import (
    DEFAULT_IN_FLIGHT,
    Access,
    ConsumeOptions,
    MessageOptions,
    QueueOptions,
    options_as_dict,
)
from dep2p.protocols.queues.wire.frames import WireMessage
from dep2p.queues.api.broker import QueueBroker
from dep2p.queues.api.outbox import OutboxRelay
from dep2p.queues.api.producer import Producer
from dep2p.queues.api.push_consumer import Handler, PushConsumer
from dep2p.queues.api.simple_consumer import SimpleConsumer
from dep2p.queues.consumer import Messages
from dep2p.queues.types import SubscribeOptions, node_names
from dep2p.storage.app_outbox import DEFAULT_TABLE, SqlConnection, publish_in

EXPORT_ITEMS: Final = 256


@checks_arguments
class Queues(QueueBroker):
    """The queues of one broker. Answers are plain values, those of the control API (docs/reference/control-api.md).

    Everything raises QueueAccessError where the owner does not allow it, and for another member's queues what a request
    raises: PeerNotFoundError, NotMemberError, RequestTimeoutError, StreamClosedError.
    """

    # Publishing

    async def publish(
        self,
        name: str,
        body: bytes,
        *,
        timeout_s: float | None = None,
        **options: Unpack[MessageOptions],
    ) -> str:
        """Publish one message; returns its id when it is durable.

        ``options`` are those of :class:`MessageOptions`: ``key``, ``tags``, ``priority``, ``delay_s`` and ``headers``.
        Messages with the same ``key`` go to the same partition. It is delivered after ``delay_s``, counted from the
        publish. Waits while the queue is full, at most ``timeout_s`` (without end when None; another member's queue:
        ``Limits.request_timeout_s``), then raises QueueFullError. Raises QueueNotFoundError, MessageTooLargeError,
        StoreFullError, StoreError. When it is cancelled or times out for another reason, whether the message was taken
        is not known.
        """
        attributes = encode_options(**options) if options else b""
        ((partition, seq),) = await self.publish_batch(name, [WireMessage(attributes, body)], timeout_s)
        return message_id(partition, seq)

    async def publish_many(
        self,
        name: str,
        bodies: Sequence[bytes],
        *,
        timeout_s: float | None = None,
        **options: Unpack[MessageOptions],
    ) -> list[str]:
        """Publish some messages, all or none; as :meth:`publish` for the rest."""
        if not bodies:
            return []
        attributes = encode_options(**options) if options else b""
        points = await self.publish_batch(name, [WireMessage(attributes, body) for body in bodies], timeout_s)
        return [message_id(partition, seq) for partition, seq in points]

    def producer(
        self,
        name: str,
        *,
        order: Order = "best_effort",
        other_brokers: Sequence["Queues"] = (),
        **settings: Unpack[ProducerOptions],
    ) -> AbstractAsyncContextManager[Producer]:
        """Send with retries, and in key queues, while the block runs::

            async with queues.producer("orders", order="strict") as producer:
                await producer.publish(b"paid", key="customer 7")

        ``other_brokers``: other brokers that have a queue of this name; messages without a key go to each in turn, a
        key belongs to one of them, and in best-effort order a message may go to another one when its own fails.
        ``settings`` are those of :class:`ProducerSettings`. Raises ``ValueError`` for a setting.
        """
        return Producer([self, *other_brokers], name, ProducerSettings(order=order, **settings)).working()

    def relay(
        self, address: str | Path, *, table: str = DEFAULT_TABLE, poll_s: float = 0.2
    ) -> AbstractAsyncContextManager[OutboxRelay]:
        """Put what apps published in their own transactions (`dep2p.storage.app_outbox.publish_in`) into the queues
        of this broker, exactly once, while the block runs.

        ``address``: the app's database, a file of SQLite or ``postgresql://…``; ``table``: its outbox, which is made if
        it is not there; ``poll_s``: the time between two looks at it. Raises ``ValueError``, and what the database
        raises when it cannot be opened.
        """
        return OutboxRelay(self, address, table=table, poll_s=poll_s).working()

    # Consuming

    def consume(
        self,
        name: str,
        channel: str,
        **options: Unpack[ConsumeOptions],
    ) -> AbstractAsyncContextManager[Messages]:
        """Take messages: ``async with queues.consume("jobs", "workers") as messages: async for m in messages: …``.

        The channel is made when it is new; then it gets what is published from now on, or everything that is there
        (``from_start``). The first channel of a queue always gets everything. At most ``max_in_flight`` messages, and
        about ``bytes_max`` bytes, are held without a result. After ``count`` messages the loop ends, and no more are
        taken. What is held when the block ends goes to others at once. A new channel gets only what its ``filter`` lets
        through: ``tag in (a, b) and header.size != 3``.

        ``exclusive``: the channel gives each partition to one consumer at a time, and of each key one message at a
        time, in their order (docs/howto/consumers.md); work on a message in its ``scope()``. Whether a channel is
        exclusive is chosen when it is made.

        Raises QueueNotFoundError, ``ValueError`` (ProtocolError from another member) for a malformed filter,
        QueueExistsError when the channel is there with another one, or is (not) exclusive; later, while iterating,
        QueueConsumerClosedError when queue or channel is deleted.
        """
        return self._consume(name, channel, options.get("count"), _subscribe_options(**options))

    @asynccontextmanager
    async def _consume(
        self, name: str, channel: str, count: int | None, options: SubscribeOptions
    ) -> AsyncGenerator[Messages, None]:
        consumer = await self.open_consumer(name, channel, options)
        async with consumer:
            yield Messages(consumer, count)

    def consumer(
        self, name: str, group: str, handler: Handler, *, mode: Mode = "normal", **settings: Unpack[ConsumerOptions]
    ) -> AbstractAsyncContextManager[PushConsumer]:
        """Call ``handler(message)`` for each message of a channel (consumer group) while the block runs::

            async with queues.consumer("orders", "billing", handle, mode="fifo", concurrency=8):
                await trio.sleep_forever()

        ``settings`` are those of :class:`ConsumerSettings`. A handler that returns finishes its message; one that
        raises has it tried again, and after the last attempt it becomes a dead letter. A message is renewed while its
        handler runs, and the handler is cancelled when the message is lost all the same. In ``fifo`` mode messages with
        the same order key are handled one after the other, in the order of publishing.

        Raises QueueNotFoundError, ``ValueError`` (a setting, a filter), QueueExistsError (a channel of another kind);
        when the block ends, QueueConsumerClosedError if the queue or channel was deleted meanwhile.
        """
        return PushConsumer(self, name, group, handler, ConsumerSettings(mode=mode, **settings)).working()

    def simple_consumer(self, name: str, group: str) -> SimpleConsumer:
        """receive, ack and change_invisible on a channel, as calls; see :class:`SimpleConsumer`."""
        return SimpleConsumer(self, name, group)

    # Administration

    async def create(
        self,
        name: str,
        options: QueueOptions | Mapping[str, OptionValue] | None = None,
        *,
        access: Access | None = None,
        nodes: Sequence[str] = (),
    ) -> "QueueHandle":
        """Make a queue; one that is there with the same options is taken as it is.

        ``nodes``: peer ids of members of the realm (or "self", the node that is asked), which keep its partitions, in
        turn; by default the node that is asked keeps all. Raises what a request to one of them raises.

        Raises QueueExistsError when it is there with others, ``ValueError`` (ProtocolError from another member) for a
        malformed name or option.
        """
        if isinstance(options, QueueOptions):
            options = options_as_dict(options)
        change = None
        if access is not None:
            change = convert(
                {right: who if isinstance(who, str) else tuple(who) for right, who in access.items()}, AccessChange
            )
        await self.ask(
            CreateQueue(queue=name, options=dict(options or {}), access=change, nodes=tuple(node_names(nodes)))
        )
        return QueueHandle(self, name)

    def queue(self, name: str) -> "QueueHandle":
        """Return a handle of a queue. The queue need not be there."""
        return QueueHandle(self, name)

    async def listing(self) -> list[QueueSummary]:
        """All queues in numbers."""
        return list((await self.ask(ListQueues())).queues)

    async def info(self, name: str) -> QueueInfo:
        """Options, access, counts and channels. Raises QueueNotFoundError."""
        return await self.ask(DescribeQueue(queue=name))

    async def delete(self, name: str, *, force: bool = False) -> list[PendingDeletion]:
        """Delete a queue with all that is in it. Raises QueueNotFoundError.

        A queue on several nodes is deleted when all of them are there, and is left as it is otherwise; ``force``
        deletes it without those that are away, and returns the shards that are left on them.
        """
        return list((await self.ask(DeleteQueue(queue=name, force=force))).pending_deletions or ())

    async def create_channel(
        self, name: str, channel: str, *, from_start: bool = False, filter: str = "", exclusive: bool = False
    ) -> None:
        """Make a channel before its first consumer comes. Idempotent. Raises what `consume` raises."""
        await self.ask(
            CreateChannel(queue=name, channel=channel, from_start=from_start, filter=filter, exclusive=exclusive)
        )

    async def delete_channel(self, name: str, channel: str) -> None:
        """Delete a channel with its dead letters. Raises QueueNotFoundError, ChannelNotFoundError."""
        await self.ask(DeleteChannel(queue=name, channel=channel))

    async def pause(self, name: str, channel: str) -> None:
        """Deliver nothing to a channel from now on. This outlives restarts."""
        await self.ask(PauseQueue(queue=name, channel=channel))

    async def pause_all(self, name: str) -> None:
        """Deliver nothing of a queue from now on. This outlives restarts."""
        await self.ask(PauseQueue(queue=name, all_channels=True))

    async def resume(self, name: str, channel: str) -> None:
        """Undo :meth:`pause`."""
        await self.ask(ResumeQueue(queue=name, channel=channel))

    async def resume_all(self, name: str) -> None:
        """Undo :meth:`pause_all`. A channel that was paused by itself stays so."""
        await self.ask(ResumeQueue(queue=name, all_channels=True))

    async def empty(self, name: str, channel: str) -> int:
        """Drop the messages that wait in a channel; returns how many."""
        return (await self.ask(EmptyQueue(queue=name, channel=channel))).messages

    async def empty_all(self, name: str) -> int:
        """Drop all messages of a queue, in every channel; returns how many."""
        return (await self.ask(EmptyQueue(queue=name, all_channels=True))).messages

    # Order

    async def expand(self, name: str, partitions: int, *, nodes: Sequence[str] = ()) -> QueueExpanded:
        """Expand the queue to this number of partitions in all; return the route table with the ``added`` ones. The
        order of each key holds.

        ``nodes``: the nodes of the new partitions of a queue on several nodes; by default those that it has.

        Raises QueueNotFoundError, ``ValueError`` (ProtocolError from another member) for fewer than there are.
        """
        request = ExpandQueue(queue=name, partitions=partitions, nodes=tuple(node_names(nodes)))
        return await self.ask(request)

    async def route(self, name: str) -> QueueRoute:
        """The route table: which partition has which keys."""
        return await self.ask(DescribeRoute(queue=name))

    async def consumers(self, name: str, channel: str) -> ChannelConsumers:
        """List the consumers of a channel, each with its ``partitions``: in an exclusive channel, its own ones."""
        return await self.ask(ListConsumers(queue=name, channel=channel))

    async def locks(self, name: str, channel: str) -> ChannelLocks:
        """The holders of the partitions of an exclusive channel."""
        return await self.ask(ListLocks(queue=name, channel=channel))

    # Messages

    async def peek(self, name: str, channel: str | None = None, *, count: int = 10) -> list[MessageInfo]:
        """The oldest messages, without taking them: of the log, or those that a channel has not done."""
        return list((await self.ask(PeekMessages(queue=name, channel=channel, count=count))).messages)

    def export(self, name: str) -> AbstractAsyncContextManager[AsyncIterator[MessageInfo]]:
        """Every message of the log, oldest first: ``async with queues.export("jobs") as messages: async for …``. Raises
        QueueNotFoundError."""
        return aclosing(self._export(name))

    async def _export(self, name: str) -> AsyncGenerator[MessageInfo, None]:
        after = ""
        while True:
            page = await self.ask(ExportMessages(queue=name, after=after, count=EXPORT_ITEMS))
            for message in page.messages:
                yield message
            after = page.after
            if not after:
                return

    async def dead_letters(self, name: str, channel: str, *, after: int = 0, count: int = 100) -> list[DeadLetterInfo]:
        """Dead letters of a channel, oldest first, from behind the id ``after``."""
        request = ListDeadLetters(queue=name, channel=channel, after=after, count=count)
        return list((await self.ask(request)).dead_letters)

    async def replay(self, name: str, channel: str, ids: Iterable[int]) -> int:
        """Give these dead letters to their channel again; returns how many. Raises QueueMessageNotFoundError."""
        return (await self.ask(ReplayDeadLetters(queue=name, channel=channel, ids=tuple(ids)))).messages

    async def replay_all(self, name: str, channel: str) -> int:
        """Give all dead letters of a channel to it again; returns how many."""
        return (await self.ask(ReplayDeadLetters(queue=name, channel=channel, all=True))).messages

    async def delete_dead_letters(self, name: str, channel: str, ids: Iterable[int]) -> int:
        """Drop these dead letters; returns how many. Raises QueueMessageNotFoundError."""
        return (await self.ask(DeleteDeadLetters(queue=name, channel=channel, ids=tuple(ids)))).messages

    async def delete_all_dead_letters(self, name: str, channel: str) -> int:
        """Drop all dead letters of a channel; returns how many."""
        return (await self.ask(DeleteDeadLetters(queue=name, channel=channel, all=True))).messages


@checks_arguments
class QueueHandle:
    """A handle of one queue."""

    def __init__(self, queues: Queues, name: str) -> None:
        self._queues = queues
        self.name = name

    @unchecked
    async def publish(
        self,
        body: bytes,
        *,
        timeout_s: float | None = None,
        **options: Unpack[MessageOptions],
    ) -> str:
        """As :meth:`Queues.publish`."""
        if timeout_s is None and not options:  # by name, each argument is looked up and checked
            return await self._queues.publish(self.name, body)
        return await self._queues.publish(self.name, body, timeout_s=timeout_s, **options)

    @unchecked
    async def publish_many(
        self,
        bodies: Sequence[bytes],
        *,
        timeout_s: float | None = None,
        **options: Unpack[MessageOptions],
    ) -> list[str]:
        """As :meth:`Queues.publish_many`."""
        return await self._queues.publish_many(
            self.name,
            bodies,
            timeout_s=timeout_s,
            **options,
        )

    def publish_in(
        self,
        connection: SqlConnection,
        body: bytes,
        *,
        table: str = DEFAULT_TABLE,
        **options: Unpack[MessageOptions],
    ) -> None:
        """Publish when the connection's transaction commits: `dep2p.storage.app_outbox.publish_in`."""
        publish_in(
            connection,
            self.name,
            body,
            table=table,
            **options,
        )

    def producer(
        self, *, order: Order = "best_effort", other_brokers: Sequence[Queues] = (), **settings: Unpack[ProducerOptions]
    ) -> AbstractAsyncContextManager[Producer]:
        """As :meth:`Queues.producer`."""
        return self._queues.producer(self.name, order=order, other_brokers=other_brokers, **settings)

    def consume(
        self,
        channel: str,
        **options: Unpack[ConsumeOptions],
    ) -> AbstractAsyncContextManager[Messages]:
        """As :meth:`Queues.consume`."""
        return self._queues.consume(self.name, channel, **options)

    def consumer(
        self, group: str, handler: Handler, *, mode: Mode = "normal", **settings: Unpack[ConsumerOptions]
    ) -> AbstractAsyncContextManager[PushConsumer]:
        """As :meth:`Queues.consumer`."""
        return self._queues.consumer(self.name, group, handler, mode=mode, **settings)

    def simple_consumer(self, group: str) -> SimpleConsumer:
        """As :meth:`Queues.simple_consumer`."""
        return self._queues.simple_consumer(self.name, group)

    async def info(self) -> QueueInfo:
        """As :meth:`Queues.info`."""
        return await self._queues.info(self.name)

    async def pause(self, channel: str) -> None:
        """As :meth:`Queues.pause`."""
        await self._queues.pause(self.name, channel)

    async def pause_all(self) -> None:
        """As :meth:`Queues.pause_all`."""
        await self._queues.pause_all(self.name)

    async def resume(self, channel: str) -> None:
        """As :meth:`Queues.resume`."""
        await self._queues.resume(self.name, channel)

    async def resume_all(self) -> None:
        """As :meth:`Queues.resume_all`."""
        await self._queues.resume_all(self.name)

    async def empty(self, channel: str) -> int:
        """As :meth:`Queues.empty`."""
        return await self._queues.empty(self.name, channel)

    async def empty_all(self) -> int:
        """As :meth:`Queues.empty_all`."""
        return await self._queues.empty_all(self.name)

    async def delete(self, *, force: bool = False) -> list[PendingDeletion]:
        """As :meth:`Queues.delete`."""
        return await self._queues.delete(self.name, force=force)


def _subscribe_options(
    *,
    max_in_flight: int = DEFAULT_IN_FLIGHT,
    from_start: bool = False,
    bytes_max: int | None = None,
    count: int | None = None,
    filter: str = "",
    exclusive: bool = False,
) -> SubscribeOptions:
    if count is not None:
        max_in_flight = min(max_in_flight, max(1, count))
    return SubscribeOptions(
        max_in_flight=max_in_flight,
        from_start=from_start,
        bytes_max=bytes_max,
        filter=filter,
        exclusive=exclusive,
    )
