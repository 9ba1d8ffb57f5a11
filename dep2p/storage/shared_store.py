"""The contract of a store that several nodes share: one of them has it at a time, and the others look after it."""

import sys
import time
from dataclasses import dataclass
from typing import Final, Protocol

from dep2p.storage.queue_store import QueueStore

LEASE_S: Final = 15.0
"""An owner that has not renewed for so long, by the store's clock, may be replaced."""
NODES_MAX: Final = 8
"""Those seen last are told to others."""
_MARGIN: Final = 0.99
"""Clocks run alike within a hundredth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOwner:
    """Who has the store, as last looked at."""

    epoch: int = 0
    """Of its term; each has a higher one."""
    peer: str = ""
    """Empty: nobody, since the last one closed it in good order, or was of no such set."""
    silent_s: float = 0.0
    """Since it renewed, by the store's clock."""
    lease_s: float = LEASE_S
    """What it was promised."""
    since_unix_s: float = 0.0
    """When its term began, by the store's clock."""
    nodes: tuple[str, ...] = ()
    """Those of the set that were there in the last day, by peer id, sorted."""

    @property
    def is_free(self) -> bool:
        """Whether another one may take the store."""
        return not self.peer or self.silent_s > self.lease_s


class OwnedStore(QueueStore, Protocol):
    """A store of which one node at a time is the owner. `open` takes it, and raises NotOwnerError when another did.

    Every commit renews, and fails with NotOwnerError when another node has it; `tidy` renews when nothing is written.
    `close` lets others take it at once.
    """

    @property
    def epoch(self) -> int:
        """Of this term."""
        ...

    def is_held(self) -> bool:
        """Whether nobody else can have it by now, as this machine's clock tells: from any thread, without waiting."""
        ...


class SharedStores(Protocol):
    """Where the set's store is. Every method blocks; one call at a time. Errors are StoreErrors."""

    @property
    def place(self) -> str:
        """For people: without a password."""
        ...

    @property
    def blocks(self) -> bool:
        """Whether a call may take a while, and goes to a thread: not so in memory."""
        ...

    def look(self) -> StoreOwner:
        """Who has it now, and be seen there as one of the set. Raises StoreLockedError when a node has it that is of
        no set."""
        ...

    def store(self, seen: StoreOwner) -> OwnedStore:
        """One that takes it when it is opened, if its owner is still as ``seen``."""
        ...

    def close(self) -> None:
        """Give everything back. Idempotent."""
        ...


def boot_s() -> float:
    """A clock that goes on while the process is stopped, and, where the system has such a one, while it sleeps."""
    if sys.platform == "linux":
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


def held_until_s(renewed_s: float, lease_s: float) -> float:
    """By `boot_s`, until when a lease that was asked for at ``renewed_s`` holds for its owner."""
    return renewed_s + lease_s * _MARGIN
