"""Hostile bytes to the Noise layer: only ProtocolError comes out, and the split of the bytes makes no difference."""

import random
from collections.abc import Callable, Iterator

import pytest
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_static_pair
from libp2p.peer.id import ID

from dep2p.errors import ProtocolError
from dep2p.host.noise.codec import PLAINTEXT_BYTES_MAX, NoiseOpener, NoiseSealer
from dep2p.host.noise.handshake import NoiseHandshake

pytestmark = pytest.mark.fuzz

FuzzRounds = Callable[[], Iterator[random.Random]]
KEY = bytes(32)
SCRATCH = memoryview(bytearray(PLAINTEXT_BYTES_MAX))


def damage(rng: random.Random, data: bytes) -> bytes:
    """``data`` with none to a few bytes changed, inserted or removed."""
    changed = bytearray(data)
    for _ in range(rng.choice((0, 0, 1, 1, 3))):
        at = rng.randrange(len(changed) + 1)
        action = rng.randrange(4)
        if action == 0:
            changed[at : at + 1] = rng.randbytes(1)
        elif action == 1:
            changed[at:at] = rng.randbytes(rng.randrange(1, 30))
        elif action == 2:
            del changed[at : at + rng.randrange(1, 30)]
        else:
            del changed[at:]
    return bytes(changed)


def opened(wire: bytes, steps: Iterator[int]) -> tuple[bytes, str | None]:
    opener = NoiseOpener(KEY)
    plain = bytearray()
    at = 0
    try:
        while at < len(wire):
            step = next(steps)
            opener.feed(memoryview(wire)[at : at + step], SCRATCH, plain.extend)
            at += step
    except ProtocolError as error:
        return bytes(plain), str(error)
    return bytes(plain), None


def steps_of(rng: random.Random) -> Iterator[int]:
    while True:
        yield rng.randrange(1, 200)


def ones() -> Iterator[int]:
    while True:
        yield 1


def test_transport_messages(fuzz_rounds: FuzzRounds) -> None:
    for rng in fuzz_rounds():
        sealer = NoiseSealer(KEY)
        parts = [rng.randbytes(rng.choice((0, 1, 16, 100, 700))) for _ in range(rng.randrange(1, 6))]
        wire = damage(rng, b"".join(sealer.seal(part) for part in parts))
        whole = opened(wire, iter([max(len(wire), 1)]))
        assert b"".join(parts).startswith(whole[0])
        assert opened(wire, ones()) == whole
        assert opened(wire, steps_of(rng)) == whole


def test_handshake_messages(fuzz_rounds: FuzzRounds) -> None:
    keys, other_keys = create_new_key_pair(), create_new_key_pair()
    static, other_static = create_static_pair().private_key, create_static_pair().private_key
    peer, other_peer = ID.from_pubkey(keys.public_key), ID.from_pubkey(other_keys.public_key)
    for rng in fuzz_rounds():
        one = NoiseHandshake(keys, static, is_initiator=True, expected_peer=rng.choice((None, other_peer)))
        other = NoiseHandshake(other_keys, other_static, is_initiator=False)
        changed = False

        def sent(message: bytes | None, rng: random.Random = rng) -> bytes:
            nonlocal changed
            assert message is not None
            hostile = rng.randbytes(rng.randrange(300)) if rng.random() < 0.1 else damage(rng, message)
            changed = changed or hostile != message
            return hostile

        try:
            other.receive(sent(one.receive(sent(other.receive(sent(one.start()))))))
        except ProtocolError:
            assert changed
            continue
        assert not changed
        assert one.result is not None
        assert other.result is not None
        assert (one.result.remote_peer, other.result.remote_peer) == (other_peer, peer)
