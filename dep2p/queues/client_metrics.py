"""What the producers and consumers of a node count, over those that are at work and those that are over.

Each counts for itself; it is added up when somebody asks, so that a message costs nothing here.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

_SWEEP_ITEMS: Final = 64


class Durations:
    """How often something took how long."""

    BOUNDS_S: Final[Sequence[float]] = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

    def __init__(self) -> None:
        self.counts = [0] * (len(self.BOUNDS_S) + 1)
        """By the bound up to which it took; the last: longer."""
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        """One more."""
        self.counts[bisect_left(self.BOUNDS_S, seconds)] += 1
        self.sum_s += seconds

    def update(self, other: "Durations") -> None:
        """Those of another one, too."""
        self.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        self.sum_s += other.sum_s


class Handovers:
    """Of the partitions of exclusive channels, as their consumers see it."""

    def __init__(self) -> None:
        self.given = Durations()
        """From when one is to hand a partition over until everything is done and its lock is given back."""
        self.taken = Durations()
        """From when a partition is allocated to one until it has its lock."""

    def update(self, other: "Handovers") -> None:
        """Those of another one, too."""
        self.given.update(other.given)
        self.taken.update(other.taken)


class Flow(Protocol):
    """A producer or a consumer."""

    flow_kind: str
    """``producer`` or ``consumer``."""

    @property
    def is_over(self) -> bool:
        """It counts nothing more."""
        ...

    def flow_counts(self) -> Mapping[str, int]:
        """Since it began."""
        ...

    def flow_values(self) -> Mapping[str, float]:
        """Of this moment."""
        ...

    @property
    def handovers(self) -> Handovers | None:
        """If it has partitions of its own."""
        ...


class FlowCounts:
    """Of one node."""

    def __init__(self) -> None:
        self._flows: dict[Flow, None] = {}
        self._ended: dict[str, Counter[str]] = {}
        self._ended_handovers = Handovers()
        self._sweep_at = _SWEEP_ITEMS

    def add(self, flow: Flow) -> None:
        """It is at work."""
        if len(self._flows) >= self._sweep_at:
            self._sweep()
            self._sweep_at = max(_SWEEP_ITEMS, 2 * len(self._flows))
        self._flows[flow] = None

    @property
    def live(self) -> int:
        """How many are remembered each for itself."""
        return len(self._flows)

    def _sweep(self) -> None:
        for flow in [flow for flow in self._flows if flow.is_over]:
            del self._flows[flow]
            self._ended.setdefault(flow.flow_kind, Counter()).update(flow.flow_counts())
            if flow.handovers is not None:
                self._ended_handovers.update(flow.handovers)

    def counts(self, kind: str) -> dict[str, int]:
        """All that the flows of a kind have counted."""
        self._sweep()
        total = Counter(self._ended.get(kind, {}))
        for flow in self._flows:
            if flow.flow_kind == kind:
                total.update(flow.flow_counts())
        return dict(total)

    def values(self, kind: str) -> dict[str, float]:
        """What those of a kind have now, added up; of what begins with ``oldest`` the largest."""
        total: dict[str, float] = {"at_work": sum(flow.flow_kind == kind and not flow.is_over for flow in self._flows)}
        for flow in self._flows:
            if flow.flow_kind == kind and not flow.is_over:
                for name, value in flow.flow_values().items():
                    before = total.get(name, 0.0)
                    total[name] = max(before, value) if name.startswith("oldest") else before + value
        return total

    def handovers(self) -> Handovers:
        """Of all."""
        self._sweep()
        total = Handovers()
        total.update(self._ended_handovers)
        for flow in self._flows:
            if flow.handovers is not None:
                total.update(flow.handovers)
        return total
