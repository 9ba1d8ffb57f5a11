"""The asking end of a link, and the calls that use it: request with retries, and notify."""

import logging
from collections.abc import Awaitable, Mapping
from typing import Final

import trio
from outcome import Error, Value

from dep2p.arguments import WrongTypeError, as_bytes, check_number, check_text
from dep2p.errors import Dep2pError, NotMemberError, RequestTimeoutError, StreamClosedError
from dep2p.host.interface import ByteStream
from dep2p.links.link import Link, LinkPool
from dep2p.links.writer import YIELD_BYTES
from dep2p.messaging.context import MessageCall, MessagingContext
from dep2p.protocols.messaging.request import Requester
from dep2p.protocols.messaging.retry import RetryPolicy
from dep2p.protocols.wire.compression import Compression
from dep2p.protocols.wire.frame import HEADER_BYTES, HEADERS, Frame, FrameType, encode_header
from dep2p.protocols.wire.payload import (
    TIMEOUT_MS_MAX,
    PayloadReader,
    check_body,
    compressed_body,
    payload_bytes_max,
)
from dep2p.types import PeerId, Rng

logger: logging.Logger = logging.getLogger("dep2p.io")

_REQUEST: Final = int(FrameType.REQUEST)
_NOTIFY: Final = int(FrameType.NOTIFY)
_CANCEL: Final = int(FrameType.CANCEL)
_URGENT_BYTES: Final = 16_384
_LINKS_TRIED_MAX: Final = 4
"""Links that a request tries before it is sent over one."""


class OutboundLink(Link):
    """The link that we opened: our requests and notifies go out, answers come in."""

    def __init__(self, stream: ByteStream, context: MessagingContext) -> None:
        limits, zstd = context.limits, context.zstd_for(stream.connection)
        super().__init__(stream, context.gate, limits, context.counters, payload_bytes_max=payload_bytes_max(limits))
        self._timer = context.timer
        self.compression: Compression | None = None if zstd is None else Compression(zstd, limits.compress_bytes_min)
        self.requester: Requester[trio.lowlevel.Task] = Requester(
            PayloadReader(limits, zstd), in_flight_max=limits.requests_in_flight_per_peer_max
        )
        self._places = trio.lowlevel.ParkingLot()
        self._batch = 0

    @property
    def is_busy(self) -> bool:
        return super().is_busy or self.requester.in_flight > 0

    async def place(self, size: int) -> None:
        """Wait until one more request of about ``size`` bytes may be sent. Raises StreamClosedError."""
        while self.requester.is_full and self.error is None:
            await self._places.park()
        if self.out.is_full:
            try:
                await self.out.wait_for_space(size)
            except BaseException:
                self._places.unpark()  # this caller was woken for the place: the next one gets it
                raise

    def ask(self, head: bytes, flags: int, body: bytes | memoryview, deadline: float) -> Awaitable[bytes]:
        """Send a request at once, and return the wait for its answer, which the caller awaits in the same step.

        ``head``: the encoded headers. Raises what the peer answers, StreamClosedError or RequestTimeoutError.
        """
        if self.error is not None:
            raise _again(self.error)
        requester = self.requester
        req_id = requester.start(trio.lowlevel.current_task(), deadline)
        self.was_used = True
        size = len(head) + len(body)
        header = encode_header(_REQUEST, size, flags=flags, req_id=req_id)
        try:
            if requester.in_flight == 1 and self._batch <= 1 and size <= _URGENT_BYTES:
                self.out.put_urgent(b"".join((header, head, body)))
            else:
                self.out.put((header, head, body), HEADER_BYTES + size)
        except BaseException:
            requester.give_up(req_id)
            raise
        self._timer.schedule(deadline)

        def abort(_raise_cancel: object) -> trio.lowlevel.Abort:
            self._give_up(req_id)
            return trio.lowlevel.Abort.SUCCEEDED

        # The caller awaits it: a coroutine around the wait would cost a request about a hundredth of its time.
        return trio.lowlevel.wait_task_rescheduled(abort)  # noqa: ASYNC105

    def _give_up(self, req_id: int) -> None:
        if self.requester.give_up(req_id):
            self.counters["requests_cancelled"] += 1
            self._send_cancel(req_id)
        self._places.unpark()

    def _send_cancel(self, req_id: int) -> None:
        if self.error is None:
            self.out.put((encode_header(_CANCEL, 0, req_id=req_id),), HEADER_BYTES)

    def receive(self, frames: list[Frame]) -> None:
        requester = self.requester
        answers = requester.handle(frames, trio.current_time())
        self._batch = len(answers)
        reschedule = trio.lowlevel.reschedule
        for task, answer in answers:
            reschedule(task, Value(answer) if isinstance(answer, bytes) else Error(answer))
        if self._places:
            self._places.unpark(count=len(answers))
        if requester.link_error is not None:
            self.counters["links_refused_by_peer"] += 1
            self.end(requester.link_error)
        elif requester.violation is not None:
            self.violate(requester.violation)

    def next_deadline(self) -> float | None:
        """Return the earliest deadline of the requests in flight."""
        return self.requester.next_deadline()

    def on_deadline(self, now: float) -> None:
        """Give RequestTimeoutError to callers whose time is over, and cancel their requests at the peer."""
        for req_id, task in self.requester.on_deadline(now):
            self.counters["requests_timed_out"] += 1
            trio.lowlevel.reschedule(task, Error(RequestTimeoutError("no answer within the deadline")))
            self._send_cancel(req_id)
            self._places.unpark()

    def peer_half_closed(self) -> None:
        self.end(StreamClosedError("the peer closed the link"))

    def collect_counts(self) -> None:
        """Move the requester's counts into the common counters."""
        self.counters["responses_unmatched"] += self.requester.unmatched
        self.requester.unmatched = 0

    def ended(self, error: Dep2pError) -> None:
        self.collect_counts()
        for task in self.requester.close():
            trio.lowlevel.reschedule(task, Error(_again(error)))
        self._places.unpark_all()


def _again(error: Dep2pError) -> Dep2pError:
    """Make a new error for one caller, so that tracebacks do not pile up on a shared one."""
    if isinstance(error, NotMemberError):
        return NotMemberError(str(error))
    return StreamClosedError(str(error))


class Caller:
    """The methods that send over outbound links."""

    def __init__(self, pool: LinkPool[OutboundLink], context: MessagingContext, rng: Rng) -> None:
        self._pool = pool
        self._limits = context.limits
        self._counters = context.counters
        self._encoder = context.encoder
        self._retry = RetryPolicy(context.limits, rng)

    async def request(self, peer: PeerId, call: MessageCall) -> bytes:
        """See `Messaging.request`."""
        # Calls pay for checks by their type alone; what has another type gets the whole check.
        if type(peer) is not str:
            check_text(peer, "the peer")
        data = call.body if type(call.body) is bytes else as_bytes(call.body, "the message")
        check_body(data, self._limits.message_bytes_max)
        timeout_s = self._limits.request_timeout_s if call.timeout_s is None else call.timeout_s
        if type(timeout_s) is not float or timeout_s != timeout_s:
            check_number(timeout_s, "timeout_s")
        if type(call.idempotent) is not bool:
            raise WrongTypeError(f"idempotent must be True or False, not {type(call.idempotent).__name__}")
        if not timeout_s >= 0:
            raise ValueError(f"timeout_s is {timeout_s}: it cannot be negative")
        deadline = trio.current_time() + timeout_s
        self._counters["requests_sent"] += 1
        if not call.idempotent or call.is_one_try:
            return await self._try(peer, call, data, timeout_s, deadline)
        tries = 0
        while True:
            try:
                return await self._try(peer, call, data, timeout_s, deadline)
            except Dep2pError as error:
                tries += 1
                delay_s = self._retry.delay_s(error, tries)
                if delay_s is None or trio.current_time() + delay_s >= deadline:
                    raise
                logger.debug("request %r to %s is tried again: %s", call.name, peer, error)
            self._counters["requests_retried"] += 1
            await trio.sleep(delay_s)
            timeout_s = deadline - trio.current_time()

    def _try(self, peer: PeerId, call: MessageCall, data: bytes, timeout_s: float, deadline: float) -> Awaitable[bytes]:
        """Send over the open link, if it has space, and return the wait for the answer; else return the whole try."""
        head = self._encoder.encode(call.name, _timeout_ms(timeout_s), call.idempotent, call.headers)
        link = self._pool.ready(peer)
        if link is None or link.out.is_full or link.requester.is_full:
            return self._try_later(peer, call, data, len(head), deadline)
        flags, body = compressed_body(link.compression, data)
        return link.ask(head, flags | HEADERS, body, deadline)

    async def _try_later(self, peer: PeerId, call: MessageCall, data: bytes, head_bytes: int, deadline: float) -> bytes:
        try:
            link = await self._wait_for_link(peer, head_bytes + len(data), deadline)
        except Dep2pError as error:
            error.is_unsent = True
            raise
        left_ms = _timeout_ms(deadline - trio.current_time())
        head = self._encoder.encode(call.name, left_ms, call.idempotent, call.headers)
        flags, body = compressed_body(link.compression, data)
        return await link.ask(head, flags | HEADERS, body, deadline)

    async def _wait_for_link(self, peer: PeerId, size: int, deadline: float) -> OutboundLink:
        # Nothing is sent yet: a link that ends or is replaced meanwhile, as when both sides have dialed, costs a try.
        error: Dep2pError = StreamClosedError("the link was replaced")
        with trio.move_on_at(deadline):
            for _ in range(_LINKS_TRIED_MAX):
                link = await self._pool.get(peer, deadline)
                try:
                    await link.place(size)
                except StreamClosedError as ended:
                    error = ended
                if link.error is None and self._pool.ready(peer) is link:
                    return link
                if link.error is not None and not isinstance(link.error, StreamClosedError):
                    raise _again(link.error)  # the peer refused the link: it would refuse another one, too
            raise _again(error)
        raise RequestTimeoutError(f"nothing could be sent to {peer} within the deadline")

    async def notify(self, peer: PeerId, name: str, data: bytes, headers: Mapping[str, object] | None) -> None:
        """See `Messaging.notify`."""
        if type(peer) is not str:
            check_text(peer, "the peer")
        if type(data) is not bytes:
            data = as_bytes(data, "the message")
        body: bytes | memoryview = data
        limits = self._limits
        size = len(data)
        if size > limits.message_bytes_max:
            check_body(data, limits.message_bytes_max)
        head = self._encoder.encode(name, 0, False, headers)
        link = self._pool.ready(peer)
        if link is None or link.out.is_full:
            deadline = trio.current_time() + limits.request_timeout_s
            link = await self._link_with_room(peer, size + len(head), deadline)
        flags = HEADERS
        if limits.compress_bytes_min and size >= limits.compress_bytes_min:
            compressed, body = compressed_body(link.compression, data)
            flags |= compressed
        size = len(head) + len(body)
        out = link.out
        link.was_used = True
        out.put((encode_header(_NOTIFY, size, flags=flags), head, body), HEADER_BYTES + size)
        self._counters["notifies_sent"] += 1
        if out.waiting_bytes >= YIELD_BYTES:
            await trio.lowlevel.checkpoint()
        else:
            await trio.lowlevel.checkpoint_if_cancelled()

    async def _link_with_room(self, peer: PeerId, size: int, deadline: float) -> OutboundLink:
        # A link that dies while a caller waits for room has not accepted the message: another try is safe.
        while True:
            link = await self._pool.get(peer, deadline)
            if not link.out.is_full:
                return link
            try:
                await link.out.wait_for_space(size)
            except StreamClosedError:
                continue
            if self._pool.ready(peer) is link:
                return link


def _timeout_ms(timeout_s: float) -> int:
    return int(min(max(1.0, timeout_s * 1000), TIMEOUT_MS_MAX))
