"""The vectors in docs/spec/realm.md are what this implementation says."""

import re
from dataclasses import replace
from pathlib import Path

import cbor2

from dep2p.identity import Identity
from dep2p.protocols.realm.handshake import (
    HandshakeBytes,
    HandshakeChannel,
    HandshakeInitiator,
    HandshakeResponder,
    PeerAuthenticated,
    ResponderKeys,
    SendBytes,
)
from dep2p.protocols.realm.keys import ProofContext, derive_keys, handshake_proof, hello_tag, stretch_passphrase
from dep2p.protocols.realm.member_record import LIFE_MS, MemberRecord, seal_record
from dep2p.protocols.realm.messages import encode_digest, encode_summary, encode_want
from dep2p.protocols.realm.record_store import Applied, RecordStore
from dep2p.protocols.realm.statement import MemberStatement, ServiceOffer, TopicGroup
from dep2p.realm.credentials import Realm

SPEC = Path(__file__).resolve().parents[3] / "docs" / "spec" / "realm.md"
KEYS = derive_keys(bytes(range(32)))
CHANNEL = b"\x33" * 32
A, B = Identity(bytes([1]) * 32), Identity(bytes([2]) * 32)
NOW_MS = 1_700_000_000_000


class SameByte:
    """A source that repeats one byte."""

    def __init__(self, byte: int) -> None:
        self._byte = byte

    def random(self) -> float:
        return 0.0

    def randbytes(self, n: int, /) -> bytes:
        return bytes([self._byte]) * n


def test_every_vector_of_the_specification_is_ours() -> None:
    blocks = re.findall(r"```\n(.*?)```", SPEC.read_text("utf-8"), re.DOTALL)
    # Long values are broken into lines; a label is in front of each first line.
    values = [re.sub(r"\s+", "", re.sub(r"(?m)^(\S+( → \S)?) {2,}", "", block)) for block in blocks]
    record = MemberRecord(A.peer_id, ("/ip4/192.0.2.1/tcp/4001",), 7, NOW_MS, NOW_MS + LIFE_MS, "active", ("zstd",))
    sealed = seal_record(record, KEYS, A.sign)
    store = RecordStore(B.peer_id, KEYS, records_max=1)
    assert isinstance(store.offer(sealed.envelope, NOW_MS, 0.0), Applied)
    context = ProofContext(b"initiator-peer", b"responder-peer", KEYS.realm_id, CHANNEL, b"\x11" * 32, b"\x22" * 32)
    address = f"/ip4/192.0.2.1/tcp/4001/p2p/{A.peer_id}"
    body, signature, mac = cbor2.loads(sealed.envelope)
    statement = MemberStatement(
        {"app": "mailer", "load": "0.5"},
        (ServiceOffer("resize", "workers", "1.2"),),
        (TopicGroup("jobs", "workers"),),
    )
    saying = b"".join(cbor2.loads(seal_record(replace(record, statement=statement), KEYS, A.sign).envelope))
    ours = [
        saying.hex(),
        KEYS.realm_id + KEYS.auth_key.hex() + KEYS.member_key.hex() + KEYS.hello_key.hex(),
        stretch_passphrase("correct horse battery staple", "team").hex(),
        hello_tag(KEYS.hello_key, b"initiator-peer", b"responder-peer", CHANNEL, b"\x11" * 32).hex()
        + "".join(handshake_proof(KEYS.auth_key, side, context).hex() for side in ("I", "R")),
        _handshake().hex(),
        body.hex() + signature.hex() + mac.hex() + sealed.envelope.hex(),
        (encode_digest([(A.peer_id, 7)])[0] + encode_want([A.peer_id])[0] + encode_summary(store.summary())).hex(),
        Realm.from_psk(bytes(range(32)), "team").invite([address]),
    ]
    for value in ours:
        assert value in values
    # The others are diagrams.
    assert len([value for value in values if re.fullmatch(r"[0-9a-f]{64,}|dep2p-invite-v1:\S+", value)]) == len(ours)


def _handshake() -> bytes:
    features = ["zstd"]
    i = HandshakeInitiator(
        KEYS,
        HandshakeChannel(A.peer_id, B.peer_id, CHANNEL),
        features=features,
        rng=SameByte(0x11),
        now=0.0,
        timeout_s=5.0,
    )
    r = HandshakeResponder(
        ResponderKeys((KEYS,), derive_keys(bytes(32))),
        HandshakeChannel(B.peer_id, A.peer_id, CHANNEL),
        features=features,
        rng=SameByte(0x22),
        now=0.0,
        timeout_s=5.0,
    )
    effects = i.start()
    transcript = b""
    for side in (r, i, r, i):
        data = b"".join(effect.data for effect in effects if isinstance(effect, SendBytes))
        transcript += data
        effects = side.handle(HandshakeBytes(data), 0.0)
    assert effects == [PeerAuthenticated(KEYS.realm_id, ("zstd",))]
    return transcript
