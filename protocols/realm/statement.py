"""A member's words about itself in its record: fields, services that it offers, groups of topics that it reads in
(docs/spec/realm.md §4.6). Pure.

All texts come from members: show them through `dep2p.outside_text`. The bounds hold for each record, so that a realm of
ten thousand members costs a bounded amount of memory on each of them.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from dep2p.encoding.decoded import is_array, is_array_of, is_map
from dep2p.errors import ProtocolError

FIELDS_MAX: Final = 16
FIELD_KEY_BYTES_MAX: Final = 32
FIELD_VALUE_BYTES_MAX: Final = 256
FIELDS_BYTES_MAX: Final = 1_024
"""Bytes of all keys and values of a member's fields."""
SERVICES_MAX: Final = 64
GROUPS_MAX: Final = 64
SERVICE_NAME_BYTES_MAX: Final = 255
GROUP_BYTES_MAX: Final = 64
VERSION_BYTES_MAX: Final = 32
SCHEMA_BYTES_MAX: Final = 128
GROUP_TOPIC_BYTES_MAX: Final = 255
OFFERS_BYTES_MAX: Final = 2_048
"""Bytes of all texts of a member's services and groups together."""
STATEMENT_ENTRIES_MAX: Final = max(FIELDS_MAX, SERVICES_MAX, GROUPS_MAX)
STATEMENT_DEPTH_MAX: Final = 3


@dataclass(frozen=True, slots=True, order=True)
class ServiceOffer:
    """A name of requests that the programs of one node answer together, for every member that asks any of them."""

    name: str
    group: str
    """The programs that share the requests."""
    version: str = ""
    schema: str = ""
    """The form of requests and answers, by any text that callers compare as a whole, such as a hash."""


@dataclass(frozen=True, slots=True, order=True)
class TopicGroup:
    """The subscriptions of many members to one topic of which one gets each message."""

    topic: str
    group: str


@dataclass(frozen=True, slots=True)
class MemberStatement:
    """A member's words about itself. ``services`` and ``groups`` are in rising order, without repeats."""

    fields: Mapping[str, str] = field(default_factory=dict[str, str])
    services: tuple[ServiceOffer, ...] = ()
    groups: tuple[TopicGroup, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.fields or self.services or self.groups)


def check_statement(statement: MemberStatement) -> None:
    """Raises ``ValueError`` with a sentence about the bound that is broken."""
    check_fields(statement.fields)
    check_offers(statement.services, statement.groups)


def check_fields(fields: Mapping[str, str]) -> None:
    """Raises ``ValueError`` when a member may not have these fields."""
    if len(fields) > FIELDS_MAX:
        raise ValueError(f"{len(fields)} fields: a member has at most {FIELDS_MAX}")
    for key, value in fields.items():
        if not _is_key(key):
            raise ValueError(
                f"the field {key[:80]!r}: a key has 1 to {FIELD_KEY_BYTES_MAX} letters, digits, dots, dashes and "
                "underscores"
            )
        _check_text(value, f"the value of the field {key!r}", FIELD_VALUE_BYTES_MAX, may_be_empty=True)
    size = sum(len(key) + len(value.encode()) for key, value in fields.items())
    if size > FIELDS_BYTES_MAX:
        raise ValueError(f"the fields have {size} bytes: at most {FIELDS_BYTES_MAX} in all. Keep state in a database")


def check_offers(services: Sequence[ServiceOffer], groups: Sequence[TopicGroup]) -> None:
    """Raises ``ValueError`` when a member may not offer these services and read in these groups."""
    if len(services) > SERVICES_MAX:
        raise ValueError(f"{len(services)} services: a member offers at most {SERVICES_MAX}")
    if len(groups) > GROUPS_MAX:
        raise ValueError(f"{len(groups)} groups of topics: a member reads in at most {GROUPS_MAX}")
    size = 0
    for offer in services:
        check_offer(offer)
        size += _bytes_of(offer.name, offer.group, offer.version, offer.schema)
    for group in groups:
        check_group(group)
        size += _bytes_of(group.topic, group.group)
    if size > OFFERS_BYTES_MAX:
        raise ValueError(
            f"the names of services and groups have {size} bytes: at most {OFFERS_BYTES_MAX} in all. Take shorter "
            "names, or fewer"
        )
    names = [offer.name for offer in services]
    if any(first >= second for first, second in itertools.pairwise(names)):
        raise ValueError("services are not in rising order of their names, each once")
    if any(first >= second for first, second in itertools.pairwise(groups)):
        raise ValueError("groups are not in rising order, each once")


def check_offer(offer: ServiceOffer) -> None:
    """Raises ``ValueError`` when a text of the offer is empty, too long, or has control characters."""
    _check_text(offer.name, "the name of a service", SERVICE_NAME_BYTES_MAX)
    _check_text(offer.group, "the group of a service", GROUP_BYTES_MAX)
    _check_text(offer.version, "the version of a service", VERSION_BYTES_MAX, may_be_empty=True)
    _check_text(offer.schema, "the schema of a service", SCHEMA_BYTES_MAX, may_be_empty=True)


def check_group(group: TopicGroup) -> None:
    """Raises ``ValueError`` when a text of the group is empty, too long, or has control characters."""
    _check_text(group.topic, "the topic of a group", GROUP_TOPIC_BYTES_MAX)
    _check_text(group.group, "the name of a group", GROUP_BYTES_MAX)


def encode_services(services: Sequence[ServiceOffer]) -> list[object]:
    """Return the services as arrays for CBOR."""
    return [[offer.name, offer.group, offer.version, offer.schema] for offer in services]


def encode_groups(groups: Sequence[TopicGroup]) -> list[object]:
    """Return the groups as arrays for CBOR."""
    return [[group.topic, group.group] for group in groups]


def decode_statement(fields: object, services: object, groups: object) -> MemberStatement:
    """Return the statement of decoded CBOR; None stands for a part that is absent. Raises :class:`ProtocolError`."""
    statement = MemberStatement(_fields(fields), _services(services), _groups(groups))
    try:
        check_statement(statement)
    except ValueError as error:
        raise ProtocolError(f"a member record's statement: {error}") from None
    return statement


def _fields(value: object) -> dict[str, str]:
    if value is None:
        return {}
    if not is_map(value):
        raise ProtocolError("a member record's fields are no map")
    fields: dict[str, str] = {}
    for key, text in value.items():
        if not isinstance(key, str) or not isinstance(text, str):
            raise ProtocolError("a member record's field is no text")
        fields[key] = text
    return fields


def _services(value: object) -> tuple[ServiceOffer, ...]:
    return tuple(ServiceOffer(*texts) for texts in _rows(value, 4, "service"))


def _groups(value: object) -> tuple[TopicGroup, ...]:
    return tuple(TopicGroup(*texts) for texts in _rows(value, 2, "group"))


def _rows(value: object, size: int, what: str) -> list[list[str]]:
    if value is None:
        return []
    if not is_array(value):
        raise ProtocolError(f"a member record's {what}s are no list")
    rows: list[list[str]] = []
    for row in value:
        if not is_array_of(row, size):
            raise ProtocolError(f"a member record's {what} is not {size} texts")
        texts = [text for text in row if isinstance(text, str)]
        if len(texts) < size:
            raise ProtocolError(f"a member record's {what} is not {size} texts")
        rows.append(texts)
    return rows


def _is_key(key: str) -> bool:
    return 0 < len(key) <= FIELD_KEY_BYTES_MAX and key.isascii() and all(c.isalnum() or c in "._-" for c in key)


def _check_text(text: str, what: str, bytes_max: int, *, may_be_empty: bool = False) -> None:
    try:
        size = len(text.encode("utf-8"))
    except UnicodeEncodeError:
        raise ValueError(f"{what} {text[:80]!r} is not valid Unicode") from None
    if size > bytes_max or not (size or may_be_empty):
        least = 0 if may_be_empty else 1
        raise ValueError(f"{what} has {size} bytes: it must have {least} to {bytes_max}")
    # Not `isprintable`: members with other versions of Unicode must judge alike.
    if any(char < " " or "\x7f" <= char <= "\x9f" for char in text):
        raise ValueError(f"{what} {text[:80]!r} has control characters")


def _bytes_of(*texts: str) -> int:
    return sum(len(text.encode("utf-8")) for text in texts)
