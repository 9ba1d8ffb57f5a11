"""A publish that waits to become durable, and the task that waits for it."""

import copy
from typing import Final, cast

import trio
from outcome import Value

from dep2p.protocols.queues.deduplication import PendingPublish
from dep2p.protocols.queues.records import Run


class Pending:
    """Messages and bytes that are not durable yet."""

    __slots__ = ("bytes", "items")

    def __init__(self) -> None:
        self.items: int = 0
        self.bytes: int = 0


class _Woken:
    """The outcome that a waiting task gets. All tasks share one, since trio's own outcomes may be used only once
    each."""

    __slots__ = ()

    def unwrap(self) -> None:
        """Return nothing."""


_WOKEN: Final = cast("Value[None]", _Woken())


def _notify(publish: PendingPublish) -> None:
    """Wake the task when the outcome is known, or in doubt; also when the task waits no more."""
    assert isinstance(publish, WaitedPublish)
    if publish.is_notified:
        return
    publish.is_notified = True
    pending = publish.pending
    pending.items -= publish.items
    pending.bytes -= publish.size
    task, publish.task = publish.task, None
    if task is not None:
        trio.lowlevel.reschedule(task, _WOKEN)


class WaitedPublish(PendingPublish):
    """A publish, and the task that waits for it to become durable. It is one object with few calls, since each message
    makes one.

    It counts in ``pending`` from when it was taken until its waiter is notified."""

    __slots__ = ("is_notified", "items", "pending", "size", "task")

    def __init__(self, pending: Pending, items: int, size: int) -> None:
        super().__init__(_notify)
        self.pending: Pending = pending
        self.items: int = items
        self.size: int = size
        self.is_notified: bool = False
        self.task: trio.lowlevel.Task | None = None

    def repeats(self, publish: PendingPublish) -> None:
        """Follow another publish that stands for this one, which is done or in doubt."""
        if not self.is_notified:
            self.runs: list[Run] = publish.runs
            self.error: Exception | None = publish.error
            _notify(self)

    def _abort(self, _raise_cancel: object) -> trio.lowlevel.Abort:
        self.task = None
        return trio.lowlevel.Abort.SUCCEEDED

    async def wait(self) -> list[tuple[int, int]]:
        """Wait for the outcome: return the ids, or raise the error. When the wait is cancelled, the publish goes on:
        its outcome is unknown then."""
        if not self.is_notified:
            self.task = trio.lowlevel.current_task()
            # Not by `suspend`, which makes a function for each wait: every publish passes here.
            await trio.lowlevel.wait_task_rescheduled(self._abort)
        else:
            await trio.lowlevel.checkpoint()
        if self.error is not None:
            raise copy.copy(self.error)
        return self.points()
