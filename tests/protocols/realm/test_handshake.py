"""The realm handshake: both prove, nothing else counts, and nothing that somebody else said can be used."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dep2p.errors import (
    ErrorCode,
    LocalProtocolError,
    NotMemberError,
    OverloadedError,
    ProtocolError,
    RateLimitedError,
    RequestTimeoutError,
    WireError,
)
from dep2p.identity import Identity
from dep2p.protocols.realm.handshake import (
    REALMS_PADDING,
    HandshakeBytes,
    HandshakeChannel,
    HandshakeEffect,
    HandshakeFailed,
    HandshakeInitiator,
    HandshakeResponder,
    HandshakeStreamEnded,
    PeerAuthenticated,
    ResponderKeys,
    SendBytes,
    check_features,
)
from dep2p.protocols.realm.keys import ProofContext, RealmKeys, derive_keys, handshake_proof, hello_tag
from dep2p.protocols.wire.frame import FrameDecoder, FrameType, encode_error, encode_frame
from dep2p.protocols.wire.headers import HeaderKey, encode_headers
from dep2p.types import PeerId, peer_id_bytes

KEYS = derive_keys(bytes(range(32)))
OTHER = derive_keys(bytes(32))
DECOY = derive_keys(b"\xdd" * 32)
A, B, M = (Identity(bytes([n]) * 32).peer_id for n in (1, 2, 3))
CHANNEL = bytes(range(100, 132))
"""The channel binding of the connection."""

Side = HandshakeInitiator | HandshakeResponder


def initiator(own: PeerId = A, peer: PeerId = B, keys: RealmKeys = KEYS, seed: int = 1) -> HandshakeInitiator:
    return HandshakeInitiator(
        keys, HandshakeChannel(own, peer, CHANNEL), features=["zstd"], rng=Random(seed), now=0.0, timeout_s=5.0
    )


def responder(
    own: PeerId = B, peer: PeerId = A, keys: RealmKeys = KEYS, seed: int = 2, channel: bytes = CHANNEL
) -> HandshakeResponder:
    return HandshakeResponder(
        ResponderKeys((keys,), DECOY),
        HandshakeChannel(own, peer, channel),
        features=["x"],
        rng=Random(seed),
        now=0.0,
        timeout_s=5.0,
    )


def sent(effects: list[HandshakeEffect]) -> bytes:
    return b"".join(effect.data for effect in effects if isinstance(effect, SendBytes))


def feed(side: Side, data: bytes, *, step: int = 0, now: float = 0.0) -> list[HandshakeEffect]:
    effects: list[HandshakeEffect] = []
    for at in range(0, len(data), step or max(1, len(data))):
        effects += side.handle(HandshakeBytes(data[at : at + (step or len(data))]), now)
    return effects


def failure(effects: list[HandshakeEffect]) -> WireError:
    last = effects[-1]
    assert isinstance(last, HandshakeFailed)
    assert not any(isinstance(effect, PeerAuthenticated) for effect in effects)
    return last.error


@pytest.mark.parametrize("step", [0, 1, 7])
def test_both_sides_prove_themselves_and_report_their_features(step: int) -> None:
    i, r = initiator(), responder()
    first = feed(r, sent(i.start()), step=step)
    second = feed(i, sent(first), step=step)
    third = feed(r, sent(second), step=step)
    fourth = feed(i, sent(third), step=step)
    assert third[-1] == PeerAuthenticated(KEYS.realm_id, ("zstd",))
    assert fourth == [PeerAuthenticated(KEYS.realm_id, ("x",))]
    assert i.is_over and r.is_over and i.next_deadline() is None


def test_the_frames_on_the_wire_are_those_of_the_specification() -> None:
    i = HandshakeInitiator(KEYS, HandshakeChannel(A, B, CHANNEL), features=[], rng=Random(1), now=0.0, timeout_s=5.0)
    keys = ResponderKeys((OTHER, KEYS), DECOY)
    r = HandshakeResponder(keys, HandshakeChannel(B, A, CHANNEL), features=[], rng=Random(2), now=0.0, timeout_s=5.0)
    nonce_i, nonce_r = Random(1).randbytes(32), Random(2).randbytes(32)

    def proof(side: str) -> bytes:
        return handshake_proof(
            KEYS.auth_key,
            "I" if side == "I" else "R",
            ProofContext(peer_id_bytes(A), peer_id_bytes(B), KEYS.realm_id, CHANNEL, nonce_i, nonce_r),
        )

    tag = hello_tag(KEYS.hello_key, peer_id_bytes(A), peer_id_bytes(B), CHANNEL, nonce_i)
    request = sent(i.start())
    assert request == encode_frame(FrameType.REQUEST, nonce_i + tag, req_id=1)
    response = sent(feed(r, request))
    assert response == encode_frame(FrameType.RESPONSE, nonce_r + proof("R"), req_id=1)
    answer = sent(feed(i, response))
    assert answer == encode_frame(FrameType.REQUEST, proof("I"), req_id=2)
    assert sent(feed(r, answer)) == encode_frame(FrameType.RESPONSE, b"", req_id=2)


def test_another_secret_is_noticed_by_the_initiator_and_reported() -> None:
    i, r = initiator(), responder(keys=OTHER)
    effects = feed(i, sent(feed(r, sent(i.start()))))
    assert isinstance(failure(effects), NotMemberError)
    assert FrameDecoder(4096).feed(sent(effects))[0].payload[:4] == ErrorCode.NOT_MEMBER.to_bytes(4, "big")
    assert isinstance(failure(feed(r, sent(effects))), NotMemberError)


def test_a_responder_does_not_believe_a_wrong_proof() -> None:
    r = responder()
    feed(r, sent(initiator().start()))
    effects = feed(r, encode_frame(FrameType.REQUEST, bytes(32), req_id=2))
    assert isinstance(failure(effects), NotMemberError)
    assert effects[-1] == HandshakeFailed(effects[-1].error, by_peer=True)  # type: ignore[union-attr]  # pyright: ignore


def test_a_proof_is_worth_nothing_on_another_channel() -> None:
    """A transport that mistakes who stands in the middle for the peer changes nothing: the channels differ."""
    a, b = initiator(), responder(channel=bytes(32))
    at_a = feed(a, sent(feed(b, sent(a.start()))))
    assert isinstance(failure(at_a), NotMemberError)
    assert isinstance(failure(feed(b, sent(at_a))), NotMemberError)


@pytest.mark.parametrize("length", [0, 31, 33])
def test_a_channel_binding_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match="channel binding"):
        responder(channel=bytes(length))


def test_a_proof_cannot_be_relayed_by_a_node_in_the_middle() -> None:
    """M answers A's dial and dials B, and passes every byte on: both notice, since each names M in its proofs."""
    a = initiator(A, M)
    b = responder(B, M)
    from_b = feed(b, sent(a.start()))
    at_a = feed(a, sent(from_b))
    assert isinstance(failure(at_a), NotMemberError)
    # Even a proof that A made for M is nothing to B.
    nonce_a, nonce_b = Random(1).randbytes(32), Random(2).randbytes(32)
    for_m = handshake_proof(
        KEYS.auth_key,
        "I",
        ProofContext(peer_id_bytes(A), peer_id_bytes(M), KEYS.realm_id, CHANNEL, nonce_a, nonce_b),
    )
    assert isinstance(failure(feed(b, encode_frame(FrameType.REQUEST, for_m, req_id=2))), NotMemberError)


def test_a_reflected_nonce_or_proof_is_worth_nothing() -> None:
    """M, without the secret, makes A prove itself in the other role and sends that back."""
    a_dials = initiator(A, M, seed=1)
    request = sent(a_dials.start())
    a_answers = responder(A, M, seed=2)
    answer = feed(a_answers, request)
    assert isinstance(failure(feed(a_dials, sent(answer))), NotMemberError)
    again = initiator(A, M, seed=1)
    nonce = Random(1).randbytes(32)
    again.start()
    echoed = encode_frame(FrameType.RESPONSE, nonce + bytes(32), req_id=1)
    assert isinstance(failure(feed(again, echoed)), ProtocolError)


def test_an_old_transcript_cannot_be_replayed() -> None:
    i, r = initiator(), responder()
    request = sent(i.start())
    response = sent(feed(r, request))
    proof = sent(feed(i, response))
    assert isinstance(failure(feed(_started(seed=9), response)), NotMemberError)
    fresh = responder(seed=9)
    feed(fresh, request)
    assert isinstance(failure(feed(fresh, proof)), NotMemberError)


def _started(seed: int) -> HandshakeInitiator:
    side = initiator(seed=seed)
    side.start()
    return side


def test_it_ends_at_its_deadline_and_not_before() -> None:
    for side in (initiator(), responder()):
        assert side.next_deadline() == 5.0
        assert side.on_deadline(4.9) == []
        assert isinstance(failure(side.on_deadline(5.0)), RequestTimeoutError)
        assert side.on_deadline(6.0) == []
    late = responder()
    assert isinstance(failure(feed(late, sent(initiator().start()), now=5.0)), RequestTimeoutError)


def test_an_early_end_of_the_stream_fails_it() -> None:
    side = responder()
    assert isinstance(failure(side.handle(HandshakeStreamEnded(), 0.0)), ProtocolError)
    assert side.handle(HandshakeStreamEnded(), 0.0) == []


def test_what_comes_after_the_verdict_is_ignored() -> None:
    i, r = initiator(), responder()
    proof = sent(feed(i, sent(feed(r, sent(i.start())))))
    effects = feed(r, proof + b"\xff" * 100)
    assert isinstance(effects[-1], PeerAuthenticated)
    assert feed(r, b"\xff" * 100) == []


@pytest.mark.parametrize(
    "data",
    [
        encode_frame(FrameType.REQUEST, bytes(63), req_id=1),
        encode_frame(FrameType.REQUEST, bytes(65), req_id=1),
        encode_frame(FrameType.REQUEST, b"", req_id=1),
        encode_frame(FrameType.REQUEST, bytes(64), req_id=2),
        encode_frame(FrameType.REQUEST, bytes(64), req_id=0),
        encode_frame(FrameType.GOSSIP, bytes(32)),
        encode_frame(FrameType.CANCEL, b"", req_id=1),
        encode_frame(FrameType.REQUEST, bytes(64), req_id=1, flags=0x0001),
        encode_frame(FrameType.REQUEST, bytes(64), req_id=1, flags=0x0004),
        encode_frame(FrameType.REQUEST, bytes(2049), req_id=1),
        encode_frame(FrameType.REQUEST, b"\xff" + bytes(64), req_id=1, flags=0x0008),
        encode_frame(FrameType.REQUEST, b"\x01" + bytes(64), req_id=1, flags=0x0008),
        encode_frame(FrameType.REQUEST, encode_headers({HeaderKey.FEATURES: 1}) + bytes(64), req_id=1, flags=0x0008),
        encode_frame(FrameType.REQUEST, encode_headers({HeaderKey.FEATURES: [1]}) + bytes(64), req_id=1, flags=0x0008),
        encode_frame(
            FrameType.REQUEST, encode_headers({HeaderKey.FEATURES: ["a" * 33]}) + bytes(64), req_id=1, flags=8
        ),
        encode_frame(
            FrameType.REQUEST, encode_headers({HeaderKey.FEATURES: ["a"] * 17}) + bytes(64), req_id=1, flags=8
        ),
        encode_frame(FrameType.REQUEST, encode_headers({HeaderKey.NAME: "a" * 1100}) + bytes(64), req_id=1, flags=8),
        encode_frame(FrameType.ERROR, b"\x00"),
        b"\x02" + bytes(11),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_hostile_bytes_are_a_protocol_error_whole_and_byte_by_byte(data: bytes) -> None:
    for side in (responder, lambda: _started(1)):
        for step in (0, 1):
            assert isinstance(failure(feed(side(), data, step=step)), ProtocolError)


@pytest.mark.parametrize("size", [0, 32, 63, 65])
def test_an_initiator_takes_only_64_bytes(size: int) -> None:
    data = encode_frame(FrameType.RESPONSE, bytes(size), req_id=1)
    assert isinstance(failure(feed(_started(1), data)), ProtocolError)


def test_an_end_with_bytes_in_it_is_refused() -> None:
    i, r = initiator(), responder()
    feed(i, sent(feed(r, sent(i.start()))))
    assert isinstance(failure(feed(i, encode_frame(FrameType.RESPONSE, b"x", req_id=2))), ProtocolError)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (ErrorCode.NOT_MEMBER, NotMemberError),
        (ErrorCode.RATE_LIMITED, RateLimitedError),
        (ErrorCode.OVERLOADED, OverloadedError),
        (ErrorCode.HANDLER_FAILED, ProtocolError),
        (4_000_000_000, ProtocolError),
    ],
)
def test_the_peers_error_ends_it(code: int, kind: type[WireError]) -> None:
    assert type(failure(feed(_started(1), encode_error(code, "no")))) is kind


def test_misuse_by_our_own_side_is_reported() -> None:
    with pytest.raises(ValueError, match="itself"):
        initiator(A, A)
    with pytest.raises(LocalProtocolError):
        _started(1).start()
    for features in (["a"] * 17, [""], ["a" * 33], ["ä"], ["\n"]):
        with pytest.raises(ValueError, match="feature"):
            check_features(features)


@given(st.integers(0, 2), st.integers(0, 63), st.integers(1, 255))
def test_one_flipped_bit_in_a_nonce_or_proof_verifies_no_one(message: int, position: int, change: int) -> None:
    i, r = initiator(), responder()
    data = sent(i.start())
    for number in range(3):
        if number == message:
            # Nonces and proofs are at the end: 32 bytes, or 64 in the response.
            at = len(data) - 1 - position % (64 if number == 1 else 32)
            data = data[:at] + bytes([data[at] ^ change]) + data[at + 1 :]
        effects = feed(r if number % 2 == 0 else i, data)
        assert number < message or not any(isinstance(effect, PeerAuthenticated) for effect in effects)
        data = sent(effects)
    assert not (message < 2 and any(isinstance(effect, PeerAuthenticated) for effect in feed(i, data)))


@given(st.lists(st.binary(max_size=200), max_size=6))
def test_random_bytes_only_ever_fail_it(chunks: list[bytes]) -> None:
    for side in (responder(), _started(1)):
        for chunk in chunks:
            for effect in side.handle(HandshakeBytes(chunk), 0.0):
                assert not isinstance(effect, PeerAuthenticated)


# The handshake is blinded


def transcript(keys: RealmKeys, known: tuple[RealmKeys, ...]) -> tuple[list[bytes], list[HandshakeEffect]]:
    """The messages of an initiator of one realm and a responder of others, and what comes of it."""
    i = HandshakeInitiator(keys, HandshakeChannel(A, B, CHANNEL), features=["x"], rng=Random(1), now=0.0, timeout_s=5.0)
    r = HandshakeResponder(
        ResponderKeys(known, DECOY),
        HandshakeChannel(B, A, CHANNEL),
        features=["x"],
        rng=Random(2),
        now=0.0,
        timeout_s=5.0,
    )
    first = sent(i.start())
    second = sent(feed(r, first))
    third = feed(i, second)
    return [first, second, sent(third)], feed(r, sent(third))


def realms(count: int) -> tuple[RealmKeys, ...]:
    return tuple(derive_keys(number.to_bytes(32, "big")) for number in range(1, count + 1))


@pytest.mark.parametrize("count", [1, 2, 16, 17])
def test_a_responder_recognises_each_of_its_realms_and_no_other(count: int) -> None:
    known = realms(count)
    for keys in known:
        assert transcript(keys, known)[1][-1] == PeerAuthenticated(keys.realm_id, ("x",))
    assert isinstance(transcript(KEYS, known)[1][-1], HandshakeFailed)


def test_no_message_holds_anything_of_the_realm() -> None:
    messages, _ = transcript(KEYS, (KEYS,))
    secrets = [KEYS.auth_key, KEYS.hello_key, KEYS.member_key]
    for form in (KEYS.realm_id.encode(), bytes.fromhex(KEYS.realm_id), *secrets):
        assert not any(form in message for message in messages)


@pytest.mark.parametrize("known", [(), (KEYS,), (OTHER,), realms(16), realms(40)], ids=len)
def test_a_stranger_sees_the_same_steps_and_sizes_whatever_realms_a_node_is_in(known: tuple[RealmKeys, ...]) -> None:
    r = HandshakeResponder(
        ResponderKeys(known, DECOY),
        HandshakeChannel(B, A, CHANNEL),
        features=["x"],
        rng=Random(2),
        now=0.0,
        timeout_s=5.0,
    )
    first = feed(r, encode_frame(FrameType.REQUEST, Random(7).randbytes(64), req_id=1))
    assert [len(sent(first)), first[1:]] == [len(sent(feed(responder(), sent(initiator().start())))), []]
    second = feed(r, encode_frame(FrameType.REQUEST, Random(8).randbytes(32), req_id=2))
    text = "the peer proved membership of none of this node's realms"
    assert sent(second) == encode_error(ErrorCode.NOT_MEMBER, text) and failure(second)


def test_a_proof_of_a_realm_goes_only_to_a_peer_that_named_it() -> None:
    """A stranger that dials a node gets nothing against which it could guess a passphrase."""
    _, response, _ = transcript(OTHER, (KEYS,))[0]
    nonce_i, nonce_r = Random(1).randbytes(32), response[-64:-32]
    for keys in (KEYS, OTHER):
        context = ProofContext(peer_id_bytes(A), peer_id_bytes(B), keys.realm_id, CHANNEL, nonce_i, nonce_r)
        assert response[-32:] != handshake_proof(keys.auth_key, "R", context)


def test_a_tag_is_worth_nothing_on_another_channel_or_for_another_peer() -> None:
    first = transcript(KEYS, (KEYS,))[0][0]
    for r in (responder(channel=bytes(32)), responder(M, A), responder(B, M)):
        effects = feed(r, first)
        assert len(sent(effects)) > 64
        assert isinstance(failure(feed(r, encode_frame(FrameType.REQUEST, bytes(32), req_id=2))), NotMemberError)
        assert r._keys is DECOY  # pyright: ignore[reportPrivateUsage]


def test_the_work_for_a_stranger_is_bounded_and_does_not_count_realms(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[bytes] = []

    def counted(*args: bytes) -> bytes:
        computed.append(args[0])
        return hello_tag(*args)

    monkeypatch.setattr("dep2p.protocols.realm.handshake.hello_tag", counted)
    for known in ((), realms(1), realms(15), realms(16)):
        computed.clear()
        r = HandshakeResponder(
            ResponderKeys(known, DECOY),
            HandshakeChannel(B, A, CHANNEL),
            features=[],
            rng=Random(2),
            now=0.0,
            timeout_s=5.0,
        )
        feed(r, encode_frame(FrameType.REQUEST, bytes(64), req_id=1))
        assert len(computed) == REALMS_PADDING
