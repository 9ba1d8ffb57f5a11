"""A message of a queue: what its publisher says, and how it is kept."""

import struct
from typing import Final, NamedTuple, cast

from dep2p.errors import ProtocolError
from dep2p.protocols.queues.records import MessageRow
from dep2p.protocols.wire.cbor import decode_bounded

_META: Final = struct.Struct(">QQQIB")
pack_meta = _META.pack
"""published_us, due_us, expires_us, only_channel, priority: the beginning of a row's meta; attributes follow."""
_LONG_AGO_US: Final = 1
_ATTRIBUTE_ENTRIES_MAX: Final = 64
OVERHEAD_BYTES: Final = 512
"""What a message in memory counts for besides its body: its fields, and its places in the log and the cache."""


class NewMessage(NamedTuple):
    """What is published. ``attributes``: encoded CBOR map, or nothing (`dep2p.queues.types.encode_attributes`)."""

    body: bytes
    attributes: bytes = b""
    key: str = ""
    priority: int = 0
    delay_s: float = 0.0


class Message(NamedTuple):
    """A message in memory."""

    seq: int
    published_us: int
    due_us: int
    """Deferred by its publisher until then, Unix microseconds; 0: it was not."""
    expires_us: int
    """0: never."""
    only_channel: int
    """It is for this channel alone (a replayed dead letter); 0: for all."""
    priority: int
    attributes: bytes
    body: bytes


def encode_meta(message: Message) -> bytes:
    """All but the body; `decode_row` reads it."""
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


def decode_row(row: MessageRow) -> Message:
    """A stored message. Raises :class:`ProtocolError` for a damaged one."""
    meta = row.meta
    if len(meta) < _META.size:
        raise ProtocolError(f"message {row.seq} of partition {row.partition} is damaged")
    published_us, due_us, expires_us, only_channel, priority = _META.unpack_from(meta)
    attributes = meta[_META.size :]
    return Message(row.seq, published_us, due_us, expires_us, only_channel, priority, attributes, row.body)


def damaged(seq: int) -> Message:
    """What stands in the place of a damaged message: one that has expired, which channels and the sweep pass by."""
    return Message(seq, 0, 0, _LONG_AGO_US, 0, 0, b"", b"")


def is_damaged(message: Message) -> bool:
    """Whether it is only the place of one."""
    return message.expires_us == _LONG_AGO_US


def tags_and_headers(attributes: bytes) -> tuple[tuple[str, ...], dict[str, object]]:
    """What a filter looks at; nothing for attributes that are no map."""
    if not attributes:
        return (), {}
    try:
        fields = decode_bounded(attributes, "a message's attributes", depth_max=4, entries_max=_ATTRIBUTE_ENTRIES_MAX)
    except ProtocolError:
        return (), {}
    if not isinstance(fields, dict):
        return (), {}
    given = cast(dict[object, object], fields)
    tags, headers = given.get("t"), given.get("h")
    found = [tag for tag in cast(list[object], tags) if isinstance(tag, str)] if isinstance(tags, list) else []
    named: dict[str, object] = {}
    if isinstance(headers, dict):
        named = {k: v for k, v in cast(dict[object, object], headers).items() if isinstance(k, str)}
    return tuple(found), named
