"""Places of handlers: concurrency holds, lines are fair between peers and bounded for each."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dep2p.errors import ErrorCode
from dep2p.limits import Limits
from dep2p.protocols.messaging.admission import HandlerQueue, PeerLoad
from dep2p.token_bucket import TokenBucket
from dep2p.types import PeerId

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


def test_free_places_go_round_the_peers() -> None:
    queue: HandlerQueue[str] = HandlerQueue(1, 100)
    assert queue.offer(A, "a0") == "start"
    for index in range(1, 5):
        assert queue.offer(A, f"a{index}") == "wait"
    assert queue.offer(B, "b1") == "wait"
    assert queue.offer(C, "c1") == "wait"
    order: list[str] = []
    running: str | None = "a0"
    while running is not None:
        queue.done(PeerId(running[0]))
        running = queue.next()
        order.append(running or "")
    assert order == ["a1", "b1", "c1", "a2", "a3", "a4", ""]
    assert queue.running == 0


def test_one_peer_s_full_line_refuses_that_peer_only() -> None:
    queue: HandlerQueue[str] = HandlerQueue(1, 2)
    assert [queue.offer(A, f"a{index}") for index in range(4)] == ["start", "wait", "wait", "refuse"]
    assert queue.offer(B, "b0") == "wait"
    assert HandlerQueue[str](1, 0).offer(A, "x") == "start"


def test_without_a_line_work_over_the_concurrency_is_refused() -> None:
    queue: HandlerQueue[str] = HandlerQueue(1, 0)
    assert queue.offer(A, "a0") == "start"
    assert queue.offer(A, "a1") == "refuse"


@given(st.integers(1, 4), st.lists(st.tuples(st.sampled_from("odw"), st.sampled_from([A, B, C])), max_size=80))
def test_places_are_never_lost_or_given_twice(concurrency: int, steps: list[tuple[str, PeerId]]) -> None:
    queue: HandlerQueue[int] = HandlerQueue(concurrency, 3)
    running: list[tuple[PeerId, int]] = []
    waiting: list[tuple[PeerId, int]] = []
    for number, (step, peer) in enumerate(steps):
        if step == "o":
            match queue.offer(peer, number):
                case "start":
                    running.append((peer, number))
                case "wait":
                    waiting.append((peer, number))
                case "refuse":
                    assert sum(1 for its, _ in waiting if its == peer) == 3
        elif step == "d" and running:
            queue.done(running.pop()[0])
            following = queue.next()
            assert queue.next() is None
            if following is not None:
                (entry,) = [entry for entry in waiting if entry[1] == following]
                waiting.remove(entry)
                running.append(entry)
        elif step == "w" and waiting:
            its, job = waiting.pop(number % len(waiting))
            assert queue.withdraw(its, job)
            assert not queue.withdraw(its, job)
        assert queue.running == len(running) <= concurrency
        assert queue.waiting == len(waiting)
        assert not waiting or len(running) == concurrency


def test_a_peer_s_jobs_are_bounded_in_number_and_bytes() -> None:
    load = PeerLoad(Limits(handlers_per_peer_max=2, link_in_bytes_max=100))
    assert load.admit_request("n", 0.0, 100, 0.0) is None
    load.begin(60)
    refusal = load.admit_request("n", 0.0, 41, 0.0)
    assert refusal is not None and refusal.code == ErrorCode.OVERLOADED
    assert load.admit_request("n", 0.0, 40, 0.0) is None
    load.begin(0)
    assert load.admit_request("n", 0.0, 0, 0.0) is not None
    load.end(60)
    assert load.admit_request("n", 0.0, 100, 0.0) is None
    assert not load.is_idle
    load.end(0)
    assert load.is_idle


def test_rates_are_kept_per_peer_and_per_handler() -> None:
    load = PeerLoad(Limits(requests_per_peer_per_s=3.0))
    assert [load.admit_request("a", 1.0, 0, 0.0) for _ in range(1)] == [None]
    refusal = load.admit_request("a", 1.0, 0, 0.0)
    assert refusal is not None and refusal.code == ErrorCode.RATE_LIMITED
    assert 1_000 <= refusal.retry_after_ms <= 1_002
    assert load.admit_request("b", 0.0, 0, 0.0) is None
    refusal = load.admit_request("b", 0.0, 0, 0.0)
    assert refusal is not None and 333 <= refusal.retry_after_ms <= 336


@pytest.mark.parametrize(("concurrency", "waiting"), [(0, 1), (1, -1)])
def test_impossible_bounds_are_refused(concurrency: int, waiting: int) -> None:
    with pytest.raises(ValueError, match="concurrency"):
        HandlerQueue[str](concurrency, waiting)


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
