"""Reading what control clients send: bounded bodies, and fields with the name of what is wrong."""

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, TypeVar, cast

import trio
from starlette.requests import ClientDisconnect, Request

from dep2p.config.values import nearest
from dep2p.control_api.encoding import decode_headers, decode_payload
from dep2p.daemon.bounds import ControlBounds
from dep2p.daemon.problems import Problem
from dep2p.errors import MessageTooLargeError
from dep2p.types import Headers, PeerId, parse_peer_id

_NAME_BYTES_MAX = 255
T = TypeVar("T", bound=str)


async def read_json(request: Request, bounds: ControlBounds) -> "Fields":
    """The request's body as fields; an empty body is an empty object. Raises :class:`Problem`."""
    raw = await read_body(request, bounds.json_bytes_max, bounds.body_timeout_s)
    return parse_json(raw) if raw else Fields({})


def parse_json(raw: bytes, what: str = "the body") -> "Fields":
    """A JSON object as fields. Raises :class:`Problem`."""
    try:
        value = cast(object, json.loads(raw, parse_constant=_no_constant))
    except RecursionError:
        raise Problem("D1005", f"{what} is not JSON: it is nested too deeply") from None
    except ValueError as error:
        raise Problem("D1005", f"{what} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise Problem("D1005", f"{what} is not a JSON object")
    return Fields(cast(dict[str, object], value))


async def read_body(request: Request, bytes_max: int, timeout_s: float) -> bytes:
    """The whole body. Raises :class:`Problem` when it is too large or too slow."""
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > bytes_max:
        raise Problem("D1007", f"the body has {announced} bytes; the most here is {bytes_max}")
    pieces: list[bytes] = []
    size = 0
    with trio.move_on_after(timeout_s) as scope:
        more = True
        while more:
            message = await request.receive()
            if message["type"] != "http.request":
                raise ClientDisconnect
            piece = cast(bytes, message.get("body", b""))
            size += len(piece)
            if size > bytes_max:
                raise Problem("D1007", f"the body is longer than the {bytes_max} bytes that are taken here")
            pieces.append(piece)
            more = bool(message.get("more_body", False))
    if scope.cancelled_caught:
        raise Problem("D1009", f"the body did not arrive within {timeout_s:g} s")
    return b"".join(pieces)


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def query_fields(request: Request) -> "Fields":
    """The query parameters as fields of texts. Raises :class:`Problem` for a repeated one."""
    values: dict[str, object] = {}
    for name, value in request.query_params.multi_items():
        if name in values:
            raise Problem("D1005", f"the query parameter {name[:80]!r} is given twice")
        values[name] = value
    return Fields(values, "query parameter")


class Fields:
    """Takes fields one by one, checks each, and at the end refuses those that nobody asked for."""

    def __init__(self, values: Mapping[str, object], noun: str = "field") -> None:
        self._values = dict(values)
        self._noun = noun
        self._asked: dict[str, None] = {}

    def wrong(self, name: str, why: str) -> Problem:
        """The problem of a field."""
        return Problem("D1005", f"{self._noun} {name!r}: {why}", field=name)

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        self._asked[name] = None
        return self._values.get(name) is not None

    def _take(self, name: str) -> object:
        self._asked[name] = None
        return self._values.get(name)

    def text(self, name: str, default: str | None = None, *, bytes_max: int = 65_536) -> str:
        """A text. Without ``default`` it must be there."""
        value = self._take(name)
        if value is None:
            if default is None:
                raise self.wrong(name, "is missing")
            return default
        if not isinstance(value, str):
            raise self.wrong(name, f"is not a text but {_kind(value)}")
        try:
            size = len(value.encode("utf-8"))
        except UnicodeEncodeError:
            raise self.wrong(name, "is not valid Unicode") from None
        if size > bytes_max:
            raise self.wrong(name, f"has {size} bytes; the most is {bytes_max}")
        return value

    def optional_text(self, name: str) -> str | None:
        """A text, or None when it is not there."""
        return self.text(name) if self.has(name) else None

    def name(self, field: str = "name") -> str:
        """The name of a request, notify or stream: 1 to 255 bytes, printable."""
        value = self.text(field, bytes_max=_NAME_BYTES_MAX)
        if not value or not value.isprintable():
            raise self.wrong(field, "a name has 1 to 255 bytes, all printable")
        return value

    def number(
        self, name: str, default: float, *, low: float = 0.0, high: float = math.inf, may_be_low: bool = False
    ) -> float:
        """A number greater than ``low``, or ``low`` itself when that is allowed, at most ``high``."""
        value = self._take(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, f"is not a number but {_kind(value)}")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not (low < number <= high or (may_be_low and number == low)) or not math.isfinite(number):
            bound = "at least" if may_be_low else "more than"
            raise self.wrong(name, f"is out of range: {bound} {low:g}, at most {high:g}")
        return number

    def integer(self, name: str, default: int, *, low: int, high: int) -> int:
        """A whole number from ``low`` to ``high``."""
        value = self._take(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(name, f"is not a whole number but {_kind(value)}")
        if not low <= value <= high:
            raise self.wrong(name, f"is out of range: {low} to {high}")
        return value

    def integer_text(self, name: str, default: int, *, low: int, high: int) -> int:
        """A whole number that is written as text, as in a query."""
        text = self.text(name, str(default))
        if not text.isascii() or not text.isdecimal() or len(text) > 18 or not low <= int(text) <= high:
            raise self.wrong(name, f"is not a whole number from {low} to {high}")
        return int(text)

    def choice(self, name: str, choices: tuple[T, ...]) -> T:
        """One of some texts; the first when it is not there."""
        text = self.text(name, choices[0])
        for choice in choices:
            if choice == text:
                return choice
        raise self.wrong(name, f"is none of {', '.join(choices)}")

    def boolean(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, f"is not true or false but {_kind(value)}")
        return value

    def texts(self, name: str, *, items_max: int) -> list[str]:
        """A list of texts; empty when it is not there."""
        value = self._take(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.wrong(name, f"is not a list but {_kind(value)}")
        items = cast(list[object], value)
        if len(items) > items_max or not all(isinstance(item, str) for item in items):
            raise self.wrong(name, f"is not a list of at most {items_max} texts")
        return [Fields({name: item}, self._noun).text(name) for item in items]

    def integers(self, name: str, *, items_max: int) -> list[int]:
        """A list of whole numbers that are not negative; empty when it is not there."""
        value = self._list(name, items_max)
        if not all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 1 << 63 for item in value):
            raise self.wrong(name, "is not a list of whole numbers")
        return cast(list[int], value)

    def objects(self, name: str, *, items_max: int) -> list[dict[str, object]]:
        """A list of objects; empty when it is not there."""
        value = self._list(name, items_max)
        if not all(isinstance(item, dict) for item in value):
            raise self.wrong(name, "is not a list of objects")
        return cast(list[dict[str, object]], value)

    def _list(self, name: str, items_max: int) -> list[object]:
        value = self._take(name)
        if value is None:
            return []
        if not isinstance(value, list) or len(cast(list[object], value)) > items_max:
            raise self.wrong(name, f"is not a list of at most {items_max} entries")
        return cast(list[object], value)

    def mapping(self, name: str) -> dict[str, object]:
        """An object, whose fields are checked by whom it is for; empty when it is not there."""
        value = self._take(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.wrong(name, f"is not an object but {_kind(value)}")
        return cast(dict[str, object], value)

    def payload(self, bytes_max: int, *, required: bool = True) -> bytes:
        """``data`` and ``encoding`` as bytes. Raises MessageTooLargeError above ``bytes_max``."""
        encoding = self.text("encoding", "base64")
        if not required and not self.has("data"):
            return b""
        text = self.text("data", bytes_max=bytes_max * 2 + 64)
        try:
            data = decode_payload(text, encoding)
        except ValueError as error:
            raise self.wrong("data", str(error)) from None
        if len(data) > bytes_max:
            raise MessageTooLargeError(f"the data has {len(data)} bytes; the most is {bytes_max}")
        return data

    def headers(self) -> Headers | None:
        """App headers; None when there are none."""
        value = self._take("headers")
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong("headers", f"is not an object but {_kind(value)}")
        try:
            return decode_headers(cast(dict[str, object], value))
        except ValueError as error:
            raise self.wrong("headers", str(error)) from None

    def peer(self, name: str = "peer") -> PeerId:
        """A peer id."""
        return as_peer(self.text(name))

    def finish(self, also: Iterable[str] = ()) -> None:
        """Refuse fields that were not asked for, with the nearest right name."""
        known = [*self._asked, *also]
        for name in self._values:
            if name not in known:
                hint = nearest(name, known) if known else "there are none"
                raise self.wrong(name[:80], f"is not known here; {hint}")


def as_peer(text: str) -> PeerId:
    """A peer id. Raises :class:`Problem`."""
    try:
        return parse_peer_id(text)
    except ValueError as error:
        raise Problem("D4004", str(error)) from None


def _kind(value: object) -> str:
    names: dict[type[Any], str] = {bool: "true or false", str: "a text", list: "a list", dict: "an object"}
    if isinstance(value, bool):
        return "true or false"
    return names.get(type(value), "a number")
