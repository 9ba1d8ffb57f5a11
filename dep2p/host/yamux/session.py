"""A yamux session without I/O: received bytes go in by `YamuxCore.receive`, bytes to send come out of its send queue.

Whatever the peer sends either follows the protocol or raises ProtocolError, after which the session is of no use.
Frames of a stream that has just ended are normal (both sides end streams at the same time) and are ignored.
"""

from collections import deque
from collections.abc import Callable
from typing import Generic, Never, Protocol, TypeVar

from dep2p.errors import LocalProtocolError, ProtocolError, StreamClosedError
from dep2p.host.resources.ledger import STREAM_BYTES, ConnectionResources, unbounded
from dep2p.host.resources.scopes import Account
from dep2p.host.yamux.frames import (
    ACK,
    DATA,
    FIN,
    GO_AWAY,
    HEADER,
    HEADER_BYTES,
    PING,
    RST,
    STREAM_ID_MAX,
    SYN,
    VERSION,
    WINDOW_INITIAL_BYTES,
    WINDOW_MAX,
    WINDOW_UPDATE,
    GoAway,
)
from dep2p.host.yamux.send_queue import YamuxSendQueue
from dep2p.host.yamux.stream_state import (
    BUFFERED_BYTES_MAX,
    RECEIVE_WINDOW_MAX_BYTES,
    RECEIVE_WINDOW_NEAR_BYTES,
    WINDOW_GROWTH_BUDGET_BYTES,
    StreamState,
)

ACCEPT_BACKLOG_MAX = 256
"""Inbound streams that were not accepted yet, and outbound ones that the peer has not acknowledged."""
ACCEPT_BACKLOG_UNPROVEN_MAX = 104
"""The same inbound streams of an unproven peer: a host of the public network may open 100 at once. More of them are
objects in which the garbage collector finds nothing: with 128, on 128 connections, for 30 ms, again and again."""
FRAMES_PER_CALL_MAX = 65_536
"""Frames that `YamuxCore.receive` takes at a time, unless it is called with another number."""
SYN_FRAMES = 4
"""Control frames that a new stream counts for: it costs a task, a negotiation and an answer."""

_COUNTS = (
    "violations",
    "streams_opened",
    "streams_accepted",
    "streams_refused_limit",
    "streams_refused_backlog",
    "streams_refused_memory",
    "control_rate_exceeded",
    "resets_in",
    "resets_out",
    "resets_buffer_full",
    "resets_no_reader",
    "resets_lingering",
    "frames_of_ended_streams",
    "bytes_of_ended_streams",
    "receiver_failures",
)

S = TypeVar("S", bound=StreamState)


class CoreOwner(Protocol):
    """The owner of a session, which drives it. The calls are synchronous and must neither block nor raise."""

    def on_output(self) -> None:
        """Take the news that the send queue has got something to send."""
        ...

    def on_inbound_stream(self) -> None:
        """Take the news that a stream can be accepted."""
        ...

    def on_pong(self, value: int) -> None:
        """Take the peer's answer to a ping."""
        ...

    def on_acknowledged(self) -> None:
        """Take the news that the peer acknowledged an outbound stream, or that one ended unacknowledged."""
        ...

    def on_go_away(self, code: int) -> None:
        """Take the peer's notice that it accepts no new streams; a code other than NORMAL says that it ends the session
        for a fault."""
        ...

    def on_stuck(self, reason: str) -> None:
        """Take the failure of the session: the peer makes us answer and does not read the answers."""
        ...

    def now_s(self) -> float:
        """The time, by a clock that never goes back; asked for when the peer has used up its control frames."""
        ...

    @property
    def rtt_s_min(self) -> float:
        """The shortest round trip that was measured, seconds; 0.0 before the first one."""
        ...


class _NoOwner:
    """In the place of the owner of a session that has ended: the two would keep each other until the garbage collector
    finds them, and thousands that end in an attack make it stop all else for a tenth of a second."""

    def on_output(self) -> None: ...
    def on_inbound_stream(self) -> None: ...
    def on_pong(self, value: int) -> None: ...
    def on_acknowledged(self) -> None: ...
    def on_go_away(self, code: int) -> None: ...
    def on_stuck(self, reason: str) -> None: ...

    def now_s(self) -> float:
        return 0.0

    @property
    def rtt_s_min(self) -> float:
        return 0.0


_NO_OWNER = _NoOwner()


def _make_no_stream(_core: object, _stream_id: int) -> Never:
    raise LocalProtocolError("the session has ended")


class YamuxCore(Generic[S]):
    """One side of one session.

    ``make_stream`` is called with (core, stream id) for each stream of either side.
    """

    def __init__(
        self,
        owner: CoreOwner,
        make_stream: "Callable[[YamuxCore[S], int], S]",
        *,
        is_initiator: bool,
        streams_max: int,
        accept_backlog_max: int = ACCEPT_BACKLOG_MAX,
    ) -> None:
        self.is_initiator = is_initiator
        self.streams: dict[int, S] = {}
        self.unacknowledged: int = 0
        self.peer_said_goodbye: bool = False
        self.error: StreamClosedError | None = None
        self.buffered_bytes: int = 0  # received and not yet read, of all streams
        self.grown_bytes: int = 0  # receive windows beyond the initial ones
        self.unsent_bytes: int = 0  # taken for sending and not handed on yet, of all streams
        self.send_queue: YamuxSendQueue = YamuxSendQueue(owner.on_output, self._on_fin)
        self.bytes_in: int = 0
        self.frames_in: int = 0
        self.counts: dict[str, int] = {name: 0 for name in _COUNTS}
        self.resources: ConnectionResources = unbounded(4 * BUFFERED_BYTES_MAX)
        """Set before anything is received; the owner closes its account when the session has ended."""
        self._owner = owner
        self._make_stream = make_stream
        self._streams_max = streams_max
        self._backlog: deque[S] = deque()
        self._backlog_max = accept_backlog_max
        self._next_id = 1 if is_initiator else 2
        self._header = bytearray()  # the start of a header whose end has not arrived
        self._body_left = 0
        self._body_flags = 0
        self._body_stream: S | None = None

    # Calls of the owner

    def open_stream(self) -> S:
        """Open an outbound stream.

        Raises StreamClosedError at the limit of streams, after a GO_AWAY, and when the session has ended.
        """
        if self.error is not None:
            raise StreamClosedError(str(self.error))
        if self.peer_said_goodbye:
            raise StreamClosedError("the peer takes no new streams on this connection")
        if len(self.streams) >= self._streams_max:
            raise StreamClosedError(f"{self._streams_max} streams are open on this connection: close some first")
        stream_id = self._next_id
        if stream_id > STREAM_ID_MAX:
            raise StreamClosedError("the connection has used up its stream ids")
        self._next_id += 2
        stream = self._make_stream(self, stream_id)
        stream.awaits_ack = True
        self.unacknowledged += 1
        self.streams[stream_id] = stream
        self.counts["streams_opened"] += 1
        self.send_control(WINDOW_UPDATE, SYN, stream_id, 0)
        return stream

    def accept_stream(self) -> S | None:
        """Return the oldest inbound stream that was not accepted yet, which this acknowledges to the peer."""
        while self._backlog:
            stream = self._backlog.popleft()
            if stream.error is None:
                self.counts["streams_accepted"] += 1
                self.send_control(WINDOW_UPDATE, ACK, stream.id, 0)
                return stream
        return None

    def ping(self, value: int) -> None:
        """Ask the peer for a pong with ``value`` (u32)."""
        self.send_control(PING, SYN, 0, value)

    def go_away(self, code: GoAway) -> None:
        """Tell the peer that the session ends."""
        self.send_control(GO_AWAY, 0, 0, code)

    def fail(self, reason: str) -> None:
        """End the session: every stream fails with ``reason``, nothing more is sent. Idempotent."""
        if self.error is not None:
            return
        self.error = StreamClosedError(reason)
        self.send_queue.close()
        self._backlog.clear()
        self._body_stream = None
        streams = list(self.streams.values())
        self.streams.clear()
        for stream in streams:
            self._give_back_window(stream)
            stream.connection_lost(StreamClosedError(reason))
        self.buffered_bytes = 0
        self._owner, self._make_stream = _NO_OWNER, _make_no_stream

    def counters(self) -> dict[str, int]:
        """Monotonic counts by name."""
        send_queue = self.send_queue
        sizes = {
            "frames_in": self.frames_in,
            "frames_out": send_queue.frames_out,
            "bytes_in": self.bytes_in,
            "bytes_out": send_queue.bytes_out,
        }
        return sizes | self.counts

    def send_control(self, kind: int, flags: int, stream_id: int, length: int) -> None:
        """Queue a frame without a body. Never raises: a peer that does not read its frames ends the session."""
        if not self.send_queue.send_control(kind, flags, stream_id, length):
            self.counts["violations"] += 1
            reason, owner = "the peer does not read: too many control frames wait for it", self._owner
            self.fail(reason)
            owner.on_stuck(reason)

    # Receiving

    def receive(self, data: memoryview, frames_max: int = FRAMES_PER_CALL_MAX) -> int:
        """Take the next received bytes, split anyhow; returns how many were taken: all, or ``frames_max`` frames.

        Raises ProtocolError. After an error, or when a receiver ends the session, the rest is dropped.
        """
        position, end = 0, len(data)
        frames_end = self.frames_in + frames_max
        self.bytes_in += end
        streams = self.streams
        unpack = HEADER.unpack_from
        while self.error is None and self.frames_in < frames_end:
            left = end - position
            if self._body_left:
                if not left:
                    break
                size = min(self._body_left, left)
                self._body_left -= size
                self._take_body(data[position : position + size])
                position += size
                continue
            if self._header or left < HEADER_BYTES:
                if not left:
                    break
                size = min(HEADER_BYTES - len(self._header), left)
                self._header += data[position : position + size]
                position += size
                if len(self._header) < HEADER_BYTES:
                    break
                version, kind, flags, stream_id, length = unpack(self._header)
                self._header.clear()
            else:
                version, kind, flags, stream_id, length = unpack(data, position)
                position += HEADER_BYTES
            self.frames_in += 1
            if kind == DATA and length and not flags and version == VERSION:
                stream = streams.get(stream_id)
                if (
                    stream is not None
                    and length <= stream.receive_credit
                    and length <= end - position
                    and not stream.read_ended
                ):
                    # The common case in one step: a whole frame of a live stream.
                    stream.receive_credit -= length
                    stop = position + length
                    stream.deliver(data[position:stop])
                    position = stop
                    continue
            if version != VERSION:
                raise self._violation(f"yamux version {version}")
            if kind == DATA:
                self._start_body(flags, stream_id, length)
            elif kind == WINDOW_UPDATE:
                self._take_window_update(flags, stream_id, length)
            elif kind == PING:
                self._take_ping(flags, stream_id, length)
            elif kind == GO_AWAY:
                self._take_go_away(length)
            else:
                raise self._violation(f"yamux frame type {kind}")
        if self.error is not None:
            return end
        self.bytes_in -= end - position
        return position

    def _charge(self, frames: int) -> None:
        """Count control frames of the peer against its rate."""
        rate = self.resources.control_rate
        if not rate.take(frames) and not rate.refill(self._owner.now_s(), self.bytes_in + self.send_queue.bytes_out):
            self.counts["control_rate_exceeded"] += 1
            raise ProtocolError("more control frames (SYN, RST, PING, window updates, empty frames) than are allowed")

    def _violation(self, text: str) -> ProtocolError:
        self.counts["violations"] += 1
        return ProtocolError(text)

    def _start_body(self, flags: int, stream_id: int, length: int) -> None:
        if length > RECEIVE_WINDOW_MAX_BYTES:
            raise self._violation(f"a DATA frame of {length} bytes is larger than any window")
        stream = self._stream_of(flags, stream_id)
        if not length or stream is None:
            self._charge(1)
        if stream is not None:
            if length > stream.receive_credit:
                raise self._violation(
                    f"stream {stream_id}: {length} bytes sent with a window of {stream.receive_credit} left"
                )
            if length and stream.read_ended:
                raise self._violation(f"stream {stream_id}: data after its end")
            stream.receive_credit -= length
        if length:
            self._body_stream = stream
            self._body_left = length
            self._body_flags = flags
        elif stream is not None:
            self._take_flags(stream, flags)

    def _take_body(self, part: memoryview) -> None:
        stream = self._body_stream
        if stream is None or stream.error is not None:
            self.counts["bytes_of_ended_streams"] += len(part)
        else:
            stream.deliver(part)
        if not self._body_left:
            self._body_stream = None
            if stream is not None and stream.error is None:
                self._take_flags(stream, self._body_flags)

    def _take_window_update(self, flags: int, stream_id: int, credit: int) -> None:
        self._charge(1)
        stream = self._stream_of(flags, stream_id)
        if stream is None:
            return
        if credit:
            if stream.send_window + credit > WINDOW_MAX:
                raise self._violation(f"stream {stream_id}: a window of more than {WINDOW_MAX} bytes")
            stream.send_window += credit
            stream.granted_bytes += credit
            if stream.unsent_bytes:
                self.send_queue.schedule(stream)
        self._take_flags(stream, flags)

    def _take_flags(self, stream: StreamState, flags: int) -> None:
        if flags & ACK and stream.awaits_ack:
            self._acknowledge(stream)
        if flags & RST:
            self.counts["resets_in"] += 1
            self.drop(stream)
            stream.fail(StreamClosedError("the peer reset the stream"))
        elif flags & FIN and not stream.read_ended:
            stream.end_reading()
            self._remove_if_done(stream)

    def _take_ping(self, flags: int, stream_id: int, value: int) -> None:
        self._charge(1)
        if stream_id:
            raise self._violation(f"a PING on stream {stream_id}")
        if flags & SYN:
            self.send_control(PING, ACK, 0, value)
        elif flags & ACK:
            self._owner.on_pong(value)

    def _take_go_away(self, code: int) -> None:
        self._charge(1)
        self.peer_said_goodbye = True
        self._owner.on_go_away(code)

    def _stream_of(self, flags: int, stream_id: int) -> S | None:
        """Return the live stream of a DATA or WINDOW_UPDATE frame; None when it has ended or was refused."""
        if not stream_id:
            raise self._violation("a stream frame without a stream id")
        stream = self.streams.get(stream_id)
        if flags & SYN:
            if stream is not None:
                raise self._violation(f"stream {stream_id} opened twice")
            return self._take_syn(stream_id)
        if stream is None:
            if self._is_own(stream_id) and stream_id >= self._next_id:
                raise self._violation(f"a frame for stream {stream_id}, which was never opened")
            self.counts["frames_of_ended_streams"] += 1
        return stream

    def _is_own(self, stream_id: int) -> bool:
        return bool(stream_id & 1) == self.is_initiator

    def _take_syn(self, stream_id: int) -> S | None:
        if self._is_own(stream_id):
            raise self._violation(f"the peer opened stream {stream_id}, whose id is ours to give")
        self._charge(SYN_FRAMES)
        reason = None
        if len(self.streams) >= self._streams_max:
            reason = "streams_refused_limit"
        elif len(self._backlog) >= (self._backlog_max if self.resources.is_proven else ACCEPT_BACKLOG_UNPROVEN_MAX):
            reason = "streams_refused_backlog"
        elif not self.resources.account.reserve_half(STREAM_BYTES):
            reason = "streams_refused_memory"
        if self.error is not None:
            return None  # all memory is taken, and this connection had most of it
        if reason is not None:
            self.counts[reason] += 1
            self.send_control(WINDOW_UPDATE, RST, stream_id, 0)
            return None
        stream = self._make_stream(self, stream_id)
        self.streams[stream_id] = stream
        self._backlog.append(stream)
        self._owner.on_inbound_stream()
        return stream

    # Calls of streams

    def schedule(self, stream: StreamState) -> None:
        """Send the queued bytes of the stream, in its turn."""
        self.send_queue.schedule(stream)

    def send_fin(self, stream: StreamState) -> None:
        """Half-close a stream that has nothing unsent."""
        self.send_control(WINDOW_UPDATE, FIN, stream.id, 0)
        self._on_fin(stream)

    def _on_fin(self, stream: StreamState) -> None:
        stream.fin_sent = True
        self._remove_if_done(stream)

    def send_reset(self, stream: StreamState, count: str = "resets_out") -> None:
        """Abort a stream and forget it."""
        if self.streams.get(stream.id) is stream:
            self.counts[count] += 1
            self.drop(stream)
            self.send_control(WINDOW_UPDATE, RST, stream.id, 0)

    def now_s(self) -> float:
        """Return the time of the owner's clock."""
        return self._owner.now_s()

    def send_credit(self, stream: StreamState, *, may_grow: bool) -> None:
        """Let the peer send what the stream's reader has taken, and more as long as the window may grow."""
        window = stream.receive_window
        # Four streams of an unproven peer with the initial window already fill its share of the memory.
        growth = self._growth(stream) if may_grow and self.resources.is_proven else 0
        credit = stream.consumed_bytes + growth
        self.grown_bytes += growth
        stream.receive_window = window + growth
        stream.consumed_bytes = 0
        stream.credited_at_s = self._owner.now_s()
        stream.receive_credit += credit
        self.send_control(WINDOW_UPDATE, 0, stream.id, credit)

    def _growth(self, stream: StreamState) -> int:
        """Return the bytes by which the window of a busy stream grows: a window that is used up soon is what limits its
        sender."""
        window = stream.receive_window
        left = WINDOW_GROWTH_BUDGET_BYTES - self.grown_bytes
        if window < RECEIVE_WINDOW_NEAR_BYTES:
            return min(RECEIVE_WINDOW_NEAR_BYTES - window, left)
        # A sender that the window limits uses half of it up in a round trip; at two, the window is four times too wide.
        is_used_up = self._owner.now_s() - stream.credited_at_s < 2 * self._owner.rtt_s_min
        if not is_used_up or stream.account is not None:  # a relay holds little of what it carries
            return 0
        return self.resources.windows.take(min(window, RECEIVE_WINDOW_MAX_BYTES - window, left))

    def buffered(self, stream: StreamState, size: int) -> bool:
        """Account for received bytes that wait for their reader; False when the session holds too many already."""
        account = stream.account
        if account is not None:
            return account.reserve(size)
        if self.buffered_bytes + size > BUFFERED_BYTES_MAX or not self.resources.account.reserve(size):
            return False
        self.buffered_bytes += size
        return True

    def unbuffered(self, stream: StreamState, size: int) -> None:
        """Take bytes off the account that `buffered` counted: they were read or dropped."""
        if self.streams.get(stream.id) is stream:  # what an ended stream still holds is no longer counted
            self._release(stream, size)

    def _release(self, stream: StreamState, size: int) -> None:
        if stream.account is not None:
            stream.account.release(size)
        else:
            self.buffered_bytes -= size
            self.resources.account.release(size)

    def charge_to(self, stream: StreamState, account: Account) -> None:
        """Account for the stream's unread bytes in ``account``, and no longer for those of the connection."""
        size = len(stream.buffer)
        self.unbuffered(stream, size)
        stream.account = account
        if self.streams.get(stream.id) is stream and not account.reserve(size):
            stream.reset_state("the stream holds too many unread bytes", "resets_buffer_full")

    def drop(self, stream: StreamState) -> None:
        """Forget a stream: it has ended on both sides."""
        if self.streams.get(stream.id) is not stream:
            return
        self._release(stream, len(stream.buffer))
        if not self._is_own(stream.id):
            self.resources.account.release(STREAM_BYTES)
        del self.streams[stream.id]
        self.send_queue.unschedule(stream)
        self._give_back_window(stream)
        if stream.awaits_ack:
            self._acknowledge(stream)

    def _give_back_window(self, stream: StreamState) -> None:
        self.grown_bytes -= stream.receive_window - WINDOW_INITIAL_BYTES
        self.resources.windows.give_back(max(0, stream.receive_window - RECEIVE_WINDOW_NEAR_BYTES))

    def _acknowledge(self, stream: StreamState) -> None:
        stream.awaits_ack = False
        self.unacknowledged -= 1
        self._owner.on_acknowledged()

    def _remove_if_done(self, stream: StreamState) -> None:
        if stream.fin_sent and stream.read_ended:
            self.drop(stream)
