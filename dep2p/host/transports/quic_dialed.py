"""The connections that a QUIC listener's socket has dialed, and which datagrams are theirs.

A dial from the listener's own socket has the listener's public port at a NAT router, and the router then lets the peer
answer. Both kinds of connection share the socket; the connection id in a datagram says whose it is.
"""

from dep2p.host.upstream.quic_internals import SharedSocketConnection

_LONG_HEADER = 0x80
_ID_BYTES = 8
"""Bytes of the connection ids that aioquic gives out."""


class DialedConnections:
    """The dialed connections of one socket."""

    def __init__(self) -> None:
        self._by_target: dict[tuple[str, int], list[SharedSocketConnection]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_target.values()))

    def add(self, target: tuple[str, int], connection: SharedSocketConnection) -> None:
        """Take a connection to ``target`` from now on; those that have ended are dropped."""
        for each in list(self._by_target):
            self._by_target[each] = [one for one in self._by_target[each] if not one.is_closed]
            if not self._by_target[each]:
                del self._by_target[each]
        self._by_target.setdefault(target, []).append(connection)

    def find(self, data: bytes, sender: tuple[str, int]) -> SharedSocketConnection | None:
        """Return the connection that a datagram is for; None when it is for the listener.

        A client's connection stays at the address that was dialed (RFC 9000, section 9), so another sender has none.
        """
        for connection in self._by_target.get((sender[0], sender[1]), ()):
            if not connection.is_closed and connection.has_id(destination_id(data)):
                return connection
        return None


def destination_id(data: bytes) -> bytes:
    """Return the destination connection id of a QUIC packet (RFC 8999, section 5); b"" when there is none."""
    if not data:
        return b""
    if not data[0] & _LONG_HEADER:
        return data[1 : 1 + _ID_BYTES]
    return data[6 : 6 + data[5]] if len(data) > 5 else b""
