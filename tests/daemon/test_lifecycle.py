"""Draining, under the virtual clock."""

import pytest
import trio
from trio.testing import MockClock

from dep2p.daemon.lifecycle import Lifecycle
from dep2p.daemon.problems import Problem


async def nothing() -> None:
    await trio.lowlevel.checkpoint()


async def test_a_drain_waits_for_what_is_in_flight(autojump_clock: MockClock) -> None:
    lifecycle = Lifecycle(nothing, 10.0)
    ended: list[float] = []

    async def work(seconds: float) -> None:
        with lifecycle.work():
            await trio.sleep(seconds)
        ended.append(trio.current_time())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(work, 3.0)
        nursery.start_soon(work, 5.0)
        await trio.sleep(1)
        started_s = trio.current_time()
        await lifecycle.drain()
        assert trio.current_time() - started_s == pytest.approx(4.0)
        assert len(ended) == 2 or lifecycle.in_flight == 0
        with pytest.raises(Problem) as refused:
            with lifecycle.work():
                pass
        assert refused.value.code == "D3006"


async def test_a_drain_ends_by_its_timeout(autojump_clock: MockClock) -> None:
    lifecycle = Lifecycle(trio.sleep_forever, 10.0)
    started_s = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lifecycle.drain)
        await trio.sleep(1)
        await lifecycle.drain()
    assert trio.current_time() - started_s == pytest.approx(10.0)
    lifecycle.stop()
    assert lifecycle.state == "stopping"
    assert lifecycle.drained.is_set()
