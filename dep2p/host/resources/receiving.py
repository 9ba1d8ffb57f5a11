"""The account of bytes that a transport's library holds, and the window that is granted because of them. Pure.

aioquic grants a window twice as large whenever half of it was received, read or not, and allocates each gap in front of
bytes that came early. So a peer that sent 3 KB of single bytes, each at the end of its window, made a node hold 512 MB.
"""

from dataclasses import dataclass

from dep2p.errors import ProtocolError
from dep2p.host.resources.ledger import ConnectionResources

WINDOW_UNPROVEN_BYTES = 524_288
"""Bytes on their way that an unproven peer may have: half of `memory_bytes_per_unproven_connection_max` by default."""
WINDOW_BYTES = 8_388_608
"""The same of a peer that a realm has verified."""
STREAM_WINDOW_UNPROVEN_BYTES = 262_144
"""Bytes of one stream that may wait for their reader, as in yamux."""
STREAM_WINDOW_BYTES = 2_097_152
"""The same of a peer that a realm has verified."""
CRYPTO_BYTES_MAX = 16_384
"""Bytes of a handshake that may come early, as in quic-go; RFC 9000 section 7.5 asks for 4,096 at least."""
RANGE_BYTES = 128
"""Memory of one range between gaps."""
RANGES_UNPROVEN_MAX = 256
"""Ranges between gaps: a window of datagrams of which every second one is lost makes 218 of them."""
RANGES_MAX = 4_096
STREAM_UNSEEN_BYTES = 2_048
"""Memory of a stream that the peer opened, before this node accepts it."""


class TooMuchHeldError(ProtocolError):
    """A peer made the library hold more than it may; its connection has to end."""


@dataclass(frozen=True, slots=True)
class Held:
    """Received bytes inside of the library, and what they are spread over."""

    waiting_bytes: int = 0
    """Bytes of streams, gaps included: behind a gap, or in streams that this node has not accepted yet."""
    crypto_bytes: int = 0
    """Bytes of handshake messages behind a gap, gaps included."""
    ranges: int = 0
    streams_unseen: int = 0

    @property
    def memory_bytes(self) -> int:
        """The memory that all of it takes."""
        spread = self.ranges * RANGE_BYTES + self.streams_unseen * STREAM_UNSEEN_BYTES
        return self.waiting_bytes + self.crypto_bytes + spread


class Receiving:
    """The bytes that the library holds for one connection.

    Example::

        receiving = Receiving()
        receiving.check(held)  # while the handshake is under way
        receiving.bind(connection.resources)
        receiving.check(held)  # after each datagram
    """

    __slots__ = ("_charged_bytes", "_resources")

    def __init__(self) -> None:
        self._resources: ConnectionResources | None = None
        self._charged_bytes = 0

    def bind(self, resources: ConnectionResources) -> None:
        """The handshake is complete: account for the bytes from now on."""
        self._resources = resources

    @property
    def window_bytes(self) -> int:
        """Bytes that the peer may have on their way."""
        return WINDOW_BYTES if self._is_proven else WINDOW_UNPROVEN_BYTES

    @property
    def stream_window_bytes(self) -> int:
        """Bytes of one stream that the peer may have on their way or unread."""
        return STREAM_WINDOW_BYTES if self._is_proven else STREAM_WINDOW_UNPROVEN_BYTES

    @property
    def _is_proven(self) -> bool:
        return self._resources is not None and self._resources.is_proven

    def check(self, held: Held) -> None:
        """Account for what is held now. Raises TooMuchHeldError: then the connection ends, and nothing is held on."""
        if held.crypto_bytes > CRYPTO_BYTES_MAX:
            raise TooMuchHeldError(f"{held.crypto_bytes} bytes of the handshake came early, {CRYPTO_BYTES_MAX} may")
        most = RANGES_MAX if self._is_proven else RANGES_UNPROVEN_MAX
        if held.ranges > most:
            raise TooMuchHeldError(f"what came has gaps in {held.ranges} places, {most} may be")
        if self._resources is None:
            return
        account, memory_bytes = self._resources.account, held.memory_bytes
        if memory_bytes > self._charged_bytes:
            if not account.reserve(memory_bytes - self._charged_bytes):
                raise TooMuchHeldError(f"{account.name} may not hold {memory_bytes} bytes that came early")
        else:
            account.release(self._charged_bytes - memory_bytes)
        self._charged_bytes = memory_bytes
