"""A ledger of quotas: what each member holds of them, and what was refused to it. Pure; one for a node."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from dep2p.types import PeerId

MEMBERS_MAX: Final = 4_096
"""Members whose refusals are remembered one by one; the one that was refused first is forgotten first. Those that hold
something are always remembered: they are bounded by what they hold."""


@dataclass(frozen=True, slots=True)
class MemberUsage:
    """One member at this moment."""

    peer: PeerId
    held: Mapping[str, int]
    """By quota, what it holds."""
    refused: Mapping[str, int]
    """By quota, how often it was refused since the node began."""


class QuotaLedger:
    """Quotas by name, each with a maximum for one member.

    >>> ledger = QuotaLedger()
    >>> alice = PeerId("alice")
    >>> ledger.acquire(alice, "consumers", 1, most=1), ledger.acquire(alice, "consumers", 1, most=1)
    (True, False)
    """

    __slots__ = ("_held", "_refused", "refused")

    def __init__(self) -> None:
        self._held: dict[PeerId, Counter[str]] = {}
        self._refused: dict[PeerId, Counter[str]] = {}
        self.refused: Counter[str] = Counter()
        """Refusals by quota, of all members together."""

    def acquire(self, member: PeerId, quota: str, amount: int, *, most: int) -> bool:
        """Take ``amount`` more of a quota, if the member then holds at most ``most``. A refusal is counted."""
        held = self._held.get(member)
        has = 0 if held is None else held[quota]
        if has + amount > most:
            self.refuse(member, quota)
            return False
        if held is None:
            held = self._held[member] = Counter()
        held[quota] = has + amount
        return True

    def release(self, member: PeerId, quota: str, amount: int) -> None:
        """Give back what was acquired."""
        held = self._held[member]
        left = held[quota] - amount
        if left:
            held[quota] = left
            return
        del held[quota]
        if not held:
            del self._held[member]

    def held(self, member: PeerId, quota: str) -> int:
        """Return how much a member holds of a quota."""
        held = self._held.get(member)
        return 0 if held is None else held[quota]

    def refuse(self, member: PeerId, quota: str, count: int = 1) -> None:
        """Count refusals of a quota that its caller keeps, such as a rate."""
        self.refused[quota] += count
        refused = self._refused.get(member)
        if refused is None:
            if len(self._refused) >= MEMBERS_MAX:
                del self._refused[next(iter(self._refused))]
            refused = self._refused[member] = Counter()
        refused[quota] += count

    def usage(self) -> list[MemberUsage]:
        """All members that hold something or were refused something; most refused first."""
        members = {**dict.fromkeys(self._held), **dict.fromkeys(self._refused)}
        found = [
            MemberUsage(member, dict(self._held.get(member, {})), dict(self._refused.get(member, {})))
            for member in members
        ]
        return sorted(found, key=lambda each: -sum(each.refused.values()))
