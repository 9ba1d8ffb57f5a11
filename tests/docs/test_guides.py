"""The programs in the guides for authors of apps run as they are, and print what their comments say."""

import contextlib
import functools
import io
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import trio.testing

from tests.docs.programs import daemon_in_a_realm, wanted_lines

HOWTO = Path(__file__).resolve().parents[2] / "docs/howto"
PROGRAMS = {
    f"{page}-{number}": block
    for page in ("ten-lines", "embedding", "testing-an-app")
    for number, block in enumerate(
        re.findall(r"```python\n(.*?)```", (HOWTO / f"{page}.md").read_text("utf-8"), re.DOTALL), 1
    )
}
IN_MEMORY = [name for name, block in PROGRAMS.items() if "open_nodes" in block]
REAL = [name for name in PROGRAMS if name not in IN_MEMORY]


def run(program: str) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program, "guide", "exec"), {"__name__": "__main__"})
    assert sorted(printed.getvalue().splitlines()) == sorted(wanted_lines(program))
    assert printed.getvalue() or "assert" in program


def test_each_pattern_is_there_with_a_node_and_with_a_client() -> None:
    page = (HOWTO / "ten-lines.md").read_text("utf-8")
    for pattern in ("Request", "Notify", "Publish", "Stream", "Queue", "Session"):
        section = page.partition(f"\n## {pattern}\n")[2].partition("\n## ")[0]
        node, client = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
        assert "trio.run(main)" in node and "asyncio.run(main())" in client


@pytest.mark.parametrize("name", IN_MEMORY)
def test_a_program_of_nodes_in_memory_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = trio.testing.MockClock(autojump_threshold=0)
    if "MockClock" not in PROGRAMS[name]:
        monkeypatch.setattr(trio, "run", functools.partial(trio.run, clock=clock))
    run(PROGRAMS[name])


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with daemon_in_a_realm(tmp_path_factory.mktemp("daemon")) as folder:
        yield folder


@pytest.mark.real
@pytest.mark.parametrize("name", REAL)
def test_a_program_with_sockets_or_a_daemon_runs(name: str, daemon: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEP2P_DATA_DIR", str(daemon))
    here = Path(sys.executable).parent  # `dep2p` of this environment, for readers who have it on their path
    monkeypatch.setenv("PATH", f"{here}{os.pathsep}{os.environ.get('PATH', '')}")
    run(PROGRAMS[name])
