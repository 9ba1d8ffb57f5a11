"""The words for whether other nodes reach this one."""

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
