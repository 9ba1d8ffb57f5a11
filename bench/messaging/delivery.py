"""Reliable messages and ordered pushes beside plain notifies, in the same run."""

from bench.harness.compare import Run, alternate, start_pairs
from bench.harness.report import Result
from bench.messaging.messages import MESSAGE_BYTES, sending
from bench.messaging.session import session


async def delivery(run: Run) -> list[Result]:
    """delivery/memory, delivery/durable (64 in flight, until acknowledged) and session, each against notify."""
    async with run.crew() as crew:
        pairs = await start_pairs(run, crew, ("dep2p/reliable", "dep2p/durable", "dep2p"))
        measures = [sending(run, pair, "notify", MESSAGE_BYTES) for pair in pairs]
        memory, durable, notify = await alternate(run, crew, measures)
    return [
        Result("delivery/memory", "1/s", "dep2p notify", memory, notify),
        Result("delivery/durable", "1/s", "dep2p notify", durable, notify),
        *await session(run),
    ]
