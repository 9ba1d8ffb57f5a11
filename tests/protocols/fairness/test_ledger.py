"""Quotas of members: one member's use and refusals are its own."""

from dep2p.protocols.fairness.ledger import MEMBERS_MAX, QuotaLedger
from dep2p.protocols.fairness.rates import MemberRates
from dep2p.types import PeerId

A, B = PeerId("a"), PeerId("b")


def test_a_quota_is_refused_to_the_member_that_holds_it_and_to_no_other() -> None:
    ledger = QuotaLedger()
    assert ledger.acquire(A, "queues", 2, most=3)
    assert not ledger.acquire(A, "queues", 2, most=3)
    assert ledger.acquire(A, "consumers", 1, most=1)
    assert ledger.acquire(B, "queues", 3, most=3)
    assert (ledger.held(A, "queues"), ledger.held(B, "queues")) == (2, 3)
    ledger.release(A, "queues", 2)
    assert ledger.acquire(A, "queues", 3, most=3)
    assert ledger.refused == {"queues": 1}


def test_usage_names_what_is_held_and_refused_most_refused_first() -> None:
    ledger = QuotaLedger()
    ledger.acquire(A, "queues", 1, most=9)
    ledger.refuse(B, "request_rate", 5)
    first, second = ledger.usage()
    assert (first.peer, first.held, first.refused) == (B, {}, {"request_rate": 5})
    assert (second.peer, second.held, second.refused) == (A, {"queues": 1}, {})
    ledger.release(A, "queues", 1)
    assert [each.peer for each in ledger.usage()] == [B]


def test_refusals_of_endless_members_take_bounded_memory_and_are_all_counted() -> None:
    ledger = QuotaLedger()
    for number in range(MEMBERS_MAX + 10):
        ledger.refuse(PeerId(f"m{number}"), "queues")
    assert len(ledger.usage()) == MEMBERS_MAX
    assert ledger.refused["queues"] == MEMBERS_MAX + 10


def test_a_rate_is_kept_for_each_member() -> None:
    rates = MemberRates(2.0, burst=3)
    assert [rates.wait_s(A, 1, 0.0) for _ in range(3)] == [0.0, 0.0, 0.0]
    assert 0.5 <= rates.wait_s(A, 1, 0.0) <= 0.501
    assert rates.wait_s(B, 1, 0.0) == 0.0
    assert rates.wait_s(A, 1, 0.51) == 0.0


def test_a_large_batch_is_taken_and_paid_for_by_the_next() -> None:
    rates = MemberRates(10.0, burst=10)
    assert rates.wait_s(A, 100, 0.0) == 0.0
    assert 9.0 <= rates.wait_s(A, 1, 0.0) <= 9.2
    assert rates.wait_s(A, 1, 9.2) == 0.0


def test_a_rate_of_zero_sets_no_limit() -> None:
    rates = MemberRates(0.0, burst=0)
    assert [rates.wait_s(A, 1_000, 0.0) for _ in range(100)] == [0.0] * 100
