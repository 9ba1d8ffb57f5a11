"""The timer and the generic loop for pure cores."""

from dataclasses import dataclass

import trio

from dep2p.concurrency.deadlines import DeadlineTimer, drive


async def test_the_timer_fires_at_the_earliest_wanted_time_and_is_rearmed(autojump_clock: trio.abc.Clock) -> None:
    fired: list[float] = []
    following: list[float | None] = [7.0, None]

    def on_time(now: float) -> float | None:
        fired.append(now - began)
        wanted = following.pop(0) if following else None
        return None if wanted is None else began + wanted

    began = trio.current_time()
    timer = DeadlineTimer(on_time)
    timer.want(began + 5)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(timer.run)
        await trio.sleep(1)
        timer.want(began + 9)
        timer.want(began + 3)
        await trio.sleep(9)
        timer.want(began + 12)
        await trio.sleep(5)
        timer.want(began + 1)  # past: at once
        await trio.sleep(1)
        nursery.cancel_scope.cancel()
    assert [round(at, 3) for at in fired] == [3, 7, 12, 15]


@dataclass(frozen=True)
class Say:
    text: str


class Echo:
    """Says what it hears, and that it is bored after a second of silence."""

    def __init__(self) -> None:
        self._bored_at: float | None = None

    def handle(self, event: str, now: float) -> list[Say]:
        self._bored_at = now + 1
        return [Say(event)]

    def next_deadline(self) -> float | None:
        return self._bored_at

    def on_deadline(self, now: float) -> list[Say]:
        self._bored_at = None
        return [Say("bored")]


async def test_a_core_is_driven_by_events_and_deadlines_in_order(autojump_clock: trio.abc.Clock) -> None:
    said: list[str] = []

    def perform(effect: Say) -> None:
        said.append(effect.text)

    send, receive = trio.open_memory_channel[str](0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(drive, Echo(), receive, perform)
        await send.send("a")
        await trio.sleep(0.5)
        await send.send("b")
        await trio.sleep(2)
        await send.send("c")
        await send.aclose()
    assert said == ["a", "b", "bored", "c"]
