"""The host as the server and the client of AutoNAT see it, and their messages on its streams."""

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from dep2p.encoding.length_prefixed import encode_length_prefixed, read_length_prefixed
from dep2p.host.interface import ByteStream, Connection, HostEvent, StreamHandler
from dep2p.protocols.reachability.messages import (
    MESSAGE_BYTES_MAX,
    DialMessage,
    decode_dial_message,
    encode_dial_message,
)
from dep2p.protocols.reachability.observed import ObservedTransport
from dep2p.types import PeerId

TESTED_TRANSPORTS: Final[tuple[ObservedTransport, ...]] = ("tcp", "ws", "quic")
"""The transports over which a server dials back."""


class ReachabilityHost(Protocol):
    """The host, as its tests of reachability use it."""

    @property
    def peer_id(self) -> PeerId: ...

    def connections(self, peer: PeerId | None = None) -> Sequence[Connection]: ...

    def subscribe(self, on_event: Callable[[HostEvent], None]) -> Callable[[], None]: ...

    def set_stream_handler(self, protocol: str, handler: StreamHandler) -> None: ...

    def is_protected(self, connection: Connection) -> bool: ...

    def peer_protocols(self, peer: PeerId) -> tuple[str, ...]: ...


async def send_dial_message(stream: ByteStream, message: DialMessage) -> None:
    """Send one message. Raises StreamClosedError."""
    await stream.write(encode_length_prefixed(encode_dial_message(message)))


async def read_dial_message(stream: ByteStream) -> DialMessage:
    """Read one message. Raises ProtocolError, StreamClosedError."""
    return decode_dial_message(await read_length_prefixed(stream, MESSAGE_BYTES_MAX))


def is_relayed(connection: Connection) -> bool:
    """Whether a connection goes through a relay."""
    return "/p2p-circuit" in connection.remote_addr
