"""Signatures of libp2p authors: Ed25519, secp256k1, ECDSA and RSA keys, inside the peer id or beside it."""

import hashlib
from collections.abc import Callable
from typing import Final

import nacl.bindings
import nacl.exceptions
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_der_public_key

from dep2p.errors import ProtocolError
from dep2p.gossipsub.encoding.protobuf import ProtoReader

_RSA: Final = 0
_ED25519: Final = 1
_SECP256K1: Final = 2
_ECDSA: Final = 3
_KEY_BYTES_MAX: Final = 4_096
_INLINE_KEY_BYTES_MAX: Final = 42
_RSA_BITS: Final = range(2_048, 8_193)
_CACHED_MAX: Final = 1_024

Verify = Callable[[bytes, bytes], bool]
"""(signed bytes, signature) → whether it holds."""


class AuthorKeys:
    """Finds and remembers the keys of recent authors."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[bytes, Verify | None] = {}

    def verify(self, author: bytes, key: bytes, signed: bytes, signature: bytes) -> bool:
        """Whether the author (multihash bytes) made the signature. ``key``: its protobuf public key, or empty."""
        if key:
            # The author must be the hash of that key, or anybody could sign for anybody.
            if author != key_identity(key) and author != b"\x12\x20" + hashlib.sha256(key).digest():
                return False
        elif len(author) > 2 and author[0] == 0 and author[1] == len(author) - 2:
            key = author[2:]
        else:
            return False
        verify = self._known.get(key)
        if verify is None:
            if key in self._known:
                return False
            if len(self._known) >= _CACHED_MAX:
                self._known.clear()
            verify = self._known[key] = load_key(key)
            if verify is None:
                return False
        return verify(signed, signature)


def key_identity(key: bytes) -> bytes | None:
    """The peer id of a short key: the key itself in an identity multihash."""
    return bytes((0, len(key))) + key if len(key) <= _INLINE_KEY_BYTES_MAX else None


def load_key(key: bytes) -> Verify | None:
    """The verifier of a protobuf PublicKey{Type, Data}; None when it is no key that libp2p knows."""
    kind, data = -1, b""
    try:
        reader = ProtoReader(key, 0, len(key))
        while reader.next():
            if reader.number == 1:
                kind = reader.uint()
            elif reader.number == 2:
                data = reader.bytes_(_KEY_BYTES_MAX)
            else:
                reader.skip()
        if kind == _ED25519 and len(data) == 32:
            return _ed25519(data)
        if kind == _SECP256K1 and len(data) == 33:
            return _ecdsa(ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256K1(), data))
        if kind in (_RSA, _ECDSA):
            loaded = load_der_public_key(data)
            if kind == _RSA and isinstance(loaded, rsa.RSAPublicKey) and loaded.key_size in _RSA_BITS:
                return _rsa(loaded)
            if kind == _ECDSA and isinstance(loaded, ec.EllipticCurvePublicKey):
                return _ecdsa(loaded)
    except (ProtocolError, ValueError, UnsupportedAlgorithm):
        return None
    return None


def _ed25519(public_key: bytes) -> Verify:
    def verify(signed: bytes, signature: bytes) -> bool:
        if len(signature) != 64:
            return False
        try:
            nacl.bindings.crypto_sign_open(signature + signed, public_key)
        except nacl.exceptions.BadSignatureError:
            return False
        return True

    return verify


def _ecdsa(public_key: ec.EllipticCurvePublicKey) -> Verify:
    def verify(signed: bytes, signature: bytes) -> bool:
        try:
            public_key.verify(signature, signed, ec.ECDSA(SHA256()))
        except InvalidSignature:
            return False
        return True

    return verify


def _rsa(public_key: rsa.RSAPublicKey) -> Verify:
    def verify(signed: bytes, signature: bytes) -> bool:
        try:
            public_key.verify(signature, signed, padding.PKCS1v15(), SHA256())
        except InvalidSignature:
            return False
        return True

    return verify
