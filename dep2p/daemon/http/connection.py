"""One HTTP/1.1 connection: h11 reads and writes the messages, an ASGI application answers them.

The application pulls the body: `receive` reads the socket only when it is called, so a slow application slows its
client. Bytes behind a request wait until its answer is complete. RFC 9112 is the rule for all that is read here.
"""

import logging
import select
import socket
from typing import Final
from urllib.parse import unquote

import h11
import trio
from starlette.types import ASGIApp, Message, Scope

from dep2p.daemon.bounds import ControlBounds

PIECES_WRITTEN: Final = "dep2p.pieces_written"
"""The extension of a scope that counts the parts of the answer's body that the socket has. `send` alone does not say
that: it writes nothing to a client that is gone."""

_logger = logging.getLogger("dep2p.daemon.http")
_READ_BYTES = 262_144
_HEAD_BYTES_MAX = 32_768
_HANGUP_INTERVAL_S = 1.0
_CLOSE = (b"connection", b"close")
_BODYLESS_STATUSES = (204, 304)


class RefusedRequestError(Exception):
    """A request that HTTP/1.1 does not allow, with the status of the answer."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


def scope_of(request: h11.Request) -> Scope:
    """Return the ASGI scope of a request. Raises RefusedRequestError."""
    headers = [(bytes(name), bytes(value)) for name, value in request.headers]
    _check_version_and_framing(request, {name for name, _ in headers})
    target, authority = _split_target(request)
    if authority is not None:
        headers = [(b"host", authority), *(header for header in headers if header[0] != b"host")]
    path, _, query = target.partition(b"?")
    return {
        "type": "http",
        "asgi": {"spec_version": "2.1", "version": "3.0"},
        "http_version": request.http_version.decode("ascii"),
        "method": request.method.decode("ascii"),
        "scheme": "http",
        "path": unquote(path.decode("ascii")),
        "raw_path": path,
        "query_string": query,
        "root_path": "",
        "headers": headers,
        "client": None,
        "server": None,
        "state": {},
        "extensions": {},
    }


def _check_version_and_framing(request: h11.Request, names: set[bytes]) -> None:
    if not request.http_version.startswith(b"1."):
        raise RefusedRequestError(505, "HTTP/1.1 is spoken here")
    if b"transfer-encoding" in names and (b"content-length" in names or request.http_version == b"1.0"):
        raise RefusedRequestError(400, "the length of the body is ambiguous")  # RFC 9112, 6.1: request smuggling
    if request.method == b"CONNECT":
        raise RefusedRequestError(501, "CONNECT is for proxies")


def _split_target(request: h11.Request) -> tuple[bytes, bytes | None]:
    """Return path and query. A target in absolute form also gives its authority, which replaces Host (RFC 9112,
    3.2.2)."""
    target = request.target
    if target.startswith(b"/") or (target == b"*" and request.method == b"OPTIONS"):
        return target, None
    scheme, separator, rest = target.partition(b"://")
    if not separator or scheme.lower() != b"http":
        raise RefusedRequestError(400, "the target is neither a path nor an http URL")
    end = min((at for mark in b"/?#" if (at := rest.find(mark)) >= 0), default=len(rest))
    authority, target = rest[:end], rest[end:].partition(b"#")[0]
    if not authority or b"@" in authority:
        raise RefusedRequestError(400, "the target's URL names no host, or a user")
    return (target if target.startswith(b"/") else b"/" + target), authority


class HttpConnection:
    """Serves the requests of one client, one after the other."""

    def __init__(self, app: ASGIApp, stream: trio.abc.HalfCloseableStream, bounds: ControlBounds) -> None:
        self._app = app
        self._stream = stream
        self._bounds = bounds
        self._write_lock = trio.Lock()
        self._unread = b""
        """Bytes from the client that no h11 connection has read."""
        self._at_eof = False
        self._eof_seen_s: float | None = None
        self._broken = False
        self._closing = False
        self._head_scope: trio.CancelScope | None = None
        self._exchange: _Exchange | None = None

    async def run(self) -> None:
        """Serve until either side ends the connection. An application at work then is cancelled. Never raises because
        of the client."""
        try:
            head_timeout_s = self._bounds.head_timeout_s
            while await self._serve_next(head_timeout_s):
                head_timeout_s = self._bounds.keep_alive_timeout_s
        except* (trio.BrokenResourceError, trio.ClosedResourceError):
            _logger.debug("a client hung up")
        except* Exception:
            _logger.exception("a control connection failed")
        finally:
            await trio.aclose_forcefully(self._stream)

    def end_keep_alive(self) -> None:
        """Close after the present answer, or now when no request is at work."""
        self._closing = True
        if self._head_scope is not None:
            self._head_scope.cancel()

    async def _serve_next(self, head_timeout_s: float) -> bool:
        """Answer the next request. Returns False when no other may follow it on this connection."""
        http = h11.Connection(h11.SERVER, max_incomplete_event_size=_HEAD_BYTES_MAX)
        try:
            request = await self._read_head(http, head_timeout_s)
            if request is not None:
                await self._answer(http, request)
            elif not self._closing:
                return False
        except h11.RemoteProtocolError as error:
            await self.refuse(http, error.error_status_hint, str(error))
        except RefusedRequestError as refused:
            await self.refuse(http, refused.status, str(refused))
        if http.our_state is h11.DONE and http.their_state is h11.DONE and not self._closing:
            # Bytes that h11 did not read come before those that arrived while the application worked.
            self._unread = http.trailing_data[0] + self._unread
            return True
        await self._linger()
        return False

    async def _read_head(self, http: h11.Connection, timeout_s: float) -> h11.Request | None:
        """Return the head of the next request; None when the client ends or is too slow. Raises
        h11.RemoteProtocolError."""
        begun = False
        with trio.CancelScope(deadline=trio.current_time() + timeout_s) as self._head_scope:
            if self._closing:
                self._head_scope.cancel()
            while True:
                if not begun:
                    # RFC 9112, 2.2: old clients send an empty line behind a body.
                    self._unread = self._unread.lstrip(b"\r\n")
                if self._unread:
                    begun = True
                    http.receive_data(self._unread)
                    self._unread = b""
                elif self._at_eof:
                    if not begun:
                        return None
                    http.receive_data(b"")
                if begun and isinstance(event := http.next_event(), h11.Request):
                    self._head_scope = None
                    return event
                await self._fill(_HEAD_BYTES_MAX)
        self._head_scope = None
        return None

    async def _answer(self, http: h11.Connection, request: h11.Request) -> None:
        scope = scope_of(request)
        async with trio.open_nursery() as nursery:
            exchange = self._exchange = _Exchange(self, http, request, nursery.cancel_scope)
            scope["extensions"][PIECES_WRITTEN] = lambda: exchange.pieces_written
            nursery.start_soon(self._cut_when_hung_up, exchange)
            try:
                await self._app(scope, exchange.receive, exchange.send)
            except Exception:
                _logger.exception("the application failed", extra={"path": scope["path"][:200]})
            finally:
                exchange.answered.set()
            nursery.cancel_scope.cancel()
        self._exchange = None
        await self.refuse(http, 500, "the application gave no answer")

    async def refuse(self, http: h11.Connection, status: int, why: str) -> None:
        """Answer without the application, unless an answer has begun."""
        if http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        _logger.debug("a request was refused", extra={"status": status, "reason": why})
        head = h11.Response(status_code=status, headers=[(b"content-length", b"0"), _CLOSE])
        await self.write(http.send(head) + http.send(h11.EndOfMessage()))

    # Reading

    async def _fill(self, bytes_max: int) -> None:
        """Read more from the client, or note that it sends no more."""
        data = bytes(await self._stream.receive_some(bytes_max))
        self._unread += data
        self._at_eof = not data

    async def read(self) -> bytes:
        """Return bytes from the client; b"" when it sends no more."""
        if not self._unread and not self._at_eof:
            await self._fill(_READ_BYTES)
        data, self._unread = self._unread, b""
        return data

    async def _linger(self) -> None:
        """Read on for a moment: closing with unread data would lose the answer to the client."""
        if self._broken or self._at_eof:
            return
        with trio.move_on_after(self._bounds.linger_timeout_s):
            async with self._write_lock:
                await self._stream.send_eof()
            left_bytes = self._bounds.linger_bytes_max
            while left_bytes > 0:
                data = await self._stream.receive_some(_READ_BYTES)
                if not data:
                    return
                left_bytes -= len(data)

    # A client that leaves

    async def _cut_when_hung_up(self, exchange: "_Exchange") -> None:
        try:
            await self._wait_hung_up(exchange)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            _logger.debug("a client hung up")
        self._cut()

    async def _wait_hung_up(self, exchange: "_Exchange") -> None:
        while not exchange.body_read.is_set():  # the application reads the socket, or the body waits for it
            if self._is_hung_up():
                return
            with trio.move_on_after(_HANGUP_INTERVAL_S):
                await exchange.body_read.wait()
        if not self._unread and not self._at_eof and not exchange.has_pipelined:
            await self._fill(_READ_BYTES)
        while not self._is_hung_up():  # noqa: ASYNC110  # the kernel has no event for a hang-up that trio can wait for
            await trio.sleep(_HANGUP_INTERVAL_S)

    def _is_hung_up(self) -> bool:
        """Whether the client is gone.

        A client that only ended its sending side wants its answer. A Unix socket tells the two apart. Over TCP they
        look alike until a write fails, so that the answer has `half_close_timeout_s` to come.
        """
        if not isinstance(self._stream, trio.SocketStream):
            return self._at_eof
        poll = select.poll()
        poll.register(self._stream.socket.fileno(), select.POLLRDHUP)
        events = next((events for _, events in poll.poll(0)), 0)
        if events & (select.POLLHUP | select.POLLERR):
            return True
        if not events & select.POLLRDHUP or self._stream.socket.family == socket.AF_UNIX:
            return False
        now_s = trio.current_time()
        if self._eof_seen_s is None:
            self._eof_seen_s = now_s
        return now_s - self._eof_seen_s >= self._bounds.half_close_timeout_s

    def _cut(self) -> None:
        """Write nothing more, and cancel the application."""
        self._broken = True
        if self._exchange is not None:
            self._exchange.scope.cancel()

    # Writing

    @property
    def is_broken(self) -> bool:
        """Whether nothing more can be written."""
        return self._broken

    @property
    def is_closing(self) -> bool:
        """Whether no request follows the present one."""
        return self._closing

    async def write(self, data: bytes) -> bool:
        """Write all of it; return whether the socket has it. A client that takes nothing for `write_stall_timeout_s` is
        cut off."""
        if self._broken:
            return False
        try:
            async with self._write_lock:
                with memoryview(data) as view:
                    for start in range(0, len(view), _READ_BYTES):
                        with trio.fail_after(self._bounds.write_stall_timeout_s):
                            await self._stream.send_all(view[start : start + _READ_BYTES])
            return True
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
            self._cut()
            return False
        except trio.Cancelled:
            self._cut()  # a part of the write may be out, so nothing may follow it
            raise


class _Exchange:
    """One request and its answer, as the application sees them."""

    def __init__(
        self, connection: HttpConnection, http: h11.Connection, request: h11.Request, scope: trio.CancelScope
    ) -> None:
        self._connection = connection
        self._http = http
        self._is_head = request.method == b"HEAD"
        self._has_answer_body = True
        self._is_end_given = False
        self.scope = scope
        self.pieces_written = 0
        """Parts of the answer's body that the socket has."""
        self.body_read = trio.Event()
        """Set when the client has sent its whole body, and the application has taken it."""
        self.answered = trio.Event()
        if not any(
            name == b"transfer-encoding" or (name == b"content-length" and int(value))
            for name, value in request.headers
        ):
            http.next_event()  # the end of the message: nothing follows the head
            self.body_read.set()

    @property
    def has_pipelined(self) -> bool:
        """Whether bytes of a next request are here."""
        return bool(self._http.trailing_data[0])

    async def receive(self) -> Message:
        """Return the next part of the body. After its end, wait for the end of the answer."""
        if not self.body_read.is_set():
            return await self._receive_part()
        if not self._is_end_given:
            self._is_end_given = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self.answered.wait()
        return {"type": "http.disconnect"}

    async def _receive_part(self) -> Message:
        http, connection = self._http, self._connection
        try:
            if http.they_are_waiting_for_100_continue:
                await connection.write(http.send(h11.InformationalResponse(status_code=100, headers=[])))
            while (event := http.next_event()) is h11.NEED_DATA:
                http.receive_data(await connection.read())
        except h11.RemoteProtocolError as error:
            # The body is broken, or ended too early: the application never gets all of it.
            await connection.refuse(http, error.error_status_hint, str(error))
            self.scope.cancel()
            await trio.lowlevel.checkpoint_if_cancelled()
            return {"type": "http.disconnect"}
        if isinstance(event, h11.Data):
            return {"type": "http.request", "body": bytes(event.data), "more_body": True}
        self.body_read.set()
        self._is_end_given = True
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(self, message: Message) -> None:
        """Send a part of the answer. Nothing is written any more to a client that is gone."""
        if self._connection.is_broken or self._http.our_state is h11.ERROR or self.scope.cancel_called:
            return
        if message["type"] == "http.response.start":
            await self._connection.write(self._http.send(self._head(message)))
        elif message["type"] == "http.response.body":
            data = message.get("body", b"")
            out = self._http.send(h11.Data(data=data)) if data and self._has_answer_body else b""
            is_last = not message.get("more_body", False)
            if is_last:
                out += self._http.send(h11.EndOfMessage())
            self.pieces_written += await self._connection.write(out)
            if is_last:
                self.answered.set()
        else:
            raise RuntimeError(f"HTTP has no answer of the kind {message['type']}")

    def _head(self, message: Message) -> h11.Response:
        status: int = message["status"]
        headers: list[tuple[bytes, bytes]] = list(message.get("headers", ()))
        if not self.body_read.is_set() or self._connection.is_closing:
            # The rest of the body would stand in the way of a next request.
            headers.append(_CLOSE)
        self._has_answer_body = not self._is_head and status not in _BODYLESS_STATUSES
        return h11.Response(status_code=status, headers=headers)
