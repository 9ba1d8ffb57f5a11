"""The answering end of a link: request handlers in worker tasks, notify handlers one after the other."""

import logging
from collections import Counter
from typing import Final

import trio

from dep2p.concurrency.deadlines import DeadlineTimer
from dep2p.errors import Dep2pError, ErrorCode, HandlerError, NotMemberError, StreamClosedError
from dep2p.host.interface import ByteStream
from dep2p.limits import Limits
from dep2p.links.link import PAUSED_BY_INBOX, Link
from dep2p.messaging.handlers import Notice, Registry, Request, RequestEntry
from dep2p.messaging.trace_events import trace_notify, trace_request
from dep2p.messaging.worker_pool import Workers
from dep2p.protocols.messaging.admission import PeerLoad, Refusal
from dep2p.protocols.messaging.notify import NotifyInbox
from dep2p.protocols.messaging.request import Abandon, Answer, Begin, Job, Responder, ResponderEffect
from dep2p.protocols.wire.compression import Compression, Zstd
from dep2p.protocols.wire.frame import HEADER_BYTES, Frame, FrameType, encode_error, encode_header
from dep2p.protocols.wire.headers import HeaderMap, app_headers
from dep2p.protocols.wire.payload import PayloadReader, compressed_body, payload_bytes_max, required_name
from dep2p.realm.interface import RealmGate
from dep2p.tracing.event_log import TraceLog

logger = logging.getLogger("dep2p.io")

_NOTIFY: Final = int(FrameType.NOTIFY)
_RESPONSE: Final = int(FrameType.RESPONSE)
_URGENT_BYTES: Final = 16_384
_NOTIFIES_PER_STEP: Final = 128
"""A handler that never waits gives other tasks a turn after so many notifies,"""
_NOTIFY_BYTES_SHIFT: Final = 13
"""and large ones (a few compressed bytes can stand for a megabyte) count once more for each 8 KiB: 1 MiB a turn."""


class RequestWork:
    """One request at work: waiting for a place or running in a worker."""

    __slots__ = ("_link", "entry", "is_cancelled", "is_started", "job", "outcome", "scope")

    def __init__(self, link: "InboundLink", entry: RequestEntry, job: Job) -> None:
        self._link = link
        self.entry = entry
        self.job = job
        self.scope: trio.CancelScope | None = None
        self.is_started = False
        self.is_cancelled = False

    async def run(self) -> None:
        """Call the handler and send what it gives."""
        link, job = self._link, self.job
        log = link.trace_log
        began = 0.0 if log is None else trio.current_time()
        self.outcome = "cancelled"
        try:
            if not self.is_cancelled:
                await self._answer(link, job)
        except StreamClosedError:
            link.counters["responses_dropped_link_ended"] += 1
        finally:
            link.work_ended(self)
            if log is not None:
                took_s = trio.current_time() - began
                trace_request(log, link.peer, job.name, "in", self.outcome, took_s, len(job.data), None)

    async def _answer(self, link: "InboundLink", job: Job) -> None:
        try:
            data = await self.entry.fn(
                Request(link.peer, job.name, job.data, app_headers(job.headers), job.deadline, job.idempotent)
            )
            if type(data) is not bytes:
                raise TypeError(f"the handler {job.name!r} gave {type(data).__name__}: it must give bytes")
        except HandlerError as error:
            self.outcome = "handler_failed"
            link.counters["handlers_failed"] += 1
            await link.answer_error(job, ErrorCode.HANDLER_FAILED, str(error))
        except Exception:
            self.outcome = "handler_failed"
            link.counters["handlers_failed"] += 1
            logger.exception("the handler of requests %r failed", job.name)
            await link.answer_error(job, ErrorCode.HANDLER_FAILED, "the handler failed")
        else:
            self.outcome = "ok"
            await link.answer(job, data)


class InboundLink(Link):
    """The link of a peer that asks us. Its requests run side by side, its notifies in their order."""

    def __init__(
        self,
        stream: ByteStream,
        gate: RealmGate,
        limits: Limits,
        counters: Counter[str],
        *,
        registry: Registry,
        workers: Workers,
        load: PeerLoad,
        zstd: Zstd | None,
        timer: DeadlineTimer,
        nursery: trio.Nursery,
    ) -> None:
        """``nursery``: where the task of the notify handlers goes; the link ends before it does."""
        super().__init__(stream, gate, limits, counters, payload_bytes_max=payload_bytes_max(limits))
        self._nursery = nursery
        self._has_notify_task = False
        self._registry = registry
        self._workers = workers
        self._load = load
        self._timer = timer
        self._compression = None if zstd is None else Compression(zstd, limits.compress_bytes_min)
        payloads = PayloadReader(limits, zstd)
        self.responder = Responder(
            payloads, registry.request_policies, load, default_timeout_s=limits.request_timeout_s
        )
        self.inbox = NotifyInbox(payloads, items_max=limits.link_in_items_max, bytes_max=limits.link_in_bytes_max)
        self._works: dict[Job, RequestWork] = {}
        self._batch = 0
        self._half_closed = False
        self._notify_task: trio.lowlevel.Task | None = None
        self._notify_asleep = False
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
                case Answer(frame):
                    if self.error is None:
                        self.out.put((frame,), len(frame))
                case Abandon(job):
                    self._abandon(job)

    def _begin(self, job: Job) -> None:
        self.counters["requests_received"] += 1
        entry = self._registry.requests[job.name]
        work = RequestWork(self, entry, job)
        place = entry.queue.offer(self.peer, work)
        if place == "refuse":
            frame = self.responder.refuse(job, Refusal(ErrorCode.OVERLOADED, "too many requests wait for this handler"))
            if frame is not None:
                self.out.put((frame,), len(frame))
            return
        self._works[job] = work
        self._timer.want(job.deadline)
        if place == "start":
            work.is_started = True
            self._workers.start(work)

    def _abandon(self, job: Job) -> None:
        self.counters["requests_abandoned"] += 1
        work = self._works.get(job)
        if work is None:
            return
        work.is_cancelled = True
        if work.scope is not None:
            work.scope.cancel()
        elif not work.is_started and work.entry.queue.withdraw(self.peer, work):
            self._forget(work)
            self._end_when_done()

    def work_ended(self, work: RequestWork) -> None:
        """A worker is done with it: its place goes to the next."""
        self._forget(work)
        self._end_when_done()
        following = work.entry.queue.done()
        if following is not None:
            following.is_started = True
            self._workers.start(following)

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
        if out.is_full:
            await out.room(size)
        if self._wanted(job):
            header = encode_header(_RESPONSE, size, flags=flags, req_id=job.req_id)
            if self._batch <= 1 and size <= _URGENT_BYTES and not self.responder.in_flight:
                out.put_urgent(header + body)
            else:
                out.put((header, body), HEADER_BYTES + size)
            self.counters["responses_sent"] += 1

    async def answer_error(self, job: Job, code: ErrorCode, text: str) -> None:
        """Send an ERROR instead."""
        frame = encode_error(code, text, req_id=job.req_id, text_bytes_max=self.limits.error_text_bytes_max)
        if self.out.is_full:
            await self.out.room(len(frame))
        if self._wanted(job):
            self.out.put((frame,), len(frame))

    def _wanted(self, job: Job) -> bool:
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
        self._wake_notify_task()
        if not self._has_notify_task:
            self._has_notify_task = True
            self._nursery.start_soon(self._handle_notifies)
        if inbox.must_pause:
            self.pause(PAUSED_BY_INBOX)

    @property
    def notifies_pending(self) -> int:
        """Queued or being handled."""
        return len(self.inbox) + (self._has_notify_task and not self._notify_asleep and not self._inbox_closed)

    async def _handle_notifies(self) -> None:
        """The one task that calls notify handlers for this link, in order, until it is over and all is handled."""
        inbox, notifies, connection = self.inbox, self._registry.notifies, self.connection
        is_verified = self.gate.is_verified
        self._notify_task = trio.lowlevel.current_task()
        known: HeaderMap | None = None
        name = ""
        headers: dict[str, object] = {}
        left = _NOTIFIES_PER_STEP
        while True:
            if left <= 0:
                left = _NOTIFIES_PER_STEP
                await trio.lowlevel.checkpoint()
            if self._paused and inbox.may_resume:
                self.resume(PAUSED_BY_INBOX)
            item = inbox.take()
            if item is None:
                if inbox.violation is not None:
                    self.counters["notifies_dropped_behind_violation"] += inbox.clear()
                    self.violate(inbox.violation)
                if self._inbox_closed:
                    return
                self._notify_asleep = True
                await trio.lowlevel.wait_task_rescheduled(self._abort_sleep)
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
            if entry.running < entry.concurrency and not entry.waiters:
                entry.running += 1
            else:
                await entry.take_place()
            try:
                # A verdict ends with its connection: what a member sent before it hung up counts. Who is expelled loses
                # it in `ended`.
                if self._inbox_closed or is_verified(connection):
                    await entry.fn(Notice(self.peer, name, item[1], dict(headers) if headers else {}))
                    if self.trace_log is not None:
                        trace_notify(self.trace_log, self.peer, name, "in", "ok", len(item[1]))
                else:
                    self.counters["notifies_dropped_not_member"] += 1
            except Exception:
                self.counters["handlers_failed"] += 1
                logger.exception("the handler of notifies %r failed", name)
                if self.trace_log is not None:
                    trace_notify(self.trace_log, self.peer, name, "in", "handler_failed", len(item[1]))
            finally:
                entry.give_place()

    async def _pace(self, name: str, rate_per_s: float) -> None:
        while wait_s := self._load.notify_wait_s(name, rate_per_s, trio.current_time()):
            self.counters["notifies_delayed_rate"] += 1
            await trio.sleep(wait_s)

    def _wake_notify_task(self) -> None:
        if self._notify_asleep and self._notify_task is not None:
            self._notify_asleep = False
            trio.lowlevel.reschedule(self._notify_task)

    def _abort_sleep(self, _raise_cancel: object) -> trio.lowlevel.Abort:
        self._notify_asleep = False
        return trio.lowlevel.Abort.SUCCEEDED

    # Deadlines and the end

    def next_deadline(self) -> float | None:
        """Of the requests at work."""
        return self.responder.next_deadline()

    def on_deadline(self, now: float) -> None:
        """Cancel what nobody waits for any more."""
        self._perform(self.responder.on_deadline(now))

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
        """Move what the responder has counted into the common counters."""
        for name, count in self.responder.refused.items():
            self.counters[f"requests_refused_{name.lower()}"] += count
        self.responder.refused.clear()

    def ended(self, error: Dep2pError) -> None:
        self.collect_counts()
        self._perform(self.responder.close(str(error)))
        if isinstance(error, NotMemberError):
            self.counters["notifies_dropped_not_member"] += self.inbox.clear()
        self._inbox_closed = True
        self._wake_notify_task()
