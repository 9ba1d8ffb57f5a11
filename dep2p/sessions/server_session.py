"""The server's end of ordered sessions, for apps: a handler pushes into it and answers requests on it."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Literal

import trio

from dep2p.arguments import as_bytes
from dep2p.concurrency.deadline_heap import DueTimes
from dep2p.errors import (
    Dep2pError,
    ErrorCode,
    HandlerError,
    SessionClosedError,
    SessionFailedError,
    SessionFullError,
)
from dep2p.links.pull_link import SessionLink
from dep2p.protocols.sessions.options import SessionOptions
from dep2p.protocols.sessions.server import Asked, ServerSession
from dep2p.protocols.sessions.wire import AFTER, BEFORE, PUSH, RESPONSE, SKIP, Resume, cut_text, encode_failure
from dep2p.protocols.sessions.wire import FAILURE as FAILURE_KIND
from dep2p.protocols.wire.frame import Frame
from dep2p.sessions.trace_events import SessionTrace
from dep2p.types import PeerId

logger: logging.Logger = logging.getLogger("dep2p.io")

_YIELD_BYTES: Final = 65_536
_PUSH_BYTES: Final = 128
"""Bytes that a push counts for besides its data, until the pushing task lets others run."""
_NEVER: Final = float("inf")

Place = Literal["before", "after"]
SessionHandler = Callable[["Session"], Awaitable[None]]
SessionRequestHandler = Callable[["SessionRequest"], Awaitable[bytes]]


@dataclass(frozen=True, slots=True, eq=False)
class SessionEntry:
    """The handlers and options for sessions of one name."""

    name: str
    fn: SessionHandler
    on_request: SessionRequestHandler | None
    options: SessionOptions


class SessionRequest:
    """A request of the client. Answer it once: by `respond` or `fail`."""

    __slots__ = ("body", "deadline_s", "request_id", "session")

    def __init__(self, session: Session, asked: Asked) -> None:
        self.session: Session = session
        self.request_id: int = asked.request_id
        self.body: bytes = asked.data
        self.deadline_s: float = asked.deadline
        """Trio time at which the client gets TIMEOUT."""

    async def before(self, body: bytes) -> None:
        """Push in front of the response; see `Session.bind`."""
        await self.session.bind(self.request_id, body, "before")

    async def after(self, body: bytes) -> None:
        """Push behind the response; at once when that has been sent."""
        await self.session.bind(self.request_id, body, "after")

    async def respond(self, body: bytes) -> None:
        """Answer the request; see `Session.respond`."""
        await self.session.respond(self.request_id, body)

    async def fail(self, text: str) -> None:
        """Answer by an error: the client's `request` raises HandlerError with this text."""
        await self.session.fail(self.request_id, text)


class Reserved:
    """A number of the sequence whose content comes later; later pushes wait behind it."""

    __slots__ = ("_session", "seq")

    def __init__(self, session: Session, seq: int) -> None:
        self._session = session
        self.seq: int = seq

    def fill(self, body: bytes) -> None:
        """Set the content. Raises LocalProtocolError when it was filled or its time is over, and what `push` raises."""
        self._session.fill(self.seq, PUSH, body)

    def skip(self, reason: str) -> None:
        """Leave the number empty: the client's iteration raises SessionGapError with the reason, once, and goes on."""
        self._session.fill(self.seq, SKIP, cut_text(reason))


class Session:
    """One client's session: it outlives connections and, on the client's side, processes.

    Iterating gives the client's requests, in order, until the session is over; with a request handler
    (``on_request``) there is nothing to iterate.
    """

    def __init__(
        self, core: ServerSession, entry: SessionEntry, peer: PeerId, body: bytes, counters: Counter[str], due: DueTimes
    ) -> None:
        self.core = core
        self.entry = entry
        self.peer = peer
        """The transport-authenticated client."""
        self.name: str = core.name
        self.id: str = core.session_id.hex()
        """The session's name in this process; see `Sessions.find`."""
        self.body = body
        """The client's data at opening."""
        self.opened_at_s: float = trio.current_time()
        self.scope: trio.CancelScope = trio.CancelScope()
        """The scope of the handler."""
        self.armed_at = _NEVER
        self.link: SessionLink | None = None
        self.over: trio.Event = trio.Event()
        """Set when nothing more can be pushed, and the client has everything or will never get it."""
        self.trace: SessionTrace | None = None
        self._counters = counters
        self._due = due
        self._turn = trio.StrictFIFOLock()
        self._response_turn = trio.StrictFIFOLock()
        self._room = trio.lowlevel.ParkingLot()
        self._requests: deque[SessionRequest] = deque()
        self._request_lot = trio.lowlevel.ParkingLot()
        self._request_scopes: dict[int, trio.CancelScope] = {}
        self._burst_bytes = 0

    def __repr__(self) -> str:
        return f"<session {self.name!r} of {self.peer[-6:]} {self.core.closed or 'live'}>"

    # Pushing

    async def push(self, body: bytes) -> int:
        """Push ``body`` and return its number; waits while the session holds as much as it may.

        The session keeps it until the client has handled it, over any number of connections. Raises SessionClosedError
        (SessionFailedError when the client has not had everything), MessageTooLargeError.
        """
        if type(body) is not bytes:
            body = as_bytes(body, "a push")
        if self._turn.locked():
            return await self._wait(lambda: self.core.push(body))
        seq = self.core.push(body)
        if not seq:
            return await self._wait(lambda: self.core.push(body))
        if self.link is not None:
            self.link.pulled.wake()
        self._burst_bytes += len(body) + _PUSH_BYTES
        if self._burst_bytes > _YIELD_BYTES:
            self._burst_bytes = 0
            await trio.lowlevel.checkpoint()
        else:
            await trio.lowlevel.checkpoint_if_cancelled()
        return seq

    def push_nowait(self, body: bytes) -> int:
        """Push without waiting. Raises SessionFullError (nothing was pushed) and what `push` raises."""
        seq = 0 if self._turn.locked() else self.core.push(as_bytes(body, "a push"))
        if not seq:
            stats = self.core.sender
            raise SessionFullError(
                f"the client has not handled {stats.unhandled} pushes of {stats.kept_bytes} bytes: push again later"
            )
        self._wake()
        return seq

    async def reserve(self) -> Reserved:
        """Take the next number now and fill it later, within ``options.gap_timeout_s``; waits for room as `push`."""
        now = trio.current_time

        def take() -> int:
            self.core.check(b"")
            return self.core.sender.reserve(now())

        seq = await self._wait(take)
        self._due.schedule(self)
        return Reserved(self, seq)

    def fill(self, seq: int, kind: int, body: bytes) -> None:
        """See `Reserved`."""
        self.core.fill(seq, kind, body)
        self._wake()

    async def _wait(self, take: Callable[[], int], line: trio.StrictFIFOLock | None = None) -> int:
        """Wait in line until ``take`` returns a number; responses have a line of their own."""
        async with line or self._turn:
            while True:
                taken = take()
                if taken:
                    self._wake()
                    return taken
                await self._room.park()

    def _wake(self) -> None:
        if self.link is not None:
            self.link.pulled.wake()

    # Requests

    async def bind(self, request_id: int, body: bytes, place: Place) -> None:
        """Bind a push to a request, open or still to come: it goes directly before or after the response.

        One ``after`` an answered request is pushed at once. Raises AlreadyRespondedError for one ``before`` it,
        SessionFullError over ``bound_items_max``, and what `push` raises. A binding whose request does not come within
        ``binding_timeout_s`` is dropped (counted, logged) or pushed, by ``binding_expired``.
        """
        kind = BEFORE if place == "before" else AFTER
        body = as_bytes(body, "a push")
        await self._wait(lambda: self.core.bind(kind, request_id, body, trio.current_time()), self._response_turn)
        self._due.schedule(self)

    async def respond(self, request_id: int, body: bytes) -> None:
        """Answer a request, with the pushes bound to it around the response. Waits until there is room for all of them.

        Raises AlreadyRespondedError (also when its deadline has passed), ``ValueError`` for a request that has not
        come, and what `push` raises.
        """
        body = as_bytes(body, "a push")
        await self._wait(lambda: self.core.respond(request_id, RESPONSE, body), self._response_turn)
        self._ended(request_id)

    async def fail(self, request_id: int, text: str) -> None:
        """Answer a request by an error; the pushes bound to it go all the same."""
        body = encode_failure(ErrorCode.HANDLER_FAILED, text)
        await self._wait(lambda: self.core.respond(request_id, FAILURE_KIND, body), self._response_turn)
        self._ended(request_id)

    def _ended(self, request_id: int) -> None:
        self._request_scopes.pop(request_id, None)

    def __aiter__(self) -> AsyncIterator[SessionRequest]:
        return self

    async def __anext__(self) -> SessionRequest:
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self._requests:
            if self.core.closed is not None:
                if self.core.failed:
                    raise SessionFailedError(f"the session is over: {self.core.closed}")
                raise StopAsyncIteration
            await self._request_lot.park()
        return self._requests.popleft()

    async def serve_requests(self, handler: SessionRequestHandler) -> None:
        """Answer the client's requests by ``handler``, side by side, until the session is over."""
        async with trio.open_nursery() as nursery:
            try:
                async for request in self:
                    nursery.start_soon(self._answer, handler, request)
            except SessionFailedError:
                logger.debug("%r failed", self)

    async def _answer(self, handler: SessionRequestHandler, request: SessionRequest) -> None:
        request_id = request.request_id
        if not self.core.bindings.is_open(request_id):
            return  # its time was over before its turn came
        try:
            with trio.CancelScope() as scope:
                self._request_scopes[request_id] = scope
                await self._answer_by(handler, request)
        except Dep2pError as error:
            logger.debug("request %d of %r was not answered: %s", request_id, self, error)
        finally:
            self._ended(request_id)

    async def _answer_by(self, handler: SessionRequestHandler, request: SessionRequest) -> None:
        try:
            data = await handler(request)
            if type(data) is not bytes:
                raise TypeError(f"the handler of requests of {self.name!r} gave {type(data).__name__}: not bytes")
        except HandlerError as error:
            self._counters["handlers_failed"] += 1
            await self._fail_open(request, str(error))
        except Exception as error:
            if self.core.closed is not None and isinstance(error, SessionClosedError):
                return
            self._counters["handlers_failed"] += 1
            logger.exception("the handler of requests of sessions %r failed", self.name)
            await self._fail_open(request, "the handler failed")
        else:
            if self.core.bindings.is_open(request.request_id):
                await self.respond(request.request_id, data)

    async def _fail_open(self, request: SessionRequest, text: str) -> None:
        if self.core.bindings.is_open(request.request_id):
            await self.fail(request.request_id, text)

    # Its life

    @property
    def is_attached(self) -> bool:
        """Whether its client is connected at this moment."""
        return self.link is not None

    @property
    def close_reason(self) -> str | None:
        """The reason why it is over; None while it lives."""
        return self.core.closed

    async def wait_closed(self) -> None:
        """Until the session is over."""
        await self.over.wait()

    def end(self, reason: str = "") -> None:
        """End it: nothing more can be pushed. The client gets the pushes under way, and then its iteration ends."""
        self.core.end(reason)
        self._wake()
        self._due.schedule(self)

    def stats(self) -> dict[str, object]:
        """Return statistics of the session's queues (docs/reference/control-api.md) as plain values."""
        return {"peer": self.peer, "role": "server", **self.core.stats()}

    # For the service

    def attach(self, link: SessionLink, resume: Resume) -> None:
        """Begin a link of the client; an earlier one is over. Raises ProtocolError."""
        earlier, self.link = self.link, None
        if earlier is not None:
            self._counters["links_taken_over"] += 1
            self.core.detach(trio.current_time())
            earlier.end(SessionClosedError("another stream of the client took the session over"), abort=True)
        resumes, first = self.core.resumes, not self.core.links
        self.core.attach(resume, trio.current_time())
        if self.trace is not None:
            state = "resumed" if self.core.resumes > resumes else "opened" if first else "reset"
            self.trace.put(state, epoch=self.core.epoch, position=self.core.sender.sent)
        self.link = link
        self._settle()

    def detach(self, link: SessionLink) -> None:
        """End a link."""
        if self.link is link:
            self.link = None
            self.core.detach(trio.current_time())
            if self.trace is not None and self.core.closed is None:
                self.trace.put("lost", position=self.core.sender.handled)
            self._settle()

    def handle(self, frames: list[Frame]) -> None:
        """Take frames of the attached link. Raises ProtocolError."""
        core = self.core
        try:
            if core.handle(frames, trio.current_time()):
                self._room.unpark_all()  # the first of each line
                self._wake()
        finally:
            if self.trace is not None:
                self.trace.acknowledged(core)
            if core.expired_requests:
                self._stop_expired()
                self._wake()
            if core.requests:
                while core.requests:
                    self._requests.append(SessionRequest(self, core.requests.popleft()))
                self._request_lot.unpark_all()
                self._wake()
            if core.closed is not None:
                self._settle()

    def collect(self, bytes_max: int) -> list[bytes]:
        """Return the bytes to write next."""
        now = trio.current_time()
        pieces = self.core.collect(bytes_max, now)
        if pieces:
            self._note_flow(now)
            self._due.schedule(self)
            if self.trace is not None:
                self.trace.written(self.core)
        return pieces

    def _note_flow(self, now: float) -> None:
        if self.link is not None and self.link.flows():
            self.core.sender.note_flow(now)

    def next_deadline(self) -> float | None:
        return self.core.next_deadline()

    def on_deadline(self, now: float) -> None:
        """Act on deadlines."""
        core = self.core
        self._note_flow(now)
        given_up = core.on_deadline(now)
        if given_up:
            self._counters["bound_expired"] += len(given_up)
            logger.warning(
                "%d pushes bound to requests of %r that did not come: %s",
                len(given_up),
                self,
                "pushed now" if self.entry.options.binding_expired == "deliver" else "dropped",
            )
        self._stop_expired()
        self._settle()

    def _stop_expired(self) -> None:
        """Cancel handlers of requests whose time is over, or that the client has given up."""
        expired = self.core.expired_requests
        for request_id in expired:
            scope = self._request_scopes.pop(request_id, None)
            if scope is not None:
                scope.cancel()
        expired.clear()

    def close(self, reason: str, *, failed: bool = False) -> None:
        """End it now."""
        self.core.close(reason, failed=failed)
        self._settle()

    def _settle(self) -> None:
        core = self.core
        if core.closed is None:
            self._wake()
            self._due.schedule(self)
        elif not self.over.is_set():
            if self.trace is not None:
                self.trace.end(failed=core.failed, position=core.sender.last_seq, reason=core.closed)
            self.over.set()
            self._room.unpark_all()
            self._request_lot.unpark_all()
            self._due.forget(self)
