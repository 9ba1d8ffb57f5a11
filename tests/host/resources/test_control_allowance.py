"""The token bucket of control frames."""

from hypothesis import given
from hypothesis import strategies as st

from dep2p.host.resources.control_allowance import DATA_BYTES_PER_FRAME, ControlRate


def allowed(rate: ControlRate, frames: int, now_s: float, data_bytes: int = 0) -> bool:
    return rate.take(frames) or rate.refill(now_s, data_bytes)


def test_a_burst_passes_and_then_the_rate() -> None:
    rate = ControlRate(10, 4)
    assert all(allowed(rate, 1, 0.0) for _ in range(40))
    assert not allowed(rate, 1, 0.0)
    assert allowed(rate, 1, 0.2)
    assert not allowed(rate, 5, 0.3)


def test_data_pays_for_frames() -> None:
    """Window updates and streams of a busy connection are no flood."""
    rate = ControlRate(1, 1)
    assert allowed(rate, 1, 0.0)
    for number in range(1, 1_000):
        assert allowed(rate, 1, 0.0, number * DATA_BYTES_PER_FRAME)
    assert not allowed(rate, 1, 0.0, 999 * DATA_BYTES_PER_FRAME)


def test_a_proof_grants_the_larger_burst_once() -> None:
    rate = ControlRate(10, 4)
    assert allowed(rate, 40, 0.0)
    rate.change(100)
    assert allowed(rate, 360, 0.0)
    assert not allowed(rate, 1, 0.0)
    rate.change(10)
    rate.change(100)
    assert not allowed(rate, 361, 0.0)


def test_no_rate_is_no_limit() -> None:
    rate = ControlRate(0, 4)
    assert all(allowed(rate, 1_000_000, 0.0) for _ in range(100))
    rate.change(5)
    assert not allowed(rate, 21, 0.0)
    rate.change(0)
    assert allowed(rate, 10**9, 0.0)


@given(st.lists(st.tuples(st.integers(1, 50), st.floats(0, 2)), max_size=50))
def test_no_more_pass_than_the_burst_and_the_rate_allow(steps: list[tuple[int, float]]) -> None:
    rate, now_s, passed = ControlRate(10, 4), 0.0, 0
    for frames, pause_s in steps:
        now_s += pause_s
        if not allowed(rate, frames, now_s):
            break
        passed += frames
    assert passed <= 40 + 10 * now_s + 1e-6
