"""The addresses of a node that may be reached from outside, and are worth a test. Pure."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from dep2p.protocols.addresses.dialable import AddressScope, address_scope
from dep2p.protocols.reachability.serving import is_testable

CANDIDATES_MAX: Final = 8
"""Addresses that are tested at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressSources:
    """The addresses that a node knows of itself, as multiaddrs without the peer id.

    ``listened``: its sockets. ``advertised``: those of its settings. ``observed``: where peers see its sockets.
    ``hosts``: the IP addresses that peers see. ``verified``: those that others have reached before.
    """

    listened: Sequence[str]
    advertised: Sequence[str] = ()
    observed: Sequence[str] = ()
    hosts: Sequence[str] = ()
    verified: Sequence[str] = ()


def candidate_addrs(sources: AddressSources, transports: Collection[str]) -> tuple[str, ...]:
    """Return the addresses that are worth a test over these transports, at most eight, the likeliest first.

    The last are guesses: a public IP address with a port that the node listens on, as a router has it whose owner has
    forwarded that port.
    """
    named = [*sources.listened, *sources.advertised, *sources.observed, *sources.verified]
    testable = (addr for addr in [*named, *_guesses(sources)] if is_testable(addr, transports))
    return tuple(dict.fromkeys(testable))[:CANDIDATES_MAX]


def _guesses(sources: AddressSources) -> Iterator[str]:
    for host in sources.hosts:
        family = "ip6" if ":" in host else "ip4"
        for addr in sources.listened:
            _, own_family, _, socket = addr.split("/", 3)
            if own_family == family and address_scope(addr) is not AddressScope.LOOPBACK:
                yield f"/{family}/{host}/{socket}"
