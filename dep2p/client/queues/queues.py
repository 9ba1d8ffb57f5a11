"""The client's calls about durable queues: those of `dep2p.queues.api.queues.Queues`.

Replies are the structs of `dep2p.protocols.queues.admin`, which the node's own API gives, too.
"""

from base64 import b64encode
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, Unpack

import anyio

from dep2p.arguments import checks_arguments
from dep2p.client.models import realm_text
from dep2p.client.queues.calls import ANSWER_TIMEOUT_S, BrokerCalls, channel_path, queue_path, read_answer
from dep2p.client.queues.consumer import ClientMessages
from dep2p.client.queues.producer import ClientProducer
from dep2p.client.queues.push_consumer import ClientPushConsumer, PushHandler
from dep2p.client.queues.relay import ClientOutboxRelay
from dep2p.client.reconnection.feeds import FeedCall, opened_feed
from dep2p.client.transport import NdjsonLines, Transport
from dep2p.client.upload import Batches
from dep2p.control_api.encoding import encode_headers
from dep2p.control_api.queues import (
    ConsumerOpened,
    NewQueueMessage,
    NewQueueMessages,
    PublishedMessage,
    PublishedMessages,
    QueuedMany,
)
from dep2p.errors import NotInFlightError
from dep2p.gossipsub.topic_types import Lagged
from dep2p.protocols.queues.admin import (
    ChannelConsumers,
    ChannelLocks,
    DeadLetterInfo,
    DeadLetterPage,
    InvisibleTime,
    MessageCount,
    MessageInfo,
    MessageList,
    OptionValue,
    PendingDeletion,
    QueueDeleted,
    QueueExpanded,
    QueueInfo,
    QueueList,
    QueueRoute,
    QueueSummary,
    ReceivedMessage,
    ReceivedMessages,
    RefusedHandles,
)
from dep2p.protocols.queues.clients.producer import Order
from dep2p.protocols.queues.clients.push_consumer import Mode
from dep2p.protocols.queues.clients.settings import ConsumerOptions, ConsumerSettings, ProducerOptions, ProducerSettings
from dep2p.protocols.queues.options import (
    DEFAULT_IN_FLIGHT,
    Access,
    ConsumeOptions,
    MessageOptions,
    QueueOptions,
    options_as_dict,
)
from dep2p.protocols.queues.wire.admin import reply_fields
from dep2p.storage.app_outbox import DEFAULT_TABLE, SqlConnection, publish_in
from dep2p.types import Headers, PeerId

if TYPE_CHECKING:
    from dep2p.realm.credentials import RealmChoice

_LOOK_TIMEOUT_S: Final = 10.0
_WORK_TIMEOUT_S: Final = 600.0
"""Seconds for a call that may wait for room or for a disk, or works through many messages."""
_ALL_CHANNELS: Final = {"all_channels": True}


@checks_arguments
class ClientQueues:
    """The queues of one broker, through the daemon: ``client.queues`` are those of this machine's programs, which no
    other node reaches.

    ``client.queues.of("team")`` are the queues that the daemon serves for the members of a realm, and
    ``client.queues.at(peer)`` those that another member keeps. All have the same calls.

    Everything raises QueueAccessError where the owner does not allow it, and for another member's queues what a request
    raises: PeerNotFoundError, NotMemberError, RequestTimeoutError, StreamClosedError.
    """

    def __init__(self, transport: Transport, *, realm: str | None = None, peers: Sequence[PeerId] = ()) -> None:
        """``realm``: empty means the only one that is joined."""
        params = {} if realm is None else {"realm": realm}
        self._calls = BrokerCalls(transport, params | ({"peer": ",".join(peers)} if peers else {}))

    # Brokers

    def of(self, realm: "RealmChoice" = None) -> "ClientQueues":
        """The queues that the daemon serves for a realm; its calls raise NotInRealmError."""
        return ClientQueues(self._calls.transport, realm=realm_text(realm) or "")

    def at(self, peer: PeerId, *others: PeerId, realm: "RealmChoice" = None) -> "ClientQueues":
        """The queues that a member of a realm keeps; for the daemon's own id its own. Its calls raise NotInRealmError.

        ``others``: nodes that share its store, of which one may keep the queues now (docs/howto/failover.md). The
        member names them itself when it can be reached; name them here so that they are found while it is away.
        """
        return ClientQueues(self._calls.transport, realm=realm_text(realm), peers=(peer, *others))

    def select(self, realm: "RealmChoice", *peers: PeerId) -> "ClientQueues":
        """The queues for a caller's choice: no argument, a realm, or peers as for `at` (in the only realm, when none is
        named)."""
        if peers:
            return self.at(*peers, realm=realm)
        return ClientQueues(self._calls.transport) if realm is None else self.of(realm)

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
        publish. Waits while the queue is full, at most ``timeout_s``, then raises QueueFullError. Raises
        QueueNotFoundError, MessageTooLargeError, StoreFullError, StoreError. After any other error (a lost daemon) it
        may or may not have been published.
        """
        message = _message(body, timeout_s, **options)
        path, call_timeout_s = f"{queue_path(name)}/messages", _publish_timeout_s(timeout_s)
        return (
            await self._calls.ask(PublishedMessage, "POST", path, reply_fields(message), timeout_s=call_timeout_s)
        ).id

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
        messages = _messages(bodies, timeout_s, **options)
        path, call_timeout_s = f"{queue_path(name)}/batches", _publish_timeout_s(timeout_s)
        published = await self._calls.ask(
            PublishedMessages, "POST", path, reply_fields(messages), timeout_s=call_timeout_s
        )
        return list(published.ids)

    async def publish_from(
        self,
        name: str,
        messages: AsyncIterator[bytes],
        *,
        key: str = "",
        tags: Sequence[str] = (),
        priority: int = 0,
        delay_s: float = 0.0,
    ) -> QueuedMany:
        """Publish messages while ``messages`` gives them, in order, as fast as they are taken. Raises as
        :meth:`publish`, and what ``messages`` raises; messages before the one that failed are published then."""
        params = {**self._calls.params, "priority": str(priority), "delay_s": f"{delay_s:g}"}
        if key:
            params["key"] = key
        if tags:
            params["tags"] = ",".join(tags)
        batches = Batches(messages)
        error: Exception | None = None
        queued = QueuedMany(messages=0, bytes=0, first_id="", last_id="")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(batches.fill)
            try:
                async with aclosing(batches.pieces()) as pieces:
                    answer = await self._calls.transport.upload(f"{queue_path(name)}/messages", pieces, params=params)
                    queued = read_answer(QueuedMany, answer)
            except Exception as raised:
                error = raised
            tasks.cancel_scope.cancel()
        if error is not None:
            raise error
        return queued

    def producer(
        self,
        name: str,
        *,
        order: Order = "best_effort",
        other_brokers: Sequence["ClientQueues"] = (),
        **settings: Unpack[ProducerOptions],
    ) -> AbstractAsyncContextManager[ClientProducer]:
        """Send with retries, and in key queues, while the block runs::

            async with queues.producer("orders", order="strict") as producer:
                await producer.publish(b"paid", key="customer 7")

        ``other_brokers``: other brokers that have a queue of this name; messages without a key go to each in turn, a
        key belongs to one of them, and in best-effort order a message may go to another one when its own fails.
        ``settings`` are those of :class:`ProducerSettings`. Raises ``ValueError`` for a setting.

        While the daemon is away, strict messages wait for it, and others for ``send_timeout_s`` at each try.
        """
        brokers = [self._calls, *(each._calls for each in other_brokers)]
        return ClientProducer(brokers, name, ProducerSettings(order=order, **settings)).working()

    def relay(
        self, address: str | Path, *, table: str = DEFAULT_TABLE, poll_s: float = 0.2
    ) -> AbstractAsyncContextManager[ClientOutboxRelay]:
        """Put what apps published in their own transactions (:meth:`ClientQueueHandle.publish_in`) into the queues of
        this broker, exactly once, while the block runs.

        ``address``: the app's database, a file of SQLite or ``postgresql://…``, which this program opens, not the
        daemon; ``table``: its outbox, which is made if it is not there; ``poll_s``: the time between two looks at it.
        Raises ``ValueError``, and what the database raises when it cannot be opened.
        """
        return ClientOutboxRelay(self._calls, address, table=table, poll_s=poll_s).working()

    # Consuming

    def consume(
        self,
        name: str,
        channel: str,
        **options: Unpack[ConsumeOptions],
    ) -> AbstractAsyncContextManager[ClientMessages]:
        """Take messages: ``async with queues.consume("jobs", "workers") as messages: async for m in messages: …``.

        The channel is made when it is new; then it gets what is published from now on, or everything that is there
        (``from_start``). The first channel of a queue always gets everything. At most ``max_in_flight`` messages, and
        about ``bytes_max`` bytes, are held without a result. After ``count`` messages the loop ends, and no more are
        taken. What is held when the block or the connection to the daemon ends goes to others at once. A new channel
        gets only what its ``filter`` lets through: ``tag in (a, b) and header.size != 3``.

        ``exclusive``: the channel gives each partition to one consumer at a time, and of each key one message at a
        time, in their order (docs/howto/consumers.md); work on a message in its ``scope()``. Whether a channel is
        exclusive is chosen when it is made.

        Raises QueueNotFoundError, ``ControlError`` D1005 for a malformed filter, QueueExistsError when the channel is
        there with another one, or is (not) exclusive; later, while iterating, FeedEndedError when queue or channel is
        deleted. When the daemon goes away, the loop waits for it and goes on: what was held is delivered again.
        """
        path, what = f"{channel_path(name, channel)}/consume", f"messages of queue {name!r}, channel {channel!r}"
        return self._consume(path, what, _consume_params(**options), options.get("count"))

    @asynccontextmanager
    async def _consume(
        self, path: str, what: str, params: dict[str, str], count: int | None
    ) -> AsyncGenerator[ClientMessages, None]:
        feed = FeedCall("POST", path, what, loses=False, params=self._calls.params | params)
        async with opened_feed(self._calls.transport, feed) as lines:
            while isinstance(line := await lines.next_line(), Lagged):
                pass
            yield ClientMessages(self._calls.transport, lines, read_answer(ConsumerOpened, line), count)

    def consumer(
        self, name: str, group: str, handler: PushHandler, *, mode: Mode = "normal", **settings: Unpack[ConsumerOptions]
    ) -> AbstractAsyncContextManager[ClientPushConsumer]:
        """Call ``handler(message)`` for each message of a channel (consumer group) while the block runs::

            async with queues.consumer("orders", "billing", handle, mode="fifo", concurrency=8):
                await asyncio.Event().wait()

        ``settings`` are those of :class:`ConsumerSettings`. A handler that returns finishes its message; one that
        raises has it tried again, and after the last attempt it becomes a dead letter. A message is renewed while its
        handler runs, and the handler is cancelled when the message is lost all the same. In ``fifo`` mode messages with
        the same order key are handled one after the other, in the order of publishing.

        When the daemon goes away, the handlers of messages that were held are cancelled, and the consumer waits for the
        daemon and goes on. Raises QueueNotFoundError, ``ValueError`` (a setting), ``ControlError`` D1005 for a
        malformed filter, QueueExistsError (a channel of another kind); when the block ends, FeedEndedError if the queue
        or channel was deleted meanwhile, DaemonUnreachableError after ``reconnect_s`` without the daemon.
        """
        return ClientPushConsumer(self._calls, name, group, handler, ConsumerSettings(mode=mode, **settings)).working()

    def simple_consumer(self, name: str, group: str) -> "ClientSimpleConsumer":
        """receive, ack and change_invisible on a channel, as calls; see :class:`ClientSimpleConsumer`."""
        return ClientSimpleConsumer(self._calls, name, group)

    # Administration

    async def create(
        self,
        name: str,
        options: QueueOptions | Mapping[str, OptionValue] | None = None,
        *,
        access: Access | None = None,
        nodes: Sequence[str] = (),
    ) -> "ClientQueueHandle":
        """Make a queue; one that is there with the same options is taken as it is.

        ``nodes``: peer ids of members of the realm (or "self", the node that is asked), which keep its partitions, in
        turn; by default the node that is asked keeps all. Raises what a request to one of them raises.

        Raises QueueExistsError when it is there with others, ``ControlError`` D1005 for a malformed name or option.
        """
        if isinstance(options, QueueOptions):
            options = options_as_dict(options)
        body: dict[str, object] = {"name": name, "options": dict(options or {})}
        if access is not None:
            body["access"] = {right: who if isinstance(who, str) else list(who) for right, who in access.items()}
        if nodes:
            body["nodes"] = list(nodes)
        await self._calls.ask(QueueInfo, "POST", "/v1/queues", body, timeout_s=_WORK_TIMEOUT_S)
        return ClientQueueHandle(self, name)

    def queue(self, name: str) -> "ClientQueueHandle":
        """Return a handle of a queue. The queue need not be there."""
        return ClientQueueHandle(self, name)

    async def listing(self) -> list[QueueSummary]:
        """All queues in numbers."""
        return list((await self._calls.ask(QueueList, "GET", "/v1/queues", timeout_s=_LOOK_TIMEOUT_S * 3)).queues)

    async def info(self, name: str) -> QueueInfo:
        """Options, access, counts and channels. Raises QueueNotFoundError."""
        return await self._calls.ask(QueueInfo, "GET", queue_path(name), timeout_s=_LOOK_TIMEOUT_S)

    async def delete(self, name: str, *, force: bool = False) -> list[PendingDeletion]:
        """Delete a queue with all that is in it. Raises QueueNotFoundError.

        A queue on several nodes is deleted when all of them are there, and is left as it is otherwise; ``force``
        deletes it without those that are away, and returns the shards that are left on them.
        """
        params = {"force": "true"} if force else {}
        deleted = await self._calls.ask(
            QueueDeleted, "DELETE", queue_path(name), params=params, timeout_s=_WORK_TIMEOUT_S
        )
        return list(deleted.pending_deletions or ())

    async def create_channel(
        self, name: str, channel: str, *, from_start: bool = False, filter: str = "", exclusive: bool = False
    ) -> None:
        """Make a channel before its first consumer comes. Idempotent. Raises what `consume` raises."""
        body = {"from_start": from_start, "filter": filter, "exclusive": exclusive}
        await self._calls.call("POST", channel_path(name, channel), body)

    async def delete_channel(self, name: str, channel: str) -> None:
        """Delete a channel with its dead letters. Raises QueueNotFoundError, ChannelNotFoundError."""
        await self._calls.call("DELETE", channel_path(name, channel), timeout_s=_WORK_TIMEOUT_S)

    async def pause(self, name: str, channel: str) -> None:
        """Deliver nothing to a channel from now on. This outlives restarts."""
        await self._act(name, "pause", {"channel": channel})

    async def pause_all(self, name: str) -> None:
        """Deliver nothing of a queue from now on. This outlives restarts."""
        await self._act(name, "pause", _ALL_CHANNELS)

    async def resume(self, name: str, channel: str) -> None:
        """Undo :meth:`pause`."""
        await self._act(name, "resume", {"channel": channel})

    async def resume_all(self, name: str) -> None:
        """Undo :meth:`pause_all`. A channel that was paused by itself stays so."""
        await self._act(name, "resume", _ALL_CHANNELS)

    async def empty(self, name: str, channel: str) -> int:
        """Drop the messages that wait in a channel; returns how many."""
        return read_answer(MessageCount, await self._act(name, "empty", {"channel": channel})).messages

    async def empty_all(self, name: str) -> int:
        """Drop all messages of a queue, in every channel; returns how many."""
        return read_answer(MessageCount, await self._act(name, "empty", _ALL_CHANNELS)).messages

    async def _act(self, name: str, what: str, body: Mapping[str, object]) -> dict[str, object]:
        return await self._calls.call("POST", f"{queue_path(name)}/{what}", body, timeout_s=_WORK_TIMEOUT_S)

    # Order

    async def expand(self, name: str, partitions: int, *, nodes: Sequence[str] = ()) -> QueueExpanded:
        """Expand the queue to this number of partitions in all; return the route table with the ``added`` ones. The
        order of each key holds.

        ``nodes``: the nodes of the new partitions of a queue on several nodes; by default those that it has.

        Raises QueueNotFoundError, ``ControlError`` D1005 for fewer than there are.
        """
        body: dict[str, object] = {"partitions": partitions}
        if nodes:
            body["nodes"] = list(nodes)
        return await self._calls.ask(QueueExpanded, "POST", f"{queue_path(name)}/expand", body)

    async def route(self, name: str) -> QueueRoute:
        """The route table: which partition has which keys."""
        return await self._calls.ask(QueueRoute, "GET", f"{queue_path(name)}/route")

    async def consumers(self, name: str, channel: str) -> ChannelConsumers:
        """List the consumers of a channel, each with its ``partitions``: in an exclusive channel, its own ones."""
        return await self._calls.ask(ChannelConsumers, "GET", f"{channel_path(name, channel)}/consumers")

    async def locks(self, name: str, channel: str) -> ChannelLocks:
        """The holders of the partitions of an exclusive channel."""
        return await self._calls.ask(ChannelLocks, "GET", f"{channel_path(name, channel)}/locks")

    # Messages

    async def peek(self, name: str, channel: str | None = None, *, count: int = 10) -> list[MessageInfo]:
        """The oldest messages, without taking them: of the log, or those that a channel has not done."""
        params = {"count": str(count)}
        if channel is not None:
            params["channel"] = channel
        return list((await self._calls.ask(MessageList, "GET", f"{queue_path(name)}/messages", params=params)).messages)

    def export(self, name: str) -> AbstractAsyncContextManager[AsyncIterator[MessageInfo]]:
        """Every message of the log, oldest first: ``async with queues.export("jobs") as messages: async for …``. Raises
        QueueNotFoundError."""
        return self._export(name)

    @asynccontextmanager
    async def _export(self, name: str) -> AsyncGenerator[AsyncIterator[MessageInfo], None]:
        async with self._calls.transport.opened(
            "GET", f"{queue_path(name)}/export", params=self._calls.params
        ) as answer:
            yield _each(NdjsonLines(answer))

    async def dead_letters(self, name: str, channel: str, *, after: int = 0, count: int = 100) -> list[DeadLetterInfo]:
        """Dead letters of a channel, oldest first, from behind the id ``after``."""
        params = {"after": str(after), "count": str(count)}
        path = f"{channel_path(name, channel)}/dead-letters"
        return list((await self._calls.ask(DeadLetterPage, "GET", path, params=params)).dead_letters)

    async def replay(self, name: str, channel: str, ids: Iterable[int]) -> int:
        """Give these dead letters to their channel again; returns how many. Raises QueueMessageNotFoundError."""
        return await self._dead_letters(name, channel, "replay", {"ids": list(ids)})

    async def replay_all(self, name: str, channel: str) -> int:
        """Give all dead letters of a channel to it again; returns how many."""
        return await self._dead_letters(name, channel, "replay", {"all": True})

    async def delete_dead_letters(self, name: str, channel: str, ids: Iterable[int]) -> int:
        """Drop these dead letters; returns how many. Raises QueueMessageNotFoundError."""
        return await self._dead_letters(name, channel, "delete", {"ids": list(ids)})

    async def delete_all_dead_letters(self, name: str, channel: str) -> int:
        """Drop all dead letters of a channel; returns how many."""
        return await self._dead_letters(name, channel, "delete", {"all": True})

    async def _dead_letters(self, name: str, channel: str, what: str, body: Mapping[str, object]) -> int:
        path = f"{channel_path(name, channel)}/dead-letters/{what}"
        return (await self._calls.ask(MessageCount, "POST", path, body, timeout_s=_WORK_TIMEOUT_S)).messages


@checks_arguments
class ClientQueueHandle:
    """A handle of one queue."""

    def __init__(self, queues: ClientQueues, name: str) -> None:
        self._queues = queues
        self.name = name

    async def publish(
        self,
        body: bytes,
        *,
        timeout_s: float | None = None,
        **options: Unpack[MessageOptions],
    ) -> str:
        """As :meth:`ClientQueues.publish`."""
        return await self._queues.publish(self.name, body, timeout_s=timeout_s, **options)

    async def publish_many(
        self,
        bodies: Sequence[bytes],
        *,
        timeout_s: float | None = None,
        **options: Unpack[MessageOptions],
    ) -> list[str]:
        """As :meth:`ClientQueues.publish_many`."""
        return await self._queues.publish_many(self.name, bodies, timeout_s=timeout_s, **options)

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
        self,
        *,
        order: Order = "best_effort",
        other_brokers: Sequence[ClientQueues] = (),
        **settings: Unpack[ProducerOptions],
    ) -> AbstractAsyncContextManager[ClientProducer]:
        """As :meth:`ClientQueues.producer`."""
        return self._queues.producer(self.name, order=order, other_brokers=other_brokers, **settings)

    def consume(
        self,
        channel: str,
        **options: Unpack[ConsumeOptions],
    ) -> AbstractAsyncContextManager[ClientMessages]:
        """As :meth:`ClientQueues.consume`."""
        return self._queues.consume(self.name, channel, **options)

    def consumer(
        self, group: str, handler: PushHandler, *, mode: Mode = "normal", **settings: Unpack[ConsumerOptions]
    ) -> AbstractAsyncContextManager[ClientPushConsumer]:
        """As :meth:`ClientQueues.consumer`."""
        return self._queues.consumer(self.name, group, handler, mode=mode, **settings)

    def simple_consumer(self, group: str) -> "ClientSimpleConsumer":
        """As :meth:`ClientQueues.simple_consumer`."""
        return self._queues.simple_consumer(self.name, group)

    async def info(self) -> QueueInfo:
        """As :meth:`ClientQueues.info`."""
        return await self._queues.info(self.name)

    async def pause(self, channel: str) -> None:
        """As :meth:`ClientQueues.pause`."""
        await self._queues.pause(self.name, channel)

    async def pause_all(self) -> None:
        """As :meth:`ClientQueues.pause_all`."""
        await self._queues.pause_all(self.name)

    async def resume(self, channel: str) -> None:
        """As :meth:`ClientQueues.resume`."""
        await self._queues.resume(self.name, channel)

    async def resume_all(self) -> None:
        """As :meth:`ClientQueues.resume_all`."""
        await self._queues.resume_all(self.name)

    async def empty(self, channel: str) -> int:
        """As :meth:`ClientQueues.empty`."""
        return await self._queues.empty(self.name, channel)

    async def empty_all(self) -> int:
        """As :meth:`ClientQueues.empty_all`."""
        return await self._queues.empty_all(self.name)

    async def delete(self, *, force: bool = False) -> list[PendingDeletion]:
        """As :meth:`ClientQueues.delete`."""
        return await self._queues.delete(self.name, force=force)


@checks_arguments
class ClientSimpleConsumer:
    """Made by ``queue.simple_consumer(group)``. It has no state: any of its calls may come from any task, and a message
    may be acknowledged through another consumer of this daemon, by its handle."""

    def __init__(self, calls: BrokerCalls, queue: str, channel: str) -> None:
        self.queue = queue
        self.channel = channel
        self._calls = calls
        self._path = channel_path(queue, channel)

    async def receive(
        self,
        count: int = 16,
        *,
        wait_s: float = 10.0,
        invisible_s: float = 60.0,
        attempt_id: str = "",
        from_start: bool = False,
    ) -> list[ReceivedMessage]:
        """Return the messages that are there: up to ``count`` (at most 32), none when ``wait_s`` (at most 20) seconds
        are over.

        Each is hidden from other consumers for ``invisible_s`` (at most the queue's ``msg_timeout_max_s``). A receive
        whose answer was lost may be asked again with the same ``attempt_id`` (any text of up to 64 characters): it
        gives the same messages, those that are still held. The channel is made when it is new.

        From a queue on several nodes it returns the messages of the nodes that can be reached.

        Raises QueueNotFoundError, QueueExistsError (an exclusive channel), ``ControlError`` D1005 for a number out of
        its bounds, and what a request raises.
        """
        body: dict[str, object] = {"count": count, "wait_s": wait_s, "invisible_s": invisible_s}
        body |= {"attempt_id": attempt_id} if attempt_id else {}
        body |= {"from_start": True} if from_start else {}
        timeout_s = wait_s + ANSWER_TIMEOUT_S
        path = f"{self._path}/receive"
        # With an attempt id it may be asked twice.
        got = await self._calls.call("POST", path, body, timeout_s=timeout_s, repeatable=bool(attempt_id))
        return list(read_answer(ReceivedMessages, got).messages)

    async def ack(self, *messages: ReceivedMessage | str) -> None:
        """Acknowledge messages (or handles); durable on return. Raises NotInFlightError that names those whose time was
        over (also in its ``handles``), and for a queue on several nodes the error of a request, with the handles whose
        node is away. All others are acknowledged all the same."""
        handles = [each if isinstance(each, str) else each.handle for each in messages]
        reply = await self._calls.ask(RefusedHandles, "POST", f"{self._path}/ack", {"handles": handles})
        if reply.refused:
            raise NotInFlightError(
                f"not held here any more, since their time was over or they are done: {', '.join(reply.refused)}",
                reply.refused,
            )

    async def change_invisible(self, message: ReceivedMessage | str, invisible_s: float) -> float:
        """Deliver a message again ``invisible_s`` from now, unless it is acknowledged before; 0: at once.

        Returns the seconds that it got (the queue's ``msg_timeout_max_s`` counts from the receipt). Raises
        NotInFlightError.
        """
        body = {"handle": message if isinstance(message, str) else message.handle, "invisible_s": invisible_s}
        return (await self._calls.ask(InvisibleTime, "POST", f"{self._path}/invisible", body)).invisible_s


async def _each(lines: NdjsonLines) -> AsyncGenerator[MessageInfo, None]:
    while True:
        try:
            line = await lines.next_line()
        except StopAsyncIteration:
            return
        yield read_answer(MessageInfo, line)


def _consume_params(
    *,
    max_in_flight: int = DEFAULT_IN_FLIGHT,
    from_start: bool = False,
    bytes_max: int | None = None,
    count: int | None = None,
    filter: str = "",
    exclusive: bool = False,
) -> dict[str, str]:
    params = {"max_in_flight": str(max_in_flight)}
    numbers = {"bytes_max": bytes_max, "count": count}
    params |= {option: str(value) for option, value in numbers.items() if value is not None}
    params |= {option: "1" for option, value in (("from_start", from_start), ("exclusive", exclusive)) if value}
    return params | {"filter": filter} if filter else params


def _publish_timeout_s(timeout_s: float | None) -> float:
    return _WORK_TIMEOUT_S if timeout_s is None else timeout_s + ANSWER_TIMEOUT_S


def _message(
    body: bytes,
    timeout_s: float | None,
    *,
    key: str = "",
    tags: Sequence[str] = (),
    priority: int = 0,
    delay_s: float = 0.0,
    headers: Headers | None = None,
) -> NewQueueMessage:
    return NewQueueMessage(
        body=b64encode(body).decode("ascii"),
        key=key,
        tags=tuple(tags),
        priority=priority,
        delay_s=delay_s,
        headers=encode_headers(headers or {}),
        timeout_s=timeout_s,
    )


def _messages(
    bodies: Sequence[bytes],
    timeout_s: float | None,
    *,
    key: str = "",
    tags: Sequence[str] = (),
    priority: int = 0,
    delay_s: float = 0.0,
    headers: Headers | None = None,
) -> NewQueueMessages:
    return NewQueueMessages(
        bodies=tuple(b64encode(body).decode("ascii") for body in bodies),
        key=key,
        tags=tuple(tags),
        priority=priority,
        delay_s=delay_s,
        headers=encode_headers(headers or {}),
        timeout_s=timeout_s,
    )
