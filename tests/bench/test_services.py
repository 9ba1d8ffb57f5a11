"""The benchmark of services: each request is answered, also while a worker is killed, and each worker has its share."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_TIMEOUT_S = 100


@pytest.mark.real
def test_no_idempotent_request_fails_when_a_worker_is_killed() -> None:
    command = [sys.executable, "-m", "bench", "services", "--json", "--tiny"]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    results = {result["name"]: result for result in json.loads(done.stdout.splitlines()[-1])["results"]}
    killed = results.pop("services/killed")
    assert killed["failed"] == 0, done.stderr
    assert killed["asked"] >= 64 and killed["p50_ms"] <= killed["p99_ms"]
    assert set(results) == {"services/request/1", "services/request/64", "services/group"}
    for result in results.values():
        assert result["value"] > 0 and result["peer_value"] > 0
        shares = [result[f"worker_{number}_percent"] for number in (1, 2, 3)]
        assert min(shares) >= 0 and 98 <= sum(shares) <= 102, "percents are rounded"
