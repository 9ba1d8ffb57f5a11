"""dial: from a node that knows only an address to a connection that may be used."""

from collections.abc import Awaitable, Callable
from statistics import median

import trio

from bench.harness.compare import Run, alternate
from bench.harness.processes import Crew
from bench.harness.report import Result, Sample
from dep2p.protocols.timing.percentile import percentile

_Dialed = tuple[Sample, Sample]


async def dial(run: Run) -> list[Result]:
    """dial and, with the answer to a first request, dial/request: a fresh node each time."""
    async with run.crew() as crew:
        dialing: dict[str, Callable[[], Awaitable[_Dialed]]] = {}

        async def start_pair(side: str) -> None:
            dialing[side] = await _prepare(run, crew, side)

        async with trio.open_nursery() as nursery:
            for side in (run.ours, "libp2p"):
                nursery.start_soon(start_pair, side)
        ours, stock = await alternate(run, crew, [dialing[run.ours], dialing["libp2p"]])
    return [
        Result("dial", "ms", "libp2p host.connect", [each[0] for each in ours], [each[0] for each in stock]),
        Result(
            "dial/request",
            "ms",
            "libp2p host.connect, RequestResponse",
            [each[1] for each in ours],
            [each[1] for each in stock],
        ),
    ]


async def _prepare(run: Run, crew: Crew, side: str) -> Callable[[], Awaitable[_Dialed]]:
    server, client = await crew.start(side, "server"), await crew.start(side, "client")
    address = await server.call_text("serve", secret=run.secret)

    async def dial_some() -> _Dialed:
        usable_ms: list[float] = []
        answered_ms: list[float] = []
        before_s = server.cpu_s() + client.cpu_s()
        for _ in range(run.effort.dials):
            times = await client.call("dial", secret=run.secret, address=address)
            usable_ms.append(times["usable_ms"])
            answered_ms.append(times["answered_ms"])
        cpu_us = (server.cpu_s() + client.cpu_s() - before_s) * 1e6 / run.effort.dials
        return _sample(usable_ms, cpu_us), _sample(answered_ms, cpu_us)

    return dial_some


def _sample(times_ms: list[float], cpu_us: float) -> Sample:
    times_ms.sort()
    return Sample(median(times_ms), percentile(times_ms, 0.5), percentile(times_ms, 0.99), cpu_us)
