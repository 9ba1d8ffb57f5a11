"""The receiving end of reliable delivery: one link of one sender, its handler task, and its acknowledgements."""

import logging
from collections import Counter, deque
from itertools import repeat
from typing import TYPE_CHECKING, Final

import trio

from dep2p.errors import Dep2pError, HandlerError, ProtocolError
from dep2p.host.interface import ByteStream
from dep2p.links.link import PAUSED_BY_INBOX
from dep2p.links.pull_link import SessionLink
from dep2p.messaging.handlers import Notice, NotifyEntry
from dep2p.messaging.trace_events import trace_received
from dep2p.protocols.delivery.receiver import ReceiverLane
from dep2p.protocols.delivery.wire import Hello, decode_batch, decode_hello, split_ack
from dep2p.protocols.wire.frame import Frame, FrameType
from dep2p.protocols.wire.headers import HeaderMap, app_headers
from dep2p.protocols.wire.payload import PayloadReader, required_name
from dep2p.storage.delivery_store import InboxRow
from dep2p.types import Headers

if TYPE_CHECKING:
    from dep2p.delivery.service import Delivery

logger = logging.getLogger("dep2p.io")

_ACK_REQUEST: Final = int(FrameType.ACK_REQUEST)
_ACK_REQUESTS: Final = int(FrameType.ACK_REQUESTS)
_ACK_ITEMS: Final = 32
"""After so many results the sender hears of them, while the next ones are handled: it sends on meanwhile."""
_SIGN_OF_LIFE_S: Final = 2.0
"""While a handler runs, the sender hears so often that its messages are here. Less than half its ack timeout."""
_RESULTS_S: Final = 0.25
"""Results of slow handlers wait so long for more of them."""
_STEP_ITEMS: Final = 128
"""A handler that never waits gives other tasks a turn after so many messages,"""
_STEP_BYTES_SHIFT: Final = 13
"""and large ones count once more for each 8 KiB."""
_OVERHEAD_BYTES: Final = 64
_NEVER: Final = float("inf")
_WITHOUT_HANDLER_MAX: Final = 4_096
_UNTOLD_MAX: Final = 4_096
"""A sender that does not read what it is told gets nothing more handled from so many results on."""
NO_HANDLER: Final = "no handler of this name"


class Receiving:
    """One inbound link. Its messages are handled one after the other, in the order they came."""

    def __init__(
        self, service: "Delivery", stream: ByteStream, counters: Counter[str], payloads: PayloadReader
    ) -> None:
        self.armed_at = _NEVER
        self.lane: ReceiverLane | None = None
        self.link = service.make_link(stream, self._collect, self._on_frames, self._on_end)
        self._service = service
        self._counters = counters
        self._payloads = payloads
        self._inbox: deque[tuple[int, Frame | HeaderMap, bytes]] = deque()
        """Number, and the headers and the body; or a frame that is still to be taken apart, and its payload."""
        self._inbox_bytes = 0
        self._handled: list[int] = []
        self._rejected: list[tuple[int, str]] = []
        self._peer = self.link.peer
        self._without_handler: dict[int, int] = {}
        self._handled_count = 0
        self._known: HeaderMap | None = None
        self._known_name = ""
        """Of the handler; empty for a message of a topic."""
        self._known_app: Headers = {}
        self._received = 0
        self._told_received = 0
        self._told_s = 0.0
        self._looked_s = 0.0
        self._is_paused = False
        self._sleeper: trio.lowlevel.Task | None = None
        self._results = trio.Event()
        self._collected = trio.Event()
        self._is_over = False
        self._is_idle = False
        self._is_durable = service.journal.is_durable
        self._notifies = service.messaging.notify_entries

    # Frames

    def _on_frames(self, _link: SessionLink, frames: list[Frame]) -> None:
        if self._service.is_draining:
            self._counters["messages_dropped_draining"] += len(frames)  # unacknowledged: they come again
            return
        inbox, size, received = self._inbox, 0, self._received
        try:
            for frame in frames:
                kind, _flags, number, payload = frame
                if kind == _ACK_REQUESTS:
                    if self.lane is None:
                        raise ProtocolError("a message before HELLO")
                    headers, bodies = decode_batch(frame, self._payloads.split_headers)
                    inbox.extend(zip(range(number, number + len(bodies)), repeat(headers), bodies))
                    number += len(bodies) - 1
                    size += sum(map(len, bodies)) + len(bodies) * _OVERHEAD_BYTES
                elif kind != _ACK_REQUEST:
                    raise ProtocolError(f"frame type 0x{kind:02x} on a delivery link")
                elif not number:
                    self._on_hello(decode_hello(frame))
                elif self.lane is None:
                    raise ProtocolError("a message before HELLO")
                else:
                    inbox.append((number, frame, payload))
                    size += len(payload) + _OVERHEAD_BYTES
                if number > received:
                    received = number
        finally:
            self._received = received
            self._inbox_bytes += size
        limits = self._service.limits
        if len(inbox) >= limits.link_in_items_max or self._inbox_bytes >= limits.link_in_bytes_max:
            self.link.pause(PAUSED_BY_INBOX)
            self._is_paused = True
        self._wake_handler()

    def _on_hello(self, hello: Hello) -> None:
        if self.lane is None:
            self.lane = self._service.inbound.lane(self.link.peer, hello.epoch)
        self.lane.on_hello(hello)

    def _on_end(self, _link: SessionLink, _error: Dep2pError) -> None:
        self._is_over = True
        self._counters["messages_dropped_link_ended"] += len(self._inbox)  # unacknowledged: they come again
        self._inbox.clear()
        self._service.due.forget(self)
        self._wake_handler()
        self._results.set()
        self._collected.set()

    # Handling

    async def run(self, *, is_verified: bool) -> None:
        """Until the link is over, and the handler at work then."""
        try:
            await self._run(is_verified)
        finally:
            if self.lane is not None and (self._handled or self._rejected):
                self._service.inbound.note_later(self.link.peer, self.lane)

    async def _run(self, is_verified: bool) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._handle_all)
            if self._is_durable:
                nursery.start_soon(self._write_results)
            if is_verified:
                self.link.start()
            else:
                self.link.lose_membership()
            await self.link.run()
            # A handler at work goes on: its message is not handled again when the sender comes back.

    async def _handle_all(self) -> None:
        inbox = self._inbox
        limits, notifies, peer = self._service.limits, self._notifies, self._peer
        body_bytes_max = limits.message_bytes_max
        left = _STEP_ITEMS
        while not self._is_over:
            if not inbox:
                self._tell()
                await self._sleep()
                continue
            number, what, content = inbox.popleft()
            size = len(content)
            self._inbox_bytes -= size + _OVERHEAD_BYTES
            left -= 1 + (size >> _STEP_BYTES_SHIFT)
            if left <= 0:
                left = _STEP_ITEMS
                await trio.lowlevel.checkpoint()
            entry = notifies.get(self._known_name) if what is self._known else None
            if (
                entry is not None
                and entry.running < entry.concurrency
                and not entry.waiters
                and size <= body_bytes_max
                and (lane := self.lane) is not None
                and lane.begin_next(number)
            ):  # nearly always: alike the one before, the next one, and nothing to wait for
                reason: str | None = None
                entry.running += 1
                try:
                    await entry.fn(
                        Notice(peer, self._known_name, content, dict(self._known_app) if self._known_app else {})
                    )
                except Exception as error:
                    reason = self._failed(entry.name, error)
                except BaseException:
                    lane.abandon(number)
                    raise
                finally:
                    if entry.waiters:
                        entry.give_place()
                    else:
                        entry.running -= 1
                if reason is None and not self._is_over and self._service.trace_log is None:
                    lane.finish(number)
                    self._handled_count += 1
                    self._handled.append(number)
                else:
                    self._settle(number, reason, size)
            else:
                try:
                    await self._take(number, what, content)
                except ProtocolError as error:
                    self.link.violate(error, number)
                    return
            if (
                self._is_paused
                and len(inbox) * 2 <= limits.link_in_items_max
                and self._inbox_bytes * 2 <= limits.link_in_bytes_max
            ):
                self._is_paused = False
                self.link.resume(PAUSED_BY_INBOX)
            if len(self._handled) + len(self._rejected) >= _ACK_ITEMS:
                self._tell()
                if len(self._handled) + len(self._rejected) >= _UNTOLD_MAX:
                    self._collected = trio.Event()
                    await self._collected.wait()
                elif inbox:
                    left = _STEP_ITEMS
                    await trio.lowlevel.checkpoint()  # the writer's turn

    def _wake_handler(self) -> None:
        sleeper = self._sleeper
        if sleeper is not None:
            self._sleeper = None
            trio.lowlevel.reschedule(sleeper)

    async def _sleep(self) -> None:
        """Until something has come."""

        def abort(_raise_cancel: object) -> trio.lowlevel.Abort:
            self._sleeper = None
            return trio.lowlevel.Abort.SUCCEEDED

        self._sleeper = trio.lowlevel.current_task()
        self._is_idle = True
        await trio.lowlevel.wait_task_rescheduled(abort)
        self._is_idle = False
        self._told_s = self._looked_s = trio.current_time()
        if self.armed_at == _NEVER:
            self._service.due.want(self)

    async def _take(self, number: int, what: Frame | HeaderMap, body: bytes) -> None:
        lane, service = self.lane, self._service
        assert lane is not None
        size = len(body)
        known = lane.begin(number)
        if known != "handle":
            self._counters["messages_repeated"] += 1
            self._trace("repeated", number, size)
            if known == "handled":
                self._handled.append(number)
            elif known == "rejected":
                self._rejected.append((number, lane.reason(number)))
            return
        reason: str | None = None
        try:
            if isinstance(what, Frame):
                headers, body = self._payloads.read(what)
            else:
                headers = what
                self._payloads.check_body(body)
            if headers is not self._known:
                self._look_at(headers)
            if self._known_name:
                entry = self._notifies.get(self._known_name)
                reason = NO_HANDLER if entry is None else await self._handle(entry, body)
            else:
                verdict, why = await service.inbound.receive_for_topic(self.link.peer, lane, number, headers, body)
                if verdict == "absent":
                    lane.abandon(number)  # after the ack timeout it is sent again, with its data
                    return
                if verdict == "here":
                    lane.wait(number)
                    return
                reason = why if verdict == "rejected" else None
        except BaseException:
            lane.abandon(number)
            raise
        if reason is NO_HANDLER and self._may_come(number):
            lane.abandon(number)
            return
        self._settle(number, reason, size)

    def _settle(self, number: int, reason: str | None, size: int) -> None:
        """The handler has taken the message, or it is rejected."""
        lane, service = self.lane, self._service
        assert lane is not None
        # The link may have ended meanwhile, and the sender have come back on another one.
        teller = self if not self._is_over else service.inbound.receiving_of(self.link.peer, lane)
        if reason is None:
            lane.finish(number)
            self._handled_count += 1
            if service.trace_log is not None:
                self._trace("received", number, size)
            if teller is self:
                self._handled.append(number)
            elif teller is not None:
                teller.tell_handled(number)
        else:
            lane.reject(number, reason)
            self._counters["messages_rejected"] += 1
            if teller is not None:
                teller.tell_rejected(number, reason)
        if teller is None:
            service.inbound.note_later(self.link.peer, lane)

    def _trace(self, state: str, number: int, size: int) -> None:
        log = self._service.trace_log
        if log is not None and self.lane is not None:
            trace_received(log, self.lane.epoch, number, self._peer, state, size)

    def _look_at(self, headers: HeaderMap) -> None:
        """Headers come again and again, and are the same object then. Raises ProtocolError."""
        self._known_name = "" if self._service.inbound.is_for_topic(headers) else required_name(headers)
        self._known_app = app_headers(headers)
        self._known = headers

    async def _handle(self, entry: NotifyEntry, body: bytes) -> str | None:
        """When the handler has a place for it. Why it is rejected, or None."""
        name, app = self._known_name, self._known_app
        await entry.take_place()
        try:
            await entry.fn(Notice(self._peer, name, body, dict(app) if app else {}))
        except Exception as error:
            return self._failed(name, error)
        finally:
            entry.give_place()
        return None

    def _failed(self, name: str, error: Exception) -> str:
        if isinstance(error, HandlerError):
            return str(error) or "the handler failed"
        self._counters["handlers_failed"] += 1
        logger.error("the handler of notifies %r failed for a reliable message", name, exc_info=error)
        return "the handler failed"

    def _may_come(self, number: int) -> bool:
        """Whether a handler may still be registered: its app may just be starting. As often as the sender tries."""
        times = self._without_handler.get(number, 0)
        if times >= self._service.limits.delivery_retries or len(self._without_handler) >= _WITHOUT_HANDLER_MAX:
            self._without_handler.pop(number, None)
            return False
        self._without_handler[number] = times + 1
        self._counters["messages_left_no_handler"] += 1
        return True

    # Telling

    def tell_handled(self, number: int) -> None:
        """The message was handled."""
        self._handled.append(number)
        if self._is_idle:
            self._tell()

    def tell_rejected(self, number: int, reason: str) -> None:
        """The message was rejected."""
        self._rejected.append((number, reason))
        if self._is_idle:
            self._tell()

    def _tell(self) -> None:
        self._counters["messages_handled"] += self._handled_count
        self._handled_count = 0
        if not self._handled and not self._rejected:
            return
        if self._is_durable:
            self._results.set()
        else:
            self.link.pulled.write_now()

    async def _write_results(self) -> None:
        """What was handled is on disk before the sender hears of it: it may forget then, and never send again."""
        service = self._service
        while not self._is_over:
            if not self._handled and not self._rejected:
                self._results = trio.Event()
                await self._results.wait()
                continue
            lane = self.lane
            assert lane is not None
            handled, self._handled = self._handled, []
            rejected, self._rejected = self._rejected, []
            self._collected.set()
            if not service.inbound.is_current(self.link.peer, lane):
                continue  # the sender counts anew: nobody waits for these
            row = InboxRow(lane.epoch, *lane.dump(), lane.dump_rejected())
            if await service.journal.note_handled(service.realm_id, self.link.peer, row):
                self._put(handled, rejected)
            # else unacknowledged: the sender tries again, and hears of it then

    def _collect(self, _bytes_max: int) -> list[bytes]:
        if self._is_durable or not (self._handled or self._rejected):
            return []
        handled, self._handled = self._handled, []
        rejected, self._rejected = self._rejected, []
        self._collected.set()
        self._told_received, self._told_s = self._received, trio.current_time()
        return split_ack(self._received, handled, rejected)

    def _put(self, handled: list[int], rejected: list[tuple[int, str]]) -> None:
        if self.link.error is None:
            self._told_received, self._told_s = self._received, trio.current_time()
            for frame in split_ack(self._received, handled, rejected):
                self.link.out.put((frame,), len(frame))

    # A sign of life while handlers run

    def next_deadline(self) -> float | None:
        """When the sender should hear something, or there may be something to tell."""
        if self._is_over or (self._is_idle and not (self.lane and self.lane.has_working)):
            return None
        return min(self._told_s + _SIGN_OF_LIFE_S, self._looked_s + _RESULTS_S)

    def on_deadline(self, now: float) -> None:
        """Tell what slow handlers have done so far, or that we are still here."""
        self._looked_s = now
        if self._handled or self._rejected:
            self._tell()
        elif self.link.out.items:
            self._told_s = now  # the sender has not read the last word yet
        elif now >= self._told_s + _SIGN_OF_LIFE_S:
            self._put([], [])
