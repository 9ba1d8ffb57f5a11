"""services/…: three members that offer a service and read a topic in a group, and a caller, over loopback."""

import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping

import trio

from bench.harness.compare import Run, alternate
from bench.harness.processes import Crew, Worker
from bench.harness.report import Result, Sample
from bench.services.worker import GROUP_TOPIC, PLAIN_TOPIC

WORKERS = 3
MESSAGE_BYTES = 100
_IN_FLIGHT = 64
_KILL_SECONDS = 2.0
"""Times ``Effort.seconds`` of a round in which a worker is killed."""
_DRAIN_TIMEOUT_S = 60.0
_CALL_TIMEOUT_S = 60.0
_POLL_S = 0.01
_MODULE = "bench.services.worker"


class _Stage:
    """The members of a run: each is connected to each."""

    def __init__(self, run: Run, crew: Crew, caller: Worker) -> None:
        self.run = run
        self.caller = caller
        self.workers: list[Worker] = []
        self._crew = crew
        self._addresses: list[str] = []

    async def add_workers(self, count: int) -> None:
        """Start workers and wait until all members know each other."""
        started: list[Worker] = []

        async def start() -> None:
            started.append(await self._crew.start("worker", "", _MODULE))

        async with trio.open_nursery() as nursery:
            for _ in range(count):
                nursery.start_soon(start)
        for worker in started:
            await self.open(worker)
            self.workers.append(worker)
        for worker in (*self.workers, self.caller):
            await worker.call("meet", count=len(self.workers))

    async def open(self, member: Worker) -> None:
        """Open the node of a process, connected to those that are open."""
        address = await member.call_text("open", secret=self.run.secret, addresses=json.dumps(self._addresses))
        self._addresses.append(address)

    async def end(self, worker: Worker) -> None:
        """Forget a worker whose process has been killed."""
        del self._addresses[1 + self.workers.index(worker)]
        self.workers.remove(worker)
        await self._crew.end(worker)

    def cpu_s(self) -> float:
        """User and system seconds of all processes, a killed one included."""
        return sum(process.cpu_s() for process in (self.caller, *self.workers))

    async def counts(self, command: str, **arguments: object) -> list[Mapping[str, float]]:
        """The answer of each worker to a command."""
        return [await worker.call(command, timeout_s=_CALL_TIMEOUT_S, **arguments) for worker in self.workers]


async def services(run: Run) -> list[Result]:
    """services/request/1 and /64 to any member, beside one member; services/group; services/killed."""
    async with run.crew() as crew:
        stage = _Stage(run, crew, await crew.start("caller", "", _MODULE))
        await stage.open(stage.caller)
        await stage.add_workers(WORKERS)
        results: list[Result] = []
        for in_flight in (1, _IN_FLIGHT):
            shares: Counter[int] = Counter()
            ours, theirs = await alternate(
                run, crew, [_asking(stage, "ask_any", in_flight, shares), _asking(stage, "ask_one", in_flight)]
            )
            name = f"services/request/{in_flight}"
            results.append(Result(name, "1/s", "a request to one member", ours, theirs, _percent(shares)))
        shares = Counter()
        ours, theirs = await alternate(
            run, crew, [_publishing(stage, GROUP_TOPIC, 1, shares), _publishing(stage, PLAIN_TOPIC, WORKERS)]
        )
        results.append(Result("services/group", "1/s", "a topic that all three read", ours, theirs, _percent(shares)))
        results.append(await _killed(stage, crew))
    return results


def _percent(shares: Counter[int]) -> dict[str, int]:
    """The share of each worker, percent."""
    total = sum(shares.values())
    return {f"worker_{number + 1}_percent": round(100 * shares[number] / total) for number in range(WORKERS)}


def _asking(
    stage: _Stage, command: str, in_flight: int, shares: Counter[int] | None = None
) -> Callable[[], Awaitable[Sample]]:
    async def ask() -> Sample:
        await stage.counts("reset")
        before_s = stage.cpu_s()
        done = await stage.caller.call(
            command, seconds=stage.run.effort.seconds, in_flight=in_flight, size_bytes=MESSAGE_BYTES
        )
        if done["failed"]:
            raise ValueError(f"{done['failed']:.0f} requests failed, and all members are up")
        cpu_us = (stage.cpu_s() - before_s) * 1e6 / done["count"]
        if shares is not None:
            shares.update({number: int(each["count"]) for number, each in enumerate(await stage.counts("answered"))})
        return Sample(done["count"] / done["elapsed_s"], done["p50_ms"], done["p99_ms"], cpu_us)

    return ask


def _publishing(
    stage: _Stage, topic: str, copies: int, shares: Counter[int] | None = None
) -> Callable[[], Awaitable[Sample]]:
    """``copies``: how many of the workers get each message."""

    async def publish() -> Sample:
        await stage.counts("reset")
        before_s = stage.cpu_s()
        sent = await stage.caller.call(
            "publish", topic=topic, seconds=stage.run.effort.seconds, size_bytes=MESSAGE_BYTES
        )
        arrived = await stage.counts("arrived", topic=topic)
        with trio.move_on_after(_DRAIN_TIMEOUT_S):
            while sum(each["count"] for each in arrived) < sent["count"] * copies:
                await trio.sleep(_POLL_S)
                arrived = await stage.counts("arrived", topic=topic)
        came = sum(each["count"] for each in arrived)
        if came != sent["count"] * copies:
            raise ValueError(f"{sent['count']:.0f} messages were sent, and {came:.0f} of {copies} each arrived")
        cpu_us = (stage.cpu_s() - before_s) * 1e6 / sent["count"]
        if shares is not None:
            shares.update({number: int(each["count"]) for number, each in enumerate(arrived)})
        return Sample(sent["count"] / (max(each["last_at_s"] for each in arrived) - sent["began_s"]), cpu_us=cpu_us)

    return publish


async def _killed(stage: _Stage, crew: Crew) -> Result:
    """The same requests while all are up, and while one worker is killed by SIGKILL halfway; a fresh one for each."""
    run = stage.run
    seconds = _KILL_SECONDS * run.effort.seconds
    counts = {"asked": 0, "failed": 0, "tried_again": 0, "most_ms": 0}
    killed: list[Sample] = []
    quiet: list[Sample] = []
    for number in range(1 + run.effort.rounds // 4):
        if number:
            await stage.add_workers(1)
        run.load.begin(crew.pids)
        victim = stage.workers[-1]
        _, sample = await _ask_all(stage, "ask_any", seconds)
        quiet.append(sample)
        done, sample = await _ask_all(stage, "ask_and_kill", seconds, pid=victim.pid)
        killed.append(sample)
        run.load.end(crew.pids)
        counts["asked"] += int(done["count"] + done["failed"])
        counts["failed"] += int(done["failed"])
        counts["tried_again"] += int(done["tried_again"])
        counts["most_ms"] = max(counts["most_ms"], round(done["most_ms"]))
        await stage.end(victim)
    return Result("services/killed", "1/s", "the same with all three up", killed, quiet, counts)


async def _ask_all(
    stage: _Stage, command: str, seconds: float, **arguments: object
) -> tuple[Mapping[str, float], Sample]:
    before_s = stage.cpu_s()
    done = await stage.caller.call(
        command, seconds=seconds, in_flight=_IN_FLIGHT, size_bytes=MESSAGE_BYTES, timeout_s=_CALL_TIMEOUT_S, **arguments
    )
    cpu_us = (stage.cpu_s() - before_s) * 1e6 / done["count"]
    return done, Sample(done["count"] / done["elapsed_s"], done["p50_ms"], done["p99_ms"], cpu_us)
