"""The certificate of a peer on QUIC, checked by libp2p's TLS specification.

py-libp2p 0.8.1 checks it too, but drops the result of the signature's verification, so that any node passes as any peer
(docs/explanation/py-libp2p-traps.md). Nothing here relies on its verdict.
Rules: https://github.com/libp2p/specs/blob/master/tls/tls.md.
"""

import hashlib
from collections.abc import Sequence
from datetime import datetime
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import ExtensionOID

from dep2p.errors import ProtocolError
from dep2p.public_keys import PublicKey, parse_public_key

LIBP2P_EXTENSION: Final = x509.ObjectIdentifier("1.3.6.1.4.1.53594.1.1")
BINDING_PREFIX: Final = b"dep2p-quic-binding-v1"
SIGNED_PREFIX: Final = b"libp2p-tls-handshake:"

_UNDERSTOOD: Final = frozenset((LIBP2P_EXTENSION, ExtensionOID.BASIC_CONSTRAINTS, ExtensionOID.KEY_USAGE))
"""Extensions that may be critical. The specification refuses a critical one that the reader does not understand."""
_HASHES: Final = frozenset(("sha256", "sha384", "sha512"))
_CURVES: Final = frozenset(("secp256r1", "secp384r1", "secp521r1"))
_RSA_BITS: Final = range(2_048, 8_193)
_OCTET_STRING: Final = 0x04
_SEQUENCE: Final = 0x30


def verify_certificate(certificate: x509.Certificate, chain: Sequence[x509.Certificate], now: datetime) -> PublicKey:
    """Return the identity that the certificate proves.

    ``chain`` is what came behind the certificate, and ``now`` the time in UTC. The caller must know from the TLS
    handshake that the peer has the private key of ``certificate``.

    Raises :class:`ProtocolError` that names the rule which is broken.
    """
    if chain:
        raise ProtocolError(f"the certificate comes with {len(chain)} others: libp2p's is alone")
    if not certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc:
        raise ProtocolError("the certificate is not valid at this time")
    try:
        spki = _self_signed_key(certificate)
        signed_key = _libp2p_extension(certificate)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ProtocolError(f"a malformed certificate: {type(error).__name__}") from error
    encoded_key, signature = _signed_key(signed_key)
    public_key = parse_public_key(encoded_key)
    if not public_key.verify(SIGNED_PREFIX + spki, signature):
        raise ProtocolError("the certificate's key is not signed by the peer's identity")
    return public_key


def certificate_key(certificate: x509.Certificate) -> bytes:
    """Return the SubjectPublicKeyInfo of a certificate, in DER."""
    return certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def channel_binding(client_key: bytes, server_key: bytes) -> bytes:
    """Return 32 bytes that follow from both certificates' keys (docs/spec/realm.md §3.1).

    TLS proves that each end has the private key of its certificate, so a node in the middle cannot show the same
    pair of keys on both of its connections.
    """
    parts = (
        BINDING_PREFIX,
        len(client_key).to_bytes(2, "big"),
        client_key,
        len(server_key).to_bytes(2, "big"),
        server_key,
    )
    return hashlib.sha256(b"".join(parts)).digest()


def _self_signed_key(certificate: x509.Certificate) -> bytes:
    """The SubjectPublicKeyInfo of a certificate that is signed by that very key, with a hash that still holds."""
    key = certificate.public_key()
    is_strong = (
        isinstance(key, ed25519.Ed25519PublicKey)
        or (isinstance(key, ec.EllipticCurvePublicKey) and key.curve.name in _CURVES)
        or (isinstance(key, rsa.RSAPublicKey) and key.key_size in _RSA_BITS)
    )
    if not is_strong:
        raise ProtocolError("the certificate's key is of a type or size that is not taken")
    hashed = certificate.signature_hash_algorithm
    if hashed is not None and hashed.name not in _HASHES:
        raise ProtocolError(f"the certificate is signed with {hashed.name}")
    try:
        certificate.verify_directly_issued_by(certificate)
    except (InvalidSignature, TypeError) as error:
        raise ProtocolError("the certificate is not signed by its own key") from error
    return certificate_key(certificate)


def _libp2p_extension(certificate: x509.Certificate) -> bytes:
    found: bytes | None = None
    for extension in certificate.extensions:  # raises ValueError where one stands twice
        if extension.critical and extension.oid not in _UNDERSTOOD:
            raise ProtocolError(f"a critical extension that is not understood: {extension.oid.dotted_string}")
        if isinstance(extension.value, x509.KeyUsage) and not extension.value.digital_signature:
            raise ProtocolError("the certificate's key must not sign")
        if extension.oid == LIBP2P_EXTENSION and isinstance(extension.value, x509.UnrecognizedExtension):
            found = extension.value.value
    if found is None:
        raise ProtocolError("the certificate has no libp2p extension: the peer names no identity")
    return found


def _signed_key(encoded: bytes) -> tuple[bytes, bytes]:
    """The public key and the signature of ``SignedKey ::= SEQUENCE { publicKey, signature }``, in DER."""
    body, rest = _element(_SEQUENCE, encoded)
    public_key, after = _element(_OCTET_STRING, body)
    signature, end = _element(_OCTET_STRING, after)
    if rest or end:
        raise ProtocolError("a malformed libp2p extension: bytes behind its end")
    return public_key, signature


def _element(tag: int, encoded: bytes) -> tuple[bytes, bytes]:
    """Return the content of the first DER element, and the bytes after it."""
    if len(encoded) >= 2 and encoded[0] == tag:
        length, start = encoded[1], 2
        if length in (0x81, 0x82):
            start = 2 + length - 0x80
            length = int.from_bytes(encoded[2:start], "big")
            if length < 0x80 or (start == 4 and length < 0x100):
                length = len(encoded)  # a longer form than DER allows
        if length <= len(encoded) - start:
            return encoded[start : start + length], encoded[start + length :]
    raise ProtocolError("a malformed libp2p extension")
