"""Publish/subscribe among real daemons on loopback: three people, bursts, a reader that lags, kill -9 and restart."""

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Thread

import pytest

from tests.cli.test_real_daemons import DEP2P, Person, finish, see_each_other, wait_for

pytestmark = [pytest.mark.real, pytest.mark.xdist_group("cli-real"), pytest.mark.timeout(180)]

Three = tuple[Person, Person, Person]


@pytest.fixture(scope="module")
def people(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Three]:
    """Ann, Bob and Cleo in one realm; Ann writes a trace."""
    root = tmp_path_factory.mktemp("pubsub")
    with ExitStack() as stack:
        ann, bob, cleo = (stack.enter_context(Person(root, name)) for name in ("ann", "bob", "cleo"))
        ann.start("--trace-json", str(root / "trace.ndjson"))
        bob.start()
        cleo.start()
        ann.run("realm", "new", "team")
        invite = ann.run("realm", "invite", "team").stdout
        for other in (bob, cleo):
            other.run("realm", "join", "-", data=invite)
        see_each_other(ann, bob, cleo)
        yield ann, bob, cleo


def subscribed(publisher: Person, topic: str, *readers: Person) -> None:
    """Wait until the publisher knows that they read the topic."""
    wanted = {reader.peer_id for reader in readers}

    def known() -> bool:
        done = publisher.run("topic", "peers", topic, "--json", expect=None)
        return done.returncode == 0 and wanted <= set(json.loads(done.stdout)["peers"])

    wait_for("the subscriptions' announcement", known)


def test_a_message_reaches_every_subscriber_once(people: Three) -> None:
    ann, bob, cleo = people
    assert "D5013" in ann.run("publish", "chat", "anybody?", expect=4).stderr
    assert "D5010" in ann.run("topic", "peers", "chat", expect=4).stderr
    readers = [person.background("subscribe", "chat", "--json", "-n", "3") for person in (bob, cleo)]
    subscribed(ann, "chat", bob, cleo)
    sent = [ann.json("publish", "chat", text) for text in ("one", "two")] + [
        ann.json("publish", "chat", "-f", __file__)
    ]
    assert all(set(each["sent_to"]) <= {bob.peer_id, cleo.peer_id} and each["sent_to"] for each in sent)
    for reader in readers:
        received = [json.loads(line) for line in finish(reader)[0].splitlines()]
        assert [each["id"] for each in received] == [each["id"] for each in sent]
        assert {each["sender"] for each in received} == {ann.peer_id}
        assert [each["text"] for each in received[:2]] == ["one", "two"]
        assert received[2]["text"] == Path(__file__).read_text()


def test_a_thousand_lines_arrive_whole_and_in_order(people: Three) -> None:
    ann, bob, cleo = people
    readers = [person.background("subscribe", "burst", "-n", "1000", "--buffer", "4096") for person in (bob, cleo)]
    subscribed(ann, "burst", bob, cleo)
    lines = "".join(f"line {number} {'x' * 200}\n" for number in range(1_000))
    result = json.loads(ann.run("--json", "publish", "burst", "--lines", data=lines).stdout)
    assert (result["messages"], result["dropped"], result["queued"], result["peers"]) == (1_000, 0, 0, 2)
    for reader in readers:
        out, err = finish(reader)
        assert out == lines and "lagged" not in err


def test_lines_are_sent_as_they_come(people: Three) -> None:
    ann, bob, _ = people
    reader = bob.background("subscribe", "live", "-n", "2", "--raw")
    subscribed(ann, "live", bob)
    writer = subprocess.Popen(
        [*DEP2P, "publish", "live", "--lines"], env=ann.environment, stdin=subprocess.PIPE, bufsize=0
    )
    assert writer.stdin is not None and reader.stdout is not None
    writer.stdin.write(b"first\n")
    assert reader.stdout.read(5) == "first", "it came while the command still runs"
    assert writer.poll() is None
    writer.stdin.write(b"second\n")
    writer.stdin.close()
    assert writer.wait(30) == 0
    assert finish(reader)[0] == "second"


def test_a_reader_that_lags_is_reported_how_much_it_missed_and_delays_no_one(people: Three) -> None:
    ann, bob, cleo = people
    lagging = bob.background("subscribe", "flood", "--json", "--buffer", "16")
    keen = cleo.background("subscribe", "flood", "-n", "2000", "--raw", "--buffer", "4096")
    subscribed(ann, "flood", bob, cleo)
    lagging.send_signal(signal.SIGSTOP)
    result = ann.json("publish", "flood", "{{n}} " + "y" * 2_000, "--count", "2000")
    assert (result["messages"], result["dropped"]) == (2_000, 0)
    assert len(finish(keen)[0]) > 4_000_000
    lagging.send_signal(signal.SIGCONT)
    received = lagged = 0
    assert lagging.stdout is not None
    while received + lagged < 2_000:
        line = json.loads(lagging.stdout.readline())
        received += "data" in line
        lagged += line.get("lagged", 0)
    assert lagged > 0 and received + lagged == 2_000
    lagging.send_signal(signal.SIGINT)
    finish(lagging, 130)


def test_one_of_a_group_gets_each_message_over_programs_and_members(people: Three) -> None:
    ann, bob, cleo = people
    readers = [person.background("subscribe", "jobs", "--group", "workers") for person in (bob, bob, cleo)]
    subscribed(ann, "jobs", bob, cleo)
    wait_for("the groups", lambda: [group_readers(person, "jobs workers") for person in (bob, cleo)] == [2, 2])
    sent = "".join(f"job {number}\n" for number in range(300))
    ann.run("publish", "jobs", "--lines", data=sent)
    got: list[list[str]] = [[], [], []]
    threads = [Thread(target=collect, args=(reader, lines)) for reader, lines in zip(readers, got, strict=True)]
    for thread in threads:
        thread.start()
    wait_for("all jobs", lambda: sum(map(len, got)) >= 300)
    for reader in readers:
        reader.send_signal(signal.SIGINT)
        assert reader.wait(60) == 130
    for thread in threads:
        thread.join()
    assert sorted(line for lines in got for line in lines) == sorted(sent.splitlines())
    assert all(len(lines) > 30 for lines in got), list(map(len, got))


def group_readers(person: Person, group: str) -> int:
    """How many members the node sees in a group."""
    return int(person.json("status")["pubsub"]["team"]["groups"].get(group, 0))


def collect(reader: "subprocess.Popen[str]", lines: list[str]) -> None:
    assert reader.stdout is not None
    for line in reader.stdout:
        lines.append(line.rstrip("\n"))


def test_topics_are_listed_and_files_dumped(people: Three, tmp_path: Path) -> None:
    ann, bob, cleo = people
    reading = bob.background("subscribe", "files", "--dump", str(tmp_path / "in"), "-n", "2")
    other = cleo.background("subscribe", "files")
    subscribed(ann, "files", bob, cleo)
    wait_for("the mesh", lambda: bob.json("topic", "mesh", "files")["mesh"] == [cleo.peer_id])
    rows = {row["topic"]: row for row in bob.json("topic", "ls")["topics"]}
    assert (rows["files"]["realm"], rows["files"]["peers"], rows["files"]["subscriptions"]) == ("team", 1, 1)
    assert set(ann.json("topic", "scores", "files")["scores"]) == {bob.peer_id, cleo.peer_id}
    for name in ("a", "b"):
        (tmp_path / name).write_text(name * 1_000)
    ann.run("publish", "files", "-f", str(tmp_path / "a"), "-f", str(tmp_path / "b"))
    paths = [Path(line) for line in finish(reading)[0].splitlines()]
    assert [path.read_text() for path in paths] == ["a" * 1_000, "b" * 1_000]
    other.send_signal(signal.SIGINT)
    finish(other, 130)


def test_a_message_waits_for_its_first_subscriber(people: Three) -> None:
    ann, bob, _ = people
    assert "queued" in ann.run("publish", "later", "patience", "--on-no-peers", "queue").stderr
    assert bob.run("subscribe", "later", "-n", "1").stdout == "patience\n"


def test_kill_9_of_a_daemon_ends_its_readers_and_after_its_restart_messages_come_again(people: Three) -> None:
    ann, bob, cleo = people
    steady = bob.background("subscribe", "news", "-n", "4", "--raw")
    broken = cleo.background("subscribe", "news", "--raw", "--no-reconnect")
    subscribed(ann, "news", bob, cleo)
    ann.run("publish", "news", "1")
    assert broken.stdout is not None and broken.stdout.read(1) == "1"
    cleo.kill(signal.SIGKILL)
    _, err = finish(broken, 3)
    assert "D3001" in err
    started_s = time.monotonic()
    ann.run("publish", "news", "2")
    assert time.monotonic() - started_s < 10, "a dead neighbour holds up nobody"
    cleo.start()
    see_each_other(ann, bob, cleo)
    again = cleo.background("subscribe", "news", "-n", "1", "--raw")
    subscribed(ann, "news", bob, cleo)
    ann.run("publish", "news", "3")
    assert finish(again)[0] == "3"
    cleo_speaks = cleo.json("publish", "news", "4")
    assert cleo_speaks["sent_to"] == [bob.peer_id]
    assert finish(steady)[0] == "1234"


def test_the_trace_reports_what_happened(people: Three) -> None:
    ann, _, _ = people
    trace = ann.directory.parent / "trace.ndjson"

    def types() -> set[object]:
        return {json.loads(line)["type"] for line in trace.read_text().splitlines()}

    wait_for("the trace", lambda: len(types()) >= 3)
