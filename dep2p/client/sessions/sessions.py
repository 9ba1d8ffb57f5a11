"""The client's calls about ordered sessions: those of `dep2p.node.sessions.Sessions`."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Final

import anyio
from msgspec import UNSET, structs

from dep2p.arguments import checks_arguments
from dep2p.client.background import Background, tasks
from dep2p.client.models import realm_text
from dep2p.client.reconnection.feeds import FeedCall, opened_feed
from dep2p.client.reconnection.outages import Outages
from dep2p.client.sessions.served import (
    ClientServedSession,
    ClientSessionHandler,
    ClientSessionRequestHandler,
    ServedSessions,
    all_stats,
    run_handler,
    stats_of,
)
from dep2p.client.transport import Transport
from dep2p.control_api.calls import AskSession, OpenSessionCall, PushToSessions, TakePushes, base64_text
from dep2p.control_api.errors import DaemonUnreachableError
from dep2p.control_api.replies import (
    PayloadReply,
    PushedToSessions,
    PushLine,
    SessionOpened,
    SessionTokenReply,
    TakenPushes,
)
from dep2p.errors import Dep2pError, SessionGapError, SessionNotFoundError, SessionResetError
from dep2p.protocols.sessions.resume_token import decode_token, encode_token
from dep2p.protocols.sessions.wire import AFTER, BEFORE, PUSH, Push
from dep2p.types import PeerId

if TYPE_CHECKING:
    from dep2p.realm.credentials import RealmChoice

_CALL_TIMEOUT_S: Final = 60.0
_TAKE_WAIT_S: Final = 30.0
_MARGIN_S: Final = 10.0
_END_S: Final = 2.0
"""Seconds for the end of a session that the daemon has to find again first."""
_TAKEN: Final = frozenset({"D5012"})
"""Another program goes on with the session by its token: this one must not take it back."""
_REQUEST_TIMEOUT_MAX_S: Final = 3_600.0
"""Seconds to wait for an answer whose time the daemon chooses."""


@checks_arguments
class ClientOpenSession:
    """A session with a server. Iterating gives its pushes (`seq`, `body`) in strict order, each once. Iterate in one
    task; `request` may be called from any.

    A push counts as handled when the app comes for the next one; until then the server keeps it. The session outlives
    the daemon: after a restart it goes on at its place, and nothing comes twice.
    """

    def __init__(self, transport: Transport, opening: OpenSessionCall, opened: SessionOpened) -> None:
        self._transport = transport
        self._opening = opening
        self._attaching = anyio.Lock()
        self._outages = Outages(
            transport.watch, f"session {opened.name!r} with {opened.peer}", loses=False, ends_with=_TAKEN
        )
        self.peer: PeerId = opened.peer
        self.name: str = opened.name
        self.id: str = opened.id
        self._token: str = opened.token
        """The place behind the last push that was handled."""
        self._taken_token: str = opened.token
        """The place behind the last push of the batch."""
        self._after = 0
        self._last_seq = 0
        """The number of the last push of the batch."""
        self._batch: list[Push] = []
        self._given: Push | None = None
        self._is_over = False

    def __repr__(self) -> str:
        return f"<session {self.name!r} with {self.peer[-6:]} at {self._after}>"

    def __aiter__(self) -> AsyncIterator[Push]:
        return self

    async def __anext__(self) -> Push:
        push = await self.receive()
        if push is None:
            raise StopAsyncIteration
        return push

    async def receive(self) -> Push | None:
        """Wait for the next push; None when the server or this side has ended the session. Only one task may take
        pushes.

        Raises SessionResetError or SessionGapError once, where pushes are missing, and goes on when called again;
        SessionFailedError when the session cannot go on.
        """
        self.handled()
        while not self._batch:
            if self._is_over:
                return None
            await self._take()
        self._given = self._batch.pop(0)
        return self._given

    async def receive_many(self, items_max: int = 1_024) -> list[Push]:
        """Wait for at least one push, and return up to ``items_max``, as many as are there; [] at the end. Otherwise as
        `receive`."""
        first = await self.receive()
        if first is None:
            return []
        pushes = [first, *self._batch[: items_max - 1]]
        del self._batch[: items_max - 1]
        self._given = pushes[-1]
        return pushes

    async def _next_batch(self) -> TakenPushes:
        call, timeout_s = TakePushes(after=self._after, wait_s=_TAKE_WAIT_S), _TAKE_WAIT_S + _MARGIN_S
        return await self._transport.ask("POST", f"{self._path}/take", TakenPushes, call, timeout_s=timeout_s)

    async def _take(self) -> None:
        try:
            if not self._outages.is_lost:
                taken = await self._next_batch()
            else:  # the call before was cancelled while it waited
                taken = await self._after_loss()
        except (DaemonUnreachableError, SessionNotFoundError) as error:
            self._outages.lost(_as_loss(error))
            taken = await self._after_loss()
        token: str = taken.token or self._token
        if taken.ended:
            self._is_over = True
        elif taken.reset is not UNSET:
            self._after, self._token = taken.reset.next_seq - 1, token
            raise SessionResetError(taken.reset.detail, taken.reset.epoch, taken.reset.next_seq)
        elif taken.gap is not UNSET:
            self._token = token
            raise SessionGapError(taken.gap)
        elif taken.pushes:
            self._batch = [_push(line) for line in taken.pushes]
            self._taken_token, self._last_seq = token, taken.pushes[-1].seq

    async def _after_loss(self) -> TakenPushes:
        taken = await self._outages.over(self._take_anew)
        self._outages.resumed()
        return taken

    async def _take_anew(self) -> TakenPushes:
        try:
            return await self._next_batch()
        except SessionNotFoundError:
            await self._attach()
            return await self._next_batch()

    async def _attach(self) -> None:
        """Go on by the token with a session that this daemon has not opened."""
        async with self._attaching:
            call = structs.replace(self._opening, data="", token=self._token)
            path, timeout_s = "/v1/sessions", _REQUEST_TIMEOUT_MAX_S
            self.id = (await self._transport.ask("POST", path, SessionOpened, call, timeout_s=timeout_s)).id

    @property
    def _path(self) -> str:
        return f"/v1/sessions/{self.id}"

    async def request(self, body: bytes, *, timeout_s: float | None = None) -> bytes:
        """Ask the server. It handles the request at most once, however often the connection breaks.

        The answer comes as soon as it is here, also in front of pushes that wait to be taken. ``timeout_s``: the
        daemon's ``request_timeout_s`` by default.

        Raises HandlerError and others that the server answers, RequestTimeoutError, SessionResetError (the server has
        forgotten the session; the request may have been handled), SessionClosedError, SessionFullError (too many are
        open), MessageTooLargeError; DaemonUnreachableError when the daemon goes away: it may have been handled, and is
        not sent again.
        """
        call = AskSession(data=base64_text(body), timeout_s=timeout_s)
        wait_s = _REQUEST_TIMEOUT_MAX_S if timeout_s is None else timeout_s + _MARGIN_S
        try:
            answer = await self._transport.ask("POST", f"{self._path}/requests", PayloadReply, call, timeout_s=wait_s)
        except SessionNotFoundError:  # the daemon has restarted, and did not send it
            if self._is_over or not self._transport.watch.bounds.feed_s:
                raise
            await self._attach()
            answer = await self._transport.ask("POST", f"{self._path}/requests", PayloadReply, call, timeout_s=wait_s)
        return answer.data

    @property
    def token(self) -> str:
        """This place, as a word to keep: `open(peer, name, token=…)` goes on behind the last handled push.

        A push is handled when the app comes for the next one, or calls `handled`. The server keeps unacknowledged
        pushes: save the token no later than then.
        """
        return self._token

    def token_behind(self, seq: int) -> str:
        """The place behind push ``seq``, for a program that keeps it before it comes for more."""
        last = decode_token(self._taken_token)
        if last.handled != self._last_seq:
            return self._taken_token  # of an earlier epoch: the token stays where it leads to the reset
        return encode_token(last._replace(handled=seq))

    def handled(self) -> None:
        """Report all taken pushes as handled, before the app comes for more: `token` counts them at once."""
        if self._given is not None:
            self._after, self._token, self._given = self._given.seq, self.token_behind(self._given.seq), None

    def give_back(self) -> None:
        """Give the last push back as not handled. Called before `detach`, so that the token does not count it."""
        if self._given is not None:
            self._batch.insert(0, self._given)
            self._given = None

    async def stats(self) -> dict[str, object]:
        """Return its statistics as plain values. Raises SessionNotFoundError."""
        return await stats_of(self._transport, self.id)

    async def aclose(self) -> None:
        """End the session and tell the server."""
        await self._leave("0")

    async def detach(self) -> str:
        """Leave without ending the session; return the token to go on with."""
        await self._leave("1")
        return self._token

    async def _leave(self, keep: str) -> None:
        if not self._is_over:
            self._is_over = True
            try:
                await self._delete(keep)
            except SessionNotFoundError:  # a daemon that has restarted does not have it
                if keep == "0":
                    with anyio.move_on_after(_END_S):  # else the server learns it when the session expires
                        await self._attach()
                        await self._delete(keep)

    async def _delete(self, keep: str) -> None:
        params = {"keep": keep}
        await self._transport.ask("DELETE", self._path, SessionTokenReply, params=params, timeout_s=_CALL_TIMEOUT_S)


def _as_loss(error: Dep2pError) -> DaemonUnreachableError:
    """Return the reason of a session that a daemon does not know any more."""
    if isinstance(error, DaemonUnreachableError):
        return error
    return DaemonUnreachableError(f"the daemon has restarted: {error}")


def _push(line: PushLine) -> Push:
    place = "" if line.place is UNSET else line.place
    kind = BEFORE if place == "before" else AFTER if place == "after" else PUSH
    return Push(line.seq, line.data, kind, 0 if line.request_id is UNSET else line.request_id)


@checks_arguments
class ClientSessions:
    """The session API of a client: ``client.sessions``. ``realm`` may be left out as for every method."""

    def __init__(self, transport: Transport, background: Background) -> None:
        self._transport = transport
        self._background = background
        self._live: dict[str, ClientServedSession] = {}

    def serve(
        self,
        name: str,
        handler: ClientSessionHandler,
        *,
        on_request: ClientSessionRequestHandler | None = None,
        realm: "RealmChoice" = None,
    ) -> Callable[[], None]:
        """Serve sessions ``name`` in every realm that the daemon has joined now or later, or in the given one.

        ``handler`` runs once for each new session, for as long as it lives: it pushes, and takes the client's requests
        by iterating over the session unless ``on_request`` answers them. When it returns, the client gets what is under
        way and then the end. Returns a function that ends serving, and the sessions in progress.

        Another program that serves the name fails the client's block with ``ControlError`` D5012; see
        `Client.on_request`.
        """
        return self._background.start(lambda started: self._serve(name, handler, on_request, realm, started))

    async def _serve(
        self,
        name: str,
        handler: ClientSessionHandler,
        on_request: ClientSessionRequestHandler | None,
        realm: "RealmChoice",
        started: Callable[[], None],
    ) -> None:
        async def one(session: ClientServedSession) -> None:
            async with anyio.create_task_group() as group:
                if on_request is not None:
                    group.start_soon(session.serve_requests, on_request)
                await run_handler(session, handler)
                group.cancel_scope.cancel()

        async with self.accept(name, realm=realm) as sessions, tasks() as handlers:
            started()
            async for session in sessions:
                handlers.start_soon(one, session)

    @asynccontextmanager
    async def accept(
        self, name: str, *, realm: "RealmChoice" = None
    ) -> AsyncGenerator[AsyncIterator[ClientServedSession], None]:
        """Yield each new session ``name`` while the block runs. The program pushes into it, takes its requests by
        iterating over it, and ends it.

        Leaving the block ends those that are open. When the daemon goes away, its sessions are over; the loop waits
        for it and serves again, and clients that come back open new sessions, after a SessionResetError. Raises
        ControlError D5012 when the name is taken at the first registration.
        """
        params, text = {"serve": name}, realm_text(realm)
        if text is not None:
            params["realm"] = text
        feed = FeedCall("GET", "/v1/sessions", f"sessions {name!r}", loses=False, params=params)
        async with opened_feed(self._transport, feed) as lines, tasks() as group:
            served = ServedSessions(self._transport, lines, self._live)
            group.start_soon(served.pump)
            try:
                yield served
            finally:
                served.end()

    def open(
        self,
        peer: PeerId,
        name: str,
        body: bytes = b"",
        *,
        token: str | None = None,
        timeout_s: float | None = None,
        realm: "RealmChoice" = None,
    ) -> AbstractAsyncContextManager[ClientOpenSession]:
        """Open a session with ``peer``, or with ``token`` go on with one: ``async with … as session``.

        ``body`` is for the server's handler. ``timeout_s`` (the daemon's ``request_timeout_s`` by default) is for the
        server's first answer; later the session finds its connection again by itself. Leaving the block ends the
        session, unless `ClientOpenSession.detach` was called; a session that is left by an exception, or by a process
        that dies, is kept for its token.

        Raises NoHandlerError, OverloadedError, PeerNotFoundError, NotMemberError, ProtocolNotSupportedError,
        RequestTimeoutError, SessionTokenError, NotInRealmError, ``ValueError``. A token whose session the server does
        not have any more opens a new one, and the first thing that is taken from it is SessionResetError.
        """
        return self._open(peer, name, body, token, timeout_s, realm)

    @asynccontextmanager
    async def _open(
        self,
        peer: PeerId,
        name: str,
        body: bytes,
        token: str | None,
        timeout_s: float | None,
        realm: "RealmChoice",
    ) -> AsyncGenerator[ClientOpenSession, None]:
        session = await self.start(peer, name, body, token=token, timeout_s=timeout_s, realm=realm)
        yield session
        await session.aclose()

    async def start(
        self,
        peer: PeerId,
        name: str,
        body: bytes = b"",
        *,
        token: str | None = None,
        timeout_s: float | None = None,
        realm: "RealmChoice" = None,
    ) -> ClientOpenSession:
        """Like `open`; the caller ends the session by `ClientOpenSession.aclose` or `detach`. Raises what `open`
        raises."""
        call = OpenSessionCall(
            peer=peer, name=name, data=base64_text(body), token=token, timeout_s=timeout_s, realm=realm_text(realm)
        )
        wait_s = _REQUEST_TIMEOUT_MAX_S if timeout_s is None else timeout_s + _MARGIN_S
        opened = await self._transport.ask("POST", "/v1/sessions", SessionOpened, call, timeout_s=wait_s)
        return ClientOpenSession(self._transport, call, opened)

    def find(self, session_id: str) -> ClientServedSession:
        """Return the session that this program serves under this id. Raises SessionNotFoundError."""
        session = self._live.get(session_id)
        if session is None:
            raise SessionNotFoundError(f"no session {session_id!r} is served here: it is over, or never was")
        return session

    def served(self, name: str | None = None) -> list[ClientServedSession]:
        """The live sessions that this program serves, of one name when given."""
        return [session for session in self._live.values() if name is None or session.name == name]

    async def push_all(self, name: str, body: bytes) -> tuple[int, list[str]]:
        """Push to every session of a name that has room. Returns how many got it, and the ids of those that were
        full."""
        call, path = PushToSessions(name=name, data=base64_text(body)), "/v1/sessions/pushes"
        done = await self._transport.ask("POST", path, PushedToSessions, call, timeout_s=_CALL_TIMEOUT_S)
        return done.pushed, list(done.full)

    async def stats(self) -> list[dict[str, object]]:
        """Return the counts of each session of the node: the live ones, then those that ended lately."""
        return await all_stats(self._transport)
