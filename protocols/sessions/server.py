"""The server's end of one ordered session: its pushes and answers, over any number of links."""

import heapq
from collections import deque
from typing import Final, NamedTuple

from dep2p.errors import (
    AlreadyRespondedError,
    ErrorCode,
    MessageTooLargeError,
    ProtocolError,
    SessionClosedError,
    SessionFailedError,
)
from dep2p.protocols.sessions.bindings import Bindings
from dep2p.protocols.sessions.options import SessionOptions
from dep2p.protocols.sessions.sender import SessionSender
from dep2p.protocols.sessions.wire import (
    AFTER,
    BEFORE,
    END,
    FAILURE,
    OPENED,
    PUSH,
    RESET_RELEASED,
    RESET_UNKNOWN,
    RESUMED,
    Resume,
    SessionAnswer,
    cut_text,
    decode_ack,
    decode_request,
    encode_failure,
    encode_session_answer,
    encode_taken,
)
from dep2p.protocols.wire.frame import Frame, FrameType

_REQUEST: Final = int(FrameType.REQUEST)
_ACK: Final = int(FrameType.PUSH_ACK)
_RESUME: Final = int(FrameType.RESUME)
_CANCEL: Final = int(FrameType.CANCEL)
_STREAM_END: Final = int(FrameType.STREAM_END)


class Asked(NamedTuple):
    """A request that was taken."""

    request_id: int
    data: bytes
    deadline: float
    """The time, in the clock of ``now``, at which the request is answered with TIMEOUT."""


class ServerSession:
    """One session. It is with its client while a link is attached, and keeps everything while none is."""

    def __init__(self, session_id: bytes, name: str, epoch: int, options: SessionOptions, now: float) -> None:
        self.session_id = session_id
        self.name = name
        self.epoch = epoch
        self.options = options
        self.sender: SessionSender = SessionSender(options)
        self.bindings: Bindings = Bindings(options)
        self.requests: deque[Asked] = deque()
        """Requests that the app has not taken."""
        self.expired_requests: list[int] = []
        """Requests that got TIMEOUT or that the client gave up, since the shell last looked."""
        self.is_attached: bool = False
        self.links: int = 0
        """The number of links so far."""
        self.resumes: int = 0
        """How often the client came back to the session that it had left."""
        self.is_ending: bool = False
        """Whether the app has ended it: END is the last item for the client."""
        self.closed: str | None = None
        """The reason why it is over; None while it lives."""
        self.failed: bool = False
        """Whether it ended by a failure."""
        self.counts: dict[str, int] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._expires_at: float | None = now + options.resume_timeout_s
        self._control_frames: list[bytes] = []  # small frames that go in front of pushes
        self._reported_taken = 0

    # For the app

    def push(self, data: bytes) -> int:
        """Number one push and keep it; return 0 when there is no room. Raises SessionClosedError,
        MessageTooLargeError."""
        if self.closed is not None or self.is_ending or len(data) > self.options.message_bytes_max:
            self.check(data)
        return self.sender.offer(PUSH, 0, data)

    def check(self, data: bytes) -> None:
        """Raises what `push` raises."""
        if self.closed is not None:
            kind = SessionFailedError if self.failed else SessionClosedError
            raise kind(f"the session is over: {self.closed}")
        if self.is_ending:
            raise SessionClosedError("this side has ended the session")
        if len(data) > self.options.message_bytes_max:
            raise MessageTooLargeError(
                f"message of {len(data)} bytes: at most {self.options.message_bytes_max} are allowed"
            )

    def fill(self, seq: int, kind: int, data: bytes) -> None:
        """Set the content of a reserved number, even in front of the end. Raises LocalProtocolError and as `push`."""
        if self.closed is not None or len(data) > self.options.message_bytes_max:
            self.check(data)
        self.sender.fill(seq, kind, data)

    def bind(self, kind: int, request_id: int, data: bytes, now: float) -> bool:
        """Bind a push to a request. Returns False when there is no room for one that goes out at once.

        Raises AlreadyRespondedError, SessionFullError and what `push` raises.
        """
        self.check(data)
        if self.bindings.bind(kind, request_id, data, now):
            return True
        if not self.sender.has_room(1, len(data)):
            return False
        self.sender.append(AFTER, request_id, data)
        return True

    def respond(self, request_id: int, kind: int, data: bytes, *, force: bool = False) -> bool:
        """Answer a request: the pushes bound in front, the response, the pushes bound behind, in one run of numbers.

        Returns False when there is no room for all of it now; ``force`` takes it over the bound. Raises
        AlreadyRespondedError and what `push` raises.
        """
        bindings, sender = self.bindings, self.sender
        if not bindings.is_open(request_id):
            if request_id <= bindings.taken:
                raise AlreadyRespondedError(f"request {request_id} was answered before")
            raise ValueError(f"request {request_id} has not come")
        if not force:
            self.check(data)
        before, after = bindings.of(request_id)
        size = len(data) + sum(map(len, before)) + sum(map(len, after))
        if not force and not sender.has_room(1 + len(before) + len(after), size):
            return False
        for bound in before:
            sender.append(BEFORE, request_id, bound)
        sender.append(kind, request_id, data)
        for bound in after:
            sender.append(AFTER, request_id, bound)
        bindings.close(request_id)
        return True

    def fail_request(self, request_id: int, code: ErrorCode, text: str) -> None:
        """Answer a request by an error; the pushes bound to it go all the same. There is always room."""
        self.respond(request_id, FAILURE, encode_failure(code, text), force=True)

    def end(self, reason: str = "") -> None:
        """End it: nothing more can be pushed, and the client gets the items under way, then the end. Idempotent.

        ``reason``: why it fails; the client raises it then.
        """
        if self.closed is None and not self.is_ending:
            for request_id in self.bindings.open_ids():
                self.fail_request(request_id, ErrorCode.HANDLER_FAILED, "the session's handler has ended")
            self.is_ending = True
            self.sender.append(END, 0, cut_text(reason))

    def close(self, reason: str, *, failed: bool = False) -> None:
        """End it now, even with items under way. Idempotent."""
        if self.closed is None:
            self.closed = reason
            self.failed = failed
            self._expires_at = None

    # Links

    def attach(self, resume: Resume, now: float) -> None:
        """Begin a link of the client with this RESUME. Raises ProtocolError for impossible floors."""
        sender = self.sender
        # Without an epoch, a client has not heard the answer to its first RESUME yet.
        if resume.epoch != self.epoch and (resume.epoch or sender.handled):
            status, received = RESET_UNKNOWN, sender.handled
            self.bindings.skip_to(resume.requests_given)  # the client uses no id twice
        elif resume.handled < sender.handled:
            status, received = RESET_RELEASED, sender.handled
        else:
            sender.acknowledge(resume.received, resume.handled, now)
            status, received = (RESUMED if self.links else OPENED), resume.received
        self.resumes += status == RESUMED
        self.links += 1
        self.is_attached = True
        self._expires_at = None
        sender.attach(received, resume.window_items, resume.window_bytes)
        self._reported_taken = self.bindings.taken
        self._control_frames = [
            encode_session_answer(SessionAnswer(status, self.epoch, sender.sent + 1, self.bindings.taken))
        ]

    def detach(self, now: float) -> None:
        """End the link."""
        self.is_attached = False
        self._control_frames.clear()
        self.sender.detach()
        if self.closed is None:
            self._expires_at = now + self.options.resume_timeout_s

    def handle(self, frames: list[Frame], now: float) -> bool:
        """Take frames of the attached link, behind its RESUME. Returns whether there is new room for pushes.

        Raises ProtocolError: then the link has to be closed, and the session lives on.
        """
        made_room = False
        for frame in frames:
            kind = frame[0]
            if frame[1]:
                raise ProtocolError(f"flags 0x{frame[1]:04x} are not allowed in a session")
            if kind == _ACK:
                received, handled = decode_ack(frame[3])
                made_room |= self.sender.acknowledge(received, handled, now)
            elif kind == _REQUEST:
                self._take_request(frame, now)
            elif kind == _CANCEL:
                self._cancel(frame[2])
            elif kind == _STREAM_END:
                self.close("the client has closed it")
            elif kind == _RESUME:
                raise ProtocolError("a second RESUME on one stream")
            else:
                raise ProtocolError(f"frame type 0x{kind:02x} is not for the server of a session")
        if self.is_ending and self.closed is None and self.sender.received == self.sender.last_seq:
            self.close("ended")
        return made_room

    def _take_request(self, frame: Frame, now: float) -> None:
        bindings = self.bindings
        request_id = frame[2]
        timeout_ms, data = decode_request(frame[3])
        if not request_id:
            raise ProtocolError("REQUEST with the id 0")
        if len(data) > self.options.message_bytes_max:
            raise ProtocolError(f"REQUEST of {len(data)} bytes", ErrorCode.MESSAGE_TOO_LARGE)
        if request_id != bindings.taken + 1:
            # Taken before, or behind one that was lost: the client sends it again.
            self._count("requests_repeated" if request_id <= bindings.taken else "requests_early")
            self._reported_taken = -1
            return
        bindings.open(request_id)
        if self.is_ending:
            bindings.close(request_id)
            return
        self._count("requests")
        if bindings.open_requests > self.options.requests_max:
            self._count("requests_refused_overloaded")
            self.fail_request(request_id, ErrorCode.OVERLOADED, "too many requests of this session are open")
            return
        deadline = now + (timeout_ms / 1000 if timeout_ms else self.options.request_timeout_s)
        heapq.heappush(self._deadlines, (deadline, request_id))
        self.requests.append(Asked(request_id, data, deadline))

    def _cancel(self, request_id: int) -> None:
        """Cancel a request that the client has given up: before it was sent, which uses its number all the same, or
        after."""
        bindings = self.bindings
        if request_id == bindings.taken + 1:
            bindings.skip_to(request_id)
        elif bindings.is_open(request_id):
            self._count("requests_cancelled")
            self.expired_requests.append(request_id)
            self.fail_request(request_id, ErrorCode.TIMEOUT, "the client has given up")
        else:
            self._reported_taken = -1

    def _count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1

    def collect(self, bytes_max: int, now: float) -> list[bytes]:
        """Return the pieces to write now, about ``bytes_max`` bytes."""
        if not self.is_attached:
            return []
        pieces, self._control_frames = self._control_frames, []
        if self._reported_taken != self.bindings.taken or self.sender.wants_probe:
            self.sender.wants_probe = False
            self._reported_taken = self.bindings.taken
            pieces.append(encode_taken(self._reported_taken))
        return pieces + self.sender.take(bytes_max, now)

    # Time

    def next_deadline(self) -> float | None:
        """Return when `on_deadline` has work to do."""
        if self.closed is not None:
            return None
        while self._deadlines and not self.bindings.is_open(self._deadlines[0][1]):
            heapq.heappop(self._deadlines)
        due = [
            self._expires_at,
            self.sender.next_deadline(),
            self.bindings.next_deadline(),
            self._deadlines[0][0] if self._deadlines else None,
        ]
        return min((each for each in due if each is not None), default=None)

    def on_deadline(self, now: float) -> list[tuple[int, int, bytes]]:
        """Give up overdue requests and bindings. Returns the bound pushes (kind, request id, data) whose requests did
        not come.

        They are sent now when the option says so.
        """
        if self.closed is not None:
            return []
        while self._deadlines and self._deadlines[0][0] <= now:
            _due, request_id = heapq.heappop(self._deadlines)
            if self.bindings.is_open(request_id):
                self._count("requests_timed_out")
                self.expired_requests.append(request_id)
                self.fail_request(request_id, ErrorCode.TIMEOUT, "no answer within the deadline")
        given_up = self.bindings.expire(now)
        if given_up and self.options.binding_expired == "deliver" and not self.is_ending:
            for kind, request_id, data in given_up:
                self.sender.append(kind, request_id, data)
        elif given_up:
            self._count_many("bound_dropped_no_request", len(given_up))
        self.sender.on_deadline(now)
        if self.sender.failure is not None:
            self.close(self.sender.failure, failed=True)
        elif self._expires_at is not None and self._expires_at <= now:
            self.close(f"its client did not come back within {self.options.resume_timeout_s:g} s", failed=True)
        return given_up

    def _count_many(self, name: str, count: int) -> None:
        self.counts[name] = self.counts.get(name, 0) + count

    def stats(self) -> dict[str, object]:
        """Return counts and settings of this moment as plain values."""
        return {
            "session_id": self.session_id.hex(),
            "name": self.name,
            "epoch": self.epoch,
            "is_attached": self.is_attached,
            "links": self.links,
            "resumes": self.resumes,
            **self.sender.stats(),
            "stopped": self.closed is not None,
            "reason": self.closed or "",
            "requests_taken": self.bindings.taken,
            "requests_open": self.bindings.open_requests,
            "bound_items": self.bindings.items,
            "bound_bytes": self.bindings.size_bytes,
            "bound_expired": self.bindings.expired,
            **self.counts,
        }
