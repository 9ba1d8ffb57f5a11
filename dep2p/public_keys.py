"""Public keys of libp2p peers, read from untrusted bytes.

Every key that a stranger sends is read here: in handshakes, certificates, records and signed messages. The type, the
encoding and the size are checked before any arithmetic, and only public keys are taken, so that no input costs more
than about a millisecond. Format: https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md#keys.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import nacl.bindings
import nacl.exceptions
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_der_public_key

from dep2p.encoding.varint import encode_varint, read_varint
from dep2p.errors import ProtocolError

RSA: Final = 0
ED25519: Final = 1
SECP256K1: Final = 2
ECDSA: Final = 3

KEY_BYTES_MAX: Final = 1_200
"""The longest encoded key that is read: an RSA key of 8,192 bits takes about 1,070 bytes."""
SIGNATURE_BYTES_MAX: Final = 1_024
"""The longest signature that is checked: one of an RSA key of 8,192 bits."""
_INLINE_KEY_BYTES_MAX: Final = 42
_RSA_BITS: Final = range(2_048, 8_193)
_RSA_EXPONENT_MAX: Final = 2**32
_ED25519_BYTES: Final = 32
_ED25519_SIGNATURE_BYTES: Final = 64
_SECP256K1_BYTES: Final = 33
_ECDSA_CURVES: Final = ("secp256r1", "secp384r1", "secp521r1")

Verify = Callable[[bytes, bytes], bool]
"""(signed bytes, signature) → whether the signature holds."""


@dataclass(frozen=True, slots=True)
class PublicKey:
    """A peer's public key.

    ``encoded`` is the protobuf message ``PublicKey{Type, FileData}`` in its only encoding. ``verify`` says whether a
    signature over some bytes is this key's; it never raises.
    """

    kind: int
    encoded: bytes
    verify: Verify

    @property
    def peer_id_bytes(self) -> bytes:
        """The multihash that is the peer id of this key: the key itself when it is short, else its SHA-256."""
        if len(self.encoded) <= _INLINE_KEY_BYTES_MAX:
            return bytes((0, len(self.encoded))) + self.encoded
        return b"\x12\x20" + hashlib.sha256(self.encoded).digest()


def parse_public_key(encoded: bytes) -> PublicKey:
    """Read a protobuf ``PublicKey{Type, FileData}``.

    >>> key = parse_public_key(bytes.fromhex("08011220") + bytes(31) + b"\\x09")
    >>> key.kind == ED25519, len(key.peer_id_bytes)
    (True, 38)

    Raises :class:`ProtocolError`: not the encoding that the specification demands, a type that libp2p does not know,
    a private key, or a key that is too small or too large.
    """
    kind, data = _split(encoded)
    try:
        verify = _verifier(kind, data)
    except (ValueError, UnsupportedAlgorithm):
        verify = None
    if verify is None:
        raise ProtocolError("a public key that libp2p does not know, or that is malformed")
    return PublicKey(kind, encoded, verify)


def _split(encoded: bytes) -> tuple[int, bytes]:
    """The type and the data. Only the canonical encoding is taken: the peer id is made of these very bytes."""
    if len(encoded) > KEY_BYTES_MAX:
        raise ProtocolError(f"a public key of {len(encoded)} bytes is over {KEY_BYTES_MAX}")
    if len(encoded) >= 4 and encoded[0] == 0x08 and encoded[1] <= ECDSA and encoded[2] == 0x12:
        size, start = read_varint(encoded, 3, len(encoded))
        if size == len(encoded) - start and encode_varint(size) == encoded[3:start]:
            return encoded[1], encoded[start:]
    raise ProtocolError("a public key that is no protobuf of a type and its data")


def _verifier(kind: int, data: bytes) -> Verify | None:
    if kind == ED25519 and len(data) == _ED25519_BYTES:
        return _ed25519(data)
    if kind == SECP256K1 and len(data) == _SECP256K1_BYTES:
        return _ecdsa(ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256K1(), data))
    if kind not in (RSA, ECDSA):
        return None
    loaded = load_der_public_key(data)
    if kind == RSA and isinstance(loaded, rsa.RSAPublicKey) and loaded.key_size in _RSA_BITS:
        # A huge exponent makes each verification slow.
        return _rsa(loaded) if loaded.public_numbers().e < _RSA_EXPONENT_MAX else None
    if kind == ECDSA and isinstance(loaded, ec.EllipticCurvePublicKey) and loaded.curve.name in _ECDSA_CURVES:
        return _ecdsa(loaded)
    return None


def _ed25519(public_key: bytes) -> Verify:
    def verify(signed: bytes, signature: bytes) -> bool:
        if len(signature) != _ED25519_SIGNATURE_BYTES:
            return False
        try:
            nacl.bindings.crypto_sign_open(signature + signed, public_key)
        except nacl.exceptions.BadSignatureError:
            return False
        return True

    return verify


def _ecdsa(public_key: ec.EllipticCurvePublicKey) -> Verify:
    def verify(signed: bytes, signature: bytes) -> bool:
        if len(signature) > SIGNATURE_BYTES_MAX:
            return False
        try:
            public_key.verify(signature, signed, ec.ECDSA(SHA256()))
        except InvalidSignature:
            return False
        return True

    return verify


def _rsa(public_key: rsa.RSAPublicKey) -> Verify:
    def verify(signed: bytes, signature: bytes) -> bool:
        if len(signature) > SIGNATURE_BYTES_MAX:
            return False
        try:
            public_key.verify(signature, signed, padding.PKCS1v15(), SHA256())
        except InvalidSignature:
            return False
        return True

    return verify
