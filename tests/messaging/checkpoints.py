"""Cancel a call at every one of its awaits."""

from collections.abc import AsyncIterator, Awaitable, Callable

import trio


class _CancelAfter(trio.abc.Instrument):
    """Cancels ``scope`` before the ``count``-th step of one task."""

    def __init__(self, task: trio.lowlevel.Task, scope: trio.CancelScope, count: int) -> None:
        self._task = task
        self._scope = scope
        self._left = count

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self._task:
            self._left -= 1
            if self._left == 0:
                self._scope.cancel()


async def cancelled_at_step(call: Callable[[], Awaitable[object]], step: int) -> bool:
    """Run ``call``, and cancel it when it has come to its ``step``-th wake-up; True when it was cancelled.

    At a wake-up the task has something to return to already, so the cancellation strikes at its next await: together
    with step 0, which cancels before the call, every await is hit while it waits or before it starts.
    """
    with trio.CancelScope() as scope:
        if step == 0:
            scope.cancel()
            await call()
            return scope.cancelled_caught
        instrument = _CancelAfter(trio.lowlevel.current_task(), scope, step)
        trio.lowlevel.add_instrument(instrument)
        try:
            await call()
        finally:
            trio.lowlevel.remove_instrument(instrument)
    return scope.cancelled_caught


async def cancelled_after(call: Callable[[], Awaitable[object]], delay_s: float) -> bool:
    """Run ``call`` and cancel it after ``delay_s`` of virtual time: while it waits for the network."""
    with trio.move_on_after(delay_s) as scope:
        await call()
    return scope.cancelled_caught


async def every_cancellation(
    call: Callable[[], Awaitable[object]], *, step_s: float = 0.000_5, duration_s: float = 0.02, steps_max: int = 60
) -> AsyncIterator[str]:
    """Run ``call`` again and again, each time cancelled at another point, until it completes; yields after each.

    First by wake-ups of its task (n = 0, 1, 2 … until it is no longer cancelled), then by time in ``step_s``.
    """
    for step in range(steps_max):
        cancelled = await cancelled_at_step(call, step)
        yield f"step {step}, {'cancelled' if cancelled else 'completed'}"
        if not cancelled and step > 3:
            break
    else:
        raise AssertionError(f"the call was still cancelled at its step {steps_max}")
    delay_s = 0.0
    while delay_s <= duration_s:
        cancelled = await cancelled_after(call, delay_s)
        yield f"after {delay_s} s, {'cancelled' if cancelled else 'completed'}"
        delay_s += step_s
