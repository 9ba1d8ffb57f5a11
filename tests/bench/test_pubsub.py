"""The pub/sub benchmark: that what is lost or comes twice fails it, and that its command ends with its results."""

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import pytest
import trio
from trio.testing import MockClock

from bench.harness.processes import Worker, WorkerError
from bench.pubsub import benchmark as pubsub
from bench.sides.pubsub import Received, make_message

_ROOT = Path(__file__).parents[2]
_TIMEOUT_S = 120
_HAS_JS = shutil.which("node") is not None and (_ROOT / "tests" / "interop" / "node_modules" / "libp2p").is_dir()


class Answering:
    """A worker whose answers are known."""

    label = "a side"

    def __init__(self, answers: Mapping[str, dict[str, float]]) -> None:
        self._answers = answers

    async def call(self, command: str, **_arguments: object) -> dict[str, float]:
        await trio.lowlevel.checkpoint()
        return self._answers.get(command, {})


def group_that_received(count: int, again: int = 0) -> pubsub.Group:
    arrived = {"count": float(count), "again": float(again), "last_at_s": 12.0, "p50_ms": 1.0, "p99_ms": 2.0}
    workers = [Answering({"reach": arrived}), Answering({"publish": {"began_s": 10.0}})]
    return pubsub.Group(cast("Sequence[Worker]", workers), [1], 100.0)


async def test_the_rate_counts_until_the_last_delivery() -> None:
    flight = await pubsub.fly(group_that_received(100), 100)
    assert (flight.published, flight.elapsed_s, flight.lost) == (100, 2.0, 0.0)


@pytest.mark.parametrize(("count", "again"), [(99, 0), (100, 1), (0, 0)])
async def test_a_message_of_ours_that_is_lost_or_comes_twice_fails_the_run(count: int, again: int) -> None:
    with pytest.raises(WorkerError, match="of 100 deliveries"):
        await pubsub.fly(group_that_received(count, again), 100)


@pytest.mark.parametrize(("count", "lost"), [(100, 0), (101, 0), (10, 90), (0, 100)])
async def test_the_loss_of_a_peer_is_reported_and_fails_nothing(count: int, lost: int) -> None:
    group = group_that_received(count)
    group.may_lose = True
    flight = await pubsub.fly(group, 100)
    assert flight.lost == pytest.approx(lost / 100)
    assert flight.elapsed_s > 0
    assert (group.due, group.lost) == (100, lost)


async def test_a_subscriber_counts_each_message_once(autojump_clock: MockClock) -> None:
    received = Received()
    first, second = make_message(1, 0, 64), make_message(2, 0, 64)
    for message in (first, first, second):
        received.add(message)
    assert (len(received), received.again, len(received.ages_s)) == (2, 1, 2)
    assert len(first) == 64
    received.reset()
    assert (len(received), received.again) == (0, 0)


async def test_a_subscriber_waits_while_messages_come_and_no_longer(autojump_clock: MockClock) -> None:
    received = Received()

    async def send_three() -> None:
        for number in range(3):
            await trio.sleep(0.9)
            received.add(make_message(1, number, 64))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send_three)
        await received.reach(3, quiet_s=1.0)
        assert len(received) == 3
        assert trio.current_time() == pytest.approx(2.7)
        await received.reach(4, quiet_s=1.0)
        assert trio.current_time() == pytest.approx(3.7)


async def test_without_node_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_nothing(_name: str, path: str | None = None) -> None:
        return None

    monkeypatch.setattr(shutil, "which", find_nothing)
    with pytest.raises(WorkerError, match=r"tests/interop/install\.sh"):
        pubsub.js_command()


@pytest.mark.real
@pytest.mark.skipif(not _HAS_JS, reason="needs Node and the packages of tests/interop/install.sh")
def test_the_last_line_is_the_object_of_the_contract() -> None:
    command = [sys.executable, "-m", "bench", "pubsub", "--json", "--tiny"]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["bench"] == "pubsub"
    results = {result["name"]: result for result in report["results"]}
    assert list(results) == [
        "pubsub/2",
        "pubsub/2/libp2p",
        "pubsub/2/py",
        "pubsub/burst",
        "pubsub/burst/py",
        "pubsub/10",
        "pubsub/burst/10",
        "pubsub/slow",
    ]
    for name, result in results.items():
        assert result["value"] > 0
        assert ("p50_ms" in result) is not name.startswith("pubsub/burst")
    assert results["pubsub/burst/py"]["peer"].endswith(" lost")
