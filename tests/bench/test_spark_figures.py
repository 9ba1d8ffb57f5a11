"""The figures that the Spark benchmark computes from its measurements."""

import subprocess
import sys
import time

from bench.harness.environment import FamilyMeter
from bench.harness.report import Result, Sample
from bench.spark.benchmark import with_marginal

_UNSEEN = """
import os, signal, sys, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # as PySpark's daemon does
if os.fork() == 0:
    while time.process_time() < 0.4:
        pass
    print("used", flush=True)
    sys.stdin.read()
    os._exit(0)
sys.stdin.read()
"""


def test_the_time_of_a_process_that_no_one_waits_for_counts() -> None:
    meter = FamilyMeter()
    child = subprocess.Popen([sys.executable, "-c", _UNSEEN], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdin is not None
    assert child.stdout.readline() == b"used\n"
    meter.look()
    child.stdin.close()
    child.wait()
    child.stdout.close()
    meter.look()
    assert meter.used_s >= 0.35
    begun, before = time.process_time(), meter.used_s
    while time.process_time() < begun + 0.1:
        pass
    meter.look()
    assert meter.used_s == before, "what this process uses itself does not count"


def test_the_cost_of_an_event_more_is_the_slope_between_two_sizes() -> None:
    def of(events: int, ours_us: float, theirs_us: float) -> Result:
        ours, theirs = [Sample(ours_us / events)], [Sample(theirs_us / events)]
        return Result(f"spark/flat/{events}", "us", "peer", ours, theirs, {"events": events})

    found = with_marginal([of(50_000_000, 55e6, 25e6), of(1_000_000, 6e6, 0.5e6), of(10_000_000, 15e6, 5e6)])
    assert [result.name for result in found] == [
        *("spark/flat/1000000", "spark/marginal/1-10", "spark/flat/10000000", "spark/marginal/10-50"),
        "spark/flat/50000000",
    ]
    slopes = [(round(found[at].value, 6), round(found[at].peer_value, 6)) for at in (1, 3)]
    assert slopes == [(1.0, 0.5), (1.0, 0.5)]
    assert with_marginal([]) == []
