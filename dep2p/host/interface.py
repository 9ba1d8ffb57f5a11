"""The host as the rest of the node sees it. No libp2p here: `host.py` implements it over py-libp2p, and
`dep2p.testing.memory` implements it in memory for tests under a virtual clock."""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import trio

from dep2p.host.resources.ledger import ConnectionResources
from dep2p.host.resources.turns import Turns
from dep2p.limits import Limits
from dep2p.types import PeerId

Direction = Literal["inbound", "outbound"]
ReceiveCallback = Callable[[bytes | memoryview], None]
"""Called with received bytes, synchronously from the connection's reader; must not block and must not raise. A
memoryview is valid only during the call."""
EndCallback = Callable[[BaseException | None], None]
"""Called once when no more bytes will come: None for the peer's half-close, else a StreamClosedError."""


@dataclass(frozen=True, slots=True)
class CircuitUse:
    """The relay of a connection, and what it still carries.

    ``is_limited``: it carries little, or not for long. ``data_left_bytes``: bytes in the direction that has carried
    more; None without a limit. ``time_left_s``: seconds; None without a limit.
    """

    relay: PeerId
    is_limited: bool
    data_left_bytes: int | None = None
    time_left_s: float | None = None


class Connection(Protocol):
    """One transport connection to a peer, authenticated by the transport's handshake."""

    @property
    def id(self) -> int:
        """Unique in this process; never used again."""
        ...

    @property
    def peer(self) -> PeerId:
        """The transport-authenticated remote identity."""
        ...

    @property
    def direction(self) -> Direction: ...

    @property
    def remote_addr(self) -> str:
        """The remote multiaddr, or "" when the transport does not tell."""
        ...

    @property
    def channel_binding(self) -> bytes:
        """32 bytes that both ends of this channel share; a node in the middle has others with each side (RFC 5056).

        Noise: the handshake hash. QUIC: a hash of the keys of both certificates, each of which belongs to one
        process.
        """
        ...

    @property
    def opened_at_s(self) -> float:
        """``trio.current_time()`` at which it became usable."""
        ...

    @property
    def rtt_s(self) -> float | None:
        """Round-trip time of the last liveness probe; None before the first."""
        ...

    @property
    def is_closed(self) -> bool: ...

    @property
    def is_superseded(self) -> bool:
        """There is another connection to the same peer that is to be used instead: newer, or not yet doubted."""
        ...

    @property
    def is_limited(self) -> bool:
        """Whether it goes through a relay that carries little or not for long: nothing that no app asked for goes over
        it, such as pub/sub."""
        ...

    @property
    def circuit(self) -> CircuitUse | None:
        """The relay that it goes through, with what is left of the relay's limits now; None for a direct one."""
        ...

    async def open_stream(self, protocol: str, *, timeout_s: float = 10.0) -> "ByteStream":
        """Open a stream and negotiate ``protocol``.

        Raises ProtocolNotSupportedError, StreamClosedError (connection gone, stream limit) or RequestTimeoutError.
        """
        ...

    async def close(self) -> None:
        """Close it with all its streams. Idempotent, shielded: cancelling the caller leaves nothing half closed."""
        ...


class WriteNowait(Protocol):
    """The bound method `ByteStream.write_nowait`."""

    def __call__(self, data: bytes | bytearray | memoryview, *, urgent: bool = False) -> None: ...


class Drain(Protocol):
    """The bound method `ByteStream.drain`."""

    async def __call__(self, low_bytes: int = 0) -> None: ...


class ByteStream(Protocol):
    """One bidirectional byte stream with real back-pressure and half-close.

    Reading is pulled with `read` or, after `set_receiver`, pushed. Writing is never torn by cancellation: bytes that
    `write_nowait` took will be sent whole and in order, or the stream ends.
    """

    @property
    def connection(self) -> Connection:
        """The connection that carries the stream."""
        ...

    @property
    def protocol(self) -> str:
        """The protocol that both ends have agreed on."""
        ...

    @property
    def unsent_bytes(self) -> int:
        """Bytes taken by `write_nowait` that have not been handed to the transport yet (window or socket full)."""
        ...

    @property
    def sent_bytes(self) -> int:
        """Bytes that have been handed to the transport."""
        ...

    @property
    def granted_bytes(self) -> int:
        """Changes as the peer takes what was sent: room that it has granted, or bytes that it has acknowledged. Always
        0 where the transport does not show it. Compare two values; the number alone means nothing."""
        ...

    @property
    def is_write_closed(self) -> bool:
        """True after close_write, close or reset, by either side."""
        ...

    def write_nowait(self, data: bytes | bytearray | memoryview, *, urgent: bool = False) -> None:
        """Take ``data`` for sending; never blocks. The caller bounds `unsent_bytes`, by `drain`.

        ``urgent`` sends at once from the caller's own step when nothing is queued (lowest latency); otherwise the
        bytes go out with whatever else is queued when the writer next runs (highest throughput).
        Raises StreamClosedError.
        """
        ...

    async def drain(self, low_bytes: int = 0) -> None:
        """Wait until ``unsent_bytes <= low_bytes``. Raises StreamClosedError."""
        ...

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """`write_nowait`, then wait while more than about 256 KiB are unsent. Raises StreamClosedError."""
        ...

    async def read(self, max_bytes: int = 65_536) -> bytes:
        """Up to ``max_bytes``; b"" after the peer's half-close. Raises StreamClosedError on a reset or lost stream."""
        ...

    def set_receiver(self, on_data: ReceiveCallback, on_end: EndCallback) -> None:
        """Push what is buffered now, and all that comes, to ``on_data``; then `read` must not be used any more."""
        ...

    def pause_receiving(self) -> None:
        """Push mode: stop calling `on_data` and stop granting the peer more window, so that its writes block."""
        ...

    def resume_receiving(self) -> None:
        """Undo `pause_receiving`; what arrived meanwhile is pushed from within this call."""
        ...

    async def close_write(self) -> None:
        """Half-close: the peer reads what was sent, then b"". Reading goes on."""
        ...

    async def close(self) -> None:
        """Half-close our side, drop what the peer still sends, and forget the stream. Idempotent."""
        ...

    def reset(self) -> None:
        """Abort both directions at once; pending and later calls raise StreamClosedError. Idempotent, never raises."""
        ...


StreamHandler = Callable[[ByteStream], Awaitable[None]]
"""Runs in a task of its own; an exception is logged and counted and resets that stream, nothing else."""


@dataclass(frozen=True, slots=True)
class PeerConnected:
    """A connection became usable."""

    connection: Connection


@dataclass(frozen=True, slots=True)
class PeerDisconnected:
    """A connection ended. ``last`` tells whether it was the peer's last one."""

    connection: Connection
    last: bool
    reason: str


@dataclass(frozen=True, slots=True)
class PeerDiscovered:
    """A discovery source named addresses of a peer."""

    peer: PeerId
    addrs: tuple[str, ...]
    source: str


@dataclass(frozen=True, slots=True)
class ConnectionPreferred:
    """An older one of several connections to a peer is to be used from now on: the newer ones have ended, or both
    sides have chosen it. A new connection is preferred from its `PeerConnected` on."""

    connection: Connection


@dataclass(frozen=True, slots=True)
class NetworkChanged:
    """This machine's addresses or routes have changed, or it has slept; ``what``, in words."""

    what: str


HostEvent = PeerConnected | PeerDisconnected | PeerDiscovered | ConnectionPreferred | NetworkChanged


class ProtocolGate(Protocol):
    """Decides on which connections some protocols show."""

    def is_open(self, connection: Connection) -> bool:
        """Whether the peer may learn that this host speaks them."""
        ...

    async def wait_for_attempt(self, connection: Connection) -> None:
        """Wait until nothing is under way that may open the gate for the connection; bounded."""
        ...


class Host(Protocol):
    """Dials, listens, and carries streams. Started by its own ``open`` (an async context manager)."""

    @property
    def peer_id(self) -> PeerId: ...

    def listen_addrs(self) -> list[str]:
        """Where others can dial this host, each ending in /p2p/<own id>.

        The multiaddrs really listened on, wildcard hosts expanded, then those given as ``advertise`` and those reserved
        at relays.
        """
        ...

    @property
    def loopback(self) -> Connection:
        """The connection of this host to itself, in memory; `connections` and events do not name it."""
        ...

    def connections(self, peer: PeerId | None = None) -> Sequence[Connection]:
        """Live connections, oldest first; of one peer when given."""
        ...

    def subscribe(self, on_event: Callable[[HostEvent], None]) -> Callable[[], None]:
        """Call ``on_event`` synchronously for each event; returns a function that ends it.

        It must not block or raise.
        """
        ...

    def set_stream_handler(self, protocol: str, handler: StreamHandler) -> None:
        """Serve ``protocol``; may be called at any time; replaces an earlier handler."""
        ...

    def remove_stream_handler(self, protocol: str) -> None:
        """Stop serving ``protocol``; streams in progress go on."""
        ...

    def restrict(self, part: str, gate: ProtocolGate | None) -> None:
        """Hide the protocols whose id contains ``part``.

        On a connection that ``gate`` is not open for, this host neither names them in identify nor speaks them. None
        shuts them for all connections; no call shows them to all again.
        """
        ...

    async def dial(self, peer: PeerId, addrs: Sequence[str] = (), *, timeout_s: float | None = None) -> Connection:
        """A live connection to the peer: an existing one, or a new one by trying all known and given addresses.

        Raises PeerNotFoundError that names each address tried and why it failed.
        """
        ...

    async def ping(self, peer: PeerId, *, timeout_s: float = 5.0) -> float:
        """Round-trip seconds over /ipfs/ping. Raises PeerNotFoundError, RequestTimeoutError, StreamClosedError."""
        ...

    async def disconnect(self, peer: PeerId) -> bool:
        """Close every connection to the peer; False when there was none."""
        ...

    def keep_connected(self, peer: PeerId, by: str) -> None:
        """Dial the peer now if it is not connected, and again with back-off whenever it is lost, until `forget`.

        ``by`` names who needs the connection; several may.
        """
        ...

    def forget(self, peer: PeerId, by: str | None = None) -> None:
        """End `keep_connected` for ``by``, or, for None, for all. Connections stay as they are."""
        ...

    def dial_failure(self, peer: PeerId) -> str | None:
        """Return why the last dial for `keep_connected` failed, as one line; None once the peer is connected."""
        ...

    def discovered(self) -> list[PeerDiscovered]:
        """Return the peers that discovery sources have named within the last hour, each once, the latest last, bounded:
        for a subscriber who was not there when `PeerDiscovered` was emitted."""
        ...

    def protect(self, connection: Connection, by: str) -> None:
        """Do not end this connection to make room for another one; ``by`` names who asks, several may."""
        ...

    def unprotect(self, connection: Connection, by: str) -> None:
        """Undo `protect`."""
        ...

    def is_protected(self, connection: Connection) -> bool:
        """Whether a part of the node protects the connection."""
        ...

    def add_addrs(self, peer: PeerId, addrs: Sequence[str], *, ttl_s: float) -> None:
        """Remember addresses in the peer store. Malformed ones are dropped and counted."""
        ...

    def addrs(self, peer: PeerId) -> list[str]:
        """Known addresses of a peer."""
        ...

    def signed_record(self, peer: PeerId) -> bytes:
        """The signed peer record that a connected peer gave of itself; b"" when it gave none that holds."""
        ...

    def add_signed_record(self, peer: PeerId, envelope: bytes, *, ttl_s: float) -> None:
        """Check a signed record of a peer that a third one passed on, and remember its addresses.

        Raises ProtocolError when it does not hold.
        """
        ...

    def counters(self) -> dict[str, int]:
        """Monotonic counts for metrics, by name: drops, refusals, resets, bytes and so on, each with its reason."""
        ...


# Between a connection and its stream multiplexer; used inside dep2p.host only.


class NamedStream(ByteStream, Protocol):
    """A stream whose protocol is filled in after the negotiation."""

    def set_protocol(self, protocol: str) -> None:
        """Record the negotiated protocol."""
        ...


class MuxedConnection(Connection, Protocol):
    """A connection as its multiplexer sees it."""

    @property
    def limits(self) -> Limits: ...

    @property
    def resources(self) -> ConnectionResources:
        """The memory of the connection, its bounds, and its rate of control frames."""
        ...

    @property
    def turns(self) -> Turns:
        """The queue in which unproven peers take turns."""
        ...

    def count(self, name: str) -> None:
        """Add one to the host's counter ``name``."""
        ...

    async def negotiation_place(self) -> None:
        """Wait until another inbound stream may be handed to `serve`."""
        ...

    def serve(self, stream: NamedStream) -> None:
        """Negotiate and handle an inbound stream in a task of its own."""
        ...

    def end(self, reason: str) -> None:
        """Mark the connection closed and notify the host, once."""
        ...

    def abort(self, reason: str) -> None:
        """`end`, from a synchronous caller, and cancel the connection's tasks."""
        ...


class Muxer(Protocol):
    """The stream multiplexer under a connection."""

    @property
    def rtt_s(self) -> float | None:
        """Round-trip time that the multiplexer measured itself; None when it did not."""
        ...

    @property
    def probes_itself(self) -> bool:
        """True when it notices a silent peer by itself, within the liveness limits."""
        ...

    @property
    def received_bytes(self) -> int:
        """Bytes that have come; 0 when it does not count them."""
        ...

    def counters(self) -> Mapping[str, int]:
        """Its own monotonic counts, by name."""
        ...

    def open_protocols(self) -> Collection[str]:
        """The protocols of the streams that are open; "" for one that is still being negotiated."""
        ...

    def bind(self, connection: MuxedConnection) -> None:
        """Called once before anything else."""
        ...

    async def run(self, connection: MuxedConnection, nursery: trio.Nursery) -> str:
        """Serve until the connection ends, inbound streams by ``connection.serve``. Returns the reason of the end."""
        ...

    async def open(self) -> NamedStream:
        """A new outbound stream. Raises StreamClosedError, for the stream limit too."""
        ...

    def fail(self, reason: str) -> None:
        """End at once, from any step, and drop what is held for the connection; `close` must follow."""
        ...

    async def close(self) -> None:
        """End the connection, telling the peer where possible."""
        ...
