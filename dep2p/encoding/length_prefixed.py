"""Messages on a libp2p stream: each behind its length as an unsigned varint."""

from typing import Final, Protocol

from dep2p.encoding.varint import encode_varint, find_varint
from dep2p.errors import ErrorCode, LocalProtocolError, ProtocolError, StreamClosedError

_LENGTH_BYTES_MAX: Final = 9


class ByteReader(Protocol):
    """A stream that is read by `await`."""

    async def read(self, max_bytes: int = 65_536) -> bytes: ...


def encode_length_prefixed(message: bytes) -> bytes:
    """A message with its length in front."""
    return encode_varint(len(message)) + message


class LengthPrefixedDecoder:
    """Turns received bytes into messages. They are the same however the bytes are split.

    The length is checked before a message is buffered. After a violation `error` is set, the messages in front of it
    have been returned, and feeding on is a misuse.
    """

    __slots__ = ("_buffer", "_message_bytes_max", "error")

    def __init__(self, message_bytes_max: int) -> None:
        self._message_bytes_max = message_bytes_max
        self._buffer = bytearray()
        self.error: ProtocolError | None = None

    @property
    def buffered_bytes(self) -> int:
        """Bytes of an incomplete message; at most the cap plus a length."""
        return len(self._buffer)

    def feed(self, data: bytes | bytearray | memoryview) -> list[bytes]:
        """Take received bytes, give the messages that they complete.

        Raises :class:`LocalProtocolError` when called after an error.
        """
        if self.error is not None:
            raise LocalProtocolError("feed() after a protocol error: close the stream instead")
        buffer = self._buffer
        buffer += data
        messages: list[bytes] = []
        position = 0
        try:
            while (found := find_varint(buffer, position, len(buffer), _LENGTH_BYTES_MAX)) is not None:
                size, start = found
                _check(size, self._message_bytes_max)
                if start + size > len(buffer):
                    break
                messages.append(bytes(buffer[start : start + size]))
                position = start + size
        except ProtocolError as error:
            self.error = error
            buffer.clear()
        else:
            if position:
                del buffer[:position]
        return messages


async def read_length_prefixed(stream: ByteReader, bytes_max: int) -> bytes:
    """The next message of a stream; takes no byte of what follows it.

    Raises ProtocolError over ``bytes_max``, StreamClosedError when the stream ends in the middle of it.
    """
    length = bytearray()
    while (found := find_varint(length, 0, len(length), _LENGTH_BYTES_MAX)) is None:
        length += await _read_exactly(stream, 1)
    _check(found[0], bytes_max)
    return await _read_exactly(stream, found[0])


def _check(size: int, bytes_max: int) -> None:
    if size > bytes_max:
        raise ProtocolError(
            f"a message of {size} bytes: at most {bytes_max} are taken here", ErrorCode.MESSAGE_TOO_LARGE
        )


async def _read_exactly(stream: ByteReader, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = await stream.read(count - len(data))
        if not more:
            raise StreamClosedError("the stream ended in the middle of a message")
        data += more
    return data
