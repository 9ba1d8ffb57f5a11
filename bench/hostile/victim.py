"""A process with the node under attack, or with a relay, driven by JSON lines as :mod:`bench.messaging.worker` is."""

import json
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import trio

from bench.hostile.members import REQUEST
from bench.hostile.public_wire import TOPIC
from bench.messaging.worker import run_worker
from bench.sides.node import realm_of
from dep2p.daemon.gc import collect_in_steps, tune_gc
from dep2p.gossipsub.topic_types import Lagged
from dep2p.messaging.service import Request
from dep2p.node.node import Node
from dep2p.protocols.timing.percentile import percentile

STAMP = struct.Struct(">Id")
"""In front of a published message: its number, and the time at which it was published (the machine's clock)."""
_TCP = "/ip4/127.0.0.1/tcp/0"
_QUIC = "/ip4/127.0.0.1/udp/0/quic-v1"
_POLL_S = 0.02
_CIRCUIT_TIMEOUT_S = 20.0
_CALL_TIMEOUT_S = 1.0
_PAUSE_S = 0.002


class LoopPasses(trio.abc.Instrument):
    """Measures the processor time of the event loop's longest pass: the part of a delay that is the node's own.

    The rest of a delay is the machine's, which runs the attacker and the bystanders, too.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget the passes until now, and the one that calls this until now."""
        self.longest_s = 0.0
        self._began_s = time.thread_time()

    def after_io_wait(self, timeout: float) -> None:
        """Note where a pass begins."""
        self._began_s = time.thread_time()

    def before_io_wait(self, timeout: float) -> None:
        """Note where a pass ends."""
        self.longest_s = max(self.longest_s, time.thread_time() - self._began_s)


class VictimCommands:
    """The commands of the process under attack."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._node: Node | None = None
        self._peer = ""
        self._delays_s: dict[int, float] = {}
        self._counts: Counter[str] = Counter()
        self._scope = trio.CancelScope()
        self._passes = LoopPasses()

    async def hello(self) -> dict[str, object]:
        """The process is ready."""
        return {}

    async def serve(self, secret: str, relay: str = "") -> dict[str, object]:
        """A member that answers requests and is in a public topic; answers with its addresses as JSON.

        With ``relay`` it listens on nothing, and is reached through the relay of that address only.
        """
        directory = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="dep2p-hostile-"))
        node = self._node = await self._stack.enter_async_context(
            Node.open(
                realm_of(secret),
                data_dir=directory,
                listen=() if relay else (_TCP, _QUIC),
                relay="client" if relay else "off",
                public_pubsub=not relay,
            )
        )

        @node.on_request(REQUEST)
        async def echo(request: Request) -> bytes:
            return request.body

        del echo
        if relay:
            await node.connect(relay)
            with trio.fail_after(_CIRCUIT_TIMEOUT_S):
                while not any("/p2p-circuit" in one for one in node.listen_addrs()):  # noqa: ASYNC110
                    await trio.sleep(_POLL_S)
        else:
            await self._subscribe(node)
        await self._tune()
        return {"text": json.dumps(node.listen_addrs())}

    async def _tune(self) -> None:
        """Collect garbage as the daemon does."""
        tune_gc()
        nursery = await self._stack.enter_async_context(trio.open_nursery())
        self._stack.callback(nursery.cancel_scope.cancel)
        nursery.start_soon(collect_in_steps)

    async def _subscribe(self, node: Node) -> None:
        topic = await node.join(TOPIC, public=True)
        messages = await self._stack.enter_async_context(topic.subscribe())
        nursery = await self._stack.enter_async_context(trio.open_nursery())
        self._stack.callback(nursery.cancel_scope.cancel)

        async def take() -> None:
            async for message in messages:
                if isinstance(message, Lagged):
                    continue
                number, sent_s = STAMP.unpack_from(message.body)
                self._delays_s[number] = time.monotonic() - sent_s

        nursery.start_soon(take)

    async def relay(self, secret: str) -> dict[str, object]:
        """A relay that is a member, or with "" for ``secret`` one of no realm; answers with its addresses as JSON."""
        realm = realm_of(secret) if secret else None
        self._node = await self._stack.enter_async_context(Node.open(realm, listen=(_TCP,), relay="server"))
        await self._tune()
        return {"text": json.dumps(self._node.listen_addrs())}

    async def watch(self) -> dict[str, object]:
        """Measure passes of the event loop from now on; answers with the longest until now, and begins anew."""
        longest_s = self._passes.longest_s
        self._passes.begin()
        trio.lowlevel.add_instrument(self._passes)
        return {"loop_pass_ms": 1_000 * longest_s}

    async def status(self, members: list[str]) -> dict[str, object]:
        """How many of these members are up and how many known, and the size of the public topic's mesh."""
        assert self._node is not None
        found = [member for member in self._node.membership().members() if member.peer in members]
        public = [topic.mesh for topic in self._node.topics() if topic.realm_id is None]
        return {
            "up": sum(member.state == "up" for member in found),
            "known": len(found),
            "mesh": sum(public),
        }

    async def take(self, first: int, count: int, give_up_s: float) -> dict[str, object]:
        """Delays of the published messages ``first`` to ``first + count - 1``; one that never came counts as
        ``give_up_s``."""
        with trio.move_on_after(give_up_s):
            while not all(number in self._delays_s for number in range(first, first + count)):  # noqa: ASYNC110
                await trio.sleep(_POLL_S)
        delays_s = sorted(self._delays_s.get(number, give_up_s) for number in range(first, first + count))
        return {
            "count": count,
            "failed": sum(number not in self._delays_s for number in range(first, first + count)),
            "p50_ms": percentile(delays_s, 0.5) * 1_000,
            "p99_ms": percentile(delays_s, 0.99) * 1_000,
        }

    async def begin(self) -> dict[str, object]:
        """Call the node's public methods with wrong types and sizes until `end`, as a careless program would."""
        node = self._node
        assert node is not None
        nursery = await self._stack.enter_async_context(trio.open_nursery())
        self._stack.callback(nursery.cancel_scope.cancel)
        self._peer = str(next(member.peer for member in node.membership().members()))
        await node.queues.of().create("jobs")
        nursery.start_soon(self._call_wrongly, node)
        return {}

    async def _call_wrongly(self, node: Node) -> None:
        calls = _wrong_calls(node, self._peer)
        with self._scope:
            while True:
                for call in calls:
                    self._counts["calls"] += 1
                    with trio.move_on_after(_CALL_TIMEOUT_S):
                        try:
                            await call()
                        except Exception:  # any error that its caller can catch is right
                            self._counts["refused"] += 1
                    await trio.sleep(_PAUSE_S)

    async def end(self) -> dict[str, object]:
        """Stop; answers with what was counted."""
        self._scope.cancel()
        return dict(self._counts)


def _wrong_calls(node: Any, peer: str) -> list[Callable[[], Awaitable[object]]]:
    """Each a call that no caller should make. ``node`` is Any: a type checker refuses most of them."""
    queue = node.queues.of().queue("jobs")
    bodies: list[object] = ["text", None, 5, [b"x"], object()]
    options: list[dict[str, object]] = [
        {"key": 5},
        {"key": "\ud800"},
        {"key": "k" * 70_000},
        {"tags": "abc"},
        {"tags": [1]},
        {"tags": ["t" * 40_000, "u" * 40_000]},
        {"priority": "5"},
        {"priority": 300},
        {"delay_s": float("nan")},
        {"delay_s": 1e300},
        {"headers": {"a": object()}},
        {"headers": {1: 2}},
        {"headers": {"a": 2**80}},
        {"headers": {"a": "x" * 70_000}},
        {"headers": {"a": "\ud800"}},
    ]
    calls: list[Callable[[], Awaitable[object]]] = []
    for body in bodies:
        calls += [
            partial(queue.publish, body),
            partial(queue.publish_many, [b"a", body]),
            partial(node.request, peer, REQUEST, body),
            partial(node.notify, peer, REQUEST, body),
            partial(node.publish, TOPIC, body, on_no_peers="ok"),
            partial(node.send, peer, REQUEST, body, reliable=True),
        ]
    for option in options:
        calls.append(partial(queue.publish, b"x", **option))
        if "headers" in option:
            calls.append(partial(node.request, peer, REQUEST, b"x", **option))
            calls.append(partial(node.send, peer, REQUEST, b"x", reliable=True, **option))
    for name in (5, "\ud800", "n" * 100_000, None):
        calls += [
            partial(node.request, peer, name, b"x"),
            partial(node.publish, name, b"x", on_no_peers="ok"),
            partial(node.send, peer, name, b"x", reliable=True),
        ]
    return calls


if __name__ == "__main__":
    run_worker("bench.hostile.victim", lambda _, stack: VictimCommands(stack))
