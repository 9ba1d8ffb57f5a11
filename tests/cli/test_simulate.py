"""``dep2p simulate``: human-readable and machine-readable figures, the same run for the same seed, no heavy library."""

import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dep2p.cli.commands.simulate import AttackName
from dep2p.testing.simulator.attacks import ATTACKS
from dep2p.traces.files import read_events, trace_files

SMALL = ("simulate", "--nodes", "20", "--publishers", "2", "--messages", "6", "--degree", "8")


def test_json_holds_every_figure(cli: Callable[..., Any]) -> None:
    done = cli(*SMALL, "--loss", "0.01", "--seed", "7", "--json")
    assert done.code == 0 and done.err == ""
    found = done.json
    assert found["delivery_ratio"] == 1.0
    assert found["expected_deliveries"] == 6 * 19
    assert found["seed"] == 7 and found["loss"] == 0.01
    for spread in ("latency_ms", "hops", "mesh_degree"):
        assert found[spread]["p50"] <= found[spread]["p99"] <= found[spread]["max"]
    assert found["copies_per_delivery"] > 1
    assert found["events"] > 1_000 and found["performance"]["events_per_s"] > 0
    assert len(found["trace_hash"]) == 32


def test_the_same_seed_prints_the_same_hash(cli: Callable[..., Any]) -> None:
    hashes = [cli(*SMALL, "--seed", seed, "--json").json["trace_hash"] for seed in ("1", "1", "2")]
    assert hashes[0] == hashes[1] != hashes[2]


def test_people_get_a_table(cli: Callable[..., Any]) -> None:
    done = cli(*SMALL, "--attack", "message-spam")
    assert done.code == 0 and done.err == ""
    for word in ("delivered", "100.0000%", "114 of 114", "p99", "hops", "mesh degree", "sybils", "trace hash", "/s"):
        assert word in done.out
    assert "DELIVERED TWICE" not in done.out


def test_parameters_arrive_at_the_router(cli: Callable[..., Any]) -> None:
    plain = cli(*SMALL, "--json").json
    go = cli(*SMALL, "--profile", "go", "--json").json
    small = cli(*SMALL, "--d", "3", "--d-lo", "2", "--d-hi", "4", "--d-score", "2", "--d-out", "1", "--json").json
    flooded = cli(*SMALL, "--flood-publish", "--json").json
    silent = cli(*SMALL, "--d-lazy", "0", "--gossip-factor", "0", "--json").json
    assert go["mesh_degree"]["min"] >= 5
    assert small["mesh_degree"]["max"] <= 5
    assert flooded["copies"] > plain["copies"]
    assert "ihave" in go["rpcs"] and "ihave" not in silent["rpcs"]


def test_faults_and_codecs_can_be_asked_for(cli: Callable[..., Any]) -> None:
    done = cli(
        *SMALL,
        *("--partition", "0.2:1", "--leaves", "1", "--crashes", "1", "--down", "2", "--latency", "lognormal:40:0.5"),
        *("--validation-ms", "5", "--wire", "realm", "--scores", "off", "--settle", "8", "--size", "2000"),
        "--json",
    )
    assert done.code == 0
    assert done.json["rpcs"]["idontwant"] > 0
    assert done.json["delivered_twice"] == 0


def test_a_trace_is_written_and_named(cli: Callable[..., Any], tmp_path: Path) -> None:
    done = cli(*SMALL, "--trace", str(tmp_path / "out"), "--no-trace-rpcs")
    assert done.code == 0 and str(tmp_path / "out") in done.err
    kinds = {event["kind"] for path in trace_files([tmp_path / "out"]) for event in read_events(path)}
    assert {"publish", "deliver", "join", "graft", "node_stop"} <= kinds and "send_rpc" not in kinds
    assert cli(*SMALL, "--trace", str(tmp_path / "again"), "--quiet").err == ""


def test_a_trace_that_cannot_be_written_is_an_error(cli: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = cli(*SMALL, "--trace", str(tmp_path / "file"))
    assert done.code == 1 and "file" in done.err and "D6006" in done.err


def test_require_turns_a_bad_ratio_into_exit_1(cli: Callable[..., Any]) -> None:
    assert cli(*SMALL, "--require", "0.99").code == 0
    lossy = cli(*SMALL, "--require", "0.99", "--loss", "0.9", "--settle", "0")
    assert lossy.code == 1 and "below 0.99" in lossy.err


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--loss", "1"), "loss"),
        (("--latency", "gauss:1"), "fixed:50"),
        (("--partition", "5"), "START:END"),
        (("--d-lo", "9"), "d_lo"),
        (("--rate", "0"), "rate_per_s"),
        (("--attack", "none-such"), "covert-flash"),
        (("--nodes", "1"), "--nodes"),
    ],
)
def test_nonsense_is_a_usage_error_that_says_what_is_wrong(
    cli: Callable[..., Any], arguments: tuple[str, ...], word: str
) -> None:
    done = cli(*SMALL, *arguments)
    assert done.code == 2 and word in done.err and done.out == ""


def test_the_command_knows_every_attack() -> None:
    assert [attack.value for attack in AttackName] == list(ATTACKS)


def test_it_loads_neither_libp2p_nor_trio() -> None:
    code = (
        "import sys; from dep2p.cli import main\n"
        f"code = main.run([*{SMALL!r}, '--json'])\n"
        "heavy = {'trio', 'libp2p', 'anyio', 'asyncio', 'httpx', 'pyspark', 'nacl', 'dep2p.node'} & set(sys.modules)\n"
        "assert not code and not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_on_a_terminal_a_bar_shows_virtual_time_and_is_wiped() -> None:
    master, slave = pty.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "dep2p.cli.main", *SMALL],
            stdout=subprocess.PIPE,
            stderr=slave,
            timeout=60,
            check=True,
        )
        shown = os.read(master, 65_536).decode()
    finally:
        os.close(master)
        os.close(slave)
    assert "simulating  [" in shown and "of 11.2 s" in shown
    assert shown.endswith("\r\x1b[K")
    assert b"simulating" not in done.stdout
