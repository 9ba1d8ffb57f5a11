"""The benchmark of attacks: which there are, and that a run reports what it saw."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.hostile.attacker import ATTACKS
from bench.hostile.benchmark import SCENARIOS

_ROOT = Path(__file__).parents[2]
_TIMEOUT_S = 100


def test_each_scenario_has_its_attack_and_each_attack_its_scenario() -> None:
    by_others = {name for name, scenario in SCENARIOS.items() if scenario.by != "caller"}
    assert by_others == set(ATTACKS) and by_others | {"wrong-calls"} == set(SCENARIOS)


def test_an_attack_is_an_option_of_hostile_only(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["dial", "--attack", "identify"], ["hostile", "--attack", "nothing"]):
        with pytest.raises(SystemExit) as exit_info:
            main(arguments)
        assert exit_info.value.code == 2
    assert "option of hostile" in capsys.readouterr().err


@pytest.mark.real
@pytest.mark.parametrize(
    "attack",
    ["yamux-resets", "request-flood", "wrong-calls", "forged-copy", "relay-circuits", "relay-reservations"],
)
def test_a_run_says_what_the_bystander_saw(attack: str) -> None:
    command = [sys.executable, "-m", "bench", "hostile", "--attack", attack, "--json", "--tiny"]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    [result] = json.loads(done.stdout.splitlines()[-1])["results"]
    assert result["name"] == f"hostile/{attack}" and result["unit"] == "ms"
    assert result["p50_ms"] <= result["p99_ms"] == result["value"]
    assert result["ratio"] == pytest.approx(result["peer_value"] / result["value"], rel=0.01)
    assert 0 < result["rss_before_mb"] <= result["rss_most_mb"]
    assert 0 <= result["failed"] <= result["asked"] and result["members_up"] <= result["members"]
    attacked = {"frames", "requests", "calls", "forged", "circuits", "circuits_refused", "refused", "too_slow"}
    attacked |= {"reserved", "reservations_refused"}
    assert attacked & set(result) or attack == "forged-copy"
