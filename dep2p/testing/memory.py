"""A network in memory: hosts, connections and streams with flow control, latency, partitions and crashes, no sockets.

Runs under trio's virtual clock (``autojump_clock``), so that a test of minutes takes milliseconds. Tests of
everything above the host use it; what only a real transport can show is tested on real hosts.
"""

import hashlib
import heapq
import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import trio

from dep2p.errors import (
    PeerNotFoundError,
    ProtocolError,
    ProtocolNotSupportedError,
    RequestTimeoutError,
    StreamClosedError,
)
from dep2p.host.connection_interest import ConnectionInterest
from dep2p.host.connections.duplicates import Duplicates
from dep2p.host.counters import Counters
from dep2p.host.discovery.named_peers import NamedPeers
from dep2p.host.interface import (
    CircuitUse,
    Connection,
    Direction,
    EndCallback,
    HostEvent,
    PeerConnected,
    PeerDisconnected,
    PeerDiscovered,
    ProtocolGate,
    ReceiveCallback,
    StreamHandler,
)
from dep2p.host.loopback.connection import LoopbackConnection
from dep2p.identity import Identity
from dep2p.limits import Limits
from dep2p.types import PeerId

_logger = logging.getLogger("dep2p.testing")

WINDOW_BYTES: Final = 262_144
_CHUNK_BYTES: Final = 65_536
_CREDIT_BYTES: Final = WINDOW_BYTES // 2
"""Window is given back in pieces of at least this size, as Yamux does: else it falls apart into ever smaller ones."""
_SLOW_CREDIT_BYTES: Final = 16_384
"""Or in these, a second after the last time: as our Yamux does, so that a slow link's sender sees its bytes arrive."""
_SLOW_CREDIT_S: Final = 1.0
_WRITE_HIGH_BYTES: Final = 262_144


class MemoryNetwork:
    """The wire between :class:`MemoryHost` objects.

    ``latency_s`` is one way and may be changed at any time. With ``bytes_per_s`` it is slow:

        network = MemoryNetwork(bytes_per_s=8_000)
    """

    def __init__(self, *, latency_s: float = 0.001, bytes_per_s: float = float("inf")) -> None:
        self.latency_s = latency_s
        self.bytes_per_s: float = bytes_per_s
        """Bytes that pass in a second, from each host to each other one; may be changed at any time."""
        self._free_at_s: dict[tuple[PeerId, PeerId], float] = {}
        self._hosts: dict[PeerId, MemoryHost] = {}
        self._cut: dict[tuple[PeerId, PeerId], None] = {}
        self._due: list[tuple[float, int, PeerId, PeerId, Callable[[], None]]] = []
        self._held: list[tuple[PeerId, PeerId, Callable[[], None]]] = []
        self._order = itertools.count()
        self._ports = itertools.count(1)
        self._wake = trio.Event()
        self._pumping = False

    def host(self, identity: Identity | None = None) -> "MemoryHost":
        """Make a host, reachable at once. The same identity again replaces a killed host (a reboot)."""
        host = MemoryHost(self, identity or Identity.generate(), next(self._ports))
        self._hosts[host.peer_id] = host
        return host

    def find(self, peer: PeerId) -> "MemoryHost | None":
        """Return the live host of a peer."""
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

    def post(self, sender: PeerId, receiver: PeerId, deliver: Callable[[], None], size_bytes: int = 0) -> None:
        """Call ``deliver`` after the latency, and the time that the bytes take, in the order of posting."""
        begins_s = max(trio.current_time(), self._free_at_s.get((sender, receiver), 0.0))
        self._free_at_s[(sender, receiver)] = ends_s = begins_s + size_bytes / self.bytes_per_s
        due = ends_s + self.latency_s
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
        self.id: int = next(self._ids)
        self.host = host
        self.peer: PeerId = remote.peer_id
        self.direction: Direction = direction
        self.remote_addr: str = (
            remote.addr if direction == "outbound" else f"/ip4/127.0.0.1/tcp/{40_000 + self.id % 20_000}"
        )
        self.opened_at_s: float = trio.current_time()
        self.rtt_s: float | None = None
        self.is_closed: bool = False
        self.is_superseded: bool = False
        self.is_limited: bool = False
        self.circuit: CircuitUse | None = None
        self.protected_by: dict[str, None] = {}
        self.keeps_place: bool = False
        self.channel_binding = b""
        self.twin: MemoryConnection
        self.streams: dict[MemoryStream, None] = {}

    def post(self, deliver: Callable[[], None], size_bytes: int = 0) -> None:
        """Deliver something to the other end, unless the connection is gone by then."""

        def deliver_if_open() -> None:
            if not self.twin.is_closed:
                deliver()

        self.host.network.post(self.host.peer_id, self.peer, deliver_if_open, size_bytes)

    async def open_stream(self, protocol: str, *, timeout_s: float = 10.0) -> "MemoryStream":
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

    @property
    def carried_bytes(self) -> int:
        """0: no relay carries anything."""
        return 0

    def open_protocols(self) -> list[str]:
        """The protocols of the streams that are open."""
        return [stream.protocol for stream in self.streams]

    def abort(self, reason: str) -> None:
        """End the connection without waiting; the other end notices."""
        self.end(reason)
        twin = self.twin
        self.host.network.post(self.host.peer_id, self.peer, lambda: twin.end("closed by the peer"))

    async def probe(self, within_s: float) -> None:
        """Return when the other end answers. Raises RequestTimeoutError."""
        answered = trio.Event()
        self.post(lambda: self.twin.post(answered.set))
        with trio.move_on_after(within_s):
            await answered.wait()
            return
        raise RequestTimeoutError(f"{self.peer} did not answer a ping in {within_s} s")

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


class MemoryStream:
    """One end of a stream; implements ``dep2p.host.interface.ByteStream``."""

    def __init__(self, connection: MemoryConnection, protocol: str) -> None:
        self._connection = connection
        self._protocol = protocol
        self.twin: MemoryStream
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self.sent_bytes: int = 0
        self.granted_bytes: int = 0
        self._window_bytes = WINDOW_BYTES
        self._consumed_bytes = 0  # and not given back yet
        self._credited_at_s = trio.current_time()
        self._end_awaited = False
        self._write_closed = False
        self._inbox = bytearray()
        self._read_ended = False
        self._error: StreamClosedError | None = None
        self._on_data: ReceiveCallback | None = None
        self._on_end: EndCallback | None = None
        self._end_notified = False
        self._paused = False
        self._dropping = False
        self._lot = trio.lowlevel.ParkingLot()

    @property
    def connection(self) -> MemoryConnection:
        return self._connection

    @property
    def protocol(self) -> str:
        return self._protocol

    @property
    def unsent_bytes(self) -> int:
        return self._unsent_bytes

    @property
    def is_write_closed(self) -> bool:
        return self._write_closed or self._error is not None

    def write_nowait(self, data: bytes | bytearray | memoryview, *, urgent: bool = False) -> None:
        if self._error is not None:
            raise self._error
        if self._write_closed:
            raise StreamClosedError("this side of the stream is closed for writing")
        if len(data):
            self._unsent.append(memoryview(bytes(data)))
            self._unsent_bytes += len(data)
            self._flush()

    def _flush(self) -> None:
        while self._unsent and self._window_bytes > 0:
            data = self._next_chunk(min(self._window_bytes, _CHUNK_BYTES))
            self._window_bytes -= len(data)
            self._unsent_bytes -= len(data)
            self.sent_bytes += len(data)
            self._connection.post(partial(self.twin.take, data), len(data))
        if self._end_awaited and not self._unsent:
            self._end_awaited = False
            self._post(lambda: self.twin.take_end())
        self._lot.unpark_all()

    def _next_chunk(self, room: int) -> bytes:
        pieces: list[memoryview] = []
        while self._unsent and room > 0:
            piece = self._unsent.popleft()
            if len(piece) > room:
                self._unsent.appendleft(piece[room:])
                piece = piece[:room]
            pieces.append(piece)
            room -= len(piece)
        return b"".join(pieces)

    def _post(self, deliver: Callable[[], None]) -> None:
        self._connection.post(deliver)

    async def drain(self, low_bytes: int = 0) -> None:
        await trio.lowlevel.checkpoint()
        while self._unsent_bytes > low_bytes:
            if self._error is not None:
                raise self._error
            await self._lot.park()
        if self._error is not None:
            raise self._error

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        self.write_nowait(data)
        await self.drain(_WRITE_HIGH_BYTES)

    async def read(self, max_bytes: int = 65_536) -> bytes:
        await trio.lowlevel.checkpoint()
        while not self._inbox:
            if self._error is not None:
                raise self._error
            if self._read_ended:
                return b""
            await self._lot.park()
        data = bytes(self._inbox[:max_bytes])
        del self._inbox[:max_bytes]
        self._credit(len(data))
        return data

    def _credit(self, count: int) -> None:
        self._consumed_bytes += count
        now = trio.current_time()
        is_slow = self._consumed_bytes >= _SLOW_CREDIT_BYTES and now - self._credited_at_s >= _SLOW_CREDIT_S
        if self._consumed_bytes >= _CREDIT_BYTES or is_slow:
            self._credited_at_s = now
            consumed, self._consumed_bytes = self._consumed_bytes, 0
            self._post(lambda: self.twin.grant(consumed))

    def grant(self, count: int) -> None:
        """Take back window, since the other end consumed ``count`` bytes."""
        self._window_bytes += count
        self.granted_bytes += count
        self._flush()

    def take(self, data: bytes) -> None:
        """Take bytes that arrived from the other end."""
        if self._error is not None:
            return
        if self._dropping:
            self._credit(len(data))
            return
        if self._on_data is not None and not self._paused:
            self._credit(len(data))
            self._on_data(data)
            return
        self._inbox += data
        self._lot.unpark_all()

    def take_end(self) -> None:
        """Note that the other end half-closed."""
        self._read_ended = True
        self._lot.unpark_all()
        self._notify_end()
        self._forget_if_done()

    def set_receiver(self, on_data: ReceiveCallback, on_end: EndCallback) -> None:
        self._on_data = on_data
        self._on_end = on_end
        self._push_inbox()

    def pause_receiving(self) -> None:
        self._paused = True

    def resume_receiving(self) -> None:
        self._paused = False
        self._push_inbox()

    def _push_inbox(self) -> None:
        while self._inbox and self._on_data is not None and not self._paused:
            data = bytes(self._inbox[:_CHUNK_BYTES])
            del self._inbox[:_CHUNK_BYTES]
            self._credit(len(data))
            self._on_data(data)
        self._notify_end()

    def _notify_end(self) -> None:
        if self._on_end is None or self._end_notified:
            return
        if self._error is not None:
            self._end_notified = True
            self._on_end(self._error)
        elif self._read_ended and not self._inbox:
            self._end_notified = True
            self._on_end(None)

    async def close_write(self) -> None:
        await trio.lowlevel.checkpoint()
        self._close_write_nowait()

    def _close_write_nowait(self) -> None:
        if self._write_closed or self._error is not None:
            return
        self._write_closed = True
        self._end_awaited = True
        self._flush()
        self._forget_if_done()

    async def close(self) -> None:
        self._close_write_nowait()
        self._dropping = True
        self._end_notified = True
        if self._inbox:
            self._credit(len(self._inbox))
            self._inbox.clear()
        await trio.lowlevel.cancel_shielded_checkpoint()

    def reset(self) -> None:
        if self._error is None:
            self._post(lambda: self.twin.fail(StreamClosedError("the peer reset the stream")))
            self._end_notified = True  # who resets knows
            self.fail(StreamClosedError("the stream was reset on this side"))

    def fail(self, error: StreamClosedError) -> None:
        """End both directions with an error. Idempotent."""
        if self._error is not None:
            return
        self._error = error
        self._unsent.clear()
        self._unsent_bytes = 0
        self._inbox.clear()
        self._lot.unpark_all()
        self._notify_end()
        self._connection.streams.pop(self, None)

    def _forget_if_done(self) -> None:
        if self._write_closed and self._read_ended:
            self._connection.streams.pop(self, None)


class MemoryHost:
    """Implements ``dep2p.host.interface.Host`` on a :class:`MemoryNetwork`."""

    def __init__(self, network: MemoryNetwork, identity: Identity, port: int) -> None:
        self.network = network
        self.identity = identity
        self.peer_id: PeerId = identity.peer_id
        self.addr: str = f"/ip4/127.0.0.1/tcp/{port}/p2p/{self.peer_id}"
        self.handlers: dict[str, StreamHandler] = {}
        self.is_killed: bool = False
        self._connections: dict[MemoryConnection, None] = {}
        self._listeners: dict[int, Callable[[HostEvent], None]] = {}
        self._listener_ids = itertools.count()
        self._addrs: dict[PeerId, dict[str, None]] = {}
        self._targets: dict[PeerId, trio.CancelScope] = {}
        self._dial_failures: dict[PeerId, str] = {}
        self._named = NamedPeers(Limits().peers_known_max)
        self._interest = ConnectionInterest()
        self._counters: dict[str, int] = {}
        self._duplicates: Duplicates[MemoryConnection] = Duplicates(
            self.peer_id, MemoryConnection.probe, self._emit, self._count
        )
        self._loopback: LoopbackConnection | None = None

    def _count(self, name: str) -> None:
        self._counters[name] = self._counters.get(name, 0) + 1

    def _admit(self, connection: MemoryConnection) -> None:
        others = self.connections(connection.peer)
        self._connections[connection] = None
        if others:
            self._duplicates.admitted(connection, others)
        self._emit(PeerConnected(connection))
        if others:
            trio.lowlevel.spawn_system_task(self._duplicates.settle, connection, others)

    @property
    def loopback(self) -> LoopbackConnection:
        if self._loopback is None:
            self._loopback = LoopbackConnection(self.peer_id, self.handlers, Limits(), Counters())
            trio.lowlevel.spawn_system_task(self._loopback.run)
        return self._loopback

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

    def restrict(self, part: str, gate: ProtocolGate | None) -> None:
        """Nothing to do: this host hides no protocols, so that tests reach the checks behind."""

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
        live = self.connections(peer)
        if live:
            return next((one for one in live if not one.is_superseded), live[-1])
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
        local.channel_binding = local.twin.channel_binding = hashlib.sha256(b"memory %d" % local.id).digest()
        self._addrs.setdefault(peer, {})[remote.addr] = None
        self._admit(local)
        remote._admit(local.twin)
        return local

    def drop(self, connection: MemoryConnection, reason: str) -> None:
        """Forget an ended connection and tell the listeners."""
        if connection in self._connections:
            del self._connections[connection]
            left = self.connections(connection.peer)
            self._emit(PeerDisconnected(connection, not left, reason))
            self._duplicates.ended(left)

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

    def signed_record(self, peer: PeerId) -> bytes:
        """Return no record: hosts in memory have no keys for them."""
        return b""

    def add_signed_record(self, peer: PeerId, envelope: bytes, *, ttl_s: float) -> None:
        """Always raises ProtocolError."""
        raise ProtocolError("hosts in memory read no signed records")

    def keep_connected(self, peer: PeerId, by: str) -> None:
        """Dial the peer, and again each second after it is lost, until `forget`."""
        if peer == self.peer_id or self.is_killed:
            return
        self._interest.add(peer, by)
        if peer in self._targets:
            return
        self._targets[peer] = scope = trio.CancelScope()
        trio.lowlevel.spawn_system_task(self._keep, peer, scope)

    async def _keep(self, peer: PeerId, scope: trio.CancelScope) -> None:
        with scope:
            while True:
                if not self.connections(peer):
                    try:
                        await self.dial(peer)
                        self._dial_failures.pop(peer, None)
                    except PeerNotFoundError as error:
                        self._dial_failures[peer] = str(error)
                        self._counters["redial_failures"] = self._counters.get("redial_failures", 0) + 1
                await trio.sleep(1.0)

    def forget(self, peer: PeerId, by: str | None = None) -> None:
        """End `keep_connected`."""
        if self._interest.remove(peer, by) and peer in self._targets:
            self._targets.pop(peer).cancel()
            self._dial_failures.pop(peer, None)

    def dial_failure(self, peer: PeerId) -> str | None:
        """Return why the last dial for `keep_connected` failed."""
        return None if self.connections(peer) else self._dial_failures.get(peer)

    def protect(self, connection: Connection, by: str) -> None:
        """Note who has verified the peer; this host takes any number of connections."""
        if isinstance(connection, MemoryConnection):
            connection.protected_by[by] = None

    def unprotect(self, connection: Connection, by: str) -> None:
        """Undo `protect`."""
        if isinstance(connection, MemoryConnection):
            connection.protected_by.pop(by, None)

    def is_protected(self, connection: Connection) -> bool:
        """Whether a part of the node protects the connection."""
        return isinstance(connection, MemoryConnection) and bool(connection.protected_by)

    def keep_place(self, connection: Connection, *, keeps: bool) -> None:
        """Note whether the connection keeps its place; this host takes any number of connections."""
        if isinstance(connection, MemoryConnection):
            connection.keeps_place = keeps

    def discover(self, peer: PeerId, addrs: Sequence[str], source: str = "test") -> None:
        """Act as if a discovery source had named a peer."""
        event = PeerDiscovered(peer, tuple(addrs), source)
        self._named.note(event, trio.current_time())
        self._emit(event)

    def discovered(self) -> list[PeerDiscovered]:
        """Return what `discover` has named within the last hour."""
        return self._named.events(trio.current_time())

    def counters(self) -> dict[str, int]:
        return dict(self._counters)

    def kill(self) -> None:
        """End the host as kill -9 does: every connection breaks at both ends, the address answers no more.

        For a host that goes without a word, use `vanish`.
        """
        self.is_killed = True
        for peer in list(self._targets):
            self.forget(peer)
        if self.network.find(self.peer_id) is self:
            self.network.remove(self.peer_id)
        for connection in list(self._connections):
            connection.end("this host was killed")
            twin = connection.twin
            self.network.post(self.peer_id, connection.peer, partial(twin.end, "connection reset by the peer"))

    def vanish(self) -> None:
        """End the host as a power cut does: the address answers no more, and the other ends of its connections do not
        notice."""
        self.is_killed = True
        for peer in list(self._targets):
            self.forget(peer)
        if self.network.find(self.peer_id) is self:
            self.network.remove(self.peer_id)
        for connection in list(self._connections):
            connection.end("this host has vanished")
