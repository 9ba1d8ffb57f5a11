"""A process of the benchmark: serves or drives one side, as JSON lines on its input say.

Started by :mod:`bench.harness.processes` only. It ends when its input ends.
"""

import argparse
import cProfile
import gc
import json
import os
import time
import traceback
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import trio

from bench.sides.interface import Client, Send, Server, Side
from dep2p.protocols.timing.percentile import percentile

_LINE_BYTES_MAX = 65_536
_CONNECTING_MAX = 8
"""Held nodes that connect at the same time."""


def load_side(name: str) -> Side:
    """Load the side ``name``: it is imported here, so that no process holds code of a side that it does not run."""
    if name == "dep2p":
        from bench.sides.node import NodeSide

        return NodeSide()
    if name == "dep2p/session":
        from bench.sides.node_session import SessionSide

        return SessionSide()
    if name == "dep2p/reliable":
        from bench.sides.node_delivery import ReliableSide

        return ReliableSide()
    if name == "dep2p/durable":
        from bench.sides.node_delivery import DurableSide

        return DurableSide()
    if name in ("dep2p/local", "dep2p/topic", "dep2p/topic-local"):
        from bench.sides.node_local import LocalSide, LocalTopicSide, TopicSide

        return {"dep2p/local": LocalSide, "dep2p/topic": TopicSide, "dep2p/topic-local": LocalTopicSide}[name]()
    if name == "libp2p":
        from bench.sides.stock import StockSide

        return StockSide()
    if name == "tcp":
        from bench.sides.tcp import TCPSide

        return TCPSide()
    raise ValueError(f"no side {name!r}")


class Commands:
    """The commands of one process; each method's keyword arguments come off the wire, its result goes back."""

    def __init__(self, side: Side, stack: AsyncExitStack) -> None:
        self._side = side
        self._stack = stack
        self._server: Server | None = None
        self._client: Client | None = None
        self._holding: trio.Nursery | None = None

    async def hello(self) -> dict[str, object]:
        """The process is ready."""
        return {}

    async def serve(self, secret: str) -> dict[str, object]:
        """Listen; answers with the address."""
        self._server = await self._stack.enter_async_context(self._side.serve(secret))
        return {"text": self._server.address}

    async def connect(self, secret: str, address: str) -> dict[str, object]:
        """Connect to a server and ask it once, so that everything is open."""
        self._client = await self._stack.enter_async_context(self._side.connect(secret, address))
        await self._client.request(b"first")
        return {}

    async def hold(self, secret: str, address: str, count: int) -> dict[str, object]:
        """Connect ``count`` nodes of their own to a server, ask once from each, and keep them."""
        if self._holding is None:
            self._holding = await self._stack.enter_async_context(trio.open_nursery())
            self._stack.callback(self._holding.cancel_scope.cancel)
        holding, slots = self._holding, trio.CapacityLimiter(_CONNECTING_MAX)

        async def start_one() -> None:
            async with slots:
                await holding.start(self._hold_one, secret, address)

        async with trio.open_nursery() as nursery:
            for _ in range(count):
                nursery.start_soon(start_one)
        return {}

    async def _hold_one(self, secret: str, address: str, *, task_status: trio.TaskStatus[None]) -> None:
        async with self._side.connect(secret, address, listen=False) as client:
            await client.request(b"first")
            task_status.started()
            await trio.sleep_forever()

    async def collect(self) -> dict[str, object]:
        """Collect garbage, before the memory of this process is read."""
        gc.collect()
        return {}

    async def reset(self) -> dict[str, object]:
        """Count arrivals from zero."""
        assert self._server is not None
        self._server.arrivals.reset()
        return {}

    async def reach(self, size_bytes: int) -> dict[str, object]:
        """Wait until ``size_bytes`` arrived; answer with the time of the last arrival and the count of messages."""
        assert self._server is not None
        arrivals = self._server.arrivals
        await arrivals.reach(size_bytes)
        return {"last_at_s": arrivals.last_at_s, "messages": arrivals.messages, "bytes": arrivals.bytes}

    async def request(self, seconds: float, in_flight: int, size_bytes: int) -> dict[str, object]:
        """Ask for ``seconds`` with ``in_flight`` requests open at any moment."""
        assert self._client is not None
        data = os.urandom(size_bytes)
        ask = self._client.request
        latencies_s: list[float] = []
        began_s = time.monotonic()
        until_s = began_s + seconds

        async def one_after_another() -> None:
            clock, note = time.monotonic, latencies_s.append
            sent_s = clock()
            while sent_s < until_s:
                answer = await ask(data)
                now_s = clock()
                note(now_s - sent_s)
                if len(answer) != size_bytes:
                    raise ValueError(f"an answer of {len(answer)} bytes to a request of {size_bytes}")
                sent_s = now_s

        async with trio.open_nursery() as nursery:
            for _ in range(in_flight):
                nursery.start_soon(one_after_another)
        elapsed_s = time.monotonic() - began_s
        latencies_s.sort()
        return {
            "count": len(latencies_s),
            "elapsed_s": elapsed_s,
            "p50_ms": percentile(latencies_s, 0.5) * 1_000,
            "p99_ms": percentile(latencies_s, 0.99) * 1_000,
        }

    async def notify(self, seconds: float, size_bytes: int) -> dict[str, object]:
        """Send one-way messages for ``seconds``, each by a call of its own."""
        assert self._client is not None
        async with self._client.open_notify() as send:
            return await _send_for(send, seconds, os.urandom(size_bytes))

    async def bulk(self, seconds: float, size_bytes: int) -> dict[str, object]:
        """Send bulk pieces of ``size_bytes`` for ``seconds``."""
        assert self._client is not None
        async with self._client.open_bulk() as send:
            return await _send_for(send, seconds, os.urandom(size_bytes))

    async def dial(self, secret: str, address: str) -> dict[str, object]:
        """Dial once from a node made for it."""
        times = await self._side.dial_fresh(secret, address)
        return {"usable_ms": times.usable_ms, "answered_ms": times.answered_ms}


async def _send_for(send: Send, seconds: float, data: bytes) -> dict[str, object]:
    clock = time.monotonic
    count = 0
    began_s = clock()
    until_s = began_s + seconds
    while clock() < until_s:
        await send(data)
        count += 1
    return {"count": count, "began_s": began_s, "sent_at_s": clock()}


async def _read_commands(input_fd: int, output_fd: int, make: Callable[[AsyncExitStack], object]) -> None:
    lines = trio.lowlevel.FdStream(input_fd)
    received = bytearray()
    async with lines, AsyncExitStack() as stack:
        commands = make(stack)
        while True:
            while b"\n" not in received:
                chunk = await lines.receive_some(_LINE_BYTES_MAX)
                if not chunk:
                    return
                received += chunk
            line, _, rest = bytes(received).partition(b"\n")
            received[:] = rest
            call = json.loads(line)
            method: Callable[..., Awaitable[dict[str, object]]] = getattr(commands, call["command"])
            try:
                answer = await method(**call["arguments"])
            except Exception as error:  # the run ends with this text; the worker stays, so that it can report it
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
            os.write(output_fd, json.dumps(answer).encode() + b"\n")


def run_worker(program: str, make: Callable[[str, AsyncExitStack], object]) -> None:
    """Run the commands that ``make`` gives for a side's name; what its libraries print goes to stderr.

    Each command is an async method of its name.
    """
    parser = argparse.ArgumentParser(prog=program)
    parser.add_argument("side")
    parser.add_argument("--profile")
    options = parser.parse_args()
    input_fd, output_fd = os.dup(0), os.dup(1)
    os.dup2(2, 1)

    def make_commands(stack: AsyncExitStack) -> object:
        return make(options.side, stack)

    if options.profile is None:
        trio.run(_read_commands, input_fd, output_fd, make_commands)
        return
    profile = cProfile.Profile()
    try:
        profile.enable()
        trio.run(_read_commands, input_fd, output_fd, make_commands)
    finally:
        profile.disable()
        profile.dump_stats(options.profile)


if __name__ == "__main__":
    run_worker("bench.messaging.worker", lambda name, stack: Commands(load_side(name), stack))
