"""Unchanged NSQ clients on a real daemon: pynsq from PyPI and nsqjs from npm (tests/interop/nsq/install.sh)."""

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.interop.nsq_clients import COMMANDS, FOLDER, INSTALLED, NsqDaemon, NsqProcess

pytestmark = [pytest.mark.interop, pytest.mark.xdist_group("nsq")]

Client = Callable[..., NsqProcess]
GUIDE = Path(__file__).parents[2] / "docs" / "howto" / "nsq-clients.md"


@pytest.fixture(params=["pynsq", "nsqjs"])
def kind(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    if not INSTALLED[name].exists():
        message = f"{name} is not installed: run tests/interop/nsq/install.sh"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return name


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[NsqDaemon]:
    made = NsqDaemon(tmp_path / "d")
    yield made
    made.close()


@pytest.fixture
def client(kind: str, daemon: NsqDaemon) -> Iterator[Client]:
    made: list[NsqProcess] = []

    def make(**options: object) -> NsqProcess:
        made.append(NsqProcess(kind, daemon.address, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def reader(client: Client, max_in_flight: int = 1, **options: object) -> NsqProcess:
    return client(topic="t", channel="c", max_in_flight=max_in_flight, **options)


def test_publish_subscribe_finish(client: Client, daemon: NsqDaemon) -> None:
    writer, taker = client(), reader(client, 10)
    assert writer.publish("t", "one") is None
    assert writer.publish("t", "two", "three") is None
    messages = [taker.message() for _ in range(3)]
    assert [(each["body"], each["attempts"]) for each in messages] == [("one", 1), ("two", 1), ("three", 1)]
    daemon.wait_stats("t", "c", in_flight_count=3)
    for each in messages:
        taker.do("finish", id=each["id"])
    stats = daemon.wait_stats("t", "c", in_flight_count=0)
    assert (stats["depth"], stats["clients"][0]["finish_count"]) == (0, 3)


def test_requeue_and_touch_and_timeout(client: Client, daemon: NsqDaemon) -> None:
    writer, taker = client(), reader(client, 1, msg_timeout_ms=1500)
    assert writer.publish("t", "x") is None
    first = taker.message()
    taker.do("requeue", id=first["id"], delay_ms=300)
    second = taker.message()
    assert (second["id"], second["attempts"]) == (first["id"], 2)
    for _ in range(3):
        assert taker.nothing(seconds=1.0)  # twice as long as the timeout: touching keeps it
        taker.do("touch", id=second["id"])
    third = taker.message(5)
    assert (third["id"], third["attempts"]) == (first["id"], 3)
    taker.do("finish", id=third["id"])
    stats = daemon.wait_stats("t", "c", in_flight_count=0)
    assert (stats["requeue_count"], stats["timeout_count"], stats["depth"]) == (1, 1, 0)


def test_a_deferred_message(client: Client, daemon: NsqDaemon) -> None:
    writer, taker = client(), reader(client)
    assert writer.publish("t", "later", delay_ms=1500) is None
    daemon.wait_stats("t", "c", deferred_count=1)
    assert taker.nothing(seconds=0.8)
    assert taker.message()["body"] == "later"


def test_pause_and_unpause(client: Client, daemon: NsqDaemon) -> None:
    writer, taker = client(), reader(client)
    assert writer.publish("t", "first") is None
    taker.do("finish", id=taker.message()["id"])
    assert daemon.post("/channel/pause?topic=t&channel=c").status_code == 200
    assert writer.publish("t", "second") is None
    assert taker.nothing()
    assert daemon.stats("t", "c")["paused"]
    assert daemon.post("/channel/unpause?topic=t&channel=c").status_code == 200
    assert taker.message()["body"] == "second"


def test_a_killed_consumers_messages_go_to_another_at_once(client: Client, daemon: NsqDaemon) -> None:
    writer, dying = client(), reader(client, 2)
    assert writer.publish("t", "a", "b") is None
    held = {dying.message()["id"] for _ in range(2)}
    other = reader(client, 2)
    daemon.wait_stats("t", "c", client_count=2)
    dying.kill()
    again = [other.message(5) for _ in range(2)]
    assert ({each["id"] for each in again}, {each["attempts"] for each in again}) == (held, {2})


def test_two_consumers_hold_no_more_than_they_asked_for(client: Client, daemon: NsqDaemon) -> None:
    writer, first, second = client(), reader(client, 2), reader(client, 3)
    daemon.wait_stats("t", "c", client_count=2)
    assert writer.publish("t", *[str(number) for number in range(10)]) is None
    stats = daemon.wait_stats("t", "c", in_flight_count=5)
    assert sorted(each["in_flight_count"] for each in stats["clients"]) == [2, 3]
    mine = [first.message() for _ in range(2)]
    assert first.nothing()
    theirs = [second.message() for _ in range(3)]
    for each in mine:
        first.do("finish", id=each["id"])
    mine += [first.message() for _ in range(2)]
    assert len({each["id"] for each in mine + theirs}) == 7
    assert daemon.stats("t", "c")["in_flight_count"] == 5


def test_heartbeats_are_answered(client: Client, daemon: NsqDaemon) -> None:
    writer, taker = client(), reader(client, 1, heartbeat_s=1)
    assert taker.nothing(seconds=4.5)  # more than two heartbeats: a silent client would be cut off
    assert writer.publish("t", "x") is None
    assert taker.message()["body"] == "x"
    assert daemon.process.get("/v1/status")["nsq"]["consumers"] == 1


def test_clients_come_back_after_the_daemon_was_away(client: Client, daemon: NsqDaemon) -> None:
    writer, taker = client(), reader(client)
    assert writer.publish("t", "before") is None
    taker.do("finish", id=taker.message()["id"])
    daemon.wait_stats("t", "c", in_flight_count=0)
    assert daemon.process.end() == 0
    daemon.process.close()
    daemon.start()
    assert writer.publish("t", "after") is None
    assert taker.message(40)["body"] == "after"


def test_kill_9_with_messages_in_flight(client: Client, daemon: NsqDaemon) -> None:
    writer, taker = client(), reader(client, 3)
    assert writer.publish("t", "a", "b", "c", "d") is None
    held = [taker.message() for _ in range(3)]
    taker.kill()
    taker = reader(client, 3)
    held = [taker.message() for _ in range(3)]
    assert {each["attempts"] for each in held} == {2}
    taker.do("finish", id=held[0]["id"])
    daemon.wait_stats("t", "c", in_flight_count=3)  # the fourth came for the one that is done
    writer.publish("t", "e")  # durable, and so is what was said before it
    taker.kill()
    daemon.crash()
    last = reader(client, 10)
    bodies = {
        each["body"]: each["attempts"] for each in (last.message(), last.message(), last.message(), last.message())
    }
    assert bodies.keys() == {"a", "b", "c", "d", "e"} - {held[0]["body"]}
    assert all(bodies[each["body"]] >= 3 for each in held[1:])
    assert bodies["e"] == 1
    assert last.nothing()


@pytest.mark.parametrize(("language", "topic"), [("python", "pyjobs"), ("js", "jsjobs")])
def test_the_examples_of_the_guide_run_as_written(daemon: NsqDaemon, language: str, topic: str) -> None:
    kind = {"python": "pynsq", "js": "nsqjs"}[language]
    if not INSTALLED[kind].exists():
        pytest.skip(f"{kind} is not installed: run tests/interop/nsq/install.sh")
    (example,) = re.findall(rf"```{language}\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    port = daemon.address.rpartition(":")[2]
    program = [COMMANDS[kind][0], "-c" if language == "python" else "-e", example.replace("4150", port)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, cwd=FOLDER)
    assert done.returncode == 0, done.stderr
    assert {"got one attempt 1", "got two attempt 1"} <= set(done.stdout.splitlines()), done.stdout + done.stderr
    assert "published" in done.stdout
    daemon.wait_stats(topic, "workers", in_flight_count=0, depth=0)
