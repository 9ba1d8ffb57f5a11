"""The control socket: never taken from a living daemon, always from a dead one."""

import socket
import stat
from pathlib import Path

import pytest

from dep2p.daemon.http.listeners import open_unix
from dep2p.daemon.problems import Problem


async def test_the_socket_of_another_living_program_is_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen(1)
        with pytest.raises(Problem) as refused:
            open_unix(path)
        assert refused.value.code == "D3005" and "listens" in str(refused.value)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))


async def test_a_socket_that_a_dead_daemon_left_is_replaced_and_private(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
        dead.listen(1)
    async with open_unix(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
