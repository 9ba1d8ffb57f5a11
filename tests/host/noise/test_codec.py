"""Noise messages without I/O."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dep2p.errors import ProtocolError
from dep2p.host.noise.codec import NONCE_MAX, PLAINTEXT_BYTES_MAX, NoiseOpener, NoiseSealer

KEY = bytes(range(32))


def open_all(wire: bytes, step: int, opener: NoiseOpener | None = None) -> tuple[bytes, str]:
    """Feed ``wire`` to an opener, ``step`` bytes at a time. Return the plaintext, and the error that ended it."""
    opener = opener or NoiseOpener(KEY)
    scratch = memoryview(bytearray(2 * PLAINTEXT_BYTES_MAX))
    plain = bytearray()
    view = memoryview(wire)
    try:
        for at in range(0, len(wire), step):
            opener.feed(view[at : at + step], scratch, plain.extend)
    except ProtocolError as error:
        return bytes(plain), str(error)
    return bytes(plain), ""


@given(st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=8), st.integers(1, 400))
def test_any_split_gives_the_same_plaintext(parts: list[bytes], step: int) -> None:
    sealer = NoiseSealer(KEY)
    wire = b"".join(sealer.seal(part) for part in parts)
    assert open_all(wire, step) == (b"".join(parts), "")


@given(st.lists(st.binary(min_size=1, max_size=60), min_size=2, max_size=5), st.data())
def test_a_damaged_message_ends_it_the_same_way_for_any_split(parts: list[bytes], data: st.DataObject) -> None:
    sealer = NoiseSealer(KEY)
    sealed = [sealer.seal(part) for part in parts]
    hit = data.draw(st.integers(0, len(sealed) - 1))
    offset = data.draw(st.integers(2, len(sealed[hit]) - 1))  # not in the length
    damaged = bytearray(sealed[hit])
    damaged[offset] ^= data.draw(st.integers(1, 255))
    wire = b"".join((*sealed[:hit], damaged, *sealed[hit + 1 :]))
    whole = open_all(wire, len(wire))
    assert whole == (b"".join(parts[:hit]), "a Noise message is forged or damaged")
    assert open_all(wire, 1) == whole


def test_more_plaintext_than_a_message_holds_is_cut() -> None:
    data = bytes(200_000)
    wire = NoiseSealer(KEY).seal(data)
    assert len(wire) == len(data) + 4 * 18
    assert open_all(wire, 70_000) == (data, "")
    assert open_all(wire, len(wire)) == (data, "")


def test_seal_into_gives_the_same_bytes_as_seal() -> None:
    out = memoryview(bytearray(65_537))
    one, other = NoiseSealer(KEY), NoiseSealer(KEY)
    for data in (b"a", b"bc" * 700, bytes(PLAINTEXT_BYTES_MAX)):
        size = one.seal_into(data, out)
        assert bytes(out[:size]) == other.seal(data)


@pytest.mark.parametrize("length", [0, 1, 15])
@pytest.mark.parametrize("step", [1, 100])
def test_a_message_shorter_than_its_tag_is_refused(length: int, step: int) -> None:
    wire = NoiseSealer(KEY).seal(b"before") + length.to_bytes(2, "big") + bytes(length)
    plain, error = open_all(wire, step)
    assert plain == b"before"
    assert "shorter than its tag" in error


def test_an_empty_message_carries_nothing_and_uses_a_nonce() -> None:
    sealer = NoiseSealer(KEY)
    out = memoryview(bytearray(100))
    size = sealer.seal_into(b"", out)
    opener = NoiseOpener(KEY)
    assert open_all(bytes(out[:size]) + sealer.seal(b"next"), 5, opener) == (b"next", "")
    assert opener.nonce == 2
    assert opener.is_between_messages


def test_a_replayed_message_is_refused() -> None:
    wire = NoiseSealer(KEY).seal(b"pay 1")
    assert open_all(wire + wire, len(wire)) == (b"pay 1", "a Noise message is forged or damaged")


def test_used_up_nonces_end_both_directions() -> None:
    sealer, opener = NoiseSealer(KEY), NoiseOpener(KEY)
    sealer.nonce = opener.nonce = NONCE_MAX - 1
    wire = sealer.seal(b"the last")
    assert open_all(wire, len(wire), opener) == (b"the last", "")
    with pytest.raises(ProtocolError, match="nonces"):
        sealer.seal(b"one more")
    with pytest.raises(ProtocolError, match="nonces"):
        sealer.seal_into(b"one more", memoryview(bytearray(100)))
    assert "nonces" in open_all(wire, len(wire), opener)[1]
