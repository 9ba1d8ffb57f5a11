"""Tasks that wait until another task wakes them: `Sleeper` for one task, `WaitQueue` for several in line.

Both are cancel-safe: a task whose wait is cancelled leaves its place. Both cost less than `trio.Event`, which has to be
made anew for each wait, and than `trio.lowlevel.ParkingLot`: every message passes them.
"""

from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import trio
from outcome import Value


def suspend(on_cancel: Callable[[], object]) -> Awaitable[Any]:
    """Wait until another task calls ``trio.lowlevel.reschedule`` for the current one; give or raise what it sends.

    ``on_cancel`` is called when the wait is cancelled: it must remove the task from where the other one would find it.
    """

    def abort(_raise_cancel: object) -> trio.lowlevel.Abort:
        on_cancel()
        return trio.lowlevel.Abort.SUCCEEDED

    return trio.lowlevel.wait_task_rescheduled(abort)  # noqa: ASYNC105  (the caller awaits it: one coroutine less)


class Sleeper:
    """The place of one task that waits. A wake-up is not remembered: the task checks for work before it waits."""

    __slots__ = ("task",)

    def __init__(self) -> None:
        self.task: trio.lowlevel.Task | None = None
        """The waiting task. None while no task waits: callers on hot paths look at it before they call `wake`."""

    async def wait(self) -> None:
        """Wait for `wake`. Only one task may wait at a time."""
        self.task = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(self._abort)

    def _abort(self, _raise_cancel: object) -> trio.lowlevel.Abort:
        self.task = None
        return trio.lowlevel.Abort.SUCCEEDED

    def wake(self) -> None:
        """Wake the task, if one waits."""
        task = self.task
        if task is not None:
            self.task = None
            trio.lowlevel.reschedule(task)


class WaitQueue:
    """Tasks that wait in line: the first to come is the first to be woken."""

    __slots__ = ("tasks",)

    def __init__(self) -> None:
        self.tasks: deque[trio.lowlevel.Task] = deque()
        """The waiting tasks. Callers on hot paths look at it: the length of the queue itself costs a call."""

    def __len__(self) -> int:
        return len(self.tasks)

    async def wait(self, *, first: bool = False) -> None:
        """Wait in line until the task is woken.

        ``first``: before all others, for a task that was woken too early and keeps its place.
        """
        tasks = self.tasks
        task = trio.lowlevel.current_task()
        if first:
            tasks.appendleft(task)
        else:
            tasks.append(task)

        def abort(_raise_cancel: object) -> trio.lowlevel.Abort:
            tasks.remove(task)
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    def wake(self, count: int = 1) -> None:
        """Wake the first ``count`` tasks, or fewer if fewer wait."""
        tasks = self.tasks
        while tasks and count > 0:
            trio.lowlevel.reschedule(tasks.popleft(), Value(None))
            count -= 1

    def wake_all(self) -> None:
        """Wake all tasks."""
        self.wake(len(self.tasks))
