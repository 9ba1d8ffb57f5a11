"""libp2p's wire: what js-libp2p 17.1 wrote is read and written byte for byte, signatures of all its keys hold."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import strategies as st

from dep2p.encoding.length_prefixed import LengthPrefixedDecoder, encode_length_prefixed
from dep2p.encoding.protobuf import encode_field
from dep2p.encoding.varint import encode_varint
from dep2p.errors import LocalProtocolError, ProtocolError
from dep2p.gossipsub import reasons
from dep2p.gossipsub.codecs.interface import DecodeLimits
from dep2p.gossipsub.codecs.libp2p import Libp2pCodec
from dep2p.gossipsub.messages.message_id import MessageIds
from dep2p.gossipsub.params import GossipParams, with_rust_limits
from dep2p.gossipsub.rpc import IHave, PeerInfo, Prune, Rpc, SubscriptionChange
from dep2p.gossipsub.signing.author_keys import AuthorKeys
from dep2p.gossipsub.signing.policy import SigningPolicy, policy_violation
from dep2p.identity import Identity
from dep2p.types import PeerId, peer_id_bytes

IDENTITY = Identity(bytes(range(32)))
AUTHOR = peer_id_bytes(IDENTITY.peer_id)
SEQNO = (7).to_bytes(8, "big")
JS: dict[str, Any] = json.loads((Path(__file__).parent / "js_vectors.json").read_text())


def codec(profile: str = "go", policy: SigningPolicy = SigningPolicy.STRICT_SIGN, **options: Any) -> Libp2pCodec:
    params = options.pop("params", GossipParams())
    return Libp2pCodec(AUTHOR, IDENTITY.sign, MessageIds(profile), params, policy=policy, **options)


@pytest.mark.parametrize("vector", JS["messages"], ids=lambda vector: str(vector["key"]))
def test_a_message_signed_by_js_is_read_verified_and_written_again_unchanged(vector: dict[str, str]) -> None:
    ours = codec("js")
    payload = bytes.fromhex(vector["rpc"])
    rpc = ours.decode(payload)
    (message,) = rpc.messages
    assert message.author == peer_id_bytes(PeerId(vector["peer"]))
    assert (message.topic, message.data) == ("grüße", b"hello " + vector["key"].encode())
    assert message.id.hex() == vector["id"]
    assert policy_violation(SigningPolicy.STRICT_SIGN, message) is None
    assert ours.authenticate(message) is None
    assert ours.authenticate(replace(message, author=AUTHOR[:-1] + b"x")) == reasons.INVALID_SIGNATURE
    assert ours.encode(rpc) == [payload]


def test_our_message_is_what_js_makes_with_the_same_key_but_for_the_key_field_that_the_peer_id_holds() -> None:
    vector = JS["messages"][0]
    with_key = codec("js", key=AUTHOR[2:])
    message = with_key.compose("grüße", b"hello Ed25519", bytes.fromhex("0102030405060708"))
    assert with_key.encode(Rpc((message,)))[0].hex() == vector["rpc"]
    without = codec("js").compose("grüße", b"hello Ed25519", bytes.fromhex("0102030405060708"))
    assert without.signature == message.signature
    assert without.id == message.id
    assert not without.key


def test_js_s_unsigned_message_is_ours_under_strict_no_sign() -> None:
    ours = codec("sha256", SigningPolicy.STRICT_NO_SIGN)
    message = ours.compose("t", b"anonymous", SEQNO)
    assert ours.encode(Rpc((message,)))[0].hex() == JS["unsigned"]["rpc"]
    assert message.id.hex() == JS["unsigned"]["id"]
    assert (message.author, message.seqno, message.signature, message.key) == (b"", b"", b"", b"")
    assert policy_violation(SigningPolicy.STRICT_NO_SIGN, message) is None
    assert policy_violation(SigningPolicy.STRICT_SIGN, message) == reasons.MISSING_SIGNATURE
    assert ours.authenticate(message) is None


def test_every_control_message_of_js_is_read_and_written_unchanged() -> None:
    payload = bytes.fromhex(JS["rpc"])
    rpc = codec().decode(payload)
    assert rpc == Rpc(
        (),
        (SubscriptionChange("a", True), SubscriptionChange("b", False)),
        (IHave("a", (b"\x01\xff", b"\x02")),),
        (b"\x03",),
        ("a",),
        (Prune("b", 60, (PeerInfo(b"\x09\x09", b"\x08"),)),),
        (b"\x04",),
    )
    assert codec().encode(rpc) == [payload]


def test_the_policies_report_what_is_missing_or_too_much() -> None:
    signed = codec().compose("t", b"x", SEQNO)
    no_sign, strict = SigningPolicy.STRICT_NO_SIGN, SigningPolicy.STRICT_SIGN
    assert policy_violation(strict, signed) is None
    assert policy_violation(strict, replace(signed, signature=b"")) == reasons.MISSING_SIGNATURE
    assert policy_violation(strict, replace(signed, author=b"")) == reasons.MISSING_SIGNATURE
    assert policy_violation(no_sign, signed) == reasons.UNEXPECTED_SIGNATURE
    assert policy_violation(no_sign, replace(signed, signature=b"")) == reasons.UNEXPECTED_AUTH_INFO


def test_a_changed_message_or_one_signed_by_another_is_refused() -> None:
    ours = codec()
    message = ours.compose("t", b"payload", SEQNO)
    assert ours.authenticate(message) is None
    changed = ours.decode(encode_field(2, message.wire.replace(b"payload", b"paiload"))).messages[0]
    assert ours.authenticate(changed) == reasons.INVALID_SIGNATURE
    other = Identity(bytes(32))
    forged = Libp2pCodec(AUTHOR, other.sign, MessageIds("go"), GossipParams()).compose("t", b"payload", SEQNO)
    assert ours.authenticate(forged) == reasons.INVALID_SIGNATURE
    # A key beside the message that is not the author's must not help.
    with_key = replace(forged, key=peer_id_bytes(other.peer_id)[2:])
    assert ours.authenticate(with_key) == reasons.INVALID_SIGNATURE


@pytest.mark.parametrize("order", [(4, 3, 2, 1, 5), (1, 2, 3, 5, 4), (1, 1, 2, 3, 4, 5)])
def test_fields_in_another_order_are_judged_as_they_are_written_on(order: tuple[int, ...]) -> None:
    ours = codec()
    message = ours.compose("t", b"x", SEQNO)
    values = {1: AUTHOR, 2: b"x", 3: SEQNO, 4: b"t", 5: message.signature}
    raw = b"".join(encode_field(number, values[number]) for number in order)
    (read,) = ours.decode(encode_field(2, raw)).messages
    assert read == message
    assert read.wire == message.wire
    assert ours.authenticate(read) is None


def test_lengths_in_more_bytes_than_needed_and_unknown_fields_are_not_passed_on() -> None:
    ours = codec()
    message = ours.compose("t", b"x", SEQNO)
    padded = message.wire.replace(b"\x12\x01x", b"\x12\x81\x00x") + encode_field(9, b"unknown")
    (read,) = ours.decode(encode_field(2, padded)).messages
    assert read.wire == message.wire
    assert ours.authenticate(read) is None


def test_a_message_without_a_topic_belongs_nowhere() -> None:
    assert codec().decode(encode_field(2, encode_field(2, b"x"))) == Rpc()


def test_unknown_fields_and_extensions_of_an_rpc_are_passed_over() -> None:
    extension = encode_varint(6492434 << 3 | 2) + encode_varint(1) + b"x"
    payload = encode_field(1, b"\x08\x01" + encode_field(2, b"t")) + encode_field(10, b"partial") + extension
    fixed = bytes([13 << 3 | 1]) + bytes(8) + bytes([13 << 3 | 5]) + bytes(4) + bytes([13 << 3, 5])
    assert codec().decode(payload + fixed) == Rpc(subscriptions=(SubscriptionChange("t", True),))


@pytest.mark.parametrize(
    "payload",
    [
        b"\x0a",
        b"\x0a\x05ab",
        b"\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        b"\x0b",
        b"\x00\x00",
        encode_field(2, encode_field(4, b"\xff\xfe")),
        encode_field(2, b"\x20\x01"),
        encode_field(3, encode_field(4, b"\x18" + b"\xff" * 10)),
        encode_field(2, encode_field(1, bytes(200))),
        encode_field(3, encode_field(2, encode_field(1, bytes(5_000)))),
    ],
)
def test_hostile_bytes_are_a_protocol_error(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        codec().decode(payload)


def test_counts_above_the_limits_are_a_protocol_error() -> None:
    limits = DecodeLimits(subscriptions_max=2, messages_max=2, ids_max=3, grafts_max=2, prunes_max=2, px_peers_max=2)
    small = codec(limits=limits)
    sub = encode_field(1, encode_field(2, b"t"))
    message = encode_field(2, encode_field(4, b"t"))
    parts = {
        "subscriptions": sub,
        "messages": message,
        "ids": encode_field(3, encode_field(2, encode_field(1, b"i"))),
        "ids told": encode_field(3, encode_field(5, encode_field(1, b"i") * 2)),
        "ihave": encode_field(3, encode_field(1, b"")),
        "graft": encode_field(3, encode_field(3, b"")),
        "prune": encode_field(3, encode_field(4, b"")),
        "px": encode_field(3, encode_field(4, encode_field(2, b"") * 2)),
    }
    for name, part in parts.items():
        small.decode(part)
        with pytest.raises(ProtocolError):
            small.decode(part * 4)
            pytest.fail(name)


def test_a_backoff_of_64_bits_is_read() -> None:
    prune = encode_field(3, encode_field(4, encode_field(1, b"t") + b"\x18" + b"\xff" * 9 + b"\x01"))
    assert codec().decode(prune).prune == (Prune("t", (1 << 64) - 1),)


def test_rpcs_are_split_to_what_rust_reads() -> None:
    rust = codec(params=with_rust_limits(GossipParams()))
    messages = tuple(rust.compose("t", bytes(200), number.to_bytes(8, "big")) for number in range(1_200))
    ids = tuple(hashlib.sha256(b"%d" % number).digest() + bytes(14) for number in range(5_000))
    rpc = Rpc(
        messages,
        (SubscriptionChange("t", True),),
        (IHave("t", ids), IHave("u", ())),
        ids[:900],
        ("t",),
        (Prune("t", 60),),
        ids[:5],
    )
    payloads = rust.encode(rpc)
    parts = [rust.decode(payload) for payload in payloads]
    for payload, part in zip(payloads, parts, strict=True):
        assert len(payload) <= 65_536
        assert len(part.messages) <= 500
        if not part.messages:
            assert len(payload) <= 16_384
    assert tuple(message for part in parts for message in part.messages) == messages
    assert tuple(i for part in parts for item in part.ihave if item.topic == "t" for i in item.ids) == ids
    assert tuple(i for part in parts for i in part.iwant) == ids[:900]
    assert [part.graft for part in parts if part.graft] == [("t",)]
    assert len(payloads) < 40


def test_ecdsa_keys_are_known_and_nonsense_keys_are_not() -> None:
    private = ec.generate_private_key(ec.SECP256R1())
    der = private.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    key = b"\x08\x03" + encode_field(2, der)
    author = b"\x12\x20" + hashlib.sha256(key).digest()
    keys = AuthorKeys()
    signature = private.sign(b"signed", ec.ECDSA(SHA256()))
    assert keys.verify(author, key, b"signed", signature)
    assert not keys.verify(author, key, b"other", signature)
    for nonsense in (b"", b"\x08\x00\x12\x01x", b"\x08\x02" + encode_field(2, bytes(33)), b"\x08\x09", b"\xff"):
        name = b"\x12\x20" + hashlib.sha256(nonsense).digest()
        assert not keys.verify(name, nonsense, b"signed", signature)
        assert not keys.verify(name, nonsense, b"signed", signature), "remembered as no key"


@given(st.lists(st.binary(max_size=300), max_size=6), st.lists(st.integers(1, 50), min_size=1))
def test_any_split_of_a_stream_gives_the_same_payloads(payloads: list[bytes], sizes: list[int]) -> None:
    stream = b"".join(encode_length_prefixed(payload) for payload in payloads)
    decoder = LengthPrefixedDecoder(300)
    found: list[bytes] = []
    position = number = 0
    while position < len(stream):
        size = sizes[number % len(sizes)]
        found += decoder.feed(stream[position : position + size])
        position += size
        number += 1
    assert found == payloads
    assert decoder.buffered_bytes == 0


def test_a_length_above_the_cap_is_an_error_before_anything_is_buffered() -> None:
    decoder = LengthPrefixedDecoder(100)
    assert decoder.feed(encode_length_prefixed(b"first") + encode_varint(101)) == [b"first"]
    assert decoder.error is not None
    assert decoder.buffered_bytes == 0
    with pytest.raises(LocalProtocolError):
        decoder.feed(b"x")
    endless = LengthPrefixedDecoder(100)
    assert endless.feed(b"\xff" * 9) == []
    assert endless.error is not None
