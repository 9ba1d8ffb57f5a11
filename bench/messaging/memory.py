"""memory/idle and memory/peer: resident memory of a process, and what each connected peer adds to it."""

from functools import partial

import trio

from bench.harness.compare import Run
from bench.harness.processes import Crew, Worker
from bench.harness.report import Result, Sample
from bench.messaging.daemon import idle_daemon_kb

_HOLDERS = 2
_HOLD_TIMEOUT_S = 120.0


async def memory(run: Run) -> list[Result]:
    """Both results. A fresh server process for each round and side; the peers live in processes of their own."""
    sides = (run.ours, "libp2p")
    idle: dict[str, list[Sample]] = {side: [] for side in sides}
    grown: dict[str, list[Sample]] = {side: [] for side in sides}
    for number in range(max(1, run.effort.rounds // 3)):
        for side in sides if number % 2 == 0 else reversed(sides):
            async with run.crew() as crew:
                idle_kb, grown_kb = await _measure(run, crew, side)
            idle[side].append(Sample(idle_kb / 1_000))
            grown[side].append(Sample(grown_kb / run.effort.peers))
    return [
        Result("memory/idle", "MB", "libp2p host process", idle[run.ours], idle["libp2p"]),
        Result("memory/peer", "KB", "libp2p host connection", grown[run.ours], grown["libp2p"]),
    ]


async def _measure(run: Run, crew: Crew, side: str) -> tuple[float, float]:
    """KB of an idle server, and KB that all peers together add to it."""
    workers: list[Worker] = []

    async def start(role: str) -> None:
        workers.append(await crew.start(side, role))

    async with trio.open_nursery() as nursery:
        for role in ("server", *["holder"] * _HOLDERS):
            nursery.start_soon(start, role)
    server, *holders = sorted(workers, key=lambda worker: "server" not in worker.label)
    address = await server.call_text("serve", secret=run.secret)
    await server.call("collect")
    # Of ours the whole daemon counts; the server here is a node without its control API.
    idle_kb = await idle_daemon_kb(address) if side == "dep2p" else server.rss_kb()
    run.load.begin(crew.pids)
    # A first peer loads what only a connection loads (imports, caches): that is not what a further peer costs.
    await holders[0].call("hold", secret=run.secret, address=address, count=1)
    await server.call("collect")
    first_kb = server.rss_kb()
    shares = [len(range(index, run.effort.peers, _HOLDERS)) for index in range(_HOLDERS)]
    async with trio.open_nursery() as nursery:
        for holder, count in zip(holders, shares, strict=True):
            nursery.start_soon(
                partial(holder.call, "hold", timeout_s=_HOLD_TIMEOUT_S, secret=run.secret, address=address, count=count)
            )
    await server.call("collect")
    grown_kb = server.rss_kb() - first_kb
    run.load.end(crew.pids)
    return idle_kb, grown_kb
