"""`ByteStream` over any py-libp2p muxed stream: QUIC, relayed connections and stock muxers.

TCP and WebSocket connections use the streams of `dep2p.host.yamux.connection` directly; this slower path exists because
those other streams tear a write when its caller is cancelled. Here callers never touch the muxed stream: one task per
stream writes what was queued, so that cancelling a caller can never leave half a frame behind.
"""

import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import trio
from libp2p.stream_muxer.exceptions import MuxedStreamEOF

from dep2p.concurrency.stall import run_while_moving
from dep2p.errors import LocalProtocolError, StreamClosedError
from dep2p.host.interface import Connection, EndCallback, MuxedConnection, ReceiveCallback
from dep2p.host.resources.ledger import STREAM_BYTES
from dep2p.host.resources.scopes import Account
from dep2p.protocols.timing.stall import LEFT_BYTES_MIN

if TYPE_CHECKING:
    from libp2p.abc import IMuxedStream

from dep2p.host.scopes import new_scope

logger: logging.Logger = logging.getLogger("dep2p.host")

WRITE_HIGH_BYTES = 262_144
"""`write` waits while more than this is unsent."""
_CHUNK_BYTES = 65_536


@runtime_checkable
class _HalfCloses(Protocol):
    """A muxed stream whose two directions end by themselves: most have this, `IMuxedStream` does not name it."""

    async def close_write(self) -> None: ...


class MuxedByteStream:
    """One stream of a py-libp2p muxer, as a `ByteStream`."""

    def __init__(
        self,
        muxed: "IMuxedStream",
        connection: MuxedConnection,
        nursery: trio.Nursery,
        *,
        on_done: Callable[["MuxedByteStream"], None],
        close_timeout_s: float,
    ) -> None:
        self.protocol: str = ""
        self._muxed = muxed
        self._connection = connection
        self._nursery = nursery
        self._on_done = on_done
        self._close_timeout_s = close_timeout_s
        self._queue: deque[bytes] = deque()
        self._unsent = 0
        self.sent_bytes: int = 0
        self._writing = False
        self._write_closed = False
        self._eof_sent = False
        self._read_ended = False
        self._error: StreamClosedError | None = None
        self._changed = trio.Event()
        self._on_data: ReceiveCallback | None = None
        self._on_end: EndCallback | None = None
        self._paused: trio.Event | None = None
        self._draining = False
        self._done = False
        self._read_scope: trio.CancelScope | None = None
        self._account = connection.resources.account
        self._held_bytes = 0

    def __repr__(self) -> str:
        return f"<MuxedByteStream {self.protocol or '?'} of {self._connection!r}>"

    def set_protocol(self, protocol: str) -> None:
        """Record what was negotiated."""
        self.protocol = protocol

    def reserve_stream(self) -> bool:
        """Account for the stream; False when its connection may hold no more."""
        if not self._account.reserve_half(STREAM_BYTES):
            return False
        self._held_bytes += STREAM_BYTES
        return True

    def charge_to(self, account: Account) -> None:
        """Account for unread bytes, and for the stream, in ``account`` in place of the connection's."""
        held = self._held_bytes
        self._release(held)
        self._account = account
        if held and not self._reserve(held):
            self._fail("the stream holds too many unread bytes")

    def _reserve(self, size: int) -> bool:
        if self._done or not self._account.reserve(size):
            return False
        self._held_bytes += size
        return True

    def _release(self, size: int) -> None:
        size = min(size, self._held_bytes)
        self._held_bytes -= size
        self._account.release(size)

    @property
    def connection(self) -> Connection:
        return self._connection

    @property
    def unsent_bytes(self) -> int:
        return self._unsent

    @property
    def granted_bytes(self) -> int:
        return 0

    @property
    def is_write_closed(self) -> bool:
        return self._write_closed or self._error is not None

    # Writing

    def write_nowait(self, data: bytes | bytearray | memoryview, *, urgent: bool = False) -> None:
        del urgent  # the muxed stream's own write needs a task in any case
        if self._error is not None:
            raise StreamClosedError(str(self._error))
        if self._write_closed:
            raise StreamClosedError("the stream is closed for writing")
        if data:
            self._queue.append(bytes(data))
            self._unsent += len(data)
            self._wake_writer()

    def _wake_writer(self) -> None:
        if not self._writing:
            self._writing = True
            self._spawn(self._write_queued)

    def _spawn(self, task: Callable[[], Awaitable[None]]) -> None:
        try:
            self._nursery.start_soon(task)
        except RuntimeError:  # the connection's nursery has ended: so has the connection
            self.connection_lost("the connection has ended")

    async def _write_queued(self) -> None:
        try:
            while self._queue and self._error is None:
                parts = [self._queue.popleft()]
                size = len(parts[0])
                while self._queue and size + len(self._queue[0]) <= _CHUNK_BYTES:
                    parts.append(self._queue.popleft())
                    size += len(parts[-1])
                await self._muxed.write(parts[0] if len(parts) == 1 else b"".join(parts))
                self._unsent -= size
                self.sent_bytes += size
                self._notify()
            if self._write_closed and not self._eof_sent and self._error is None:
                self._eof_sent = True
                if isinstance(self._muxed, _HalfCloses):
                    await self._muxed.close_write()
                else:
                    await self._muxed.close()
                self._notify()
                self._check_done()
        except Exception as error:
            self._fail(f"writing failed: {error!r}")
        finally:
            self._writing = False

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def drain(self, low_bytes: int = 0) -> None:
        while self._unsent > low_bytes:
            if self._error is not None:
                raise StreamClosedError(str(self._error))
            await self._changed.wait()
        if self._error is not None:
            raise StreamClosedError(str(self._error))

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        self.write_nowait(data)
        if self._unsent > WRITE_HIGH_BYTES:
            await self.drain(WRITE_HIGH_BYTES)
        else:
            await trio.lowlevel.checkpoint_if_cancelled()

    # Reading

    async def read(self, max_bytes: int = 65_536) -> bytes:
        if self._on_data is not None:
            raise LocalProtocolError("read() cannot be used after set_receiver()")
        if self._error is not None:
            raise StreamClosedError(str(self._error))
        if self._read_ended:
            return b""
        data = await self._read_muxed(max_bytes)
        if data is None:
            raise StreamClosedError(str(self._error))
        if not data:
            self._read_ended = True
            self._check_done()
        return data

    async def _read_muxed(self, max_bytes: int) -> bytes | None:
        """Return data; b"" at the peer's half-close; None when the stream failed."""
        if self._error is not None:
            return None
        try:
            with new_scope() as self._read_scope:  # so that a lost connection ends a read that would wait on
                return await self._pull(max_bytes)
        except MuxedStreamEOF:
            return b""
        except Exception as error:
            self._fail(f"the stream was reset or its connection lost: {error!r}")
        return None

    async def _pull(self, max_bytes: int) -> bytes:
        """Return bytes from the muxed stream; b"" or MuxedStreamEOF at the peer's half-close."""
        return bytes(await self._muxed.read(max_bytes))

    def set_receiver(self, on_data: ReceiveCallback, on_end: EndCallback) -> None:
        if self._on_data is not None:
            raise LocalProtocolError("the stream has a receiver already")
        self._on_data, self._on_end = on_data, on_end
        if self._error is not None or self._read_ended:
            self._end_receiving()
        else:
            self._spawn(self._push)

    async def _push(self) -> None:
        while self._error is None:
            await self._until_resumed()
            data = await self._read_muxed(_CHUNK_BYTES)
            await self._until_resumed()  # what came while paused is pushed on resume
            if not data:
                break
            if self._on_data is not None:
                self._on_data(data)
        if self._error is None:
            self._read_ended = True
        self._end_receiving()
        self._check_done()

    async def _until_resumed(self) -> None:
        while (paused := self._paused) is not None:
            await paused.wait()

    def _end_receiving(self) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end(self._error)

    def pause_receiving(self) -> None:
        if self._paused is None:
            self._paused = trio.Event()

    def resume_receiving(self) -> None:
        if self._paused is not None:
            self._paused.set()
            self._paused = None

    # Ending

    async def close_write(self) -> None:
        if self.is_write_closed:
            return
        self._write_closed = True
        self._wake_writer()
        while not self._eof_sent and self._error is None:
            await self._changed.wait()

    async def close(self) -> None:
        self._write_closed = True
        if self._error is not None or self._done:
            return
        self._wake_writer()
        if not self._draining:
            self._draining = True
            if self._on_data is None and not self._read_ended:
                self._spawn(self._discard)
            elif self._on_data is not None:
                self._on_data = lambda _data: None
                self.resume_receiving()
        await trio.lowlevel.checkpoint_if_cancelled()

    async def _discard(self) -> None:
        # A reset drops what the peer has not got yet: it waits for an end of the peer, or until nothing of ours goes.
        if await run_while_moving(
            self._read_to_end,
            lambda: self.sent_bytes + self.granted_bytes,
            self._close_timeout_s,
            least=LEFT_BYTES_MIN,
        ):
            self._read_ended = True
            self._check_done()
        else:
            self.reset()

    async def _read_to_end(self) -> None:
        while await self._read_muxed(_CHUNK_BYTES):
            pass

    def reset(self) -> None:
        if self._error is None:
            self._fail("the stream was reset on this side")

    def connection_lost(self, reason: str) -> None:
        """Note that the connection has ended: fail every call, now and later."""
        if self._error is None:
            self._error = StreamClosedError(reason)
            self._settle()

    def _fail(self, reason: str) -> None:
        if self._error is not None:
            return
        self._error = StreamClosedError(reason)
        try:
            self._nursery.start_soon(self._reset_muxed)
        except RuntimeError:
            logger.debug("the connection ended before the reset of %r could be sent", self)
        self._settle()

    def _settle(self) -> None:
        self._queue.clear()
        self._unsent = 0
        self._notify()
        if self._read_scope is not None:
            self._read_scope.cancel()
        self.resume_receiving()
        self._end_receiving()
        self._finish()

    async def _reset_muxed(self) -> None:
        with trio.move_on_after(self._close_timeout_s):
            try:
                await self._muxed.reset()
            except Exception as error:
                logger.debug("resetting %r failed: %r", self, error)

    def _check_done(self) -> None:
        if self._read_ended and self._eof_sent:
            self._finish()

    def _finish(self) -> None:
        if not self._done:
            self._done = True
            self._release(self._held_bytes)
            self._on_done(self)
