"""The choice of a member: even among equals, less for the slow, and one try for those that do not answer."""

from collections import Counter
from heapq import heappop, heappush
from random import Random

import pytest

from dep2p.protocols.services.choice import AVOID_MAX_S, AVOID_S, PASSED_OVER_MAX, Failure, MemberChoice
from dep2p.types import PeerId

WORKERS = [PeerId(name) for name in ("ann", "bob", "cid")]


def run(
    times_s: dict[PeerId, float], requests: int, callers: int, *, seed: int = 1, choice: MemberChoice | None = None
) -> Counter[PeerId]:
    """Callers that ask one after the other, each as soon as it has its answer; times vary by 30 %."""
    rng = Random(seed)
    choice = choice or MemberChoice(rng)
    peers, counts = list(times_s), Counter[PeerId]()
    busy: list[tuple[float, int, PeerId, float]] = []
    now = 0.0
    for number in range(requests):
        if len(busy) >= callers:
            now, _, done, took = heappop(busy)
            choice.answered("s", done, took, now)
        peer = choice.choose("s", peers, now)
        choice.began("s", peer)
        counts[peer] += 1
        took = times_s[peer] * rng.uniform(0.7, 1.3)
        heappush(busy, (now + took, number, peer, took))
    return counts


@pytest.mark.parametrize("callers", [1, 4, 32])
@pytest.mark.parametrize("time_s", [0.001, 0.1])
@pytest.mark.parametrize("seed", [1, 2])
def test_equal_members_share_within_a_fifth_of_even(callers: int, time_s: float, seed: int) -> None:
    counts = run(dict.fromkeys(WORKERS, time_s), 2_000, callers, seed=seed)
    assert all(abs(counts[peer] - 2_000 / 3) <= 0.2 * 2_000 / 3 for peer in WORKERS), counts


@pytest.mark.parametrize("callers", [1, 16])
def test_a_slow_member_gets_less(callers: int) -> None:
    ann, bob, cid = WORKERS
    counts = run({ann: 0.01, bob: 0.01, cid: 0.1}, 2_000, callers)
    assert counts[cid] < 0.35 * counts[ann] and counts[cid] > 0
    assert abs(counts[ann] - counts[bob]) <= 0.2 * counts[ann]


def test_requests_in_flight_count_without_any_measured_time() -> None:
    choice = MemberChoice(Random(1))
    for _ in range(30):
        choice.began("s", choice.choose("s", WORKERS, 0.0))
    in_flight = [choice.standing("s", peer, 0.0) for peer in WORKERS]
    assert all(one is not None and 7 <= one.in_flight <= 13 for one in in_flight)


@pytest.mark.parametrize("failure", list(AVOID_S))
def test_a_member_that_fails_costs_one_try_and_falls_behind(failure: Failure) -> None:
    ann, bob, _ = WORKERS
    choice = MemberChoice(Random(1))
    choice.began("s", ann)
    choice.failed("s", ann, failure, 0.0)
    assert {choice.choose("s", [ann, bob], AVOID_S[failure] * 0.99) for _ in range(100)} == {bob}
    assert choice.choose("s", [ann], 0.1) == ann, "it is better than none"
    assert {choice.choose("s", [ann, bob], AVOID_S[failure]) for _ in range(100)} == {ann, bob}
    choice.failed("s", ann, failure, 1.0)
    standing = choice.standing("s", ann, 1.0)
    assert standing is not None and standing.avoided_s == pytest.approx(2 * AVOID_S[failure])
    for _ in range(100):
        choice.failed("s", ann, failure, 1.0)
    standing = choice.standing("s", ann, 1.0)
    assert standing is not None and standing.avoided_s <= AVOID_MAX_S
    choice.answered("s", ann, 0.1, 2.0)
    standing = choice.standing("s", ann, 2.0)
    assert standing is not None and (standing.failures, standing.avoided_s) == (0, 0.0)


def test_a_wait_that_a_member_asks_for_is_kept_to_and_bounded() -> None:
    choice = MemberChoice(Random(1))
    choice.failed("s", WORKERS[0], "busy", 0.0, avoid_s=1e12)
    standing = choice.standing("s", WORKERS[0], 0.0)
    assert standing is not None and standing.avoided_s == AVOID_MAX_S


def test_members_that_all_failed_are_tried_in_the_order_in_which_their_time_ends() -> None:
    choice = MemberChoice(Random(1))
    for at, peer in enumerate(WORKERS):
        choice.failed("s", peer, "absent", -float(at))
    assert choice.choose("s", WORKERS, 0.0) == WORKERS[2]


def test_a_member_whose_handlers_fail_at_once_does_not_draw_the_requests() -> None:
    ann, bob, _ = WORKERS
    choice, counts = MemberChoice(Random(1)), Counter[PeerId]()
    for step in range(1_000):
        peer = choice.choose("s", [ann, bob], step / 10)
        counts[peer] += 1
        choice.began("s", peer)
        choice.answered("s", peer, 0.00001 if peer == ann else 0.01, step / 10, is_error=peer == ann)
    assert counts[ann] < counts[bob] / 2


def test_a_member_that_was_slow_once_is_tried_again() -> None:
    ann, bob, _ = WORKERS
    choice = MemberChoice(Random(1))
    for peer, took_s in ((ann, 10.0), (bob, 0.01)):
        choice.began("s", peer)
        choice.answered("s", peer, took_s, 0.0)
    tried = 0
    for step in range(1, 2_000):
        now = step / 10
        peer = choice.choose("s", [ann, bob], now)
        choice.began("s", peer)
        choice.answered("s", peer, 0.01, now)
        tried += peer == ann
    assert tried > 100


@pytest.mark.parametrize("callers", [1, 4])
@pytest.mark.parametrize("first_s", [0.05, 1.0, 100.0])
def test_a_slow_first_answer_costs_a_member_its_share_for_a_moment_only(callers: int, first_s: float) -> None:
    ann, bob, cid = WORKERS
    choice = MemberChoice(Random(1))
    choice.began("s", ann)
    choice.answered("s", ann, first_s, 0.0)
    counts = run(dict.fromkeys(WORKERS, 0.0003), 6_000, callers, choice=choice)
    assert counts[ann] > 0.8 * counts[bob] and counts[ann] > 0.8 * counts[cid], counts


@pytest.mark.parametrize("times", [20, 1_000, 1_000_000])
def test_a_member_that_is_always_slow_is_tried_again_now_and_then(times: int) -> None:
    ann, bob, cid = WORKERS
    counts = run({ann: 0.0003, bob: 0.0003, cid: 0.0003 * times}, 20_000, 1)
    tried = 20_000 / PASSED_OVER_MAX
    assert 2 <= counts[cid] <= 2 * tried, counts


def test_services_do_not_share_what_is_known_of_a_member() -> None:
    choice = MemberChoice(Random(1))
    choice.failed("s", WORKERS[0], "absent", 0.0)
    assert {choice.choose("t", WORKERS[:2], 0.0) for _ in range(50)} == set(WORKERS[:2])


def test_what_is_remembered_is_bounded_and_work_in_flight_is_kept() -> None:
    choice = MemberChoice(Random(1), standings_max=100)
    choice.began("s", WORKERS[0])
    for number in range(10_000):
        choice.began(f"s{number}", WORKERS[1])
        choice.answered(f"s{number}", WORKERS[1], 0.1, 0.0)
    assert len(choice) == 100
    standing = choice.standing("s", WORKERS[0], 0.0)
    assert standing is not None and standing.in_flight == 1
    for number in range(1_000):
        choice.began(f"t{number}", WORKERS[1])
    assert len(choice) == 100
