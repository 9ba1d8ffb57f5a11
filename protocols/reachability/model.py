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
