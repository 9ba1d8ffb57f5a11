"""Order by key over real processes, which are killed and paused. The whole size: ``python -m bench.ordering.crash``."""

from dataclasses import replace
from pathlib import Path

import pytest

from bench.harness.order_log import Order, OrderLog
from bench.harness.servers import NotInstalledError
from bench.ordering.crash import run
from bench.ordering.failover import run as run_failovers
from bench.ordering.options import OrderRun
from tests.services.servers import missing

pytestmark = [pytest.mark.real, pytest.mark.timeout(1_200)]


SMALL = OrderRun(
    keys=60,
    per_key=50,
    consumers=3,
    expand_to=4,
    pause_s=10.0,
    host_away_s=3.0,
    settle_s=1.0,
    timeout_s=900.0,
    options='{"order": "strict", "lease_s": 6.0}',
)


def test_every_key_keeps_its_order_whatever_happens_to_its_consumers() -> None:
    report = run(SMALL)
    assert report["out_of_order"] == []
    assert report["is_complete"], report
    assert len(report["events"]) == 4, report["events"]


@pytest.mark.parametrize("check_s", [0.2, 2.0])
def test_every_key_keeps_its_order_over_partitions_on_two_nodes_of_which_one_is_killed(check_s: float) -> None:
    """Everything happens, also when this process is slow to look how far the others are."""
    report = run(replace(SMALL, nodes=2, check_s=check_s))
    assert report["out_of_order"] == [], report
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
    path, order = tmp_path / "log", Order(keys=2, per_key=1)
    path.write_bytes(b"0 0 3\n1 ")
    log = OrderLog(path, order)
    log.read()
    assert order.handled == 1
    with path.open("ab") as more:
        more.write(b"0 6\n")
    log.read()
    log.close()
    assert (order.handled, dict(order.by_process)) == (2, {3: 1, 6: 1})


def test_every_key_keeps_its_order_while_two_brokers_take_over_from_each_other() -> None:
    """One is killed with -9; the next one is stopped for longer than its lease, and wakes up replaced."""
    try:
        report = run_failovers(replace(SMALL, failovers=2, stop_s=20.0, keys=40, per_key=60, consumers=2))
    except NotInstalledError as error:
        missing(str(error))
    assert report["out_of_order"] == []
    assert report["is_complete"], report
    assert (report["term"], report["left_in_the_queue"]) == (3, 0), report
    assert [each["what"] for each in report["events"]][-1] == "let it go on; it is on standby"
