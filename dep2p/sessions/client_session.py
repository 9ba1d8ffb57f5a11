"""The client's end of an ordered session, for apps: pushes in order, requests, and the token to go on with later."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from inspect import CORO_CLOSED, getcoroutinestate
from typing import Final

import trio
from outcome import Error, Value

from dep2p.arguments import as_bytes
from dep2p.concurrency.deadline_heap import DueTimes
from dep2p.concurrency.wait_queue import Sleeper, suspend
from dep2p.errors import (
    Dep2pError,
    ProtocolError,
    RequestTimeoutError,
    SessionClosedError,
    SessionFailedError,
    SessionGapError,
    SessionResetError,
    StreamClosedError,
    error_from_wire,
)
from dep2p.host.interface import ByteStream
from dep2p.limits import Limits
from dep2p.links.pull_link import LinkCalls, SessionLink
from dep2p.protocols.sessions.client import ClientSession
from dep2p.protocols.sessions.resume_token import SessionToken, encode_token
from dep2p.protocols.sessions.wire import (
    AFTER,
    BEFORE,
    END,
    FAILURE,
    PUSH,
    RESET,
    RESPONSE,
    SKIP,
    Push,
    decode_failure,
    read_reset,
)
from dep2p.protocols.timing.backoff import Backoff
from dep2p.protocols.wire.frame import Frame
from dep2p.realm.interface import RealmGate
from dep2p.sessions.trace_events import SessionTrace
from dep2p.types import PeerId, Rng, peer_id_bytes

ANSWERS: Final = (RESPONSE, FAILURE)


class Answers:
    """The tasks that wait for answers, by request id. ``on_cancel`` is called for a task that does not wait any
    more."""

    def __init__(self, on_cancel: Callable[[int], None]) -> None:
        self._on_cancel = on_cancel
        self._waiting: dict[int, trio.lowlevel.Task] = {}
        self._hasty: dict[int, None] = {}  # its answer need not wait for the pushes in front

    def __len__(self) -> int:
        return len(self._waiting)

    async def wait(self, request_id: int, in_order: bool) -> bytes:
        """Wait for an answer. Raises the server's error, or the one given to `fail`."""
        self._waiting[request_id] = trio.lowlevel.current_task()
        if not in_order:
            self._hasty[request_id] = None
        answer: bytes = await suspend(lambda: self._give_up(request_id))
        return answer

    def _give_up(self, request_id: int) -> None:
        self._pop(request_id)
        self._on_cancel(request_id)

    def _pop(self, request_id: int) -> trio.lowlevel.Task | None:
        self._hasty.pop(request_id, None)
        return self._waiting.pop(request_id, None)

    def is_urgent(self, request_id: int, consumer: trio.lowlevel.Task | None) -> bool:
        """Whether an answer must not wait for the pushes in front: no reader takes them, or the asker itself does."""
        task = self._waiting.get(request_id)
        return task is not None and (consumer in (None, task) or request_id in self._hasty)

    def give(self, push: Push) -> None:
        """Wake the caller that waits for this response, if there is one."""
        task = self._pop(push.request_id)
        if task is None:
            return
        if push.kind == RESPONSE:
            trio.lowlevel.reschedule(task, Value(push.body))
            return
        try:
            code, text = decode_failure(push.body)
            error: Dep2pError = error_from_wire(code, text)
        except ProtocolError as bad:
            error = bad
        trio.lowlevel.reschedule(task, Error(error))

    def fail(self, request_id: int, error: Dep2pError) -> None:
        """Fail a request: it gets no answer."""
        task = self._pop(request_id)
        if task is not None:
            trio.lowlevel.reschedule(task, Error(error))

    def fail_all(self, error: Callable[[], Dep2pError]) -> None:
        """Fail all requests, each with an error of its own."""
        for request_id in list(self._waiting):
            self.fail(request_id, error())


logger: logging.Logger = logging.getLogger("dep2p.io")

_BACKOFF: Final = Backoff(first_s=0.1, max_s=3.0)
_NEVER: Final = float("inf")
_PUSHES: Final = (PUSH, AFTER, BEFORE)
_TRIED_AGAIN: Final = (StreamClosedError, RequestTimeoutError)
"""Errors that may heal by themselves while a session is opened for the first time."""


@dataclass(frozen=True, slots=True)
class SessionContext:
    """The context that the opened sessions of one realm share."""

    gate: RealmGate
    protocol: str
    limits: Limits
    counters: Counter[str]
    due: DueTimes
    rng: Rng


class OpenSession:
    """A session with a server. Iterating gives its pushes (`seq`, `body`) in strict order, each once.

    A push counts as handled when the app comes for the next one; until then the server keeps it. The connection is
    found again by itself; iterating goes on as if nothing had been.
    """

    def __init__(self, core: ClientSession, peer: PeerId, context: SessionContext) -> None:
        self.core = core
        self.peer = peer
        self.name: str = core.name
        self.id: str = core.session_id.hex()
        self.armed_at = _NEVER
        self.link: SessionLink | None = None
        self.scope: trio.CancelScope = trio.CancelScope()
        self.is_left: bool = False
        self._context = context
        self.trace: SessionTrace | None = None
        self._error: Dep2pError | None = None
        self._opened = trio.Event()
        self._refused: Dep2pError | None = None  # by the latest try
        self._changed = trio.Event()
        self._consumer: trio.lowlevel.Task | None = None
        self._sleeper = Sleeper()
        self._answers = Answers(self._give_up)
        self._attached_at: float | None = None
        self._patience = trio.CancelScope()
        self.finished: trio.Event = trio.Event()
        """Set when `run` has ended: the link is closed."""

    def __repr__(self) -> str:
        return f"<session {self.name!r} with {self.peer[-6:]} at {self.core.receiver.handled}>"

    # Pushes

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
        await trio.lowlevel.checkpoint_if_cancelled()
        core = self.core
        self._consumer = trio.lowlevel.current_task()
        while True:
            push = core.take()
            if push is None:
                if self._error is not None:
                    raise SessionFailedError(str(self._error))
                if core.ended:
                    return None
                core.idle()
                if self.link is not None:
                    self.link.pulled.wake()
                await self._sleep()
                continue
            if core.ack_now and self.link is not None:
                self.link.pulled.wake()
            if push[2] in ANSWERS:
                self._answer(push)
            elif push[2] < SKIP:
                return push
            elif self._special(push):
                return None

    async def receive_many(self, items_max: int = 1_024) -> list[Push]:
        """Wait for at least one push, and return up to ``items_max``, as many as are there; [] at the end. Otherwise as
        `receive`."""
        first = await self.receive()
        if first is None:
            return []
        pushes = [first]
        receiver = self.core.receiver
        queue, take = receiver.queue, receiver.take
        while queue and queue[0][2] in _PUSHES and len(pushes) < items_max and (push := take()) is not None:
            pushes.append(push)
        return pushes

    def _special(self, push: Push) -> bool:
        """Act on an item that is no push. Returns whether it is the end."""
        kind = push.kind
        if kind == RESET:
            self._context.counters["resets"] += 1
            self._changed.set()
            epoch, next_seq, reason = read_reset(push)
            if self.trace is not None:
                self.trace.put("reset", epoch=epoch, position=next_seq - 1, reason=reason)
            raise SessionResetError(reason, epoch, next_seq)
        text = push.body.decode("utf-8", "replace")
        if kind == SKIP:
            self._context.counters["gaps"] += 1
            if self.trace is not None:
                self.trace.put("skipped", position=push.seq, count=1, reason=text)
            raise SessionGapError(f"number {push.seq} of the sequence is skipped: {text}")
        if kind == END:
            self.core.done()
            self.core.idle()
            self._kick()
            if text:
                self._fail(SessionFailedError(f"the server's end of the session failed: {text}"))
                raise SessionFailedError(f"the server's end of the session failed: {text}")
            self._fail(SessionClosedError("the server has ended the session"), raise_later=False)
        return True

    async def _sleep(self) -> None:
        if self._sleeper.task is not None:
            raise trio.BusyResourceError("another task is taking pushes of this session")
        await self._sleeper.wait()

    def _kick(self) -> None:
        if self.link is not None:
            self.link.pulled.wake()

    # Requests

    @property
    def next_request_id(self) -> int:
        """The id of the next `request`: the server can bind pushes to it before it comes."""
        return self.core.next_request_id

    async def request(self, body: bytes, *, timeout_s: float | None = None, in_order: bool = True) -> bytes:
        """Ask the server. It handles the request at most once, however often the connection breaks.

        The answer has its place in the sequence: while another task takes pushes, `request` returns when that task has
        handled all that comes before the answer. Called by the task that takes pushes, or while none does, it returns
        as soon as the answer is here; and always without ``in_order``.
        ``timeout_s``: ``Limits.request_timeout_s`` by default. Cancelling the call cancels the server's handler.

        Raises HandlerError and others that the server answers, RequestTimeoutError, SessionResetError (the server has
        forgotten the session; the request may have been handled), SessionClosedError, SessionFullError (too many are
        open), MessageTooLargeError.
        """
        timeout_s = self._context.limits.request_timeout_s if timeout_s is None else timeout_s
        if not timeout_s >= 0:
            raise ValueError(f"timeout_s is {timeout_s}: it cannot be negative")
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._error is not None:
            raise SessionClosedError(str(self._error))
        request_id = self.core.ask(as_bytes(body, "the request"), int(min(timeout_s * 1_000, 0xFFFF_FFFF)))
        self._kick()
        self._context.due.schedule(self)
        with trio.move_on_after(timeout_s):
            return await self._answers.wait(request_id, in_order)
        behind = len(self.core.receiver.queue)
        why = f"; {behind} pushes wait to be taken first" if behind else ""
        raise RequestTimeoutError(f"no answer to request {request_id} within {timeout_s:g} s{why}")

    def _answer_early(self, before: int) -> None:
        """Give answers behind the first ``before`` items of the queue to tasks that cannot wait for their turn."""
        queue = self.core.receiver.queue
        if self._consumer is not None and getcoroutinestate(self._consumer.coro) == CORO_CLOSED:
            self._consumer = None  # its task has ended
        if self._answers:
            for push in list(itertools.islice(queue, before, None)):
                if push[2] in ANSWERS and self._answers.is_urgent(push.request_id, self._consumer):
                    self._answer(push)
        if self._consumer is None:
            while queue and queue[0][2] in ANSWERS:
                self.core.take()
            self.core.done()
            self.core.idle()
            self._changed.set()

    def _answer(self, push: Push) -> None:
        self.core.answered(push.request_id)
        self._answers.give(push)

    # The token

    @property
    def token(self) -> str:
        """This place, as a word to keep: `open(peer, name, token=…)` goes on behind the last handled push.

        A push is handled when the app comes for the next one, or calls `handled`. The server keeps unacknowledged
        pushes: save the token no later than then.
        """
        return self._token(*self.core.place)

    def token_behind(self, seq: int) -> str:
        """The place behind push ``seq``, for a program that keeps it before it comes for more."""
        return self.token if self.core.receiver.stale else self._token(self.core.epoch, seq)

    def _token(self, epoch: int, handled: int) -> str:
        return encode_token(SessionToken(self.core.session_id, epoch, handled, peer_id_bytes(self.peer), self.name))

    def handled(self) -> None:
        """Report all taken pushes as handled, before the app comes for more: `token` counts them at once."""
        self.core.done()
        if self.core.ack_now:
            self._kick()

    def give_back(self) -> None:
        """Give the last push back as not handled. Called before `detach`, so that the token does not count it."""
        self.core.receiver.give_back()

    @property
    def is_attached(self) -> bool:
        """Whether it is connected at this moment."""
        return self.core.is_open

    def stats(self) -> dict[str, object]:
        """Return its statistics as plain values."""
        return {"peer": self.peer, "role": "client", **self.core.stats()}

    # Its life

    async def opened(self, timeout_s: float) -> None:
        """Wait for the first answer of the server. Raises its error."""
        with trio.move_on_after(timeout_s):
            await self._opened.wait()
        if self._error is not None:
            raise self._error
        if not self._opened.is_set():
            raise self._refused or RequestTimeoutError(f"{self.peer} did not open the session within {timeout_s:g} s")

    async def run(self) -> None:
        """Keep a link to the server until the session is over."""
        try:
            with self.scope:
                await self._keep_linked()
        finally:
            if not self.core.ended:  # after an error too: no caller may wait forever
                self._fail(SessionClosedError("this side has left the session"), raise_later=False)
            self._context.due.forget(self)
            self.finished.set()

    async def _keep_linked(self) -> None:
        failures = 0
        away_since = trio.current_time()
        while not self.is_left and not self.core.ended:
            if not self.core.may_attach:
                self._changed = trio.Event()
                await self._changed.wait()
                continue
            try:
                was_open = await self._one_link()
            except Dep2pError as error:
                was_open = False
                self._refused = error
                logger.debug("%r has no link: %s", self, error)
                if not self._opened.is_set() and not isinstance(error, _TRIED_AGAIN):
                    self._fail(error)
                    return
            if self.core.ended or self.is_left:
                break
            now = trio.current_time()
            if was_open:
                failures, away_since = 0, now
                self._context.counters["links_lost"] += 1
            elif now - away_since >= self.core.options.resume_timeout_s:
                self._fail(SessionFailedError(f"{self.peer} was away for too long: {self._refused}"))
                return
            failures += 1
            await trio.sleep(_BACKOFF.jittered(failures, self._context.rng))

    async def _one_link(self) -> bool:
        """Open a link and stay until it is over. Returns whether the server answered on it."""
        limits = self._context.limits
        connection = await self._context.gate.connect(self.peer, timeout_s=limits.dial_timeout_s)
        stream = await connection.open_stream(self._context.protocol, timeout_s=limits.stream_open_timeout_s)
        self._attached_at = None
        link = self._make_link(stream)
        hello = self.core.attach(trio.current_time())
        self.link = link
        link.out.put((hello,), len(hello))
        link.start()
        with trio.CancelScope(deadline=trio.current_time() + limits.stream_first_item_timeout_s) as patience:
            self._patience = patience
            await link.run()
        if link.error is not None and self._attached_at is None:
            raise link.error
        return self._attached_at is not None

    def _make_link(self, stream: ByteStream) -> SessionLink:
        return SessionLink(
            stream,
            self._context.gate,
            self._context.limits,
            self._context.counters,
            LinkCalls(self._collect, self._on_frames, self._on_link_end),
        )

    def _collect(self, bytes_max: int) -> list[bytes]:
        now = trio.current_time()
        pieces = self.core.collect(bytes_max, now)
        if pieces:
            self._note_flow(now)
            self._context.due.schedule(self)
        elif self.is_left and self.link is not None:
            self.link.end(StreamClosedError("this side has left the session"))
        return pieces

    def _on_frames(self, _link: SessionLink, frames: list[Frame]) -> None:
        core = self.core
        queue = core.receiver.queue
        before = len(queue)
        was_open = core.is_open
        try:
            core.handle(frames, trio.current_time())
        finally:
            if core.is_open and not was_open:
                self._attached_at = trio.current_time()
                self._patience.deadline = _NEVER
                self._context.counters["links_opened"] += 1
                if self.trace is not None:
                    state = "resumed" if self._opened.is_set() or core.resumes else "opened"
                    self.trace.put(state, epoch=core.epoch, position=core.receiver.received)
                self._opened.set()
                self._kick()
                if core.lost_requests:
                    self._lose_requests()
            if len(queue) > before:
                if self.trace is not None:
                    self.trace.read(core)
                if self._sleeper.task is None:
                    self._answer_early(before)
                self._sleeper.wake()
            if core.wants_write:
                self._kick()
            self._context.due.schedule(self)

    def _lose_requests(self) -> None:
        lost, self.core.lost_requests = self.core.lost_requests, []
        text = "the server has forgotten the session: the request may or may not have been handled"
        for request_id in lost:
            self._answers.fail(request_id, SessionResetError(text, self.core.epoch))

    def _give_up(self, request_id: int) -> None:
        self.core.give_up(request_id)
        self._kick()

    def _on_link_end(self, link: SessionLink, error: Dep2pError) -> None:
        if self.link is link:
            self.link = None
            self._refused = error
            if self.trace is not None and self.core.is_open and not (self.core.ended or self.is_left):
                self.trace.put("lost", position=self.core.receiver.received, reason=str(error))
            self.core.detach()

    def _note_flow(self, now: float) -> None:
        if self.link is not None and self.link.flows():
            self.core.note_flow(now)

    def next_deadline(self) -> float | None:
        return self.core.next_deadline()

    def on_deadline(self, now: float) -> None:
        """Act on deadlines."""
        self._note_flow(now)
        self.core.on_deadline(now)
        if self.core.receiver.failure is not None:
            self._fail(SessionFailedError(self.core.receiver.failure))
        elif self.core.receiver.queue:
            self._sleeper.wake()
        if self.core.wants_write:
            self._kick()

    def _fail(self, error: Dep2pError, *, raise_later: bool = True) -> None:
        """End with an error: no more pushes come, and earlier ones can still be taken."""
        if self.trace is not None:
            self.trace.end(failed=raise_later, position=self.core.receiver.received, reason=str(error))
        if self._error is None and raise_later:
            self._context.counters["failed"] += 1
            self._error = error
        self.core.ended = True
        self._opened.set()
        self._answers.fail_all(lambda: SessionClosedError(str(error)))
        self._sleeper.wake()
        self._changed.set()

    def failed_internally(self, _error: Exception) -> None:
        """End by a fault of `run`."""
        self._fail(SessionFailedError("an internal error ended the session: the log has it"))

    def leave(self, *, keep: bool) -> None:
        """Stop this side. With ``keep`` the server is not notified, so that a token can go on. Idempotent."""
        if self.is_left:
            return
        self.is_left = True
        self.core.done()
        self.core.idle()
        if not keep:
            self.core.leave()
        self._fail(SessionClosedError("this side has left the session"), raise_later=False)
        if self.link is not None:
            self.link.pulled.wake()
        else:
            self.scope.cancel()

    async def aclose(self) -> None:
        """End the session and tell the server; waits until that is written, at most ``Limits.close_timeout_s``."""
        self.leave(keep=False)
        await self._finish()

    async def detach(self) -> str:
        """Leave without ending the session; return the token to go on with."""
        self.leave(keep=True)
        await self._finish()
        return self.token

    async def _finish(self) -> None:
        with trio.move_on_after(self._context.limits.close_timeout_s):
            await self.finished.wait()
        self.scope.cancel()

    def stop(self) -> None:
        """Stop at once."""
        self.is_left = True
        self._fail(SessionClosedError("the node is stopping"))
        self._context.due.forget(self)
        self.scope.cancel()
