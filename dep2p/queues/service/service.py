"""The queues of one joined realm: those that this node serves for its members, and those of other members."""

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final, cast

import trio

from dep2p.concurrency.contained import run_contained
from dep2p.errors import (
    Dep2pError,
    ProtocolError,
    QueueExistsError,
    QueueNotFoundError,
    RequestTimeoutError,
    StreamClosedError,
)
from dep2p.host.interface import ByteStream, Connection, Host
from dep2p.limits import Limits
from dep2p.links.link import LinkPool
from dep2p.protocols.queues.admin import (
    AdminReply,
    AdminRequest,
    CreateQueue,
    DeleteQueue,
    MayCreate,
    QueueRequest,
    R,
    ReadFailoverGroup,
    ReceiveMessages,
)
from dep2p.protocols.queues.ordering.placement import is_shard_of
from dep2p.protocols.queues.wire import frames as wire
from dep2p.protocols.queues.wire.admin import encode_admin
from dep2p.protocols.queues.wire.exclusive import MEMBER_BYTES
from dep2p.protocols.queues.wire.frames import WireMessage, queue_protocol
from dep2p.protocols.wire.frame import encode_frame
from dep2p.queues.access import Right, Rights
from dep2p.queues.api.queues import Queues
from dep2p.queues.broker.admin import RIGHTS, BrokerAdmin
from dep2p.queues.broker.connection import ServedQueueLink
from dep2p.queues.broker.engine import QueueEngine
from dep2p.queues.broker.local_consumer import LocalConsumer
from dep2p.queues.broker.ownership import StoreOwnership
from dep2p.queues.client_metrics import FlowCounts
from dep2p.queues.consumer import Consumer
from dep2p.queues.distributed.controller import QueueController
from dep2p.queues.distributed.queue import DistributedQueue, QueueNodes
from dep2p.queues.remote.abandoned_receives import Receivings
from dep2p.queues.remote.broker_directory import BrokerDirectory, reply_of
from dep2p.queues.remote.consumer import RemoteConsumer
from dep2p.queues.remote.exclusive_port import RemotePort
from dep2p.queues.remote.link import QueueLink
from dep2p.queues.remote.publisher import PeerPublisher
from dep2p.queues.service.member_quotas import QueueQuotas
from dep2p.queues.service.realm_queues import LocalQueues, RealmQueues, RemoteQueues
from dep2p.queues.types import SubscribeOptions, new_messages
from dep2p.realm.interface import RealmGate
from dep2p.types import PeerId, RealmId, Rng, parse_peer_id

logger: logging.Logger = logging.getLogger("dep2p.io")

_LINKS_PER_PEER: Final = 4
"""Streams of one peer. A peer has more than one only for a moment, when it reconnects."""
_IDLE_CHECK_S: Final = 30.0
_BYTES_MAX_DEFAULT: Final = 8_388_608
_DRAIN_STEP_S: Final = 0.02
_DISTRIBUTED_MAX: Final = 1_000
"""Tables of queues on several nodes; the oldest is forgotten, and asked for again."""


class QueueService:
    """The queues of one realm. Everything but `run` may be called while `run` runs in another task."""

    def __init__(
        self,
        host: Host,
        gate: RealmGate,
        realm_id: RealmId,
        limits: Limits,
        ownership: StoreOwnership,
        rights: Rights,
        *,
        rng: Rng,
    ) -> None:
        self.protocol: str = queue_protocol(realm_id)
        self._host = host
        self._gate = gate
        self._realm_id = realm_id
        self._limits = limits
        self._ownership = ownership
        self._rights = rights
        self._rng = rng
        self._counters: Counter[str] = Counter()
        self._served: dict[ServedQueueLink, None] = {}
        self._quotas = QueueQuotas(limits, ownership)
        self._publishers: dict[PeerId, PeerPublisher] = {}
        self._publisher_scopes: dict[PeerId, trio.CancelScope] = {}
        self._consumers: dict[RemoteConsumer, None] = {}
        self._nursery: trio.Nursery | None = None
        self._is_draining = False
        self.controller: QueueController = QueueController(ownership, rights, realm_id, host.peer_id, self._queues_at)
        """The controller of queues whose partitions are on several nodes."""
        self._distributed: dict[tuple[PeerId, str], DistributedQueue] = {}
        self.receivings: Receivings = Receivings(self._counters, self._start_soon, rng)
        self._pool: LinkPool[QueueLink] = LinkPool(gate, self.protocol, limits, self._counters, self._make_link)
        self._broker_directory = BrokerDirectory(
            self._pool, host.peer_id, self._counters, lambda: ownership.is_shared and ownership.is_here
        )

    # Life

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled."""
        unsubscribe = self._gate.subscribe_unverified(self._on_unverified)
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                self._pool.serve_in(nursery)
                self._host.set_stream_handler(self.protocol, self._accept)
                nursery.start_soon(self.controller.run)
                nursery.start_soon(self._broker_directory.run)
                task_status.started()
                while True:
                    await trio.sleep(_IDLE_CHECK_S)
                    self._pool.close_idle()
                    self._end_idle_publishers()
        finally:
            self._nursery = None
            self._pool.serve_in(None)
            unsubscribe()
            self._host.remove_stream_handler(self.protocol)

    async def drain(self) -> None:
        """Take no new streams and deliver nothing more. Wait at most ``drain_timeout_s`` until other nodes have
        answered our publishes, and have settled our messages."""
        self._is_draining = True
        for served in self._served:
            served.drain()
        with trio.move_on_after(self._limits.drain_timeout_s):
            while self._is_busy:  # noqa: ASYNC110  (once in a life)
                await trio.sleep(_DRAIN_STEP_S)
            for link in self._pool.links.copy().values():
                await link.flush()  # for results of consumers that were closed a moment ago

    @property
    def _is_busy(self) -> bool:
        return any(not publisher.is_idle for publisher in self._publishers.values()) or any(
            link.is_holding for link in self._served
        )

    def _on_unverified(self, connection: Connection) -> None:
        for link in [*self._served, *self._pool.links.values()]:
            if link.connection.id == connection.id:
                link.lose_membership()

    def _make_link(self, stream: ByteStream) -> QueueLink:
        self._broker_directory.linked()
        return QueueLink(stream, self._gate, self._limits, self._counters, self._pool.forget)

    def _end_idle_publishers(self) -> None:
        links = self._pool.links
        for peer in [
            peer for peer, each in self._publishers.items() if each.is_idle and each.broker_route.at not in links
        ]:
            self._publisher_scopes.pop(peer).cancel()
            del self._publishers[peer]

    # Serving

    async def _accept(self, stream: ByteStream) -> None:
        nursery = self._nursery
        peer = stream.connection.peer
        if nursery is None or self._is_draining:
            stream.reset()
        elif sum(link.peer == peer for link in self._served) >= _LINKS_PER_PEER:
            self._counters["links_refused_per_peer_max"] += 1
            stream.reset()
        else:
            nursery.start_soon(run_contained, partial(self._serve, stream), "a served queue link")

    async def _serve(self, stream: ByteStream) -> None:
        link = ServedQueueLink(stream, self._gate, self._limits, self._counters, self, self._ownership.fairness)
        self._served[link] = None
        self._counters["links_served"] += 1
        try:
            if not self._gate.is_verified(stream.connection):
                link.lose_membership()
            await link.serve()
        finally:
            del self._served[link]

    @property
    def _engine(self) -> QueueEngine:
        """The engine. Raises NotOwnerError while another node is the broker of the queues."""
        return self._ownership.engine

    def publish_soon(
        self,
        peer: PeerId,
        name: str,
        messages: Sequence[WireMessage],
        publisher: tuple[bytes, int] | None,
        on_done: Callable[[Sequence[tuple[int, int]], Dep2pError | None], None],
    ) -> None:
        """See `QueueHost`."""
        engine = self._engine
        self._require(name, peer, Right.PUBLISH)
        self._quotas.admit_publish(peer, self._realm_id, name, messages)
        engine.publish_soon(self._realm_id, name, new_messages(messages), publisher, on_done)

    async def subscribe(
        self,
        peer: PeerId,
        name: str,
        channel: str,
        options: SubscribeOptions,
        *,
        member: bytes = b"",
    ) -> LocalConsumer:
        """See `QueueHost`."""
        engine = self._engine
        self._require(name, peer, Right.CONSUME)
        return await engine.subscribe(self._realm_id, name, channel, options, owner=f"peer {peer}", member=member)

    async def administer(self, peer: PeerId, request: AdminRequest[R]) -> R:
        """See `QueueHost`."""
        if isinstance(request, ReadFailoverGroup):
            return cast(R, self._ownership.failover_group())
        with self._ownership.during_term():
            self._require_rights(request, peer)
            if peer not in self._ownership.nodes:
                self._quotas.admit_change(peer, self._realm_id, request)
            return await self._perform(request, f"peer {peer}", peer)

    def _require_rights(self, request: AdminRequest[AdminReply], peer: PeerId | None) -> None:
        """Check the rights of a request. Raises QueueAccessError, QueueExistsError, QueueNotFoundError. ``peer``: None
        for a program of this node."""
        if isinstance(request, CreateQueue | MayCreate):
            self._require_create(request, peer)
        elif isinstance(request, QueueRequest) and peer is not None:
            right = RIGHTS[type(request)]
            if right is not Right.DESCRIBE:
                self._require(request.queue, peer, right)
            if isinstance(request, DeleteQueue):
                try:
                    self._require_own_shard(request.queue, peer)
                except QueueExistsError as error:  # the controller has no shard there, and could not make it
                    raise QueueNotFoundError(str(error)) from None

    def _require(self, name: str, peer: PeerId, right: Right) -> None:
        """Check one right. All nodes that share the store count as its owners."""
        if peer not in self._ownership.nodes:
            self._rights.require(self._realm_id, name, peer, right)

    def _require_create(self, request: CreateQueue | MayCreate, peer: PeerId | None) -> None:
        """Raises QueueAccessError unless the asker may make that queue, and the member for whom the controller of a
        distributed queue asks; and administer one that is there, if the request gives it another access: to make it
        once more, as programs do at each start, changes nothing else. ``peer``: None for this node itself."""
        asker = request.asker if isinstance(request, MayCreate) else None
        changes_access = (
            isinstance(request, CreateQueue)
            and request.access is not None
            and (self._realm_id, request.queue) in self._engine.registry.queues
        )
        for each in (peer, None if asker is None else parse_peer_id(asker)):
            if each is not None and not self._is_own(each):
                self._rights.require_create(each)
                if changes_access:
                    self._rights.require(self._realm_id, request.queue, each, Right.ADMINISTER)
        self._require_own_shard(request.queue, peer)

    def _require_own_shard(self, name: str, controller: PeerId | None) -> None:
        """A member that makes a queue of the name of a controller's shard could read it, whatever access the controller
        sets later.

        Raises QueueExistsError. None: this node is the controller.
        """
        if not is_shard_of(name, controller or self._host.peer_id):
            return
        found = self._engine.registry.queues.get((self._realm_id, name))
        if found is not None and found.made_by != (controller or ""):
            raise QueueExistsError(
                f"the queue {name!r} is there, and was not made by {controller or 'this node'}, whose partition would "
                "have that name: export what is in it, then delete it (`dep2p queue rm`)"
            )

    async def _perform(self, request: AdminRequest[R], owner: str, asker: PeerId | None = None) -> R:
        local = BrokerAdmin(self._engine, self._rights, self._realm_id, owner)
        if self.controller.handles(request):
            return await self.controller.perform(request, local.perform, asker)
        return await local.perform(request)

    # Requests to others

    def active_broker(self) -> "RemoteQueues | None":
        """The queues at the present broker, while that is another node that shares the store; else None."""
        if self._ownership.is_here:
            return None
        others = [
            each for each in (self._ownership.owner, *self._ownership.nodes) if each not in ("", self._host.peer_id)
        ]
        if not others:
            return None
        self._broker_directory.to(PeerId(others[0])).failover_group.add([*others, self._host.peer_id])
        return self.at(PeerId(others[0]))

    def own(self) -> LocalQueues:
        """The queues that this node serves for the realm."""
        return LocalQueues(self._ownership, self._rights, self._realm_id, self)

    async def perform_own(self, request: AdminRequest[R]) -> R:
        """Carry out an administrative request of a program of this node."""
        with self._ownership.during_term():
            self._require_rights(request, None)
            return await self._perform(request, "local")

    def _queues_at(self, node: str) -> Queues:
        peer = parse_peer_id(node)
        return self.own() if self._is_own(peer) else self.at(peer)

    def _is_own(self, peer: PeerId) -> bool:
        """Whether a peer is this node, or shares its store: this node is the broker of its queues, too."""
        return peer == self._host.peer_id or peer in self._ownership.nodes

    def _queues_of_shard(self, node: str) -> RealmQueues:
        """Return the queues of a node that stores a shard. This node, too, counts as a member like others: the
        controller may be any node."""
        peer = parse_peer_id(node)
        if not self._is_own(peer):
            return self.at(peer)
        return LocalQueues(self._ownership, self._rights, self._realm_id, self, as_member=self._host.peer_id)

    def _is_up(self, node: str) -> bool:
        peer = parse_peer_id(node)
        if self._is_own(peer):
            return self._ownership.is_here or self._is_up_at(self._ownership.owner)
        return self._is_up_at(self._broker_directory.to(peer).at)

    def _is_up_at(self, peer: str) -> bool:
        return bool(peer) and self._gate.verified_connection(PeerId(peer)) is not None

    def distributed(self, peer: PeerId | None, name: str) -> DistributedQueue:
        """Return a queue whose partitions are on several nodes, by its controller; None: this node."""
        peer = peer or self._host.peer_id
        found = self._distributed.get((peer, name))
        if found is None:
            controller = self.own() if self._is_own(peer) else self.at(peer)
            found = DistributedQueue(
                name,
                QueueNodes(lambda: self._controllers(peer), controller, self._queues_of_shard, self._is_up),
                self._counters,
                self.receivings,
                self._start_soon,
            )
            while len(self._distributed) >= _DISTRIBUTED_MAX:
                del self._distributed[next(iter(self._distributed))]
            self._distributed[peer, name] = found
        return found

    def _controllers(self, peer: PeerId) -> Sequence[str]:
        if self._is_own(peer):
            return [*dict.fromkeys([peer, *self._ownership.nodes])]
        return self._broker_directory.to(peer).failover_group.nodes

    def known_distributed(self, peer: PeerId | None, name: str) -> DistributedQueue | None:
        """Return such a queue if it was used here before."""
        return self._distributed.get((peer or self._host.peer_id, name))

    def forget_distributed(self, peer: PeerId | None, name: str) -> None:
        """Forget a queue that is not distributed any more."""
        self._distributed.pop((peer or self._host.peer_id, name), None)

    def _start_soon(self, run: Callable[[], Awaitable[None]]) -> None:
        if self._nursery is None:
            raise StreamClosedError("queues are not running")
        self._nursery.start_soon(run)

    def at(self, peer: PeerId, *others: PeerId) -> RemoteQueues:
        """The queues that another member stores, or one of ``others``, which share its store."""
        if others:
            self._broker_directory.to(peer).failover_group.add(others)
        return RemoteQueues(self, peer)

    async def publish(
        self, peer: PeerId, name: str, messages: Sequence[WireMessage], timeout_s: float | None
    ) -> list[tuple[int, int]]:
        """Publish to a member's queue."""
        publisher = self._publishers.get(peer)
        if publisher is None:
            if self._nursery is None:
                raise StreamClosedError("queues are not running")
            publisher = PeerPublisher(self._broker_directory.to(peer), self._limits, self._counters, self._rng)
            self._publishers[peer] = publisher
            self._nursery.start_soon(self._run_publisher, peer, publisher)
        timeout_s = self._limits.request_timeout_s if timeout_s is None else timeout_s
        return [*await publisher.publish(name, messages, timeout_s)]

    async def _run_publisher(self, peer: PeerId, publisher: PeerPublisher) -> None:
        with trio.CancelScope() as scope:
            self._publisher_scopes[peer] = scope
            await run_contained(publisher.run, f"publishing to {peer}", publisher.fail)
            if not scope.cancel_called and self._publishers.get(peer) is publisher:
                del self._publishers[peer]  # the next publish makes another one

    async def consume(self, peer: PeerId, name: str, channel: str, options: SubscribeOptions) -> Consumer:
        """Consume from a member's queue."""
        nursery = self._nursery
        if nursery is None:
            raise StreamClosedError("queues are not running")
        fields: dict[str, object] = {
            "q": name,
            "c": channel,
            "n": options.max_in_flight,
            "b": options.bytes_max or _BYTES_MAX_DEFAULT,
        }
        if options.from_start:
            fields["s"] = True
        if options.filter:
            fields["f"] = options.filter
        if options.of_distributed:
            fields["p"] = True
        consumer: RemoteConsumer
        if options.exclusive:
            member = self._rng.randbytes(MEMBER_BYTES)
            consumer = RemotePort(
                self._broker_directory.to(peer), name, channel, fields, self._limits, self._counters, member
            )
        else:
            consumer = RemoteConsumer(
                self._broker_directory.to(peer), name, channel, fields, self._limits, self._counters
            )
        self._consumers[consumer] = None
        nursery.start_soon(self._run_consumer, consumer)
        try:
            with trio.fail_after(self._limits.request_timeout_s):
                await consumer.subscribed.wait()
        except BaseException as error:
            await _close(consumer)
            if isinstance(error, trio.TooSlowError):
                if consumer.refusal is not None:
                    raise consumer.refusal.with_traceback(None) from None
                raise RequestTimeoutError(
                    f"{peer} cannot be reached within {self._limits.request_timeout_s:g} s to consume {name!r}"
                ) from None
            raise
        if consumer.error is not None:
            raise consumer.error
        return consumer.consumer if isinstance(consumer, RemotePort) else consumer

    async def _run_consumer(self, consumer: RemoteConsumer) -> None:
        try:
            run = consumer.run_all if isinstance(consumer, RemotePort) else consumer.run
            await run_contained(run, f"a consumer of {consumer.queue!r} at a member")
        finally:
            del self._consumers[consumer]

    async def ask(self, peer: PeerId, request: AdminRequest[R], *, on_sent: Callable[[], None] | None = None) -> R:
        """Send an administrative request to a member. ``on_sent`` is called when there is a link, and the request
        goes."""
        payload = encode_admin(request)
        if len(payload) > wire.ADMIN_BYTES_MAX:
            raise ValueError(f"the request has {len(payload)} bytes: at most {wire.ADMIN_BYTES_MAX}")
        timeout_s = self._limits.request_timeout_s + _wait_s(request)

        def frame(req_id: int) -> bytes:
            if on_sent is not None:
                on_sent()
            return encode_frame(wire.ADMIN, payload, req_id=req_id)

        answer = await self._broker_directory.to(peer).request(frame, timeout_s)
        try:
            return reply_of(request, answer)
        except ProtocolError as error:
            raise error if answer.error is not None else ProtocolError(f"the node {peer}: {error}") from None

    async def publish_sequenced(
        self, peer: PeerId, name: str, messages: Sequence[WireMessage], publisher: tuple[bytes, int]
    ) -> list[tuple[int, int]]:
        """Publish to a member's queue under a producer's own numbers; once, without another try."""
        answer = await self._broker_directory.to(peer).request(
            lambda req_id: wire.encode_publish(req_id, name, *publisher, messages), self._limits.request_timeout_s
        )
        if answer.error is not None:
            raise answer.error
        points = wire.decode_published(answer.payload) if answer.type == wire.PUBLISHED else []
        if len(points) != len(messages):
            raise ProtocolError(f"{len(points)} ids for {len(messages)} messages")
        return [*points]

    # Reporting

    @property
    def flows(self) -> FlowCounts:
        """The producers and consumers of the node."""
        return self._ownership.flows

    def counters(self) -> dict[str, int]:
        """Monotonic counts by name."""
        return dict(self._counters)

    def distributed_values(self) -> dict[str, int]:
        """Return numbers on queues that are on several nodes: `QueueController.values`, and ``waiting_in_key_queue``,
        the messages whose publishers here wait for nodes that are away."""
        waiting = sum(each.waiting for each in self._distributed.values())
        return {**self.controller.values(), "waiting_in_key_queue": waiting}

    def stats(self) -> object:
        """Return the values of this moment."""
        return {
            "links_served": len(self._served),
            "consumers_served": sum(link.subscriptions for link in self._served),
            "consumers": len(self._consumers),
            "placed": self.distributed_values(),
        }


def _wait_s(request: AdminRequest[AdminReply]) -> float:
    """Return how long the broker may wait before it answers."""
    return request.wait_s if isinstance(request, ReceiveMessages) else 0.0


async def _close(consumer: Consumer) -> None:
    with trio.CancelScope(shield=True):
        await consumer.aclose()
