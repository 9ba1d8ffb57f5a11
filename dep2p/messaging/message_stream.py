"""Logical streams: items both ways over a libp2p stream of their own, with its back-pressure and half-close."""

import logging
from collections import deque
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Final, Self

import trio

from dep2p.arguments import as_bytes
from dep2p.concurrency.wait_queue import Sleeper
from dep2p.errors import Dep2pError, ErrorCode, NotMemberError, StreamClosedError, WireError
from dep2p.host.interface import ByteStream, Connection
from dep2p.messaging.context import MessagingContext
from dep2p.protocols.messaging.stream import (
    Aborted,
    Accepted,
    Ended,
    Item,
    Stopped,
    StreamEffect,
    StreamMachine,
    StreamOpened,
)
from dep2p.protocols.wire.frame import COMPRESSED, Frame, FrameDecoder
from dep2p.protocols.wire.headers import app_headers
from dep2p.protocols.wire.payload import payload_bytes_max
from dep2p.types import Headers, PeerId

logger: logging.Logger = logging.getLogger("dep2p.io")

_OUT_HIGH_BYTES: Final = 262_144
_OUT_LOW_BYTES: Final = 65_536
_IN_ITEMS_MAX: Final = 1_024
_IN_BYTES_MAX: Final = 1_048_576
_ITEM_OVERHEAD_BYTES: Final = 64
_OWN_WRITE_BYTES: Final = 16_384


class MessageStream:
    """Items both ways between two members. One task may read at a time; any number may send.

    Leaving a ``for`` loop over it does not end it; its context manager, or the return of its handler, does.
    """

    def __init__(
        self,
        stream: ByteStream,
        context: MessagingContext,
        *,
        is_opener: bool,
    ) -> None:
        self.peer: PeerId = stream.connection.peer
        """The transport-authenticated other side, a verified member of the realm."""
        self.name: str = ""
        self.body: bytes = b""
        """The opener's payload."""
        self.headers: Headers = {}
        self._stream = stream
        self._connection: Connection = stream.connection
        self._received_bytes = 0  # of the transport's stream
        self._gate = context.gate
        self._limits = limits = context.limits
        self._counters = context.counters
        self._timer = context.timer
        self._machine = StreamMachine(limits, context.zstd_for(stream.connection), is_opener=is_opener)
        self._decoder = FrameDecoder(payload_bytes_max(limits))
        self._frames: deque[Frame] = deque()
        self._lost: StreamClosedError | None = None
        self._lost_in_order = False
        self._items: deque[bytes] = deque()
        self._items_bytes = 0
        self._paused = False
        self._discards = False
        self._reader = Sleeper()
        self._left = trio.Event()
        self._opened = False
        self._error: Dep2pError | None = None
        self._error_reported = False
        self._handler_scope: trio.CancelScope | None = None
        self.bytes_in: int = 0
        """Bytes of the items that have come, unpacked."""
        self.bytes_out: int = 0
        """Bytes of the items that were sent."""
        self.is_closed: bool = False
        """The transport's stream has been closed in order."""

    async def __aenter__(self) -> Self:
        await trio.lowlevel.checkpoint()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the stream; after an error, abort it."""
        try:
            if error is None:
                await self.aclose()
            else:
                self.reset()
        finally:
            self._left.set()

    async def wait_left(self) -> None:
        """Wait until the program that has taken this stream (`Node.accept`) has left its block, or has ended it."""
        await self._left.wait()

    def __repr__(self) -> str:
        return f"<stream {self.name!r} with {self.peer[-6:]} {self._machine.state}>"

    # Sending

    async def send(self, item: bytes) -> None:
        """Send one item, up to ``Limits.stream_item_bytes_max`` bytes; waits while the peer does not read.

        When the call is cancelled, the whole item was sent or nothing of it. Raises StreamClosedError,
        NotMemberError, MessageTooLargeError, the error by which the peer aborted the stream, or LocalProtocolError
        after `send_eof`.
        """
        if type(item) is not bytes:
            item = as_bytes(item, "an item")
        stream = self._stream
        try:
            if stream.unsent_bytes > _OUT_HIGH_BYTES:
                await stream.drain(_OUT_LOW_BYTES)
            else:
                await trio.lowlevel.checkpoint_if_cancelled()
            self._check_sending()
            self.bytes_out += len(item)
            # All parts in one step: an item is never half sent, and items of several tasks never mix.
            for header, payload in self._machine.parts(item):
                if len(payload) >= _OWN_WRITE_BYTES:
                    stream.write_nowait(header)
                    stream.write_nowait(payload)
                else:
                    stream.write_nowait(header + payload)
        except StreamClosedError as error:
            raise self._reported(error) from None

    async def send_eof(self) -> None:
        """Half-close: the peer's iteration ends after what was sent. Reading goes on. Idempotent."""
        try:
            await trio.lowlevel.checkpoint_if_cancelled()
            if not self._machine.sent_end:
                if self._error is not None:
                    raise self._reported(self._error)
                self._stream.write_nowait(self._machine.end())
        except StreamClosedError as error:
            raise self._reported(error) from None

    def _check_sending(self) -> None:
        if self._error is not None:
            raise self._reported(self._error)
        if self._machine.peer_stopped:
            raise StreamClosedError("the peer reads no more items")
        if not self._gate.is_verified(self._connection):
            self.lose_membership()
            raise self._reported(NotMemberError(f"{self.peer} is not a verified member of this realm"))

    def _reported(self, error: Dep2pError) -> Dep2pError:
        """Return the error to raise: the reason why the stream is over, where that is known better than ``error``
        says."""
        self._error_reported = True
        return self._error or error

    # Receiving

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        item = await self.receive()
        if item is None:
            raise StopAsyncIteration
        return item

    async def receive(self) -> bytes | None:
        """The next item; None after the peer's end.

        Raises RequestTimeoutError when none comes and nothing else moves, in either direction, for
        ``Limits.stream_first_item_timeout_s`` or, after the first one, ``stream_item_timeout_s`` (the stream is
        aborted then, after 1 to 1.5 times as long); StreamClosedError, NotMemberError, or the error by which
        the peer aborted the stream, after the items that came before it.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if not self._items:
            await self._wait_for_item()
        if not self._items:
            if self._error is not None and not self._machine.peer_ended:
                raise self._reported(self._error)
            if self._discards and not self._machine.peer_ended:
                raise StreamClosedError("the stream was closed on this side")
            return None
        item = self._items.popleft()
        self._items_bytes -= len(item) + _ITEM_OVERHEAD_BYTES
        if self._paused and self._items_bytes <= _IN_BYTES_MAX // 2 and len(self._items) <= _IN_ITEMS_MAX // 2:
            self._resume()
        self._limit_handler()
        return item

    async def _wait_for_item(self) -> None:
        machine = self._machine
        while not self._items and self._error is None and not machine.peer_ended and not self._discards:
            machine.expect_item(trio.current_time(), self.progress)
            self._schedule_deadline()
            await self._sleep()

    async def _sleep(self) -> None:
        if self._reader.task is not None:
            raise trio.BusyResourceError("another task is reading this stream")
        try:
            await self._reader.wait()
        except BaseException:
            self._machine.expect_nothing()
            raise

    def _schedule_deadline(self) -> None:
        deadline = self._machine.next_deadline()
        if deadline is not None:
            self._timer.schedule(deadline)

    # What comes from the transport

    def start(self) -> None:
        """Begin to receive."""
        self._stream.set_receiver(self._on_data, self._on_end)

    def _on_data(self, data: bytes | memoryview) -> None:
        if self._error is not None:
            return
        self._received_bytes += len(data)
        if not self._gate.is_verified(self._connection):
            self.lose_membership()
            return
        self._frames.extend(self._decoder.feed(data))
        self._take_frames()

    def _take_frames(self) -> None:
        """Hand frames to the machine while there is room for items; the rest waits as it came.

        A few compressed bytes can stand for a megabyte, so compressed frames are taken one by one.
        """
        frames, machine = self._frames, self._machine
        while frames and not self._is_full:
            batch = [frames.popleft()]
            while frames and not (batch[-1].flags | frames[0].flags) & COMPRESSED:
                batch.append(frames.popleft())
            self._perform(machine.handle(batch, trio.current_time()))
        if frames:
            self._pause()
            return
        if self._decoder.error is not None:
            aborted = machine.violated(self._decoder.error)
            if aborted is not None:
                self._perform([aborted])
        if self._lost is not None and not (self._lost_in_order and machine.peer_ended):
            self._fail(self._lost, b"")
        elif self._is_full:
            self._pause()

    @property
    def _is_full(self) -> bool:
        return self._items_bytes >= _IN_BYTES_MAX or len(self._items) >= _IN_ITEMS_MAX

    def _pause(self) -> None:
        if not self._paused:
            self._paused = True
            self._stream.pause_receiving()

    def _resume(self) -> None:
        if self._paused:
            self._take_frames()
            if not self._frames and not self._is_full:
                self._paused = False
                self._stream.resume_receiving()

    def _perform(self, effects: list[StreamEffect]) -> None:
        for effect in effects:
            match effect:
                case Item(item):
                    self._take(item)
                case Ended() | Stopped():
                    self._reader.wake()
                    self._limit_handler()
                case StreamOpened(name, first, headers):
                    self.name, self.body, self.headers = name, first, app_headers(headers)
                    self._opened = True
                    self._reader.wake()
                case Accepted():
                    self._opened = True
                    self._reader.wake()
                case Aborted(error, frame):
                    self._fail(error, frame)

    def _take(self, item: bytes) -> None:
        if self._discards:
            self._counters["stream_items_dropped_closing"] += 1
            return
        self.bytes_in += len(item)
        self._items.append(item)
        self._items_bytes += len(item) + _ITEM_OVERHEAD_BYTES
        self._reader.wake()

    def _on_end(self, error: BaseException | None) -> None:
        if error is not None:
            self._lost = StreamClosedError(str(error))
        else:
            self._lost = StreamClosedError("the peer closed the stream without ending it")
            self._lost_in_order = True
        self._take_frames()

    def _fail(self, error: Dep2pError, frame: bytes) -> None:
        """End the stream with an error, both ways."""
        if self._error is not None:
            return
        self._error = error
        self._counters[
            f"streams_aborted_{error.code.name.lower()}" if isinstance(error, WireError) else "streams_lost"
        ] += 1
        if frame:
            try:
                self._stream.write_nowait(frame, urgent=True)
            except StreamClosedError:
                logger.debug("%r was closed before its ERROR could be sent", self)
        self._reader.wake()
        self._limit_handler()

    def _limit_handler(self) -> None:
        # A handler learns of the end by its next call. A handler that makes no call is cancelled.
        machine, scope = self._machine, self._handler_scope
        if scope is not None and (self._error is not None or (machine.peer_ended and machine.peer_stopped)):
            now = trio.current_time()
            if self._items:
                scope.deadline = now + self._limits.stream_item_timeout_s  # each item that it takes renews this
            else:
                scope.deadline = min(scope.deadline, now + self._limits.close_timeout_s)

    def lose_membership(self) -> None:
        """End the stream and tell the peer: it is not a verified member any more."""
        error = NotMemberError(f"{self.peer} is not a verified member of this realm")
        self._items.clear()
        self._items_bytes = 0
        self._frames.clear()
        if self._error is None:
            self._counters["streams_refused_not_member"] += 1
        self._fail(error, self._machine.abort(ErrorCode.NOT_MEMBER, "not a verified member of this realm"))

    def is_on(self, connection: Connection) -> bool:
        """Whether this connection carries the stream."""
        return self._connection.id == connection.id

    @property
    def progress(self) -> int:
        """Changes while anything moves: bytes that come, bytes of ours that go, and those that the peer takes."""
        return self._received_bytes + self._stream.sent_bytes + self._stream.granted_bytes

    def next_deadline(self) -> float | None:
        """When `on_deadline` is due."""
        return self._machine.next_deadline()

    def on_deadline(self, now: float) -> None:
        """End the stream if the peer was too slow."""
        self._perform(self._machine.on_deadline(now, self.progress))

    # Opening

    async def open(self, name: str, head: bytes, body: bytes, headers: Headers) -> None:
        """Opener: send the REQUEST and wait until the peer takes the stream. Raises its error otherwise."""
        self.name, self.body, self.headers = name, body, headers
        self._stream.write_nowait(self._machine.open(head, body, trio.current_time()), urgent=True)
        self.start()
        await self._wait_opened()

    async def opened_by_peer(self) -> None:
        """Acceptor: wait for the opener's REQUEST."""
        self._machine.expect_request(trio.current_time())
        await self._wait_opened()

    async def _wait_opened(self) -> None:
        self._schedule_deadline()
        while not self._opened and self._error is None:
            await self._sleep()
        if not self._opened and self._error is not None:
            raise self._reported(self._error)

    def accept(self, handler_scope: trio.CancelScope) -> None:
        """Acceptor: take it; ``handler_scope`` is cancelled when the stream is over and the handler does not notice."""
        self._handler_scope = handler_scope
        self._stream.write_nowait(self._machine.accept(), urgent=True)

    def abort(self, error: Dep2pError, code: ErrorCode, text: str, headers: bytes = b"") -> None:
        """End both ways by an ERROR frame: refuse an opening stream, or tell that the handler failed."""
        self._fail(error, self._machine.abort(code, text, headers=headers))

    # Ending

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be received or sent."""
        return self._error is not None or (self._machine.peer_ended and self._machine.sent_end)

    @property
    def error(self) -> Dep2pError | None:
        """Why the stream ended early; None while it lives or when both sides ended it."""
        return self._error

    def raise_unreported(self) -> None:
        """Raise the error by which the stream was aborted, if no call has raised it yet."""
        if not self._error_reported and isinstance(self._error, WireError):
            raise self._reported(self._error)

    @property
    def is_unwanted(self) -> bool:
        """Whether the stream is over, or the peer reads no more: a handler that fails then has not failed by itself."""
        return self._error is not None or self._machine.peer_stopped

    async def aclose(self) -> None:
        """End this side and tell the peer that nothing more is read; wait a moment for its end. Idempotent.

        Waits at most ``Limits.close_timeout_s``. What was sent still reaches the peer, but its handler may stop when it
        sends: to know that everything was handled, call `send_eof` and iterate to the end first.
        """
        self._left.set()
        with trio.move_on_after(self._limits.close_timeout_s):
            await self.finish()

    async def finish(self) -> None:
        """Do the same as `aclose` without a limit in time, then close the transport's stream, too."""
        self._discards = self._machine.discards = True
        self._items.clear()
        self._items_bytes = 0
        self._limit_handler()
        self._reader.wake()  # for another task that still reads
        machine = self._machine
        try:
            if machine.state == "open":
                last = b"" if machine.sent_end else machine.end()
                last += machine.stop()
                if last:
                    self._stream.write_nowait(last, urgent=True)
            self._resume()
            while not self.is_over:
                await self._sleep()
            is_read = self._error is None and not machine.peer_stopped
            with trio.move_on_after(float("inf") if is_read else self._limits.close_timeout_s):
                await self._stream.drain()
                await self._stream.close()
                self.is_closed = True
        except StreamClosedError as error:
            self._fail(error, b"")
            self._stream.reset()

    def reset(self) -> None:
        """Abort both directions at once; what the peer has not received yet is lost. Idempotent, never raises."""
        self._left.set()
        if not self.is_over:
            self._fail(StreamClosedError("the stream was reset on this side"), b"")
        self._stream.reset()
