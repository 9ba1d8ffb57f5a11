"""Where things come from and go to: strange names, and places that hold what is somebody else's."""

import json
from pathlib import Path
from typing import Any

import pytest

from dep2p.spark_analytics.follow import (
    CHECKPOINT,
    SILVER,
    FollowOptions,
    batch_place,
    committed,
    follow,
    report_committed,
)
from dep2p.spark_analytics.ingest.silver import pattern_of, raw_files, write_silver
from dep2p.spark_analytics.job import InputError, ReportOptions, check_out, run
from dep2p.testing import Scenario, simulate

STRANGE = "a b ü 日本 100%25 [x] {a,b} *? #&'\\"


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("places") / STRANGE
    simulate(Scenario(nodes=6, publishers=1, messages=4, degree=4), trace_dir=base / "traces")
    return base / "traces"


def _follow(spark: Any, traces: Path, out: Path) -> Any:
    return follow(spark, [str(traces)], out, ReportOptions(title="t"), FollowOptions(once=True))


def test_names_are_taken_as_they_are_and_a_report_leaves_a_streams_silver_alone(
    spark: Any, traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Hadoop can do names with colons, and names that look like patterns, but not both in one path.
    monkeypatch.chdir(tmp_path)
    out = Path("c:d/ü 100%25 #&'")
    followed = _follow(spark, traces, out)
    assert followed is not None and followed.figures["nodes"] == 6
    made = run(spark, [str(traces)], out)
    assert made.figures == followed.figures
    assert json.loads((out / "summary.json").read_text())["nodes"] == 6
    assert committed(out) and all(Path(batch_place(out, number)).is_dir() for number in committed(out))


def test_what_is_no_silver_is_not_written_over(spark: Any, traces: Path, tmp_path: Path) -> None:
    for place in (tmp_path / "theirs", tmp_path / "deep/in"):
        place.mkdir(parents=True)
        (place / "notes.txt").write_text("precious")
    (tmp_path / "file").write_text("precious")
    files = raw_files(spark, [str(traces)])
    for name in ("theirs", "deep", "file"):
        with pytest.raises(FileExistsError, match=rf"{name}.*silver"):
            write_silver(files, str(tmp_path / name))
    for name in ("theirs", "deep"):
        with pytest.raises(FileExistsError, match=rf"{name}.*silver.*notes.txt"):
            write_silver(files, (tmp_path / name).as_uri())
    assert len(list(tmp_path.rglob("*"))) == 6, "all is there, and nothing else"


def test_silver_that_a_stream_made_and_that_is_gone_is_said(tmp_path: Path) -> None:
    commits = tmp_path / CHECKPOINT / "commits"
    commits.mkdir(parents=True)
    for number in range(2):
        (commits / str(number)).touch()
    (tmp_path / SILVER / "batch=0").mkdir(parents=True)
    assert committed(tmp_path) == [0, 1]
    with pytest.raises(InputError, match=r"batch=1 is gone.*remove .*checkpoint and .*silver to read"):
        report_committed(None, tmp_path, ReportOptions(title="t"))
    assert Path(batch_place(tmp_path, 0)).is_dir()


def test_a_report_goes_to_a_directory_of_this_machine() -> None:
    for url in ("s3a://bucket/report", "file:///tmp/report", "hdfs://x/y"):
        with pytest.raises(InputError, match="a directory of this machine"):
            check_out(Path(url))
    for path in ("report", "/tmp/a:b", "c:d/e"):
        check_out(Path(path))


def test_patterns_are_for_urls_only() -> None:
    assert pattern_of("s3a://bucket/date=2026-*/{a,b}") == "s3a://bucket/date=2026-*/{a,b}"
    assert pattern_of("/a/[x]*") == r"file:/a/\[x\]\*"
