"""Messages of circuit relay v2, and the host as a relay and its clients see it."""

from collections.abc import Callable, Sequence
from typing import Protocol

from google.protobuf.message import DecodeError
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, Limit, StopMessage

from dep2p.encoding.length_prefixed import encode_length_prefixed, read_length_prefixed
from dep2p.errors import ProtocolError
from dep2p.host.connections.circuit_limit import CircuitLimit
from dep2p.host.interface import ByteStream, Connection, HostEvent, StreamHandler
from dep2p.types import PeerId

HOP = "/libp2p/circuit/relay/0.2.0/hop"
STOP = "/libp2p/circuit/relay/0.2.0/stop"
MESSAGE_BYTES_MAX = 4_096

RESERVATION_S = 3_600
CIRCUIT_S = 3_600
CIRCUIT_BYTES_MAX = 268_435_456
"""Bytes that a circuit may carry in one direction; a circuit over it, or older than CIRCUIT_S, is reset."""


class RelayHost(Protocol):
    """The host, as a relay and its clients use it."""

    @property
    def peer_id(self) -> PeerId: ...

    def listen_addrs(self) -> list[str]: ...

    def connections(self, peer: PeerId | None = None) -> Sequence[Connection]: ...

    def subscribe(self, on_event: Callable[[HostEvent], None]) -> Callable[[], None]: ...

    async def dial(self, peer: PeerId, addrs: Sequence[str], *, timeout_s: float | None = None) -> Connection: ...

    def set_stream_handler(self, protocol: str, handler: StreamHandler) -> None: ...

    def is_protected(self, connection: Connection) -> bool: ...

    def keep_place(self, connection: Connection, *, keeps: bool) -> None: ...

    def keep_connected(self, peer: PeerId, by: str) -> None: ...

    def forget(self, peer: PeerId, by: str | None = None) -> None: ...


def is_relayed(connection: Connection) -> bool:
    """Whether a connection goes through a relay itself."""
    return "/p2p-circuit" in connection.remote_addr


async def send_message(stream: ByteStream, message: HopMessage | StopMessage) -> None:
    """Send one message. Raises StreamClosedError."""
    await stream.write(encode_length_prefixed(message.SerializeToString()))


async def read_hop(stream: ByteStream) -> HopMessage:
    """Read one message to a relay, or its answer. Raises ProtocolError, StreamClosedError."""
    message = HopMessage()
    try:
        message.ParseFromString(await read_length_prefixed(stream, MESSAGE_BYTES_MAX))
    except (DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"a relay message that cannot be read: {error}") from None
    return message


async def read_hop_status(stream: ByteStream) -> HopMessage:
    """Read a relay's answer. Raises ProtocolError, StreamClosedError."""
    answer = await read_hop(stream)
    if answer.type != HopMessage.STATUS:
        raise ProtocolError("the relay answered with something else than a status")
    return answer


async def read_stop(stream: ByteStream) -> StopMessage:
    """Read one message between a relay and the target of a circuit. Raises ProtocolError, StreamClosedError."""
    message = StopMessage()
    try:
        message.ParseFromString(await read_length_prefixed(stream, MESSAGE_BYTES_MAX))
    except (DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"a relay message that cannot be read: {error}") from None
    return message


def limit_of(message: HopMessage | StopMessage) -> CircuitLimit:
    """Return the limit that a relay names for a circuit."""
    return CircuitLimit(message.limit.data, float(message.limit.duration))


def write_limit(limit: Limit) -> None:
    """Write the limit of this relay's circuits."""
    limit.duration = CIRCUIT_S
    limit.data = CIRCUIT_BYTES_MAX
