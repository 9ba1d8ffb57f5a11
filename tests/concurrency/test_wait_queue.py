"""Tasks that wait for another task."""

from collections.abc import Awaitable, Callable

import trio
import trio.testing
from outcome import Value

from dep2p.concurrency.wait_queue import Sleeper, WaitQueue, suspend


async def _start_in_line(nursery: trio.Nursery, wait: Callable[[str], Awaitable[None]], *names: str) -> None:
    for name in names:
        nursery.start_soon(wait, name)
        await trio.testing.wait_all_tasks_blocked()


async def test_tasks_are_woken_in_the_order_in_which_they_came() -> None:
    queue, woken = WaitQueue(), list[str]()

    async def wait(name: str) -> None:
        await queue.wait(first=name == "urgent")
        woken.append(name)

    async with trio.open_nursery() as nursery:
        await _start_in_line(nursery, wait, "a", "b", "c", "urgent")
        assert len(queue) == 4
        for expected in ("urgent", "a", "b"):
            queue.wake()
            await trio.testing.wait_all_tasks_blocked()
            assert woken.pop() == expected
        queue.wake(count=5)
        queue.wake()
    assert woken == ["c"]
    assert not queue


async def test_a_cancelled_task_leaves_the_line_and_uses_up_no_wake() -> None:
    queue, woken = WaitQueue(), list[str]()
    scope = trio.CancelScope()

    async def wait(name: str) -> None:
        with scope if name == "cancelled" else trio.CancelScope():
            await queue.wait()
            woken.append(name)

    async with trio.open_nursery() as nursery:
        await _start_in_line(nursery, wait, "cancelled", "b")
        scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert len(queue) == 1
        queue.wake()
    assert woken == ["b"]


async def test_a_sleeper_wakes_its_task_and_forgets_a_wake_that_no_task_waits_for() -> None:
    sleeper = Sleeper()
    sleeper.wake()
    with trio.move_on_after(0.01) as scope:
        await sleeper.wait()
    assert scope.cancelled_caught
    assert sleeper.task is None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sleeper.wait)
        await trio.testing.wait_all_tasks_blocked()
        assert sleeper.task is not None
        sleeper.wake()


async def test_a_suspended_task_gets_what_it_is_sent_or_is_removed_when_it_is_cancelled() -> None:
    tasks, got = list[trio.lowlevel.Task](), list[str]()

    async def wait() -> None:
        task = trio.lowlevel.current_task()
        tasks.append(task)
        got.append(await suspend(lambda: tasks.remove(task)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        trio.lowlevel.reschedule(tasks.pop(), Value("answer"))
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert got == ["answer"]
    assert not tasks
