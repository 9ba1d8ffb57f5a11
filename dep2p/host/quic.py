"""QUIC (/udp/…/quic-v1) by py-libp2p and aioquic, with its socket, its time limits and its end under our control.

Slower than TCP here (a few MB/s): it is for peers that offer nothing else. What py-libp2p's listener does by itself:
its UDP socket shares the port with any other process (SO_REUSEPORT), a read gives up after 30 s of silence, and a dead
peer is noticed after ten minutes.
"""

import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Self, cast

import trio
from libp2p.crypto.keys import KeyPair
from libp2p.network.stream.exceptions import StreamEOF
from libp2p.transport.quic.config import QUICTransportConfig
from libp2p.transport.quic.connection import QUICConnection
from libp2p.transport.quic.exceptions import QUICStreamClosedError
from libp2p.transport.quic.listener import QUICListener
from libp2p.transport.quic.transport import QUICTransport
from multiaddr import Multiaddr

from dep2p.errors import ListenError
from dep2p.host.addresses import Address, parse_address, socket_address
from dep2p.host.counting import Counters
from dep2p.host.listen import bind
from dep2p.host.scopes import shielded
from dep2p.host.streams import MuxedByteStream
from dep2p.host.upgrade import Upgraded, UpgradeError, describe
from dep2p.host.upstream_muxer import UpstreamMuxer
from dep2p.limits import Limits
from dep2p.types import PeerId

logger = logging.getLogger("dep2p.host")

_NEVER_S = 1e9
_RECEIVE_BYTES_MAX = 8_388_608
"""Unread bytes of one stream; aioquic grants window without asking, so over this the stream is reset."""
_STREAM_WINDOW_BYTES = 1_048_576
_CONNECTION_WINDOW_BYTES = 8_388_608

OnInbound = Callable[[Upgraded, str], Awaitable[None]]
"""Takes an inbound connection and its remote multiaddr; never raises."""


class _ExclusiveListener(QUICListener):
    """A QUIC listener whose port belongs to it alone."""

    bound: Address | None = None

    async def _create_socket(self, host: str, port: int) -> Any:
        address = parse_address(socket_address(host, port, "udp/quic-v1"))
        sock = await bind(address, socket.SOCK_DGRAM)
        bound_host, bound_port = sock.getsockname()[:2]
        self.bound = parse_address(socket_address(str(bound_host), int(bound_port), "udp/quic-v1"))
        return sock


class _QuicByteStream(MuxedByteStream):
    """Tells the peer's real end of a stream from a lost connection, and never loses data from its middle.

    py-libp2p closes a stream in the same way for both, and drops what comes while its receive buffer is full.
    """

    _has_fin = False

    def watch(self) -> Self:
        """Look at what arrives before py-libp2p's stream does."""
        muxed = self._muxed
        if muxed.is_initiator:
            # aioquic takes a stream for finished when a later one was written to first, and py-libp2p's writes race.
            muxed._connection._quic.send_stream_data(int(muxed.stream_id), b"")
        take = muxed.handle_data_received
        self._has_fin = bool(muxed._read_closed)

        async def checked(data: bytes, end_stream: bool) -> None:
            if data and len(muxed._receive_buffer) + len(data) > muxed.MAX_RECEIVE_BUFFER_SIZE:
                self._fail(f"the reader is over {muxed.MAX_RECEIVE_BUFFER_SIZE} bytes behind")
                return
            self._has_fin = self._has_fin or end_stream
            await take(data, end_stream)

        muxed.handle_data_received = checked
        return self

    def _is_end(self, error: Exception) -> bool:
        return self._has_fin and isinstance(error, QUICStreamClosedError | StreamEOF) and not self._muxed.is_reset()


def _quic_stream(*args: Any, **kwargs: Any) -> _QuicByteStream:
    return _QuicByteStream(*args, **kwargs).watch()


class _QuicMuxer(UpstreamMuxer):
    """Ends at once when the peer says goodbye; py-libp2p waits until aioquic has drained the connection, about 2 s."""

    def __init__(self, connection: QUICConnection) -> None:
        super().__init__(connection, _quic_stream)
        quic = cast(Any, connection)
        signal = quic._signal_activity

        def observed() -> None:
            signal()
            if quic._quic._close_event is not None and self._connection is not None:
                self._connection.abort("the peer closed the connection")

        quic._signal_activity = observed


class QuicEndpoint:
    """Listens and dials over QUIC. `run` carries the background tasks of aioquic's connections."""

    def __init__(self, key_pair: KeyPair, limits: Limits, counters: Counters, on_inbound: OnInbound) -> None:
        self._limits = limits
        self._counters = counters
        self._on_inbound = on_inbound
        config = QUICTransportConfig(
            # Liveness probes of ours go out within this time, so only a silent peer runs into it.
            idle_timeout=2 * (limits.liveness_interval_s + limits.liveness_timeout_s),
            CONNECTION_HANDSHAKE_TIMEOUT=limits.handshake_timeout_s,
            STREAM_READ_TIMEOUT=_NEVER_S,
            STREAM_WRITE_TIMEOUT=_NEVER_S,
            MAX_STREAM_RECEIVE_BUFFER=_RECEIVE_BYTES_MAX,
            STREAM_FLOW_CONTROL_WINDOW=_STREAM_WINDOW_BYTES,
            CONNECTION_FLOW_CONTROL_WINDOW=_CONNECTION_WINDOW_BYTES,
            enable_draft29=False,
        )
        self._transport = QUICTransport(key_pair.private_key, config)
        self._configs = {
            version: one
            for version, one in self._transport._quic_configs.items()  # pyright: ignore[reportPrivateUsage]
            if version.endswith("_server")
        }
        self._config = config
        self._listeners: list[_ExclusiveListener] = []

    async def run(self, *, ready: Callable[[], object]) -> None:
        """Until cancelled; ``ready`` is called when the rest may be used."""
        async with trio.open_nursery() as nursery:
            self._transport.set_background_nursery(nursery)
            ready()
            await trio.sleep_forever()

    async def listen(self, address: Address) -> Address:
        """Listen, and return the address with the real port. Raises ListenError."""
        listener = _ExclusiveListener(
            transport=self._transport,
            handler_function=self._inbound,
            quic_configs=self._configs,
            config=self._config,
            security_manager=self._transport.get_security_manager(),
        )
        try:
            await listener.listen(address.multiaddr)
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, ListenError):
                cause = cause.__cause__
            raise cause or ListenError(f"cannot listen on {address.text}: {describe(error)}") from None
        if listener.bound is None:
            raise ListenError(f"cannot listen on {address.text}: the QUIC listener did not start")
        self._listeners.append(listener)
        return listener.bound

    async def _inbound(self, connection: QUICConnection) -> None:
        try:
            host, port = connection.get_remote_address()
            remote = socket_address(host, port, "udp/quic-v1")
            muxer = _QuicMuxer(connection)
            await self._on_inbound(Upgraded(muxer, PeerId(str(connection.peer_id))), remote)
        except Exception:
            self._counters.add("inbound_quic_failed")
            logger.exception("an inbound QUIC connection could not be taken over")

    async def dial(self, address: Address, peer: PeerId) -> Upgraded:
        """Raises UpgradeError, for another peer than ``peer`` too."""
        try:
            connection = await self._transport.dial(Multiaddr(f"{address.text}/p2p/{peer}"))
        except Exception as error:
            raise UpgradeError(describe(error)) from error
        if str(connection.peer_id) != peer:
            with shielded(self._limits.close_timeout_s):
                await connection.close()
            raise UpgradeError(f"another node answers there: {connection.peer_id}")
        return Upgraded(_QuicMuxer(connection), peer)

    async def close(self) -> None:
        """Close the sockets; the connections were closed before."""
        for listener in self._listeners:
            await listener.close()
        await self._transport.close()
