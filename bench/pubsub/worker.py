"""A process of the pub/sub benchmark: one subscribed node, driven by JSON lines as :mod:`bench.messaging.worker` is."""

import time
from contextlib import AsyncExitStack

import trio

from bench.messaging.worker import run_worker
from bench.sides.pubsub import PubSubSide, Subscriber, make_message
from dep2p.protocols.timing.percentile import percentile

_MESH_CHECK_S = 0.02


def load_side(name: str) -> PubSubSide:
    """The side ``name``; imported here, so that no process holds code of a side that it does not run."""
    if name in ("dep2p", "dep2p-public", "dep2p-traced", "dep2p-traced-rpcs"):
        from bench.sides.node_pubsub import NodePubSubSide

        return NodePubSubSide(is_public=name == "dep2p-public", is_traced="traced" in name, rpcs=name.endswith("-rpcs"))
    if name == "libp2p":
        from bench.sides.stock_pubsub import StockPubSubSide

        return StockPubSubSide()
    raise ValueError(f"no side {name!r}")


class PubSubCommands:
    """The commands of one process; `peer.mjs` has the same."""

    def __init__(self, side: PubSubSide, stack: AsyncExitStack) -> None:
        self._side = side
        self._opened = AsyncExitStack()
        self._subscriber: Subscriber | None = None
        self._published = 0
        stack.push_async_callback(self._close)

    async def _close(self) -> None:
        await self._opened.aclose()

    async def hello(self) -> dict[str, object]:
        """The process is ready."""
        return {}

    async def open(self, secret: str, is_limited: bool) -> dict[str, object]:
        """A new subscribed node in place of the last one; answers with its address."""
        await self._close()
        self._subscriber = await self._opened.enter_async_context(self._side.subscribe(secret, is_limited=is_limited))
        return {"text": self._subscriber.address}

    async def connect(self, address: str) -> dict[str, object]:
        """Dial another node."""
        await self._node.connect(address)
        return {}

    async def meshed(self, count: int) -> dict[str, object]:
        """Wait until the mesh has ``count`` peers; answers with how many it has."""
        while len(self._node.mesh) < count:  # noqa: ASYNC110  (no side tells of a change)
            await trio.sleep(_MESH_CHECK_S)
        return {"count": len(self._node.mesh)}

    async def reset(self) -> dict[str, object]:
        """Count arrivals from zero."""
        self._node.received.reset()
        return {}

    async def publish(self, publisher: int, count: int, size_bytes: int, per_s: float) -> dict[str, object]:
        """Publish ``count`` messages: as fast as each call returns, or ``per_s`` a second when that is not 0."""
        publish = self._node.publish
        first, self._published = self._published, self._published + count
        began_s, began_at = time.monotonic(), trio.current_time()
        for number in range(count):
            if per_s:
                await trio.sleep_until(began_at + number / per_s)
            await publish(make_message(publisher, first + number, size_bytes))
        return {"began_s": began_s}

    async def reach(self, count: int, quiet_s: float) -> dict[str, object]:
        """Wait for ``count`` arrivals, or for none during ``quiet_s``; answers with what came and how old it was."""
        received = self._node.received
        await received.reach(count, quiet_s)
        ages_s = sorted(received.ages_s) or [0.0]
        return {
            "count": len(received),
            "again": received.again,
            "last_at_s": received.last_at_s,
            "p50_ms": percentile(ages_s, 0.5) * 1_000,
            "p99_ms": percentile(ages_s, 0.99) * 1_000,
        }

    @property
    def _node(self) -> Subscriber:
        assert self._subscriber is not None
        return self._subscriber


if __name__ == "__main__":
    run_worker("bench.pubsub.worker", lambda name, stack: PubSubCommands(load_side(name), stack))
