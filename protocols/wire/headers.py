"""Message headers: a CBOR map in front of a payload (flag HEADERS, docs/spec/frame.md).

Integer keys are dep2p's own (:class:`HeaderKey`), text keys are the app's. Only definite lengths, no tags, bounded in
bytes, entries and depth, and walked before anything is decoded, so that hostile CBOR costs nothing.
"""

from collections.abc import Mapping
from enum import IntEnum
from typing import Final

import cbor2

from dep2p.arguments import WrongTypeError
from dep2p.encoding.cbor import Bounds, item_end
from dep2p.encoding.shapes import is_map, is_mapping
from dep2p.errors import ProtocolError
from dep2p.types import Headers


class HeaderKey(IntEnum):
    """dep2p's own header keys."""

    NAME = 1
    """Text: the app's protocol name of a request, notify or stream."""
    TIMEOUT_MS = 2
    """Unsigned: how long the caller waits from now on; the server stops working for it then."""
    IDEMPOTENT = 3
    """True when the request may be handled more than once."""
    RETRY_AFTER_MS = 4
    """Unsigned, on ERROR/RATE_LIMITED."""
    FEATURES = 5
    """List of text: what this side offers, for example "zstd"."""
    TOPIC = 6
    """Text, on a reliable message for pub/sub: its topic."""
    SEQNO = 7
    """8 bytes, with TOPIC: the message's sequence number in pub/sub."""


HeaderMap = dict[int | str, object]

_ENTRIES_MAX: Final = 64
_BOUNDS: Final = Bounds(depth_max=3, entries_max=_ENTRIES_MAX, floats=True)


def encode_headers(own: Mapping[int, object], app: Mapping[str, object] | None = None) -> bytes:
    """Encode a header map as canonical CBOR.

    Raises ``ValueError`` when an app header's value cannot be encoded or there are more than 64 entries,
    `WrongTypeError` for app headers that are no mapping.
    """
    entries: HeaderMap = {int(key): value for key, value in own.items()}
    if app:
        if not is_mapping(app):
            raise WrongTypeError(f"headers must be a dict of names and values, not {type(app).__name__}")
        for key, value in app.items():
            if type(key) is not str:
                raise ValueError(f"header name {key!r} is not text")
            entries[key] = value
    if len(entries) > _ENTRIES_MAX:
        raise ValueError(f"{len(entries)} headers: at most {_ENTRIES_MAX} are allowed")
    try:
        encoded = cbor2.dumps(entries, canonical=True)
    except UnicodeEncodeError:
        raise ValueError("headers hold text that UTF-8 cannot encode: half of a surrogate pair") from None
    except (cbor2.CBOREncodeError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"headers cannot be encoded as CBOR: {error}") from error
    try:
        headers_end(encoded, 0, len(encoded))
    except ProtocolError as error:
        raise ValueError(f"headers hold a value that is not allowed: {error}") from error
    return encoded


def headers_end(data: bytes, start: int, bytes_max: int) -> int:
    """Return where the header map that starts at ``start`` ends, without decoding it.

    Raises :class:`ProtocolError` for indefinite lengths, tags, too deep nesting, truncation or more than ``bytes_max``.
    """
    return item_end(data, start, min(len(data), start + bytes_max), _BOUNDS, "headers")


def decode_headers(data: bytes) -> HeaderMap:
    """Decode exactly one header map. Raises :class:`ProtocolError`."""
    try:
        decoded: object = cbor2.loads(data)
    except Exception as error:  # cbor2 leaks UnicodeDecodeError, OverflowError and others on hostile input
        raise ProtocolError(f"headers are not CBOR: {type(error).__name__}") from None
    if not is_map(decoded):
        raise ProtocolError("headers are not a CBOR map")
    entries: HeaderMap = {}
    for key, value in decoded.items():
        if type(key) is not int and type(key) is not str:
            raise ProtocolError("a header's key is neither an integer nor text")
        entries[key] = value
    return entries


class HeaderReader:
    """Splits payloads into headers and body, with a memory of the last header maps.

    A CBOR item marks its own end, so no header map is a proper prefix of another: when a payload starts with the
    bytes of a map seen before, that is its map. Peers repeat a few maps (same name, same timeout) millions of times.
    The returned maps are shared: read, never change them.
    """

    __slots__ = ("_bytes_max", "_last", "_last_headers", "_recent")
    _RECENT_MAX: Final = 8

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._recent: list[tuple[bytes, HeaderMap]] = []
        self._last = b""  # the map of the last payload: usually that of the next one, too
        self._last_headers: HeaderMap = {}

    def split(self, payload: bytes) -> tuple[HeaderMap, bytes]:
        """Return headers and body of a payload whose frame has the flag HEADERS. Raises :class:`ProtocolError`."""
        last = self._last
        if last and payload.startswith(last):
            return self._last_headers, payload[len(last) :]
        recent = self._recent
        for index, (prefix, headers) in enumerate(recent):
            if payload.startswith(prefix):
                recent.insert(0, recent.pop(index))
                self._last, self._last_headers = prefix, headers
                return headers, payload[len(prefix) :]
        end = headers_end(payload, 0, self._bytes_max)
        prefix = payload[:end]
        headers = decode_headers(prefix)
        recent.insert(0, (prefix, headers))
        del recent[self._RECENT_MAX :]
        self._last, self._last_headers = prefix, headers
        return headers, payload[end:]


def app_headers(headers: HeaderMap) -> Headers:
    """Return the app's part of a header map."""
    return {key: value for key, value in headers.items() if isinstance(key, str)}


def header_uint(headers: HeaderMap, key: int) -> int | None:
    """Return an unsigned header of dep2p's own; None when absent. Raises :class:`ProtocolError` otherwise."""
    value = headers.get(key)
    if value is None:
        return None
    if type(value) is int and 0 <= value <= 0xFFFF_FFFF:
        return value
    raise ProtocolError(f"header {key} is not an unsigned 32-bit integer")
