"""The groups in which waiting work goes on: pure.

Each pass of the event loop takes one group. Its weights together keep to a bound, so that all other work waits for so
much of strangers' work and no more, however many of them there are.
"""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class TurnGroups(Generic[K]):
    """Keys that wait in two lanes, early and late work, each in the order in which they came and with its weight.

    Half of each group is for either lane, and what one lane leaves is the other's. So a peer that has just come waits
    for others that have, and not for those that have kept the node at work for long; nor do these wait for a stream of
    newcomers.

    >>> groups = TurnGroups[str](weight_max=4)
    >>> for name, weight in (("a", 1), ("b", 3), ("c", 1), ("d", 9)):
    ...     groups.add(name, weight)
    >>> groups.add("new", 1, is_early=True)
    >>> groups.next_group(), groups.next_group(), groups.next_group(), groups.next_group()
    (['new', 'a', 'b'], ['c', 'd'], [], [])
    """

    def __init__(self, weight_max: int) -> None:
        """``weight_max``: of one group. A key that weighs more than half of it counts as half: else it would wait
        for a group without others."""
        self._weight_max = weight_max
        self._half = max(1, weight_max // 2)
        self._early: OrderedDict[K, int] = OrderedDict()
        self._late: OrderedDict[K, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._early) + len(self._late)

    def add(self, key: K, weight: int, *, is_early: bool = False) -> None:
        """Put a key that does not wait yet behind the others of its lane."""
        (self._early if is_early else self._late)[key] = min(weight, self._half)

    def remove(self, key: K) -> None:
        """Take a waiting key out."""
        if self._early.pop(key, None) is None:
            del self._late[key]

    def next_group(self) -> list[K]:
        """Take out those that go on now: as many as keep to the bound, at least one if any waits."""
        group: list[K] = []
        late_max = self._weight_max // 2 if self._late else 0
        left = self._take(self._early, self._weight_max - late_max, group)
        left = self._take(self._late, left + late_max, group)
        self._take(self._early, left, group)
        return group

    @staticmethod
    def _take(lane: OrderedDict[K, int], weight_max: int, group: list[K]) -> int:
        """Move keys from a lane to the group; return the weight that is left."""
        left = weight_max
        while lane:
            key, weight = next(iter(lane.items()))
            if group and weight > left:
                break
            del lane[key]
            group.append(key)
            left -= weight
        return left
