"""The table of connections: admission, limits, upgrades, events. Everything that changes it is synchronous, so that no
cancellation can leave a slot taken."""

import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol

import trio
from libp2p.io.exceptions import IOException

from dep2p.errors import StreamClosedError
from dep2p.host.connections import liveness
from dep2p.host.connections.connection import Muxer, PeerConnection
from dep2p.host.connections.upgrade import UpgradeError, upgrade_inbound
from dep2p.host.counters import Counters
from dep2p.host.interface import Direction, HostEvent, PeerConnected, PeerDisconnected, StreamHandler
from dep2p.host.scopes import new_scope, shielded
from dep2p.limits import Limits
from dep2p.types import PeerId

if TYPE_CHECKING:
    from libp2p.transport.upgrader import TransportUpgrader

logger = logging.getLogger("dep2p.host")


UNPROTECTED_S = 30.0
"""How long a connection that nobody protects keeps its place when others need one: a few tries of a realm handshake.
Without it, whoever holds idle connections from enough identities, or is named by discovery often enough, takes all."""


class RawTransport(Protocol):
    """What is accepted or dialled before its upgrade: py-libp2p's ``ReadWriteCloser``."""

    async def close(self) -> None: ...


class Swarm:
    """All connections of one host."""

    def __init__(
        self,
        own_peer: PeerId,
        upgrader: "TransportUpgrader",
        limits: Limits,
        counters: Counters,
        *,
        is_wanted: Callable[[PeerId], bool],
    ) -> None:
        self.own_peer = own_peer
        self.upgrader = upgrader
        self.limits = limits
        self.counters = counters
        self._is_wanted = is_wanted
        self.handlers: dict[str, StreamHandler] = {}
        self.nursery: trio.Nursery | None = None
        self._connections: dict[PeerId, list[PeerConnection]] = {}
        self._total = 0
        self._pending: OrderedDict[int, trio.CancelScope] = OrderedDict()
        self._next_pending = 0
        self._subscribers: dict[int, Callable[[HostEvent], None]] = {}
        self._next_subscriber = 0
        self._idle = trio.Event()
        self.closing = False

    # Looking

    def connections(self, peer: PeerId | None = None) -> list[PeerConnection]:
        """Live connections, oldest first."""
        if peer is not None:
            return list(self._connections.get(peer, ()))
        return sorted((one for some in self._connections.values() for one in some), key=lambda one: one.id)

    def live(self, peer: PeerId) -> PeerConnection | None:
        """The oldest live connection to a peer."""
        found = self._connections.get(peer)
        return found[0] if found else None

    @property
    def total(self) -> int:
        """How many connections there are."""
        return self._total

    @property
    def pending_inbound(self) -> int:
        """How many inbound connections are in their handshake."""
        return len(self._pending)

    # Events

    def subscribe(self, on_event: Callable[[HostEvent], None]) -> Callable[[], None]:
        key = self._next_subscriber
        self._next_subscriber += 1
        self._subscribers[key] = on_event
        return lambda: void(self._subscribers.pop(key, None))

    def emit(self, event: HostEvent) -> None:
        """Tell every subscriber; one that raises is logged and does not stop the others."""
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
        """The oldest connection that has had time to prove of use to somebody, and is not."""
        latest_s = trio.current_time() - UNPROTECTED_S
        idle = [
            one
            for some in self._connections.values()
            for one in some
            if one.opened_at_s <= latest_s and not one.protected_by and not self._is_wanted(one.peer)
        ]
        return min(idle, key=lambda one: one.opened_at_s, default=None)

    def admit(self, muxer: Muxer, peer: PeerId, direction: Direction, remote_addr: str) -> PeerConnection:
        """Take an upgraded connection into the table and start serving it.

        Raises StreamClosedError when a limit refuses it or the host is closing; the caller closes the muxer then.
        """
        nursery = self.nursery
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
        same_peer = self._connections.get(peer, ())
        if len(same_peer) >= self.limits.connections_per_peer_max:
            self.counters.add(f"{direction}_refused_connections_per_peer_max")
            raise StreamClosedError(
                f"this host has {len(same_peer)} connections to {peer}, its limit (connections_per_peer_max)"
            )
        connection = PeerConnection(
            muxer,
            peer,
            direction,
            remote_addr,
            limits=self.limits,
            counters=self.counters,
            handlers=self.handlers,
            on_end=self._ended,
            watch=liveness.watch,
        )
        nursery.start_soon(connection.run)
        self._connections.setdefault(peer, []).append(connection)
        self._total += 1
        self.counters.add(f"{direction}_connections")
        self.emit(PeerConnected(connection))
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

    # Inbound

    async def accept(self, raw: Any, remote_addr: str, prepare: Callable[[Any], Awaitable[Any]] | None) -> None:
        """Upgrade one inbound transport connection and admit it. Never raises for what the remote does."""
        if self.closing or (self._is_full("inbound") and self._replaceable() is None):
            self.counters.add("inbound_refused_connections_max")
            await self._close_raw(raw)
            return
        if len(self._pending) >= self.limits.connections_inbound_pending_max:
            # Those who hold a socket open in silence must not lock out who comes next: the oldest has had its time.
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
                finally:
                    in_time = self._pending.pop(key, None) is not None
                try:
                    self.admit(upgraded.muxer, upgraded.peer, "inbound", remote_addr)
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
            # Whatever a library lets pass: one connection must not end the listener, and with it the host.
            if not self.counters["inbound_crashed"]:
                logger.exception("an inbound connection from %s failed in an unexpected way", remote_addr)
            self.counters.add("inbound_crashed")
        finally:
            if not admitted:
                await self._close_raw(raw)

    async def _close_raw(self, raw: Any) -> None:
        with shielded(self.limits.close_timeout_s):
            try:
                await raw.close()
            except Exception as error:
                logger.debug("closing an unused transport connection: %r", error)

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


def void(_value: object) -> None:
    """Drop a value where a callback must return None."""
