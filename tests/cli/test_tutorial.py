"""docs/tutorial/first-messages.md: every command runs as written, and what it says is printed is printed."""

import os
import re
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import pytest

TUTORIAL = Path(__file__).parents[2] / "docs/tutorial/first-messages.md"
BLOCK_S = 90.0


def blocks(text: str) -> Iterator[tuple[str, str, str]]:
    """(kind, terminal, content) of each fenced block."""
    yield from re.findall(r"^```(\w+) (\w+)\n(.*?)^```$", text, re.M | re.S)


class Terminal:
    """A shell that stays open from block to block."""

    def __init__(self, directory: Path) -> None:
        binaries = Path(sys.executable).parent
        keep = {key: value for key, value in os.environ.items() if not key.startswith("DEP2P_")}
        self._shell = subprocess.Popen(
            ["/bin/bash", "--noprofile", "--norc"],
            cwd=directory,
            env={**keep, "PATH": f"{binaries}:{os.environ['PATH']}", "NO_COLOR": "1", "COLUMNS": "200"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._number = 0
        self.output = ""
        """Output since the last block began."""

    def run(self, commands: str) -> None:
        """Run the commands to their end; background ones go on."""
        assert self._shell.stdin is not None and self._shell.stdout is not None
        self._number += 1
        mark = f"block-{self._number}-is-done"
        self._shell.stdin.write(f"{commands}\necho; echo {mark}\n".encode())
        self._shell.stdin.flush()
        deadline = time.monotonic() + BLOCK_S
        got = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._shell.stdout, selectors.EVENT_READ)
            while f"\n{mark}\n".encode() not in got:
                assert selector.select(deadline - time.monotonic()), f"{commands}\nprinted so far:\n{got.decode()}"
                piece = os.read(self._shell.stdout.fileno(), 65_536)
                assert piece, f"the shell ended:\n{got.decode()}"
                got += piece
        self.output = got.decode()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            os.killpg(self._shell.pid, 9)  # its own session: the shell and what it started
        except ProcessLookupError:
            pass
        self._shell.wait(10)
        for stream in (self._shell.stdin, self._shell.stdout):
            if stream is not None:
                stream.close()


def pattern(line: str) -> str:
    """A line of expected output as a regular expression: ``…`` stands for anything, spaces for any number of them."""
    return r"\s+".join(".*".join(re.escape(part) for part in word.split("…")) for word in line.split())


def test_every_line_of_the_tutorial_is_at_most_130_characters() -> None:
    assert max(map(len, TUTORIAL.read_text("utf-8").splitlines())) <= 130


@pytest.mark.real
@pytest.mark.timeout(300)
@pytest.mark.xdist_group("cli-real")
def test_the_tutorial_runs_as_written(tmp_path: Path) -> None:
    shown = 0
    with ExitStack() as stack:
        terminals = {who: stack.enter_context(Terminal(tmp_path)) for who in ("ann", "bob")}
        for kind, who, content in blocks(TUTORIAL.read_text("utf-8")):
            terminal = terminals[who]
            if kind == "sh":
                terminal.run(content)
                continue
            for line in content.splitlines():
                shown += 1
                assert re.search(pattern(line), terminal.output), f"{line!r} is not in\n{terminal.output}"
        for name in ("ann", "bob"):
            log = (tmp_path / f"{name}.log").read_text()
            assert "stopped" in log.splitlines()[-1] and "exit_code=0" in log
    assert shown > 15
