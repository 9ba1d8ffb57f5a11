"""kill -9 at random moments during publish and consume. DEP2P_CRASH_ROUNDS: how often, 3 in the suite."""

import os
import random
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.services import servers

pytestmark = [pytest.mark.real, pytest.mark.timeout(3_600)]
ROUNDS = int(os.environ.get("DEP2P_CRASH_ROUNDS", "3"))


@pytest.fixture(params=["sqlite", "postgres", "redis"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield str(tmp_path / "queues.sqlite")
        return
    server = servers.postgres() if request.param == "postgres" else servers.redis()
    server.start()
    yield server.url
    server.remove()


def _run(address: str, mode: str, seconds: float, wanted: dict[str, None] | None = None) -> list[str]:
    """What it said until it was killed: after so long, or when it has said all that is wanted."""
    worker = [sys.executable, str(Path(__file__).with_name("crash_worker.py")), address, mode]
    with subprocess.Popen(worker, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as process:
        assert process.stdout is not None
        left = None if wanted is None else dict(wanted)
        until_s, said, rest = None, list[str](), b""
        give_up_s = time.monotonic() + 60 + 3 * ROUNDS
        while time.monotonic() < (until_s or give_up_s) and left != {}:
            if select.select([process.stdout], [], [], 0.01)[0]:
                chunk = os.read(process.stdout.fileno(), 1 << 20)
                assert chunk, f"the worker ended by itself: {process.wait(5)}"
                until_s = until_s or (time.monotonic() + seconds if left is None else None)
                *lines, rest = (rest + chunk).split(b"\n")
                said += [line.decode() for line in lines]
                for line in lines if left is not None else ():
                    left.pop(line.decode(), None)  # type: ignore[union-attr]  # pyright: ignore
        process.kill()
        tail = process.stdout.read()
        *lines, _ = (rest + tail).split(b"\n")
        return said + [line.decode() for line in lines]


def test_nothing_acknowledged_is_lost_and_no_id_is_given_twice(address: str) -> None:
    """nsqio/nsq#1386, #755: kill -9 lost what was queued or in flight."""
    rng = random.Random(5)
    acked: dict[str, None] = {}
    got: dict[str, None] = {}
    for _ in range(ROUNDS):
        for line in _run(address, "both", rng.uniform(0.05, 1.0)):
            what, _, message = line.partition(" ")
            if what == "acked":
                assert message not in acked
                acked[message] = None
            else:
                got[message] = None
    unfinished: dict[str, None] = {
        f"got {each}": None for each in acked if each not in got or int(each.split()[1]) % 3 == 0
    }
    assert acked
    assert unfinished
    came = dict.fromkeys(_run(address, "drain", 60, unfinished))
    lost = [each for each in unfinished if each not in came]
    assert lost == [], f"{len(lost)} of {len(acked)}"
