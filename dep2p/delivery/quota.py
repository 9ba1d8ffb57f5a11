"""The bounds of an outbox, and who waits for room in it."""

from collections import deque
from collections.abc import Callable
from typing import Final

import trio

from dep2p.errors import DeliveryQueueFullError
from dep2p.protocols.delivery.sender import Outgoing

OVERHEAD_BYTES = 512
"""What a waiting message counts for besides its head and body."""
_NEVER: Final = float("inf")


def size_of(message: Outgoing) -> int:
    """What a message takes of the bound in bytes."""
    return len(message.head) + len(message.body) + OVERHEAD_BYTES


class OutboxRoom:
    """Items and bytes of all messages that have not ended."""

    def __init__(self, items_max: int, bytes_max: int) -> None:
        self.items = 0
        self.bytes = 0
        self.items_max = items_max
        self.bytes_max = bytes_max
        self.refused = 0
        self.armed_at = _NEVER
        self._let_in_at = _NEVER
        self.waiting: deque[trio.lowlevel.Task] = deque()
        self.held: deque[trio.lowlevel.Task] = deque()
        """Those who wait for something else than room, and hold up nobody behind them."""

    def is_full(self, size: int) -> bool:
        """Whether ``size`` bytes more are too much, or somebody stands in line already."""
        return self.items >= self.items_max or self.bytes + size > self.bytes_max or bool(self.waiting)

    def take(self, message: Outgoing) -> None:
        """A message is in."""
        self.items += 1
        self.bytes += size_of(message)

    def give(self, message: Outgoing) -> None:
        """A message has ended; call `let_in` when all that end together have."""
        self.items -= 1
        self.bytes -= size_of(message)

    def give_all(self, items: int, size: int) -> None:
        """So many have ended together, with heads and bodies of ``size`` bytes."""
        self.items -= items
        self.bytes -= size + items * OVERHEAD_BYTES

    def let_in(self) -> None:
        """Who waits may look again, as many as there are places."""
        self._let_in_at = _NEVER
        while self.held:
            trio.lowlevel.reschedule(self.held.popleft())
        places = self.items_max - self.items if self.bytes < self.bytes_max else 0
        while self.waiting and places > 0:
            trio.lowlevel.reschedule(self.waiting.popleft())
            places -= 1

    def let_in_soon(self, at: float) -> bool:
        """Who waits is let in at ``at`` if not before; whether that has to be armed."""
        self._let_in_at = min(self._let_in_at, at)
        return self._let_in_at < self.armed_at

    def next_deadline(self) -> float | None:
        """When who waits is let in, however little room there is."""
        return self._let_in_at if self._let_in_at < _NEVER else None

    def on_deadline(self, now: float) -> None:
        """It is time."""
        if now >= self._let_in_at:
            self.let_in()

    def wake_all(self) -> None:
        """Everybody looks again: there will be no more room."""
        for line in (self.held, self.waiting):
            while line:
                trio.lowlevel.reschedule(line.popleft())

    async def wait(self, size: int, check: Callable[[], bool], *, wait: bool) -> bool:
        """Until ``size`` bytes fit and ``check`` agrees; in line. ``check`` may raise. Whether others have run.

        Raises DeliveryQueueFullError when ``wait`` is False.
        """
        in_line = False
        while True:
            may = check()
            fits = may and self.items < self.items_max and self.bytes + size <= self.bytes_max
            if fits and (in_line or not self.waiting):
                return in_line
            if not wait:
                self.refused += 1
                raise DeliveryQueueFullError(
                    f"the outbox is full: {self.items} messages of {self.bytes} bytes wait. Wait for some to end, or "
                    "raise delivery_queue_items_max and delivery_queue_bytes_max in [limits]"
                )
            task = trio.lowlevel.current_task()
            line = self.waiting if may else self.held
            if in_line and not may and self.waiting and self.items < self.items_max:
                trio.lowlevel.reschedule(self.waiting.popleft())  # the place that this one was let in for
            if in_line and may:  # let in, but there was no room after all: still the first
                line.appendleft(task)
            else:
                line.append(task)

            def abort(
                _raise_cancel: object, task: trio.lowlevel.Task = task, line: deque[trio.lowlevel.Task] = line
            ) -> trio.lowlevel.Abort:
                line.remove(task)
                return trio.lowlevel.Abort.SUCCEEDED

            await trio.lowlevel.wait_task_rescheduled(abort)
            in_line = may
