"""Turns: one task a pass, in order, whatever is cancelled."""

import trio
import trio.testing

from dep2p.host.resources.turns import Turns


async def test_one_of_many_tasks_goes_on_in_each_pass() -> None:
    turns, passes, at = Turns(), 0, list[int]()
    done = trio.Event()

    async def count() -> None:
        nonlocal passes
        while not done.is_set():
            passes += 1
            await trio.lowlevel.checkpoint()

    async def worker() -> None:
        for _ in range(5):
            await turns.next()
            at.append(passes)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(count)
        async with trio.open_nursery() as workers:
            for _ in range(20):
                workers.start_soon(worker)
        done.set()
    assert len(at) == 100
    assert max(at.count(number) for number in at) <= 2
    assert turns.waiting == 0


async def test_turns_are_given_in_the_order_in_which_tasks_came() -> None:
    turns, order = Turns(), list[int]()

    async def worker(number: int) -> None:
        await turns.next()
        order.append(number)

    async with trio.open_nursery() as nursery:
        for number in range(10):
            nursery.start_soon(worker, number)
            await trio.testing.wait_all_tasks_blocked(0)
    assert order == sorted(order)


async def test_a_cancelled_task_passes_its_turn_on() -> None:
    turns, passed = Turns(), list[int]()

    async def worker(number: int, scope: trio.CancelScope) -> None:
        with scope:
            await turns.next()
            passed.append(number)

    for cancelled in range(6):
        passed.clear()
        scopes = [trio.CancelScope() for _ in range(6)]
        with trio.fail_after(5):
            async with trio.open_nursery() as nursery:
                for number, scope in enumerate(scopes):
                    nursery.start_soon(worker, number, scope)
                for _ in range(cancelled):
                    await trio.lowlevel.checkpoint()
                scopes[cancelled].cancel()
            await turns.next()
        assert turns.waiting == 0


async def test_light_work_goes_on_together_and_heavy_work_alone() -> None:
    turns, passes = Turns(weight_max=4), 0
    at: dict[int, list[int]] = {}
    done = trio.Event()

    async def count() -> None:
        nonlocal passes
        while not done.is_set():
            passes += 1
            await trio.lowlevel.checkpoint()

    async def worker(weight: int) -> None:
        for _ in range(5):
            await turns.next(weight)
            at.setdefault(passes, []).append(weight)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(count)
        async with trio.open_nursery() as workers:
            for number in range(30):
                workers.start_soon(worker, (1, 2, 9)[number % 3])
        done.set()
    assert sum(map(len, at.values())) == 150
    # One that comes while nobody waits is no part of a group; and the counter runs before or after the others.
    assert max(map(len, at.values())) <= 2 * 4 + 1
    assert sum(len(weights) > 1 for weights in at.values()) > 10
