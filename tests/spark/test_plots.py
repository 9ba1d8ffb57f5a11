"""Axes of the report's plots. Needs no Spark."""

import re
from datetime import UTC, datetime
from itertools import pairwise

import pytest

from dep2p.spark_analytics.report.svg import Axes, Series, TimeAxis, plot

_BASE_S = datetime(2026, 1, 31, 23, 58, 47, 300_000, UTC).timestamp()


@pytest.mark.parametrize("span_s", [0.004, 0.5, 3, 20, 100, 635, 3_600, 9_000, 80_000, 700_000, 9_000_000])
def test_times_of_day_are_marked_at_round_times(span_s: float) -> None:
    clock = TimeAxis(_BASE_S)
    ticks = clock.ticks(0.0, span_s)
    assert 1 <= len(ticks) <= 7
    if len(ticks) > 1:
        steps = {round(b - a, 3) for a, b in pairwise(ticks)}
        assert len(steps) == 1
        (step,) = steps
        at = _BASE_S + ticks[0]
        assert 0 <= ticks[0] and ticks[-1] <= span_s + 1e-6 and abs(at / step - round(at / step)) < 1e-3


def test_a_plot_over_time_shows_them() -> None:
    shown = plot([Series("a", [(0.0, 1.0), (635.0, 2.0)])], Axes(x_text=TimeAxis(_BASE_S)))
    assert re.findall(r">(\d\d:\d\d:\d\d)<", shown) == ["00:00:00", "00:02:00", "00:04:00", "00:06:00", "00:08:00"]
    assert TimeAxis(_BASE_S, with_days=True)(75.0) == "01. 00:00"
