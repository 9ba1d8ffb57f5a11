"""The ordered sessions of one joined realm (docs/spec/session.md): those served here, and those opened to others."""

import logging
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

import trio

from dep2p.arguments import as_bytes
from dep2p.concurrency.contained import run_contained
from dep2p.concurrency.deadline_heap import DueTimes
from dep2p.errors import (
    Dep2pError,
    ErrorCode,
    HandlerError,
    NoHandlerError,
    OverloadedError,
    ProtocolError,
    SessionClosedError,
    SessionNotFoundError,
    SessionTokenError,
    StreamClosedError,
)
from dep2p.host.interface import ByteStream, Connection, Host
from dep2p.limits import Limits
from dep2p.links.fairness import Fairness
from dep2p.links.pull_link import LinkCalls, SessionLink
from dep2p.protocols.sessions.client import ClientSession
from dep2p.protocols.sessions.options import SessionOptions
from dep2p.protocols.sessions.resume_token import decode_token
from dep2p.protocols.sessions.server import ServerSession
from dep2p.protocols.sessions.wire import SESSION_ID_BYTES, Resume, decode_resume
from dep2p.protocols.wire.frame import Frame, FrameType
from dep2p.protocols.wire.payload import check_body, check_name
from dep2p.realm.interface import RealmGate
from dep2p.sessions.client_session import OpenSession, SessionContext
from dep2p.sessions.server_session import Session, SessionEntry, SessionHandler, SessionRequestHandler
from dep2p.sessions.trace_events import SessionTrace
from dep2p.tracing.event_log import TraceLog
from dep2p.types import PeerId, RealmId, Rng, peer_id_bytes

logger: logging.Logger = logging.getLogger("dep2p.io")

_RESUME: Final = int(FrameType.RESUME)
_CLOSED_KEPT: Final = 64
"""Sessions that are over and still in `stats`."""
_LINKS_PER_PEER: Final = 2
"""Streams of one peer for each session that it may have: it has more for a moment when it reconnects."""


def session_protocol(realm_id: RealmId) -> str:
    """The libp2p protocol id of ordered sessions."""
    return f"/dep2p/app/{realm_id}/session/1.0.0"


class SessionHandlers:
    """The registry of session handlers, by name; one for all realms of a node."""

    def __init__(self) -> None:
        self._entries: dict[tuple[RealmId | None, str], SessionEntry] = {}

    def serve(self, realm_id: RealmId | None, entry: SessionEntry) -> Callable[[], None]:
        """Register a handler; return a function that removes it, while sessions in progress go on. Raises
        ``ValueError``."""
        check_name(entry.name)
        if not callable(entry.fn):
            raise ValueError(f"the handler of sessions {entry.name!r} is not callable: {entry.fn!r}")
        key = (realm_id, entry.name)
        if key in self._entries:
            raise ValueError(f"sessions {entry.name!r} have a handler already: unregister that one first")
        self._entries[key] = entry

        def unregister() -> None:
            if self._entries.get(key) is entry:
                del self._entries[key]

        return unregister

    def find(self, realm_id: RealmId, name: str) -> SessionEntry | None:
        """Return the handler of this realm, or of every realm."""
        return self._entries.get((realm_id, name)) or self._entries.get((None, name))

    def names(self, realm_id: RealmId) -> list[str]:
        """List the names with a handler in a realm."""
        return [name for realm, name in self._entries if realm in (None, realm_id)]


class SessionService:
    """The sessions of one realm. Everything but `run` may be called while `run` runs in another task."""

    def __init__(
        self,
        host: Host,
        gate: RealmGate,
        realm_id: RealmId,
        limits: Limits,
        registry: SessionHandlers,
        *,
        rng: Rng,
        fairness: Fairness | None = None,
    ) -> None:
        """``fairness``: that of the node, which all its realms share."""
        self._fairness = fairness or Fairness()
        self.protocol: str = session_protocol(realm_id)
        self._host = host
        self._gate = gate
        self._realm_id = realm_id
        self._limits = limits
        self._registry = registry
        self._rng = rng
        self._counters: Counter[str] = Counter()
        self._due = DueTimes()
        self._context = SessionContext(gate, self.protocol, limits, self._counters, self._due, rng)
        self._served: dict[tuple[PeerId, bytes], Session] = {}
        self._opened: dict[OpenSession, None] = {}
        self._links: dict[SessionLink, None] = {}
        self._closed: deque[dict[str, object]] = deque(maxlen=_CLOSED_KEPT)
        self._nursery: trio.Nursery | None = None
        self._is_draining = False
        self._trace_log: TraceLog | None = None

    def trace_to(self, log: TraceLog | None) -> None:
        """Write events to this trace from now on; None ends that."""
        self._trace_log = log
        for session in self._served.values():
            session.trace = None if log is None else SessionTrace(log, session.id, session.peer, "in", session.core)
        for opened in self._opened:
            opened.trace = None if log is None else SessionTrace(log, opened.id, opened.peer, "out", opened.core)

    # Life

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled."""
        unsubscribe = (
            self._gate.subscribe_unverified(self._on_unverified),
            self._gate.subscribe_verified(self._on_verified),
        )
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                self._host.set_stream_handler(self.protocol, self._accept)
                task_status.started()
                await self._due.run()
        finally:
            self._nursery = None
            for each in unsubscribe:
                each()
            self._host.remove_stream_handler(self.protocol)
            for session in list(self._served.values()):
                session.close("this node has left the realm or stopped", failed=bool(session.core.sender.unhandled))
            for opened in list(self._opened):
                opened.stop()

    async def drain(self) -> None:
        """Refuse new sessions from now on, and wait until connected clients have received their pushes."""
        self._is_draining = True
        while any(  # noqa: ASYNC110  (happens once in a life)
            session.is_attached and session.core.sender.received < session.core.sender.last_seq
            for session in self._served.values()
        ):
            await trio.sleep(0.02)

    def _on_unverified(self, connection: Connection) -> None:
        for link in list(self._links):
            if link.connection.id == connection.id:
                link.lose_membership()
        for opened in self._opened:
            if opened.link is not None and opened.link.connection.id == connection.id:
                opened.link.lose_membership()

    def _on_verified(self, connection: Connection) -> None:
        """A newer connection: a session that is opened from here resumes on it, since the older one may be dead."""
        for opened in self._opened:
            link = opened.link
            if (
                link is not None
                and opened.peer == connection.peer
                and link.connection.is_superseded
                and link.connection.id != connection.id
            ):
                link.end(StreamClosedError("the peer has a newer connection"), abort=True)

    # Serving

    def find(self, session_id: str) -> Session:
        """Return the session that is served here under this id. Raises SessionNotFoundError."""
        for session in self._served.values():
            if session.id == session_id:
                return session
        raise SessionNotFoundError(f"no session {session_id!r} is served here")

    def served(self, name: str | None = None) -> list[Session]:
        """List the live sessions, oldest first; of one name when given."""
        return [session for session in self._served.values() if name is None or session.name == name]

    def opened(self) -> list[OpenSession]:
        """List the sessions that this node has opened, oldest first."""
        return list(self._opened)

    async def _accept(self, stream: ByteStream) -> None:
        nursery = self._nursery
        peer = stream.connection.peer
        if nursery is None:
            stream.reset()
        elif sum(link.peer == peer for link in self._links) >= self._limits.sessions_per_peer_max * _LINKS_PER_PEER:
            self._counters["links_refused_per_peer_max"] += 1
            stream.reset()
        else:
            nursery.start_soon(run_contained, partial(self._serve_link, stream), "a session link")

    async def _serve_link(self, stream: ByteStream) -> None:
        attached: list[Session] = []

        def collect(bytes_max: int) -> list[bytes]:
            return attached[0].collect(bytes_max) if attached else []

        def on_frames(link: SessionLink, frames: list[Frame]) -> None:
            if not attached:
                session = self._resume(link, frames[0])
                if session is None:
                    return
                attached.append(session)
                patience.deadline = float("inf")
                frames = frames[1:]
            if frames and attached[0].link is link:
                attached[0].handle(frames)
            self._end_if_over(attached[0], link)

        def on_end(link: SessionLink, _error: Dep2pError) -> None:
            if attached:
                attached[0].detach(link)

        link = SessionLink(
            stream,
            self._gate,
            self._limits,
            self._counters,
            LinkCalls(collect, on_frames, on_end),
            fairness=self._fairness,
        )
        self._links[link] = None
        try:
            with trio.move_on_after(self._limits.stream_first_item_timeout_s) as patience:
                if self._gate.is_verified(stream.connection):
                    link.start()
                else:
                    link.lose_membership()
                await link.run()
        finally:
            del self._links[link]

    def _end_if_over(self, session: Session, link: SessionLink) -> None:
        if session.core.closed is not None and link.error is None:
            link.end(StreamClosedError(f"the session is over: {session.core.closed}"))

    def _resume(self, link: SessionLink, frame: Frame) -> Session | None:
        """Return the session of a link's first frame; None when it is refused. Raises ProtocolError."""
        if frame.type != _RESUME or frame.flags:
            raise ProtocolError(f"frame type 0x{frame.type:02x} before RESUME")
        resume = decode_resume(frame.payload)
        key = (link.peer, resume.session_id)  # a peer cannot find another peer's session, which stays as it is
        session = self._served.get(key)
        if session is None:
            session = self._create(link, resume)
            if session is None:
                return None
        elif session.name != resume.name:
            raise ProtocolError(f"the session has the name {session.name!r}")
        session.attach(link, resume)
        return session

    def _create(self, link: SessionLink, resume: Resume) -> Session | None:
        refusal: Dep2pError | None = None
        entry = self._registry.find(self._realm_id, resume.name)
        of_peer = sum(peer == link.peer for peer, _id in self._served)
        code = ErrorCode.OVERLOADED
        if self._is_draining:
            refusal = OverloadedError("this node is about to stop")
        elif entry is None:
            code, refusal = ErrorCode.NO_HANDLER, NoHandlerError(f"no sessions {resume.name[:200]!r} are served here")
        elif len(self._served) >= self._limits.sessions_max or of_peer >= self._limits.sessions_per_peer_max:
            self._fairness.ledger.refuse(link.peer, "sessions")
            refusal = OverloadedError(
                f"{len(self._served)} sessions are served here, {of_peer} of them yours, and no more are taken "
                "(sessions_max, sessions_per_peer_max): try again when some have ended"
            )
        nursery = self._nursery
        if entry is None or refusal is not None or nursery is None:
            self._counters[f"refused_{code.name.lower()}"] += 1
            link.refuse(refusal or StreamClosedError("this node is stopping"), code)
            return None
        epoch = int.from_bytes(self._rng.randbytes(8), "big") or 1
        core = ServerSession(resume.session_id, resume.name, epoch, entry.options, trio.current_time())
        session = Session(core, entry, link.peer, resume.data, self._counters, self._due)
        if self._trace_log is not None:
            session.trace = SessionTrace(self._trace_log, session.id, session.peer, "in", core)
        self._served[(link.peer, resume.session_id)] = session
        self._counters["opened"] += 1
        nursery.start_soon(run_contained, partial(self._run_session, session), f"the session {session.name!r}")
        return session

    async def _run_session(self, session: Session) -> None:
        """Run the handler's task, and end the session."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch, session)
                with session.scope:
                    await self._handle(session)
                await session.over.wait()
        finally:
            session.close("this node has left the realm or stopped", failed=bool(session.core.sender.unhandled))
            self._forget(session)

    async def _handle(self, session: Session) -> None:
        on_request = session.entry.on_request
        async with trio.open_nursery() as nursery:
            if on_request is not None:
                nursery.start_soon(session.serve_requests, on_request)
            reason = await self._call(session)
            nursery.cancel_scope.cancel()
        session.end(reason)

    async def _call(self, session: Session) -> str:
        """Call the handler; return the reason of its failure, or "". It runs inside the nursery, which would group its
        errors."""
        try:
            await session.entry.fn(session)
        except HandlerError as error:
            self._counters["handlers_failed"] += 1
            return str(error) or "the handler failed"
        except Exception as error:
            if session.core.closed is None or not isinstance(error, SessionClosedError):
                self._counters["handlers_failed"] += 1
                logger.exception("the handler of sessions %r failed", session.name)
                return "the handler failed"
        return ""

    async def _watch(self, session: Session) -> None:
        """Cancel a handler that does not notice the end: it must not stay forever."""
        await session.over.wait()
        if session.core.failed:
            self._counters["failed"] += 1
            logger.warning(
                "session %s (%r) of %s failed: %s", session.id, session.name, session.peer, session.core.closed
            )
        if session.link is not None:
            self._end_if_over(session, session.link)
        session.scope.deadline = min(session.scope.deadline, trio.current_time() + self._limits.close_timeout_s)

    def _forget(self, session: Session) -> None:
        del self._served[(session.peer, session.core.session_id)]
        self._counters["closed"] += 1
        self._count(session.core.counts)
        sender = session.core.sender
        self._counters["resumes_served"] += session.core.resumes
        self._counters["retransmitted_items"] += sender.retransmitted_items
        self._counters["pushed"] += sender.last_seq
        self._closed.append(session.stats())

    def _count(self, counts: dict[str, int]) -> None:
        for name, count in counts.items():
            self._counters[name] += count

    # Opening

    @asynccontextmanager
    async def open(
        self,
        peer: PeerId,
        name: str,
        body: bytes = b"",
        *,
        token: str | None = None,
        options: SessionOptions | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[OpenSession, None]:
        """See `Sessions.open`."""
        session = await self.start(peer, name, body, token=token, options=options, timeout_s=timeout_s)
        try:
            yield session
            await session.aclose()
        finally:
            session.scope.cancel()

    async def start(
        self,
        peer: PeerId,
        name: str,
        body: bytes = b"",
        *,
        token: str | None = None,
        options: SessionOptions | None = None,
        timeout_s: float | None = None,
    ) -> OpenSession:
        """Like `open`, for a caller that ends it by `OpenSession.aclose` or `detach` itself."""
        nursery = self._nursery
        if nursery is None:
            raise StreamClosedError("sessions are not running")
        check_name(name)
        body = as_bytes(body, "the opening body")
        check_body(body, self._limits.message_bytes_max)
        if len(self._opened) >= self._limits.sessions_max:
            raise OverloadedError(f"this node has {len(self._opened)} sessions open: raise sessions_max in [limits]")
        options = options or SessionOptions.of(self._limits)
        core = self._core(peer, name, body, token, options)
        session = OpenSession(core, peer, self._context)
        if self._trace_log is not None:
            session.trace = SessionTrace(self._trace_log, session.id, peer, "out", core)
        self._opened[session] = None
        nursery.start_soon(self._run_opened, session)
        try:
            await session.opened(self._limits.request_timeout_s if timeout_s is None else timeout_s)
        except BaseException:
            session.leave(keep=token is not None)
            session.scope.cancel()
            raise
        return session

    def _core(self, peer: PeerId, name: str, body: bytes, token: str | None, options: SessionOptions) -> ClientSession:
        if token is None:
            return ClientSession(self._rng.randbytes(SESSION_ID_BYTES), name, options, data=body)
        place = decode_token(token)
        if place.server != peer_id_bytes(peer) or place.name != name:
            raise SessionTokenError(f"the token is of a session {place.name!r} with another peer, or of another name")
        if any(each.core.session_id == place.session_id for each in self._opened):
            raise SessionTokenError("the session of this token is open in this node already")
        return ClientSession(place.session_id, name, options, data=body, epoch=place.epoch, handled=place.handled)

    async def _run_opened(self, session: OpenSession) -> None:
        try:
            await run_contained(session.run, f"the session {session.name!r}", session.failed_internally)
        finally:
            del self._opened[session]
            core = session.core
            self._count(core.counts)
            self._counters["resumes"] += core.resumes
            self._counters["duplicates_dropped"] += core.receiver.duplicates
            self._counters["early_dropped"] += core.receiver.early_dropped
            self._closed.append(session.stats())

    # Reporting

    def counters(self) -> dict[str, int]:
        """Monotonic counts by name."""
        counts = Counter(self._counters)
        for session in self._served.values():
            counts.update(session.core.counts)
            counts["resumes_served"] += session.core.resumes
            counts["retransmitted_items"] += session.core.sender.retransmitted_items
            counts["pushed"] += session.core.sender.last_seq
        for opened in self._opened:
            core = opened.core
            counts.update(core.counts)
            counts["resumes"] += core.resumes
            counts["duplicates_dropped"] += core.receiver.duplicates
            counts["early_dropped"] += core.receiver.early_dropped
        return dict(counts)

    def each(self) -> Iterator[dict[str, object]]:
        """The statistics of each session that lives, then of those that were over lately."""
        for session in self._served.values():
            yield {**session.stats(), "is_over": False}
        for opened in self._opened:
            yield {**opened.stats(), "is_over": False}
        for stats in self._closed:
            yield {**stats, "is_over": True}

    def stats(self) -> object:
        """Return counts of this moment."""
        return {"served": len(self._served), "opened": len(self._opened), "names": self._registry.names(self._realm_id)}


__all__ = [
    "OpenSession",
    "Session",
    "SessionEntry",
    "SessionHandler",
    "SessionHandlers",
    "SessionRequestHandler",
    "SessionService",
    "session_protocol",
]
