"""Places of one pool: a member uses nearly all of them, and leaves some for the first work of others."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dep2p.limits import HANDLER_CONCURRENCY
from dep2p.protocols.fairness.shares import MemberShares
from dep2p.types import PeerId

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


def fill(shares: MemberShares[PeerId], member: PeerId) -> int:
    """Take as many as the member may; how many it holds."""
    while shares.may_take(member):
        shares.take(member)
    return shares.held(member)


@pytest.mark.parametrize(("places", "alone"), [(1, 1), (2, 2), (7, 7), (8, 7), (16, 14), (64, 56), (1_000, 875)])
def test_a_member_alone_gets_seven_of_eight_places(places: int, alone: int) -> None:
    shares: MemberShares[PeerId] = MemberShares(places)
    assert fill(shares, A) == alone
    assert shares.may_take(B) == (places >= 8)


def test_a_newcomer_finds_a_place_beside_two_that_take_all_they_may() -> None:
    shares: MemberShares[PeerId] = MemberShares(64)
    assert (fill(shares, A), fill(shares, B)) == (56, 7)
    assert shares.may_take(C)


def test_members_with_endless_work_get_equal_shares_when_places_come_back() -> None:
    shares: MemberShares[PeerId] = MemberShares(64)
    fill(shares, A)
    for _ in range(200):
        shares.release(A if shares.held(A) > shares.held(B) else B)
        fill(shares, B)
        fill(shares, A)
    assert abs(shares.held(A) - shares.held(B)) <= 8


@given(st.integers(1, 30), st.lists(st.tuples(st.booleans(), st.sampled_from([A, B, C])), max_size=200))
def test_places_are_never_lost_or_given_twice(places: int, steps: list[tuple[bool, PeerId]]) -> None:
    shares: MemberShares[PeerId] = MemberShares(places)
    held = dict.fromkeys([A, B, C], 0)
    for takes, member in steps:
        if takes and shares.may_take(member):
            shares.take(member)
            held[member] += 1
        elif not takes and held[member]:
            shares.release(member)
            held[member] -= 1
        assert {each: shares.held(each) for each in held} == held
        assert shares.taken == sum(held.values()) <= places
        assert shares.taken or shares.may_take(A)


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        MemberShares(0)


@pytest.mark.parametrize("places", [1, 3, 8, 80])
def test_try_take_gives_what_may_take_allows(places: int) -> None:
    asked, taken = MemberShares[str](places), MemberShares[str](places)
    for member in "aab" * places:
        may = asked.may_take(member)
        if may:
            asked.take(member)
        assert taken.try_take(member) is may
        assert (taken.taken, taken.held(member)) == (asked.taken, asked.held(member))


def test_a_lone_member_keeps_64_requests_at_work_with_the_default_concurrency() -> None:
    shares = MemberShares[str](HANDLER_CONCURRENCY)
    assert all(shares.try_take("a") for _ in range(64))


@given(places=st.integers(1, 200), amount=st.integers(1, 50), before=st.integers(0, 50))
def test_many_places_at_once_are_taken_just_when_one_after_the_other_could_be(
    places: int, amount: int, before: int
) -> None:
    at_once: MemberShares[PeerId] = MemberShares(places)
    one_by_one: MemberShares[PeerId] = MemberShares(places)
    for shares in (at_once, one_by_one):
        shares.take(A, min(before, places))
    may = at_once.may_take(A, amount)
    taken = 0
    while taken < amount and one_by_one.may_take(A):
        one_by_one.take(A)
        taken += 1
    assert may == (taken == amount)
    if may:
        at_once.take(A, amount)
        assert at_once.held(A) == one_by_one.held(A) == at_once.held_most == at_once.taken
        at_once.release(A, amount)
