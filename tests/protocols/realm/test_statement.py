"""What members say about themselves: bounded in every direction, in one spelling, and harmless when it is hostile."""

import dataclasses

import cbor2
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dep2p.errors import ProtocolError
from dep2p.identity import Identity
from dep2p.protocols.realm.keys import derive_keys, keyed_mac, length_prefixed
from dep2p.protocols.realm.member_record import (
    LIFE_MS,
    RECORD_BYTES_MAX,
    MemberRecord,
    open_envelope,
    seal_fitting,
    seal_record,
)
from dep2p.protocols.realm.offer_index import OfferIndex
from dep2p.protocols.realm.statement import (
    FIELDS_MAX,
    GROUPS_MAX,
    SERVICES_MAX,
    MemberStatement,
    ServiceOffer,
    TopicGroup,
)
from dep2p.types import PeerId
from tests.protocols.realm.records import verify_record

KEYS = derive_keys(bytes(range(32)))
OWNER = Identity(bytes([1]) * 32)
NOW = 1_700_000_000_000
PLAIN = MemberRecord(OWNER.peer_id, ("/ip4/192.0.2.1/tcp/4001",), 7, NOW, NOW + LIFE_MS)
FULL = MemberStatement(
    {"app": "mailer", "status": "à table"},
    (ServiceOffer("resize", "workers", "1.2", "sha-1"), ServiceOffer("sum", "workers")),
    (TopicGroup("jobs", "a"), TopicGroup("jobs", "b")),
)


def sealed(statement: MemberStatement, **changes: object) -> bytes:
    record = dataclasses.replace(PLAIN, statement=statement, **changes)  # type: ignore[arg-type]  # pyright: ignore
    return seal_record(record, KEYS, OWNER.sign).envelope


def forged(**fields: object) -> bytes:
    """A record that only its content can betray, with these values in place of keys 8, 9 and 10."""
    body: dict[int, object] = cbor2.loads(cbor2.loads(sealed(MemberStatement()))[0])
    numbers = {"fields": 8, "services": 9, "groups": 10, "state": 6, "addrs": 2}
    body |= {numbers[name]: value for name, value in fields.items()}
    encoded = cbor2.dumps(body, canonical=True)
    signature = OWNER.sign(b"dep2p-member-record-v1" + length_prefixed(KEYS.realm_id.encode("ascii")) + encoded)
    mac = keyed_mac(KEYS.member_key, b"dep2p-member-mac-v1" + length_prefixed(encoded) + signature)
    return cbor2.dumps([encoded, signature, mac], canonical=True)


def test_a_statement_survives_the_record() -> None:
    assert verify_record(sealed(FULL), KEYS, NOW).record.statement == FULL


def test_a_record_that_says_nothing_is_what_it_was_before_members_could_say_anything() -> None:
    assert cbor2.loads(cbor2.loads(sealed(MemberStatement()))[0]).keys() == {1, 2, 3, 4, 5, 6}


_texts = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=8)


@given(
    st.dictionaries(st.text("abz09._-", min_size=1, max_size=8), _texts, max_size=8),
    st.dictionaries(_texts, st.tuples(_texts, _texts | st.just(""), _texts | st.just("")), max_size=8),
    st.sets(st.tuples(_texts, _texts), max_size=8),
)
def test_every_statement_within_the_bounds_survives(
    fields: dict[str, str], services: dict[str, tuple[str, str, str]], groups: set[tuple[str, str]]
) -> None:
    offers = sorted(ServiceOffer(name, *rest) for name, rest in services.items())
    statement = MemberStatement(fields, tuple(offers), tuple(sorted(TopicGroup(*group) for group in groups)))
    assert verify_record(sealed(statement), KEYS, NOW).record.statement == statement


@pytest.mark.parametrize(
    ("statement", "why"),
    [
        ({"fields": {str(n): "" for n in range(FIELDS_MAX + 1)}}, "17 fields"),
        ({"fields": {"k" * 33: "v"}}, "a key has"),
        ({"fields": {"": "v"}}, "a key has"),
        ({"fields": {"a b": "v"}}, "a key has"),
        ({"fields": {"ü": "v"}}, "a key has"),
        ({"fields": {"k": "é" * 129}}, "258 bytes"),
        ({"fields": {str(n): "v" * 256 for n in range(4)}}, "1028 bytes"),
        ({"fields": {"status": "\x1b[2J"}}, "control characters"),
        ({"fields": {"status": "a\nb"}}, "control characters"),
        ({"fields": {"status": "\x9b31m"}}, "control characters"),
        ({"fields": {"status": "\x7f"}}, "control characters"),
        ({"services": [[f"{n:02}", "g", "", ""] for n in range(SERVICES_MAX + 1)]}, "^.*65 "),
        ({"services": [["a\x00", "g", "", ""]]}, "control characters"),
        ({"services": [["a", "", "", ""]]}, "1 to 64"),
        ({"services": [["", "g", "", ""]]}, "1 to 255"),
        ({"services": [["a", "g", "v" * 33, ""]]}, "0 to 32"),
        ({"services": [["a", "g", "", "s" * 129]]}, "0 to 128"),
        ({"services": [["b", "g", "", ""], ["a", "g", "", ""]]}, "rising order"),
        ({"services": [["a", "g", "", ""], ["a", "h", "", ""]]}, "rising order"),
        ({"services": [[f"{n:02}" * 60, "g" * 40, "", ""] for n in range(20)]}, "at most 2048"),
        ({"groups": [[f"{n:02}", "g"] for n in range(GROUPS_MAX + 1)]}, "^.*65 "),
        ({"groups": [["t", "b"], ["t", "a"]]}, "rising order"),
        ({"groups": [["t", "b"], ["t", "b"]]}, "rising order"),
        ({"groups": [["t" * 256, "b"]]}, "256 bytes"),
    ],
)
def test_a_broken_bound_is_refused_by_the_sender_and_by_receivers(statement: dict[str, object], why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        open_envelope(forged(**statement), KEYS)
    fields = msgspec.convert(statement.get("fields", {}), dict[str, str])
    services = msgspec.convert(statement.get("services", []), list[tuple[str, str, str, str]])
    groups = msgspec.convert(statement.get("groups", []), list[tuple[str, str]])
    said = MemberStatement(
        fields, tuple(ServiceOffer(*each) for each in services), tuple(TopicGroup(*each) for each in groups)
    )
    with pytest.raises(ValueError, match=why):
        sealed(said)


@pytest.mark.parametrize(
    "statement",
    [
        {"fields": []},
        {"fields": {}},  # a part without anything is left out
        {"services": []},
        {"groups": []},
        {"fields": {1: "v"}},
        {"fields": {"k": 1}},
        {"fields": {"k": b"v"}},
        {"fields": {"k": {"deep": "er"}}},
        {"services": {"a": "b"}},
        {"services": ["a"]},
        {"services": [["a", "g", ""]]},
        {"services": [["a", "g", "", 1]]},
        {"services": [["a", "g", "", ["x"]]]},
        {"groups": [["t"]]},
        {"groups": [[b"t", "g"]]},
        {"fields": {"k": "v"}, "state": 1, "addrs": []},  # a member that left says nothing
    ],
)
def test_a_malformed_statement_is_refused(statement: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        open_envelope(forged(**statement), KEYS)


def test_eight_kibibytes_of_services_are_refused_before_they_are_read() -> None:
    with pytest.raises(ProtocolError, match="at most 8192"):
        open_envelope(forged(services=[[f"{n:03}" * 60, "g", "", ""] for n in range(64)]), KEYS)


def test_the_longest_statement_leaves_room_for_addresses_and_not_the_other_way_round() -> None:
    longest = MemberStatement(
        {f"{n:032}": "v" * 224 for n in range(4)},
        tuple(ServiceOffer(f"{n:02}" + "n" * 20, "g" * 9) for n in range(64)),
    )
    addrs = tuple(f"/dns4/{n:02}{'a' * 248}" for n in range(16))
    record = seal_fitting(dataclasses.replace(PLAIN, addrs=addrs, statement=longest), KEYS, OWNER.sign)
    assert len(record.envelope) <= RECORD_BYTES_MAX
    assert record.record.statement == longest
    assert record.record.addrs and record.record.addrs == addrs[: len(record.record.addrs)]


def test_the_index_forgets_what_no_record_says_any_more() -> None:
    index = OfferIndex()
    nothing = MemberStatement()
    said = [
        MemberStatement(services=tuple(ServiceOffer(f"{member}-{n}", "g") for n in range(50)), groups=FULL.groups)
        for member in range(200)
    ]
    for number, statement in enumerate(said):
        index.replace(PeerId(str(number)), nothing, statement)
    assert len(index.services()) == 10_000 and len(index.readers(TopicGroup("jobs", "a"))) == 200
    for number, statement in enumerate(said):
        index.replace(PeerId(str(number)), statement, nothing)
    assert not index.services() and not index.readers(TopicGroup("jobs", "a"))
    assert vars(index)["_groups"] == {}
