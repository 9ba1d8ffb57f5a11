"""The answering end of a link: request handlers in worker tasks, notify handlers one after the other."""

import logging
from collections import deque
from typing import Final

import trio

from dep2p.concurrency.wait_queue import Sleeper
from dep2p.errors import Dep2pError, ErrorCode, NotMemberError, StreamClosedError
from dep2p.host.interface import ByteStream
from dep2p.links.link import PAUSED_BY_INBOX, Link
from dep2p.messaging.context import MessagingContext
from dep2p.messaging.handlers import Registry, RequestWork, start_waiting
from dep2p.messaging.trace_events import TracedCall, trace_notify
from dep2p.messaging.worker_pool import Workers
from dep2p.protocols.fairness.turns import UNITS_PER_TURN
from dep2p.protocols.messaging.admission import PeerLoad, Refusal
from dep2p.protocols.messaging.incoming import Notification
from dep2p.protocols.messaging.notify import NotifyInbox
from dep2p.protocols.messaging.request import Abandon, Begin, Job, Responder, ResponderEffect, SendAnswer
from dep2p.protocols.wire.compression import Compression
from dep2p.protocols.wire.frame import HEADER_BYTES, Frame, FrameType, encode_error, encode_header
from dep2p.protocols.wire.headers import HeaderMap, app_headers
from dep2p.protocols.wire.payload import PayloadReader, compressed_body, payload_bytes_max, required_name
from dep2p.tracing.event_log import TraceLog
from dep2p.types import Headers, RealmId

logger: logging.Logger = logging.getLogger("dep2p.io")

_NOTIFY: Final = int(FrameType.NOTIFY)
_RESPONSE: Final = int(FrameType.RESPONSE)
_URGENT_BYTES: Final = 16_384
_NOTIFIES_PER_STEP: Final = 128
"""Notifies after which a handler that never waits gives other tasks a turn."""
_NEVER: Final = float("inf")
_STALLED_LOOKS: Final = 4
"""Checks in ``Limits.answers_unread_timeout_s`` whether a peer reads."""
_UNITS_PER_START: Final = 4
"""Units of a turn that starting a handler takes."""
_NOTIFY_BYTES_SHIFT: Final = 13
"""A large notify counts once more for each 8 KiB (a few compressed bytes can stand for a megabyte): 1 MiB a turn."""


class InboundLink(Link):
    """The link of a peer that sends us requests and notifies. Requests run side by side, notifies in their order."""

    def __init__(
        self,
        stream: ByteStream,
        context: MessagingContext,
        *,
        registry: Registry,
        workers: Workers,
        load: PeerLoad,
        nursery: trio.Nursery,
    ) -> None:
        """``nursery``: where the task of the notify handlers goes; the link ends before it does."""
        limits, zstd, fairness = context.limits, context.zstd_for(stream.connection), context.fairness
        super().__init__(
            stream,
            context.gate,
            limits,
            context.counters,
            payload_bytes_max=payload_bytes_max(limits),
            fairness=fairness,
        )
        self.realm_id: RealmId = context.gate.realm_id
        self._turns = fairness
        self._ready: deque[RequestWork] = deque()
        """Works that have a place, and wait for the peer's turn."""
        self._held: deque[RequestWork] = deque()
        """Works that wait until the peer reads its answers: they need no place before."""
        self._stalled_at = _NEVER
        """Time of the next check whether the peer reads; never while nothing waits for that."""
        self._stalled_looks = 0
        """Checks in a row that found that it does not."""
        self._stalled_writes = (0, 0)
        self._nursery = nursery
        self._has_notify_task = False
        self._registry = registry
        self._workers = workers
        self._load = load
        self._timer = context.timer
        self._compression = None if zstd is None else Compression(zstd, limits.compress_bytes_min)
        payloads = PayloadReader(limits, zstd)
        self.responder: Responder = Responder(
            payloads, registry.request_policies, load, default_timeout_s=limits.request_timeout_s
        )
        self.inbox: NotifyInbox = NotifyInbox(
            payloads, items_max=limits.link_in_items_max, bytes_max=limits.link_in_bytes_max
        )
        self._works: dict[Job, RequestWork] = {}
        self._batch = 0
        self._half_closed = False
        self._notify_sleeper = Sleeper()
        self._inbox_closed = False
        self._has_notify_rate = limits.notifies_per_peer_per_s > 0
        self.trace_log: TraceLog | None = None

    # Frames

    def receive(self, frames: list[Frame]) -> None:
        now = trio.current_time()
        notifies = [frame for frame in frames if frame[0] == _NOTIFY]
        if notifies:
            self._receive_notifies(notifies, now)
            if len(notifies) == len(frames):
                return
            frames = [frame for frame in frames if frame[0] != _NOTIFY]
        self._batch = len(frames)
        self._perform(self.responder.handle(frames, now))
        if self.responder.violation is not None:
            self.violate(self.responder.violation)

    def _perform(self, effects: list[ResponderEffect]) -> None:
        for effect in effects:
            match effect:
                case Begin(job):
                    self._begin(job)
                case SendAnswer(frame):
                    if self.error is None:
                        self.out.put((frame,), len(frame))
                case Abandon(job):
                    self._abandon(job)

    def _begin(self, job: Job) -> None:
        self.counters["requests_received"] += 1
        work = RequestWork(self, self._registry.requests[job.name], job)
        self._works[job] = work
        self._timer.schedule(job.deadline)
        if self.out.is_full:
            self._hold(work)
        else:
            self._offer(work)

    def _offer(self, work: RequestWork) -> None:
        match work.entry.queue.offer(self.peer, work):
            case "start":
                work.has_place = work.is_started = True
                self._workers.start(work)
            case "refuse":
                del self._works[work.job]
                self._load.refused("waiting_requests")
                text = "too many requests of this peer wait for this handler: send more when some are answered"
                frame = self.responder.refuse(work.job, Refusal(ErrorCode.OVERLOADED, text))
                if frame is not None:
                    self.out.put((frame,), len(frame))
            case "wait":
                pass

    def start_work(self, work: RequestWork) -> bool:
        """See `AnsweringLink`."""
        if self.out.is_full:
            self._hold(work)
            return False
        if self._ready or self._turns.is_shared(self.peer):
            self._ready.append(work)
            self.want_turn(self._turns)
        else:
            work.is_started = True
            self._workers.start(work)
        return True

    def work_for(self, units: int) -> bool:
        """Start works that have got a place, then take frames that wait."""
        ready = self._ready
        while ready and units > 0:
            work = ready.popleft()
            if work.has_place:
                work.is_started = True
                self._workers.start(work)
                units -= _UNITS_PER_START
        return super().work_for(units) or bool(ready)

    def _hold(self, work: RequestWork) -> None:
        """The peer does not read: what it asks waits without a place, and if that lasts, the link is cut."""
        self._held.append(work)
        if self._stalled_at == _NEVER:
            self._watch_reading(trio.current_time())

    def _output_low(self) -> None:
        super()._output_low()
        self._stalled_at = _NEVER
        held, self._held = self._held, deque()
        for work in held:
            if work.job in self._works:
                self._offer(work)

    def _watch_reading(self, now: float) -> None:
        writes = (self.out.writes, self.stream.unsent_bytes)
        is_same = self._stalled_at != _NEVER and writes == self._stalled_writes
        self._stalled_looks = self._stalled_looks + 1 if is_same else 0
        self._stalled_writes = writes
        self._stalled_at = now + self.limits.answers_unread_timeout_s / _STALLED_LOOKS
        self._timer.schedule(self._stalled_at)

    def _cut_if_stalled(self, now: float) -> None:
        if now < self._stalled_at:
            return
        self._watch_reading(now)
        if self._stalled_looks < _STALLED_LOOKS:
            return
        self._stalled_at = _NEVER
        self.counters["links_cut_answers_unread"] += 1
        self._load.refused("unread_answers")
        logger.warning(
            "cut a link of %s: it has read no answer for %g s, and %d bytes wait for it",
            self.peer,
            self.limits.answers_unread_timeout_s,
            self.out.waiting_bytes + self.stream.unsent_bytes,
        )
        self.end(StreamClosedError("the peer does not read its answers"), abort=True)

    def _abandon(self, job: Job) -> None:
        self.counters["requests_abandoned"] += 1
        work = self._works.get(job)
        if work is None:
            return
        work.is_cancelled = True
        if work.scope is not None:
            work.scope.cancel()
        elif not work.is_started:  # it waits for a place, for the peer's turn, or until the peer reads
            if not work.has_place:
                work.entry.queue.withdraw(self.peer, work)
            self.handler_ended(work)
            self._forget(work)
            self._end_when_done()

    def handler_ended(self, work: RequestWork) -> None:
        """See `AnsweringLink`."""
        if work.has_place:
            work.has_place = False
            queue = work.entry.queue
            if queue.done(self.peer):
                start_waiting(queue)

    def work_ended(self, work: RequestWork) -> None:
        """A worker is done with a request: forget it."""
        if work.has_place:
            self.handler_ended(work)
        if work.job in self._works:  # it was not answered
            self._forget(work)
        if self._half_closed:
            self._end_when_done()

    def _forget(self, work: RequestWork) -> None:
        if self._works.pop(work.job, None) is not None:
            self.responder.finish(work.job)

    # Answers

    async def answer(self, job: Job, data: bytes) -> None:
        """Send a RESPONSE, or ERROR/MESSAGE_TOO_LARGE; waits while the peer does not read, up to the deadline."""
        if len(data) > self.limits.message_bytes_max:
            text = f"the response has {len(data)} bytes: at most {self.limits.message_bytes_max} are allowed"
            await self.answer_error(job, ErrorCode.MESSAGE_TOO_LARGE, text)
            return
        flags, body = compressed_body(self._compression, data)
        size = len(body)
        out = self.out
        if out.is_full and not await self._wait_until_read(job, size):
            return
        if self._is_expected(job):
            header = encode_header(_RESPONSE, size, flags=flags, req_id=job.req_id)
            if self._batch <= 1 and size <= _URGENT_BYTES and not self.responder.in_flight:
                out.put_urgent(header + body)
            else:
                out.put((header, body), HEADER_BYTES + size)
            self.counters["responses_sent"] += 1

    async def answer_error(self, job: Job, code: ErrorCode, text: str) -> None:
        """Send an ERROR instead of an answer."""
        frame = encode_error(code, text, req_id=job.req_id, text_bytes_max=self.limits.error_text_bytes_max)
        if self.out.is_full and not await self._wait_until_read(job, len(frame)):
            return
        if self._is_expected(job):
            self.out.put((frame,), len(frame))

    async def _wait_until_read(self, job: Job, size: int) -> bool:
        """Wait for space in the output; False when too much waits for this peer already, and it got that as answer."""
        load = self._load
        if not load.keep_answer(size):
            self.counters["responses_dropped_unread"] += 1
            if self._is_expected(job):
                text = (
                    f"{load.answers_bytes} bytes of answers wait here for this peer to read them, the most allowed "
                    "(answers_unread_bytes_max), so this answer was dropped: read answers before asking more"
                )
                # Not OVERLOADED, which says that no handler ran: the caller would ask again.
                frame = encode_error(ErrorCode.TIMEOUT, text, req_id=job.req_id)
                self.out.put((frame,), len(frame))
            return False
        if self._stalled_at == _NEVER:
            self._watch_reading(trio.current_time())
        try:
            await self.out.wait_for_space(size)
        finally:
            load.answer_left(size)
        return True

    def _is_expected(self, job: Job) -> bool:
        del self._works[job]
        return self.responder.finish(job) and self.error is None

    # Notifies

    def _receive_notifies(self, frames: list[Frame], now: float) -> None:
        if self.responder.is_draining:
            self.counters["notifies_dropped_draining"] += len(frames)
            return
        inbox = self.inbox
        inbox.handle(frames, now)
        self.counters["notifies_received"] += len(frames)
        self._notify_sleeper.wake()
        if not self._has_notify_task:
            self._has_notify_task = True
            self._nursery.start_soon(self._handle_notifies)
        if inbox.must_pause:
            self.pause(PAUSED_BY_INBOX)

    @property
    def notifies_pending(self) -> int:
        """Notifies that are queued or being handled."""
        return len(self.inbox) + (
            self._has_notify_task and self._notify_sleeper.task is None and not self._inbox_closed
        )

    async def _handle_notifies(self) -> None:
        """Call the notify handlers of this link, in order, until the link is over and all is handled. One task does
        it."""
        inbox, notifies, connection = self.inbox, self._registry.notifies, self.connection
        is_verified, realm = self.gate.is_verified, self.realm_id
        known: HeaderMap | None = None
        name = ""
        headers: Headers = {}
        left = _NOTIFIES_PER_STEP
        while True:
            if left <= 0:
                await self._turns.wait_turn(self.peer)
                left = UNITS_PER_TURN if self._turns.is_shared(self.peer) else _NOTIFIES_PER_STEP
            if self._paused and inbox.may_resume:
                self.resume(PAUSED_BY_INBOX)
            item = inbox.take()
            if item is None:
                if inbox.violation is not None:
                    self.counters["notifies_dropped_behind_violation"] += inbox.clear()
                    self.violate(inbox.violation)
                if self._inbox_closed:
                    return
                await self._notify_sleeper.wait()
                continue
            left -= 1 + (len(item[1]) >> _NOTIFY_BYTES_SHIFT)
            if item[0] is not known:
                known = item[0]
                name = required_name(known)
                headers = app_headers(known)
            entry = notifies.get(name)
            if entry is None:
                self.counters["notifies_dropped_no_handler"] += 1
                continue
            if entry.rate_per_s or self._has_notify_rate:
                await self._pace(name, entry.rate_per_s)
            if entry.running < entry.concurrency:
                entry.running += 1
            else:
                await entry.acquire()
            try:
                # A verdict ends with its connection. Notifies that a member sent before it hung up still count; `ended`
                # drops those of a member that was expelled.
                if self._inbox_closed or is_verified(connection):
                    await entry.fn(Notification(self.peer, name, item[1], dict(headers) if headers else {}, realm))
                    if self.trace_log is not None:
                        trace_notify(self.trace_log, TracedCall(self.peer, name, "in", len(item[1])), "ok")
                else:
                    self.counters["notifies_dropped_not_member"] += 1
            except Exception:
                self.counters["handlers_failed"] += 1
                logger.exception("the handler of notifies %r failed", name)
                if self.trace_log is not None:
                    trace_notify(self.trace_log, TracedCall(self.peer, name, "in", len(item[1])), "handler_failed")
            finally:
                entry.release()

    async def _pace(self, name: str, rate_per_s: float) -> None:
        while wait_s := self._load.notify_wait_s(name, rate_per_s, trio.current_time()):
            self.counters["notifies_delayed_rate"] += 1
            await trio.sleep(wait_s)

    # Deadlines and the end

    def next_deadline(self) -> float | None:
        """Return the earliest deadline of the requests at work, and of a check whether the peer reads."""
        deadline = self.responder.next_deadline()
        if self._stalled_at == _NEVER:
            return deadline
        return self._stalled_at if deadline is None else min(deadline, self._stalled_at)

    def on_deadline(self, now: float) -> None:
        """Cancel the jobs whose callers wait no more; cut the link of a peer that reads nothing."""
        self._perform(self.responder.on_deadline(now))
        self._cut_if_stalled(now)

    def drain(self) -> None:
        """Refuse new work from now on."""
        self.responder.is_draining = True

    def peer_half_closed(self) -> None:
        self._half_closed = True
        self._end_when_done()

    def _end_when_done(self) -> None:
        if self._half_closed and not self._works:
            self.end(StreamClosedError("the peer closed the link"))

    def collect_counts(self) -> None:
        """Move the responder's counts into the common counters."""
        for name, count in self.responder.refused.items():
            self.counters[f"requests_refused_{name.lower()}"] += count
        self.responder.refused.clear()

    def ended(self, error: Dep2pError) -> None:
        self.collect_counts()
        self._stalled_at = _NEVER
        self._perform(self.responder.close(str(error)))
        if isinstance(error, NotMemberError):
            self.counters["notifies_dropped_not_member"] += self.inbox.clear()
        self._inbox_closed = True
        self._notify_sleeper.wake()
