"""``dep2p bench``: how fast requests, notifies and streams go to a peer, through both daemons."""

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Final

import typer

from dep2p.cli.framework.command import Invocation, command, group
from dep2p.cli.framework.errors import CliError
from dep2p.cli.framework.payloads import RealmOption
from dep2p.cli.framework.render import byte_count, duration, short_peer
from dep2p.cli.framework.resolve import resolve_peer
from dep2p.errors import NoHandlerError, StreamClosedError
from dep2p.protocols.timing.percentile import percentile

if TYPE_CHECKING:
    from anyio.abc import TaskStatus

    from dep2p.client import Client, ClientStream

NAME: Final = "dep2p.bench"
_ITEM_BYTES: Final = 262_144
_WARM_UP: Final = 20

PeerArgument = Annotated[str, typer.Argument(help="A peer that runs `dep2p bench serve`.", metavar="PEER")]
SizeOption = Annotated[int, typer.Option("--size", "-s", help="Bytes of each payload.", min=0, max=1_000_000)]
CountOption = Annotated[int, typer.Option("--count", "-n", help="How many.", min=1, max=10_000_000)]
ConcurrencyOption = Annotated[int, typer.Option("--concurrency", "-c", help="How many at once.", min=1, max=1024)]


def serve(run: Invocation, realm: RealmOption = None) -> None:
    """Be the other side: echo requests, take notifies, send streams back."""

    async def body(client: "Client") -> None:
        import anyio

        async with anyio.create_task_group() as tasks:
            await tasks.start(_echo_requests, client, realm)
            await tasks.start(_count_notifies, client, realm)
            await tasks.start(_echo_streams, client, realm)
            run.say("serving benchmarks; Ctrl-C ends")

    run.with_client(body)


async def _echo_requests(client: "Client", realm: str | None, *, task_status: "TaskStatus[None]") -> None:
    import anyio

    async with client.reply(NAME, realm=realm, concurrency=256) as requests, anyio.create_task_group() as tasks:
        task_status.started()
        async for request in requests:
            tasks.start_soon(request.respond, request.body)


async def _count_notifies(client: "Client", realm: str | None, *, task_status: "TaskStatus[None]") -> None:
    async with client.listen(NAME, realm=realm) as notifications:
        task_status.started()
        async for _ in notifications:
            pass


async def _echo_streams(client: "Client", realm: str | None, *, task_status: "TaskStatus[None]") -> None:
    import anyio

    async with client.accept(NAME, realm=realm) as streams, anyio.create_task_group() as tasks:
        task_status.started()
        async for stream in streams:
            tasks.start_soon(_take_stream, stream)


async def _take_stream(stream: "ClientStream") -> None:
    """Count the received bytes and send the count back at the end."""
    received = 0
    try:
        async with stream:
            async for item in stream:
                received += len(item)
            await stream.send(str(received).encode("ascii"))
            await stream.send_eof()
    except StreamClosedError:
        return  # the other side gave up


def bench_request(
    run: Invocation,
    peer_text: PeerArgument,
    count: CountOption = 1000,
    size: SizeOption = 100,
    concurrency: ConcurrencyOption = 1,
    realm: RealmOption = None,
) -> None:
    """Time requests and their answers."""
    _timed_calls(run, "request", peer_text, count=count, size=size, concurrency=concurrency, realm=realm)


def bench_notify(
    run: Invocation,
    peer_text: PeerArgument,
    count: CountOption = 1000,
    size: SizeOption = 100,
    concurrency: ConcurrencyOption = 16,
    realm: RealmOption = None,
) -> None:
    """Time notifies, up to the moment when the daemon has taken them."""
    _timed_calls(run, "notify", peer_text, count=count, size=size, concurrency=concurrency, realm=realm)


def _timed_calls(
    run: Invocation, kind: str, peer_text: str, *, count: int, size: int, concurrency: int, realm: str | None
) -> None:
    async def body(client: "Client") -> tuple[str, list[float], float]:
        import anyio

        peer = await resolve_peer(client, peer_text)
        data = os.urandom(size)
        taken: list[float] = []

        async def call() -> None:
            if kind == "request":
                await client.request(peer, NAME, data, realm=realm)
            else:
                await client.notify(peer, NAME, data, realm=realm)

        try:
            await client.request(peer, NAME, b"", realm=realm)
        except NoHandlerError:
            raise CliError(
                f"{short_peer(peer)} does not serve benchmarks", "D5003", tries=("dep2p bench serve   (there)",)
            ) from None
        for _ in range(min(_WARM_UP, count)):
            await call()
        left = count

        async def worker() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                started_s = time.perf_counter()
                await call()
                taken.append(time.perf_counter() - started_s)

        started_s = time.perf_counter()
        async with anyio.create_task_group() as tasks:
            for _ in range(min(concurrency, count)):
                tasks.start_soon(worker)
        return peer, taken, time.perf_counter() - started_s

    peer, taken, seconds = run.with_client(body)
    _report(run, kind, peer, taken, seconds, size=size, concurrency=concurrency)


def _report(
    run: Invocation, kind: str, peer: str, taken: Sequence[float], seconds: float, *, size: int, concurrency: int
) -> None:
    ordered = sorted(taken)
    figures = {
        "min_ms": ordered[0] * 1000,
        "median_ms": percentile(ordered, 0.5) * 1000,
        "p99_ms": percentile(ordered, 0.99) * 1000,
    }
    rate = len(ordered) / max(seconds, 1e-9)
    if run.json:
        run.emit(
            {
                "kind": kind,
                "peer": peer,
                "count": len(ordered),
                "size_bytes": size,
                "concurrency": concurrency,
                "seconds": round(seconds, 4),
                "per_s": round(rate, 1),
            }
            | {name: round(value, 4) for name, value in figures.items()}
        )
        return
    run.print(
        f"{len(ordered)} {kind} calls of {byte_count(size)}, {concurrency} at once, to {short_peer(peer)}: "
        f"{rate:,.0f}/s\nmin {figures['min_ms']:.2f} ms   median {figures['median_ms']:.2f} ms   "
        f"p99 {figures['p99_ms']:.2f} ms"
    )
    run.say("through the control APIs of both daemons; programs that use dep2p.Node are much faster")


def bench_stream(
    run: Invocation,
    peer_text: PeerArgument,
    megabytes: Annotated[int, typer.Option("--megabytes", "-m", help="How much to send.", min=1, max=1_000_000)] = 256,
    realm: RealmOption = None,
) -> None:
    """Time a stream of data to the peer."""

    async def body(client: "Client") -> tuple[str, float]:
        peer = await resolve_peer(client, peer_text)
        total = megabytes * 1_000_000
        item = os.urandom(_ITEM_BYTES)  # what a link carries: zeros shrink to nothing
        try:
            async with client.stream(peer, NAME, realm=realm) as stream:
                started_s = time.perf_counter()
                left = total
                while left:
                    await stream.send(item if left >= _ITEM_BYTES else item[:left])
                    left -= min(left, _ITEM_BYTES)
                await stream.send_eof()
                received = 0
                async for answer in stream:
                    received = int(answer)
                seconds = time.perf_counter() - started_s
        except NoHandlerError:
            raise CliError(
                f"{short_peer(peer)} does not serve benchmarks", "D5003", tries=("dep2p bench serve   (there)",)
            ) from None
        if received != total:
            raise CliError(f"the peer received {received} of {total} bytes", "D6001")
        return peer, seconds

    peer, seconds = run.with_client(body)
    rate = megabytes / max(seconds, 1e-9)
    if run.json:
        run.emit(
            {
                "kind": "stream",
                "peer": peer,
                "bytes": megabytes * 1_000_000,
                "seconds": round(seconds, 4),
                "megabytes_per_s": round(rate, 1),
            }
        )
    else:
        run.print(f"{megabytes} MB to {short_peer(peer)} in {duration(seconds)}: {rate:,.1f} MB/s")


def register(app: typer.Typer) -> None:
    """Add the group ``bench``."""
    sub = group(app, "bench", "Measure requests, notifies and streams between two nodes.")
    command(sub, "serve", examples=[("dep2p bench serve", "on the other node, until Ctrl-C")])(serve)
    command(sub, "request", examples=[("dep2p bench request f3Qa --concurrency 64", "64 at once")])(bench_request)
    command(sub, "notify", examples=[("dep2p bench notify f3Qa --count 10000", "up to the own daemon")])(bench_notify)
    command(sub, "stream", examples=[("dep2p bench stream f3Qa --megabytes 1000", "one gigabyte")])(bench_stream)
