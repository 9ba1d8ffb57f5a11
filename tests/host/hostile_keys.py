"""RSA private keys in the place of public ones: a careless reader tests their primes, for seconds."""

from dep2p.encoding.protobuf import encode_field
from dep2p.identity import Identity
from dep2p.types import PeerId, peer_id_bytes
from tests.test_public_keys import encoded, private_with_prime

ENCODED = encoded(0, private_with_prime(2_203))
"""The protobuf message of such a key."""


def private_key_envelope(peer: PeerId | None = None) -> bytes:
    """A signed peer record of ``peer`` whose key is an RSA private key."""
    owner = peer_id_bytes(peer or Identity(bytes([1]) * 32).peer_id)
    payload = encode_field(1, owner) + b"\x10\x07"
    fields = ((1, ENCODED), (2, b"\x03\x01"), (3, payload), (5, bytes(256)))
    return b"".join(encode_field(number, value) for number, value in fields)
