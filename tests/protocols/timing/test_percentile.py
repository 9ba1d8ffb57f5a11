"""Percentiles by nearest rank."""

from dep2p.protocols.timing.percentile import percentile


def test_percentile() -> None:
    assert percentile([], 0.5) == 0
    assert [percentile([1, 2, 3, 4, 5], share) for share in (0, 0.5, 0.99, 1)] == [1, 3, 5, 5]
