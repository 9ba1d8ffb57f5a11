"""A store in memory that several nodes share, by the virtual clock: what PostgreSQL does for real ones."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import trio

from dep2p.errors import NotOwnerError, StoreError
from dep2p.limits import Limits
from dep2p.protocols.queues.options import QueueOptions
from dep2p.protocols.queues.records import StoreBatch
from dep2p.queues.broker.engine import QueueEngine
from dep2p.queues.broker.ownership import LeasedStoreOwnership
from dep2p.storage.memory import MemoryStore
from dep2p.storage.shared_store import OwnedStore, StoreOwner, held_until_s
from dep2p.testing.memory import MemoryNetwork
from tests.queues.nodes import QueueSide

LEASE_S = 15.0


class SharedMemory:
    """The server."""

    def __init__(self) -> None:
        self.content = MemoryStore()
        self.term = 0
        self.holder = ""
        self.renewed_s = 0.0
        self.nodes: dict[str, None] = {}
        self.away: dict[str, None] = {}
        """Nodes that cannot reach it."""

    def owner(self) -> StoreOwner:
        return StoreOwner(
            term=self.term,
            peer=self.holder,
            silent_s=trio.current_time() - self.renewed_s,
            lease_s=LEASE_S,
            nodes=tuple(sorted(self.nodes)),
        )

    def other(self) -> NotOwnerError:
        owner = self.owner()
        return NotOwnerError(f"the queues are {owner.peer}'s by now", owner.peer, owner.term, owner.nodes)

    def require(self, peer: str) -> None:
        if peer in self.away:
            raise StoreError(f"{peer} cannot reach the server")


class OwnedMemoryStore:
    """One term."""

    is_durable = False
    location = "shared memory"

    def __init__(self, server: SharedMemory, peer: str, seen: StoreOwner) -> None:
        self.term = 0
        self._server = server
        self._peer = peer
        self._seen = seen
        self._renewed_s = self._until_s = float("-inf")

    def __getattr__(self, name: str) -> Any:
        """Reading is as ever."""
        return getattr(self._server.content, name)

    def open(self) -> None:
        server = self._server
        server.require(self._peer)
        if server.term != self._seen.term or not server.owner().is_free:
            raise server.other()
        server.term = self.term = server.term + 1
        server.holder = self._peer
        self._renew()

    def _renew(self) -> None:
        self._server.renewed_s = self._renewed_s = trio.current_time()
        self._until_s = held_until_s(self._renewed_s, LEASE_S)

    def is_held(self) -> bool:
        return trio.current_time() < self._until_s

    def commit(self, batch: StoreBatch) -> None:
        self._server.require(self._peer)
        if self._server.term != self.term:
            raise self._server.other()
        self._server.content.commit(batch)
        self._renew()

    def tidy_in_s(self) -> float | None:
        return max(0.0, self._renewed_s + LEASE_S / 5 - trio.current_time())

    def tidy(self) -> None:
        self.commit(StoreBatch())

    def close(self) -> None:
        if self._server.term == self.term and self._peer not in self._server.away:
            self._server.holder = ""


class MemoryStores:
    """The server, as a node sees it."""

    blocks = False
    location = "shared memory"

    def __init__(self, server: SharedMemory, peer: str) -> None:
        self._server = server
        self._peer = peer

    def look(self) -> StoreOwner:
        self._server.require(self._peer)
        self._server.nodes[self._peer] = None
        return self._server.owner()

    def store(self, seen: StoreOwner) -> OwnedStore:
        made: Any = OwnedMemoryStore(self._server, self._peer, seen)
        return made  # type: ignore[no-any-return]

    def close(self) -> None:
        pass


class SetSide(QueueSide):
    """A node of a set."""

    ownership: LeasedStoreOwnership

    def __init__(self, network: MemoryNetwork, limits: Limits, server: SharedMemory) -> None:
        self.server = server
        super().__init__(network, limits)
        self.scope = trio.CancelScope()

    def make_ownership(self) -> LeasedStoreOwnership:
        rights = self.rights

        def make(store: Any) -> QueueEngine:
            return QueueEngine(store, rights=rights)

        return LeasedStoreOwnership(MemoryStores(self.server, self.peer), self.peer, make, QueueOptions())

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        with self.scope:
            try:
                await super().run(task_status=task_status)
            finally:
                await self.ownership.aclose()

    @property
    def is_owner(self) -> bool:
        return self.ownership.engine_if_here is not None

    async def until_owner(self) -> None:
        with trio.fail_after(120):
            await self.ownership.here()

    def die(self) -> None:
        """As by kill -9: nothing is said to anybody."""
        self.server.away[self.peer] = None
        self.scope.cancel()
        self.host.kill()

    def freeze(self) -> None:
        """It cannot reach the server; its links are as they were."""
        self.server.away[self.peer] = None

    def thaw(self) -> None:
        del self.server.away[self.peer]


@asynccontextmanager
async def set_of_nodes(
    failover_group: int = 2, members: int = 2, *, limits: Limits | None = None
) -> AsyncGenerator[tuple[list[SetSide], list[QueueSide]], None]:
    """Nodes that share a store, of which the first is the broker of the queues, and members."""
    network = MemoryNetwork()
    server = SharedMemory()
    limits = limits or Limits()
    nodes = [SetSide(network, limits, server) for _ in range(failover_group)]
    others = [QueueSide(network, limits) for _ in range(members)]
    everybody: list[QueueSide] = [*nodes, *others]
    for side in everybody:
        side.knows(*[other for other in everybody if other is not side])
    async with trio.open_nursery() as nursery:
        for side in everybody:
            await nursery.start(side.run)
        yield nodes, others
        nursery.cancel_scope.cancel()
