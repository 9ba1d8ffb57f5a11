"""Random and mutated bytes on the realm handshake and on member records: only protocol errors, in any split."""

import random
from collections.abc import Callable, Iterator

import pytest

from dep2p.errors import NotMemberError, OverloadedError, ProtocolError, RateLimitedError
from dep2p.identity import Identity
from dep2p.protocols.realm.handshake import (
    HandshakeBytes,
    HandshakeChannel,
    HandshakeEffect,
    HandshakeFailed,
    HandshakeInitiator,
    HandshakeResponder,
    PeerAuthenticated,
    ResponderKeys,
    SendBytes,
)
from dep2p.protocols.realm.keys import derive_keys
from dep2p.protocols.realm.member_record import LIFE_MS, MemberRecord, seal_record
from dep2p.protocols.realm.member_table import AddrsChanged, ClockObserved, LinkOpened, MemberTable, MessageReceived
from dep2p.protocols.realm.messages import (
    MEMBERS_PAYLOAD_BYTES_MAX,
    decode_members,
    encode_digest,
    encode_records,
    encode_summary,
    encode_want,
)
from dep2p.protocols.realm.own_record import OwnRecord
from dep2p.protocols.realm.record_store import RecordStore
from dep2p.protocols.wire.frame import HEADERS, FrameDecoder, FrameType, encode_error, encode_frame
from dep2p.protocols.wire.headers import HeaderKey, encode_headers
from tests.protocols.realm.records import verify_record

pytestmark = pytest.mark.fuzz

KEYS = derive_keys(bytes(range(32)))
A, B = Identity(bytes([1]) * 32), Identity(bytes([2]) * 32)
NOW_MS = 1_700_000_000_000
RECORD = MemberRecord(A.peer_id, ("/ip4/192.0.2.1/tcp/1",), 7, NOW_MS, NOW_MS + LIFE_MS, "active", ("zstd",))
ENVELOPE = seal_record(RECORD, KEYS, A.sign).envelope
INTERESTING = (0, 1, 23, 24, 25, 26, 27, 31, 0x5B, 0x7F, 0x80, 0x9B, 0x9F, 0xBB, 0xBF, 0xC0, 0xF9, 0xFB, 0xFE, 0xFF)

Side = HandshakeInitiator | HandshakeResponder


def mutated(data: bytes, rng: random.Random) -> bytes:
    """A few bytes changed, dropped, repeated or put in."""
    made = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(made) + 1)
        match rng.randrange(5):
            case 0 if at < len(made):
                made[at] = rng.choice(INTERESTING)
            case 1 if at < len(made):
                made[at] ^= 1 << rng.randrange(8)
            case 2:
                del made[at : at + rng.randint(1, 8)]
            case 3:
                made[at:at] = rng.randbytes(rng.randint(1, 8))
            case _:
                made[at:at] = made[at : at + rng.randint(1, 40)]
    return bytes(made)


def feed(side: Side, data: bytes, step: int) -> list[HandshakeEffect]:
    effects: list[HandshakeEffect] = []
    for at in range(0, len(data), step):
        effects += side.handle(HandshakeBytes(data[at : at + step]), 0.0)
    return effects


def sent(effects: list[HandshakeEffect]) -> bytes:
    return b"".join(effect.data for effect in effects if isinstance(effect, SendBytes))


def handshake(rng: random.Random) -> tuple[HandshakeInitiator, HandshakeResponder]:
    seed = rng.getrandbits(32)
    i = HandshakeInitiator(
        KEYS,
        HandshakeChannel(A.peer_id, B.peer_id, bytes(32)),
        features=["zstd"],
        rng=random.Random(seed),
        now=0.0,
        timeout_s=5.0,
    )
    r = HandshakeResponder(
        ResponderKeys((KEYS,), derive_keys(b"\xdd" * 32)),
        HandshakeChannel(B.peer_id, A.peer_id, bytes(32)),
        features=[],
        rng=random.Random(~seed),
        now=0.0,
        timeout_s=5.0,
    )
    return i, r


def hostile(rng: random.Random) -> bytes:
    """Bytes that look like a message of a handshake."""
    match rng.randrange(4):
        case 0:
            return rng.randbytes(rng.randint(1, 200))
        case 1:
            headers = encode_headers({HeaderKey.FEATURES: ["zstd"], 99: rng.randbytes(rng.randint(0, 9))})
            body = mutated(headers + rng.randbytes(rng.choice((0, 32, 64))), rng)
            kind = rng.choice((FrameType.REQUEST, FrameType.RESPONSE, FrameType.ERROR))
            return encode_frame(kind, body, flags=HEADERS, req_id=rng.randint(0, 3))
        case 2:
            return encode_frame(rng.randrange(256), rng.randbytes(rng.choice((0, 32, 64))), req_id=rng.randint(0, 3))
        case _:
            return mutated(encode_error(rng.randint(0, 12), "x" * rng.randint(0, 40)), rng)


def test_fuzz_handshake(fuzz_rounds: Callable[[], Iterator[random.Random]]) -> None:
    for rng in fuzz_rounds():
        state = rng.getstate()
        verdicts: list[object] = []
        for step in (10**6, 1):
            rng.setstate(state)
            i, r = handshake(rng)
            data = sent(i.start())
            at = rng.randrange(4)
            effects: list[HandshakeEffect] = []
            for number in range(4):
                if number == at:
                    data = mutated(data, rng) if rng.random() < 0.5 else hostile(rng)
                receiver: Side = r if number % 2 == 0 else i
                effects = feed(receiver, data, step)
                data = sent(effects)
                for effect in effects:
                    if isinstance(effect, HandshakeFailed):
                        kinds = ProtocolError | NotMemberError | RateLimitedError | OverloadedError
                        assert isinstance(effect.error, kinds)
            verdicts.append([effect for effect in effects if isinstance(effect, PeerAuthenticated)])
        assert verdicts[0] == verdicts[1], "the split of the bytes changed the verdict"


def test_fuzz_member_record(fuzz_rounds: Callable[[], Iterator[random.Random]]) -> None:
    for rng in fuzz_rounds():
        data = mutated(ENVELOPE, rng) if rng.random() < 0.7 else rng.randbytes(rng.randint(0, 300))
        try:
            assert verify_record(data, KEYS, NOW_MS).record == RECORD and data == ENVELOPE
        except ProtocolError:
            continue


def test_fuzz_member_messages(fuzz_rounds: Callable[[], Iterator[random.Random]]) -> None:
    own, store = OwnRecord(B.peer_id, KEYS, B.sign), RecordStore(B.peer_id, KEYS, records_max=8)
    table = MemberTable(own, store, members_max=8, rng=random.Random(1))
    table.handle(ClockObserved(NOW_MS / 1000), 0.0)
    table.handle(AddrsChanged(()), 0.0)
    table.handle(LinkOpened(1, A.peer_id), 0.0)
    good = [
        *encode_records([ENVELOPE, ENVELOPE]),
        *encode_digest([(A.peer_id, 9)]),
        *encode_want([A.peer_id, B.peer_id]),
        encode_summary(bytes(32)),
    ]
    for rng in fuzz_rounds():
        payload = mutated(rng.choice(good)[12:], rng)
        whole = encode_frame(FrameType.GOSSIP, payload) if rng.random() < 0.8 else mutated(rng.choice(good), rng)
        decoder = FrameDecoder(MEMBERS_PAYLOAD_BYTES_MAX)
        step = rng.choice((1, 7, len(whole)))
        for at in range(0, len(whole), step):
            for frame in decoder.feed(whole[at : at + step]):
                try:
                    table.handle(MessageReceived(1, decode_members(frame)), rng.random() * 100)
                except ProtocolError:
                    continue
            if decoder.error is not None:
                break
        assert len(table.members()) <= 8
