"""The client's calls about ordered sessions."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, Literal

from msgspec import UNSET

from dep2p.arguments import checks_arguments
from dep2p.client.models import EventStream, FeedLagged, line_or_lag
from dep2p.client.transport import NdjsonLines, Transport
from dep2p.control_api.calls import (
    AskSession,
    EmptyCall,
    OpenSessionCall,
    PushToSession,
    PushToSessions,
    RespondInSession,
    TakePushes,
    base64_text,
)
from dep2p.control_api.replies import (
    PayloadReply,
    PushedToSessions,
    PushLine,
    PushReply,
    ResponseReply,
    SessionEnded,
    SessionLine,
    SessionList,
    SessionOpened,
    SessionTokenReply,
    TakenPushes,
)
from dep2p.errors import SessionGapError, SessionResetError
from dep2p.protocols.sessions.resume_token import decode_token, encode_token
from dep2p.types import PeerId

_CALL_TIMEOUT_S: Final = 60.0
_TAKE_WAIT_S: Final = 30.0
_MARGIN_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class SessionPush:
    """A push of a session."""

    seq: int
    body: bytes
    request_id: int
    """The number of the request that the push is bound to; 0 for none."""
    place: Literal["", "before", "after"]
    """Whether it comes before or after that request's response."""
    token: str
    """The token of the place behind this push: keep it when the push is handled."""


@dataclass(frozen=True, slots=True)
class SessionEvent:
    """Something that happened on a session that this program serves."""

    event: Literal["opened", "request", "closed"]
    session: str
    """The session's id, for `push_session` and the others."""
    peer: PeerId
    name: str
    body: bytes
    """The client's data at opening, or its request."""
    request_id: int
    reason: str
    """The reason why it was closed."""


@checks_arguments
class OpenedSession:
    """A session with a server. Iterate in one task; `request` may be called from any."""

    def __init__(self, transport: Transport, session_id: str, token: str) -> None:
        self._transport = transport
        self.id = session_id
        self.token: str = token
        """The place behind the last push that was handled: the one before the latest."""
        self._after = 0
        self._batch: list[SessionPush] = []
        self._given: SessionPush | None = None
        self._is_over = False

    def __aiter__(self) -> AsyncIterator[SessionPush]:
        return self

    async def __anext__(self) -> SessionPush:
        """Return the next push. Raises SessionResetError or SessionGapError once where pushes are missing; iterating
        goes on."""
        if self._given is not None:
            self._after, self.token, self._given = self._given.seq, self._given.token, None
        while not self._batch:
            if self._is_over:
                raise StopAsyncIteration
            await self._take()
        self._given = self._batch.pop(0)
        return self._given

    async def _take(self) -> None:
        call, timeout_s = TakePushes(after=self._after, wait_s=_TAKE_WAIT_S), _TAKE_WAIT_S + _MARGIN_S
        taken = await self._transport.ask("POST", f"{self._path}/take", TakenPushes, call, timeout_s=timeout_s)
        token = taken.token or self.token
        if taken.ended:
            self._is_over = True
        elif taken.reset is not UNSET:
            self._after, self.token = taken.reset.next_seq - 1, token
            raise SessionResetError(taken.reset.detail, taken.reset.epoch, taken.reset.next_seq)
        elif taken.gap is not UNSET:
            self.token = token
            raise SessionGapError(taken.gap)
        else:
            self._batch = _with_own_tokens([_push(line, token) for line in taken.pushes])

    @property
    def _path(self) -> str:
        return f"/v1/sessions/{self.id}"

    async def request(self, body: bytes, *, timeout_s: float = 30.0) -> bytes:
        """Ask the server and return its answer; see `dep2p.sessions.service.OpenSessionCall.request`."""
        call, path = AskSession(data=base64_text(body), timeout_s=timeout_s), f"{self._path}/requests"
        return (await self._transport.ask("POST", path, PayloadReply, call, timeout_s=timeout_s + _MARGIN_S)).data

    async def aclose(self) -> None:
        """End the session, and notify the server."""
        await self._leave("0")

    async def detach(self) -> str:
        """Leave without ending the session; return the token to go on with."""
        await self._leave("1")
        return self.token

    async def _leave(self, keep: str) -> None:
        if not self._is_over:
            self._is_over = True
            params = {"keep": keep}
            await self._transport.ask("DELETE", self._path, SessionTokenReply, params=params, timeout_s=_CALL_TIMEOUT_S)


def _push(line: PushLine, token: str) -> SessionPush:
    request_id = 0 if line.request_id is UNSET else line.request_id
    return SessionPush(line.seq, line.data, request_id, "" if line.place is UNSET else line.place, token)


def _with_own_tokens(pushes: list[SessionPush]) -> list[SessionPush]:
    """Give each push of a batch its own token. The batch has one token, for the place behind its last push."""
    if not pushes:
        return pushes
    last = decode_token(pushes[-1].token)
    if last.handled != pushes[-1].seq:
        return pushes  # of an earlier epoch: the token stays where it leads to the reset
    return [
        SessionPush(each.seq, each.body, each.request_id, each.place, encode_token(last._replace(handled=each.seq)))
        for each in pushes
    ]


@checks_arguments
class SessionClientApi:
    """The part of :class:`dep2p.client.Client` about ordered sessions."""

    _transport: Transport

    @asynccontextmanager
    async def open_session(
        self, peer: str, name: str, body: bytes = b"", *, token: str | None = None, realm: str | None = None
    ) -> AsyncGenerator[OpenedSession, None]:
        """Open a session with a member, or continue one by its token.

        Leaving the block ends it, unless `OpenedSession.detach` was called; a session that is left by an exception, or
        by a process that dies, is kept for its token.

        Raises NoHandlerError, SessionTokenError, PeerNotFoundError and what `request` raises.
        """
        call = OpenSessionCall(peer=peer, name=name, data=base64_text(body), token=token, realm=realm)
        opened = await self._transport.ask("POST", "/v1/sessions", SessionOpened, call, timeout_s=_CALL_TIMEOUT_S)
        session = OpenedSession(self._transport, opened.id, opened.token)
        yield session
        await session.aclose()

    async def sessions(self) -> list[dict[str, object]]:
        """Return the statistics of each session of the node, the live ones first; docs/reference/control-api.md has the
        fields."""
        found = await self._transport.ask("GET", "/v1/sessions", SessionList, timeout_s=_CALL_TIMEOUT_S)
        return list(found.sessions)

    @asynccontextmanager
    async def serve_sessions(
        self, name: str, *, realm: str | None = None
    ) -> AsyncGenerator[AsyncIterator[SessionEvent | FeedLagged], None]:
        """Serve sessions ``name`` while the block lasts. Iterate over their events.

        Leaving the block ends those that are open. Raises ControlError D5012 when the name is taken.
        """
        params = {"serve": name} if realm is None else {"serve": name, "realm": realm}
        async with self._transport.opened("GET", "/v1/sessions", params=params) as answer:
            yield EventStream(NdjsonLines(answer), _event)

    async def push_session(
        self, session: str, body: bytes, *, request_id: int = 0, place: Literal["before", "after"] = "after"
    ) -> None:
        """Push into a session that is served here; with ``request_id`` bound to that request. Waits for room.

        Raises SessionNotFoundError, SessionClosedError, AlreadyRespondedError, MessageTooLargeError.
        """
        call = PushToSession(data=base64_text(body), request_id=request_id, place=place if request_id else "before")
        await self._transport.ask("POST", f"/v1/sessions/{session}/pushes", PushReply, call, timeout_s=3_600.0)

    async def push_all_sessions(self, name: str, body: bytes) -> tuple[int, list[str]]:
        """Push to every session of a name that has room. Returns how many got it, and the ids of those that were
        full."""
        call, path = PushToSessions(name=name, data=base64_text(body)), "/v1/sessions/pushes"
        done = await self._transport.ask("POST", path, PushedToSessions, call, timeout_s=_CALL_TIMEOUT_S)
        return done.pushed, list(done.full)

    async def respond_session(
        self, session: str, request_id: int, body: bytes = b"", *, error: str | None = None
    ) -> None:
        """Answer a request, or with ``error`` fail it. Raises SessionNotFoundError, AlreadyRespondedError."""
        call = RespondInSession(request_id=request_id, data=base64_text(body) if error is None else "", error=error)
        path = f"/v1/sessions/{session}/responses"
        await self._transport.ask("POST", path, ResponseReply, call, timeout_s=_CALL_TIMEOUT_S)

    async def end_session(self, session: str) -> None:
        """End a session that is served here: its client gets the pushes under way, then the end."""
        path = f"/v1/sessions/{session}/end"
        await self._transport.ask("POST", path, SessionEnded, EmptyCall(), timeout_s=_CALL_TIMEOUT_S)


def _event(line: dict[str, object]) -> SessionEvent | FeedLagged:
    event = line_or_lag(line, SessionLine)
    if isinstance(event, FeedLagged):
        return event
    return SessionEvent(
        event.event,
        event.session,
        event.peer,
        event.name,
        b"" if event.data is UNSET else event.data,
        0 if event.request_id is UNSET else event.request_id,
        "" if event.reason is UNSET else event.reason,
    )
