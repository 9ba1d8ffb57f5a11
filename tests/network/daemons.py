"""Real daemons on the machines of a laboratory."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from tests.network.lab import Host

_DEP2P = (sys.executable, "-m", "dep2p.cli.main")
WAIT_S = 40.0


def wait_for(what: str, condition: Callable[[], bool]) -> None:
    """Wait until the condition holds."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen in {WAIT_S:g} s"
        time.sleep(0.05)


class LabDaemon:
    """A daemon on a machine, and the command line that talks to it."""

    def __init__(self, host: Host, data_dir: Path) -> None:
        self.host = host
        self.data_dir = data_dir
        data_dir.mkdir(mode=0o700)
        names = ("DEP2P_DATA_DIR", "DEP2P_SOCKET", "DEP2P_CONFIG")
        self._environment = {key: value for key, value in os.environ.items() if key not in names}
        self._environment |= {"DEP2P_DATA_DIR": str(data_dir), "NO_COLOR": "1"}
        self.processes: list[subprocess.Popen[bytes]] = []
        self._daemon: subprocess.Popen[bytes] | None = None

    def start(self, *options: str, listen: Sequence[str] = ("/ip4/0.0.0.0/tcp/4001",)) -> None:
        """Start the daemon. Others may be started before `wait_started`."""
        addresses = [word for each in listen for word in ("--listen", each)]
        self._daemon = self.background("daemon", *addresses, *options)

    def wait_started(self) -> None:
        """Wait until the daemon answers."""
        daemon = self._daemon
        assert daemon is not None
        wait_for("the daemon's start", lambda: daemon.poll() is not None or self._answers())
        assert daemon.poll() is None, self.log()

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as control:
            return control.connect_ex(str(self.data_dir / "control.sock")) == 0

    def background(self, *words: str) -> subprocess.Popen[bytes]:
        """Start a command on the machine that goes on; what it prints is in the log."""
        with (self.data_dir / "lab.log").open("ab") as log:
            process = subprocess.Popen(
                self.host.command(*_DEP2P, *words), env=self._environment, stdout=log, stderr=log
            )
        self.processes.append(process)
        return process

    def run(self, *words: str, stdin: str = "", is_checked: bool = True) -> "subprocess.CompletedProcess[str]":
        """Run a command to its end."""
        done = subprocess.run(
            [*_DEP2P, *words],
            env=self._environment,
            capture_output=True,
            text=True,
            input=stdin,
            timeout=WAIT_S,
            check=False,
        )
        assert not is_checked or done.returncode == 0, (words, done.stdout, done.stderr, self.log())
        return done

    @property
    def peer_id(self) -> str:
        """The id of its node."""
        return str(msgspec.json.decode(self.run("id", "--json").stdout, type=dict[str, object])["peer_id"])

    def log(self) -> str:
        """What the daemon and the commands in the background have printed last."""
        return (self.data_dir / "lab.log").read_text()[-4_000:]

    def close(self) -> None:
        """Kill what runs."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()


@contextmanager
def daemons_on(root: Path, *hosts: Host) -> Generator[list[LabDaemon]]:
    """A daemon for each machine, not started; what they start ends with the block."""
    with ExitStack() as stack:
        made: list[LabDaemon] = []
        for host in hosts:
            made.append(LabDaemon(host, root / host.name))
            stack.callback(made[-1].close)
        yield made
