"""Who may start work on this node: per peer, and per handler across peers. Pure."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from dep2p.errors import ErrorCode
from dep2p.limits import Limits
from dep2p.protocols.messaging.rate_limit import TokenBucket
from dep2p.types import PeerId

Job = TypeVar("Job", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a piece of inbound work is not taken; becomes an ERROR frame."""

    code: ErrorCode
    text: str
    retry_after_ms: int = 0


class HandlerQueue(Generic[Job]):
    """At most ``concurrency`` jobs of one handler at work; the others wait, each peer in a line of its own.

    Free places go round the peers, so that one peer's backlog delays another peer by one job at most.
    """

    __slots__ = ("_concurrency", "_waiting", "_waiting_max", "running")

    def __init__(self, concurrency: int, waiting_max: int) -> None:
        """``waiting_max``: jobs of one peer that may wait."""
        if concurrency < 1 or waiting_max < 0:
            raise ValueError(f"concurrency {concurrency} must be at least 1 and waiting_max {waiting_max} at least 0")
        self._concurrency = concurrency
        self._waiting_max = waiting_max
        self._waiting: dict[PeerId, dict[Job, None]] = {}
        self.running = 0

    def offer(self, peer: PeerId, job: Job) -> Literal["start", "wait", "refuse"]:
        """Take a place, stand in line, or neither when the peer's line is full."""
        if self.running < self._concurrency:
            self.running += 1
            return "start"
        line = self._waiting.get(peer)
        if line is None:
            if not self._waiting_max:
                return "refuse"
            self._waiting[peer] = {job: None}
            return "wait"
        if len(line) >= self._waiting_max:
            return "refuse"
        line[job] = None
        return "wait"

    def done(self) -> Job | None:
        """A running job has ended: the next one, which takes over its place, or None."""
        waiting = self._waiting
        if not waiting:
            self.running -= 1
            return None
        peer = next(iter(waiting))
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
        """Jobs in all lines."""
        return sum(len(line) for line in self._waiting.values())


class PeerLoad:
    """What one peer has at work here, over all its links: opening another link gives it no more."""

    __slots__ = ("_buckets", "_limits", "_notifies", "_requests", "jobs", "jobs_bytes", "links", "streams")

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.jobs = 0
        self.jobs_bytes = 0
        self.links = 0
        self.streams = 0
        self._requests = bucket(limits.requests_per_peer_per_s)
        self._notifies = bucket(limits.notifies_per_peer_per_s)
        self._buckets: dict[str, TokenBucket] = {}

    @property
    def is_idle(self) -> bool:
        """Nothing at work, so that it may be forgotten when room is needed."""
        return not (self.jobs or self.links or self.streams)

    def admit_request(self, name: str, rate_per_s: float, body_bytes: int, now: float) -> Refusal | None:
        """None when one more request of this peer may be taken; the caller then counts it with `begin`."""
        limits = self._limits
        if self.jobs >= limits.handlers_per_peer_max or self.jobs_bytes + body_bytes > limits.link_in_bytes_max:
            return Refusal(ErrorCode.OVERLOADED, "this peer has too many requests at work here")
        if self._requests is None and not rate_per_s:
            return None
        wait_s = self._requests.take(now) if self._requests is not None else 0.0
        if not wait_s and rate_per_s:
            wait_s = self._bucket_of(name, rate_per_s).take(now)
        if wait_s:
            return Refusal(ErrorCode.RATE_LIMITED, f"too many requests {name!r}", int(wait_s * 1000) + 1)
        return None

    def notify_wait_s(self, name: str, rate_per_s: float, now: float) -> float:
        """Seconds until the next notify may be handled; 0.0 means now, and its tokens have been taken."""
        if self._notifies is None and not rate_per_s:
            return 0.0
        wait_s = self._notifies.take(now) if self._notifies is not None else 0.0
        if not wait_s and rate_per_s:
            wait_s = self._bucket_of("\0" + name, rate_per_s).take(now)
        return wait_s

    def stream_wait_s(self, name: str, rate_per_s: float, now: float) -> float:
        """Seconds until this peer may open the next stream of that name; 0.0 means now, and its token was taken."""
        return self._bucket_of("\1" + name, rate_per_s).take(now) if rate_per_s else 0.0

    def begin(self, body_bytes: int) -> None:
        """Count a job."""
        self.jobs += 1
        self.jobs_bytes += body_bytes

    def end(self, body_bytes: int) -> None:
        """A job has really ended: its handler returned or was never started."""
        self.jobs -= 1
        self.jobs_bytes -= body_bytes

    def _bucket_of(self, name: str, rate_per_s: float) -> TokenBucket:
        # Names are those of registered handlers, so their number is the app's.
        found = self._buckets.get(name)
        if found is None:
            found = self._buckets[name] = TokenBucket(rate_per_s)
        return found


def bucket(rate_per_s: float) -> TokenBucket | None:
    """A bucket, or None for rate 0: no limit."""
    return TokenBucket(rate_per_s) if rate_per_s else None
