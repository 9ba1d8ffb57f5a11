"""A time limit that runs while nothing moves. Pure."""

from typing import Final

SAMPLES: Final = 2
"""Looks in one timeout: a wait that stops moving ends after 1 to 1.5 timeouts."""
LEFT_BYTES_MIN: Final = 4_096
"""Bytes that a timeout has to bring to a stream that its user has left: 70 a second, less than any link in use."""


class StallTimer:
    """Ends a wait in which nothing moves, in either direction, or too little.

    ``progress`` is a number that changes with each step forward of a two-way exchange: bytes that came, bytes that
    went, room that the peer granted. A timer that only watches what comes ends a transfer that flows the other way.

    >>> timer = StallTimer(60.0, now=0.0, progress=0)
    >>> timer.is_stalled(30.0, 5), timer.check_at_s
    (False, 60.0)
    >>> timer.is_stalled(60.0, 5), timer.is_stalled(90.0, 5)
    (False, True)
    """

    __slots__ = ("_end_s", "_least", "_progress", "_timeout_s", "check_at_s")

    def __init__(self, timeout_s: float, now: float, progress: int, *, least: int = 1) -> None:
        """``timeout_s``: seconds without progress until the wait ends. ``now``: seconds, of any clock. ``least``: the
        progress that a timeout has to bring; a peer that lets a byte move now and then could otherwise hold what it
        waits for as long as it likes."""
        self._least = least
        self._timeout_s = timeout_s
        self._end_s = now + timeout_s
        self._progress = progress
        self.check_at_s: float = now + timeout_s / SAMPLES
        """The time of the next look."""

    def is_stalled(self, now: float, progress: int) -> bool:
        """Whether less than ``least`` has moved for the timeout. Before ``check_at_s`` it does not look."""
        if now < self.check_at_s:
            return False
        if progress - self._progress >= self._least:
            self._progress = progress
            self._end_s = now + self._timeout_s
        self.check_at_s = min(self._end_s, now + self._timeout_s / SAMPLES)
        return now >= self._end_s
