"""The client's calls about ordered sessions."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

from dep2p.client.models import Lagged, Subscription
from dep2p.client.transport import NdjsonLines, Transport
from dep2p.control_api.encoding import decode_payload, encode_payload
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
    data: bytes
    request_id: int
    """Of the request that it is bound to; 0 for none."""
    place: Literal["", "before", "after"]
    """Where it stands, seen from that request's response."""
    token: str
    """The place behind this push: to be kept when the push is handled."""


@dataclass(frozen=True, slots=True)
class SessionEvent:
    """Something happened on a session that this program serves."""

    event: Literal["opened", "request", "closed"]
    session: str
    """Its id, for `push_session` and the others."""
    peer: PeerId
    name: str
    data: bytes
    """What the client said at opening, or its request."""
    request_id: int
    reason: str
    """Why it was closed."""


class OpenedSession:
    """A session with a server. Iterate in one task; `request` may be called from any."""

    def __init__(self, transport: Transport, session_id: str, token: str) -> None:
        self._transport = transport
        self.id = session_id
        self.token = token
        """The place behind the last push that was handled: of the one before the latest."""
        self._after = 0
        self._batch: list[SessionPush] = []
        self._given: SessionPush | None = None
        self._is_over = False

    def __aiter__(self) -> AsyncIterator[SessionPush]:
        return self

    async def __anext__(self) -> SessionPush:
        """Raises SessionResetError or SessionGapError once, where something is missing; iterating on goes on."""
        if self._given is not None:
            self._after, self.token, self._given = self._given.seq, self._given.token, None
        while not self._batch:
            if self._is_over:
                raise StopAsyncIteration
            await self._take()
        self._given = self._batch.pop(0)
        return self._given

    async def _take(self) -> None:
        body = {"after": self._after, "wait_s": _TAKE_WAIT_S}
        answer = await self._transport.call("POST", f"{self._path}/take", body, timeout_s=_TAKE_WAIT_S + _MARGIN_S)
        if answer["ended"]:
            self._is_over = True
        elif "reset" in answer:
            reset = cast(dict[str, Any], answer["reset"])
            self._after, self.token = int(reset["next_seq"]) - 1, str(answer["token"])
            raise SessionResetError(str(reset["detail"]), int(reset["epoch"]), int(reset["next_seq"]))
        elif "gap" in answer:
            self.token = str(answer["token"])
            raise SessionGapError(str(answer["gap"]))
        else:
            self._batch = [_push(fields, str(answer["token"])) for fields in answer["pushes"]]
            self._batch = _with_own_tokens(self._batch)

    @property
    def _path(self) -> str:
        return f"/v1/sessions/{self.id}"

    async def request(self, data: bytes, *, timeout_s: float = 30.0) -> bytes:
        """The server's answer; see `dep2p.sessions.service.OpenSession.request`."""
        body = {**encode_payload(data), "timeout_s": timeout_s}
        answer = await self._transport.call("POST", f"{self._path}/requests", body, timeout_s=timeout_s + _MARGIN_S)
        return decode_payload(str(answer["data"]), str(answer["encoding"]))

    async def aclose(self) -> None:
        """End the session; the server is told."""
        await self._leave("0")

    async def detach(self) -> str:
        """Leave without ending it; gives the token to go on with."""
        await self._leave("1")
        return self.token

    async def _leave(self, keep: str) -> None:
        if not self._is_over:
            self._is_over = True
            await self._transport.call("DELETE", self._path, params={"keep": keep}, timeout_s=_CALL_TIMEOUT_S)


def _push(fields: dict[str, Any], token: str) -> SessionPush:
    return SessionPush(
        int(fields["seq"]),
        decode_payload(str(fields["data"]), str(fields["encoding"])),
        int(fields.get("request_id", 0)),
        cast(Literal["", "before", "after"], fields.get("place", "")),
        token,
    )


def _with_own_tokens(pushes: list[SessionPush]) -> list[SessionPush]:
    """The batch's token is for the place behind its last push: from it, one for behind each."""
    if not pushes:
        return pushes
    last = decode_token(pushes[-1].token)
    if last.handled != pushes[-1].seq:
        return pushes  # of an earlier epoch: the token stays where it leads to the reset
    return [
        SessionPush(each.seq, each.data, each.request_id, each.place, encode_token(last._replace(handled=each.seq)))
        for each in pushes
    ]


class SessionCalls:
    """The part of :class:`dep2p.client.Client` about ordered sessions."""

    _transport: Transport

    @asynccontextmanager
    async def open_session(
        self, peer: str, name: str, data: bytes = b"", *, token: str | None = None, realm: str | None = None
    ) -> AsyncGenerator[OpenedSession, None]:
        """Open a session with a member, or go on with one by its token.

        Leaving the block ends it, unless `OpenedSession.detach` was called; a session that is left by an exception, or
        by a process that dies, is kept for its token.

        Raises NoHandlerError, SessionTokenError, PeerNotFoundError and what `request` raises.
        """
        body: dict[str, object] = {"peer": peer, "name": name, **encode_payload(data)}
        if token is not None:
            body["token"] = token
        if realm is not None:
            body["realm"] = realm
        answer = await self._transport.call("POST", "/v1/sessions", body, timeout_s=_CALL_TIMEOUT_S)
        session = OpenedSession(self._transport, str(answer["id"]), str(answer["token"]))
        yield session
        await session.aclose()

    async def sessions(self) -> list[dict[str, Any]]:
        """The statistics of each session of the node, the live ones first; docs/reference/control-api.md has the
        fields."""
        answer = await self._transport.call("GET", "/v1/sessions", timeout_s=_CALL_TIMEOUT_S)
        return cast(list[dict[str, Any]], answer["sessions"])

    @asynccontextmanager
    async def serve_sessions(
        self, name: str, *, realm: str | None = None
    ) -> AsyncGenerator[AsyncIterator[SessionEvent | Lagged], None]:
        """Serve sessions ``name`` while the block lasts; what happens on them comes by iterating.

        Leaving the block ends those that are open. Raises ControlError D5012 when the name is taken.
        """
        params = {"serve": name} if realm is None else {"serve": name, "realm": realm}
        async with self._transport.opened("GET", "/v1/sessions", params=params) as answer:
            yield Subscription(NdjsonLines(answer), _event)

    async def push_session(
        self, session: str, data: bytes, *, request_id: int = 0, place: Literal["before", "after"] = "after"
    ) -> None:
        """Push into a session that is served here; with ``request_id`` bound to that request. Waits for room.

        Raises SessionNotFoundError, SessionClosedError, AlreadyRespondedError, MessageTooLargeError.
        """
        body: dict[str, object] = encode_payload(data)
        if request_id:
            body |= {"request_id": request_id, "place": place}
        await self._transport.call("POST", f"/v1/sessions/{session}/pushes", body, timeout_s=3_600.0)

    async def push_all_sessions(self, name: str, data: bytes) -> tuple[int, list[str]]:
        """Push to every session of a name that has room; how many that were, and the ids of those that were full."""
        body = {"name": name, **encode_payload(data)}
        answer = await self._transport.call("POST", "/v1/sessions/pushes", body, timeout_s=_CALL_TIMEOUT_S)
        return int(answer["pushed"]), [str(each) for each in answer["full"]]

    async def respond_session(
        self, session: str, request_id: int, data: bytes = b"", *, error: str | None = None
    ) -> None:
        """Answer a request, or with ``error`` fail it. Raises SessionNotFoundError, AlreadyRespondedError."""
        body: dict[str, object] = {"request_id": request_id}
        body |= encode_payload(data) if error is None else {"error": error}
        await self._transport.call("POST", f"/v1/sessions/{session}/responses", body, timeout_s=_CALL_TIMEOUT_S)

    async def end_session(self, session: str) -> None:
        """End a session that is served here: its client gets what is under way, then the end."""
        await self._transport.call("POST", f"/v1/sessions/{session}/end", {}, timeout_s=_CALL_TIMEOUT_S)


def _event(line: dict[str, object]) -> SessionEvent | Lagged:
    fields = cast(dict[str, Any], line)
    if "lagged" in fields:
        return Lagged(int(fields["lagged"]))
    data = decode_payload(str(fields["data"]), str(fields["encoding"])) if "data" in fields else b""
    return SessionEvent(
        fields["event"],
        str(fields["session"]),
        PeerId(str(fields["peer"])),
        str(fields["name"]),
        data,
        int(fields.get("request_id", 0)),
        str(fields.get("reason", "")),
    )
