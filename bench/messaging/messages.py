"""request, notify and stream: rates between two processes that are connected already."""

from collections.abc import Awaitable, Callable

from bench.harness.compare import Pair, Run, alternate, start_pairs
from bench.harness.report import Result, Sample

Measure = Callable[[], Awaitable[Sample]]

MESSAGE_BYTES = 100
OUR_PIECE_BYTES = 262_144
PEER_PIECE_BYTES = 1_048_576
_DRAIN_TIMEOUT_S = 60.0


async def request(run: Run) -> list[Result]:
    """request/1, request/1/tcp and request/64: 100 bytes there and back."""
    async with run.crew() as crew:
        ours, stock, tcp = await start_pairs(run, crew, (run.ours, "libp2p", "tcp"))

        def asking(pair: Pair, in_flight: int) -> Measure:
            return lambda: _ask(run, pair, in_flight)

        ours_1, stock_1, tcp_1 = await alternate(run, crew, [asking(pair, 1) for pair in (ours, stock, tcp)])
        ours_64, stock_64 = await alternate(run, crew, [asking(pair, 64) for pair in (ours, stock)])
    return [
        Result("request/1", "1/s", "libp2p RequestResponse", ours_1, stock_1),
        Result("request/1/tcp", "1/s", "raw trio TCP", ours_1, tcp_1),
        Result("request/64", "1/s", "libp2p RequestResponse", ours_64, stock_64),
    ]


async def notify(run: Run) -> list[Result]:
    """notify: 100 bytes one way, counted at the receiver."""
    async with run.crew() as crew:
        pairs = await start_pairs(run, crew, (run.ours, "libp2p"))
        ours, stock = await alternate(run, crew, [sending(run, pair, "notify", MESSAGE_BYTES) for pair in pairs])
    return [Result("notify", "1/s", "libp2p stream, a write each", ours, stock)]


async def stream(run: Run) -> list[Result]:
    """stream: bulk one way, counted at the receiver."""
    async with run.crew() as crew:
        ours, stock = await start_pairs(run, crew, (run.ours, "libp2p"))
        [bulk, theirs] = await alternate(
            run,
            crew,
            [sending(run, ours, "bulk", OUR_PIECE_BYTES), sending(run, stock, "bulk", PEER_PIECE_BYTES)],
        )
    return [Result("stream", "MB/s", "libp2p stream", bulk, theirs)]


async def local(run: Run) -> list[Result]:
    """local/…: two programs of one node, beside the same calls between two nodes over loopback."""
    async with run.crew() as crew:
        near, far, near_topic, far_topic = await start_pairs(
            run, crew, ("dep2p/local", "dep2p", "dep2p/topic-local", "dep2p/topic")
        )

        def asking(pair: Pair, in_flight: int) -> Measure:
            return lambda: _ask(run, pair, in_flight)

        by_1 = await alternate(run, crew, [asking(pair, 1) for pair in (near, far)])
        by_64 = await alternate(run, crew, [asking(pair, 64) for pair in (near, far)])
        notified = await alternate(run, crew, [sending(run, pair, "notify", MESSAGE_BYTES) for pair in (near, far)])
        published = await alternate(
            run, crew, [sending(run, pair, "notify", MESSAGE_BYTES) for pair in (near_topic, far_topic)]
        )
    return [
        Result(f"local/{name}", "1/s", "two nodes on loopback", ours, theirs)
        for name, (ours, theirs) in (
            ("request/1", by_1),
            ("request/64", by_64),
            ("notify", notified),
            ("publish", published),
        )
    ]


async def _ask(run: Run, pair: Pair, in_flight: int) -> Sample:
    before_s = pair.cpu_s()
    done = await pair.client.call("request", seconds=run.effort.seconds, in_flight=in_flight, size_bytes=MESSAGE_BYTES)
    cpu_us = (pair.cpu_s() - before_s) * 1e6 / done["count"]
    return Sample(done["count"] / done["elapsed_s"], done["p50_ms"], done["p99_ms"], cpu_us)


def sending(run: Run, pair: Pair, command: str, size_bytes: int) -> Measure:
    """Measures one-way messages (``notify``) or pieces (``bulk``) of a pair."""
    return lambda: _send(run, pair, command, size_bytes)


async def _send(run: Run, pair: Pair, command: str, size_bytes: int) -> Sample:
    """A rate from the first send to the last arrival: what a sender has queued does not count."""
    await pair.server.call("reset")
    before_s = pair.cpu_s()
    sent = await pair.client.call(command, seconds=run.effort.seconds, size_bytes=size_bytes)
    total_bytes = int(sent["count"]) * size_bytes
    arrived = await pair.server.call("reach", timeout_s=_DRAIN_TIMEOUT_S, size_bytes=total_bytes)
    if arrived["bytes"] != total_bytes:
        raise ValueError(f"{total_bytes} bytes were sent and {arrived['bytes']:.0f} arrived")
    cpu_us = (pair.cpu_s() - before_s) * 1e6 / sent["count"]
    amount = total_bytes / 1e6 if command == "bulk" else sent["count"]
    return Sample(amount / (arrived["last_at_s"] - sent["began_s"]), cpu_us=cpu_us)
