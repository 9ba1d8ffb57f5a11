"""Deadlines of pure cores on trio."""

from collections.abc import Callable

import trio

_NEVER = float("inf")


class DeadlineTimer:
    """One task that calls ``on_time(now)`` at the earliest scheduled time.

    ``on_time`` must not raise; it returns the next time to be scheduled, or None. Asking for a later time than one
    already scheduled costs a comparison, so that a request per call may do it.
    """

    def __init__(self, on_time: Callable[[float], float | None]) -> None:
        self._on_time = on_time
        self._scope: trio.CancelScope | None = None
        self.at: float = _NEVER
        """The time that the task waits for."""

    def schedule(self, at: float) -> None:
        """Call ``on_time`` at ``at`` (trio time) at the latest."""
        if at < self.at:
            self.at = at
            if self._scope is not None:
                self._scope.deadline = at

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            with trio.CancelScope(deadline=self.at) as self._scope:
                await trio.sleep_forever()
            self._scope = None
            self.at = _NEVER
            following = self._on_time(trio.current_time())
            if following is not None:
                self.schedule(following)
