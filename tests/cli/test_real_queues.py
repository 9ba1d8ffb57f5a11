"""Queues among real daemons and the command line: a command for each message, a member's queue, kill -9."""

import json
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_real_daemons import DEP2P, Person, finish, see_each_other, wait_for

pytestmark = [pytest.mark.real, pytest.mark.xdist_group("cli-real"), pytest.mark.timeout(180)]

Two = tuple[Person, Person]


@pytest.fixture(scope="module")
def people(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    """Ann keeps queues, Bob uses them; both in one realm."""
    root = tmp_path_factory.mktemp("queues")
    with ExitStack() as stack:
        ann, bob = (stack.enter_context(Person(root, name)) for name in ("ann", "bob"))
        with socket.create_server(("127.0.0.1", 0)) as free:  # who starts again is found where it was
            ann.listen = f"/ip4/127.0.0.1/tcp/{free.getsockname()[1]}"
        ann.start()
        bob.start()
        ann.run("realm", "new", "team")
        bob.run("realm", "join", "-", data=ann.run("realm", "invite", "team").stdout)
        see_each_other(ann, bob)
        yield ann, bob


def test_what_a_command_does_not_do_comes_again_and_then_is_a_dead_letter(people: Two, tmp_path: Path) -> None:
    ann, _ = people
    ann.run("queue", "create", "work", "--max-attempts", "2")
    put = [ann.json("queue", "put", "work", text)["id"] for text in ("good", "bad")]
    script = tmp_path / "work.sh"
    log = tmp_path / "log"
    script.write_text(f'#!/bin/sh\nread x\necho "$DEP2P_MESSAGE_ID $DEP2P_ATTEMPTS $x" >>{log}\n[ "$x" = good ]\n')
    script.chmod(0o755)
    ann.run("queue", "consume", "work", "c", "--exec", str(script), "--count", "3", "--requeue-delay", "0", expect=1)
    assert log.read_text().splitlines() == [f"{put[0]} 1 good", f"{put[1]} 1 bad", f"{put[1]} 2 bad"]
    [dead] = [json.loads(line) for line in ann.run("queue", "dlq", "ls", "work", "c", "--json").stdout.splitlines()]
    assert (dead["message_id"], dead["text"], dead["reasons"]) == (put[1], "bad", ["exit status 1", "exit status 1"])
    assert ann.json("queue", "dlq", "replay", "work", "c", "--all")["replayed"] == 1
    assert ann.run("queue", "consume", "work", "c", "--count", "1", "--raw").stdout == "bad"
    assert ann.json("queue", "info", "work")["messages"] == 0


def test_a_members_queue(people: Two) -> None:
    ann, bob = people
    there = ("--realm", "team", "--peer", ann.peer_id)
    assert "D5201" in bob.run("queue", "put", "shared", "x", *there, expect=4).stderr
    ann.run("queue", "create", "shared", "--realm", "team", "--administer", "owner")
    assert bob.json("queue", "put", "shared", "job {{n}}", "--count", "500", *there)["messages"] == 500
    lines = bob.run("queue", "consume", "shared", "c", "--count", "500", "--json", *there).stdout.splitlines()
    assert [json.loads(line)["text"] for line in lines] == [f"job {number}" for number in range(1, 501)]
    assert "D5207" in bob.run("queue", "rm", "shared", "--yes", *there, expect=6).stderr
    assert [each["name"] for each in bob.json("queue", "ls", *there)["queues"]] == ["shared"]
    assert completed(bob, f"dep2p queue info --realm team --peer {ann.peer_id} sh") == ["shared"]
    assert completed(bob, f"dep2p queue consume --realm team --peer {ann.peer_id} shared ") == ["c"]
    assert completed(ann, "dep2p queue info sh") == [], "queues of the realm are not those of the machine"


def completed(person: Person, line: str) -> list[str]:
    """What a shell offers for the last word."""
    words = {"_DEP2P_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    done = subprocess.run(DEP2P, env=person.environment | words, capture_output=True, text=True, timeout=60)
    assert not done.stderr, done.stderr
    return done.stdout.split()


def test_kill_9_of_the_daemon_loses_nothing(people: Two) -> None:
    ann, bob = people
    ann.run("queue", "create", "safe", "--realm", "team")
    there = ("--realm", "team", "--peer", ann.peer_id)
    ann.run("queue", "put", "safe", "job {{n}}", "--count", "200", "--realm", "team")
    reader = bob.background("queue", "consume", "safe", "c", "--json", "--max-in-flight", "5", *there)
    assert reader.stdout is not None
    seen = {json.loads(reader.stdout.readline())["id"]: None}
    ann.kill(signal.SIGKILL)
    ann.start()
    ann.run("queue", "put", "safe", "job {{n}}", "--count", "100", "--realm", "team")

    def is_done() -> bool:
        return bool(ann.json("queue", "info", "safe", "--realm", "team")["messages"] == 0)

    while len(seen) < 300:  # read all the time: a full pipe would hold the consumer
        seen[json.loads(reader.stdout.readline())["id"]] = None
    wait_for("the last results", is_done)
    reader.send_signal(signal.SIGINT)
    reader.communicate(timeout=20)


def test_no_message_goes_to_two_of_eight_processes(people: Two) -> None:
    """(39: litements/litequeue#2) Can two workers pop the same item? Each takes 40 and gives back the rest."""
    ann, bob = people
    ann.run("queue", "create", "pop", "--realm", "team")
    ann.run("queue", "put", "pop", "job {{n}}", "--count", "320", "--realm", "team")
    place = ("pop", "c", "--json", "--count", "40", "--max-in-flight", "7", "--realm", "team")
    at_ann = ("--peer", ann.peer_id)
    workers = [ann.background("queue", "consume", *place) for _ in range(4)]
    workers += [bob.background("queue", "consume", *place, *at_ann) for _ in range(4)]
    taken = [[json.loads(line) for line in finish(worker)[0].splitlines()] for worker in workers]
    assert [len(each) for each in taken] == [40] * 8
    everything = [message for each in taken for message in each]
    assert len({message["id"] for message in everything}) == 320
    assert {message["text"] for message in everything} == {f"job {number}" for number in range(1, 321)}
    assert ann.json("queue", "info", "pop", "--realm", "team")["messages"] == 0


def test_a_message_is_received_by_one_command_and_acknowledged_by_another(people: Two) -> None:
    ann, bob = people
    ann.run("queue", "create", "letters", "--realm", "team")
    at = ("--realm", "team", "--peer", ann.peer_id)
    bob.run("queue", "put", "letters", "first", "second", *at)
    first, second = [
        json.loads(line)
        for line in bob.run(
            "queue", "receive", "letters", "c", "-n", "2", "--invisible", "10m", "--json", *at
        ).stdout.splitlines()
    ]
    assert [first["text"], second["text"]] == ["first", "second"]
    assert ann.run("queue", "receive", "letters", "c", "--wait", "0", "--realm", "team", expect=1).stdout == ""
    bob.run("queue", "ack", "letters", "c", first["handle"], *at)
    assert bob.json("queue", "invisible", "letters", "c", second["handle"], "0", *at)["invisible_s"] == 0
    again = ann.json("queue", "receive", "letters", "c", "--realm", "team")
    assert (again["id"], again["attempts"]) == (second["id"], 2)
    refused = bob.run("queue", "ack", "letters", "c", second["handle"], *at, expect=1)
    assert "is not held any more" in refused.stderr
    ann.run("queue", "ack", "letters", "c", again["handle"], "--realm", "team")
    assert ann.json("queue", "info", "letters", "--realm", "team")["messages"] == 0


def test_partitions_on_two_members_by_the_command_line(people: Two) -> None:
    ann, bob = people
    there = ("--realm", "team", "--peer", ann.peer_id)
    create = ("queue", "create", "spread", "--partitions", "4", "--order", "strict", "--realm", "team")
    ann.run(*create, "--node", "self", "--node", bob.peer_id)
    found = bob.json("queue", "route", "spread", *there)["partitions"]
    assert [each["node"] for each in found] == [ann.peer_id, bob.peer_id] * 2
    assert all(each["is_up"] for each in found)
    for number in range(3):
        for key in ("a", "b", "c", "d"):
            bob.run("queue", "put", "spread", f"{key} {number}", "--key", key, *there)
    bob.run("queue", "expand", "spread", "5", "--node", bob.peer_id, *there)
    assert "NODE" in bob.run("queue", "route", "spread", *there).stdout
    lines = ann.run("queue", "consume", "spread", "bill", "--fifo", "--count", "12", "--json", "--realm", "team").stdout
    seen = [json.loads(line)["text"] for line in lines.splitlines()]
    for key in ("a", "b", "c", "d"):
        assert [text for text in seen if text.startswith(key)] == [f"{key} {number}" for number in range(3)]
    # Messages by calls, from both nodes; what was received is the node's that asked.
    assert bob.run("queue", "receive", "spread", "calls", "--wait", "0", *there, expect=1).stdout == ""
    for key in ("a", "b", "c", "d", "e"):
        ann.run("queue", "put", "spread", key, "--key", key, "--realm", "team")
    received: list[dict[str, Any]] = []
    while len(received) < 5:
        lines = bob.run("queue", "receive", "spread", "calls", "-n", "3", "--json", *there).stdout
        received += [json.loads(line) for line in lines.splitlines()]
    assert sorted(each["text"] for each in received) == ["a", "b", "c", "d", "e"]
    handles = [each["handle"] for each in received]
    refused = ann.run("queue", "ack", "spread", "calls", *handles, "--realm", "team", expect=1)
    assert "is not held any more" in refused.stderr
    assert bob.json("queue", "invisible", "spread", "calls", handles[0], "0", *there)["invisible_s"] == 0
    again = bob.json("queue", "receive", "spread", "calls", *there)
    assert (again["id"], again["attempts"]) == (received[0]["id"], 2)
    bob.run("queue", "ack", "spread", "calls", again["handle"], *handles[1:], *there)
    assert bob.run("queue", "receive", "spread", "calls", "--wait", "1", *there, expect=1).stdout == ""
    shard = found[1]["shard"]
    assert ann.json("queue", "info", shard, "--realm", "team", "--peer", bob.peer_id)["name"] == shard
    ann.run("queue", "locks", "spread", "bill", "--realm", "team")
    ann.run("queue", "rm", "spread", "--yes", "--channel", "bill", "--realm", "team", expect=2)
    ann.run("queue", "rm", "spread", "--yes", "--force", "--realm", "team")
    assert "D5201" in ann.run("queue", "info", shard, "--realm", "team", "--peer", bob.peer_id, expect=4).stderr


def test_order_by_key_by_the_command_line(people: Two) -> None:
    ann, bob = people
    there = ("--realm", "team", "--peer", ann.peer_id)
    ann.run("queue", "create", "orders", "--partitions", "2", "--order", "strict", "--realm", "team")
    for number in range(3):
        for key in ("a", "b", "c"):
            bob.run("queue", "put", "orders", f"{key} {number}", "--key", key, *there)
    bob.run("queue", "expand", "orders", "4", *there)
    assert bob.json("queue", "route", "orders", *there)["version"] == 2
    lines = bob.run("queue", "consume", "orders", "bill", "--fifo", "--count", "9", "--json", *there).stdout
    seen = [json.loads(line)["text"] for line in lines.splitlines()]
    for key in ("a", "b", "c"):
        assert [text for text in seen if text.startswith(key)] == [f"{key} {number}" for number in range(3)]
    assert "D5204" in bob.run("queue", "consume", "orders", "bill", "--count", "1", *there, expect=6).stderr
    ann.run("queue", "locks", "orders", "bill", "--realm", "team")
    ann.run("queue", "consumers", "orders", "bill", "--realm", "team")
