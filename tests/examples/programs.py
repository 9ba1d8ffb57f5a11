"""Members and programs for the tests of examples: each is a process that is killed and started again under traffic."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from dep2p.realm.credentials import Realm
from dep2p.types import PeerId
from tests.daemon.processes import DaemonProcess

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RESTARTS = int(os.environ.get("DEP2P_TEST_RESTARTS", "2"))
"""Restarts of each daemon and program under traffic; the acceptance run has 10."""
SIGNALS = (signal.SIGKILL, signal.SIGTERM)
WAIT_S = 60.0
TYPED_AHEAD = 8


def wait_for(what: str, condition: Callable[[], object]) -> None:
    """Return when the condition holds; fail after WAIT_S."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen in {WAIT_S:g} s"
        time.sleep(0.02)


class Member:
    """A data directory and its daemon, which keeps its port over restarts."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.daemon = DaemonProcess(directory)
        self.addr = ""

    def wait_ready(self) -> None:
        """Wait for the daemon's first start."""
        self.addr = str(self.daemon.wait_ready().get("/v1/status")["listen"][0])

    @property
    def peer_id(self) -> PeerId:
        """The node's id."""
        return PeerId(self.addr.rpartition("/p2p/")[2])

    def end(self, number: int) -> None:
        """End the daemon by a signal."""
        self.daemon.end(number, WAIT_S)
        self.daemon.close()

    def start(self) -> None:
        """Start it again, on the same port."""
        self.daemon = DaemonProcess(self.directory, f"--listen={self.addr.rpartition('/p2p/')[0]}").wait_ready()

    def restart(self, number: int) -> None:
        """End the daemon by a signal and start it again."""
        self.end(number)
        self.start()

    def close(self) -> None:
        """End the daemon in any case."""
        self.daemon.close()

    def knows(self, state: str, *others: "Member") -> bool:
        """Whether this daemon sees the others in that state."""
        (realm,) = self.daemon.get("/v1/realms")["realms"]
        members = self.daemon.get(f"/v1/realms/{realm['realm_id']}/members")["members"]
        return {other.peer_id for other in others} <= {each["peer"] for each in members if each["state"] == state}


class Team(NamedTuple):
    """Three members of a realm, each connected to the others."""

    ann: Member
    bob: Member
    eve: Member
    realm: Realm


@contextmanager
def team_of_three() -> Generator[Team]:
    """Start the daemons and bring them together."""
    realm = Realm.generate("team")
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dep2p-")))  # short enough for sockets
        ann, bob, eve = started = [Member(root / name) for name in ("ann", "bob", "eve")]
        for member in started:
            stack.callback(member.close)
        for member in started:
            member.wait_ready()
            member.daemon.post("/v1/realms", {"invite": realm.invite([])})
        for first, second in combinations(started, 2):
            first.daemon.post("/v1/peers", {"addr": second.addr})
        for member in started:
            others = [other for other in started if other is not member]
            wait_for("seeing the other members", partial(member.knows, "up", *others))
        yield Team(ann, bob, eve, realm)


class Program:
    """An example, started as a user starts it. Lines of its output are collected over restarts."""

    def __init__(self, member: Member | None, name: str, *words: str | Path, ready: str = "") -> None:
        """``ready``: the line that it prints when it has begun."""
        self._command = [sys.executable, str(EXAMPLES / f"{name}.py"), *map(str, words)]
        environ = {key: value for key, value in os.environ.items() if not key.startswith("DEP2P_")}
        self._environ = environ | ({} if member is None else {"DEP2P_DATA_DIR": str(member.directory)})
        self._ready = ready
        self.lines: list[str] = []
        self.errors: list[str] = []
        self.start()

    def start(self) -> None:
        """Start it, for the first time or again, and wait until it is ready."""
        ready = f"{self._ready}\n"
        before = self.lines.count(ready)
        self.process = subprocess.Popen(
            self._command,
            env=self._environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None and self.process.stderr is not None
        self._readers = [
            threading.Thread(target=lines.extend, args=(pipe,), daemon=True)
            for lines, pipe in ((self.lines, self.process.stdout), (self.errors, self.process.stderr))
        ]
        for reader in self._readers:
            reader.start()
        if self._ready:

            def has_begun() -> bool:
                assert self.process.poll() is None, self.errors
                return self.lines.count(ready) > before

            wait_for(f"{self._ready!r} of {self._command}", has_begun)

    def type(self, line: str) -> bool:
        """Write a line to its standard input. Return false when the program has ended."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{line}\n")
            self.process.stdin.flush()
        except (BrokenPipeError, ValueError):
            return False
        return True

    def end(self, number: int = signal.SIGTERM) -> int:
        """End it by a signal and return its exit code, when all its output is collected."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """Return its exit code when it has ended by itself."""
        code = self.process.wait(WAIT_S)
        for reader in self._readers:
            reader.join(WAIT_S)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                pass
        return code

    def restart(self, number: int) -> None:
        """End it by a signal and start it again."""
        self.end(number)
        self.start()

    @contextmanager
    def paused(self) -> Generator[None]:
        """Stop its process for the block, so that it is not done before something else has happened."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End it in any case."""
        if self.process.poll() is None:
            self.process.kill()
        self.wait()

    def said(self, start: str) -> list[str]:
        """The rest of each line that begins with ``start``."""
        return [line.removeprefix(start).rstrip("\n") for line in list(self.lines) if line.startswith(start)]


class Typist:
    """Types numbered lines into a program, a few ahead of its answers. After a restart it types again what the program
    had not answered, as a user would, and also after a line "not sent: …"."""

    def __init__(self, program: Program, line: Callable[[int], str], answer: Callable[[int], str]) -> None:
        """``answer``: the line that the program prints when it has accepted line ``number`` for good."""
        self._program = program
        self._line = line
        self._answer = answer
        self._is_over = threading.Event()
        self._is_paused = threading.Event()
        self._waiting: dict[str, int] = {}
        self.answered: list[int] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        waiting = self._waiting
        number = read = 0
        process: object = None
        while not self._is_over.is_set() or waiting:
            for line in self._program.lines[read:]:
                read += 1
                if (answered := waiting.pop(line.rstrip("\n"), None)) is not None:
                    self.answered.append(answered)
                elif line.startswith("not sent"):
                    process = None
            if process is not self._program.process:
                process = self._program.process
                for each in waiting.values():
                    self._program.type(self._line(each))
            if len(waiting) < TYPED_AHEAD and not (self._is_over.is_set() or self._is_paused.is_set()):
                waiting[self._answer(number)] = number
                self._program.type(self._line(number))
                number += 1
            else:
                time.sleep(0.01)

    def wait_for_answers(self) -> None:
        """Return when further lines are answered."""
        aim = len(self.answered) + 2 * TYPED_AHEAD
        wait_for("further answers", lambda: len(self.answered) >= aim)

    @contextmanager
    def paused(self) -> Generator[None]:
        """Type nothing for the block, which begins when all lines are answered."""
        self._is_paused.set()
        wait_for("an answer to each line", lambda: not self._waiting)
        try:
            yield
        finally:
            self._is_paused.clear()

    def finish(self) -> list[int]:
        """Type no more, and return the numbers of all lines, each of which is answered."""
        self._is_over.set()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), ("lines without an answer", self._program.errors)
        return sorted(self.answered)


def unexpected(errors: list[str]) -> list[str]:
    """The lines of standard error that docs/howto/restarts.md does not announce: it does so for a daemon that is away,
    and for the answer to a request that has gone with it."""
    known = ("waiting for the daemon at ", "the daemon at ")
    inside = (" goes on", " waits: ", " was not answered: ")
    return [line for line in errors if not line.startswith(known) and not any(part in line for part in inside)]
