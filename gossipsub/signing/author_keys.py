"""Signatures of libp2p authors: Ed25519, secp256k1, ECDSA and RSA keys, inside the peer id or beside it."""

import hashlib
from typing import Final

from dep2p.errors import ProtocolError
from dep2p.public_keys import Verify, parse_public_key

_INLINE_KEY_BYTES_MAX: Final = 42
_CACHED_MAX: Final = 1_024


class AuthorKeys:
    """Finds and remembers the keys of recent authors."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[bytes, Verify | None] = {}

    def verify(self, author: bytes, key: bytes, signed: bytes, signature: bytes) -> bool:
        """Whether the author (multihash bytes) made the signature. ``key``: its protobuf public key, or empty."""
        if key:
            # The author must be the hash of that key, or any node could sign for any other.
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
    """Return the peer id of a short key: the key itself in an identity multihash."""
    return bytes((0, len(key))) + key if len(key) <= _INLINE_KEY_BYTES_MAX else None


def load_key(key: bytes) -> Verify | None:
    """Return the verifier of a protobuf PublicKey{Type, Data}; None when it is no key that libp2p knows."""
    try:
        return parse_public_key(key).verify
    except ProtocolError:
        return None
