"""The private members of py-libp2p's and aioquic's QUIC classes that this package uses: here and nowhere else."""

# pyright: reportPrivateUsage=false

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Protocol

from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.tls import Context
from cryptography import x509
from libp2p.custom_types import TProtocol
from libp2p.transport.quic.connection import QUICConnection
from libp2p.transport.quic.listener import QUICListener, ServerQuicConnection
from libp2p.transport.quic.stream import QUICStream
from libp2p.transport.quic.transport import QUICTransport
from libp2p.transport.quic.utils import create_server_config_from_base, custom_quic_version_to_wire_format


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
    """Announce a stream of ours to aioquic before it is written to."""
    stream._connection._quic.send_stream_data(int(stream.stream_id), b"")


def take_over_receiving(stream: QUICStream) -> tuple[bytearray, bool]:
    """Return the buffer of received bytes, and whether the end has come."""
    return stream._receive_buffer, stream._read_closed


def replace_receivers(stream: QUICStream, take_data: TakeData, take_reset: TakeReset) -> None:
    """Pass data and resets to these two from now on."""
    stream.handle_data_received = take_data  # type: ignore[method-assign]
    stream.handle_reset = take_reset  # type: ignore[method-assign]
