"""Payloads: which flags a frame may have, and the caps of headers and body."""

from typing import Any

import pytest

from dep2p.errors import ErrorCode, MessageTooLargeError, ProtocolError
from dep2p.limits import Limits
from dep2p.protocols.wire.compression import Compression, Zstd
from dep2p.protocols.wire.frame import COMPRESSED, FINAL, HEADERS, Frame
from dep2p.protocols.wire.headers import HeaderKey
from dep2p.protocols.wire.payload import HeaderEncoder, PayloadReader, compressed_body, required_name

LIMITS = Limits(message_bytes_max=5_000, headers_bytes_max=200, compress_bytes_min=100)


def test_headers_and_compressed_body_come_apart() -> None:
    zstd = Zstd(LIMITS.message_bytes_max)
    head = HeaderEncoder(LIMITS).encode("echo", 500, True, {"a": 1})
    flags, body = compressed_body(Compression(zstd, LIMITS.compress_bytes_min), b"x" * 4_000)
    assert flags == COMPRESSED
    headers, data = PayloadReader(LIMITS, zstd).read(Frame(1, flags | HEADERS, 1, head + bytes(body)))
    assert headers == {HeaderKey.NAME: "echo", HeaderKey.TIMEOUT_MS: 500, HeaderKey.IDEMPOTENT: True, "a": 1}
    assert data == b"x" * 4_000
    assert required_name(headers) == "echo"


def test_compressed_from_a_peer_that_did_not_offer_it_is_a_violation() -> None:
    body = Zstd(5_000).compress(b"x" * 100)
    with pytest.raises(ProtocolError, match="zstd"):
        PayloadReader(LIMITS, None).read(Frame(2, COMPRESSED, 1, body))


def test_the_flag_final_is_a_violation_outside_of_streams() -> None:
    with pytest.raises(ProtocolError, match="flags"):
        PayloadReader(LIMITS, None).read(Frame(2, FINAL, 1, b""))


@pytest.mark.parametrize("flags", [0, HEADERS, COMPRESSED, COMPRESSED | HEADERS])
def test_a_body_over_the_cap_is_refused_in_every_form(flags: int) -> None:
    zstd = Zstd(LIMITS.message_bytes_max)
    head = HeaderEncoder(LIMITS).encode("n") if flags & HEADERS else b""
    for size in (5_000, 5_001):
        body = bytes(size)
        frame = Frame(1, flags, 1, head + (zstd.compress(body) if flags & COMPRESSED else body))
        if size == 5_000:
            assert PayloadReader(LIMITS, zstd).read(frame)[1] == body
        else:
            with pytest.raises(ProtocolError) as refused:
                PayloadReader(LIMITS, zstd).read(frame)
            assert refused.value.code == ErrorCode.MESSAGE_TOO_LARGE


def test_headers_over_the_cap_cannot_be_sent() -> None:
    with pytest.raises(MessageTooLargeError):
        HeaderEncoder(LIMITS).encode("n", app={"a": bytes(200)})


@pytest.mark.parametrize("headers", [{}, {1: 5}, {1: ""}, {1: b"x"}, {"name": "x"}])
def test_a_name_is_required_and_is_text(headers: dict[int | str, object]) -> None:
    with pytest.raises(ProtocolError):
        required_name(headers)


def test_many_different_headers_do_not_pile_up_in_memory() -> None:
    encoder = HeaderEncoder(LIMITS)
    for index in range(5_000):
        assert encoder.encode(f"name{index}", index + 1) == HeaderEncoder(LIMITS).encode(f"name{index}", index + 1)
    assert len(encoder._known) <= 512  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize(
    ("name", "error"), [("", ValueError), ("x" * 256, ValueError), (3, TypeError), (None, TypeError)]
)
def test_a_name_that_no_handler_can_have_is_refused_before_it_costs_the_link(name: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="name"):
        HeaderEncoder(LIMITS).encode(name)
