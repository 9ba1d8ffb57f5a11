"""A step that may take any time while something moves."""

import trio

from dep2p.concurrency.stall import run_while_moving


async def test_a_step_goes_on_while_something_moves_and_ends_when_nothing_does(autojump_clock: trio.abc.Clock) -> None:
    moved = 0

    async def move() -> None:
        nonlocal moved
        while moved < 100:
            await trio.sleep(4)
            moved += 1
        await trio.sleep_forever()

    began = trio.current_time()
    assert not await run_while_moving(move, lambda: moved, 5.0)
    assert 500 <= trio.current_time() - began <= 510


async def test_a_step_ends_when_too_little_moves(autojump_clock: trio.abc.Clock) -> None:
    moved = 0

    async def move() -> None:
        nonlocal moved
        while True:
            await trio.sleep(1)
            moved += 10 if trio.current_time() < began + 50 else 1

    began = trio.current_time()
    assert not await run_while_moving(move, lambda: moved, 5.0, least=40)
    assert 50 <= trio.current_time() - began <= 60


async def test_a_step_that_returns_is_done(autojump_clock: trio.abc.Clock) -> None:
    calls: list[float] = []

    async def step() -> None:
        calls.append(trio.current_time())
        await trio.sleep(3)

    assert await run_while_moving(step, lambda: 0, 5.0)
    assert len(calls) == 1
