"""Requests of a controller to the nodes of its partitions: few at once, with errors that name the node."""

from collections.abc import Callable, Mapping
from typing import Final

import trio

from dep2p.errors import (
    ChannelNotFoundError,
    Dep2pError,
    QueueNotFoundError,
)
from dep2p.protocols.queues.admin import AdminRequest, DeleteChannel, DescribeQueue, MayCreate, QueueRequest, R
from dep2p.protocols.queues.ordering.placement import ShardLocation
from dep2p.protocols.queues.queue import Queue
from dep2p.queues.distributed.interfaces import Asker
from dep2p.queues.types import UNREACHABLE_ERRORS
from dep2p.types import PeerId

INSPECT_S: Final = 2.0
"""A node that does not answer within this time is shown as away."""
_ASKS_PER_NODE: Final = 8
"""Requests to one node at once. A link takes 16, and others use it, too."""


class ShardClient:
    """The nodes that store partitions of this node's queues."""

    def __init__(self, at: Callable[[str], Asker]) -> None:
        self._at = at
        self._limiters: dict[str, trio.CapacityLimiter] = {}
        self.away: dict[str, None] = {}
        """Nodes that did not answer the last time."""

    async def ask(self, node: str, request: AdminRequest[R]) -> R:
        """Ask a node, at most 8 requests at once. When it is away, the error names it."""
        limiter = self._limiters.setdefault(node, trio.CapacityLimiter(_ASKS_PER_NODE))
        try:
            async with limiter:
                reply = await self._at(node).ask(request)
            self.away.pop(node, None)
            return reply
        except UNREACHABLE_ERRORS as error:
            self.away[node] = None
            raise type(error)(f"the node {node}: {error}") from error
        finally:
            if not limiter.borrowed_tokens and self._limiters.get(node) is limiter:
                del self._limiters[node]

    async def reach(self, shards: Mapping[str, str]) -> None:
        """Raises unless each node answers. ``shards``: the name of a shard by node; it need not exist."""
        for node, shard in shards.items():
            try:
                await self.ask(node, DescribeQueue(queue=shard))
            except QueueNotFoundError:
                continue

    async def may_create(self, shards: Mapping[str, str], asker: PeerId | None) -> None:
        """Raises unless each node answers and lets this one make such a queue, for ``asker``. A controller with more
        rights than its asker must not make a queue that the asker may not make itself."""
        for node, shard in shards.items():
            await self.ask(node, MayCreate(queue=shard, asker=asker))

    async def ask_all(
        self,
        queue: Queue,
        request: Callable[[ShardLocation], QueueRequest[R]],
        *,
        gone: R | None = None,
        is_needed: bool = True,
    ) -> dict[int, R]:
        """Ask every shard, also those of an expansion that is not complete. Returns the replies by partition.

        ``gone``: the reply for a shard, or a channel, that is deleted already; without it that is an error. Raises the
        first error, as it is, when all are needed; else gives the replies that come within `INSPECT_S`.
        """
        found: dict[int, R] = {}
        errors: list[Exception] = []

        async def ask(partition: int, location: ShardLocation) -> None:
            wanted = request(location)
            try:
                with trio.move_on_after(float("inf") if is_needed else INSPECT_S):
                    found[partition] = await self.ask(location.node, wanted)
            except (QueueNotFoundError, ChannelNotFoundError) as error:
                is_done = isinstance(error, QueueNotFoundError) or isinstance(wanted, DeleteChannel)
                if gone is not None and is_done:
                    found[partition] = gone
                else:
                    errors.append(error)
            except Exception as error:  # raised as it is, not in the nursery's group
                errors.append(error)

        async with trio.open_nursery() as nursery:
            for partition, location in all_locations(queue).items():
                nursery.start_soon(ask, partition, location)
        if errors and is_needed:
            raise errors[0]
        return found


def all_locations(queue: Queue) -> dict[int, ShardLocation]:
    """Return the locations of all shards, also those of an expansion that is not complete."""
    return {**queue.locations, **queue.pending_expansion}


def away(error: Dep2pError, queue: str, partition: int, node: str) -> Dep2pError:
    """Return the same error with partition and node in its text."""
    return type(error)(f"partition {partition} of the queue {queue!r}, at {node}: {error}")
