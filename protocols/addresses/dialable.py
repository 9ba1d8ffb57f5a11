"""Selection of the addresses of another node that can be right, by their form and by the connection that brought them.
Pure.

A member's record names addresses, and any member can write into its record what it likes. A loopback address from
another machine is a port of this machine; a private one from the internet is a device in this node's own home. So an
address is dialed only when its scope is at least as wide as that of the link which brought it (docs/spec/realm.md §6).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Final


class AddressScope(IntEnum):
    """How far an address reaches: the machine, a private network, the internet. Wider is greater."""

    LOOPBACK = 0
    PRIVATE = 1
    PUBLIC = 2


@dataclass(frozen=True, slots=True)
class DialTarget:
    """The socket that a dial of an address knocks at."""

    host: str
    """IP literal in its shortest form, or a DNS name in lower case."""
    port: int


_PRIVATE: Final = (
    IPv4Network("10.0.0.0/8"),
    IPv4Network("172.16.0.0/12"),
    IPv4Network("192.168.0.0/16"),
    IPv4Network("100.64.0.0/10"),  # carrier-grade NAT, and overlay networks
    IPv4Network("169.254.0.0/16"),
    IPv6Network("fc00::/7"),
)
_NOWHERE: Final = (
    IPv4Network("0.0.0.0/8"),
    IPv4Network("224.0.0.0/3"),  # multicast, reserved, broadcast
    IPv6Network("::/128"),
    IPv6Network("ff00::/8"),
    IPv6Network("fe80::/10"),  # means nothing without a zone, which only the interface's own machine knows
)
_SUBNET_BITS: Final = {4: 24, 6: 64}
"""A home or office network; two addresses that share them are taken for neighbours."""


def dial_target(addr: str) -> DialTarget | None:
    """Return the socket of a multiaddr, of the relay for a relayed one; None when there is none or its port is 0."""
    parts = addr.split("/")
    if len(parts) < 5 or parts[0] or parts[3] not in ("tcp", "udp"):
        return None
    port = int(parts[4]) if len(parts[4]) <= 5 and parts[4].isascii() and parts[4].isdecimal() else 0
    if not 0 < port < 65_536:
        return None
    if parts[1] in ("dns", "dns4", "dns6"):
        return DialTarget(parts[2].lower().rstrip("."), port) if parts[2] else None
    ip = _ip(parts[2]) if parts[1] in ("ip4", "ip6") else None
    return None if ip is None else DialTarget(str(ip), port)


def address_scope(addr: str) -> AddressScope | None:
    """How far an address reaches; None when no other node can be there (unspecified, multicast, port 0, no address).

    assert address_scope("/ip4/127.0.0.1/tcp/4001") is AddressScope.LOOPBACK
    """
    target = dial_target(addr)
    return None if target is None else _host_scope(target.host)


def widest_scope(addrs: Iterable[str]) -> AddressScope | None:
    """Return how far the addresses of a node reach together; None when no other node can use any of them."""
    return max((scope for scope in map(address_scope, addrs) if scope is not None), default=None)


def addrs_for_others(addrs: Iterable[str]) -> tuple[str, ...]:
    """Return the addresses of this node that can be of use to other nodes, each once, the widest first.

    Loopback addresses are of use on this machine only; they are given when there are no others. Two nodes of one
    machine reach each other by the others, too.

    assert addrs_for_others(["/ip4/127.0.0.1/tcp/1", "/ip4/192.0.2.1/tcp/1"]) == ("/ip4/192.0.2.1/tcp/1",)
    """
    scopes = {addr: scope for addr in addrs if (scope := address_scope(addr)) is not None}
    usable = [addr for addr, scope in scopes.items() if scope > AddressScope.LOOPBACK]
    return tuple(sorted(usable or scopes, key=lambda addr: -scopes[addr]))


def addrs_over(addrs: Iterable[str], link: AddressScope) -> tuple[str, ...]:
    """Return the addresses of this node that can be of use to a peer at the other end of a link, each once.

    A peer on the internet can use public ones only; one in the same network also private ones; a program on this
    machine all of them.
    """
    return tuple(addr for addr in dict.fromkeys(addrs) if (scope := address_scope(addr)) is not None and scope >= link)


def link_scope(remote_addr: str) -> AddressScope:
    """Return the scope of a connection, by its remote address; public, which takes the fewest addresses, when that
    tells nothing."""
    scope = address_scope(remote_addr)
    return AddressScope.PUBLIC if scope is None else scope


def plausible_addrs(addrs: Sequence[str], *, heard_over: AddressScope, own: Sequence[str]) -> tuple[str, ...]:
    """Return those addresses of another node that can be right.

    ``heard_over``: the scope of the link that brought them. ``own``: the addresses that this node listens on. Left out
    are those that `address_scope` gives None for, this node's own ones, and those of a narrower scope than the link,
    unless a private one shares a subnet with one of this node's own: two nodes at home, introduced by one outside.
    """
    own_targets = [target for target in map(dial_target, own) if target is not None]
    return tuple(addr for addr in addrs if _is_plausible(addr, heard_over, own_targets))


def _is_plausible(addr: str, heard_over: AddressScope, own: Sequence[DialTarget]) -> bool:
    target = dial_target(addr)
    scope = None if target is None else _host_scope(target.host)
    if target is None or scope is None:
        return False
    if target in own and "/p2p-circuit" not in addr:
        return False
    if scope >= heard_over:
        return True
    return scope is AddressScope.PRIVATE and any(_are_neighbours(target.host, one.host) for one in own)


def _ip(text: str) -> IPv4Address | IPv6Address | None:
    try:
        ip = ip_address(text)
    except ValueError:
        return None
    mapped = ip.ipv4_mapped if isinstance(ip, IPv6Address) else None
    return ip if mapped is None else mapped


def _host_scope(host: str) -> AddressScope | None:
    ip = _ip(host)
    if ip is None:
        is_local = host == "localhost" or host.endswith(".localhost")
        return AddressScope.LOOPBACK if is_local else AddressScope.PUBLIC
    if any(ip in network for network in _NOWHERE):
        return None
    if ip.is_loopback:
        return AddressScope.LOOPBACK
    return AddressScope.PRIVATE if any(ip in network for network in _PRIVATE) else AddressScope.PUBLIC


def _are_neighbours(a: str, b: str) -> bool:
    ip_a, ip_b = _ip(a), _ip(b)
    if ip_a is None or ip_b is None or ip_a.version != ip_b.version:
        return False
    host_bits = ip_a.max_prefixlen - _SUBNET_BITS[ip_a.version]
    return int(ip_a) >> host_bits == int(ip_b) >> host_bits and _host_scope(b) is AddressScope.PRIVATE
