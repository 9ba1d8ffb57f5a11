"""The encodings that the daemon's control API and its client share: payloads and headers in JSON, NDJSON lines, item
framing.

Pure, and free of the node: the client imports it too. The contract is docs/reference/control-api.md.
"""

import base64
import binascii
import json
from collections import deque
from collections.abc import Mapping
from typing import Final, cast

import msgspec
from msgspec import Struct

from dep2p.encoding.shapes import is_list, is_map
from dep2p.types import Headers

ITEM_ABORT: Final = 0xFFFF_FFFF
"""In place of an item's length: the stream failed. The next item is an RFC 9457 problem and the last of the body."""
LENGTH_BYTES: Final = 4


def encode_payload(data: bytes) -> dict[str, object]:
    """Encode ``data`` as JSON fields."""
    return {"data": base64.b64encode(data).decode("ascii"), "encoding": "base64"}


def decode_payload(data: str, encoding: str = "base64") -> bytes:
    """Decode the bytes of a payload's fields. Raises ``ValueError`` with a sentence."""
    if encoding == "base64":
        try:
            return base64.b64decode(data, validate=True)
        except (binascii.Error, ValueError) as error:
            raise ValueError(f"data is not base64 ({error}); text may be sent with encoding utf-8") from None
    if encoding == "utf-8":
        return data.encode("utf-8")
    raise ValueError(f'encoding {encoding!r} is not "base64" or "utf-8"')


def encode_headers(headers: Mapping[str, object]) -> dict[str, object]:
    """App headers as JSON; bytes become ``{"data", "encoding"}``."""
    return {name: _encode_value(value) for name, value in headers.items() if type(name) is str}


def _encode_value(value: object) -> object:
    if isinstance(value, bytes):
        return encode_payload(value)
    if isinstance(value, tuple):
        return [_encode_value(item) for item in cast(tuple[object, ...], value)]
    if is_list(value):
        return [_encode_value(item) for item in value]
    return value


def decode_headers(fields: dict[str, object]) -> Headers:
    """App headers from JSON: texts, integers, booleans, bytes, and flat lists of these. Raises ``ValueError``."""
    headers: dict[str, object] = {}
    for name, value in fields.items():
        name.encode("utf-8")  # a lone surrogate is a UnicodeEncodeError, which is a ValueError
        if is_list(value):
            headers[name] = [_decode_value(name, item) for item in value]
        else:
            headers[name] = _decode_value(name, value)
    return headers


def _decode_value(name: str, value: object) -> object:
    if is_map(value):
        data, encoding = value.get("data"), value.get("encoding")
        if isinstance(data, str) and isinstance(encoding, str) and set(value) <= {"data", "encoding", "text"}:
            return decode_payload(data, encoding)
    elif isinstance(value, str):
        value.encode("utf-8")
        return value
    elif isinstance(value, bool) or (isinstance(value, int) and -(2**63) <= value < 2**63):
        return value
    raise ValueError(
        f'header {name!r}: a value is a text, a 64-bit integer, true or false, {{"data", "encoding"}} for bytes, '
        "or a flat list of these"
    )


def fields_of(body: Struct) -> dict[str, object]:
    """The JSON fields of a call, a reply, or a part of one."""
    fields: dict[str, object] = msgspec.to_builtins(body)
    return fields


def encode_line(value: Struct | dict[str, object]) -> bytes:
    """One NDJSON line, ASCII, so that no reader splits it at an exotic line end."""
    fields = fields_of(value) if isinstance(value, Struct) else value
    return json.dumps(fields, separators=(",", ":")).encode("ascii") + b"\n"


def encode_item(item: bytes) -> bytes:
    """An item with its length before it."""
    return len(item).to_bytes(LENGTH_BYTES, "big") + item


class ItemTooLargeError(ValueError):
    """An item's length is over the bound."""


class ItemSplitter:
    """Puts items together from a body that arrives in pieces; never buffers more than one item and one piece."""

    __slots__ = ("_buffer", "_item_bytes_max", "aborted")

    def __init__(self, item_bytes_max: int) -> None:
        self._buffer = bytearray()
        self._item_bytes_max = item_bytes_max
        self.aborted: bool = False
        """True from the length ITEM_ABORT on: the next item is a problem."""

    @property
    def is_inside_item(self) -> bool:
        """Whether a part of an item has arrived."""
        return bool(self._buffer)

    def feed(self, piece: bytes) -> list[bytes]:
        """Take a piece; return the items that are complete now. Raises :class:`ItemTooLargeError`."""
        buffer = self._buffer
        buffer += piece
        items: list[bytes] = []
        position, end = 0, len(buffer)
        while end - position >= LENGTH_BYTES:
            start = position + LENGTH_BYTES
            length = int.from_bytes(buffer[position:start], "big")
            if length == ITEM_ABORT:
                self.aborted = True
                position = start
                continue
            if length > self._item_bytes_max:
                raise ItemTooLargeError(f"an item of {length} bytes; the most is {self._item_bytes_max}")
            if end - start < length:
                break
            position = start + length
            with memoryview(buffer) as view:
                items.append(bytes(view[start:position]))
        if position:
            del buffer[:position]
        return items


class LineSplitter:
    """Splits a body that arrives in pieces into lines, without their ends; empty lines are left out."""

    __slots__ = ("_buffer", "_line_bytes_max")

    def __init__(self, line_bytes_max: int) -> None:
        self._buffer = bytearray()
        self._line_bytes_max = line_bytes_max

    @property
    def is_inside_line(self) -> bool:
        """Whether a part of a line has arrived."""
        return bool(self._buffer)

    def feed(self, piece: bytes) -> deque[bytes]:
        """Take a piece; return the lines that are complete now. Raises ``ValueError`` when one is over the bound."""
        self._buffer += piece
        *lines, rest = self._buffer.split(b"\n")
        if len(rest) > self._line_bytes_max:
            raise ValueError(f"a line of more than {self._line_bytes_max} bytes")
        self._buffer = rest
        return deque(bytes(line) for line in lines if line)
