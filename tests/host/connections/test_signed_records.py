"""Signed peer records: what their own peer signed is taken, everything else refused before any arithmetic."""

from collections.abc import Iterator

import pytest
from Crypto.PublicKey import RSA
from hypothesis import given
from hypothesis import strategies as st
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.envelope import seal_record
from libp2p.peer.id import ID
from libp2p.peer.pb.envelope_pb2 import Envelope
from libp2p.peer.peer_record import PeerRecord
from multiaddr import Multiaddr

from dep2p.errors import ProtocolError
from dep2p.host.connections.signed_records import SIGNED_RECORD_BYTES_MAX, open_signed_record
from dep2p.identity import Identity
from tests.host.hostile_keys import private_key_envelope

OWNER, OTHER = Identity(bytes([1]) * 32), Identity(bytes([2]) * 32)
ADDRS = ("/ip4/192.0.2.1/tcp/4001", "/ip4/192.0.2.1/udp/4001/quic-v1")


def envelope(signer: Identity = OWNER, owner: Identity = OWNER) -> bytes:
    """A record of ``owner``, sealed by py-libp2p with the key of ``signer``."""
    record = PeerRecord(ID.from_string(owner.peer_id), [Multiaddr(text) for text in ADDRS], 7)
    return seal_record(record, create_new_key_pair(signer.private_seed).private_key).marshal_envelope()


@pytest.fixture(autouse=True)
def no_prime_is_tested(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(RSA, "import_key", None)
    yield


def test_the_record_that_py_libp2p_seals_is_taken() -> None:
    record = open_signed_record(envelope(), OWNER.peer_id)
    assert (record.peer, record.seq, record.addrs) == (OWNER.peer_id, 7, ADDRS)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        pytest.param(envelope(OTHER, OTHER), "another peer", id="of another peer"),
        pytest.param(envelope(OTHER, OWNER), "another peer", id="signed by another peer"),
        pytest.param(envelope()[:-1] + bytes([envelope()[-1] ^ 1]), "signature", id="a wrong signature"),
        pytest.param(private_key_envelope(), "public key", id="an RSA private key"),
        pytest.param(envelope() + b"\x1a\x01x", "cut off|another", id="a second payload"),
        pytest.param(envelope()[:40], "cut off", id="cut off"),
        pytest.param(b"", "something else", id="empty"),
        pytest.param(bytes(SIGNED_RECORD_BYTES_MAX + 1), "over", id="too long"),
        pytest.param(Envelope(payload_type=b"\x03\x02").SerializeToString(), "something else", id="another type"),
    ],
)
def test_what_is_no_record_of_the_peer_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        open_signed_record(data, OWNER.peer_id)


@given(st.binary(max_size=400), st.integers(0, 200))
def test_any_bytes_are_a_record_or_a_protocol_error(data: bytes, cut: int) -> None:
    for hostile in (data, envelope()[:cut] + data):
        try:
            open_signed_record(hostile, OWNER.peer_id)
        except ProtocolError:
            pass
