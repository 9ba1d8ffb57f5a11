"""The garbage collector of the daemon."""

import gc

import pytest
import trio
import trio.testing

from dep2p.daemon.gc import STEP_S, SURVIVORS_STEPS, collect_in_steps


async def test_young_objects_are_looked_through_in_steps_and_their_survivors_once_a_minute(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    generations: list[int] = []
    monkeypatch.setattr(gc, "collect", generations.append)
    with trio.move_on_after(2.5 * SURVIVORS_STEPS * STEP_S):
        await collect_in_steps()
    assert generations.count(1) == 2
    assert generations.index(1) == SURVIVORS_STEPS - 1
    assert set(generations) == {0, 1}
    assert len(generations) == pytest.approx(2.5 * SURVIVORS_STEPS, abs=2)
