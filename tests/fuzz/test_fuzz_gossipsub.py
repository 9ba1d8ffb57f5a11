"""Hostile bytes into both pubsub decoders, whole and in pieces, and hostile events into the router."""

import random
from collections.abc import Callable, Iterator

import pytest

from dep2p.encoding.length_prefixed import LengthPrefixedDecoder, encode_length_prefixed
from dep2p.errors import (
    MessageTooLargeError,
    NoPeersSubscribedError,
    ProtocolError,
    RateLimitedError,
    TooManyTopicsError,
)
from dep2p.gossipsub.codecs.interface import Codec
from dep2p.gossipsub.codecs.libp2p import Libp2pCodec
from dep2p.gossipsub.codecs.realm import RealmCodec
from dep2p.gossipsub.headers import message_headers
from dep2p.gossipsub.messages.message_id import MessageIds
from dep2p.gossipsub.params import GossipParams
from dep2p.gossipsub.rpc import IHave, PeerInfo, Prune, Rpc, RpcMessage, SubscriptionChange
from dep2p.gossipsub.scoring.params import standard_scores
from dep2p.gossipsub.signing.policy import SigningPolicy, policy_violation
from dep2p.identity import Identity
from dep2p.types import peer_id_bytes
from tests.gossipsub.hostile import some_event
from tests.gossipsub.network import make_router, merge_rpcs
from tests.gossipsub.test_state_machine import SMALL, check, check_effects

pytestmark = pytest.mark.fuzz

FuzzRounds = Callable[[], Iterator[random.Random]]

IDENTITY = Identity(bytes(range(32)))
AUTHOR = peer_id_bytes(IDENTITY.peer_id)
PARAMS = GossipParams()
REALM = {
    "realm": RealmCodec(AUTHOR, IDENTITY.sign, bytes(32), PARAMS),
    "realm, batches": RealmCodec(AUTHOR, IDENTITY.sign, bytes(32), PARAMS, sign_batch_max=16),
}
PUBLIC = {
    profile: Libp2pCodec(AUTHOR, IDENTITY.sign, MessageIds(profile), PARAMS)
    for profile in ("go", "js", "rust", "sha256")
}


def message(codec: Codec, topic: str, rng: random.Random) -> RpcMessage:
    data, seqno = rng.randbytes(rng.randrange(200)), rng.randbytes(8)
    if isinstance(codec, RealmCodec) and rng.random() < 0.5:
        values = ["x" * rng.randrange(9), rng.randbytes(rng.randrange(9)), -rng.getrandbits(60), True, ["a", 1]]
        headers = {f"h{number}": rng.choice(values) for number in range(rng.randrange(1, 6))}
        return codec.compose_with_headers(topic, data, seqno, message_headers(headers))
    return codec.compose(topic, data, seqno)


def honest(codec: Codec, rng: random.Random) -> Rpc:
    topic = rng.choice(["t", "grüße", "x" * 300])
    ids = tuple(rng.randbytes(rng.choice([1, 16, 46])) for _ in range(rng.randrange(5)))
    return Rpc(
        tuple(message(codec, topic, rng) for _ in range(rng.randrange(3))),
        (SubscriptionChange(topic, rng.random() < 0.5),) * rng.randrange(2),
        (IHave(topic, ids),) * rng.randrange(2),
        ids,
        (topic,) * rng.randrange(2),
        (Prune(topic, rng.getrandbits(rng.choice([6, 64])), (PeerInfo(rng.randbytes(38), rng.randbytes(9)),)),)
        * rng.randrange(2),
        ids,
    )


def damage(payload: bytes, rng: random.Random) -> bytes:
    changed = bytearray(payload)
    for _ in range(rng.randrange(1, 6)):
        if not changed:
            break
        position = rng.randrange(len(changed))
        match rng.randrange(5):
            case 0:
                changed[position] ^= 1 << rng.randrange(8)
            case 1:
                changed[position] = rng.choice([0x00, 0x7F, 0x80, 0xFF, 0x9B, 0xBB, 0x5B])
            case 2:
                del changed[position : position + rng.randrange(1, 20)]
            case 3:
                changed[position:position] = rng.randbytes(rng.randrange(1, 12))
            case _:
                changed[position:position] = changed[: rng.randrange(1, 40)]
    return bytes(changed)


def attempt(codec: Codec, payload: bytes) -> None:
    """Read, judge and write on: nothing but a protocol error may come out."""
    try:
        rpc = codec.decode(payload)
    except ProtocolError:
        return
    for message in rpc.messages:
        for policy in SigningPolicy:
            policy_violation(policy, message)
        codec.authenticate(message)
        assert len(message.data) <= PARAMS.message_bytes_max
    again = [codec.decode(part) for part in codec.encode(rpc)]
    assert merge_rpcs(again or [Rpc()]).messages == rpc.messages


@pytest.mark.parametrize("name", [*REALM, *PUBLIC])
def test_damaged_rpcs_give_protocol_errors_only(name: str, fuzz_rounds: FuzzRounds) -> None:
    codec: Codec = REALM[name] if name in REALM else PUBLIC[name]
    for rng in fuzz_rounds():
        for payload in codec.encode(honest(codec, rng)):
            attempt(codec, damage(payload, rng))
        attempt(codec, rng.randbytes(rng.randrange(80)))


def test_streams_in_any_pieces_are_bounded_and_never_raise(fuzz_rounds: FuzzRounds) -> None:
    codec = PUBLIC["go"]
    for rng in fuzz_rounds():
        stream = b"".join(
            encode_length_prefixed(payload) for _ in range(3) for payload in codec.encode(honest(codec, rng))
        )
        if rng.random() < 0.7:
            stream = damage(stream, rng)
        decoder = LengthPrefixedDecoder(5_000)
        step = rng.choice([1, 7, 1_000])
        whole = LengthPrefixedDecoder(5_000)
        expected = whole.feed(stream)
        found: list[bytes] = []
        for start in range(0, len(stream), step):
            found += decoder.feed(stream[start : start + step])
            assert decoder.buffered_bytes <= 5_010
            if decoder.error is not None:
                break
        assert found == expected
        assert (decoder.error is None) == (whole.error is None)
        for payload in found:
            attempt(codec, payload)


def test_hostile_events_leave_the_router_whole(fuzz_rounds: FuzzRounds) -> None:
    for rng in fuzz_rounds():
        external, patterns = rng.random() < 0.3, rng.random() < 0.7
        router = make_router(params=SMALL, scores=standard_scores(), is_external=external, patterns=patterns)
        now = 0.0
        for _ in range(300):
            now += rng.choice([0.0, 0.0, 0.001, 0.3])
            try:
                effects = router.handle(some_event(rng), now)
            except (MessageTooLargeError, NoPeersSubscribedError, RateLimitedError, TooManyTopicsError, ValueError):
                continue
            check_effects(router, effects)
            deadline = router.next_deadline()
            if deadline is not None and deadline <= now:
                check_effects(router, router.on_deadline(now))
        check(router)
