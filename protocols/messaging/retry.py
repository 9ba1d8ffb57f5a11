"""The retries of requests: whether a request may be tried again, and after how long (docs/spec/messaging.md). Pure."""

from dep2p.errors import OverloadedError, RateLimitedError, RequestTimeoutError, StreamClosedError
from dep2p.limits import Limits
from dep2p.protocols.timing.backoff import Backoff
from dep2p.types import Rng

_BY_POLICY = (RequestTimeoutError, OverloadedError, StreamClosedError, RateLimitedError)


class RetryPolicy:
    """Exponential backoff with jitter, for idempotent requests and errors that may heal by themselves."""

    __slots__ = ("_backoff", "_rng", "_tries_max")

    def __init__(self, limits: Limits, rng: Rng) -> None:
        max_s = limits.request_retry_max_s
        self._backoff = Backoff(min(limits.request_retry_initial_s, max_s), max_s)
        self._tries_max = limits.request_tries_max
        self._rng = rng

    def delay_s(self, error: Exception, tries_done: int) -> float | None:
        """Return the seconds before the next try of an idempotent request; None when it must not be tried again.

        The wait doubles from try to try and is drawn from its upper half, so that callers that failed together do not
        come back together. RATE_LIMITED waits at least the time that the peer named.
        """
        if tries_done >= self._tries_max or not isinstance(error, _BY_POLICY):
            return None
        delay_s = self._backoff.jittered(tries_done, self._rng)
        if isinstance(error, RateLimitedError):
            delay_s += error.retry_after_ms / 1000
        return delay_s
