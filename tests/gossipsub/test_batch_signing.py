"""One signature for several messages: each is verifiable alone, none can be added, changed or moved."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import cbor2
import nacl.bindings
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dep2p.errors import ProtocolError
from dep2p.gossipsub import reasons
from dep2p.gossipsub.codecs.realm import RealmCodec
from dep2p.gossipsub.params import GossipParams
from dep2p.gossipsub.rpc import Rpc, RpcMessage
from dep2p.gossipsub.signing.merkle_batch import BATCH_MAX, VerifiedBatches, is_proof, make_proofs, root_of
from dep2p.identity import Identity
from dep2p.types import peer_id_bytes
from tests.gossipsub.test_codec_realm import IDENTITY, KEY

# docs/spec/pubsub.md holds the same value.
VECTOR_BATCH = (
    "a102838484582600240801122003a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b81b17979cfe362a"
    "000064636861744161584045c5cbdeb3fe56a11ad63ffacd1bb4e5294672610e032c4a9c4a6d1fb966b80f11431779542b672cb0"
    "a514628d9111e6f7176352c2a7a0dba11d62489c6542015085c13a32e3cd6f687e9ea9863db0cb575841004ca5d57e0c25474f97"
    "a820c1b36c668377340521b823bd1fb3e8d584fc84276b632de777ae15e4584ff366f18b5a8078e988263cad3052423042ac6fe3"
    "0967928484582600240801122003a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b81b17979cfe362a"
    "000164636861744162584045c5cbdeb3fe56a11ad63ffacd1bb4e5294672610e032c4a9c4a6d1fb966b80f11431779542b672cb0"
    "a514628d9111e6f7176352c2a7a0dba11d62489c654201507a6a5f61795bd728a49c7a04308c3b7a5841017f5445a4abe1e3f22d"
    "2c41d128e3ec9d7966d8e2942f38d0e1af340b8552fd41632de777ae15e4584ff366f18b5a8078e988263cad3052423042ac6fe3"
    "0967928484582600240801122003a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b81b17979cfe362a"
    "000264636861744163584045c5cbdeb3fe56a11ad63ffacd1bb4e5294672610e032c4a9c4a6d1fb966b80f11431779542b672cb0"
    "a514628d9111e6f7176352c2a7a0dba11d62489c654201500d00dfd189913b5813df7bc0d9aa56a658210178665264047ad7e914"
    "bdc3e5028e81ec9103103bd52e5e5d8faf6041442208d3"
)


def codec(batch: int = 16, identity: Identity = IDENTITY) -> RealmCodec:
    return RealmCodec(peer_id_bytes(identity.peer_id), identity.sign, KEY, GossipParams(), sign_batch_max=batch)


def composed(texts: Sequence[bytes], batch: int = 16, identity: Identity = IDENTITY) -> list[RpcMessage]:
    ours = codec(batch, identity)
    messages = [
        ours.compose("chat", text, (1_700_000_000_000_000_000 + number).to_bytes(8, "big"))
        for number, text in enumerate(texts)
    ]
    ours.sign_waiting()
    return messages


def batch_of(count: int) -> list[RpcMessage]:
    return composed([b"%d" % number for number in range(count)], BATCH_MAX)


def test_the_vector_of_the_specification() -> None:
    messages = composed([b"a", b"b", b"c"])
    (payload,) = codec().encode(Rpc(tuple(messages)))
    assert payload.hex() == VECTOR_BATCH


def test_a_batch_is_what_the_specification_says() -> None:
    items = [cbor2.loads(codec().encode(Rpc((message,)))[0])[2][0] for message in composed([b"a", b"b", b"c"])]
    leaves = [hashlib.sha256(b"dep2p-pubsub:" + cbor2.dumps(item[0], canonical=True)).digest() for item in items]
    pair = hashlib.sha256(b"\x01" + leaves[0] + leaves[1]).digest()
    root = hashlib.sha256(b"\x01" + pair + leaves[2]).digest()
    assert [item[3] for item in items] == [
        b"\x00" + leaves[1] + leaves[2],
        b"\x01" + leaves[0] + leaves[2],
        b"\x01" + pair,
    ]
    assert {item[1] for item in items} == {IDENTITY.sign(b"dep2p-pubsub-batch:" + root)}


@pytest.mark.parametrize("count", [*range(2, 20), 33, BATCH_MAX])
def test_every_proof_leads_to_the_root(count: int) -> None:
    covered = [b"dep2p-pubsub:%d" % number for number in range(count)]
    root, proofs = make_proofs(covered)
    assert all(is_proof(proof) for proof in proofs)
    assert {root_of(one, proof) for one, proof in zip(covered, proofs, strict=True)} == {root}
    assert root_of(covered[0], proofs[-1]) != root


@pytest.mark.parametrize("count", [0, 1, BATCH_MAX + 1])
def test_a_batch_has_bounds(count: int) -> None:
    with pytest.raises(ValueError, match="between 2 and 256"):
        make_proofs([b""] * count)


@pytest.mark.parametrize("count", [2, 3, 16, 17, 100])
def test_each_message_passes_alone_in_any_order_and_goes_on_as_it_came(count: int) -> None:
    for message in reversed(batch_of(count)):
        receiver = codec(identity=Identity(bytes(32)))
        (payload,) = codec().encode(Rpc((message,)))
        (read,) = receiver.decode(payload).messages
        assert read == message
        assert receiver.authenticate(read) is None
        assert receiver.encode(Rpc((read,))) == [payload]


def test_messages_wait_for_company_until_one_of_them_is_encoded() -> None:
    ours = codec()
    first, second = (ours.compose("chat", text, bytes(8)) for text in (b"1", b"2"))
    assert first.wire == second.wire == b""
    ours.encode(Rpc((second,)))
    assert first.wire and first.proof and first.signature == second.signature
    alone = ours.compose("chat", b"3", bytes(8))
    ours.encode(Rpc((alone,)))
    assert alone.wire and not alone.proof, "alone it has an ordinary signature"


def test_no_more_wait_than_share_a_signature() -> None:
    ours = codec(batch=3)
    messages = [ours.compose("chat", b"%d" % number, bytes(8)) for number in range(7)]
    assert [bool(message.wire) for message in messages] == [True] * 6 + [False]
    assert len({message.signature for message in messages[:6]}) == 2


def test_large_messages_do_not_wait() -> None:
    ours = codec()
    small, large = ours.compose("chat", b"", bytes(8)), ours.compose("chat", bytes(262_144), bytes(8))
    assert small.wire and large.wire
    assert not ours.compose("chat", bytes(200_000), bytes(8)).wire


def test_the_signature_of_a_batch_is_verified_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bytes] = []
    verify = nacl.bindings.crypto_sign_open

    def counting(signed: bytes, key: bytes) -> bytes:
        calls.append(signed)
        return verify(signed, key)

    messages = batch_of(100)
    monkeypatch.setattr(nacl.bindings, "crypto_sign_open", counting)
    receiver = codec()
    assert [receiver.authenticate(message) for message in messages] == [None] * 100
    assert len(calls) == 1


@pytest.mark.parametrize("is_known", [False, True])
def test_nothing_of_a_batch_can_be_changed_or_moved(is_known: bool) -> None:
    other = Identity(bytes(32))
    messages = batch_of(4)
    receiver = codec()
    if is_known:
        assert receiver.check_signature(messages[3]) is None
    first, second = messages[:2]
    alone = composed([b"alone"])[0]
    by_other = composed([b"0", b"1"], identity=other)[0]
    forged = [
        replace(first, proof=second.proof),
        replace(first, proof=bytes((first.proof[0] ^ 1,)) + first.proof[1:]),
        replace(first, proof=first.proof[:-1] + bytes((first.proof[-1] ^ 1,))),
        replace(first, proof=first.proof[:-32]),
        replace(first, proof=b""),
        replace(first, signature=by_other.signature),
        replace(first, wire=first.wire.replace(b"chat", b"chaT")),
        replace(alone, proof=first.proof, signature=first.signature),
        replace(by_other, proof=first.proof, signature=first.signature),
        replace(first, author=by_other.author),
    ]
    for message in forged:
        assert receiver.check_signature(message) == reasons.INVALID_SIGNATURE
    assert receiver.check_signature(first) is None


def test_a_failed_batch_is_not_remembered() -> None:
    receiver = codec()
    for message in batch_of(3):
        assert receiver.check_signature(replace(message, signature=bytes(64))) == reasons.INVALID_SIGNATURE
        assert receiver.check_signature(message) is None


@pytest.mark.parametrize(
    "proof",
    [
        b"",
        b"\x00",
        bytes(32),
        bytes(34),
        b"\x02" + bytes(32),
        b"\x80" + bytes(32 * 7),
        bytes(1 + 32 * 9),
        b"\x04" + bytes(64),
    ],
)
def test_a_proof_of_another_form_is_a_protocol_error(proof: bytes) -> None:
    assert not is_proof(proof)
    (decoded,) = cbor2.loads(codec().encode(Rpc((batch_of(2)[0],)))[0])[2]
    with pytest.raises(ProtocolError, match=r"proof|bytes where at most"):
        codec().decode(cbor2.dumps({2: [[*decoded[:3], proof]]}, canonical=True))


@pytest.mark.parametrize("parts", [0, 1, 2, 5])
def test_a_message_has_three_or_four_parts(parts: int) -> None:
    (decoded,) = cbor2.loads(codec().encode(Rpc((batch_of(2)[0],)))[0])[2]
    with pytest.raises(ProtocolError, match=r"parts|list"):
        codec().decode(cbor2.dumps({2: [[*decoded, b""][:parts]]}, canonical=True))


@given(st.data())
def test_any_changed_bit_of_a_batch_s_message_is_noticed(data: st.DataObject) -> None:
    (payload,) = codec().encode(Rpc((batch_of(3)[1],)))
    bit = data.draw(st.integers(0, 8 * len(payload) - 1))
    changed = bytearray(payload)
    changed[bit // 8] ^= 1 << bit % 8
    try:
        messages = codec().decode(bytes(changed)).messages
    except ProtocolError:
        return
    assert not messages or codec().authenticate(messages[0]) is not None


def test_remembered_batches_are_bounded_and_the_oldest_go_first() -> None:
    known = VerifiedBatches(items_max=32)
    for number in range(1_000):
        known.add(b"%d" % number)
    assert len(known) <= 32
    assert b"999" in known
    assert b"0" not in known
