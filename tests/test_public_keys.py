"""Public keys from strangers: what libp2p knows is read, everything else is refused before it costs anything."""

import hashlib

import pytest
from Crypto.PublicKey import RSA
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from hypothesis import given
from hypothesis import strategies as st

from dep2p.errors import ProtocolError
from dep2p.identity import Identity
from dep2p.public_keys import KEY_BYTES_MAX, parse_public_key
from dep2p.types import peer_id_from_bytes


def encoded(kind: int, data: bytes) -> bytes:
    """The protobuf of a key."""
    size = bytes((len(data),)) if len(data) < 0x80 else bytes((len(data) & 0x7F | 0x80, len(data) >> 7))
    return bytes((0x08, kind, 0x12)) + size + data


def spki(key: rsa.RSAPublicKey | ec.EllipticCurvePublicKey) -> bytes:
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


RSA_KEY = rsa.generate_private_key(65537, 2048)
EC_KEY = ec.generate_private_key(ec.SECP256R1())
SECP_KEY = ec.generate_private_key(ec.SECP256K1())
SECP_BYTES = SECP_KEY.public_key().public_bytes(Encoding.X962, PublicFormat.CompressedPoint)
PRIVATE = RSA_KEY.private_bytes(Encoding.DER, PrivateFormat.TraditionalOpenSSL, NoEncryption())
PKCS8 = RSA_KEY.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())


def der_integer(number: int) -> bytes:
    data = number.to_bytes(number.bit_length() // 8 + 1, "big")
    return b"\x02" + _length(len(data)) + data


def _length(size: int) -> bytes:
    if size < 0x80:
        return bytes((size,))
    return (b"\x81" + bytes((size,))) if size < 0x100 else b"\x82" + size.to_bytes(2, "big")


def private_with_prime(bits: int) -> bytes:
    """A PKCS#1 private key whose primes a careless parser would test, each for seconds."""
    prime = 2**bits - 1
    body = b"".join(der_integer(n) for n in (0, prime * 3, 65537, 5, prime, 3, 5, 5, 5))
    return b"\x30" + _length(len(body)) + body


def test_each_type_of_key_is_read_and_checks_signatures() -> None:
    identity = Identity.generate()
    key = parse_public_key(encoded(1, identity.public_key))
    assert peer_id_from_bytes(key.peer_id_bytes) == identity.peer_id
    assert key.verify(b"text", identity.sign(b"text"))
    assert not key.verify(b"other", identity.sign(b"text"))
    for kind, data, private in ((2, SECP_BYTES, SECP_KEY), (3, spki(EC_KEY.public_key()), EC_KEY)):
        key = parse_public_key(encoded(kind, data))
        signature = private.sign(b"text", ec.ECDSA(SHA256()))
        assert key.verify(b"text", signature)
        assert not key.verify(b"other", signature)
        assert not key.verify(b"text", b"junk")
    key = parse_public_key(encoded(0, spki(RSA_KEY.public_key())))
    signature = RSA_KEY.sign(b"text", padding.PKCS1v15(), SHA256())
    assert key.verify(b"text", signature)
    assert not key.verify(b"other", signature)
    assert key.peer_id_bytes == b"\x12\x20" + hashlib.sha256(key.encoded).digest()


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\x08", id="cut"),
        pytest.param(encoded(1, bytes(31)), id="ed25519 too short"),
        pytest.param(encoded(1, bytes(33)), id="ed25519 too long"),
        pytest.param(encoded(1, bytes(32)) + b"\x18\x01", id="a further field"),
        pytest.param(b"\x12\x20" + bytes(32) + b"\x08\x01", id="fields in another order"),
        pytest.param(b"\x08\x81\x00\x12\x20" + bytes(32), id="a type in two bytes"),
        pytest.param(b"\x08\x01\x12\xa0\x00" + bytes(32), id="a length in two bytes"),
        pytest.param(encoded(4, bytes(32)), id="unknown type"),
        pytest.param(
            encoded(2, SECP_KEY.public_key().public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)),
            id="secp256k1 uncompressed",
        ),
        pytest.param(encoded(2, b"\x02" + b"\xff" * 32), id="secp256k1 off the curve"),
        pytest.param(encoded(3, SECP_BYTES), id="secp256k1 as ECDSA"),
        pytest.param(encoded(3, spki(SECP_KEY.public_key())), id="ECDSA on secp256k1"),
        pytest.param(encoded(3, spki(RSA_KEY.public_key())), id="RSA as ECDSA"),
        pytest.param(encoded(0, spki(EC_KEY.public_key())), id="ECDSA as RSA"),
        pytest.param(encoded(0, PRIVATE), id="RSA private PKCS1"),
        pytest.param(encoded(0, PKCS8), id="RSA private PKCS8"),
        pytest.param(encoded(0, spki(rsa.generate_private_key(65537, 1024).public_key())), id="RSA too small"),
        pytest.param(
            encoded(0, spki(rsa.RSAPublicNumbers(2**64 + 1, RSA_KEY.public_key().public_numbers().n).public_key())),
            id="RSA huge exponent",
        ),
        pytest.param(encoded(0, private_with_prime(2203)), id="primes of 2203 bits"),
        pytest.param(encoded(0, private_with_prime(9941)), id="primes of 9941 bits"),
        pytest.param(encoded(0, bytes(KEY_BYTES_MAX)), id="too long"),
    ],
)
def test_what_is_no_public_key_is_refused_at_no_cost(wrong: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RSA, "import_key", None)  # it tests the primes of private keys, for seconds
    with pytest.raises(ProtocolError):
        parse_public_key(wrong)


@given(st.binary(max_size=1_500) | st.builds(encoded, st.integers(0, 5), st.binary(max_size=600)))
def test_any_bytes_are_a_key_or_a_protocol_error(data: bytes) -> None:
    try:
        assert parse_public_key(data).verify(b"x", b"y") is False
    except ProtocolError:
        pass
