"""`YamuxStream`: one stream of a `dep2p.host.yamux.connection.YamuxConnection`, as py-libp2p sees it.

It also has those methods of our `ByteStream` whose names do not collide with py-libp2p's;
`dep2p.host.yamux.byte_stream` has the rest.
"""

from types import TracebackType
from typing import TYPE_CHECKING, Any

import trio
from libp2p.abc import IMuxedStream
from libp2p.stream_muxer.exceptions import MuxedStreamClosed, MuxedStreamEOF, MuxedStreamReset

from dep2p.errors import StreamClosedError
from dep2p.host.yamux.stream_state import StreamState

if TYPE_CHECKING:
    from dep2p.host.yamux.connection import YamuxConnection

WRITE_HIGH_BYTES = 262_144
"""`write` waits while more than this is unsent."""
LINGER_S = 60.0
"""How long a stream closed here is kept for a peer that does not end its side; then it is reset."""


class YamuxStream(StreamState, IMuxedStream):
    """One stream. All state changes are synchronous: cancelling a caller at any await leaves the stream usable."""

    __slots__ = ("_connection", "_drain_low_bytes", "_readable", "_sent", "linger_until_s", "muxed_conn")

    def __init__(self, connection: "YamuxConnection", core: Any, stream_id: int) -> None:
        super().__init__(core, stream_id)
        self.muxed_conn = connection
        self._connection = connection  # the same, as the class that it is
        self.linger_until_s: float | None = None
        self._readable: trio.Event | None = None
        self._sent: trio.Event | None = None
        self._drain_low_bytes = 0

    def __repr__(self) -> str:
        return f"<YamuxStream {self.id} of {self.muxed_conn!r}>"

    @property
    def stream_id(self) -> int:
        return self.id

    def on_readable(self) -> None:
        if self._readable is not None:
            self._readable.set()
            self._readable = None

    def on_sent(self) -> None:
        if self._sent is not None and (self.unsent_bytes <= self._drain_low_bytes or self.error is not None):
            self._sent.set()
            self._sent = None

    # The parts of ByteStream

    @property
    def is_write_closed(self) -> bool:
        """True after close_write, close or reset, by either side."""
        return self.write_ended or self.error is not None

    def write_nowait(self, data: bytes | bytearray | memoryview, *, urgent: bool = False) -> None:
        """See `dep2p.host.interface.ByteStream.write_nowait`. Raises StreamClosedError."""
        if type(data) is memoryview:
            data = bytes(data)
        if urgent and not self.unsent_bytes and self._connection.send_urgently(self, data):
            return
        self.enqueue(data)

    async def drain(self, low_bytes: int = 0) -> None:
        """Wait until ``unsent_bytes <= low_bytes``. Raises StreamClosedError."""
        while self.error is None and self.unsent_bytes > low_bytes:
            if self._sent is None:
                self._sent = trio.Event()
                self._drain_low_bytes = low_bytes
            else:
                self._drain_low_bytes = max(self._drain_low_bytes, low_bytes)
            await self._sent.wait()
        if self.error is not None:
            raise StreamClosedError(str(self.error))

    async def wait_readable(self) -> None:
        """Wait until something can be read, be it the end."""
        if self._readable is None:
            self._readable = trio.Event()
        await self._readable.wait()

    async def close_write(self) -> None:
        """Half-close: the peer reads what was sent, then the end. Reading goes on. Idempotent."""
        self.end_writing()
        await trio.lowlevel.checkpoint_if_cancelled()

    def linger(self) -> None:
        """Reset the stream later if the peer does not end its side."""
        if self.linger_until_s is None:
            self.linger_until_s = trio.current_time() + LINGER_S

    def reset_nowait(self) -> None:
        """Abort both directions at once. Idempotent, never raises."""
        self.reset_state("the stream was reset on this side")

    # py-libp2p's face

    async def read(self, n: int | None = None) -> bytes:
        """Up to ``n`` bytes, at least one; all that is there for None or -1.

        Raises MuxedStreamEOF after the peer's half-close, MuxedStreamReset after a reset or a lost connection.
        """
        if n == 0:
            return b""
        while not self.buffer:
            if self.read_ended:
                raise MuxedStreamEOF("the peer closed its side of the stream")
            if self.error is not None:
                raise MuxedStreamReset(str(self.error))
            await self.wait_readable()
        return self.take_received(len(self.buffer) if n is None or n < 0 else n)

    async def write(self, data: bytes) -> None:
        """Take ``data``, at once on the wire if possible, and wait while more than WRITE_HIGH_BYTES are unsent.

        Raises MuxedStreamClosed after a half-close, MuxedStreamReset after a reset or a lost connection.
        """
        if self.error is None and self.write_ended:
            raise MuxedStreamClosed("the stream is closed for writing")
        try:
            self.write_nowait(data, urgent=True)
            if self.unsent_bytes > WRITE_HIGH_BYTES:
                await self.drain(WRITE_HIGH_BYTES // 2)
            else:
                await trio.lowlevel.checkpoint_if_cancelled()
        except StreamClosedError as error:
            raise MuxedStreamReset(str(error)) from error

    async def close(self) -> None:
        """As in py-libp2p: half-close; what the peer still sends can be read. Idempotent."""
        self.linger()
        await self.close_write()

    async def reset(self) -> None:
        """Abort both directions at once. Idempotent."""
        self.reset_nowait()
        await trio.lowlevel.checkpoint_if_cancelled()

    def set_deadline(self, ttl: int) -> None:
        """Not supported, as in py-libp2p's yamux: use a trio cancel scope."""
        raise NotImplementedError("use a trio cancel scope around the call")

    def get_remote_address(self) -> tuple[str, int] | None:
        return self._connection.get_remote_address()

    async def __aenter__(self) -> "YamuxStream":
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        await self.close()
