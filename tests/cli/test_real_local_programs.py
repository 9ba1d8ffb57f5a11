"""Programs of one daemon, and no other node: each pattern of the command line reaches another program."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.test_real_daemons import Person, finish, wait_for

pytestmark = [pytest.mark.real, pytest.mark.xdist_group("cli-real"), pytest.mark.timeout(180)]


def test_each_pattern_reaches_another_program_of_the_daemon(tmp_path: Path) -> None:
    with Person(tmp_path, "ann") as ann:
        ann.start()
        ann.run("realm", "new", "team")

        def succeeds(*words: str) -> Callable[[], bool]:
            return lambda: ann.run(*words, expect=None).returncode == 0

        reader = ann.background("subscribe", "chat", "--json", "-n", "2")
        wait_for("the subscription", succeeds("publish", "chat", "one"))
        publish = ann.json("publish", "chat", "two")
        assert (publish["sent_to"], publish["local_subscriptions"]) == ([], 1)
        messages = [json.loads(line) for line in finish(reader)[0].splitlines()]
        assert [(each["text"], each["sender"]) for each in messages] == [("one", ann.peer_id), ("two", ann.peer_id)]

        server = ann.background("reply", "echo", "--echo", "-n", "3")
        wait_for("the handler", succeeds("request", "self", "echo", "first"))
        assert ann.run("request", "self", "echo", "second").stdout.strip() == "second"
        assert ann.run("request", ann.peer_id[-6:], "echo", "third").stdout.strip() == "third"
        finish(server)

        listener = ann.background("listen", "news", "--json", "-n", "2")
        wait_for("the listener", succeeds("send", "self", "news", "kept", "--reliable"))
        ann.run("send", "self", "news", "not kept")
        assert {json.loads(line)["text"] for line in finish(listener)[0].splitlines()} == {"kept", "not kept"}

        big = tmp_path / "big"
        big.write_bytes(bytes(range(256)) * 10_000)
        inbox = tmp_path / "inbox"
        receiver = ann.background("stream", "receive", str(inbox), "--count", "1")
        wait_for("the receiver", succeeds("stream", "send", "self", str(big)))
        finish(receiver)
        assert (inbox / "big").read_bytes() == big.read_bytes()
