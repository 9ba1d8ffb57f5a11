"""The Noise XX handshake without I/O."""

import gc
import weakref
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_static_pair
from libp2p.peer.id import ID

from dep2p.errors import LocalProtocolError, ProtocolError
from dep2p.host.noise.handshake import HANDSHAKE_BYTES_MAX, NoiseHandshake

KEYS, OTHER_KEYS = create_new_key_pair(), create_new_key_pair()
PEER, OTHER_PEER = ID.from_pubkey(KEYS.public_key), ID.from_pubkey(OTHER_KEYS.public_key)
STATIC, OTHER_STATIC = create_static_pair().private_key, create_static_pair().private_key


def initiator(expected: ID | None = OTHER_PEER) -> NoiseHandshake:
    return NoiseHandshake(KEYS, STATIC, is_initiator=True, expected_peer=expected)


def responder() -> NoiseHandshake:
    return NoiseHandshake(OTHER_KEYS, OTHER_STATIC, is_initiator=False)


def messages(one: NoiseHandshake, other: NoiseHandshake) -> list[bytes]:
    """The three messages of a handshake that is carried out."""
    first = one.start()
    second = other.receive(first)
    assert second is not None
    third = one.receive(second)
    assert third is not None
    assert other.receive(third) is None
    return [first, second, third]


def test_both_sides_learn_the_identity_and_crossed_keys() -> None:
    one, other = initiator(), responder()
    messages(one, other)
    assert one.result is not None
    assert other.result is not None
    assert (one.result.remote_peer, other.result.remote_peer) == (OTHER_PEER, PEER)
    assert one.result.remote_public_key == OTHER_KEYS.public_key
    assert one.result.send_key == other.result.receive_key != other.result.send_key == one.result.receive_key


def test_another_peer_than_the_expected_one_is_refused() -> None:
    one, other = initiator(expected=PEER), responder()
    second = other.receive(one.start())
    assert second is not None
    with pytest.raises(ProtocolError, match="as expected"):
        one.receive(second)
    assert one.result is None


@given(st.integers(0, 2), st.integers(0, 10_000), st.integers(1, 255))
def test_a_changed_byte_in_any_message_is_refused(which: int, offset: int, mask: int) -> None:
    one, other = initiator(), responder()

    def sent(number: int, message: bytes) -> bytes:
        if number != which:
            return message
        damaged = bytearray(message)
        damaged[offset % len(message)] ^= mask
        return bytes(damaged)

    with pytest.raises(ProtocolError):
        second = other.receive(sent(0, one.start()))
        assert second is not None
        third = one.receive(sent(1, second))
        assert third is not None
        other.receive(sent(2, third))
    assert other.result is None


@given(st.binary(max_size=400), st.booleans())
def test_junk_is_refused_by_either_side(junk: bytes, to_initiator: bool) -> None:
    if to_initiator:
        one = initiator()
        one.start()
        with pytest.raises(ProtocolError):
            one.receive(junk)
    else:
        one, other = initiator(), responder()
        try:
            other.receive(junk)  # 32 bytes or more are a key that somebody might have
        except ProtocolError:
            return
        with pytest.raises(ProtocolError):
            other.receive(one.start())


@pytest.mark.parametrize("which", [1, 2])
def test_every_truncation_of_a_message_is_refused(which: int) -> None:
    length = len(messages(initiator(), responder())[which])
    for size in range(0, length, 7):
        one, other = initiator(), responder()
        second = other.receive(one.start())
        assert second is not None
        with pytest.raises(ProtocolError):
            if which == 1:
                one.receive(second[:size])
            else:
                third = one.receive(second)
                assert third is not None
                other.receive(third[:size])


def test_a_message_over_the_limit_is_refused_before_it_is_looked_at() -> None:
    with pytest.raises(ProtocolError, match="is over"):
        responder().receive(bytes(HANDSHAKE_BYTES_MAX + 1))


@pytest.mark.parametrize("key", [bytes(32), b"\x01" + bytes(31)])
def test_a_key_of_low_order_is_refused(key: bytes) -> None:
    with pytest.raises(ProtocolError, match="key"):
        responder().receive(key)


def test_misuse_is_our_own_error() -> None:
    with pytest.raises(LocalProtocolError):
        responder().start()
    one, other = initiator(), responder()
    messages(one, other)
    with pytest.raises(LocalProtocolError):
        one.receive(b"more")


def test_a_finished_handshake_is_no_work_for_the_garbage_collector() -> None:
    gc.disable()
    try:
        ends: list[Any] = [initiator(), responder()]
        messages(*ends)
        states = [weakref.ref(end._protocol) for end in ends]
        ends.clear()
        assert [state() for state in states] == [None, None]
    finally:
        gc.enable()
