"""`ByteStream` over a yamux stream, where the names of py-libp2p's stream interface mean something else."""

import trio

from dep2p.errors import LocalProtocolError, StreamClosedError
from dep2p.host.interface import Connection, Drain, EndCallback, ReceiveCallback, WriteNowait
from dep2p.host.resources.scopes import Account
from dep2p.host.yamux.connection import WRITE_HIGH_BYTES, YamuxStream


class YamuxByteStream:
    """The `dep2p.host.interface.ByteStream` of one `YamuxStream`; its docstrings hold here."""

    __slots__ = ("_connection", "_protocol", "_stream", "drain", "write_nowait")

    def __init__(self, stream: YamuxStream, connection: Connection, protocol: str = "") -> None:
        self._stream = stream
        self._connection = connection
        self._protocol = protocol
        # Bound once: these are called for every message.
        self.write_nowait: WriteNowait = stream.write_nowait
        self.drain: Drain = stream.drain

    def __repr__(self) -> str:
        return f"<stream {self._stream.id} {self._protocol or '?'} of {self._connection!r}>"

    @property
    def connection(self) -> Connection:
        return self._connection

    @property
    def protocol(self) -> str:
        return self._protocol

    def set_protocol(self, protocol: str) -> None:
        """Record what was negotiated."""
        self._protocol = protocol
        self._stream.protocol = protocol

    def charge_to(self, account: Account) -> None:
        """Account for unread bytes in ``account`` in place of the connection's."""
        self._stream.core.charge_to(self._stream, account)

    @property
    def muxed(self) -> YamuxStream:
        """The stream as py-libp2p sees it."""
        return self._stream

    @property
    def unsent_bytes(self) -> int:
        return self._stream.unsent_bytes

    @property
    def sent_bytes(self) -> int:
        return self._stream.sent_bytes

    @property
    def granted_bytes(self) -> int:
        return self._stream.granted_bytes

    @property
    def is_write_closed(self) -> bool:
        return self._stream.is_write_closed

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        stream = self._stream
        stream.enqueue(data)
        if stream.unsent_bytes > WRITE_HIGH_BYTES:
            await stream.drain(WRITE_HIGH_BYTES // 2)
        else:
            await trio.lowlevel.checkpoint_if_cancelled()

    async def read(self, max_bytes: int = 65_536) -> bytes:
        stream = self._stream
        if stream.has_receiver:
            raise LocalProtocolError("read() cannot be used after set_receiver()")
        if max_bytes <= 0:
            return b""
        if not stream.is_proven:
            await trio.lowlevel.checkpoint()  # thousands of small requests may be there: others come between them
        while not stream.buffer:
            if stream.read_ended and not stream.is_discarding:
                return b""
            if stream.error is not None:
                raise StreamClosedError(str(stream.error))
            if stream.is_discarding:
                raise StreamClosedError("the stream was closed on this side")
            await stream.wait_readable()
        return stream.take_received(max_bytes)

    def set_receiver(self, on_data: ReceiveCallback, on_end: EndCallback) -> None:
        self._stream.set_receiver(on_data, on_end)

    def pause_receiving(self) -> None:
        self._stream.pause_receiving()

    def resume_receiving(self) -> None:
        self._stream.resume_receiving()

    async def close_write(self) -> None:
        await self._stream.close_write()

    async def close(self) -> None:
        stream = self._stream
        stream.end_writing()
        stream.discard_input()
        stream.linger()
        stream.on_readable()
        await trio.lowlevel.checkpoint_if_cancelled()

    def reset(self) -> None:
        self._stream.reset_nowait()
