"""Pairs of processes, one pair for each side, and rounds in which the sides alternate."""

import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import trio

from bench.harness.environment import LoadMeter
from bench.harness.processes import Crew, Worker

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Effort:
    """How long a benchmark measures."""

    rounds: int
    seconds: float
    """Seconds of one round of one side."""
    dials: int
    """Dials in one round of one side."""
    peers: int
    """Connected peers when memory is measured."""


FULL = Effort(rounds=9, seconds=1.5, dials=8, peers=100)
QUICK = Effort(rounds=5, seconds=0.4, dials=3, peers=100)
TINY = Effort(rounds=1, seconds=0.05, dials=1, peers=2)
"""An effort for tests of the benchmarks themselves; its figures mean nothing."""


@dataclass(slots=True)
class Run:
    """The arguments of every benchmark."""

    effort: Effort
    load: LoadMeter = field(default_factory=LoadMeter)
    secret: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)
    profile_dir: Path | None = None
    ours: str = "dep2p"
    """The side measured as ours; another one only to try the benchmarks themselves."""
    store: str = ""
    """The one store that ``crash`` tries; all when empty."""
    attack: str = ""
    """The one attack that ``hostile`` tries; all when empty."""
    crash_rounds: int = 0
    """The number of kills in ``crash``; as the effort says when 0."""

    def crew(self) -> Crew:
        """The processes of one benchmark, as an async context manager."""
        return Crew(self.profile_dir)


@dataclass(frozen=True, slots=True)
class Pair:
    """A server process and a client process of one side, connected; the same process for two programs of one node."""

    server: Worker
    client: Worker

    def cpu_s(self) -> float:
        """User and system seconds of the processes."""
        if self.server is self.client:
            return self.server.cpu_s()
        return self.server.cpu_s() + self.client.cpu_s()


async def start_pairs(run: Run, crew: Crew, sides: Sequence[str]) -> list[Pair]:
    """Start a connected pair of processes for each side."""
    pairs: dict[str, Pair] = {}

    async def start_pair(side: str) -> None:
        server = await crew.start(side, "server")
        client = server if side.endswith("local") else await crew.start(side, "client")
        address = await server.call_text("serve", secret=run.secret)
        await client.call("connect", secret=run.secret, address=address)
        pairs[side] = Pair(server, client)

    async with trio.open_nursery() as nursery:
        for side in sides:
            nursery.start_soon(start_pair, side)
    return [pairs[side] for side in sides]


async def alternate(run: Run, crew: Crew, measures: Sequence[Callable[[], Awaitable[T]]]) -> list[list[T]]:
    """Run each measure once in each round, with another first one each time, after a round that is thrown away."""
    samples: list[list[T]] = [[] for _ in measures]
    for measure in measures:
        await measure()
    for number in range(run.effort.rounds):
        for step in range(len(measures)):
            index = (number + step) % len(measures)
            run.load.begin(crew.pids)
            samples[index].append(await measures[index]())
            run.load.end(crew.pids)
    return samples
