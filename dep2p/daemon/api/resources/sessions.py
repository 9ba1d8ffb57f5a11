"""Ordered sessions that control clients take pushes from, and those that they serve."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import trio

from dep2p.control_api.encoding import encode_line
from dep2p.control_api.replies import PushedToSessions, PushLine, SessionLine, SessionResetPoint, TakenPushes
from dep2p.daemon.api.resources.exclusive_names import ExclusiveNames
from dep2p.daemon.api.resources.subscriptions import LineQueue, SubscriptionRegistry
from dep2p.daemon.bounds import ControlBounds
from dep2p.daemon.node_interface import NodeInterface
from dep2p.daemon.problems import Problem
from dep2p.errors import (
    HandlerError,
    SessionClosedError,
    SessionFullError,
    SessionGapError,
    SessionNotFoundError,
    SessionResetError,
)
from dep2p.protocols.sessions.resume_token import decode_token
from dep2p.protocols.sessions.wire import Push
from dep2p.sessions.service import OpenSession, Session
from dep2p.types import PeerId

_logger = logging.getLogger("dep2p.daemon.control")
_REAP_INTERVAL_S: Final = 5.0


class _Opened:
    """A session that a control client has opened, and the pushes that it got and did not report as handled."""

    def __init__(self, session: OpenSession) -> None:
        self.session = session
        self.batch: Sequence[Push] = ()
        self.is_taking = False
        self.scope = trio.CancelScope()
        """Cancels the call that takes pushes."""
        self.last_call_s = trio.current_time()


class SessionRegistry:
    """The sessions of control clients, bounded."""

    def __init__(self, node: NodeInterface, subscriptions: SubscriptionRegistry, bounds: ControlBounds) -> None:
        self._node = node
        self._subscriptions = subscriptions
        self._bounds = bounds
        self._opened: dict[str, _Opened] = {}
        self._serving = ExclusiveNames("serves sessions")
        self._taking = ExclusiveNames("takes the pushes of session")

    # Taking pushes

    async def open(
        self,
        peer: PeerId,
        name: str,
        data: bytes,
        token: str | None,
        realm: str | None,
        *,
        timeout_s: float | None = None,
    ) -> OpenSession:
        """Open a session, or go on with one. Raises what `Sessions.open` raises, and :class:`Problem` D3008."""
        if len(self._opened) >= self._bounds.streams_max:
            raise Problem("D3008", f"{len(self._opened)} sessions of control clients are open, as many as may be")
        if token is not None:
            # The program that had the session is gone, or about to go: the program with the token goes on.
            await self._forget(decode_token(token).session_id.hex(), keep=True)
        session = await self._node.sessions.start(peer, name, data, token=token, timeout_s=timeout_s, realm=realm)
        self._opened[session.id] = _Opened(session)
        return session

    def _get(self, session_id: str) -> _Opened:
        opened = self._opened.get(session_id)
        if opened is None:
            raise SessionNotFoundError(f"no control client has opened a session {session_id[:40]!r}")
        opened.last_call_s = trio.current_time()
        return opened

    def opened(self, session_id: str) -> OpenSession:
        """Return a session that a control client has opened. Raises SessionNotFoundError."""
        return self._get(session_id).session

    def is_taking(self, session_id: str) -> bool:
        """Whether a call waits for pushes of this session."""
        return self._opened[session_id].is_taking

    async def take(self, session_id: str, after: int, items_max: int, wait_s: float) -> TakenPushes:
        """Return pushes behind number ``after``, which reports that all up to it are handled.

        Waits up to ``wait_s`` for the first one. Pushes that were given and not reported as handled are given again.
        """
        self._get(session_id)
        free = await self._taking.claim(session_id)
        try:
            return await self._take(self._get(session_id), after, items_max, wait_s)
        finally:
            free()

    async def _take(self, opened: _Opened, after: int, items_max: int, wait_s: float) -> TakenPushes:
        session = opened.session
        left = [push for push in opened.batch if push.seq > after]
        if left:
            return _batch(session, left)
        opened.is_taking = True
        try:
            opened.batch = ()
            pushes: list[Push] | None = None
            with trio.CancelScope(deadline=trio.current_time() + wait_s) as opened.scope:
                pushes = await session.receive_many(items_max)
            if pushes:
                opened.batch = pushes
                return _batch(session, pushes)
            if pushes is not None:
                await self._forget(session.id, keep=False)
                return TakenPushes(pushes=(), token=None, ended=True)
            if opened is not self._opened.get(session.id):
                raise Problem("D5012", "another program goes on with this session")
            return _batch(session, ())
        except SessionResetError as error:
            reset = SessionResetPoint(detail=str(error), epoch=error.epoch, next_seq=error.next_seq)
            return TakenPushes(pushes=(), token=session.token, ended=False, reset=reset)
        except SessionGapError as error:
            return TakenPushes(pushes=(), token=session.token, ended=False, gap=str(error))
        except SessionClosedError:
            await self._forget(session.id, keep=False)
            raise
        finally:
            opened.is_taking = False
            opened.last_call_s = trio.current_time()

    async def close(self, session_id: str, *, keep: bool) -> str:
        """End the session, or with ``keep`` only leave it; return the token of its place."""
        opened = self._get(session_id)
        await self._forget(session_id, keep=keep)
        return opened.session.token

    async def _forget(self, session_id: str, *, keep: bool) -> None:
        opened = self._opened.pop(session_id, None)
        if opened is not None:
            opened.scope.cancel()
            if keep and opened.batch:
                opened.session.give_back()
            await (opened.session.detach() if keep else opened.session.aclose())

    async def reap(self) -> None:
        """Leave sessions whose clients do not come any more, until cancelled. Their tokens can go on later."""
        while True:
            await trio.sleep(min(_REAP_INTERVAL_S, self._bounds.stream_unattached_timeout_s / 4))
            until = trio.current_time() - self._bounds.stream_unattached_timeout_s
            for session_id, opened in list(self._opened.items()):
                if not opened.is_taking and opened.last_call_s < until:
                    _logger.info("session %s is left: its control client does not come any more", session_id)
                    await self._forget(session_id, keep=True)

    # Serving

    async def serve(self, name: str, realm: str | None) -> tuple[LineQueue, Callable[[], None]]:
        """Return a queue of the events of sessions ``name``, and a function that ends it. Raises :class:`Problem`
        D5012."""
        free = await self._serving.claim(name)
        queue = self._subscriptions.open("sessions")
        try:
            unregister = self._node.sessions.serve(name, partial(self._handle, queue), realm=realm)
        except BaseException as error:
            free()
            self._subscriptions.forget(queue)
            if isinstance(error, ValueError):
                raise Problem("D5012", str(error)) from None
            raise

        def end() -> None:
            self._subscriptions.forget(queue)
            if free():
                unregister()
                for session in self._node.sessions.served(name):
                    session.end("the program that serves it went away")

        return queue, end

    async def _handle(self, queue: LineQueue, session: Session) -> None:
        line = partial(SessionLine, session=session.id, peer=session.peer, name=session.name)
        if not _notify(queue, line(event="opened", data=session.body, encoding="base64")):
            raise HandlerError("the program that serves is too slow")
        try:
            async for request in session:
                left_s = max(0.0, request.deadline_s - trio.current_time())
                event = line(
                    event="request",
                    request_id=request.request_id,
                    data=request.body,
                    encoding="base64",
                    deadline_ms=int(left_s * 1_000),
                )
                if not _notify(queue, event):
                    await request.fail("the program that serves is too slow")
        finally:
            _notify(queue, line(event="closed", reason=session.close_reason or ""))

    def push_all(self, name: str, data: bytes) -> PushedToSessions:
        """Push to every session of a name that has room. Returns how many, and which were full."""
        full: list[str] = []
        sessions = self._node.sessions.served(name)
        for session in sessions:
            try:
                session.push_nowait(data)
            except SessionFullError:
                full.append(session.id)
            except SessionClosedError:
                _logger.debug("session %s is over", session.id)
        return PushedToSessions(pushed=len(sessions) - len(full), full=tuple(full))

    def counts(self) -> dict[str, int]:
        """Return counts of the sessions of control clients, for metrics."""
        return {"opened": len(self._opened), "served_names": len(self._serving)}


def _notify(queue: LineQueue, event: SessionLine) -> bool:
    line = encode_line(event)
    if not queue.has_room(line):
        return False
    queue.put(line)
    return True


def _batch(session: OpenSession, pushes: Sequence[Push]) -> TakenPushes:
    token = session.token_behind(pushes[-1].seq) if pushes else session.token
    return TakenPushes(pushes=tuple(map(_push_line, pushes)), token=token, ended=False)


def _push_line(push: Push) -> PushLine:
    if not push.request_id:
        return PushLine(seq=push.seq, data=push.body)
    return PushLine(seq=push.seq, data=push.body, request_id=push.request_id, place=push.place)
