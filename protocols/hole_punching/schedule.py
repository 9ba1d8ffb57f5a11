"""The order of the tries to find a direct path beside one relayed connection. Pure."""

from dataclasses import dataclass
from enum import Enum
from typing import Final

from dep2p.protocols.timing.backoff import Backoff
from dep2p.types import Rng

TRIES: Final = 3
"""Tries of a round (specification), each with a new exchange of addresses."""
FIRST_WAITS_S: Final = (5.0, 30.0, 300.0)
"""Waits before the second round and those after it: a peer that has just started learns its addresses meanwhile."""
LATER: Final = Backoff(600.0, 3_600.0)
"""Waits before the rounds after those: networks change."""
UNREADY: Final = Backoff(0.25, 30.0)
"""Waits for the addresses of this node itself."""


class TryKind(Enum):
    """The way of a try."""

    REVERSE = "reverse"
    """Dial the peer's public addresses: it may be reachable itself."""
    PUNCH = "punch"
    """Exchange addresses over the relay, and dial at the same time."""


@dataclass(frozen=True, slots=True)
class NextTry:
    """Wait ``wait_s`` seconds, then try."""

    kind: TryKind
    wait_s: float


class Schedule:
    """Says what to try next, until a direct path is found or the relayed connection ends.

    Example::

        schedule = Schedule(rng)
        step = schedule.next()        # NextTry(TryKind.REVERSE, 0.0)
        step = schedule.next()        # it failed: NextTry(TryKind.PUNCH, 0.0)
        step = schedule.unready()     # no addresses to punch with yet: the same try, later
    """

    def __init__(self, rng: Rng) -> None:
        self._rng = rng
        self._rounds = 0
        self._done = 0
        """Tries of this round; the first is the reversal."""
        self._unready = 0

    def next(self) -> NextTry:
        """Return the next try: this is the first, or the one before has failed."""
        self._unready = 0
        if self._done > TRIES:
            self._done = 0
            self._rounds += 1
        self._done += 1
        if self._done > 1:
            return NextTry(TryKind.PUNCH, 0.0)
        return NextTry(TryKind.REVERSE, self._wait_s())

    def unready(self) -> NextTry:
        """Return the same try again for later: this node lacked what it takes."""
        self._unready += 1
        return NextTry(TryKind.PUNCH, UNREADY.after(self._unready))

    def _wait_s(self) -> float:
        if not self._rounds:
            return 0.0
        if self._rounds <= len(FIRST_WAITS_S):
            return FIRST_WAITS_S[self._rounds - 1] * (0.75 + 0.5 * self._rng.random())
        return LATER.jittered(self._rounds - len(FIRST_WAITS_S), self._rng)
