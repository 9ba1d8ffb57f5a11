"""The addresses at which other nodes see this one, by vote. Pure.

Each peer says in identify from which address a connection reaches it, or at which it reached this node. One peer can
be wrong or lie, so an address counts when peers that have nothing to do with each other agree.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Final, Literal

from dep2p.protocols.addresses.dialable import AddressScope, address_scope, dial_target
from dep2p.protocols.reachability.model import NatKind
from dep2p.types import PeerId

ObservedTransport = Literal["tcp", "ws", "quic"]
"""The transports whose connections show an address."""
PortUse = Literal["inbound", "listening", "other"]
"""Which socket of this node carries the connection: the peer dialed a listening one; this node dialed from the port of
a listening one; or it dialed from another port, so that the port which the peer sees leads nowhere."""
RefusedObservation = Literal["scope", "transport", "relayed", "block_full", "table_full"]
"""Why an observation does not count, as the counters name it."""

VOTES_MAX: Final = 256
"""Observations that are remembered at most."""
VOTES_PER_BLOCK_MAX: Final = 8
"""Observations of strangers of one address block at most: together they have one vote."""
CONFIRMATIONS_MIN: Final = 2
"""Voters that make an address confirmed."""
ADDRS_MAX: Final = 8
"""Addresses that are named at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """How the peer of one connection sees this node.

    ``connection``: the connection's number. ``observer_addr``: the multiaddr at the peer's end. ``block``: the address
    block of the peer. ``listening_port``: the port that this node listens on and has dialed from; None for an inbound
    connection and for one from another port. ``addr``: the multiaddr of this node, as the peer sees it.
    """

    connection: int
    observer: PeerId
    observer_addr: str
    block: str
    transport: ObservedTransport
    port_use: PortUse
    listening_port: int | None
    addr: str


@dataclass(slots=True)
class ObservedAddresses:
    """Counts what peers say of this node's addresses.

    An observation lives as long as its connection. Strangers of one address block have one vote together; a member has
    its own, by its IP address. ``is_member`` answers for a peer at any time, since a peer proves its membership after
    identify.

    Example::

        observed = ObservedAddresses(is_member=lambda peer: False)
        observed.note(observation)
        observed.addrs()
    """

    is_member: Callable[[PeerId], bool]
    _votes: dict[tuple[PeerId, ObservedTransport, PortUse], Observation] = field(
        default_factory=dict[tuple[PeerId, ObservedTransport, PortUse], Observation]
    )
    """The latest of each peer, transport and use of a port; the oldest first."""

    def __len__(self) -> int:
        return len(self._votes)

    def note(self, seen: Observation) -> RefusedObservation | None:
        """Count an observation; return why it does not count.

        Only the internet tells something: a public address, seen by a peer with a public one, over no relay.
        """
        if "/p2p-circuit" in seen.observer_addr or "/p2p-circuit" in seen.addr:
            return "relayed"
        if transport_of(seen.addr) != seen.transport:
            return "transport"
        if not _is_public(seen.addr) or not _is_public(seen.observer_addr):
            return "scope"
        key = seen.observer, seen.transport, seen.port_use
        self._votes.pop(key, None)
        refusal = self._make_room(seen)
        if refusal is None:
            self._votes[key] = seen
        return refusal

    def _make_room(self, seen: Observation) -> RefusedObservation | None:
        if self.is_member(seen.observer):
            if len(self._votes) >= VOTES_MAX:
                stranger = next((key for key in self._votes if not self.is_member(key[0])), None)
                self._votes.pop(next(iter(self._votes)) if stranger is None else stranger)
            return None
        in_block = sum(vote.block == seen.block and not self.is_member(vote.observer) for vote in self._votes.values())
        if in_block >= VOTES_PER_BLOCK_MAX:
            return "block_full"
        return "table_full" if len(self._votes) >= VOTES_MAX else None

    def forget(self, connection: int) -> None:
        """Drop the observations of a connection that has ended."""
        for key in [key for key, vote in self._votes.items() if vote.connection == connection]:
            del self._votes[key]

    def confirmed(self) -> tuple[str, ...]:
        """Return the addresses on which at least two voters agree, the best known first, at most eight."""
        counted = self._counted(self._votes.values())
        return tuple(addr for addr, voters in counted if voters >= CONFIRMATIONS_MIN)[:ADDRS_MAX]

    def addrs(self) -> tuple[str, ...]:
        """Return the confirmed addresses, then those that a member alone has seen, at most eight: for hole punching,
        which needs one member with a public address only.

        The port belongs to a socket that this node listens on. Behind a NAT that is endpoint-dependent the address of
        an outbound connection is of use to its one receiver only.
        """
        of_members = self._counted(vote for vote in self._votes.values() if self.is_member(vote.observer))
        return tuple(dict.fromkeys([*self.confirmed(), *(addr for addr, _ in of_members)]))[:ADDRS_MAX]

    def hosts(self) -> tuple[str, ...]:
        """Return the public IP addresses of this node by the same rule as `addrs`, whatever the port."""
        everyone: dict[str, dict[str, None]] = {}
        members: dict[str, None] = {}
        for vote in self._votes.values():
            host = _host(vote.addr)
            everyone.setdefault(host, {})[self._voter(vote)] = None
            if self.is_member(vote.observer):
                members[host] = None
        ranked = sorted(everyone, key=lambda host: -len(everyone[host]))
        return tuple(host for host in ranked if len(everyone[host]) >= CONFIRMATIONS_MIN or host in members)[:ADDRS_MAX]

    def nat_kind(self, transport: ObservedTransport, own_hosts: Collection[str]) -> NatKind:
        """Return how the connections of a transport are translated. ``own_hosts``: the IP addresses of this machine.

        IPv4 decides where there are observations of it, since IPv6 is seldom translated. Ports say something
        only where this node dialed several peers from one socket.
        """
        votes = [vote for vote in self._votes.values() if vote.transport == transport]
        votes = [vote for vote in votes if vote.addr.startswith("/ip4/")] or votes
        untranslated = Counter(_host(vote.addr) in own_hosts for vote in self._once(votes))
        if untranslated[True] > untranslated[False]:
            return NatKind.NONE
        by_port: dict[int, list[Observation]] = {}
        for vote in votes:
            if vote.listening_port is not None and _host(vote.addr) not in own_hosts:
                by_port.setdefault(vote.listening_port, []).append(vote)
        seen = [[vote.addr for vote in self._once(some)] for some in by_port.values()]
        if any(count >= CONFIRMATIONS_MIN for addrs in seen for count in Counter(addrs).values()):
            return NatKind.ENDPOINT_INDEPENDENT
        if any(len(addrs) >= CONFIRMATIONS_MIN for addrs in seen):
            return NatKind.ENDPOINT_DEPENDENT
        return NatKind.UNKNOWN

    def _once(self, votes: Iterable[Observation]) -> list[Observation]:
        """The latest observation of each voter."""
        return list({self._voter(vote): vote for vote in votes}.values())

    def _voter(self, vote: Observation) -> str:
        return _host(vote.observer_addr) if self.is_member(vote.observer) else f"block {vote.block}"

    def _counted(self, votes: Iterable[Observation]) -> list[tuple[str, int]]:
        """The addresses of listening sockets with the number of their voters, the most first."""
        voters: dict[str, dict[str, None]] = {}
        for vote in votes:
            if vote.port_use != "other":
                voters.setdefault(vote.addr, {})[self._voter(vote)] = None
        return sorted(((addr, len(some)) for addr, some in voters.items()), key=lambda each: -each[1])


def transport_of(addr: str) -> ObservedTransport | None:
    """Return the transport of a multiaddr without a peer id; None for one that shows no socket of an IP address.

    assert transport_of("/ip4/192.0.2.1/udp/4001/quic-v1") == "quic"
    """
    parts = addr.split("/")
    if parts[1:2] not in (["ip4"], ["ip6"]):
        return None
    by_form: dict[tuple[str, ...], ObservedTransport] = {
        ("tcp",): "tcp",
        ("tcp", "ws"): "ws",
        ("udp", "quic-v1"): "quic",
    }
    return by_form.get((*parts[3:4], *parts[5:]))


def _host(addr: str) -> str:
    target = dial_target(addr)
    return "" if target is None else target.host


def _is_public(addr: str) -> bool:
    return address_scope(addr) is AddressScope.PUBLIC
