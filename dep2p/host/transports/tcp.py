"""Listening sockets: each address is bound for real or fails with a sentence; nothing listens on after the host ended.

py-libp2p's TCP listener sets SO_REUSEPORT (a second daemon on the same port silently takes half of the connections),
swallows failures, and lives on in a system task. These sockets are bound without it and belong to the host's nursery;
`ListeningPorts` shares their port with dials.
"""

import errno
import logging
import socket
from collections.abc import Awaitable, Callable

import trio
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.trio import TrioTCPStream

from dep2p.errors import ListenError
from dep2p.host.addresses import Address, parse_address, socket_address, socket_family
from dep2p.host.counters import Counters

logger: logging.Logger = logging.getLogger("dep2p.host")

BACKLOG = 512
_OUT_OF_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
_OUT_OF_RESOURCES_PAUSE_S = 0.1
_COMPLAIN_INTERVAL_S = 60.0

Prepare = Callable[[TrioTCPStream], Awaitable[ReadWriteCloser]]
"""A step before the upgrade, within its time limit, such as the WebSocket handshake."""

Accept = Callable[[TrioTCPStream, str, Prepare | None], Awaitable[None]]
"""Takes an inbound transport connection and its remote multiaddr; never raises for what the remote does."""


def tcp_stream(stream: trio.SocketStream, host: str, port: int) -> TrioTCPStream:
    """Make py-libp2p's TCP stream with its remote address, which it does not find by itself for IPv6."""
    wrapped = TrioTCPStream(stream)
    wrapped._cached_remote_address = (host, port)  # pyright: ignore[reportPrivateUsage]
    return wrapped


def listenable(text: str) -> Address:
    """Parse an address to listen on. Raises ListenError."""
    try:
        address = parse_address(text)
    except ValueError as error:
        raise ListenError(f"cannot listen on {text}: {error}") from None
    if address.transport == "circuit":
        raise ListenError(f"cannot listen on {text}: a relayed address is reserved at the relay (relay = client)")
    if address.family == "dns":
        raise ListenError(f"cannot listen on {text}: give an IP address of this machine, or /ip4/0.0.0.0 for all")
    return address


def listen_error(address: Address, error: OSError) -> ListenError:
    """Return the ListenError for a failed bind: its address, its cause, and a remedy."""
    kind = "UDP" if address.transport == "quic" else "TCP"
    match error.errno:
        case errno.EADDRINUSE:
            why = (
                f"{kind} port {address.port} is taken by another process, maybe another daemon: stop it, "
                "or choose another port (0 picks a free one)"
            )
        case errno.EACCES | errno.EPERM:
            why = f"this user may not bind {kind} port {address.port}: choose one from 1024 on"
        case errno.EADDRNOTAVAIL:
            why = f"{address.host} is no address of this machine: use one that `ip address` shows, or a wildcard"
        case errno.EAFNOSUPPORT:
            why = "this machine has no IPv6: listen on /ip4/… instead"
        case _:
            why = f"{error.strerror or error}"
    return ListenError(f"cannot listen on {address.text}: {why}")


async def bind(address: Address, kind: socket.SocketKind) -> trio.socket.SocketType:
    """Bind a socket of the exclusive kind. Raises ListenError."""
    sock = trio.socket.socket(socket_family(address), kind)
    try:
        if kind == socket.SOCK_STREAM:
            # Only for ports in TIME_WAIT: Linux still refuses a port that another socket listens on.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if address.family == "ip6":
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        await sock.bind((address.host, address.port))
        if kind == socket.SOCK_STREAM:
            sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise listen_error(address, error) from error
    except BaseException:
        sock.close()
        raise
    return sock


class TCPListener:
    """One listening TCP socket."""

    def __init__(
        self,
        listener: trio.SocketListener,
        suffix: str,
        accept: Accept,
        prepare: Prepare | None,
        counters: Counters,
    ) -> None:
        self._listener = listener
        self._suffix = suffix
        self._accept = accept
        self._prepare = prepare
        self._counters = counters
        host, port = listener.socket.getsockname()[:2]
        self.address: Address = parse_address(socket_address(str(host), int(port), suffix))

    @property
    def socket(self) -> trio.socket.SocketType:
        """The socket that listens."""
        return self._listener.socket

    async def serve(self) -> None:
        """Accept until cancelled; closes the socket at the end."""
        try:
            async with trio.open_nursery() as nursery:
                complain_s = trio.current_time()
                while True:
                    try:
                        stream = await self._listener.accept()
                    except OSError as error:
                        if error.errno not in _OUT_OF_RESOURCES:
                            raise
                        self._counters.add("accept_out_of_resources")
                        if trio.current_time() >= complain_s:  # ten times a second would fill a disk next
                            logger.error("accepting on %s: %s; trying again", self.address.text, error)
                            complain_s = trio.current_time() + _COMPLAIN_INTERVAL_S
                        await trio.sleep(_OUT_OF_RESOURCES_PAUSE_S)
                    else:
                        nursery.start_soon(self._handle, stream)
        finally:
            self.close()

    async def _handle(self, stream: trio.SocketStream) -> None:
        try:
            host, port = stream.socket.getpeername()[:2]
        except OSError:  # gone before we looked
            self._counters.add("inbound_gone_before_handshake")
            stream.socket.close()
            return
        raw = tcp_stream(stream, str(host), int(port))
        await self._accept(raw, socket_address(str(host), int(port), self._suffix), self._prepare)

    def close(self) -> None:
        """Stop listening at once."""
        self._listener.socket.close()


async def open_tcp_listener(
    address: Address, accept: Accept, counters: Counters, *, suffix: str = "tcp", prepare: Prepare | None = None
) -> TCPListener:
    """Listen on a TCP port. Raises ListenError."""
    sock = await bind(address, socket.SOCK_STREAM)
    return TCPListener(trio.SocketListener(sock), suffix, accept, prepare, counters)


async def connect_tcp(address: Address) -> TrioTCPStream:
    """Dial a TCP port. Raises OSError that says why."""
    if address.family == "dns":
        try:
            stream = await trio.open_tcp_stream(address.host, address.port)
        except OSError as error:
            raise error.__cause__ if isinstance(error.__cause__, OSError) else error from None
        return tcp_stream(stream, address.host, address.port)
    sock = trio.socket.socket(socket_family(address), socket.SOCK_STREAM)
    try:
        await sock.connect((address.host, address.port))
        return tcp_stream(trio.SocketStream(sock), address.host, address.port)
    except BaseException:
        sock.close()
        raise
