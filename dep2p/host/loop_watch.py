"""Notices when the event loop is blocked: one step of one task, or many, that hold up all others."""

import logging
from collections import deque

import trio

from dep2p.host.counters import Counters

logger: logging.Logger = logging.getLogger("dep2p.host")

BEAT_S = 0.1
"""Between two looks at the clock: a task that sleeps for so long wakes up later when the loop is blocked."""
BLOCKED_S = 0.1
"""Delay from which on the loop counts as blocked: a person notices it, and a request's p99 shall stay below."""
LOGGED_S = 0.5
"""Delay from which on the log says so: shorter ones are usual on a busy machine, and the metric has them."""
WINDOW_S = 60.0
"""Time for which the longest delay is reported; a blocked loop is logged once in it."""


class LoopWatch:
    """The delays of the event loop.

    Counters: ``loop_blocked`` (delays of `BLOCKED_S` or more) and ``loop_blocked_ms`` (their sum).
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._delays: deque[tuple[float, float]] = deque()
        """Times and delays of the last `WINDOW_S`, each delay longer than those after it."""
        self._log_s = 0.0

    def note(self, now_s: float, delay_s: float) -> None:
        """Take a delay that was measured at ``now_s``."""
        delays = self._delays
        while delays and delays[-1][1] <= delay_s:
            delays.pop()
        delays.append((now_s, delay_s))
        while delays[0][0] < now_s - WINDOW_S:
            delays.popleft()
        if delay_s < BLOCKED_S:
            return
        self._counters.add("loop_blocked")
        self._counters.add("loop_blocked_ms", round(1_000 * delay_s))
        if delay_s >= LOGGED_S and now_s >= self._log_s:
            self._log_s = now_s + WINDOW_S
            logger.warning(
                "the event loop was blocked for %.0f ms: a handler that computes or does blocking I/O, or a machine "
                "without a free processor; counted as host_loop_blocked, logged once in %.0f s",
                1_000 * delay_s,
                WINDOW_S,
            )

    @property
    def delay_max_ms(self) -> int:
        """The longest delay of the last `WINDOW_S` before the newest one, milliseconds."""
        return round(1_000 * self._delays[0][1]) if self._delays else 0

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            due_s = trio.current_time() + BEAT_S
            await trio.sleep_until(due_s)
            now_s = trio.current_time()
            self.note(now_s, max(0.0, now_s - due_s))
