"""simulator/1000 and simulator/10000: simulated events for each second of one core, with the whole router.

No other simulator runs this router, so the peer is a floor: a plain ``heapq`` loop over nodes that flood, with no mesh,
gossip, scores, validation, heartbeats or metrics. The ratio says what all of these cost together; it is below 1.
"""

import gc
import heapq
import time
from dataclasses import dataclass
from random import Random
from typing import Final

from bench.harness.compare import FULL, QUICK, Effort, Run
from bench.harness.report import Result, Sample
from dep2p.gossipsub.params import go_defaults
from dep2p.testing.simulator.simulator import Scenario, Simulation
from dep2p.testing.simulator.topology import Latency, random_graph

PEER: Final = "heapq loop, flooding nodes"


@dataclass(frozen=True, slots=True)
class _Size:
    """One result: how many nodes, and how much of them for which effort."""

    name: str
    nodes: int
    messages: int
    rounds: int
    warmup_s: float
    settle_s: float


def _sizes(effort: Effort) -> list[_Size]:
    if effort is FULL:
        return [
            _Size("simulator/1000", 1_000, 60, 5, 5.0, 5.0),
            _Size("simulator/10000", 10_000, 12, 3, 5.0, 5.0),
        ]
    if effort is QUICK:
        return [
            _Size("simulator/1000", 1_000, 20, 3, 2.0, 2.0),
            _Size("simulator/10000", 10_000, 2, 1, 2.0, 1.5),
        ]
    return [_Size("simulator/1000", 20, 2, 1, 1.0, 1.0), _Size("simulator/10000", 40, 2, 1, 1.0, 1.0)]


async def simulator(run: Run) -> list[Result]:
    """Both results. Processor time is measured: a simulation is one thread, and other processes take the core away."""
    results: list[Result] = []
    for size in _sizes(run.effort):
        ours: list[Sample] = []
        theirs: list[Sample] = []
        for number in range(size.rounds):
            for mine in (True, False) if number % 2 == 0 else (False, True):
                gc.collect()
                run.load.begin(())
                if mine:
                    ours.append(_ours(size, number))
                else:
                    theirs.append(_theirs(size, number))
                run.load.end(())
        results.append(Result(size.name, "1/s", PEER, ours, theirs))
    return results


def _ours(size: _Size, seed: int) -> Sample:
    """The scenario of the published figure: go's mesh, ten publishers, four messages a second. Raises RuntimeError."""
    scenario = Scenario(
        nodes=size.nodes,
        publishers=10,
        messages=size.messages,
        seed=seed,
        params=go_defaults(),
        warmup_s=size.warmup_s,
        settle_s=size.settle_s,
    )
    gc.disable()
    try:
        simulation = Simulation(scenario)
        started = time.process_time()
        simulation.run()
        cpu_s = time.process_time() - started
        report = simulation.report(cpu_s=cpu_s)
    finally:
        gc.enable()
    if report.deliveries.ratio < 1.0:
        raise RuntimeError(f"{size.name} delivered {report.deliveries.ratio:.4f}: a speed without deliveries is none")
    latency = report.deliveries.latency_ms
    return Sample(report.events / cpu_s, p50_ms=latency.p50, p99_ms=latency.p99, cpu_us=cpu_s / report.events * 1e6)


class _FloodNode:
    """Sends what is new to all neighbours but the sender."""

    __slots__ = ("neighbours", "seen")

    def __init__(self) -> None:
        self.neighbours: dict[int, float] = {}
        self.seen: dict[bytes, float] = {}

    def receive(self, now: float, sender: int, message: bytes) -> list[tuple[float, int]]:
        """(arrival, node) of each copy to send."""
        if message in self.seen:
            return []
        self.seen[message] = now
        return [(now + delay, other) for other, delay in self.neighbours.items() if other != sender]


def _theirs(size: _Size, seed: int) -> Sample:
    rng = Random(seed)
    latency = Latency()
    nodes = [_FloodNode() for _ in range(size.nodes)]
    for dialer, other in random_graph(size.nodes, 20, rng):
        delay = latency.draw(rng)
        nodes[dialer].neighbours[other] = nodes[other].neighbours[dialer] = delay
    heap: list[tuple[float, int, int, int, bytes]] = []
    for index in range(size.messages):
        heap.append((index * 0.25, index, rng.randrange(size.nodes), -1, b"message %d" % index))
    sequence = len(heap)
    events = 0
    gc.disable()
    started = time.process_time()
    try:
        while heap:
            now, _, number, sender, message = heapq.heappop(heap)
            events += 1
            for at, other in nodes[number].receive(now, sender, message):
                sequence += 1
                heapq.heappush(heap, (at, sequence, other, number, message))
        cpu_s = time.process_time() - started
    finally:
        gc.enable()
    delays = sorted(at - index * 0.25 for node in nodes for index, at in enumerate(sorted(node.seen.values())))
    return Sample(
        events / cpu_s,
        p50_ms=delays[len(delays) // 2] * 1_000,
        p99_ms=delays[int(len(delays) * 0.99)] * 1_000,
        cpu_us=cpu_s / events * 1e6,
    )
