"""Reliable messages between real daemons by the command line: kill -9 of both, the outbox, and wrong use."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.cli.test_real_daemons import Person, finish, see_each_other, wait_for

pytestmark = [pytest.mark.real, pytest.mark.xdist_group("cli-real"), pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def people(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Person, Person]]:
    """Ann sends, Bob receives."""
    root = tmp_path_factory.mktemp("delivery")
    with ExitStack() as stack:
        ann, bob = (stack.enter_context(Person(root, name)) for name in ("ann", "bob"))
        for person in (ann, bob):
            person.start()
            # The same port again after a restart: else two that were killed would never find each other.
            person.listen = person.json("status")["listen"][0].partition("/p2p/")[0]
        ann.run("realm", "new", "team")
        bob.run("realm", "join", "-", data=ann.run("realm", "invite", "team").stdout)
        see_each_other(ann, bob)
        yield ann, bob


def _both_up(ann: Person, bob: Person) -> None:
    for person in (ann, bob):
        if person.daemon is None or person.daemon.poll() is not None:
            person.start()
    ann.run("outbox", "drop", "--all", expect=None)
    see_each_other(ann, bob)


def _nothing_waits(person: Person) -> bool:
    return not person.json("outbox", "ls")["items"]


def test_a_message_is_taken_and_said_to_be(people: tuple[Person, Person]) -> None:
    ann, bob = people
    listening = bob.background("listen", "orders", "--raw", "-n", "3")
    said = ann.run("send", bob.peer_id, "orders", "one", "--reliable")
    assert "has taken 3 B" in said.stderr and said.stdout == ""
    sent = ann.json("send", bob.peer_id[-6:], "orders", "two", "--reliable", "-H", "kind=test")
    assert (sent["state"], sent["peer"], sent["tries"]) == ("acknowledged", bob.peer_id, 1)
    assert sent["id"].startswith(f"{bob.peer_id}:")
    assert ann.json("send", bob.peer_id, "orders", "3") == {"peer": bob.peer_id, "name": "orders", "sent": True}
    assert finish(listening)[0] == "onetwo3"
    assert ann.run("outbox", "ls").stderr == "nothing waits\n"


def test_a_message_that_no_one_takes_waits_until_a_program_comes(people: tuple[Person, Person]) -> None:
    ann, bob = people
    waits = ann.run("send", bob.peer_id, "late", "one\n", "--reliable", "-t", "1")
    assert "goes on trying" in waits.stderr
    ann.run("send", bob.peer_id, "late", "two\n", "--reliable", "-t", "0")
    assert [item["tries"] for item in ann.json("outbox", "ls")["items"]] == [1, 1]
    assert "has a handler of notifies 'late'" in (bob.directory / "daemon.log").read_text()
    assert finish(bob.background("listen", "late", "--raw", "-n", "2"))[0] == "one\ntwo\n"
    wait_for("the end of both", lambda: _nothing_waits(ann))


WORKER = """
import sys, time
import trio
from dep2p.client import Client, Notification

async def main():
    async with Client.open() as client, client.listen("jobs") as jobs:
        print("waiting for jobs", file=sys.stderr, flush=True)
        async for job in jobs:
            if isinstance(job, Notification):
                print(job.body.decode(), flush=True)
                if job.body == b"last":
                    break
                if job.body == b"poison":
                    time.sleep(600)  # killed here, with the message in hand

trio.run(main)
"""


def test_a_program_that_is_killed_with_a_message_in_hand_loses_none(people: tuple[Person, Person]) -> None:
    ann, bob = people

    def worker() -> "subprocess.Popen[str]":
        child = subprocess.Popen(
            [sys.executable, "-c", WORKER],
            env=bob.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        bob.children.append(child)
        assert child.stderr is not None and child.stderr.readline() == "waiting for jobs\n"
        return child

    first = worker()
    for body in ("fine", "poison", "last"):
        ann.run("send", bob.peer_id, "jobs", body, "--reliable", "--timeout", "0")
    assert first.stdout is not None
    assert [first.stdout.readline() for _ in range(2)] == ["fine\n", "poison\n"]
    first.kill()
    first.wait()
    taken = bob.background("listen", "jobs", "-n", "2", "--json")
    assert [json.loads(line)["text"] for line in finish(taken)[0].splitlines()] == ["poison", "last"]
    wait_for("everything acknowledged", lambda: _nothing_waits(ann))


def test_a_lost_message_is_listed_and_sent_again(people: tuple[Person, Person]) -> None:
    ann, bob = people
    failed = ann.run("send", bob.peer_id, "gone", "one\n", "--reliable", "--ttl", "500ms", expect=1)
    assert "no program there took it" in failed.stderr
    assert "failed or expired: dep2p outbox ls --failed" in ann.run("outbox", "ls").stderr
    table = ann.run("outbox", "ls", "--failed").stdout.splitlines()
    assert "REASON" in table[0] and "expired" in table[1] and "no program there" in table[1]
    listening = bob.background("listen", "gone", "--raw", "-n", "1")
    assert "accepted 1 message again" in ann.run("outbox", "replay", table[1].split()[0]).stderr
    assert finish(listening)[0] == "one\n"
    assert ann.run("outbox", "replay", "--all", expect=1).stderr == "nothing was lost\n"
    assert "--reliable" in ann.run("send", bob.peer_id, "gone", "x", "--ttl", "5", expect=2).stderr
    assert "1ms to 30d" in ann.run("send", bob.peer_id, "gone", "x", "--reliable", "--ttl", "31d", expect=2).stderr
    assert "outbox ls --failed" in ann.run("outbox", "replay", "77", expect=2).stderr
    publish = ("publish", "prices", "x", "--reliable", "--critical", bob.peer_id)
    assert "D5402" in ann.run(*publish, "--ttl", "500ms", expect=1).stderr
    assert "--reliable" in ann.run("publish", "prices", "x", "--ttl", "5", expect=2).stderr
    assert "1ms to 30d" in ann.run(*publish, "--ttl", "31d", expect=2).stderr


def test_a_publish_is_acknowledged_by_the_critical_peers_app(people: tuple[Person, Person]) -> None:
    ann, bob = people
    _both_up(ann, bob)
    reading = bob.background("subscribe", "prices", "--raw", "-n", "2")
    done = ann.run("publish", "prices", "up\n", "--reliable", "--critical", bob.peer_id)
    assert "acknowledged by" in done.stderr and bob.peer_id[-4:] in done.stderr
    told = ann.json("publish", "prices", "down\n", "--reliable", "--critical", bob.peer_id)
    assert (told["acknowledged_by"], told["missing"]) == ([bob.peer_id], {})
    assert finish(reading)[0] == "up\ndown\n"
    # Nobody reads it now: it is said who is missing, and that it is not over.
    early = ann.run("publish", "prices", "lost?", "--reliable", "--critical", bob.peer_id, "-t", "0")
    assert "acknowledged by no peer" in early.stderr and "goes on trying" in early.stderr
    assert [item["name"] for item in ann.json("outbox", "ls")["items"]] == ["prices"]
    assert finish(bob.background("subscribe", "prices", "--raw", "-n", "1"))[0] == "lost?"
    wait_for("its end", lambda: _nothing_waits(ann))


def test_dropping_by_id_by_peer_and_all(people: tuple[Person, Person]) -> None:
    ann, bob = people
    _both_up(ann, bob)
    bob.kill(signal.SIGKILL)
    ids = [ann.json("send", bob.peer_id, "drop", "x", "--reliable", "-t", "0")["id"] for _ in range(7)]
    numbers = [each.rpartition(":")[2] for each in ids]

    def left() -> list[str]:
        return [item["id"] for item in ann.json("outbox", "ls")["items"]]

    assert left() == ids
    assert ann.run("outbox", "drop", ids[0]).stderr == "dropped 1 message\n"
    shown = [line.split()[0] for line in ann.run("outbox", "ls").stdout.splitlines()[1:]]
    assert ann.json("outbox", "drop", shown[0]) == {"dropped": 1}
    assert ann.json("outbox", "drop", f"{bob.peer_id[-4:]}:{numbers[2]}", numbers[3]) == {"dropped": 2}
    assert left() == ids[4:]
    for words in ([], [ids[5], "--all"]):
        assert "one of the three" in ann.run("outbox", "drop", *words, expect=2).stderr
    for wrong in ("", f"{ids[5]}0", ids[0]):
        # The good one in front of it stays, too: nothing is dropped by half.
        refused = ann.run("outbox", "drop", ids[5], wrong, expect=2)
        assert "PEER:NUMBER" in refused.stderr and "outbox ls" in refused.stderr, wrong
    problem = json.loads(ann.run("--json", "outbox", "drop", ids[0], expect=2).stderr)
    assert problem["code"] == "D1001"
    assert "D4001" in ann.run("outbox", "drop", "--peer", "nobody-at-all", expect=None).stderr
    assert left() == ids[4:]
    assert ann.json("outbox", "drop", "--peer", bob.peer_id) == {"dropped": 3}
    assert ann.run("outbox", "drop", "--all", expect=1).stderr == "nothing waits\n"
    assert json.loads(ann.run("--json", "outbox", "drop", "--all", expect=1).stdout) == {"dropped": 0}


def test_wrong_use_says_what_to_do(people: tuple[Person, Person]) -> None:
    ann, bob = people
    _both_up(ann, bob)
    for words, said in (
        (("send", bob.peer_id, "orders", "x", "--reliable", "-t", "-1"), "'--timeout'"),
        (("send", bob.peer_id, "", "x", "--reliable"), "name"),
        (("publish", "prices", "x", "--critical", bob.peer_id), "--reliable"),
        (("publish", "prices", "x", "--any"), "--reliable"),
        (("publish", "prices", "--lines", "--reliable"), "one message"),
        (("publish", "prices", "x", "--reliable", "--public"), "in a realm"),
    ):
        assert said in ann.run(*words, expect=2, data="").stderr, words
    unknown = ann.run("send", "12D3KooWnobody", "orders", "x", "--reliable", expect=None)
    assert unknown.returncode not in (0, 1) and "peer" in unknown.stderr
    unsubscribed = ann.run("publish", "empty", "x", "--reliable", expect=None)
    assert unsubscribed.returncode != 0 and "no peer is critical" in unsubscribed.stderr
    elsewhere = ann.run("send", bob.peer_id, "orders", "x", "--reliable", "--realm", "nowhere", expect=None)
    assert elsewhere.returncode not in (0, 1) and "nowhere" in elsewhere.stderr


def test_kill_9_of_both_daemons_and_what_was_accepted_arrives_once(people: tuple[Person, Person]) -> None:
    ann, bob = people
    _both_up(ann, bob)
    bob.kill(signal.SIGKILL)
    accepted = ann.run("send", bob.peer_id, "late", "1\n", "--reliable", "--timeout", "0")
    assert "not acknowledged yet" in accepted.stderr and "outbox ls" in accepted.stderr
    sent = ann.json("send", bob.peer_id, "late", "2\n", "--reliable", "-t", "0")
    assert sent["state"] != "acknowledged"
    ann.kill(signal.SIGKILL)
    ann.start()
    waiting = ann.json("outbox", "ls")
    assert waiting["is_durable"] is True
    assert [(item["name"], item["peer"], item["size_bytes"]) for item in waiting["items"]] == [
        ("late", bob.peer_id, 2)
    ] * 2
    assert waiting["items"][1]["id"] == sent["id"]
    wait_for("a reason", lambda: ann.json("outbox", "ls")["items"][0]["last_error"])
    table = ann.run("outbox", "ls").stdout
    assert "late" in table and "LAST ERROR" in table and f":{sent['id'].rpartition(':')[2]}" in table
    assert ann.run("outbox", "flush", "--timeout", "0", expect=1).stderr == ("2 messages still wait: dep2p outbox ls\n")
    assert json.loads(ann.run("--json", "outbox", "flush", "-t", "0", expect=1).stdout) == {"left": 2}
    bob.start()
    listening = bob.background("listen", "late", "--raw", "-n", "3")
    flushed = ann.run("outbox", "flush", "--timeout", "50")
    assert flushed.stderr == "nothing waits\n"
    ann.run("send", bob.peer_id, "late", "3\n", "--reliable")
    assert finish(listening)[0] == "1\n2\n3\n"
    assert ann.json("outbox", "flush") == {"left": 0}
