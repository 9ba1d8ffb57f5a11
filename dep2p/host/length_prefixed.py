"""Protobuf messages with a varint length before them, as libp2p's protocols send them; never a byte is read too far."""

from typing import Protocol

from dep2p.errors import ProtocolError, StreamClosedError

_VARINT_BYTES_MAX = 4


class _Reader(Protocol):
    async def read(self, max_bytes: int = 65_536) -> bytes: ...


async def read_message(stream: _Reader, bytes_max: int) -> bytes:
    """The next message. Raises ProtocolError over ``bytes_max`` or when it is cut off, StreamClosedError."""
    length = shift = 0
    for index in range(_VARINT_BYTES_MAX):
        byte = (await _read_exactly(stream, 1))[0]
        length |= (byte & 0x7F) << shift
        if not byte & 0x80:
            break
        shift += 7
        if index == _VARINT_BYTES_MAX - 1:
            raise ProtocolError(f"a message over {bytes_max} bytes")
    if length > bytes_max:
        raise ProtocolError(f"a message of {length} bytes; the limit is {bytes_max}")
    return await _read_exactly(stream, length)


async def _read_exactly(stream: _Reader, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = await stream.read(count - len(data))
        if not more:
            raise StreamClosedError("the stream ended in the middle of a message")
        data += more
    return data


def encode_message(body: bytes) -> bytes:
    """A message with its length."""
    out = bytearray()
    value = len(body)
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out) + body
