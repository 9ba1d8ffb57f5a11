"""QUIC (/udp/…/quic-v1) by py-libp2p and aioquic, with its socket, its time limits and its end under our control.

Slower than TCP here (some MB/s, for its cost in CPU time): it is for peers that offer nothing else. What py-libp2p's
listener does by itself: its UDP socket shares the port with any other process (SO_REUSEPORT), a read gives up after
30 s of silence, and a dead peer is noticed after ten minutes.
"""

import logging
import secrets
import socket
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import partial
from ipaddress import ip_address
from weakref import WeakValueDictionary

import trio
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import NetworkAddress, QuicConnection
from aioquic.quic.packet import encode_quic_retry
from cryptography import x509
from libp2p.abc import IMuxedStream
from libp2p.crypto.keys import KeyPair
from libp2p.custom_types import TProtocol
from libp2p.peer.id import ID
from libp2p.transport.quic.config import QUICTransportConfig
from libp2p.transport.quic.connection import QUICConnection
from libp2p.transport.quic.listener import QUICListener, QUICPacketInfo
from libp2p.transport.quic.security import PeerAuthenticator
from libp2p.transport.quic.stream import QUICStream
from libp2p.transport.quic.transport import QUICTransport
from multiaddr import Multiaddr

from dep2p.errors import ListenError, ProtocolError
from dep2p.host.addresses import Address, parse_address, socket_address
from dep2p.host.connections.connection import Upgraded
from dep2p.host.connections.upgrade import UpgradeError, describe
from dep2p.host.counters import Counters
from dep2p.host.interface import MuxedConnection
from dep2p.host.resources.receiving import (
    STREAM_WINDOW_BYTES,
    STREAM_WINDOW_UNPROVEN_BYTES,
    WINDOW_UNPROVEN_BYTES,
    Receiving,
    TooMuchHeldError,
)
from dep2p.host.scopes import shielded
from dep2p.host.transports.listening_ports import source_towards
from dep2p.host.transports.quic_admission import DATAGRAM_BYTES_MIN, QuicAdmission, Start
from dep2p.host.transports.quic_certificate import certificate_key, channel_binding, verify_certificate
from dep2p.host.transports.quic_dialed import DialedConnections
from dep2p.host.transports.tcp import bind
from dep2p.host.upstream.byte_stream import MuxedByteStream
from dep2p.host.upstream.muxer import UpstreamMuxer
from dep2p.host.upstream.quic_internals import (
    acknowledged_of,
    aioquic_of,
    bound_connection_ids,
    bound_receiving,
    completed_handshake,
    dial_from,
    drop_held,
    forget_handshake,
    forget_initial_cid,
    held_by,
    is_handshake_complete,
    new_handshake,
    on_peer_close,
    open_early,
    peer_certificates,
    process_handshake,
    register_handshake,
    replace_receivers,
    say_goodbye,
    send_datagrams,
    server_configurations,
    take_over_receiving,
    transmit,
    unread_of,
)
from dep2p.host.upstream.quic_receiving import receive_datagrams
from dep2p.host.upstream.quic_sending import OneSender
from dep2p.limits import Limits
from dep2p.types import PeerId, peer_id_from_bytes

logger: logging.Logger = logging.getLogger("dep2p.host")

_ALPN = "libp2p"
_NEVER_S = 1e9
_BAD_CERTIFICATE = 0x100 + 42
"""TLS's alert as a QUIC error code (RFC 9001, section 4.8)."""
_CRYPTO_FRAME = 0x06
_CRYPTO_BUFFER_EXCEEDED = 0x0D
_HANDSHAKE_CHECK_S = 1.0
_CONNECTION_IDS_MAX = 64
"""Connection ids of one connection."""
_GOODBYE_S = 0.2
_RECEIVE_BYTES_MAX = 8_388_608
"""Unread bytes of one stream at most; a peer that sends more than its window gets a reset."""

OnInbound = Callable[[Upgraded, str], Awaitable[None]]
"""Takes an inbound connection and its remote multiaddr; never raises."""


def _why_it_ends(error: Exception, addr: tuple[str, int]) -> str:
    """The counter of a handshake that a datagram ends."""
    logger.debug("a QUIC handshake with %s cannot be read: %r", addr, error)
    return "inbound_quic_ended_memory" if isinstance(error, TooMuchHeldError) else "inbound_quic_malformed"


class _ReceivedBytes:
    """Accounts for what aioquic holds of one connection, and ends the connection when it is too much."""

    def __init__(self, quic: QuicConnection, count: Callable[[str], None]) -> None:
        self._quic = quic
        self._count = count
        self._receiving = Receiving()
        self._muxed: QUICConnection | None = None
        self._connection: MuxedConnection | None = None
        self._streams_seen: Callable[[], int] = lambda: 0
        bound_receiving(quic, self)

    @property
    def window_bytes(self) -> int:
        return self._receiving.window_bytes

    @property
    def stream_window_bytes(self) -> int:
        return self._receiving.stream_window_bytes

    def unread_bytes(self, stream_id: int) -> int:
        return 0 if self._muxed is None else unread_of(self._muxed, stream_id)

    def bind(self, muxed: QUICConnection, connection: MuxedConnection, streams_seen: Callable[[], int]) -> None:
        """The handshake is complete; ``streams_seen`` returns how many streams the connection's account has."""
        self._muxed, self._connection, self._streams_seen = muxed, connection, streams_seen
        self._receiving.bind(connection.resources)
        self.waiting_bytes()

    def waiting_bytes(self) -> int:
        held = held_by(self._quic, self._muxed, self._streams_seen())
        try:
            self._receiving.check(held)
        except TooMuchHeldError as error:
            drop_held(self._quic)
            if self._connection is not None:
                account = self._connection.resources.account
                if not account.is_closed:
                    account.end("connection", f"{account.name}: {error}")
            elif is_handshake_complete(self._quic):
                self._count("inbound_quic_ended_memory")
                self._quic.close(_CRYPTO_BUFFER_EXCEEDED, reason_phrase="too much came early")
            else:
                raise
            return 0
        return held.waiting_bytes


class ExclusiveListener(QUICListener):
    """A QUIC listener whose port belongs to it alone."""

    bound: Address | None = None

    def __init__(
        self, endpoint: "QuicEndpoint", configs: dict[TProtocol, QuicConfiguration], handshake_timeout_s: float
    ) -> None:
        super().__init__(
            transport=endpoint.transport,
            handler_function=endpoint.take_inbound,
            quic_configs=configs,
            config=endpoint.config,
            security_manager=endpoint.transport.get_security_manager(),
        )
        self.admission: QuicAdmission = QuicAdmission()
        self.dialed: DialedConnections = DialedConnections()
        self._endpoint = endpoint
        self._on_event = endpoint.count
        self._handshake_timeout_s = handshake_timeout_s
        self._handshakes: dict[int, tuple[QuicConnection, bytes]] = {}
        """Those under way, each with the client's first connection id."""
        bound_connection_ids(self, _CONNECTION_IDS_MAX)

    async def _process_packet(self, data: bytes, addr: tuple[str, int]) -> None:
        await super()._process_packet(data, addr[:2])  # an IPv6 sender has four parts, and upstream reads two

    async def _handle_new_connection(
        self, data: bytes, addr: tuple[str, int], packet_info: QUICPacketInfo
    ) -> QuicConnection | None:
        """Begin a handshake if its packet is whole, its address may be real and the limits allow it.

        py-libp2p makes a connection of each Initial packet, even of junk, and keeps it for 15 s.
        """
        if len(data) < DATAGRAM_BYTES_MIN:
            self._on_event("inbound_quic_dropped_short")
            return None
        if packet_info.version not in self._supported_versions:
            self._on_event("inbound_quic_other_version")
            await self._send_version_negotiation(addr, packet_info.source_cid)
            return None
        now_s = time.time()
        initial_cid = packet_info.destination_cid
        decision = self.admission.decide(addr, initial_cid, packet_info.token or b"", now_s)
        if decision == "retry":
            await self._send_retry(addr, packet_info, now_s)
            return None
        if not isinstance(decision, Start):
            self._on_event(f"inbound_quic_dropped_{decision}")
            return None
        quic = new_handshake(self, packet_info.version, decision.original_destination_cid, decision.retry_source_cid)
        if quic is None:
            return None
        self._endpoint.watch(quic)
        try:
            quic.receive_datagram(data, addr, now_s)
            answer = [datagram for datagram, _ in quic.datagrams_to_send(now_s)]
        except Exception as error:
            self._on_event(_why_it_ends(error, addr))
            return None
        if not answer:
            self._on_event("inbound_quic_dropped_junk")  # nothing in it could be decrypted: no state is kept
            return None
        ended = self.admission.begin(id(quic), addr, now_s)
        if ended is not None:
            await self._forget(ended, "inbound_quic_dropped_pending_max")
        self._handshakes[id(quic)] = quic, initial_cid
        cid = await register_handshake(self, quic, initial_cid, addr)
        await process_handshake(self, quic, addr, cid)
        await send_datagrams(self, answer, addr)
        return quic

    async def _send_retry(self, addr: tuple[str, int], packet: QUICPacketInfo, now_s: float) -> None:
        self._on_event("inbound_quic_retry")
        source_cid = secrets.token_bytes(8)
        try:
            retry = encode_quic_retry(
                version=packet.version,
                source_cid=source_cid,
                destination_cid=packet.source_cid,
                original_destination_cid=packet.destination_cid,
                retry_token=self.admission.token(addr, packet.destination_cid, source_cid, now_s),
            )
        except ValueError:  # an id of a length that does not exist
            self._on_event("inbound_quic_malformed")
            return
        await send_datagrams(self, [retry], addr)

    async def _forget(self, key: int, why: str) -> None:
        self.admission.end(key)
        found = self._handshakes.pop(key, None)
        if found is not None:
            self._on_event(why)
            await forget_handshake(self, *found)

    async def _periodic_cleanup_loop(self) -> None:
        clean_up = super()._periodic_cleanup_loop
        async with trio.open_nursery() as nursery:
            nursery.start_soon(clean_up)
            while True:
                await trio.sleep(_HANDSHAKE_CHECK_S)
                await self.end_handshakes(time.time())

    async def end_handshakes(self, now_s: float) -> None:
        """Forget the handshakes that are complete, or late at ``now_s``."""
        for key in self.admission.keys():
            quic, initial_cid = self._handshakes[key]
            if is_handshake_complete(quic):
                self.admission.end(key)
                del self._handshakes[key]
                await forget_initial_cid(self, initial_cid)
            elif self.admission.is_late(key, now_s, self._handshake_timeout_s):
                await self._forget(key, "inbound_quic_handshake_timeout")

    async def _handle_pending_connection_packet(
        self, quic_conn: QuicConnection, data: bytes, addr: tuple[str, int], destination_connection_id: bytes
    ) -> None:
        """End a handshake that makes aioquic raise, with an alert.

        An X.509 version that does not exist is one such case: py-libp2p logs a traceback for each packet, and keeps the
        handshake for 15 s.
        """
        receive = quic_conn.receive_datagram

        def receive_or_end(data: bytes, addr: NetworkAddress, now: float) -> None:
            try:
                receive(data, addr, now)
            except Exception as error:
                code = _CRYPTO_BUFFER_EXCEEDED if isinstance(error, TooMuchHeldError) else _BAD_CERTIFICATE
                quic_conn.close(code, _CRYPTO_FRAME)
                self._on_event(_why_it_ends(error, addr))

        quic_conn.receive_datagram = receive_or_end  # type: ignore[method-assign]
        try:
            await super()._handle_pending_connection_packet(quic_conn, data, addr, destination_connection_id)
        finally:
            quic_conn.receive_datagram = receive  # type: ignore[method-assign]

    async def _handle_incoming_packets(self) -> None:
        await receive_datagrams(self, self.dialed.find)

    async def _create_socket(self, host: str, port: int) -> trio.socket.SocketType:
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

    def __init__(
        self,
        muxed: IMuxedStream,
        connection: MuxedConnection,
        nursery: trio.Nursery,
        *,
        on_done: Callable[[MuxedByteStream], None],
        close_timeout_s: float,
    ) -> None:
        """Take over from py-libp2p's stream; before anything else is awaited."""
        super().__init__(muxed, connection, nursery, on_done=on_done, close_timeout_s=close_timeout_s)
        assert isinstance(muxed, QUICStream)
        if muxed.is_initiator:
            # aioquic takes a stream for finished when a later one was written to first, and py-libp2p's writes race.
            open_early(muxed)
        self._quic = muxed.muxed_conn
        self._stream_id = int(muxed.stream_id)
        self._received, self._has_fin = take_over_receiving(muxed)
        self._read_bytes = 0
        """Bytes read since the peer was last given a wider window for them."""
        self._arrived = trio.Event()
        take, handle_reset = muxed.handle_data_received, muxed.handle_reset

        async def take_data(data: bytes, end_stream: bool) -> None:
            if len(self._received) + len(data) > _RECEIVE_BYTES_MAX:
                self._fail(f"the reader is over {_RECEIVE_BYTES_MAX} bytes behind")
                return
            if data and not self._reserve(len(data)):
                self._fail("the connection holds too many unread bytes")
                return
            self._received += data
            self._has_fin = self._has_fin or end_stream
            self._arrived.set()
            await take(b"", end_stream)

        async def take_reset(error_code: int) -> None:
            self._fail(f"the peer reset the stream (code {error_code})")
            await handle_reset(error_code)

        replace_receivers(muxed, take_data, take_reset)

    async def _pull(self, max_bytes: int) -> bytes:
        while not self._received and not self._has_fin:
            self._arrived = trio.Event()
            await self._arrived.wait()
        data = bytes(self._received[:max_bytes])
        del self._received[:max_bytes]
        self._release(len(data))
        self._read_bytes += len(data)
        if self._read_bytes >= STREAM_WINDOW_UNPROVEN_BYTES // 2:
            self._read_bytes = 0
            self._spawn(self._widen)
        return data

    @property
    def granted_bytes(self) -> int:
        return acknowledged_of(self._quic, self._stream_id)

    async def _widen(self) -> None:
        await transmit(self._quic)

    def reserve_stream(self) -> bool:
        return super().reserve_stream() and self._reserve(len(self._received))

    def _settle(self) -> None:
        self._received.clear()
        super()._settle()


class _QuicMuxer(UpstreamMuxer):
    """Ends at once when the peer says goodbye; py-libp2p waits until aioquic has drained the connection, about 2 s."""

    def __init__(self, connection: QUICConnection, received: _ReceivedBytes) -> None:
        super().__init__(connection, _QuicByteStream)
        self._quic = connection
        self._received = received
        on_peer_close(connection, self._peer_closed)

    def bind(self, connection: MuxedConnection) -> None:
        super().bind(connection)
        self._received.bind(self._quic, connection, lambda: len(self._streams))

    def fail(self, reason: str) -> None:
        super().fail(reason)
        drop_held(aioquic_of(self._quic))  # which lives on for a while, to answer late packets

    def _peer_closed(self) -> None:
        if self._connection is not None:
            self._connection.abort("the peer closed the connection")

    async def close(self) -> None:
        # First, so that py-libp2p cannot end each stream in good order: the peer would take what it has for everything.
        if not self._quic.is_closed:
            with trio.move_on_after(_GOODBYE_S):
                await say_goodbye(self._quic)
        await super().close()


class _StrictAuthenticator(PeerAuthenticator):
    """Refuses what the specification refuses before py-libp2p goes on; its own check accepts any signature."""

    def verify_peer_certificate(self, certificate: x509.Certificate, expected_peer_id: ID | None = None) -> ID:
        peer = ID(verify_certificate(certificate, (), datetime.now(UTC)).peer_id_bytes)
        if expected_peer_id is not None and peer != expected_peer_id:
            raise ProtocolError(f"the peer is {peer}, not {expected_peer_id} as expected")
        return peer


def _verified(connection: QUICConnection) -> tuple[PeerId, bytes]:
    """The peer that the TLS handshake of a connection has proved, and its channel binding. Raises ProtocolError.

    Nothing here relies on what py-libp2p says of the connection.
    """
    tls = completed_handshake(connection)
    if tls is None:
        raise ProtocolError("the TLS handshake is not complete")
    if tls.alpn_negotiated != _ALPN:
        raise ProtocolError(f"the peer speaks {tls.alpn_negotiated!r} on QUIC, not {_ALPN!r}")
    certificate, chain = peer_certificates(tls)
    if certificate is None or tls.certificate is None:
        raise ProtocolError("the peer sent no certificate")
    public_key = verify_certificate(certificate, chain, datetime.now(UTC))
    keys = [certificate_key(tls.certificate), certificate_key(certificate)]
    if not aioquic_of(connection).configuration.is_client:
        keys.reverse()
    return peer_id_from_bytes(public_key.peer_id_bytes), channel_binding(*keys)


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
            # As much as a proven peer's window, so that the buffer does not end what the path can carry.
            STREAM_SEND_BUFFER_HIGH_WATERMARK=STREAM_WINDOW_BYTES,
            STREAM_SEND_BUFFER_LOW_WATERMARK=STREAM_WINDOW_BYTES // 2,
            STREAM_FLOW_CONTROL_WINDOW=STREAM_WINDOW_UNPROVEN_BYTES,
            CONNECTION_FLOW_CONTROL_WINDOW=WINDOW_UNPROVEN_BYTES,
            enable_draft29=False,
        )
        self.transport: QUICTransport = QUICTransport(key_pair.private_key, config)
        self.transport.get_security_manager().peer_authenticator = _StrictAuthenticator()
        self._configs = server_configurations(self.transport)
        self.config: QUICTransportConfig = config
        self._listeners: list[ExclusiveListener] = []
        self._received: WeakValueDictionary[int, _ReceivedBytes] = WeakValueDictionary()
        """By the id of aioquic's connection, which keeps its own alive."""

    def watch(self, quic: QuicConnection) -> _ReceivedBytes:
        """Bound what aioquic holds for a connection. Idempotent."""
        found = self._received.get(id(quic))
        if found is None:
            found = self._received[id(quic)] = _ReceivedBytes(quic, self.count)
        return found

    def count(self, name: str) -> None:
        """Add one to the host's counter ``name``."""
        self._counters.add(name)

    async def run(self, *, ready: Callable[[], object]) -> None:
        """Run until cancelled; ``ready`` is called when the other methods may be used."""
        async with trio.open_nursery() as nursery:
            self.transport.set_background_nursery(nursery)
            ready()
            await trio.sleep_forever()

    async def listen(self, address: Address) -> Address:
        """Listen, and return the address with the real port. Raises ListenError."""
        listener = ExclusiveListener(self, self._configs, self._limits.handshake_timeout_s)
        try:
            await listener.listen(Multiaddr(address.text))
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, ListenError):
                cause = cause.__cause__
            raise cause or ListenError(f"cannot listen on {address.text}: {describe(error)}") from None
        if listener.bound is None:
            raise ListenError(f"cannot listen on {address.text}: the QUIC listener did not start")
        self._listeners.append(listener)
        return listener.bound

    async def take_inbound(self, connection: QUICConnection) -> None:
        """Verify the peer of a connection that the listener accepted, and hand it on."""
        host, port = connection.get_remote_address()
        remote = socket_address(host, port, "udp/quic-v1")
        try:
            peer, binding = _verified(connection)
        except ProtocolError as error:
            self._counters.add("inbound_quic_refused")
            logger.warning("refused a QUIC connection from %s: %s", remote, error)
            with shielded(self._limits.close_timeout_s):
                await connection.close()
            return
        try:
            await self._on_inbound(Upgraded(self._muxer(connection), peer, binding), remote)
        except Exception:
            self._counters.add("inbound_quic_failed")
            logger.exception("an inbound QUIC connection could not be taken over")

    def _muxer(self, connection: QUICConnection) -> _QuicMuxer:
        OneSender(connection)
        return _QuicMuxer(connection, self.watch(aioquic_of(connection)))

    async def dial(self, address: Address, peer: PeerId) -> Upgraded:
        """Dial a peer. Raises UpgradeError, for another peer than ``peer`` too."""
        listener = self._listener_towards(address)
        text = Multiaddr(f"{address.text}/p2p/{peer}")
        connection: QUICConnection
        try:
            if listener is None:
                connection = await self.transport.dial(text)
            else:
                target = str(ip_address(address.host)), address.port  # as the socket names senders
                dialed = partial(listener.dialed.add, target)
                connection = await dial_from(listener, self.transport, text, target, ID.from_string(peer), dialed)
        except Exception as error:
            raise UpgradeError(describe(error)) from error
        try:
            answering, binding = _verified(connection)
            if answering != peer:
                raise ProtocolError(f"another node answers there: {answering}")
        except ProtocolError as error:
            with shielded(self._limits.close_timeout_s):
                await connection.close()
            raise UpgradeError(str(error)) from error
        port = None if listener is None or listener.bound is None else listener.bound.port
        return Upgraded(self._muxer(connection), peer, binding, listening_port=port)

    def _listener_towards(self, address: Address) -> ExclusiveListener | None:
        """The listener whose socket can send to an IP address: that of its family and of the interface."""
        source = None if address.family == "dns" or not self._listeners else source_towards(address)
        for listener in self._listeners:
            bound = listener.bound
            if source is not None and bound is not None and bound.family == address.family:
                if bound.is_wildcard or ip_address(bound.host) == ip_address(source):
                    return listener
        return None

    async def send_random(self, address: Address, size_bytes: int) -> bool:
        """Send a datagram of random bytes from the socket that would dial the address; return False when there is none.

        It opens the way of the peer's datagrams through this node's NAT router, and is no QUIC packet: those have the
        second bit set (RFC 9000, section 17).
        """
        listener = self._listener_towards(address)
        if listener is None:
            return False
        data = secrets.token_bytes(size_bytes)
        await send_datagrams(listener, [bytes([data[0] & 0x3F]) + data[1:]], (address.host, address.port))
        return True

    async def close(self) -> None:
        """Close the sockets; the connections were closed before."""
        for listener in self._listeners:
            await listener.close()
        await self.transport.close()
