"""Multistream-select 1.0.0 on byte streams: bounded, and one round trip when the initiator knows what it wants.

The rules: https://github.com/multiformats/multistream-select. A message is a varint length, the text and a line feed.
"""

from collections.abc import Awaitable, Callable, Container
from typing import Protocol

import trio

from dep2p.encoding.length_prefixed import encode_length_prefixed
from dep2p.encoding.varint import find_varint
from dep2p.errors import ProtocolError, ProtocolNotSupportedError, RequestTimeoutError, StreamClosedError

NAME_BYTES_MAX = 1_024
"""A protocol name, as UTF-8."""
PROPOSALS_MAX = 16
"""Names that an initiator may propose on one stream before it is reset."""

_HEADER = b"\x13/multistream/1.0.0\n"
_NOT_AVAILABLE = b"\x03na\n"
_SHORTEST_MESSAGE = 4  # "\x03na\n": reading this much after a header never takes bytes of what follows


class _Stream(Protocol):
    def write_nowait(self, data: bytes | bytearray | memoryview, *, urgent: bool = False) -> None: ...

    async def read(self, max_bytes: int = 65_536) -> bytes: ...


def encode_message(name: str) -> bytes:
    """A name as a multistream message.

    Raises ``ValueError`` when the name is empty, over `NAME_BYTES_MAX` or holds a line feed.
    """
    text = name.encode() + b"\n"
    if len(text) < 2 or len(text) > NAME_BYTES_MAX + 1 or b"\n" in text[:-1]:
        raise ValueError(f"{name[:80]!r} is no protocol name: 1 to {NAME_BYTES_MAX} bytes without a line feed")
    return encode_length_prefixed(text)


class _MessageReader:
    """Reads messages without ever taking a byte that belongs to what follows the negotiation."""

    __slots__ = ("_have", "_stream")

    def __init__(self, stream: _Stream) -> None:
        self._stream = stream
        self._have = b""

    async def _need(self, count: int) -> None:
        while len(self._have) < count:
            data = await self._stream.read(count - len(self._have))
            if not data:
                raise StreamClosedError("the stream ended in the middle of its protocol negotiation")
            self._have += data

    async def header(self) -> bool:
        """Take the header; True when the next message has begun to arrive with it."""
        want = len(_HEADER) + _SHORTEST_MESSAGE
        while len(self._have) < len(_HEADER):
            data = await self._stream.read(want - len(self._have))
            if not data:
                raise StreamClosedError("the stream ended before its multistream header")
            self._have += data
            seen = min(len(self._have), len(_HEADER))
            if self._have[:seen] != _HEADER[:seen]:
                raise ProtocolError("the stream does not start with the multistream header")
        self._have = self._have[len(_HEADER) :]
        return bool(self._have)

    async def message(self) -> bytes:
        """The text of the next message, without its line feed."""
        await self._need(2)
        length, prefix = find_varint(self._have, 0, 2, bytes_max=2) or (0, 0)
        if length > NAME_BYTES_MAX + 1 or length + prefix < _SHORTEST_MESSAGE:
            raise ProtocolError(f"a negotiation message of {length} bytes is out of bounds")
        await self._need(prefix + length)
        text, self._have = self._have[prefix : prefix + length], self._have[prefix + length :]
        if text[-1:] != b"\n":
            raise ProtocolError("a negotiation message does not end with a line feed")
        return text[:-1]


async def select(stream: _Stream, protocol: str, *, timeout_s: float) -> None:
    """As the initiator: agree on ``protocol``, header and name in one write.

    Raises ProtocolNotSupportedError when the peer answers "na", RequestTimeoutError, StreamClosedError, ProtocolError.
    """
    stream.write_nowait(_HEADER + encode_message(protocol), urgent=True)
    reader = _MessageReader(stream)
    with trio.move_on_after(timeout_s) as scope:
        await reader.header()
        answer = await reader.message()
        if answer == b"na":
            raise ProtocolNotSupportedError(f"the peer does not speak {protocol}")
        if answer != protocol.encode():
            raise ProtocolError("the peer agreed to a protocol that was not proposed")
        return
    if scope.cancelled_caught:
        raise RequestTimeoutError(f"no answer to the proposal of {protocol} within {timeout_s:g} s")


async def respond(
    stream: _Stream,
    served: Container[str],
    *,
    timeout_s: float,
    before_refusal: Callable[[str], Awaitable[None]] | None = None,
) -> str:
    """As the responder: answer proposals until one is served, and return it.

    ``before_refusal`` is awaited for a name that is not served; then it is looked up once more.

    Raises ProtocolError on anything malformed, RequestTimeoutError, StreamClosedError.
    """
    reader = _MessageReader(stream)
    with trio.move_on_after(timeout_s):
        # Peers that wait for our header before they propose get it at once; for all others it rides with the answer.
        owed = _HEADER
        if not await reader.header():
            stream.write_nowait(_HEADER, urgent=True)
            owed = b""
        for _ in range(PROPOSALS_MAX):
            text = await reader.message()
            try:
                name = text.decode()
            except UnicodeDecodeError:
                raise ProtocolError("a proposed protocol name is not UTF-8") from None
            if name not in served and before_refusal is not None:
                await before_refusal(name)
            if name in served:
                stream.write_nowait(owed + encode_message(name), urgent=True)
                return name
            stream.write_nowait(owed + _NOT_AVAILABLE, urgent=True)
            owed = b""
        raise ProtocolError(f"more than {PROPOSALS_MAX} protocol proposals on one stream")
    raise RequestTimeoutError(f"no protocol agreed within {timeout_s:g} s")
