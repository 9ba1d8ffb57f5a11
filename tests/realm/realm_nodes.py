"""Nodes of realms on the memory network, under the virtual clock."""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import trio

from dep2p.host.interface import ByteStream, Connection
from dep2p.identity import Identity
from dep2p.limits import Limits
from dep2p.protocols.wire.frame import Frame, FrameDecoder
from dep2p.realm.credentials import Realm
from dep2p.realm.handshake_responder import RealmResponder
from dep2p.realm.interface import MemberEvent
from dep2p.realm.membership import Membership, MembershipOptions
from dep2p.testing import MemoryHost, MemoryNetwork
from dep2p.types import PeerId

WALL_S = 1_700_000_000.0
TEAM = Realm.from_psk(bytes(range(32)), "team")
OTHER = Realm.from_psk(bytes(32), "other")


def wall_clock_s() -> float:
    """Goes with the virtual clock."""
    return WALL_S + trio.current_time()


@dataclass
class Node:
    """A host with one membership, and what it told."""

    host: MemoryHost
    membership: Membership
    events: list[tuple[float, str, str]] = field(default_factory=list[tuple[float, str, str]])

    @property
    def counts(self) -> dict[str, int]:
        return self.membership.counters()

    def kinds(self, other: "Node") -> list[str]:
        """The kinds of events about another node, in order."""
        return [kind for _, kind, peer in self.events if peer == other.host.peer_id]

    def state(self, other: "Node") -> str | None:
        member = self.membership.member(other.host.peer_id)
        return None if member is None else member.state

    async def connect(self, other: "Node") -> Connection:
        return await self.membership.connect(other.host.peer_id, [other.host.addr])


@dataclass
class Nodes:
    """Makes nodes in one network."""

    network: MemoryNetwork
    nursery: trio.Nursery
    responders: dict[PeerId, tuple[MemoryHost, RealmResponder]] = field(
        default_factory=dict[PeerId, tuple[MemoryHost, RealmResponder]]
    )
    """One for each host, as a node has it."""

    async def add(
        self,
        realm: Realm = TEAM,
        *,
        identity: Identity | None = None,
        host: MemoryHost | None = None,
        limits: Limits | None = None,
        records_path: Path | None = None,
        clock: Callable[[], float] = wall_clock_s,
    ) -> Node:
        host = host or self.network.host(identity)
        limits = limits or Limits()
        if host.peer_id not in self.responders or self.responders[host.peer_id][0] is not host:
            responder = RealmResponder(host, host.peer_id, limits, rng=Random(host.peer_id))
            self.responders[host.peer_id] = (host, responder)
        membership = Membership(
            realm,
            host,
            host.identity,
            limits,
            MembershipOptions(
                records_path=records_path,
                rng=Random(host.peer_id),
                wall_clock_s=clock,
                responder=self.responders[host.peer_id][1],
            ),
        )
        node = Node(host, membership)

        def note(event: MemberEvent) -> None:
            node.events.append((trio.current_time(), event.kind, event.peer))

        membership.subscribe(note)
        await self.nursery.start(membership.run)
        return node


@asynccontextmanager
async def realm_nodes() -> AsyncGenerator[Nodes, None]:
    """A network whose memberships end with the block."""
    async with trio.open_nursery() as nursery:
        yield Nodes(MemoryNetwork(), nursery)
        nursery.cancel_scope.cancel()


async def until(condition: Callable[[], bool], *, timeout_s: float = 60.0) -> None:
    """Wait, in virtual time, until something is so."""
    with trio.fail_after(timeout_s):
        while not condition():  # noqa: ASYNC110 - any condition at all, and the clock is virtual
            await trio.sleep(0.01)


async def read_frames(stream: ByteStream) -> list[Frame]:
    """All frames until the end of the stream."""
    decoder = FrameDecoder(300_000)
    frames: list[Frame] = []
    while data := await stream.read():
        frames += decoder.feed(data)
    return frames
