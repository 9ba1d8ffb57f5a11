"""Request and response over one link (docs/spec/messaging.md): the asking side and the answering side. Pure.

Both take batches of frames. A violation is not raised but kept in `violation`, so that earlier frames count.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import msgspec

from dep2p.errors import ErrorCode, ProtocolError, WireError, error_from_wire
from dep2p.protocols.messaging.admission import PeerLoad, Refusal
from dep2p.protocols.wire.frame import HEADERS, REQ_ID_MAX, Frame, FrameType, decode_error, encode_error
from dep2p.protocols.wire.headers import HeaderKey, HeaderMap, header_uint
from dep2p.protocols.wire.payload import PayloadReader, required_name, retry_after_headers

Token = TypeVar("Token")

_REQUEST: Final = int(FrameType.REQUEST)
_RESPONSE: Final = int(FrameType.RESPONSE)
_ERROR: Final = int(FrameType.ERROR)
_CANCEL: Final = int(FrameType.CANCEL)
_TIMEOUT_MS: Final = int(HeaderKey.TIMEOUT_MS)
_IDEMPOTENT: Final = int(HeaderKey.IDEMPOTENT)
_NEVER: Final = float("inf")


class Requester(Generic[Token]):
    """The asking side of a link: the requests in flight, and the caller that waits for each (an opaque token)."""

    __slots__ = (
        "_deadline",
        "_in_flight_max",
        "_last_id",
        "_payloads",
        "_pending",
        "link_error",
        "unmatched",
        "violation",
    )

    def __init__(self, payloads: PayloadReader, *, in_flight_max: int, last_id: int = 0) -> None:
        self._payloads = payloads
        self._in_flight_max = in_flight_max
        self._last_id = last_id
        self._pending: dict[int, tuple[float, Token]] = {}
        self._deadline = _NEVER  # never later than the earliest deadline; may be earlier, then a check finds nothing
        self.unmatched: int = 0
        """Responses and errors without a waiting caller: late, or for an id that was never sent."""
        self.violation: ProtocolError | None = None
        self.link_error: WireError | None = None
        """The peer's error for the whole link (ERROR with req_id 0), which comes before it closes the link."""

    @property
    def in_flight(self) -> int:
        """The number of requests that wait for their answer."""
        return len(self._pending)

    @property
    def is_full(self) -> bool:
        """Whether no more requests may be started now."""
        return len(self._pending) >= self._in_flight_max

    def start(self, token: Token, deadline: float) -> int:
        """Add a request and return its req_id: never 0, unique among those in flight."""
        pending = self._pending
        req_id = self._last_id + 1
        while req_id > REQ_ID_MAX or req_id in pending:
            req_id = req_id + 1 if req_id < REQ_ID_MAX else 1
        self._last_id = req_id
        pending[req_id] = (deadline, token)
        if deadline < self._deadline:
            self._deadline = deadline
        return req_id

    def give_up(self, req_id: int) -> bool:
        """Drop a request whose caller waits no more. Returns True when CANCEL must be sent to the peer; an answer under
        way is dropped."""
        return self._pending.pop(req_id, None) is not None

    def handle(self, frames: Iterable[Frame], now: float) -> list[tuple[Token, bytes | WireError]]:
        """Match received frames with requests; see also `violation` and `link_error` afterwards."""
        answers: list[tuple[Token, bytes | WireError]] = []
        pending = self._pending
        try:
            for frame in frames:
                type_, flags, req_id, payload = frame
                if type_ == _RESPONSE:
                    if flags and req_id not in pending:
                        self._payloads.split(frame)  # checked, but not decompressed: no caller waits for it
                        self.unmatched += 1
                        continue
                    answer: bytes | WireError = self._payloads.read(frame)[1] if flags else payload
                elif type_ == _ERROR:
                    answer = self._error(frame)
                    if not req_id:
                        self.link_error = answer
                        return answers
                else:
                    raise ProtocolError(f"frame type 0x{type_:02x} is not for the asking side")
                entry = pending.pop(req_id, None)
                if entry is None:
                    self.unmatched += 1
                else:
                    answers.append((entry[1], answer))
        except ProtocolError as violation:
            self.violation = violation
        return answers

    def _error(self, frame: Frame) -> WireError:
        if frame.flags & ~HEADERS:
            raise ProtocolError(f"flags 0x{frame.flags:04x} are not allowed on ERROR")
        headers, body = self._payloads.read_error(frame)
        code, text = decode_error(body)
        return error_from_wire(code, text, header_uint(headers, HeaderKey.RETRY_AFTER_MS) or 0)

    def next_deadline(self) -> float | None:
        """Return when `on_deadline` has work to do; None while nothing is in flight."""
        if not self._pending:
            self._deadline = _NEVER
            return None
        return self._deadline

    def on_deadline(self, now: float) -> list[tuple[int, Token]]:
        """Take out the requests whose time is over: their callers get TIMEOUT, the peer gets CANCEL."""
        if now < self._deadline:
            return []
        pending = self._pending
        expired = [(req_id, token) for req_id, (deadline, token) in pending.items() if deadline <= now]
        for req_id, _ in expired:
            del pending[req_id]
        self._deadline = min((deadline for deadline, _ in pending.values()), default=_NEVER)
        return expired

    def close(self) -> list[Token]:
        """Return all callers that still wait: the link has ended."""
        tokens = [token for _, token in self._pending.values()]
        self._pending.clear()
        return tokens


@dataclass(frozen=True, slots=True)
class RequestPolicy:
    """A handler's rules for requests, as the answering side applies them."""

    rate_per_s: float = 0.0
    """Requests of one peer per second; 0 means no limit."""


class Job(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A request that was taken. Two jobs are never equal. A Struct: it is made in a fifth of the time of a frozen
    dataclass."""

    req_id: int
    name: str
    data: bytes
    headers: HeaderMap
    deadline: float
    idempotent: bool


class Begin(msgspec.Struct, frozen=True, gc=False):
    """Effect: run the handler of this job, now or when it has a place."""

    job: Job


class Abandon(msgspec.Struct, frozen=True, gc=False):
    """Effect: stop working on the job: its caller waits no more. `Responder.finish` is still due."""

    job: Job
    reason: str


class SendAnswer(msgspec.Struct, frozen=True, gc=False):
    """Effect: send this frame."""

    frame: bytes


ResponderEffect = Begin | Abandon | SendAnswer


class Responder:
    """The answering side of a link: requests at work, their deadlines, and refusals."""

    __slots__ = (
        "_default_timeout_s",
        "_jobs",
        "_load",
        "_next_check",
        "_payloads",
        "_policies",
        "cancelled",
        "is_draining",
        "refused",
        "violation",
    )

    def __init__(
        self,
        payloads: PayloadReader,
        policies: Mapping[str, RequestPolicy],
        load: PeerLoad,
        *,
        default_timeout_s: float,
    ) -> None:
        self._payloads = payloads
        self._policies = policies
        self._load = load
        self._default_timeout_s = default_timeout_s
        self._jobs: dict[int, Job] = {}
        self._next_check = _NEVER  # never later than the earliest deadline
        self.is_draining: bool = False
        self.violation: ProtocolError | None = None
        self.refused: dict[str, int] = {}
        """Requests not taken, by the error's name."""
        self.cancelled: int = 0

    @property
    def in_flight(self) -> int:
        """The number of requests that this link's peer still waits for."""
        return len(self._jobs)

    def handle(self, frames: Iterable[Frame], now: float) -> list[ResponderEffect]:
        """Take REQUEST and CANCEL frames; check `violation` afterwards."""
        effects: list[ResponderEffect] = []
        try:
            for frame in frames:
                if frame.type == _REQUEST:
                    effects.append(self._request(frame, now))
                elif frame.type == _CANCEL:
                    job = self._cancel(frame)
                    if job is not None:
                        effects.append(Abandon(job, "the caller gave up"))
                else:
                    raise ProtocolError(f"frame type 0x{frame.type:02x} is not for the answering side")
        except ProtocolError as violation:
            self.violation = violation
        return effects

    def _request(self, frame: Frame, now: float) -> Begin | SendAnswer:
        req_id = frame.req_id
        if not req_id:
            raise ProtocolError("REQUEST with req_id 0")
        if req_id in self._jobs:
            raise ProtocolError(f"req_id {req_id} is in flight already")
        payloads, flags = self._payloads, frame.flags
        headers, body = payloads.split(frame)
        name = required_name(headers)
        timeout_ms = header_uint(headers, _TIMEOUT_MS) if _TIMEOUT_MS in headers else None
        refusal = self._admit(name, payloads.content_bytes(flags, body), timeout_ms, now)
        if refusal is not None:
            return SendAnswer(self.refusal_frame(req_id, refusal))
        body = payloads.content(flags, body)
        deadline = now + (self._default_timeout_s if timeout_ms is None else timeout_ms / 1000)
        job = Job(req_id, name, body, headers, deadline, headers.get(_IDEMPOTENT) is True)
        self._jobs[req_id] = job
        self._load.begin(len(body))
        if deadline < self._next_check:
            self._next_check = deadline
        return Begin(job)

    def _admit(self, name: str, body_bytes: int, timeout_ms: int | None, now: float) -> Refusal | None:
        if self.is_draining:
            return Refusal(ErrorCode.OVERLOADED, "this node is about to stop")
        policy = self._policies.get(name)
        if policy is None:
            return Refusal(ErrorCode.NO_HANDLER, f"no handler for requests {name[:200]!r}")
        if timeout_ms == 0:
            return Refusal(ErrorCode.TIMEOUT, "the request's time was over when it came")
        return self._load.admit_request(name, policy.rate_per_s, body_bytes, now)

    def refusal_frame(self, req_id: int, refusal: Refusal) -> bytes:
        """Return the ERROR frame of a refusal, and count it."""
        code = refusal.code
        self.refused[code.name] = self.refused.get(code.name, 0) + 1
        headers = retry_after_headers(refusal.retry_after_ms) if code == ErrorCode.RATE_LIMITED else b""
        return encode_error(code, refusal.text, req_id=req_id, headers=headers)

    def _cancel(self, frame: Frame) -> Job | None:
        if frame.flags or frame.payload or not frame.req_id:
            raise ProtocolError("CANCEL with flags, a payload or req_id 0")
        job = self._jobs.pop(frame.req_id, None)  # None: the CANCEL crossed our answer
        if job is not None:
            self.cancelled += 1
        return job

    def refuse(self, job: Job, refusal: Refusal) -> bytes | None:
        """Refuse a job after all: return the ERROR frame to send, if a caller waits for it."""
        if self.finish(job):
            return self.refusal_frame(job.req_id, refusal)
        return None

    def finish(self, job: Job) -> bool:
        """Note that the handler has ended, or will not start. Returns whether its answer is still wanted. Exactly once
        per job."""
        self._load.end(len(job.data))
        if self._jobs.get(job.req_id) is job:
            del self._jobs[job.req_id]
            return True
        return False

    def next_deadline(self) -> float | None:
        """Return when `on_deadline` has work to do; None while nothing is at work."""
        if not self._jobs:
            self._next_check = _NEVER
            return None
        return self._next_check

    def on_deadline(self, now: float) -> list[ResponderEffect]:
        """Give up the jobs whose callers wait no more."""
        if now < self._next_check:
            return []
        effects: list[ResponderEffect] = []
        jobs = self._jobs
        for job in [job for job in jobs.values() if job.deadline <= now]:
            del jobs[job.req_id]
            effects.append(Abandon(job, "the caller's deadline has passed"))
            effects.append(
                SendAnswer(self.refusal_frame(job.req_id, Refusal(ErrorCode.TIMEOUT, "no answer within the deadline")))
            )
        self._next_check = min((job.deadline for job in jobs.values()), default=_NEVER)
        return effects

    def close(self, reason: str) -> list[ResponderEffect]:
        """End: the link has ended, and no caller waits any more."""
        effects: list[ResponderEffect] = [Abandon(job, reason) for job in self._jobs.values()]
        self._jobs.clear()
        return effects
