"""Percentiles of measured values."""

from collections.abc import Sequence


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the value below which ``share`` (0 to 1) of an ascending sequence lies, by nearest rank; 0 if it is empty.

    >>> percentile([1.0, 2.0, 3.0, 4.0, 5.0], 0.5)
    3.0
    """
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
