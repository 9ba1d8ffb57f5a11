"""Damaged, doubled, foreign and strange input: a finding that names it, and the rest is analysed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from dep2p.spark_analytics.findings.model import Finding
from dep2p.spark_analytics.job import COMPACTED, InputError, JobResult, ReportOptions, check_places, run
from dep2p.spark_analytics.metrics.analysis import AnalysisOptions
from dep2p.spark_analytics.report.page import listed
from dep2p.testing import Scenario, simulate
from dep2p.traces import schema
from dep2p.traces.files import FileName, parse_file_name, read_events, scan_frames, trace_files
from dep2p.traces.schema import SCHEMA_VERSION as V
from tests.spark.app_trace import START_US, write_node


def test_no_input_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such trace file or directory"):
        check_places([str(tmp_path / "none")])
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/notes.txt").write_text("no trace")
    with pytest.raises(InputError, match=r"no trace files \(\*\.ndjson\.zst\) in .*empty"):
        check_places([str(tmp_path / "empty")])
    (tmp_path / "empty/a-1-0.ndjson.zst").touch()
    with pytest.raises(InputError, match="all 1 trace files are empty"):
        check_places([str(tmp_path / "empty")])


def test_only_foreign_lines_are_an_error_that_names_a_file(spark: Any, tmp_path: Path) -> None:
    _pack(tmp_path / "in/a-1-0.ndjson.zst", ['{"hello": 1}', "no json at all"])
    with pytest.raises(InputError, match=r"no event that can be read.*a-1-0"):
        run(spark, [str(tmp_path / "in")], tmp_path / "out")


def _pack(path: Path, lines: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(zstandard.compress(("\n".join(lines) + "\n").encode()))


def _shift(path: Path, shift_us: int) -> None:
    """The same file from a node whose clock is ahead."""
    name = parse_file_name(path.name)
    assert name is not None
    lines = [json.dumps({**event, "t": event["t"] + shift_us}) for event in read_events(path)]
    _pack(path.with_name(str(FileName(name.node, name.start_ns + shift_us * 1000, name.number))), lines)
    path.unlink()


class Hurt:
    """A simulated trace and what was done to it."""

    def __init__(self, base: Path) -> None:
        scenario = Scenario(nodes=16, publishers=3, messages=60, degree=7, seed=4, settle_s=8.0)
        simulate(scenario, trace_dir=base / "whole")
        self.whole = base / "whole"
        self.hurt = base / "hurt"
        shutil.copytree(self.whole, self.hurt)
        files = trace_files([self.hurt])
        nodes = [name.node for path in files if (name := parse_file_name(path.name)) is not None]
        events = {node: list(read_events(path)) for node, path in zip(nodes, files, strict=True)}
        # a copy of a file elsewhere, and a cut copy
        (self.hurt / "backup").mkdir()
        shutil.copy(files[0], self.hurt / "backup" / files[0].name)
        (self.hurt / "backup2").mkdir()
        (self.hurt / "backup2" / files[0].name).write_bytes(files[0].read_bytes()[:-400])
        # cut within its last frame
        self.cut = files[1]
        with self.cut.open("rb") as file:
            frames = scan_frames(file)
        self.cut.write_bytes(self.cut.read_bytes()[: frames.whole[-1][1] - 5])
        # an hour ahead
        self.ahead = nodes[2]
        _shift(files[2], 3_600_000_000)
        # foreign fields, a later schema, unknown kinds, lines that are no JSON: in one node's file
        self.odd = files[3]
        lines = [json.dumps({**event, "colour": "red", "v": 9}) for event in events[nodes[3]]]
        lines[5:5] = ["this is no JSON", '{"kind": "telepathy", "node": "x", "t": 5, "v": 9}', '{"kind": "join"}']
        _pack(self.odd, lines)
        # events out of order within a file
        shuffled = [json.dumps(event) for event in reversed(events[nodes[4]])]
        _pack(files[4], shuffled)
        # no trace file at all, with the right ending; a hidden one
        (self.hurt / "garbage-1-0.ndjson.zst").write_bytes(b"\x00\x01garbage" * 40)
        (self.hurt / ".open-1-0.ndjson.zst").write_bytes(b"\x28\xb5\x2f\xfd")
        # killed twenty seconds before the end, and stopped for a while: two nodes of their own
        ping: Callable[[str, int], schema.TraceEvent] = lambda node, t: schema.RttsEvent(V, node, 0, START_US + t, [])  # noqa: E731
        self.silent = write_node(
            self.hurt, "sleeper", [ping("sleeper", t * 500_000) for t in range(60) if not 20 <= t < 46]
        )
        killed = write_node(self.hurt, "victim", [ping("victim", t * 500_000) for t in range(16)])
        _pack(killed, [json.dumps(event) for event in read_events(killed)][:-1])


@pytest.fixture(scope="module")
def hurt(tmp_path_factory: pytest.TempPathFactory) -> Hurt:
    return Hurt(tmp_path_factory.mktemp("hurt"))


@pytest.fixture(scope="module")
def result(hurt: Hurt, spark: Any) -> JobResult:
    return run(spark, [str(hurt.hurt)], hurt.hurt.parent / "out", options=ReportOptions(AnalysisOptions(settle_s=1.0)))


@pytest.fixture(scope="module")
def untouched(hurt: Hurt, spark: Any) -> JobResult:
    return run(
        spark, [str(hurt.whole)], hurt.hurt.parent / "out-whole", options=ReportOptions(AnalysisOptions(settle_s=1.0))
    )


def of(result: JobResult, kind: str) -> list[Finding]:
    return [item for item in result.findings if item.kind == kind]


def result_tables(result: JobResult, name: str) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = pq.read_table(result.out / "tables" / f"{name}.parquet").to_pylist()
    return rows


def test_a_file_twice_is_counted_once(hurt: Hurt, result: JobResult) -> None:
    found = of(result, "duplicate-file")
    assert sorted("backup2" in item.text for item in found) == [False, True]


def test_a_cut_file_is_named_and_its_whole_frames_are_counted(hurt: Hurt, result: JobResult) -> None:
    cut = of(result, "cut")
    assert any(str(hurt.cut) in item.text for item in cut)
    name = parse_file_name(hurt.cut.name)
    assert name is not None
    runs = result_tables(result, "runs")
    (events,) = (row["events"] for row in runs if row["node"] == name.node)
    assert events == sum(1 for _ in read_events(hurt.cut)) > 500


def test_a_clock_an_hour_ahead_is_found_and_corrected(hurt: Hurt, result: JobResult, untouched: JobResult) -> None:
    (clock,) = of(result, "clock")
    assert clock.subject == hurt.ahead
    ahead_us = clock.evidence["ahead_us"]
    assert isinstance(ahead_us, int) and abs(ahead_us - 3_600_000_000) < 100_000
    before = untouched.figures["topics"][0]["latency_ms"]
    after = result.figures["topics"][0]["latency_ms"]
    assert after is not None and before is not None
    assert after["max"] < before["max"] + 200, "an hour would be 3,600,000 ms"
    assert abs(after["p50"] - before["p50"]) < 40


def test_strange_lines_kinds_fields_and_versions_are_named(hurt: Hurt, result: JobResult) -> None:
    bad = {item.text.partition(": ")[2]: item for item in of(result, "bad-lines") if hurt.odd.name in item.subject}
    assert bad["no JSON"].evidence["example"] == "this is no JSON"
    assert "unknown kind telepathy" in bad
    assert "no event: node or t is missing" in bad
    assert any(str(hurt.odd) in item.text and "colour" in item.text for item in of(result, "foreign-columns"))
    assert of(result, "newer-schema")[0].evidence["versions"] == [1, 9]


def test_garbage_is_named(result: JobResult) -> None:
    assert any("garbage-1-0" in item.text for item in of(result, "cut"))


def test_the_rest_is_analysed(result: JobResult, untouched: JobResult) -> None:
    hurt, whole = result.figures["topics"][0], untouched.figures["topics"][0]
    assert hurt["messages"] == whole["messages"] == 60
    assert 0.8 * whole["deliveries"] < hurt["deliveries"] <= whole["deliveries"]


def test_who_was_killed_and_who_was_silent_is_said_with_the_times(result: JobResult) -> None:
    killed = {item.subject: item for item in of(result, "killed")}
    assert killed["victim"].at_us == START_US + 7_500_000
    silent = {item.subject: item for item in of(result, "silent")}
    assert silent["sleeper"].at_us == START_US + 9_500_000
    assert silent["sleeper"].evidence["silent_s"] == pytest.approx(13.5)
    assert "sleeper" not in killed


def test_the_report_stands_alone(result: JobResult) -> None:
    page = result.report.read_text()
    for word in ("http://", "https://", "<script", "src="):
        assert word not in page
    assert page.count("<svg") >= 10 and len(page) < 2_000_000
    written = json.loads((result.out / "summary.json").read_text())
    assert written["topics"][0]["messages"] == 60
    findings = json.loads((result.out / "findings.json").read_text())
    assert {item["kind"] for item in findings} >= {"cut", "clock", "silent"}
    assert not (result.out / COMPACTED).exists()


def test_of_many_findings_of_a_kind_most_are_behind_a_click() -> None:
    many = [Finding("bad", "lossy", f"node {number} <b>") for number in range(30)]
    shown = listed([*many, Finding("look", "slow", "another")])
    open_, closed = shown.split("<details>")
    assert "node 3 &lt;b&gt;" in open_ and "another" in open_ and "node 4" not in open_
    assert "26 more: lossy" in closed and "node 29" in closed and "<details>" not in listed(many[:4])


def test_names_in_traces_cannot_inject_into_the_page(spark: Any, tmp_path: Path) -> None:
    name = '<img src=x onerror=alert(1)>"'
    write_node(
        tmp_path / "in",
        "node",
        [
            schema.JoinEvent(V, "node", 0, START_US, name),
            schema.PublishEvent(V, "node", 0, START_US + 5, b"m", name),
            schema.DeliverEvent(V, "node", 0, START_US + 5, b"m", name),
            schema.DeliverEvent(V, "node", 0, START_US + 50, b"n", name, "peer"),
        ],
    )
    page = run(spark, [str(tmp_path / "in")], tmp_path / "out").report.read_text()
    assert "<img" not in page and "&lt;img" in page


def test_many_topics_of_which_one_has_nearly_all(spark: Any, tmp_path: Path) -> None:
    events: list[schema.TraceEvent] = []
    for number in range(3_000):
        topic = "big" if number % 10 else f"topic-{number}"
        events.append(schema.JoinEvent(V, "a", 0, START_US, topic))
        events.append(schema.PublishEvent(V, "a", 0, START_US + number, b"%d" % number, topic))
    deliveries: list[schema.TraceEvent] = [
        schema.DeliverEvent(V, "b", 0, START_US + 100 + n, b"%d" % n, "big" if n % 10 else f"topic-{n}", "a")
        for n in range(3_000)
    ]
    write_node(tmp_path / "in", "a", events)
    write_node(tmp_path / "in", "b", deliveries, start_us=START_US)
    result = run(spark, [str(tmp_path / "in")], tmp_path / "out")
    assert len(result.figures["topics"]) == 301
    assert result.figures["topics"][0]["topic"] == "big"
    assert result.figures["topics"][0]["deliveries"] == 2_700
    assert len(result.report.read_text()) < 500_000
