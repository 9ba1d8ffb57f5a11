"""Shards and channels that the controller of distributed queues deletes when their nodes are back."""

import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager
from typing import Final

import trio

from dep2p.errors import ChannelNotFoundError, Dep2pError, QueueNotFoundError
from dep2p.protocols.queues.admin import DeleteChannel, DeleteQueue
from dep2p.protocols.queues.ordering.placement import ShardLocation
from dep2p.queues.broker.engine import QueueEngine
from dep2p.queues.broker.ownership import StoreOwnership
from dep2p.queues.distributed.shard_client import INSPECT_S, ShardClient
from dep2p.types import RealmId

logger: logging.Logger = logging.getLogger("dep2p.queues")

_TRY_S: Final = 15.0
"""Seconds between two tries at a node."""
_DELETIONS_MAX: Final = 10_000
"""The most deletions; above it the oldest is forgotten. The owner of its node can remove the shard (`dep2p queue
rm`)."""


class PendingDeletions:
    """Shards of deleted queues, and channels of shards that were not made everywhere."""

    def __init__(
        self,
        ownership: StoreOwnership,
        realm_id: RealmId,
        shards: ShardClient,
        alone: Callable[[str], AbstractAsyncContextManager[None]],
    ) -> None:
        """``alone``: makes a block in which nothing else changes the queue of that name."""
        self._ownership = ownership
        self._realm_id = realm_id
        self._shards = shards
        self._alone = alone
        self._wake = trio.Event()

    @property
    def _engine(self) -> QueueEngine:
        """The engine. Raises NotOwnerError while another node is the broker of the queues."""
        return self._ownership.engine

    def remember(self, locations: Iterable[ShardLocation], channel: str = "") -> None:
        """Add shards, or their channel, to delete. Durable with the next commit."""
        registry = self._engine.registry
        for location in locations:
            while len(registry.pending_deletions) >= _DELETIONS_MAX:
                oldest = next(iter(registry.pending_deletions))
                logger.warning("too much is to be removed from nodes that are away: %r is left for good", oldest[1])
                registry.set_pending_deletion(*oldest, None)
            registry.set_pending_deletion(self._realm_id, location.shard, channel, location.node)
            self._engine.changed()
            self._wake.set()

    def forget(self, locations: Iterable[ShardLocation], channel: str = "") -> None:
        """Drop deletions of shards that may be there again."""
        for location in locations:
            self._engine.registry.set_pending_deletion(self._realm_id, location.shard, channel, None)
        self._engine.changed()

    def _by_node(self) -> dict[str, list[tuple[str, str]]]:
        found: dict[str, list[tuple[str, str]]] = {}
        for (namespace, shard, channel), node in self._engine.registry.pending_deletions.items():
            if namespace == self._realm_id:
                found.setdefault(node, []).append((shard, channel))
        return found

    @property
    def items(self) -> int:
        """The number of pending deletions."""
        return sum(map(len, self._by_node().values()))

    async def run(self) -> None:
        """Delete shards and channels when their node is there."""
        while True:
            self._wake = trio.Event()
            by_node = self._by_node()
            async with trio.open_nursery() as nursery:
                for node, each in by_node.items():
                    nursery.start_soon(self._remove_all, node, each)
            if by_node:
                await trio.sleep(_TRY_S)
            else:
                await self._wake.wait()

    async def _remove_all(self, node: str, pending: list[tuple[str, str]]) -> None:
        for shard, channel in pending:
            try:
                await self._remove(node, shard, channel)
            except (QueueNotFoundError, ChannelNotFoundError):
                pass  # removed by others
            except (Dep2pError, trio.TooSlowError) as error:
                logger.debug("%r is still at %s: %s", shard, node, error)
                return  # also for the others: the node is away
            except Exception:
                logger.exception("the shard %r cannot be removed from %s; it is tried again", shard, node)
                return
            self._engine.registry.set_pending_deletion(self._realm_id, shard, channel, None)
            self._engine.changed()

    async def _remove(self, node: str, shard: str, channel: str) -> None:
        if not channel:  # its name never comes again
            await self._shards.ask(node, DeleteQueue(queue=shard))
            logger.info("the shard %r was removed from %s: its queue is gone", shard, node)
            return
        async with self._alone(shard.rsplit(".", 2)[0]):
            if (self._realm_id, shard, channel) in self._engine.registry.pending_deletions:  # else it is wanted again
                with trio.fail_after(INSPECT_S):
                    await self._shards.ask(node, DeleteChannel(queue=shard, channel=channel))
