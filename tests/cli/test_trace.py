"""``dep2p trace``: what needs no Spark."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def traces(cli: Callable[..., Any], tmp_path: Path) -> Path:
    done = cli(
        "simulate",
        "--nodes",
        "6",
        "--publishers",
        "1",
        "--messages",
        "2",
        "--degree",
        "4",
        "--trace",
        str(tmp_path / "t"),
    )
    assert done.code == 0
    return tmp_path / "t"


def test_cat_shows_events_and_json_gives_them_as_they_are(cli: Callable[..., Any], traces: Path) -> None:
    lines = cli("trace", "cat", str(traces), "--kind", "publish").out.splitlines()
    assert len(lines) == 2 and all("publish" in line and "topic=simulation" in line for line in lines)
    events = [json.loads(line) for line in cli("trace", "cat", str(traces), "--json").out.splitlines()]
    assert sum(event["kind"] == "publish" for event in events) == 2
    node = events[0]["node"]
    one = [json.loads(line) for line in cli("trace", "cat", str(traces), "--json", "--node", node).out.splitlines()]
    assert one == [event for event in events if event["node"] == node]


def test_cat_reports_damage_and_of_unknown_kinds(cli: Callable[..., Any], traces: Path) -> None:
    path = next(traces.rglob("*.zst"))
    path.write_bytes(path.read_bytes()[:-3])
    assert "is cut" in cli("trace", "cat", str(path)).err
    wrong = cli("trace", "cat", str(path), "--kind", "telepathy")
    assert wrong.code == 2 and "telepathy" in wrong.err and "publish" in wrong.err
    assert "D7001" in cli("trace", "cat", str(traces / "none")).err


def test_options_of_analyze_that_would_do_nothing_are_refused(cli: Callable[..., Any], traces: Path) -> None:
    for options, word in (
        (("--once",), "--follow"),
        (("--follow", "--silver", "x"), "--silver does not go with --follow"),
        (("--follow", "--remote", "sc://127.0.0.1:1"), "--master"),
        (("--conf", "spark.executor.memory"), "spark.KEY=VALUE"),
        (("--conf", "executor.memory=4g"), "spark.KEY=VALUE"),
        (("--conf", "spark.master=local"), "--master URL"),
    ):
        wrong = cli("trace", "analyze", str(traces), *options)
        assert wrong.code == 2 and word in wrong.err and "D1001" in wrong.err


def test_import_takes_libp2ps_json(cli: Callable[..., Any], tmp_path: Path) -> None:
    line = {"type": 9, "peerID": "ACQ=", "timestamp": 1_700_000_000_000_000_000, "join": {"topic": "news"}}
    (tmp_path / "trace.json").write_text(json.dumps(line) + "\n")
    done = cli("trace", "import", str(tmp_path / "trace.json"), "--out", str(tmp_path / "out"), "--json")
    assert done.json["events"] == 1 and done.json["nodes"] == 1
    (tmp_path / "other").write_text('{"a": 1}\n')
    assert "D7003" in cli("trace", "import", str(tmp_path / "other"), "--out", str(tmp_path / "out")).err


def test_compare_says_what_got_worse(cli: Callable[..., Any], tmp_path: Path) -> None:
    def summary(name: str, reliability: float, p99: float) -> str:
        figures = {
            "schema": 1,
            "topics": [{"topic": "news", "messages": 10, "reliability": reliability, "latency_ms": {"p99": p99}}],
            "queues": [{"namespace": "", "queue": "jobs", "channel": "mail", "finished": 5}],
        }
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_text(json.dumps(figures))
        return str(tmp_path / name)

    before, after = summary("a", 1.0, 100.0), summary("b", 0.99, 80.0)
    text = cli("trace", "compare", before, after).out
    assert "worse" in text and "topics/news/reliability" in text and "-1.0%" in text
    assert "better" in text and "-20.0%" in text
    changes = cli("trace", "compare", before, after, "--json").json["changes"]
    assert [change["verdict"] for change in changes] == ["worse", "better"]
    assert "no figure changed" in cli("trace", "compare", before, before).out
    missing = cli("trace", "compare", before, str(tmp_path))
    assert missing.code == 4 and "summary.json" in missing.err and "D7001" in missing.err


def test_options_that_do_not_go_together(cli: Callable[..., Any], tmp_path: Path) -> None:
    assert cli("trace", "analyze", str(tmp_path), "--once").code == 2
