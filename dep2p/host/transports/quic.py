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
from libp2p.transport.quic.config import QUICTransportConfig
from libp2p.transport.quic.connection import QUICConnection
from libp2p.transport.quic.listener import QUICListener
from libp2p.transport.quic.transport import QUICTransport
from multiaddr import Multiaddr

from dep2p.errors import ListenError
from dep2p.host.addresses import Address, parse_address, socket_address
from dep2p.host.connections.upgrade import Upgraded, UpgradeError, describe
from dep2p.host.counters import Counters
from dep2p.host.scopes import shielded
from dep2p.host.transports.tcp import bind
from dep2p.host.upstream.byte_stream import MuxedByteStream
from dep2p.host.upstream.muxer import UpstreamMuxer
from dep2p.limits import Limits
from dep2p.types import PeerId

logger = logging.getLogger("dep2p.host")

_NEVER_S = 1e9
_GOODBYE_S = 0.2
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
    """Takes what arrives itself, as soon as aioquic has it in order.

    py-libp2p's own read loses the last bytes when they come with the end of the stream at the wrong moment, takes a
    lost connection for such an end, and drops what comes while its receive buffer is full.
    """

    def watch(self) -> Self:
        """Take over from py-libp2p's stream; before anything else is awaited."""
        muxed = self._muxed
        if muxed.is_initiator:
            # aioquic takes a stream for finished when a later one was written to first, and py-libp2p's writes race.
            muxed._connection._quic.send_stream_data(int(muxed.stream_id), b"")
        self._received = muxed._receive_buffer
        self._has_fin = bool(muxed._read_closed)
        self._arrived = trio.Event()
        take, handle_reset = muxed.handle_data_received, muxed.handle_reset

        async def take_data(data: bytes, end_stream: bool) -> None:
            if len(self._received) + len(data) > _RECEIVE_BYTES_MAX:
                self._fail(f"the reader is over {_RECEIVE_BYTES_MAX} bytes behind")
                return
            self._received += data
            self._has_fin = self._has_fin or end_stream
            self._arrived.set()
            await take(b"", end_stream)

        async def take_reset(error_code: int) -> None:
            self._fail(f"the peer reset the stream (code {error_code})")
            await handle_reset(error_code)

        muxed.handle_data_received, muxed.handle_reset = take_data, take_reset
        return self

    async def _pull(self, max_bytes: int) -> bytes:
        while not self._received and not self._has_fin:
            self._arrived = trio.Event()
            await self._arrived.wait()
        data = bytes(self._received[:max_bytes])
        del self._received[:max_bytes]
        return data


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

    async def close(self) -> None:
        # First, so that py-libp2p cannot end each stream in good order: the peer would take what it has for everything.
        quic = self._muxed
        if not quic.is_closed:
            quic._quic.close()
            with trio.move_on_after(_GOODBYE_S):
                await quic._transmit()
        await super().close()


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
