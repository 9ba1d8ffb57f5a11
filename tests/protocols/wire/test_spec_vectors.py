"""The vectors of docs/spec/frame.md, read from the page itself."""

import re
from pathlib import Path

import pytest

from dep2p.errors import ErrorCode
from dep2p.limits import Limits
from dep2p.protocols.wire.compression import Zstd
from dep2p.protocols.wire.frame import (
    FINAL,
    HEADERS,
    Frame,
    FrameDecoder,
    FrameType,
    decode_error,
    encode_error,
    encode_frame,
)
from dep2p.protocols.wire.headers import decode_headers, encode_headers
from dep2p.protocols.wire.payload import PayloadReader, retry_after_headers

_PAGE = (Path(__file__).parents[3] / "docs" / "spec" / "frame.md").read_text(encoding="utf-8")
_GOOD, _REFUSED = re.findall(r"```\n(.*?)```", _PAGE[_PAGE.index("## 7. Vectors") :], flags=re.DOTALL)
VECTORS = {line.split()[0]: bytes.fromhex(line.split()[1]) for line in _GOOD.splitlines()}

ENCODED = {
    "headers": lambda: encode_headers({1: "greet", 2: 5000}),
    "app-headers": lambda: encode_headers({1: "greet"}, {"lang": "en"}),
    "request": lambda: encode_frame(1, VECTORS["headers"] + b"ann", flags=HEADERS, req_id=1),
    "response": lambda: encode_frame(2, b"hello ann", req_id=1),
    "notify": lambda: encode_frame(3, encode_headers({1: "seen"}) + b"42", flags=HEADERS),
    "cancel": lambda: encode_frame(7, b"", req_id=1),
    "stream-data": lambda: encode_frame(4, b"item", flags=FINAL, req_id=1),
    "stream-end": lambda: encode_frame(5, b"", req_id=1),
    "error": lambda: encode_error(6, "no handler for requests 'x'", req_id=2),
    "rate-limited": lambda: encode_error(8, "slow down", req_id=3, headers=retry_after_headers(250)),
    "not-member": lambda: encode_error(5, "not a verified member of this realm"),
}


@pytest.mark.parametrize("name", list(ENCODED))
def test_what_we_encode_is_the_vector(name: str) -> None:
    assert ENCODED[name]() == VECTORS[name]


def test_the_page_has_no_vector_that_is_not_checked() -> None:
    assert set(VECTORS) == {*ENCODED, "compressed", "skipped"}


def test_what_we_decode_from_the_vectors() -> None:
    assert decode_headers(VECTORS["app-headers"]) == {1: "greet", "lang": "en"}
    reader = PayloadReader(Limits(), Zstd(1_048_576))
    (frame,) = FrameDecoder(10_000).feed(VECTORS["request"])
    assert frame == Frame(FrameType.REQUEST, HEADERS, 1, VECTORS["headers"] + b"ann")
    assert reader.read(frame) == ({1: "greet", 2: 5000}, b"ann")
    (frame,) = FrameDecoder(10_000).feed(VECTORS["compressed"])
    assert reader.read(frame) == ({}, b"a" * 5_000)
    (frame,) = FrameDecoder(10_000).feed(VECTORS["rate-limited"])
    headers, body = reader.read(frame)
    assert (headers, decode_error(body)) == ({4: 250}, (8, "slow down"))
    decoder = FrameDecoder(10_000)
    assert decoder.feed(VECTORS["skipped"]) == []
    assert decoder.skipped_frames == 1 and decoder.buffered_bytes == 0


@pytest.mark.parametrize("line", _REFUSED.splitlines())
def test_what_is_refused(line: str) -> None:
    data, code, *_ = line.split()
    decoder = FrameDecoder(1_000_000)
    assert decoder.feed(bytes.fromhex(data)) == []
    assert decoder.error is not None
    assert decoder.error.code == ErrorCode[code]
