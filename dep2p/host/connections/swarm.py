"""The table of connections: admission, limits, upgrades, events. Everything that changes it is synchronous, so that no
cancellation can leave a slot taken."""

import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import trio
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.exceptions import IOException

from dep2p.errors import ProtocolNotSupportedError, RequestTimeoutError, StreamClosedError
from dep2p.host.connections import liveness
from dep2p.host.connections.circuit_limit import meter_of
from dep2p.host.connections.connection import ConnectionContext, PeerConnection, Upgraded
from dep2p.host.connections.duplicates import Duplicates
from dep2p.host.connections.identify import ping
from dep2p.host.connections.protocol_gates import ProtocolGates
from dep2p.host.connections.upgrade import UpgradeError, upgrade_inbound
from dep2p.host.counters import Counters
from dep2p.host.interface import Direction, HostEvent, PeerConnected, PeerDisconnected, StreamHandler
from dep2p.host.resources.ledger import Ledger
from dep2p.host.resources.turns import Turns
from dep2p.host.scopes import new_scope, shielded
from dep2p.limits import Limits
from dep2p.outside_text import one_line
from dep2p.types import PeerId

if TYPE_CHECKING:
    from libp2p.transport.upgrader import TransportUpgrader

logger: logging.Logger = logging.getLogger("dep2p.host")
R = TypeVar("R", bound=ReadWriteCloser)

_COMPLAIN_INTERVAL_S = 60
UNPROVEN_WEIGHT_MAX = 16
"""Weight of the work of unproven peers in one pass of the event loop: 16 reads of 16 KiB or 512 frames, a
millisecond."""
PROBE_AGAIN_S = 1.5
"""Seconds for an answer to a ping after the network has changed."""
PROBES_AT_ONCE = 256
UNPROTECTED_S = 30.0
"""How long an unprotected connection keeps its place when others need one: a few tries of a realm handshake.
Without it, a peer that holds idle connections from enough identities, or that discovery names often, takes all."""


class Swarm:
    """All connections of one host."""

    def __init__(
        self,
        own_peer: PeerId,
        upgrader: "TransportUpgrader",
        limits: Limits,
        counters: Counters,
        *,
        is_pinned: Callable[[PeerId], bool],
    ) -> None:
        self.own_peer = own_peer
        self.upgrader = upgrader
        self.limits = limits
        self.counters = counters
        self._is_pinned = is_pinned
        self.handlers: dict[str, StreamHandler] = {}
        self.gates: ProtocolGates = ProtocolGates(self.handlers)
        self.ledger: Ledger = Ledger(limits, self._on_resource_event)
        self._context = ConnectionContext(
            limits=limits,
            counters=counters,
            handlers=self.handlers,
            gates=self.gates,
            on_end=self._ended,
            watch=liveness.watch,
            ledger=self.ledger,
            turns=Turns(UNPROVEN_WEIGHT_MAX),
        )
        self.nursery: trio.Nursery | None = None
        self._connections: dict[PeerId, list[PeerConnection]] = {}
        self._total = 0
        self._pending: OrderedDict[int, trio.CancelScope] = OrderedDict()
        self._next_pending = 0
        self._complain_s: dict[str, float] = {}
        self._subscribers: dict[int, Callable[[HostEvent], None]] = {}
        self._next_subscriber = 0
        self._idle = trio.Event()
        self.closing: bool = False
        self._duplicates: Duplicates[PeerConnection] = Duplicates(own_peer, _probe, self.emit, counters.add)

    # Look-ups

    def connections(self, peer: PeerId | None = None) -> list[PeerConnection]:
        """Live connections, oldest first."""
        if peer is not None:
            return list(self._connections.get(peer, ()))
        return sorted((one for some in self._connections.values() for one in some), key=lambda one: one.id)

    def live(self, peer: PeerId) -> PeerConnection | None:
        """The live connection to a peer that is to be used; see `Duplicates`."""
        found = self._connections.get(peer)
        if not found:
            return None
        return next((one for one in found if not one.is_superseded), found[-1])

    @property
    def total(self) -> int:
        """How many connections there are."""
        return self._total

    @property
    def pending_inbound(self) -> int:
        """How many inbound connections are in their handshake."""
        return len(self._pending)

    # Events

    def _on_resource_event(self, counter: str, text: str) -> None:
        self.counters.add(counter)
        now_s = trio.current_time()
        if now_s >= self._complain_s.get(counter, now_s):  # an attack would fill the log
            self._complain_s[counter] = now_s + _COMPLAIN_INTERVAL_S
            logger.warning("%s; counted as host_%s, logged once in %d s", one_line(text), counter, _COMPLAIN_INTERVAL_S)

    def subscribe(self, on_event: Callable[[HostEvent], None]) -> Callable[[], None]:
        key = self._next_subscriber
        self._next_subscriber += 1
        self._subscribers[key] = on_event
        return lambda: void(self._subscribers.pop(key, None))

    def emit(self, event: HostEvent) -> None:
        """Notify every subscriber; one that raises is logged and does not stop the others."""
        for on_event in list(self._subscribers.values()):
            try:
                on_event(event)
            except Exception:
                self.counters.add("event_subscriber_failed")
                logger.exception("an event subscriber failed for %r", event)

    # Admission

    def _is_full(self, direction: Direction) -> bool:
        """Inbound connections leave room for our own dials: strangers cannot take every place."""
        most = self.limits.connections_max
        return self._total >= (most if direction == "outbound" else most - most // 8)

    def _replaceable(self) -> PeerConnection | None:
        """The oldest connection that has had time to become protected or pinned, and is neither."""
        latest_s = trio.current_time() - UNPROTECTED_S
        idle = [
            one
            for some in self._connections.values()
            for one in some
            if one.opened_at_s <= latest_s and not one.protected_by and not self._is_pinned(one.peer)
        ]
        # Those that use this host as a relay last: others reach them, or they reach others, through it.
        return min(idle, key=lambda one: (one.resources.account.keeps_place, one.opened_at_s), default=None)

    def admit(self, upgraded: Upgraded, direction: Direction, remote_addr: str) -> PeerConnection:
        """Take an upgraded connection into the table and start serving it.

        Raises StreamClosedError when a limit refuses it or the host is closing; the caller closes the muxer then.
        """
        nursery, peer = self.nursery, upgraded.peer
        if nursery is None or self.closing:
            raise StreamClosedError("the host is closing")
        if peer == self.own_peer:
            if not self.counters[f"{direction}_refused_own_identity"]:
                logger.warning(
                    "%s has this node's own identity: is its key file in use twice? It is refused", remote_addr
                )
            self.counters.add(f"{direction}_refused_own_identity")
            raise StreamClosedError("the peer has this host's own identity")
        if self._is_full(direction):
            idle = self._replaceable()
            if idle is not None:
                self.counters.add("connections_replaced")
                idle.abort("made room for another peer")
        if self._is_full(direction):
            self.counters.add(f"{direction}_refused_connections_max")
            raise StreamClosedError(f"this host has {self._total} connections, its limit (connections_max)")
        while len(self._connections.get(peer, ())) >= self.limits.connections_per_peer_max:
            # A peer that restarts again and again has left dead ones behind: the newest is the one that it uses.
            self.counters.add("connections_replaced_per_peer_max")
            self._connections[peer][0].abort("the peer has opened more connections than connections_per_peer_max")
        if upgraded.meter is not None and upgraded.meter.limit.is_narrow:
            limit = upgraded.meter.limit
            self.counters.add(f"{direction}_connections_limited")
            logger.info("the relay of the connection with %s carries %s: no pub/sub over it", peer, limit)
        others = self.connections(peer)
        connection = PeerConnection(upgraded, direction, remote_addr, self._context)
        nursery.start_soon(connection.run)
        self._connections.setdefault(peer, []).append(connection)
        self._total += 1
        self.counters.add(f"{direction}_connections")
        if others:
            self._duplicates.admitted(connection, others)
        self.emit(PeerConnected(connection))
        if others:
            nursery.start_soon(self._duplicates.settle, connection, others)
        return connection

    def _ended(self, connection: PeerConnection, reason: str) -> None:
        same_peer = self._connections.get(connection.peer, [])
        if connection not in same_peer:
            return
        same_peer.remove(connection)
        self._total -= 1
        if not same_peer:
            del self._connections[connection.peer]
        if self._total == 0:
            self._idle.set()
            self._idle = trio.Event()
        logger.debug("connection %d to %s ended: %s", connection.id, connection.peer, reason)
        self.emit(PeerDisconnected(connection, not same_peer, reason))
        self._duplicates.ended(same_peer)

    # Inbound

    async def accept(self, raw: R, remote_addr: str, prepare: Callable[[R], Awaitable[ReadWriteCloser]] | None) -> None:
        """Upgrade one inbound transport connection and admit it. Never raises for what the remote does."""
        if self.closing or (self._is_full("inbound") and self._replaceable() is None):
            self.counters.add("inbound_refused_connections_max")
            await self._close_raw(raw)
            return
        if len(self._pending) >= self.limits.connections_inbound_pending_max:
            # Peers that hold sockets open in silence must not lock out the next one: the oldest has had its time.
            _, oldest = self._pending.popitem(last=False)
            oldest.cancel()
            self.counters.add("inbound_dropped_pending_max")
        key = self._next_pending
        self._next_pending += 1
        admitted = in_time = False
        try:
            with new_scope(trio.current_time() + self.limits.handshake_timeout_s) as scope:
                self._pending[key] = scope
                try:
                    ready = raw if prepare is None else await prepare(raw)
                    upgraded = await upgrade_inbound(self.upgrader, ready)
                    upgraded = replace(upgraded, meter=meter_of(ready))
                finally:
                    in_time = self._pending.pop(key, None) is not None
                try:
                    self.admit(upgraded, "inbound", remote_addr)
                    admitted = True
                except StreamClosedError as error:
                    logger.debug("inbound connection of %s refused: %s", upgraded.peer, error)
                    await upgraded.muxer.close()
            if scope.cancelled_caught and in_time:
                self.counters.add("inbound_handshake_timeout")
        except (UpgradeError, IOException) as error:
            self.counters.add("inbound_handshake_failed")
            logger.debug("inbound connection from %s: %s", remote_addr, error)
        except Exception:
            # Whatever exception a library lets pass: one connection must not end the listener, and with it the host.
            if not self.counters["inbound_crashed"]:
                logger.exception("an inbound connection from %s failed in an unexpected way", remote_addr)
            self.counters.add("inbound_crashed")
        finally:
            if not admitted:
                await self._close_raw(raw)

    async def _close_raw(self, raw: ReadWriteCloser) -> None:
        with shielded(self.limits.close_timeout_s):
            try:
                await raw.close()
            except Exception as error:
                logger.debug("closing an unused transport connection: %r", error)

    # A changed network

    async def probe_all(self, reason: str) -> None:
        """End each connection over which nothing comes any more, within `PROBE_AGAIN_S`: its peer is dialed again at
        once, where TCP would wait for minutes. ``reason`` is for the log."""
        slots = trio.CapacityLimiter(PROBES_AT_ONCE)
        async with trio.open_nursery() as nursery:
            for connection in self.connections():
                nursery.start_soon(self._probe_again, connection, slots, reason)

    async def _probe_again(self, connection: PeerConnection, slots: trio.CapacityLimiter, reason: str) -> None:
        async with slots:
            before = connection.received_bytes
            try:
                await _probe(connection, PROBE_AGAIN_S)
            except (RequestTimeoutError, StreamClosedError):
                # Bytes may go before the answer on a slow way; a peer that answers no pings is left to its liveness.
                if not connection.is_closed and connection.received_bytes == before:
                    self.counters.add("connections_ended_network_change")
                    connection.abort(f"it is silent since the network has changed ({reason})")
            except ProtocolNotSupportedError:
                return

    # Ending

    async def close_all(self, reason: str) -> None:
        """End every connection, telling the peers; bounded by the close timeout as a whole."""
        self.closing = True
        for scope in list(self._pending.values()):
            scope.cancel()
        with shielded(self.limits.close_timeout_s):
            async with trio.open_nursery() as nursery:
                for connection in self.connections():
                    connection.end(reason)
                    nursery.start_soon(connection.close)


async def _probe(connection: PeerConnection, within_s: float) -> None:
    await ping(connection, timeout_s=within_s)


def void(_value: object) -> None:
    """Drop a value where a callback must return None."""
