"""Nodes with queues in memory, under the virtual clock."""

import itertools
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from random import Random

import trio

from dep2p.identity import Identity
from dep2p.limits import Limits
from dep2p.protocols.queues.admin import MessageInfo
from dep2p.queues.access import Access, Rights, Who
from dep2p.queues.api.queues import Queues
from dep2p.queues.broker.engine import EngineBounds, QueueEngine
from dep2p.queues.broker.ownership import StoreOwnership
from dep2p.queues.service.realm_queues import RemoteQueues
from dep2p.queues.service.service import QueueService
from dep2p.storage.memory import MemoryStore
from dep2p.storage.queue_store import QueueStore
from dep2p.testing.memory import MemoryHost, MemoryNetwork
from tests.messaging.nodes import REALM, FakeGate

_seeds = itertools.count(1)


@asynccontextmanager
async def running_engine(
    store: QueueStore | None = None, *, bounds: EngineBounds | None = None, rights: Rights | None = None
) -> AsyncGenerator[QueueEngine, None]:
    """An engine at work; closed at the end."""
    engine = QueueEngine(store or MemoryStore(), bounds=bounds, rights=rights)
    await engine.open()
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(engine.run)
            yield engine
            nursery.cancel_scope.cancel()
    finally:
        await engine.aclose()


class QueueSide:
    """One node: its host, gate, engine and queues."""

    def __init__(
        self,
        network: MemoryNetwork,
        limits: Limits,
        *,
        store: QueueStore | None = None,
        create: Who = "members",
        identity: Identity | None = None,
    ) -> None:
        self.network = network
        self.host: MemoryHost = network.host(identity)
        self.peer = self.host.peer_id
        self.gate = FakeGate(self.host)
        self.rights = Rights(Access(), create)
        self._store = store or MemoryStore()
        self.ownership = self.make_ownership()
        self.service = QueueService(
            self.host, self.gate, REALM, limits, self.ownership, self.rights, rng=Random(next(_seeds))
        )
        self.queues = self.service.own()

    def make_ownership(self) -> StoreOwnership:
        return StoreOwnership(QueueEngine(self._store, rights=self.rights))

    @property
    def engine(self) -> QueueEngine:
        return self.ownership.engine

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        await self.ownership.open()
        async with trio.open_nursery() as nursery:
            await nursery.start(self.ownership.run)
            await self.service.run(task_status=task_status)

    def at(self, other: "QueueSide") -> RemoteQueues:
        """The queues of the other."""
        return self.service.at(other.peer)

    def knows(self, *others: "QueueSide") -> None:
        for other in others:
            self.host.add_addrs(other.peer, other.host.listen_addrs(), ttl_s=1e9)

    def count(self, name: str) -> int:
        return self.service.counters().get(name, 0)

    async def cut(self, other: "QueueSide") -> None:
        """Every connection to the other ends."""
        await self.host.disconnect(other.peer)


async def exported(queues: Queues, name: str) -> list[MessageInfo]:
    """Every message of a queue's log."""
    async with queues.export(name) as messages:
        return [message async for message in messages]


@asynccontextmanager
async def queue_sides(
    count: int = 2, *, limits: Limits | None = None, create: Who = "members"
) -> AsyncGenerator[list[QueueSide], None]:
    """That many nodes, running, each able to dial the others. The first is the broker of the queues by custom."""
    network = MemoryNetwork()
    made = [QueueSide(network, limits or Limits(), create=create) for _ in range(count)]
    for side in made:
        side.knows(*[other for other in made if other is not side])
    async with trio.open_nursery() as nursery:
        for side in made:
            await nursery.start(side.run)
        yield made
        nursery.cancel_scope.cancel()
