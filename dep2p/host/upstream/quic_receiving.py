"""The datagrams of a QUIC listener, taken from the kernel several at a time.

py-libp2p takes one datagram at a time, with four locks and a turn of the event loop for each, answers each one, and
wakes its event loop, which looks for the same work again.
"""

# pyright: reportPrivateUsage=false

import logging
import os
import socket
import time
from collections.abc import Callable

import trio
from libp2p.transport.quic.connection import QUICConnection
from libp2p.transport.quic.listener import QUICListener

from dep2p.host.upstream.quic_internals import SharedSocketConnection

logger: logging.Logger = logging.getLogger("dep2p.host")

DATAGRAM_BYTES_MAX = 65_536
DATAGRAMS_AT_ONCE = 16
"""Datagrams that are taken before other tasks have their turn: 2 ms."""
_LONG_HEADER = 0x80
_CONNECTION_ID_BYTES = 8


FindDialed = Callable[[bytes, tuple[str, int]], SharedSocketConnection | None]
"""Returns the dialed connection that a datagram of a sender is for."""


async def receive_datagrams(listener: QUICListener, find_dialed: FindDialed) -> None:
    """Take what comes to the listener's socket until it is closed or this task is cancelled."""
    sock = listener._socket
    if sock is None:
        return
    reader = socket.socket(fileno=os.dup(sock.fileno()))
    try:
        reader.setblocking(False)
        while listener._listening and listener._socket is not None:
            await trio.lowlevel.wait_readable(reader)
            for connection in await _take(listener, reader, find_dialed):
                await _answer(connection)
    except trio.ClosedResourceError:
        return
    finally:
        reader.close()


async def _take(listener: QUICListener, reader: socket.socket, find_dialed: FindDialed) -> list[QUICConnection]:
    """Take the datagrams that wait; return the connections that got some."""
    touched: dict[QUICConnection, None] = {}
    for _ in range(DATAGRAMS_AT_ONCE):
        try:
            data, addr = reader.recvfrom(DATAGRAM_BYTES_MAX)
        except BlockingIOError:
            break
        except OSError as error:  # what the network said of a datagram that was sent before
            logger.debug("the QUIC socket: %s", error)
            continue
        dialed = find_dialed(data, addr)
        if dialed is not None:
            addr = dialed.target  # without the two further parts of an IPv6 sender, which aioquic does not know
        connection = dialed or _established(listener, data)
        if connection is None:
            await listener._process_packet(data, addr)
            continue
        try:
            connection._quic.receive_datagram(data, addr, now=time.time())
        except Exception as error:  # a library's fault with one datagram ends no other connection
            logger.debug("a datagram from %s is dropped: %r", addr, error)
        touched[connection] = None
    return list(touched)


def _established(listener: QUICListener, data: bytes) -> QUICConnection | None:
    """The connection of a datagram with a short header; None for all else, which takes the long way."""
    if len(data) <= _CONNECTION_ID_BYTES or data[0] & _LONG_HEADER:
        return None
    return listener._registry._connections.get(data[1 : 1 + _CONNECTION_ID_BYTES])


async def _answer(connection: QUICConnection) -> None:
    try:
        is_busy = connection._event_processing_active
        await connection._process_quic_events_batched()
        if is_busy or connection._quic._close_event is not None:
            connection._signal_activity()  # another task is at the events, or the end has come
        await connection._transmit()
    except Exception as error:
        logger.debug("a QUIC connection cannot take what has come: %r", error)
