"""Reads the input of control clients: bounded bodies, and fields whose errors name the field."""

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, Protocol, TypeVar

import msgspec
import trio
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from dep2p.config.values import nearest
from dep2p.control_api.calls import parse_call
from dep2p.control_api.encoding import decode_headers
from dep2p.control_api.structs import FieldError, S, convert_fields
from dep2p.daemon.bounds import BODY_BYTES_PER_S_MIN, ControlBounds
from dep2p.daemon.problems import Problem
from dep2p.errors import MessageTooLargeError
from dep2p.gossipsub.headers import MessageHeaders, message_headers
from dep2p.limits import Limits
from dep2p.types import Headers, PeerId, parse_peer_id

_NAME_BYTES_MAX = 255
T = TypeVar("T", bound=str)


async def read_json(request: Request, bounds: ControlBounds) -> "Fields":
    """Read the request's body as fields; an empty body is an empty object. Raises :class:`Problem`."""
    raw = await _read_json_body(request, bounds)
    return parse_json(raw) if raw else Fields({})


async def read_call(request: Request, bounds: ControlBounds, kind: type[S]) -> S:
    """Read the request's body as a call; an empty body is an empty object. Raises :class:`Problem`."""
    raw = await _read_json_body(request, bounds)
    return parse_line(raw or b"{}", kind, "the body")


async def _read_json_body(request: Request, bounds: ControlBounds) -> bytes:
    holds = f", which holds {bounds.message_bytes_max} bytes of data in base64"
    return await read_body(request, bounds.json_bytes_max, bounds.body_timeout_s, holds)


def parse_line(raw: bytes, kind: type[S], what: str = "a line") -> S:
    """Decode a JSON object as a call. Raises :class:`Problem`."""
    try:
        return parse_call(json_object(raw, what), kind, what)
    except FieldError as error:
        raise field_problem(error) from None


def wrong_field(name: str, why: str) -> Problem:
    """Return the problem of a field of a body."""
    return Problem("D1005", f"field {name!r}: {why}", field=name)


def parse_json(raw: bytes) -> "Fields":
    """Decode a JSON object as fields. Raises :class:`Problem`."""
    return Fields(json_object(raw, "the body"))


def json_object(raw: bytes, what: str) -> dict[str, object]:
    """Decode a JSON object. Raises :class:`Problem`; ``what`` begins its sentence."""
    try:
        # Not msgspec's decoder, which refuses a lone surrogate as no JSON, without the name of its field.
        value: object = json.loads(raw, parse_constant=_no_constant)
    except RecursionError:
        raise Problem("D1005", f"{what} is not JSON: it is nested too deeply") from None
    except ValueError as error:
        raise Problem("D1005", f"{what} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise Problem("D1005", f"{what} is not a JSON object")
    return msgspec.convert(value, dict[str, object])


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


class CarriesPayload(Protocol):
    """A call with bytes."""

    def payload(self) -> bytes:
        """Return the bytes. Raises FieldError."""
        ...


def payload_of(call: CarriesPayload, bytes_max: int) -> bytes:
    """Return the bytes of a call. Raises :class:`Problem`, MessageTooLargeError."""
    try:
        data = call.payload()
    except FieldError as error:
        raise field_problem(error) from None
    if len(data) > bytes_max:
        raise MessageTooLargeError(f"the data has {len(data)} bytes; the most is {bytes_max}")
    return data


def headers_of(fields: dict[str, object] | None) -> Headers | None:
    """Return the app headers of a call. Raises :class:`Problem`."""
    if fields is None:
        return None
    try:
        return decode_headers(fields)
    except ValueError as error:
        raise wrong_field("headers", str(error)) from None


def topic_headers(fields: dict[str, object] | None, limits: Limits) -> MessageHeaders | None:
    """Return the headers of a message for a topic. Raises :class:`Problem`."""
    headers = headers_of(fields)
    if not headers:
        return None
    try:
        return message_headers(headers, bytes_max=limits.headers_bytes_max)
    except ValueError as error:
        raise wrong_field("headers", str(error)) from None


def checked_name(text: str) -> str:
    """Check the name of a request, notify, stream or session: 1 to 255 bytes, printable. Raises :class:`Problem`."""
    return Fields({"name": text}).name()


def within(name: str, value: float | None, *, default: float, high: float, may_be_zero: bool = False) -> float:
    """Check a number of a call: above 0 (or 0 itself when that is allowed) and at most ``high``. Raises
    :class:`Problem`."""
    return Fields({name: value}).number(name, default, high=high, may_be_low=may_be_zero)


async def read_body(request: Request, bytes_max: int, timeout_s: float, holds: str = "") -> bytes:
    """Read the whole body. Raises :class:`Problem` when it is too large, or slower than BODY_BYTES_PER_S_MIN after its
    first ``timeout_s``. ``holds`` ends the first one's sentence."""
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > bytes_max:
        raise Problem("D1007", f"the body has {announced} bytes; the most here is {bytes_max}{holds}")
    pieces: list[bytes] = []
    size = 0
    with trio.move_on_after(timeout_s) as scope:
        more = True
        while more:
            message = await request.receive()
            if message["type"] != "http.request":
                raise ClientDisconnect
            piece = body_piece(message)
            size += len(piece)
            if size > bytes_max:
                raise Problem("D1007", f"the body is longer than the {bytes_max} bytes that are taken here{holds}")
            pieces.append(piece)
            scope.deadline += len(piece) / BODY_BYTES_PER_S_MIN
            more = bool(message.get("more_body", False))
    if scope.cancelled_caught:
        raise Problem("D1009", f"the body did not arrive within {timeout_s + size / BODY_BYTES_PER_S_MIN:g} s")
    return b"".join(pieces)


def body_piece(message: Message) -> bytes:
    """Return the bytes of an ``http.request`` message."""
    piece: bytes = message.get("body", b"")
    return piece


def query_fields(request: Request) -> "Fields":
    """Return the query parameters as fields of texts. Raises :class:`Problem` for a repeated one."""
    values: dict[str, object] = {}
    for name, value in request.query_params.multi_items():
        if name in values:
            raise Problem("D1005", f"the query parameter {name[:80]!r} is given twice")
        values[name] = value
    return Fields(values, "query parameter")


class Fields:
    """Takes fields one by one, checks each, and at the end refuses unknown ones."""

    def __init__(self, values: Mapping[str, object], noun: str = "field") -> None:
        self._values = dict(values)
        self._noun = noun
        self._asked: dict[str, None] = {}

    def wrong(self, name: str, why: str) -> Problem:
        """Return the problem of a field."""
        return Problem("D1005", f"{self._noun} {name!r}: {why}", field=name)

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        self._asked[name] = None
        return self._values.get(name) is not None

    def _take(self, name: str) -> object:
        self._asked[name] = None
        return self._values.get(name)

    def text(self, name: str, default: str | None = None, *, bytes_max: int = 65_536) -> str:
        """Return a text. Without ``default`` it must be there."""
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
        """Return a text, or None when it is not there."""
        return self.text(name) if self.has(name) else None

    def name(self, field: str = "name") -> str:
        """Return the name of a request, notify or stream: 1 to 255 bytes, printable."""
        value = self.text(field, bytes_max=_NAME_BYTES_MAX)
        if not value or not value.isprintable():
            raise self.wrong(field, "a name has 1 to 255 bytes, all printable")
        return value

    def number(
        self, name: str, default: float, *, low: float = 0.0, high: float = math.inf, may_be_low: bool = False
    ) -> float:
        """Return a number greater than ``low``, or ``low`` itself when that is allowed, at most ``high``."""
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

    def integer_text(self, name: str, default: int, *, low: int, high: int) -> int:
        """Return a whole number that is written as text, as in a query."""
        text = self.text(name, str(default))
        if not text.isascii() or not text.isdecimal() or len(text) > 18 or not low <= int(text) <= high:
            raise self.wrong(name, f"is not a whole number from {low} to {high}")
        return int(text)

    def flag(self, name: str) -> bool:
        """Take 0 or 1; False when it is missing. Raises :class:`Problem`."""
        text = self.text(name, "0")
        if text not in ("0", "1"):
            raise self.wrong(name, "is neither 0 nor 1")
        return text == "1"

    def choice(self, name: str, choices: tuple[T, ...]) -> T:
        """Return one of some texts; the first when it is not there."""
        text = self.text(name, choices[0])
        for choice in choices:
            if choice == text:
                return choice
        raise self.wrong(name, f"is none of {', '.join(choices)}")

    def given(self, *names: str) -> dict[str, object]:
        """Return those of these fields that are there and not null, for a struct that checks them."""
        self._asked.update(dict.fromkeys(names))
        return {name: self._values[name] for name in names if self._values.get(name) is not None}

    def struct(self, kind: type[S], label: str) -> S:
        """Return all fields that are not null as a struct, which checks them. ``label`` begins the sentence of a
        refusal."""
        given = {name: value for name, value in self._values.items() if value is not None}
        try:
            return convert_fields(given, kind, label)
        except FieldError as error:
            raise field_problem(error) from None

    def finish(self, also: Iterable[str] = ()) -> None:
        """Refuse fields that were not read, with the nearest right name."""
        known = [*self._asked, *also]
        for name in self._values:
            if name not in known:
                hint = nearest(name, known) if known else "there are none"
                raise self.wrong(name[:80], f"is not known here; {hint}")


def field_problem(error: FieldError) -> Problem:
    """Return the problem of a field that a struct does not take."""
    return Problem("D1005", str(error), **({"field": error.field} if error.field else {}))


def as_peer(text: str) -> PeerId:
    """Parse a peer id. Raises :class:`Problem`."""
    try:
        return parse_peer_id(text)
    except ValueError as error:
        raise Problem("D4004", str(error)) from None


def _kind(value: object) -> str:
    names: dict[type[Any], str] = {bool: "true or false", str: "a text", list: "a list", dict: "an object"}
    if isinstance(value, bool):
        return "true or false"
    return names.get(type(value), "a number")
