"""The ordered sessions of a node: `node.sessions` serves them and opens them."""

import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

import trio

from dep2p.arguments import checks_arguments
from dep2p.errors import SessionClosedError, SessionFullError, SessionNotFoundError
from dep2p.limits import Limits
from dep2p.node.services import RealmServices
from dep2p.protocols.sessions.options import SessionOptions
from dep2p.realm.credentials import Realm, RealmChoice
from dep2p.sessions.service import (
    OpenSession,
    Session,
    SessionEntry,
    SessionHandler,
    SessionHandlers,
    SessionRequestHandler,
    SessionService,
)
from dep2p.types import PeerId


class HasServices(Protocol):
    """The part of a node that sessions need."""

    def realm(self, realm: RealmChoice = None) -> Realm: ...

    def services(self, realm: RealmChoice = None) -> RealmServices: ...

    def all_services(self) -> list[RealmServices]: ...


@checks_arguments
class Sessions:
    """The session API of a node. ``realm`` may be left out as for every method."""

    def __init__(self, node: HasServices, registry: SessionHandlers, limits: Limits) -> None:
        self._node = node
        self._registry = registry
        self._limits = limits

    def _each(self) -> Iterator[SessionService]:
        for services in self._node.all_services():
            yield services.sessions

    def serve(
        self,
        name: str,
        handler: SessionHandler,
        *,
        on_request: SessionRequestHandler | None = None,
        options: SessionOptions | None = None,
        realm: RealmChoice = None,
    ) -> Callable[[], None]:
        """Serve sessions ``name`` in every realm joined now or later, or in the given one.

        ``handler`` runs once for each new session, for as long as it lives: it pushes, and takes the client's requests
        by iterating over the session unless ``on_request`` answers them. When it returns, the client gets what is under
        way and then the end. It is cancelled ``Limits.close_timeout_s`` after the client has ended the session or the
        session has failed. Returns a function that ends serving; sessions in progress go on.

        Raises ``ValueError`` when the name is taken or malformed, NotInRealmError.
        """
        entry = SessionEntry(name, handler, on_request, options or SessionOptions.of(self._limits))
        realm_id = None if realm is None else self._node.realm(realm).realm_id
        return self._registry.serve(realm_id, entry)

    @asynccontextmanager
    async def accept(self, name: str, *, realm: RealmChoice = None) -> AsyncGenerator[AsyncIterator[Session], None]:
        """Yield each new session ``name`` while the block runs. The program pushes into it, takes its requests by
        iterating over it, and ends it.

        Leaving the block ends those that are open. Raises ``ValueError`` when the name is taken, NotInRealmError.
        """
        send, receive = trio.open_memory_channel[Session](math.inf)  # `Limits.sessions_max` bounds them
        taken: dict[Session, None] = {}

        async def hold(session: Session) -> None:
            taken[session] = None
            send.send_nowait(session)
            try:
                await session.wait_closed()
            finally:
                del taken[session]

        end = self.serve(name, hold, realm=realm)
        try:
            async with receive:
                yield receive
        finally:
            end()
            send.close()
            for session in list(taken):
                session.end("the program that serves it went away")

    async def push_all(self, name: str, body: bytes) -> tuple[int, list[str]]:
        """Push to every session of a name that has room. Returns how many got it, and the ids of those that were
        full."""
        pushed, full = 0, list[str]()
        for session in self.served(name):
            try:
                session.push_nowait(body)
                pushed += 1
            except SessionFullError:
                full.append(session.id)
            except SessionClosedError:
                continue
        await trio.lowlevel.checkpoint()
        return pushed, full

    def open(
        self,
        peer: PeerId,
        name: str,
        body: bytes = b"",
        *,
        token: str | None = None,
        options: SessionOptions | None = None,
        timeout_s: float | None = None,
        realm: RealmChoice = None,
    ) -> AbstractAsyncContextManager[OpenSession]:
        """Open a session with ``peer``, or with ``token`` go on with one: ``async with … as session``.

        ``body`` is for the server's handler. ``timeout_s`` (``Limits.request_timeout_s`` by default) is for the
        server's first answer; later the session finds its connection again by itself, until ``resume_timeout_s`` have
        passed without one. Leaving the block ends the session, unless `OpenSession.detach` was called.

        Raises NoHandlerError, OverloadedError, PeerNotFoundError, NotMemberError, ProtocolNotSupportedError,
        RequestTimeoutError, SessionTokenError, NotInRealmError, ``ValueError``. A token whose session the server does
        not have any more opens a new one, and the first thing that is taken from it is SessionResetError.
        """
        service = self._node.services(realm).sessions
        return service.open(peer, name, body, token=token, options=options, timeout_s=timeout_s)

    async def start(
        self,
        peer: PeerId,
        name: str,
        body: bytes = b"",
        *,
        token: str | None = None,
        options: SessionOptions | None = None,
        timeout_s: float | None = None,
        realm: RealmChoice = None,
    ) -> OpenSession:
        """Like `open`; the caller ends the session by `OpenSession.aclose` or `detach`. Raises what `open` raises."""
        service = self._node.services(realm).sessions
        return await service.start(peer, name, body, token=token, options=options, timeout_s=timeout_s)

    def find(self, session_id: str) -> Session:
        """Return the session that this node serves under this id, from anywhere in its process.

        Raises SessionNotFoundError.
        """
        for service in self._each():
            for session in service.served():
                if session.id == session_id:
                    return session
        raise SessionNotFoundError(f"no session {session_id!r} is served here: it is over, or never was")

    def served(self, name: str | None = None) -> list[Session]:
        """The live sessions that this node serves, of one name when given."""
        return [session for service in self._each() for session in service.served(name)]

    def opened(self) -> list[OpenSession]:
        """The live sessions that this node has opened."""
        return [session for service in self._each() for session in service.opened()]

    def stats(self) -> list[dict[str, object]]:
        """Return the counts of each session: the live ones, then those that ended lately."""
        return [stats for service in self._each() for stats in service.each()]
