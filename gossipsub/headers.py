"""Headers of a published message: a canonical CBOR map in the signed part (docs/spec/pubsub.md §4).

Text keys are the app's; unsigned keys are dep2p's own (:class:`OwnHeader`). Values are text, bytes, integers of 64
bits, booleans, and flat lists of these.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from dep2p.arguments import WrongTypeError
from dep2p.encoding.cbor import ARRAY, BYTES, MAP, TEXT, UINT, CborReader, encode_bytes, encode_text, head
from dep2p.encoding.shapes import is_mapping, is_sequence
from dep2p.errors import ProtocolError

ENTRIES_MAX: Final = 64
"""Entries of a map of headers, and items of a list in it."""
APP_ENTRIES_MAX: Final = 60
"""Those of an app: the others are for dep2p's own, on this wire and on that of reliable delivery."""
HEADERS_BYTES_MAX: Final = 16_384
"""Encoded bytes of the headers of one message, on the wire. Together with the message they must fit the message's
limit, too."""

REPLY_TOKEN_BYTES: Final = 16
REPLY_TIMEOUT_MS_MAX: Final = 86_400_000

_NEGATIVE: Final = 1
_NUMBER_MAX: Final = (1 << 63) - 1
_TRUE: Final = b"\xf5"
_FALSE: Final = b"\xf4"
_KINDS: Final = "a text, bytes, a 64-bit integer, True or False, or a flat list of these"


class OwnHeader(IntEnum):
    """dep2p's own keys. A receiver passes over those that it does not know."""

    REPLY_TOKEN = 1
    """16 bytes: the author waits for answers to this message; an answer gives the token back."""
    TIMEOUT_MS = 2
    """Unsigned, with REPLY_TOKEN: how long the author waits, from its publish on."""


@dataclass(frozen=True, slots=True)
class ReplyWanted:
    """The author of a message waits for answers."""

    token: bytes
    until_s: float
    """When it surely waits no more, on the clock of this node: the message may have been on its way for a while."""


class MessageHeaders(Mapping[str, object]):
    """The headers of one message, shared by all of its receivers here: read-only. Iterating gives the app's."""

    __slots__ = ("_app", "encoded", "own", "size_bytes")

    def __init__(self, app: Mapping[str, object], own: Mapping[int, object], encoded: bytes) -> None:
        self._app = app
        self.own: Mapping[int, object] = own
        """dep2p's own, by :class:`OwnHeader`."""
        self.encoded: bytes = encoded
        """The CBOR map; empty for a message without headers."""
        self.size_bytes: int = len(encoded)

    def __getitem__(self, name: str) -> object:
        return self._app[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._app)

    def __len__(self) -> int:
        return len(self._app)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, MessageHeaders):
            return self.encoded == other.encoded
        return super().__eq__(other)

    def __hash__(self) -> int:
        return hash(self.encoded)

    def __repr__(self) -> str:
        return repr(self._app)


NO_HEADERS: Final = MessageHeaders({}, {}, b"")
"""Those of every message without headers: compare with ``is``."""


def reply_wanted(headers: MessageHeaders, now: float) -> ReplyWanted | None:
    """Return how to answer a message that came ``now``; None when its author waits for no answer, or says so in a form
    that is not understood."""
    token, timeout_ms = headers.own.get(OwnHeader.REPLY_TOKEN), headers.own.get(OwnHeader.TIMEOUT_MS)
    if type(token) is not bytes or len(token) != REPLY_TOKEN_BYTES or type(timeout_ms) is not int:
        return None
    if not 1 <= timeout_ms <= REPLY_TIMEOUT_MS_MAX:
        return None
    return ReplyWanted(token, now + timeout_ms / 1000)


def message_headers(
    app: Mapping[str, object] | None,
    own: Mapping[int, object] | None = None,
    *,
    bytes_max: int = HEADERS_BYTES_MAX,
) -> MessageHeaders:
    """Check and encode headers; NO_HEADERS when there are none.

    Raises `WrongTypeError` for headers that are no mapping, and ``ValueError`` for a name or a value that is not
    allowed, more than 60 of them, or more than ``bytes_max`` encoded.
    """
    if app is not None and not is_mapping(app):
        raise WrongTypeError(f"headers must be a dict of names and values, not {type(app).__name__}")
    if not app and not own:
        return NO_HEADERS
    entries: list[tuple[bytes, bytes]] = []
    kept: dict[str, object] = {}
    for name, value in (app or {}).items():
        if type(name) is not str or not name:
            raise ValueError(f"header name {name!r} is not a text of at least one character")
        try:
            entries.append((encode_text(name), _encoded(value)))
        except UnicodeEncodeError:
            raise ValueError("headers hold text that UTF-8 cannot encode: half of a surrogate pair") from None
        except TypeError:
            raise ValueError(f"header {name!r}: a value is {_KINDS}, not {type(value).__name__}") from None
        kept[name] = list(value) if is_sequence(value) else value
    if len(entries) > APP_ENTRIES_MAX:
        raise ValueError(f"{len(entries)} headers: at most {APP_ENTRIES_MAX} are allowed")
    entries += [(head(UINT, key), _encoded(value)) for key, value in (own or {}).items()]
    entries.sort()
    encoded = head(MAP, len(entries)) + b"".join([key + value for key, value in entries])
    most = min(bytes_max, HEADERS_BYTES_MAX)
    if len(encoded) > most:
        raise ValueError(f"headers of {len(encoded)} bytes: at most {most} are allowed")
    return MessageHeaders(kept, dict(own or {}), encoded)


def _encoded(value: object, *, in_list: bool = False) -> bytes:
    """Raises ``TypeError`` for a value that is not allowed."""
    if isinstance(value, bool):
        return _TRUE if value else _FALSE
    if isinstance(value, int):
        number = int(value)
        if not -_NUMBER_MAX - 1 <= number <= _NUMBER_MAX:
            raise TypeError
        return head(UINT, number) if number >= 0 else head(_NEGATIVE, -1 - number)
    if isinstance(value, str):
        return encode_text(value)
    if isinstance(value, bytes):
        return encode_bytes(value)
    if is_sequence(value) and not in_list:
        if len(value) > ENTRIES_MAX:
            raise ValueError(f"a header's list of {len(value)}: at most {ENTRIES_MAX} items are allowed")
        return head(ARRAY, len(value)) + b"".join([_encoded(item, in_list=True) for item in value])
    raise TypeError


def read_headers(reader: CborReader) -> MessageHeaders:
    """Read the headers of a message. Raises :class:`ProtocolError`, also for none: such a message has another form."""
    start = reader.position
    count = reader.map(ENTRIES_MAX)
    app: dict[str, object] = {}
    own: dict[int, object] = {}
    last = b""
    for _ in range(count):
        key_start = reader.position
        if _major(reader) == UINT:
            name: int | str = reader.uint()
        else:
            name = reader.text(HEADERS_BYTES_MAX)
            if not name:
                raise ProtocolError("a header without a name")
        key = reader.data[key_start : reader.position]
        if key <= last:
            raise ProtocolError("the headers are not in order")
        last = key
        value = _read_value(reader, may_be_list=True)
        if isinstance(name, int):
            own[name] = value
        else:
            app[name] = value
    encoded = reader.data[start : reader.position]
    if not count or len(encoded) > HEADERS_BYTES_MAX:
        raise ProtocolError(f"headers of {len(encoded)} bytes: 1 to {HEADERS_BYTES_MAX} are taken, with an entry")
    return MessageHeaders(app, own, encoded)


def _major(reader: CborReader) -> int:
    if reader.position >= len(reader.data):
        raise ProtocolError("the message is cut off")
    return reader.data[reader.position] >> 5


def _read_value(reader: CborReader, *, may_be_list: bool) -> object:
    major = _major(reader)
    if major == TEXT:
        return reader.text(HEADERS_BYTES_MAX)
    if major == BYTES:
        return reader.bytes_(HEADERS_BYTES_MAX)
    if major == UINT or major == _NEGATIVE:
        number = reader.integer()
        if not -_NUMBER_MAX - 1 <= number <= _NUMBER_MAX:
            raise ProtocolError("a header holds a number of more than 64 bits")
        return number
    if major == ARRAY and may_be_list:
        return [_read_value(reader, may_be_list=False) for _ in range(reader.array(ENTRIES_MAX))]
    return reader.boolean()
