"""Nodes with ordered sessions in memory, under the virtual clock."""

import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from random import Random

import trio

from dep2p.limits import Limits
from dep2p.protocols.sessions.options import SessionOptions
from dep2p.sessions.server_session import SessionRequest
from dep2p.sessions.service import OpenSession, Session, SessionEntry, SessionHandlers, SessionService
from dep2p.testing.memory import MemoryHost, MemoryNetwork
from tests.messaging.nodes import REALM, FakeGate

_seeds = itertools.count(1)
"""Seeds of ids and epochs, which must differ."""
Handler = Callable[[Session], Awaitable[None]]


class SessionSide:
    """One node: its host, gate and sessions."""

    def __init__(self, network: MemoryNetwork, limits: Limits, host: MemoryHost | None = None) -> None:
        self.host = host or network.host()
        self.peer = self.host.peer_id
        self.gate = FakeGate(self.host)
        self.registry = SessionHandlers()
        self.service = SessionService(self.host, self.gate, REALM, limits, self.registry, rng=Random(next(_seeds)))
        self.limits = limits
        self._scope = trio.CancelScope()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        with self._scope:
            await self.service.run(task_status=task_status)

    def stop(self) -> None:
        """Its sessions end; the host lives on."""
        self._scope.cancel()

    def serve(
        self,
        handler: Handler,
        on_request: Callable[[SessionRequest], Awaitable[bytes]] | None = None,
        options: SessionOptions | None = None,
        name: str = "x",
    ) -> Callable[[], None]:
        entry = SessionEntry(name, handler, on_request, options or SessionOptions.of(self.limits))
        return self.registry.serve(None, entry)

    def knows(self, *others: "SessionSide") -> None:
        for other in others:
            self.host.add_addrs(other.peer, other.host.listen_addrs(), ttl_s=1e9)

    def count(self, name: str) -> int:
        return self.service.counters().get(name, 0)

    async def cut(self, other: "SessionSide") -> None:
        """Every connection to the other ends."""
        await self.host.disconnect(other.peer)

    @property
    def session(self) -> Session:
        """The only one that it serves."""
        [session] = self.service.served()
        return session


@asynccontextmanager
async def session_sides(
    count: int = 2, *, limits: Limits | None = None, network: MemoryNetwork | None = None
) -> AsyncGenerator[list[SessionSide], None]:
    """That many nodes, running, each able to dial the others. The first is the server by custom."""
    network = network or MemoryNetwork()
    made = [SessionSide(network, limits or Limits()) for _ in range(count)]
    for side in made:
        side.knows(*[other for other in made if other is not side])
    async with trio.open_nursery() as nursery:
        for side in made:
            await nursery.start(side.run)
        yield made
        nursery.cancel_scope.cancel()


async def take(session: OpenSession, count: int) -> list[bytes]:
    """So many pushes."""
    data: list[bytes] = []
    for _ in range(count):
        push = await session.receive()
        assert push is not None, f"the session ended after {data}"
        data.append(push.body)
    return data


async def forever(session: Session) -> None:
    """A handler whose session others push into."""
    await session.wait_closed()
