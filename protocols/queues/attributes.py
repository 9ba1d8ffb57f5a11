"""The attributes of a message: key, tags, priority, headers; their form on the wire and in stores. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Annotated, Final

from msgspec import Meta, Struct, ValidationError, convert, field

from dep2p.errors import HeadersTooLargeError, MessageTooLargeError, ProtocolError
from dep2p.protocols.queues.wire.frames import ATTRIBUTES_BYTES_MAX
from dep2p.protocols.wire.cbor import decode_bounded, encode_canonical
from dep2p.types import Headers

_TAGS_MAX: Final = 32
_HEADERS_MAX: Final = 64
_PRIORITY_MAX: Final = 255
_DELAY_MAX_S: Final = 10 * 365 * 86_400.0


@dataclass(frozen=True, slots=True)
class Attributes:
    """The attributes of a message: all but its body."""

    key: str = ""
    tags: tuple[str, ...] = ()
    priority: int = 0
    headers: Headers = dataclass_field(default_factory=dict[str, object])
    delay_ms: int = 0
    """Only on the way in."""


_Number = Annotated[int, Meta(ge=0, lt=1 << 53)]


class _AttributeFields(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Attributes as they go over the wire."""

    key: str = field(name="k", default="")
    tags: Annotated[tuple[str, ...], Meta(max_length=_TAGS_MAX)] = field(name="t", default=())
    priority: _Number = field(name="p", default=0)
    headers: Headers = field(name="h", default_factory=dict[str, object])
    delay_ms: _Number = field(name="d", default=0)


NO_ATTRIBUTES: Final = Attributes()


def encode_attributes(attributes: Attributes) -> bytes:
    """Encode attributes for the wire; those at their defaults are left out.

    Raises MessageTooLargeError for more than 16,384 bytes, ``ValueError`` for values that no consumer could read.
    """
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
    if not fields:
        return b""
    try:
        encoded = encode_canonical(fields)
        if attributes.headers or attributes.tags:
            decode_attributes(encoded)  # refuse values that a consumer could not read
    except MessageTooLargeError:
        raise
    except UnicodeEncodeError:
        raise ValueError(
            "key, tags and headers must be text that UTF-8 can encode: one holds half of a surrogate pair"
        ) from None
    except Exception as error:  # cbor2 raises errors of many types, by the value
        raise ValueError(f"the key, tags and headers of a message cannot be encoded: {error}") from error
    if len(encoded) > ATTRIBUTES_BYTES_MAX:
        raise HeadersTooLargeError(
            f"key, tags and headers of {len(encoded)} bytes together: at most {ATTRIBUTES_BYTES_MAX} are allowed; "
            "put the rest into the body"
        )
    return encoded


def encode_options(
    *,
    key: str = "",
    tags: Sequence[str] = (),
    priority: int = 0,
    delay_s: float = 0.0,
    headers: Headers | None = None,
) -> bytes:
    """Encode the attributes of a message with these options (`MessageOptions`). Raises what `encode_attributes`
    raises."""
    if not 0 <= delay_s <= _DELAY_MAX_S:
        raise ValueError(f"delay_s is {delay_s}: it is 0 to {_DELAY_MAX_S:g}")
    if not 0 <= priority <= _PRIORITY_MAX:
        raise ValueError(f"a priority of {priority}: it is 0 to {_PRIORITY_MAX}")
    if len(tags) > _TAGS_MAX:
        raise ValueError(f"{len(tags)} tags: at most {_TAGS_MAX} are allowed")
    return encode_attributes(Attributes(key, tuple(tags), priority, dict(headers or {}), round(delay_s * 1000)))


def decode_attributes(raw: bytes) -> Attributes:
    """Raises :class:`ProtocolError` for anything that `encode_attributes` does not make."""
    if not raw:
        return NO_ATTRIBUTES
    fields = decode_bounded(raw, "a message's attributes", depth_max=4, entries_max=_HEADERS_MAX)
    try:
        given = convert(fields, _AttributeFields)
    except ValidationError as error:
        raise ProtocolError(f"a message's attributes are malformed: {error}") from None
    return Attributes(given.key, given.tags, given.priority, given.headers, given.delay_ms)


def readable_attributes(raw: bytes) -> Attributes:
    """Decode the attributes of a stored message, for lists and for tasks that several messages share; damaged ones
    count as none."""
    try:
        return decode_attributes(raw)
    except ProtocolError:
        return NO_ATTRIBUTES
