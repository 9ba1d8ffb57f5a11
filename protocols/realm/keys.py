"""Ids, keys and proofs that follow from a realm's secret (docs/spec/realm.md §2, §3.2).

All of it is deterministic; the nonces of a handshake come from the caller.
"""

import hashlib
import hmac
import unicodedata
from dataclasses import dataclass, field
from typing import Final, Literal

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from dep2p.types import RealmId

PSK_BYTES: Final = 32
NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32
CHANNEL_BYTES: Final = 32
MAC_BYTES: Final = 32
TAG_BYTES: Final = 32

SCRYPT_N: Final = 1 << 17
SCRYPT_R: Final = 8
SCRYPT_P: Final = 1
"""128 MiB and some 0.4 s per guess: the realm id is public, so a passphrase can be guessed offline."""

_REALM_ID_SALT: Final = b"dep2p-realm-id-v1"
_AUTH_KEY_SALT: Final = b"dep2p-auth-key-v1"
_MEMBER_KEY_SALT: Final = b"dep2p-member-key-v1"
_PASSPHRASE_SALT: Final = b"dep2p-realm-passphrase-v1"
_HELLO_KEY_SALT: Final = b"dep2p-hello-key-v1"
_PROOF_PREFIX: Final = b"dep2p-realm-proof-v3"
_HELLO_PREFIX: Final = b"dep2p-realm-hello-v3"

Side = Literal["I", "R"]
"""Which proof: the handshake's initiator's or its responder's."""


@dataclass(frozen=True, slots=True)
class RealmKeys:
    """The public id of a realm and the secret keys that its protocols use. The keys never show in ``repr``."""

    realm_id: RealmId
    auth_key: bytes = field(repr=False)
    member_key: bytes = field(repr=False)
    hello_key: bytes = field(repr=False)


def derive_keys(psk: bytes) -> RealmKeys:
    """All keys of a realm. Raises ``ValueError`` unless the PSK has 32 bytes."""
    realm_id = derive_realm_id(psk)
    return RealmKeys(
        realm_id, derive_auth_key(psk, realm_id), derive_member_key(psk, realm_id), derive_hello_key(psk, realm_id)
    )


def derive_realm_id(psk: bytes) -> RealmId:
    """The realm's public id, 64 lower-case hex digits. Raises ``ValueError`` unless the PSK has 32 bytes."""
    if len(psk) != PSK_BYTES:
        raise ValueError(f"a realm's PSK has {PSK_BYTES} bytes, not {len(psk)}")
    return RealmId(_hkdf(psk, _REALM_ID_SALT, hashlib.sha256(psk).digest()).hex())


def derive_auth_key(psk: bytes, realm_id: RealmId) -> bytes:
    """The 32-byte key of handshake proofs."""
    return _hkdf(psk, _AUTH_KEY_SALT, realm_id.encode("ascii"))


def derive_member_key(psk: bytes, realm_id: RealmId) -> bytes:
    """The 32-byte key of member record MACs."""
    return _hkdf(psk, _MEMBER_KEY_SALT, realm_id.encode("ascii"))


def derive_hello_key(psk: bytes, realm_id: RealmId) -> bytes:
    """The 32-byte key of the tags by which members recognise their realm in a handshake's first message."""
    return _hkdf(psk, _HELLO_KEY_SALT, realm_id.encode("ascii"))


def stretch_passphrase(passphrase: str, name: str) -> bytes:
    """The 32-byte PSK of a passphrase; takes some 0.4 s and 128 MiB.

    The salt is bound to the realm's name, so that one table of guesses does not serve two realms. Both texts are
    NFKC-normalised, so that the same keys pressed on another system give the same realm.
    """
    salt = _PASSPHRASE_SALT + b"\x00" + unicodedata.normalize("NFKC", name).encode("utf-8")
    secret = unicodedata.normalize("NFKC", passphrase).encode("utf-8")
    return Scrypt(salt=salt, length=PSK_BYTES, n=SCRYPT_N, r=SCRYPT_R, p=SCRYPT_P).derive(secret)


@dataclass(frozen=True, slots=True)
class ProofContext:
    """The subject of a proof: one channel between two identities, in one handshake.

    ``initiator`` and ``responder`` are peer ids as multihash bytes, and ``channel`` is the connection's channel
    binding; all three come from the transport, never from a message. A node in the middle has another channel with
    each side, so that it can pass no proof on, even where a transport takes it for another peer.
    """

    initiator: bytes
    responder: bytes
    realm_id: RealmId
    channel: bytes
    nonce_i: bytes
    nonce_r: bytes


def handshake_proof(auth_key: bytes, side: Side, context: ProofContext) -> bytes:
    """The proof of one side that it holds the realm's secret."""
    message = b"".join(
        (
            _PROOF_PREFIX,
            side.encode("ascii"),
            length_prefixed(context.initiator),
            length_prefixed(context.responder),
            length_prefixed(context.realm_id.encode("ascii")),
            length_prefixed(context.channel),
            context.nonce_i,
            context.nonce_r,
        )
    )
    return hmac.digest(auth_key, message, "sha256")


def hello_tag(hello_key: bytes, initiator: bytes, responder: bytes, channel: bytes, nonce_i: bytes) -> bytes:
    """The initiator's mark of its realm, 32 bytes that are random to all who lack the secret.

    Bound to both peers, the channel and the nonce: no two handshakes have a tag in common, and no tag holds on
    another channel.
    """
    message = b"".join(
        (_HELLO_PREFIX, length_prefixed(initiator), length_prefixed(responder), length_prefixed(channel), nonce_i)
    )
    return hmac.digest(hello_key, message, "sha256")


def length_prefixed(data: bytes) -> bytes:
    """``data`` behind its length as a big-endian u16."""
    return len(data).to_bytes(2, "big") + data


def keyed_mac(key: bytes, data: bytes) -> bytes:
    """HMAC-SHA256, 32 bytes."""
    return hmac.digest(key, data, "sha256")


def equal_in_constant_time(a: bytes, b: bytes) -> bool:
    """Whether two secrets are equal, in a time that tells nothing of where they differ."""
    return hmac.compare_digest(a, b)


def _hkdf(psk: bytes, salt: bytes, info: bytes) -> bytes:
    return HKDF(algorithm=SHA256(), length=32, salt=salt, info=info).derive(psk)
