"""Compression: round trips, the decision when it pays, and bombs that cost nothing."""

import os
import tracemalloc

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from dep2p.errors import ErrorCode, ProtocolError
from dep2p.protocols.wire.compression import Compression, Zstd

CAP = 100_000


def repeated(unit: bytes, times: int) -> bytes:
    return unit * times


@given(st.one_of(st.binary(max_size=5_000), st.builds(repeated, st.binary(max_size=20), st.integers(0, 999))))
def test_what_is_compressed_comes_back(body: bytes) -> None:
    zstd = Zstd(CAP)
    assert zstd.decompress(zstd.compress(body)) == body


@given(st.binary(min_size=1, max_size=200))
def test_arbitrary_bytes_decompress_within_the_cap_or_are_violations(data: bytes) -> None:
    try:
        content = Zstd(1_000).decompress(data)
    except ProtocolError:
        return
    assert len(content) <= 1_000


def unsized(content: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1, write_content_size=False).compress(content)


def test_a_frame_without_a_size_is_taken_up_to_the_cap() -> None:
    assert Zstd(CAP).decompress(unsized(bytes(CAP))) == bytes(CAP)
    with pytest.raises(ProtocolError) as refused:
        Zstd(CAP).decompress(unsized(bytes(CAP + 1)))
    assert refused.value.code == ErrorCode.MESSAGE_TOO_LARGE


def test_a_frame_of_exactly_the_cap_passes_and_one_byte_more_does_not() -> None:
    zstd = Zstd(CAP)
    assert len(zstd.decompress(zstd.compress(bytes(CAP)))) == CAP
    with pytest.raises(ProtocolError) as refused:
        zstd.decompress(zstd.compress(bytes(CAP + 1)))
    assert refused.value.code == ErrorCode.MESSAGE_TOO_LARGE


@pytest.mark.parametrize("sized", [True, False])
def test_a_zip_bomb_costs_no_memory(sized: bool) -> None:
    content = bytes(512 * 1024 * 1024)
    bomb = zstandard.ZstdCompressor(level=1, write_content_size=sized).compress(content)
    del content
    assert len(bomb) < CAP
    zstd = Zstd(CAP)
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError) as refused:
            zstd.decompress(bomb)
        _now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert refused.value.code == ErrorCode.MESSAGE_TOO_LARGE
    assert peak < 8 * 1024 * 1024


def test_a_size_that_lies_is_a_violation() -> None:
    frame = bytearray(Zstd(CAP).compress(bytes(1_000)))
    # Single-segment frame: descriptor, then a 2-byte size of 1000 - 256.
    assert int.from_bytes(frame[5:7], "little") == 1_000 - 256
    frame[5:7] = (10).to_bytes(2, "little")
    with pytest.raises(ProtocolError):
        Zstd(CAP).decompress(bytes(frame))


@pytest.mark.parametrize("damage", ["cut off", "a byte more", "twice", "empty", "no magic"])
@pytest.mark.parametrize("sized", [True, False])
def test_anything_but_one_whole_frame_is_a_violation(damage: str, sized: bool) -> None:
    frame = zstandard.ZstdCompressor(level=1, write_content_size=sized).compress(b"abc" * 500)
    damaged = {
        "cut off": frame[:-1],
        "a byte more": frame + b"x",
        "twice": frame + frame,
        "empty": b"",
        "no magic": frame[4:],
    }
    with pytest.raises(ProtocolError):
        Zstd(CAP).decompress(damaged[damage])


def test_a_window_larger_than_needed_is_refused() -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=27, write_content_size=False)
    frame = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    data = frame.compress(b"abc" * 100) + frame.flush()
    with pytest.raises(ProtocolError):
        Zstd(CAP).decompress(data)


def test_only_bodies_from_the_minimum_on_are_compressed_and_only_when_smaller() -> None:
    compression = Compression(Zstd(CAP), 1_000)
    assert compression.compress(b"a" * 999) is None
    compressed = compression.compress(b"a" * 1_000)
    assert compressed is not None and len(compressed) < 100
    assert compression.compress(os.urandom(5_000)) is None
    assert Compression(Zstd(CAP), 0).compress(b"a" * 50_000) is None


def test_bodies_that_do_not_shrink_are_tried_less_and_less_often() -> None:
    class Counting(Zstd):
        calls = 0

        def compress(self, body: bytes | memoryview) -> bytes:
            Counting.calls += 1
            return super().compress(body)

    compression = Compression(Counting(CAP), 1_000)
    for _ in range(1_000):
        assert compression.compress(os.urandom(2_000)) is None
    assert Counting.calls < 30
    # It comes back when bodies shrink again.
    assert any(compression.compress(b"a" * 2_000) for _ in range(64))
    assert all(compression.compress(b"a" * 2_000) for _ in range(10))


def test_a_compressed_body_keeps_no_more_memory_than_it_has() -> None:
    zstd = Zstd(1_000_000)
    tracemalloc.start()
    try:
        bodies = [zstd.compress(bytes(1_000_000)) for _ in range(20)]
        assert sum(map(len, bodies)) < 4_000
        assert tracemalloc.get_traced_memory()[0] < 100_000
    finally:
        tracemalloc.stop()
