"""Spark's ``xxhash64`` of texts, in numpy: keys that workers make are those that Spark makes.

This file imports nothing of dep2p: it travels to workers by value, which need pyarrow and numpy only. The algorithm is
XXH64 with Spark's seed (https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md), of all texts of a length at
once.
"""

import numpy as np
import pyarrow as pa

SEED = 42
_P1, _P2, _P3, _P4, _P5 = (
    np.uint64(prime)
    for prime in (
        *(0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63),
        0x27D4EB2F165667C5,
    )
)


def keys_of(texts: pa.Array) -> pa.Array:
    """Return the int64 keys of an Arrow array of strings; null where the text is null."""
    texts = texts.cast(pa.string())
    count = len(texts)
    _, offsets_of, bytes_of = texts.buffers()
    offsets = np.frombuffer(offsets_of, dtype=np.int32)[texts.offset : texts.offset + count + 1].astype(np.int64)
    data = np.frombuffer(bytes_of, dtype=np.uint8) if bytes_of is not None else np.zeros(0, dtype=np.uint8)
    lengths = np.diff(offsets)
    found = np.empty(count, dtype=np.uint64)
    for length in np.unique(lengths):
        rows = np.flatnonzero(lengths == length)
        if len(rows) == count:
            found[:] = _hashed(data[offsets[0] : offsets[-1]].reshape(count, length))
        else:
            found[rows] = _hashed(data[offsets[rows][:, None] + np.arange(length)])
    mask = texts.is_null().to_numpy(zero_copy_only=False) if texts.null_count else None
    return pa.array(found.view(np.int64), mask=mask)


def _hashed(octets: np.ndarray) -> np.ndarray:
    """Return the hashes of the rows of a matrix of bytes."""
    count, length = octets.shape
    at = 0
    with np.errstate(over="ignore"):
        if length >= 32:
            start = (_P1 + _P2, _P2, np.uint64(0), np.uint64(0) - _P1)
            lanes = [np.full(count, np.uint64(SEED) + part, dtype=np.uint64) for part in start]
            while at + 32 <= length:
                lanes = [_round(lane, _words(octets, at + 8 * n)) for n, lane in enumerate(lanes)]
                at += 32
            found = sum((_turned(lane, by) for lane, by in zip(lanes, (1, 7, 12, 18), strict=True)), np.uint64(0))
            for lane in lanes:
                found = (found ^ _round(np.zeros(count, dtype=np.uint64), lane)) * _P1 + _P4
        else:
            found = np.full(count, np.uint64(SEED) + _P5, dtype=np.uint64)
        found = found + np.uint64(length)
        while at + 8 <= length:
            found = found ^ _round(np.zeros(count, dtype=np.uint64), _words(octets, at))
            found = _turned(found, 27) * _P1 + _P4
            at += 8
        if at + 4 <= length:
            half = np.ascontiguousarray(octets[:, at : at + 4]).view("<u4")[:, 0].astype(np.uint64)
            found = _turned(found ^ (half * _P1), 23) * _P2 + _P3
            at += 4
        for place in range(at, length):
            found = _turned(found ^ (octets[:, place].astype(np.uint64) * _P5), 11) * _P1
        found = (found ^ (found >> np.uint64(33))) * _P2
        found = (found ^ (found >> np.uint64(29))) * _P3
        return found ^ (found >> np.uint64(32))


def _words(octets: np.ndarray, at: int) -> np.ndarray:
    return np.ascontiguousarray(octets[:, at : at + 8]).view("<u8")[:, 0]


def _round(lane: np.ndarray, words: np.ndarray) -> np.ndarray:
    return _turned(lane + words * _P2, 31) * _P1


def _turned(values: np.ndarray, by: int) -> np.ndarray:
    return (values << np.uint64(by)) | (values >> np.uint64(64 - by))
