"""Durable queues: publish, consume, fan out, over a connection; beside other queue systems in the same run."""

import os
import signal
import tempfile
from collections.abc import Awaitable, Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.harness import servers
from bench.harness.compare import Run, alternate
from bench.harness.processes import Crew, Worker
from bench.harness.report import Result, Sample
from bench.queues.peers import PEERS, missing

CHANNELS = 16
_MODULE = "bench.queues.worker"
_BACKLOG = 1_000_000
_IDLE = 10_000
_SMALL = 50_000
"""Messages that are consumed from both backlogs, and all that the small one has."""
Measure = Callable[[], Awaitable[Sample]]


@dataclass(slots=True)
class _Sides:
    ours: Worker
    peers: dict[str, Worker]
    absent: dict[str, str]


async def queue(run: Run) -> list[Result]:
    """queue/publish, queue/consume, queue/fanout and queue/p2p; 1 KiB, durable before it is acknowledged."""
    with _servers() as addresses:
        return await _queue(run, addresses)


@contextmanager
def _servers() -> Generator[dict[str, str], None, None]:
    """Addresses of Redis and PostgreSQL: those named in the environment, or servers of this run where installed."""
    addresses: dict[str, str] = {}
    with ExitStack() as stack:
        for name, make in (("redis", servers.redis), ("postgres", servers.postgres)):
            addresses[name] = os.environ.get(f"DEP2P_BENCH_{name.upper()}", "")
            if addresses[name]:
                continue
            try:
                server = make()
            except servers.NotInstalledError:
                continue
            stack.callback(server.remove)
            server.start()
            addresses[name] = server.url
        yield addresses


async def _queue(run: Run, addresses: dict[str, str]) -> list[Result]:
    async with run.crew() as crew:
        sides = await _start(crew, addresses)
        ours, seconds = sides.ours, run.effort.seconds

        def mine(command: str, **options: object) -> Measure:
            return lambda: sample(ours, command, seconds=seconds, **options)

        def theirs(worker: Worker, what: str) -> Measure:
            return lambda: sample(worker, "run_peer", what=what, seconds=seconds)

        results: list[Result] = []
        for what, command in (("publish", mine("publish")), ("consume", mine("consume"))):
            measures = [command, *[theirs(worker, what) for worker in sides.peers.values()]]
            samples = await alternate(run, crew, measures)
            for number, name in enumerate(sides.peers, 1):
                title = f"queue/{what}" if number == 1 else f"queue/{what}/{name}"
                results.append(Result(title, "1/s", PEERS[name].title, samples[0], samples[number]))
            if not sides.peers:
                results.append(Result(f"queue/{what}", "1/s", _absent(sides), samples[0], samples[0]))
        [fanout, one, all_of_it] = await alternate(
            run, crew, [mine("publish", channels=CHANNELS), mine("publish"), mine("consume", channels=CHANNELS)]
        )
        results.append(Result("queue/fanout", "1/s", "dep2p without channels", fanout, one))
        results.append(Result("queue/fanout/consume", "1/s", "dep2p without consuming", all_of_it, fanout))
        through = await start_pair(run, crew)
        [over, within] = await alternate(
            run, crew, [lambda: sample(through, "through", seconds=seconds), mine("consume")]
        )
        results.append(Result("queue/p2p", "1/s", "dep2p in process", over, within))
    return results


async def queue_scale(run: Run) -> list[Result]:
    """queue/backlog and queue/idle: start-up, memory and speed with a million messages, and with 10,000 queues.

    Who fills a store is killed, not closed; each figure is of a new process.
    """
    quick = run.effort.rounds < 9
    backlog = _BACKLOG // 10 if quick else _BACKLOG
    idle = _IDLE // 10 if quick else _IDLE
    root = Path(__file__).parents[2] / ".run"
    root.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="dep2p-bench-scale-", dir=root) as folder:
        async with run.crew() as crew:
            for name, command, count in (
                ("empty", "fill", 0),
                ("small", "fill", _SMALL),
                ("large", "fill", backlog),
                ("idle", "idle", idle),
            ):
                filler = await crew.start("dep2p", f"fills {name}", _MODULE)
                await filler.call("open", name=f"{folder}/{name}.sqlite")
                await filler.call(command, count=count, timeout_s=900)
                os.kill(filler.pid, signal.SIGKILL)
                await crew.end(filler)
            opened: dict[str, dict[str, float]] = {}
            drained: dict[str, dict[str, float]] = {}
            for name in ("empty", "small", "large", "idle"):
                reader = await crew.start("dep2p", f"reads {name}", _MODULE)
                opened[name] = await reader.call("open", name=f"{folder}/{name}.sqlite", timeout_s=120)
                if name in ("small", "large"):
                    drained[name] = await reader.call("drain_backlog", count=_SMALL, timeout_s=300)
                await crew.end(reader)
    start_ms = {name: [Sample(each["elapsed_s"] * 1e3)] for name, each in opened.items()}
    memory = {name: [Sample(each["rss_mb"])] for name, each in {**opened, **drained}.items()}
    rate = {name: [Sample(_rate(each), cpu_us=each["cpu_us"])] for name, each in drained.items()}
    empty, few = "an empty store", f"a backlog of {_SMALL:,}"
    return [
        Result("queue/backlog/start", "ms", empty, start_ms["large"], start_ms["empty"]),
        Result("queue/backlog/memory", "MB", few, memory["large"], memory["small"]),
        Result("queue/backlog", "1/s", few, rate["large"], rate["small"]),
        Result("queue/idle", "ms", empty, start_ms["idle"], start_ms["empty"]),
        Result("queue/idle/memory", "MB", empty, memory["idle"], memory["empty"]),
    ]


async def _start(crew: Crew, addresses: dict[str, str]) -> _Sides:
    ours = await crew.start("dep2p", "engine", _MODULE)
    await ours.call("open")
    peers: dict[str, Worker] = {}
    absent: dict[str, str] = {}
    for name, kind in PEERS.items():
        why = missing(kind, addresses)
        if why:
            absent[name] = why
            continue
        worker = await crew.start(name, "peer", _MODULE)
        await worker.call("open_peer", kind=name, url=addresses.get(kind.needs, ""))
        peers[name] = worker
    return _Sides(ours, peers, absent)


def _absent(sides: _Sides) -> str:
    return "no peer: " + "; ".join(f"{name}: {why}" for name, why in sides.absent.items())


async def start_pair(run: Run, crew: Crew) -> Worker:
    """A node that keeps queues, and one that uses them: that one."""
    broker = await crew.start("dep2p", "keeper", _MODULE)
    address = await broker.call_text("keep", secret=run.secret)
    user = await crew.start("dep2p", "user", _MODULE)
    await user.call("join", secret=run.secret, address=address)
    return user


async def sample(worker: Worker, command: str, **options: object) -> Sample:
    done = await worker.call(command, timeout_s=120, **options)
    return Sample(_rate(done), done.get("p50_ms"), done.get("p99_ms"), done.get("cpu_us"), done.get("fsyncs"))


def _rate(done: dict[str, float]) -> float:
    return done["count"] / done["elapsed_s"]
