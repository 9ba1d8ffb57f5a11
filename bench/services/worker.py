"""A process of the benchmark of services: a worker node or the caller, driven as :mod:`bench.messaging.worker` is."""

import json
import os
import signal
import time
import traceback
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import trio

from bench.messaging.worker import run_worker
from bench.sides.interface import Arrivals
from bench.sides.node import dial, realm_of
from dep2p.errors import Dep2pError
from dep2p.gossipsub.topic_types import TopicMessage
from dep2p.limits import Limits
from dep2p.messaging.service import Request
from dep2p.node.node import Node
from dep2p.protocols.realm.statement import TopicGroup
from dep2p.protocols.timing.percentile import percentile
from dep2p.pubsub.topic import Topic
from dep2p.types import PeerId

SERVICE = "bench/work"
PLAIN_TOPIC = "bench-plain"
GROUP_TOPIC = "bench-group"
GROUP = "workers"
_LISTEN = ("/ip4/127.0.0.1/tcp/0",)
_LIMITS = Limits(pubsub_publish_per_s=0)
_POLL_S = 0.01
_MEET_TIMEOUT_S = 30.0


class MemberCommands:
    """The commands of both roles."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._opened: Node | None = None

    @property
    def _node(self) -> Node:
        assert self._opened is not None
        return self._opened

    async def hello(self) -> dict[str, object]:
        """The process is ready."""
        return {}

    async def open(self, secret: str, addresses: str) -> dict[str, object]:
        """Open a node and connect it to the members at ``addresses``, a list as JSON; answers with its own address."""
        self._opened = node = await self._stack.enter_async_context(
            Node.open(realm_of(secret), listen=_LISTEN, limits=_LIMITS)
        )
        await self._begin()
        for address in json.loads(addresses):
            await dial(node, address)
        return {"text": node.listen_addrs()[0]}

    async def _begin(self) -> None:
        """Register what the role has."""


class WorkerCommands(MemberCommands):
    """A node that offers the service, reads one topic alone, and another one in a group."""

    def __init__(self, stack: AsyncExitStack) -> None:
        super().__init__(stack)
        self._answered = 0
        self._arrivals = {PLAIN_TOPIC: Arrivals(), GROUP_TOPIC: Arrivals()}

    async def _begin(self) -> None:
        @self._node.on_request(SERVICE, group=GROUP, concurrency=256)
        async def answer(request: Request) -> bytes:
            self._answered += 1
            return request.body

        del answer
        nursery = await self._stack.enter_async_context(trio.open_nursery())
        self._stack.callback(nursery.cancel_scope.cancel)
        await nursery.start(self._count, PLAIN_TOPIC, None)
        await nursery.start(self._count, GROUP_TOPIC, GROUP)

    async def _count(
        self, topic: str, group: str | None, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        add = self._arrivals[topic].add
        async with self._node.subscribe(topic, on_full="pause", group=group) as messages:
            task_status.started()
            async for message in messages:
                if isinstance(message, TopicMessage):
                    add(1, len(message.body))

    async def meet(self, count: int) -> dict[str, object]:
        """Wait until this node knows that ``count`` members read in the group."""
        groups, group = self._node.services().topic_groups, TopicGroup(GROUP_TOPIC, GROUP)
        await _until(lambda: len(groups.readers(group)) == count)
        return {}

    async def reset(self) -> dict[str, object]:
        """Count from zero."""
        self._answered = 0
        for arrivals in self._arrivals.values():
            arrivals.reset()
        return {}

    async def answered(self) -> dict[str, object]:
        """How many requests this node has answered."""
        return {"count": self._answered}

    async def arrived(self, topic: str) -> dict[str, object]:
        """How many messages of a topic have arrived, and when the last one did."""
        arrivals = self._arrivals[topic]
        return {"count": arrivals.messages, "last_at_s": arrivals.last_at_s}


class CallerCommands(MemberCommands):
    """A node that offers nothing, asks and publishes."""

    def __init__(self, stack: AsyncExitStack) -> None:
        super().__init__(stack)
        self._topics: dict[str, Topic] = {}
        self._one = PeerId("")

    async def _begin(self) -> None:
        for name in (PLAIN_TOPIC, GROUP_TOPIC):
            self._topics[name] = await self._stack.enter_async_context(await self._node.join(name))

    async def meet(self, count: int) -> dict[str, object]:
        """Wait until ``count`` connected members offer the service and read the topics."""

        def connected() -> list[PeerId]:
            offering = self._node.offered_services().get(SERVICE, ())
            return [member.peer for member in offering if member.is_connected]

        await _until(lambda: len(connected()) == count)
        await _until(lambda: all(len(topic.peers()) == count for topic in self._topics.values()))
        self._one = connected()[0]
        return {}

    async def ask_any(self, seconds: float, in_flight: int, size_bytes: int) -> dict[str, object]:
        """Ask any member for ``seconds`` with ``in_flight`` requests open at any moment."""
        data, node = os.urandom(size_bytes), self._node
        return await _ask(lambda: node.request_any(SERVICE, data, idempotent=True), seconds, in_flight)

    async def ask_one(self, seconds: float, in_flight: int, size_bytes: int) -> dict[str, object]:
        """The same, always the same member."""
        data, node, one = os.urandom(size_bytes), self._node, self._one
        return await _ask(lambda: node.request(one, SERVICE, data, idempotent=True), seconds, in_flight)

    async def ask_and_kill(self, seconds: float, in_flight: int, size_bytes: int, pid: int) -> dict[str, object]:
        """Ask any member, and halfway kill the process ``pid`` of one of them by SIGKILL."""
        before = self._failed_tries()
        async with trio.open_nursery() as nursery:

            async def kill() -> None:
                await trio.sleep(seconds / 2)
                os.kill(pid, signal.SIGKILL)

            nursery.start_soon(kill)
            asked = await self.ask_any(seconds, in_flight, size_bytes)
        return asked | {"tried_again": self._failed_tries() - before}

    def _failed_tries(self) -> int:
        counters = self._node.services().services.counters()
        return sum(count for name, count in counters.items() if name.startswith("tries_failed_"))

    async def publish(self, topic: str, seconds: float, size_bytes: int) -> dict[str, object]:
        """Publish to a topic for ``seconds``."""
        data, publish = os.urandom(size_bytes), self._topics[topic].publish
        count, began_s = 0, time.monotonic()
        while not count or time.monotonic() < began_s + seconds:
            await publish(data)
            count += 1
        return {"count": count, "began_s": began_s}


async def _until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(_MEET_TIMEOUT_S):
        while not condition():  # noqa: ASYNC110 - before the clock starts
            await trio.sleep(_POLL_S)


async def _ask(ask: Callable[[], Awaitable[bytes]], seconds: float, in_flight: int) -> dict[str, object]:
    latencies_s: list[float] = []
    failed = 0
    began_s = time.monotonic()
    until_s = began_s + seconds

    async def one_after_another() -> None:
        nonlocal failed
        sent_s = time.monotonic()
        while True:  # once in any case, however late a busy machine lets it begin
            try:
                await ask()
            except Dep2pError:
                failed += 1
                traceback.print_exc()
            else:
                latencies_s.append(time.monotonic() - sent_s)
            sent_s = time.monotonic()
            if sent_s >= until_s:
                return

    async with trio.open_nursery() as nursery:
        for _ in range(in_flight):
            nursery.start_soon(one_after_another)
    elapsed_s = time.monotonic() - began_s
    latencies_s.sort()
    return {
        "count": len(latencies_s),
        "failed": failed,
        "elapsed_s": elapsed_s,
        "p50_ms": percentile(latencies_s, 0.5) * 1_000,
        "p99_ms": percentile(latencies_s, 0.99) * 1_000,
        "most_ms": max(latencies_s, default=0.0) * 1_000,
    }


if __name__ == "__main__":
    ROLES: dict[str, Callable[[AsyncExitStack], MemberCommands]] = {"worker": WorkerCommands, "caller": CallerCommands}
    run_worker("bench.services.worker", lambda role, stack: ROLES[role](stack))
