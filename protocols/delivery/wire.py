"""Frames of reliable delivery: HELLO and messages one way, acknowledgements the other (docs/spec/delivery.md). Pure.

A message is an ACK_REQUEST frame whose ``req_id`` is its number for this receiver and whose payload is that of a
NOTIFY. ``req_id`` 0 is HELLO: the name of the numbering, and the number up to which it is settled. Small messages with
the same headers and numbers in a row travel together, as one ACK_REQUESTS frame.
"""

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from dep2p.errors import ProtocolError
from dep2p.protocols.wire.frame import HEADER, HEADERS, VERSION, Frame, FrameType, encode_frame
from dep2p.protocols.wire.headers import HeaderMap

EPOCH_BYTES: Final = 8
NUMBER_MAX: Final = 0xFFFF_FFFF
WINDOW_MAX: Final = 65_536
"""The distance of a message's number from the lowest unsettled one: it bounds the memory of a receiver."""
REASON_BYTES_MAX: Final = 256
RANGES_MAX: Final = 4_096
"""Ranges in one ACK."""

BATCH_ITEMS_MAX: Final = 1_024
"""Messages in one ACK_REQUESTS."""
BATCH_BYTES_MAX: Final = 65_536
"""Bytes of the payload of one ACK_REQUESTS. Every receiver takes so much, whatever size it allows one message."""

_COUNT: Final = struct.Struct(">H")
_HELLO: Final = struct.Struct(">8sI")
_COUNTS: Final = struct.Struct(">IHH")
_RANGE: Final = struct.Struct(">II")
_REJECTED: Final = struct.Struct(">IB")
_ACK: Final = int(FrameType.ACK)
_ACK_REQUEST: Final = int(FrameType.ACK_REQUEST)
_ACK_REQUESTS: Final = int(FrameType.ACK_REQUESTS)
_ONE_RANGE: Final = struct.Struct(">BBHIIIHHII")
"""A whole ACK of one range, which nearly all are."""


def delivery_protocol(realm_id: str) -> str:
    """The id of the protocol in a realm."""
    return f"/dep2p/app/{realm_id}/delivery/1.0.0"


@dataclass(frozen=True, slots=True)
class Hello:
    """The first frame of a link, and again whenever ``settled`` has moved far."""

    epoch: bytes
    """The name of a numbering of the sender for this receiver; another one begins at 1."""
    settled: int
    """Everything up to this number is settled: it will not be sent again, so the receiver may forget it."""


@dataclass(frozen=True, slots=True)
class Ack:
    """A receiver's acknowledgement of messages, by their numbers on this link."""

    received: int = 0
    """Every message of this link up to this number has come; 0: nothing new. Also a sign of life while handlers run."""
    handled: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Inclusive ranges of numbers whose handlers took them."""
    rejected: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    """Numbers that will not be handled, and why."""


def encode_hello(hello: Hello) -> bytes:
    """Encode a HELLO frame."""
    return encode_frame(_ACK_REQUEST, _HELLO.pack(hello.epoch, hello.settled))


def decode_hello(frame: Frame) -> Hello:
    """Decode a HELLO frame. Raises :class:`ProtocolError`."""
    if frame.flags or len(frame.payload) != _HELLO.size:
        raise ProtocolError(f"HELLO with flags 0x{frame.flags:04x} and {len(frame.payload)} bytes")
    epoch, settled = _HELLO.unpack(frame.payload)
    return Hello(epoch, settled)


def encode_batch(number: int, head: bytes, bodies: Sequence[bytes]) -> list[bytes]:
    """Encode messages from ``number`` on, with the same encoded headers, as the pieces of one frame. `fits_batch` must
    hold."""
    count = len(bodies)
    payload_bytes = _COUNT.size + 4 * count + len(head) + sum(map(len, bodies))
    front = struct.pack(f">H{count}I", count, *map(len, bodies))
    header = HEADER.pack(VERSION, _ACK_REQUESTS, HEADERS, number, payload_bytes)
    return [header, front, head, *bodies]


def fits_batch(head: bytes, bodies: Sequence[bytes]) -> bool:
    """Whether these are few and small enough to travel together."""
    count = len(bodies)
    return (
        1 < count <= BATCH_ITEMS_MAX and _COUNT.size + 4 * count + len(head) + sum(map(len, bodies)) <= BATCH_BYTES_MAX
    )


def decode_batch(frame: Frame, split: Callable[[bytes], tuple[HeaderMap, bytes]]) -> tuple[HeaderMap, list[bytes]]:
    """Decode the headers of all, and the bodies of the messages from ``req_id`` on. ``split`` takes headers off a
    payload.

    Raises :class:`ProtocolError`.
    """
    payload = frame.payload
    if frame.flags != HEADERS or not frame.req_id or not _COUNT.size <= len(payload) <= BATCH_BYTES_MAX:
        raise ProtocolError(
            f"ACK_REQUESTS with flags 0x{frame.flags:04x}, req_id {frame.req_id} and {len(payload)} bytes"
        )
    [count] = _COUNT.unpack_from(payload)
    at = _COUNT.size + 4 * count
    if not 1 <= count <= BATCH_ITEMS_MAX or at > len(payload) or frame.req_id + count - 1 > NUMBER_MAX:
        raise ProtocolError(f"ACK_REQUESTS of {count} messages from {frame.req_id} on, with {len(payload)} bytes")
    sizes = struct.unpack_from(f">{count}I", payload, _COUNT.size)
    headers, rest = split(payload[at:])
    if sum(sizes) != len(rest):
        raise ProtocolError(f"ACK_REQUESTS says {sum(sizes)} bytes of bodies and has {len(rest)}")
    bodies: list[bytes] = []
    start = 0
    for size in sizes:
        bodies.append(rest[start : start + size])
        start += size
    return headers, bodies


def encode_ack(ack: Ack) -> bytes:
    """Encode an ACK frame. At most `RANGES_MAX` ranges and as many rejections: see `split_ack`."""
    parts = [_COUNTS.pack(ack.received, len(ack.handled), len(ack.rejected))]
    parts += [_RANGE.pack(low, high) for low, high in ack.handled]
    for number, reason in ack.rejected:
        text = reason.encode("utf-8", "replace")[: REASON_BYTES_MAX - 1].decode("utf-8", "ignore").encode()
        parts.append(_REJECTED.pack(number, len(text)) + text)
    return encode_frame(_ACK, b"".join(parts))


def decode_ack(frame: Frame) -> Ack:
    """Decode an ACK frame. Raises :class:`ProtocolError` for a malformed one; the sender checks the numbers."""
    payload = frame.payload
    if frame.flags or frame.req_id or len(payload) < _COUNTS.size:
        raise ProtocolError(f"ACK with flags 0x{frame.flags:04x}, req_id {frame.req_id} and {len(payload)} bytes")
    received, ranges, rejections = _COUNTS.unpack_from(payload)
    at = _COUNTS.size
    if ranges > RANGES_MAX or rejections > RANGES_MAX or at + ranges * _RANGE.size > len(payload):
        raise ProtocolError("ACK with more ranges than allowed or than it has bytes for")
    handled: list[tuple[int, int]] = []
    for _ in range(ranges):
        low, high = _RANGE.unpack_from(payload, at)
        at += _RANGE.size
        if not 1 <= low <= high:
            raise ProtocolError(f"ACK of the range {low} to {high}")
        handled.append((low, high))
    rejected: list[tuple[int, str]] = []
    for _ in range(rejections):
        if at + _REJECTED.size > len(payload):
            raise ProtocolError("ACK is cut off")
        number, size = _REJECTED.unpack_from(payload, at)
        at += _REJECTED.size
        text = payload[at : at + size]
        if len(text) != size or not number:
            raise ProtocolError("ACK is cut off or rejects number 0")
        at += size
        rejected.append((number, text.decode("utf-8", "replace")))
    if at != len(payload):
        raise ProtocolError("ACK with bytes behind its end")
    return Ack(received, handled, rejected)


def as_ranges(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return inclusive ranges of these numbers, which may come in any order."""
    ranges: list[tuple[int, int]] = []
    ordered = sorted(set(numbers))
    if ordered and ordered[-1] - ordered[0] == len(ordered) - 1:  # nearly always
        return [(ordered[0], ordered[-1])]
    low = high = 0
    for number in ordered:
        if number == high + 1 and high:
            high = number
        elif number != high or not high:
            if high:
                ranges.append((low, high))
            low = high = number
    if high:
        ranges.append((low, high))
    return ranges


def split_ack(received: int, numbers: Sequence[int], rejected: Sequence[tuple[int, str]]) -> list[bytes]:
    """Encode as many ACK frames as these need, none larger than a receiver takes."""
    ranges = as_ranges(numbers)
    if len(ranges) == 1 and not rejected:
        return [_ONE_RANGE.pack(VERSION, _ACK, 0, 0, _COUNTS.size + _RANGE.size, received, 1, 0, *ranges[0])]
    frames: list[bytes] = []
    size = 256
    for start in range(0, max(len(ranges), len(rejected), 1), size):
        frames.append(encode_ack(Ack(received, ranges[start : start + size], list(rejected[start : start + size]))))
    return frames
