"""Traces of real daemons: three people, one of whom is killed in the middle; the files hold what they counted."""

import re
import signal
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from dep2p.traces.files import ReadProblems, parse_file_name, read_events, trace_files
from tests.cli.test_real_daemons import Person, finish, see_each_other, wait_for
from tests.cli.test_real_pubsub import subscribed

pytestmark = [pytest.mark.real, pytest.mark.xdist_group("cli-real"), pytest.mark.timeout(180)]
MESSAGES = 200


def runs(directory: Path) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """The events of each node and run; damage fails."""
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for path in sorted(trace_files([directory]), key=lambda path: path.name):
        name, problems = parse_file_name(path.name), ReadProblems()
        assert name is not None
        found.setdefault((name.node, name.start_ns), []).extend(read_events(path, problems))
        assert not problems
    for events in found.values():
        assert [event["seq"] for event in events] == list(range(len(events)))
        assert events[0]["kind"] == "node_start"
    return found


def counted(person: Person, event: str) -> int:
    """One of a daemon's metrics."""
    text = person.run("status", "--json").stdout
    found = re.search(rf'"{event}": (\d+)', text)
    return int(found[1]) if found else 0


def test_three_daemons_one_killed_and_every_message_is_in_the_files(tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    with ExitStack() as stack:
        ann, bob, cleo = (stack.enter_context(Person(tmp_path, name)) for name in ("ann", "bob", "cleo"))
        (bob.directory / "config.toml").write_text(f'[trace]\nenabled = true\ndir = "{traces}"\nsnapshot_s = 1.0\n')
        for person in (ann, bob, cleo):
            person.start()
        ann.run("realm", "new", "team")
        invite = ann.run("realm", "invite", "team").stdout
        for other in (bob, cleo):
            other.run("realm", "join", "-", data=invite)
        see_each_other(ann, bob, cleo)
        assert "not tracing" in ann.run("trace", "status").stdout
        for person in (ann, cleo):
            assert str(traces) in person.run("trace", "start", str(traces), "--snapshot", "1").stderr
        again = ann.run("trace", "start", expect=None)
        assert again.returncode and "D7006" in again.stderr and "dep2p trace stop" in again.stderr

        lines = "".join(f"{number}\n" for number in range(MESSAGES))
        readers = [person.background("subscribe", "news", "-n", str(MESSAGES), "--raw") for person in (bob, cleo)]
        subscribed(ann, "news", bob, cleo)
        ann.run("publish", "news", "-", "--lines", data=lines)
        for reader in readers:
            finish(reader)
        wait_for("the writers", lambda: cleo.json("trace", "status")["events"] >= 2 * MESSAGES)
        cleo.kill(signal.SIGKILL)
        assert bob.json("trace", "status")["is_on"]
        live = ann.run("trace", "salvage", str(traces))
        assert "completed: 1" in live.stderr and "left alone: 2" in live.stderr
        stopped = ann.run("trace", "stop")
        assert "dep2p trace analyze" in stopped.stderr
        published = counted(ann, "pubsub_router_published")
        ann.run("publish", "news", "untraced")
        bob.kill(signal.SIGTERM)

        by_node = {node: events for (node, _), events in runs(traces).items()}
        assert set(by_node) == {ann.peer_id, bob.peer_id, cleo.peer_id}
        kinds = {node: Counter(event["kind"] for event in events) for node, events in by_node.items()}
        assert kinds[ann.peer_id]["publish"] == published == MESSAGES
        ids = {event["msg"] for event in by_node[ann.peer_id] if event["kind"] == "publish"}
        for person in (bob, cleo):
            delivered = [event["msg"] for event in by_node[person.peer_id] if event["kind"] == "deliver"]
            assert len(delivered) == len(set(delivered)) and ids <= set(delivered)
        assert kinds[ann.peer_id]["node_stop"] == kinds[bob.peer_id]["node_stop"] == 1
        assert not kinds[cleo.peer_id]["node_stop"], "a run without it was killed"
        assert kinds[bob.peer_id]["scores"] and kinds[bob.peer_id]["mesh"]

        cleo.start()
        cleo.run("trace", "start", str(traces))
        cleo.run("trace", "stop")
        assert len(runs(traces)) == 4
