"""Places of one pool, shared among members so that one member's work leaves places for the others. Pure."""

from collections.abc import Hashable
from typing import Final, Generic, TypeVar

Member = TypeVar("Member", bound=Hashable)
SHARE_OF_FREE: Final = 7
"""A member may take a place while it holds less than seven times the places that are free. So one member alone gets 7
of 8 places, and two members get 7 of 15 each: the rule of dynamic thresholds (Choudhury and Hahne, IEEE/ACM
Transactions on Networking 6, 1998). Pools of fewer than 8 places have none to spare: there one member may take all."""


class MemberShares(Generic[Member]):
    """Counts the places that each member holds.

    >>> shares = MemberShares[str](64)
    >>> while shares.may_take("alice"):
    ...     shares.take("alice")
    >>> shares.held("alice"), shares.may_take("bob")
    (56, True)
    """

    __slots__ = ("_held", "_places", "taken")

    def __init__(self, places: int) -> None:
        """``places`` is at least 1. Raises ``ValueError``."""
        if places < 1:
            raise ValueError(f"a pool of {places} places: it must have at least 1")
        self._places = places
        self._held: dict[Member, int] = {}
        self.taken: int = 0
        """Places of all members together."""

    def may_take(self, member: Member, amount: int = 1) -> bool:
        """Whether so many places are free, and the member's share is not used up before the last of them."""
        free_for_last = self._places - self.taken - amount + 1
        return free_for_last > 0 and self._held.get(member, 0) + amount - 1 < SHARE_OF_FREE * free_for_last

    def take(self, member: Member, amount: int = 1) -> None:
        """Take places; the caller has asked `may_take`, or takes more than there are for once."""
        self.taken += amount
        self._held[member] = self._held.get(member, 0) + amount

    def try_take(self, member: Member) -> bool:
        """Take a place if the member may; whether it has."""
        held = self._held.get(member, 0)
        free = self._places - self.taken
        if free <= 0 or held >= SHARE_OF_FREE * free:
            return False
        self.taken += 1
        self._held[member] = held + 1
        return True

    def release(self, member: Member, amount: int = 1) -> None:
        """Give back places that the member holds."""
        self.taken -= amount
        held = self._held[member] - amount
        if held:
            self._held[member] = held
        else:
            del self._held[member]

    def held(self, member: Member) -> int:
        """Places of this member."""
        return self._held.get(member, 0)

    @property
    def held_most(self) -> int:
        """Places of the member that holds most."""
        return max(self._held.values(), default=0)
