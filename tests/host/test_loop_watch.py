"""The delays of the event loop are measured, counted and logged."""

import time
from typing import Any

import pytest
import trio
import trio.lowlevel

from dep2p.host.counters import Counters
from dep2p.host.loop_watch import BLOCKED_S, LOGGED_S, WINDOW_S, LoopWatch


def test_the_longest_delay_of_the_last_minute_is_reported() -> None:
    watch = LoopWatch(Counters())
    assert watch.delay_max_ms == 0
    for now_s, delay_s in ((0.0, 0.002), (1.0, 0.05), (2.0, 0.01), (30.0, 0.02), (40.0, 0.001)):
        watch.note(now_s, delay_s)
    assert watch.delay_max_ms == 50
    watch.note(1.5 + WINDOW_S, 0.0)
    assert watch.delay_max_ms == 20
    watch.note(35.0 + WINDOW_S, 0.0)
    assert watch.delay_max_ms == 1
    watch.note(200.0, 0.0)
    assert watch.delay_max_ms == 0


def test_a_blocked_loop_is_counted_each_time_and_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    counters = Counters()
    watch = LoopWatch(counters)
    for number in range(100):
        watch.note(number, BLOCKED_S / 2)
        watch.note(number, BLOCKED_S)
        watch.note(number, LOGGED_S)
    assert counters["loop_blocked"] == 200
    assert counters["loop_blocked_ms"] == 100 * 600
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "blocked for 500 ms" in caplog.text


@pytest.mark.real
async def test_a_host_reports_that_its_loop_was_blocked(open_host: Any, eventually: Any) -> None:
    async with open_host() as host:
        await trio.lowlevel.checkpoint()
        await trio.lowlevel.checkpoint()
        time.sleep(0.3)  # noqa: ASYNC251 - the fault that this is about
        await eventually(lambda: host.counters().get("loop_blocked", 0) >= 1)
        assert host.counters()["loop_delay_max_ms"] >= 100
