"""The benchmark command, with processes that measure for milliseconds only: its output, not speed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest

from bench.__main__ import BENCHES, main

_ROOT = Path(__file__).parents[2]
_TIMEOUT_S = 100

NAMES = {
    "request": {"request/1", "request/1/tcp", "request/64"},
    "local": {"local/request/1", "local/request/64", "local/notify", "local/publish"},
    "notify": {"notify"},
    "stream": {"stream"},
    "dial": {"dial", "dial/request"},
    "memory": {"memory/idle", "memory/peer"},
    "ordered": {"ordered/p2p", "ordered/handover"},
    "simulator": {"simulator/1000", "simulator/10000"},
    "trace": {"trace/event", "trace/event/all", "trace/bytes", "trace/overhead", "trace/overhead/cpu"}
    | {"trace/overhead/rpcs", "trace/overhead/rpcs/cpu"},
}


def run_bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench", *arguments]
    return subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)


@pytest.mark.real
@pytest.mark.parametrize("name", list(NAMES))
def test_the_last_line_is_the_object_of_the_contract(name: str) -> None:
    done = run_bench(name, "--json", "--tiny")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert set(report) == {"bench", "environment", "results"}
    assert report["bench"] == name
    assert {"cpu", "cores", "python", "commit", "packages", "other_processes_cores"} == set(report["environment"])
    assert {result["name"] for result in report["results"]} == NAMES[name]
    for result in cast("list[dict[str, object]]", report["results"]):
        assert {"name", "value", "unit", "peer", "peer_value", "ratio"} <= set(result)
        assert {"p50_ms", "p99_ms", "cpu_us", "fsyncs"} >= set(result) - {
            "name",
            "value",
            "unit",
            "peer",
            "peer_value",
            "ratio",
        }
        for key in ("value", "peer_value", "ratio"):
            # Two peers can fit in memory that the process had already, and a tiny run into one tick of its CPU time.
            assert isinstance(result[key], float)
            may_be_nothing = result["name"] == "memory/peer" or cast("str", result["name"]).endswith("/cpu")
            assert cast("float", result[key]) > 0 or (may_be_nothing and not result[key])


@pytest.mark.real
def test_a_side_that_cannot_run_is_an_error_with_its_reason() -> None:
    done = run_bench("notify", "--json", "--tiny", "--ours", "nothing")
    assert done.returncode == 1
    assert "no side 'nothing'" in done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["results"] == []


def test_list_names_every_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(BENCHES)


def test_an_unknown_benchmark_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["nothing"])
    assert exit_info.value.code == 2
    assert "invalid choice" in capsys.readouterr().err


@pytest.mark.real
def test_a_crash_run_counts_what_was_promised() -> None:
    done = run_bench("crash", "--store", "sqlite", "--rounds", "2", "--json", "--tiny")
    assert done.returncode == 0, done.stderr
    [result] = json.loads(done.stdout.splitlines()[-1])["results"]
    assert (result["name"], result["rounds"], result["lost"], result["ids_given_twice"]) == (
        "queue/crash/sqlite",
        2,
        0,
        0,
    )
    assert result["value"] == result["peer_value"] > result["done"] > 0
    assert result["in_flight_back"] > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["crash", "--store", "memory"], "invalid choice"),
        (["crash", "--rounds", "0"], "at least 1"),
        (["queue", "--store", "sqlite"], "options of crash"),
        (["dial", "--rounds", "3"], "options of crash"),
    ],
)
def test_options_of_a_crash_run_are_checked(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2
    assert said in capsys.readouterr().err
