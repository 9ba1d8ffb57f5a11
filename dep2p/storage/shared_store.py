"""The contract of a store that several nodes share: one of them owns it at a time, and the others watch it."""

import sys
import time
from dataclasses import dataclass
from typing import Final, Protocol

from dep2p.storage.queue_store import QueueStore

LEASE_S: Final = 15.0
"""Seconds. An owner that has not renewed for so long, by the store's clock, may be replaced."""
NODES_MAX: Final = 8
"""Nodes in the group's list at most: those that were seen last."""
_MARGIN: Final = 0.99
"""The share of a lease that an owner uses: clocks run alike within a hundredth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOwner:
    """The owner of a store, as last read."""

    term: int = 0
    """The number of the term; each has a higher one."""
    peer: str = ""
    """The owner's peer id. Empty: none, since the last one closed in good order, or was of no failover group."""
    silent_s: float = 0.0
    """Seconds since it renewed, by the store's clock."""
    lease_s: float = LEASE_S
    """The lease that it got."""
    since_unix_s: float = 0.0
    """When its term began, by the store's clock."""
    nodes: tuple[str, ...] = ()
    """Peer ids of the nodes of the group that were there in the last day, sorted."""

    @property
    def is_free(self) -> bool:
        """Whether another node may take the store."""
        return not self.peer or self.silent_s > self.lease_s


class OwnedStore(QueueStore, Protocol):
    """A store of which one node at a time is the owner. `open` takes it, and raises NotOwnerError when another did.

    Every commit renews, and fails with NotOwnerError when another node has it; `tidy` renews when nothing is written.
    `close` lets others take it at once.
    """

    @property
    def term(self) -> int:
        """The number of this term."""
        ...

    def is_held(self) -> bool:
        """Whether no other node can own it yet, by this machine's clock. From any thread, without waiting."""
        ...


class SharedStores(Protocol):
    """The store of a failover group. Every method blocks; one call at a time. Errors are StoreErrors."""

    @property
    def location(self) -> str:
        """The place of the store, human-readable, without a password."""
        ...

    @property
    def blocks(self) -> bool:
        """Whether a call may take a while, and goes to a thread; not so in memory."""
        ...

    def look(self) -> StoreOwner:
        """The present owner. The call also notes this node as one of the group. Raises StoreLockedError when a node of
        no group has the store."""
        ...

    def store(self, seen: StoreOwner) -> OwnedStore:
        """Return a store that takes the ownership when it is opened, if the owner is still as ``seen``."""
        ...

    def close(self) -> None:
        """Close the connection. Idempotent."""
        ...


def boot_s() -> float:
    """Read a clock that goes on while the process is stopped and, where the system has such a clock, while it
    sleeps."""
    if sys.platform == "linux":
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


def held_until_s(renewed_s: float, lease_s: float) -> float:
    """Return until when, by `boot_s`, a lease that was asked for at ``renewed_s`` holds for its owner."""
    return renewed_s + lease_s * _MARGIN
