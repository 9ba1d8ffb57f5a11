"""The HTTP/1.1 server of the control API and of nsqd's API: any number of connections up to a limit, cut at the end.

docs/decisions/0006-control-api.md says why it is a server of our own.
"""

import logging
import socket
import struct
from collections.abc import Sequence
from typing import Final

import trio
from starlette.types import ASGIApp

from dep2p.daemon.bounds import ControlBounds
from dep2p.daemon.http.connection import HttpConnection
from dep2p.protocols.fairness.shares import MemberShares

_CREDENTIALS: Final = struct.Struct("3i")
"""The struct ucred of Linux: process, user and group."""
_logger = logging.getLogger("dep2p.daemon.http")
_BUSY = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


def _program_of(stream: trio.abc.HalfCloseableStream) -> int:
    """Return the process id of a Unix socket's client; 0 for all others, which count as one program."""
    if not isinstance(stream, trio.SocketStream) or stream.socket.family != socket.AF_UNIX:
        return 0
    try:
        raw = stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except OSError:  # the client has hung up
        return 0
    pid: int = _CREDENTIALS.unpack(raw)[0]
    return pid


class HttpServer:
    """Serves one ASGI application on any number of listeners."""

    def __init__(self, bounds: ControlBounds) -> None:
        self.bounds = bounds
        self._connections: dict[HttpConnection, None] = {}
        self._places: MemberShares[int] = MemberShares(bounds.connections_max)
        """Connections by the process id of their program."""
        self._is_ending = False
        self.refused: int = 0
        self._none_open = trio.Event()

    @property
    def connection_count(self) -> int:
        """The number of open connections."""
        return len(self._connections)

    async def serve(self, app: ASGIApp, listeners: Sequence[trio.abc.Listener[trio.abc.HalfCloseableStream]]) -> None:
        """Take connections until cancelled; then every connection is cut."""

        async def handle(stream: trio.abc.HalfCloseableStream) -> None:
            await self.handle(app, stream)

        await trio.serve_listeners(handle, list(listeners))

    async def handle(self, app: ASGIApp, stream: trio.abc.HalfCloseableStream) -> None:
        """Serve one connection until it ends. Never raises because of the client."""
        program = _program_of(stream)
        if not self._places.may_take(program):
            self.refused += 1
            with trio.move_on_after(self.bounds.linger_timeout_s):
                try:
                    await stream.send_all(_BUSY)
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    _logger.debug("a refused client hung up")
            await trio.aclose_forcefully(stream)
            return
        connection = HttpConnection(app, stream, self.bounds)
        if self._is_ending:
            connection.end_keep_alive()
        self._connections[connection] = None
        self._places.take(program)
        try:
            await connection.run()
        finally:
            self._connections.pop(connection, None)
            self._places.release(program)
            if not self._connections:
                self._none_open.set()

    async def wait_closed(self) -> None:
        """Wait until no connection is open."""
        while self._connections:
            self._none_open = trio.Event()
            await self._none_open.wait()

    def end_keep_alive(self) -> None:
        """Close connections after their present answer from now on; close idle ones at once."""
        self._is_ending = True
        for connection in list(self._connections):
            connection.end_keep_alive()
