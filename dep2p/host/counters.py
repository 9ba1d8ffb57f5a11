"""Named monotonic counts: every refusal, drop and reset of the host ends up in one of these."""

from collections import Counter


class Counters:
    """Counts by name, for metrics. Names tell the event and its reason, for example
    ``inbound_refused_connections_max``."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, name: str, amount: int = 1) -> None:
        self._counts[name] += amount

    def __getitem__(self, name: str) -> int:
        return self._counts[name]

    def snapshot(self) -> dict[str, int]:
        """Return all counts so far, by name."""
        return dict(sorted(self._counts.items()))
