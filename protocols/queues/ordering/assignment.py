"""The assignment of partitions to a channel's consumers. Pure, and the same for the same input."""

from collections.abc import Mapping, Sequence
from enum import Enum


class Strategy(Enum):
    """How the consumers of a channel share its partitions."""

    EXCLUSIVE = "exclusive"
    """Each partition has one consumer at a time."""
    SHARED = "shared"
    """Every consumer takes from every partition."""


def assign_partitions(
    strategy: Strategy, partitions: Sequence[int], members: Sequence[bytes], before: Mapping[bytes, Sequence[int]]
) -> dict[bytes, tuple[int, ...]]:
    """Return the partitions of each member; a member without any has an empty entry.

    Exclusive: no member has more than one partition more than another, and as few as possible change hands. ``members``
    in the order in which they joined: the first ones have the extra partitions, unless another has them already.
    """
    if strategy is Strategy.SHARED:
        return {member: tuple(partitions) for member in members}
    if not members:
        return {}
    there = dict.fromkeys(partitions)
    had: dict[bytes, list[int]] = {}
    for member in members:
        had[member] = [each for each in before.get(member, ()) if each in there]
        for each in had[member]:
            del there[each]  # a partition has one owner, even when `before` says otherwise
    share, extra = divmod(len(partitions), len(members))
    # A member that has most already keeps the extra ones.
    rich = dict.fromkeys(sorted(members, key=lambda member: -len(had[member]))[:extra])
    kept = {member: had[member][: share + (member in rich)] for member in members}
    free = sorted([*there, *(each for member in members for each in had[member][len(kept[member]) :])])
    for member in members:
        room = share + (member in rich) - len(kept[member])
        kept[member] += free[:room]
        del free[:room]
    return {member: tuple(sorted(kept[member])) for member in members}
