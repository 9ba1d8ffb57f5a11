"""Contexts and the choice of a daemon: what is stored, what comes first, what is refused."""

import os
import stat
import threading
from pathlib import Path

import pytest

from dep2p.config.contexts import Context, ContextsFile, contexts_path
from dep2p.config.target import TargetArguments, find_daemon
from dep2p.errors import ConfigError

TOKEN = "t" * 32
PRINT = "ab" * 32
HOME = Context(addr="192.0.2.7:4781", token=TOKEN, fingerprint=PRINT)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"XDG_CONFIG_HOME": str(tmp_path / "config"), "XDG_DATA_HOME": str(tmp_path / "data"), "HOME": str(tmp_path)}


@pytest.fixture
def file(environ: dict[str, str]) -> ContextsFile:
    return ContextsFile(contexts_path(environ))


def test_arguments_come_before_the_environment_before_the_selected_context_before_the_default(
    tmp_path: Path, environ: dict[str, str], file: ContextsFile
) -> None:
    found = find_daemon(TargetArguments(), environ)
    assert (found.origin, found.socket) == ("default", tmp_path / "data/dep2p/control.sock")
    file.add("bob", Context(data_dir=str(tmp_path / "bob")))
    file.add("home", HOME)
    file.select("bob")
    found = find_daemon(TargetArguments(), environ)
    assert (found.origin, found.socket) == ("context bob (selected)", tmp_path / "bob/control.sock")
    assert found.config is not None and found.config.origins["node.data_dir"] == "context bob (selected)"
    found = find_daemon(TargetArguments(), environ | {"DEP2P_DATA_DIR": str(tmp_path / "ann")})
    assert (found.origin, found.socket) == ("environment DEP2P_DATA_DIR", tmp_path / "ann/control.sock")
    found = find_daemon(TargetArguments(), environ | {"DEP2P_SOCKET": "/s", "DEP2P_DATA_DIR": str(tmp_path)})
    assert (found.origin, found.socket) == ("environment DEP2P_SOCKET", Path("/s"))
    found = find_daemon(TargetArguments(), environ | {"DEP2P_CONTEXT": "home"})
    assert (found.origin, found.tcp, found.token) == ("context home (environment DEP2P_CONTEXT)", HOME.addr, TOKEN)
    assert found.is_tls and found.socket is None and found.config is None
    both = environ | {"DEP2P_SOCKET": "/s", "DEP2P_CONTROL_SOCKET": "/s"}
    found = find_daemon(TargetArguments(context="home"), both)
    assert found.origin == "context home (argument context)"
    assert find_daemon(TargetArguments(context="bob"), both).socket == tmp_path / "bob/control.sock"
    found = find_daemon(TargetArguments(context="default"), both)
    assert found.socket == tmp_path / "data/dep2p/control.sock"
    found = find_daemon(TargetArguments(data_dir=tmp_path / "c"), environ | {"DEP2P_SOCKET": "/s"})
    assert (found.origin, found.socket) == ("argument data_dir", tmp_path / "c/control.sock")


@pytest.mark.parametrize(
    ("given", "variables", "words"),
    [
        (TargetArguments(socket=""), {}, ["argument socket", "empty"]),
        (TargetArguments(data_dir=""), {}, ["argument data_dir", "empty"]),
        (TargetArguments(context=""), {}, ["argument context", "empty"]),
        (TargetArguments(socket="/a", context="home"), {}, ["argument socket (/a)", "argument context (home)"]),
        (TargetArguments(data_dir="/a", tcp="127.0.0.1:1"), {}, ["argument data_dir (/a)", "argument tcp"]),
        (TargetArguments(token=TOKEN), {}, ["argument token", "goes with tcp"]),
        (TargetArguments(context="nobody"), {}, ["argument context", "'nobody'", "there is: default, home"]),
        (TargetArguments(tcp="192.0.2.7:1", token=TOKEN), {}, ["not a loopback address", "fingerprint or ca_file"]),
        (TargetArguments(tcp="192.0.2.7:1", fingerprint=PRINT), {}, ["needs the token"]),
        (TargetArguments(tcp="192.0.2.7", token=TOKEN, fingerprint=PRINT), {}, ["is not HOST:PORT"]),
        (TargetArguments(tcp="192.0.2.7:1", token=TOKEN, fingerprint="ab"), {}, ["64 hex digits"]),
        (
            TargetArguments(),
            {"DEP2P_CONTEXT": "home", "DEP2P_DATA_DIR": "/d"},
            ["environment DEP2P_CONTEXT is home", "environment DEP2P_DATA_DIR is /d"],
        ),
        (TargetArguments(), {"DEP2P_CONTEXT": "x"}, ["environment DEP2P_CONTEXT", "there is no context 'x'"]),
        (TargetArguments(), {"DEP2P_SOKET": "/s"}, ["environment DEP2P_SOKET", 'mean "DEP2P_SOCKET"?']),
        (TargetArguments(), {"DEP2P_CONTEXT": " "}, ["environment DEP2P_CONTEXT", "empty"]),
    ],
)
def test_what_contradicts_itself_is_refused_with_its_origin(
    environ: dict[str, str], file: ContextsFile, given: TargetArguments, variables: dict[str, str], words: list[str]
) -> None:
    file.add("home", HOME)
    with pytest.raises(ConfigError) as refused:
        find_daemon(given, environ | variables)
    for word in words:
        assert word in str(refused.value)


def test_the_file_is_the_users_alone_and_is_written_whole(file: ContextsFile) -> None:
    os.umask(0)
    file.add("home", HOME)
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.path.parent.stat().st_mode) == 0o700
    assert file.contexts() == {"home": HOME}
    file.select("home")
    file.remove("home")
    assert (file.contexts(), file.selected()) == ({}, "")
    assert [path.name for path in file.path.parent.iterdir()] == ["contexts.json"]
    file.path.chmod(0o640)
    with pytest.raises(ConfigError, match="others may read it"):
        file.contexts()


def test_changes_of_several_programs_lose_nothing(file: ContextsFile) -> None:
    threads = [
        threading.Thread(target=file.add, args=(f"c{number}", Context(socket=f"/{number}"))) for number in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(file.contexts()) == {f"c{number}" for number in range(16)}


@pytest.mark.parametrize(
    ("name", "context"),
    [
        ("default", Context(socket="/s")),
        ("../x", Context(socket="/s")),
        ("x" * 65, Context(socket="/s")),
        ("", Context(socket="/s")),
        ("x", Context()),
        ("x", Context(socket="/s", data_dir="/d")),
        ("x", Context(socket="s")),
        ("x", Context(socket="/s", token=TOKEN)),
        ("x", Context(addr="192.0.2.7:1", token=TOKEN)),
        ("x", Context(addr="192.0.2.7:1", fingerprint=PRINT)),
        ("x", Context(addr="192.0.2.7:1", token="short", fingerprint=PRINT)),
        ("x", Context(addr="192.0.2.7:1", token=TOKEN + "\r\nx: y", fingerprint=PRINT)),
        ("x", Context(addr="192.0.2.7:1", token=TOKEN, fingerprint=PRINT, ca_file="system")),
        ("x", Context(addr="192.0.2.7:1", token=TOKEN, fingerprint=PRINT.upper())),
        ("x", Context(addr="192.0.2.7:1", token=TOKEN, ca_file="ca.pem")),
        ("x", Context(addr="evil@host:1", token=TOKEN, fingerprint=PRINT)),
        ("x", Context(addr="192.0.2.7:65536", token=TOKEN, fingerprint=PRINT)),
    ],
)
def test_a_context_that_cannot_be_used_is_not_stored(file: ContextsFile, name: str, context: Context) -> None:
    with pytest.raises(ConfigError):
        file.add(name, context)
    assert not file.path.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'{"version": 2}',
        b'{"contexts": {"x": {"addr": "192.0.2.7:1"}}}',
        b'{"contexts": {"x": {"socket": "/s", "more": 1}}}',
        b'{"contexts": {"x": {"socket": 1}}}',
        b"\xff",
        b"[" * 100_000,
    ],
)
def test_a_damaged_file_is_named_and_stays(file: ContextsFile, content: bytes) -> None:
    file.path.parent.mkdir(parents=True)
    file.path.write_bytes(content)
    file.path.chmod(0o600)
    for attempt in (file.contexts, lambda: file.add("y", Context(socket="/s"))):
        with pytest.raises(ConfigError, match=r"contexts\.json"):
            attempt()
    assert file.path.read_bytes() == content


def test_an_existing_context_is_replaced_only_when_asked(file: ContextsFile) -> None:
    file.add("x", Context(socket="/a"))
    with pytest.raises(ConfigError, match="there is a context x already"):
        file.add("x", Context(socket="/b"))
    file.add("x", Context(socket="/b"), replace=True)
    assert file.contexts() == {"x": Context(socket="/b")}
