"""Reliable messages of dep2p: 64 in flight, acknowledged by the handler; the outbox in memory or on disk."""

import shutil
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from bench.sides.interface import Send
from bench.sides.node import NodeClient, NodeServer, NodeSide, dial, realm_of
from dep2p.limits import Limits
from dep2p.node.node import Node

_NOTIFY = "bench/notify"
_LISTEN = ("/ip4/127.0.0.1/tcp/0",)
IN_FLIGHT = 64


class ReliableClient(NodeClient):
    """Sends reliably what the benchmark means to notify."""

    @asynccontextmanager
    async def open_notify(self) -> AsyncGenerator[Send, None]:
        """One ``send`` for a message, as fast as there is room; all are acknowledged when the block ends."""
        node, peer = self.node, self.peer

        async def send(data: bytes) -> None:
            await node.send(peer, _NOTIFY, data, reliable=True)

        if not node.delivery().stats().is_durable:
            yield send
        else:
            async with _side_by_side(send) as spread:
                yield spread
        await node.delivery().flush()


@asynccontextmanager
async def _side_by_side(send: Send) -> AsyncGenerator[Send, None]:
    """So many callers at once: each waits until its message is on disk."""
    feed, work = trio.open_memory_channel[bytes](IN_FLIGHT)

    async def caller() -> None:
        async for data in work:
            await send(data)

    async with trio.open_nursery() as nursery:
        for _ in range(IN_FLIGHT):
            nursery.start_soon(caller)
        async with feed:
            yield feed.send


class ReliableSide(NodeSide):
    """The outbox in memory."""

    is_durable = False

    @asynccontextmanager
    async def serve(self, secret: str) -> AsyncGenerator[NodeServer, None]:
        """As the plain side; durable, it also remembers on disk what was handled."""
        async with self._directory() as directory, self._serve(secret, data_dir=directory) as server:
            yield server

    @asynccontextmanager
    async def connect(self, secret: str, address: str, *, listen: bool = True) -> AsyncGenerator[NodeClient, None]:
        """A new node, connected and verified."""
        limits = Limits(delivery_queue_items_max=IN_FLIGHT)
        async with (
            self._directory() as directory,
            Node.open(realm_of(secret), listen=_LISTEN if listen else (), limits=limits, data_dir=directory) as node,
        ):
            yield ReliableClient(node, await dial(node, address))

    @asynccontextmanager
    async def _directory(self) -> AsyncGenerator[Path | None, None]:
        if not self.is_durable:
            yield None
            return
        # Where the machine has a disk: /tmp may be memory.
        directory = Path(tempfile.mkdtemp(prefix="dep2p-bench-", dir="/var/tmp"))
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)


class DurableSide(ReliableSide):
    """The outbox on disk: a message is accepted when it is there."""

    is_durable = True
