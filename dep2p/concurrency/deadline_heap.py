"""Deadlines of many sessions on one timer, in the order of time."""

import heapq
import itertools
from typing import Protocol

from dep2p.concurrency.deadlines import DeadlineTimer

_NEVER = float("inf")


class Due(Protocol):
    """Something with deadlines."""

    armed_at: float
    """The armed time: infinity when nothing is armed. `DueTimes` owns it."""

    def next_deadline(self) -> float | None: ...

    def on_deadline(self, now: float) -> None: ...


class DueTimes:
    """The deadlines of many parts. Arming a later time costs one comparison: it is found when the earlier one comes."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Due]] = []
        self._order = itertools.count()
        self._timer = DeadlineTimer(self._on_time)

    def schedule(self, part: Due) -> None:
        """Arm the part's next deadline."""
        at = part.next_deadline()
        if at is not None and at < part.armed_at:
            part.armed_at = at
            heapq.heappush(self._heap, (at, next(self._order), part))
            self._timer.schedule(at)

    def forget(self, part: Due) -> None:
        """Forget a part that is over: its armed time has no effect."""
        part.armed_at = -_NEVER

    def _on_time(self, now: float) -> float | None:
        heap = self._heap
        due: list[Due] = []
        while heap and heap[0][0] <= now:
            at, _order, part = heapq.heappop(heap)
            if part.armed_at == at:
                part.armed_at = _NEVER
                due.append(part)
        for part in due:
            deadline = part.next_deadline()
            if deadline is not None and deadline <= now:
                part.on_deadline(now)
            if part.armed_at > 0:
                self.schedule(part)
        while heap and heap[0][2].armed_at != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    async def run(self) -> None:
        """Run until cancelled."""
        await self._timer.run()
