"""Who is a neighbour: in a realm every verified member, on the public network every connected peer."""

from collections.abc import Callable
from typing import Protocol

from dep2p.host.interface import Connection, Host, HostEvent, PeerConnected, PeerDisconnected
from dep2p.realm.interface import RealmGate
from dep2p.types import PeerId

OnConnection = Callable[[Connection], None]


class Neighbours(Protocol):
    """The peers that pub/sub may talk to at this moment."""

    def is_admitted(self, connection: Connection) -> bool:
        """Asked for every piece of received bytes."""
        ...

    def connection(self, peer: PeerId) -> Connection | None:
        """A live connection to the peer on which it is admitted."""
        ...

    def watch(self, on_up: OnConnection, on_down: OnConnection) -> Callable[[], None]:
        """Tell of each connection that is admitted, and of each that is no longer or has ended; those that are there
        already are told within this call. Returns a function that ends it."""
        ...

    async def dial(self, peer: PeerId) -> None:
        """Connect. Raises what dialing raises."""
        ...


class PubSubGate(RealmGate, Protocol):
    """What a membership offers beyond `RealmGate`."""

    def subscribe_verified(self, on_verified: OnConnection) -> Callable[[], None]: ...


class RealmNeighbours:
    """The verified members of a realm."""

    def __init__(self, host: Host, gate: PubSubGate) -> None:
        self._host = host
        self._gate = gate
        self.is_admitted = gate.is_verified

    def connection(self, peer: PeerId) -> Connection | None:
        return self._gate.verified_connection(peer)

    def watch(self, on_up: OnConnection, on_down: OnConnection) -> Callable[[], None]:
        def on_event(event: HostEvent) -> None:
            if isinstance(event, PeerDisconnected):
                on_down(event.connection)

        ends = (
            self._gate.subscribe_verified(on_up),
            self._gate.subscribe_unverified(on_down),
            self._host.subscribe(on_event),
        )
        for connection in list(self._host.connections()):
            if self._gate.is_verified(connection):
                on_up(connection)

        def end() -> None:
            for one in ends:
                one()

        return end

    async def dial(self, peer: PeerId) -> None:
        await self._gate.connect(peer)


class PublicNeighbours:
    """Everybody who is connected."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def is_admitted(self, connection: Connection) -> bool:
        return not connection.is_closed

    def connection(self, peer: PeerId) -> Connection | None:
        for connection in self._host.connections(peer):
            if not connection.is_closed:
                return connection
        return None

    def watch(self, on_up: OnConnection, on_down: OnConnection) -> Callable[[], None]:
        def on_event(event: HostEvent) -> None:
            if isinstance(event, PeerConnected):
                on_up(event.connection)
            elif isinstance(event, PeerDisconnected):
                on_down(event.connection)

        end = self._host.subscribe(on_event)
        for connection in list(self._host.connections()):
            on_up(connection)
        return end

    async def dial(self, peer: PeerId) -> None:
        await self._host.dial(peer)
