"""Order by key over a connection: publish, consume in order and acknowledge, beside a shared channel."""

from bench.harness.compare import Run, alternate
from bench.harness.processes import Worker
from bench.harness.report import Result, Sample
from bench.queues.benchmark import sample, start_pair

PARTITIONS = 4
KEYS = 1_000


async def ordered(run: Run) -> list[Result]:
    """ordered/p2p against the shared mode, and ordered/handover: how long a partition waits for its next consumer."""
    seconds = run.effort.seconds
    async with run.crew() as crew:
        worker = await start_pair(run, crew)

        async def through(exclusive: bool) -> Sample:
            return await sample(
                worker, "ordered", seconds=seconds, exclusive=exclusive, partitions=PARTITIONS, keys=KEYS
            )

        [in_order, shared] = await alternate(run, crew, [lambda: through(True), lambda: through(False)])
        waits = [await _handover(worker, max(1, run.effort.rounds))]
    return [
        Result("ordered/p2p", "1/s", "dep2p, a shared channel", in_order, shared),
        Result("ordered/handover", "ms", "none: the p99 of a clean leave, against itself", waits, waits),
    ]


async def _handover(worker: Worker, rounds: int) -> Sample:
    found = await worker.call("handover", rounds=5 * rounds, partitions=PARTITIONS, timeout_s=300)
    return Sample(found["p99_ms"], p50_ms=found["p50_ms"], p99_ms=found["p99_ms"])
