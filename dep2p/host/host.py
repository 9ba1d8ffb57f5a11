"""`LibP2PHost`: a node's connections over py-libp2p, behind the `Host` interface."""

import logging
import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import trio
from libp2p.crypto.ed25519 import create_new_key_pair

from dep2p._version import __version__
from dep2p.errors import ListenError, StreamClosedError
from dep2p.host.addresses import parse_address
from dep2p.host.connection_interest import ConnectionInterest
from dep2p.host.connections.connection import PeerConnection
from dep2p.host.connections.dialer import Dialer
from dep2p.host.connections.identify import (
    IDENTIFY,
    IDENTIFY_PUSH,
    PING,
    IdentifyService,
    OwnDescription,
    PingServer,
    ping,
)
from dep2p.host.connections.peerstore import PeerStore
from dep2p.host.connections.reconnect import Reconnector
from dep2p.host.connections.signed_records import open_signed_record
from dep2p.host.connections.swarm import Swarm
from dep2p.host.connections.upgrade import new_upgrader
from dep2p.host.counters import Counters
from dep2p.host.discovery.bootstrap import BootstrapDiscovery
from dep2p.host.discovery.interface import Discovery, run_source
from dep2p.host.discovery.libp2p_adapter import FacadeHost
from dep2p.host.discovery.named_peers import NamedPeers
from dep2p.host.hole_punching.dials import DirectDials
from dep2p.host.hole_punching.service import HolePunching
from dep2p.host.interface import (
    Connection,
    HostEvent,
    NetworkChanged,
    PeerConnected,
    PeerDisconnected,
    PeerDiscovered,
    ProtocolGate,
    StreamHandler,
)
from dep2p.host.loop_watch import LoopWatch
from dep2p.host.loopback.connection import LoopbackConnection
from dep2p.host.multistream import encode_message
from dep2p.host.network_watch import NetworkWatch
from dep2p.host.reachability.client import ReachabilityClient
from dep2p.host.reachability.dial_back import BackDialer, has_route, source_address
from dep2p.host.reachability.observations import Observations
from dep2p.host.reachability.server import DialBackServer
from dep2p.host.scopes import new_scope, shielded
from dep2p.host.supervisor import Supervisor
from dep2p.host.transports.registry import Transports
from dep2p.host.transports.relay.client import RelayClient
from dep2p.host.transports.relay.server import RelayServer
from dep2p.host.transports.tcp import listenable
from dep2p.identity import Identity
from dep2p.limits import Limits
from dep2p.protocols.reachability.model import NatKind, ReachabilityReport
from dep2p.protocols.reachability.observed import ObservedTransport
from dep2p.protocols.timing.reconnect import ReconnectPolicy
from dep2p.types import PeerId

logger: logging.Logger = logging.getLogger("dep2p.host")

RelayMode = Literal["off", "client", "server"]
"""client: reserve at connected relays, be dialled through them; server: relay for others; both dial through relays."""

_DISCOVERED_TTL_S = 3_600.0
_RECONNECT_MAX_S = 60.0
"""The longest wait before a peer that is kept connected is dialed again: what came back is found within a minute."""
_PEERSTORE_SAVE_INTERVAL_S = 30.0
_IDENTIFY_PUSH_DELAY_S = 0.2
_IDENTIFY_CONCURRENCY = 128  # a peer that does not answer holds a place until the time limit


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    """Options of a host.

    ``peerstore_path``: a file that keeps peers' addresses; None keeps them in memory. ``advertise``: addresses to
    announce besides those in use, for example of a forwarded port. ``agent``: the software that
    identify names; "" names dep2p and its version.
    """

    limits: Limits = field(default_factory=Limits)
    peerstore_path: Path | None = None
    discovery: Sequence[Discovery] = ()
    relay: RelayMode = "off"
    agent: str = ""
    advertise: Sequence[str] = ()


class LibP2PHost:
    """The `Host` that speaks to other processes. Make one with `open`."""

    def __init__(self, identity: Identity, options: HostOptions) -> None:
        """Use `open`; this only wires the parts and does no I/O."""
        limits = options.limits
        self._identity = identity
        self._limits = limits
        self._counters = Counters()
        self._loop_watch = LoopWatch(self._counters)
        self._network_watch = NetworkWatch(self._on_network_change, self._counters)
        self._key_pair = create_new_key_pair(identity.private_seed)
        self._peer_store = PeerStore(
            identity.peer_id, limits.peers_known_max, self._counters, path=options.peerstore_path
        )
        upgrader = new_upgrader(self._key_pair, limits, self._counters)
        self._swarm = Swarm(identity.peer_id, upgrader, limits, self._counters, is_pinned=self._peer_store.is_pinned)
        self._loopback = LoopbackConnection(identity.peer_id, self._swarm.handlers, limits, self._counters)
        self._advertise = [_advertised(text) for text in options.advertise]
        self._discovery = list(options.discovery)
        self._facade: FacadeHost | None = None
        self._supervisor = Supervisor()
        self._transports = Transports(self._swarm, self._key_pair, self._supervisor, limits, self._counters)
        self._protocols_changed = trio.Event()
        self._identify_slots = trio.CapacityLimiter(_IDENTIFY_CONCURRENCY)
        self._observations = Observations(
            self._counters, is_member=self._is_member, listen_addrs=self._transports.listen_texts
        )
        self._identify = IdentifyService(
            OwnDescription(
                key_pair=self._key_pair,
                agent=options.agent or f"dep2p/{__version__}",
                addrs=self.listen_addrs,
                protocols=lambda connection: list(self._swarm.gates.seen_by(connection)),
            ),
            self._peer_store,
            self._counters,
            timeout_s=limits.stream_open_timeout_s,
            on_identified=self._on_identified,
            on_observed=self._observations.take,
        )
        self._reachability = ReachabilityClient(
            self,
            self._counters,
            self._observations,
            listened=self._transports.listen_texts,
            advertised=self._advertise,
            network=source_address,
        )
        self._back_dialer: BackDialer | None = None
        self._relay_mode = options.relay
        self._relay_client: RelayClient | None = None
        self._relay_server: RelayServer | None = None
        self._hole_punching: HolePunching | None = None
        self._nursery: trio.Nursery | None = None
        self._dialer: Dialer | None = None
        self._interest = ConnectionInterest()
        self._named = NamedPeers(limits.peers_known_max)
        self._reconnector = Reconnector(
            ReconnectPolicy(random.SystemRandom(), max_s=_RECONNECT_MAX_S, peers_max=limits.peers_known_max),
            self.dial,
            lambda peer: self._swarm.live(peer) is not None,
            self._counters,
        )

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        identity: Identity,
        *,
        listen: Sequence[str],
        options: HostOptions | None = None,
    ) -> AsyncGenerator["LibP2PHost", None]:
        """Listen on ``listen`` and run until the block is left; then everything is closed, bounded by close_timeout_s.

        ``listen`` may be empty (dial only); port 0 picks a free port.

        Raises ListenError before the block starts, HostFailedError out of the block when a part of the host fails.
        """
        host = cls(identity, options or HostOptions())
        body_error: Exception | None = None
        async with trio.open_nursery() as nursery:
            try:
                await host._start(nursery, listen)
                with new_scope() as body_scope:
                    host._supervisor.watch(body_scope)
                    yield host
            except Exception as error:
                body_error = error
            finally:
                with shielded(4 * host._limits.close_timeout_s):
                    await host._stop()
                nursery.cancel_scope.cancel()
        if host._supervisor.failure is not None:
            raise host._supervisor.failure from (body_error or host._supervisor.failure.__cause__)
        if body_error is not None:
            raise body_error

    # Life

    async def _start(self, nursery: trio.Nursery, listen: Sequence[str]) -> None:
        self._nursery = self._swarm.nursery = nursery
        await trio.to_thread.run_sync(self._peer_store.load)
        self._dialer = Dialer(
            nursery,
            self.peer_id,
            self._swarm.live,
            self._peer_store.addrs,
            self._transports.connect_once,
            self._limits,
            self._counters,
        )
        self.set_stream_handler(IDENTIFY, self._identify.serve)
        self.set_stream_handler(IDENTIFY_PUSH, self._identify.serve_push)
        self.set_stream_handler(PING, PingServer(self._counters).serve)
        self._swarm.subscribe(self._on_event)
        self._swarm.subscribe(self._observations.on_event)
        self._swarm.subscribe(self._reconnector.on_event)
        nursery.start_soon(self._supervisor.run, "loopback", self._loopback.run)
        for text in listen:
            await self._transports.listen(listenable(text))
        self._start_reachability(nursery)
        if self._relay_mode != "off":
            self._start_relaying(nursery)
        for source in self._discovery:
            nursery.start_soon(self._run_source, source)
        nursery.start_soon(self._supervisor.run, "identify push", self._push_changes)
        nursery.start_soon(self._supervisor.run, "peer store", self._save_peer_store)
        nursery.start_soon(self._supervisor.run, "reconnector", self._reconnector.run)
        nursery.start_soon(self._supervisor.run, "loop watch", self._loop_watch.run)
        nursery.start_soon(self._supervisor.run, "network watch", self._network_watch.run)

    async def _stop(self) -> None:
        self._supervisor.stop()
        await self._swarm.close_all("this host was closed")
        await self._transports.close()
        if self._back_dialer is not None:
            await self._back_dialer.close()
        with trio.move_on_after(self._limits.close_timeout_s):
            await self._peer_store.save()

    async def _save_peer_store(self) -> None:
        while True:
            await trio.sleep(_PEERSTORE_SAVE_INTERVAL_S)
            self._peer_store.expire()
            await self._peer_store.save()

    # Reachability

    def _start_reachability(self, nursery: trio.Nursery) -> None:
        self._back_dialer = BackDialer(nursery, self._limits)
        DialBackServer(
            self,
            self._counters,
            own_addrs=self.listen_addrs,
            bring=self._back_dialer.bring,
            has_route=has_route,
            rng=random.SystemRandom(),
        )
        self._reachability.subscribe(lambda _report: self._protocols_changed.set())  # the addresses that identify names
        nursery.start_soon(self._supervisor.run, "reachability client", self._reachability.run)

    def reachability(self) -> ReachabilityReport:
        """Return whether and where nodes outside reach this host, by tests of members, and what NAT is between."""
        return self._reachability.report()

    def subscribe_reachability(self, on_report: Callable[[ReachabilityReport], None]) -> Callable[[], None]:
        """Call ``on_report`` synchronously when the reachability or a verified address changes.

        It must not block or raise. Returns a function that ends it.
        """
        return self._reachability.subscribe(on_report)

    def _on_network_change(self, what: str) -> None:
        self._protocols_changed.set()  # identify names the addresses, too
        self._swarm.emit(NetworkChanged(what))
        self._reconnector.network_changed()
        if self._nursery is not None:
            self._nursery.start_soon(self._swarm.probe_all, what)

    # Relay

    def _start_relaying(self, nursery: trio.Nursery) -> None:
        timeout_s = self._limits.stream_open_timeout_s
        if self._relay_mode == "server":
            self._relay_server = RelayServer(self, self._counters, timeout_s=timeout_s, ledger=self._swarm.ledger)
        self._relay_client = RelayClient(
            self,
            self._counters,
            self._swarm.accept,
            self._peer_store.protocols,
            reserves=self._relay_mode == "client",
            timeout_s=timeout_s,
        )
        self._transports.dial_relayed = self._relay_client.dial
        if self._relay_mode == "client":
            nursery.start_soon(self._supervisor.run, "relay client", self._relay_client.run)
        rng = random.SystemRandom()
        self._hole_punching = HolePunching(
            self, DirectDials(self._transports, self._counters, rng), self._counters, rng, timeout_s=timeout_s
        )
        nursery.start_soon(self._supervisor.run, "hole punching", self._hole_punching.run)

    def _on_identified(self, peer: PeerId) -> None:
        self._reachability.wake()
        if self._relay_client is not None:
            self._relay_client.consider(peer)
        if self._hole_punching is not None:
            self._hole_punching.consider(peer)

    # Discovery

    async def _run_source(self, source: Discovery) -> None:
        named: dict[PeerId, None] = {}

        def emit(peer: PeerId, addrs: Sequence[str]) -> None:
            has_new = self._peer_store.add_addrs(peer, addrs, _DISCOVERED_TTL_S)
            if peer == self.peer_id:
                return
            self._named.note(PeerDiscovered(peer, tuple(addrs), source.name), trio.current_time())
            if has_new or peer not in named:
                if len(named) >= self._limits.peers_known_max:
                    named.clear()  # at worst some peers are reported twice
                named[peer] = None
                self._counters.add(f"discovery_{source.name}_found")
                self._reconnector.hint(peer)
                self._swarm.emit(PeerDiscovered(peer, tuple(self._peer_store.addrs(peer)), source.name))

        await self._supervisor.run(
            f"discovery source {source.name}", lambda: run_source(source, self, emit, self._counters)
        )

    def discovered(self) -> list[PeerDiscovered]:
        return self._named.events(trio.current_time())

    # Identify

    def _on_event(self, event: HostEvent) -> None:
        if isinstance(event, PeerConnected) and self._nursery is not None:
            self._nursery.start_soon(self._identify_peer, event.connection)
        elif isinstance(event, PeerDisconnected) and event.last:
            self._peer_store.forget_protocols(event.connection.peer)

    async def _identify_peer(self, connection: Connection) -> None:
        async with self._identify_slots:
            if not connection.is_closed:
                await self._identify.query(connection)

    async def _push_changes(self) -> None:
        while True:
            await self._protocols_changed.wait()
            await trio.sleep(_IDENTIFY_PUSH_DELAY_S)  # handlers are usually set several at a time
            self._protocols_changed = trio.Event()
            async with trio.open_nursery() as nursery:
                for connection in self._swarm.connections():
                    nursery.start_soon(self._push_to, connection)

    async def _push_to(self, connection: PeerConnection) -> None:
        async with self._identify_slots:
            await self._identify.push(connection)

    # Host

    @property
    def peer_id(self) -> PeerId:
        return self._identity.peer_id

    def listen_addrs(self) -> list[str]:
        relayed = [] if self._relay_client is None else self._relay_client.addrs()
        verified = self._reachability.verified()
        found = dict.fromkeys([*self._transports.listen_texts(), *self._advertise, *verified, *relayed])
        return [f"{text}/p2p/{self.peer_id}" for text in found]

    def observed_addrs(self) -> list[str]:
        """Return the public addresses at which peers see the sockets that this host listens on, without a peer id.

        TCP, WebSocket and QUIC; the surest first: those on which several agree, then those that one member has seen.
        None of them is tested.
        """
        return self._observations.addrs()

    def nat_kind(self, transport: ObservedTransport) -> NatKind:
        """Return how routers translate the connections of a transport, by what peers see."""
        return self._observations.nat_kind(transport)

    @property
    def loopback(self) -> Connection:
        return self._loopback

    def connections(self, peer: PeerId | None = None) -> list[Connection]:
        return list(self._swarm.connections(peer))

    def subscribe(self, on_event: Callable[[HostEvent], None]) -> Callable[[], None]:
        return self._swarm.subscribe(on_event)

    def set_stream_handler(self, protocol: str, handler: StreamHandler) -> None:
        encode_message(protocol)  # raises ValueError for what is no protocol name
        is_new = protocol not in self._swarm.handlers
        self._swarm.handlers[protocol] = handler
        if is_new and not self._swarm.gates.is_restricted(protocol):
            self._protocols_changed.set()

    def remove_stream_handler(self, protocol: str) -> None:
        is_gone = self._swarm.handlers.pop(protocol, None) is not None
        if is_gone and not self._swarm.gates.is_restricted(protocol):
            self._protocols_changed.set()

    def restrict(self, part: str, gate: ProtocolGate | None) -> None:
        self._swarm.gates.restrict(part, gate)

    async def dial(self, peer: PeerId, addrs: Sequence[str] = (), *, timeout_s: float | None = None) -> Connection:
        if self._dialer is None:
            raise StreamClosedError("the host is not open")
        return await self._dialer.dial(peer, addrs, timeout_s)

    async def ping(self, peer: PeerId, *, timeout_s: float = 5.0) -> float:
        connection = await self.dial(peer, timeout_s=timeout_s)
        return await ping(connection, timeout_s=timeout_s)

    async def disconnect(self, peer: PeerId) -> bool:
        connections = self._swarm.connections(peer)
        async with trio.open_nursery() as nursery:
            for connection in connections:
                nursery.start_soon(connection.close)
        return bool(connections)

    def keep_connected(self, peer: PeerId, by: str) -> None:
        if peer != self.peer_id:
            self._interest.add(peer, by)
            self._peer_store.pin(peer)
            self._reconnector.keep_connected(peer, is_bootstrap=by == BootstrapDiscovery.name)

    def forget(self, peer: PeerId, by: str | None = None) -> None:
        if self._interest.remove(peer, by):
            self._reconnector.forget(peer)
            self._peer_store.unpin(peer)

    def dial_failure(self, peer: PeerId) -> str | None:
        return self._reconnector.failure(peer)

    def protect(self, connection: Connection, by: str) -> None:
        if isinstance(connection, PeerConnection):
            connection.protect(by)
            self._reachability.wake()

    def unprotect(self, connection: Connection, by: str) -> None:
        if isinstance(connection, PeerConnection):
            connection.unprotect(by)

    def is_protected(self, connection: Connection) -> bool:
        """Whether a part of the node protects the connection."""
        return isinstance(connection, PeerConnection) and bool(connection.protected_by)

    def _is_member(self, peer: PeerId) -> bool:
        """Whether a part of the node has verified the peer on a connection that it has now."""
        return any(map(self.is_protected, self._swarm.connections(peer)))

    def keep_place(self, connection: Connection, *, keeps: bool) -> None:
        """Whether other connections of strangers give way before this one, whose peer uses this host as a relay."""
        if isinstance(connection, PeerConnection):
            connection.keep_place(keeps)

    def add_addrs(self, peer: PeerId, addrs: Sequence[str], *, ttl_s: float) -> None:
        if self._peer_store.add_addrs(peer, addrs, ttl_s):
            self._reconnector.hint(peer)

    def addrs(self, peer: PeerId) -> list[str]:
        return self._peer_store.addrs(peer)

    def signed_record(self, peer: PeerId) -> bytes:
        return self._peer_store.signed_record(peer)

    def add_signed_record(self, peer: PeerId, envelope: bytes, *, ttl_s: float) -> None:
        self.add_addrs(peer, open_signed_record(envelope, peer).addrs, ttl_s=ttl_s)

    def peer_protocols(self, peer: PeerId) -> tuple[str, ...]:
        """The protocols that the peer named in identify; empty before that, and when it is not connected."""
        return self._peer_store.protocols(peer)

    def peer_agent(self, peer: PeerId) -> str:
        """The software that the peer named in identify; "" before that."""
        return self._peer_store.agent(peer)

    def facade(self) -> FacadeHost:
        """This host as py-libp2p's protocols want it."""
        if self._facade is None:
            self._facade = FacadeHost(self, self._key_pair)
        return self._facade

    def counters(self) -> dict[str, int]:
        counts = Counter(self._counters.snapshot())
        for connection in self._swarm.connections():
            counts.update({f"mux_{name}": amount for name, amount in connection.muxer_counters().items()})
        counts["connections"] = self._swarm.total
        counts["inbound_pending"] = self._swarm.pending_inbound
        counts["peers_known"] = len(self._peer_store)
        counts.update(self._swarm.ledger.values())
        for relaying in (self._relay_server, self._relay_client):
            counts.update({} if relaying is None else relaying.values())
        counts.update(self._observations.values())
        counts["loop_delay_max_ms"] = self._loop_watch.delay_max_ms
        return dict(sorted(counts.items()))


def _advertised(text: str) -> str:
    try:
        return parse_address(text).text
    except ValueError as error:
        raise ListenError(f"cannot advertise {text}: {error}") from None
