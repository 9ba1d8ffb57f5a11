"""Order by key over real processes, which are killed and paused. The whole size: ``python -m bench.order_crash``."""

import argparse
from pathlib import Path

import pytest

from bench.order_crash import Lines, Order, run

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]


def _arguments(**more: object) -> argparse.Namespace:
    wanted: dict[str, object] = {
        "keys": 60,
        "per_key": 50,
        "consumers": 3,
        "partitions": 2,
        "expand_to": 4,
        "pause_s": 10.0,
        "kill": 1,
        "nodes": 0,
        "host_away_s": 3.0,
        "settle_s": 1.0,
        "timeout_s": 240.0,
        "options": '{"order": "strict", "lease_s": 6.0}',
    }
    return argparse.Namespace(**(wanted | more))


def test_every_key_keeps_its_order_whatever_happens_to_its_consumers() -> None:
    report = run(_arguments())
    assert report["out_of_order"] == []
    assert report["is_complete"], report
    assert len(report["events"]) == 4, report["events"]


def test_every_key_keeps_its_order_over_partitions_on_two_nodes_of_which_one_is_killed() -> None:
    report = run(_arguments(nodes=2))
    assert report["out_of_order"] == []
    assert report["is_complete"], report
    assert len(report["events"]) == 6, report["events"]


def test_the_count_itself_notices_what_it_is_for() -> None:
    order = Order(keys=1, per_key=3)
    for line in ("0 0 7", "0 1 7", "0 1 8"):
        order.take(line)
    assert (order.handled, order.repeats, order.wrong) == (2, 1, [])
    order.take("0 0 9")
    assert len(order.wrong) == 1
    order.take("0 2 9")
    assert order.is_complete
    order.take("0 4 9")
    assert len(order.wrong) == 2


def test_a_line_that_was_read_in_part_is_read_as_a_whole(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"1 2 3\n4 5")
    lines = Lines(log)
    assert lines.take() == ["1 2 3"]
    with log.open("ab") as more:
        more.write(b" 6\n")
    assert lines.take() == ["4 5 6"]
    lines.close()
