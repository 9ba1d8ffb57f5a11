"""Temporary files of killed writers hold secrets: none survives a later write, a start or the end of a membership."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dep2p.cli.commands.realm import files
from dep2p.daemon.realm_files import RealmFiles
from dep2p.identity import Identity
from dep2p.realm.credentials import LEFTOVER_S, Realm

TEAM = Realm.from_psk(bytes(range(32)), "team")


def leftover(directory: Path, age_s: float = LEFTOVER_S + 1, name: str = ".team.realm.abc123.tmp") -> Path:
    path = directory / name
    path.write_bytes(TEAM.to_file_bytes())
    os.utime(path, (time.time() - age_s, time.time() - age_s))
    return path


def test_a_later_write_removes_what_a_killed_writer_left(tmp_path: Path) -> None:
    old, young = leftover(tmp_path), leftover(tmp_path, 1.0, ".team.realm.def456.tmp")
    other = leftover(tmp_path, name=".work.realm.abc123.tmp")
    TEAM.save(tmp_path / "team.realm")
    assert not old.exists() and young.exists() and other.exists(), "a young one has a writer, another realm's stays"
    assert Realm.from_psk_file(tmp_path / "team.realm") == TEAM


def test_the_start_of_a_daemon_removes_them_all(tmp_path: Path) -> None:
    TEAM.save(tmp_path / "team.realm")
    old, young = leftover(tmp_path), leftover(tmp_path, 1.0, ".work.realm.def456.tmp")
    realms, problems = RealmFiles(tmp_path).load_all()
    assert (realms, problems) == ([TEAM], []) and not old.exists() and young.exists()


@pytest.mark.parametrize("is_daemon", [True, False])
def test_a_member_that_leaves_keeps_no_secret(tmp_path: Path, is_daemon: bool) -> None:
    TEAM.save(tmp_path / "team.realm")
    leftover(tmp_path, 0.0)
    if is_daemon:
        RealmFiles(tmp_path)._remove(TEAM)  # pyright: ignore[reportPrivateUsage]
    else:
        files._remove(tmp_path / "team.realm")  # pyright: ignore[reportPrivateUsage]
    assert list(tmp_path.iterdir()) == []


def test_a_key_file_is_written_beside_no_old_secret(tmp_path: Path) -> None:
    old = leftover(tmp_path, name=".node.key.123.tmp")
    Identity.generate().save(tmp_path / "node.key")
    assert [path.name for path in tmp_path.iterdir()] == ["node.key"] and not old.exists()


@pytest.mark.real
def test_a_writer_that_is_killed_leaves_nothing_for_long(tmp_path: Path) -> None:
    """A process that is killed between the write and the rename; the next one, a minute later, cleans up."""
    code = (
        "import os, signal, pathlib, sys\n"
        "from dep2p.realm.credentials import Realm\n"
        "os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "Realm.from_psk(bytes(range(32)), 'team').save(sys.argv[1])\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "team.realm")], check=False)
    assert done.returncode == -signal.SIGKILL
    [left] = tmp_path.iterdir()
    os.utime(left, (0, 0))
    TEAM.save(tmp_path / "team.realm")
    assert [path.name for path in tmp_path.iterdir()] == ["team.realm"]
