"""Requests, notifies and streams that come to a program through the daemon."""

import logging
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final, TypeVar
from urllib.parse import quote

import anyio
import anyio.abc
from msgspec import UNSET

from dep2p.client.background import Background, tasks
from dep2p.client.models import EventStream, FeedLines, NoticingEventStream, line_or_lag
from dep2p.client.reconnection.feeds import FeedCall, opened_feed
from dep2p.client.streams import ClientStream
from dep2p.client.transport import Transport
from dep2p.control_api.calls import ConfirmNotify, GiveReply, ServeRequests, base64_text
from dep2p.control_api.encoding import decode_headers, fields_of
from dep2p.control_api.errors import DaemonUnreachableError, code_of, too_late
from dep2p.control_api.replies import AcceptedReply, NotifyLine, RequestLine, StreamLine, parse_reply
from dep2p.errors import Dep2pError, HandlerError, StreamClosedError
from dep2p.gossipsub.topic_types import Lagged
from dep2p.outside_text import one_line, sendable
from dep2p.protocols.messaging.incoming import IncomingRequest, Notification, Request
from dep2p.protocols.services.options import ServiceOptions
from dep2p.protocols.timing.backoff import Backoff
from dep2p.types import PeerId

logger: logging.Logger = logging.getLogger("dep2p.client")

_INBOX_ITEMS: Final = 64
"""Notifies of one peer that wait for their handler."""
_PEERS_IDLE_MAX: Final = 1_024
_ERROR_TEXT_BYTES_MAX: Final = 1_024
"""Bytes of an error's text that the daemon takes."""

_CONFIRM_S: Final = 10.0
"""Seconds in which the word that a message was handled is said again. A daemon that is away has forgotten it then."""
_CONFIRM_BACKOFF: Final = Backoff(first_s=0.1, max_s=2.0)

RequestHandler = Callable[[Request], Awaitable[bytes]]
NotifyHandler = Callable[[Notification], Awaitable[None]]
ClientStreamHandler = Callable[[ClientStream], Awaitable[None]]
H = TypeVar("H", bound=Callable[..., Awaitable[object]])


class NotifyStream:
    """An async iterator over notifies, and items where the feed was interrupted. Use it in one task.

    A reliable message is handled when the next entry is asked for, or when `handled` is called.
    """

    def __init__(self, lines: FeedLines, confirm: Callable[[str, str | None], Awaitable[None]]) -> None:
        self._entries = NoticingEventStream(lines, self._convert)
        self._confirm = confirm
        self._in_hand: str | None = None

    def __aiter__(self) -> "NotifyStream":
        return self

    async def __anext__(self) -> Notification | Lagged:
        await self.handled()
        return await anext(self._entries)

    async def handled(self) -> None:
        """Tell the daemon that the message in hand, if it is a reliable one, was handled."""
        if self._in_hand is not None:
            await self._confirm(self._in_hand, None)  # cancelled, it is said again
            self._in_hand = None

    def take(self) -> str | None:
        """Take the id of the message in hand out, for a caller that confirms it itself; None: it is not reliable."""
        message_id, self._in_hand = self._in_hand, None
        return message_id

    def _convert(self, line: dict[str, object]) -> Notification | Lagged:
        message = line_or_lag(line, NotifyLine)
        if isinstance(message, Lagged):
            return message
        self._in_hand = None if message.id is UNSET else message.id
        return Notification(
            message.peer,
            message.name,
            message.data,
            decode_headers(message.headers),
            message.realm_id,
            message.received_at_s,
            message.id is not UNSET,
        )


class Incoming:
    """The names that a client answers, listens to and accepts."""

    def __init__(self, transport: Transport, background: Background) -> None:
        self._transport = transport
        self._background = background

    # By iterating

    @asynccontextmanager
    async def listen(self, name: str, realm: str | None, rate_per_s: float = 0.0) -> AsyncGenerator[NotifyStream, None]:
        """See `Client.listen`."""
        rate = f"{rate_per_s:g}" if rate_per_s else None
        params = _params(name=name, realm=realm, rate_per_s=rate, confirm="1")
        feed = FeedCall("GET", "/v1/notifies", f"notifies {name!r}", loses=True, params=params)
        async with opened_feed(self._transport, feed) as lines:
            notifications = NotifyStream(lines, self._confirm)
            yield notifications
            await notifications.handled()

    async def _confirm(self, message_id: str, error: str | None) -> None:
        """Say that a message was handled, or the error that rejects it, until the daemon has heard it."""
        path = f"/v1/notifies/{quote(message_id, safe='')}"
        call = ConfirmNotify(error=None if error is None else sendable(error, _ERROR_TEXT_BYTES_MAX))
        failures, until = 0, anyio.current_time() + _CONFIRM_S
        while True:
            try:
                await self._transport.ask("POST", path, AcceptedReply, call)
                return
            except (Dep2pError, ValueError) as refused:
                failures += 1
                is_over = code_of(refused) == "D5011" if isinstance(refused, Dep2pError) else False
                pause_s = _CONFIRM_BACKOFF.jittered(failures, random)
                if is_over or anyio.current_time() + pause_s > until:
                    # the daemon restarted, or gave up: it gives the message to a program again
                    logger.warning(
                        "a reliable message was handled and may come again, not confirmed: %s", one_line(str(refused))
                    )
                    return
            await anyio.sleep(pause_s)

    @asynccontextmanager
    async def reply(
        self, name: str, realm: str | None, concurrency: int, rate_per_s: float, service: ServiceOptions
    ) -> AsyncGenerator[AsyncIterator[IncomingRequest], None]:
        """See `Client.reply`."""
        call = ServeRequests(
            name=name,
            concurrency=concurrency,
            realm=realm,
            rate_per_s=rate_per_s,
            group=service.get("group"),
            version=service.get("version"),
            schema=service.get("schema"),
            metadata=dict(service["metadata"]) if "metadata" in service else None,
        )

        def convert(line: dict[str, object]) -> IncomingRequest:
            request = parse_reply(line, RequestLine)
            path = f"/v1/replies/{quote(request.id, safe='')}"

            async def respond(body: bytes, error: str | None) -> None:
                given = (
                    GiveReply(data=base64_text(body))
                    if error is None
                    else GiveReply(error=sendable(error, _ERROR_TEXT_BYTES_MAX))
                )
                try:
                    await self._transport.ask("POST", path, AcceptedReply, given)
                except DaemonUnreachableError as gone:
                    raise too_late(f"the request is gone with the daemon: {gone}") from gone

            return IncomingRequest(_request(request), respond)

        feed = FeedCall("POST", "/v1/replies", f"requests {name!r}", loses=False, body=fields_of(call))
        async with opened_feed(self._transport, feed) as lines:
            yield EventStream(lines, convert)

    @asynccontextmanager
    async def accept(self, name: str, realm: str | None) -> AsyncGenerator[AsyncIterator[ClientStream], None]:
        """See `Client.accept`."""
        async with tasks() as group:
            opened: list[ClientStream] = []

            def convert(line: dict[str, object]) -> ClientStream:
                stream = ClientStream(self._transport, group, parse_reply(line, StreamLine))
                opened[:] = [each for each in opened if not each.is_closed] + [stream]
                return stream

            params = _params(accept=name, realm=realm)
            feed = FeedCall("GET", "/v1/streams", f"streams {name!r}", loses=False, params=params)
            async with opened_feed(self._transport, feed) as lines:
                try:
                    yield EventStream(lines, convert)
                finally:
                    for stream in opened:
                        await stream.aclose()

    # By handlers

    def on_request(
        self,
        name: str,
        handler: RequestHandler,
        realm: str | None,
        concurrency: int,
        rate_per_s: float,
        service: ServiceOptions,
    ) -> Callable[[], None]:
        """Answer requests by a handler, until the returned function is called."""

        async def work(started: Callable[[], None]) -> None:
            async with self.reply(name, realm, concurrency, rate_per_s, service) as requests, tasks() as group:
                started()
                async for request in requests:
                    group.start_soon(_answer, request, handler)

        return self._background.start(work)

    def on_notify(
        self, name: str, handler: NotifyHandler, realm: str | None, concurrency: int, rate_per_s: float
    ) -> Callable[[], None]:
        """Handle notifies, in order per peer, until the returned function is called."""

        async def work(started: Callable[[], None]) -> None:
            async with self.listen(name, realm, rate_per_s) as notifications, tasks() as group:
                lanes = _Lanes(name, handler, concurrency, group, self._confirm)
                started()
                async for notification in notifications:
                    if isinstance(notification, Lagged):
                        if notification.count:  # without, the daemon was away, and the log says so
                            logger.warning(
                                "%d notifies %r were lost, because the handler is too slow", notification.count, name
                            )
                    else:
                        await lanes.put(notification, notifications.take())

        return self._background.start(work)

    def on_stream(
        self, name: str, handler: ClientStreamHandler, realm: str | None, concurrency: int
    ) -> Callable[[], None]:
        """Serve streams by a handler, until the returned function is called."""
        slots = anyio.Semaphore(concurrency)

        async def one(stream: ClientStream) -> None:
            try:
                async with stream:
                    await handler(stream)
            except StreamClosedError as error:
                logger.debug("a stream %r of %s ended early: %s", name, stream.peer, error)
            except Exception:
                logger.exception("the handler of streams %r failed", name)
            finally:
                slots.release()

        async def work(started: Callable[[], None]) -> None:
            async with self.accept(name, realm) as streams, tasks() as group:
                started()
                async for stream in streams:
                    await slots.acquire()
                    group.start_soon(one, stream)

        return self._background.start(work)


class _Lanes:
    """Calls the handler of notifies: those of one peer one after the other, at most ``concurrency`` at once."""

    def __init__(
        self,
        name: str,
        handler: NotifyHandler,
        concurrency: int,
        group: anyio.abc.TaskGroup,
        confirm: Callable[[str, str | None], Awaitable[None]],
    ) -> None:
        self._name = name
        self._confirm = confirm
        self._handler = handler
        self._slots = anyio.Semaphore(concurrency)
        self._group = group
        self._inboxes: dict[PeerId, list[tuple[Notification, str | None]]] = {}
        self._room = anyio.Event()

    async def put(self, notification: Notification, message_id: str | None) -> None:
        """Add a notify; waits while many of its peer wait already. ``message_id``: of a reliable message."""
        inbox = self._inboxes.get(notification.peer)
        if inbox is None:
            self._inboxes[notification.peer] = [(notification, message_id)]
            self._group.start_soon(self._work, notification.peer)
            await anyio.lowlevel.checkpoint()
            return
        while len(inbox) >= _INBOX_ITEMS:
            self._room = anyio.Event()
            await self._room.wait()
        inbox.append((notification, message_id))

    async def _work(self, peer: PeerId) -> None:
        inbox = self._inboxes[peer]
        while inbox:
            notification, message_id = inbox.pop(0)
            self._room.set()
            async with self._slots:
                error = await self._handle(notification)
                if message_id is not None:
                    await self._confirm(message_id, error)
        del self._inboxes[peer]

    async def _handle(self, notification: Notification) -> str | None:
        """Call the handler; return the text of its error."""
        try:
            await self._handler(notification)
        except HandlerError as error:
            logger.warning("the handler of notifies %r failed: %s", self._name, one_line(str(error)))
            return str(error)
        except Exception:
            logger.exception("the handler of notifies %r failed", self._name)
            return "the handler failed"
        return None


async def _answer(request: IncomingRequest, handler: RequestHandler) -> None:
    data: bytes | None = None
    try:
        with anyio.CancelScope(deadline=request.deadline_s) as scope:
            data = await handler(request.request)
        if scope.cancelled_caught:
            return  # its caller does not wait any more
        if type(data) is not bytes:
            raise TypeError(f"the handler {request.name!r} gave {type(data).__name__}: it must give bytes")
        answer = request.respond(data)
    except HandlerError as error:
        answer = request.fail(str(error))
    except Exception:
        logger.exception("the handler of requests %r failed", request.name)
        answer = request.fail("the handler failed")
    try:
        await answer
    except Dep2pError as error:  # too late, too large, or the daemon is gone, which ends the block anyway
        logger.warning("a request %r of %s was not answered: %s", request.name, request.peer, error)


def _request(line: RequestLine) -> Request:
    deadline_s = anyio.current_time() + line.deadline_ms / 1000
    return Request(
        line.peer, line.name, line.data, decode_headers(line.headers), deadline_s, line.idempotent, line.realm_id
    )


def _params(**optional: str | None) -> dict[str, str]:
    return {name: value for name, value in optional.items() if value is not None}
