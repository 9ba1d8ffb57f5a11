"""Two or more nodes' messaging in memory, under the virtual clock, behind a gate that a test can close."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from random import Random

import trio
import trio.testing

from dep2p.errors import Dep2pError, NotMemberError
from dep2p.host.interface import Connection
from dep2p.limits import Limits
from dep2p.links.fairness import Fairness
from dep2p.messaging.caller import OutboundLink
from dep2p.messaging.service import Messaging, message_protocol
from dep2p.messaging.stream_service import stream_protocol
from dep2p.testing.memory import MemoryHost, MemoryNetwork
from dep2p.types import PeerId, RealmId

REALM = RealmId("ab" * 32)


class FakeGate:
    """Everybody is a member until said otherwise."""

    def __init__(self, host: MemoryHost, features: frozenset[str] = frozenset({"zstd"})) -> None:
        self._host = host
        self._features = features
        self.strangers: dict[PeerId, None] = {}
        self._on_lost: list[Callable[[Connection], None]] = []

    @property
    def realm_id(self) -> RealmId:
        return REALM

    def is_verified(self, connection: Connection) -> bool:
        return not connection.is_closed and connection.peer not in self.strangers

    def features(self, connection: Connection) -> frozenset[str]:
        return self._features

    def verified_connection(self, peer: PeerId) -> Connection | None:
        live = self._host.connections(peer)
        return live[0] if live and peer not in self.strangers else None

    async def connect(self, peer: PeerId, addrs: Sequence[str] = (), *, timeout_s: float | None = None) -> Connection:
        if peer in self.strangers:
            raise NotMemberError(f"{peer} is a stranger")
        return await self._host.dial(peer, addrs, timeout_s=timeout_s)

    def subscribe_unverified(self, on_lost: Callable[[Connection], None]) -> Callable[[], None]:
        self._on_lost.append(on_lost)
        return lambda: self._on_lost.remove(on_lost)

    def subscribe_verified(self, on_verified: Callable[[Connection], None]) -> Callable[[], None]:
        return lambda: None

    def expel(self, peer: PeerId, *, tell: bool = True) -> None:
        """The peer is no member from now on; ``tell`` the subscribers, as a membership does."""
        self.strangers[peer] = None
        if tell:
            for connection in self._host.connections(peer):
                for on_lost in list(self._on_lost):
                    on_lost(connection)


class Side:
    """One node: its host, gate and messaging."""

    def __init__(self, network: MemoryNetwork, limits: Limits, features: frozenset[str]) -> None:
        self.host = network.host()
        self.peer = self.host.peer_id
        self.gate = FakeGate(self.host, features)
        self.limits = limits
        self.fairness = Fairness()
        self.messaging = Messaging(self.host, self.gate, REALM, limits, rng=Random(1), fairness=self.fairness)
        self.message_protocol = message_protocol(REALM)
        self.stream_protocol = stream_protocol(REALM)
        self._scope = trio.CancelScope()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Its messaging, until `stop`."""
        with self._scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(self.fairness.run)
                await nursery.start(self.messaging.run)
                task_status.started()

    def stop(self) -> None:
        """End its messaging; its host lives on."""
        self._scope.cancel()

    @property
    def open_streams(self) -> int:
        """Logical streams that live."""
        return len(self.messaging._streams.streams)  # pyright: ignore[reportPrivateUsage]

    def link_to(self, other: "Side") -> OutboundLink:
        """The live link that this side opened to the other."""
        return self.messaging._pool.links[other.peer]  # pyright: ignore[reportPrivateUsage]

    def count(self, name: str) -> int:
        return self.messaging.counters().get(name, 0)


async def quietly(a: Side, b: Side, name: str) -> None:
    """A request whose failure does not matter."""
    with suppress(Dep2pError):
        await a.messaging.request(b.peer, name, b"")


async def settled() -> None:
    """Let everything that is under way in the network arrive and be handled."""
    await trio.sleep(0.2)
    await trio.testing.wait_all_tasks_blocked()


@asynccontextmanager
async def sides(
    count: int = 2,
    *,
    limits: Limits | Sequence[Limits] | None = None,
    features: frozenset[str] = frozenset({"zstd"}),
    network: MemoryNetwork | None = None,
) -> AsyncGenerator[list[Side], None]:
    """That many nodes, running, each able to dial the others."""
    network = network or MemoryNetwork()
    each = [limits or Limits()] * count if limits is None or isinstance(limits, Limits) else list(limits)
    made = [Side(network, each[index], features) for index in range(count)]
    for side in made:
        for other in made:
            if other is not side:
                side.host.add_addrs(other.peer, other.host.listen_addrs(), ttl_s=1e9)
    async with trio.open_nursery() as nursery:
        for side in made:
            await nursery.start(side.run)
        yield made
        nursery.cancel_scope.cancel()
