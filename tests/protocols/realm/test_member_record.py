"""Member records: only their owner makes them, only for one realm, only for a time."""

import dataclasses

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dep2p.errors import ProtocolError
from dep2p.identity import Identity
from dep2p.protocols.realm.keys import derive_keys, keyed_mac, length_prefixed
from dep2p.protocols.realm.member_record import (
    LIFE_MS,
    LIFE_MS_MAX,
    RECORD_BYTES_MAX,
    SEQ_MAX,
    SKEW_MS,
    MemberRecord,
    fitting_addrs,
    seal_record,
)
from dep2p.protocols.realm.messages import (
    ENTRIES_PER_MESSAGE_MAX,
    MEMBERS_PAYLOAD_BYTES_MAX,
    Digest,
    Records,
    Summary,
    Want,
    decode_members,
    encode_digest,
    encode_records,
    encode_summary,
    encode_want,
)
from dep2p.protocols.wire.frame import Frame, FrameDecoder, FrameType
from tests.protocols.realm.records import verify_record

KEYS = derive_keys(bytes(range(32)))
OTHER = derive_keys(bytes(32))
OWNER = Identity(bytes([1]) * 32)
NOW = 1_700_000_000_000
ENVELOPE = (
    "835863a70158260024080112208a88e3dd7409f195fd52db2d3cba5d72ca6709bf1d94121bf3748801b40f6f5c0281772f69"
    "70342f3139322e302e322e312f7463702f343030310307041b0000018bcfe56800051b0000018bd50bc40006000781647a73"
    "74645840654faae869637baf350508767848e0d288b0d368608c4196969e2ee6f524ba64e22524f04be2a622abc60b636e1e"
    "b037c0f21626fc9444c714e773818cdb7b065820d5b01ed8340a626df64480400f0f011d99ee45426e0aa06ab2f9c5ee6e1e"
    "7e2f"
)
RECORD = MemberRecord(OWNER.peer_id, ("/ip4/192.0.2.1/tcp/4001",), 7, NOW, NOW + LIFE_MS, "active", ("zstd",))


def sealed(**changes: object) -> bytes:
    record = dataclasses.replace(RECORD, **changes)  # type: ignore[arg-type]  # pyright: ignore
    return seal_record(record, KEYS, OWNER.sign).envelope


def forged(body: object, *, raw: bytes | None = None) -> bytes:
    """A record that only its content can betray: signed and MACed as it should be."""
    encoded = cbor2.dumps(body, canonical=True) if raw is None else raw
    signature = OWNER.sign(b"dep2p-member-record-v1" + length_prefixed(KEYS.realm_id.encode()) + encoded)
    mac = keyed_mac(KEYS.member_key, b"dep2p-member-mac-v1" + length_prefixed(encoded) + signature)
    return cbor2.dumps([encoded, signature, mac], canonical=True)


def good_body() -> dict[int, object]:
    return cbor2.loads(cbor2.loads(sealed())[0])  # type: ignore[no-any-return]


def test_the_envelope_equals_the_vector() -> None:
    assert sealed().hex() == ENVELOPE


def test_a_record_survives_the_wire() -> None:
    for record in (
        RECORD,
        dataclasses.replace(RECORD, addrs=(), features=(), state="left", seq=SEQ_MAX),
        dataclasses.replace(RECORD, addrs=tuple(f"/dns/{n}{'x' * 240}" for n in range(16))),
    ):
        assert verify_record(seal_record(record, KEYS, OWNER.sign).envelope, KEYS, NOW).record == record


def test_a_forged_body_that_is_right_is_taken() -> None:
    """So that the tests below fail for their own reason."""
    assert verify_record(forged(good_body()), KEYS, NOW).record == RECORD


def test_a_record_of_another_realm_is_refused() -> None:
    with pytest.raises(ProtocolError, match="MAC"):
        verify_record(sealed(), OTHER, NOW)


def test_a_member_of_two_realms_cannot_carry_a_record_from_one_to_the_other() -> None:
    body, signature, _mac = cbor2.loads(sealed())
    mac = keyed_mac(OTHER.member_key, b"dep2p-member-mac-v1" + length_prefixed(body) + signature)
    with pytest.raises(ProtocolError, match="not signed"):
        verify_record(cbor2.dumps([body, signature, mac], canonical=True), OTHER, NOW)


def test_a_member_cannot_speak_for_another_one() -> None:
    mallory = Identity(bytes([2]) * 32)
    envelope = seal_record(dataclasses.replace(RECORD, state="left", seq=8), KEYS, mallory.sign).envelope
    with pytest.raises(ProtocolError, match="not signed"):
        verify_record(envelope, KEYS, NOW)


def test_a_record_is_valid_from_its_issue_to_its_expiry_give_or_take_the_skew() -> None:
    envelope = sealed()
    for now in (NOW - SKEW_MS, NOW, NOW + LIFE_MS, NOW + LIFE_MS + SKEW_MS - 1):
        verify_record(envelope, KEYS, now)
    with pytest.raises(ProtocolError, match="future"):
        verify_record(envelope, KEYS, NOW - SKEW_MS - 1)
    with pytest.raises(ProtocolError, match="expired"):
        verify_record(envelope, KEYS, NOW + LIFE_MS + SKEW_MS)


@pytest.mark.parametrize(
    "change",
    [
        {1: b"short"},
        {1: "text"},
        {1: bytes(200)},
        {1: bytes.fromhex("1220") + bytes(32)},  # a peer id without a key in it
        {2: ["/ip4/1.2.3.4"] * 17},
        {2: ["/" + "x" * 256]},
        {2: ["no slash"]},
        {2: ["/a\nb"]},
        {2: ["/ä"]},
        {2: [1]},
        {2: None},
        {3: -1},
        {3: SEQ_MAX + 1},
        {3: True},
        {3: "7"},
        {4: None},
        {5: NOW},  # no life
        {5: NOW + LIFE_MS_MAX + 1},
        {5: 2**64},
        {6: 2},
        {6: False},
        {7: ["x"] * 17},
        {7: ["x" * 33]},
        {7: []},  # empty ones are left out: one form only
        {8: "unknown"},
        {"name": "unknown"},
    ],
)
def test_a_signed_record_with_a_bad_field_is_refused(change: dict[object, object]) -> None:
    body: dict[object, object] = dict(good_body().items())
    body.update(change)
    with pytest.raises(ProtocolError):
        verify_record(forged(body), KEYS, NOW)


@pytest.mark.parametrize("key", range(1, 7))
def test_a_signed_record_that_lacks_a_field_is_refused(key: int) -> None:
    body = good_body()
    del body[key]
    with pytest.raises(ProtocolError):
        verify_record(forged(body), KEYS, NOW)


def test_a_record_has_one_form_only() -> None:
    body = cbor2.loads(sealed())[0]
    loose = b"\xb8\x07" + body[1:]  # the map's length in two bytes
    assert cbor2.loads(loose) == cbor2.loads(body)
    with pytest.raises(ProtocolError, match="canonical"):
        verify_record(forged(None, raw=loose), KEYS, NOW)
    loose = b"\x98\x03" + sealed()[1:]
    with pytest.raises(ProtocolError, match="canonical"):
        verify_record(loose, KEYS, NOW)


@pytest.mark.parametrize(
    "envelope",
    [
        b"",
        b"\x80",
        b"\x83\x00\x00\x00",
        b"\xff",
        cbor2.dumps([b"", b"", b""]),
        b"\x59\xff\xff",
        bytes(RECORD_BYTES_MAX + 1),
    ],
)
def test_what_is_no_envelope_is_refused(envelope: bytes) -> None:
    with pytest.raises(ProtocolError):
        verify_record(envelope, KEYS, NOW)


def test_the_mac_comes_before_everything_that_costs() -> None:
    body, signature, mac = cbor2.loads(sealed())
    with pytest.raises(ProtocolError, match="MAC"):
        verify_record(cbor2.dumps([b"\xff" * 3000, signature, mac], canonical=True), KEYS, NOW)
    with pytest.raises(ProtocolError, match="MAC"):
        verify_record(cbor2.dumps([body, bytes(64), mac], canonical=True), KEYS, NOW)


def test_our_own_side_cannot_issue_what_others_refuse() -> None:
    for changes in ({"seq": SEQ_MAX + 1}, {"expires_ms": NOW}, {"addrs": ("x",)}, {"features": ("",)}):
        with pytest.raises(ValueError, match="refused"):
            sealed(**changes)
    assert fitting_addrs(["/a", "b", "/a", "/" + "x" * 256, *[f"/{n}" for n in range(20)]]) == (
        "/a",
        *[f"/{n}" for n in range(15)],
    )


@given(st.integers(0, 400), st.integers(1, 255))
def test_no_changed_byte_goes_unnoticed(position: int, change: int) -> None:
    envelope = sealed()
    position %= len(envelope)
    with pytest.raises(ProtocolError):
        verify_record(envelope[:position] + bytes([envelope[position] ^ change]) + envelope[position + 1 :], KEYS, NOW)


@given(st.binary(max_size=300))
def test_random_bytes_are_only_ever_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        verify_record(data, KEYS, NOW)
    frame = Frame(FrameType.GOSSIP, 0, 0, data)
    try:
        decode_members(frame)
    except ProtocolError:
        return


def frames_of(encoded: bytes) -> list[Frame]:
    return FrameDecoder(MEMBERS_PAYLOAD_BYTES_MAX).feed(encoded)


def test_messages_survive_the_wire_in_parts_that_are_bounded() -> None:
    entries = [(Identity(n.to_bytes(32, "big")).peer_id, n) for n in range(ENTRIES_PER_MESSAGE_MAX + 1)]
    digests = [decode_members(frame) for part in encode_digest(entries) for frame in frames_of(part)]
    assert digests == [Digest(tuple(entries[:-1])), Digest((entries[-1],))]
    peers = [peer for peer, _ in entries]
    wants = [decode_members(frame) for part in encode_want(peers) for frame in frames_of(part)]
    assert wants == [Want(tuple(peers[:-1])), Want((peers[-1],))]
    big, small = bytes(RECORD_BYTES_MAX), b"small"
    batches = [decode_members(frame) for part in encode_records([big] * 30 + [small] * 65) for frame in frames_of(part)]
    assert [envelope for batch in batches if isinstance(batch, Records) for envelope in batch.envelopes] == (
        [big] * 30 + [small] * 65
    )
    assert [len(batch.envelopes) for batch in batches if isinstance(batch, Records)] == [24, 64, 7]
    assert decode_members(frames_of(encode_summary(bytes(32)))[0]) == Summary(bytes(32))
    assert encode_records([]) == encode_digest([]) == encode_want([]) == []


@pytest.mark.parametrize(
    "message",
    [
        None,
        [],
        [1],
        [1, [b"x"], 3],
        [0, []],
        [5, []],
        ["1", []],
        [True, []],
        [1, "x"],
        [1, [1]],
        [1, [b"x"] * 65],
        [1, [bytes(RECORD_BYTES_MAX + 1)]],
        [2, [[b"x"]]],
        [2, [[b"x", -1]]],
        [2, [[b"x", SEQ_MAX + 1]]],
        [2, [["x", 1]]],
        [2, [b"x"]],
        [2, [[b"x", 1]] * 513],
        [3, [b""]],
        [3, [bytes(65)]],
        [3, [b"x"] * 513],
        [4, b"short"],
        [4, [1]],
    ],
)
def test_a_hostile_message_is_a_protocol_error(message: object) -> None:
    with pytest.raises(ProtocolError):
        decode_members(Frame(FrameType.GOSSIP, 0, 0, cbor2.dumps(message)))


def test_only_plain_gossip_frames_belong_on_a_members_stream() -> None:
    payload = b"\x82\x03\x80"
    decode_members(Frame(FrameType.GOSSIP, 0, 0, payload))
    for frame in (
        Frame(FrameType.NOTIFY, 0, 0, payload),
        Frame(FrameType.GOSSIP, 8, 0, payload),
        Frame(0x20, 0, 1, payload),
    ):
        with pytest.raises(ProtocolError):
            decode_members(frame)
