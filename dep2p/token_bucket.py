"""A token bucket: a rate with a burst. Pure; one for requests, publishes, control messages and administration."""


class TokenBucket:
    """Gives ``rate_per_s`` tokens a second and holds at most ``burst`` of them; it starts full.

    >>> bucket = TokenBucket(2.0, burst=1)
    >>> bucket.take(10.0), round(bucket.take(10.0), 3)
    (0.0, 0.5)
    """

    __slots__ = ("_burst", "_filled_at", "_rate_per_s", "_tokens")

    def __init__(self, rate_per_s: float, burst: float | None = None) -> None:
        """``rate_per_s`` is above 0; ``burst`` defaults to what one second gives, at least one token.

        Raises ``ValueError``.
        """
        if not rate_per_s > 0:
            raise ValueError(f"rate_per_s is {rate_per_s}: a bucket needs a rate above 0")
        self._rate_per_s = rate_per_s
        self._burst = max(1.0, rate_per_s if burst is None else burst)
        self._tokens = self._burst
        self._filled_at: float | None = None

    def take(self, now: float) -> float:
        """Take one token: 0.0 when there was one, else the seconds until there will be one, and nothing is taken."""
        wait_s = self.wait_s(now)
        if not wait_s:
            self._tokens -= 1.0
        return wait_s

    def take_up_to(self, wanted: int, now: float) -> int:
        """Take as many whole tokens as there are, at most ``wanted``; gives how many."""
        self._fill(now)
        taken = min(wanted, int(self._tokens))
        self._tokens -= taken
        return taken

    def wait_s(self, now: float) -> float:
        """Seconds until there is a token; 0.0: there is one. Nothing is taken."""
        self._fill(now)
        if self._tokens >= 1.0:
            return 0.0
        # Rounded up a little, so that asking again at that time succeeds in spite of floating point.
        return (1.0 - self._tokens) / self._rate_per_s + 1e-6

    def spend(self, tokens: float = 1.0) -> None:
        """Take tokens that the caller has checked, or a debt that later takers wait for."""
        self._tokens -= tokens

    def _fill(self, now: float) -> None:
        filled_at = self._filled_at
        if filled_at is not None and now > filled_at:
            self._tokens = min(self._burst, self._tokens + (now - filled_at) * self._rate_per_s)
        if filled_at is None or now > filled_at:
            self._filled_at = now
