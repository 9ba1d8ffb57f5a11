"""How long a relayed connection beside a direct one is kept for the streams that are open on it. Pure."""

from typing import Final

RELAYED_GRACE_S: Final = 60.0
"""Seconds for which open streams of apps keep it, whether anything flows on them or not."""
QUIET_S: Final = 10.0
"""After them it ends when so many seconds bring next to nothing: what flows goes on to its end."""
QUIET_BYTES: Final = 1_024
"""Next to nothing: probes of liveness."""


class RelayGrace:
    """Says when a relayed connection has had its time.

    Example::

        grace = RelayGrace(now_s=100.0)
        grace.is_over(carried_bytes, now_s=161.0)
    """

    def __init__(self, *, now_s: float) -> None:
        """``now_s``: the time at which the direct connection took over."""
        self._until_s = now_s + RELAYED_GRACE_S
        self._quiet_since_s = now_s
        self._carried_bytes = 0

    def is_over(self, carried_bytes: int, *, now_s: float) -> bool:
        """Return whether to end it. ``carried_bytes``: all that it has carried, both ways. Call it several times in
        `QUIET_S`."""
        if carried_bytes - self._carried_bytes > QUIET_BYTES:
            self._carried_bytes = carried_bytes
            self._quiet_since_s = now_s
        return now_s >= self._until_s and now_s - self._quiet_since_s >= QUIET_S
