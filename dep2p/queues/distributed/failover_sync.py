"""Several nodes on one store as the controller of distributed queues: the shards' nodes know that any of them may act
as it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final

import trio

from dep2p.protocols.queues.admin import AccessChange, CreateQueue
from dep2p.protocols.queues.options import options_as_dict
from dep2p.protocols.queues.ordering.placement import ShardLocation
from dep2p.protocols.queues.queue import Queue
from dep2p.queues.access import Who
from dep2p.queues.broker.ownership import StoreOwnership
from dep2p.queues.distributed.shard_client import ShardClient
from dep2p.types import PeerId, RealmId

_CHECK_S: Final = 5.0
"""Seconds between two looks for another node on the store, or for a shard's node that is back."""


def nodes_of_group(ownership: StoreOwnership, own: PeerId) -> list[str]:
    """List this node, and the nodes that may be the controller instead of it."""
    return [*dict.fromkeys([own, *ownership.nodes])]


def who_of(who: Who, nodes: Sequence[str]) -> str | tuple[str, ...]:
    """Return the same members, as the node of a shard names them; ``nodes``: those of the failover group."""
    if who == "members":
        return "members"
    return tuple(nodes) if isinstance(who, str) else tuple(dict.fromkeys([*nodes, *who]))


def create_shard(queue: Queue, location: ShardLocation, access: AccessChange) -> CreateQueue:
    """Return the request that makes a shard of a queue, or sets the access of one that is there."""
    options = {**options_as_dict(queue.options), "partitions": 1}
    return CreateQueue(queue=location.shard, options=options, access=access)


class FailoverGroupSync:
    """Tells the shards of each queue which nodes may be its controller."""

    def __init__(
        self,
        ownership: StoreOwnership,
        realm_id: RealmId,
        own: PeerId,
        shards: ShardClient,
        alone: Callable[[str], AbstractAsyncContextManager[None]],
        access: Callable[[Queue, str], AccessChange],
    ) -> None:
        """``alone``: makes a block in which nothing else changes the queue of that name. ``access``: the access of its
        shard at a node."""
        self._ownership = ownership
        self._realm_id = realm_id
        self._own = own
        self._shards = shards
        self._alone = alone
        self._access = access

    async def run(self) -> None:
        """Report changes of the failover group to the shards, in one term."""
        notified: dict[str, list[str]] = {}
        while True:
            nodes = nodes_of_group(self._ownership, self._own)
            registry = self._ownership.engine.registry
            for (realm_id, name), queue in list(registry.queues.items()):
                if realm_id == self._realm_id and queue.locations and notified.get(name) != nodes:
                    async with self._alone(name):
                        if not queue.is_deleted and not queue.pending_expansion and await self._notify(queue, nodes):
                            notified[name] = nodes
            await trio.sleep(_CHECK_S)

    async def _notify(self, queue: Queue, nodes: list[str]) -> bool:
        found = await self._shards.ask_all(
            queue,
            lambda location: create_shard(queue, location, self._access(queue, location.node)),
            is_needed=False,
        )
        return all(each in found for each, location in queue.locations.items() if location.node not in nodes)
