"""The private members of py-libp2p's and aioquic's QUIC classes that this package uses: here and nowhere else."""

# pyright: reportPrivateUsage=false

import copy
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Protocol

from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import NetworkAddress, QuicConnection
from aioquic.quic.events import StreamDataReceived
from aioquic.quic.packet_builder import QuicPacketBuilder
from aioquic.quic.rangeset import RangeSet
from aioquic.quic.recovery import QuicPacketSpace
from aioquic.quic.stream import QuicStream
from aioquic.tls import Context
from cryptography import x509
from libp2p.custom_types import TProtocol
from libp2p.peer.id import ID
from libp2p.transport.quic.connection import QUICConnection
from libp2p.transport.quic.listener import QUICListener, ServerQuicConnection
from libp2p.transport.quic.stream import QUICStream
from libp2p.transport.quic.transport import QUICTransport
from libp2p.transport.quic.utils import create_server_config_from_base, custom_quic_version_to_wire_format
from multiaddr import Multiaddr

from dep2p.errors import StreamClosedError
from dep2p.host.resources.receiving import Held


class TakeData(Protocol):
    """Takes data of a stream; ``end_stream``: nothing follows it."""

    async def __call__(self, data: bytes, end_stream: bool) -> None: ...


class TakeReset(Protocol):
    """Takes the code with which the peer has reset a stream."""

    async def __call__(self, error_code: int) -> None: ...


def aioquic_of(connection: QUICConnection) -> QuicConnection:
    """Return aioquic's connection under py-libp2p's."""
    return connection._quic


def server_configurations(transport: QUICTransport) -> dict[TProtocol, QuicConfiguration]:
    """Return the configurations for listening, by version."""
    return {version: one for version, one in transport._quic_configs.items() if version.endswith("_server")}


def is_handshake_complete(quic: QuicConnection) -> bool:
    """Whether the handshake of aioquic's connection is over."""
    return quic._handshake_complete


def new_handshake(
    listener: QUICListener, version: int, original_destination_cid: bytes, retry_source_cid: bytes | None
) -> QuicConnection | None:
    """The server's side of a handshake; None for a QUIC version that is not spoken."""
    base = next(
        (one for name, one in listener._quic_configs.items() if custom_quic_version_to_wire_format(name) == version),
        None,
    )
    if base is None:
        return None
    quic = ServerQuicConnection(
        configuration=create_server_config_from_base(
            base_config=base, security_manager=listener._security_manager, transport_config=listener._config
        ),
        original_destination_connection_id=original_destination_cid,
        retry_source_connection_id=retry_source_cid,
    )
    quic._replenish_connection_ids()
    quic._local_max_streams_uni.value = quic._local_max_streams_uni.sent = 0  # libp2p uses none
    return quic


async def register_handshake(
    listener: QUICListener, quic: QuicConnection, initial_cid: bytes, addr: tuple[str, int]
) -> bytes:
    """Route packets to a handshake by its own connection id, which is returned, and by the client's first one."""
    registry, cid = listener._registry, quic._host_cids[0].cid
    await registry.set_sequence_counter(cid, 0)
    await registry.register_pending(cid, quic, addr, 0)
    listener._pending_cid_by_quic_id[id(quic)] = cid
    await registry.register_initial_connection_id(initial_cid, quic, addr, 0)
    return cid


async def forget_handshake(listener: QUICListener, quic: QuicConnection, initial_cid: bytes) -> None:
    """Drop every trace of a handshake that came to nothing."""
    registry = listener._registry
    listener._pending_cid_by_quic_id.pop(id(quic), None)
    await registry.remove_initial_connection_id(initial_cid)
    registry._pending_created_at.pop(initial_cid, None)
    for each in quic._host_cids:
        await registry.remove_pending_connection(each.cid)
        await registry.remove_connection_id(each.cid)
        registry._connection_sequence_counters.pop(each.cid, None)


async def forget_initial_cid(listener: QUICListener, initial_cid: bytes) -> None:
    """The handshake is complete: the client uses the server's connection ids from now on."""
    await listener._registry.remove_initial_connection_id(initial_cid)
    listener._registry._pending_created_at.pop(initial_cid, None)


async def process_handshake(listener: QUICListener, quic: QuicConnection, addr: tuple[str, int], cid: bytes) -> None:
    """Let py-libp2p take the events of a handshake."""
    await listener._process_quic_events(quic, addr, cid)


async def send_datagrams(listener: QUICListener, datagrams: Iterable[bytes], addr: tuple[str, int]) -> None:
    """Send from the listener's socket; a full or closed socket loses them, as any network may."""
    sock = listener._socket
    if sock is not None:
        for datagram in datagrams:
            with suppress(OSError):
                await sock.sendto(datagram, addr)


def registry_sizes(listener: QUICListener) -> list[int]:
    """Entries of each table that a handshake is in."""
    registry = listener._registry
    return [
        len(listener._pending_cid_by_quic_id),
        len(registry._initial_connection_ids),
        len(registry._pending),
        len(registry._pending_created_at),
        len(registry._connection_id_to_addr),
        len(registry._connection_id_sequences),
        len(registry._connection_sequence_counters),
    ]


def bound_connection_ids(listener: QUICListener, ids_max: int) -> None:
    """Let no connection have more than ``ids_max`` ids: py-libp2p takes each unknown one of a known address."""
    registry = listener._registry
    register = registry.register_new_connection_id_for_existing_conn

    async def bounded(
        new_connection_id: bytes, connection: QUICConnection, addr: tuple[str, int], sequence: int | None = None
    ) -> None:
        if registry._connection_cid_counts.get(connection, 0) < ids_max:
            await register(new_connection_id, connection, addr, sequence)

    registry.register_new_connection_id_for_existing_conn = bounded  # type: ignore[method-assign]


def completed_handshake(connection: QUICConnection) -> Context | None:
    """Return the TLS state, once the handshake is complete."""
    quic = connection._quic
    return quic.tls if quic._handshake_complete else None


def peer_certificates(tls: Context) -> tuple[x509.Certificate | None, list[x509.Certificate]]:
    """Return the certificate of the peer, and those that it sent with it."""
    return tls._peer_certificate, tls._peer_certificate_chain


def on_peer_close(connection: QUICConnection, peer_closed: Callable[[], None]) -> None:
    """Call ``peer_closed`` as soon as the peer says goodbye; from then on at each packet."""
    signal = connection._signal_activity

    def observed() -> None:
        signal()
        if connection._quic._close_event is not None:
            peer_closed()

    connection._signal_activity = observed  # type: ignore[method-assign]


async def say_goodbye(connection: QUICConnection) -> None:
    """Close aioquic's connection and send the end to the peer."""
    connection._quic.close()
    await connection._transmit()


def open_early(stream: QUICStream) -> None:
    """Announce a stream of ours to aioquic before it is written to. Raises StreamClosedError when it is finished
    already, because its connection ends at this moment."""
    try:
        stream._connection._quic.send_stream_data(int(stream.stream_id), b"")
    except ValueError as error:
        raise StreamClosedError(f"the connection is ending: {error}") from None


def take_over_receiving(stream: QUICStream) -> tuple[bytearray, bool]:
    """Return the buffer of received bytes, and whether the end has come."""
    return stream._receive_buffer, stream._read_closed


def replace_receivers(stream: QUICStream, take_data: TakeData, take_reset: TakeReset) -> None:
    """Pass data and resets to these two from now on."""
    stream.handle_data_received = take_data  # type: ignore[method-assign]
    stream.handle_reset = take_reset  # type: ignore[method-assign]


def held_by(quic: QuicConnection, connection: QUICConnection | None, streams_seen: int) -> Held:
    """Return what aioquic holds, and py-libp2p before its streams are accepted.

    Drops the rest of streams that have ended: aioquic keeps it until this node has ended its side. ``streams_seen``:
    how many streams the connection's account has.
    """
    waiting = ranges = 0
    for stream in quic._streams.values():
        receiver = stream.receiver
        if receiver._buffer:
            if receiver.is_finished:
                receiver._buffer.clear()
                receiver._ranges = RangeSet()
                continue
            waiting += len(receiver._buffer)
            ranges += len(receiver._ranges)
    crypto = 0
    for stream in quic._crypto_streams.values():
        if stream.receiver._buffer:
            crypto += len(stream.receiver._buffer)
            ranges += len(stream.receiver._ranges)
    for event in quic._events:
        if isinstance(event, StreamDataReceived):
            waiting += len(event.data)
    if connection is not None:
        for unaccepted in connection._stream_accept_queue:
            waiting += len(unaccepted._receive_buffer)
    return Held(waiting, crypto, ranges, max(0, len(quic._streams) - streams_seen))


def drop_held(quic: QuicConnection) -> None:
    """Release what aioquic holds of a connection that ends."""
    for stream in [*quic._streams.values(), *quic._crypto_streams.values()]:
        stream.receiver._buffer.clear()
        stream.receiver._ranges = RangeSet()
    quic._events.clear()


class GrantWindows(Protocol):
    """The windows that a connection grants."""

    @property
    def window_bytes(self) -> int: ...

    @property
    def stream_window_bytes(self) -> int: ...

    def waiting_bytes(self) -> int:
        """Called after each datagram: bytes that have come and wait. When it raises, the datagram fails."""
        ...

    def unread_bytes(self, stream_id: int) -> int:
        """Bytes of a stream that have left aioquic and wait for their reader."""
        ...


def bound_receiving(quic: QuicConnection, windows: GrantWindows) -> None:
    """Grant what ``windows`` says beyond what was read, in place of twice as much each time."""
    receive = quic.receive_datagram
    write_limits, write_stream_limits = quic._write_connection_limits, quic._write_stream_limits

    def receive_and_check(data: bytes, addr: NetworkAddress, now: float) -> None:
        receive(data, addr, now)
        windows.waiting_bytes()

    def write_bounded(builder: QuicPacketBuilder, space: QuicPacketSpace) -> None:
        limit, most = quic._local_max_data, windows.window_bytes
        used = limit.used
        if limit.value - used <= most // 2:
            limit.value = max(limit.value, used - windows.waiting_bytes() + most)
        limit.used = 0  # else aioquic doubles the limit when half of it is used
        try:
            write_limits(builder=builder, space=space)
        finally:
            limit.used = used

    def write_stream_bounded(builder: QuicPacketBuilder, space: QuicPacketSpace, stream: QuicStream) -> None:
        receiver, granted, most = stream.receiver, stream.max_stream_data_local, windows.stream_window_bytes
        highest = receiver.highest_offset
        if granted and not receiver.is_finished and granted - highest <= most // 2:
            read = receiver.starting_offset() - windows.unread_bytes(stream.stream_id or 0)
            stream.max_stream_data_local = max(granted, read + most)
        receiver.highest_offset = 0  # for the same reason
        try:
            write_stream_limits(builder=builder, space=space, stream=stream)
        finally:
            receiver.highest_offset = highest

    quic.receive_datagram = receive_and_check  # type: ignore[method-assign]
    quic._write_connection_limits = write_bounded  # type: ignore[method-assign]
    quic._write_stream_limits = write_stream_bounded  # type: ignore[method-assign]


def unread_of(connection: QUICConnection, stream_id: int) -> int:
    """Return how many bytes of a stream wait in its buffer, which is also that of `take_over_receiving`."""
    stream = connection._streams.get(stream_id)
    return 0 if stream is None else len(stream._receive_buffer)


def acknowledged_of(connection: QUICConnection, stream_id: int) -> int:
    """Return how many bytes of a stream of ours the peer has acknowledged without a gap; 0 once aioquic has dropped
    it."""
    stream = connection._quic._streams.get(stream_id)
    return 0 if stream is None else stream.sender._buffer_start


class SharedSocketConnection(QUICConnection):
    """A dialed connection on the socket of a listener, which takes its datagrams (`receive_datagrams`)."""

    async def _initiate_connection(self) -> None:
        self._quic.connect(self._remote_addr, now=time.time())
        await self._transmit()

    async def _client_packet_receiver(self) -> None:
        """Nothing: the listener reads the socket."""

    def has_id(self, connection_id: bytes) -> bool:
        """Whether the connection has given its peer this id to send to."""
        return any(each.cid == connection_id for each in self._quic._host_cids)

    @property
    def target(self) -> tuple[str, int]:
        """The address that was dialed."""
        return self._remote_addr


async def dial_from(
    listener: QUICListener,
    transport: QUICTransport,
    address: Multiaddr,
    target: tuple[str, int],
    peer: ID,
    made: Callable[[SharedSocketConnection], None],
) -> SharedSocketConnection:
    """Dial from a listener's socket; ``made`` is called before the first datagram leaves. Raises for any failure."""
    configuration = copy.copy(transport._quic_configs[TProtocol("quic-v1_client")])
    configuration.is_client = True
    nursery, sock = transport._background_nursery, listener._socket
    if nursery is None or sock is None:
        raise StreamClosedError("the QUIC listener is closed")
    connection = SharedSocketConnection(
        quic_connection=QuicConnection(configuration=configuration),
        remote_addr=target,
        remote_peer_id=peer,
        local_peer_id=transport._peer_id,
        is_initiator=True,
        maddr=address,
        transport=transport,
        security_manager=transport._security_manager,
        listener_socket=sock,
    )
    made(connection)
    await connection.connect(nursery)  # which closes it when it fails
    return connection


async def transmit(connection: QUICConnection) -> None:
    """Send what aioquic has to say, such as a wider window."""
    await connection._transmit()
