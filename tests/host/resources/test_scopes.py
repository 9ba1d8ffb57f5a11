"""Accounts and scopes: what is reserved is counted everywhere, and a full scope ends its largest account."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dep2p.host.resources.scopes import Account, Scope


class Holders:
    """Accounts in one scope, and what happened to them."""

    def __init__(self, scope_bytes: int, own_bytes: int, *, evicts: bool = True) -> None:
        self.scope = Scope("unproven", scope_bytes, "a_setting", evicts=evicts)
        self.ended: list[str] = []
        self.events: list[str] = []
        self._own_bytes = own_bytes

    def open(self, name: str, *, ends_at_limit: bool = True) -> Account:
        return Account(
            name,
            self._own_bytes,
            (self.scope,),
            end=lambda _reason: self.ended.append(name),
            on_event=lambda event, _text: self.events.append(event),
            ends_at_limit=ends_at_limit,
        )


def test_what_is_reserved_and_released_is_counted_in_the_account_and_in_each_scope() -> None:
    system, peer = Scope("system", 100, "one"), Scope("peer", 100, "two")
    account = Account("it", 100, (system, peer))
    assert account.reserve(30)
    account.release(10)
    assert (account.memory_bytes, system.memory_bytes, peer.memory_bytes) == (20, 20, 20)
    account.close()
    account.close()
    account.release(5)
    assert (account.memory_bytes, system.memory_bytes, peer.memory_bytes) == (0, 0, 0)
    assert not account.reserve(1)
    assert not system.accounts


def test_an_account_over_its_own_bound_ends() -> None:
    holders = Holders(1_000, 100)
    account = holders.open("greedy")
    assert account.reserve(100)
    assert not account.reserve_half(1)
    assert not account.is_closed
    assert not account.reserve(1)
    assert holders.ended == ["greedy"]
    assert holders.events == ["resources_ended_connection"]
    assert holders.scope.memory_bytes == 0


def test_an_account_that_does_not_end_is_refused_and_keeps_what_it_has() -> None:
    holders = Holders(1_000, 100)
    account = holders.open("member", ends_at_limit=False)
    assert account.reserve(100)
    assert not account.reserve(1)
    assert holders.ended == []
    assert holders.events == ["resources_refused_connection"]
    assert account.memory_bytes == 100


def test_a_full_scope_ends_its_largest_account_and_not_the_one_that_comes_last() -> None:
    holders = Holders(100, 100)
    large, small, late = (holders.open(name) for name in ("large", "small", "late"))
    assert large.reserve(60)
    assert small.reserve(30)
    assert late.reserve(20)
    assert holders.ended == ["large"]
    assert holders.scope.memory_bytes == 50


def test_the_account_that_would_become_the_largest_ends_itself() -> None:
    holders = Holders(100, 100)
    first, greedy = holders.open("first"), holders.open("greedy")
    assert first.reserve(40)
    assert greedy.reserve(50)
    assert not greedy.reserve(30)
    assert holders.ended == ["greedy"]
    assert first.memory_bytes == holders.scope.memory_bytes == 40


def test_a_scope_that_evicts_no_account_refuses() -> None:
    holders = Holders(100, 100, evicts=False)
    first, second = holders.open("first"), holders.open("second")
    assert first.reserve(80)
    assert not second.reserve(30)
    assert holders.ended == []
    assert holders.events == ["resources_refused_unproven"]
    assert holders.scope.memory_bytes == 80


def test_a_move_takes_what_is_held_along() -> None:
    unproven, peer = Scope("unproven", 100, "one"), Scope("peer", 10, "two")
    account = Account("it", 100, (unproven,))
    assert account.reserve(50)
    account.move((peer,))
    assert (unproven.memory_bytes, peer.memory_bytes) == (0, 50)
    assert not unproven.accounts
    assert peer.largest() is account


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(-3, 40)), max_size=60))
@pytest.mark.parametrize("evicts", [True, False])
def test_no_sequence_of_calls_exceeds_a_bound_or_loses_a_byte(evicts: bool, calls: list[tuple[int, int]]) -> None:
    holders = Holders(100, 50, evicts=evicts)
    accounts = [holders.open(str(number)) for number in range(5)]
    for number, size in calls:
        account = accounts[number]
        if size >= 0:
            account.reserve(size)
        elif size == -1:
            account.release(min(5, account.memory_bytes))
        elif size == -2:
            account.close()
        else:
            accounts[number] = holders.open(str(number))
            account.close()
        assert holders.scope.memory_bytes == sum(each.memory_bytes for each in accounts) <= 100
        assert all(each.memory_bytes <= 50 for each in accounts)
        assert all(each.is_closed == (each not in holders.scope.accounts) for each in accounts)
