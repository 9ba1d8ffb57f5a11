"""The client's calls about durable queues.

Replies are the structs of `dep2p.protocols.queues.admin`, which the node's own API gives, too.
"""

from base64 import b64encode
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Final, Self, TypedDict, Unpack
from urllib.parse import quote

import anyio
from msgspec import convert

from dep2p.arguments import checks_arguments
from dep2p.client.transport import NdjsonLines, Transport
from dep2p.client.upload import Batches
from dep2p.control_api.encoding import decode_headers, encode_headers
from dep2p.control_api.errors import error_from_problem
from dep2p.control_api.queues import (
    ConsumerOpened,
    DeliveredMessage,
    MessageResult,
    NewQueueMessage,
    PublishedMessage,
    QueuedMany,
    SettledMessages,
    SettleMessages,
)
from dep2p.control_api.structs import S
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
from dep2p.protocols.queues.options import MessageOptions
from dep2p.protocols.queues.wire.admin import parse_reply, reply_fields
from dep2p.types import Headers

_LOOK_TIMEOUT_S: Final = 10.0
_WORK_TIMEOUT_S: Final = 600.0
"""Seconds for a call that may wait for room or for a disk, or works through many messages."""
_RESULTS_MAX: Final = 512
"""Results in one call; further ones go into the next call."""
_ANSWER_TIMEOUT_S: Final = 60.0
"""Seconds for a call that waits for a commit, or for another member."""


class BrokerChoice(TypedDict, total=False):
    """The broker of a call, as keyword arguments. Without both the queues are those of this machine's programs."""

    realm: str | None
    """The realm for whose members this node serves the queues."""
    peer: str | None
    """The member that stores the queues; one of several members that share a store, with commas: "A,B"."""


@dataclass(frozen=True, slots=True)
@checks_arguments
class QueueDelivery:
    """A message that this consumer holds until it reports a result, or until the message's time is over."""

    id: str
    queue: str
    channel: str
    body: bytes
    attempts: int
    """The number of this delivery, from 1. Above 1 an earlier delivery failed or timed out: the message may have been
    worked on."""
    published_s: float
    """Unix seconds."""
    timeout_s: float
    """Seconds from its delivery on; then it goes to another consumer."""
    key: str
    tags: tuple[str, ...]
    priority: int
    headers: Headers
    _consumer: "QueueConsumer" = field(repr=False, compare=False)

    async def finish(self, *, durable: bool = False) -> None:
        """Report success. With ``durable``, return when that is on disk: the message cannot come back then.

        Raises NotInFlightError when its time is over: another consumer may have it.
        """
        await self._consumer.settle(MessageResult(id=self.id, do="finish"), durable=durable)

    async def requeue(self, delay_s: float = 0.0, reason: str = "") -> None:
        """Report a failure: deliver the message again after ``delay_s``. Raises NotInFlightError."""
        await self._consumer.settle(MessageResult(id=self.id, do="requeue", delay_s=delay_s, reason=reason))

    async def release(self) -> None:
        """Release the message: the attempt does not count. Raises NotInFlightError."""
        await self._consumer.settle(MessageResult(id=self.id, do="release"))

    async def reject(self, reason: str = "") -> None:
        """Report that the message can never work: it becomes a dead letter at once. Raises NotInFlightError."""
        await self._consumer.settle(MessageResult(id=self.id, do="reject", reason=reason))

    async def touch(self) -> float:
        """Begin the message's time anew, while work goes on. Returns the seconds that are left. Raises
        NotInFlightError."""
        return await self._consumer.settle(MessageResult(id=self.id, do="touch"))


class _Round:
    """Results that go into one call together."""

    def __init__(self) -> None:
        self.results: list[MessageResult] = []
        self.durable = False
        self.done = anyio.Event()
        self.settled = SettledMessages(refused={}, timeouts_s={})
        self.error: Exception | None = None


class QueueConsumer:
    """The deliveries of a channel: an async iterator for one task. Leaving the block releases the messages that it
    holds."""

    def __init__(self, transport: Transport, lines: NdjsonLines, opened: ConsumerOpened, count: int | None) -> None:
        """``count``: the iterator ends after so many messages, which can be settled until the block ends."""
        self._transport = transport
        self._lines = lines
        self._queue = opened.queue
        self._channel = opened.channel
        self._left = count
        self._path = f"/v1/queue-consumers/{quote(opened.consumer, safe='')}/results"
        self._round = _Round()
        self._is_sending = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> QueueDelivery:
        if self._left == 0:
            raise StopAsyncIteration
        message = convert(await self._lines.next_line(), DeliveredMessage)
        if self._left is not None:
            self._left -= 1
        return QueueDelivery(
            message.id,
            self._queue,
            self._channel,
            message.body,
            message.attempts,
            message.published_s,
            message.timeout_s,
            message.key,
            message.tags,
            message.priority,
            decode_headers(message.headers),
            self,
        )

    async def settle(self, result: MessageResult, *, durable: bool = False) -> float:
        """Report one result. Results that come while a call is under way go together in the next call.

        Returns the seconds that are left, for a touch. Raises NotInFlightError.
        """
        while len(self._round.results) >= _RESULTS_MAX:
            await self._round.done.wait()
        mine = self._round
        mine.results.append(result)
        mine.durable = mine.durable or durable
        if not self._is_sending:
            await self._send_rounds(mine)
        await mine.done.wait()
        if mine.error is not None:
            raise mine.error
        problem = mine.settled.refused.get(result.id)
        if problem is not None:
            raise error_from_problem(problem)
        return mine.settled.timeouts_s.get(result.id, 0.0)

    async def _send_rounds(self, own: _Round) -> None:
        """Send results until the caller's own round is answered: one task calls for all, then the next one does."""
        self._is_sending = True
        try:
            while not own.done.is_set():
                current, self._round = self._round, _Round()
                try:
                    await self._send(current)
                finally:
                    if not current.done.is_set():
                        current.error = current.error or ConnectionError("the call about these results was cancelled")
                        current.done.set()
        finally:
            self._is_sending = False
        if self._round.results:
            with anyio.CancelScope(shield=True):
                await self._send_rounds(self._round)

    async def _send(self, current: _Round) -> None:
        try:
            given = SettleMessages(results=tuple(current.results), durable=current.durable)
            answer = await self._transport.call("POST", self._path, reply_fields(given))
            current.settled = convert(answer, SettledMessages)
        except Exception as error:  # for every task that waits for this round
            current.error = error
        current.done.set()


@checks_arguments
class QueueClientApi:
    """The part of :class:`dep2p.client.Client` about durable queues.

    Each call takes the keyword arguments ``realm`` and ``peer`` (`BrokerChoice`). Without them the queues are those of
    this machine's programs, which no other node reaches. With ``realm``, the queues that this node serves for the
    realm's members; with ``peer``, those that a member keeps; one of several members that share a store, with commas:
    "A,B".
    """

    _transport: Transport

    async def _ask(
        self,
        kind: type[S],
        method: str,
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        params: Mapping[str, str],
        timeout_s: float = _ANSWER_TIMEOUT_S,
    ) -> S:
        """Make a call whose answer is a ``kind``."""
        answer = await self._transport.call(
            method, path, None if body is None else dict(body), params=dict(params), timeout_s=timeout_s
        )
        return parse_reply(kind, answer)

    # Queues

    async def queue_create(
        self,
        name: str,
        *,
        options: Mapping[str, OptionValue] | None = None,
        access: Mapping[str, str | Sequence[str]] | None = None,
        nodes: Sequence[str] = (),
        **at: Unpack[BrokerChoice],
    ) -> QueueInfo:
        """Create a queue. A queue that exists with the same options stays as it is.

        ``options`` and ``access`` are in docs/howto/queues.md. ``nodes``: peer ids of members, which get the partitions
        in turn (docs/howto/distributed-queues.md). Raises QueueExistsError, QueueAccessError, ``ControlError`` D1005
        for a malformed option.
        """
        body: dict[str, object] = {"name": name, "options": dict(options or {})}
        if access is not None:
            body["access"] = {right: who if isinstance(who, str) else list(who) for right, who in access.items()}
        if nodes:
            body["nodes"] = list(nodes)
        return await self._ask(QueueInfo, "POST", "/v1/queues", body, params=_params(**at), timeout_s=_WORK_TIMEOUT_S)

    async def queues(self, **at: Unpack[BrokerChoice]) -> list[QueueSummary]:
        """All queues in numbers."""
        found = await self._ask(QueueList, "GET", "/v1/queues", params=_params(**at), timeout_s=_LOOK_TIMEOUT_S * 3)
        return list(found.queues)

    async def queue(self, name: str, **at: Unpack[BrokerChoice]) -> QueueInfo:
        """A queue with its options, access and channels. Raises QueueNotFoundError."""
        return await self._ask(QueueInfo, "GET", _path(name), params=_params(**at), timeout_s=_LOOK_TIMEOUT_S)

    async def queue_delete(
        self, name: str, *, force: bool = False, **at: Unpack[BrokerChoice]
    ) -> list[PendingDeletion]:
        """Delete a queue with all its messages, channels and dead letters. Raises QueueNotFoundError.

        ``force``: delete a queue on several nodes although some of them are away; returns the shards that remain there.
        """
        params = _params(**at) | ({"force": "true"} if force else {})
        deleted = await self._ask(QueueDeleted, "DELETE", _path(name), params=params, timeout_s=_WORK_TIMEOUT_S)
        return list(deleted.pending_deletions or ())

    async def queue_channel_delete(self, name: str, channel: str, **at: Unpack[BrokerChoice]) -> None:
        """Delete a channel with its dead letters. Raises QueueNotFoundError, ChannelNotFoundError."""
        await self._transport.call(
            "DELETE", _channel_path(name, channel), params=_params(**at), timeout_s=_WORK_TIMEOUT_S
        )

    async def queue_pause(self, name: str, channel: str, **at: Unpack[BrokerChoice]) -> None:
        """Deliver nothing to a channel from now on. This outlives restarts. Nothing is lost."""
        await self._act(name, "pause", {"channel": channel}, at)

    async def queue_pause_all(self, name: str, **at: Unpack[BrokerChoice]) -> None:
        """Deliver nothing of a queue from now on. This outlives restarts. Nothing is lost."""
        await self._act(name, "pause", _ALL_CHANNELS, at)

    async def queue_resume(self, name: str, channel: str, **at: Unpack[BrokerChoice]) -> None:
        """Undo :meth:`queue_pause`."""
        await self._act(name, "resume", {"channel": channel}, at)

    async def queue_resume_all(self, name: str, **at: Unpack[BrokerChoice]) -> None:
        """Undo :meth:`queue_pause_all`. A channel that was paused by itself stays so."""
        await self._act(name, "resume", _ALL_CHANNELS, at)

    async def queue_empty(self, name: str, channel: str, **at: Unpack[BrokerChoice]) -> int:
        """Drop the messages that wait in a channel; returns how many."""
        return convert(await self._act(name, "empty", {"channel": channel}, at), MessageCount).messages

    async def queue_empty_all(self, name: str, **at: Unpack[BrokerChoice]) -> int:
        """Drop all messages of a queue, in every channel; returns how many."""
        return convert(await self._act(name, "empty", _ALL_CHANNELS, at), MessageCount).messages

    async def _act(self, name: str, what: str, body: Mapping[str, object], at: BrokerChoice) -> object:
        return await self._transport.call(
            "POST", f"{_path(name)}/{what}", dict(body), params=_params(**at), timeout_s=_WORK_TIMEOUT_S
        )

    # Publishing and consuming

    async def queue_put(
        self,
        name: str,
        body: bytes,
        *,
        realm: str | None = None,
        peer: str | None = None,
        **options: Unpack[MessageOptions],
    ) -> str:
        """Publish one message; returns its id when it is durable.

        ``options`` are those of :class:`MessageOptions`: ``key``, ``tags``, ``priority``, ``delay_s`` and ``headers``.
        Raises QueueNotFoundError, QueueFullError, MessageTooLargeError, StoreError, QueueAccessError. After any other
        error (a lost daemon) it may or may not have been published.
        """
        message = _message(body, **options)
        published = await self._ask(
            PublishedMessage,
            "POST",
            f"{_path(name)}/messages",
            reply_fields(message),
            params=_params(realm=realm, peer=peer),
            timeout_s=_WORK_TIMEOUT_S,
        )
        return published.id

    async def queue_put_many(
        self,
        name: str,
        messages: AsyncIterator[bytes],
        *,
        key: str = "",
        tags: Sequence[str] = (),
        priority: int = 0,
        delay_s: float = 0.0,
        **at: Unpack[BrokerChoice],
    ) -> QueuedMany:
        """Publish messages in one call, in order, as fast as they are taken. Raises as :meth:`queue_put`; messages
        before the one that failed are published then, as the error's text says."""
        params = _params(**at) | {"priority": str(priority), "delay_s": f"{delay_s:g}"}
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
                    answer = await self._transport.upload(f"{_path(name)}/messages", pieces, params=params)
                    queued = convert(answer, QueuedMany)
            except Exception as raised:
                error = raised
            tasks.cancel_scope.cancel()
        if error is not None:
            raise error
        return queued

    @asynccontextmanager
    async def queue_consume(
        self,
        name: str,
        channel: str,
        *,
        max_in_flight: int = 1,
        from_start: bool = False,
        count: int | None = None,
        filter: str = "",
        exclusive: bool = False,
        **at: Unpack[BrokerChoice],
    ) -> AsyncGenerator[QueueConsumer, None]:
        """Take messages of a channel, which is made when it is new: ``async for message in consumer``.

        At most ``max_in_flight`` messages are held without a result. A new channel starts with what is published from
        now on, or with everything that is there (``from_start``); the first channel of a queue always gets everything.
        After ``count`` messages the loop ends, and no more are taken. When this block or the connection ends, what is
        held goes to other consumers at once. A new channel gets only what its ``filter`` lets through. In an
        ``exclusive`` channel, which is made so, each partition has one consumer at a time, and of each order key one
        message is out at a time, in the order of publishing.

        Raises QueueNotFoundError, QueueAccessError, QueueExistsError when the channel has another filter, or is (not)
        exclusive.
        """
        params = _params(**at) | {"max_in_flight": str(max_in_flight)}
        if from_start:
            params["from_start"] = "1"
        if count is not None:
            params["count"] = str(count)
        if filter:
            params["filter"] = filter
        if exclusive:
            params["exclusive"] = "1"
        path = f"{_channel_path(name, channel)}/consume"
        async with self._transport.opened("POST", path, params=params) as answer:
            lines = NdjsonLines(answer)
            opened = convert(await lines.next_line(), ConsumerOpened)
            yield QueueConsumer(self._transport, lines, opened, count)

    # Messages

    async def queue_peek(
        self,
        name: str,
        *,
        channel: str | None = None,
        count: int = 10,
        **at: Unpack[BrokerChoice],
    ) -> list[MessageInfo]:
        """List the oldest messages without taking them: of the log, or those that ``channel`` has not finished.

        Raises QueueNotFoundError, ChannelNotFoundError.
        """
        params = _params(**at) | {"count": str(count)}
        if channel is not None:
            params["channel"] = channel
        return list((await self._ask(MessageList, "GET", f"{_path(name)}/messages", params=params)).messages)

    @asynccontextmanager
    async def queue_export(
        self, name: str, **at: Unpack[BrokerChoice]
    ) -> AsyncGenerator[AsyncIterator[MessageInfo], None]:
        """Yield every message of the log, oldest first. Raises QueueNotFoundError."""
        async with self._transport.opened("GET", f"{_path(name)}/export", params=_params(**at)) as answer:
            yield _each(NdjsonLines(answer))

    async def queue_dead_letters(
        self,
        name: str,
        channel: str,
        *,
        after: int = 0,
        count: int = 100,
        **at: Unpack[BrokerChoice],
    ) -> list[DeadLetterInfo]:
        """List dead letters of a channel, oldest first, from after the id ``after``.

        Raises QueueNotFoundError, ChannelNotFoundError.
        """
        params = _params(**at) | {"after": str(after), "count": str(count)}
        path = f"{_channel_path(name, channel)}/dead-letters"
        return list((await self._ask(DeadLetterPage, "GET", path, params=params)).dead_letters)

    async def queue_dead_letters_replay(
        self, name: str, channel: str, ids: Iterable[int], **at: Unpack[BrokerChoice]
    ) -> int:
        """Publish these dead letters again, to that channel only; returns how many."""
        return await self._dead_letters(name, channel, "replay", {"ids": list(ids)}, at)

    async def queue_dead_letters_replay_all(self, name: str, channel: str, **at: Unpack[BrokerChoice]) -> int:
        """Publish all dead letters of a channel again, to that channel only; returns how many."""
        return await self._dead_letters(name, channel, "replay", {"all": True}, at)

    async def queue_dead_letters_delete(
        self, name: str, channel: str, ids: Iterable[int], **at: Unpack[BrokerChoice]
    ) -> int:
        """Drop these dead letters; returns how many."""
        return await self._dead_letters(name, channel, "delete", {"ids": list(ids)}, at)

    async def queue_dead_letters_delete_all(self, name: str, channel: str, **at: Unpack[BrokerChoice]) -> int:
        """Drop all dead letters of a channel; returns how many."""
        return await self._dead_letters(name, channel, "delete", {"all": True}, at)

    async def _dead_letters(
        self, name: str, channel: str, what: str, body: Mapping[str, object], at: BrokerChoice
    ) -> int:
        path = f"{_channel_path(name, channel)}/dead-letters/{what}"
        done = await self._ask(MessageCount, "POST", path, body, params=_params(**at), timeout_s=_WORK_TIMEOUT_S)
        return done.messages

    # Partitions

    async def queue_expand(
        self,
        name: str,
        partitions: int,
        *,
        nodes: Sequence[str] = (),
        **at: Unpack[BrokerChoice],
    ) -> QueueExpanded:
        """Expand the queue to this number of partitions in all; return the route table with the ``added`` ones. The
        order of each key holds.

        ``nodes``: the nodes of the new partitions of a queue on several nodes; by default those that it has.
        Raises QueueNotFoundError, QueueAccessError, ``ControlError`` D1005 for fewer than there are.
        """
        body: dict[str, object] = {"partitions": partitions}
        if nodes:
            body["nodes"] = list(nodes)
        return await self._ask(QueueExpanded, "POST", f"{_path(name)}/expand", body, params=_params(**at))

    async def queue_route(self, name: str, **at: Unpack[BrokerChoice]) -> QueueRoute:
        """The route table: which partition has which keys."""
        return await self._ask(QueueRoute, "GET", f"{_path(name)}/route", params=_params(**at))

    async def queue_consumers(self, name: str, channel: str, **at: Unpack[BrokerChoice]) -> ChannelConsumers:
        """The consumers of a channel."""
        path = f"{_channel_path(name, channel)}/consumers"
        return await self._ask(ChannelConsumers, "GET", path, params=_params(**at))

    async def queue_locks(self, name: str, channel: str, **at: Unpack[BrokerChoice]) -> ChannelLocks:
        """The holders of the partitions of an exclusive channel."""
        path = f"{_channel_path(name, channel)}/locks"
        return await self._ask(ChannelLocks, "GET", path, params=_params(**at))

    # Receiving by calls

    async def queue_receive(
        self,
        name: str,
        channel: str,
        *,
        count: int = 1,
        wait_s: float = 10.0,
        invisible_s: float = 60.0,
        attempt_id: str = "",
        from_start: bool = False,
        **at: Unpack[BrokerChoice],
    ) -> list[ReceivedMessage]:
        """Return up to ``count`` messages (at most 32), none when ``wait_s`` (at most 20) seconds are over.

        No other consumer gets them for ``invisible_s``. Asked again with the same ``attempt_id``, the call
        gives the same messages, in case its answer was lost. Nothing is tried again. The channel is made when it is
        new. Raises QueueNotFoundError, ``ControlError`` D1005 for a number out of its bounds.
        """
        body: dict[str, object] = {"count": count, "wait_s": wait_s, "invisible_s": invisible_s}
        body |= {"attempt_id": attempt_id} if attempt_id else {}
        body |= {"from_start": True} if from_start else {}
        received = await self._ask(
            ReceivedMessages,
            "POST",
            f"{_channel_path(name, channel)}/receive",
            body,
            params=_params(**at),
            timeout_s=wait_s + _ANSWER_TIMEOUT_S,
        )
        return list(received.messages)

    async def queue_ack(
        self,
        name: str,
        channel: str,
        handles: Iterable[str],
        **at: Unpack[BrokerChoice],
    ) -> list[str]:
        """Acknowledge messages, on disk when it returns. Returns the handles of those whose time was over before."""
        path = f"{_channel_path(name, channel)}/ack"
        done = await self._ask(RefusedHandles, "POST", path, {"handles": list(handles)}, params=_params(**at))
        return list(done.refused)

    async def queue_change_invisible(
        self,
        name: str,
        channel: str,
        handle: str,
        invisible_s: float,
        **at: Unpack[BrokerChoice],
    ) -> float:
        """Deliver a message again ``invisible_s`` from now, unless it is acknowledged before (0: at once). Returns the
        seconds that it got. Raises NotInFlightError."""
        path = f"{_channel_path(name, channel)}/invisible"
        body = {"handle": handle, "invisible_s": invisible_s}
        return (await self._ask(InvisibleTime, "POST", path, body, params=_params(**at))).invisible_s


_ALL_CHANNELS: Final = {"all_channels": True}


async def _each(lines: NdjsonLines) -> AsyncGenerator[MessageInfo, None]:
    while True:
        try:
            line = await lines.next_line()
        except StopAsyncIteration:
            return
        yield parse_reply(MessageInfo, line)


def _message(
    body: bytes,
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
    )


def _path(name: str) -> str:
    return f"/v1/queues/{quote(name, safe='')}"


def _channel_path(name: str, channel: str) -> str:
    return f"{_path(name)}/channels/{quote(channel, safe='')}"


def _params(*, realm: str | None = None, peer: str | None = None) -> dict[str, str]:
    return {name: value for name, value in (("realm", realm), ("peer", peer)) if value is not None}
