"""Following growing directories: exactly once, whatever is killed. DEP2P_SPARK_KILLS says how often (2)."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dep2p.spark_analytics.follow import FollowOptions, batch_place, committed, follow
from dep2p.spark_analytics.ingest.silver import raw_files, write_silver
from dep2p.spark_analytics.job import ReportOptions, run
from dep2p.testing import Scenario, simulate
from dep2p.traces.files import trace_files

KILLS = int(os.environ.get("DEP2P_SPARK_KILLS", "2"))
_WAIT_S = 180.0


def figures_of(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return found


def test_following_gives_what_the_batch_gives_and_goes_on_where_it_was(spark: Any, tmp_path: Path) -> None:
    simulate(Scenario(nodes=12, publishers=2, messages=10, degree=6, loss=0.02), trace_dir=tmp_path / "traces")
    files = trace_files([tmp_path / "traces"])
    growing = tmp_path / "growing"
    growing.mkdir()
    seen: list[int] = []
    for part in (files[:5], files[5:]):
        for path in part:
            shutil.copy(path, growing / path.name)
        made = follow(
            *(spark, [str(growing)], tmp_path / "out"),
            ReportOptions(title="t"),
            FollowOptions(once=True, files_per_batch=2),
        )
        assert made is not None
        seen.append(made.figures["nodes"])
    assert seen == [5, 12]
    batch = run(spark, [str(growing)], tmp_path / "batch")
    assert figures_of(tmp_path / "out") == figures_of(batch.out)


@pytest.mark.real
@pytest.mark.timeout(60 + 120 * (KILLS + 2))
def test_killed_in_the_middle_nothing_is_twice_or_missing(spark: Any, tmp_path: Path) -> None:
    scenario = Scenario(nodes=40 + 4 * KILLS, publishers=4, messages=20, degree=8, loss=0.02)
    simulate(scenario, trace_dir=tmp_path / "traces")
    out = tmp_path / "out"
    for number in range(KILLS):
        child = _start(tmp_path / "traces", out)
        _wait_for_more(out, len(committed(out)), child)
        # Some time after a commit: sometimes within the writing of a batch, sometimes between two.
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(0.05 * (number % 7))
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    assert _start(tmp_path / "traces", out).wait(_WAIT_S) == 0
    write_silver(raw_files(spark, [str(tmp_path / "traces")]), str(tmp_path / "silver"))
    places = [batch_place(out, number) for number in committed(out)]
    ours = spark.read.option("basePath", str(out / "silver")).parquet(*places)
    truth = spark.read.parquet(str(tmp_path / "silver"))
    columns = [name for name in truth.columns if name not in ("scores", "depths", "rtts", "peers")]
    ours, truth = ours.select(columns), truth.select(columns)
    assert ours.count() == truth.count() > 0
    assert ours.exceptAll(truth).count() == 0
    # Readers that know no checkpoint see each row once, too: a batch that was cut off is overwritten under its number.
    assert spark.read.parquet(str(out / "silver")).count() == truth.count()
    batch = run(spark, [str(tmp_path / "traces")], tmp_path / "batch")
    assert figures_of(out) == figures_of(batch.out)


def _start(traces: Path, out: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "dep2p.spark_analytics", str(traces), "--out", str(out), "--follow", "--once"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYSPARK_")}
    return subprocess.Popen(
        [*command, "--files-per-batch", "3", "--master", "local[2]", "--memory", "1g"],
        start_new_session=True,  # so that the JVM is killed with it
        env=environ,
        stderr=subprocess.DEVNULL,
    )


def _wait_for_more(out: Path, already: int, child: "subprocess.Popen[bytes]") -> None:
    end = time.monotonic() + _WAIT_S
    while len(committed(out)) <= already:
        assert child.poll() is None, "it ended before it could be killed: more files are needed"
        assert time.monotonic() < end
        try:
            child.wait(0.02)
        except subprocess.TimeoutExpired:
            continue
