"""The home of queues whose partitions are on several nodes: it makes and expands them, and says who may read what.

A partition is a queue of its own on its node (a share), so that messages never pass through the home. The home keeps
the route table, and its exclusive channel allocates partitions to consumers; locks and epochs are the shares' own.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Protocol, cast

import trio

from dep2p.errors import Dep2pError, QueueNotFoundError, QueuePlacedError
from dep2p.io.queue_access import Rights, Who
from dep2p.io.queue_engine import QueueEngine
from dep2p.protocols.queue.ordering.placement import Place, Placement, narrowed_by, nodes_for, ranges_of, share_name
from dep2p.protocols.queue.queue import Queue
from dep2p.types import PeerId, RealmId, parse_peer_id

logger = logging.getLogger("dep2p.queues")

_NODES_MAX: Final = 1_024
_POLL_S: Final = 0.25
"""While a range waits behind its barrier, or an expansion is not complete."""
_LOOK_S: Final = 2.0
"""A node that does not answer within it counts as away, for people."""


class Asker(Protocol):
    """The queues of a node, for administration."""

    async def ask(self, op: str, fields: Mapping[str, object]) -> dict[str, Any]:
        """An administrative request."""
        ...


class QueueHome:
    """Of the placed queues of one realm that this node is the home of."""

    def __init__(
        self, engine: QueueEngine, rights: Rights, realm_id: RealmId, own: PeerId, at: Callable[[str], Asker]
    ) -> None:
        self._engine = engine
        self._rights = rights
        self._realm_id = realm_id
        self._own = own
        self._at = at
        self._wake = trio.Event()
        self._growing: dict[Queue, trio.Lock] = {}

    # Requests

    def handles(self, op: str, fields: Mapping[str, object]) -> bool:
        """Whether a request is about a placed queue, or makes one."""
        name = fields.get("queue")
        if not isinstance(name, str):
            return False
        found = self._engine.book.queues.get((self._realm_id, name))
        if op == "create":
            return bool(fields.get("nodes")) or (found is not None and bool(found.places))
        return found is not None and bool(found.places)

    async def perform(self, op: str, fields: Mapping[str, object], plain: "Plain") -> dict[str, Any]:
        """Do it. ``plain`` does the same with a queue of this node alone.

        Raises QueuePlacedError for what is done with one partition at a time, and what ``plain`` and the nodes raise.
        """
        if op == "create":
            return await self._create(fields, plain)
        queue = await self._engine.loaded(self._realm_id, str(fields["queue"]))
        if op == "route":
            return await self._route(queue, is_brief=bool(fields.get("brief")), answer=await plain(op, fields))
        if op == "expand":
            return await self._expand(queue, fields, plain)
        if op == "info":
            return {**await plain(op, fields), "placed": [_shown(*each) for each in sorted(queue.places.items())]}
        if op in ("consumers", "locks"):
            return await self._group(op, queue, fields, await plain(op, fields))
        if op in ("delete", "delete_channel", "pause", "resume", "empty"):
            found = await self._at_all(queue, op, fields)
            answer = await plain(op, fields)
            if op == "empty":
                answer["messages"] = sum(int(each["messages"]) for each in found.values())
            return answer
        if op == "create_channel":
            answer = await plain(op, fields)
            # A share that is away gets its channel from the first consumer that comes to it.
            await self._at_all(queue, op, fields, is_needed=False)
            return answer
        raise QueuePlacedError(
            f"the queue {queue.name!r} is on several nodes; {op} works with one partition: "
            + ", ".join(f"{place.share} at {place.node}" for place in list(queue.places.values())[:4])
        )

    async def _create(self, fields: Mapping[str, object], plain: "Plain") -> dict[str, Any]:
        name = str(fields.get("queue"))
        found = self._engine.book.queues.get((self._realm_id, name))
        nodes = self._nodes(fields)
        if found is not None and found.places and not nodes:
            return await plain("create", fields)  # the same queue, or refused by what differs
        share_name(name, 1, self._own)
        options = dict(cast(Mapping[str, object], fields.get("options") or {}))
        count = options.get("partitions", len(nodes))
        if not isinstance(count, int) or not len(dict.fromkeys(nodes)) <= count <= _NODES_MAX:
            raise ValueError(f"{count} partitions for {len(dict.fromkeys(nodes))} nodes: every node gets one at least")
        options["partitions"] = count
        if found is None:
            # Each node can do it: known before anything is made here.
            await self._reach(nodes)
        answer = await plain("create", {**fields, "options": options})
        queue = await self._engine.loaded(self._realm_id, name)
        places = {
            partition: Place(node, share_name(name, partition, self._own))
            for partition, node in zip(queue.partition_ids, nodes_for(count, nodes), strict=True)
        }
        if not queue.places:
            try:
                for partition, (low, high) in ranges_of(queue.routes).items():
                    await self._make_share(queue, places[partition], low, high)
            except BaseException:
                with trio.CancelScope(shield=True):
                    await plain("delete", {"queue": name})
                raise
            queue.place(places)
            self._engine.changed()
            await self._engine.flush()
        return {**answer, "placed": [_shown(*each) for each in sorted(places.items())]}

    def _nodes(self, fields: Mapping[str, object]) -> list[str]:
        given: object = fields.get("nodes") or cast(list[object], [])
        if not isinstance(given, list) or not all(isinstance(each, str) for each in cast(list[object], given)):
            raise ValueError("nodes is not a list of peer ids (or 'home')")
        nodes = cast(list[str], given)
        if len(nodes) > _NODES_MAX:
            raise ValueError(f"{len(nodes)} nodes: at most {_NODES_MAX}")
        return [self._own if each == "home" else str(parse_peer_id(each)) for each in nodes]

    async def _reach(self, nodes: list[str]) -> None:
        for node in dict.fromkeys(nodes):
            if node != self._own:
                await self._at(node).ask("list", {})

    async def _make_share(self, queue: Queue, place: Place, low: int, high: int) -> None:
        from dep2p.protocols.queue.options import options_as_dict

        options = {**options_as_dict(queue.options), "partitions": 1}
        access = self._rights.of(self._realm_id, queue.name)
        shared: dict[str, object] = {
            "publish": self._who(access.publish, place.node),
            "consume": self._who(access.consume, place.node),
            # Its home alone makes it smaller, and deletes it.
            "administer": [self._own],
        }
        where = self._at(place.node)
        await where.ask("create", {"queue": place.share, "options": options, "access": shared})
        await where.ask("serve", {"queue": place.share, "low": low, "high": high})

    def _who(self, who: Who, node: str) -> object:
        """The same people, seen from another node."""
        if who == "members":
            return who
        return [self._own] if isinstance(who, str) else [*dict.fromkeys([self._own, *who])]

    # Expansion

    async def _expand(self, queue: Queue, fields: Mapping[str, object], plain: "Plain") -> dict[str, Any]:
        lock = self._growing.setdefault(queue, trio.Lock())
        async with lock:
            await self._grow(queue)  # what a crash has interrupted
            count = fields.get("partitions")
            there = len(queue.partition_ids)
            if not isinstance(count, int) or isinstance(count, bool) or count > _NODES_MAX or count < there:
                raise ValueError(f"the queue {queue.name!r} has {there} partitions: it can only get more, not {count}")
            added: list[int] = []
            if count > there:
                nodes = self._nodes(fields) or list(
                    dict.fromkeys(queue.places[each].node for each in sorted(queue.places))
                )
                ids = self._engine.book.new_partition_ids(count - there)
                planned = {
                    each: Place(node, share_name(queue.name, each, self._own))
                    for each, node in zip(ids, nodes_for(len(ids), nodes), strict=True)
                }
                changed, _origin = narrowed_by(queue.routes, ids)
                # While a node is away nothing is begun: no key may be left without a partition.
                await self._reach([(planned.get(each) or queue.places[each]).node for each in changed])
                queue.plan_growth(planned)
                self._engine.changed()
                await self._engine.flush()
                added = await self._grow(queue)
        route = await self._route(queue, is_brief=True, answer=await plain("route", {"queue": queue.name}))
        return {"queue": queue.name, "added": added, **route}

    async def _grow(self, queue: Queue) -> list[int]:
        """Every step may be repeated. The table is told last: until then new keys of what moves are refused."""
        if not queue.growing:
            return []
        changed, _origin = narrowed_by(queue.routes, list(queue.growing))
        last_seq: dict[int, int] = {}
        for partition, place in queue.growing.items():
            await self._make_share(queue, place, *changed[partition])
            for name, channel in queue.channels.items():
                wanted: dict[str, object] = {"queue": place.share, "channel": name, "from_start": True}
                if channel.filter is not None:
                    wanted["filter"] = channel.filter.text
                if channel.is_exclusive:
                    wanted["exclusive"] = True
                await self._at(place.node).ask("create_channel", wanted)
        for partition, (low, high) in changed.items():
            if partition not in queue.growing:
                place = queue.places[partition]
                answer = await self._at(place.node).ask("serve", {"queue": place.share, "low": low, "high": high})
                last_seq[partition] = int(answer["last_seq"])
        added = queue.grow(last_seq)
        self._engine.changed()
        await self._engine.flush()
        self._wake.set()
        return added

    # Looking

    async def _route(self, queue: Queue, *, is_brief: bool, answer: dict[str, Any]) -> dict[str, Any]:
        placement = Placement(queue.routes, queue.places, queue.options.order)
        answer["placement"] = placement.to_value()
        shown = {each["partition"]: each for each in cast(list[dict[str, Any]], answer["partitions"])}
        for partition, place in queue.places.items():
            shown[partition] |= {"node": place.node, "share": place.share}
        if not is_brief:

            async def look(partition: int, place: Place) -> None:
                found: dict[str, Any] | None = None
                with trio.move_on_after(_LOOK_S):
                    try:
                        found = await self._at(place.node).ask("floors", {"queue": place.share})
                    except Dep2pError:
                        found = None
                shown[partition]["is_up"] = found is not None
                if found is not None:
                    shown[partition] |= {name: found[name] for name in ("messages", "bytes", "last_seq", "elsewhere")}

            async with trio.open_nursery() as nursery:
                for partition, place in queue.places.items():
                    nursery.start_soon(look, partition, place)
        return answer

    async def _group(
        self, op: str, queue: Queue, fields: Mapping[str, object], answer: dict[str, Any]
    ) -> dict[str, Any]:
        """Who is there and to whom partitions are allocated, the home knows; who holds them, their nodes."""
        found = await self._at_all(queue, "locks", fields, is_needed=False)
        held = [
            {**lock, "partition": partition, "node": queue.places[partition].node}
            for partition, each in found.items()
            for lock in cast(list[dict[str, Any]], each["locks"])
        ]
        return {**answer, "locks": held, "away": sorted(set(queue.places) - set(found))}

    async def _at_all(
        self, queue: Queue, op: str, fields: Mapping[str, object], *, is_needed: bool = True
    ) -> dict[int, dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        errors: list[Dep2pError] = []

        async def ask(partition: int, place: Place) -> None:
            try:
                with trio.move_on_after(float("inf") if is_needed else _LOOK_S):
                    found[partition] = await self._at(place.node).ask(op, {**fields, "queue": place.share})
            except QueueNotFoundError:
                found[partition] = {"messages": 0}  # deleted there already
            except Dep2pError as error:
                errors.append(error)

        async with trio.open_nursery() as nursery:
            for partition, place in queue.places.items():
                nursery.start_soon(ask, partition, place)
        if errors and is_needed:
            raise errors[0]
        return found

    # Barriers

    async def run(self) -> None:
        """End what a crash interrupted, and let consumers into ranges whose barrier their channel has passed."""
        while True:
            self._wake = trio.Event()
            is_open = False
            for (namespace, name), found in list(self._engine.book.queues.items()):
                if namespace != self._realm_id or not found.places:
                    continue
                queue = await self._engine.loaded(namespace, name)
                if queue.growing or queue.routes.has_barriers:
                    is_open = True
                    try:
                        await self._step(queue)
                    except Dep2pError as error:
                        logger.info("the queue %r waits for one of its nodes: %s", queue.name, error)
            with trio.move_on_after(_POLL_S if is_open else float("inf")):
                await self._wake.wait()

    async def _step(self, queue: Queue) -> None:
        if queue.growing:
            async with self._growing.setdefault(queue, trio.Lock()):
                await self._grow(queue)
        floors: dict[str, dict[int, int]] = {name: {} for name in queue.channels}
        for partition in {barrier.partition: None for route in queue.routes.routes for barrier in route.after}:
            place = queue.places[partition]
            try:
                with trio.fail_after(_LOOK_S):
                    answer = await self._at(place.node).ask("floors", {"queue": place.share})
            except (Dep2pError, trio.TooSlowError):
                continue  # nothing is known: the barrier stands
            for name, floor in cast(dict[str, int], answer["floors"]).items():
                if name in floors:
                    floors[name][partition] = floor
        if queue.is_deleted:
            return
        self._engine.book.at(self._engine.wall_us())
        queue.passed({name: _floor(each) for name, each in floors.items()})
        self._engine.changed()


Plain = Callable[[str, Mapping[str, object]], Awaitable[dict[str, Any]]]


def _floor(known: Mapping[int, int]) -> Callable[[int], int]:
    return lambda partition: known.get(partition, 0)


def _shown(partition: int, place: Place) -> dict[str, object]:
    return {"partition": partition, "node": place.node, "share": place.share}
