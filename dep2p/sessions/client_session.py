"""The client's end of an ordered session, for apps: pushes in order, requests, and the token to go on with later."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import AsyncIterator
from inspect import CORO_CLOSED, getcoroutinestate
from typing import Final, cast

import trio
from outcome import Value

from dep2p.concurrency.deadline_heap import DueTimes
from dep2p.errors import (
    Dep2pError,
    RequestTimeoutError,
    SessionClosedError,
    SessionFailedError,
    SessionGapError,
    SessionResetError,
    StreamClosedError,
)
from dep2p.host.interface import ByteStream
from dep2p.limits import Limits
from dep2p.links.pull_link import SessionLink
from dep2p.protocols.sessions.client import ClientSession
from dep2p.protocols.sessions.resume_token import SessionToken, encode_token
from dep2p.protocols.sessions.wire import (
    AFTER,
    BEFORE,
    END,
    PUSH,
    RESET,
    SKIP,
    Push,
    read_reset,
)
from dep2p.protocols.wire.frame import Frame
from dep2p.realm.interface import RealmGate
from dep2p.sessions.sessions_answers import ANSWERS, Answers
from dep2p.sessions.trace_events import SessionTrace
from dep2p.types import PeerId, Rng, peer_id_bytes

logger = logging.getLogger("dep2p.io")

_BACKOFF_INITIAL_S: Final = 0.1
_BACKOFF_MAX_S: Final = 3.0
_NEVER: Final = float("inf")
_PUSHES: Final = (PUSH, AFTER, BEFORE)
_TRIED_AGAIN: Final = (StreamClosedError, RequestTimeoutError)
"""What may heal by itself while a session is opened for the first time."""


class OpenSession:
    """A session with a server. Iterating gives its pushes (`seq`, `data`) in strict order, each once.

    A push counts as handled when the app comes for the next one; until then the server keeps it. The connection is
    found again by itself; iterating goes on as if nothing had been.
    """

    def __init__(
        self,
        core: ClientSession,
        peer: PeerId,
        gate: RealmGate,
        protocol: str,
        limits: Limits,
        counters: Counter[str],
        due: DueTimes,
        rng: Rng,
    ) -> None:
        self.core = core
        self.peer = peer
        self.name = core.name
        self.id = core.session_id.hex()
        self.armed_at = _NEVER
        self.link: SessionLink | None = None
        self.scope = trio.CancelScope()
        self.is_left = False
        self._gate = gate
        self._protocol = protocol
        self._limits = limits
        self._counters = counters
        self._due = due
        self._rng = rng
        self.trace: SessionTrace | None = None
        self._error: Dep2pError | None = None
        self._opened = trio.Event()
        self._refused: Dep2pError | None = None  # by the latest try
        self._changed = trio.Event()
        self._consumer: trio.lowlevel.Task | None = None
        self._asleep: trio.lowlevel.Task | None = None
        self._answers = Answers(self._give_up)
        self._attached_at: float | None = None
        self._patience = trio.CancelScope()
        self.finished = trio.Event()
        """`run` has ended: the link is closed."""

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
        """The next push; None when the server or this side has ended the session. Only one task may take pushes.

        Raises SessionResetError or SessionGapError once, where something is missing, and goes on when called again;
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
        """At least one push and up to ``items_max``, as many as are there; [] at the end. Otherwise as `receive`."""
        first = await self.receive()
        if first is None:
            return []
        pushes = [first]
        receiver = self.core.receiver
        queue, take = receiver.queue, receiver.take
        while queue and queue[0][2] in _PUSHES and len(pushes) < items_max:
            pushes.append(cast(Push, take()))
        return pushes

    def _special(self, push: Push) -> bool:
        """Whether this is the end."""
        kind = push.kind
        if kind == RESET:
            self._counters["resets"] += 1
            self._changed.set()
            epoch, next_seq, reason = read_reset(push)
            if self.trace is not None:
                self.trace.put("reset", epoch=epoch, position=next_seq - 1, reason=reason)
            raise SessionResetError(reason, epoch, next_seq)
        text = push.data.decode("utf-8", "replace")
        if kind == SKIP:
            self._counters["gaps"] += 1
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
        if self._asleep is not None:
            raise trio.BusyResourceError("another task is taking pushes of this session")
        self._asleep = trio.lowlevel.current_task()

        def abort(_raise_cancel: object) -> trio.lowlevel.Abort:
            self._asleep = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    def _wake(self) -> None:
        task, self._asleep = self._asleep, None
        if task is not None:
            trio.lowlevel.reschedule(task, Value(None))

    def _kick(self) -> None:
        if self.link is not None:
            self.link.pulled.wake()

    # Requests

    @property
    def next_request_id(self) -> int:
        """The id that the next `request` will have: the server can bind pushes to it before it comes."""
        return self.core.next_request_id

    async def request(self, data: bytes, *, timeout_s: float | None = None, in_order: bool = True) -> bytes:
        """Ask the server, at most once handled, whatever becomes of the connection.

        The answer has its place in the sequence: while another task takes pushes, `request` returns when that task has
        handled all that comes before the answer. Called by the task that takes pushes, or while none does, it returns
        as soon as the answer is here; and always without ``in_order``.
        ``timeout_s``: ``Limits.request_timeout_s`` by default. Cancelling the call cancels the server's handler.

        Raises HandlerError and others that the server answers, RequestTimeoutError, SessionResetError (the server has
        forgotten the session; the request may have been handled), SessionClosedError, SessionFullError (too many are
        open), MessageTooLargeError.
        """
        timeout_s = self._limits.request_timeout_s if timeout_s is None else timeout_s
        if not timeout_s >= 0:
            raise ValueError(f"timeout_s is {timeout_s}: it cannot be negative")
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._error is not None:
            raise SessionClosedError(str(self._error))
        request_id = self.core.ask(bytes(data), int(min(timeout_s * 1_000, 0xFFFF_FFFF)))
        self._kick()
        self._due.want(self)
        with trio.move_on_after(timeout_s):
            return await self._answers.wait(request_id, in_order)
        behind = len(self.core.receiver.queue)
        why = f"; {behind} pushes wait to be taken first" if behind else ""
        raise RequestTimeoutError(f"no answer to request {request_id} within {timeout_s:g} s{why}")

    def _answer_early(self, before: int) -> None:
        """Answers behind the first ``before`` of the queue, for those who cannot wait for their turn."""
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

    # The place

    @property
    def token(self) -> str:
        """This place, as a word to keep: `open(peer, name, token=…)` goes on behind the last handled push.

        A push is handled when the app comes for the next one, or calls `handled`. The server keeps what it was not
        told of: save the token no later than then.
        """
        return self._token(*self.core.place)

    def token_behind(self, seq: int) -> str:
        """The place behind push ``seq``, for a program that keeps it before it comes for more."""
        return self.token if self.core.receiver.stale else self._token(self.core.epoch, seq)

    def _token(self, epoch: int, handled: int) -> str:
        return encode_token(SessionToken(self.core.session_id, epoch, handled, peer_id_bytes(self.peer), self.name))

    def handled(self) -> None:
        """The app has handled all that it took, without coming for more yet: `token` says so at once."""
        self.core.done()
        if self.core.ack_now:
            self._kick()

    def give_back(self) -> None:
        """What was taken last was not handled: before `detach`, so that its token does not count it."""
        self.core.receiver.give_back()

    @property
    def is_attached(self) -> bool:
        """Connected at this moment."""
        return self.core.is_open

    def stats(self) -> dict[str, object]:
        """Plain values."""
        return {"peer": self.peer, "role": "client", **self.core.stats()}

    # Its life

    async def opened(self, timeout_s: float) -> None:
        """Until the server has answered for the first time. Raises why it did not."""
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
            if not self.core.ended:  # left by an error: nobody may wait for ever
                self._fail(SessionClosedError("this side has left the session"), raise_later=False)
            self._due.forget(self)
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
                self._counters["links_lost"] += 1
            elif now - away_since >= self.core.options.resume_timeout_s:
                self._fail(SessionFailedError(f"{self.peer} was away for too long: {self._refused}"))
                return
            delay_s = min(_BACKOFF_MAX_S, _BACKOFF_INITIAL_S * 2.0**failures) * (0.5 + 0.5 * self._rng.random())
            failures = min(failures + 1, 16)
            await trio.sleep(delay_s)

    async def _one_link(self) -> bool:
        """Open a link and stay until it is over; gives whether the server answered on it."""
        limits = self._limits
        connection = await self._gate.connect(self.peer, timeout_s=limits.dial_timeout_s)
        stream = await connection.open_stream(self._protocol, timeout_s=limits.stream_open_timeout_s)
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
            self._gate,
            self._limits,
            self._counters,
            collect=self._collect,
            on_frames=self._on_frames,
            on_end=self._on_link_end,
        )

    def _collect(self, bytes_max: int) -> list[bytes]:
        pieces = self.core.collect(bytes_max, trio.current_time())
        if pieces:
            self._due.want(self)
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
                self._counters["links_opened"] += 1
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
                if self._asleep is None:
                    self._answer_early(before)
                self._wake()
            if core.wants_write:
                self._kick()
            self._due.want(self)

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

    def next_deadline(self) -> float | None:
        return self.core.next_deadline()

    def on_deadline(self, now: float) -> None:
        """The time of something is over."""
        self.core.on_deadline(now)
        if self.core.receiver.failure is not None:
            self._fail(SessionFailedError(self.core.receiver.failure))
        elif self.core.receiver.queue:
            self._wake()
        if self.core.wants_write:
            self._kick()

    def _fail(self, error: Dep2pError, *, raise_later: bool = True) -> None:
        """Nothing more comes; what has come can still be taken."""
        if self.trace is not None:
            self.trace.end(failed=raise_later, position=self.core.receiver.received, reason=str(error))
        if self._error is None and raise_later:
            self._counters["failed"] += 1
            self._error = error
        self.core.ended = True
        self._opened.set()
        self._answers.fail_all(lambda: SessionClosedError(str(error)))
        self._wake()
        self._changed.set()

    def leave(self, *, keep: bool) -> None:
        """This side stops; with ``keep`` the server is not told, so that a token can go on. Idempotent."""
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
        """Leave without ending the session, and give the token to go on with."""
        self.leave(keep=True)
        await self._finish()
        return self.token

    async def _finish(self) -> None:
        with trio.move_on_after(self._limits.close_timeout_s):
            await self.finished.wait()
        self.scope.cancel()

    def stop(self) -> None:
        """At once."""
        self.is_left = True
        self._fail(SessionClosedError("the node is stopping"))
        self._due.forget(self)
        self.scope.cancel()
