"""The timer of deadlines."""

import trio

from dep2p.concurrency.deadlines import DeadlineTimer


async def test_the_timer_fires_at_the_earliest_scheduled_time_and_is_rearmed(autojump_clock: trio.abc.Clock) -> None:
    fired: list[float] = []
    following: list[float | None] = [7.0, None]

    def on_time(now: float) -> float | None:
        fired.append(now - began)
        wanted = following.pop(0) if following else None
        return None if wanted is None else began + wanted

    began = trio.current_time()
    timer = DeadlineTimer(on_time)
    timer.schedule(began + 5)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(timer.run)
        await trio.sleep(1)
        timer.schedule(began + 9)
        timer.schedule(began + 3)
        await trio.sleep(9)
        timer.schedule(began + 12)
        await trio.sleep(5)
        timer.schedule(began + 1)  # past: at once
        await trio.sleep(1)
        nursery.cancel_scope.cancel()
    assert [round(at, 3) for at in fired] == [3, 7, 12, 15]
