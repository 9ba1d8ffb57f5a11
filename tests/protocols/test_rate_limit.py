"""The token bucket gives its rate, its burst, and an honest time to come back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dep2p.protocols.messaging.rate_limit import TokenBucket


def test_the_burst_is_there_at_once_and_then_the_rate() -> None:
    bucket = TokenBucket(10.0, burst=3)
    assert [bucket.take(0.0) for _ in range(3)] == [0.0, 0.0, 0.0]
    assert bucket.take(0.0) == pytest.approx(0.1, abs=1e-5)
    assert bucket.take(0.05) == pytest.approx(0.05, abs=1e-5)
    assert bucket.take(0.1) == 0.0
    assert bucket.take(0.1) > 0


def test_a_long_pause_fills_no_more_than_the_burst() -> None:
    bucket = TokenBucket(10.0, burst=3)
    for _ in range(3):
        bucket.take(0.0)
    assert [bucket.take(1_000.0) == 0.0 for _ in range(4)] == [True, True, True, False]


def test_a_rate_below_one_still_lets_the_first_one_pass() -> None:
    bucket = TokenBucket(0.5)
    assert bucket.take(5.0) == 0.0
    assert bucket.take(5.0) == pytest.approx(2.0, abs=1e-5)
    assert bucket.take(7.0) == 0.0


def test_a_clock_that_goes_back_gives_nothing_away() -> None:
    bucket = TokenBucket(1.0)
    assert bucket.take(100.0) == 0.0
    assert bucket.take(0.0) > 0
    assert bucket.take(100.5) > 0
    assert bucket.take(101.0) == 0.0


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_a_rate_must_be_above_0(rate: float) -> None:
    with pytest.raises(ValueError, match="rate_per_s"):
        TokenBucket(rate)


@given(st.floats(0.1, 1_000), st.floats(1, 50), st.lists(st.floats(0, 2), min_size=1, max_size=100))
def test_never_more_than_burst_plus_rate_and_the_wait_is_enough(rate: float, burst: float, gaps: list[float]) -> None:
    bucket = TokenBucket(rate, burst=burst)
    now, taken = 0.0, 0
    for gap in gaps:
        now += gap
        wait_s = bucket.take(now)
        if wait_s == 0.0:
            taken += 1
        else:
            now += wait_s
            assert bucket.take(now) == 0.0
            taken += 1
        assert taken <= burst + rate * now + 1.001
