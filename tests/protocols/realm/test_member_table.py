"""The member table: which record counts, who is told what, and that all tables end up the same."""

from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dep2p.identity import Identity
from dep2p.protocols.addresses.dialable import AddressScope
from dep2p.protocols.realm.anti_entropy import (
    INVALID_PER_LINK_MAX,
    NEXT_CLAIMANT_S,
    PASSED_ON_BURST,
    SUMMARY_DELAY_S,
    SendFrames,
)
from dep2p.protocols.realm.keys import derive_keys
from dep2p.protocols.realm.member_record import LIFE_MS, SKEW_MS, MemberRecord, State, seal_record
from dep2p.protocols.realm.member_table import (
    AddrsChanged,
    ClockObserved,
    CloseLink,
    LeaveRequested,
    LinkClosed,
    LinkOpened,
    MemberChanged,
    MembershipEnded,
    MemberTable,
    MessageReceived,
    PeerUnverified,
    PeerVerified,
    ProbePeer,
    RecordsLoaded,
    ReleasePeer,
    RetainPeer,
    TableEffect,
    TableEvent,
)
from dep2p.protocols.realm.messages import Digest, Records, Summary, Want, decode_members, in_turns
from dep2p.protocols.realm.own_record import OwnRecord
from dep2p.protocols.realm.record_store import (
    UNPROVED_PER_INTRODUCER_MAX,
    Applied,
    OwnRecordSeen,
    RecordStore,
    Refused,
    StoredRecord,
)
from dep2p.protocols.wire.frame import FrameDecoder
from dep2p.types import PeerId

KEYS = derive_keys(bytes(range(32)))
OTHER_KEYS = derive_keys(bytes(32))
WALL_S = 1_700_000_000.0
NOW_MS = int(WALL_S * 1000)
IDENTITIES = [Identity(bytes([n + 1]) * 32) for n in range(12)]
OWN, A, B, C = IDENTITIES[:4]
ADDR = "/ip4/192.0.2.1/tcp/4001"
OWN_ADDR = "/ip4/192.0.2.200/tcp/4001"
STATES: tuple[State, ...] = ("active", "left")


def envelope(
    owner: Identity, seq: int, *, state: State = "active", issued_ms: int = NOW_MS, addrs: tuple[str, ...] = (ADDR,)
) -> bytes:
    record = MemberRecord(owner.peer_id, addrs, seq, issued_ms, issued_ms + LIFE_MS, state)
    return seal_record(record, KEYS, owner.sign).envelope


def table(
    own: Identity = OWN,
    *,
    members_max: int = 100,
    kept_max: int = 64,
    burst: float = 1e9,
    unproved_max: int = UNPROVED_PER_INTRODUCER_MAX,
) -> MemberTable:
    store = RecordStore(
        own.peer_id, KEYS, records_max=members_max, owner_burst=burst, unproved_per_introducer_max=unproved_max
    )
    made = MemberTable(
        OwnRecord(own.peer_id, KEYS, own.sign),
        store,
        members_max=members_max,
        rng=Random(own.private_seed[0]),
        kept_max=kept_max,
    )
    made.handle(ClockObserved(WALL_S), 0.0)
    made.handle(AddrsChanged((OWN_ADDR,)), 0.0)
    return made


def changes(effects: list[TableEffect]) -> list[tuple[str, PeerId]]:
    return [(effect.kind, effect.peer) for effect in effects if isinstance(effect, MemberChanged)]


def messages(effects: list[TableEffect]) -> list[tuple[int, object]]:
    return [
        (effect.link, decode_members(frame))
        for effect in effects
        if isinstance(effect, SendFrames)
        for encoded in effect.frames
        for frame in FrameDecoder(300_000).feed(encoded)
    ]


def give(target: MemberTable, *envelopes: bytes, link: int = 1, now: float = 0.0) -> list[TableEffect]:
    return target.handle(MessageReceived(link, Records(envelopes)), now)


def test_a_record_makes_a_member_that_is_down_until_it_proves_itself() -> None:
    own = table()
    assert changes(give(own, envelope(A, 5))) == [("joined", A.peer_id)]
    member = own.member(A.peer_id)
    assert member is not None and (member.state, member.seq, member.addrs) == ("down", 5, (ADDR,))
    assert (member.issued_s, member.expires_s, member.last_seen_s) == (WALL_S, WALL_S + LIFE_MS / 1000, None)
    assert changes(own.handle(PeerVerified(1, A.peer_id), 3.0)) == [("up", A.peer_id)]
    member = own.member(A.peer_id)
    assert member is not None and member.state == "up" and member.last_seen_s == WALL_S + 3.0


def test_a_proof_makes_a_member_before_its_record_comes() -> None:
    own = table()
    assert changes(own.handle(PeerVerified(1, A.peer_id), 0.0)) == [("joined", A.peer_id), ("up", A.peer_id)]
    assert changes(give(own, envelope(A, 5))) == []


def test_the_higher_seq_counts() -> None:
    own = table()
    give(own, envelope(A, 5))
    give(own, envelope(A, 4, addrs=()))
    give(own, envelope(A, 5, addrs=()))
    assert own.counts["record_stale"] == 1 and own.counts["record_conflict"] == 1
    assert own.members()[0].addrs == (ADDR,)
    give(own, envelope(A, 6, addrs=()))
    assert own.members()[0].addrs == ()


def test_only_the_owner_can_say_that_it_left() -> None:
    own = table()
    own.handle(PeerVerified(1, A.peer_id), 0.0)
    give(own, envelope(A, 5))
    forged = MemberRecord(A.peer_id, (), 6, NOW_MS, NOW_MS + LIFE_MS, "left")
    assert changes(give(own, seal_record(forged, KEYS, B.sign).envelope, link=2)) == []
    assert own.counts["record_invalid"] == 1 and own.members()[0].state == "up"
    effects = give(own, envelope(A, 6, state="left"), link=2)
    assert MembershipEnded(A.peer_id, "left") in effects and changes(effects) == [("left", A.peer_id)]
    assert own.members()[0].state == "left"
    assert own.handle(PeerUnverified(1, A.peer_id), 1.0) == []


def test_having_left_is_final_until_a_later_record() -> None:
    own = table()
    give(own, envelope(A, 5), envelope(A, 6, state="left"))
    assert changes(give(own, envelope(A, 5))) == [] and own.members()[0].state == "left"
    assert changes(give(own, envelope(A, 7))) == [("joined", A.peer_id)]


def test_a_member_that_left_and_proves_itself_again_is_back_before_its_record() -> None:
    own = table()
    give(own, envelope(A, 5), envelope(A, 6, state="left"))
    assert changes(own.handle(PeerVerified(2, A.peer_id), 9.0)) == [("joined", A.peer_id), ("up", A.peer_id)]
    assert changes(give(own, envelope(A, 6, state="left"))) == []
    assert own.members()[0].state == "up"


def test_a_foreign_record_is_dropped_and_counted() -> None:
    own = table()
    foreign = MemberRecord(A.peer_id, (), 6, NOW_MS, NOW_MS + LIFE_MS)
    assert give(own, seal_record(foreign, OTHER_KEYS, A.sign).envelope) == []
    assert own.counts["record_invalid"] == 1 and own.members() == []


def test_a_link_that_brings_many_bad_records_is_closed() -> None:
    own = table()
    own.handle(LinkOpened(1, B.peer_id), 0.0)
    for _ in range(INVALID_PER_LINK_MAX - 1):
        assert give(own, b"bad") == []
    (closed,) = give(own, b"bad")
    assert isinstance(closed, CloseLink) and closed.link == 1


def test_expired_records_are_not_taken_and_old_ones_end() -> None:
    own = table()
    give(own, envelope(A, 1, issued_ms=NOW_MS - LIFE_MS - SKEW_MS), envelope(B, 1, issued_ms=NOW_MS + SKEW_MS + 1))
    assert own.counts["record_times"] == 2 and own.members() == []
    own.handle(PeerVerified(1, A.peer_id), 0.0)
    give(own, envelope(A, 1))
    due = (LIFE_MS + SKEW_MS) / 1000
    assert changes(own.on_deadline(due - 0.1)) == []
    effects = own.on_deadline(due)
    assert MembershipEnded(A.peer_id, "expired") in effects and changes(effects) == [("expired", A.peer_id)]
    assert own.members() == [] and own.next_deadline() is not None


def test_the_wall_clock_may_jump() -> None:
    own = table()
    give(own, envelope(A, 1))
    own.handle(ClockObserved(WALL_S + (LIFE_MS + SKEW_MS) / 1000), 1.0)  # a laptop woke up
    due = own.next_deadline()
    assert due is not None and due <= 1.0
    assert changes(own.on_deadline(1.0)) == [("expired", A.peer_id)]


def test_a_record_that_was_issued_by_a_wrong_clock_is_issued_anew_when_the_clock_is_set_right() -> None:
    year_s = 365 * 86_400.0
    own, other = table(), table(A)
    own.handle(ClockObserved(WALL_S + year_s), 20.0)  # a clock that is a year ahead for a minute
    own.on_deadline(20.0)
    give(other, own.own_envelope, now=20.0)
    assert other.counts["record_times"] == 1
    own.handle(ClockObserved(WALL_S + 80.0), 80.0)
    due = own.next_deadline()
    assert due is not None and due <= 80.0
    own.on_deadline(80.0)
    give(other, own.own_envelope, now=80.0)
    assert [member.peer for member in other.members()] == [OWN.peer_id]
    due = own.next_deadline()
    assert due is not None and due > 1_000.0  # and not again and again


def test_a_tombstone_goes_without_a_word() -> None:
    own = table()
    give(own, envelope(A, 1, state="left"))
    assert own.members()[0].state == "left"
    assert changes(own.on_deadline((LIFE_MS + SKEW_MS) / 1000)) == [] and own.members() == []


@pytest.mark.parametrize("lost_at_s", [121.0, 100.0, 300.0], ids=["in its grace", "down", "up"])
def test_a_tombstone_that_goes_while_its_member_is_back_without_a_record_ends_nothing_twice(lost_at_s: float) -> None:
    """A record may be short-lived, so a member can arrange any of these: it ended every node's membership once."""
    own = table()
    tombstone = MemberRecord(A.peer_id, (), 5, NOW_MS, NOW_MS + 10_000, "left")  # gone at 130 s, skew included
    give(own, seal_record(tombstone, KEYS, A.sign).envelope)
    effects = own.handle(PeerVerified(1, A.peer_id), 50.0)
    told = changes(effects)
    for now in (60.0, 100.0, 121.0, 128.0, 131.0, 136.5, 300.0, 330.0):
        if now == lost_at_s:
            own.handle(PeerUnverified(1, A.peer_id), now)
        told += changes(own.on_deadline(now))
    assert [kind for kind, _ in told] == ["joined", "up", "down", "expired"]
    assert own.members() == []
    assert not own._presence._members  # pyright: ignore[reportPrivateUsage]


def test_a_member_without_a_record_ends_when_it_stays_away() -> None:
    own = table()
    own.handle(PeerVerified(1, A.peer_id), 0.0)
    own.handle(PeerUnverified(1, A.peer_id), 1.0)
    assert own.next_deadline() == 16.0
    assert changes(own.on_deadline(16.0)) == [("down", A.peer_id), ("expired", A.peer_id)]
    assert own.members() == []


def test_a_second_connection_keeps_a_member_up() -> None:
    own = table()
    own.handle(PeerVerified(1, A.peer_id), 0.0)
    own.handle(PeerVerified(2, A.peer_id), 0.0)
    own.handle(PeerUnverified(1, A.peer_id), 1.0)
    assert changes(own.on_deadline(100.0)) == [] and own.members()[0].state == "up"


def test_the_own_record_is_refreshed_at_half_its_life_with_a_higher_seq() -> None:
    own = table()
    own.handle(LinkOpened(1, A.peer_id), 0.0)
    first = own.own_record
    assert first is not None and first.addrs == (OWN_ADDR,) and first.seq == NOW_MS
    effects = own.on_deadline(LIFE_MS / 2000)
    second = own.own_record
    assert second is not None and second.seq > first.seq and second.expires_ms > first.expires_ms
    assert (1, Records((own.own_envelope,))) in messages(effects)


def test_addresses_that_change_are_reported_at_once() -> None:
    own = table()
    own.handle(LinkOpened(1, A.peer_id), 0.0)
    effects = own.handle(AddrsChanged(("/ip4/192.0.2.9/tcp/1",)), 1.0)
    assert messages(effects) == [(1, Records((own.own_envelope,)))]


def test_a_record_of_an_earlier_run_that_is_ahead_is_overtaken_but_not_in_a_storm() -> None:
    own = table()
    ahead = envelope(OWN, NOW_MS + 999_999, state="left")
    give(own, ahead)
    assert own.next_deadline() == 10.0
    give(own, ahead)
    own.on_deadline(10.0)
    record = own.own_record
    assert record is not None and record.seq == NOW_MS + 1_000_000 and record.state == "active"
    give(own, ahead, now=11.0)
    assert own.own_record == record and own.members() == []


def test_leaving_reports_everybody_and_stays_so() -> None:
    own = table()
    own.handle(LinkOpened(1, A.peer_id), 0.0)
    own.handle(LinkOpened(2, B.peer_id), 0.0)
    effects = own.handle(LeaveRequested(), 1.0)
    assert messages(effects) == [(1, Records((own.own_envelope,))), (2, Records((own.own_envelope,)))]
    record = own.own_record
    assert record is not None and record.state == "left" and record.addrs == ()
    give(own, envelope(OWN, record.seq + 5), now=2.0)
    own.on_deadline(LIFE_MS / 1000)
    assert own.own_record == record


def test_news_goes_to_others_but_not_back_and_only_once() -> None:
    own = table()
    for link, peer in ((1, A), (2, B), (3, C)):
        own.handle(LinkOpened(link, peer.peer_id), 0.0)
    news = envelope(IDENTITIES[5], 1)
    assert sorted(link for link, _ in messages(give(own, news, link=1))) == [2, 3]
    assert messages(give(own, news, link=2)) == []
    assert [link for link, _ in messages(give(own, envelope(C, 1), link=1))] == [2]  # C knows its own


def test_gossip_fans_out_to_a_bounded_number() -> None:
    own = table()
    for link, peer in enumerate(IDENTITIES[1:]):
        own.handle(LinkOpened(link, peer.peer_id), 0.0)
    assert len(messages(give(own, envelope(Identity(bytes([99]) * 32), 1), link=0))) == 8


def test_one_member_cannot_flood_the_realm_with_its_record() -> None:
    own = table(burst=8.0)
    give(own, *[envelope(A, n) for n in range(1, 20)])
    assert own.members()[0].seq == 8 and own.counts["record_owner_rate"] == 11
    give(own, envelope(A, 20), now=2.0)
    assert own.members()[0].seq == 20
    give(own, envelope(A, 21, state="left"), now=2.0)  # leaving always passes
    assert own.members()[0].state == "left"
    give(own, envelope(A, 22), now=2.0)
    assert own.members()[0].state == "left"


def test_a_full_table_refuses_new_members_and_counts() -> None:
    own = table(members_max=3)
    for number, identity in enumerate(IDENTITIES[1:4]):
        own.handle(PeerVerified(number, identity.peer_id), 0.0)
    give(own, *[envelope(identity, 1) for identity in IDENTITIES[1:6]])
    assert len(own.members()) == 3 and own.counts["record_full"] == 2
    assert own.handle(PeerVerified(1, IDENTITIES[9].peer_id), 0.0) == []
    assert own.counts["member_full"] == 1 and len(own.members()) == 3
    give(own, envelope(IDENTITIES[1], 2))
    assert own.members()[0].seq == 2


def test_members_with_addresses_are_kept_connected_up_to_a_bound() -> None:
    own = table(kept_max=2)
    effects = give(own, *[envelope(identity, 1) for identity in IDENTITIES[1:8]], envelope(IDENTITIES[9], 1, addrs=()))
    assert not any(isinstance(effect, RetainPeer) for effect in effects), "a record proves nothing"
    for number, identity in enumerate(IDENTITIES[1:10]):
        effects += own.handle(PeerVerified(number, identity.peer_id), 0.0)
    kept: dict[PeerId, None] = {}
    for effect in effects:
        if isinstance(effect, RetainPeer):
            assert effect.addrs == (ADDR,) and effect.ttl_s == LIFE_MS / 1000
            kept[effect.peer] = None
        elif isinstance(effect, ReleasePeer):
            del kept[effect.peer]
    assert len(kept) == 2
    one = next(identity for identity in IDENTITIES if identity.peer_id in kept)
    effects = give(own, envelope(one, 2, state="left"))
    assert ReleasePeer(one.peer_id) in effects and len([e for e in effects if isinstance(e, RetainPeer)]) == 1


def test_new_addresses_of_a_kept_member_reach_the_host() -> None:
    own = table()
    own.handle(PeerVerified(1, A.peer_id), 0.0)
    give(own, envelope(A, 1))
    (kept,) = give(own, envelope(A, 2, addrs=("/ip4/192.0.2.7/tcp/7",)))
    assert isinstance(kept, RetainPeer) and kept.addrs == ("/ip4/192.0.2.7/tcp/7",)
    assert give(own, envelope(A, 3, addrs=())) == [ReleasePeer(A.peer_id)]


def test_records_from_disk_are_checked_and_not_gossiped() -> None:
    own = table()
    own.handle(LinkOpened(1, B.peer_id), 0.0)
    kept = StoredRecord(envelope(A, 1), is_proved=True, scope=AddressScope.PRIVATE)
    found = StoredRecord(envelope(C, 1), is_proved=False, scope=AddressScope.PUBLIC)
    effects = own.handle(RecordsLoaded((kept, found, StoredRecord(b"damaged", True, AddressScope.PUBLIC))), 0.0)
    assert changes(effects) == [("joined", A.peer_id), ("joined", C.peer_id)] and messages(effects) == []
    assert own.stored() == [kept, found]
    assert [effect.peer for effect in effects if isinstance(effect, RetainPeer)] == [A.peer_id]
    assert [effect.peer for effect in effects if isinstance(effect, ProbePeer)] == [C.peer_id]


def test_summaries_that_differ_lead_to_lists_but_not_too_often() -> None:
    own = table()
    own.handle(LinkOpened(1, A.peer_id), 0.0)
    same = own.handle(MessageReceived(1, Summary(_summary(own))), 0.0)
    assert same == []
    kinds = [type(message) for _, message in messages(own.handle(MessageReceived(1, Summary(bytes(32))), 0.0))]
    assert kinds == [Summary, Digest]
    assert own.handle(MessageReceived(1, Summary(bytes(32))), 4.9) == []
    assert own.counts["digest_held_back"] == 1
    assert own.handle(MessageReceived(1, Summary(bytes(32))), 5.0) != []


def _summary(own: MemberTable) -> bytes:
    (effect,) = own.handle(LinkOpened(77, B.peer_id), 0.0)
    own.handle(LinkClosed(77), 0.0)
    return next(message.digest for _, message in messages([effect]) if isinstance(message, Summary))


def test_a_record_that_was_asked_for_is_asked_for_elsewhere_only_when_it_does_not_come() -> None:
    own = table()
    own.handle(LinkOpened(1, A.peer_id), 0.0)
    own.handle(LinkOpened(2, B.peer_id), 0.0)
    digest = Digest(((C.peer_id, 9),))
    asked = messages(own.handle(MessageReceived(1, digest), 0.0))
    assert asked == [(1, Want((C.peer_id,)))]
    assert own.handle(MessageReceived(2, digest), 0.5) == [] and own.handle(MessageReceived(2, digest), 0.6) == []
    assert own.next_deadline() == NEXT_CLAIMANT_S
    assert messages(own.on_deadline(NEXT_CLAIMANT_S)) == [(2, Want((C.peer_id,)))]
    assert own.handle(MessageReceived(1, digest), 9.9) == [], "neither is asked twice within ten seconds"
    assert messages(own.handle(MessageReceived(1, digest), 13.0)) == [(1, Want((C.peer_id,)))]
    own.handle(MessageReceived(2, digest), 13.1)
    give(own, envelope(C, 9), link=1, now=13.2)
    assert not [message for _, message in messages(own.on_deadline(15.0)) if isinstance(message, Want)]


@pytest.mark.parametrize("liars", [1, 3, 8])
def test_claims_of_records_that_never_come_keep_none_from_the_others(liars: int) -> None:
    """Members that name the highest numbers kept a newcomer from asking honest ones: 0 of 17 members in an hour."""
    own, honest = table(), table(A)
    others = IDENTITIES[2:]
    give(honest, *[envelope(one, 5) for one in others])
    claims = Digest(tuple((one.peer_id, 2**53 - 1) for one in others))
    truth = Digest(tuple((one.peer_id, 5) for one in others))
    for link in range(2, 2 + liars):
        own.handle(LinkOpened(link, others[link % 8].peer_id), 0.0)
        own.handle(MessageReceived(link, claims), 0.0)
    own.handle(LinkOpened(1, A.peer_id), 0.0)
    honest.handle(LinkOpened(1, OWN.peer_id), 0.0)

    def carry(effects: list[TableEffect], now: float) -> None:
        for link, message in messages(effects):
            if link == 1 and isinstance(message, Want):
                for _, answer in messages(honest.handle(MessageReceived(1, message), now)):
                    assert isinstance(answer, Records)
                    own.handle(MessageReceived(1, answer), now)

    carry(own.handle(MessageReceived(1, truth), 0.1), 0.1)
    for tenth in range(2, 120):
        now = tenth / 10
        for link in range(2, 2 + liars):
            own.handle(MessageReceived(link, claims), now)
        due = own.next_deadline()
        if due is not None and due <= now:
            carry(own.on_deadline(now), now)
    assert [own.member(one.peer_id) is not None for one in others] == [True] * len(others)
    assert len(own._sync._claims) <= len(others)  # pyright: ignore[reportPrivateUsage]


def invented(count: int, start: int = 1_000) -> list[Identity]:
    return [Identity((start + n).to_bytes(32, "big")) for n in range(count)]


def test_a_member_brings_a_bounded_number_of_members_that_were_never_met() -> None:
    own = table(members_max=10_000, unproved_max=60)
    own.handle(LinkOpened(1, A.peer_id), 0.0)
    made_up = invented(60 + 40)
    give(own, *[envelope(one, 1, addrs=()) for one in made_up])
    assert len(own.members()) == 60 and own.counts["record_introducer_full"] == 40
    assert own.full_introducers() == [A.peer_id]
    assert own.handle(MessageReceived(1, Digest(((made_up[-1].peer_id, 1),))), 1.0) == [], "nor is it asked for more"
    # Another member is not held to account for it, and a member that proves itself is taken from each.
    own.handle(LinkOpened(2, B.peer_id), 0.0)
    assert changes(give(own, envelope(C, 1, addrs=()), link=2)) == [("joined", C.peer_id)]
    own.handle(PeerVerified(3, made_up[-1].peer_id), 2.0)
    give(own, envelope(made_up[-1], 1, addrs=()))
    member = own.member(made_up[-1].peer_id)
    assert member is not None and member.seq == 1
    own.handle(PeerVerified(4, made_up[0].peer_id), 2.0)
    assert own.full_introducers() == [], "a proved one does not count"


def test_a_full_table_makes_room_for_members_that_prove_themselves() -> None:
    own = table(members_max=20)
    own.handle(LinkOpened(1, A.peer_id), 0.0)
    made_up = invented(30)
    give(own, *[envelope(one, 1) for one in made_up])
    assert len(own.members()) == 20
    for number, one in enumerate(IDENTITIES[2:8]):
        told = changes(own.handle(PeerVerified(number, one.peer_id), 1.0))
        assert ("up", one.peer_id) in told and len([kind for kind, _ in told if kind == "expired"]) == 1
        give(own, envelope(one, 1), link=1, now=1.0)
    assert len(own.members()) == 20 and not own.counts["member_full"]
    assert [own.member(one.peer_id) is not None for one in IDENTITIES[2:8]] == [True] * 6


def test_lists_begin_with_the_members_that_were_met() -> None:
    own = table()
    own.handle(LinkOpened(1, A.peer_id), 0.0)
    give(own, *[envelope(one, 1) for one in invented(20)], envelope(B, 1))
    own.handle(PeerVerified(2, B.peer_id), 0.0)
    (digest,) = [
        message
        for _, message in messages(own.handle(MessageReceived(1, Summary(bytes(32))), 1.0))
        if isinstance(message, Digest)
    ]
    assert {peer for peer, _ in digest.entries[:2]} == {OWN.peer_id, B.peer_id}


def test_addresses_that_cannot_be_right_are_not_dialed() -> None:
    own = table()
    own.handle(LinkOpened(1, A.peer_id, AddressScope.PUBLIC), 0.0)
    own.handle(LinkOpened(2, B.peer_id, AddressScope.LOOPBACK), 0.0)
    addrs = (
        "/ip4/127.0.0.1/tcp/22",
        "/ip4/192.168.1.1/tcp/80",
        OWN_ADDR,
        "/ip4/198.51.100.7/tcp/0",
        "/ip4/9.9.9.9/tcp/1",
    )
    (probe,) = [one for one in give(own, envelope(C, 1, addrs=addrs), link=1) if isinstance(one, ProbePeer)]
    assert probe.addrs == ("/ip4/9.9.9.9/tcp/1",), "OWN_ADDR is this node's own"
    give(own, envelope(C, 1, addrs=addrs), link=2)  # the same from a neighbour on this machine
    assert own.dialable_addrs(C.peer_id) == (*addrs[:2], addrs[-1])


def test_a_want_is_answered_with_what_there_is() -> None:
    own = table()
    own.handle(LinkOpened(1, A.peer_id), 0.0)
    give(own, envelope(C, 1))
    want = Want((C.peer_id, B.peer_id, C.peer_id))
    assert messages(own.handle(MessageReceived(1, want), 0.0)) == [(1, Records((envelope(C, 1),)))]
    assert own.handle(MessageReceived(1, Want((B.peer_id,))), 0.0) == []


def test_endless_lists_of_invented_members_leave_bounded_state() -> None:
    own = table(unproved_max=10_000)
    own.handle(LinkOpened(1, A.peer_id), 0.0)
    named = [Identity(n.to_bytes(32, "big")).peer_id for n in range(5_000)]
    for at in range(0, 5_000, 500):
        own.handle(MessageReceived(1, Digest(tuple((peer, 1) for peer in named[at : at + 500]))), 0.0)
    assert own.counts["want_full"] == 2
    assert messages(own.handle(MessageReceived(1, Digest(((named[-1], 1),))), 11.0)) == [(1, Want((named[-1],)))]
    own.on_deadline(20.0)
    assert not own._sync._claims and not own._sync._claims_due  # pyright: ignore[reportPrivateUsage]


def test_a_store_keeps_its_heap_bounded_when_records_change_forever() -> None:
    store = RecordStore(OWN.peer_id, KEYS, records_max=10, owner_burst=1e9)
    for seq in range(1, 500):
        assert isinstance(store.offer(envelope(A, seq), NOW_MS, 0.0), Applied)
    assert len(store._expiries) <= 2 * len(store) + 65  # pyright: ignore[reportPrivateUsage]
    assert store.next_expiry_ms() == NOW_MS + LIFE_MS + SKEW_MS
    assert isinstance(store.offer(envelope(OWN, 1), NOW_MS, 0.0), OwnRecordSeen)
    assert store.offer(b"", NOW_MS, 0.0) == Refused("invalid")


# Convergence


@dataclass
class Net:
    """Tables that talk over lossy, reordering links."""

    rng: Random
    tables: list[MemberTable]
    now: float = 0.0
    wire: list[tuple[int, int, object]] = field(default_factory=list[tuple[int, int, object]])

    def link(self, a: int, b: int) -> int:
        return a * 100 + b

    def connect(self, a: int, b: int) -> None:
        for x, y in ((a, b), (b, a)):
            self.act(x, PeerVerified(self.link(x, y), IDENTITIES[y].peer_id))
            self.act(x, LinkOpened(self.link(x, y), IDENTITIES[y].peer_id))

    def act(self, node: int, event: TableEvent) -> None:
        self.send(node, self.tables[node].handle(event, self.now))

    def send(self, node: int, effects: list[TableEffect]) -> None:
        for link, message in messages(effects):
            self.wire.append((link % 100, node, message))

    def pump(self, loss: float, duplication: float) -> None:
        while self.wire:
            to, sender, message = self.wire.pop(int(self.rng.random() * len(self.wire)))
            if self.rng.random() < loss:
                continue
            if self.rng.random() < duplication:
                self.wire.append((to, sender, message))
            assert isinstance(message, Records | Digest | Want | Summary)
            self.act(to, MessageReceived(self.link(to, sender), message))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for node, one in enumerate(self.tables):
            one.handle(ClockObserved(WALL_S + self.now), self.now)
            self.send(node, one.on_deadline(self.now))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 6), st.floats(0, 0.7), st.floats(0, 0.3))
def test_tables_converge_over_links_that_lose_repeat_and_reorder(
    seed: int, nodes: int, loss: float, duplication: float
) -> None:
    rng = Random(seed)
    net = Net(rng, [table(IDENTITIES[n]) for n in range(nodes)])
    for node in range(1, nodes):  # a random tree: every record has to pass through others
        net.connect(node, int(rng.random() * node))
    left = int(rng.random() * nodes)
    for step in range(6):
        net.pump(loss, duplication)
        node = int(rng.random() * nodes)
        if step == 3:
            net.act(left, LeaveRequested())
        elif node != left or step < 3:
            net.act(node, AddrsChanged((f"/ip4/192.0.2.{step}/tcp/{node}",)))
        net.pass_time(1.0)
    for _ in range(3 * nodes):
        net.pump(0.0, 0.0)
        net.pass_time(80.0)
    net.pump(0.0, 0.0)
    records = {one.own_record.peer: one.own_record for one in net.tables if one.own_record is not None}
    for one in net.tables:
        for peer, record in records.items():
            if one.own_record is not None and peer != one.own_record.peer:
                member = one.member(peer)
                assert member is not None and (member.seq, member.addrs) == (record.seq, record.addrs)
                assert (member.state == "left") == (record.state == "left")


Step = tuple[int, int, bool]
STEPS = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 8), st.booleans()), max_size=30)


@settings(max_examples=60, deadline=None)
@given(
    STEPS,
    st.randoms(use_true_random=False),
)
def test_the_table_equals_a_naive_model_in_any_order(steps: list[Step], rng: Random) -> None:
    """The model: of each owner, the record with the highest seq. An owner uses each seq once."""
    made: dict[tuple[int, int], bool] = {}
    for owner, seq, leaves in steps:
        made.setdefault((owner, seq), leaves)
    offered = [key for key in made for _ in range(2)]
    rng.shuffle(offered)
    own = table()
    events: dict[PeerId, list[str]] = {}
    for owner, seq in offered:
        state: State = "left" if made[(owner, seq)] else "active"
        for kind, peer in changes(give(own, envelope(IDENTITIES[owner], seq, state=state))):
            events.setdefault(peer, []).append(kind)
    for owner in range(1, 4):
        peer = IDENTITIES[owner].peer_id
        seqs = [seq for known, seq in made if known == owner]
        member = own.member(peer)
        if not seqs:
            assert member is None
            continue
        assert member is not None and member.seq == max(seqs)
        assert member.state == ("left" if made[(owner, max(seqs))] else "down")
        told = events.get(peer, [])
        assert told == ["joined", "left"] * (len(told) // 2) + ["joined"] * (len(told) % 2)
        assert (len(told) % 2 == 1) == (member.state == "down")


@pytest.mark.parametrize("step", [1, -1])
def test_sums_do_not_depend_on_the_order(step: int) -> None:
    items = [envelope(identity, seq) for identity in IDENTITIES[1:5] for seq in (1, 2)]
    store = RecordStore(OWN.peer_id, KEYS, records_max=10)
    for item in items[::step]:
        store.offer(item, NOW_MS, 0.0)
    expected = RecordStore(OWN.peer_id, KEYS, records_max=10)
    for item in items[1::2]:
        expected.offer(item, NOW_MS, 0.0)
    assert store.summary() == expected.summary() != RecordStore(OWN.peer_id, KEYS, records_max=10).summary()
    store.expire(NOW_MS + LIFE_MS + SKEW_MS)
    assert store.summary() == bytes(32) and len(store) == 0


@pytest.mark.parametrize("seed", range(30))
def test_no_order_of_short_lived_records_proofs_losses_and_clock_jumps_fails_or_leaves_anything(seed: int) -> None:
    rng, now, wall_s, seq = Random(seed), 0.0, 0.0, 1
    own = table(members_max=rng.choice([2, 100]), kept_max=2, burst=rng.choice([2.0, 1e9]))
    connections: dict[int, PeerId] = {}

    def act(effects: list[TableEffect]) -> None:
        for effect in effects:
            if isinstance(effect, MembershipEnded):  # as the shell does
                for connection in [one for one, peer in connections.items() if peer == effect.peer]:
                    act(own.handle(PeerUnverified(connection, connections.pop(connection)), now))

    for step in range(150):
        owner = rng.choice(IDENTITIES[1:5])
        match rng.randrange(6):
            case 0:
                connections[step] = owner.peer_id
                act(own.handle(PeerVerified(step, owner.peer_id), now))
            case 1 if connections:
                connection = rng.choice(list(connections))
                act(own.handle(PeerUnverified(connection, connections.pop(connection)), now))
            case 2 | 3:
                seq += rng.choice([0, 1, 2])
                issued_ms = NOW_MS + int((now + wall_s) * 1000) + rng.randrange(-130_000, 119_000)
                life_ms, state = rng.choice([1, 1_000, 30_000, LIFE_MS]), rng.choice(STATES)
                addrs = rng.choice([(), (ADDR,)])
                record = MemberRecord(owner.peer_id, addrs, seq, issued_ms, issued_ms + life_ms, state)
                act(give(own, seal_record(record, KEYS, owner.sign).envelope, now=now))
            case 4:
                wall_s += rng.choice([-1e5, 1e5, 30.0, -30.0])
                act(own.handle(ClockObserved(WALL_S + now + wall_s), now))
            case _:
                now += rng.choice([0, 1, 5, 16, 120, 400])
                act(own.on_deadline(now))
    for connection in list(connections):
        act(own.handle(PeerUnverified(connection, connections.pop(connection)), now))
    for _ in range(100):
        now += 20_000
        own.handle(ClockObserved(WALL_S + now), now)
        act(own.on_deadline(now))
    assert own.members() == []
    store, keep = own._store, own._keep  # pyright: ignore[reportPrivateUsage]
    assert not own._presence._members and not store._buckets  # pyright: ignore[reportPrivateUsage]
    assert not store._proved and not store._introducers  # pyright: ignore[reportPrivateUsage]
    assert not store._introduced and not store._scopes  # pyright: ignore[reportPrivateUsage]
    assert not keep._candidates and not keep._kept and not keep._probes  # pyright: ignore[reportPrivateUsage]


def test_what_a_member_says_of_others_is_passed_on_at_a_rate_and_compared_above_it() -> None:
    own = table(members_max=1_000)
    for link, member in ((1, A), (2, B)):
        own.handle(LinkOpened(link, member.peer_id), 0.0)
    made = [envelope(one, 1) for one in invented(PASSED_ON_BURST + 40)]
    sent = [
        (link, len(message.envelopes))
        for at in range(0, len(made), 56)
        for link, message in messages(give(own, *made[at : at + 56]))
        if isinstance(message, Records)
    ]
    assert {link for link, _ in sent} == {2}, "to the other neighbour only"
    assert sum(count for _, count in sent) == PASSED_ON_BURST
    assert own.counts["record_applied"] == len(made) and own.counts["record_not_passed_on_rate"] == 40
    due = own.next_deadline()
    assert due is not None and due <= SUMMARY_DELAY_S
    compared = [message for _, message in messages(own.on_deadline(due))]
    assert any(isinstance(message, Summary) for message in compared), "neighbours learn the rest when they compare"
    later = give(own, *[envelope(one, 2) for one in invented(1)], now=10.0)
    assert [link for link, message in messages(later) if isinstance(message, Records)] == [2]


def test_a_member_s_own_records_are_passed_on_whatever_it_says_of_others() -> None:
    own = table(members_max=1_000)
    for link, member in ((1, A), (2, B)):
        own.handle(LinkOpened(link, member.peer_id), 0.0)
    give(own, *[envelope(one, 1) for one in invented(PASSED_ON_BURST + 1)])
    assert [link for link, message in messages(give(own, envelope(A, 1))) if isinstance(message, Records)] == [2]


def test_a_message_in_parts_is_passed_on_as_one() -> None:
    own = table(members_max=1_000)
    for link, member in ((1, A), (2, B)):
        own.handle(LinkOpened(link, member.peer_id), 0.0)
    whole = Records(tuple(envelope(one, 1) for one in invented(20)))
    parts = in_turns(whole)
    assert [one for part in parts if isinstance(part, Records) for one in part.envelopes] == list(whole.envelopes)
    sent: list[list[tuple[int, object]]] = []
    for number, part in enumerate(parts, 1):
        sent.append(messages(own.handle(MessageReceived(1, part, number < len(parts)), 0.0)))
    assert sent == [[], [], [(2, whole)]]


def test_a_record_that_is_known_is_not_verified_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of a node's neighbours passes a record on."""
    own = table()
    sealed = envelope(A, 1)
    give(own, sealed)
    newer = envelope(A, 2)

    def fail(*_: object) -> None:
        raise AssertionError("verified again")

    with monkeypatch.context() as patch:
        patch.setattr("dep2p.protocols.realm.record_store.open_envelope", fail)
        assert give(own, sealed, sealed) == []
        assert own.counts["record_stale"] == 2
    give(own, newer)
    with monkeypatch.context() as patch:
        patch.setattr("dep2p.protocols.realm.record_store.open_envelope", fail)
        assert give(own, newer) == []
        with pytest.raises(AssertionError):
            give(own, sealed)  # forgotten with the record that it was
