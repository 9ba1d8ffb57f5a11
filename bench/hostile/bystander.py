"""Honest members that ask the node under attack: a process driven by JSON lines as :mod:`bench.messaging.worker` is."""

import json
import os
import time
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress

import trio

from bench.hostile.members import REQUEST
from bench.hostile.public_wire import TOPIC
from bench.hostile.victim import STAMP
from bench.messaging.worker import run_worker
from bench.sides.node import realm_of
from dep2p.errors import Dep2pError
from dep2p.node.node import Node
from dep2p.node.validation import split_addr
from dep2p.protocols.timing.percentile import percentile
from dep2p.pubsub.topic import Topic
from dep2p.types import PeerId

_BODY = os.urandom(100)
_TOPIC_BYTES = 2_000
"""Size of a published message: neighbours say IDONTWANT of messages of 1 KiB and more."""
_HOLD_S = 0.1
"""How long the honest neighbour takes to forward: an attacker's way is shorter."""
_POLL_S = 0.02
_TCP = "/ip4/127.0.0.1/tcp/0"


class BystanderCommands:
    """The commands of the bystanders' process."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._nodes: list[Node] = []
        self._peer = PeerId("")
        self._topic: Topic | None = None

    async def hello(self) -> dict[str, object]:
        """The process is ready."""
        return {}

    async def join(self, secret: str, address: str, count: int, is_relayed: bool) -> dict[str, object]:
        """``count`` members connect to the node, and each asks it once; answers with their peer ids as JSON."""
        self._peer, _ = split_addr(address)
        for _ in range(count):
            node = await self._stack.enter_async_context(_open(secret, is_relayed))
            await _prove(node, self._peer, address)
            await node.request(self._peer, REQUEST, _BODY)
            self._nodes.append(node)
        return {"text": json.dumps([str(node.peer_id) for node in self._nodes])}

    async def meet(self, secret: str, count: int) -> dict[str, object]:
        """``count`` members that know each other and not the node under attack; answers with their ids as JSON."""
        first = await self._stack.enter_async_context(Node.open(realm_of(secret)))
        self._nodes.append(first)
        for _ in range(count - 1):
            node = await self._stack.enter_async_context(Node.open(realm_of(secret)))
            await node.connect(first.listen_addrs()[0])
            self._nodes.append(node)
        return {"text": json.dumps([str(node.peer_id) for node in self._nodes])}

    async def introduce(self, address: str) -> dict[str, object]:
        """The first of those that met connects to the node, so that it can learn all of them; it asks it then."""
        self._peer, _ = split_addr(address)
        await _prove(self._nodes[0], self._peer, address)
        return {}

    async def ask(self, seconds: float, per_s: float, give_up_s: float) -> dict[str, object]:
        """``per_s`` requests a second, each at its time whether the ones before are answered or not.

        A latency counts from the time at which the request was due. A failed request counts as ``give_up_s``.
        """
        node, peer = self._nodes[0], self._peer
        latencies_s: list[float] = []
        failed = 0

        async def one(due_s: float) -> None:
            nonlocal failed
            try:
                with trio.fail_after(give_up_s):
                    await node.request(peer, REQUEST, _BODY, timeout_s=give_up_s)
                latencies_s.append(trio.current_time() - due_s)
            except (Dep2pError, trio.TooSlowError):
                failed += 1
                latencies_s.append(give_up_s)

        began_s = trio.current_time()
        async with trio.open_nursery() as nursery:
            for number in range(max(1, int(seconds * per_s))):
                due_s = began_s + number / per_s
                await trio.sleep_until(due_s)
                nursery.start_soon(one, due_s)
        latencies_s.sort()
        return {
            "count": len(latencies_s),
            "failed": failed,
            "p50_ms": percentile(latencies_s, 0.5) * 1_000,
            "p99_ms": percentile(latencies_s, 0.99) * 1_000,
        }

    async def rate(self, seconds: float, in_flight: int) -> dict[str, object]:
        """Answered requests a second with ``in_flight`` open at any moment."""
        node, peer = self._nodes[0], self._peer
        done = 0

        async def ask() -> None:
            nonlocal done
            while True:
                try:
                    await node.request(peer, REQUEST, _BODY, timeout_s=seconds)
                    done += 1
                except Dep2pError:
                    await trio.sleep(_POLL_S)

        began_s = trio.current_time()
        with trio.move_on_after(seconds):
            async with trio.open_nursery() as nursery:
                for _ in range(in_flight):
                    nursery.start_soon(ask)
        return {"per_s": done / (trio.current_time() - began_s)}

    async def newcomers(
        self, secret: str, address: str, count: int, give_up_s: float, is_relayed: bool
    ) -> dict[str, object]:
        """Fresh members connect one after the other and ask once; answers with how many could, and the longest time."""
        joined, longest_s = 0, 0.0
        for _ in range(count):
            began_s = trio.current_time()
            with trio.move_on_after(give_up_s), suppress(Dep2pError):
                async with _open(secret, is_relayed) as node:
                    await _prove(node, self._peer, address)
                    await node.request(self._peer, REQUEST, _BODY)
                    joined += 1
                    longest_s = max(longest_s, trio.current_time() - began_s)
        return {"joined": joined, "longest_ms": longest_s * 1_000}

    async def reserve(self, secret: str, address: str, count: int, give_up_s: float) -> dict[str, object]:
        """Fresh members want a reservation at the relay; answers with how many got one, and the longest time."""
        reserved, longest_s = 0, 0.0
        for _ in range(count):
            began_s = trio.current_time()
            with trio.move_on_after(give_up_s), suppress(Dep2pError):
                async with _open(secret, True) as node:
                    await node.connect(address)
                    while not any("/p2p-circuit" in one for one in node.listen_addrs()):  # noqa: ASYNC110
                        await trio.sleep(_POLL_S)
                    reserved += 1
                    longest_s = max(longest_s, trio.current_time() - began_s)
        return {"joined": reserved, "longest_ms": longest_s * 1_000}

    async def author(self, address: str) -> dict[str, object]:
        """An author of the public topic, and the honest neighbour between it and the node; answers with its address."""
        author = await self._stack.enter_async_context(Node.open(public_pubsub=True))
        honest = await self._stack.enter_async_context(Node.open(public_pubsub=True))
        self._topic = await author.join(TOPIC, public=True)
        between = await honest.join(TOPIC, public=True)

        async def hold(message: object) -> bool:
            await trio.sleep(_HOLD_S)
            return True

        between.add_validator(hold)
        await honest.connect(author.listen_addrs()[0])
        await honest.connect(address)
        with trio.fail_after(10.0):
            while len(between.mesh()) < 2:  # noqa: ASYNC110
                await trio.sleep(_POLL_S)
        return {"text": author.listen_addrs()[0]}

    async def publish(self, first: int, count: int, per_s: float) -> dict[str, object]:
        """Publish ``count`` messages with their numbers and times."""
        assert self._topic is not None
        began_s = trio.current_time()
        for number in range(first, first + count):
            await trio.sleep_until(began_s + (number - first) / per_s)
            await self._topic.publish(STAMP.pack(number, time.monotonic()).ljust(_TOPIC_BYTES, b"x"))
        return {}


def _open(secret: str, is_relayed: bool) -> AbstractAsyncContextManager[Node]:
    listen = () if is_relayed else (_TCP,)
    return Node.open(realm_of(secret), listen=listen, relay="client" if is_relayed else "off")


async def _prove(node: Node, peer: PeerId, address: str) -> None:
    """Connect and prove membership. Raises Dep2pError."""
    await node.membership().connect(peer, [split_addr(address)[1]])


if __name__ == "__main__":
    run_worker("bench.hostile.bystander", lambda _, stack: BystanderCommands(stack))
