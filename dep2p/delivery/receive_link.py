"""The receiving end of reliable delivery: one link of one sender, its handler task, and its acknowledgements."""

import logging
from collections import deque
from itertools import repeat
from typing import Final, Literal, Protocol

import trio

from dep2p.concurrency.wait_queue import Sleeper
from dep2p.delivery.context import DeliveryContext
from dep2p.delivery.trace_events import trace_received
from dep2p.errors import Dep2pError, HandlerError, ProtocolError, StreamClosedError
from dep2p.host.interface import ByteStream
from dep2p.links.link import PAUSED_BY_INBOX
from dep2p.links.pull_link import LinkCalls, SessionLink
from dep2p.messaging.handlers import HandlerAwayError, NotifyEntry
from dep2p.protocols.delivery.receiver import ReceiveWindow
from dep2p.protocols.delivery.wire import Hello, decode_batch, decode_hello, split_ack
from dep2p.protocols.messaging.incoming import Notification
from dep2p.protocols.wire.frame import Frame, FrameType
from dep2p.protocols.wire.headers import HeaderKey, HeaderMap, app_headers
from dep2p.protocols.wire.payload import PayloadReader, required_name
from dep2p.storage.delivery_store import InboxRow
from dep2p.types import Headers, PeerId

logger: logging.Logger = logging.getLogger("dep2p.io")

_ACK_REQUEST: Final = int(FrameType.ACK_REQUEST)
_ACK_REQUESTS: Final = int(FrameType.ACK_REQUESTS)
_ACK_ITEMS: Final = 32
"""Results after which the sender gets a report while the next messages are handled, so that it sends on meanwhile."""
_SIGN_OF_LIFE_S: Final = 2.0
"""Seconds between signs of life to the sender while a handler runs: its messages are here. Less than half its ack
timeout."""
_RESULTS_S: Final = 0.25
"""Seconds for which results of slow handlers wait for more of them."""
_STEP_BYTES_SHIFT: Final = 13
"""In a step of the handlers a large message counts once more for each 8 KiB."""
_OVERHEAD_BYTES: Final = 64
_NEVER: Final = float("inf")
_WANTED_MAX: Final = 1_024
"""Names without a handler, and topics without a subscription, that a link remembers; with more of them any name that
comes counts as one of them."""
_UNREPORTED_MAX: Final = 4_096
"""Results that the sender has not read, from which on its messages are not handled."""

_LEFT: Final = "the app behind the handler has gone"
"""In place of the reason of a rejection: the message is left to its sender, which sends it again."""

TopicVerdict = Literal["handled", "here", "absent", "rejected", "unsubscribed"]
"""The verdict on a message for a topic: ``here`` says that a call of `ReceiveWindows.topic_handled` follows, ``absent``
that the sender should send the message itself, ``unsubscribed`` that no app here reads the topic now."""

Wanted = tuple[Literal["handler", "topic"], str]
"""The app's part that a message waits for: a handler of this name, or a subscription to this topic."""


class ReceiveWindows(Protocol):
    """The receive window of each sender. It outlives the sender's links."""

    def window(self, peer: PeerId, epoch: bytes) -> ReceiveWindow: ...

    def is_current(self, peer: PeerId, window: ReceiveWindow) -> bool: ...

    def receive_link_of(self, peer: PeerId, window: ReceiveWindow) -> "ReceiveLink | None": ...

    def note_later(self, peer: PeerId, window: ReceiveWindow) -> None: ...

    def is_for_topic(self, headers: HeaderMap) -> bool: ...

    async def receive_for_topic(
        self, peer: PeerId, window: ReceiveWindow, number: int, headers: HeaderMap, body: bytes
    ) -> tuple[TopicVerdict, str]: ...


class ReceiveLink:
    """One inbound link. Its messages are handled one after the other, in the order they came."""

    def __init__(
        self, context: DeliveryContext, windows: ReceiveWindows, stream: ByteStream, payloads: PayloadReader
    ) -> None:
        self.armed_at = _NEVER
        self.window: ReceiveWindow | None = None
        self.link: SessionLink = context.make_link(stream, LinkCalls(self._collect, self._on_frames, self._on_end))
        self._context = context
        self._windows = windows
        self._counters = context.counts
        self._payloads = payloads
        self._inbox: deque[tuple[int, Frame | HeaderMap, bytes]] = deque()
        """Number, headers and body; or a frame that is not decoded yet, and its payload."""
        self._inbox_bytes = 0
        self._handled: list[int] = []
        self._rejected: list[tuple[int, str]] = []
        self._peer = self.link.peer
        self._wanted: dict[Wanted, None] = {}
        """The handlers and subscriptions that messages of this link wait for."""
        self._handled_count = 0
        self._known: HeaderMap | None = None
        self._known_name = ""
        """The name of the handler; empty for a message of a topic."""
        self._known_app: Headers = {}
        self._received = 0
        self._reported_received = 0
        self._reported_s = 0.0
        self._looked_s = 0.0
        self._is_paused = False
        self._sleeper = Sleeper()
        self._results = trio.Event()
        self._collected = trio.Event()
        self._says_received = False
        """Whether a message is here without a result for its sender, and no report has said so yet."""
        self._is_over = False
        self._is_idle = False
        self._is_durable = context.journal.is_durable
        self._notifies = context.notify_entries

    # Frames

    def _on_frames(self, _link: SessionLink, frames: list[Frame]) -> None:
        if self._context.is_draining:
            self._counters["messages_dropped_draining"] += len(frames)  # unacknowledged: they come again
            return
        inbox, size, received = self._inbox, 0, self._received
        try:
            for frame in frames:
                kind, _flags, number, payload = frame
                if kind == _ACK_REQUESTS:
                    if self.window is None:
                        raise ProtocolError("a message before HELLO")
                    headers, bodies = decode_batch(frame, self._payloads.split_headers)
                    inbox.extend(zip(range(number, number + len(bodies)), repeat(headers), bodies))
                    number += len(bodies) - 1
                    size += sum(map(len, bodies)) + len(bodies) * _OVERHEAD_BYTES
                elif kind != _ACK_REQUEST:
                    raise ProtocolError(f"frame type 0x{kind:02x} on a delivery link")
                elif not number:
                    self._on_hello(decode_hello(frame))
                elif self.window is None:
                    raise ProtocolError("a message before HELLO")
                else:
                    inbox.append((number, frame, payload))
                    size += len(payload) + _OVERHEAD_BYTES
                if number > received:
                    received = number
        finally:
            self._received = received
            self._inbox_bytes += size
        limits = self._context.limits
        if len(inbox) >= limits.link_in_items_max or self._inbox_bytes >= limits.link_in_bytes_max:
            self.link.pause(PAUSED_BY_INBOX)
            self._is_paused = True
        self._sleeper.wake()

    def _on_hello(self, hello: Hello) -> None:
        if self.window is None:
            self.window = self._windows.window(self.link.peer, hello.epoch)
        self.window.on_hello(hello)

    def _on_end(self, _link: SessionLink, _error: Dep2pError) -> None:
        self._is_over = True
        self._counters["messages_dropped_link_ended"] += len(self._inbox)  # unacknowledged: they come again
        self._inbox.clear()
        self._context.due.forget(self)
        self._sleeper.wake()
        self._results.set()
        self._collected.set()

    # Handling

    async def run(self, *, is_verified: bool) -> None:
        """Run until the link is over, and the handler then at work has ended."""
        try:
            await self._run(is_verified)
        finally:
            if self.window is not None and (self._handled or self._rejected):
                self._windows.note_later(self.link.peer, self.window)

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
            # A handler at work goes on, so that its message is not handled again when the sender comes back.

    async def _handle_all(self) -> None:
        inbox = self._inbox
        limits, notifies, peer, realm = self._context.limits, self._notifies, self._peer, self._context.realm_id
        body_bytes_max = limits.message_bytes_max
        left = _ACK_ITEMS
        while not self._is_over:
            if not inbox:
                self._report()
                await self._sleep()
                continue
            number, what, content = inbox.popleft()
            size = len(content)
            self._inbox_bytes -= size + _OVERHEAD_BYTES
            left -= 1 + (size >> _STEP_BYTES_SHIFT)
            entry = notifies.get(self._known_name) if what is self._known else None
            if (
                entry is not None
                and entry.running < entry.concurrency
                and size <= body_bytes_max
                and (window := self.window) is not None
                and window.begin_next(number)
            ):  # the usual case: like the message before, the next number, and nothing to wait for
                reason: str | None = None
                entry.running += 1
                try:
                    await entry.fn(
                        Notification(
                            peer,
                            self._known_name,
                            content,
                            dict(self._known_app) if self._known_app else {},
                            realm,
                            0.0,
                            True,  # `is_reliable`; as a keyword it would take a third longer
                        )
                    )
                except Exception as error:
                    reason = self._failed(number, entry.name, error)
                except BaseException:
                    window.abandon(number)
                    raise
                finally:
                    if entry.running >= entry.concurrency:
                        entry.release()
                    else:
                        entry.running -= 1
                if reason is None and not self._is_over and self._context.trace_log is None:
                    window.finish(number)
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
            if left <= 0:
                left = await self._end_step()

    async def _end_step(self) -> int:
        """Report results when there are many, and give other tasks a turn: the handlers may never wait.

        Returns the number of messages of the next step: when it is over, there may be many results again.
        """
        if len(self._handled) + len(self._rejected) >= _ACK_ITEMS:
            self._report()
        if len(self._handled) + len(self._rejected) >= _UNREPORTED_MAX:
            self._collected = trio.Event()
            await self._collected.wait()
        elif self._inbox:
            await trio.lowlevel.checkpoint()
        return max(1, _ACK_ITEMS - len(self._handled) - len(self._rejected))

    async def _sleep(self) -> None:
        """Wait until frames have come."""
        self._is_idle = True
        await self._sleeper.wait()
        self._is_idle = False
        self._reported_s = self._looked_s = trio.current_time()
        if self.armed_at == _NEVER:
            self._context.due.schedule(self)

    async def _take(self, number: int, what: Frame | HeaderMap, body: bytes) -> None:
        window = self.window
        assert window is not None
        size = len(body)
        known = window.begin(number)
        if known != "handle":
            self._counters["messages_repeated"] += 1
            self._trace("repeated", number, size)
            if known == "handled":
                self._handled.append(number)
            elif known == "rejected":
                self._rejected.append((number, window.reason(number)))
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
                if entry is None:
                    self._wait_for(number, ("handler", self._known_name))
                    return
                reason = await self._handle(number, entry, body)
            else:
                verdict, why = await self._windows.receive_for_topic(self.link.peer, window, number, headers, body)
                if verdict == "absent":
                    window.abandon(number)  # after the ack timeout the sender sends it again, with its data
                    return
                if verdict == "here":
                    window.wait(number)
                    return
                if verdict == "unsubscribed":
                    self._wait_for(number, ("topic", str(headers[HeaderKey.TOPIC])))
                    return
                reason = why if verdict == "rejected" else None
        except BaseException:
            window.abandon(number)
            raise
        self._settle(number, reason, size)

    def _settle(self, number: int, reason: str | None, size: int) -> None:
        """Settle a message: its handler has taken it, or it is rejected; one that is left to its sender stays open."""
        if reason is _LEFT:
            return
        window = self.window
        assert window is not None
        # The link may have ended meanwhile, and the sender may be back on another one.
        reporter = self if not self._is_over else self._windows.receive_link_of(self.link.peer, window)
        if reason is None:
            window.finish(number)
            self._handled_count += 1
            if self._context.trace_log is not None:
                self._trace("received", number, size)
            if reporter is self:
                self._handled.append(number)
            elif reporter is not None:
                reporter.report_handled(number)
        else:
            window.reject(number, reason)
            self._counters["messages_rejected"] += 1
            if reporter is not None:
                reporter.report_rejected(number, reason)
        if reporter is None:
            self._windows.note_later(self.link.peer, window)

    def _trace(self, state: str, number: int, size: int) -> None:
        log = self._context.trace_log
        if log is not None and self.window is not None:
            trace_received(log, self.window.epoch, number, self._peer, state, size)

    def _look_at(self, headers: HeaderMap) -> None:
        """Read the headers, which repeat and are the same object then. Raises ProtocolError."""
        self._known_name = "" if self._windows.is_for_topic(headers) else required_name(headers)
        self._known_app = app_headers(headers)
        self._known = headers

    async def _handle(self, number: int, entry: NotifyEntry, body: bytes) -> str | None:
        """Handle a message when its handler has a place. Returns the reason of a rejection, `_LEFT` or None."""
        name, app = self._known_name, self._known_app
        await entry.acquire()
        try:
            realm_id = self._context.realm_id
            headers = dict(app) if app else {}
            await entry.fn(Notification(self._peer, name, body, headers, realm_id, is_reliable=True))
        except Exception as error:
            return self._failed(number, name, error)
        finally:
            entry.release()
        return None

    def _failed(self, number: int, name: str, error: Exception) -> str:
        """Return the reason for which the handler's error rejects a message, or `_LEFT`."""
        if isinstance(error, HandlerAwayError):
            self._app_left(number)
            return _LEFT
        if isinstance(error, HandlerError):
            return str(error) or "the handler failed"
        self._counters["handlers_failed"] += 1
        logger.error("the handler of notifies %r failed for a reliable message", name, exc_info=error)
        return "the handler failed"

    def _wait_for(self, number: int, wanted: Wanted) -> None:
        """No app here takes the message now. Its sender keeps it, and gets signs of life until an app comes or the
        message is too old: an app that is not running is like a node that is not connected."""
        window = self.window
        assert window is not None
        window.wait(number)
        self._says_received = True
        self._counters["messages_left_no_handler" if wanted[0] == "handler" else "messages_left_no_subscription"] += 1
        if wanted in self._wanted or len(self._wanted) >= _WANTED_MAX:
            return
        self._wanted[wanted] = None
        if self._context.waiting_lines.take(trio.current_time()):
            return
        missing = "handler of notifies" if wanted[0] == "handler" else "subscription to topic"
        logger.warning(
            "a reliable message of %s waits at its sender: no program here has a %s %r", self._peer, missing, wanted[1]
        )

    def _app_left(self, number: int) -> None:
        """Leave a message to its sender: the app behind its handler has gone."""
        if self._notifies.get(self._known_name) is None:
            self._wait_for(number, ("handler", self._known_name))
        elif self.window is not None:  # a new one has come, or it is there for other realms
            self.window.abandon(number)

    def app_came(self, wanted: Wanted) -> None:
        """Have the sender send again what waits for this part of an app: the next link begins with all that is
        unsettled, in its order."""
        if wanted in self._wanted or len(self._wanted) >= _WANTED_MAX:
            self._counters["links_ended_app_came"] += 1
            self.link.end(StreamClosedError(f"an app for {wanted[1]!r} has come: send again what waits for it"))

    # Reporting

    def report_handled(self, number: int) -> None:
        """Report a handled message."""
        self._handled.append(number)
        if self._is_idle:
            self._report()

    def report_rejected(self, number: int, reason: str) -> None:
        """Report a rejected message."""
        self._rejected.append((number, reason))
        if self._is_idle:
            self._report()

    def _report(self) -> None:
        self._counters["messages_handled"] += self._handled_count
        self._handled_count = 0
        if not self._handled and not self._rejected:
            if self._says_received:
                self._says_received = False
                self._put([], [])
            return
        self._says_received = False
        if self._is_durable:
            self._results.set()
        else:
            self.link.pulled.write_now()

    async def _write_results(self) -> None:
        """Write results to disk before the sender gets them: it may forget a message then, and never send it again."""
        context = self._context
        while not self._is_over:
            if not self._handled and not self._rejected:
                self._results = trio.Event()
                await self._results.wait()
                continue
            window = self.window
            assert window is not None
            handled, self._handled = self._handled, []
            rejected, self._rejected = self._rejected, []
            self._collected.set()
            if not self._windows.is_current(self.link.peer, window):
                continue  # the sender has new numbers: nothing waits for these
            row = InboxRow(window.epoch, *window.dump(), window.dump_rejected())
            if await context.journal.note_handled(context.realm_id, self.link.peer, row):
                self._put(handled, rejected)
            # otherwise unacknowledged: the sender tries again, and gets the result then

    def _collect(self, _bytes_max: int) -> list[bytes]:
        if self._is_durable or not (self._handled or self._rejected):
            return []
        handled, self._handled = self._handled, []
        rejected, self._rejected = self._rejected, []
        self._collected.set()
        self._reported_received, self._reported_s = self._received, trio.current_time()
        return split_ack(self._received, handled, rejected)

    def _put(self, handled: list[int], rejected: list[tuple[int, str]]) -> None:
        if self.link.error is None:
            self._reported_received, self._reported_s = self._received, trio.current_time()
            for frame in split_ack(self._received, handled, rejected):
                self.link.out.put((frame,), len(frame))

    # A sign of life while handlers run

    def next_deadline(self) -> float | None:
        """When to send the next report to the sender, or to check whether there is one."""
        if self._is_over or (self._is_idle and not (self.window and self.window.has_working)):
            return None
        return min(self._reported_s + _SIGN_OF_LIFE_S, self._looked_s + _RESULTS_S)

    def on_deadline(self, now: float) -> None:
        """Report the results of slow handlers, or a sign of life."""
        self._looked_s = now
        if self._handled or self._rejected:
            self._report()
        elif self.link.out.items:
            self._reported_s = now  # the sender has not read the last report yet
        elif now >= self._reported_s + _SIGN_OF_LIFE_S:
            self._put([], [])
