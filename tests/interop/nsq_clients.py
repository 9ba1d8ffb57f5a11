"""NSQ's own clients as processes, and a daemon that they are pointed at."""

import json
import queue
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from tests.daemon.processes import DaemonProcess

FOLDER = Path(__file__).parent / "nsq"
COMMANDS = {
    "pynsq": [str(FOLDER / "venv" / "bin" / "python"), str(FOLDER / "client.py")],
    "nsqjs": ["node", str(FOLDER / "client.cjs")],
}
INSTALLED = {"pynsq": FOLDER / "venv" / ".locked", "nsqjs": FOLDER / "node_modules" / ".locked"}
WAIT_S = 20.0


class NsqProcess:
    """A writer, or with a channel a reader; driven by lines of JSON."""

    def __init__(self, kind: str, address: str, **options: object) -> None:
        self._process = subprocess.Popen(
            [*COMMANDS[kind], json.dumps({"address": address, **options})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=FOLDER,
        )
        self._lines: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._kept: list[dict[str, Any]] = []
        self._number = 0
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        self.event("started")

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(json.loads(line))

    def event(self, kind: str, timeout_s: float = WAIT_S) -> dict[str, Any]:
        """The next event of a kind; fails when none comes."""
        end_s = time.monotonic() + timeout_s
        while True:
            for each in self._kept:
                if each["event"] == kind:
                    self._kept.remove(each)
                    return each
            try:
                self._kept.append(self._lines.get(timeout=max(0.01, end_s - time.monotonic())))
            except queue.Empty:
                raise AssertionError(f"no {kind!r} came; there were {self._kept}") from None

    def message(self, timeout_s: float = WAIT_S) -> dict[str, Any]:
        return self.event("message", timeout_s)

    def nothing(self, kind: str = "message", seconds: float = 0.7) -> bool:
        """Whether no event of that kind comes for so long."""
        try:
            raise AssertionError(f"unexpected: {self.event(kind, seconds)}") from None
        except AssertionError as error:
            if str(error).startswith("no "):
                return True
            raise

    def do(self, what: str, **fields: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, **fields}) + "\n")
        self._process.stdin.flush()

    def publish(self, topic: str, *bodies: str, delay_ms: int = 0) -> str | None:
        """The error that the client reports, if any. Asked again while it is not connected."""
        end_s = time.monotonic() + WAIT_S
        while True:
            self._number += 1
            self.do("publish", topic=topic, bodies=bodies, delay_ms=delay_ms, number=self._number)
            error: str | None = self.event("answer")["error"]
            if error is None or "E_" in error or time.monotonic() > end_s:
                return error
            time.sleep(0.1)

    def kill(self) -> None:
        """SIGKILL: what a crash looks like."""
        self._process.kill()
        self.close()

    def close(self) -> None:
        self._process.kill()
        self._process.wait(10)
        self._thread.join(10)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass


class NsqDaemon:
    """A daemon with both listeners, at the same ports after a restart."""

    def __init__(self, data_dir: Path, *settings: str) -> None:
        self.data_dir = data_dir
        tcp, http = _free_port(), _free_port()
        self.address = f"127.0.0.1:{tcp}"
        self.url = f"http://127.0.0.1:{http}"
        self._arguments: list[str] = []
        for setting in (f"nsq.listen={self.address}", f"nsq.http=127.0.0.1:{http}", *settings):
            self._arguments += ["--set", setting]
        self.process = DaemonProcess(data_dir, *self._arguments).wait_ready()

    def crash(self) -> None:
        """kill -9, and start again."""
        self.process.close()
        self.start()

    def start(self) -> None:
        self.process = DaemonProcess(self.data_dir, *self._arguments).wait_ready()

    def post(self, path: str, body: bytes = b"") -> httpx.Response:
        return httpx.post(self.url + path, content=body)

    def stats(self, topic: str, channel: str) -> dict[str, Any]:
        """Return the statistics of one channel."""
        answer = httpx.get(f"{self.url}/stats", params={"format": "json", "topic": topic, "channel": channel}).json()
        found: dict[str, Any] = answer["topics"][0]["channels"][0]
        return found

    def wait_stats(self, topic: str, channel: str, **wanted: object) -> dict[str, Any]:
        """When these fields have these values."""
        end_s = time.monotonic() + WAIT_S
        while True:
            stats = self.stats(topic, channel)
            if all(stats[name] == value for name, value in wanted.items()):
                return stats
            assert time.monotonic() < end_s, f"wanted {wanted}, have {stats}"
            time.sleep(0.05)

    def close(self) -> None:
        self.process.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
