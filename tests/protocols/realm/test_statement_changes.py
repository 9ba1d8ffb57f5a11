"""Changes of what members say about themselves: events for each, and no flood of records from any member."""

from collections.abc import Mapping
from itertools import pairwise

import pytest

from dep2p.identity import Identity
from dep2p.protocols.realm.member_record import LIFE_MS, MemberRecord, seal_record
from dep2p.protocols.realm.member_table import (
    AddrsChanged,
    CloseLink,
    LeaveRequested,
    LinkOpened,
    MemberTable,
    PeerVerified,
    StatementChanged,
)
from dep2p.protocols.realm.messages import Records
from dep2p.protocols.realm.own_record import CHANGE_INTERVAL_S, CHANGES_BURST, GATHER_S
from dep2p.protocols.realm.record_store import OWNER_BURST, OWNER_RECORDS_PER_S
from dep2p.protocols.realm.statement import MemberStatement, ServiceOffer
from tests.protocols.realm.test_member_table import (
    IDENTITIES,
    KEYS,
    NOW_MS,
    OWN,
    OWN_ADDR,
    A,
    B,
    changes,
    envelope,
    give,
    messages,
    table,
)


def saying(seq: int, fields: Mapping[str, str] = {}, *services: ServiceOffer) -> bytes:
    record = MemberRecord(
        A.peer_id, (), seq, NOW_MS, NOW_MS + LIFE_MS, statement=MemberStatement(dict(fields), services)
    )
    return seal_record(record, KEYS, A.sign).envelope


def issued(own: MemberTable, begin: float, end: float) -> list[float]:
    """The times in this span at which the table issues records of its own."""
    times: list[float] = []
    while (due := own.next_deadline()) is not None and due <= end:
        effects = own.on_deadline(max(due, begin))
        times += [due for _, message in messages(effects) if isinstance(message, Records)]
    return times


def test_a_change_of_a_statement_is_an_event_and_the_same_record_or_new_addresses_are_none() -> None:
    own = table()
    assert changes(give(own, saying(1, {"load": "1"}))) == [("joined", A.peer_id)]
    assert changes(give(own, saying(1, {"load": "1"}))) == []
    assert changes(give(own, saying(2, {"load": "2"}))) == [("changed", A.peer_id)]
    assert changes(give(own, saying(3, {"load": "2"}))) == []
    assert changes(give(own, saying(4, {"load": "2"}, ServiceOffer("sum", "g")))) == [("changed", A.peer_id)]
    assert own.index.offers("sum") == {A.peer_id: ServiceOffer("sum", "g")}
    member = own.member(A.peer_id)
    assert member is not None and member.fields == {"load": "2"}
    assert changes(give(own, envelope(A, 5))) == [("changed", A.peer_id)]
    assert not own.index.offers("sum")


def test_what_a_member_says_is_an_event_when_its_proof_came_before_its_record() -> None:
    own = table()
    own.handle(PeerVerified(1, A.peer_id), 0.0)
    assert changes(give(own, saying(1, {"load": "1"}))) == [("changed", A.peer_id)]


def test_a_member_that_leaves_offers_nothing_any_more() -> None:
    own = table()
    give(own, saying(1, {}, ServiceOffer("sum", "g")))
    give(own, envelope(A, 2, state="left", addrs=()))
    assert not own.index.services()


def test_a_statement_that_breaks_a_bound_changes_nothing() -> None:
    own = table()
    own.handle(StatementChanged(MemberStatement({"load": "1"})), 1.0)
    with pytest.raises(ValueError, match="control characters"):
        own.handle(StatementChanged(MemberStatement({"load": "\n"})), 1.0)
    assert own.own_statement == MemberStatement({"load": "1"})


def test_changes_at_a_start_go_together_and_soon() -> None:
    own = table()
    for number in range(10):
        own.handle(StatementChanged(MemberStatement(services=(ServiceOffer(f"{number}", "g"),))), 1.0 + number / 1000)
    own.handle(LinkOpened(1, B.peer_id), 1.0)
    assert issued(own, 1.0, 2.0) == [pytest.approx(1.0 + GATHER_S)]
    record = own.own_record
    assert record is not None and record.statement.services == (ServiceOffer("9", "g"),)


@pytest.mark.parametrize(("members", "interval_s"), [(2, CHANGE_INTERVAL_S), (1_000, 50.0)])
def test_a_member_that_changes_its_fields_a_thousand_times_a_second_does_not_flood_its_realm(
    members: int, interval_s: float
) -> None:
    own = table(members_max=2_000, unproved_max=2_000)
    for number in range(members):
        give(own, envelope(Identity(number.to_bytes(32, "big")), 1))
    own.handle(LinkOpened(1, B.peer_id), 100.0)
    times: list[float] = []
    for step in range(20_000):
        now = 100.0 + step / 1000
        own.handle(StatementChanged(MemberStatement({"load": str(step)})), now)
        times += issued(own, now, now)
    assert len(times) <= CHANGES_BURST + 20 / interval_s + 1
    gaps = [second - first for first, second in pairwise(times[CHANGES_BURST + 1 :])]
    assert all(gap >= interval_s - 0.01 for gap in gaps)
    last = issued(own, 120.0, 120.0 + interval_s)
    record = own.own_record
    assert last and record is not None and record.statement.fields == {"load": "19999"}


def test_members_take_all_changes_of_an_honest_member() -> None:
    """The pace of senders is within that of receivers, so an honest member is never behind for long."""
    own, other = table(A), table(burst=OWNER_BURST)
    own.handle(LinkOpened(1, B.peer_id), 0.0)
    for step in range(20_000):
        now = step / 1000
        own.handle(StatementChanged(MemberStatement({"load": str(step)})), now)
        if step % 7_000 == 0:
            own.handle(AddrsChanged((f"/ip4/192.0.2.{step // 7_000}/tcp/1",)), now)
            give(other, own.own_envelope, now=now)
        if (due := own.next_deadline()) is not None and due <= now:
            own.on_deadline(now)
            give(other, own.own_envelope, now=now)
    assert other.counts["record_owner_rate"] == 0 and other.counts["record_applied"] >= 7


def test_a_hostile_member_that_changes_its_record_in_a_loop_is_neither_passed_on_nor_cut() -> None:
    own = table(burst=OWNER_BURST)
    for link, identity in enumerate(IDENTITIES[1:6], 1):
        own.handle(LinkOpened(link, identity.peer_id), 0.0)
    passed_on = closed = 0
    for step in range(10_000):
        effects = give(own, saying(step + 1, {"load": str(step)}), now=step / 1000)
        passed_on += any(isinstance(message, Records) for _, message in messages(effects))
        closed += any(isinstance(effect, CloseLink) for effect in effects)
    allowed = OWNER_BURST + 10 * OWNER_RECORDS_PER_S
    assert passed_on <= allowed + 1 and closed == 0
    assert own.counts["record_owner_rate"] >= 10_000 - allowed - 1
    # Its last word still arrives, by comparing.
    assert changes(give(own, saying(10_001, {"load": "last"}), now=20.0)) == [("changed", A.peer_id)]


def test_leaving_takes_the_statement_back() -> None:
    own = table()
    own.handle(StatementChanged(MemberStatement({"load": "1"})), 0.0)
    own.handle(AddrsChanged((OWN_ADDR, OWN_ADDR + "1")), 1.0)
    record = own.own_record
    assert record is not None and record.statement.fields == {"load": "1"}
    own.handle(LeaveRequested(), 2.0)
    record = own.own_record
    assert record is not None and not record.statement
    assert not own.index.services() and OWN.peer_id == record.peer
