"""Distances between nodes, and the links among them."""

import math
from dataclasses import dataclass
from random import Random
from typing import Final, Literal

_LATENCY_MAX_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Latency:
    """A distribution of one-way delays; each link draws its own once, so that RPCs on it stay in order.

    - ``fixed``: ``first`` for all;
    - ``uniform``: between ``first`` and ``second``;
    - ``lognormal``: median ``first``, sigma ``second`` (0.5: one link in twenty above 2.3 times the median); capped at
      5 s.

    Times in seconds.
    """

    kind: Literal["fixed", "uniform", "lognormal"] = "uniform"
    first: float = 0.010
    second: float = 0.150

    def __post_init__(self) -> None:
        if not 0 <= self.first <= _LATENCY_MAX_S or not 0 <= self.second <= _LATENCY_MAX_S:
            raise ValueError(f"a latency is between 0 and {_LATENCY_MAX_S:g} s")
        if self.kind == "uniform" and self.second < self.first:
            raise ValueError("a uniform latency goes from the smaller to the larger")

    def draw(self, rng: Random) -> float:
        """Draw the delay of one link, seconds."""
        if self.kind == "fixed":
            return self.first
        if self.kind == "uniform":
            return self.first + (self.second - self.first) * rng.random()
        return min(self.first * math.exp(self.second * rng.gauss(0.0, 1.0)), _LATENCY_MAX_S)

    @classmethod
    def parse(cls, text: str) -> "Latency":
        """Parse ``fixed:50``, ``uniform:10:150`` or ``lognormal:60:0.5`` (milliseconds; sigma plain).

        Raises ``ValueError`` with a sentence for the user.
        """
        kind, *numbers = text.split(":")
        try:
            values = [float(number) for number in numbers]
            if kind == "fixed":
                (first,) = values
                return cls("fixed", first / 1_000, 0.0)
            first, second = values
            if kind == "uniform":
                return cls("uniform", first / 1_000, second / 1_000)
            if kind == "lognormal":
                return cls("lognormal", first / 1_000, second)
        except ValueError as error:
            raise ValueError(
                f"no latency {text!r} ({error}): write fixed:50, uniform:10:150 or lognormal:60:0.5"
            ) from None
        raise ValueError(f"no latency {text!r}: write fixed:50, uniform:10:150 or lognormal:60:0.5")


def random_graph(nodes: int, degree: int, rng: Random) -> list[tuple[int, int]]:
    """Return links (dialer, dialed): each node dials ``degree // 2`` others that it is not linked to, at random.

    So a node has about ``degree`` links, half of them its own. In a small network it dials all nodes that are left.
    """
    linked: list[dict[int, None]] = [{} for _ in range(nodes)]
    links: list[tuple[int, int]] = []
    for number in range(nodes):
        for _ in range(max(1, degree // 2)):
            if len(linked[number]) >= nodes - 1:
                break
            other = number
            while other == number or other in linked[number]:
                other = rng.randrange(nodes)
            linked[number][other] = None
            linked[other][number] = None
            links.append((number, other))
    return links
