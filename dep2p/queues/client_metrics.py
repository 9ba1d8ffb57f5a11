"""Counters of a node's producers and consumers: the sums over those at work and those that have ended.

Each producer and consumer has its own counters. The sums are made on request, so that a message costs nothing here.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

_SWEEP_ITEMS: Final = 64


class Durations:
    """A histogram of durations."""

    BOUNDS_S: Final[Sequence[float]] = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

    def __init__(self) -> None:
        self.counts: list[int] = [0] * (len(self.BOUNDS_S) + 1)
        """The counts by upper bound; the last one: longer."""
        self.sum_s: float = 0.0

    def add(self, seconds: float) -> None:
        """Count a duration."""
        self.counts[bisect_left(self.BOUNDS_S, seconds)] += 1
        self.sum_s += seconds

    def update(self, other: "Durations") -> None:
        """Add the counts of another one."""
        self.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        self.sum_s += other.sum_s


class Handovers:
    """Durations of handovers of partitions in exclusive channels, as their consumers measure them."""

    def __init__(self) -> None:
        self.given: Durations = Durations()
        """From the request to hand a partition over until its work is done and its lock is released."""
        self.taken: Durations = Durations()
        """From the assignment of a partition until the consumer has its lock."""

    def update(self, other: "Handovers") -> None:
        """Add the durations of another one."""
        self.given.update(other.given)
        self.taken.update(other.taken)


class Flow(Protocol):
    """A producer or a consumer."""

    flow_kind: str
    """``producer`` or ``consumer``."""

    @property
    def is_over(self) -> bool:
        """Whether it counts nothing more."""
        ...

    def flow_counts(self) -> Mapping[str, int]:
        """Return its counts since it began, by name."""
        ...

    def flow_values(self) -> Mapping[str, float]:
        """Return its gauges of this moment, by name."""
        ...

    @property
    def handovers(self) -> Handovers | None:
        """The handovers of a consumer that has partitions of its own; else None."""
        ...


class FlowCounts:
    """The counters of all producers and consumers of one node."""

    def __init__(self) -> None:
        self._flows: dict[Flow, None] = {}
        self._ended: dict[str, Counter[str]] = {}
        self._ended_handovers = Handovers()
        self._sweep_at = _SWEEP_ITEMS

    def add(self, flow: Flow) -> None:
        """Add a producer or consumer that begins."""
        if len(self._flows) >= self._sweep_at:
            self._sweep()
            self._sweep_at = max(_SWEEP_ITEMS, 2 * len(self._flows))
        self._flows[flow] = None

    @property
    def live(self) -> int:
        """The number of producers and consumers that are remembered one by one."""
        return len(self._flows)

    def _sweep(self) -> None:
        for flow in [flow for flow in self._flows if flow.is_over]:
            del self._flows[flow]
            self._ended.setdefault(flow.flow_kind, Counter()).update(flow.flow_counts())
            if flow.handovers is not None:
                self._ended_handovers.update(flow.handovers)

    def counts(self, kind: str) -> dict[str, int]:
        """Return the sum of each counter over all producers or consumers, past ones too."""
        self._sweep()
        total = Counter(self._ended.get(kind, {}))
        for flow in self._flows:
            if flow.flow_kind == kind:
                total.update(flow.flow_counts())
        return dict(total)

    def values(self, kind: str) -> dict[str, float]:
        """Return the sum of each gauge over the producers or consumers at work; the maximum for a name that begins with
        ``oldest``."""
        total: dict[str, float] = {"at_work": sum(flow.flow_kind == kind and not flow.is_over for flow in self._flows)}
        for flow in self._flows:
            if flow.flow_kind == kind and not flow.is_over:
                for name, value in flow.flow_values().items():
                    before = total.get(name, 0.0)
                    total[name] = max(before, value) if name.startswith("oldest") else before + value
        return total

    def handovers(self) -> Handovers:
        """Return the durations of all handovers of this node's consumers."""
        self._sweep()
        total = Handovers()
        total.update(self._ended_handovers)
        for flow in self._flows:
            if flow.handovers is not None:
                total.update(flow.handovers)
        return total
