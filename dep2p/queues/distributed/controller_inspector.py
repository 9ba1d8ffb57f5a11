"""Read-only requests to the controller of distributed queues: it asks the nodes of their partitions."""

from collections.abc import Sequence

import trio
from msgspec.structs import replace

from dep2p.errors import Dep2pError, ProtocolError
from dep2p.protocols.queues.admin import AckFloors, ChannelConsumers, ChannelLocks, ListLocks, QueueRoute, ReadAckFloors
from dep2p.protocols.queues.ordering.placement import Placement, ShardLocation
from dep2p.protocols.queues.queue import Queue
from dep2p.queues.distributed.shard_client import INSPECT_S, ShardClient, all_locations


class ControllerInspector:
    """Describes the distributed queues of a controller, and changes nothing."""

    def __init__(self, shards: ShardClient) -> None:
        self._shards = shards

    async def route(self, queue: Queue, local: QueueRoute, *, is_brief: bool) -> QueueRoute:
        """Return the route table, with the counts of each partition's node unless it is to be brief. ``local``: the
        table as this node has it."""
        placement = Placement(queue.routes, queue.locations, queue.options.order)
        shown = {each.partition: each for each in local.partitions}
        located = {partition: location for partition, location in queue.locations.items() if partition in shown}
        for partition, location in located.items():
            shown[partition] = replace(shown[partition], node=location.node, shard=location.shard)

        async def inspect(partition: int, location: ShardLocation) -> None:
            found: AckFloors | None = None
            with trio.move_on_after(INSPECT_S):
                try:
                    found = await self._shards.ask(location.node, ReadAckFloors(queue=location.shard))
                except (Dep2pError, ValueError):
                    found = None
            before = shown[partition]
            shown[partition] = replace(before, is_up=False)
            if found is not None:
                shown[partition] = replace(
                    before,
                    messages=found.messages,
                    bytes=found.bytes,
                    last_seq=found.last_seq,
                    off_partition=found.off_partition,
                    is_up=True,
                )

        if not is_brief:
            async with trio.open_nursery() as nursery:
                for partition, location in located.items():
                    nursery.start_soon(inspect, partition, location)
        return replace(local, partitions=tuple(shown.values()), placement=placement.to_value())

    async def consumers(self, queue: Queue, channel: str, local: ChannelConsumers) -> ChannelConsumers:
        """List the consumers that the controller knows, with the locks at the nodes of the partitions."""
        locks = await self.locks(queue, channel, local)
        return replace(local, locks=locks.locks, away=locks.away)

    async def locks(self, queue: Queue, channel: str, local: ChannelLocks) -> ChannelLocks:
        """List the holders of partitions: ask the node of each partition."""
        locations = dict(queue.locations)
        found = await self._shards.ask_all(
            queue, lambda location: ListLocks(queue=location.shard, channel=channel), is_needed=False
        )
        locks = [
            replace(lock, partition=partition, node=locations[partition].node)
            for partition, reply in found.items()
            if partition in locations
            for lock in reply.locks
        ]
        return ChannelLocks(
            exclusive=local.exclusive, locks=tuple(locks), away=tuple(sorted(set(locations) - set(found)))
        )

    async def ack_floors(self, queue: Queue) -> dict[str, dict[int, int]]:
        """Return by channel and partition the ack floor, for partitions with barriers whose nodes answer. Raises
        ProtocolError for a malformed answer."""
        ack_floors: dict[str, dict[int, int]] = {name: {} for name in queue.channels}
        malformed: list[Exception] = []

        async def inspect(partition: int, location: ShardLocation) -> None:
            try:
                with trio.fail_after(INSPECT_S):
                    found = await self._shards.ask(location.node, ReadAckFloors(queue=location.shard))
                for name in ack_floors:
                    if name in found.floors:
                        ack_floors[name][partition] = found.floors[name]
            except ProtocolError as error:
                malformed.append(error)
            except (Dep2pError, trio.TooSlowError):
                pass  # nothing is known: the barrier stands

        async with trio.open_nursery() as nursery:
            for partition in {barrier.partition: None for route in queue.routes.routes for barrier in route.after}:
                nursery.start_soon(inspect, partition, queue.locations[partition])
        if malformed:
            raise malformed[0]
        return ack_floors

    def values(self, queues: Sequence[Queue], to_remove: int) -> dict[str, int]:
        """Return numbers on present work: queues, creations and expansions that are not complete, ranges that a channel
        may not read yet, nodes, nodes that did not answer the last time, and pending deletions."""
        nodes = {location.node: None for queue in queues for location in all_locations(queue).values()}
        return {
            "queues": len(queues),
            "expanding": sum(bool(queue.pending_expansion) for queue in queues),
            "barriers": sum(bool(route.after) for queue in queues for route in queue.routes.routes),
            "nodes": len(nodes),
            "nodes_away": sum(node in self._shards.away for node in nodes),
            "to_remove": to_remove,
        }
