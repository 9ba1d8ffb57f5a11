"""The control API for other machines: TLS 1.3, then the token; little is held for connections before that.

Any node of the network reaches this port. Until a connection has brought the token it is a stranger's: strangers have
places of their own, a newcomer replaces the oldest of the address that holds most, and a wrong token is answered late.
So neither guesses nor idle connections cost much, and no address is ever shut out.
"""

import hmac
import ipaddress
import logging
import ssl
from collections import Counter
from dataclasses import dataclass
from typing import Final

import trio
from starlette.types import ASGIApp, Receive, Scope, Send

from dep2p.daemon.bounds import ControlBounds
from dep2p.daemon.http.server import HttpServer
from dep2p.daemon.problems import Problem, problem_response

_logger = logging.getLogger("dep2p.daemon.http")
_LOG_INTERVAL_S: Final = 60.0
_BLOCKS_LOGGED_MAX: Final = 1_024
_IPV6_BLOCK_BITS: Final = 64


class TlsStream(trio.abc.HalfCloseableStream):
    """A TLS stream as the HTTP server uses it: TLS 1.3 has no half-closed state that clients rely on."""

    def __init__(self, stream: "trio.SSLStream[trio.SocketStream]") -> None:
        self._stream = stream

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of it."""
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        """Wait until a send may go on at once."""
        await self._stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        """Return bytes from the client; b"" when it sends no more."""
        return await self._stream.receive_some(max_bytes)

    async def send_eof(self) -> None:
        """Do nothing: the length of each answer says where it ends."""
        await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        """Close the connection."""
        await self._stream.aclose()


@dataclass(slots=True, eq=False)
class _UnprovenConnection:
    """A connection that has not brought the token."""

    block: str
    scope: trio.CancelScope


class RemoteControl:
    """Serves the control API on one TLS listener."""

    def __init__(
        self, server: HttpServer, context: ssl.SSLContext, token: str, bounds: ControlBounds, counts: Counter[str]
    ) -> None:
        self._server = server
        self._context = context
        self._expected = b"Bearer " + token.encode("utf-8")
        self._bounds = bounds
        self._counts = counts
        self._unproven: dict[_UnprovenConnection, None] = {}
        self._failures: dict[str, tuple[int, float]] = {}
        """Wrong tokens of an address block since its last log line, and when that was."""

    @property
    def unproven_count(self) -> int:
        """Open connections that have not brought the token."""
        return len(self._unproven)

    async def serve(self, app: ASGIApp, listener: trio.SocketListener) -> None:
        """Take connections until cancelled. ``app`` gets requests with the right token only."""

        async def handle(stream: trio.SocketStream) -> None:
            await self._handle(app, stream)

        await trio.serve_listeners(handle, [listener])

    async def _handle(self, app: ASGIApp, stream: trio.SocketStream) -> None:
        connection = self._admit(_block_of(stream))
        try:
            with connection.scope:
                secured = trio.SSLStream(stream, self._context, server_side=True, https_compatible=True)
                try:
                    with trio.fail_after(self._bounds.tls_handshake_timeout_s):
                        await secured.do_handshake()
                except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError) as error:
                    self._counts["tls_handshake_failed"] += 1
                    _logger.debug("a TLS handshake failed", extra={"address": connection.block, "reason": repr(error)})
                    return
                await self._server.handle(_Caller(app, self, connection), TlsStream(secured))
        finally:
            self._unproven.pop(connection, None)
            await trio.aclose_forcefully(stream)

    def _admit(self, block: str) -> _UnprovenConnection:
        held = Counter(each.block for each in self._unproven)
        fullest = ""
        if held[block] >= self._bounds.connections_unproven_per_block_max:
            fullest = block
        elif len(self._unproven) >= self._bounds.connections_unproven_max:
            fullest = max(held, key=lambda each: held[each])
        if fullest:
            oldest = next(each for each in self._unproven if each.block == fullest)
            del self._unproven[oldest]
            oldest.scope.cancel()
            self._counts["tls_connection_replaced"] += 1
        deadline = trio.current_time() + self._bounds.token_timeout_s
        connection = _UnprovenConnection(block, trio.CancelScope(deadline=deadline))
        self._unproven[connection] = None
        return connection

    async def check(self, scope: Scope, connection: _UnprovenConnection) -> None:
        """Raises :class:`Problem` D1008 for a request without the token, after a pause."""
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) == 1 and hmac.compare_digest(given[0], self._expected):
            self._unproven.pop(connection, None)
            connection.scope.deadline = float("inf")
            return
        self._counts["tls_token_wrong"] += 1
        self._log_failure(connection.block)
        await trio.sleep(self._bounds.wrong_token_delay_s)
        raise Problem("D1008", "the bearer token is missing or wrong")

    def _log_failure(self, block: str) -> None:
        now_s = trio.current_time()
        count, logged_s = self._failures.pop(block, (0, float("-inf")))
        count += 1
        if now_s - logged_s >= _LOG_INTERVAL_S:
            _logger.warning(
                "a program on the network brought a wrong token to the control API",
                extra={"address": block, "times": count},
            )
            count, logged_s = 0, now_s
        self._failures[block] = (count, logged_s)
        if len(self._failures) > _BLOCKS_LOGGED_MAX:
            del self._failures[next(iter(self._failures))]


class _Caller:
    """The app as one connection reaches it."""

    def __init__(self, app: ASGIApp, remote: RemoteControl, connection: _UnprovenConnection) -> None:
        self._app = app
        self._remote = remote
        self._connection = connection

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._remote.check(scope, self._connection)
        except Problem as problem:
            await problem_response(problem)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _block_of(stream: trio.SocketStream) -> str:
    """Return the client's address, and for IPv6 its network of 64 bits, which one machine can have whole."""
    try:
        address = ipaddress.ip_address(str(stream.socket.getpeername()[0]).partition("%")[0])
    except (OSError, ValueError):  # it has hung up
        return "unknown"
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, _IPV6_BLOCK_BITS), strict=False))
