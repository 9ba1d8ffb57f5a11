"""The shell's completions of values, as the shell asks for them: by environment variables."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dep2p.cli import main
from dep2p.cli.framework.completion import VARIABLE
from tests.daemon.api.fake_node import ANN, BOB, ME
from tests.daemon.api.harness import Served, serving

Complete = Callable[[str], list[str]]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Served]:
    with serving() as started:
        for name in ("DEP2P_DATA_DIR", "DEP2P_CONTEXT"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("DEP2P_SOCKET", str(started.socket))
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
        yield started


@pytest.fixture
def complete(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Complete:
    """The completions of a line whose last word is not complete."""

    def ask(line: str) -> list[str]:
        words = line.split(" ")
        with monkeypatch.context() as patched:
            patched.setenv(VARIABLE, "complete_bash")
            patched.setenv("COMP_WORDS", line)
            patched.setenv("COMP_CWORD", str(len(words) - 1))
            with pytest.raises(SystemExit):
                main.run([])
        said = capsys.readouterr()
        assert not said.err, said.err
        return said.out.split()

    return ask


def test_what_the_daemon_knows_is_completed(served: Served, complete: Complete) -> None:
    assert {"self", ANN, BOB} <= set(complete("dep2p request "))
    assert ME not in complete("dep2p request ")
    assert complete(f"dep2p request {ANN[:-4]}") == [ANN]
    assert complete("dep2p request self ") == []
    assert ANN in complete("dep2p send ")
    assert complete("dep2p realm members ") == ["team"]
    assert complete("dep2p publish chat x --realm t") == ["team"]
    assert complete("dep2p realm show ") == ["team"]
    served.do(served.node.pubsub().deliver, b"x", 1)
    assert all(topic.startswith("ch") for topic in complete("dep2p publish ch"))


def test_words_without_a_daemon_are_completed_too(
    complete: Complete, cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("DEP2P_SOCKET", str(tmp_path / "nothing.sock"))
    assert complete("dep2p subscribe chat --on-full drop") == ["drop-newest", "drop-oldest"]
    assert complete("dep2p publish chat x --on-no-peers ") == ["error", "ok", "queue"]
    assert "D4001" in complete("dep2p errors show D400")
    assert cli("context", "add", "home", "--dir", "/tmp/home").code == 0
    assert complete("dep2p context select ") == ["default", "home"]
    assert complete("dep2p --context ho") == ["home"]
    assert complete("dep2p request ") == [], "no daemon: no values, and no error in the user's line"
    assert complete("dep2p publish chat --realm ") == []


def test_a_wrong_setting_does_not_break_the_line(complete: Complete, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEP2P_CONTEXT", "nowhere")
    monkeypatch.delenv("DEP2P_SOCKET", raising=False)
    monkeypatch.delenv("DEP2P_DATA_DIR", raising=False)
    assert complete("dep2p request ") == []
