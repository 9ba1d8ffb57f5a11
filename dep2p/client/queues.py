"""The client's calls about durable queues."""

from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Self, cast
from urllib.parse import quote

import anyio

from dep2p.client.errors import error_from_problem
from dep2p.client.transport import NdjsonLines, Transport
from dep2p.client.upload import Batches
from dep2p.control_api.encoding import decode_headers, decode_payload, encode_headers, encode_payload
from dep2p.types import Headers

_LOOK_TIMEOUT_S: Final = 10.0
_WORK_TIMEOUT_S: Final = 600.0
"""For what may wait for room or for a disk, or works through many messages."""
_RESULTS_MAX: Final = 512
"""In one call; further ones are the next call."""


@dataclass(frozen=True, slots=True)
class QueuedMany:
    """What became of many messages."""

    messages: int
    bytes: int
    first_id: str
    """Empty when there were none."""
    last_id: str


@dataclass(frozen=True, slots=True)
class QueueDelivery:
    """A message that this consumer holds until it says what became of it, or until its time is over."""

    id: str
    queue: str
    channel: str
    data: bytes
    attempts: int
    """1 at the first delivery; above it, an earlier one came to no good end: it may have been worked on before."""
    published_s: float
    """Unix seconds."""
    timeout_s: float
    """From its delivery on; then it goes to another consumer."""
    key: str
    tags: tuple[str, ...]
    priority: int
    headers: Headers
    _consumer: "QueueConsumer" = field(repr=False, compare=False)

    async def finish(self, *, durable: bool = False) -> None:
        """It is done. With ``durable``, returns when that is on disk: the message cannot come back then.

        Raises NotInFlightError when its time is over: another consumer may have it.
        """
        await self._consumer.settle(self.id, {"do": "finish"}, durable=durable)

    async def requeue(self, delay_s: float = 0.0, reason: str = "") -> None:
        """It did not work: deliver it again after ``delay_s``. Raises NotInFlightError."""
        await self._consumer.settle(self.id, {"do": "requeue", "delay_s": delay_s, "reason": reason})

    async def release(self) -> None:
        """Give it back untried: the attempt does not count. Raises NotInFlightError."""
        await self._consumer.settle(self.id, {"do": "release"})

    async def reject(self, reason: str = "") -> None:
        """It can never work: to the dead letters at once. Raises NotInFlightError."""
        await self._consumer.settle(self.id, {"do": "reject", "reason": reason})

    async def touch(self) -> float:
        """Work goes on: returns the seconds that are left from now on. Raises NotInFlightError."""
        return await self._consumer.settle(self.id, {"do": "touch"})


class _Round:
    """Results that go into one call together."""

    def __init__(self) -> None:
        self.results: list[dict[str, object]] = []
        self.durable = False
        self.done = anyio.Event()
        self.refused: dict[str, dict[str, Any]] = {}
        self.timeouts: dict[str, float] = {}
        self.error: Exception | None = None


class QueueConsumer:
    """Deliveries as they come: an async iterator for one task. Leaving the block gives back what is held."""

    def __init__(self, transport: Transport, lines: NdjsonLines, consumer_id: str, queue: str, channel: str) -> None:
        self._transport = transport
        self._lines = lines
        self._queue = queue
        self._channel = channel
        self._path = f"/v1/queue-consumers/{quote(consumer_id, safe='')}/results"
        self._round = _Round()
        self._is_sending = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> QueueDelivery:
        fields = cast(dict[str, Any], await self._lines.next_line())
        return QueueDelivery(
            str(fields["id"]),
            self._queue,
            self._channel,
            decode_payload(str(fields["data"]), str(fields["encoding"])),
            int(fields["attempts"]),
            float(fields["published_s"]),
            float(fields["timeout_s"]),
            str(fields.get("key", "")),
            tuple(str(tag) for tag in fields.get("tags", ())),
            int(fields.get("priority", 0)),
            decode_headers(fields.get("headers") or {}),
            self,
        )

    async def settle(self, message_id: str, result: Mapping[str, object], *, durable: bool = False) -> float:
        """Report one result; those that come while a call is under way go together in the next one.

        Returns the seconds that are left, for a touch. Raises NotInFlightError.
        """
        while len(self._round.results) >= _RESULTS_MAX:
            await self._round.done.wait()
        mine = self._round
        mine.results.append({"id": message_id, **result})
        mine.durable = mine.durable or durable
        if not self._is_sending:
            await self._send_rounds(mine)
        await mine.done.wait()
        if mine.error is not None:
            raise mine.error
        problem = mine.refused.get(message_id)
        if problem is not None:
            raise error_from_problem(problem)
        return mine.timeouts.get(message_id, 0.0)

    async def _send_rounds(self, own: _Round) -> None:
        """Whoever comes first calls for all; it goes on until its own round is answered, the next one then does."""
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
            body = {"results": current.results, "durable": current.durable}
            answer = await self._transport.call("POST", self._path, body)
            current.refused = cast(dict[str, dict[str, Any]], answer.get("refused", {}))
            current.timeouts = {str(key): float(value) for key, value in answer.get("timeouts_s", {}).items()}
        except Exception as error:  # for everybody who waits for this round
            current.error = error
        current.done.set()


class QueueCalls:
    """The part of :class:`dep2p.client.Client` about durable queues.

    Without ``realm`` and ``peer`` the queues are those of this machine's programs, which no other node reaches. With
    ``realm``, the queues that this node keeps for the realm's members; with ``peer``, those that a member keeps;
    one of several members that share a store, with commas: "A,B".
    """

    _transport: Transport

    async def queue_create(
        self,
        name: str,
        *,
        realm: str | None = None,
        peer: str | None = None,
        options: Mapping[str, object] | None = None,
        access: Mapping[str, object] | None = None,
        nodes: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Create a queue; one that exists with the same options is taken as it is.

        ``options`` and ``access`` are in docs/howto/queues.md. ``nodes``: peer ids of members, which get the partitions
        in turn (docs/howto/placed-queues.md). Returns it as :meth:`queue` does. Raises
        QueueExistsError, QueueAccessError, ``ControlError`` D1005 for a malformed option.
        """
        body: dict[str, object] = {"name": name, "options": dict(options or {})}
        if access is not None:
            body["access"] = dict(access)
        if nodes:
            body["nodes"] = list(nodes)
        return await self._transport.call(
            "POST", "/v1/queues", body, params=_params(realm, peer), timeout_s=_WORK_TIMEOUT_S
        )

    async def queues(self, *, realm: str | None = None, peer: str | None = None) -> list[dict[str, Any]]:
        """Each queue as :meth:`queue` tells it, without its channels."""
        answer = await self._transport.call(
            "GET", "/v1/queues", params=_params(realm, peer), timeout_s=_LOOK_TIMEOUT_S * 3
        )
        return cast(list[dict[str, Any]], answer["queues"])

    async def queue(self, name: str, *, realm: str | None = None, peer: str | None = None) -> dict[str, Any]:
        """``name``, ``options``, ``access``, counts, and ``channels`` with theirs. Raises QueueNotFoundError."""
        return await self._transport.call("GET", _path(name), params=_params(realm, peer), timeout_s=_LOOK_TIMEOUT_S)

    async def queue_delete(
        self, name: str, *, realm: str | None = None, peer: str | None = None, force: bool = False
    ) -> None:
        """Delete it with all its messages, channels and dead letters. Raises QueueNotFoundError.

        ``force``: one on several nodes also while some of them are away, whose shares are left.
        """
        params = _params(realm, peer) | ({"force": "true"} if force else {})
        await self._transport.call("DELETE", _path(name), params=params, timeout_s=_WORK_TIMEOUT_S)

    async def queue_channel_delete(
        self, name: str, channel: str, *, realm: str | None = None, peer: str | None = None
    ) -> None:
        """Delete a channel with its dead letters. Raises QueueNotFoundError, ChannelNotFoundError."""
        path = f"{_path(name)}/channels/{quote(channel, safe='')}"
        await self._transport.call("DELETE", path, params=_params(realm, peer), timeout_s=_WORK_TIMEOUT_S)

    async def queue_put(
        self,
        name: str,
        data: bytes,
        *,
        key: str = "",
        tags: Sequence[str] = (),
        priority: int = 0,
        defer_s: float = 0.0,
        headers: Headers | None = None,
        realm: str | None = None,
        peer: str | None = None,
    ) -> str:
        """Publish one message; returns its id when it is durable.

        Raises QueueNotFoundError, QueueFullError, MessageTooLargeError, StoreError, QueueAccessError. After any other
        error (a lost daemon) it may or may not have been published.
        """
        body: dict[str, object] = {**encode_payload(data), "key": key, "tags": list(tags), "priority": priority}
        body["defer_s"] = defer_s
        if headers:
            body["headers"] = encode_headers(headers)
        answer = await self._transport.call(
            "POST", f"{_path(name)}/messages", body, params=_params(realm, peer), timeout_s=_WORK_TIMEOUT_S
        )
        return str(answer["id"])

    async def queue_put_many(
        self,
        name: str,
        messages: AsyncIterator[bytes],
        *,
        key: str = "",
        tags: Sequence[str] = (),
        priority: int = 0,
        defer_s: float = 0.0,
        realm: str | None = None,
        peer: str | None = None,
    ) -> QueuedMany:
        """Publish messages in one call, in order, as fast as they are taken. Raises as :meth:`queue_put`; messages
        before the one that failed are published then, as the error's text says."""
        params = _params(realm, peer) | {"priority": str(priority), "defer_s": f"{defer_s:g}"}
        if key:
            params["key"] = key
        if tags:
            params["tags"] = ",".join(tags)
        batches = Batches(messages)
        error: Exception | None = None
        answer: dict[str, Any] = {}
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(batches.fill)
            try:
                async with aclosing(batches.pieces()) as pieces:
                    answer = await self._transport.upload(f"{_path(name)}/messages", pieces, params=params)
            except Exception as raised:
                error = raised
            tasks.cancel_scope.cancel()
        if error is not None:
            raise error
        return QueuedMany(
            int(answer["messages"]), int(answer["bytes"]), str(answer["first_id"]), str(answer["last_id"])
        )

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
        realm: str | None = None,
        peer: str | None = None,
    ) -> AsyncGenerator[QueueConsumer, None]:
        """Take messages of a channel, which is made when it is new: ``async for message in consumer``.

        At most ``max_in_flight`` messages are held without a result. A new channel starts with what is published from
        now on, or with everything that is there (``from_start``); the first channel of a queue always gets everything.
        No more than ``count`` messages are taken in all. When this block or the connection ends, what is held goes to
        other consumers at once. A new channel gets only what its ``filter`` lets through. In an ``exclusive`` channel,
        which is made so, each partition has one consumer at a time, and of each order key one message is out at a time,
        in the order of publishing.

        Raises QueueNotFoundError, QueueAccessError, QueueExistsError when the channel has another filter, or is (not)
        exclusive.
        """
        params = _params(realm, peer) | {"max_in_flight": str(max_in_flight)}
        if from_start:
            params["from_start"] = "1"
        if count is not None:
            params["count"] = str(count)
        if filter:
            params["filter"] = filter
        if exclusive:
            params["exclusive"] = "1"
        path = f"{_path(name)}/channels/{quote(channel, safe='')}/consume"
        async with self._transport.opened("POST", path, params=params) as answer:
            lines = NdjsonLines(answer)
            first = await lines.next_line()
            yield QueueConsumer(self._transport, lines, str(first["consumer"]), name, channel)

    async def queue_peek(
        self,
        name: str,
        *,
        channel: str | None = None,
        count: int = 10,
        realm: str | None = None,
        peer: str | None = None,
    ) -> list[dict[str, Any]]:
        """The oldest messages, without taking them: of the log, or those that ``channel`` has not done yet.

        Raises QueueNotFoundError, ChannelNotFoundError.
        """
        params = _params(realm, peer) | {"count": str(count)}
        if channel is not None:
            params["channel"] = channel
        answer = await self._transport.call("GET", f"{_path(name)}/messages", params=params)
        return cast(list[dict[str, Any]], answer["messages"])

    @asynccontextmanager
    async def queue_export(
        self, name: str, *, realm: str | None = None, peer: str | None = None
    ) -> AsyncGenerator[AsyncIterator[dict[str, Any]], None]:
        """Every message of the log, oldest first, as :meth:`queue_peek` tells them. Raises QueueNotFoundError."""
        async with self._transport.opened("GET", f"{_path(name)}/export", params=_params(realm, peer)) as answer:
            yield _each(NdjsonLines(answer))

    async def queue_pause(
        self, name: str, *, channel: str | None = None, realm: str | None = None, peer: str | None = None
    ) -> None:
        """Deliver nothing from now on, in one channel or in all; also over restarts. Nothing is lost."""
        await self._act(name, "pause", channel, realm, peer)

    async def queue_resume(
        self, name: str, *, channel: str | None = None, realm: str | None = None, peer: str | None = None
    ) -> None:
        """Undo :meth:`queue_pause`."""
        await self._act(name, "resume", channel, realm, peer)

    async def queue_empty(
        self, name: str, *, channel: str | None = None, realm: str | None = None, peer: str | None = None
    ) -> int:
        """Drop what waits in one channel, or everything; returns how many messages."""
        return int((await self._act(name, "empty", channel, realm, peer)).get("messages", 0))

    async def _act(
        self, name: str, what: str, channel: str | None, realm: str | None, peer: str | None
    ) -> dict[str, Any]:
        body: dict[str, object] = {} if channel is None else {"channel": channel}
        return await self._transport.call(
            "POST", f"{_path(name)}/{what}", body, params=_params(realm, peer), timeout_s=_WORK_TIMEOUT_S
        )

    async def queue_dead(
        self,
        name: str,
        channel: str,
        *,
        after: int = 0,
        count: int = 100,
        realm: str | None = None,
        peer: str | None = None,
    ) -> list[dict[str, Any]]:
        """Dead letters of a channel, oldest first, from after the id ``after``: ``id``, ``attempts``, ``died_s``,
        ``reasons`` and the message. Raises QueueNotFoundError, ChannelNotFoundError."""
        params = _params(realm, peer) | {"after": str(after), "count": str(count)}
        answer = await self._transport.call("GET", _dead(name, channel), params=params)
        return cast(list[dict[str, Any]], answer["dead"])

    async def queue_dead_replay(
        self,
        name: str,
        channel: str,
        ids: Iterable[int] | None = None,
        *,
        realm: str | None = None,
        peer: str | None = None,
    ) -> int:
        """Publish dead letters again, all of them or ``ids``, to that channel only; returns how many."""
        return await self._dead(name, channel, "replay", ids, realm, peer)

    async def queue_dead_remove(
        self,
        name: str,
        channel: str,
        ids: Iterable[int] | None = None,
        *,
        realm: str | None = None,
        peer: str | None = None,
    ) -> int:
        """Forget dead letters, all of them or ``ids``; returns how many."""
        return await self._dead(name, channel, "remove", ids, realm, peer)

    async def _dead(
        self, name: str, channel: str, what: str, ids: Iterable[int] | None, realm: str | None, peer: str | None
    ) -> int:
        body: dict[str, object] = {} if ids is None else {"ids": list(ids)}
        answer = await self._transport.call(
            "POST", f"{_dead(name, channel)}/{what}", body, params=_params(realm, peer), timeout_s=_WORK_TIMEOUT_S
        )
        return int(answer["messages"])


async def _each(lines: NdjsonLines) -> AsyncGenerator[dict[str, Any], None]:
    while True:
        try:
            line = await lines.next_line()
        except StopAsyncIteration:
            return
        yield line


def _path(name: str) -> str:
    return f"/v1/queues/{quote(name, safe='')}"


def _dead(name: str, channel: str) -> str:
    return f"{_path(name)}/channels/{quote(channel, safe='')}/dead"


def _params(realm: str | None, peer: str | None) -> dict[str, str]:
    params = {} if realm is None else {"realm": realm}
    return params if peer is None else params | {"peer": peer}
