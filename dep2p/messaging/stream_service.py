"""Opening streams to peers, and serving theirs."""

import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial

import trio

from dep2p.arguments import as_bytes, check_text
from dep2p.concurrency.contained import run_contained
from dep2p.concurrency.stall import run_while_moving
from dep2p.errors import (
    Dep2pError,
    ErrorCode,
    HandlerError,
    NoHandlerError,
    OverloadedError,
    RateLimitedError,
    StreamClosedError,
)
from dep2p.host.interface import ByteStream
from dep2p.messaging.context import MessagingContext
from dep2p.messaging.handlers import Registry, StreamEntry
from dep2p.messaging.message_stream import MessageStream
from dep2p.messaging.trace_events import trace_stream
from dep2p.protocols.messaging.admission import PeerLoad
from dep2p.protocols.timing.stall import LEFT_BYTES_MIN
from dep2p.protocols.wire.payload import check_body, retry_after_headers
from dep2p.tracing.event_log import TraceLog
from dep2p.types import PeerId, RealmId

logger: logging.Logger = logging.getLogger("dep2p.io")


def stream_protocol(realm_id: RealmId) -> str:
    """The libp2p protocol id of app streams."""
    return f"/dep2p/app/{realm_id}/stream/1.0.0"


class StreamService:
    """All streams of one realm."""

    def __init__(
        self,
        context: MessagingContext,
        realm_id: RealmId,
        registry: Registry,
        load_of: Callable[[PeerId], PeerLoad],
    ) -> None:
        self.protocol: str = stream_protocol(realm_id)
        self.is_draining = False
        self.trace_log: TraceLog | None = None
        self._context = context
        self._gate = context.gate
        self._limits = context.limits
        self._counters = context.counters
        self._registry = registry
        self._load_of = load_of
        self._streams: dict[MessageStream, None] = {}
        self._nursery: trio.Nursery | None = None
        self.lingering: int = 0
        """Streams that their openers have left and whose other sides have not ended yet."""

    def serve_in(self, nursery: trio.Nursery | None) -> None:
        """Set the nursery of streams that their openers have left; with None no stream is opened any more."""
        self._nursery = nursery

    @property
    def streams(self) -> list[MessageStream]:
        """The streams that have not ended."""
        return list(self._streams)

    def _make(self, stream: ByteStream, *, is_opener: bool) -> MessageStream:
        made = MessageStream(stream, self._context, is_opener=is_opener)
        self._streams[made] = None
        return made

    @asynccontextmanager
    async def stream(
        self, peer: PeerId, name: str, body: bytes, headers: Mapping[str, object] | None
    ) -> AsyncGenerator[MessageStream, None]:
        """See `Messaging.stream`."""
        nursery = self._nursery
        if nursery is None:
            raise StreamClosedError("messaging is not running")
        check_text(peer, "the peer")
        body = as_bytes(body, "the message")
        check_body(body, self._limits.message_bytes_max)
        head = self._context.encoder.encode(name, app=headers)
        connection = await self._gate.connect(peer, timeout_s=self._limits.dial_timeout_s)
        raw = await connection.open_stream(self.protocol, timeout_s=self._limits.stream_open_timeout_s)
        stream = self._make(raw, is_opener=True)
        lingers = False
        log, began = self.trace_log, trio.current_time()
        try:
            await stream.open(name, head, body, dict(headers or {}))
            self._counters["streams_opened"] += 1
            if log is not None:
                trace_stream(log, peer, name, "out", None, 0.0)
            yield stream
            await stream.aclose()
            stream.raise_unreported()
            if not stream.is_over and self._nursery is nursery:  # the service still runs
                lingers = True
                nursery.start_soon(run_contained, partial(self._linger, stream), "a stream that its opener left")
        finally:
            if log is not None:
                trace_stream(log, peer, name, "out", stream, trio.current_time() - began)
            if not lingers:
                self._forget(stream)

    async def _linger(self, stream: MessageStream) -> None:
        """Wait for the end of a stream that the app has left: its data must still reach the peer."""
        self.lingering += 1
        try:
            timeout_s = self._limits.stream_item_timeout_s
            await run_while_moving(stream.finish, lambda: stream.progress, timeout_s, least=LEFT_BYTES_MIN)
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
                load.refused("streams")
                self._refuse(
                    stream,
                    OverloadedError(
                        f"this peer has {load.streams - 1} streams here, the most allowed "
                        "(streams_inbound_per_peer_max): open more when some have ended"
                    ),
                )
            else:
                stream.start()
                await self._serve(stream)
            # Without a limit in time: a slow opener can still read the data that the handler sent.
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
        elif not entry.places.may_take(stream.peer):
            held = entry.places.held(stream.peer)
            self._load_of(stream.peer).refused("stream_places")
            self._refuse(
                stream,
                OverloadedError(
                    f"{entry.places.taken} streams of this name are open here, {held} of them yours: "
                    "open more when some have ended"
                ),
            )
        else:
            wait_s = self._load_of(stream.peer).stream_wait_s(stream.name, entry.rate_per_s, trio.current_time())
            if wait_s:
                self._load_of(stream.peer).refused("stream_rate")
                retry_ms = int(wait_s * 1000) + 1
                text = f"this peer opens streams of this name faster than is allowed: try again after {retry_ms} ms"
                self._refuse(stream, RateLimitedError(text, retry_ms))
                return
            entry.places.take(stream.peer)
            try:
                await self._handle(stream, entry)
            finally:
                entry.places.release(stream.peer)

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
            if error is not stream.error:  # the handler raised it itself, and did not pass on the opener's
                self._counters["handlers_failed"] += 1
                stream.abort(error, ErrorCode.HANDLER_FAILED, str(error))
        except Exception as error:
            if stream.is_unwanted and isinstance(error, Dep2pError):
                logger.debug("the handler of streams %r ended by %r", entry.name, error)
                return
            self._counters["handlers_failed"] += 1
            logger.exception("the handler of streams %r failed", entry.name)
            stream.abort(HandlerError("the handler failed"), ErrorCode.HANDLER_FAILED, "the handler failed")
