"""Random choice from nothing but a `Rng`."""

from typing import TypeVar

from dep2p.types import Rng

T = TypeVar("T")


def shuffle(items: list[T], rng: Rng) -> None:
    """Put the items into random order."""
    random = rng.random
    for last in range(len(items) - 1, 0, -1):
        other = int(random() * (last + 1))
        items[last], items[other] = items[other], items[last]


def sample(items: list[T], count: int, rng: Rng) -> list[T]:
    """Return ``count`` of the items at random, all when there are fewer. The given list is reordered."""
    size = len(items)
    if count >= size:
        return items
    random = rng.random
    for index in range(count):
        other = index + int(random() * (size - index))
        items[index], items[other] = items[other], items[index]
    return items[:count]
