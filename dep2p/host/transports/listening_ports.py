"""TCP dials that leave from the port of a listener, so that a NAT router gives both the same public port.

Listeners are bound exclusively: a second daemon on the port is an error. A listener shares its port only in the step in
which a dial is bound to it, and Linux lets sockets of this user alone share it. A program of this user that shares
ports on purpose can still bind the address that such a dial has.
"""

import errno
import socket
from contextlib import closing, suppress
from ipaddress import ip_address
from typing import Final

import trio
from libp2p.io.trio import TrioTCPStream

from dep2p.host.addresses import Address, parse_address, socket_address, socket_family
from dep2p.host.transports.tcp import tcp_stream

_SHARES_PORTS: Final = hasattr(socket, "SO_REUSEPORT")
"""Whether the system has sockets that share a port."""
_PORT_NOT_USABLE: Final = frozenset({errno.EADDRINUSE, errno.EADDRNOTAVAIL})
_NAMED_S: Final = 1.0
"""Seconds for each address of a DNS name; then all are tried beside each other, from any port."""


class ListeningPorts:
    """The listeners of a host, as the ports from which its TCP dials leave."""

    def __init__(self) -> None:
        self._listeners: list[trio.socket.SocketType] = []

    def add(self, listener: trio.socket.SocketType) -> None:
        """Let dials leave from the port of a listener."""
        if _SHARES_PORTS:
            self._listeners.append(listener)

    async def connect(self, address: Address) -> tuple[TrioTCPStream, int] | None:
        """Dial from the port of a listener; return the stream and the port.

        None when no listener has the family and the interface that the dial leaves from, when the target is this
        machine, when the port cannot be used for this target now since the last connection between the two has just
        ended, and when the first addresses of a DNS name do not answer soon. Raises OSError when the target cannot be
        reached.
        """
        if not self._listeners:
            return None
        if address.family != "dns":
            return await self._connect_ip(address)
        for each in await _resolved(address):
            with trio.move_on_after(_NAMED_S), suppress(OSError):
                return await self._connect_ip(each)
        return None

    async def _connect_ip(self, address: Address) -> tuple[TrioTCPStream, int] | None:
        bound = self._bound(address)
        if bound is None:
            return None
        sock = trio.socket.from_stdlib_socket(bound)
        port = int(sock.getsockname()[1])
        try:
            await sock.connect((address.host, address.port))
        except OSError as error:
            sock.close()
            if error.errno in _PORT_NOT_USABLE:
                return None
            raise
        except BaseException:
            sock.close()
            raise
        return tcp_stream(trio.SocketStream(sock), address.host, address.port), port

    def _bound(self, address: Address) -> socket.socket | None:
        """A socket with the port of the listener that has the interface; None when there is no such one."""
        source = source_towards(address)
        if source is None or ip_address(source) == ip_address(address.host):
            return None
        for listener in self._listeners:
            host, port = listener.getsockname()[:2]
            if listener.family == socket_family(address) and host in (source, "0.0.0.0", "::"):
                return _bind_beside(listener, source, int(port))
        return None


async def _resolved(address: Address) -> list[Address]:
    """The first address of each family that the DNS name stands for. Raises OSError."""
    wanted = {"/dns4": socket.AF_INET, "/dns6": socket.AF_INET6}.get(address.text[:5], socket.AF_UNSPEC)
    found: dict[int, Address] = {}
    for family, _, _, _, sockaddr in await trio.socket.getaddrinfo(
        address.host, address.port, family=wanted, type=socket.SOCK_STREAM
    ):
        found.setdefault(family, parse_address(socket_address(str(sockaddr[0]), address.port)))
    return list(found.values())


def source_towards(address: Address) -> str | None:
    """Return the address of this machine from which the system sends to an IP address; None when it has no route."""
    with closing(socket.socket(socket_family(address), socket.SOCK_DGRAM)) as probe:
        try:
            probe.connect((address.host, address.port))  # sends nothing
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _bind_beside(listener: trio.socket.SocketType, source: str, port: int) -> socket.socket | None:
    """In one step, so that the listener shares its port with nothing else."""
    sock = socket.socket(listener.family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            sock.bind((source, port))
        finally:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 0)
    except OSError:
        sock.close()
        return None
    return sock
