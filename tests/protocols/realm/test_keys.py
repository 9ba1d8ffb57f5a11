"""Derivations and proofs equal the vectors of docs/spec/realm.md."""

import pytest

from dep2p.errors import ProtocolError
from dep2p.protocols.realm.handshake_limits import FailureLimit, address_key
from dep2p.protocols.realm.keys import ProofContext, Side, derive_keys, handshake_proof, stretch_passphrase
from dep2p.protocols.wire.cbor import decode_bounded, encode_canonical
from dep2p.types import PeerId

PSK = bytes(range(32))
REALM_ID = "24ce373b1aa775394207392be0df98d0fdc7abdf3a327ec74f4a9907cd1f7c16"
AUTH_KEY = "f51178386a7052a438ef99716e76651ac4e604b3d73a0fa3069cc8fcf51e43b2"
MEMBER_KEY = "99aaa64e2a479534edeb4d2203bd87ec43c5d8181d03ec00198d6e59411bb893"
PASSPHRASE_PSK = "9a2f7ecf4ccf3e60a8d02cb55d683246a426b314fd90e36dacaad736845c542e"


def test_keys_equal_the_vector() -> None:
    keys = derive_keys(PSK)
    assert keys.realm_id == REALM_ID
    assert keys.auth_key.hex() == AUTH_KEY
    assert keys.member_key.hex() == MEMBER_KEY


@pytest.mark.parametrize(
    ("side", "expected"),
    [
        ("I", "fadc4a50385142a1467c1aaaa66a39d6f555eba9501f33f8b7bea93e3f4b9b9e"),
        ("R", "5c70ff913e5196ab84e8758a3f167ba6336483063e50d5fe17430cc960ac06b8"),
    ],
)
def test_proofs_equal_the_vector(side: Side, expected: str) -> None:
    keys = derive_keys(PSK)
    proof = handshake_proof(
        keys.auth_key,
        side,
        ProofContext(b"initiator-peer", b"responder-peer", keys.realm_id, b"\x33" * 32, b"\x11" * 32, b"\x22" * 32),
    )
    assert proof.hex() == expected


def test_a_proof_depends_on_each_of_its_inputs() -> None:
    keys = derive_keys(PSK)
    other = derive_keys(bytes(32))
    base = (keys.auth_key, "I", b"a", b"b", keys.realm_id, b"3" * 32, b"1" * 32, b"2" * 32)
    changed = [
        (other.auth_key, *base[1:]),
        (base[0], "R", *base[2:]),
        (*base[:2], b"b", b"a", *base[4:]),
        (*base[:2], b"ab", b"", *base[4:]),  # lengths are covered: ids cannot be shifted into each other
        (*base[:4], other.realm_id, *base[5:]),
        (*base[:5], b"4" * 32, *base[6:]),
        (*base[:6], b"2" * 32, b"1" * 32),
    ]
    proofs = [
        handshake_proof(key, side, ProofContext(*inputs))  # type: ignore[arg-type]  # pyright: ignore
        for key, side, *inputs in [base, *changed]
    ]
    assert len(set(proofs)) == len(proofs)


def test_a_psk_of_another_length_is_refused() -> None:
    for length in (0, 31, 33, 64):
        with pytest.raises(ValueError, match="32 bytes"):
            derive_keys(bytes(length))


def test_keys_do_not_show() -> None:
    keys = derive_keys(PSK)
    assert keys.auth_key.hex()[:8] not in repr(keys) and str(keys.auth_key)[2:-1] not in repr(keys)
    assert repr(keys) == f"RealmKeys(realm_id='{REALM_ID}')"


def test_a_passphrase_is_stretched_with_the_name_as_salt() -> None:
    assert stretch_passphrase("correct horse battery staple", "team").hex() == PASSPHRASE_PSK
    assert stretch_passphrase("correct horse battery staple", "Team").hex() != PASSPHRASE_PSK


def test_the_form_of_unicode_in_a_passphrase_does_not_matter() -> None:
    assert stretch_passphrase("se\u0301same ouvre-toi", "x") == stretch_passphrase("s\u00e9same ouvre-toi", "x")


@pytest.mark.parametrize(
    ("addr", "key"),
    [
        ("/ip4/10.1.2.3/tcp/4001", "10.1.2.3"),
        ("/ip6/2001:db8:1:2:3:4:5:6/tcp/1", "2001:db8:1:2::/64"),
        ("/ip6/2001:DB8::7/tcp/1", "2001:db8:0:0::/64"),
        ("/ip6/2001:db8:0001::7/udp/1/quic-v1", "2001:db8:1:0::/64"),
        ("/ip6/::1/tcp/1", "0:0:0:0::/64"),
        ("/ip4/10.1.2.3/tcp/4001/p2p/QmRelay/p2p-circuit", "10.1.2.3"),
        ("/dns4/example.org/tcp/1", "/dns4/example.org/tcp/1"),
        ("", ""),
    ],
)
def test_shares_count_per_address_that_an_attacker_cannot_vary(addr: str, key: str) -> None:
    assert address_key(addr) == key


A, B = PeerId("a"), PeerId("b")


def test_a_peer_is_refused_after_its_failures_and_taken_again_after_a_minute() -> None:
    limit = FailureLimit(3)
    for second in range(3):
        assert limit.retry_after_s(A, float(second)) == 0.0
        limit.note(A, float(second))
    assert limit.retry_after_s(A, 3.0) == 57.0
    assert limit.retry_after_s(B, 3.0) == 0.0
    assert limit.retry_after_s(A, 60.0) == 0.0
    limit.note(A, 60.0)
    assert limit.retry_after_s(A, 60.0) == 1.0


def test_no_number_of_peers_fills_the_memory() -> None:
    limit = FailureLimit(3)
    for number in range(10_000):
        limit.note(PeerId(str(number)), 0.0)
    assert len(limit) == 4_096


def test_zero_means_no_limit() -> None:
    limit = FailureLimit(0)
    for _ in range(100):
        limit.note(A, 0.0)
    assert limit.retry_after_s(A, 0.0) == 0.0


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x9f\xff",  # indefinite length
        b"\xc0\x61a",  # a tag
        b"\xf9\x3c\x00",  # a float
        b"\x9b\xff\xff\xff\xff\xff\xff\xff\xff",  # 2^64-1 entries
        b"\x5b\xff\xff\xff\xff\xff\xff\xff\xff",  # 2^64-1 bytes
        b"\x81\x81\x81\x81\x81\x00",  # too deep
        b"\x00\x00",  # something after it
        b"\x61\xff",  # no UTF-8
        b"\x19\x01",  # cut off
        b"\x1c",  # reserved
    ],
)
def test_hostile_cbor_is_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_bounded(data, "test", depth_max=3, entries_max=8)


def test_cbor_within_the_bounds_survives() -> None:
    value: list[object] = [1, -1, b"x", "y", True, None, [[b""]]]
    assert decode_bounded(encode_canonical(value), "test", depth_max=4, entries_max=8) == value
