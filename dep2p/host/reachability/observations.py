"""Takes the observed addresses of identify, checks their form, and gives them to the vote."""

import logging
from collections.abc import Callable, Sequence

from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from dep2p.host.addresses import ADDR_BYTES_MAX, Address, parse_address
from dep2p.host.connections.connection import PeerConnection
from dep2p.host.counters import Counters
from dep2p.host.interface import Connection, HostEvent, PeerDisconnected
from dep2p.host.resources.ledger import address_block
from dep2p.protocols.addresses.dialable import dial_target
from dep2p.protocols.reachability.model import NatKind
from dep2p.protocols.reachability.observed import Observation, ObservedAddresses, ObservedTransport, PortUse
from dep2p.types import PeerId

logger: logging.Logger = logging.getLogger("dep2p.host")


class Observations:
    """How the peers of a host see it, from identify."""

    def __init__(
        self, counters: Counters, *, is_member: Callable[[PeerId], bool], listen_addrs: Callable[[], Sequence[str]]
    ) -> None:
        """``listen_addrs``: the multiaddrs of the sockets that the host listens on, wildcards expanded."""
        self._counters = counters
        self._listen_addrs = listen_addrs
        self._observed = ObservedAddresses(is_member)

    def take(self, connection: Connection, observed: bytes) -> None:
        """Take the ``observed_addr`` of an identify message. What says nothing is counted, and dropped."""
        if connection.is_closed or not observed:
            return
        address = self._parsed(connection.peer, observed)
        if address is None:
            return
        if "/p2p-circuit" in connection.remote_addr:
            self._count("relayed")
            return
        if address.transport == "circuit" or address.family == "dns":
            self._count("transport")
            return
        remote = _without_peer(connection.remote_addr)
        port, use = _port_use(connection)
        refusal = self._observed.note(
            Observation(
                connection=connection.id,
                observer=connection.peer,
                observer_addr=remote,
                block=address_block(remote),
                transport=_transport(remote),
                port_use=use,
                listening_port=port,
                addr=address.text,
            )
        )
        if refusal is None:
            self._counters.add("observed_addresses")
        else:
            self._count(refusal)

    def _count(self, why: str) -> None:
        self._counters.add(f"observed_addresses_dropped_{why}")

    def _parsed(self, peer: PeerId, observed: bytes) -> Address | None:
        if len(observed) <= ADDR_BYTES_MAX:
            try:
                return parse_address(str(Multiaddr(observed)))
            except (ValueError, TypeError, KeyError, MultiaddrError) as error:
                logger.debug("the address at which %s sees this node is not used: %s", peer, error)
        self._count("malformed")
        return None

    def on_event(self, event: HostEvent) -> None:
        """Forget what a peer has seen when its connection ends."""
        if isinstance(event, PeerDisconnected):
            self._observed.forget(event.connection.id)

    def addrs(self) -> list[str]:
        """Return the public addresses, without a peer id, at which others see listening sockets; the surest first."""
        return list(self._observed.addrs())

    def confirmed(self) -> list[str]:
        """Return those of them on which peers of different networks, or members, agree."""
        return list(self._observed.confirmed())

    def hosts(self) -> list[str]:
        """Return the public IP addresses at which others see this node."""
        return list(self._observed.hosts())

    def nat_kind(self, transport: ObservedTransport) -> NatKind:
        """Return how routers translate the connections of a transport."""
        targets = [dial_target(addr) for addr in self._listen_addrs()]
        return self._observed.nat_kind(transport, [target.host for target in targets if target is not None])

    def values(self) -> dict[str, int]:
        """Return how many observations are held now, by the name of the counter."""
        return {"observed_addresses_held": len(self._observed)}


def _without_peer(addr: str) -> str:
    return addr.partition("/p2p/")[0]


def _transport(addr: str) -> ObservedTransport:
    if addr.endswith("/ws"):
        return "ws"
    return "quic" if "/udp/" in addr else "tcp"


def _port_use(connection: Connection) -> tuple[int | None, PortUse]:
    if connection.direction == "inbound":
        return None, "inbound"
    port = connection.listening_port if isinstance(connection, PeerConnection) else None
    return port, "other" if port is None else "listening"
