"""Pushes of an ordered session beside plain notifies, in the same run."""

from bench.harness.compare import Run, alternate, start_pairs
from bench.harness.report import Result
from bench.messaging.messages import MESSAGE_BYTES, sending


async def session(run: Run) -> list[Result]:
    """session: 100 bytes pushed in strict order and taken by an app, against a notify of 100 bytes."""
    async with run.crew() as crew:
        pairs = await start_pairs(run, crew, ("dep2p/session", "dep2p"))
        ours, notify = await alternate(run, crew, [sending(run, pair, "notify", MESSAGE_BYTES) for pair in pairs])
    return [Result("session", "1/s", "dep2p notify", ours, notify)]
