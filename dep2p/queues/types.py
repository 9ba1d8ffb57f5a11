"""What goes into queues and comes out of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Final, NamedTuple, cast

from dep2p.errors import ProtocolError
from dep2p.protocols.queues.message import NewMessage
from dep2p.protocols.queues.wire import WireMessage
from dep2p.protocols.wire.cbor import decode_bounded, encode_canonical
from dep2p.types import Headers

_SEQ_BITS: Final = 40
_SEQ_MASK: Final = (1 << _SEQ_BITS) - 1
_TAGS_MAX: Final = 32
_HEADERS_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class Attributes:
    """What a message has besides its body."""

    key: str = ""
    tags: tuple[str, ...] = ()
    priority: int = 0
    headers: Headers = field(default_factory=dict[str, object])
    delay_ms: int = 0
    """On the way in only."""


NO_ATTRIBUTES: Final = Attributes()


class Delivery(NamedTuple):
    """A message as a consumer gets it."""

    partition: int
    seq: int
    attempts: int
    published_us: int
    deadline_s: float
    """``trio.current_time()`` at which it is not this consumer's any more."""
    attributes: bytes
    """As `encode_attributes` made them; mostly nobody looks at them."""
    body: bytes
    epoch: int = 0
    """In an exclusive channel: under which lock of its partition it was delivered."""


def message_id(partition: int, seq: int) -> str:
    """The id of a message as people and programs see it: 16 hex digits."""
    return f"{(partition << _SEQ_BITS) | seq:016x}"


def parse_message_id(text: str) -> tuple[int, int]:
    """Partition and sequence number of an id. Raises ``ValueError``."""
    if len(text) != 16:
        raise ValueError(f"{text[:40]!r} is no message id: it has 16 hex digits")
    number = int(text, 16)
    return number >> _SEQ_BITS, number & _SEQ_MASK


def encode_attributes(attributes: Attributes) -> bytes:
    """As they go over the wire; nothing for what is at its default."""
    fields: dict[str, object] = {}
    if attributes.key:
        fields["k"] = attributes.key
    if attributes.tags:
        fields["t"] = list(attributes.tags)
    if attributes.priority:
        fields["p"] = attributes.priority
    if attributes.headers:
        fields["h"] = attributes.headers
    if attributes.delay_ms:
        fields["d"] = attributes.delay_ms
    return encode_canonical(fields) if fields else b""


def decode_attributes(raw: bytes) -> Attributes:
    """Raises :class:`ProtocolError` for anything that `encode_attributes` does not make."""
    if not raw:
        return NO_ATTRIBUTES
    fields = decode_bounded(raw, "a message's attributes", depth_max=4, entries_max=_HEADERS_MAX)
    if not isinstance(fields, dict):
        raise ProtocolError("a message's attributes are no map")
    given = cast(dict[object, object], fields)
    if not all(name in ("k", "t", "p", "h", "d") for name in given):
        raise ProtocolError("a message has unknown attributes")
    key, tags, priority = given.get("k", ""), given.get("t", []), given.get("p", 0)
    headers, delay_ms = given.get("h", {}), given.get("d", 0)
    if (
        not isinstance(key, str)
        or not isinstance(tags, list)
        or len(cast(list[object], tags)) > _TAGS_MAX
        or not all(isinstance(tag, str) for tag in cast(list[object], tags))
        or not _is_number(priority)
        or not _is_number(delay_ms)
        or not isinstance(headers, dict)
        or not all(isinstance(name, str) for name in cast(dict[object, object], headers))
    ):
        raise ProtocolError("a message's attributes are malformed")
    return Attributes(
        key,
        tuple(cast(Sequence[str], tags)),
        cast(int, priority),
        cast(Headers, headers),
        cast(int, delay_ms),
    )


def new_messages(messages: Sequence[WireMessage]) -> list[NewMessage]:
    """What the core takes. Raises :class:`ProtocolError`."""
    return [
        NewMessage(body, *_for_core(attributes)) if attributes else NewMessage(body) for attributes, body in messages
    ]


@lru_cache(maxsize=64)
def _for_core(raw: bytes) -> tuple[bytes, str, int, float]:
    attributes = decode_attributes(raw)
    kept = encode_attributes(replace(attributes, delay_ms=0)) if attributes.delay_ms else raw
    return kept, attributes.key, attributes.priority, attributes.delay_ms / 1000


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53
