"""Names for daemons: what `dep2p context` stores, shows and refuses."""

import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TOKEN = "0123456789abcdef0123456789abcdef"
FINGERPRINT = "5f" * 32


@pytest.fixture(autouse=True)
def contexts_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("DEP2P_CONTEXT", raising=False)
    return tmp_path / "config" / "dep2p" / "contexts.json"


def test_a_context_is_added_selected_shown_and_removed(cli: Callable[..., Any], contexts_file: Path) -> None:
    added = cli(
        "context",
        "add",
        "home",
        "--addr",
        "192.0.2.7:4781",
        "--fingerprint",
        FINGERPRINT,
        stdin=b"%s\n" % TOKEN.encode(),
    )
    assert added.code == 0 and "dep2p context select home" in added.err
    assert stat.S_IMODE(contexts_file.stat().st_mode) == 0o600
    assert cli("context", "add", "bob", "--dir", "/tmp/bob", "--select").code == 0
    listed = cli("context", "ls", "--json").json
    assert listed["selected"] == "bob" and [row["name"] for row in listed["contexts"]] == ["home", "bob"]
    assert cli("context", "select", "home").code == 0
    shown = cli("context", "show", "home", "--json").json
    assert (shown["addr"], shown["fingerprint"], shown["token"]) == ("192.0.2.7:4781", FINGERPRINT, "***")
    assert cli("context", "show", "home", "--token", "--json").json["token"] == TOKEN
    assert cli("context", "rm", "home").code == 0
    assert cli("context", "ls", "--json").json["selected"] == "default"
    assert TOKEN not in contexts_file.read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--addr", "192.0.2.7:4781"], "fingerprint"),
        (["--addr", "192.0.2.7:4781", "--fingerprint", "5f"], "64 hex digits"),
        (["--addr", "192.0.2.7", "--fingerprint", FINGERPRINT], "192.0.2.7"),
        (["--addr", "192.0.2.7:4781", "--fingerprint", FINGERPRINT, "--ca", "system"], "one of the two"),
        (["--addr", "192.0.2.7:4781", "--fingerprint", FINGERPRINT], "standard input has no token"),
        (["--dir", "/tmp/bob", "--sock", "/tmp/s"], "exactly one"),
        (["--dir", ""], "--dir is empty"),
        (["--dir", "/tmp/bob", "--token", TOKEN], "go with --addr"),
        ([], "exactly one"),
    ],
)
def test_a_context_that_cannot_be_used_is_refused_before_the_token_is_asked_for(
    cli: Callable[..., Any], contexts_file: Path, words: list[str], said: str
) -> None:
    refused = cli("context", "add", "home", *words)
    assert refused.code != 0 and said in refused.err
    assert not contexts_file.exists()


def test_an_unknown_context_is_refused_with_what_to_do(cli: Callable[..., Any]) -> None:
    assert cli("context", "add", "bob", "--dir", "/tmp/bob").code == 0
    for words in (["context", "select", "home"], ["context", "rm", "home"], ["--context", "home", "status"]):
        refused = cli(*words)
        assert refused.code != 0 and "there is: default, bob" in refused.err and "dep2p context add" in refused.err
    again = cli("context", "add", "bob", "--dir", "/tmp/other")
    assert again.code != 0 and "--replace" in again.err
    assert cli("context", "add", "bob", "--dir", "/tmp/other", "--replace").code == 0
    assert "/tmp/other" in cli("context", "ls").out
