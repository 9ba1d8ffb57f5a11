"""The verbs on the queues of one place: those that this node keeps, or those of another member."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from dep2p.protocols.queues.clients.producer import Order
from dep2p.protocols.queues.clients.push_consumer import Mode
from dep2p.protocols.queues.wire import WireMessage
from dep2p.queues.api.outbox import DEFAULT_TABLE, OutboxRelay, publish_in
from dep2p.queues.api.producer import Producer, ProducerSettings
from dep2p.queues.api.push_consumer import ConsumerSettings, Handler, PushConsumer
from dep2p.queues.api.simple_consumer import SimpleConsumer
from dep2p.queues.client_metrics import FlowCounts
from dep2p.queues.consumer import Consumer, Messages
from dep2p.queues.types import Attributes, encode_attributes, message_id
from dep2p.types import Headers

if TYPE_CHECKING:
    from dep2p.protocols.queues.options import QueueOptions

DEFAULT_IN_FLIGHT: Final = 1
EXPORT_ITEMS: Final = 256

Access = Mapping[str, str | Sequence[str]]
"""``publish``, ``consume`` and ``administer``: "members", "owner" (this node alone), or a list of peer ids."""


class Queues(ABC):
    """The queues of one place. Answers are plain values, those of the control API (docs/reference/control-api.md).

    Everything raises QueueAccessError where the owner does not allow it, and for another member's queues what a request
    raises: PeerNotFoundError, NotMemberError, RequestTimeoutError, StreamClosedError.
    """

    @property
    def flows(self) -> FlowCounts | None:
        """Where the producers and consumers of this place are counted."""
        return None

    @abstractmethod
    async def ask(self, op: str, fields: Mapping[str, object]) -> dict[str, Any]:
        """An administrative request, and its answer."""

    @abstractmethod
    async def publish_batch(
        self, name: str, messages: Sequence[WireMessage], timeout_s: float | None
    ) -> list[tuple[int, int]]:
        """Publish all or none; returns the ids when all are durable.

        Only messages of several order keys may be on several nodes: QueuePartlyPublishedError says which are taken.
        """

    @abstractmethod
    async def publish_numbered(
        self, name: str, messages: Sequence[WireMessage], publisher: tuple[bytes, int], destination: str = ""
    ) -> list[tuple[int, int]]:
        """Publish all or none, as a publisher (16 bytes) whose first message has that number.

        The last 64 numbers of a publisher are remembered on disk: one that comes again is not taken again, and gives
        the ids of the first time. Numbers rise. Raises what `publish` raises; ProtocolError or ``ValueError`` for a
        number that is older than what is remembered.

        A queue on several nodes needs the messages' ``destination`` (`destinations`); a number that comes again must go
        to the same one. Raises QueuePlacedError without it, and QueueMovedError when a key has moved from there:
        nothing was taken then, and new destinations under new numbers are right.
        """

    async def destinations(self, name: str, messages: Sequence[WireMessage], *, is_stale: bool = False) -> list[str]:
        """Of each message, for `publish_numbered`: texts that may be kept; "" for a queue that is on one node.

        ``is_stale``: what was told before was refused. Raises QueueNotFoundError, and what a request raises.
        """
        del name, is_stale
        return [""] * len(messages)

    @abstractmethod
    async def open_consumer(
        self,
        name: str,
        channel: str,
        *,
        max_in_flight: int,
        from_start: bool,
        bytes_max: int | None,
        filter_text: str,
        exclusive: bool = False,
    ) -> Consumer:
        """A consumer; the caller closes it."""

    def is_elsewhere(self, name: str, order_key: str, message_id: str) -> bool:
        """Whether a message was put where its key does not belong: its node was away, and the order is best-effort."""
        del name, order_key, message_id
        return False

    # Publishing

    async def publish(
        self,
        name: str,
        body: bytes,
        *,
        order_key: str = "",
        tags: Sequence[str] = (),
        priority: int = 0,
        delay_s: float = 0.0,
        headers: Headers | None = None,
        timeout: float | None = None,
    ) -> str:
        """Publish one message; returns its id when it is durable.

        Messages with the same ``order_key`` go to the same partition. It is delivered after ``delay_s``, counted from
        the publish. Waits while the queue is full, at most ``timeout`` seconds (for ever when None; another member's
        queue: ``Limits.request_timeout_s``), then raises QueueFullError. Raises QueueNotFoundError,
        MessageTooLargeError, StoreFullError, StoreError. When it is cancelled or times out for another reason, whether
        the message was taken is not known.
        """
        attributes = encode_attributes(
            Attributes(order_key, tuple(tags), priority, dict(headers or {}), round(delay_s * 1000))
        )
        ((partition, seq),) = await self.publish_batch(name, [WireMessage(attributes, body)], timeout)
        return message_id(partition, seq)

    async def publish_many(
        self,
        name: str,
        bodies: Sequence[bytes],
        *,
        order_key: str = "",
        tags: Sequence[str] = (),
        priority: int = 0,
        delay_s: float = 0.0,
        headers: Headers | None = None,
        timeout: float | None = None,
    ) -> list[str]:
        """Publish some messages, all or none; as :meth:`publish` for the rest."""
        if not bodies:
            return []
        attributes = encode_attributes(
            Attributes(order_key, tuple(tags), priority, dict(headers or {}), round(delay_s * 1000))
        )
        points = await self.publish_batch(name, [WireMessage(attributes, body) for body in bodies], timeout)
        return [message_id(partition, seq) for partition, seq in points]

    def producer(
        self, name: str, *, order: Order = "best_effort", elsewhere: Sequence["Queues"] = (), **settings: Any
    ) -> AbstractAsyncContextManager[Producer]:
        """Send with retries, and in lines of order keys, while the block runs::

            async with queues.producer("orders", order="strict") as producer:
                await producer.publish(b"paid", order_key="customer 7")

        ``elsewhere``: other places that have a queue of this name; messages without a key go to each in turn, a key
        belongs to one of them, and in best-effort order a message may go to another one when its own fails.
        ``settings`` are those of :class:`ProducerSettings`. Raises ``ValueError`` for a setting.
        """
        return Producer([self, *elsewhere], name, ProducerSettings(order=order, **settings)).working()

    def relay(
        self, address: str | Path, *, table: str = DEFAULT_TABLE, poll_s: float = 0.2
    ) -> AbstractAsyncContextManager[OutboxRelay]:
        """Put what apps published in their own transactions (`dep2p.queues.api.outbox.publish_in`) into the queues of
        this place, exactly once, while the block runs.

        ``address``: the app's database, a file of SQLite or ``postgresql://…``; ``table``: its outbox, which is made if
        it is not there; ``poll_s``: how often it is looked at. Raises ``ValueError``, and what the database raises
        when it cannot be opened.
        """
        return OutboxRelay(self, address, table=table, poll_s=poll_s).working()

    # Consuming

    def consume(
        self,
        name: str,
        channel: str,
        *,
        max_in_flight: int = DEFAULT_IN_FLIGHT,
        from_start: bool = False,
        bytes_max: int | None = None,
        filter: str = "",
        exclusive: bool = False,
    ) -> AbstractAsyncContextManager[Messages]:
        """Take messages: ``async with queues.consume("jobs", "workers") as messages: async for m in messages: …``.

        The channel is made when it is new; then it gets what is published from now on, or everything that is there
        (``from_start``). The first channel of a queue always gets everything. At most ``max_in_flight`` messages, and
        about ``bytes_max`` bytes, are held without a result. What is held when the block ends goes to others at once.
        A new channel gets only what its ``filter`` lets through: ``tag in (a, b) and header.size != 3``.

        ``exclusive``: the channel gives each partition to one consumer at a time, and of each key one message at a
        time, in their order (docs/howto/consumers.md); work on a message in its ``scope()``. Whether a channel is
        exclusive is chosen when it is made.

        Raises QueueNotFoundError, ``ValueError`` (ProtocolError from another member) for a malformed filter,
        QueueExistsError when the channel is there with another one, or is (not) exclusive; later, while iterating,
        QueueConsumerClosedError when queue or channel is deleted.
        """
        return self._consume(name, channel, max_in_flight, from_start, bytes_max, filter, exclusive)

    @asynccontextmanager
    async def _consume(
        self,
        name: str,
        channel: str,
        max_in_flight: int,
        from_start: bool,
        bytes_max: int | None,
        filter_text: str,
        exclusive: bool,
    ) -> AsyncGenerator[Messages, None]:
        consumer = await self.open_consumer(
            name,
            channel,
            max_in_flight=max_in_flight,
            from_start=from_start,
            bytes_max=bytes_max,
            filter_text=filter_text,
            exclusive=exclusive,
        )
        async with consumer:
            yield Messages(consumer)

    def consumer(
        self, name: str, group: str, handler: Handler, *, mode: Mode = "normal", **settings: Any
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
        """receive, ack and change_invisible_duration on a channel, as calls; see :class:`SimpleConsumer`."""
        return SimpleConsumer(self, name, group)

    # Administration

    async def create(
        self,
        name: str,
        options: "QueueOptions | Mapping[str, object] | None" = None,
        *,
        access: Access | None = None,
        nodes: Sequence[str] = (),
    ) -> "Queue":
        """Make a queue; one that is there with the same options is taken as it is.

        ``nodes``: peer ids of members of the realm (or "home", the node that is asked), which keep its partitions, in
        turn; by default the node that is asked keeps all. Raises what a request to one of them raises.

        Raises QueueExistsError when it is there with others, ``ValueError`` (ProtocolError from another member) for a
        malformed name or option.
        """
        given: Mapping[str, object]
        if options is not None and is_dataclass(options):
            given = asdict(cast(Any, options))
        else:
            given = cast("Mapping[str, object]", options or {})
        fields: dict[str, object] = {"queue": name, "options": dict(given)}
        if access is not None:
            fields["access"] = {right: who if isinstance(who, str) else list(who) for right, who in access.items()}
        if nodes:
            fields["nodes"] = list(nodes)
        await self.ask("create", fields)
        return Queue(self, name)

    def queue(self, name: str) -> "Queue":
        """A handle of a queue, whether it is there or not."""
        return Queue(self, name)

    async def listing(self) -> list[dict[str, Any]]:
        """All queues with what waits in them."""
        return cast(list[dict[str, Any]], (await self.ask("list", {}))["queues"])

    async def info(self, name: str) -> dict[str, Any]:
        """Options, access, counts and channels. Raises QueueNotFoundError."""
        return await self.ask("info", {"queue": name})

    async def delete(self, name: str, *, force: bool = False) -> list[dict[str, Any]]:
        """Delete a queue with all that is in it. Raises QueueNotFoundError.

        A queue on several nodes is deleted when all of them are there, and is left as it is otherwise; ``force``
        deletes it without those that are away, and returns the shares that are left on them (``node``, ``share``).
        """
        answer = await self.ask("delete", {"queue": name, "force": True} if force else {"queue": name})
        return cast(list[dict[str, Any]], answer.get("left", []))

    async def create_channel(
        self, name: str, channel: str, *, from_start: bool = False, filter: str = "", exclusive: bool = False
    ) -> None:
        """Make a channel before anybody consumes from it. Idempotent. Raises what `consume` raises."""
        fields: dict[str, object] = {"queue": name, "channel": channel, "from_start": from_start}
        if filter:
            fields["filter"] = filter
        if exclusive:
            fields["exclusive"] = True
        await self.ask("create_channel", fields)

    # Order

    async def expand(self, name: str, partitions: int, *, nodes: Sequence[str] = ()) -> list[int]:
        """So many partitions in all from now on; returns the new ones. The order of each key holds.

        ``nodes``: of a queue on several nodes, where the new ones are; by default on those that it has.

        Raises QueueNotFoundError, ``ValueError`` (ProtocolError from another member) for fewer than there are.
        """
        fields: dict[str, object] = {"queue": name, "partitions": partitions}
        if nodes:
            fields["nodes"] = list(nodes)
        return cast(list[int], (await self.ask("expand", fields))["added"])

    async def route(self, name: str) -> dict[str, Any]:
        """The route table: ``version``, and for each range of logical partitions ``low``, ``high``, ``partition``, and
        ``after``, what comes first."""
        return await self.ask("route", {"queue": name})

    async def consumers(self, name: str, channel: str) -> list[dict[str, Any]]:
        """The consumers of a channel, each with its ``partitions``: in an exclusive one, those that are its own."""
        answer = await self.ask("consumers", {"queue": name, "channel": channel})
        return cast(list[dict[str, Any]], answer["consumers"])

    async def locks(self, name: str, channel: str) -> list[dict[str, Any]]:
        """Who holds which partition of an exclusive channel: ``partition``, ``consumer``, ``epoch``, ``since_s``."""
        return cast(list[dict[str, Any]], (await self.ask("locks", {"queue": name, "channel": channel}))["locks"])

    async def delete_channel(self, name: str, channel: str) -> None:
        """Delete a channel with its dead letters. Raises QueueNotFoundError, ChannelNotFoundError."""
        await self.ask("delete_channel", {"queue": name, "channel": channel})

    async def pause(self, name: str, channel: str | None = None) -> None:
        """Deliver nothing from now on, in one channel or in all; kept over restarts."""
        await self.ask("pause", _fields(name, channel))

    async def resume(self, name: str, channel: str | None = None) -> None:
        """Undo :meth:`pause`."""
        await self.ask("resume", _fields(name, channel))

    async def empty(self, name: str, channel: str | None = None) -> int:
        """Drop what waits in a channel, or everything; returns how many messages."""
        return int((await self.ask("empty", _fields(name, channel)))["messages"])

    async def peek(self, name: str, channel: str | None = None, *, count: int = 10) -> list[dict[str, Any]]:
        """The oldest messages, without taking them: of the log, or those that a channel has not done."""
        answer = await self.ask("peek", {**_fields(name, channel), "count": count})
        return cast(list[dict[str, Any]], answer["messages"])

    async def export(self, name: str) -> AsyncIterator[dict[str, Any]]:
        """Every message of the log, oldest first."""
        after = ""
        while True:
            answer = await self.ask("export", {"queue": name, "after": after, "count": EXPORT_ITEMS})
            for message in answer["messages"]:
                yield message
            after = str(answer["after"])
            if not after:
                return

    async def dead(self, name: str, channel: str, *, after: int = 0, count: int = 100) -> list[dict[str, Any]]:
        """Dead letters of a channel, oldest first, from behind the id ``after``."""
        answer = await self.ask("dead", {**_fields(name, channel), "after": after, "count": count})
        return cast(list[dict[str, Any]], answer["dead"])

    async def replay(self, name: str, channel: str, ids: Sequence[int] | None = None) -> int:
        """Give dead letters (all, or these) to their channel again; returns how many."""
        return int((await self.ask("replay", _dead(name, channel, ids)))["messages"])

    async def forget_dead(self, name: str, channel: str, ids: Sequence[int] | None = None) -> int:
        """Drop dead letters (all, or these); returns how many."""
        return int((await self.ask("forget_dead", _dead(name, channel, ids)))["messages"])


def _fields(name: str, channel: str | None) -> dict[str, object]:
    return {"queue": name} if channel is None else {"queue": name, "channel": channel}


def _dead(name: str, channel: str, ids: Sequence[int] | None) -> dict[str, object]:
    return _fields(name, channel) | ({} if ids is None else {"ids": list(ids)})


class Queue:
    """A handle of one queue."""

    def __init__(self, place: Queues, name: str) -> None:
        self._place = place
        self.name = name

    async def publish(self, body: bytes, **options: Any) -> str:
        """As :meth:`Queues.publish`."""
        return await self._place.publish(self.name, body, **options)

    async def publish_many(self, bodies: Sequence[bytes], **options: Any) -> list[str]:
        """As :meth:`Queues.publish_many`."""
        return await self._place.publish_many(self.name, bodies, **options)

    def publish_in(self, connection: Any, body: bytes, **options: Any) -> None:
        """Publish when the connection's transaction commits: `dep2p.queues.api.outbox.publish_in`."""
        publish_in(connection, self.name, body, **options)

    def producer(
        self, *, order: Order = "best_effort", elsewhere: Sequence[Queues] = (), **settings: Any
    ) -> AbstractAsyncContextManager[Producer]:
        """As :meth:`Queues.producer`."""
        return self._place.producer(self.name, order=order, elsewhere=elsewhere, **settings)

    def consume(self, channel: str, **options: Any) -> AbstractAsyncContextManager[Messages]:
        """As :meth:`Queues.consume`."""
        return self._place.consume(self.name, channel, **options)

    def consumer(
        self, group: str, handler: Handler, *, mode: Mode = "normal", **settings: Any
    ) -> AbstractAsyncContextManager[PushConsumer]:
        """As :meth:`Queues.consumer`."""
        return self._place.consumer(self.name, group, handler, mode=mode, **settings)

    def simple_consumer(self, group: str) -> SimpleConsumer:
        """As :meth:`Queues.simple_consumer`."""
        return self._place.simple_consumer(self.name, group)

    async def info(self) -> dict[str, Any]:
        """As :meth:`Queues.info`."""
        return await self._place.info(self.name)

    async def delete(self) -> None:
        """As :meth:`Queues.delete`."""
        await self._place.delete(self.name)
