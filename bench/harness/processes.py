"""The processes of a benchmark: started, commanded by JSON lines, and ended by their handles."""

import json
import sys
import tempfile
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from subprocess import DEVNULL, PIPE
from types import TracebackType
from typing import IO, Self

import trio

from bench.harness.environment import process_cpu_s, process_rss_kb

_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 5.0
_STDERR_TAIL_BYTES = 2_000
_ROOT = Path(__file__).parents[2]


class WorkerError(Exception):
    """A process of the benchmark failed; the text holds the end of what it wrote to stderr."""


class Worker:
    """One process of a side, driven by JSON lines as :mod:`bench.messaging.worker` is."""

    def __init__(self, label: str, process: trio.Process, stderr: IO[bytes]) -> None:
        self.label = label
        self._process = process
        self._stderr = stderr
        self._received = bytearray()
        self._calling = trio.Lock()
        """Answers come in the order of the calls, and carry no number."""

    @property
    def pid(self) -> int:
        """The id of the live process."""
        return self._process.pid

    def cpu_s(self) -> float:
        """User and system seconds used so far."""
        return process_cpu_s(self.pid)

    def rss_kb(self) -> float:
        """Resident memory, KB of 1,000 bytes."""
        return process_rss_kb(self.pid)

    async def call(self, command: str, *, timeout_s: float = 60.0, **arguments: object) -> dict[str, float]:
        """Send ``command`` and return the numbers of the answer. Raises WorkerError."""
        return {key: float(str(value)) for key, value in (await self._call(command, timeout_s, arguments)).items()}

    async def call_text(self, command: str, *, timeout_s: float = 60.0, **arguments: object) -> str:
        """Send ``command`` and return the one text of the answer. Raises WorkerError."""
        return str((await self._call(command, timeout_s, arguments))["text"])

    async def _call(self, command: str, timeout_s: float, arguments: Mapping[str, object]) -> dict[str, object]:
        try:
            with trio.fail_after(timeout_s):
                async with self._calling:
                    answer = await self._exchange(command, arguments)
        except trio.TooSlowError:
            raise WorkerError(f"{self.label}: no answer to {command} in {timeout_s:g} s. {self._tail()}") from None
        except (trio.BrokenResourceError, EOFError, ValueError) as error:
            raise WorkerError(f"{self.label} died at {command} ({error!r}). {self._tail()}") from error
        if "error" in answer:
            raise WorkerError(f"{self.label}: {command}: {answer['error']} {self._tail()}")
        return answer

    async def _exchange(self, command: str, arguments: Mapping[str, object]) -> dict[str, object]:
        line = json.dumps({"command": command, "arguments": arguments}).encode() + b"\n"
        assert self._process.stdin is not None
        await self._process.stdin.send_all(line)
        answer: dict[str, object] = json.loads(await self._read_line())
        return answer

    async def _read_line(self) -> bytes:
        assert self._process.stdout is not None
        while b"\n" not in self._received:
            chunk = await self._process.stdout.receive_some()
            if not chunk:
                raise EOFError("its output ended")
            self._received += chunk
        line, _, rest = bytes(self._received).partition(b"\n")
        self._received[:] = rest
        return line

    def _tail(self) -> str:
        size = self._stderr.seek(0, 2)
        self._stderr.seek(max(0, size - _STDERR_TAIL_BYTES))
        text = self._stderr.read().decode(errors="replace").strip()
        return f"Its stderr ends with:\n{text}" if text else ""

    async def stop(self) -> None:
        """End the process: it leaves when its input ends, or is killed."""
        with trio.CancelScope(shield=True):
            assert self._process.stdin is not None
            await self._process.stdin.aclose()
            with trio.move_on_after(_STOP_TIMEOUT_S):
                await self._process.wait()
            if self._process.poll() is None:
                self._process.kill()
                await self._process.wait()
            assert self._process.stdout is not None
            await self._process.stdout.aclose()


class Crew:
    """All processes of one benchmark run; ends them when its block is left."""

    def __init__(self, profile_dir: Path | None = None) -> None:
        self._workers: list[Worker] = []
        self._files: list[IO[bytes]] = []
        self._profile_dir = profile_dir
        self._started = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        async with trio.open_nursery() as nursery:
            for worker in self._workers:
                nursery.start_soon(worker.stop)
        for file in self._files:
            file.close()

    @property
    def pids(self) -> list[int]:
        """The ids of all live processes of the run."""
        return [worker.pid for worker in self._workers]

    async def start(self, side: str, role: str, module: str = "bench.messaging.worker") -> Worker:
        """Start a worker of ``side``, which has imported its code and waits for commands."""
        label = self._label(side, role)
        command = [sys.executable, "-m", module, side]
        if self._profile_dir is not None:
            command += ["--profile", str(self._profile_dir / f"{label.replace(' ', '-')}.prof")]
        return await self._start(label, command, _ROOT)

    async def start_program(self, side: str, role: str, command: list[str], directory: Path) -> Worker:
        """Start a program in another language that takes the same JSON lines. Raises WorkerError."""
        return await self._start(self._label(side, role), command, directory)

    def _label(self, side: str, role: str) -> str:
        self._started += 1
        return f"{side} {role} {self._started}"

    async def _start(self, label: str, command: list[str], directory: Path) -> Worker:
        stderr: IO[bytes] = tempfile.TemporaryFile()  # closed in __aexit__
        self._files.append(stderr)
        try:
            process = await trio.lowlevel.open_process(command, stdin=PIPE, stdout=PIPE, stderr=stderr, cwd=directory)
        except OSError as error:
            raise WorkerError(f"{label} cannot be started: {error}") from error
        worker = Worker(label, process, stderr)
        self._workers.append(worker)
        await worker.call("hello", timeout_s=_START_TIMEOUT_S)
        return worker

    async def end(self, worker: Worker) -> None:
        """End one worker before the others."""
        self._workers.remove(worker)
        await worker.stop()


@asynccontextmanager
async def other_process(command: list[str], env: Mapping[str, str]) -> AsyncGenerator[trio.Process, None]:
    """Run another program, and terminate it (or, when it does not end, kill it) when the block is left."""
    process = await trio.lowlevel.open_process(
        command, stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL, env=dict(env), cwd=_ROOT
    )
    try:
        yield process
    finally:
        with trio.CancelScope(shield=True):
            process.terminate()
            with trio.move_on_after(_STOP_TIMEOUT_S):
                await process.wait()
            if process.poll() is None:
                process.kill()
                await process.wait()
