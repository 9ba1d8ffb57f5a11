"""Frames of queues between nodes (docs/spec/queue.md): publish, subscribe, deliver, settle, administer. Pure.

One stream carries any number of publishers and subscriptions of its opener; ``req_id`` tells them apart. Messages and
results go in batches. Decoders raise :class:`ProtocolError` for anything that no encoder here makes.
"""

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Final, NamedTuple

from dep2p.errors import ProtocolError
from dep2p.protocols.wire.frame import Frame, encode_frame

PUBLISH: Final = 0x40
PUBLISHED: Final = 0x41
SUBSCRIBE: Final = 0x42
SUBSCRIBED: Final = 0x43
READY: Final = 0x44
DELIVER: Final = 0x45
SETTLE: Final = 0x46
SETTLED: Final = 0x47
UNSUBSCRIBE: Final = 0x48
ENDED: Final = 0x49
ADMIN: Final = 0x4A
ANSWER: Final = 0x4B
REFUSED: Final = 0x4C

PUBLISHER_BYTES: Final = 16
NAME_BYTES_MAX: Final = 255
"""Bytes of the field for names. Names are shorter; the core checks them."""
BATCH_ITEMS_MAX: Final = 4_096
"""Messages of one PUBLISH or DELIVER, results of one SETTLE."""
ATTRIBUTES_BYTES_MAX: Final = 16_384
"""Bytes of the attributes of one message: all but its body, as the core encodes it."""
_ATTRIBUTES_BYTES_FRAME: Final = 0xFFFF
"""The largest length in a DELIVER's field. Earlier versions stored more."""
REASON_BYTES_MAX: Final = 200
TEXT_BYTES_MAX: Final = 1_024
ADMIN_BYTES_MAX: Final = 65_536
"""Bytes of an ADMIN request. The frame's cap bounds the replies."""

_COUNT = struct.Struct(">I")
_PUBLISH_ITEM = struct.Struct(">HI")
_POINT = struct.Struct(">IQ")
_READY = struct.Struct(">II")
_DELIVERED = struct.Struct(">IQHQIHI")
_SETTLE_ITEM = struct.Struct(">BIQIB")
_REFUSED_ITEM = struct.Struct(">IQH")
_TOUCHED_ITEM = struct.Struct(">IQI")
_REFUSED = struct.Struct(">HI")


class Settle(IntEnum):
    """The kinds of results for a delivered message."""

    FINISH = 1
    REQUEUE = 2
    TOUCH = 3
    RELEASE = 4
    REJECT = 5


class QueueCode(IntEnum):
    """The reason of a refusal; each is one public exception."""

    OTHER = 0
    INVALID = 1
    QUEUE_NOT_FOUND = 2
    CHANNEL_NOT_FOUND = 3
    MESSAGE_NOT_FOUND = 4
    EXISTS = 5
    FULL = 6
    NOT_IN_FLIGHT = 7
    ACCESS = 8
    OVERLOADED = 9
    TOO_LARGE = 10
    STORE = 11
    STORE_FULL = 12
    CONSUMER_CLOSED = 13
    STORE_UNKNOWN = 14
    LOCK_LOST = 15
    DISTRIBUTED = 16
    MOVED = 17
    NOT_OWNER = 18
    """Another node is the broker of these queues now: see `not_owner_text`."""


class Point(NamedTuple):
    """The place of a message: its id."""

    partition: int
    seq: int


class WireMessage(NamedTuple):
    """A message on its way to a queue. ``attributes`` is opaque here."""

    attributes: bytes
    body: bytes


class PublishRequest(NamedTuple):
    """A batch of one publisher, whose messages have rising sequence numbers from ``first_number`` on."""

    queue: str
    publisher: bytes
    """The producer's id; empty when repeats need no recognition."""
    first_number: int
    messages: list[WireMessage]


class Delivered(NamedTuple):
    """A message on its way to a consumer."""

    partition: int
    seq: int
    attempts: int
    published_us: int
    timeout_ms: int
    """Milliseconds from the sending on."""
    attributes: bytes
    body: bytes


class DeliveryResult(NamedTuple):
    """The result of one delivered message."""

    kind: int
    partition: int
    seq: int
    delay_ms: int = 0
    reason: str = ""


class Settled(NamedTuple):
    """The answer to a SETTLE."""

    ticket: int
    refused: list[tuple[int, int, int]]
    """(partition, seq, code)."""
    touched: list[tuple[int, int, int]]
    """(partition, seq, milliseconds that are left)."""


def queue_protocol(realm_id: str) -> str:
    """Return the id of the protocol in a realm."""
    return f"/dep2p/app/{realm_id}/queue/1.0.0"


def encode_publish(
    req_id: int, queue: str, publisher: bytes, first_number: int, messages: Sequence[WireMessage]
) -> bytes:
    """Encode a PUBLISH frame."""
    batch = PublishBatch(queue, publisher, first_number, len(messages), [encode_publish_items(messages)])
    return encode_publish_batch(req_id, batch)


class PublishBatch(NamedTuple):
    """A PUBLISH of several callers, who each have encoded their own messages."""

    queue: str
    publisher: bytes
    first_number: int
    item_count: int
    items: Sequence[bytes]
    """The encoded messages of each caller, by `encode_publish_items`."""


def encode_publish_items(messages: Sequence[WireMessage]) -> bytes:
    """Encode messages for a PUBLISH. Raises ``struct.error`` or ``TypeError`` for one that no frame holds."""
    parts: list[bytes] = []
    pack = _PUBLISH_ITEM.pack
    for attributes, body in messages:
        parts += (pack(len(attributes), len(body)), attributes, body)
    return b"".join(parts)


def encode_publish_batch(req_id: int, batch: PublishBatch) -> bytes:
    """Encode a PUBLISH frame of encoded messages."""
    name = batch.queue.encode()
    head = (
        bytes((len(name),)),
        name,
        bytes((len(batch.publisher),)),
        batch.publisher,
        batch.first_number.to_bytes(8, "big"),
        _COUNT.pack(batch.item_count),
    )
    return encode_frame(PUBLISH, b"".join((*head, *batch.items)), req_id=req_id)


def decode_publish(payload: bytes) -> PublishRequest:
    """Decode the payload of a PUBLISH frame."""
    name, position = _name(payload, 0, "PUBLISH")
    size = payload[position] if position < len(payload) else 1
    if size not in (0, PUBLISHER_BYTES) or position + 1 + size + 12 > len(payload):
        raise ProtocolError("PUBLISH with a malformed publisher")
    position += 1
    publisher = payload[position : position + size]
    position += size
    first = int.from_bytes(payload[position : position + 8], "big")
    position += 8
    count, position = _counted(payload, position, "PUBLISH", 1)
    messages: list[WireMessage] = []
    append = messages.append
    unpack = _PUBLISH_ITEM.unpack_from
    limit = len(payload) - _PUBLISH_ITEM.size
    for _ in range(count):
        if position > limit:
            raise ProtocolError("PUBLISH is cut off")
        attributes, body = unpack(payload, position)
        start = position + 6
        middle = start + attributes
        position = middle + body
        append(WireMessage(payload[start:middle], payload[middle:position]))
        if attributes > ATTRIBUTES_BYTES_MAX:
            raise ProtocolError(f"PUBLISH: {attributes} bytes of attributes: at most {ATTRIBUTES_BYTES_MAX}")
    _ended(payload, position, "PUBLISH")
    if first > (1 << 63) - 1 - count:
        raise ProtocolError("PUBLISH: a number over 2^63")
    return PublishRequest(name, publisher, first, messages)


def encode_published(req_id: int, points: Sequence[tuple[int, int]]) -> bytes:
    """Encode a PUBLISHED frame: the ids of the batch's messages, in its order. All of them are durable."""
    pack = _POINT.pack
    body = b"".join([pack(partition, seq) for partition, seq in points])
    return encode_frame(PUBLISHED, _COUNT.pack(len(points)) + body, req_id=req_id)


def decode_published(payload: bytes) -> list[Point]:
    """Decode the payload of a PUBLISHED frame."""
    count, position = _counted(payload, 0, "PUBLISHED", 0)
    if len(payload) != position + count * _POINT.size:
        raise ProtocolError("PUBLISHED of a wrong length")
    return [Point(*each) for each in _POINT.iter_unpack(payload[position:])]


def encode_ready(req_id: int, items: int, size_bytes: int) -> bytes:
    """Encode a READY frame: how much may be in flight to this subscription; 0 items pause it."""
    return encode_frame(READY, _READY.pack(items, size_bytes), req_id=req_id)


def decode_ready(payload: bytes) -> tuple[int, int]:
    """Decode the payload of a READY frame."""
    if len(payload) != _READY.size:
        raise ProtocolError("READY of a wrong length")
    items, size_bytes = _READY.unpack(payload)
    return items, size_bytes


def encode_deliver(req_id: int, messages: Sequence[Delivered]) -> bytes:
    """Encode a DELIVER frame."""
    return encode_frame(DELIVER, deliver_payload(messages), req_id=req_id)


def deliver_payload(messages: Sequence[Delivered]) -> bytes:
    """Encode the payload of a DELIVER frame."""
    parts = [_COUNT.pack(len(messages))]
    pack = _DELIVERED.pack
    for partition, seq, attempts, published_us, timeout_ms, attributes, body in messages:
        parts += (
            pack(partition, seq, min(attempts, 65_535), published_us, timeout_ms, len(attributes), len(body)),
            attributes,
            body,
        )
    return b"".join(parts)


def decode_deliver(payload: bytes) -> list[Delivered]:
    """Decode the payload of a DELIVER frame."""
    count, position = _counted(payload, 0, "DELIVER", 1)
    messages: list[Delivered] = []
    append = messages.append
    unpack = _DELIVERED.unpack_from
    size = _DELIVERED.size
    limit = len(payload) - size
    for _ in range(count):
        if position > limit:
            raise ProtocolError("DELIVER is cut off")
        partition, seq, attempts, published_us, timeout_ms, attributes, body = unpack(payload, position)
        start = position + size
        middle = start + attributes
        position = middle + body
        append(
            Delivered(
                partition, seq, attempts, published_us, timeout_ms, payload[start:middle], payload[middle:position]
            )
        )
    _ended(payload, position, "DELIVER")
    return messages


def undeliverable_because(attributes: bytes) -> str:
    """Return why no DELIVER can hold a stored message with these attributes; "" when one can."""
    if len(attributes) <= _ATTRIBUTES_BYTES_FRAME:
        return ""
    return f"cannot be sent to a member: {len(attributes)} bytes of attributes, a frame holds {_ATTRIBUTES_BYTES_FRAME}"


def encode_settle(req_id: int, ticket: int, results: Sequence[DeliveryResult]) -> bytes:
    """Encode a SETTLE frame. With a ``ticket`` that is not 0, SETTLED comes when all of it is durable."""
    return encode_frame(SETTLE, settle_payload(ticket, results), req_id=req_id)


def settle_payload(ticket: int, results: Sequence[DeliveryResult]) -> bytes:
    """Encode the payload of a SETTLE frame."""
    parts = [_COUNT.pack(ticket), _COUNT.pack(len(results))]
    pack = _SETTLE_ITEM.pack
    for kind, partition, seq, delay_ms, reason in results:
        text = _cut(reason, REASON_BYTES_MAX) if reason else b""
        parts.append(pack(kind, partition, seq, delay_ms, len(text)) + text)
    return b"".join(parts)


def decode_settle(payload: bytes) -> tuple[int, list[DeliveryResult]]:
    """Decode ticket and results of a SETTLE frame."""
    if len(payload) < 8:
        raise ProtocolError("SETTLE is cut off")
    ticket = int(_COUNT.unpack_from(payload)[0])
    count, position = _counted(payload, 4, "SETTLE", 1)
    results: list[DeliveryResult] = []
    size = _SETTLE_ITEM.size
    for _ in range(count):
        if position + size > len(payload):
            raise ProtocolError("SETTLE is cut off")
        kind, partition, seq, delay_ms, length = _SETTLE_ITEM.unpack_from(payload, position)
        position += size
        reason = ""
        if length:
            reason = _text(payload[position : position + length], length, "SETTLE")
            position += length
        if not 1 <= kind <= 5:
            raise ProtocolError(f"SETTLE of an unknown kind {kind}")
        results.append(DeliveryResult(kind, partition, seq, delay_ms, reason))
    _ended(payload, position, "SETTLE")
    return ticket, results


def encode_settled(req_id: int, settled: Settled) -> bytes:
    """Encode a SETTLED frame."""
    parts = [_COUNT.pack(settled.ticket), _COUNT.pack(len(settled.refused))]
    parts += [_REFUSED_ITEM.pack(*each) for each in settled.refused]
    parts.append(_COUNT.pack(len(settled.touched)))
    parts += [_TOUCHED_ITEM.pack(*each) for each in settled.touched]
    return encode_frame(SETTLED, b"".join(parts), req_id=req_id)


def decode_settled(payload: bytes) -> Settled:
    """Decode the payload of a SETTLED frame."""
    if len(payload) < 8:
        raise ProtocolError("SETTLED is cut off")
    ticket = int(_COUNT.unpack_from(payload)[0])
    count, position = _counted(payload, 4, "SETTLED", 0)
    end = position + count * _REFUSED_ITEM.size
    if end + 4 > len(payload):
        raise ProtocolError("SETTLED is cut off")
    refused = list(_REFUSED_ITEM.iter_unpack(payload[position:end]))
    count, position = _counted(payload, end, "SETTLED", 0)
    if len(payload) != position + count * _TOUCHED_ITEM.size:
        raise ProtocolError("SETTLED of a wrong length")
    touched = list(_TOUCHED_ITEM.iter_unpack(payload[position:]))
    return Settled(ticket, [(p, s, c) for p, s, c in refused], [(p, s, m) for p, s, m in touched])


def not_owner_text(epoch: int, owner: str, nodes: Sequence[str], text: str) -> str:
    """Return the text of a NOT_OWNER refusal: fields that the asker reads, then a sentence."""
    return f"{epoch} {owner or '-'} {','.join(nodes) or '-'} {text}"


def read_not_owner(text: str) -> tuple[int, str, tuple[str, ...], str]:
    """Decode epoch, owner, nodes and text. Raises :class:`ProtocolError`."""
    epoch, owner, nodes, rest = [*text.split(" ", 3), "", "", "", ""][:4]
    if not (epoch.isascii() and epoch.isdigit() and len(epoch) < 20) or not owner or not nodes:
        raise ProtocolError("a refusal that names no owner")
    return int(epoch), "" if owner == "-" else owner, () if nodes == "-" else tuple(nodes.split(",")), rest


def encode_refused(type_: int, req_id: int, code: int, text: str, retry_after_ms: int = 0) -> bytes:
    """Encode a REFUSED frame, or an ENDED one, which has the same payload."""
    payload = _REFUSED.pack(code, retry_after_ms) + _cut(text, TEXT_BYTES_MAX)
    return encode_frame(type_, payload, req_id=req_id)


def decode_refused(payload: bytes) -> tuple[int, int, str]:
    """Decode code, milliseconds until a retry makes sense, and text of a REFUSED or ENDED frame."""
    size = len(payload) - _REFUSED.size
    if not 0 <= size <= TEXT_BYTES_MAX:
        raise ProtocolError(f"REFUSED of {len(payload)} bytes")
    code, retry_after_ms = _REFUSED.unpack_from(payload)
    return code, retry_after_ms, _text(payload[_REFUSED.size :], size, "REFUSED")


def require_request(frame: Frame) -> None:
    """Check a frame: no queue frame has flags, and all have a ``req_id``."""
    if frame.flags or not frame.req_id:
        raise ProtocolError(f"queue frame 0x{frame.type:02x} with flags 0x{frame.flags:04x}, req_id {frame.req_id}")


def _name(payload: bytes, position: int, what: str) -> tuple[str, int]:
    size = payload[position] if position < len(payload) else 0
    end = position + 1 + size
    if not size or end > len(payload):
        raise ProtocolError(f"{what} without a name")
    return _text(payload[position + 1 : end], size, what), end


def _counted(payload: bytes, position: int, what: str, low: int) -> tuple[int, int]:
    if position + 4 > len(payload):
        raise ProtocolError(f"{what} is cut off")
    count = int(_COUNT.unpack_from(payload, position)[0])
    if not low <= count <= BATCH_ITEMS_MAX:
        raise ProtocolError(f"{what} of {count} entries: {low} to {BATCH_ITEMS_MAX} are allowed")
    return count, position + 4


def _ended(payload: bytes, position: int, what: str) -> None:
    if position != len(payload):
        raise ProtocolError(f"{what} is cut off" if position > len(payload) else f"{what} with bytes after its end")


def _text(raw: bytes, size: int, what: str) -> str:
    if len(raw) != size:
        raise ProtocolError(f"{what} is cut off")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise ProtocolError(f"{what}: a text is not UTF-8") from None


def _cut(text: str, bytes_max: int) -> bytes:
    raw = text.encode("utf-8", "replace")
    return raw if len(raw) <= bytes_max else raw[:bytes_max].decode("utf-8", "ignore").encode("utf-8")
