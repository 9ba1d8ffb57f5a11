"""Processes of a run that play a role each, and answer lines with JSON objects."""

import json
import signal
import socket
import subprocess
import sys
from typing import Any


class RoleProcess:
    """One role in a process of its own: ``python -m MODULE --role ROLE --NAME VALUE …``."""

    def __init__(self, module: str, role: str, **arguments: object) -> None:
        command = [sys.executable, "-m", module, "--role", role]
        for name, value in arguments.items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        self.popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self.popen.pid

    def read(self) -> dict[str, Any]:
        """The next object that the process writes. Raises ``RuntimeError`` when it has ended."""
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        if not line:
            raise RuntimeError(f"a process of the run ended with status {self.popen.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, text: str) -> dict[str, Any]:
        """Write a line to the process, and read its answer. Raises ``RuntimeError`` when it has ended."""
        assert self.popen.stdin is not None
        self.popen.stdin.write(text + "\n")
        self.popen.stdin.flush()
        return self.read()

    def stop(self) -> None:
        """Pause the process (SIGSTOP)."""
        self.popen.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let a paused process continue (SIGCONT)."""
        self.popen.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End the process with SIGKILL, also when it is paused, and close its pipes."""
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait()
        for pipe in (self.popen.stdin, self.popen.stdout):
            if pipe is not None:
                pipe.close()


def free_port() -> int:
    """A TCP port of the loopback interface that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])
