"""Malformed commands about queues, against a control API over a real engine: each is refused, and changes nothing."""

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import pytest
import typer.main

from dep2p.cli.commands.queue.admin import register
from tests.daemon.api.harness import Served, serving
from tests.queues.admin_cases import HANDLE, prepare, state

COMMANDS: Final[dict[str, list[str]]] = {
    "create": [
        "new", "--max-attempts", "5", "--msg-timeout", "30", "--ttl", "12h", "--max-messages", "10",
        "--max-bytes", "1M", "--partitions", "2", "--order", "strict", "--no-dead-letters", "--publish", "owner",
        "--consume", "members",
        "--administer", "owner", "--node", "self",
    ],
    "ls": [],
    "info": ["jobs"],
    "put": ["jobs", "x", "--delay", "1", "--key", "k", "--tag", "a", "--priority", "1"],
    "consume": ["jobs", "b", "--count", "1", "--max-in-flight", "1", "--from-start", "--filter", "tag = a", "--fifo"],
    "receive": ["jobs", "b", "--count", "1", "--wait", "1", "--invisible", "5", "--from-start", "--raw"],
    "ack": ["jobs", "b", HANDLE],
    "invisible": ["jobs", "b", HANDLE, "10"],
    "expand": ["jobs", "4", "--node", "self"],
    "route": ["jobs"],
    "consumers": ["jobs", "b"],
    "locks": ["jobs", "b"],
    "peek": ["jobs", "--channel", "b", "--count", "1"],
    "pause": ["jobs", "b"],
    "resume": ["jobs", "paused"],
    "empty": ["jobs", "b", "--yes"],
    "rm": ["jobs", "--yes", "--force"],
    "rm-channel": ["jobs", "b", "--yes"],
    "export": ["jobs"],
    "dlq ls": ["jobs", "a", "--count", "1", "--after", "0"],
    "dlq show": ["jobs", "a", "1", "--raw"],
    "dlq replay": ["jobs", "a", "1"],
    "dlq rm": ["jobs", "a", "1"],
}  # fmt: skip
"""Each command with its arguments and most of its options; nothing in it is wrong."""
REQUIRED: Final = {name: 1 for name in ("create", "info", "put", "route", "peek", "export", "rm")} | {
    "ack": 3,
    "invisible": 4,
    "expand": 2,
    "dlq show": 3,
    "ls": 0,
}
"""Arguments that cannot be left out; two elsewhere: the queue and the channel, or one that says all."""
VARIADIC: Final = ("put", "ack", "dlq replay", "dlq rm")
NUMBERS: Final = (
    "--max-attempts",
    "--max-messages",
    "--partitions",
    "--count",
    "--priority",
    "--max-in-flight",
    "--after",
)
TIMES: Final = ("--msg-timeout", "--ttl", "--delay", "--wait", "--invisible", "--max-bytes")


class Refused(NamedTuple):
    """A command that is refused."""

    name: str
    words: list[str]

    def __str__(self) -> str:
        return self.name


def refused() -> Iterator[Refused]:
    """Each command with an unknown or misspelt option, a wrong value, or without an argument."""
    for command, given in COMMANDS.items():
        arguments = _arguments(given)
        options = given[len(arguments) :]
        words = command.split()
        yield Refused(f"{command}-unknown", [*words, *given, "--nonsense"])
        if command not in VARIADIC:
            yield Refused(f"{command}-surplus", [*words, *arguments, "surplus", "surplus", *options])
        for left in range(REQUIRED.get(command, 2)):
            yield Refused(f"{command}-missing {left + 1}", [*words, *arguments[:left], *options])
        for at, word in enumerate(given):
            if not word.startswith("--"):
                continue
            misspelt = word[: len(word) // 2] + word[len(word) // 2 + 1 :]
            yield Refused(f"{command}-misspelt {word}", [*words, *given[:at], misspelt, *given[at + 1 :]])
            if word in (*NUMBERS, *TIMES):
                yield Refused(f"{command}-no number {word}", [*words, *given[: at + 1], "x", *given[at + 2 :]])
                yield Refused(f"{command}-negative {word}", [*words, *given[: at + 1], "-1", *given[at + 2 :]])
    for command in ("pause", "resume", "empty"):
        more = ["--yes"] if command == "empty" else []
        yield Refused(f"{command}-no channel", [command, "jobs", *more])
        yield Refused(f"{command}-both", [command, "jobs", "b", "--all-channels", *more])
        yield Refused(f"{command}-all misspelt", [command, "jobs", "--all-chanels", *more])
        yield Refused(f"{command}-no such channel", [command, "jobs", "bb", *more])
    for command in ("replay", "rm"):
        yield Refused(f"dlq {command}-neither", ["dlq", command, "jobs", "a"])
        yield Refused(f"dlq {command}-both", ["dlq", command, "jobs", "a", "1", "--all"])
        yield Refused(f"dlq {command}-no number", ["dlq", command, "jobs", "a", "x"])
        yield Refused(f"dlq {command}-no such id", ["dlq", command, "jobs", "a", "7"])
    for command, given in (("rm", ["jobs"]), ("rm-channel", ["jobs", "b"]), ("empty", ["jobs", "b"])):
        yield Refused(f"{command}-nobody to ask", [command, *given])
    yield Refused("create-order", ["create", "new", "--order", "strct"])
    yield Refused("create-access", ["create", "new", "--consume", "anyone"])
    yield Refused("expand-no number", ["expand", "jobs", "x"])
    yield Refused("expand-fewer", ["expand", "jobs", "1"])
    yield Refused("invisible-no time", ["invisible", "jobs", "b", HANDLE, "soon"])
    yield Refused("ack-no handle", ["ack", "jobs", "b", "x"])


def _arguments(given: list[str]) -> list[str]:
    """Those before the first option."""
    return given[: next((at for at, word in enumerate(given) if word.startswith("-")), len(given))]


@pytest.fixture(scope="module")
def queues() -> Iterator[Served]:
    with serving() as served:
        served.call(served.control.nursery.start, served.node.queues.engine.run)
        served.call(prepare, served.node.queues.select(None))
        yield served


def _state(served: Served) -> object:
    return served.call(state, served.node.queues.select(None), served.node.queues.engine)


def test_every_command_is_among_the_cases() -> None:
    app = typer.Typer()
    register(app)
    app.command("other")(lambda: None)
    group: Any = typer.main.get_command(app)
    names: set[str] = set()
    for name, command in group.commands["queue"].commands.items():
        inner = getattr(command, "commands", None)
        names |= {name} if inner is None else {f"{name} {each}" for each in inner}
    assert names == set(COMMANDS)


@pytest.mark.parametrize("case", list(refused()), ids=str)
def test_a_malformed_command_is_refused_and_changes_nothing(
    queues: Served, cli: Callable[..., Any], case: Refused
) -> None:
    before = _state(queues)
    done = cli("--socket", str(queues.socket), "queue", *case.words)
    assert done.code != 0, done.out
    assert done.err, "it says why"
    assert _state(queues) == before


def test_what_is_well_formed_is_taken(queues: Served, cli: Callable[..., Any]) -> None:
    """So the refusals above are about the fault."""
    for command in ("ls", "info", "route", "consumers", "locks", "peek", "export", "dlq ls", "dlq show"):
        done = cli("--socket", str(queues.socket), "queue", *command.split(), *COMMANDS[command])
        assert done.code == 0, done.err
    assert cli("--socket", str(queues.socket), "--json", "queue", "empty", "jobs", "b", "--yes").json == {
        "queue": "jobs",
        "channel": "b",
        "messages": 3,
    }
