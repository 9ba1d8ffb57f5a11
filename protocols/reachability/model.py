"""The words for whether other nodes reach this one."""

from dataclasses import dataclass
from enum import StrEnum


class Reachability(StrEnum):
    """Whether nodes outside this node's network can open a connection to it."""

    UNKNOWN = "unknown"
    """No test has ended yet."""
    PUBLIC = "public"
    """A node outside reached at least one of its addresses."""
    PRIVATE = "private"
    """Nodes outside tried its addresses and reached none: it needs a relay."""


class NatKind(StrEnum):
    """How a router translates the addresses of this node's sockets (RFC 4787, section 4.1)."""

    UNKNOWN = "unknown"
    """Too few nodes outside have said how they see this one."""
    NONE = "none"
    """No translation: others see an address of this machine."""
    ENDPOINT_INDEPENDENT = "endpoint-independent"
    """One socket has one public address, whomever it sends to: hole punching works."""
    ENDPOINT_DEPENDENT = "endpoint-dependent"
    """One socket has another public port for each receiver (a "symmetric" NAT): hole punching seldom works."""


@dataclass(frozen=True, slots=True)
class TransportReachability:
    """How a node is reached over one transport that it listens on: ``tcp``, ``ws`` or ``quic``."""

    transport: str
    reachability: Reachability
    nat: NatKind


@dataclass(frozen=True, slots=True)
class ReachabilityReport:
    """How a node is reached from outside.

    ``verified``: the public addresses, without the peer id, at which others have reached it. ``tested_at_s``: the time
    of the last test that said something, by ``trio.current_time()``; None before the first.
    """

    overall: Reachability = Reachability.UNKNOWN
    transports: tuple[TransportReachability, ...] = ()
    verified: tuple[str, ...] = ()
    tested_at_s: float | None = None
