"""The controller of queues whose partitions are on several nodes: it makes and expands them, and assigns partitions to
consumers.

A partition is a queue of its own on its node (a shard), so that messages never pass through the controller. The
controller keeps the route table, and its exclusive channel assigns partitions to consumers; locks and epochs are the
shards' own.
"""

import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final, Protocol, cast

import trio
from msgspec.structs import replace

from dep2p.concurrency.exception_groups import first_error
from dep2p.errors import (
    Dep2pError,
    NotOwnerError,
    QueueExistsError,
    QueueIsDistributedError,
    QueueNotFoundError,
)
from dep2p.protocols.queues.admin import (
    NODES_MAX,
    AccessChange,
    AdminReply,
    AdminRequest,
    CreateChannel,
    CreateQueue,
    DeleteChannel,
    DeleteDeadLetters,
    DeleteQueue,
    DescribeQueue,
    DescribeRoute,
    Done,
    EmptyQueue,
    ExpandQueue,
    ExportMessages,
    ListConsumers,
    ListDeadLetters,
    ListLocks,
    MessageCount,
    PauseQueue,
    PeekMessages,
    PendingDeletion,
    QueueDeleted,
    QueueExpanded,
    QueueInfo,
    QueueRequest,
    R,
    ReplayDeadLetters,
    ResumeQueue,
    ServeRange,
    ShardInfo,
    operation_of,
)
from dep2p.protocols.queues.names import is_ephemeral
from dep2p.protocols.queues.ordering.placement import ShardLocation, narrowed_by, nodes_for, ranges_of, shard_name
from dep2p.protocols.queues.queue import Queue
from dep2p.queues.access import Rights, parse_access
from dep2p.queues.broker.admin import expanded
from dep2p.queues.broker.engine import QueueEngine
from dep2p.queues.broker.ownership import StoreOwnership
from dep2p.queues.distributed.controller_inspector import ControllerInspector
from dep2p.queues.distributed.controller_messages import ControllerMessages
from dep2p.queues.distributed.failover_sync import FailoverGroupSync, create_shard, nodes_of_group, who_of
from dep2p.queues.distributed.interfaces import Asker
from dep2p.queues.distributed.pending_deletions import PendingDeletions
from dep2p.queues.distributed.shard_client import ShardClient, all_locations
from dep2p.types import PeerId, RealmId, parse_peer_id

logger: logging.Logger = logging.getLogger("dep2p.queues")

_POLL_S: Final = 0.25
"""Seconds between two looks while a range waits behind its barrier, or a creation or an expansion is not complete."""


class QueueController:
    """The controller of those distributed queues of one realm that this node made."""

    def __init__(
        self, ownership: StoreOwnership, rights: Rights, realm_id: RealmId, own: PeerId, at: Callable[[str], Asker]
    ) -> None:
        self._ownership = ownership
        self._rights = rights
        self._realm_id = realm_id
        self._own = own
        self._shards = ShardClient(at)
        self._inspector = ControllerInspector(self._shards)
        self._failover_sync = FailoverGroupSync(ownership, realm_id, own, self._shards, self._alone, self._access)
        self._messages = ControllerMessages(self._shards)
        self._pending_deletions = PendingDeletions(ownership, realm_id, self._shards, self._alone)
        self._wake = trio.Event()
        self._steps: dict[tuple[str, str], None] = {}
        """Queues with an open step, each followed by its own task: a node that hangs holds up no queue without it."""
        self._locks: dict[str, trio.Lock] = {}
        """One lock by queue name: changes of a queue are made one after another."""
        self._reported: dict[tuple[str, str], str] = {}
        """The last error of each queue's step, which was logged."""

    @property
    def _engine(self) -> QueueEngine:
        """The engine. Raises NotOwnerError while another node is the broker of the queues."""
        return self._ownership.engine

    # Requests

    def handles(self, request: AdminRequest[AdminReply]) -> bool:
        """Whether a request is about a distributed queue, or makes one."""
        if not isinstance(request, QueueRequest):
            return False
        found = self._engine.registry.queues.get((self._realm_id, request.queue))
        is_distributed = found is not None and bool(found.locations)
        return is_distributed or (isinstance(request, CreateQueue) and bool(request.nodes))

    async def perform(
        self, request: AdminRequest[R], perform_locally: "PerformLocally", asker: PeerId | None = None
    ) -> R:
        """Carry out a request that this controller `handles`. ``perform_locally`` does the same with a queue of this
        node alone; ``asker``: None for this node itself.

        Raises QueueIsDistributedError for a request that takes one partition at a time, and what ``perform_locally``
        and the nodes raise.
        """
        assert isinstance(request, QueueRequest)
        return cast(R, await self._perform(cast("QueueRequest[AdminReply]", request), perform_locally, asker))

    async def _perform(
        self, request: QueueRequest[AdminReply], perform_locally: "PerformLocally", asker: PeerId | None
    ) -> AdminReply:
        if isinstance(request, CreateQueue):
            async with self._alone(request.queue):
                return await self._create(request, perform_locally, asker)
        queue = await self._engine.loaded(self._realm_id, request.queue)
        match request:
            case DescribeRoute():
                await self._require_made(queue)
                return await self._inspector.route(queue, await perform_locally(request), is_brief=request.brief)
            case DescribeQueue():
                return replace(await perform_locally(request), shards=_shards(queue.locations))
            case ListConsumers():
                return await self._inspector.consumers(queue, request.channel, await perform_locally(request))
            case ListLocks():
                return await self._inspector.locks(queue, request.channel, await perform_locally(request))
            case PeekMessages():
                return await self._messages.peek(queue, request)
            case ExportMessages():
                return await self._messages.export(queue, request)
            case ListDeadLetters():
                return await self._messages.dead_letters(queue, request)
            case ReplayDeadLetters() | DeleteDeadLetters():
                return await self._messages.act(queue, request)
            case CreateChannel() if request.channel in queue.channels:
                # The same channel, or it is refused since it differs; the shards have it.
                return await perform_locally(request)
            case _ if isinstance(request, _CHANGES):
                async with self._alone(request.queue):
                    # Another queue may have that name since.
                    queue = await self._engine.loaded(self._realm_id, request.queue)
                    if not queue.locations:
                        return await perform_locally(request)
                    return await self._change(queue, request, perform_locally, asker)
            case _:
                raise QueueIsDistributedError(
                    f"the queue {queue.name!r} is on several nodes; {operation_of(request)} works with one partition: "
                    + ", ".join(
                        f"{location.shard} at {location.node}" for location in list(queue.locations.values())[:4]
                    )
                )

    async def _require_made(self, queue: Queue) -> None:
        if _is_being_made(queue):
            async with self._alone(queue.name):
                pass
            if queue.is_deleted or _is_being_made(queue):
                raise QueueNotFoundError(f"the queue {queue.name!r} is being made: one of its nodes is away")

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

    async def _create(self, request: CreateQueue, perform_locally: "PerformLocally", asker: PeerId | None) -> QueueInfo:
        name, nodes = request.queue, self._nodes(request.nodes)
        registry, key = self._engine.registry, (self._realm_id, request.queue)
        options = dict(request.options)
        if nodes:
            options.setdefault("partitions", len(nodes))
        local = replace(request, options=options, nodes=())
        found = registry.queues.get(key)
        if found is not None:
            return await self._create_again(found, nodes, local, perform_locally)
        shard_name(name, 1, self._own)
        count = options.get("partitions")
        if not isinstance(count, int) or not nodes or not len(dict.fromkeys(nodes)) <= count <= NODES_MAX:
            raise ValueError(f"{count} partitions for {len(dict.fromkeys(nodes))} nodes: every node gets one at least")
        wanted = self._engine.options_from(options)
        access = None if request.access is None else parse_access(request.access, self._rights.of(*key))
        # Nothing is made before each node has said that it can make its shards.
        await self._shards.may_create({node: shard_name(name, 0, self._own) for node in nodes}, asker)
        if key in registry.queues:
            raise QueueExistsError(f"the queue {name!r} was made just now")
        # All at once, so that nothing is ever published to it as to a queue of this node alone.
        queue = registry.create(*key, wanted)
        locations = {
            partition: ShardLocation(node, shard_name(name, partition, self._own))
            for partition, node in zip(queue.partition_ids, nodes_for(count, nodes), strict=True)
        }
        queue.set_locations(locations)
        queue.plan_expansion(locations)
        if access is not None:
            self._rights.set(*key, access)
        try:
            reply = await perform_locally(local)
            await self._complete_expansion(queue)
        except Exception as error:
            await self._undo(queue, error, perform_locally)
            raise
        finally:
            self._wake.set()  # a cancelled creation is completed as after a crash
        return replace(reply, shards=_shards(locations))

    async def _create_again(
        self, found: Queue, nodes: Sequence[str], request: CreateQueue, perform_locally: "PerformLocally"
    ) -> QueueInfo:
        """The same queue with the access that is given now; it is refused if it differs in anything else."""
        there = {location.node: None for location in found.locations.values()}
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
        reply = await perform_locally(request)
        await self._complete_expansion(queue)
        if request.access is not None:
            await self._shards.ask_all(
                queue, lambda location: create_shard(queue, location, self._access(queue, location.node))
            )
        return replace(reply, shards=_shards(queue.locations))

    async def _undo(self, queue: Queue, why: Exception, perform_locally: "PerformLocally") -> None:
        with trio.CancelScope(shield=True):
            found = await self._delete_shards(queue, is_needed=False)
            unreached = [location for partition, location in all_locations(queue).items() if partition not in found]
            for location in unreached:
                logger.warning(
                    "the queue %r could not be made (%s); its shard %r at %s is removed when that node is back",
                    queue.name,
                    why,
                    location.shard,
                    location.node,
                )
            self._pending_deletions.remember(unreached)
            if not queue.is_deleted:
                await perform_locally(DeleteQueue(queue=queue.name))

    async def _delete_shards(self, queue: Queue, *, is_needed: bool) -> dict[int, QueueDeleted]:
        return await self._shards.ask_all(
            queue, lambda location: DeleteQueue(queue=location.shard), gone=QueueDeleted(), is_needed=is_needed
        )

    async def _delete(self, queue: Queue, request: DeleteQueue, perform_locally: "PerformLocally") -> QueueDeleted:
        if not request.force:
            # All nodes or none, as far as that is known before.
            await self._reach_others({location.node: location.shard for location in all_locations(queue).values()})
        found = await self._delete_shards(queue, is_needed=not request.force)
        unreached = [location for partition, location in all_locations(queue).items() if partition not in found]
        for location in unreached:
            logger.warning(
                "the shard %r at %s of a queue that was deleted by force is removed when that node is back",
                location.shard,
                location.node,
            )
        self._pending_deletions.remember(unreached)
        reply = await perform_locally(DeleteQueue(queue=queue.name))
        if not request.force:
            return reply
        pending = tuple(PendingDeletion(node=location.node, shard=location.shard) for location in unreached)
        return replace(reply, pending_deletions=pending)

    async def _create_channel(self, queue: Queue, request: CreateChannel, perform_locally: "PerformLocally") -> Done:
        """Make a channel, first in all shards: messages would be skipped where it begins later. Ephemeral channels
        begin when a consumer comes."""
        name = request.channel

        def of_shard(location: ShardLocation) -> CreateChannel:
            return replace(request, queue=location.shard)

        if is_ephemeral(name):
            reply = await perform_locally(request)
            await self._shards.ask_all(queue, of_shard, is_needed=False)
            return reply
        await self._reach_others({location.node: location.shard for location in queue.locations.values()})
        self._pending_deletions.forget(all_locations(queue).values(), name)
        try:
            await self._shards.ask_all(queue, of_shard, gone=Done())
            return await perform_locally(request)
        except Exception:
            if name not in queue.channels:
                # It would keep messages that no consumer takes.
                found = await self._shards.ask_all(
                    queue,
                    lambda location: DeleteChannel(queue=location.shard, channel=name),
                    gone=Done(),
                    is_needed=False,
                )
                self._pending_deletions.remember(
                    [location for partition, location in all_locations(queue).items() if partition not in found], name
                )
            raise

    async def _change(
        self, queue: Queue, request: "_Change", perform_locally: "PerformLocally", asker: PeerId | None
    ) -> AdminReply:
        if isinstance(request, ExpandQueue):
            return await self._expand(queue, request, perform_locally, asker)
        if isinstance(request, DeleteQueue):
            return await self._delete(queue, request, perform_locally)
        if isinstance(request, CreateChannel):
            return await self._create_channel(queue, request, perform_locally)
        if isinstance(request, EmptyQueue):
            dropped = await self._shards.ask_all(
                queue, lambda location: replace(request, queue=location.shard), gone=MessageCount(messages=0)
            )
            await perform_locally(request)
            return MessageCount(messages=sum(each.messages for each in dropped.values()))
        await self._shards.ask_all(queue, lambda location: replace(request, queue=location.shard), gone=Done())
        return await perform_locally(request)

    def _nodes(self, given: Sequence[str]) -> list[str]:
        return [self._own if each == "home" else str(parse_peer_id(each)) for each in given]

    async def _reach_others(self, shards: Mapping[str, str]) -> None:
        await self._shards.reach({node: shard for node, shard in shards.items() if node not in self._set})

    async def _make_shard(self, queue: Queue, location: ShardLocation, low: int, high: int) -> None:
        access = self._access(queue, location.node)
        await self._shards.ask(location.node, create_shard(queue, location, access))
        await self._shards.ask(location.node, ServeRange(queue=location.shard, low=low, high=high))

    def _access(self, queue: Queue, node: str) -> AccessChange:
        access = self._rights.of(self._realm_id, queue.name)
        return AccessChange(
            publish=who_of(access.publish, self._set),
            consume=who_of(access.consume, self._set),
            # Only the shard's controller makes it smaller, and deletes it.
            administer=tuple(self._set),
        )

    @property
    def _set(self) -> list[str]:
        """List this node, and the nodes that share its store: any of them may be the controller."""
        return nodes_of_group(self._ownership, self._own)

    # Expansion

    async def _expand(
        self, queue: Queue, request: ExpandQueue, perform_locally: "PerformLocally", asker: PeerId | None
    ) -> QueueExpanded:
        await self._complete_expansion(queue)  # an expansion that a crash has interrupted
        count, there = request.partitions, len(queue.partition_ids)
        if count < there:
            raise ValueError(f"the queue {queue.name!r} has {there} partitions: it can only get more, not {count}")
        added: list[int] = []
        if count > there:
            nodes = self._nodes(request.nodes) or list(
                dict.fromkeys(queue.locations[each].node for each in sorted(queue.locations))
            )
            ids = self._engine.registry.new_partition_ids(count - there)
            planned = {
                each: ShardLocation(node, shard_name(queue.name, each, self._own))
                for each, node in zip(ids, nodes_for(len(ids), nodes), strict=True)
            }
            changed, _origin = narrowed_by(queue.routes, ids)
            # Nothing begins while a node is away: no key may be left without a partition.
            touched = [planned.get(each) or queue.locations[each] for each in changed]
            await self._reach_others({location.node: location.shard for location in touched})
            await self._shards.may_create({location.node: location.shard for location in planned.values()}, asker)
            _require_there(queue)
            queue.plan_expansion(planned)
            self._engine.changed()
            try:
                await self._engine.flush()
                added = await self._complete_expansion(queue)
            finally:
                self._wake.set()  # what failed in the middle goes on without being asked
        local = await perform_locally(DescribeRoute(queue=queue.name))
        return expanded(queue.name, added, await self._inspector.route(queue, local, is_brief=True))

    async def _complete_expansion(self, queue: Queue) -> list[int]:
        """Complete a creation or an expansion. Every step may be repeated. The table is stored last: until then shards
        refuse new messages of moved keys."""
        if not queue.pending_expansion:
            return []
        if _is_being_made(queue):
            for partition, (low, high) in ranges_of(queue.routes).items():
                await self._make_shard(queue, queue.locations[partition], low, high)
            _require_there(queue)
            queue.plan_expansion({})
            self._engine.changed()
            await self._engine.flush()
            return []
        planned = dict(queue.pending_expansion)
        changed, _origin = narrowed_by(queue.routes, list(planned))
        last_seq: dict[int, int] = {}
        for partition, location in planned.items():
            await self._make_shard(queue, location, *changed[partition])
            if queue.is_paused:
                await self._shards.ask(location.node, PauseQueue(queue=location.shard, all_channels=True))
        for partition, (low, high) in changed.items():
            if partition not in planned:
                location = queue.locations[partition]
                served = await self._shards.ask(location.node, ServeRange(queue=location.shard, low=low, high=high))
                last_seq[partition] = served.last_seq
        made: dict[tuple[int, str], None] = {}
        while missing := [
            (partition, name) for partition in planned for name in queue.channels if (partition, name) not in made
        ]:  # also those that consumers make meanwhile
            for partition, name in missing:
                made[partition, name] = None
                await self._make_channel(queue, planned[partition], name)
        _require_there(queue)
        added = queue.complete_expansion(last_seq)
        self._engine.changed()
        await self._engine.flush()
        self._wake.set()
        return added

    async def _make_channel(self, queue: Queue, location: ShardLocation, name: str) -> None:
        channel = queue.channels.get(name)
        if channel is None:
            return
        await self._shards.ask(
            location.node,
            CreateChannel(
                queue=location.shard,
                channel=name,
                from_start=True,
                filter="" if channel.filter is None else channel.filter.text,
                exclusive=channel.is_exclusive,
            ),
        )
        if channel.is_paused:
            await self._shards.ask(location.node, PauseQueue(queue=location.shard, channel=name))

    def values(self) -> dict[str, int]:
        """See `ControllerInspector.values`; empty while another node is the broker of the queues."""
        engine = self._ownership.engine_if_here
        if engine is None:
            return self._inspector.values([], 0)
        queues = [each for key, each in engine.registry.queues.items() if key[0] == self._realm_id and each.locations]
        return self._inspector.values(queues, self._pending_deletions.items)

    # Barriers

    async def run(self) -> None:
        """Complete steps that a crash interrupted, and let consumers into ranges whose barrier their channel has
        passed.

        No answer of a node, and no deletion meanwhile, ends it.
        """
        while True:
            await self._ownership.here()
            try:
                with self._ownership.during_term():
                    await self._run_term()
            except* NotOwnerError as gone:
                logger.info("distributed queues are another node's now: %s", first_error(gone))

    async def _run_term(self) -> None:
        """Do the same in one term."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._pending_deletions.run)
            if self._ownership.is_shared:
                nursery.start_soon(self._failover_sync.run)
            while True:
                self._wake = trio.Event()
                distributed = [key for key, found in self._engine.registry.queues.items() if found.locations]
                self._reported = {key: why for key, why in self._reported.items() if key in distributed}
                for key in distributed:
                    if (
                        key[0] == self._realm_id
                        and key not in self._steps
                        and _is_open(self._engine.registry.queues[key])
                    ):
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
        """Do one step of a queue. Returns whether there is more to do. Raises nothing but Cancelled; it logs an error
        once."""
        try:
            queue = await self._engine.loaded(*key)
            if not queue.locations or not _is_open(queue):
                self._reported.pop(key, None)
                return False
            await self._step(queue)
        except Exception as error:
            if key not in self._engine.registry.queues:
                return False  # deleted meanwhile
            why = type(error).__name__
            if self._reported.get(key) != why:
                self._reported[key] = why
                if isinstance(error, Dep2pError):
                    logger.info("the queue %r waits for one of its nodes: %s", key[1], error)
                else:
                    logger.exception("the queue %r cannot go on; it is tried again", key[1])
        else:
            self._reported.pop(key, None)
        return True

    async def _step(self, queue: Queue) -> None:
        if queue.pending_expansion:
            async with self._alone(queue.name):
                _require_there(queue)
                await self._complete_expansion(queue)
        ack_floors = await self._inspector.ack_floors(queue)
        _require_there(queue)
        self._engine.registry.at(self._engine.wall_us())
        queue.passed({name: _ack_floor(each) for name, each in ack_floors.items()})
        self._engine.changed()


class PerformLocally(Protocol):
    """Carries out a request with a queue of this node alone."""

    async def __call__(self, request: AdminRequest[R]) -> R:
        """See `BrokerAdmin.perform`."""
        ...


_Change = ExpandQueue | DeleteQueue | CreateChannel | DeleteChannel | PauseQueue | ResumeQueue | EmptyQueue
_CHANGES: Final = (ExpandQueue, DeleteQueue, CreateChannel, DeleteChannel, PauseQueue, ResumeQueue, EmptyQueue)
"""Requests that change a queue: they run one after another."""


def _ack_floor(known: Mapping[int, int]) -> Callable[[int], int]:
    return lambda partition: known.get(partition, 0)


def _shards(locations: Mapping[int, ShardLocation]) -> tuple[ShardInfo, ...]:
    return tuple(
        ShardInfo(partition=partition, node=location.node, shard=location.shard)
        for partition, location in sorted(locations.items())
    )


def _is_being_made(queue: Queue) -> bool:
    """Whether the queue's shards are not all made yet. They are planned like those of an expansion, and are in the
    table already."""
    return bool(queue.pending_expansion) and all(partition in queue.locations for partition in queue.pending_expansion)


def _is_open(queue: Queue) -> bool:
    """Whether a creation or an expansion is not complete, or a range waits behind its barrier."""
    return bool(queue.pending_expansion) or queue.routes.has_barriers


def _require_there(queue: Queue) -> None:
    if queue.is_deleted:
        raise QueueNotFoundError(f"the queue {queue.name!r} was deleted meanwhile")
