"""Commands of a client, from bytes in pieces of any size."""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from dep2p.protocols.nsq.errors import NsqError
from dep2p.protocols.nsq.frames import ID_BYTES
from dep2p.protocols.nsq.limits import NsqLimits
from dep2p.protocols.queues.names import check_name

MAGIC: Final = b"  V2"
_SIZE: Final = struct.Struct(">i")
_DIGITS_MAX: Final = 19


@dataclass(frozen=True, slots=True)
class IdentifyCommand:
    """IDENTIFY, with JSON that is not parsed yet."""

    body: bytes


@dataclass(frozen=True, slots=True)
class SubscribeCommand:
    """SUB."""

    topic: str
    channel: str


@dataclass(frozen=True, slots=True)
class PublishCommand:
    """PUB, MPUB and DPUB."""

    verb: str
    topic: str
    bodies: tuple[bytes, ...]
    delay_ms: int = 0


@dataclass(frozen=True, slots=True)
class Ready:
    """RDY."""

    count: int


class Finish(NamedTuple):
    """FIN."""

    message_id: bytes


class Requeue(NamedTuple):
    """REQ; the delay is cut by the queue's own limit."""

    message_id: bytes
    delay_ms: int


class Touch(NamedTuple):
    """TOUCH."""

    message_id: bytes


@dataclass(frozen=True, slots=True)
class Close:
    """CLS."""


@dataclass(frozen=True, slots=True)
class Nothing:
    """NOP."""


@dataclass(frozen=True, slots=True)
class Authenticate:
    """AUTH."""


Command = (
    IdentifyCommand
    | SubscribeCommand
    | PublishCommand
    | Ready
    | Finish
    | Requeue
    | Touch
    | Close
    | Nothing
    | Authenticate
)


def split_mpub(body: bytes, limits: NsqLimits) -> tuple[bytes, ...]:
    """Return the messages in the body of an MPUB: their count, and each with its size before it. Raises NsqError."""
    if len(body) < 4:
        raise NsqError("E_BAD_BODY", "MPUB failed to read message count")
    (count,) = _SIZE.unpack_from(body)
    if count <= 0:
        raise NsqError("E_BAD_BODY", f"MPUB invalid message count {count}")
    if count > limits.mpub_items_max:
        raise NsqError(
            "E_BAD_BODY", f"MPUB of {count} messages: {limits.mpub_items_max} may come at once, send several"
        )
    at = 4
    found: list[bytes] = []
    for index in range(count):
        if len(body) - at < 4:
            raise NsqError("E_BAD_MESSAGE", f"MPUB failed to read message({index}) body size")
        (size,) = _SIZE.unpack_from(body, at)
        at += 4
        if size <= 0:
            raise NsqError("E_BAD_MESSAGE", f"MPUB invalid message({index}) body size {size}")
        if size > limits.message_bytes_max:
            raise NsqError("E_BAD_MESSAGE", f"MPUB message too big {size} > {limits.message_bytes_max}")
        if len(body) - at < size:
            raise NsqError("E_BAD_MESSAGE", "MPUB failed to read message body")
        found.append(body[at : at + size])
        at += size
    if at != len(body):
        raise NsqError("E_BAD_BODY", f"MPUB has {len(body) - at} bytes behind its {count} messages")
    return tuple(found)


class CommandParser:
    """Gives whole commands, in order. After a failure it takes nothing more: all of its failures are fatal."""

    def __init__(self, limits: NsqLimits) -> None:
        self._limits = limits
        self._buffer = bytearray()
        self._scanned: int = 0
        self._has_magic = False
        self._pending: tuple[list[bytes], int] | None = None
        """A command line whose body is awaited, and the size of the body."""
        self._line: list[bytes] | None = None
        """A command line whose body's size is awaited."""
        self.failure: NsqError | None = None
        """The failure after which nothing more is taken; send it behind the answers to the commands before it."""

    @property
    def buffered_bytes(self) -> int:
        """Count the bytes that wait for the rest of their command."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[Command]:
        """Return the commands that are complete now. Look at `failure` after them."""
        if self.failure is not None:
            return []
        self._buffer += data
        found: list[Command] = []
        try:
            self._parse(found)
        except NsqError as error:
            self.failure = error
            self._buffer.clear()
        return found

    def _parse(self, found: list[Command]) -> None:
        if not self._has_magic:
            head = bytes(self._buffer[:4])
            if not MAGIC.startswith(head):
                raise NsqError("E_BAD_PROTOCOL", "")
            if len(head) < 4:
                return
            del self._buffer[:4]
            self._has_magic = True
        buffer = self._buffer
        at: int = 0
        try:
            while True:
                if self._pending is not None:
                    line, size = self._pending
                    if len(buffer) - at < size:
                        return
                    self._pending = None
                    body = bytes(buffer[at : at + size])
                    at += size
                    found.append(self._with_body(line, body))
                elif self._line is not None:
                    if len(buffer) - at < 4:
                        return
                    (size,) = _SIZE.unpack_from(buffer, at)
                    at += 4
                    self._check_size(self._line[0], size)
                    self._pending, self._line = (self._line, size), None
                else:
                    end = buffer.find(b"\n", max(at, self._scanned))
                    if end < 0:
                        self._scanned = len(buffer)
                        if len(buffer) - at > self._limits.line_bytes_max:
                            raise NsqError("E_INVALID", "the command is too long")
                        return
                    self._scanned = 0
                    line_end = end - 1 if end > at and buffer[end - 1] == 13 else end
                    if end - at > self._limits.line_bytes_max:  # with its CR: it may come in another piece
                        raise NsqError("E_INVALID", "the command is too long")
                    parameters = bytes(buffer[at:line_end]).split(b" ")
                    at = end + 1
                    self._take_line(parameters, found)
        finally:
            if at:
                del buffer[:at]
                self._scanned = max(0, self._scanned - at)

    def _take_line(self, line: list[bytes], found: list[Command]) -> None:
        verb = line[0]
        plain = _PLAIN.get(verb)
        if plain is not None:
            found.append(plain(line, self._limits))
            return
        if verb not in _WITH_BODY:
            raise NsqError("E_INVALID", f"invalid command {_shown(verb)}")
        if verb in (b"PUB", b"MPUB", b"DPUB"):
            _need(line, 3 if verb == b"DPUB" else 2, "parameters")
            _topic(line)
            if verb == b"DPUB":
                self._delay_ms(line)
        elif verb == b"AUTH" and len(line) != 1:
            raise NsqError("E_INVALID", "AUTH invalid number of parameters")
        self._line = line

    def _check_size(self, verb: bytes, size: int) -> None:
        name, limits = verb.decode("ascii"), self._limits
        if verb in (b"PUB", b"DPUB"):
            if size <= 0:
                raise NsqError("E_BAD_MESSAGE", f"{name} invalid message body size {size}")
            if size > limits.message_bytes_max:
                raise NsqError("E_BAD_MESSAGE", f"{name} message too big {size} > {limits.message_bytes_max}")
            return
        if size <= 0:
            raise NsqError("E_BAD_BODY", f"{name} invalid body size {size}")
        if size > limits.body_bytes_max:
            raise NsqError("E_BAD_BODY", f"{name} body too big {size} > {limits.body_bytes_max}")

    def _with_body(self, line: list[bytes], body: bytes) -> Command:
        verb = line[0]
        if verb == b"PUB":
            return PublishCommand("PUB", _topic(line), (body,))
        if verb == b"DPUB":
            return PublishCommand("DPUB", _topic(line), (body,), self._delay_ms(line))
        if verb == b"MPUB":
            return PublishCommand("MPUB", _topic(line), split_mpub(body, self._limits))
        return IdentifyCommand(body) if verb == b"IDENTIFY" else Authenticate()

    def _delay_ms(self, line: list[bytes]) -> int:
        delay_ms = _number(line[2], "DPUB could not parse timeout")
        if delay_ms > self._limits.defer_max_ms:
            raise NsqError("E_INVALID", f"DPUB timeout {delay_ms} out of range 0-{self._limits.defer_max_ms}")
        return delay_ms


_WITH_BODY: Final = (b"PUB", b"MPUB", b"DPUB", b"IDENTIFY", b"AUTH")


def _shown(raw: bytes) -> str:
    return raw[:64].decode("ascii", "backslashreplace")


def _need(line: list[bytes], count: int, what: str = "params") -> None:
    if len(line) < count:
        raise NsqError("E_INVALID", f"{line[0].decode('ascii')} insufficient number of {what}")


def _number(raw: bytes, failure: str) -> int:
    if not raw.isdigit() or len(raw) > _DIGITS_MAX:
        raise NsqError("E_INVALID", f"{failure} {_shown(raw)}")
    return int(raw)


def _name(raw: bytes, verb: str, what: str, code: str) -> str:
    name = raw.decode("utf-8", "backslashreplace")
    try:
        check_name(name)
    except ValueError:
        raise NsqError(code, f'{verb} {what} name "{_shown(raw)}" is not valid') from None
    return name


def _topic(line: list[bytes]) -> str:
    return _name(line[1], line[0].decode("ascii"), "topic", "E_BAD_TOPIC")


def _message_id(line: list[bytes]) -> bytes:
    if len(line[1]) != ID_BYTES:
        raise NsqError("E_INVALID", "invalid message ID")
    return line[1]


def _subscribe(line: list[bytes], _limits: NsqLimits) -> Command:
    _need(line, 3, "parameters")
    return SubscribeCommand(_topic(line), _name(line[2], "SUB", "channel", "E_BAD_CHANNEL"))


def _ready(line: list[bytes], limits: NsqLimits) -> Command:
    count = _number(line[1], "RDY could not parse count") if len(line) > 1 else 1
    if count > limits.ready_max:
        raise NsqError("E_INVALID", f"RDY count {count} out of range 0-{limits.ready_max}")
    return Ready(count)


def _finish(line: list[bytes], _limits: NsqLimits) -> Command:
    _need(line, 2)
    return Finish(_message_id(line))


def _requeue(line: list[bytes], _limits: NsqLimits) -> Command:
    _need(line, 3)
    message_id = _message_id(line)
    raw = line[2].removeprefix(b"-")
    delay_ms = _number(raw, "REQ could not parse timeout")
    return Requeue(message_id, 0 if raw != line[2] else delay_ms)


def _touch(line: list[bytes], _limits: NsqLimits) -> Command:
    _need(line, 2)
    return Touch(_message_id(line))


_PLAIN: Final[dict[bytes, Callable[[list[bytes], NsqLimits], Command]]] = {
    b"SUB": _subscribe,
    b"RDY": _ready,
    b"FIN": _finish,
    b"REQ": _requeue,
    b"TOUCH": _touch,
    b"CLS": lambda _line, _limits: Close(),
    b"NOP": lambda _line, _limits: Nothing(),
}
