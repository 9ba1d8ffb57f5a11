"""Admission of work on this node: limits per peer, and per handler across peers. Pure."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final, Generic, Literal, TypeVar

from dep2p.errors import ErrorCode
from dep2p.limits import Limits
from dep2p.protocols.fairness.ledger import QuotaLedger
from dep2p.protocols.fairness.shares import MemberShares
from dep2p.token_bucket import TokenBucket
from dep2p.types import PeerId

Job = TypeVar("Job", bound=Hashable)
_NO_PEER: Final = PeerId("")


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why inbound work is not taken; becomes an ERROR frame."""

    code: ErrorCode
    text: str
    retry_after_ms: int = 0


class HandlerQueue(Generic[Job]):
    """At most ``concurrency`` jobs of one handler at work; the others wait, each peer in a line of its own.

    Free places go round the peers, so that one peer's backlog delays another peer by one job at most. From 8 places on,
    one peer's jobs leave some places free for the first jobs of others (`MemberShares`).
    """

    __slots__ = ("_places", "_waiting", "_waiting_max")

    def __init__(self, concurrency: int, waiting_max: int) -> None:
        """``waiting_max``: jobs of one peer that may wait."""
        if concurrency < 1 or waiting_max < 0:
            raise ValueError(f"concurrency {concurrency} must be at least 1 and waiting_max {waiting_max} at least 0")
        self._places: MemberShares[PeerId] = MemberShares(concurrency)
        self._waiting_max = waiting_max
        self._waiting: dict[PeerId, dict[Job, None]] = {}

    @property
    def running(self) -> int:
        """Jobs that have a place."""
        return self._places.taken

    def offer(self, peer: PeerId, job: Job) -> Literal["start", "wait", "refuse"]:
        """Take a place for a job, put it in line, or refuse it when the peer's line is full."""
        line = self._waiting.get(peer)
        if line is None:
            if self._places.try_take(peer):
                return "start"
            if not self._waiting_max:
                return "refuse"
            self._waiting[peer] = {job: None}
            return "wait"
        if len(line) >= self._waiting_max:
            return "refuse"
        line[job] = None
        return "wait"

    def done(self, peer: PeerId) -> bool:
        """A job of this peer has left its place. Returns whether jobs wait; `next` says which ones get the place."""
        self._places.release(peer)
        return bool(self._waiting)

    def next(self) -> Job | None:
        """A waiting job that may start: it has a place now. None: no place, or none of those that wait may take one."""
        waiting = self._waiting
        if not waiting:
            return None
        places = self._places
        for peer in waiting:
            if places.try_take(peer):
                break
        else:
            return None
        line = waiting.pop(peer)
        job = next(iter(line))
        del line[job]
        if line:
            waiting[peer] = line  # to the end of the round
        return job

    def withdraw(self, peer: PeerId, job: Job) -> bool:
        """Take a waiting job out of its line; False when it does not wait (any more)."""
        line = self._waiting.get(peer)
        if line is None or job not in line:
            return False
        del line[job]
        if not line:
            del self._waiting[peer]
        return True

    @property
    def waiting(self) -> int:
        """The number of jobs in all lines."""
        return sum(len(line) for line in self._waiting.values())


class PeerLoad:
    """The work of one peer here, over all its links. Opening another link gives it no more."""

    __slots__ = (
        "_buckets",
        "_ledger",
        "_limits",
        "_notifies",
        "_peer",
        "_requests",
        "answers_bytes",
        "jobs",
        "jobs_bytes",
        "links",
        "streams",
    )

    def __init__(self, limits: Limits, peer: PeerId = _NO_PEER, ledger: QuotaLedger | None = None) -> None:
        """``ledger`` counts what is refused to ``peer``."""
        self._limits = limits
        self._peer = peer
        self._ledger = ledger or QuotaLedger()
        self.answers_bytes: int = 0
        """Bytes of answers that wait because the peer does not read."""
        self.jobs: int = 0
        self.jobs_bytes: int = 0
        self.links: int = 0
        self.streams: int = 0
        self._requests = bucket(limits.requests_per_peer_per_s)
        self._notifies = bucket(limits.notifies_per_peer_per_s)
        self._buckets: dict[str, TokenBucket] = {}

    @property
    def is_idle(self) -> bool:
        """Whether the peer has no work here, so that it may be forgotten when room is needed."""
        return not (self.jobs or self.links or self.streams)

    def admit_request(self, name: str, rate_per_s: float, body_bytes: int, now: float) -> Refusal | None:
        """Return None when one more request of this peer may be taken; the caller then counts it with `begin`."""
        limits = self._limits
        if self.jobs >= limits.handlers_per_peer_max:
            return self._overloaded(
                "requests_at_work",
                f"{self.jobs} requests of this peer are at work here, the most allowed (handlers_per_peer_max): "
                "send more when some are answered",
            )
        if self.jobs_bytes + body_bytes > limits.link_in_bytes_max:
            return self._overloaded(
                "request_bytes",
                f"requests of this peer hold {self.jobs_bytes} bytes here, and this one has {body_bytes}: at most "
                f"{limits.link_in_bytes_max} are allowed (link_in_bytes_max). Send more when some are answered",
            )
        if self._requests is None and not rate_per_s:
            return None
        wait_s = self._requests.take(now) if self._requests is not None else 0.0
        if not wait_s and rate_per_s:
            wait_s = self._bucket_of(name, rate_per_s).take(now)
        if wait_s:
            self._ledger.refuse(self._peer, "request_rate")
            retry_ms = int(wait_s * 1000) + 1
            text = f"requests {name!r} of this peer come faster than is allowed: send more after {retry_ms} ms"
            return Refusal(ErrorCode.RATE_LIMITED, text, retry_ms)
        return None

    def _overloaded(self, quota: str, text: str) -> Refusal:
        self._ledger.refuse(self._peer, quota)
        return Refusal(ErrorCode.OVERLOADED, text)

    def refused(self, quota: str) -> None:
        """Count a refusal that the caller has decided."""
        self._ledger.refuse(self._peer, quota)

    def keep_answer(self, size: int) -> bool:
        """Whether an answer may wait until the peer reads; the caller then counts it with `answer_left`."""
        if self.answers_bytes + size > self._limits.answers_unread_bytes_max:
            self._ledger.refuse(self._peer, "unread_answers")
            return False
        self.answers_bytes += size
        return True

    def answer_left(self, size: int) -> None:
        """An answer does not wait any more."""
        self.answers_bytes -= size

    def notify_wait_s(self, name: str, rate_per_s: float, now: float) -> float:
        """Return the seconds until the next notify may be handled; 0.0 means now, and its tokens have been taken."""
        if self._notifies is None and not rate_per_s:
            return 0.0
        wait_s = self._notifies.take(now) if self._notifies is not None else 0.0
        if not wait_s and rate_per_s:
            wait_s = self._bucket_of("\0" + name, rate_per_s).take(now)
        return wait_s

    def stream_wait_s(self, name: str, rate_per_s: float, now: float) -> float:
        """Return the seconds until this peer may open the next stream of that name; 0.0 means now, and its token was
        taken."""
        return self._bucket_of("\1" + name, rate_per_s).take(now) if rate_per_s else 0.0

    def begin(self, body_bytes: int) -> None:
        """Count a job."""
        self.jobs += 1
        self.jobs_bytes += body_bytes

    def end(self, body_bytes: int) -> None:
        """Count the end of a job: its handler returned or was never started."""
        self.jobs -= 1
        self.jobs_bytes -= body_bytes

    def _bucket_of(self, name: str, rate_per_s: float) -> TokenBucket:
        # Only registered handlers have names here, so the app bounds their number.
        found = self._buckets.get(name)
        if found is None:
            found = self._buckets[name] = TokenBucket(rate_per_s)
        return found


def bucket(rate_per_s: float) -> TokenBucket | None:
    """Return a bucket; None for rate 0: no limit."""
    return TokenBucket(rate_per_s) if rate_per_s else None
