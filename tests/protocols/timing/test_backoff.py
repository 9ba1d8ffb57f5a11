"""Waits between tries."""

import random

import pytest

from dep2p.protocols.timing.backoff import Backoff


def test_waits_double_up_to_the_longest() -> None:
    backoff = Backoff(first_s=0.1, max_s=1.0)
    assert [backoff.after(tries) for tries in range(1, 7)] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert backoff.after(10**9) == 1.0


def test_jitter_takes_at_most_half() -> None:
    backoff, rng = Backoff(first_s=1.0, max_s=8.0), random.Random(1)
    waits = [backoff.jittered(3, rng) for _ in range(100)]
    assert 2.0 <= min(waits) < 2.2
    assert 3.8 < max(waits) <= 4.0


@pytest.mark.parametrize(("first_s", "max_s", "factor"), [(2.0, 1.0, 2.0), (-1.0, 1.0, 2.0), (1.0, 2.0, 0.5)])
def test_a_backoff_that_would_shrink_is_refused(first_s: float, max_s: float, factor: float) -> None:
    with pytest.raises(ValueError, match="back-off"):
        Backoff(first_s, max_s, factor)
