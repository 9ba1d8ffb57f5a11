"""HTTP/1.1 for the control API: Hypercorn's protocol on connections of our own.

Hypercorn's trio worker is not used as it is, because it cannot be stopped while a client does not read (it shields
the write), can deadlock when an answer comes before the request's body was taken, has no limit for connections or slow
heads, and offers HTTP/2. Its HTTP/1.1 protocol and ASGI layer are sound, and are used unchanged.
docs/decisions/0006-control-api.md has the details.
"""

import logging
import select
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Self, cast

import trio
from hypercorn.config import Config as HypercornConfig
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.h11 import H2CProtocolRequiredError, H2ProtocolAssumedError, H11Protocol
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from starlette.types import ASGIApp, Message

from dep2p.daemon.bounds import ControlBounds

_logger = logging.getLogger("dep2p.daemon.http")
_READ_BYTES = 262_144
_HANGUP_INTERVAL_S = 1.0
_HANGUP_EVENTS = select.POLLHUP | select.POLLERR | select.POLLRDHUP
_BODY_PIECES_MAX = 2
_BUSY = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class HttpServer:
    """Serves one ASGI application on any number of listeners."""

    def __init__(self, bounds: ControlBounds) -> None:
        self.bounds = bounds
        self.context = WorkerContext(None)
        self.config = HypercornConfig()
        self.config.accesslog = None
        self.config.errorlog = _logger
        self.config.include_server_header = False
        self.config.include_date_header = False
        self.config.keep_alive_max_requests = 1_000_000
        self.config.h11_max_incomplete_size = 32_768
        self._connections: dict[_Connection, None] = {}
        self.refused = 0
        self._none_open = trio.Event()

    @property
    def connection_count(self) -> int:
        """Open connections."""
        return len(self._connections)

    async def serve(self, app: ASGIApp, listeners: Sequence[trio.abc.Listener[trio.abc.HalfCloseableStream]]) -> None:
        """Take connections until cancelled; then every connection is cut."""

        async def handle(stream: trio.abc.HalfCloseableStream) -> None:
            await self.handle(app, stream)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_hangups)
            await trio.serve_listeners(handle, list(listeners))

    async def _watch_hangups(self) -> None:
        """End connections whose client left while its body waits for the application: nothing reads there then."""
        while True:
            await trio.sleep(_HANGUP_INTERVAL_S)
            for connection in list(self._connections):
                connection.end_if_hung_up()

    async def handle(self, app: ASGIApp, stream: trio.abc.HalfCloseableStream) -> None:
        """Serve one connection until it ends. Never raises because of the client."""
        if len(self._connections) >= self.bounds.connections_max:
            self.refused += 1
            with trio.move_on_after(self.bounds.linger_timeout_s):
                try:
                    await stream.send_all(_BUSY)
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    _logger.debug("a refused client hung up")
            await trio.aclose_forcefully(stream)
            return
        connection = _Connection(self, app, stream)
        self._connections[connection] = None
        try:
            await connection.run()
        finally:
            self._connections.pop(connection, None)
            if not self._connections:
                self._none_open.set()

    async def wait_closed(self) -> None:
        """Wait until no connection is open."""
        while self._connections:
            self._none_open = trio.Event()
            await self._none_open.wait()

    async def end_keep_alive(self) -> None:
        """From now on connections close after their present answer; idle ones close at once."""
        await self.context.terminated.set()
        for connection in list(self._connections):
            connection.close_if_idle()


class _Inbox:
    """What the client sends, on its way to the application: bounded, and never in the way of a hang-up."""

    def __init__(self) -> None:
        self._messages: deque[Message] = deque()
        self._changed = trio.Event()
        self._disconnect: Message | None = None
        self._closed = False

    async def put(self, message: Any) -> None:
        """Add a message; waits while the application has not taken the last ones."""
        if message["type"].endswith(".disconnect"):
            self._disconnect = message
            self._notify()
            return
        while len(self._messages) >= _BODY_PIECES_MAX and not self._closed and self._disconnect is None:
            await self._changed.wait()
        if not self._closed:
            self._messages.append(message)
            self._notify()

    async def get(self) -> Message:
        """The next message, for the application."""
        while not self._messages and self._disconnect is None:
            await self._changed.wait()
        if self._disconnect is not None:
            return self._disconnect
        message = self._messages.popleft()
        self._notify()
        return message

    def close(self) -> None:
        """The application has ended: take and drop everything."""
        self._closed = True
        self._messages.clear()
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, trio.Event()
        changed.set()


class _Tasks:
    """The nursery of one connection, as Hypercorn's protocol wants it."""

    def __init__(self, app: ASGIApp, nursery: trio.Nursery) -> None:
        self._app = app
        self._nursery = nursery

    async def spawn_app(
        self, _app: Any, _config: Any, scope: Any, send: Callable[[Any], Awaitable[None]]
    ) -> Callable[[Any], Awaitable[None]]:
        inbox = _Inbox()
        self._nursery.start_soon(self._run, scope, inbox, send)
        return inbox.put

    async def _run(self, scope: Any, inbox: _Inbox, send: Callable[[Any], Awaitable[None]]) -> None:
        try:
            await self._app(scope, inbox.get, send)
        finally:
            inbox.close()
        await send(None)

    def spawn(self, func: Callable[..., Awaitable[Any]], *args: Any) -> None:
        self._nursery.start_soon(func, *args)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class _Connection:
    """One connection: reads, gives to the protocol, writes what it wants."""

    def __init__(self, server: HttpServer, app: ASGIApp, stream: trio.abc.HalfCloseableStream) -> None:
        self._server = server
        self._bounds = server.bounds
        self._app = app
        self._stream = stream
        self._protocol: H11Protocol
        self._write_lock = trio.Lock()
        self._deadline_s = trio.current_time() + self._bounds.head_timeout_s
        self._idle = True
        self._read_scope: trio.CancelScope | None = None
        self._closing = False
        self._broken = False
        self._handling = False
        self._all_of_it: trio.CancelScope | None = None

    async def run(self) -> None:
        """Until either side ends it. Applications still at work then are cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                tasks = _Tasks(self._app, nursery)
                self._protocol = H11Protocol(
                    cast(Any, self._app),
                    self._server.config,
                    cast(Any, self._server.context),
                    cast(Any, tasks),
                    ConnectionState(cast(Any, {})),
                    False,
                    None,
                    None,
                    self._write,
                )
                self._all_of_it = nursery.cancel_scope
                await self._read()
                nursery.cancel_scope.cancel()
        except* (trio.BrokenResourceError, trio.ClosedResourceError):
            _logger.debug("a client hung up")
        except* (H2CProtocolRequiredError, H2ProtocolAssumedError):
            _logger.debug("a client asked for HTTP/2")
        except* Exception:
            _logger.exception("a control connection failed")
        finally:
            await trio.aclose_forcefully(self._stream)

    async def _read(self) -> None:
        while not self._closing:
            data = b""
            with trio.CancelScope(deadline=self._deadline_s) as self._read_scope:
                data = bytes(await self._stream.receive_some(_READ_BYTES))
            if self._read_scope.cancelled_caught:
                break
            self._handling = True
            await self._protocol.handle(RawData(data))
            self._handling = False
            if not data:
                break
        if self._closing and not self._broken:
            await self._linger()
        await self._protocol.handle(Closed())

    async def _linger(self) -> None:
        """Read on for a moment: closing with unread data would take the answer away from the client."""
        with trio.move_on_after(self._bounds.linger_timeout_s):
            async with self._write_lock:
                await self._stream.send_eof()
            left = self._bounds.linger_bytes_max
            while left > 0:
                data = await self._stream.receive_some(_READ_BYTES)
                if not data:
                    return
                left -= len(data)

    async def _write(self, event: Event) -> None:
        if isinstance(event, RawData):
            if not self._broken:
                await self._write_bytes(event.data)
        elif isinstance(event, Updated):
            self._idle = event.idle
            timeout_s = self._bounds.keep_alive_timeout_s if event.idle else float("inf")
            self._set_deadline(trio.current_time() + timeout_s)
        elif isinstance(event, Closed):
            self._close()

    async def _write_bytes(self, data: bytes) -> None:
        try:
            async with self._write_lock:
                with memoryview(data) as view:
                    for start in range(0, len(view), _READ_BYTES):
                        with trio.fail_after(self._bounds.write_stall_timeout_s):
                            await self._stream.send_all(view[start : start + _READ_BYTES])
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
            self._broken = True
            self._close()
            await self._protocol.handle(Closed())
        except trio.Cancelled:
            self._broken = True  # a part of the write may be out: nothing may follow it
            self._close()
            raise

    def _close(self) -> None:
        self._closing = True
        self._set_deadline(float("-inf"))

    def end_if_hung_up(self) -> None:
        """Cut it when the client is gone and the reader, being busy, cannot see it."""
        if not self._handling or self._all_of_it is None or not isinstance(self._stream, trio.SocketStream):
            return
        descriptor = self._stream.socket.fileno()
        if descriptor < 0:
            return  # closed in this very step, and about to be forgotten
        poll = select.poll()
        poll.register(descriptor, _HANGUP_EVENTS)
        if poll.poll(0):
            self._broken = True
            self._all_of_it.cancel()

    def close_if_idle(self) -> None:
        """End it unless a request is at work."""
        if self._idle:
            self._close()

    def _set_deadline(self, deadline_s: float) -> None:
        if self._closing:
            deadline_s = float("-inf")
        self._deadline_s = deadline_s
        if self._read_scope is not None:
            self._read_scope.deadline = deadline_s
