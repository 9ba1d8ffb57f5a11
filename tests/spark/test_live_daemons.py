"""Two real daemons that trace, and a use of each kind of message: the report counts what was done, no more, no less."""

import json
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from dep2p.spark_analytics.job import run
from tests.cli.test_real_daemons import DEP2P, Person, finish, see_each_other

pytestmark = [pytest.mark.real, pytest.mark.xdist_group("cli-real")]
REQUESTS, RELIABLE, PUSHES, QUEUED, TRIED_TWICE = 4, 3, 25, 20, 2
FILE_BYTES = 300_000


def _use_everything(ann: Person, bob: Person, base: Path) -> None:
    replying = bob.background("reply", "greet", "--echo", "--count", str(REQUESTS))
    for _ in range(REQUESTS):
        assert ann.run("request", bob.peer_id, "greet", "hello").stdout.strip() == "hello"
    finish(replying)
    assert ann.run("request", bob.peer_id, "nobody", "x", expect=4).returncode
    listening = bob.background("listen", "orders", "--raw", "-n", str(RELIABLE))
    for _ in range(RELIABLE):
        ann.run("send", bob.peer_id, "orders", "one", "--reliable")
    finish(listening)
    (base / "file.bin").write_bytes(bytes(FILE_BYTES))
    receiving = bob.background("stream", "receive", str(base / "inbox"), "--once")
    ann.run("stream", "send", bob.peer_id, str(base / "file.bin"))
    finish(receiving)
    assert _pushed(ann, bob, "".join(f"{number}\n" for number in range(PUSHES))).splitlines() == [
        str(number) for number in range(PUSHES)
    ]
    ann.run("queue", "create", "work", "--realm", "team", "--max-attempts", "2")
    there = ("--peer", ann.peer_id, "--realm", "team")
    bob.run("queue", "put", "work", "job {{n}}", "--count", str(QUEUED), *there)
    taken = bob.run("queue", "consume", "work", "c", "--count", str(QUEUED), "--raw", *there)
    assert taken.stdout.count("job") == QUEUED
    bob.run("queue", "put", "work", "bad", "--count", str(TRIED_TWICE), *there)
    failing = ("--exec", "false", "--count", str(2 * TRIED_TWICE), "--requeue-delay", "0")
    ann.run("queue", "consume", "work", "c", *failing, "--realm", "team", expect=1)


def _pushed(server: Person, client: Person, lines: str) -> str:
    """A session gets these lines; what its client printed."""
    pipe = subprocess.PIPE
    serving = subprocess.Popen(
        [*DEP2P, "session", "serve", "feed"],
        env=server.environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True,
    )  # fmt: skip
    server.children.append(serving)
    assert serving.stderr is not None and serving.stderr.readline().startswith("serving")
    opened = subprocess.Popen(
        [*DEP2P, "session", "open", server.peer_id, "feed"], env=client.environment, stdout=pipe, text=True
    )
    client.children.append(opened)
    _, said = serving.communicate(lines, timeout=60)
    assert serving.returncode == 0, said
    return opened.communicate(timeout=60)[0]


def test_the_report_counts_what_two_daemons_did(spark: Any, tmp_path: Path) -> None:
    traces, report = tmp_path / "traces", tmp_path / "report"
    with ExitStack() as stack:
        ann, bob = (stack.enter_context(Person(tmp_path, name)) for name in ("ann", "bob"))
        for person in (ann, bob):
            person.start()
        ann.run("realm", "new", "team")
        bob.run("realm", "join", "-", data=ann.run("realm", "invite", "team").stdout)
        see_each_other(ann, bob)
        for person in (ann, bob):
            person.run("trace", "start", str(traces), "--snapshot", "1")
        _use_everything(ann, bob, tmp_path)
        for person in (ann, bob):
            person.run("trace", "stop")
    run(spark, [str(traces)], report)
    found = json.loads((report / "summary.json").read_text())
    assert found["nodes"] == 2 and found["missing_events"] == 0 and found["sample"] == 1.0
    asked = {(each["name"], each["side"]): (each["requests"], each["failed"]) for each in found["requests"]}
    assert asked["greet", "out"] == asked["greet", "in"] == (REQUESTS, 0)
    assert asked["nobody", "out"] == (1, 1)
    delivery = found["delivery"]
    assert delivery["messages"] == delivery["acknowledged"] == delivery["received"] == RELIABLE
    assert not delivery["lost"] and not delivery["repeated"] and delivery["ack_ms"]["n"] == RELIABLE
    sessions = found["sessions"]
    assert {state: sessions[state]["times"] for state in ("opened", "closed")} == {"opened": 2, "closed": 2}
    assert sessions["sent"]["items"] == sessions["received"]["items"] == PUSHES + 1  # and the end
    assert "failed" not in sessions and "lost" not in sessions
    (work,) = found["queues"]
    assert (work["queue"], work["channel"]) == ("work", "c")
    assert work["messages"] == QUEUED + TRIED_TWICE
    assert work["finished"] == work["service_ms"]["n"] == QUEUED
    assert (work["redelivered"], work["dead"]) == (TRIED_TWICE, TRIED_TWICE)
    assert work["hand_outs"] == QUEUED + 2 * TRIED_TWICE and work["requeues"] == 2 * TRIED_TWICE
    assert work["order_violations"] == 0 and work["wait_ms"]["n"] == QUEUED + TRIED_TWICE
    ended = {(each["side"], each["state"]): each for each in found["streams"]}
    assert ended["out", "closed"]["streams"] == ended["in", "closed"]["streams"] == 1
    assert ended["out", "closed"]["bytes_out"] == ended["in", "closed"]["bytes_in"] >= FILE_BYTES
    words = [each["kind"] for each in json.loads((report / "findings.json").read_text())]
    assert words.count("dead-letters") == 1 and not {"lost-messages", "order", "gap", "sampled"} & {*words}
    page = (report / "report.html").read_text()
    for word in ("Queues", "Sessions", "Streams", "Acknowledged", "Requests"):
        assert word in page
