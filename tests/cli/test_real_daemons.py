"""The whole story with real daemons on loopback: realm, invite, messages, files, interruptions, kill -9, restart."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import pytest

pytestmark = [pytest.mark.real, pytest.mark.xdist_group("cli-real"), pytest.mark.timeout(180)]

DEP2P = [sys.executable, "-m", "dep2p.cli.main"]
WAIT_S = 60.0


def wait_for(what: str, condition: Callable[[], Any]) -> Any:
    """Until the condition holds; its value."""
    deadline = time.monotonic() + WAIT_S
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"{what} did not happen in {WAIT_S:g} s"
        time.sleep(0.05)


class Person:
    """A data directory, its daemon, and the command line that talks to it."""

    def __init__(self, root: Path, name: str) -> None:
        self.directory = root / name
        self.directory.mkdir(mode=0o700)
        names = ("DEP2P_DATA_DIR", "DEP2P_SOCKET", "DEP2P_CONFIG")
        self.environment = {key: value for key, value in os.environ.items() if key not in names}
        self.environment |= {"DEP2P_DATA_DIR": str(self.directory), "NO_COLOR": "1"}
        self.children: list[subprocess.Popen[str]] = []
        self.daemon: subprocess.Popen[bytes] | None = None
        self.peer_id = ""
        self.listen = "/ip4/127.0.0.1/tcp/0"

    def start(self, *options: str) -> None:
        with (self.directory / "daemon.log").open("ab") as log:
            self.daemon = subprocess.Popen(
                [*DEP2P, "daemon", "--listen", self.listen, *options],
                env=self.environment, stdout=log, stderr=log,
            )  # fmt: skip
        wait_for("the daemon's start", self._answers)
        self.peer_id = self.json("status")["peer_id"]

    def _answers(self) -> bool:
        assert self.daemon is not None and self.daemon.poll() is None, (self.directory / "daemon.log").read_text()
        return self.run("status", expect=None).returncode == 0

    def kill(self, number: int) -> None:
        assert self.daemon is not None
        self.daemon.send_signal(number)
        self.daemon.wait(WAIT_S)

    def run(self, *words: str, expect: int | None = 0, data: str | None = None) -> "subprocess.CompletedProcess[str]":
        done = subprocess.run(
            [*DEP2P, *words], env=self.environment, capture_output=True, text=True, input=data, timeout=WAIT_S
        )
        assert expect is None or done.returncode == expect, (words, done.returncode, done.stdout, done.stderr)
        return done

    def json(self, *words: str) -> Any:
        return json.loads(self.run("--json", *words).stdout)

    def background(self, *words: str) -> "subprocess.Popen[str]":
        """A command that waits for others; returns when it is registered."""
        child = subprocess.Popen(
            [*DEP2P, *words], env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.children.append(child)
        assert child.stderr is not None
        line = child.stderr.readline()
        while line.startswith("unfinished: "):
            line = child.stderr.readline()
        assert line.startswith(("waiting for", "serving")), line
        return child

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        children: list[subprocess.Popen[Any]] = [*self.children]
        for child in children + ([self.daemon] if self.daemon else []):
            if child.poll() is None:
                child.kill()
            child.wait(WAIT_S)
            for stream in (child.stdout, child.stderr):
                if stream is not None:
                    stream.close()


def finish(child: "subprocess.Popen[str]", code: int = 0) -> tuple[str, str]:
    out, err = child.communicate(timeout=WAIT_S)
    assert child.returncode == code, (out, err)
    return out, err


def see_each_other(*people: Person) -> None:
    for one in people:
        others = {other.peer_id for other in people if other is not one}

        def up(one: Person = one, others: set[str] = others) -> bool:
            members = one.json("realm", "members", "team")["members"]
            return others <= {member["peer"] for member in members if member["state"] == "up"}

        wait_for("seeing the other members", up)


@pytest.fixture(scope="module")
def people(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Person, Person]]:
    """Ann and Bob, in one realm made by Ann; Bob pasted her invite."""
    root = tmp_path_factory.mktemp("real")
    with ExitStack() as stack:
        ann, bob = (stack.enter_context(Person(root, name)) for name in ("ann", "bob"))
        ann.start()
        bob.start()
        made = ann.run("realm", "new", "team")
        assert "the running daemon has joined it" in made.stderr
        invite = ann.run("realm", "invite", "team").stdout
        assert invite.count("\n") == 1
        bob.run("realm", "join", "-", data=invite)
        see_each_other(ann, bob)
        yield ann, bob


def test_status_doctor_peers_and_ping(people: tuple[Person, Person]) -> None:
    ann, bob = people
    text = ann.run("status").stdout
    assert text.startswith(f"Node      12D3KooW…{ann.peer_id[-4:]}   up ") and "team" in text
    doctor = bob.json("doctor")
    assert doctor["ok"] and {check["check"] for check in doctor["checks"]} >= {"daemon", "socket", "realm team"}
    assert [peer["peer"] for peer in ann.json("peer", "ls")["peers"]] == [bob.peer_id]
    assert "2 of 2 answered" in ann.run("peer", "ping", bob.peer_id[-5:], "--count", "2").stdout
    assert f"error: {ann.peer_id} is this node itself" in ann.run("peer", "ping", "self", expect=2).stderr


def test_a_join_that_reaches_no_member_says_whom_it_has_tried_and_why(tmp_path: Path) -> None:
    with Person(tmp_path, "ann") as ann, Person(tmp_path, "bob") as bob:
        ann.start()
        bob.start()
        ann.run("realm", "new", "team")
        invite = ann.run("realm", "invite", "team").stdout
        absent = ann.peer_id
        ann.kill(signal.SIGKILL)
        joined = bob.run("realm", "join", "-", data=invite)
        assert absent in joined.stderr and "no member of the realm is connected" in joined.stderr
        assert "dep2p status" in joined.stderr
        status = bob.run("status").stdout
        assert absent in status and "no member of the realm is connected" in status
        (realm,) = bob.json("realm", "ls")["realms"]
        assert len(realm["problems"]) == 1 and realm["members_up"] == 0


def test_request_and_reply_with_a_command(people: tuple[Person, Person]) -> None:
    ann, bob = people
    replying = bob.background(
        "reply", "greet", "--count", "3", "-c", 'printf "hello %s from %s" "$(cat)" "${DEP2P_PEER#${DEP2P_PEER%????}}"'
    )
    assert ann.run("request", bob.peer_id, "greet", "ann").stdout == f"hello ann from {ann.peer_id[-4:]}\n"
    answer = ann.json("request", bob.peer_id[-6:], "greet", "bytes")
    assert answer["peer"] == bob.peer_id and answer["text"] == f"hello bytes from {ann.peer_id[-4:]}"
    assert f"12D3KooW…{bob.peer_id[-4:]}  ok      hello all" in ann.run("request", "--all", "greet", "all").stdout
    out, err = finish(replying)
    assert out == "" and "[#3]" in err


def test_failures_have_their_exit_codes(people: tuple[Person, Person]) -> None:
    ann, bob = people
    assert "D5003" in ann.run("request", bob.peer_id, "nobody", "x", expect=4).stderr
    failing = bob.background("reply", "fail", "-c", "echo sorry >&2; exit 1")
    done = ann.run("request", bob.peer_id, "fail", expect=1)
    assert "sorry" in done.stderr and "D5002" in done.stderr
    slow = bob.background("reply", "slow", "-c", "sleep 50")
    done = ann.run("request", bob.peer_id, "slow", "--timeout", "0.5", expect=5)
    assert "D5001" in done.stderr
    for child in (failing, slow):
        child.send_signal(signal.SIGINT)
        _, err = finish(child, 130)
        assert "Traceback" not in err
    assert "D5012" in _taken(bob)


def test_sigterm_ends_reply_with_143_and_what_it_started(people: tuple[Person, Person], tmp_path: Path) -> None:
    ann, bob = people
    replying = bob.background("reply", "slow", "-c", f"echo $$ > {tmp_path}/pid; exec sleep 50")
    asking = subprocess.Popen(
        [*DEP2P, "request", bob.peer_id, "slow"],
        env=ann.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    pid = int(wait_for("the command", lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip()))
    replying.terminate()
    _, err = finish(replying, 143)
    assert "Traceback" not in err
    status = Path(f"/proc/{pid}/stat")
    wait_for(
        "the command's end", lambda: not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"
    )
    assert asking.wait(WAIT_S) != 0


def _taken(bob: Person) -> str:
    holding = bob.background("reply", "held", "--echo")
    refused = bob.run("reply", "held", "--echo", expect=6)
    holding.send_signal(signal.SIGINT)
    finish(holding, 130)
    return refused.stderr


def test_notify_and_listen(people: tuple[Person, Person]) -> None:
    ann, bob = people
    listening = bob.background("listen", "news", "--count", "2")
    as_json = bob.background("listen", "news", "--count", "2", "--json")
    ann.run("notify", bob.peer_id, "news", "lunch is ready")
    ann.run("notify", "--all", "news", "-", data="second\n")
    out, err = finish(listening)
    assert out == "lunch is ready\nsecond\n" and f"[#1] news from 12D3KooW…{ann.peer_id[-4:]}  14 B" in err
    lines = [json.loads(line) for line in finish(as_json)[0].splitlines()]
    assert [line["text"] for line in lines] == ["lunch is ready", "second\n"]


def test_a_reader_that_goes_away_ends_listen_quietly(people: tuple[Person, Person]) -> None:
    ann, bob = people
    listening = bob.background("listen", "pipe")
    assert listening.stdout is not None
    ann.run("notify", bob.peer_id, "pipe", "one")
    assert listening.stdout.readline() == "one\n"
    listening.stdout.close()
    listening.stdout = None
    ann.run("notify", bob.peer_id, "pipe", "two")
    assert listening.wait(WAIT_S) == 0
    assert listening.stderr is not None and "Error" not in listening.stderr.read()


def big_file(path: Path, megabytes: int) -> str:
    digest = hashlib.sha256()
    block = os.urandom(1_048_576)
    with path.open("wb") as file:
        for number in range(megabytes):
            piece = number.to_bytes(8, "big") + block[8:]
            file.write(piece)
            digest.update(piece)
    return digest.hexdigest()


def part_bytes(directory: Path) -> int:
    return sum(part.stat().st_size for part in directory.glob(".dep2p-*.part"))


def test_files_go_both_ways_with_matching_checksums(people: tuple[Person, Person], tmp_path: Path) -> None:
    for sender, receiver in (people, people[::-1]):
        digest = big_file(tmp_path / f"{receiver.directory.name}.bin", 24)
        inbox = tmp_path / f"inbox-{receiver.directory.name}"
        receiving = receiver.background("stream", "receive", str(inbox), "--once", "--json")
        sent = sender.json("stream", "send", receiver.peer_id, str(tmp_path / f"{receiver.directory.name}.bin"))
        received = json.loads(finish(receiving)[0])
        assert sent["sha256"] == received["sha256"] == digest
        assert received["peer"] == sender.peer_id and received["started_at_bytes"] == 0
        with (inbox / f"{receiver.directory.name}.bin").open("rb") as file:
            assert hashlib.file_digest(file, "sha256").hexdigest() == digest
        assert [path.name for path in inbox.iterdir()] == [f"{receiver.directory.name}.bin"]


@pytest.mark.parametrize("who", ["sender", "receiver", "receiver killed"])
def test_an_interrupted_file_goes_on_where_it_stopped(people: tuple[Person, Person], tmp_path: Path, who: str) -> None:
    ann, bob = people
    source, inbox = tmp_path / "video.mkv", tmp_path / "inbox"
    digest = big_file(source, 192)
    receiving = bob.background("stream", "receive", str(inbox), "--count", "1", "--json")
    sending = subprocess.Popen(
        [*DEP2P, "stream", "send", bob.peer_id, str(source)],
        env=ann.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    ann.children.append(sending)
    wait_for("the first megabytes", lambda: part_bytes(inbox) > 8_000_000)
    if who == "sender":
        sending.send_signal(signal.SIGINT)
        finish(sending, 130)
    else:
        receiving.send_signal(signal.SIGKILL if who == "receiver killed" else signal.SIGINT)
        out, err = finish(sending, 5)
        assert out == "" and "D6001" in err and "the same command again" in err
        finish(receiving, -signal.SIGKILL if who == "receiver killed" else 130)
        receiving = bob.background("stream", "receive", str(inbox), "--count", "1", "--json")
    assert not (inbox / "video.mkv").exists()
    held = wait_for("the part", lambda: part_bytes(inbox))

    def send_again() -> Any:
        done = ann.run("stream", "send", bob.peer_id, str(source), "--json", expect=None)
        if done.returncode == 6 and "busy" in done.stderr + "received already":
            return None  # the daemon has not told the receiver of the end of the first attempt yet
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    sent = wait_for("the second attempt", send_again)
    assert sent["sha256"] == digest and 8_000_000 < sent["started_at_bytes"] <= max(held, part_bytes(inbox), 1) + 2**23
    (last,) = [line for line in map(json.loads, finish(receiving)[0].splitlines()) if line["ok"]]
    assert last["sha256"] == digest and (inbox / "video.mkv").stat().st_size == source.stat().st_size


def test_nothing_is_overwritten_and_no_one_waiting_is_reported(people: tuple[Person, Person], tmp_path: Path) -> None:
    ann, bob = people
    source = tmp_path / "note.txt"
    source.write_text("from ann")
    assert ann.run("stream", "send", bob.peer_id, str(source), expect=4).stderr.count("D5003") == 2
    inbox = tmp_path / "inbox"
    inbox.mkdir()
    (inbox / "note.txt").write_text("of bob's")
    receiving = bob.background("stream", "receive", str(inbox), "--once")
    done = ann.run("stream", "send", bob.peer_id, str(source), expect=6)
    assert "did not take note.txt" in done.stderr and "exists already" in done.stderr
    (inbox / "note.txt").write_text("from ann")
    assert ann.json("stream", "send", bob.peer_id, str(source))["started_at_bytes"] == 8
    finish(receiving)


def test_bench(people: tuple[Person, Person]) -> None:
    ann, bob = people
    assert "dep2p bench serve" in ann.run("bench", "request", bob.peer_id, expect=4).stderr
    serving = bob.background("bench", "serve")
    figures = ann.json("bench", "request", bob.peer_id, "--count", "50", "--concurrency", "4")
    assert figures["count"] == 50 and figures["per_s"] > 0 and figures["min_ms"] <= figures["p99_ms"]
    assert "median" in ann.run("bench", "notify", bob.peer_id, "--count", "50").stdout
    assert ann.json("bench", "stream", bob.peer_id, "--megabytes", "8")["bytes"] == 8_000_000
    serving.send_signal(signal.SIGINT)
    finish(serving, 130)


def test_a_second_daemon_in_the_directory_is_refused(people: tuple[Person, Person]) -> None:
    ann, _ = people
    assert "D3002" in ann.run("daemon", "--listen", "/ip4/127.0.0.1/tcp/0", expect=6).stderr


def test_after_kill_minus_9_and_restart_messages_flow_again(people: tuple[Person, Person]) -> None:
    ann, bob = people
    before = bob.peer_id
    listening = bob.background("listen", "news", "--no-reconnect")
    bob.kill(signal.SIGKILL)
    _, err = finish(listening, 3)
    assert "D3001" in err
    done = bob.run("status", expect=3)
    assert "stale lock of pid" in done.stderr
    assert bob.run("doctor", expect=1).stdout.count("fail  daemon") == 1
    assert bob.run("id").stdout == f"{before}\n"
    bob.start()
    assert bob.peer_id == before
    see_each_other(ann, bob)
    replying = bob.background("reply", "again", "--echo", "--count", "1")
    assert ann.run("request", bob.peer_id, "again", "hello", "--timeout", "20").stdout == "hello\n"
    finish(replying)


def test_events_report_of_a_peer_that_goes_and_comes(people: tuple[Person, Person]) -> None:
    ann, bob = people
    watching = ann.background("events", "--type", "peer_disconnected", "--type", "peer_connected", "--count", "2")
    bob.run("shutdown")
    assert bob.daemon is not None and bob.daemon.wait(WAIT_S) == 0
    bob.start()
    kinds = [json.loads(line)["kind"] for line in finish(watching)[0].splitlines()]
    assert kinds == ["peer_disconnected", "peer_connected"]


def test_leaving_ends_membership(people: tuple[Person, Person]) -> None:
    ann, bob = people
    assert bob.json("realm", "leave", "team") == {"realm": "team", "left": True, "daemon": True}
    assert bob.json("realm", "ls")["realms"] == [] and not list((bob.directory / "realms").iterdir())
    wait_for("the member's leaving", lambda: not ann.json("realm", "ls")["realms"][0]["members_up"])
    assert ann.run("request", bob.peer_id, "again", "x", "--timeout", "5", expect=None).returncode in (4, 5, 6)
