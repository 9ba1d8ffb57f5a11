"""The scopes of one host: system, unproven, address block, peer, protocol, circuits.

A connection is unproven until a part of the node protects it, as a realm does when its peer has proved its membership.
Until then it may hold little, all unproven connections together may hold a fixed amount, and so may those of one
address block. After the proof its memory counts for its peer.
"""

import re
from collections import Counter
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_network

from dep2p.host.resources.control_allowance import ControlRate
from dep2p.host.resources.scopes import Account, End, OnEvent, Scope
from dep2p.host.resources.window_budget import WindowBudget
from dep2p.limits import Limits
from dep2p.types import PeerId

STREAM_BYTES = 4_096
"""The account of a stream that the peer opened: its state, its task, and a short answer that waits to be sent."""
CIRCUIT_UNSENT_BYTES = 131_072
"""Bytes that a relay took from one end of a circuit and has not sent to the other yet, both directions together."""
CIRCUITS_BYTES_MAX = 67_108_864
"""Bytes of all circuits of a relay: 256 circuits with `CIRCUIT_UNSENT_BYTES`, and as much again for bytes that
arrived."""
CIRCUITS_UNPROVEN_BYTES_MAX = 50_331_648
"""Bytes of the circuits that strangers have dialled: the rest is for those of members."""
CIRCUIT_BYTES_MAX = 1_048_576
"""Bytes of one circuit: the receive windows of both ends and `CIRCUIT_UNSENT_BYTES`."""
RELAYED_UNPROVEN_MAX = 8
"""Unproven connections that came through one relay: strangers get no more of the circuits that a relay grants."""
_BURST_S = 4
"""Seconds of their rate that control frames may come at once."""
_IP = re.compile(r"/ip([46])/([0-9a-fA-F.:]+)(?:/|$)")
_RELAY = re.compile(r"/p2p/(\w+)/p2p-circuit")
_IPV4_PREFIX = 24
_IPV6_PREFIX = 56


def address_block(addr: str) -> str:
    """Return the block that a remote multiaddr belongs to: its IPv4 /24, its IPv6 /56, its relay, or "unknown".

    Example: ``address_block("/ip4/192.0.2.7/tcp/4001")`` is ``"192.0.2.0/24"``. A customer of a provider has up to a
    /56 of IPv6 (RFC 6177); IPv4 is rented in whole /24 blocks.
    """
    relay = _RELAY.search(addr)
    if relay is not None:
        return f"relay {relay[1]}"
    found = _IP.match(addr)
    if found is None:
        return "unknown"
    try:
        if found[1] == "4":
            return str(ip_network((found[2], _IPV4_PREFIX), strict=False))
        mapped = IPv6Address(found[2]).ipv4_mapped
        if mapped is not None:
            return str(ip_network((mapped, _IPV4_PREFIX), strict=False))
        return str(ip_network((found[2], _IPV6_PREFIX), strict=False))
    except ValueError:
        return "unknown"


@dataclass(slots=True, eq=False)
class ConnectionResources:
    """The resources of one connection."""

    account: Account
    peer: PeerId
    block: str
    """Its address block; "" for a connection that this host dialled."""
    control_rate: ControlRate
    is_proven: bool = False
    windows: WindowBudget = field(default_factory=lambda: WindowBudget(0))
    """The bytes by which windows of distant peers may grow, those of all connections of the host."""


def unbounded(memory_bytes_max: int) -> ConnectionResources:
    """Return the resources of a connection that belongs to no host: its own bound, no scopes, any rate."""
    account, windows = Account("the connection", memory_bytes_max), WindowBudget(memory_bytes_max // 2)
    return ConnectionResources(account, PeerId(""), "", ControlRate(0, 1), True, windows)


class Ledger:
    """The accounts of a host's memory. ``on_event`` takes each refusal and end.

    Example::

        ledger = Ledger(Limits(), lambda name, text: print(name, text))
        held = ledger.open_connection(peer, "/ip4/192.0.2.7/tcp/4001", is_inbound=True, end=connection.evict)
        held.account.reserve(65_536)
        ledger.prove(held)
    """

    def __init__(self, limits: Limits, on_event: OnEvent = lambda _name, _text: None) -> None:
        self._limits = limits
        self._on_event = on_event
        self._system = Scope("system", limits.memory_bytes_max, "memory_bytes_max")
        self._unproven = Scope("unproven", limits.memory_bytes_unproven_max, "memory_bytes_unproven_max")
        self._circuits = Scope("circuits", CIRCUITS_BYTES_MAX, "the bound of all circuits")
        self._circuits_unproven = Scope(
            "circuits_unproven", CIRCUITS_UNPROVEN_BYTES_MAX, "the bound of circuits that strangers have dialled"
        )
        self._blocks: dict[str, Scope] = {}
        self._peers: dict[PeerId, Scope] = {}
        self._protocols: Counter[str] = Counter()
        self._windows = WindowBudget(limits.memory_bytes_max // 2)

    # Connections

    def open_connection(
        self, peer: PeerId, addr: str, *, is_inbound: bool, end: End, now_s: float = 0.0
    ) -> ConnectionResources:
        """Account for a new, unproven connection; may end the oldest unproven one of its address block."""
        block = address_block(addr) if is_inbound else ""
        scopes: tuple[Scope, ...] = (self._unproven, self._system)
        if block:
            scopes = (self._block_with_space(block), *scopes)  # first: its connections give way before those of others
        account = Account(
            f"the unproven connection of {peer}",
            self._limits.memory_bytes_per_unproven_connection_max,
            scopes,
            end=end,
            on_event=self._on_event,
            ends_at_limit=True,
        )
        rate = ControlRate(self._limits.control_frames_unproven_per_s, _BURST_S, now_s)
        return ConnectionResources(account, peer, block, rate, windows=self._windows)

    def _block_with_space(self, block: str) -> Scope:
        scope = self._block(block)
        most = self._limits.connections_unproven_per_address_block_max
        if block.startswith("relay "):
            most = min(most, RELAYED_UNPROVEN_MAX)
        while len(scope.accounts) >= most:
            oldest = next((each for each in scope.accounts if not each.keeps_place), next(iter(scope.accounts)))
            oldest.end(
                "address_block",
                f"{oldest.name} is the oldest of {most} from {block} (connections_unproven_per_address_block_max)",
            )
        self._blocks[block] = scope  # it may have been empty for a moment, and forgotten
        return scope

    def _block(self, block: str) -> Scope:
        found = self._blocks.get(block)
        if found is None:
            name = "memory_bytes_per_address_block_max"
            found = Scope("address_block", self._limits.memory_bytes_per_address_block_max, name)
            self._blocks[block] = found
        return found

    def prove(self, held: ConnectionResources) -> None:
        """Note that the peer has proved itself: the bytes of the connection count for the peer from now on.
        Idempotent."""
        if held.is_proven or held.account.is_closed:
            return
        held.is_proven = True
        account = held.account
        scope = self._peers.get(held.peer)
        if scope is None:
            most = self._limits.memory_bytes_per_peer_max
            scope = self._peers[held.peer] = Scope("peer", most, "memory_bytes_per_peer_max", evicts=False)
        account.name = f"the connection of {held.peer}"
        account.memory_bytes_max = self._limits.memory_bytes_per_peer_max
        account.ends_at_limit = False
        account.move((scope, self._system))
        self._forget_block(held.block)
        held.control_rate.change(self._limits.control_frames_per_s)

    def unprove(self, held: ConnectionResources) -> None:
        """Note that nothing protects the connection any more: it is unproven again. Idempotent."""
        if not held.is_proven or held.account.is_closed:
            return
        held.is_proven = False
        account = held.account
        account.name = f"the unproven connection of {held.peer}"
        account.memory_bytes_max = self._limits.memory_bytes_per_unproven_connection_max
        account.ends_at_limit = True
        scopes = (self._unproven, self._system)
        account.move((self._block(held.block), *scopes) if held.block else scopes)
        self._forget_peer(held.peer)
        held.control_rate.change(self._limits.control_frames_unproven_per_s)

    def close_connection(self, held: ConnectionResources) -> None:
        """Note that the connection has ended. Idempotent."""
        held.account.close()
        self._forget_block(held.block)
        self._forget_peer(held.peer)

    def _forget_block(self, block: str) -> None:
        scope = self._blocks.get(block)
        if scope is not None and not scope.accounts:
            del self._blocks[block]

    def _forget_peer(self, peer: PeerId) -> None:
        scope = self._peers.get(peer)
        if scope is not None and not scope.accounts:
            del self._peers[peer]

    # Streams

    def enter_protocol(self, held: ConnectionResources, protocol: str) -> bool:
        """Count a handler of ``protocol`` that begins on a connection; False when too many are at work for unproven
        peers.

        Call `leave_protocol` with the same arguments after True, and only then.
        """
        if held.is_proven:
            return True
        if self._protocols[protocol] >= self._limits.streams_unproven_per_protocol_max:
            self._on_event("resources_refused_protocol", f"unproven peers have too many streams of {protocol}")
            return False
        self._protocols[protocol] += 1
        return True

    def leave_protocol(self, protocol: str) -> None:
        """Note that the handler has ended."""
        self._protocols[protocol] -= 1
        if self._protocols[protocol] <= 0:
            del self._protocols[protocol]

    def open_circuit(self, end: End, *, is_proven: bool = False) -> Account:
        """Account for a circuit of a relay, whose bytes count for neither of its connections.

        ``is_proven``: its dialler has proved itself; the others together hold a part of the bytes of all circuits only.
        """
        name = "a relayed circuit"
        scopes: tuple[Scope, ...] = (self._circuits, self._system)
        if not is_proven:
            scopes = (self._circuits_unproven, *scopes)  # first: its circuits give way before those of members
        circuit = Account(name, CIRCUIT_BYTES_MAX, scopes, end=end, on_event=self._on_event, ends_at_limit=True)
        circuit.reserve(CIRCUIT_UNSENT_BYTES)
        return circuit

    # Look-ups

    @property
    def scopes(self) -> int:
        """Count of the scopes that are kept: four, and one for each address block and proven peer with a
        connection."""
        return 4 + len(self._blocks) + len(self._peers)

    def values(self) -> dict[str, int]:
        """Return the bytes, connections and streams that are held now, by the name of their scope."""
        return {
            "memory_bytes": self._system.memory_bytes,
            "memory_bytes_windows": self._windows.taken_bytes,
            "memory_bytes_unproven": self._unproven.memory_bytes,
            "memory_bytes_circuits": self._circuits.memory_bytes,
            "memory_bytes_largest_address_block": max((each.memory_bytes for each in self._blocks.values()), default=0),
            "memory_bytes_largest_peer": max((each.memory_bytes for each in self._peers.values()), default=0),
            "connections_unproven": len(self._unproven.accounts),
            "streams_unproven": self._protocols.total(),
        }
