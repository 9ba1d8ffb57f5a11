"""The one sender of a QUIC connection: its datagrams leave in order, in batches, and its timers are kept.

py-libp2p sends from every task that has written, and waits between two datagrams, so those of several tasks overtake
each other. The peer takes a late datagram for a lost one, and the congestion window never opens: over 50 ms a stream
was eight times slower than with one sender. Its event loop also learns of a new timer only at its next turn, up to two
seconds later.
"""

# pyright: reportPrivateUsage=false

import errno
import socket
import struct
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import groupby

import trio
from aioquic.quic.connection import NetworkAddress, QuicConnection
from libp2p.transport.quic.connection import QUICConnection

_UDP_SEGMENT = 103
"""Linux: the kernel cuts one buffer into datagrams of this size (udp(7))."""
_BATCH_BYTES_MAX = 60_000
_BATCH_DATAGRAMS_MAX = 32
_SOCKET_BYTES = 4_194_304
"""The buffers of the kernel, as of a window over 300 ms at 100 Mbit/s; by default they hold 90 datagrams."""
_PACE_S = 0.001
"""The least wait for the pacing of a connection: shorter ones cost more than the datagrams that they space."""

_NO_SEGMENTS = frozenset({errno.EINVAL, errno.EIO, errno.ENOPROTOOPT, errno.EOPNOTSUPP, errno.EMSGSIZE})
"""The errors of a kernel, or of a driver, that cannot cut."""

Datagram = tuple[bytes, NetworkAddress]


def batches(datagrams: Iterable[Datagram]) -> Iterator[tuple[list[bytes], NetworkAddress]]:
    """Group datagrams that the kernel can take as one buffer, in order: of one destination, all of one size but the
    last, which may be shorter."""
    for addr, group in groupby(datagrams, key=lambda one: one[1]):
        batch: list[bytes] = []
        size = 0
        for data, _ in group:
            is_full = len(batch) >= _BATCH_DATAGRAMS_MAX or size + len(data) > _BATCH_BYTES_MAX
            if batch and (is_full or len(batch[-1]) != len(batch[0]) or len(data) > len(batch[0])):
                yield batch, addr
                batch, size = [], 0
            batch.append(data)
            size += len(data)
        if batch:
            yield batch, addr


def widen(sock: trio.socket.SocketType) -> None:
    """Let the kernel keep more datagrams for a socket while this process is busy; it gives less than asked for when
    `net.core.rmem_max` is smaller."""
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BYTES)


class OneSender:
    """Sends for all tasks of a connection, one at a time."""

    segments: bool = sys.platform == "linux"
    """Whether the kernel cuts buffers; false from the first time that it refused."""

    def __init__(self, connection: QUICConnection) -> None:
        self._connection = connection
        self._quic: QuicConnection = connection._quic
        self._lock = trio.Lock()
        self._begun = 0
        self._loop: trio.lowlevel.Task | None = None
        self._armed_s = 0.0
        """The timer that the event loop waits for."""
        self._handle_timer = connection._handle_timer_events
        self._next_timer = self._quic.get_timer
        connection._transmit = self.transmit  # type: ignore[method-assign]
        connection._handle_timer_events = self._handle_timer_events  # type: ignore[method-assign]
        self._quic.get_timer = self._timer  # type: ignore[method-assign]
        if connection._socket is not None:
            widen(connection._socket)

    async def transmit(self) -> None:
        """Send what aioquic has to send at this moment, after what others send."""
        wanted = self._begun + 1
        async with self._lock:
            if self._begun >= wanted:
                return  # another task began after this one asked
            self._begun += 1
            sock = self._connection._socket
            if sock is None:
                return
            try:
                for batch, addr in batches(self._quic.datagrams_to_send(now=time.time())):
                    await self._send(sock, batch, addr)
            except OSError as error:
                await self._connection._handle_connection_error(error)
                return
        self._connection._refresh_send_backpressure()
        self._arm()

    async def _send(self, sock: trio.socket.SocketType, batch: list[bytes], addr: NetworkAddress) -> None:
        if len(batch) > 1 and OneSender.segments:
            control = [(socket.IPPROTO_UDP, _UDP_SEGMENT, struct.pack("=H", len(batch[0])))]
            try:
                await sock.sendmsg(batch, control, 0, addr)
                return
            except OSError as error:
                if error.errno not in _NO_SEGMENTS:
                    raise
                OneSender.segments = False
        for data in batch:
            await sock.sendto(data, addr)

    # Timers

    def _timer(self) -> float | None:
        """Return aioquic's next timer, not so close that the event loop runs for each datagram of its pacing."""
        timer_s, pacing_s = self._next_timer(), self._quic._pacing_at
        return timer_s if timer_s is None or timer_s != pacing_s else max(timer_s, time.time() + _PACE_S)

    async def _handle_timer_events(self) -> None:
        self._loop = trio.lowlevel.current_task()  # only the event loop calls this
        await self._handle_timer()

    def _arm(self) -> None:
        """Wake the event loop when its connection has a timer before the one that it waits for."""
        timer_s = self._timer()
        if timer_s is None:
            return
        if trio.lowlevel.current_task() is self._loop:
            self._armed_s = timer_s  # it looks at the timer before it waits
        elif timer_s < self._armed_s or self._armed_s <= time.time():
            self._armed_s = timer_s
            self._connection._signal_activity()
