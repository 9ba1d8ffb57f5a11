"""The realm wire: vectors of docs/spec/pubsub.md, canonical bytes only, MAC before signature, split and whole."""

import hashlib
import hmac
from dataclasses import replace

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dep2p.encoding.cbor import CborReader, encode_bytes, encode_text, head
from dep2p.errors import ProtocolError
from dep2p.gossipsub import reasons
from dep2p.gossipsub.codecs.interface import DecodeLimits
from dep2p.gossipsub.codecs.realm import RealmCodec, derive_pubsub_key
from dep2p.gossipsub.headers import message_headers, read_headers
from dep2p.gossipsub.params import GossipParams
from dep2p.gossipsub.rpc import IHave, PeerInfo, Prune, Rpc, RpcMessage, SubscriptionChange
from dep2p.identity import Identity
from dep2p.types import RealmId, peer_id_bytes
from tests.gossipsub.network import merge_rpcs

PSK = bytes(range(32))
REALM = RealmId("24ce373b1aa775394207392be0df98d0fdc7abdf3a327ec74f4a9907cd1f7c16")
IDENTITY = Identity(bytes(range(32)))
AUTHOR = peer_id_bytes(IDENTITY.peer_id)
KEY = derive_pubsub_key(PSK, REALM)

# docs/spec/pubsub.md holds the same values.
VECTOR_KEY = "a9b34879667964a5acd6cd3550e7de0eb5998269264eefb259c75e4dd6e0d6f8"
VECTOR_MESSAGE = (
    "a102818384582600240801122003a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b81b17979cfe"
    "362a000064636861744568656c6c6f58408e064b9fa7d121f83bc5f275d96f911f5ef7fd5758c6660f1232514c5cf78c03e5"
    "65e94fe2624ddab3900deb34f91a6802b43815a2d0bcba8cd0a493304cb205508aeb7ba7b87a9ef50d3ea4a9b95f4ebf"
)
VECTOR_ID = "474f6a4b46296aeacb75e5a6a8aaef7e"
VECTOR_CONTROL = (
    "a60182826463686174f582636f6c64f403818264636861748250000000000000000000000000000000005001010101010101"
    "0101010101010101010481500202020202020202020202020202020205816463686174068183636f6c64183c818243000109"
    "4007815003030303030303030303030303030303"
)
CONTROL = Rpc(
    (),
    (SubscriptionChange("chat", True), SubscriptionChange("old", False)),
    (IHave("chat", (bytes(16), b"\x01" * 16)),),
    (b"\x02" * 16,),
    ("chat",),
    (Prune("old", 60, (PeerInfo(b"\x00\x01\x09", b""),)),),
    (b"\x03" * 16,),
)


def codec(key: bytes = KEY, identity: Identity = IDENTITY, **limits: int) -> RealmCodec:
    decode_limits = DecodeLimits(**limits) if limits else None
    return RealmCodec(peer_id_bytes(identity.peer_id), identity.sign, key, GossipParams(), decode_limits)


def hello() -> RpcMessage:
    return codec().compose("chat", b"hello", (1_700_000_000_000_000_000).to_bytes(8, "big"))


def test_the_vectors_of_the_specification() -> None:
    assert KEY.hex() == VECTOR_KEY
    message = hello()
    (payload,) = codec().encode(Rpc((message,)))
    assert payload.hex() == VECTOR_MESSAGE
    assert message.id.hex() == VECTOR_ID
    assert [part.hex() for part in codec().encode(CONTROL)] == [VECTOR_CONTROL]


def test_a_message_is_what_the_specification_says() -> None:
    message = hello()
    decoded = cbor2.loads(codec().encode(Rpc((message,)))[0])
    ((signed, signature, mac),) = decoded[2]
    covered = b"dep2p-pubsub:" + cbor2.dumps(signed, canonical=True)
    assert signed == [AUTHOR, 1_700_000_000_000_000_000, "chat", b"hello"]
    assert signature == IDENTITY.sign(covered)
    assert mac == hmac.digest(KEY, covered, "sha256")[:16]
    assert message.id == hashlib.sha256(AUTHOR + message.seqno).digest()[:16]


def test_control_is_the_canonical_cbor_of_a_map_with_small_keys() -> None:
    (payload,) = codec().encode(CONTROL)
    value = {
        1: [["chat", True], ["old", False]],
        3: [["chat", [bytes(16), b"\x01" * 16]]],
        4: [b"\x02" * 16],
        5: ["chat"],
        6: [["old", 60, [[b"\x00\x01\x09", b""]]]],
        7: [b"\x03" * 16],
    }
    assert payload == cbor2.dumps(value, canonical=True)
    assert codec().decode(payload) == CONTROL


def test_an_authentic_message_passes_and_goes_on_as_it_came() -> None:
    receiver = codec(identity=Identity(bytes(32)))
    (payload,) = codec().encode(Rpc((hello(),)))
    rpc = receiver.decode(payload)
    assert rpc.messages == (hello(),)
    assert receiver.authenticate(rpc.messages[0]) is None
    assert receiver.encode(rpc) == [payload]


HEADERS = {"trace": "42", "count": -7, "ok": True, "raw": b"\xff", "many": ["a", b"b", 3, False]}
VECTOR_WITH_HEADERS = (
    "a108818385582600240801122003a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b81b17979c"
    "fe362a000064636861744568656c6c6fa5626f6bf56372617741ff646d616e79846161416203f465636f756e7426657472"
    "616365623432584083c66dc9492701b2648145d760c9b87207cf200c6ba7b89d5e46722355fc59198b22fb464dbe66e838"
    "4347141c71b272460bab7c4aab412bb08ffad4fe2c830d50e2f046ec6d43a1f5fe8ffede0b642e30"
)


def with_headers(data: bytes = b"hello", number: int = 0, **headers: object) -> RpcMessage:
    seqno = (1_700_000_000_000_000_000 + number).to_bytes(8, "big")
    return codec().compose_with_headers("chat", data, seqno, message_headers(headers or HEADERS))


def test_a_message_with_headers_goes_under_a_key_of_its_own_and_is_covered_with_them() -> None:
    message = with_headers()
    (payload,) = codec().encode(Rpc((message,)))
    assert payload.hex() == VECTOR_WITH_HEADERS
    decoded = cbor2.loads(payload)
    ((signed, signature, mac),) = decoded[8]
    covered = b"dep2p-pubsub:" + cbor2.dumps(signed, canonical=True)
    assert signed == [AUTHOR, 1_700_000_000_000_000_000, "chat", b"hello", HEADERS]
    assert (signature, mac) == (IDENTITY.sign(covered), hmac.digest(KEY, covered, "sha256")[:16])
    receiver = codec(identity=Identity(bytes(32)))
    rpc = receiver.decode(payload)
    assert rpc.messages == (message,)
    assert rpc.messages[0].headers == HEADERS
    assert receiver.authenticate(rpc.messages[0]) is None
    assert receiver.encode(rpc) == [payload]
    forged = payload.replace(b"42", b"43")
    assert codec().authenticate(codec().decode(forged).messages[0]) == reasons.INVALID_MAC
    assert payload != forged


def test_messages_with_and_without_headers_keep_their_order_and_control_goes_first() -> None:
    made = [hello(), with_headers(b"1", 1), with_headers(b"2", 2), codec().compose("chat", b"3", bytes(8))]
    payloads = codec().encode(Rpc(tuple(made), subscriptions=(SubscriptionChange("chat", True),)))
    read = [codec().decode(payload) for payload in payloads]
    assert [message.data for rpc in read for message in rpc.messages] == [b"hello", b"1", b"2", b"3"]
    assert read[0].subscriptions and not read[0].messages
    assert [len(rpc.messages) for rpc in read] == [0, 1, 2, 1]


def test_messages_with_headers_share_a_signature_too() -> None:
    ours = RealmCodec(AUTHOR, IDENTITY.sign, KEY, GossipParams(), sign_batch_max=4)
    made = [
        ours.compose("chat", b"%d" % number, bytes([0] * 7 + [number + 1]))
        if number % 2
        else ours.compose_with_headers("chat", b"%d" % number, bytes([0] * 7 + [number + 1]), message_headers(HEADERS))
        for number in range(4)
    ]
    payloads = ours.encode(Rpc(tuple(made)))
    read = [message for payload in payloads for message in codec().decode(payload).messages]
    assert len({message.signature for message in read}) == 1
    assert [codec().authenticate(message) for message in read] == [None] * 4
    assert [message.data for message in read] == [b"0", b"1", b"2", b"3"]


def headers_payload(headers: bytes, data: bytes = b"x") -> bytes:
    seqno = (1_700_000_000_000_000_000).to_bytes(8, "big")
    signed = b"".join((b"\x85", encode_bytes(AUTHOR), b"\x1b", seqno, encode_text("chat"), encode_bytes(data), headers))
    return b"\xa1\x08\x81\x83" + signed + b"\x58\x40" + bytes(64) + b"\x50" + bytes(16)


@pytest.mark.parametrize(
    ("headers", "why"),
    [
        (b"\xa0", "with an entry"),
        (b"\x80", "another type where a map"),
        (b"\xa2\x61b\x01\x61a\x01", "not in order"),
        (b"\xa2\x61a\x01\x61a\x02", "not in order"),
        (b"\xa1\x60\x01", "without a name"),
        (b"\xa1\x20\x01", "text"),
        (b"\xa1\x61a\xf6", "true or false"),
        (b"\xa1\x61a\xfb" + bytes(8), "true or false"),
        (b"\xa1\x61a\xa0", "true or false"),
        (b"\xa1\x61a\x81\x80", "true or false"),
        (b"\xa1\x61a\x1b\x80" + bytes(7), "64 bits"),
        (b"\xa1\x61a\x3b\x80" + bytes(7), "64 bits"),
        (b"\xa1\x61a\x18\x01", "more bytes than needed"),
        (b"\xa1\x61\xff\x01", "UTF-8"),
        (b"\xb8\x41" + b"\x01\x01" * 65, "at most 64"),
        (b"\xa1\x61a\x98\x41" + b"\x01" * 65, "at most 64"),
        (b"\xa1\x61a\x59\x40\x00" + bytes(16_384), "16384"),
        (b"\xa1\x61a", "cut off|true or false|another type"),
    ],
)
def test_headers_of_another_form_are_refused(headers: bytes, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        codec().decode(headers_payload(headers))
    assert codec().decode(headers_payload(b"\xa1\x61a\x01")).messages[0].headers == {"a": 1}


def test_headers_count_against_the_size_of_a_message() -> None:
    most = GossipParams().message_bytes_max
    headers = b"\xa1\x61a\x44abcd"
    assert codec().decode(headers_payload(headers, bytes(most - len(headers)))).messages
    with pytest.raises(ProtocolError, match="together"):
        codec().decode(headers_payload(headers, bytes(most - len(headers) + 1)))


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=12),
        st.one_of(
            st.text(max_size=20),
            st.binary(max_size=20),
            st.booleans(),
            st.integers(-(2**63), 2**63 - 1),
            st.lists(st.one_of(st.text(max_size=5), st.binary(max_size=5), st.integers(-9, 9), st.booleans())),
        ),
        min_size=1,
        max_size=20,
    )
)
def test_any_headers_come_back_as_they_were_and_have_one_encoding(given_headers: dict[str, object]) -> None:
    headers = message_headers(given_headers)
    assert headers.encoded == cbor2.dumps(given_headers, canonical=True)
    reader = CborReader(headers.encoded)
    read = read_headers(reader)
    assert (dict(read), read.encoded) == (given_headers, headers.encoded)
    assert hash(read) == hash(headers)


@pytest.mark.parametrize(
    "headers",
    [
        {"": 1},
        {1: "x"},
        {"a": None},
        {"a": 1.5},
        {"a": {"b": 1}},
        {"a": [["b"]]},
        {"a": 2**63},
        {"a": list(range(65))},
        {"a": "\ud800"},
        {"\ud800": 1},
        {str(number): 1 for number in range(61)},
        {"a": bytes(16_384)},
    ],
)
def test_an_app_s_headers_that_are_not_allowed_are_refused(headers: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"header"):
        message_headers(headers)


@pytest.mark.parametrize("seqno", [0, 23, 24, 255, 2**16, 2**32 - 1, 2**32, 2**56 - 1, 2**56, 2**63, 2**64 - 1])
def test_a_seqno_of_any_size_is_read_as_it_was_written(seqno: int) -> None:
    message = codec().compose("chat", b"hello", seqno.to_bytes(8, "big"))
    (payload,) = codec().encode(Rpc((message,)))
    (read,) = codec().decode(payload).messages
    assert (read, int.from_bytes(read.seqno, "big")) == (message, seqno)
    for cut in range(len(payload)):
        with pytest.raises(ProtocolError):
            codec().decode(payload[:cut])


@pytest.mark.parametrize("seqno", [0, 255, 2**32 - 1])
def test_a_seqno_in_more_bytes_than_needed_is_refused(seqno: int) -> None:
    message = codec().compose("chat", b"hello", seqno.to_bytes(8, "big"))
    (payload,) = codec().encode(Rpc((message,)))
    longer = payload.replace(AUTHOR + head(0, seqno), AUTHOR + b"\x1b" + seqno.to_bytes(8, "big"))
    assert len(longer) > len(payload)
    with pytest.raises(ProtocolError, match="more bytes than needed"):
        codec().decode(longer)


def test_the_mac_is_checked_first_and_another_realm_s_key_does_not_pass() -> None:
    stranger = codec(key=bytes(32)).compose("chat", b"hello", bytes(8))
    assert codec().authenticate(stranger) == reasons.INVALID_MAC
    assert codec().authenticate(replace(stranger, signature=bytes(64))) == reasons.INVALID_MAC
    assert codec().authenticate(replace(hello(), signature=bytes(64))) == reasons.INVALID_SIGNATURE


def test_a_member_cannot_speak_for_another() -> None:
    other = Identity(bytes(32))
    forged = RealmCodec(AUTHOR, other.sign, KEY, GossipParams()).compose("chat", b"hello", bytes(8))
    assert codec().authenticate(forged) == reasons.INVALID_SIGNATURE


@pytest.mark.parametrize("bit", range(0, 8 * 60, 37))
def test_any_changed_bit_of_the_signed_part_is_noticed(bit: int) -> None:
    (payload,) = codec().encode(Rpc((hello(),)))
    changed = bytearray(payload)
    changed[4 + bit // 8] ^= 1 << bit % 8
    try:
        (message,) = codec().decode(bytes(changed)).messages
    except ProtocolError:
        return
    assert codec().authenticate(message) is not None


def test_the_wire_needs_an_ed25519_peer_id_and_a_whole_psk() -> None:
    with pytest.raises(ValueError, match="Ed25519"):
        RealmCodec(b"\x12\x20" + bytes(32), IDENTITY.sign, KEY, GossipParams())
    with pytest.raises(ValueError, match="32 bytes"):
        derive_pubsub_key(b"short", REALM)


def _message(author: bytes = AUTHOR, topic: object = "t", data: object = b"", signature: bytes = bytes(64)) -> object:
    return {2: [[[author, 1, topic, data], signature, bytes(16)]]}


_NO_PEERS: list[object] = []

HOSTILE: dict[str, bytes] = {
    "empty": b"",
    "no map": b"\x80",
    "indefinite map": b"\xbf\xff",
    "reserved": b"\xbc",
    "tag": cbor2.dumps({9: cbor2.CBORTag(1, 1)}),
    "float": cbor2.dumps({9: 1.5}),
    "trailing": cbor2.dumps({5: ["t"]}) + b"\x00",
    "keys out of order": b"\xa2\x05\x81\x61t\x04\x80",
    "same key twice": b"\xa2\x05\x81\x61t\x05\x81\x61t",
    "number in more bytes": b"\xa1\x18\x05\x81\x61t",
    "length in more bytes": b"\xa1\x05\x81\x78\x01t",
    "list longer than the bytes": b"\xa1\x04\x9b\xff\xff\xff\xff\xff\xff\xff\xff",
    "bytes longer than the bytes": b"\xa1\x04\x81\x5b\x7f\xff\xff\xff\xff\xff\xff\xff",
    "bad utf-8": b"\xa1\x05\x81\x62\xff\xfe",
    "text where bytes belong": cbor2.dumps({4: ["t"]}),
    "number where a flag belongs": cbor2.dumps({1: [["t", 1]]}),
    "deep extension": b"\xa1\x09" + b"\x81" * 100 + b"\x00",
    "topic too long": cbor2.dumps({5: ["t" * 1_025]}),
    "id too long": cbor2.dumps({4: [bytes(4_097)]}),
    "short author": cbor2.dumps(_message(author=b"x")),
    "author of another key type": cbor2.dumps(_message(author=b"\x00\x24\x08\x02\x12\x20" + bytes(32))),
    "no topic": cbor2.dumps(_message(topic="")),
    "data too long": cbor2.dumps(_message(data=bytes(1_048_577))),
    "short signature": cbor2.dumps(_message(signature=bytes(63))),
    "message of two": cbor2.dumps({2: [[[AUTHOR, 1, "t", b""], bytes(64)]]}),
    "negative backoff": cbor2.dumps({6: [["t", -1, _NO_PEERS]]}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bytes_are_a_protocol_error(name: str) -> None:
    with pytest.raises(ProtocolError):
        codec().decode(HOSTILE[name])


def test_every_cut_of_a_payload_is_a_protocol_error() -> None:
    payloads = [codec().encode(Rpc((hello(),)))[0], codec().encode(CONTROL)[0]]
    for payload in payloads:
        for size in range(len(payload)):
            with pytest.raises(ProtocolError):
                codec().decode(payload[:size])


def test_counts_above_the_limits_are_a_protocol_error() -> None:
    small = codec(subscriptions_max=1, messages_max=1, ids_max=2, grafts_max=1, prunes_max=1, px_peers_max=1)
    small.decode(cbor2.dumps({3: [["t", [b"a"]]], 4: [b"b"]}, canonical=True))
    signed = [[AUTHOR, 1, "t", b""], bytes(64), bytes(16)]
    values: tuple[object, ...] = (
        {1: [["t", True], ["u", True]]},
        {2: [signed, signed]},
        {3: [["t", [b"a"]]], 4: [b"b"], 7: [b"c"]},
        {5: ["t", "u"]},
        {6: [["t", 0, _NO_PEERS], ["u", 0, _NO_PEERS]]},
        {6: [["t", 0, [[b"p", b""], [b"q", b""]]]]},
    )
    for value in values:
        with pytest.raises(ProtocolError):
            small.decode(cbor2.dumps(value, canonical=True))


def test_keys_of_later_versions_are_skipped() -> None:
    value = {5: ["t"], 40: [{"a": [1, -2, b"x", True]}, "y"]}
    assert codec().decode(cbor2.dumps(value, canonical=True)) == Rpc(graft=("t",))


_topics = st.text(min_size=1, max_size=20).filter(lambda text: text.isprintable())
_ids = st.lists(st.binary(max_size=40), max_size=5).map(tuple)
_uint64s = st.integers(0, (1 << 64) - 1)


def _compose(topic: str, data: bytes, seqno: int) -> RpcMessage:
    return codec().compose(topic, data, seqno.to_bytes(8, "big"))


_composed = st.builds(
    _compose,
    _topics,
    st.binary(max_size=300),
    _uint64s,
)
_infos = st.lists(st.builds(PeerInfo, st.binary(max_size=40), st.binary(max_size=40)), max_size=2).map(tuple)
_rpcs = st.builds(
    Rpc,
    st.lists(_composed, max_size=3).map(tuple),
    st.lists(st.builds(SubscriptionChange, _topics, st.booleans()), max_size=4).map(tuple),
    st.lists(st.builds(IHave, _topics, _ids), max_size=3).map(tuple),
    _ids,
    st.lists(_topics, max_size=3).map(tuple),
    st.lists(st.builds(Prune, _topics, _uint64s, _infos), max_size=3).map(tuple),
    _ids,
)


@given(_rpcs)
def test_every_rpc_comes_back_as_it_was(rpc: Rpc) -> None:
    payloads = codec().encode(rpc)
    assert merge_rpcs([codec().decode(payload) for payload in payloads] or [Rpc()]) == rpc


@given(st.integers(0, (1 << 64) - 1), st.binary(max_size=300), st.text(max_size=300))
def test_our_encoder_is_canonical_cbor(number: int, data: bytes, text: str) -> None:
    assert head(0, number) == cbor2.dumps(number)
    assert encode_bytes(data) == cbor2.dumps(data)
    try:
        expected = cbor2.dumps(text)
    except ValueError:
        return
    assert encode_text(text) == expected
    assert CborReader(expected).text(2_000) == text


def test_large_rpcs_are_split_and_nothing_is_lost() -> None:
    messages = tuple(codec().compose("t", bytes(100_000), number.to_bytes(8, "big")) for number in range(30))
    ids = tuple(number.to_bytes(16, "big") for number in range(5_000))
    rpc = Rpc(messages, (SubscriptionChange("t", True),), (IHave("t", ids),), (), ("t",))
    payloads = codec().encode(rpc)
    params = GossipParams()
    parts = [codec().decode(payload) for payload in payloads]
    assert max(map(len, payloads)) <= params.rpc_bytes_max
    assert tuple(message for part in parts for message in part.messages) == messages
    assert tuple(i for part in parts for item in part.ihave for i in item.ids) == ids
    assert parts[0].subscriptions == (SubscriptionChange("t", True),)
    assert codec().encode(Rpc()) == []
    largest = codec().compose("t", bytes(params.message_bytes_max), bytes(8))
    (payload,) = codec().encode(Rpc((largest,)))
    assert len(payload) <= params.rpc_bytes_max
