"""Opening streams to peers, and serving theirs."""

import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager

import trio

from dep2p.concurrency.deadlines import DeadlineTimer
from dep2p.errors import (
    Dep2pError,
    ErrorCode,
    HandlerError,
    NoHandlerError,
    OverloadedError,
    RateLimitedError,
    StreamClosedError,
)
from dep2p.host.interface import ByteStream, Connection
from dep2p.limits import Limits
from dep2p.messaging.handlers import Registry, StreamEntry
from dep2p.messaging.message_stream import MessageStream
from dep2p.messaging.trace_events import trace_stream
from dep2p.protocols.messaging.admission import PeerLoad
from dep2p.protocols.wire.compression import Zstd
from dep2p.protocols.wire.payload import HeaderEncoder, check_body, retry_after_headers
from dep2p.realm.interface import RealmGate
from dep2p.tracing.event_log import TraceLog
from dep2p.types import PeerId, RealmId

logger = logging.getLogger("dep2p.io")


def stream_protocol(realm_id: RealmId) -> str:
    """The libp2p protocol id of app streams."""
    return f"/dep2p/app/{realm_id}/stream/1.0.0"


class StreamService:
    """All streams of one realm."""

    def __init__(
        self,
        gate: RealmGate,
        realm_id: RealmId,
        limits: Limits,
        counters: Counter[str],
        timer: DeadlineTimer,
        *,
        registry: Registry,
        encoder: HeaderEncoder,
        zstd_for: Callable[[Connection], Zstd | None],
        load_of: Callable[[PeerId], PeerLoad],
    ) -> None:
        self.protocol = stream_protocol(realm_id)
        self.is_draining = False
        self.trace_log: TraceLog | None = None
        self._gate = gate
        self._limits = limits
        self._counters = counters
        self._timer = timer
        self._registry = registry
        self._encoder = encoder
        self._zstd_for = zstd_for
        self._load_of = load_of
        self._streams: dict[MessageStream, None] = {}
        self._nursery: trio.Nursery | None = None
        self.lingering = 0
        """Streams that their openers have left and whose other sides have not ended yet."""

    def serve_in(self, nursery: trio.Nursery | None) -> None:
        """Where streams live on that their openers have left; None: nothing is opened any more."""
        self._nursery = nursery

    @property
    def streams(self) -> list[MessageStream]:
        """Those that live."""
        return list(self._streams)

    def _make(self, stream: ByteStream, *, is_opener: bool) -> MessageStream:
        made = MessageStream(
            stream,
            self._gate,
            self._limits,
            self._counters,
            self._timer,
            zstd=self._zstd_for(stream.connection),
            is_opener=is_opener,
        )
        self._streams[made] = None
        return made

    @asynccontextmanager
    async def stream(
        self, peer: PeerId, name: str, data: bytes, headers: Mapping[str, object] | None
    ) -> AsyncGenerator[MessageStream, None]:
        """See `Messaging.stream`."""
        nursery = self._nursery
        if nursery is None:
            raise StreamClosedError("messaging is not running")
        check_body(data, self._limits.message_bytes_max)
        head = self._encoder.encode(name, app=headers)
        connection = await self._gate.connect(peer, timeout_s=self._limits.dial_timeout_s)
        raw = await connection.open_stream(self.protocol, timeout_s=self._limits.stream_open_timeout_s)
        stream = self._make(raw, is_opener=True)
        lingers = False
        log, began = self.trace_log, trio.current_time()
        try:
            await stream.open(name, head, bytes(data), dict(headers or {}))
            self._counters["streams_opened"] += 1
            if log is not None:
                trace_stream(log, peer, name, "out", None, 0.0)
            yield stream
            await stream.aclose()
            stream.raise_untold()
            if not stream.is_over and self._nursery is nursery:  # still running
                lingers = True
                nursery.start_soon(self._linger, stream)
        finally:
            if log is not None:
                trace_stream(log, peer, name, "out", stream, trio.current_time() - began)
            if not lingers:
                self._forget(stream)

    async def _linger(self, stream: MessageStream) -> None:
        """The app has left it; what it sent must still reach the peer."""
        self.lingering += 1
        try:
            with trio.move_on_after(self._limits.stream_item_timeout_s):
                await stream.finish()
        finally:
            self.lingering -= 1
            if not stream.is_over:
                self._counters["streams_closed_unfinished"] += 1
            self._forget(stream)

    def _forget(self, stream: MessageStream) -> None:
        del self._streams[stream]
        if not stream.is_closed:
            stream.reset()

    # Serving

    async def serve(self, raw: ByteStream) -> None:
        """A peer opened a stream: find its handler, run it, end the stream. Never raises for what the peer does."""
        stream = self._make(raw, is_opener=False)
        load = self._load_of(stream.peer)
        load.streams += 1
        try:
            if not self._gate.is_verified(raw.connection):
                stream.lose_membership()
            elif load.streams > self._limits.streams_inbound_per_peer_max:
                self._refuse(stream, OverloadedError("this peer has too many streams here"))
            else:
                stream.start()
                await self._serve(stream)
            # Without a limit in time: what the handler sent stays readable for an opener that is slow.
            await stream.finish()
        finally:
            load.streams -= 1
            self._forget(stream)

    def _refuse(self, stream: MessageStream, error: OverloadedError | NoHandlerError | RateLimitedError) -> None:
        self._counters[f"streams_refused_{error.code.name.lower()}"] += 1
        headers = retry_after_headers(error.retry_after_ms) if isinstance(error, RateLimitedError) else b""
        stream.abort(error, error.code, str(error), headers)

    async def _serve(self, stream: MessageStream) -> None:
        try:
            await stream.opened_by_peer()
        except Dep2pError as error:
            logger.debug("a stream of %s was not opened: %s", stream.peer, error)
            return
        entry = self._registry.streams.get(stream.name)
        if self.is_draining:
            self._refuse(stream, OverloadedError("this node is about to stop"))
        elif entry is None:
            self._refuse(stream, NoHandlerError(f"no handler for streams {stream.name[:200]!r}"))
        elif entry.running >= entry.concurrency:
            self._refuse(stream, OverloadedError("too many streams of this name are open"))
        else:
            wait_s = self._load_of(stream.peer).stream_wait_s(stream.name, entry.rate_per_s, trio.current_time())
            if wait_s:
                self._refuse(stream, RateLimitedError("too many streams of this name", int(wait_s * 1000) + 1))
                return
            entry.running += 1
            try:
                await self._handle(stream, entry)
            finally:
                entry.running -= 1

    async def _handle(self, stream: MessageStream, entry: StreamEntry) -> None:
        self._counters["streams_accepted"] += 1
        log, began = self.trace_log, trio.current_time()
        if log is not None:
            trace_stream(log, stream.peer, stream.name, "in", None, 0.0)
        try:
            await self._run_handler(stream, entry)
        finally:
            if log is not None:
                trace_stream(log, stream.peer, stream.name, "in", stream, trio.current_time() - began)

    async def _run_handler(self, stream: MessageStream, entry: StreamEntry) -> None:
        try:
            with trio.CancelScope() as scope:
                stream.accept(scope)
                await entry.fn(stream)
        except HandlerError as error:
            if error is not stream.error:  # its own, not the opener's that it let through
                self._counters["handlers_failed"] += 1
                stream.abort(error, ErrorCode.HANDLER_FAILED, str(error))
        except Exception as error:
            if stream.is_unwanted and isinstance(error, Dep2pError):
                logger.debug("the handler of streams %r ended by %r", entry.name, error)
                return
            self._counters["handlers_failed"] += 1
            logger.exception("the handler of streams %r failed", entry.name)
            stream.abort(HandlerError("the handler failed"), ErrorCode.HANDLER_FAILED, "the handler failed")
