"""Real daemon processes for tests, each ended by its own process id."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

START_TIMEOUT_S = 30.0


class DaemonProcess:
    """``python -m dep2p.daemon`` on a data directory."""

    def __init__(self, data_dir: Path, *arguments: str, env: dict[str, str] | None = None) -> None:
        self.data_dir = data_dir
        self.socket = data_dir / "control.sock"
        command = [sys.executable, "-m", "dep2p.daemon", "--data-dir", str(data_dir)]
        if not any(argument.startswith("--listen") for argument in arguments):
            command += ["--listen", "/ip4/127.0.0.1/tcp/0"]
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("DEP2P_", "NOTIFY_"))}
        self.process = subprocess.Popen(
            [*command, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environ | (env or {})
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_ready(self) -> "DaemonProcess":
        """Wait until it says so by its control socket."""
        end_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < end_s:
            if self.process.poll() is not None:
                raise AssertionError(f"the daemon ended with {self.process.returncode}: {self.stderr()}")
            try:
                if self.get("/readyz")["ready"]:
                    return self
            except OSError:
                time.sleep(0.05)
        raise AssertionError("the daemon was not ready in time")

    def http(self) -> httpx.Client:
        """A client of its socket; to be closed."""
        return httpx.Client(transport=httpx.HTTPTransport(uds=str(self.socket)), base_url="http://dep2p", timeout=30)

    def get(self, path: str) -> dict[str, Any]:
        """One GET."""
        return self._call("GET", path, None)

    def post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """One POST."""
        return self._call("POST", path, body or {})

    def _call(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        # http.client, since httpx leaks a socket when nothing listens, which would be a warning, and so an error.
        connection = _UnixConnection(self.socket)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            answer: dict[str, Any] = json.loads(connection.getresponse().read())
            return answer
        finally:
            connection.close()

    def send_signal(self, number: int) -> None:
        """Send a signal to this very process."""
        self.process.send_signal(number)

    def end(self, number: int = signal.SIGTERM, timeout_s: float = 20.0) -> int:
        """Signal it and return its exit code."""
        self.send_signal(number)
        return self.process.wait(timeout_s)

    def stderr(self) -> str:
        """All that it wrote; only after its end."""
        assert self.process.stderr is not None
        return self.process.stderr.read().decode("utf-8", "replace")

    def close(self) -> None:
        """End it in any case."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        if self.process.stderr is not None:
            self.process.stderr.close()


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("dep2p", timeout=30)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(30)
        self.sock.connect(str(self._path))


class NotifySocket:
    """The socket on which a service manager listens."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.settimeout(START_TIMEOUT_S)

    def next(self) -> dict[str, str]:
        """The next message."""
        lines = self._socket.recv(4096).decode().splitlines()
        return dict(line.split("=", 1) for line in lines)

    def close(self) -> None:
        """Close it."""
        self._socket.close()
