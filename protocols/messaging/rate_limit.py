"""Token bucket: how often one peer may do one thing. Pure: time is an argument."""


class TokenBucket:
    """Gives ``rate_per_s`` tokens a second and holds at most ``burst`` of them; it starts full."""

    __slots__ = ("_burst", "_filled_at", "_rate_per_s", "_tokens")

    def __init__(self, rate_per_s: float, burst: float | None = None) -> None:
        """``rate_per_s`` is above 0; ``burst`` defaults to what one second gives, at least one token."""
        if not rate_per_s > 0:
            raise ValueError(f"rate_per_s is {rate_per_s}: a bucket needs a rate above 0")
        self._rate_per_s = rate_per_s
        self._burst = max(1.0, rate_per_s if burst is None else burst)
        self._tokens = self._burst
        self._filled_at: float | None = None

    def take(self, now: float) -> float:
        """Take one token: 0.0 when there was one, else the seconds until there will be one, and nothing is taken."""
        filled_at = self._filled_at
        if filled_at is not None and now > filled_at:
            self._tokens = min(self._burst, self._tokens + (now - filled_at) * self._rate_per_s)
        if filled_at is None or now > filled_at:
            self._filled_at = now
        if self._tokens >= 1.0:
            self._tokens -= 1.0
            return 0.0
        # Rounded up a little, so that asking again at that time succeeds in spite of floating point.
        return (1.0 - self._tokens) / self._rate_per_s + 1e-6
