"""DHT streams, rid of the parts in which strangers could put data for py-libp2p to parse and keep.

py-libp2p opens each signed peer record of a DHT message with a reader of keys that takes RSA private keys and tests
their primes in the event loop, and it stores values under keys that anyone may invent. This host uses neither:
addresses come with the messages, and it keeps no values for others. So these parts are taken out before py-libp2p sees
a message.
"""

from google.protobuf.message import DecodeError
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.network.stream.exceptions import StreamReset

from dep2p.encoding.length_prefixed import LengthPrefixedDecoder, encode_length_prefixed
from dep2p.errors import ProtocolError
from dep2p.host.discovery.libp2p_adapter import FacadeStream
from dep2p.host.interface import ByteStream

MESSAGE_BYTES_MAX = 262_144
"""An answer with 20 closer peers and 64 providers, each with its signed record, takes some 100 kB."""


def admitted(encoded: bytes) -> bytes:
    """Return a DHT message without signed records and values. Raises ProtocolError for bytes that are no message."""
    message = Message()
    try:
        message.ParseFromString(encoded)
    except (DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"a DHT message that cannot be read: {error}") from None
    message.ClearField("senderRecord")
    message.ClearField("record")
    for peer in (*message.closerPeers, *message.providerPeers):
        peer.ClearField("signedRecord")
    return message.SerializeToString()


class DhtStream(FacadeStream):
    """A `FacadeStream` whose reader sees `admitted` messages only."""

    def __init__(self, stream: ByteStream) -> None:
        super().__init__(stream)
        self._decoder = LengthPrefixedDecoder(MESSAGE_BYTES_MAX)
        self._admitted = bytearray()

    async def read(self, n: int | None = None) -> bytes:
        """Read as `FacadeStream.read` does; reset the stream for bytes that are no DHT message."""
        if n == 0:
            return b""
        while not self._admitted:
            data = await super().read()
            if not data:
                return b""
            try:
                for encoded in self._decoder.feed(data):
                    self._admitted += encode_length_prefixed(admitted(encoded))
                if self._decoder.error is not None:
                    raise self._decoder.error
            except ProtocolError as error:
                self.stream.reset()
                raise StreamReset(str(error)) from error
        size = len(self._admitted) if n is None or n < 0 else n
        taken = bytes(self._admitted[:size])
        del self._admitted[:size]
        return taken
