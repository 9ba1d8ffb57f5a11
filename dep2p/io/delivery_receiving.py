"""The receiving end of reliable delivery: one link of one sender, its handler task, and its acknowledgements."""

import logging
from collections import Counter, deque
from typing import TYPE_CHECKING, Final

import trio

from dep2p.errors import Dep2pError, HandlerError, ProtocolError
from dep2p.host.interface import ByteStream
from dep2p.io.link import PAUSED_BY_INBOX
from dep2p.io.registry import Notice, NotifyEntry
from dep2p.io.sessions_link import SessionLink
from dep2p.io.trace_apps import trace_received
from dep2p.protocols.delivery.receiver import ReceiverLane
from dep2p.protocols.delivery.wire import Hello, decode_hello, split_ack
from dep2p.protocols.frame import Frame, FrameType
from dep2p.protocols.headers import HeaderMap, app_headers
from dep2p.protocols.payload import PayloadReader, required_name
from dep2p.storage.outbox import InboxRow
from dep2p.types import Headers

if TYPE_CHECKING:
    from dep2p.io.delivery import Delivery

logger = logging.getLogger("dep2p.io")

_ACK_REQUEST: Final = int(FrameType.ACK_REQUEST)
_ACK_ITEMS: Final = 32
"""After so many results the sender hears of them, while the next ones are handled: it sends on meanwhile."""
_SIGN_OF_LIFE_S: Final = 2.0
"""While a handler runs, the sender hears so often that its messages are here. Less than half its ack timeout."""
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
        self._inbox: deque[Frame] = deque()
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
        self._is_paused = False
        self._sleeper: trio.lowlevel.Task | None = None
        self._results = trio.Event()
        self._collected = trio.Event()
        self._is_over = False
        self._is_idle = False
        self._is_durable = service.journal.is_durable

    # Frames

    def _on_frames(self, _link: SessionLink, frames: list[Frame]) -> None:
        if self._service.is_draining:
            self._counters["messages_dropped_draining"] += len(frames)  # unacknowledged: they come again
            return
        for frame in frames:
            if frame[0] != _ACK_REQUEST:
                raise ProtocolError(f"frame type 0x{frame[0]:02x} on a delivery link")
            if not frame[2]:
                self._on_hello(decode_hello(frame))
            elif self.lane is None:
                raise ProtocolError("a message before HELLO")
            else:
                self._inbox.append(frame)
                self._inbox_bytes += len(frame[3]) + _OVERHEAD_BYTES
                if frame[2] > self._received:
                    self._received = frame[2]
        limits = self._service.limits
        if len(self._inbox) >= limits.link_in_items_max or self._inbox_bytes >= limits.link_in_bytes_max:
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
        limits = self._service.limits
        left = _STEP_ITEMS
        while not self._is_over:
            if not inbox:
                self._tell()
                await self._sleep()
                continue
            frame = inbox.popleft()
            self._inbox_bytes -= len(frame[3]) + _OVERHEAD_BYTES
            left -= 1 + (len(frame[3]) >> _STEP_BYTES_SHIFT)
            if left <= 0:
                left = _STEP_ITEMS
                await trio.lowlevel.checkpoint()
            try:
                await self._take(frame)
            except ProtocolError as error:
                self.link.violate(error, frame[2])
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
        self._told_s = trio.current_time()
        if self.armed_at == _NEVER:
            self._service.due.want(self)

    async def _take(self, frame: Frame) -> None:
        lane, service = self.lane, self._service
        assert lane is not None
        number = frame[2]
        known = lane.begin(number)
        if known != "handle":
            self._counters["messages_repeated"] += 1
            self._trace("repeated", frame)
            if known == "handled":
                self._handled.append(number)
            elif known == "rejected":
                self._rejected.append((number, lane.reason(number)))
            return
        reason: str | None = None
        try:
            headers, body = self._payloads.read(frame)
            if headers is not self._known:
                self._look_at(headers)
            name = self._known_name
            entry = self._service.messaging.notify_entry(name) if name else None
            if entry is not None and entry.running < entry.concurrency and not entry.waiters:  # nearly always
                entry.running += 1
                try:
                    await entry.fn(Notice(self._peer, name, body, dict(self._known_app) if self._known_app else {}))
                except Exception as error:
                    reason = self._failed(name, error)
                finally:
                    if entry.waiters:
                        entry.give_place()
                    else:
                        entry.running -= 1
            elif name:
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
        # The link may have ended meanwhile, and the sender have come back on another one.
        teller = self if not self._is_over else service.inbound.receiving_of(self.link.peer, lane)
        if reason is None:
            lane.finish(number)
            self._handled_count += 1
            self._trace("received", frame)
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

    def _trace(self, state: str, frame: Frame) -> None:
        log = self._service.trace_log
        if log is not None and self.lane is not None:
            trace_received(log, self.lane.epoch, frame[2], self._peer, state, len(frame[3]))

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
        """When the sender should hear something."""
        if self._is_over or (self._is_idle and not (self.lane and self.lane.has_working)):
            return None
        return self._told_s + _SIGN_OF_LIFE_S

    def on_deadline(self, now: float) -> None:
        """Say that we are still here."""
        if self.link.out.items:
            self._told_s = now  # the sender has not read the last word yet
        else:
            self._put([], [])
