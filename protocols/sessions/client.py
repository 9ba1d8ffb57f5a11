"""The client's end of one ordered session: its pushes, acknowledgements and requests, over any number of links."""

from typing import Final, NamedTuple

from dep2p.errors import MessageTooLargeError, ProtocolError, SessionClosedError, SessionFullError
from dep2p.protocols.sessions.options import SessionOptions
from dep2p.protocols.sessions.receiver import SessionReceiver
from dep2p.protocols.sessions.wire import (
    END,
    FAILURE,
    OPENED,
    REQUEST_MAX,
    RESET_RELEASED,
    RESET_UNKNOWN,
    RESPONSE,
    WINDOW_MAX,
    Push,
    Resume,
    SessionAnswer,
    decode_session_answer,
    decode_taken,
    encode_ack,
    encode_request,
    encode_resume,
)
from dep2p.protocols.wire.frame import Frame, FrameType, encode_frame

_PUSH: Final = int(FrameType.PUSH)
_ACK: Final = int(FrameType.PUSH_ACK)
_RESUME: Final = int(FrameType.RESUME)
_CANCEL: Final = int(FrameType.CANCEL)
_STREAM_END: Final = int(FrameType.STREAM_END)
_ACK_DELAY_S: Final = 0.2
"""Seconds after which a receipt is sent, unless another frame has carried it."""
_ACK_PART: Final = 4
"""The part of the window after which a receipt is sent at the latest."""
_TIMEOUT_MS_MAX: Final = 0xFFFF_FFFF


class _PendingRequest(NamedTuple):
    data: bytes
    timeout_ms: int


_NOTHING: Final = _PendingRequest(b"", 0)


class ClientSession:
    """One session. It keeps its place while no link is attached."""

    def __init__(
        self,
        session_id: bytes,
        name: str,
        options: SessionOptions,
        *,
        data: bytes = b"",
        epoch: int = 0,
        handled: int = 0,
    ) -> None:
        """``epoch`` and ``handled`` are those of a token, or 0 for a new session."""
        self.session_id = session_id
        self.name = name
        self.options = options
        self.epoch: int = epoch
        self.receiver: SessionReceiver = SessionReceiver(options, handled)
        self.is_attached: bool = False
        """Whether a link is there; the server may not have answered yet."""
        self.is_open: bool = False
        """Whether the server has answered on this link."""
        self.ended: bool = False
        """Whether END is in the queue or was taken: nothing more comes."""
        self.links: int = 0
        self.resumes: int = 0
        self.resets: int = 0
        self.lost_requests: list[int] = []
        """Requests that a reset has lost; the shell reports them."""
        self.counts: dict[str, int] = {}
        self._data = data
        self._place = (epoch, handled)
        self._asked: dict[
            int, _PendingRequest | None
        ] = {}  # not answered, by id; None: given up, and the server has not it
        self._next_request = 1
        self._next_to_send = 1
        self._taken = 0  # the server has these
        self._cancels: list[int] = []  # that the server has and no caller waits for
        self._reported_received = handled
        self._reported_handled = handled
        self._reported_bytes = 0
        self.ack_now: bool = False
        """Whether the next write carries an acknowledgement."""
        self._ack_at: float | None = None
        self._repeat_at: float | None = None
        self._leaves = False

    # Links

    def attach(self, now: float) -> bytes:
        """Begin a link; return the frame to send first."""
        receiver = self.receiver
        receiver.forget_early()
        self.is_attached, self.is_open = True, False
        self.links += 1
        options = self.options
        return encode_resume(
            Resume(
                self.session_id,
                self.epoch,
                receiver.handled,
                receiver.received,
                min(2 * options.items_max, WINDOW_MAX),
                min(2 * options.bytes_max, WINDOW_MAX),
                self._next_request - 1,
                self.name,
                self._data,
            )
        )

    def detach(self) -> None:
        """End the link."""
        self.is_attached = self.is_open = False
        self._cancels.clear()  # the server's own deadline ends those
        self._ack_at = self._repeat_at = None

    @property
    def may_attach(self) -> bool:
        """Whether a link may begin: not while the app has items from before a reset, since another reset would pile
        up."""
        return self.receiver.stale <= 1  # the RESET alone

    def handle(self, frames: list[Frame], now: float) -> None:
        """Take frames of the attached link. Raises ProtocolError: then the link has to be closed."""
        receiver = self.receiver
        duplicates = receiver.duplicates
        for frame in frames:
            kind = frame[0]
            if frame[1]:
                raise ProtocolError(f"flags 0x{frame[1]:04x} are not allowed in a session")
            if kind == _PUSH:
                if not self.is_open:
                    raise ProtocolError("PUSH before the answer to RESUME")
                receiver.receive(frame[3], now)
            elif kind == _RESUME:
                if self.is_open:
                    raise ProtocolError("a second answer to RESUME")
                self._open(decode_session_answer(frame[3]), now)
            elif kind == _ACK:
                taken = decode_taken(frame[3])
                self.ack_now |= taken == self._taken  # no news: the server asks for our acknowledgement
                self._server_took(taken, now)
            else:
                raise ProtocolError(f"frame type 0x{kind:02x} is not for the client of a session")
        queue = receiver.queue
        if queue and not self.ended and queue[-1][2] == END:
            self.ended = True
            self.ack_now = True
        if receiver.duplicates != duplicates:
            self.ack_now = True  # the server has not heard it
        if receiver.received != self._reported_received and self._ack_at is None:
            self._ack_at = now + _ACK_DELAY_S

    def _open(self, answer: SessionAnswer, now: float) -> None:
        receiver = self.receiver
        if answer.status in (RESET_UNKNOWN, RESET_RELEASED):
            self._reset(answer)
        elif answer.next_seq != receiver.received + 1 or self.epoch not in (0, answer.epoch):
            raise ProtocolError(f"the server resumes at {answer.next_seq}, this side is at {receiver.received}")
        elif answer.status != OPENED or self.epoch:
            self.resumes += 1
        self.epoch = answer.epoch
        self.is_open = True
        self._reported_received = receiver.received
        self._reported_handled = receiver.handled
        self._next_request = max(self._next_request, answer.requests_taken + 1)
        self._server_took(answer.requests_taken, now)
        self._next_to_send = self._taken + 1

    def _reset(self, answer: SessionAnswer) -> None:
        receiver = self.receiver
        self.resets += 1
        if answer.status == RESET_UNKNOWN:
            reason = "the server does not have this session any more (it was restarted, or the session expired)"
            answered = {push[3]: None for push in receiver.queue if push[2] in (RESPONSE, FAILURE)}
            # Requests since this link's RESUME are not lost: they go to the new session.
            lost = [each for each in self._asked if each <= answer.requests_taken and each not in answered]
            self.lost_requests += [each for each in lost if self._asked[each] is not None]
            for request_id in lost:
                del self._asked[request_id]
            self._cancels.clear()
        else:
            reason = f"pushes {receiver.handled + 1} to {answer.next_seq - 1} were acknowledged before and are gone"
        if not receiver.stale:
            self._place = (self.epoch, receiver.handled)
        receiver.reset(answer.epoch, answer.next_seq, reason)

    def _server_took(self, request_id: int, now: float) -> None:
        if request_id >= self._next_request:
            raise ProtocolError(f"request {request_id} was taken and never sent")
        for given_up in range(self._taken + 1, min(request_id, self._taken + len(self._asked)) + 1):
            if self._asked.get(given_up, _NOTHING) is None:
                del self._asked[given_up]
        self._taken = max(self._taken, request_id)
        if self._taken < self._next_to_send - 1:
            self._repeat_at = now + self.options.ack_timeout_s
        else:
            self._repeat_at = None

    @property
    def place(self) -> tuple[int, int]:
        """The epoch and handled number to go on with later: the old ones until the app has learned of a reset."""
        return self._place if self.receiver.stale else (self.epoch, self.receiver.handled)

    # For the app

    @property
    def next_request_id(self) -> int:
        """The number that the next request gets."""
        return self._next_request

    def ask(self, data: bytes, timeout_ms: int) -> int:
        """Number a request, which is sent when a link is there.

        Raises MessageTooLargeError, SessionClosedError, SessionFullError.
        """
        if len(data) > self.options.message_bytes_max:
            raise MessageTooLargeError(
                f"message of {len(data)} bytes: at most {self.options.message_bytes_max} are allowed"
            )
        if self.ended:
            raise SessionClosedError("the session is over")
        if len(self._asked) >= self.options.requests_max:
            raise SessionFullError(f"{len(self._asked)} requests of this session are not answered: ask again later")
        if self._next_request > REQUEST_MAX:
            raise SessionClosedError("every request id of this session has been used: open another one")
        request_id = self._next_request
        self._next_request += 1
        self._asked[request_id] = _PendingRequest(data, max(1, min(timeout_ms, _TIMEOUT_MS_MAX)))
        return request_id

    def leave(self) -> None:
        """End the session; the server learns it when a link is there. Nothing more is taken or asked."""
        self.ended = self._leaves = True

    def answered(self, request_id: int) -> bool:
        """Take a response; return False when no caller waits for it."""
        return self._asked.pop(request_id, None) is not None

    def give_up(self, request_id: int) -> None:
        """Give up a request whose caller waits no more. Its number is used, so the server gets a CANCEL, even without
        the request."""
        if request_id in self._asked:
            if request_id > self._taken:
                self._asked[request_id] = None
            else:
                del self._asked[request_id]
                self._cancels.append(request_id)

    @property
    def requests_open(self) -> int:
        """The number of requests without an answer."""
        return len(self._asked)

    def asked_ids(self) -> list[int]:
        """The ids of the requests with a waiting caller."""
        return [each for each, asked in self._asked.items() if asked is not None]

    def take(self) -> Push | None:
        """Return the next item for the app, which has handled all earlier ones."""
        self.done()
        return self.receiver.take()

    def done(self) -> None:
        """Note that the app has handled all that it took."""
        receiver = self.receiver
        before = receiver.unhandled_bytes
        receiver.done()
        self._reported_bytes += before - receiver.unhandled_bytes
        options = self.options
        if (
            receiver.handled - self._reported_handled >= options.items_max // _ACK_PART
            or self._reported_bytes >= options.bytes_max // _ACK_PART
        ):
            self.ack_now |= receiver.handled != self._reported_handled

    def idle(self) -> None:
        """Acknowledge handled items soon: the app waits for more."""
        if self.receiver.handled != self._reported_handled:
            self.ack_now = True

    @property
    def wants_write(self) -> bool:
        """Whether `collect` would return frames."""
        return self.is_open and (
            self.ack_now or self._leaves or bool(self._cancels) or self._next_to_send < self._next_request
        )

    def collect(self, bytes_max: int, now: float) -> list[bytes]:
        """Return the pieces to write now, about ``bytes_max`` bytes."""
        if not self.is_open:
            return []
        pieces: list[bytes] = []
        receiver = self.receiver
        if self.ack_now:
            self.ack_now = False
            self._ack_at = None
            self._reported_bytes = 0
            self._reported_received, self._reported_handled = receiver.received, receiver.handled
            pieces.append(encode_ack(receiver.received, receiver.handled))
        size = 0
        while self._next_to_send < self._next_request and size < bytes_max:
            asked = self._asked.get(self._next_to_send)
            if asked is not None:
                pieces.append(encode_request(self._next_to_send, asked.data, asked.timeout_ms))
            else:
                pieces.append(encode_frame(_CANCEL, b"", req_id=self._next_to_send))
            size += len(pieces[-1])
            self._next_to_send += 1
        if self._cancels:
            pieces += [encode_frame(_CANCEL, b"", req_id=each) for each in self._cancels]
            self._cancels.clear()
        if size and self._repeat_at is None:
            self._repeat_at = now + self.options.ack_timeout_s
        if self._leaves:
            self._leaves = False
            pieces.append(encode_frame(_STREAM_END, b""))
        return pieces

    # Time

    def note_flow(self, now: float) -> None:
        """Note that requests that were written before still flow: the server cannot have taken all of them."""
        if self._repeat_at is not None:
            self._repeat_at = now + self.options.ack_timeout_s

    def next_deadline(self) -> float | None:
        """Return when `on_deadline` has work to do."""
        due = [self._ack_at, self._repeat_at, self.receiver.next_deadline()]
        return min((each for each in due if each is not None), default=None)

    def on_deadline(self, now: float) -> None:
        """Acknowledge, ask again, or give a gap up (see ``receiver.failure``)."""
        if self._ack_at is not None and self._ack_at <= now:
            self._ack_at = None
            self.ack_now = True
        if self._repeat_at is not None and self._repeat_at <= now:
            self._repeat_at = None
            self._next_to_send = self._taken + 1
            self._count("requests_repeated")
        self.receiver.on_deadline(now)

    def _count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1

    def stats(self) -> dict[str, object]:
        """Return counts and settings of this moment as plain values."""
        receiver = self.receiver
        return {
            "session_id": self.session_id.hex(),
            "name": self.name,
            "epoch": self.epoch,
            "is_attached": self.is_open,
            "links": self.links,
            "resumes": self.resumes,
            "resets": self.resets,
            "queue_size": len(receiver.queue),
            "received_seq": receiver.received,
            "handled_seq": receiver.handled,
            "unhandled_bytes": receiver.unhandled_bytes,
            "duplicates": receiver.duplicates,
            "early_dropped": receiver.early_dropped,
            "skipped": receiver.skipped,
            "requests_open": len(self._asked),
            "stopped": self.ended,
            **self.counts,
        }
