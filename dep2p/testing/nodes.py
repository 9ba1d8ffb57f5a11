"""Nodes of one realm on a network in memory, for tests of apps."""

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager

import trio

from dep2p.limits import Limits
from dep2p.node.node import Node
from dep2p.realm.credentials import Realm
from dep2p.realm.interface import MemberEvent
from dep2p.testing.memory import MemoryNetwork
from dep2p.types import PeerId, RealmId


@asynccontextmanager
async def open_nodes(
    count: int = 2,
    *,
    realm: Realm | None = None,
    network: MemoryNetwork | None = None,
    limits: Limits | None = None,
) -> AsyncGenerator[list[Node], None]:
    """Open nodes of one realm on a network in memory: ``async with open_nodes(2) as (ann, bob)``.

    Entering returns when each node sees all the others up. Without ``realm`` they are in a new one, ``test``; without
    ``network`` on a new one. No socket is opened and no file is written; queues and outboxes are in memory. Under
    trio's virtual clock (``trio.testing.MockClock(autojump_threshold=0)``) no time passes.

    Raises ``ValueError`` for a count below 1, and what :meth:`Node.open` raises.
    """
    if count < 1:
        raise ValueError(f"count must be 1 or more, not {count}")
    realm = realm or Realm.generate("test")
    network = network or MemoryNetwork()
    async with AsyncExitStack() as stack:
        nodes: list[Node] = []
        for _ in range(count):
            host = network.host()
            bootstrap = nodes[0].listen_addrs() if nodes else []
            opened = Node.open(realm, host=host, identity=host.identity, bootstrap=bootstrap, limits=limits)
            nodes.append(await stack.enter_async_context(opened))
        for node in nodes:
            await _until_up(node, realm, {each.peer_id for each in nodes} - {node.peer_id})
        yield nodes


async def _until_up(node: Node, realm: Realm, peers: set[PeerId]) -> None:
    """Return when the node sees these members of the realm up."""
    changed = trio.Event()

    def on_event(_realm: RealmId, _event: MemberEvent) -> None:
        changed.set()

    end = node.subscribe_members(on_event)
    try:
        while not peers <= {member.peer for member in node.members(realm) if member.state == "up"}:
            await changed.wait()
            changed = trio.Event()
    finally:
        end()
