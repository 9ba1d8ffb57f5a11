"""Scopes: bounds on the bytes of several connections and streams together, and the choice which of them ends above the
bound.

The model is go-libp2p's resource manager (https://github.com/libp2p/go-libp2p/tree/master/p2p/host/resource-manager):
an account reserves in each scope that it belongs to. Here a full scope ends its largest account instead of refusing the
newcomer: else the peers that came first could shut out all others by holding what they have.
"""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

End = Callable[[str], None]
"""Ends what an account stands for, synchronously, with a reason; it closes the account."""
OnEvent = Callable[[str, str], None]
"""Takes the name of a counter and a sentence for the log."""


def _end_nothing(_reason: str) -> None:
    """In the place of the end of a closed account."""


class Scope:
    """A bound on the bytes of its accounts.

    ``setting`` names the setting behind ``memory_bytes_max`` in reasons and logs. ``evicts``: whether the largest
    account ends when the scope is full; else the reservation is refused.
    """

    __slots__ = ("accounts", "evicts", "memory_bytes", "memory_bytes_max", "name", "setting")

    def __init__(self, name: str, memory_bytes_max: int, setting: str, *, evicts: bool = True) -> None:
        self.name: str = name
        self.memory_bytes_max: int = memory_bytes_max
        self.setting: str = setting
        self.evicts: bool = evicts
        self.memory_bytes: int = 0
        self.accounts: dict[Account, None] = {}
        """The accounts, oldest first."""

    def largest(self) -> "Account":
        """Return the account that holds most; the oldest of several."""
        return max(self.accounts, key=lambda account: account.memory_bytes)


class Account:
    """The memory of one connection, or of one stream that is accounted by itself.

    ``memory_bytes_max`` is its own bound. ``ends_at_limit``: whether it ends over that bound; else `reserve` only
    refuses.
    """

    __slots__ = (
        "_end",
        "_on_event",
        "ends_at_limit",
        "is_closed",
        "keeps_place",
        "memory_bytes",
        "memory_bytes_max",
        "name",
        "scopes",
    )

    def __init__(
        self,
        name: str,
        memory_bytes_max: int,
        scopes: tuple[Scope, ...] = (),
        *,
        end: End = lambda _reason: None,
        on_event: OnEvent = lambda _name, _text: None,
        ends_at_limit: bool = False,
    ) -> None:
        self.name: str = name
        self.memory_bytes_max: int = memory_bytes_max
        self.scopes: tuple[Scope, ...] = ()
        self.ends_at_limit: bool = ends_at_limit
        self.memory_bytes: int = 0
        self.is_closed: bool = False
        self.keeps_place: bool = False
        """Others of its scope give way before it where a number of connections is the bound."""
        self._end = end
        self._on_event = on_event
        self.move(scopes)

    def reserve_half(self, size_bytes: int) -> bool:
        """Do as `reserve`, but only within the first half of the account's own bound; never ends the account for that
        bound."""
        return 2 * (self.memory_bytes + size_bytes) <= self.memory_bytes_max and self.reserve(size_bytes)

    def reserve(self, size_bytes: int) -> bool:
        """Add ``size_bytes``; False, with nothing added, when it is over a bound or has ended.

        An account that ends over its bound has ended when this returns False; so may others of a full scope have.
        """
        if self.is_closed:
            return False
        if self.memory_bytes + size_bytes > self.memory_bytes_max:
            if self.ends_at_limit:
                self._evict("connection", f"{self.name} holds over {self.memory_bytes_max} bytes of this node's memory")
            else:
                self._on_event("resources_refused_connection", f"{self.name} is at its {self.memory_bytes_max} bytes")
            return False
        for scope in self.scopes:
            if scope.memory_bytes + size_bytes > scope.memory_bytes_max and not self._make_space(scope, size_bytes):
                return False
        self.memory_bytes += size_bytes
        for scope in self.scopes:
            scope.memory_bytes += size_bytes
        return True

    def _make_space(self, scope: Scope, size_bytes: int) -> bool:
        while scope.memory_bytes + size_bytes > scope.memory_bytes_max:
            largest = scope.largest()
            if not scope.evicts or not largest.memory_bytes:
                self._on_event(f"resources_refused_{scope.name}", f"{self.name}: {scope.setting} is reached")
                return False
            if largest.memory_bytes < self.memory_bytes + size_bytes:
                largest = self
            largest._evict(scope.name, f"{largest.name} holds most of the memory that {scope.setting} allows")
            if self.is_closed:
                return False
        return True

    def _evict(self, scope_name: str, reason: str) -> None:
        self._on_event(f"resources_ended_{scope_name}", reason)
        self._end(reason)
        self.close()

    def end(self, scope_name: str, reason: str) -> None:
        """End the connection or stream of the account, to make space in a scope."""
        self._evict(scope_name, reason)

    def release(self, size_bytes: int) -> None:
        """Take back ``size_bytes`` of what was reserved; without effect after `close`."""
        if self.is_closed:
            return
        self.memory_bytes -= size_bytes
        for scope in self.scopes:
            scope.memory_bytes -= size_bytes

    def move(self, scopes: tuple[Scope, ...]) -> None:
        """Move to ``scopes`` with all bytes, even over their bounds."""
        for scope in self.scopes:
            scope.memory_bytes -= self.memory_bytes
            del scope.accounts[self]
        self.scopes = scopes
        for scope in scopes:
            scope.memory_bytes += self.memory_bytes
            scope.accounts[self] = None

    def close(self) -> None:
        """Release everything and leave all scopes. Idempotent."""
        if not self.is_closed:
            self.is_closed = True
            self.move(())
            self.memory_bytes = 0
            self._end = _end_nothing  # else the account and its connection keep each other


@runtime_checkable
class ChargedStream(Protocol):
    """A stream whose unread bytes can be accounted for apart from its connection's."""

    def charge_to(self, account: Account) -> None:
        """Account for the unread bytes in ``account`` from now on."""
        ...
