"""The groups of waiting work: in order, and no group heavier than its bound."""

import doctest

from hypothesis import given
from hypothesis import strategies as st

from dep2p.host.resources import turn_groups
from dep2p.host.resources.turn_groups import TurnGroups


def counted(weight: int, weight_max: int) -> int:
    return min(weight, max(1, weight_max // 2))


def test_the_example_holds() -> None:
    found = doctest.testmod(turn_groups)
    assert found.attempted and not found.failed


@given(st.lists(st.integers(1, 12), max_size=40), st.integers(1, 8))
def test_groups_keep_the_order_and_the_bound(weights: list[int], weight_max: int) -> None:
    groups = TurnGroups[int](weight_max)
    for number, weight in enumerate(weights):
        groups.add(number, weight)
    seen: list[int] = []
    while group := groups.next_group():
        total = sum(counted(weights[number], weight_max) for number in group)
        assert total <= weight_max
        seen += group
        if seen[-1] + 1 < len(weights):
            following = counted(weights[seen[-1] + 1], weight_max)
            assert total + following > weight_max, "the next one had room in this group"
    assert seen == list(range(len(weights)))


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 6)), max_size=60), st.integers(2, 12))
def test_neither_lane_waits_for_the_other(work: list[tuple[bool, int]], weight_max: int) -> None:
    groups = TurnGroups[int](weight_max)
    for number, (is_early, weight) in enumerate(work):
        groups.add(number, weight, is_early=is_early)
    seen: list[int] = []
    while group := groups.next_group():
        assert sum(counted(work[number][1], weight_max) for number in group) <= weight_max
        seen += group
    for lane in (True, False):
        numbers = [number for number, (is_early, _) in enumerate(work) if is_early is lane]
        assert [number for number in seen if work[number][0] is lane] == numbers
    assert len(seen) == len(work)


def test_a_newcomer_is_in_the_next_group_and_the_others_go_on() -> None:
    """448 connections that keep the node at work held up a member that wanted to join."""
    groups = TurnGroups[str](8)
    for number in range(448):
        groups.add(f"busy {number}", 1)
    groups.next_group()
    for number in range(40):
        groups.add(f"new {number}", 1, is_early=True)
    for first in range(0, 40, 4):
        assert groups.next_group()[:4] == [f"new {number}" for number in range(first, first + 4)]
    assert len(groups) == 448 - 8 - 40


def test_a_heavy_step_does_not_wait_for_the_end_of_a_stream_of_newcomers() -> None:
    groups = TurnGroups[str](8)
    groups.add("heavy", 9)
    for number in range(40):
        groups.add(f"new {number}", 1, is_early=True)
    assert "heavy" in groups.next_group()


def test_one_that_left_takes_no_place() -> None:
    groups = TurnGroups[str](2)
    for name in ("a", "b", "c"):
        groups.add(name, 1)
    groups.add("early", 1, is_early=True)
    groups.remove("early")
    groups.remove("a")
    assert len(groups) == 2
    assert groups.next_group() == ["b", "c"]
