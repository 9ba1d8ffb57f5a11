"""The control API's connections: one that ends costs nothing but itself."""

import socket
from typing import Any

import trio

from dep2p.daemon.bounds import ControlBounds
from dep2p.daemon.http import server as http_server
from dep2p.daemon.http.server import HttpServer


async def never(*_args: Any) -> None:
    raise AssertionError("no request comes here")


async def test_the_watch_for_hangups_passes_over_a_connection_that_was_closed_a_moment_ago() -> None:
    """Its socket is closed one step before it is forgotten; the watch may come in between."""
    ours, theirs = socket.socketpair()
    stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
    connection = http_server._Connection(HttpServer(ControlBounds()), never, stream)  # pyright: ignore[reportPrivateUsage]
    connection._handling = True  # pyright: ignore[reportPrivateUsage]
    connection._all_of_it = trio.CancelScope()  # pyright: ignore[reportPrivateUsage]
    theirs.close()
    await trio.aclose_forcefully(stream)
    connection.end_if_hung_up()
    assert not connection._all_of_it.cancel_called  # pyright: ignore[reportPrivateUsage]
