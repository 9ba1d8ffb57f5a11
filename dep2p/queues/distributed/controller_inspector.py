"""What the home of placed queues tells of them: it asks the nodes of their partitions."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import trio

from dep2p.errors import Dep2pError, ProtocolError
from dep2p.protocols.queues.ordering.placement import Place, Placement
from dep2p.protocols.queues.queue import Queue
from dep2p.queues.distributed.shard_client import LOOK_S, Shares, all_places, whole


class HomeLooking:
    """Changes nothing."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares

    async def route(self, queue: Queue, *, is_brief: bool, answer: dict[str, Any]) -> dict[str, Any]:
        """The table, and unless it is to be brief what each partition's node says."""
        placement = Placement(queue.routes, queue.places, queue.options.order)
        answer["placement"] = placement.to_value()
        shown = {each["partition"]: each for each in cast(list[dict[str, Any]], answer["partitions"])}
        for partition, place in queue.places.items():
            if partition in shown:
                shown[partition] |= {"node": place.node, "share": place.share}
        if not is_brief:

            async def look(partition: int, place: Place) -> None:
                found: dict[str, Any] | None = None
                with trio.move_on_after(LOOK_S):
                    try:
                        found = await self._shares.ask(place.node, "floors", {"queue": place.share})
                        shown[partition] |= {
                            name: whole(found, name) for name in ("messages", "bytes", "last_seq", "elsewhere")
                        }
                    except (Dep2pError, ValueError):
                        found = None
                shown[partition]["is_up"] = found is not None

            async with trio.open_nursery() as nursery:
                for partition, place in queue.places.items():
                    if partition in shown:
                        nursery.start_soon(look, partition, place)
        return answer

    async def group(self, queue: Queue, fields: Mapping[str, object], answer: dict[str, Any]) -> dict[str, Any]:
        """Who is there and to whom partitions are allocated, the home knows; who holds them, their nodes."""
        places = dict(queue.places)
        channel = fields.get("channel")
        found = await self._shares.ask_all(queue, "locks", lambda _place: {"channel": channel}, is_needed=False)
        held: list[dict[str, Any]] = []
        for partition, each in found.items():
            locks = each.get("locks")
            if isinstance(locks, list):
                held += [
                    {**cast(dict[str, Any], lock), "partition": partition, "node": places[partition].node}
                    for lock in cast(list[object], locks)
                    if isinstance(lock, dict) and partition in places
                ]
        return {**answer, "locks": held, "away": sorted(set(places) - set(found))}

    async def floors(self, queue: Queue) -> dict[str, dict[int, int]]:
        """By channel and partition: up to where everything is done. Of partitions with barriers, as far as their nodes
        are there. Raises ProtocolError for an answer that is none."""
        floors: dict[str, dict[int, int]] = {name: {} for name in queue.channels}
        wrong: list[Exception] = []

        async def look(partition: int, place: Place) -> None:
            try:
                with trio.fail_after(LOOK_S):
                    known = (await self._shares.ask(place.node, "floors", {"queue": place.share})).get("floors")
                if not isinstance(known, dict):
                    raise ProtocolError(f"the node {place.node} answered without floors")
                found = cast(dict[str, Any], known)
                for name in floors:
                    if name in found:
                        floors[name][partition] = whole(found, name)
            except ProtocolError as error:
                wrong.append(error)
            except (Dep2pError, trio.TooSlowError):
                pass  # nothing is known: the barrier stands

        async with trio.open_nursery() as nursery:
            for partition in {barrier.partition: None for route in queue.routes.routes for barrier in route.after}:
                nursery.start_soon(look, partition, queue.places[partition])
        if wrong:
            raise wrong[0]
        return floors

    def values(self, queues: Sequence[Queue], to_remove: int) -> dict[str, int]:
        """What is under way, in numbers: queues, expansions (and creations) that are not complete, ranges that a
        channel may not read yet, nodes, those that did not answer the last time, and what is to be removed."""
        nodes = {place.node: None for queue in queues for place in all_places(queue).values()}
        return {
            "queues": len(queues),
            "growing": sum(bool(queue.growing) for queue in queues),
            "barriers": sum(bool(route.after) for queue in queues for route in queue.routes.routes),
            "nodes": len(nodes),
            "nodes_away": sum(node in self._shares.away for node in nodes),
            "to_remove": to_remove,
        }
