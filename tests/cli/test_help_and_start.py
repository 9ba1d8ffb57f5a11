"""Help of every command, the generated reference, completion, and a start that loads next to nothing."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dep2p.cli.framework.manual import manual_of, walk
from dep2p.cli.main import root_command
from dep2p.cli.reference import reference

ALL = [(path, found) for path, found in walk(root_command())]
COMMANDS = [(path, found) for path, found in ALL if not hasattr(found, "commands")]
HEAVY = ("trio", "libp2p", "pyspark", "httpx", "starlette", "anyio", "asyncio", "nacl", "cbor2", "rich")


@pytest.mark.parametrize("path", [path for path, _ in ALL], ids=" ".join)
def test_every_command_has_help_and_a_manual_page(cli: Callable[..., Any], path: tuple[str, ...]) -> None:
    for flag in ("--help", "-h"):
        done = cli(*path, flag)
        assert done.code == 0 and done.out.startswith("Usage: dep2p") and done.err == ""
    page = cli("help", *path)
    assert page.code == 0 and page.out.startswith("NAME\n")
    for heading in ("SYNOPSIS", "OPTIONS"):
        assert f"\n{heading}\n" in page.out
    assert max(map(len, page.out.splitlines())) <= 130
    assert "<" not in page.out.partition("OPTIONS")[2].partition("EXIT STATUS")[0].replace("<=", "")
    assert cli("help", *path, "--json").json["synopsis"]


@pytest.mark.parametrize(("path", "found"), COMMANDS, ids=[" ".join(path) for path, _ in COMMANDS])
def test_every_command_has_an_example_of_itself_and_takes_json(path: tuple[str, ...], found: Any) -> None:
    examples = manual_of(found).examples
    assert examples and any(f"{' '.join(path)}" in line for line, _ in examples)
    assert any("--json" in parameter.opts for parameter in found.params)


def test_every_option_has_an_explanation() -> None:
    for path, found in ALL:
        for parameter in found.params:
            assert parameter.help, (path, parameter.name)


def test_the_reference_is_up_to_date() -> None:
    written = Path(__file__).parents[2] / "docs/reference/cli.md"
    assert written.read_text("utf-8") == reference(), "python -m dep2p.cli.reference docs/reference/cli.md"


def test_no_words_show_help_with_exit_2(cli: Callable[..., Any]) -> None:
    for words in ([], ["realm"]):
        done = cli(*words)
        assert done.code == 2 and done.out == "" and "Usage: dep2p" in done.err


def test_version(cli: Callable[..., Any]) -> None:
    from dep2p import __version__

    assert cli("--version").out == f"dep2p {__version__}\n"


def run(*args: str, env: dict[str, str] | None = None) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run([sys.executable, *args], capture_output=True, timeout=60, env=env)


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from dep2p.cli import main; code = main.run(['--help']); "
        f"print(*[m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr); sys.exit(code)"
    )
    done = run("-c", code)
    assert (done.returncode, done.stderr.strip()) == (0, b"")


def test_a_client_command_does_not_load_the_node(tmp_path: Path) -> None:
    code = (
        "import sys; from dep2p.cli import main\n"
        f"for words in (['status'], ['realm', 'new', 'team'], ['doctor'], ['id', '--new'], ['realm', 'show']):\n"
        f"    main.run(['--data-dir', {str(tmp_path / 'd')!r}, *words])\n"
        "heavy = ('libp2p', 'starlette', 'pyspark', 'dep2p.node')\n"
        "print('LOADED', *[name for name in heavy if name in sys.modules])"
    )
    done = run("-c", code)
    assert done.stdout.decode().splitlines()[-1] == "LOADED"


def test_help_loads_little_more_than_typer_does() -> None:
    """Modules stand for the time of a start: seconds would say how busy the machine is."""
    count = "import sys; {}; print(len(sys.modules), file=sys.stderr)"
    with_typer = run("-c", count.format("import typer"))
    with_help = run("-c", count.format("from dep2p.cli import main; main.run(['--help'])"))
    assert int(with_help.stderr) < 2 * int(with_typer.stderr)


def test_a_closed_pipe_ends_quietly() -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "dep2p.cli.main", "errors", "ls"], stdout=write, stderr=subprocess.PIPE, timeout=60
        )
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


def test_no_colour_and_no_escapes_without_a_terminal() -> None:
    done = run("-m", "dep2p.cli.main", "errors", "show", "D3001")
    assert done.returncode == 0 and b"\x1b" not in done.stdout + done.stderr


def on_a_terminal(*words: str, **environment: str) -> bytes:
    import pty

    master, slave = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-m", "dep2p.cli.main", *words],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**{k: v for k, v in os.environ.items() if k != "NO_COLOR"}, "TERM": "xterm", **environment},
    )
    os.close(slave)
    output = b""
    try:
        while chunk := os.read(master, 65_536):
            output += chunk
    except OSError:
        pass  # Linux says EIO when the other side is closed
    finally:
        os.close(master)
    assert child.wait(60) == 0
    return output


def test_colour_on_a_terminal_and_not_with_no_color() -> None:
    assert b"\x1b[1mD3001\x1b[0m" in on_a_terminal("errors", "show", "D3001")
    assert b"\x1b" not in on_a_terminal("errors", "show", "D3001", NO_COLOR="1")
    assert b"\x1b" not in on_a_terminal("--no-color", "errors", "show", "D3001")
    assert b"\x1b" not in on_a_terminal("errors", "show", "D3001", "--no-color")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "powershell", "pwsh"])
def test_completion_scripts(cli: Callable[..., Any], shell: str) -> None:
    done = cli("completion", "show", shell)
    assert done.code == 0 and "_DEP2P_COMPLETE" in done.out
    assert cli("completion", "show", shell, "--json").json["shell"] == shell


def test_completion_of_an_unknown_shell_is_reported(cli: Callable[..., Any]) -> None:
    done = cli("completion", "show", "csh")
    assert done.code == 2 and "'csh' is not one of" in done.err


def test_completion_install_writes_below_home(
    cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    done = cli("completion", "install", "fish", "--json")
    assert done.code == 0 and Path(done.json["path"]).is_relative_to(tmp_path)
    assert "_DEP2P_COMPLETE" in Path(done.json["path"]).read_text()


def test_the_shell_gets_completions() -> None:
    environment = {**os.environ, "_DEP2P_COMPLETE": "complete_bash", "COMP_WORDS": "dep2p realm in", "COMP_CWORD": "2"}
    done = run("-c", "from dep2p.cli.main import main; main()", env=environment)
    assert done.stdout.split() == [b"invite"]
