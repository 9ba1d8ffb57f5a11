"""docs/reference/verbs.md names calls of dep2p that exist, and all that a node and a client share."""

import inspect
import re
from pathlib import Path
from typing import Final

import pytest

from dep2p import api_reference
from dep2p.cli.framework.manual import walk
from dep2p.cli.main import root_command

PAGE: Final = (Path(__file__).resolve().parents[2] / "docs/reference/verbs.md").read_text("utf-8")
ROWS: Final = [
    [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith("| Pattern |")
]
CLASSES: Final[dict[str, tuple[str, ...]]] = {
    "": ("Node", "Client"),
    "node": ("Node",),
    "client": ("Client",),
    "queues": ("NodeQueues", "ClientQueues"),
    "sessions": ("Sessions", "ClientSessions"),
    "outbox": ("Outbox", "ClientOutbox"),
    "tracer": ("Tracer", "ClientTracer"),
    "topic": ("Topic", "ClientTopic"),
    "message": ("QueueMessage", "ClientQueueMessage"),
    "session": ("Session", "ClientServedSession"),
    "stream": ("MessageStream", "ClientStream"),
    "receipt": ("Receipt", "ClientReceipt"),
}
"""The classes that have the calls behind a prefix; a prefix that is a class stands for itself, and for the client's."""


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def has(cls: str, member: str) -> bool:
    value = api_reference.value_of(cls)
    assert inspect.isclass(value)
    return hasattr(value, member) or member in [each[0] for each in api_reference.attributes(value)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row[0]))
def test_dep2p_s_names_exist(row: list[str]) -> None:
    assert len(row) == 7 and names(row[1])
    for name in names(row[1]):
        prefix, _, member = name.rpartition(".")
        # Validators and push consumers are a node's alone; of other classes a client has its own.
        only_node = {"Topic", "Queues"}
        pair = (prefix,) if prefix in only_node else (prefix, f"Client{prefix}")
        for cls in CLASSES.get(prefix, pair):
            assert has(cls, member), f"{cls} has no {member}"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row[0]))
def test_commands_exist(row: list[str]) -> None:
    commands = {" ".join(["dep2p", *path]) for path, _ in walk(root_command())}
    assert not [name for name in names(row[2]) if name not in commands]


def test_every_call_that_a_node_and_a_client_share_is_in_a_table() -> None:
    node, client = api_reference.value_of("Node"), api_reference.value_of("Client")
    assert inspect.isclass(node) and inspect.isclass(client)
    shared = {*api_reference.public_members(node)} & {*api_reference.public_members(client)} - {"open"}
    written = {name for row in ROWS for name in names(row[1])}
    assert len(shared) > 30
    assert not shared - written


def test_the_columns_are_the_same_in_every_table() -> None:
    heads = {line for line in PAGE.splitlines() if line.startswith("| Pattern |")}
    assert len(heads) == 1 and len(ROWS) > 30
