"""Whose turn it is: a member alone is served at once; among others, rounds give each member a turn."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from dep2p.protocols.fairness.turns import BUSY_S, SHARED_S, UNITS_ALONE, UNITS_PER_S, UNITS_PER_TURN, TurnOrder
from dep2p.types import PeerId

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


def test_a_member_alone_never_shares_and_two_members_do_for_a_moment() -> None:
    order: TurnOrder[str] = TurnOrder()
    assert [order.note(A, now) for now in (0.0, 0.1, 5.0)] == [False, False, False]
    assert order.note(B, 5.1)
    assert order.note(A, 5.2)
    assert order.is_shared(C, 5.2)
    assert order.note(A, 5.1 + SHARED_S)
    assert not order.note(A, 5.2 + SHARED_S)
    assert not order.is_shared(A, 5.2 + SHARED_S)


def test_a_member_that_shares_the_node_does_a_turn_s_work_at_once_and_then_its_rate() -> None:
    order: TurnOrder[str] = TurnOrder()
    order.note(B, 0.0)
    order.note(A, 0.0)
    assert order.spend(A, UNITS_PER_TURN, 0.0)
    assert not order.spend(A, 1, 0.0)
    assert order.spend(B, UNITS_PER_TURN, 0.0)
    assert order.spend(A, 8, 8.001 / UNITS_PER_S)


def test_what_waits_goes_before_what_comes_later() -> None:
    order: TurnOrder[str] = TurnOrder()
    order.note(B, 0.0)
    order.note(A, 0.0)
    order.wait(A, "first")
    assert not order.spend(A, 1, 0.0)
    assert order.spend(B, 1, 0.0)


def test_each_member_gets_one_turn_in_a_round_however_much_waits() -> None:
    order: TurnOrder[str] = TurnOrder()
    for number in range(100):
        order.wait(A, f"a{number}")
    order.wait(B, "b0")
    order.wait(C, "c0")
    assert order.next_round(0.0) == [
        (A, "a0", UNITS_PER_TURN),
        (B, "b0", UNITS_PER_TURN),
        (C, "c0", UNITS_PER_TURN),
    ]
    assert order.next_round(0.0) == [(A, "a1", UNITS_ALONE)]


def test_a_turn_is_short_while_another_member_was_active_a_moment_ago() -> None:
    order: TurnOrder[str] = TurnOrder()
    order.note(B, 0.0)
    order.note(A, 0.5)
    order.wait(A, "x")
    assert order.next_round(0.5) == [(A, "x", UNITS_PER_TURN)]
    order.wait(A, "y")
    assert order.next_round(0.5 + SHARED_S) == [(A, "y", UNITS_ALONE)]


def test_rounds_slow_others_only_while_a_member_without_a_line_is_active() -> None:
    order: TurnOrder[str] = TurnOrder()
    order.note(A, 0.0)
    order.wait(A, "a")
    assert not order.slows_others(0.0)
    order.note(B, 0.01)
    assert order.slows_others(0.01)
    order.wait(B, "b")
    assert not order.slows_others(0.01)
    order.withdraw(B, "b")
    order.note(A, 0.02)
    assert order.slows_others(0.02)
    assert not order.slows_others(0.011 + BUSY_S)


def test_a_withdrawn_item_gets_no_turn() -> None:
    order: TurnOrder[str] = TurnOrder()
    order.wait(A, "x")
    order.withdraw(A, "x")
    order.withdraw(A, "never there")
    assert not order and order.next_round(0.0) == []


@given(st.lists(st.sampled_from([A, B, C]), max_size=60))
def test_every_item_gets_its_turn_in_the_order_of_its_member(members: list[PeerId]) -> None:
    order: TurnOrder[int] = TurnOrder()
    for number, member in enumerate(members):
        order.wait(member, number)
    got: dict[PeerId, list[int]] = {A: [], B: [], C: []}
    rounds = 0
    while order:
        rounds += 1
        turns = order.next_round(0.0)
        assert max(Counter(member for member, _, _ in turns).values()) == 1
        for member, number, _units in turns:
            got[member].append(number)
    assert got == {each: [n for n, member in enumerate(members) if member == each] for each in got}
    assert rounds == max(Counter(members).values(), default=0)
