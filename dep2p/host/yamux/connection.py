"""`/yamux/1.0.0` for py-libp2p connections, without its locks, task hops and one system call per frame.

A reader task parses and dispatches to the streams synchronously; one writer task sends what all streams have queued in
as few Noise messages as possible; an urgent write with nothing before it goes to the socket from the caller's own step.
No caller ever waits on the socket, so cancelling one tears nothing.
"""

import inspect
import logging
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Protocol

import trio
from libp2p.abc import IMuxedConn, IMuxedStream, ISecureConn
from libp2p.connection_types import ConnectionType
from libp2p.io.exceptions import ConnectionClosedError, IOException
from libp2p.network.connection.exceptions import RawConnError
from libp2p.peer.id import ID
from libp2p.stream_muxer.exceptions import (
    MuxedConnUnavailable,
    MuxedStreamClosed,
    MuxedStreamEOF,
    MuxedStreamError,
    MuxedStreamReset,
)
from multiaddr import Multiaddr

from dep2p.errors import ProtocolError, StreamClosedError
from dep2p.host.noise.codec import PLAINTEXT_BYTES_MAX, OnPlaintext
from dep2p.host.noise.session import RECEIVE_BYTES_MAX, Fill, NoiseSession, Turn
from dep2p.host.resources.ledger import ConnectionResources
from dep2p.host.resources.turns import EARLY_WEIGHT_MAX, Turns
from dep2p.host.scopes import shielded
from dep2p.host.yamux.frames import DATA, HEADER_BYTES, GoAway, encode_header
from dep2p.host.yamux.send_queue import QUANTUM_BYTES
from dep2p.host.yamux.session import ACCEPT_BACKLOG_MAX, YamuxCore
from dep2p.host.yamux.stream_state import StreamState
from dep2p.limits import Limits
from dep2p.protocols.timing.stall import LEFT_BYTES_MIN, StallTimer

logger: logging.Logger = logging.getLogger("dep2p.host")

PROTOCOL_ID = "/yamux/1.0.0"
GO_AWAY_TIMEOUT_S = 0.2
"""The time that `close` grants for sending the queue and the GO_AWAY frame, and for the peer's own end."""
LAST_READS_S = 0.5
"""Seconds for reading what the peer sent before it went, when sending fails."""
CLOSE_TIMEOUT_S = 1.0
ON_CLOSE_TIMEOUT_S = 5.0
WRITE_HIGH_BYTES = 262_144
"""`write` waits while more than this is unsent."""
FRAMES_PER_STEP_MAX = 1_024
"""Frames of one connection that are taken before other tasks run, about 2 ms of work."""
FRAMES_PER_STEP_UNPROVEN_MAX = 256
"""Frames of an unproven peer's connection that are taken before other tasks run."""
TURN_FRAMES = 32
"""Frames of an unproven peer in one step that weigh as much as the bytes of a step; each further ones add as much."""
RECEIVE_BYTES_UNPROVEN_MAX = 16_384
"""Bytes read at a time from an unproven peer: those that it cannot use in its step stay in memory."""
UNSENT_HELD_BYTES_MAX = 262_144
"""Unsent bytes of an unproven peer's connection that its account holds at most: what the node itself wants to send it,
such as public messages, has queues with bounds of their own and must not end the connection."""
_LIVENESS_LOOKS = 4
"""Looks at what moves, in the time for the answer to a ping."""
LINGER_S = 60.0
"""Seconds that a stream closed here is kept for a peer that does not end its side; then it is reset. They begin anew
while `LEFT_BYTES_MIN` of ours go, or are taken."""


class StreamUnavailableError(MuxedStreamError, StreamClosedError):
    """No stream can be opened: the limit is reached or the connection has ended. Ours and py-libp2p's alike."""


class _SecureStream(Protocol):
    """An encrypted connection, as the muxer uses it."""

    @property
    def can_send_now(self) -> bool: ...
    @property
    def unsent_bytes(self) -> int: ...
    @property
    def incomplete_bytes(self) -> int: ...
    @property
    def offered_bytes(self) -> int: ...
    def arrived_bytes(self) -> int: ...
    def send_now(self, plaintext: bytes) -> bool: ...
    async def send(self, fill: Fill) -> None: ...
    async def receive(self, on_plaintext: OnPlaintext, bytes_max: int = ..., turn: Turn | None = ...) -> bool: ...
    def end_sending(self) -> None: ...
    def abort(self) -> None: ...
    async def close(self) -> None: ...


class _GenericPipe:
    """Every other secure connection of py-libp2p."""

    can_send_now = False
    unsent_bytes = 0
    incomplete_bytes = 0
    offered_bytes = 0

    def __init__(self, conn: ISecureConn) -> None:
        self._conn = conn
        self._buffer = memoryview(bytearray(PLAINTEXT_BYTES_MAX))

    def send_now(self, plaintext: bytes) -> bool:
        raise AssertionError("can_send_now is False")

    def arrived_bytes(self) -> int:
        return 0

    async def send(self, fill: Fill) -> None:
        await self._conn.write(bytes(self._buffer[: fill(self._buffer)]))

    async def receive(
        self, on_plaintext: OnPlaintext, bytes_max: int = RECEIVE_BYTES_MAX, turn: Turn | None = None
    ) -> bool:
        data = await self._conn.read(bytes_max)
        if turn is not None:
            await turn()
        if data:
            on_plaintext(memoryview(data))
        return bool(data)

    def end_sending(self) -> None:
        """Do nothing: a half-close is unknown here."""

    def abort(self) -> None:
        """Do nothing: this connection cannot be closed from a synchronous step."""

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
        on_close: Callable[[], Awaitable[object] | None] | None = None,
    ) -> None:
        self.secured_conn = conn
        self.peer_id = peer_id
        self.on_close = on_close
        self.close_reason: str = ""
        self.negotiated_muxer_protocol: str | None = None  # py-libp2p's swarm looks for these two
        self.negotiated_security_protocol: str | None = None
        self.rtt_s: float | None = None
        self.rtt_s_min: float = 0.0
        self.event_started: trio.Event = trio.Event()
        self.event_closed: trio.Event = trio.Event()
        self._limits = limits
        self._pipe: _SecureStream = conn if isinstance(conn, NoiseSession) else _GenericPipe(conn)
        self._core: YamuxCore[YamuxStream] = YamuxCore(
            self,
            self._make_stream,
            is_initiator=conn.is_initiator if is_initiator is None else is_initiator,
            streams_max=limits.streams_per_connection_max,
        )
        self._turns = Turns()
        self._left = memoryview(b"")  # decrypted, and not taken yet
        self._held_bytes = 0  # reserved for what is incomplete or not taken
        self._weight = 1  # of the reader's next step, while the peer is unproven
        self._worked = 0  # the weight of all its steps
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

    def _make_stream(self, core: "YamuxCore[YamuxStream]", stream_id: int) -> "YamuxStream":
        return YamuxStream(self, core, stream_id)

    def bind(self, resources: ConnectionResources, turns: Turns) -> None:
        """Account for the connection in ``resources``, and take turns with other unproven peers; before `start`."""
        self._core.resources = resources
        self._turns = turns

    # State

    @property
    def is_initiator(self) -> bool:
        return self._core.is_initiator

    @property
    def is_proven(self) -> bool:
        """Whether the peer has proved itself to a part of the node."""
        return self._core.resources.is_proven

    @property
    def is_early(self) -> bool:
        """Whether an unproven peer has caused so little work that it goes before those that caused more."""
        return self._worked < EARLY_WEIGHT_MAX

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

    def open_protocols(self) -> list[str]:
        """The protocol of each open stream."""
        return [stream.protocol for stream in self._core.streams.values()]

    @property
    def unsent_bytes(self) -> int:
        """Bytes of all streams, and encrypted ones, that the transport has not taken yet."""
        return self._pipe.unsent_bytes + self._core.unsent_bytes

    @property
    def received_bytes(self) -> int:
        """Bytes of frames that have come."""
        return self._core.bytes_in

    def rtt(self) -> float:
        """Round-trip seconds; 0.0 before the first probe. py-libp2p's name for `rtt_s`."""
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
        core, receive, take, turn = self._core, self._pipe.receive, self._take, self._turn
        try:
            while True:
                seen = core.frames_in
                if self._left:
                    if core.resources.is_proven:
                        await trio.lowlevel.checkpoint()
                    else:
                        await turn()
                    left, self._left = self._left, memoryview(b"")
                    take(left)
                elif core.resources.is_proven:
                    if not await receive(take):
                        break
                elif not await receive(take, RECEIVE_BYTES_UNPROVEN_MAX, turn):
                    break
                if core.error is not None:
                    return
                self._weight = 1 + (core.frames_in - seen) // TURN_FRAMES
                self._hold()
        finally:
            self._read_ended.set()
        self.fail("the peer closed the connection")

    async def _turn(self) -> None:
        """As an unproven peer, wait for a turn that is as long as the step before it was."""
        is_early = self.is_early
        self._worked += self._weight
        await self._turns.next(self._weight, is_early=is_early)

    def _take(self, data: memoryview) -> None:
        """Give the session as many frames as one step may take; keep the rest."""
        if self._left:
            self._left = memoryview(bytes(self._left) + bytes(data))
            return
        core = self._core
        frames_max = FRAMES_PER_STEP_MAX if core.resources.is_proven else FRAMES_PER_STEP_UNPROVEN_MAX
        taken = core.receive(data, frames_max)
        if taken < len(data):
            rest = data[taken:]
            self._left = rest if rest.readonly else memoryview(bytes(rest))  # else the buffer is another read's next

    def _hold(self) -> None:
        """Account for the bytes of an unproven peer that wait for the rest of their message, for the next step, or for
        the peer to read them."""
        size, pipe, core = 0, self._pipe, self._core
        if not core.resources.is_proven:
            unsent = pipe.unsent_bytes + core.unsent_bytes + core.send_queue.control_bytes
            size = pipe.incomplete_bytes + len(self._left) + min(unsent, UNSENT_HELD_BYTES_MAX)
        account = self._core.resources.account
        more, self._held_bytes = size - self._held_bytes, size
        if more < 0:
            account.release(-more)
        elif more and not account.reserve(more):
            self.fail("no memory is left for what the peer sends")

    async def _write_all(self) -> None:
        try:
            await self._write_queued()
        except (ConnectionClosedError, IOException, RawConnError, OSError):
            # The peer has gone; what it sent before that may still have to be read.
            await trio.sleep(LAST_READS_S)
            raise

    async def _write_queued(self) -> None:
        core, send_queue, pipe = self._core, self._core.send_queue, self._pipe
        while core.error is None:
            if send_queue.has_output or pipe.unsent_bytes:
                self._hold()
                await pipe.send(send_queue.fill)
            else:
                self._hold()
                if self._flushed is not None:
                    self._flushed.set()
                await self._writer.park()

    async def _watch(self) -> None:
        """Ping the peer; end the connection when neither a pong nor anything else comes in time."""
        interval_s = self._limits.liveness_interval_s
        core = self._core
        while interval_s > 0:
            self._ponged = trio.Event()
            self._pinged = self._pinged + 1 & 0xFFFFFFFF
            sent_s = trio.current_time()
            ahead_bytes = self._pipe.offered_bytes
            core.ping(self._pinged)
            await self._wait_ponged(ahead_bytes)
            if not self._ponged.is_set():
                self.fail("liveness")
                return
            now = trio.current_time()
            self.rtt_s = now - sent_s
            self.rtt_s_min = min(self.rtt_s_min or self.rtt_s, self.rtt_s)
            self._end_leftovers(now)
            await trio.sleep_until(max(now, sent_s + interval_s))

    async def _wait_ponged(self, ahead_bytes: int) -> None:
        """Wait for the answer to a ping that ``ahead_bytes`` of this connection go ahead of.

        Until they have arrived, the peer cannot have answered: on a slow way up that may take minutes.
        """
        timeout_s = self._limits.liveness_timeout_s
        core, pipe = self._core, self._pipe
        end_s = trio.current_time() + timeout_s
        came, arrived, was_behind = core.bytes_in, pipe.arrived_bytes(), False
        while not self._ponged.is_set() and trio.current_time() < end_s:
            with trio.move_on_at(min(end_s, trio.current_time() + timeout_s / _LIVENESS_LOOKS)):
                await self._ponged.wait()
                return
            now_arrived = pipe.arrived_bytes()
            is_behind = now_arrived <= ahead_bytes
            if core.bytes_in != came or (now_arrived != arrived and (is_behind or was_behind)):
                end_s = trio.current_time() + timeout_s
            came, arrived, was_behind = core.bytes_in, now_arrived, is_behind

    def _end_leftovers(self, now: float) -> None:
        if self._core.peer_said_goodbye and not self._core.streams:
            self.fail("the peer ended the connection")
        for stream in list(self._core.streams.values()):
            if stream.is_left(now):
                stream.reset_state("the peer did not end its side in time", "resets_lingering")

    def send_urgently(self, stream: "YamuxStream", data: bytes | bytearray | memoryview) -> bool:
        """Put a write of ``stream``, which has nothing unsent, on the wire from this step; False if that cannot be."""
        send_queue, pipe, size = self._core.send_queue, self._pipe, len(data)
        if (
            not pipe.can_send_now
            or send_queue.has_data
            or size > stream.send_window
            or not 0 < size <= QUANTUM_BYTES
            or stream.is_write_closed
        ):
            return False
        stream.send_window -= size
        plaintext = b"".join((send_queue.take_control(), encode_header(DATA, 0, stream.id, size), data))
        send_queue.count_sent(HEADER_BYTES + size)
        try:
            if not pipe.send_now(plaintext):
                self._writer.unpark_all()
        except ProtocolError as error:
            self.fail(str(error))
        return True

    # Calls of the session

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

    def now_s(self) -> float:
        return trio.current_time()

    # Streams

    async def open_stream(self) -> "YamuxStream":
        """Open a stream; waits only while the peer has ACCEPT_BACKLOG_MAX streams to acknowledge.

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

    async def accept_stream(self) -> "YamuxStream":
        """Return the next stream that the peer opened. Raises MuxedConnUnavailable when the connection has ended."""
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
        self._left = memoryview(b"")
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


class YamuxStream(StreamState, IMuxedStream):
    """One stream. All state changes are synchronous: cancelling a caller at any await leaves the stream usable."""

    __slots__ = ("_connection", "_drain_low_bytes", "_linger", "_readable", "_sent", "muxed_conn", "protocol")

    def __init__(self, connection: YamuxConnection, core: YamuxCore["YamuxStream"], stream_id: int) -> None:
        super().__init__(core, stream_id)
        self.muxed_conn: IMuxedConn = connection
        self._connection = connection  # the same, as the class that it is
        self._linger: StallTimer | None = None
        self.protocol: str = ""
        """Name of the protocol that was negotiated on it."""
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

    @property
    def is_proven(self) -> bool:
        """Whether the peer has proved itself to a part of the node."""
        return self._connection.is_proven

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
        if self._linger is None:
            self._linger = StallTimer(LINGER_S, trio.current_time(), self.moved_bytes, least=LEFT_BYTES_MIN)

    def is_left(self, now: float) -> bool:
        """Whether it was closed here, the peer has not ended its side, and nothing of ours is on its way any more."""
        return self._linger is not None and self._linger.is_stalled(now, self.moved_bytes)

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
