"""`dep2p.outside_text`, and that nothing goes around it."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dep2p.errors import ErrorCode, error_from_wire
from dep2p.outside_text import environment, file_name, one_line, printable, styled, styled_line
from dep2p.traces.files import SUFFIX, FileName, parse_file_name

ROOT = Path(__file__).resolve().parents[1]
HOSTILE = [
    "\x1b]0;title\x07",
    "\x1b[2J\x1b[H",
    "a\rb",
    "a\x00b",
    "\u202eevil",
    "\u200bzero",
    "\x9b31m",
    "\ud800",
    "../../etc/passwd",
    "/etc/passwd",
    "..",
    ".",
    ".hidden",
    "",
    "a/b",
    "x" * 300,
    "na\u00efve",
    "two words",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_hostile_reaches_a_terminal_a_log_or_a_table(text: str) -> None:
    for shown in (printable(text), one_line(text), styled(text), styled_line(text)):
        assert shown.isprintable()
    assert one_line("a\nb\tc") == "a\\nb\\tc"
    assert printable("a\nb\tc\x07") == "a\nb\tc\\x07"


def test_own_styles_stay_and_others_do_not() -> None:
    assert styled("\x1b[31mred\x1b[0m \x1b[2Jx\n") == "\x1b[31mred\x1b[0m \\x1b[2Jx\n"
    assert styled_line("\x1b[1mbold\x1b[0m\n\x1b]0;t\x07") == "\x1b[1mbold\x1b[0m\\n\\x1b]0;t\\x07"


@pytest.mark.parametrize("text", HOSTILE)
def test_a_file_name_is_one_plain_component_of_its_own_directory(text: str, tmp_path: Path) -> None:
    name = file_name(text)
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name)
    assert (tmp_path / name).resolve().parent == tmp_path.resolve()
    assert file_name("12D3KooWPjceQrSwdWXPyLLeABRXmuqt69Rg3sBYbU1Nft9HyQ6X").startswith("12D3KooW")
    assert file_name("a/b") != file_name("a_b") != file_name("a\x00b")


@pytest.mark.parametrize("text", [*HOSTILE, "x" * 1_000_000])
def test_any_text_is_an_environment_variable_of_a_program(text: str) -> None:
    variables = environment(os.environ, {"DEP2P_KEY": text})
    code = "import os, sys; sys.stdout.write(str(len(os.environb[b'DEP2P_KEY'])))"
    shown = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, check=True)
    assert int(shown.stdout) <= 100_000
    assert variables["PATH"] == os.environ["PATH"]


def test_a_trace_of_a_node_with_a_path_for_an_id_stays_in_its_directory() -> None:
    name = FileName("../../../../tmp/h6/w/EVIL", 1, 0).on_disk
    assert "/" not in name
    assert name.endswith(f"-1-000000{SUFFIX}")
    assert parse_file_name(name) is not None


def test_an_error_text_of_a_peer_cannot_drive_a_terminal() -> None:
    error = error_from_wire(ErrorCode.HANDLER_FAILED, "bad \x1b[2Jnews\n")
    assert str(error) == "bad \\x1b[2Jnews\n"


# The check for ways around it -----------

_WRITES = {"print", "echo", "secho"}
_MAY_WRITE = {
    "cli/framework/command.py": "the one place that writes for commands, by `styled`",
    "cli/framework/progress.py": "its own line of figures",
    "cli/framework/completion.py": "its own script for a shell",
    "cli/framework/errors.py": "the last word of a command that failed, by `styled`",
    "cli/reference.py": "the manual",
    "cli/commands/reply.py": "the name of the user's own function",
    "cli/commands/simulate.py": "its own line of figures",
    "cli/main.py": "the version, and errors before a command is known",
}
_NAMES_FROM_OUTSIDE = {"name", "topic", "key", "reason", "text", "agent", "queue", "channel", "label", "tag", "title"}
_MAY_LOG = {
    ("dep2p/host/connections/peerstore.py", "name"): "of a file that this node named",
    ("dep2p/host/connections/swarm.py", "reason"): "our own sentence",
    ("dep2p/host/discovery/interface.py", "name"): "of a class of ours",
    ("dep2p/host/supervisor.py", "name"): "of a part of ours",
    ("dep2p/host/transports/tcp.py", "text"): "an address of our own listener",
    ("dep2p/pubsub/service.py", "reason"): "our own sentence",
    ("dep2p/queues/broker/connection.py", "reason"): "our own sentence",
    ("dep2p/tracing/file_writer.py", "reason"): "the operating system's",
}


def _trees(*folders: str) -> Iterator[tuple[str, ast.Module]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not path.is_symlink() and path.resolve().is_relative_to(ROOT / folder):
                yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "str" and node.args:
        return _last_name(node.args[0])
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _raw_writes(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in _WRITES:
                yield node.lineno
            elif isinstance(node.func, ast.Attribute) and ast.unparse(node.func).startswith(
                ("sys.stdout.write", "sys.stderr.write", "sys.stdout.buffer", "sys.stderr.buffer", "typer.echo")
            ):
                yield node.lineno


def _raw_environments(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if key is None and ast.unparse(value) == "os.environ":
                    yield node.lineno
        elif isinstance(node, ast.Call):
            for keyword in node.keywords:
                given = keyword.value
                is_made = isinstance(given, ast.Call) and ast.unparse(given.func) == "environment"
                if keyword.arg == "env" and not is_made and not isinstance(given, ast.Constant | ast.Name):
                    yield node.lineno


def _raw_log_arguments(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Arguments of ``%s`` with the name of a text that peers choose; ``%r`` writes escapes."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr not in ("debug", "info", "warning", "error", "exception", "critical") or not node.args:
            continue
        if "logger" not in ast.unparse(node.func.value):
            continue
        text, *values = node.args
        if isinstance(text, ast.JoinedStr):
            yield node.lineno, "an f-string"
        if not isinstance(text, ast.Constant) or not isinstance(text.value, str):
            continue
        conversions = re.findall(r"%[-+ #0-9.]*([a-zA-Z%])", text.value)
        for conversion, value in zip([each for each in conversions if each != "%"], values, strict=False):
            if conversion == "s" and _last_name(value) in _NAMES_FROM_OUTSIDE:
                yield node.lineno, _last_name(value)


def _raw_paths(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """``directory / something.name``: a component of a path that a text from outside may be."""
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            parts = node.right.values if isinstance(node.right, ast.JoinedStr) else [node.right]
            for part in parts:
                value = part.value if isinstance(part, ast.FormattedValue) else part
                if _last_name(value) in _NAMES_FROM_OUTSIDE | {"node", "peer", "realm"}:
                    yield node.lineno, ast.unparse(node)


def test_commands_write_through_the_one_place() -> None:
    for path, tree in _trees("cli"):
        if path not in _MAY_WRITE:
            assert not list(_raw_writes(tree)), f"{path}: write by run.print, run.say or run.warn"


def test_environments_of_programs_are_made_in_the_one_place() -> None:
    for path, tree in _trees("cli", "dep2p"):
        found = list(_raw_environments(tree))
        assert not found, f"{path}:{found}: use dep2p.outside_text.environment"


def test_logs_write_texts_of_others_with_escapes() -> None:
    for path, tree in _trees("dep2p", "cli", "protocols", "gossipsub"):
        for line, name in _raw_log_arguments(tree):
            assert (path, name) in _MAY_LOG, f"{path}:{line}: write {name} by %r, or give it to one_line"


_PATHS_CHECKED = {
    "directory / offer.name": "protocols/messaging/file_transfer.py refuses every name that is not one component",
    "self._directory / offer.name": "the same",
    "directory / f'.dep2p-{key}.part'": "hex digits of a digest",
    "tables / f'.{name}.parquet'": "a table of the report",
    "tables / f'{name}.parquet'": "the same",
    "cache_dir / f'spark-{key}.jsa'": "hex digits of a digest",
}


def test_components_of_paths_are_made_in_the_one_place() -> None:
    for path, tree in _trees("dep2p", "cli", "spark_analytics"):
        for line, found in _raw_paths(tree):
            assert found in _PATHS_CHECKED, f"{path}:{line}: {found}: use dep2p.outside_text.file_name"


def test_the_check_finds_what_goes_around() -> None:
    bad = ast.parse(
        "print(name)\n"
        "sys.stderr.write(name)\n"
        "run(env={**os.environ, 'K': key})\n"
        "run(env=dict(os.environ, K=key))\n"
        "logger.info('%d %s came', 5, message.topic)\n"
        "logger.info(f'{topic} came')\n"
        "path = directory / f'{message.name}.txt'\n"
        "path = directory / node\n"
    )
    assert list(_raw_writes(bad)) == [1, 2]
    assert sorted({*_raw_environments(bad)}) == [3, 4]
    assert [line for line, _name in _raw_log_arguments(bad)] == [5, 6]
    assert [line for line, _found in _raw_paths(bad)] == [7, 8]
    good = ast.parse(
        "run.print(name)\n"
        "run(env=environment(os.environ, {'K': key}))\n"
        "logger.info('%d %r came', 5, message.topic)\n"
        "path = directory / f'{file_name(message.name)}.txt'\n"
    )
    for check in (_raw_writes, _raw_environments, _raw_log_arguments, _raw_paths):
        assert not list(check(good))
