"""A task that fails by a fault ends alone, and its owner hears of it."""

import logging

import pytest
import trio
import trio.testing

from dep2p.concurrency.contained import run_contained


async def test_one_task_s_fault_leaves_its_neighbours_at_work_and_reaches_its_owner(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    ended: list[str] = []
    errors: list[Exception] = []

    async def fail() -> None:
        raise RuntimeError("a fault")

    async def work() -> None:
        await trio.sleep(1)
        ended.append("work")

    with caplog.at_level(logging.ERROR):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run_contained, fail, "the link of ann", errors.append)
            nursery.start_soon(run_contained, fail, "the link of bob")
            nursery.start_soon(run_contained, work, "the link of eve")
    assert ended == ["work"]
    assert [str(error) for error in errors] == ["a fault"]
    assert "the link of ann failed by an internal error" in caplog.text


async def test_a_cancellation_passes() -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        await run_contained(trio.sleep_forever, "a task")
    assert scope.cancelled_caught
