"""Sessions that this program serves through the daemon: pushes, requests of clients and their answers."""

import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Final, Literal

import anyio
from msgspec import UNSET

from dep2p.arguments import checks_arguments
from dep2p.client.models import FeedInterrupted, FeedLines, FeedResumed, line_or_lag
from dep2p.client.transport import Transport
from dep2p.control_api.calls import EndSession, PushToSession, RespondInSession, base64_text
from dep2p.control_api.replies import PushReply, ResponseReply, SessionEnded, SessionLine, SessionList
from dep2p.errors import (
    Dep2pError,
    HandlerError,
    SessionClosedError,
    SessionFullError,
    SessionNotFoundError,
)
from dep2p.gossipsub.topic_types import Lagged
from dep2p.types import PeerId

logger: logging.Logger = logging.getLogger("dep2p.client")

_CALL_TIMEOUT_S: Final = 60.0
_PUSH_TIMEOUT_S: Final = 3_600.0
"""Seconds for a push, which waits while the session is full."""
_LOST: Final = "the daemon that served it went away"
_ENDED_EARLY: Final = "the connection to the daemon has ended"

Place = Literal["before", "after"]


async def all_stats(transport: Transport) -> list[dict[str, object]]:
    """Return the statistics of each session of the node: the live ones first."""
    found = await transport.ask("GET", "/v1/sessions", SessionList, timeout_s=_CALL_TIMEOUT_S)
    return list(found.sessions)


async def stats_of(transport: Transport, session_id: str) -> dict[str, object]:
    """Return the statistics of one session. Raises SessionNotFoundError."""
    for each in await all_stats(transport):
        if each["session_id"] == session_id:
            return each
    raise SessionNotFoundError(f"no session {session_id!r} is known here: it is over, or never was")


class ClientSessionRequest:
    """A request of a session's client. Answer it once: by `respond` or `fail`."""

    __slots__ = ("body", "deadline_s", "request_id", "session")

    def __init__(self, session: "ClientServedSession", line: SessionLine) -> None:
        self.session: ClientServedSession = session
        self.request_id: int = 0 if line.request_id is UNSET else line.request_id
        self.body: bytes = b"" if line.data is UNSET else line.data
        left_ms = 0 if line.deadline_ms is UNSET else line.deadline_ms
        self.deadline_s: float = anyio.current_time() + left_ms / 1000
        """The time, on the event loop's clock, at which the client gets TIMEOUT."""

    async def before(self, body: bytes) -> None:
        """Push in front of the response; see `ClientServedSession.bind`."""
        await self.session.bind(self.request_id, body, "before")

    async def after(self, body: bytes) -> None:
        """Push behind the response; at once when that has been sent."""
        await self.session.bind(self.request_id, body, "after")

    async def respond(self, body: bytes) -> None:
        """Answer the request; see `ClientServedSession.respond`."""
        await self.session.respond(self.request_id, body)

    async def fail(self, text: str) -> None:
        """Answer by an error: the client's `request` raises HandlerError with this text."""
        await self.session.fail(self.request_id, text)


ClientSessionHandler = Callable[["ClientServedSession"], Awaitable[None]]
ClientSessionRequestHandler = Callable[[ClientSessionRequest], Awaitable[bytes]]


@checks_arguments
class ClientServedSession:
    """One client's session: it outlives connections and, on the client's side, processes.

    Iterating gives the client's requests, in order, until the session is over; with a request handler
    (``on_request``) there is nothing to iterate.
    """

    def __init__(self, transport: Transport, line: SessionLine) -> None:
        self._transport = transport
        self.id: str = line.session
        """The session's name in its node; see `ClientSessions.served`."""
        self.peer: PeerId = line.peer
        """The transport-authenticated client."""
        self.name: str = line.name
        self.body: bytes = b"" if line.data is UNSET else line.data
        """The client's data at opening."""
        self._close_reason: str | None = None
        self._over = anyio.Event()
        self._requests: deque[ClientSessionRequest] = deque()
        self._wake = anyio.Event()

    def __repr__(self) -> str:
        return f"<session {self.name!r} of {self.peer[-6:]} {self._close_reason or 'live'}>"

    @property
    def _path(self) -> str:
        return f"/v1/sessions/{self.id}"

    # Pushing

    async def push(self, body: bytes) -> int:
        """Push ``body`` and return its number; waits while the session holds as much as it may.

        The session keeps it until the client has handled it, over any number of connections. Raises SessionClosedError
        (SessionFailedError when the client has not had everything), SessionNotFoundError, MessageTooLargeError.
        """
        return await self._push(PushToSession(data=base64_text(body)))

    async def push_nowait(self, body: bytes) -> int:
        """Push without waiting for room. Raises SessionFullError (nothing was pushed) and what `push` raises."""
        return await self._push(PushToSession(data=base64_text(body), wait=False))

    async def _push(self, call: PushToSession) -> int:
        path = f"{self._path}/pushes"
        pushed = await self._transport.ask("POST", path, PushReply, call, timeout_s=_PUSH_TIMEOUT_S)
        return 0 if pushed.seq is UNSET else pushed.seq

    # Requests

    async def bind(self, request_id: int, body: bytes, place: Place) -> None:
        """Bind a push to a request, open or still to come: it goes directly before or after the response.

        One ``after`` an answered request is pushed at once. Raises AlreadyRespondedError for one ``before`` it,
        SessionFullError over ``bound_items_max``, and what `push` raises. A binding whose request does not come within
        ``binding_timeout_s`` is dropped (counted, logged) or pushed, by ``binding_expired``.
        """
        await self._push(PushToSession(data=base64_text(body), request_id=request_id, place=place))

    async def respond(self, request_id: int, body: bytes) -> None:
        """Answer a request, with the pushes bound to it around the response. Waits until there is room for all of them.

        Raises AlreadyRespondedError (also when its deadline has passed), and what `push` raises.
        """
        await self._respond(RespondInSession(request_id=request_id, data=base64_text(body)))

    async def fail(self, request_id: int, text: str) -> None:
        """Answer a request by an error; the pushes bound to it go all the same."""
        await self._respond(RespondInSession(request_id=request_id, error=text))

    async def _respond(self, call: RespondInSession) -> None:
        path = f"{self._path}/responses"
        await self._transport.ask("POST", path, ResponseReply, call, timeout_s=_CALL_TIMEOUT_S)

    def __aiter__(self) -> AsyncIterator[ClientSessionRequest]:
        return self

    async def __anext__(self) -> ClientSessionRequest:
        while not self._requests:
            if self._over.is_set():
                raise StopAsyncIteration
            self._wake = anyio.Event()
            await self._wake.wait()
        return self._requests.popleft()

    async def serve_requests(self, handler: ClientSessionRequestHandler) -> None:
        """Answer the client's requests by ``handler``, side by side, until the session is over."""
        async with anyio.create_task_group() as tasks:
            async for request in self:
                tasks.start_soon(self._answer, handler, request)

    async def _answer(self, handler: ClientSessionRequestHandler, request: ClientSessionRequest) -> None:
        data: bytes | None = None
        try:
            with anyio.CancelScope(deadline=request.deadline_s) as scope:
                data = await handler(request)
            if scope.cancelled_caught:
                return  # its client has got TIMEOUT
            if type(data) is not bytes:
                raise TypeError(f"the handler of requests of {self.name!r} gave {type(data).__name__}: not bytes")
            await self._answer_by(request.respond(data))
        except HandlerError as error:
            await self._answer_by(request.fail(str(error)))
        except Exception as error:
            if not (isinstance(error, SessionClosedError) and self._over.is_set()):
                logger.exception("the handler of requests of sessions %r failed", self.name)
                await self._answer_by(request.fail("the handler failed"))

    async def _answer_by(self, call: Awaitable[None]) -> None:
        try:
            await call
        except Dep2pError as error:  # the handler has answered by itself, its client has gone, or the daemon has
            logger.debug("a request of %r was not answered: %s", self, error)

    # Its life

    @property
    def close_reason(self) -> str | None:
        """The reason why it is over; None while it lives."""
        return self._close_reason

    async def wait_closed(self) -> None:
        """Until the session is over."""
        await self._over.wait()

    async def end(self, reason: str = "") -> None:
        """End it: nothing more can be pushed. The client gets the pushes under way, and then its iteration ends."""
        path, call = f"{self._path}/end", EndSession(reason=reason)
        await self._transport.ask("POST", path, SessionEnded, call, timeout_s=_CALL_TIMEOUT_S)

    async def stats(self) -> dict[str, object]:
        """Return statistics of the session's queues (docs/reference/control-api.md) as plain values. Raises
        SessionNotFoundError."""
        return await stats_of(self._transport, self.id)

    # For the feed

    def take_request(self, line: SessionLine) -> None:
        """Add a request of the client."""
        self._requests.append(ClientSessionRequest(self, line))
        self._wake.set()

    def close(self, reason: str) -> None:
        """Note that the session is over. Idempotent."""
        if self._close_reason is None:
            self._close_reason = reason
            self._over.set()
            self._wake.set()


class ServedSessions:
    """The sessions of one name that this program serves: an iterator over the new ones, for one task."""

    def __init__(self, transport: Transport, lines: FeedLines, live: dict[str, ClientServedSession]) -> None:
        """``live``: the table of the client's live sessions, by id."""
        self._transport = transport
        self._lines = lines
        self._all = live
        self._mine: dict[str, ClientServedSession] = {}
        self._new: deque[ClientServedSession] = deque()
        self._wake = anyio.Event()
        self._error: Exception | None = None
        self._is_over = False

    async def pump(self) -> None:
        """Read the events of the sessions until the feed ends."""
        try:
            while True:
                line = await self._lines.next_line()
                if isinstance(line, FeedInterrupted):
                    self._close_all(_LOST)
                elif not isinstance(line, FeedResumed):
                    self._take(line)
        except Exception as error:  # for the task that iterates
            self._error = error
        finally:
            self.end()

    def end(self) -> None:
        """End the sessions: their events do not come any more. Idempotent."""
        self._is_over = True
        self._close_all(_ENDED_EARLY)
        self._wake.set()

    def _close_all(self, reason: str) -> None:
        for session in list(self._mine.values()):
            self._close(session, reason)

    def _take(self, fields: Mapping[str, object]) -> None:
        line = line_or_lag(dict(fields), SessionLine)
        if isinstance(line, Lagged):
            logger.warning("%d events of sessions were lost, because this program is too slow", line.count)
            return
        session = self._mine.get(line.session)
        if line.event == "opened":
            session = self._all[line.session] = self._mine[line.session] = ClientServedSession(self._transport, line)
            self._new.append(session)
            self._wake.set()
        elif session is not None and line.event == "request":
            session.take_request(line)
        elif session is not None:
            self._close(session, "" if line.reason is UNSET else line.reason)

    def _close(self, session: ClientServedSession, reason: str) -> None:
        self._mine.pop(session.id, None)
        self._all.pop(session.id, None)
        session.close(reason)

    def __aiter__(self) -> AsyncIterator[ClientServedSession]:
        return self

    async def __anext__(self) -> ClientServedSession:
        while not self._new:
            if self._error is not None:
                raise self._error
            if self._is_over:
                raise StopAsyncIteration
            self._wake = anyio.Event()
            await self._wake.wait()
        return self._new.popleft()


async def run_handler(session: ClientServedSession, handler: ClientSessionHandler) -> None:
    """Run the handler of one session, and end the session when it returns; a session that is over cancels it."""
    reason = ""
    async with anyio.create_task_group() as tasks:

        async def watch() -> None:
            await session.wait_closed()
            tasks.cancel_scope.cancel()

        tasks.start_soon(watch)
        try:
            await handler(session)
        except HandlerError as error:
            reason = str(error) or "the handler failed"
        except Exception as error:
            if session.close_reason is None or not isinstance(error, SessionClosedError):
                logger.exception("the handler of sessions %r failed", session.name)
                reason = "the handler failed"
        tasks.cancel_scope.cancel()
    if session.close_reason is None:
        try:
            await session.end(reason)
        except (SessionNotFoundError, SessionClosedError, SessionFullError):
            return  # it is over by now
