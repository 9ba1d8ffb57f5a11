"""PostgreSQL and Redis servers of tests and benchmarks: on free loopback ports, in temporary directories."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class NotInstalledError(Exception):
    """The server is not on this machine; the text says how to get it."""


def missing(what: str) -> NotInstalledError:
    """Return the error for a server that is not installed."""
    return NotInstalledError(f"{what} is not installed here: run packaging/services.sh")


class Server:
    """A server that can be killed and started again on its port and data."""

    def __init__(self, url: str, command: list[str], port: int, folder: Path) -> None:
        self.url = url
        self._command = command
        self._port = port
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server and wait until it takes connections: its port is open before, and refuses them."""
        with (self._folder / "log").open("ab") as log:
            before = log.tell()
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, start_new_session=True)
        for _ in range(600):
            if b"eady to accept connections" in (self._folder / "log").read_bytes()[before:]:
                return
            if self._process.poll() is not None:
                break
            time.sleep(0.05)
        raise RuntimeError((self._folder / "log").read_text())

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        if self._process is not None:
            os.kill(self._process.pid, how)
            self._process.wait(20)
            self._process = None

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)


def postgres() -> Server:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    program = str(found[-1]) if found else shutil.which("initdb")
    if program is None:
        raise missing("PostgreSQL")
    folder = Path(tempfile.mkdtemp(prefix="dep2p-postgres-", dir="/tmp"))
    as_user: list[str] = []
    if os.geteuid() == 0:  # postgres refuses root
        shutil.chown(folder, "postgres")
        as_user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
    data = folder / "data"
    subprocess.run(
        [*as_user, program, "-D", str(data), "-A", "trust", "-U", "dep2p", "-E", "UTF8", "--no-sync"],
        check=True,
        capture_output=True,
        cwd=folder,
    )
    port = free_port()
    command = [*as_user, str(Path(program).with_name("postgres")), "-D", str(data), "-p", str(port)]
    command += ["-c", "listen_addresses=127.0.0.1", "-k", str(folder)]
    return Server(f"postgresql://dep2p@127.0.0.1:{port}/postgres", command, port, folder)


def redis() -> Server:
    program = shutil.which("redis-server")
    if program is None:
        raise missing("Redis")
    folder = Path(tempfile.mkdtemp(prefix="dep2p-redis-", dir="/tmp"))
    port = free_port()
    command = [program, "--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder), "--save", ""]
    command += ["--appendonly", "yes", "--appendfsync", "always"]
    return Server(f"redis://127.0.0.1:{port}/0", command, port, folder)
