"""`/yamux/1.0.0` for py-libp2p connections, without its locks, task hops and one system call per frame.

A reader task parses and dispatches to the streams synchronously; one writer task sends what all streams have queued in
as few Noise messages as possible; an urgent write with nothing before it goes to the socket from the caller's own step.
No caller ever waits on the socket, so cancelling one tears nothing.
"""

import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import trio
from libp2p.abc import IMuxedConn, ISecureConn
from libp2p.connection_types import ConnectionType
from libp2p.io.exceptions import ConnectionClosedError, IOException
from libp2p.network.connection.exceptions import RawConnError
from libp2p.peer.id import ID
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable, MuxedStreamError
from multiaddr import Multiaddr

from dep2p.errors import ProtocolError, StreamClosedError
from dep2p.host.noise.codec import PLAINTEXT_BYTES_MAX, OnPlaintext
from dep2p.host.noise.session import Fill, NoiseSession
from dep2p.host.scopes import shielded
from dep2p.host.yamux.frames import DATA, HEADER_BYTES, GoAway, encode_header
from dep2p.host.yamux.send_queue import QUANTUM_BYTES
from dep2p.host.yamux.session import ACCEPT_BACKLOG_MAX, YamuxCore
from dep2p.host.yamux.yamux_stream import YamuxStream
from dep2p.limits import Limits

logger = logging.getLogger("dep2p.host")

PROTOCOL_ID = "/yamux/1.0.0"
GO_AWAY_TIMEOUT_S = 0.2
"""What `close` grants for sending what is queued and the GO_AWAY frame, and for the peer's own end."""
LAST_READS_S = 0.5
"""When sending fails: for reading what the peer sent before it went."""
CLOSE_TIMEOUT_S = 1.0
ON_CLOSE_TIMEOUT_S = 5.0


class StreamUnavailableError(MuxedStreamError, StreamClosedError):
    """No stream can be opened: the limit is reached or the connection has ended. Ours and py-libp2p's alike."""


class _Pipe(Protocol):
    """What the muxer needs of an encrypted connection."""

    @property
    def can_send_now(self) -> bool: ...
    @property
    def unsent_bytes(self) -> int: ...
    def send_now(self, plaintext: bytes) -> bool: ...
    async def send(self, fill: Fill) -> None: ...
    async def receive(self, on_plaintext: OnPlaintext) -> bool: ...
    def end_sending(self) -> None: ...
    def abort(self) -> None: ...
    async def close(self) -> None: ...


class _GenericPipe:
    """Any other secure connection of py-libp2p."""

    can_send_now = False
    unsent_bytes = 0

    def __init__(self, conn: ISecureConn) -> None:
        self._conn = conn
        self._buffer = memoryview(bytearray(PLAINTEXT_BYTES_MAX))

    def send_now(self, plaintext: bytes) -> bool:
        raise AssertionError("can_send_now is False")

    async def send(self, fill: Fill) -> None:
        await self._conn.write(bytes(self._buffer[: fill(self._buffer)]))

    async def receive(self, on_plaintext: OnPlaintext) -> bool:
        data = await self._conn.read()
        if data:
            on_plaintext(memoryview(data))
        return bool(data)

    def end_sending(self) -> None:
        """A half-close is unknown here."""

    def abort(self) -> None:
        """Nothing can be closed from a synchronous step."""

    async def close(self) -> None:
        await self._conn.close()


class YamuxConnection(IMuxedConn):
    """A multiplexed connection. `start` carries it until it ends; everything else may be used from any task.

    ``on_close`` (which may be set later, and may be async) is called once, after ``event_closed`` is set.
    """

    def __init__(
        self,
        conn: ISecureConn,
        peer_id: ID,
        *,
        limits: Limits,
        is_initiator: bool | None = None,
        on_close: Callable[[], Awaitable[Any] | None] | None = None,
    ) -> None:
        self.secured_conn = conn
        self.peer_id = peer_id
        self.on_close = on_close
        self.close_reason = ""
        self.negotiated_muxer_protocol: str | None = None  # py-libp2p's swarm looks for these two
        self.negotiated_security_protocol: str | None = None
        self.rtt_s: float | None = None
        self.event_started = trio.Event()
        self.event_closed = trio.Event()
        self._limits = limits
        self._pipe: _Pipe = conn if isinstance(conn, NoiseSession) else _GenericPipe(conn)
        self._core: YamuxCore[YamuxStream] = YamuxCore(
            self,
            self._make_stream,
            is_initiator=conn.is_initiator if is_initiator is None else is_initiator,
            streams_max=limits.streams_per_connection_max,
        )
        self._scope: trio.CancelScope | None = None
        self._is_started = False
        self._is_closing = False
        self._is_finishing = False
        self._writer = trio.lowlevel.ParkingLot()
        self._acceptors = trio.lowlevel.ParkingLot()
        self._openers = trio.lowlevel.ParkingLot()
        self._flushed: trio.Event | None = None
        self._read_ended = trio.Event()
        self._pinged = 0
        self._ponged = trio.Event()

    def __repr__(self) -> str:
        state = f"closed: {self.close_reason}" if self._core.error is not None else f"{self.stream_count} streams"
        return f"<YamuxConnection to {str(self.peer_id)[-6:]}, {state}>"

    def _make_stream(self, core: YamuxCore[YamuxStream], stream_id: int) -> YamuxStream:
        return YamuxStream(self, core, stream_id)

    # State

    @property
    def is_initiator(self) -> bool:
        return self._core.is_initiator

    @property
    def is_established(self) -> bool:
        """True when it runs and takes new streams."""
        return self._is_started and self._core.error is None and not self._core.peer_said_goodbye

    @property
    def is_closed(self) -> bool:
        return self.event_closed.is_set()

    @property
    def stream_count(self) -> int:
        return len(self._core.streams)

    @property
    def unsent_bytes(self) -> int:
        """Bytes of all streams, and encrypted ones, that the transport has not taken yet."""
        return self._pipe.unsent_bytes + sum(stream.unsent_bytes for stream in self._core.streams.values())

    def rtt(self) -> float:
        """Seconds; 0.0 before the first probe. py-libp2p's name for `rtt_s`."""
        return 0.0 if self.rtt_s is None else self.rtt_s

    def counters(self) -> dict[str, int]:
        """Monotonic counts of frames, bytes, refusals, resets and violations."""
        return self._core.counters()

    # Running

    async def start(self) -> None:
        """Carry the connection until it ends. Never raises for what the peer or the network does."""
        if self._is_started:
            return
        self._is_started = True
        self.event_started.set()
        if self._core.error is not None:
            await self._finish()
            return
        try:
            async with trio.open_nursery() as nursery:
                self._scope = nursery.cancel_scope
                nursery.start_soon(self._run, self._write_all, "sending")
                nursery.start_soon(self._run, self._watch, "watching")
                await self._run(self._read_all, "receiving")
                nursery.cancel_scope.cancel()
        finally:
            self.fail("the connection task was cancelled")
            await self._finish()

    async def _run(self, task: Callable[[], Awaitable[None]], doing: str) -> None:
        try:
            await task()
        except ProtocolError as error:
            await self._say_goodbye(GoAway.PROTOCOL_ERROR)
            self.fail(f"protocol error: {error}")
        except (ConnectionClosedError, IOException, RawConnError, OSError) as error:
            self.fail(str(error) or f"{doing} failed: {type(error).__name__}")
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self.fail(f"{doing} failed: {type(error).__name__}")
        except Exception as error:
            logger.exception("%s on the connection to %s failed", doing, self.peer_id)
            self.fail(f"internal error: {error!r}")

    async def _read_all(self) -> None:
        receive, take = self._pipe.receive, self._core.receive
        try:
            while await receive(take):
                if self._core.error is not None:
                    return
        finally:
            self._read_ended.set()
        self.fail("the peer closed the connection")

    async def _write_all(self) -> None:
        try:
            await self._write_queued()
        except (ConnectionClosedError, IOException, RawConnError, OSError):
            # The peer has gone; what it sent before that may still have to be read.
            await trio.sleep(LAST_READS_S)
            raise

    async def _write_queued(self) -> None:
        core, outbox, pipe = self._core, self._core.outbox, self._pipe
        while core.error is None:
            if outbox.has_output or pipe.unsent_bytes:
                await pipe.send(outbox.fill)
            else:
                if self._flushed is not None:
                    self._flushed.set()
                await self._writer.park()

    async def _watch(self) -> None:
        """Ping the peer; end the connection when neither a pong nor anything else comes in time."""
        interval_s, timeout_s = self._limits.liveness_interval_s, self._limits.liveness_timeout_s
        core = self._core
        while interval_s > 0:
            self._ponged = trio.Event()
            self._pinged = self._pinged + 1 & 0xFFFFFFFF
            sent_s = trio.current_time()
            core.ping(self._pinged)
            seen = -1
            while not self._ponged.is_set() and seen != core.bytes_in:
                seen = core.bytes_in
                with trio.move_on_after(timeout_s):
                    await self._ponged.wait()
            if not self._ponged.is_set():
                self.fail("liveness")
                return
            now = trio.current_time()
            self.rtt_s = now - sent_s
            self._end_leftovers(now)
            await trio.sleep_until(max(now, sent_s + interval_s))

    def _end_leftovers(self, now: float) -> None:
        if self._core.peer_said_goodbye and not self._core.streams:
            self.fail("the peer ended the connection")
        for stream in list(self._core.streams.values()):
            if stream.linger_until_s is not None and stream.linger_until_s <= now:
                stream.reset_state("the peer did not end its side in time", "resets_lingering")

    def send_urgently(self, stream: YamuxStream, data: bytes | bytearray | memoryview) -> bool:
        """Put a write of ``stream``, which has nothing unsent, on the wire from this step; False if that cannot be."""
        outbox, pipe, size = self._core.outbox, self._pipe, len(data)
        if (
            not pipe.can_send_now
            or outbox.has_data
            or size > stream.send_window
            or not 0 < size <= QUANTUM_BYTES
            or stream.is_write_closed
        ):
            return False
        stream.send_window -= size
        plaintext = b"".join((outbox.take_control(), encode_header(DATA, 0, stream.id, size), data))
        outbox.count_sent(HEADER_BYTES + size)
        try:
            if not pipe.send_now(plaintext):
                self._writer.unpark_all()
        except ProtocolError as error:
            self.fail(str(error))
        return True

    # What the core tells

    def on_output(self) -> None:
        self._writer.unpark_all()

    def on_inbound_stream(self) -> None:
        self._acceptors.unpark_all()

    def on_acknowledged(self) -> None:
        self._openers.unpark_all()

    def on_pong(self, value: int) -> None:
        if value == self._pinged:
            self._ponged.set()

    def on_go_away(self, code: int) -> None:
        self._openers.unpark_all()
        if code != GoAway.NORMAL:
            self.fail(f"the peer ended the connection with yamux code {code}")
        elif not self._core.streams:
            self.fail("the peer ended the connection")

    def on_stuck(self, reason: str) -> None:
        self.fail(reason)

    # Streams

    async def open_stream(self) -> YamuxStream:
        """A new stream; waits only while the peer has ACCEPT_BACKLOG_MAX streams to acknowledge.

        Raises StreamUnavailableError at the limit of streams and when the connection has ended.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        core = self._core
        while core.unacknowledged >= ACCEPT_BACKLOG_MAX and core.error is None and not core.peer_said_goodbye:
            if len(core.streams) >= self._limits.streams_per_connection_max:
                break
            await self._openers.park()
        try:
            if self._is_closing:
                raise StreamClosedError("the connection is being closed")
            return core.open_stream()
        except StreamClosedError as error:
            raise StreamUnavailableError(str(error)) from None

    async def accept_stream(self) -> YamuxStream:
        """The next stream that the peer opened. Raises MuxedConnUnavailable when the connection has ended."""
        await trio.lowlevel.checkpoint()
        while self._core.error is None:
            stream = self._core.accept_stream()
            if stream is not None:
                return stream
            await self._acceptors.park()
        raise MuxedConnUnavailable(self.close_reason)

    # Ending

    def fail(self, reason: str) -> None:
        """End the connection at once, from any step: all streams and waiting calls fail. Idempotent."""
        if self.close_reason:
            return
        reason = "closed on this side" if self._is_closing else reason
        self.close_reason = reason
        self._core.fail(reason)
        self._pipe.abort()
        for lot in (self._writer, self._acceptors, self._openers):
            lot.unpark_all()
        if self._flushed is not None:
            self._flushed.set()
        if self._scope is not None:
            self._scope.cancel()

    async def _say_goodbye(self, code: GoAway) -> None:
        """Give what is queued and a GO_AWAY a little time to leave, and the peer to read them.

        A socket closed with unread input would take back what is still on its way to the peer.
        """
        if self._core.error is not None or not self._is_started:
            return
        self._core.go_away(code)
        self._flushed = trio.Event()
        with shielded(GO_AWAY_TIMEOUT_S):
            await self._flushed.wait()
            if self._core.error is None:
                self._pipe.end_sending()
                await self._read_ended.wait()

    async def close(self) -> None:
        """Say goodbye, for GO_AWAY_TIMEOUT_S at most, and close. Shielded, bounded, idempotent."""
        if not self._is_closing:
            self._is_closing = True
            await self._say_goodbye(GoAway.NORMAL)
            self.fail("closed on this side")
        with shielded(CLOSE_TIMEOUT_S + ON_CLOSE_TIMEOUT_S):
            if not self._is_started:
                await self._finish()
            await self.event_closed.wait()

    async def _finish(self) -> None:
        if self._is_finishing:
            return
        self._is_finishing = True
        with shielded(CLOSE_TIMEOUT_S):
            try:
                await self._pipe.close()
            except (IOException, RawConnError, OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
                logger.debug("closing the connection to %s: %r", self.peer_id, error)
        self.event_closed.set()
        if self.on_close is None:
            return
        with shielded(ON_CLOSE_TIMEOUT_S):
            try:
                result = self.on_close()
                if inspect.isawaitable(result):
                    await result
            except Exception:
                logger.exception("the close callback of the connection to %s failed", self.peer_id)

    # Addresses

    def get_transport_addresses(self) -> list[Multiaddr]:
        return self.secured_conn.get_transport_addresses()

    def get_connection_type(self) -> ConnectionType:
        return self.secured_conn.get_connection_type()

    def get_remote_address(self) -> tuple[str, int] | None:
        return self.secured_conn.get_remote_address()
