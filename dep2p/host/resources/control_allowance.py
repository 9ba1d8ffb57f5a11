"""The rate of control frames: frames that carry no data, whose cost for the sender is next to nothing."""

import math

DATA_BYTES_PER_FRAME = 4_096
"""Data of either direction that pays for one control frame: honest window updates are far rarer than that."""


class ControlRate:
    """A token bucket whose clock is looked at only when it is empty.

    ``per_s``: frames a second; 0 means no limit. ``burst_s``: seconds of that rate that may come at once. ``now_s``:
    the time at which the bucket is full, by the clock of `refill`.
    """

    __slots__ = ("_burst_s", "_granted", "_per_s", "_tokens", "_used_bytes", "_used_s")

    def __init__(self, per_s: float, burst_s: float, now_s: float = 0.0) -> None:
        self._burst_s = burst_s
        self._granted = 0.0
        self._tokens = 0.0
        self._used_s = now_s
        self._used_bytes = 0
        self._per_s = per_s
        self.change(per_s)

    def change(self, per_s: float) -> None:
        """Use another rate; a higher one grants the difference of its burst at once."""
        self._per_s = per_s or math.inf
        burst = self._per_s * self._burst_s
        if burst > self._granted:
            self._tokens += burst - self._granted if self._granted < math.inf else 0.0
        self._granted = burst
        self._tokens = min(self._tokens, burst)

    def take(self, frames: int) -> bool:
        """Take tokens for ``frames``; False when there are too few, and `refill` must follow."""
        self._tokens -= frames
        return self._tokens >= 0

    def refill(self, now_s: float, data_bytes: int) -> bool:
        """Add the frames that time and ``data_bytes``, carried since the start, have earned; False when over the
        rate."""
        earned = (now_s - self._used_s) * self._per_s if now_s > self._used_s else 0.0
        earned += (data_bytes - self._used_bytes) / DATA_BYTES_PER_FRAME
        self._used_s, self._used_bytes = now_s, data_bytes
        self._tokens = min(self._tokens + earned, self._per_s * self._burst_s)
        return self._tokens >= 0

    def give_back(self, frames: int) -> None:
        """Undo `take`: a refused frame costs nothing."""
        self._tokens += frames
