"""A process of `python -m bench queue`: one side, driven by JSON lines as :mod:`bench.messaging.worker` is."""

import argparse
import cProfile
import json
import os
import resource
import shutil
import tempfile
import time
import traceback
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import trio

from bench.queues.peers import PEERS, Peer, run_for
from dep2p.daemon.gc import tune_gc
from dep2p.node.node import Node
from dep2p.protocols.queues.message import NewMessage
from dep2p.protocols.queues.wire.frames import DeliveryResult, Settle
from dep2p.protocols.timing.percentile import percentile
from dep2p.queues.broker.engine import QueueEngine
from dep2p.queues.consumer import Messages
from dep2p.queues.ordered_consumer import ExclusiveConsumer
from dep2p.queues.settings import QueueSettings
from dep2p.queues.types import SubscribeOptions
from dep2p.realm.credentials import Realm
from dep2p.types import PeerId

_LINE_BYTES_MAX = 65_536
_ROOT = Path(__file__).parents[2]
BODY_BYTES = 1_024
PUBLISHERS = 64


class Commands:
    """The commands; each method's keyword arguments come off the wire, its numbers go back."""

    def __init__(self, stack: AsyncExitStack, nursery: trio.Nursery) -> None:
        self._stack = stack
        self._nursery = nursery
        # On a real disk: a directory in memory would make every fsync free.
        self._directory = Path(tempfile.mkdtemp(prefix="dep2p-bench-queue-", dir=_ROOT / ".run"))
        stack.callback(shutil.rmtree, self._directory, ignore_errors=True)
        self._engine: QueueEngine | None = None
        self._peer: Peer | None = None
        self._group = 1
        self._node: Node | None = None
        self._broker = PeerId("")
        self._round = 0

    async def hello(self) -> dict[str, object]:
        """The process is ready."""
        return {}

    # Our engine, in process

    async def open(self, name: str = "queues.sqlite") -> dict[str, object]:
        """Open the engine; how long that took, and memory after it."""
        began_s = time.perf_counter()
        settings = QueueSettings(store=str(self._directory / name))
        engine = self._engine = QueueEngine(settings.make_store(self._directory))
        await engine.open()
        await self._nursery.start(engine.run)
        return {"elapsed_s": time.perf_counter() - began_s, "rss_mb": _rss_mb()}

    async def publish(self, seconds: float, publishers: int = PUBLISHERS, channels: int = 0) -> dict[str, object]:
        """Durable publishes for some seconds, to a queue with so many channels."""
        engine = self._ours
        name = await self._fresh()
        for number in range(channels):
            await engine.create_channel("", name, f"c{number}")
        before = engine.store.statistics()
        cpu_s = time.process_time()
        count, elapsed_s, latencies_s = await self._publish(name, seconds, publishers)
        after = engine.store.statistics()
        used_s = time.process_time() - cpu_s
        await engine.delete_queue("", name)
        return {
            "count": count,
            "elapsed_s": elapsed_s,
            "p50_ms": percentile(latencies_s, 0.5) * 1e3,
            "p99_ms": percentile(latencies_s, 0.99) * 1e3,
            "cpu_us": used_s / count * 1e6,
            "fsyncs": (after.fsyncs - before.fsyncs) / count,
        }

    async def _publish(self, name: str, seconds: float, publishers: int) -> tuple[int, float, list[float]]:
        engine = self._ours
        latencies_s: list[float] = []
        body = os.urandom(BODY_BYTES)
        began_s = time.perf_counter()
        until_s = began_s + seconds

        async def publish() -> None:
            while (at_s := time.perf_counter()) < until_s:
                await engine.publish("", name, [NewMessage(body)])
                latencies_s.append(time.perf_counter() - at_s)

        async with trio.open_nursery() as nursery:
            for _ in range(publishers):
                nursery.start_soon(publish)
        elapsed_s = time.perf_counter() - began_s
        return len(latencies_s), elapsed_s, sorted(latencies_s)

    async def consume(self, seconds: float, channels: int = 1, consumers: int = 16) -> dict[str, object]:
        """Publish, consume and acknowledge at once; until everything is acknowledged, durably."""
        engine = self._ours
        name = await self._fresh()
        before = engine.store.statistics()
        cpu_s = time.process_time()
        taken = [0] * channels
        total = 0
        is_over = False
        all_taken = trio.Event()

        async def take(number: int) -> None:
            nonlocal total
            async with await engine.subscribe(
                "", name, f"c{number}", SubscribeOptions(max_in_flight=256, from_start=True)
            ) as consumer:
                while True:
                    got = await consumer.receive(256)
                    taken[number] += len(got)
                    consumer.finish([(each.partition, each.seq) for each in got])
                    if is_over and all(each >= total for each in taken):
                        all_taken.set()

        for number in range(channels):
            await engine.create_channel("", name, f"c{number}", from_start=True)
        began_s = time.perf_counter()
        async with trio.open_nursery() as nursery:
            for number in range(channels):
                for _ in range(max(1, consumers // channels)):
                    nursery.start_soon(take, number)
            total, _, latencies_s = await self._publish(name, seconds, PUBLISHERS)
            is_over = True
            if not all(each >= total for each in taken):
                with trio.fail_after(60):
                    await all_taken.wait()
            await engine.flush()
            elapsed_s = time.perf_counter() - began_s
            nursery.cancel_scope.cancel()
        used_s = time.process_time() - cpu_s
        after = engine.store.statistics()
        await engine.delete_queue("", name)
        return {
            "count": total,
            "elapsed_s": elapsed_s,
            "p50_ms": percentile(latencies_s, 0.5) * 1e3,
            "p99_ms": percentile(latencies_s, 0.99) * 1e3,
            "cpu_us": used_s / total * 1e6,
            "fsyncs": (after.fsyncs - before.fsyncs) / total,
        }

    async def fill(self, count: int) -> dict[str, object]:
        """A backlog without a consumer."""
        engine = self._ours
        await engine.create_queue("", "backlog")
        await engine.create_channel("", "backlog", "c", from_start=True)
        body = os.urandom(BODY_BYTES)

        async def publish(share: int) -> None:
            for start in range(0, share, 500):
                await engine.publish("", "backlog", [NewMessage(body)] * min(500, share - start))

        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(publish, count // 4)
        await engine.flush()
        return {"bytes_on_disk": engine.store.statistics().bytes_on_disk}

    async def drain_backlog(self, count: int) -> dict[str, object]:
        """Consume so many from the backlog; durably."""
        engine = self._ours
        taken = 0
        cpu_s = time.process_time()
        began_s = time.perf_counter()
        async with await engine.subscribe("", "backlog", "c", SubscribeOptions(max_in_flight=1_024)) as consumer:
            while taken < count:
                got = await consumer.receive(256)
                taken += len(got)
                consumer.finish([(each.partition, each.seq) for each in got])
            await engine.flush()
        elapsed_s = time.perf_counter() - began_s
        used_us = (time.process_time() - cpu_s) / taken * 1e6
        return {"count": taken, "elapsed_s": elapsed_s, "rss_mb": _rss_mb(), "cpu_us": used_us}

    async def idle(self, count: int) -> dict[str, object]:
        """Queues with one message and one channel each."""
        engine = self._ours
        slots = trio.CapacityLimiter(200)

        async def make(number: int) -> None:
            async with slots:
                await engine.create_queue("", f"idle-{number}")
                await engine.create_channel("", f"idle-{number}", "c")
                await engine.publish("", f"idle-{number}", [NewMessage(b"x")])

        async with trio.open_nursery() as nursery:
            for number in range(count):
                nursery.start_soon(make, number)
        return {}

    @property
    def _ours(self) -> QueueEngine:
        assert self._engine is not None
        return self._engine

    async def _fresh(self) -> str:
        self._round += 1
        name = f"bench-{self._round}"
        await self._ours.create_queue("", name)
        return name

    # Over a connection

    async def keep(self, secret: str) -> dict[str, object]:
        """A node that keeps queues; its address."""
        realm = Realm.from_psk(bytes.fromhex(secret), "bench")
        self._node = await self._stack.enter_async_context(Node.open(realm, data_dir=self._directory))
        return {"text": self._node.listen_addrs()[0]}

    async def join(self, secret: str, address: str) -> dict[str, object]:
        """A node that uses the queues of another."""
        realm = Realm.from_psk(bytes.fromhex(secret), "bench")
        self._node = await self._stack.enter_async_context(Node.open(realm, bootstrap=[address]))
        self._broker = PeerId(address.rpartition("/p2p/")[2])
        with trio.fail_after(20):
            while True:
                try:
                    await self._node.queues.at(self._broker).listing()
                except Exception:
                    await trio.sleep(0.1)
                else:
                    return {}

    async def through(self, seconds: float) -> dict[str, object]:
        """Publish to the broker, consume from it, acknowledge; durable on both ways."""
        assert self._node is not None
        queues = self._node.queues.at(self._broker)
        self._round += 1
        name = f"bench-{self._round}"
        await queues.create(name)
        body = os.urandom(BODY_BYTES)
        latencies_s: list[float] = []
        taken = 0
        total = -1
        all_taken = trio.Event()

        async def take() -> None:
            nonlocal taken
            async with queues.consume(name, "c", max_in_flight=2_048) as messages:
                consumer = messages.consumer
                while True:
                    got = await consumer.receive(256)
                    consumer.settle([DeliveryResult(Settle.FINISH, each.partition, each.seq) for each in got])
                    taken += len(got)
                    if taken == total:
                        all_taken.set()

        began_s = time.perf_counter()
        until_s = began_s + seconds

        async def publish() -> None:
            while (at_s := time.perf_counter()) < until_s:
                await queues.publish(name, body)
                latencies_s.append(time.perf_counter() - at_s)

        async with trio.open_nursery() as taking:
            taking.start_soon(take)
            async with trio.open_nursery() as nursery:
                for _ in range(4 * PUBLISHERS):
                    nursery.start_soon(publish)
            total = len(latencies_s)
            if taken < total:
                with trio.fail_after(60):
                    await all_taken.wait()
            elapsed_s = time.perf_counter() - began_s
            taking.cancel_scope.cancel()
        await queues.delete(name)
        latencies_s.sort()
        return {
            "count": total,
            "elapsed_s": elapsed_s,
            "p50_ms": percentile(latencies_s, 0.5) * 1e3,
            "p99_ms": percentile(latencies_s, 0.99) * 1e3,
        }

    async def ordered(self, seconds: float, exclusive: bool, partitions: int, keys: int) -> dict[str, object]:
        """Publish messages with keys to the broker, consume and acknowledge them there, in order or shared."""
        assert self._node is not None
        queues = self._node.queues.at(self._broker)
        self._round += 1
        name = f"bench-{self._round}"
        await queues.create(name, {"partitions": partitions, "order": "strict" if exclusive else "best_effort"})
        body = os.urandom(BODY_BYTES)
        taken = 0
        total = -1
        all_taken = trio.Event()
        latencies_s: list[float] = []

        async def take() -> None:
            nonlocal taken
            async with queues.consume(name, "c", exclusive=exclusive, max_in_flight=2_048) as messages:
                consumer = messages.consumer
                while True:
                    got = await consumer.receive(256)
                    consumer.settle([DeliveryResult(Settle.FINISH, each.partition, each.seq) for each in got])
                    taken += len(got)
                    if taken == total:
                        all_taken.set()

        began_s = time.perf_counter()
        until_s = began_s + seconds

        async def publish(number: int) -> None:
            key = number
            while (at_s := time.perf_counter()) < until_s:
                await queues.publish(name, body, key=f"key {key % keys}")
                key += 4 * PUBLISHERS
                latencies_s.append(time.perf_counter() - at_s)

        async with trio.open_nursery() as taking:
            taking.start_soon(take)
            async with trio.open_nursery() as nursery:
                for number in range(4 * PUBLISHERS):
                    nursery.start_soon(publish, number)
            total = len(latencies_s)
            if taken < total:
                with trio.fail_after(60):
                    await all_taken.wait()
            elapsed_s = time.perf_counter() - began_s
            taking.cancel_scope.cancel()
        await queues.delete(name)
        latencies_s.sort()
        return {
            "count": total,
            "elapsed_s": elapsed_s,
            "p50_ms": percentile(latencies_s, 0.5) * 1e3,
            "p99_ms": percentile(latencies_s, 0.99) * 1e3,
        }

    async def handover(self, rounds: int, partitions: int) -> dict[str, object]:
        """How long a partition waits when its consumer leaves cleanly: from then to its first message at the next one.

        Two consumers share the partitions while messages come all the time; one of them leaves.
        """
        assert self._node is not None
        queues = self._node.queues.at(self._broker)
        self._round += 1
        name = f"bench-{self._round}"
        await queues.create(name, {"partitions": partitions, "order": "strict"})
        body = os.urandom(BODY_BYTES)
        waits_s: list[float] = []
        first_s: dict[int, float] = {}
        seen = trio.Event()

        async def publish(number: int) -> None:
            while True:
                await queues.publish(name, body, key=f"key {number}")
                await trio.sleep(0.002)

        async def take(messages: Messages, note: bool) -> None:
            nonlocal seen
            consumer = messages.consumer
            while True:
                got = await consumer.receive(256)
                consumer.settle([DeliveryResult(Settle.FINISH, each.partition, each.seq) for each in got])
                if note:
                    for each in got:
                        first_s.setdefault(each.partition, time.perf_counter())
                    seen.set()
                    seen = trio.Event()

        def holds(messages: Messages) -> list[int]:
            consumer = messages.consumer
            assert isinstance(consumer, ExclusiveConsumer)
            return list(consumer.partitions())

        async with (
            queues.consume(name, "c", exclusive=True, max_in_flight=256) as staying,
            trio.open_nursery() as nursery,
        ):
            for number in range(64):
                nursery.start_soon(publish, number)
            nursery.start_soon(take, staying, True)
            for _ in range(rounds):
                async with queues.consume(name, "c", exclusive=True, max_in_flight=256) as messages:
                    async with trio.open_nursery() as leaving:
                        leaving.start_soon(take, messages, False)
                        with trio.fail_after(30):
                            while len(holds(messages)) < partitions // 2:  # noqa: ASYNC110
                                await trio.sleep(0.005)
                        await trio.sleep(0.05)
                        leaving.cancel_scope.cancel()
                    handed_over = holds(messages)
                    first_s.clear()
                    left_s = time.perf_counter()
                with trio.fail_after(30):
                    while not all(each in first_s for each in handed_over):
                        await seen.wait()
                waits_s += [first_s[each] - left_s for each in handed_over]
            nursery.cancel_scope.cancel()
        await queues.delete(name)
        waits_s.sort()
        return {
            "count": len(waits_s),
            "p50_ms": percentile(waits_s, 0.5) * 1e3,
            "p99_ms": percentile(waits_s, 0.99) * 1e3,
            "most_ms": waits_s[-1] * 1e3,
        }

    # Peers

    async def open_peer(self, kind: str, url: str, channels: int = 1) -> dict[str, object]:
        """Make a peer's queue."""
        self._peer = PEERS[kind].make(self._directory, url, channels)
        self._group = PEERS[kind].group
        self._stack.callback(self._peer.close)
        return {}

    async def run_peer(self, what: str, seconds: float) -> dict[str, object]:
        """Publish, or publish and consume."""
        assert self._peer is not None
        cpu_s = time.process_time()
        count, elapsed_s, latencies_s = run_for(self._peer, what, seconds, BODY_BYTES, self._group)
        latencies_s.sort()
        return {
            "count": count,
            "elapsed_s": elapsed_s,
            "p50_ms": percentile(latencies_s, 0.5) * 1e3,
            "p99_ms": percentile(latencies_s, 0.99) * 1e3,
            "cpu_us": (time.process_time() - cpu_s) / count * 1e6,
        }


def _rss_mb() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1.024 / 1_000
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1.024 / 1_000


async def serve() -> None:
    """Answer the lines of standard input until it ends."""
    (_ROOT / ".run").mkdir(exist_ok=True)
    source = trio.lowlevel.FdStream(os.dup(0))
    received = bytearray()
    async with AsyncExitStack() as stack, trio.open_nursery() as nursery:
        commands = Commands(stack, nursery)
        while True:
            while b"\n" not in received:
                chunk = await source.receive_some(_LINE_BYTES_MAX)
                if not chunk:
                    nursery.cancel_scope.cancel()
                    return
                received += chunk
            line, _, rest = bytes(received).partition(b"\n")
            received[:] = rest
            os.write(1, json.dumps(await _answer(commands, json.loads(line))).encode() + b"\n")


async def _answer(commands: Commands, asked: dict[str, object]) -> dict[str, object]:
    method: Callable[..., Awaitable[dict[str, object]]] = getattr(commands, str(asked["command"]))
    try:
        return await method(**asked["arguments"])  # type: ignore[arg-type]  # pyright: ignore
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    """As :mod:`bench.messaging.worker`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("side")
    parser.add_argument("--profile")
    options = parser.parse_args()
    tune_gc()  # as the daemon does
    if options.profile:
        with cProfile.Profile() as profile:
            trio.run(serve)
        profile.dump_stats(options.profile)
    else:
        trio.run(serve)


if __name__ == "__main__":
    main()
