"""The neighbours: in a realm every verified member, on the public network every connected peer."""

from collections.abc import Callable, Sequence
from typing import Protocol

from dep2p.host.interface import Connection, ConnectionPreferred, Host, HostEvent, PeerConnected, PeerDisconnected
from dep2p.realm.interface import RealmGate
from dep2p.types import PeerId

OnConnection = Callable[[Connection], None]


class Neighbours(Protocol):
    """The peers that pub/sub may talk to at this moment."""

    def is_admitted(self, connection: Connection, /) -> bool:
        """Whether a connection is admitted; called for every piece of received bytes."""
        ...

    def connection(self, peer: PeerId) -> Connection | None:
        """The live connection to the peer that is to be used, of those on which it is admitted."""
        ...

    def watch(self, on_up: OnConnection, on_down: OnConnection) -> Callable[[], None]:
        """Report each connection that is admitted, or preferred to others, present ones within this call, and each that
        is not admitted any more or has ended. Returns a function that ends it."""
        ...

    async def dial(self, peer: PeerId) -> None:
        """Connect to a peer. Raises what dialing raises."""
        ...

    def useless(self, peer: PeerId) -> Sequence[Connection]:
        """Return the connections to close of a peer that misuses pub/sub: those that it opened and no part needs."""
        ...


class PubSubGate(RealmGate, Protocol):
    """A membership, as pub/sub uses it: a `RealmGate` that reports verified connections."""

    def subscribe_verified(self, on_verified: OnConnection) -> Callable[[], None]: ...


def _best(connections: Sequence[Connection]) -> Connection | None:
    """The connection to use, of those to one peer; none that a relay limits: a mesh would use it up."""
    found: Connection | None = None
    for connection in connections:
        if not connection.is_closed and not connection.is_limited:
            found = connection
            if not connection.is_superseded:
                break
    return found


class RealmNeighbours:
    """The verified members of a realm."""

    def __init__(self, host: Host, gate: PubSubGate) -> None:
        self._host = host
        self._gate = gate
        self.is_admitted: Callable[[Connection], bool] = gate.is_verified

    def connection(self, peer: PeerId) -> Connection | None:
        is_verified = self._gate.is_verified
        return _best([connection for connection in self._host.connections(peer) if is_verified(connection)])

    def watch(self, on_up: OnConnection, on_down: OnConnection) -> Callable[[], None]:
        def on_event(event: HostEvent) -> None:
            if isinstance(event, PeerDisconnected):
                on_down(event.connection)

        def on_verified(connection: Connection) -> None:
            if not connection.is_limited:
                on_up(connection)

        ends = (
            self._gate.subscribe_verified(on_verified),
            self._gate.subscribe_unverified(on_down),
            self._host.subscribe(on_event),
        )
        for connection in list(self._host.connections()):
            if self._gate.is_verified(connection):
                on_verified(connection)

        def end() -> None:
            for one in ends:
                one()

        return end

    async def dial(self, peer: PeerId) -> None:
        await self._gate.connect(peer)

    def useless(self, peer: PeerId) -> Sequence[Connection]:
        return ()  # a member's requests and queues are served as before


class PublicNeighbours:
    """Every connected peer."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def is_admitted(self, connection: Connection) -> bool:
        return not connection.is_closed

    def connection(self, peer: PeerId) -> Connection | None:
        return _best(self._host.connections(peer))

    def watch(self, on_up: OnConnection, on_down: OnConnection) -> Callable[[], None]:
        def on_event(event: HostEvent) -> None:
            if isinstance(event, PeerConnected | ConnectionPreferred):
                if not event.connection.is_limited:
                    on_up(event.connection)
            elif isinstance(event, PeerDisconnected):
                on_down(event.connection)

        end = self._host.subscribe(on_event)
        for connection in list(self._host.connections()):
            if not connection.is_limited:
                on_up(connection)
        return end

    async def dial(self, peer: PeerId) -> None:
        await self._host.dial(peer)

    def useless(self, peer: PeerId) -> Sequence[Connection]:
        return [
            connection
            for connection in self._host.connections(peer)
            if connection.direction == "inbound" and not self._host.is_protected(connection)
        ]
