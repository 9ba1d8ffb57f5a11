"""Selection of the addresses of a peer that are dialed to find a direct path. Pure.

The peer says them, and it may be anyone. So they are few, on few machines, and of the internet: a node must not knock
at the doors of its own network, or be a tool against a third party, because a peer says so.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Final

from dep2p.protocols.addresses.dialable import AddressScope, address_scope, dial_target

TARGETS_MAX: Final = 6
"""Addresses that are dialed in a try."""
HOSTS_PER_FAMILY_MAX: Final = 2
"""IPv4 and IPv6 addresses of a peer that are dialed: a second one of a machine with two networks, or from before a
change."""
_FORMS: Final = (("tcp",), ("udp", "quic-v1"))
"""The transports whose dials leave from the port of a listener."""


def punch_targets(addrs: Iterable[str], own: Iterable[str]) -> tuple[str, ...]:
    """Return the multiaddrs to dial, each once and in the given order, at most six.

    ``own``: those of this node, which are left out. Left out are also names, relayed addresses, and all that the
    internet does not reach.

    assert punch_targets(["/ip4/192.168.1.1/tcp/1", "/ip4/198.51.100.7/tcp/1"], []) == ("/ip4/198.51.100.7/tcp/1",)
    """
    own_addrs = {_without_peer(addr): None for addr in own}
    hosts: Counter[str] = Counter()
    chosen: dict[str, str] = {}
    for text in addrs:
        addr = _without_peer(text)
        if addr in chosen or addr in own_addrs or not is_punchable(addr):
            continue
        target = dial_target(addr)
        family = addr[:4]
        if target is None or len(chosen) >= TARGETS_MAX:
            continue
        if target.host not in chosen.values():
            if hosts[family] >= HOSTS_PER_FAMILY_MAX:
                continue
            hosts[family] += 1
        chosen[addr] = target.host
    return tuple(chosen)


def is_punchable(addr: str) -> bool:
    """Whether a dial of the multiaddr, without a peer id, may open a way through a NAT router."""
    parts = addr.split("/")
    is_literal = parts[1:2] in (["ip4"], ["ip6"])
    return is_literal and (*parts[3:4], *parts[5:]) in _FORMS and address_scope(addr) is AddressScope.PUBLIC


def _without_peer(addr: str) -> str:
    """The text without the id of the peer at its end; a relayed one keeps that of the relay, and is no form to dial."""
    return addr if "/p2p-circuit" in addr else addr.partition("/p2p/")[0]
