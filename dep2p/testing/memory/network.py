"""A network in memory: hosts, connections and streams with flow control, latency, partitions and crashes, no sockets.

Runs under trio's virtual clock (``autojump_clock``), so that a test of minutes takes milliseconds. Tests of
everything above the host use it; what only a real transport can show is tested on real hosts.
"""

import heapq
import itertools
import logging
from collections.abc import Callable, Sequence
from functools import partial

import trio

from dep2p.errors import PeerNotFoundError, ProtocolNotSupportedError, RequestTimeoutError, StreamClosedError
from dep2p.host.interface import (
    Connection,
    Direction,
    HostEvent,
    PeerConnected,
    PeerDisconnected,
    PeerDiscovered,
    StreamHandler,
)
from dep2p.identity import Identity
from dep2p.testing.memory.stream import MemoryStream
from dep2p.types import PeerId

_logger = logging.getLogger("dep2p.testing")


class MemoryNetwork:
    """The wire between :class:`MemoryHost` objects.

    ``latency_s`` is one way and may be changed at any time.
    """

    def __init__(self, *, latency_s: float = 0.001) -> None:
        self.latency_s = latency_s
        self._hosts: dict[PeerId, MemoryHost] = {}
        self._cut: dict[tuple[PeerId, PeerId], None] = {}
        self._due: list[tuple[float, int, PeerId, PeerId, Callable[[], None]]] = []
        self._held: list[tuple[PeerId, PeerId, Callable[[], None]]] = []
        self._order = itertools.count()
        self._ports = itertools.count(1)
        self._wake = trio.Event()
        self._pumping = False

    def host(self, identity: Identity | None = None) -> "MemoryHost":
        """A new host, reachable at once. The same identity again replaces a killed host (a reboot)."""
        host = MemoryHost(self, identity or Identity.generate(), next(self._ports))
        self._hosts[host.peer_id] = host
        return host

    def find(self, peer: PeerId) -> "MemoryHost | None":
        """The live host of a peer."""
        return self._hosts.get(peer)

    def remove(self, peer: PeerId) -> None:
        """Take a host off the network."""
        self._hosts.pop(peer, None)

    def partition(self, a: PeerId, b: PeerId) -> None:
        """From now on nothing passes between ``a`` and ``b``; what is sent is held back until `heal`."""
        self._cut[(a, b)] = None
        self._cut[(b, a)] = None

    def heal(self) -> None:
        """End all partitions and deliver what was held back, in order."""
        self._cut.clear()
        held, self._held = self._held, []
        for sender, receiver, deliver in held:
            self.post(sender, receiver, deliver)

    def is_cut(self, a: PeerId, b: PeerId) -> bool:
        """Whether a partition separates the two."""
        return (a, b) in self._cut

    def post(self, sender: PeerId, receiver: PeerId, deliver: Callable[[], None]) -> None:
        """Call ``deliver`` after the latency, in the order of posting."""
        due = trio.current_time() + self.latency_s
        heapq.heappush(self._due, (due, next(self._order), sender, receiver, deliver))
        if not self._pumping:
            self._pumping = True
            trio.lowlevel.spawn_system_task(self._pump)
        else:
            self._wake.set()

    async def _pump(self) -> None:
        try:
            while self._due:
                delay = self._due[0][0] - trio.current_time()
                if delay > 0:
                    self._wake = trio.Event()
                    with trio.move_on_after(delay):
                        await self._wake.wait()
                    continue
                _due, _order, sender, receiver, deliver = heapq.heappop(self._due)
                if (sender, receiver) in self._cut:
                    self._held.append((sender, receiver, deliver))
                    continue
                deliver()
                # One step per delivery lets the receiver's tasks run as they would with a real socket.
                await trio.lowlevel.checkpoint()
        finally:
            self._pumping = False


class MemoryConnection:
    """One end of a connection; implements ``dep2p.host.interface.Connection``."""

    _ids = itertools.count(1)

    def __init__(self, host: "MemoryHost", remote: "MemoryHost", direction: Direction) -> None:
        self.id = next(self._ids)
        self.host = host
        self.peer = remote.peer_id
        self.direction: Direction = direction
        self.remote_addr = remote.addr if direction == "outbound" else f"/ip4/127.0.0.1/tcp/{40_000 + self.id % 20_000}"
        self.opened_at_s = trio.current_time()
        self.rtt_s: float | None = None
        self.is_closed = False
        self.twin: MemoryConnection
        self.streams: dict[MemoryStream, None] = {}

    def post(self, deliver: Callable[[], None]) -> None:
        """Send something to the other end, unless the connection is gone by then."""

        def deliver_if_open() -> None:
            if not self.twin.is_closed:
                deliver()

        self.host.network.post(self.host.peer_id, self.peer, deliver_if_open)

    async def open_stream(self, protocol: str, *, timeout_s: float = 10.0) -> MemoryStream:
        if self.is_closed:
            raise StreamClosedError(f"the connection to {self.peer} is closed")
        stream = MemoryStream(self, protocol)
        twin = MemoryStream(self.twin, protocol)
        stream.twin, twin.twin = twin, stream
        self.streams[stream] = None
        answered = trio.Event()
        accepted = False

        def arrive() -> None:
            nonlocal accepted
            handler = self.twin.host.handlers.get(protocol)
            accepted = handler is not None
            if handler is not None:
                self.twin.streams[twin] = None
                trio.lowlevel.spawn_system_task(self.twin.host.run_handler, handler, twin)
            self.twin.post(answered.set)

        try:
            self.post(arrive)
            with trio.fail_after(timeout_s):
                while not answered.is_set():
                    if self.is_closed:
                        raise StreamClosedError(f"the connection to {self.peer} ended")
                    with trio.move_on_after(0.05):
                        await answered.wait()
        except trio.TooSlowError:
            stream.reset()
            raise RequestTimeoutError(
                f"{self.peer} did not answer the stream for {protocol} in {timeout_s} s"
            ) from None
        except BaseException:
            stream.reset()
            raise
        if not accepted:
            self.streams.pop(stream, None)
            raise ProtocolNotSupportedError(f"{self.peer} does not speak {protocol}")
        return stream

    async def close(self) -> None:
        self.end("closed on this side")
        twin = self.twin
        self.host.network.post(self.host.peer_id, self.peer, lambda: twin.end("closed by the peer"))
        await trio.lowlevel.cancel_shielded_checkpoint()

    def end(self, reason: str) -> None:
        """Drop this end with all its streams. Idempotent."""
        if self.is_closed:
            return
        self.is_closed = True
        for stream in list(self.streams):
            stream.fail(StreamClosedError(f"the connection to {self.peer} ended: {reason}"))
        self.streams.clear()
        self.host.drop(self, reason)


class MemoryHost:
    """Implements ``dep2p.host.interface.Host`` on a :class:`MemoryNetwork`."""

    def __init__(self, network: MemoryNetwork, identity: Identity, port: int) -> None:
        self.network = network
        self.identity = identity
        self.peer_id: PeerId = identity.peer_id
        self.addr = f"/ip4/127.0.0.1/tcp/{port}/p2p/{self.peer_id}"
        self.handlers: dict[str, StreamHandler] = {}
        self.is_killed = False
        self._connections: dict[MemoryConnection, None] = {}
        self._listeners: dict[int, Callable[[HostEvent], None]] = {}
        self._listener_ids = itertools.count()
        self._addrs: dict[PeerId, dict[str, None]] = {}
        self._wanted: dict[PeerId, trio.CancelScope] = {}
        self._counters: dict[str, int] = {}

    def listen_addrs(self) -> list[str]:
        return [self.addr]

    def connections(self, peer: PeerId | None = None) -> list[MemoryConnection]:
        return [c for c in self._connections if peer is None or c.peer == peer]

    def subscribe(self, on_event: Callable[[HostEvent], None]) -> Callable[[], None]:
        key = next(self._listener_ids)
        self._listeners[key] = on_event
        return lambda: self._listeners.pop(key, None) and None

    def _emit(self, event: HostEvent) -> None:
        for on_event in list(self._listeners.values()):
            on_event(event)

    def set_stream_handler(self, protocol: str, handler: StreamHandler) -> None:
        self.handlers[protocol] = handler

    def remove_stream_handler(self, protocol: str) -> None:
        self.handlers.pop(protocol, None)

    async def run_handler(self, handler: StreamHandler, stream: MemoryStream) -> None:
        """Run one inbound stream's handler as a real host does: its failure resets that stream and nothing else."""
        try:
            await handler(stream)
        except Exception:
            _logger.exception("stream handler for %s failed", stream.protocol)
            self._counters["handler_failures"] = self._counters.get("handler_failures", 0) + 1
            stream.reset()

    async def dial(
        self, peer: PeerId, addrs: Sequence[str] = (), *, timeout_s: float | None = None
    ) -> MemoryConnection:
        await trio.lowlevel.checkpoint()
        if self.is_killed:
            raise PeerNotFoundError("this host was killed")
        if peer == self.peer_id:
            raise PeerNotFoundError("a node cannot dial itself")
        for connection in self._connections:
            if connection.peer == peer:
                return connection
        remote = self.network.find(peer)
        known = [*addrs, *self._addrs.get(peer, {})]
        if not known:
            raise PeerNotFoundError(f"no address of {peer} is known")
        if remote is None or remote.is_killed or remote.addr not in known:
            raise PeerNotFoundError(f"{peer} does not answer at {', '.join(known)}")
        if self.network.is_cut(self.peer_id, peer):
            await trio.sleep(10.0 if timeout_s is None else timeout_s)
            raise PeerNotFoundError(f"{peer} does not answer at {', '.join(known)}: timed out")
        await trio.sleep(2 * self.network.latency_s)
        if remote.is_killed or self.is_killed:
            raise PeerNotFoundError(f"{peer} went away")
        local = MemoryConnection(self, remote, "outbound")
        local.twin = MemoryConnection(remote, self, "inbound")
        local.twin.twin = local
        self._addrs.setdefault(peer, {})[remote.addr] = None
        self._connections[local] = None
        remote._connections[local.twin] = None
        self._emit(PeerConnected(local))
        remote._emit(PeerConnected(local.twin))
        return local

    def drop(self, connection: MemoryConnection, reason: str) -> None:
        """Forget an ended connection and tell the listeners."""
        if connection in self._connections:
            del self._connections[connection]
            self._emit(PeerDisconnected(connection, not self.connections(connection.peer), reason))

    async def ping(self, peer: PeerId, *, timeout_s: float = 5.0) -> float:
        connection = await self.dial(peer)
        started = trio.current_time()
        answered = trio.Event()
        connection.post(lambda: connection.twin.post(answered.set))
        with trio.move_on_after(timeout_s):
            await answered.wait()
            connection.rtt_s = trio.current_time() - started
            return connection.rtt_s
        raise RequestTimeoutError(f"{peer} did not answer a ping in {timeout_s} s")

    async def disconnect(self, peer: PeerId) -> bool:
        found = self.connections(peer)
        for connection in found:
            await connection.close()
        return bool(found)

    def add_addrs(self, peer: PeerId, addrs: Sequence[str], *, ttl_s: float) -> None:
        self._addrs.setdefault(peer, {}).update(dict.fromkeys(addrs))

    def addrs(self, peer: PeerId) -> list[str]:
        return list(self._addrs.get(peer, {}))

    def keep_connected(self, peer: PeerId) -> None:
        """Dial the peer, and again each second after it is lost, until `forget`."""
        if peer == self.peer_id or peer in self._wanted or self.is_killed:
            return
        self._wanted[peer] = scope = trio.CancelScope()
        trio.lowlevel.spawn_system_task(self._keep, peer, scope)

    async def _keep(self, peer: PeerId, scope: trio.CancelScope) -> None:
        with scope:
            while True:
                if not self.connections(peer):
                    try:
                        await self.dial(peer)
                    except PeerNotFoundError:
                        self._counters["redial_failures"] = self._counters.get("redial_failures", 0) + 1
                await trio.sleep(1.0)

    def forget(self, peer: PeerId) -> None:
        """End `keep_connected`."""
        scope = self._wanted.pop(peer, None)
        if scope is not None:
            scope.cancel()

    def protect(self, connection: Connection, by: str) -> None:
        """Nothing to do: this host takes any number of connections."""

    def unprotect(self, connection: Connection, by: str) -> None:
        """Nothing to do."""

    def discover(self, peer: PeerId, addrs: Sequence[str], source: str = "test") -> None:
        """As if a discovery source had named a peer."""
        self._emit(PeerDiscovered(peer, tuple(addrs), source))

    def counters(self) -> dict[str, int]:
        return dict(self._counters)

    def kill(self) -> None:
        """As kill -9: every connection breaks at both ends, the address answers no more."""
        self.is_killed = True
        for peer in list(self._wanted):
            self.forget(peer)
        if self.network.find(self.peer_id) is self:
            self.network.remove(self.peer_id)
        for connection in list(self._connections):
            connection.end("this host was killed")
            twin = connection.twin
            self.network.post(self.peer_id, connection.peer, partial(twin.end, "connection reset by the peer"))
