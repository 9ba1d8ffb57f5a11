"""The quota of an outbox, in items and bytes, and the tasks that wait for a part of it."""

from collections.abc import Callable
from typing import Final

from dep2p.concurrency.wait_queue import WaitQueue
from dep2p.errors import DeliveryQueueFullError
from dep2p.protocols.delivery.sender import Outgoing

OVERHEAD_BYTES = 512
"""Bytes that a waiting message counts for besides its head and body."""
_NEVER: Final = float("inf")


def size_of(message: Outgoing) -> int:
    """Return the bytes that a message takes of the quota."""
    return len(message.head) + len(message.body) + OVERHEAD_BYTES


class OutboxQuota:
    """Items and bytes of all messages that have not ended."""

    def __init__(self, items_max: int, bytes_max: int) -> None:
        self.items: int = 0
        self.bytes: int = 0
        self.items_max = items_max
        self.bytes_max = bytes_max
        self.refused: int = 0
        self.armed_at = _NEVER
        self._admit_at = _NEVER
        self.waiting: WaitQueue = WaitQueue()
        self.held: WaitQueue = WaitQueue()
        """Tasks that wait for something other than quota. They hold up no task behind them."""

    def is_full(self, size: int) -> bool:
        """Whether ``size`` bytes more are too much, or a caller waits in line already."""
        return self.items >= self.items_max or self.bytes + size > self.bytes_max or bool(self.waiting)

    def acquire(self, message: Outgoing) -> None:
        """Take quota for a message that was accepted."""
        self.items += 1
        self.bytes += size_of(message)

    def release(self, message: Outgoing) -> None:
        """Give back a message's quota. Call `admit` after the last of the messages that end together."""
        self.items -= 1
        self.bytes -= size_of(message)

    def release_all(self, items: int, size: int) -> None:
        """Give back the quota of so many messages, with heads and bodies of ``size`` bytes."""
        self.items -= items
        self.bytes -= size + items * OVERHEAD_BYTES

    def admit(self) -> None:
        """Wake waiting tasks, as many as there is quota for."""
        self._admit_at = _NEVER
        self.held.wake_all()
        if self.bytes < self.bytes_max:
            self.waiting.wake(self.items_max - self.items)

    def admit_soon(self, at: float) -> bool:
        """Wake waiting tasks at ``at`` if not before. Returns whether the timer has to be armed."""
        self._admit_at = min(self._admit_at, at)
        return self._admit_at < self.armed_at

    def next_deadline(self) -> float | None:
        """Return when waiting tasks are woken, however little quota is left."""
        return self._admit_at if self._admit_at < _NEVER else None

    def on_deadline(self, now: float) -> None:
        """Wake waiting tasks when their time has come."""
        if now >= self._admit_at:
            self.admit()

    def wake_all(self) -> None:
        """Wake all tasks: no quota will be given any more."""
        self.held.wake_all()
        self.waiting.wake_all()

    async def wait(self, size: int, check: Callable[[], bool], *, wait: bool) -> bool:
        """Wait in line until ``size`` bytes fit and ``check`` agrees; ``check`` may raise. Returns whether other tasks
        have run.

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
                    f"the outbox is full, or a receiver that is away has its share of it: {self.items} messages of "
                    f"{self.bytes} bytes wait. Wait for some to end, or "
                    "raise delivery_queue_items_max and delivery_queue_bytes_max in [limits]"
                )
            if may:  # there was too little quota: the task stays the first in line
                await self.waiting.wait(first=in_line)
            else:
                if in_line and self.items < self.items_max:
                    self.waiting.wake()  # the next task gets this task's turn
                await self.held.wait()
            in_line = may
