"""RPCs on a libp2p stream: each behind its length as an unsigned varint."""

from dep2p.errors import ErrorCode, LocalProtocolError, ProtocolError
from dep2p.gossipsub.encoding.protobuf import encode_varint

_LENGTH_BYTES_MAX = 9


def delimit(payload: bytes) -> bytes:
    """A payload with its length in front."""
    return encode_varint(len(payload)) + payload


class DelimitedDecoder:
    """Turns received bytes into payloads. Any split gives the same ones.

    The length is checked before a payload is buffered. After a violation `error` is set, the payloads in front of it
    have been returned, and feeding on is a misuse.
    """

    __slots__ = ("_buffer", "_payload_bytes_max", "error")

    def __init__(self, payload_bytes_max: int) -> None:
        self._payload_bytes_max = payload_bytes_max
        self._buffer = bytearray()
        self.error: ProtocolError | None = None

    @property
    def buffered_bytes(self) -> int:
        """Bytes of an incomplete payload; at most the cap plus a length."""
        return len(self._buffer)

    def feed(self, data: bytes | bytearray | memoryview) -> list[bytes]:
        """Take received bytes, give the payloads that they complete.

        Raises :class:`LocalProtocolError` when called after an error.
        """
        if self.error is not None:
            raise LocalProtocolError("feed() after a protocol error: close the stream instead")
        buffer = self._buffer
        buffer += data
        payloads: list[bytes] = []
        position = 0
        while (found := self._length(position)) is not None:
            size, start = found
            if start + size > len(buffer):
                break
            payloads.append(bytes(buffer[start : start + size]))
            position = start + size
        if self.error is not None:
            buffer.clear()
        elif position:
            del buffer[:position]
        return payloads

    def _length(self, position: int) -> tuple[int, int] | None:
        """(payload length, where the payload starts); None when it is not all here, or is in error."""
        buffer = self._buffer
        size = shift = 0
        for index in range(position, min(len(buffer), position + _LENGTH_BYTES_MAX)):
            byte = buffer[index]
            size |= (byte & 0x7F) << shift
            if byte < 0x80:
                if size > self._payload_bytes_max:
                    self.error = ProtocolError(
                        f"an RPC of {size} bytes: at most {self._payload_bytes_max} are taken here",
                        ErrorCode.MESSAGE_TOO_LARGE,
                    )
                    return None
                return size, index + 1
            shift += 7
        if len(buffer) - position >= _LENGTH_BYTES_MAX:
            self.error = ProtocolError("an RPC's length is longer than nine bytes")
        return None
