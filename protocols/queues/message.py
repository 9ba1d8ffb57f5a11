"""A message of a queue: as its producer publishes it, in memory, and as it is stored."""

import struct
from collections.abc import Callable
from typing import Final, NamedTuple

from dep2p.encoding.shapes import is_list, is_map
from dep2p.errors import ProtocolError
from dep2p.protocols.queues.records import MessageRow
from dep2p.protocols.wire.cbor import decode_bounded

_META: Final = struct.Struct(">QQQIB")
pack_meta: Callable[..., bytes] = _META.pack
"""published_us, due_us, expires_us, only_channel, priority: the beginning of a row's meta; attributes follow."""
_LONG_AGO_US: Final = 1
_ATTRIBUTE_ENTRIES_MAX: Final = 64
OVERHEAD_BYTES: Final = 512
"""Bytes that a message in memory counts for besides its body: its fields, and its entries in the log and the cache."""


class NewMessage(NamedTuple):
    """A message to publish. ``attributes``: encoded CBOR map, or nothing (`queues.attributes.encode_attributes`)."""

    body: bytes
    attributes: bytes = b""
    key: str = ""
    priority: int = 0
    delay_s: float = 0.0


class QueuedMessage(NamedTuple):
    """A message in memory."""

    seq: int
    published_us: int
    due_us: int
    """The end of its deferral by the publisher, in Unix microseconds; 0: not deferred."""
    expires_us: int
    """Unix microseconds; 0: never."""
    only_channel: int
    """The only channel that gets it (a replayed dead letter); 0: all channels."""
    priority: int
    attributes: bytes
    body: bytes


def encode_meta(message: QueuedMessage) -> bytes:
    """Encode all fields but the body; `decode_row` reads them."""
    return (
        pack_meta(
            message.published_us,
            message.due_us,
            message.expires_us,
            message.only_channel,
            min(255, message.priority),
        )
        + message.attributes
    )


def decode_row(row: MessageRow) -> QueuedMessage:
    """Decode a stored message. Raises :class:`ProtocolError` for a damaged one."""
    meta = row.meta
    if len(meta) < _META.size:
        raise ProtocolError(f"message {row.seq} of partition {row.partition} is damaged")
    published_us, due_us, expires_us, only_channel, priority = _META.unpack_from(meta)
    attributes = meta[_META.size :]
    return QueuedMessage(row.seq, published_us, due_us, expires_us, only_channel, priority, attributes, row.body)


def damaged(seq: int) -> QueuedMessage:
    """Return the stand-in for a damaged message: one that has expired, so that channels and the sweep pass it by."""
    return QueuedMessage(seq, 0, 0, _LONG_AGO_US, 0, 0, b"", b"")


def is_damaged(message: QueuedMessage) -> bool:
    """Whether a message is the stand-in for a damaged one."""
    return message.expires_us == _LONG_AGO_US


def tags_and_headers(attributes: bytes) -> tuple[tuple[str, ...], dict[str, object]]:
    """Return the tags and headers that filters read; none when the attributes are no map."""
    if not attributes:
        return (), {}
    try:
        fields = decode_bounded(attributes, "a message's attributes", depth_max=4, entries_max=_ATTRIBUTE_ENTRIES_MAX)
    except ProtocolError:
        return (), {}
    if not is_map(fields):
        return (), {}
    tags, headers = fields.get("t"), fields.get("h")
    found = [tag for tag in tags if isinstance(tag, str)] if is_list(tags) else []
    named = {k: v for k, v in headers.items() if isinstance(k, str)} if is_map(headers) else {}
    return tuple(found), named
