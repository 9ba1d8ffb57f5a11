"""kill -9 of a process with queues, again and again, during publish and consume: what it promised must hold.

Used by `python -m bench crash` and by tests/storage/test_crash.py.
"""

import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from subprocess import PIPE

import trio

from bench.harness import servers
from bench.harness.compare import FULL, QUICK, Run
from bench.harness.processes import WorkerError
from bench.harness.report import Result, Sample

STORES = ("sqlite", "postgres", "redis")
_ROOT = Path(__file__).parents[2]
_CHUNK_BYTES = 1 << 20
_LIFE_S = (0.05, 1.0)
"""Seconds that a process lives from its first word, at random between these two."""
_START_S = 60.0
_DRAIN_S_PER_ROUND = 3.0


@dataclass(slots=True)
class Crashes:
    """The results of some rounds. Messages are "P S": partition and number."""

    rounds: int = 0
    acked: dict[str, None] = field(default_factory=dict[str, None])
    """Messages whose publish had returned."""
    got: dict[str, None] = field(default_factory=dict[str, None])
    ended: dict[str, None] = field(default_factory=dict[str, None])
    """Messages that were being acknowledged."""
    done: dict[str, None] = field(default_factory=dict[str, None])
    """Messages whose acknowledgement was durable."""
    in_flight_back: int = 0
    """Deliveries of messages that a killed process was holding."""
    lost: list[str] = field(default_factory=list[str])
    """Messages acknowledged to their publisher or in flight, never finished, and not there any more."""
    given_twice: list[str] = field(default_factory=list[str])
    """Ids that were given to two messages."""
    came_back: list[str] = field(default_factory=list[str])
    """Messages delivered after they were done."""

    @property
    def in_flight(self) -> dict[str, None]:
        """Return the messages that were delivered and are not being acknowledged."""
        return {each: None for each in self.got if each not in self.ended}

    @property
    def is_healthy(self) -> bool:
        """Whether every promise was kept."""
        return not (self.lost or self.given_twice or self.came_back)

    def hear(self, line: str, *, before: dict[str, None]) -> None:
        """Take a line of a process. ``before``: the messages in flight when that process began."""
        what, _, message = line.partition(" ")
        if what == "acked":
            if message in self.acked:
                self.given_twice.append(message)
            self.acked[message] = None
        elif what == "ends":
            self.ended[message] = None
        elif what == "done":
            self.done[message] = None
        else:
            if message in self.done:
                self.came_back.append(message)
            if message in before:
                self.in_flight_back += 1
            self.got[message] = None


async def crash_rounds(address: str, rounds: int, *, seed: int) -> Crashes:
    """Kill a process that publishes and consumes so many times; then let one drain what is left.

    Raises WorkerError when a process ends by itself, or what is left does not come in time.
    """
    rng = Random(seed)
    crashes = Crashes(rounds)
    for _ in range(rounds):
        before = crashes.in_flight
        for line in await _live(address, "both", life_s=rng.uniform(*_LIFE_S)):
            crashes.hear(line, before=before)
    wanted = {each: None for each in {**crashes.acked, **crashes.got} if each not in crashes.ended}
    before = crashes.in_flight
    came: dict[str, None] = {}
    for line in await _live(address, "drain", wanted=wanted, drain_s=_START_S + _DRAIN_S_PER_ROUND * rounds):
        crashes.hear(line, before=before)
        came[line.partition(" ")[2]] = None
    crashes.lost = [each for each in wanted if each not in came]
    return crashes


async def _live(
    address: str, mode: str, *, life_s: float = 0.0, wanted: dict[str, None] | None = None, drain_s: float = 0.0
) -> list[str]:
    """Return the lines of a process that is then killed: so long after its first line, or when all wanted lines have
    come."""
    command = [sys.executable, "-m", "bench.queues.crash_worker", address, mode]
    process = await trio.lowlevel.open_process(command, stdout=PIPE, cwd=_ROOT)
    said: list[str] = []
    rest = b""
    left = None if wanted is None else {f"got {each}": None for each in wanted}

    def hear(chunk: bytes | bytearray) -> None:
        nonlocal rest
        *lines, rest = (rest + bytes(chunk)).split(b"\n")
        for line in lines:
            said.append(line.decode())
            if left is not None:
                left.pop(said[-1], None)

    output = process.stdout
    assert output is not None
    try:
        with trio.move_on_after(_START_S if left is None else drain_s) as patience:
            while left is None or left:
                chunk = await output.receive_some(_CHUNK_BYTES)
                if not chunk:
                    raise WorkerError(f"the process with the queues ended by itself: {await process.wait()}")
                if left is None and not said:
                    patience.deadline = trio.current_time() + life_s
                hear(chunk)
        if left is None and not said:
            raise WorkerError(f"the process with the queues said nothing for {_START_S:g} s")
    finally:
        with trio.CancelScope(shield=True):
            process.kill()
            await process.wait()
            while chunk := await output.receive_some(_CHUNK_BYTES):
                hear(chunk)
            await output.aclose()
    return said


@contextmanager
def store_address(name: str) -> Generator[str, None, None]:
    """Make a fresh store of a kind of `STORES`, on a real disk. Raises NotInstalledError."""
    if name == "sqlite":
        (_ROOT / ".run").mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="dep2p-crash-", dir=_ROOT / ".run") as folder:
            yield str(Path(folder, "queues.sqlite"))
        return
    server = servers.postgres() if name == "postgres" else servers.redis()
    try:
        server.start()
        yield server.url
    finally:
        server.remove()


async def crash(run: Run) -> list[Result]:
    """queue/crash of each store that is installed, or of the one that was asked for.

    Raises WorkerError when anything acknowledged is lost, an id is given twice, or what is done comes back.
    """
    rounds = run.crash_rounds or (100 if run.effort is FULL else 8 if run.effort is QUICK else 1)
    results: list[Result] = []
    for name in [run.store] if run.store else STORES:
        try:
            with store_address(name) as address:
                crashes = await crash_rounds(address, rounds, seed=5)
        except servers.NotInstalledError as error:
            if run.store:
                raise WorkerError(str(error)) from None
            continue
        if not crashes.is_healthy:
            raise WorkerError(
                f"{name}: of {len(crashes.acked)} acknowledged messages {len(crashes.lost)} are lost, "
                f"{len(crashes.given_twice)} ids were given twice, and {len(crashes.came_back)} of {len(crashes.done)} "
                f"that were done came back ({', '.join([*crashes.lost, *crashes.given_twice, *crashes.came_back][:5])})"
            )
        results.append(_result(name, crashes))
    return results


def _result(name: str, crashes: Crashes) -> Result:
    kept = len(crashes.acked) - len(crashes.lost)
    return Result(
        f"queue/crash/{name}",
        "messages",
        "acknowledged",
        [Sample(kept)],
        [Sample(len(crashes.acked))],
        {
            "rounds": crashes.rounds,
            "lost": len(crashes.lost),
            "ids_given_twice": len(crashes.given_twice),
            "done": len(crashes.done),
            "done_came_back": len(crashes.came_back),
            "in_flight_back": crashes.in_flight_back,
        },
    )
