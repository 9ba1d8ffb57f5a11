"""The home of queues whose partitions are on several nodes: it makes and expands them, and says who may read what.

A partition is a queue of its own on its node (a share), so that messages never pass through the home. The home keeps
the route table, and its exclusive channel allocates partitions to consumers; locks and epochs are the shares' own.
"""

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, cast

import trio

from dep2p.errors import (
    Dep2pError,
    NotOwnerError,
    QueueExistsError,
    QueueNotFoundError,
    QueuePlacedError,
)
from dep2p.protocols.queues.names import is_ephemeral
from dep2p.protocols.queues.options import options_as_dict
from dep2p.protocols.queues.ordering.placement import Place, narrowed_by, nodes_for, ranges_of, share_name
from dep2p.protocols.queues.queue import Queue
from dep2p.queues.access import Rights, parse_access
from dep2p.queues.broker.engine import QueueEngine
from dep2p.queues.broker.ownership import Keeping
from dep2p.queues.distributed.controller_inspector import HomeLooking
from dep2p.queues.distributed.controller_messages import HomeMessages
from dep2p.queues.distributed.failover_sync import SetTold, nodes_of_set, who_of
from dep2p.queues.distributed.pending_deletions import Left
from dep2p.queues.distributed.shard_client import Asker, Shares, all_places, no_fields, whole
from dep2p.types import PeerId, RealmId, parse_peer_id

logger = logging.getLogger("dep2p.queues")

_NODES_MAX: Final = 1_024
_POLL_S: Final = 0.25
"""While a range waits behind its barrier, or a creation or an expansion is not complete."""


class QueueHome:
    """Of the placed queues of one realm that this node is the home of."""

    def __init__(
        self, keeping: Keeping, rights: Rights, realm_id: RealmId, own: PeerId, at: Callable[[str], Asker]
    ) -> None:
        self._keeping = keeping
        self._rights = rights
        self._realm_id = realm_id
        self._own = own
        self._shares = Shares(at)
        self._looking = HomeLooking(self._shares)
        self._set_told = SetTold(keeping, realm_id, own, self._shares, self._alone, self._access)
        self._messages = HomeMessages(self._shares)
        self._left = Left(keeping, realm_id, self._shares, self._alone)
        self._wake = trio.Event()
        self._steps: dict[tuple[str, str], None] = {}
        """Queues that are followed, each by its own task: a node that hangs holds up no queue without it."""
        self._locks: dict[str, trio.Lock] = {}
        """By the name of a queue: what changes it is done one after another."""
        self._told: dict[tuple[str, str], str] = {}
        """Why a queue's step failed the last time, which was said."""

    @property
    def _engine(self) -> QueueEngine:
        """Raises NotOwnerError while another node keeps the queues."""
        return self._keeping.engine

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

    async def perform(
        self, op: str, fields: Mapping[str, object], plain: "Plain", asker: PeerId | None = None
    ) -> dict[str, Any]:
        """Do it. ``plain`` does the same with a queue of this node alone; ``asker``: None for this node itself.

        Raises QueuePlacedError for what is done with one partition at a time, and what ``plain`` and the nodes raise.
        """
        name = str(fields.get("queue"))
        if op == "create":
            async with self._alone(name):
                return await self._create(name, fields, plain, asker)
        queue = await self._engine.loaded(self._realm_id, name)
        if op == "route":
            if _is_being_made(queue):
                async with self._alone(name):
                    pass
                if queue.is_deleted or _is_being_made(queue):
                    raise QueueNotFoundError(f"the queue {name!r} is being made: one of its nodes is away")
            return await self._looking.route(queue, is_brief=bool(fields.get("brief")), answer=await plain(op, fields))
        if op == "info":
            return {**await plain(op, fields), "placed": [_shown(*each) for each in sorted(queue.places.items())]}
        if op in ("consumers", "locks"):
            return await self._looking.group(queue, fields, await plain(op, fields))
        if op in HomeMessages.OPS:
            return await self._messages.perform(op, queue, fields)
        name_of_channel = fields.get("channel")
        if op == "create_channel" and isinstance(name_of_channel, str) and name_of_channel in queue.channels:
            return await plain(op, fields)  # the same channel, or refused by what differs; the shares have it
        if op == "expand":
            fields = {**fields, "asker": asker}
        change = {
            "expand": self._expand,
            "delete": self._delete,
            "create_channel": self._create_channel,
            "delete_channel": self._change,
            "pause": self._change,
            "resume": self._change,
            "empty": self._change,
        }.get(op)
        if change is not None:
            async with self._alone(name):
                queue = await self._engine.loaded(self._realm_id, name)
                # Another queue of that name may be there since.
                return await (change(op, queue, fields, plain) if queue.places else plain(op, fields))
        raise QueuePlacedError(
            f"the queue {queue.name!r} is on several nodes; {op} works with one partition: "
            + ", ".join(f"{place.share} at {place.node}" for place in list(queue.places.values())[:4])
        )

    @asynccontextmanager
    async def _alone(self, name: str) -> AsyncGenerator[None, None]:
        lock = self._locks.setdefault(name, trio.Lock())
        async with lock:
            try:
                yield
            finally:
                if not lock.statistics().tasks_waiting:
                    del self._locks[name]

    # Making and removing

    async def _create(
        self, name: str, fields: Mapping[str, object], plain: "Plain", asker: PeerId | None
    ) -> dict[str, Any]:
        nodes = self._nodes(fields)
        book, key = self._engine.book, (self._realm_id, name)
        options = dict(cast(Mapping[str, object], fields.get("options") or {}))
        if nodes:
            options.setdefault("partitions", len(nodes))
        found = book.queues.get(key)
        if found is not None:
            return await self._create_again(found, nodes, {**fields, "options": options}, plain)
        share_name(name, 1, self._own)
        count = options.get("partitions")
        if not isinstance(count, int) or not nodes or not len(dict.fromkeys(nodes)) <= count <= _NODES_MAX:
            raise ValueError(f"{count} partitions for {len(dict.fromkeys(nodes))} nodes: every node gets one at least")
        wanted = self._engine.options_from(options)
        given = fields.get("access")
        access = None if given is None else parse_access(given, self._rights.of(*key))
        # Each node can do it: known before anything is made here.
        await self._shares.may_create({node: share_name(name, 0, self._own) for node in nodes}, asker)
        if key in book.queues:
            raise QueueExistsError(f"the queue {name!r} was made just now")
        # All at once, so that nothing is ever published to it as to a queue of this node alone.
        queue = book.create(*key, wanted)
        places = {
            partition: Place(node, share_name(name, partition, self._own))
            for partition, node in zip(queue.partition_ids, nodes_for(count, nodes), strict=True)
        }
        queue.place(places)
        queue.plan_growth(places)
        if access is not None:
            self._rights.set(*key, access)
        try:
            answer = await plain("create", {**fields, "options": options})
            await self._grow(queue)
        except Exception as error:
            await self._undo(queue, error, plain)
            raise
        finally:
            self._wake.set()  # if it was cancelled, it is ended like after a crash
        return {**answer, "placed": [_shown(*each) for each in sorted(places.items())]}

    async def _create_again(
        self, found: Queue, nodes: list[str], fields: Mapping[str, object], plain: "Plain"
    ) -> dict[str, Any]:
        """The same queue with the access that is given now, or refused by what differs."""
        there = {place.node: None for place in found.places.values()}
        if not there:
            raise QueueExistsError(
                f"the queue {found.name!r} is there already, on this node alone: its partitions cannot move to others; "
                "take another name, or delete it first"
            )
        more = [node for node in nodes if node not in there]
        if more:
            raise QueueExistsError(
                f"the queue {found.name!r} is there without the node {more[0]}: its partitions cannot move; "
                "new ones can be added there (expand)"
            )
        queue = await self._engine.loaded(self._realm_id, found.name)
        answer = await plain("create", fields)
        await self._grow(queue)
        if fields.get("access") is not None:
            options = {**options_as_dict(queue.options), "partitions": 1}
            await self._shares.ask_all(
                queue,
                "create",
                lambda place: {
                    "options": options,
                    "access": self._access(queue, place.node),
                },
            )
        return {**answer, "placed": [_shown(*each) for each in sorted(queue.places.items())]}

    async def _undo(self, queue: Queue, why: Exception, plain: "Plain") -> None:
        with trio.CancelScope(shield=True):
            found = await self._shares.ask_all(queue, "delete", no_fields, is_needed=False)
            left = [place for partition, place in all_places(queue).items() if partition not in found]
            for place in left:
                logger.warning(
                    "the queue %r could not be made (%s); its share %r at %s is removed when that node is back",
                    queue.name,
                    why,
                    place.share,
                    place.node,
                )
            self._left.remember(left)
            if not queue.is_deleted:
                await plain("delete", {"queue": queue.name})

    async def _delete(self, op: str, queue: Queue, fields: Mapping[str, object], plain: "Plain") -> dict[str, Any]:
        is_forced = fields.get("force", False)
        if not isinstance(is_forced, bool):
            raise ValueError("force is not true or false")
        if not is_forced:
            # All or nothing, as far as that is known before.
            await self._reach_others({place.node: place.share for place in all_places(queue).values()})
        found = await self._shares.ask_all(queue, op, no_fields, is_needed=not is_forced)
        left = [place for partition, place in all_places(queue).items() if partition not in found]
        for place in left:
            logger.warning(
                "the share %r at %s of a queue that was deleted by force is removed when that node is back",
                place.share,
                place.node,
            )
        self._left.remember(left)
        answer = await plain(op, {"queue": queue.name})
        return {**answer, "left": [place._asdict() for place in left]} if is_forced else answer

    async def _create_channel(
        self, op: str, queue: Queue, fields: Mapping[str, object], plain: "Plain"
    ) -> dict[str, Any]:
        """First in all shares: where it begins later, messages would be skipped. Those of ephemeral channels begin
        when a consumer comes there."""
        name = fields.get("channel")
        if not isinstance(name, str):
            raise ValueError("channel is missing or not a text")
        if is_ephemeral(name):
            answer = await plain(op, fields)
            await self._shares.ask_all(queue, op, lambda _place: fields, is_needed=False)
            return answer
        await self._reach_others({place.node: place.share for place in queue.places.values()})
        self._left.forget(all_places(queue).values(), name)
        try:
            await self._shares.ask_all(queue, op, lambda _place: fields)
            return await plain(op, fields)
        except Exception:
            if name not in queue.channels:
                # It would keep messages for nobody.
                found = await self._shares.ask_all(
                    queue, "delete_channel", lambda _place: {"channel": name}, is_needed=False
                )
                self._left.remember(
                    [place for partition, place in all_places(queue).items() if partition not in found], name
                )
            raise

    async def _change(self, op: str, queue: Queue, fields: Mapping[str, object], plain: "Plain") -> dict[str, Any]:
        found = await self._shares.ask_all(queue, op, lambda _place: fields)
        answer = await plain(op, fields)
        if op == "empty":
            answer["messages"] = sum(whole(each, "messages") for each in found.values())
        return answer

    def _nodes(self, fields: Mapping[str, object]) -> list[str]:
        given: object = fields.get("nodes") or cast(list[object], [])
        if not isinstance(given, list) or not all(isinstance(each, str) for each in cast(list[object], given)):
            raise ValueError("nodes is not a list of peer ids (or 'home')")
        nodes = cast(list[str], given)
        if len(nodes) > _NODES_MAX:
            raise ValueError(f"{len(nodes)} nodes: at most {_NODES_MAX}")
        return [self._own if each == "home" else str(parse_peer_id(each)) for each in nodes]

    async def _reach_others(self, shares: Mapping[str, str]) -> None:
        await self._shares.reach({node: share for node, share in shares.items() if node not in self._set})

    async def _make_share(self, queue: Queue, place: Place, low: int, high: int) -> None:
        options = {**options_as_dict(queue.options), "partitions": 1}
        access = self._access(queue, place.node)
        await self._shares.ask(place.node, "create", {"queue": place.share, "options": options, "access": access})
        await self._shares.ask(place.node, "serve", {"queue": place.share, "low": low, "high": high})

    def _access(self, queue: Queue, node: str) -> dict[str, object]:
        access = self._rights.of(self._realm_id, queue.name)
        return {
            "publish": who_of(access.publish, self._set),
            "consume": who_of(access.consume, self._set),
            # Its home alone makes it smaller, and deletes it.
            "administer": self._set,
        }

    @property
    def _set(self) -> list[str]:
        """This node, and those that may be the home instead of it, since they share its store."""
        return nodes_of_set(self._keeping, self._own)

    # Expansion

    async def _expand(self, op: str, queue: Queue, fields: Mapping[str, object], plain: "Plain") -> dict[str, Any]:
        await self._grow(queue)  # what a crash has interrupted
        count = fields.get("partitions")
        there = len(queue.partition_ids)
        if not isinstance(count, int) or isinstance(count, bool) or count > _NODES_MAX or count < there:
            raise ValueError(f"the queue {queue.name!r} has {there} partitions: it can only get more, not {count}")
        added: list[int] = []
        if count > there:
            nodes = self._nodes(fields) or list(dict.fromkeys(queue.places[each].node for each in sorted(queue.places)))
            ids = self._engine.book.new_partition_ids(count - there)
            planned = {
                each: Place(node, share_name(queue.name, each, self._own))
                for each, node in zip(ids, nodes_for(len(ids), nodes), strict=True)
            }
            changed, _origin = narrowed_by(queue.routes, ids)
            # While a node is away nothing is begun: no key may be left without a partition.
            touched = [planned.get(each) or queue.places[each] for each in changed]
            await self._reach_others({place.node: place.share for place in touched})
            asker = cast(PeerId | None, fields.get("asker"))
            await self._shares.may_create({place.node: place.share for place in planned.values()}, asker)
            _require_there(queue)
            queue.plan_growth(planned)
            self._engine.changed()
            try:
                await self._engine.flush()
                added = await self._grow(queue)
            finally:
                self._wake.set()  # what failed in the middle goes on without being asked
        route = await self._looking.route(queue, is_brief=True, answer=await plain("route", {"queue": queue.name}))
        return {"queue": queue.name, "added": added, **route}

    async def _grow(self, queue: Queue) -> list[int]:
        """End a creation or an expansion. Every step may be repeated. The table is told last: until then new keys of
        what moves are refused."""
        if not queue.growing:
            return []
        if _is_being_made(queue):
            for partition, (low, high) in ranges_of(queue.routes).items():
                await self._make_share(queue, queue.places[partition], low, high)
            _require_there(queue)
            queue.plan_growth({})
            self._engine.changed()
            await self._engine.flush()
            return []
        planned = dict(queue.growing)
        changed, _origin = narrowed_by(queue.routes, list(planned))
        last_seq: dict[int, int] = {}
        for partition, place in planned.items():
            await self._make_share(queue, place, *changed[partition])
            if queue.is_paused:
                await self._shares.ask(place.node, "pause", {"queue": place.share})
        for partition, (low, high) in changed.items():
            if partition not in planned:
                place = queue.places[partition]
                answer = await self._shares.ask(place.node, "serve", {"queue": place.share, "low": low, "high": high})
                last_seq[partition] = whole(answer, "last_seq")
        made: dict[tuple[int, str], None] = {}
        while missing := [
            (partition, name) for partition in planned for name in queue.channels if (partition, name) not in made
        ]:  # also those that consumers make meanwhile
            for partition, name in missing:
                made[partition, name] = None
                await self._make_channel(queue, planned[partition], name)
        _require_there(queue)
        added = queue.grow(last_seq)
        self._engine.changed()
        await self._engine.flush()
        self._wake.set()
        return added

    async def _make_channel(self, queue: Queue, place: Place, name: str) -> None:
        channel = queue.channels.get(name)
        if channel is None:
            return
        wanted: dict[str, object] = {"queue": place.share, "channel": name, "from_start": True}
        if channel.filter is not None:
            wanted["filter"] = channel.filter.text
        if channel.is_exclusive:
            wanted["exclusive"] = True
        await self._shares.ask(place.node, "create_channel", wanted)
        if channel.is_paused:
            await self._shares.ask(place.node, "pause", {"queue": place.share, "channel": name})

    def values(self) -> dict[str, int]:
        """See `HomeLooking.values`; nothing while another node keeps the queues."""
        engine = self._keeping.engine_if_here
        if engine is None:
            return self._looking.values([], 0)
        queues = [each for key, each in engine.book.queues.items() if key[0] == self._realm_id and each.places]
        return self._looking.values(queues, self._left.items)

    # Barriers

    async def run(self) -> None:
        """End what a crash interrupted, and let consumers into ranges whose barrier their channel has passed.

        Whatever a node answers, and whatever is deleted meanwhile, does not end it.
        """
        while True:
            await self._keeping.here()
            try:
                with self._keeping.term():
                    await self._keep()
            except* NotOwnerError as gone:
                logger.info("placed queues are another node's now: %s", gone.exceptions[0])

    async def _keep(self) -> None:
        """In one term."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._left.run)
            if self._keeping.is_shared:
                nursery.start_soon(self._set_told.run)
            while True:
                self._wake = trio.Event()
                placed = [key for key, found in self._engine.book.queues.items() if found.places]
                self._told = {key: why for key, why in self._told.items() if key in placed}
                for key in placed:
                    if key[0] == self._realm_id and key not in self._steps and _is_open(self._engine.book.queues[key]):
                        self._steps[key] = None
                        nursery.start_soon(self._follow, key)
                await self._wake.wait()

    async def _follow(self, key: tuple[str, str]) -> None:
        try:
            while await self._try_step(key):  # noqa: ASYNC110  (what it waits for is on other nodes)
                await trio.sleep(_POLL_S)
        finally:
            del self._steps[key]

    async def _try_step(self, key: tuple[str, str]) -> bool:
        """Whether there is more to do. Never raises but Cancelled; what is wrong is said once."""
        try:
            queue = await self._engine.loaded(*key)
            if not queue.places or not _is_open(queue):
                self._told.pop(key, None)
                return False
            await self._step(queue)
        except Exception as error:
            if key not in self._engine.book.queues:
                return False  # deleted meanwhile
            why = type(error).__name__
            if self._told.get(key) != why:
                self._told[key] = why
                if isinstance(error, Dep2pError):
                    logger.info("the queue %r waits for one of its nodes: %s", key[1], error)
                else:
                    logger.exception("the queue %r cannot go on; it is tried again", key[1])
        else:
            self._told.pop(key, None)
        return True

    async def _step(self, queue: Queue) -> None:
        if queue.growing:
            async with self._alone(queue.name):
                _require_there(queue)
                await self._grow(queue)
        floors = await self._looking.floors(queue)
        _require_there(queue)
        self._engine.book.at(self._engine.wall_us())
        queue.passed({name: _floor(each) for name, each in floors.items()})
        self._engine.changed()


Plain = Callable[[str, Mapping[str, object]], Awaitable[dict[str, Any]]]


def _floor(known: Mapping[int, int]) -> Callable[[int], int]:
    return lambda partition: known.get(partition, 0)


def _shown(partition: int, place: Place) -> dict[str, object]:
    return {"partition": partition, "node": place.node, "share": place.share}


def _is_being_made(queue: Queue) -> bool:
    """Its shares are not all there yet: they are planned like those of an expansion, and are in the table already."""
    return bool(queue.growing) and all(partition in queue.places for partition in queue.growing)


def _is_open(queue: Queue) -> bool:
    """A creation or an expansion is not complete, or a range waits behind its barrier."""
    return bool(queue.growing) or queue.routes.has_barriers


def _require_there(queue: Queue) -> None:
    if queue.is_deleted:
        raise QueueNotFoundError(f"the queue {queue.name!r} was deleted meanwhile")
