"""The queues of the members of a realm: this node's own and another's, each also with partitions on several nodes."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, cast

from msgspec.structs import replace

from dep2p.errors import QueueIsDistributedError, QueueNotFoundError
from dep2p.protocols.queues.admin import (
    AdminReply,
    AdminRequest,
    DescribeRoute,
    QueueRequest,
    R,
    ReceiveMessages,
    operation_of,
)
from dep2p.protocols.queues.names import check_name, parse_message_id
from dep2p.protocols.queues.wire.admin import checked
from dep2p.protocols.queues.wire.frames import WireMessage
from dep2p.queues.access import Right, Rights
from dep2p.queues.api.queues import Queues
from dep2p.queues.broker.admin import RIGHTS, BrokerAdmin
from dep2p.queues.broker.engine import QueueEngine
from dep2p.queues.broker.ownership import StoreOwnership
from dep2p.queues.client_metrics import FlowCounts
from dep2p.queues.consumer import Consumer
from dep2p.queues.distributed.consumer import DistributedConsumer
from dep2p.queues.distributed.queue import DistributedQueue
from dep2p.queues.distributed.simple_consumer import SIMPLE_REQUESTS, SimpleRequest
from dep2p.queues.ordered_consumer import ExclusiveConsumer
from dep2p.queues.remote.abandoned_receives import Receivings
from dep2p.queues.types import SubscribeOptions, check_messages, new_messages
from dep2p.types import PeerId, RealmId


class MemberQueueService(Protocol):
    """The node's queue service in a realm, as the queues of its members use it."""

    receivings: Receivings

    @property
    def flows(self) -> FlowCounts:
        """The producers and consumers of the node."""
        ...

    def distributed(self, peer: PeerId | None, name: str) -> DistributedQueue:
        """Return a queue whose partitions are on several nodes, by its controller; None: this node."""
        ...

    def known_distributed(self, peer: PeerId | None, name: str) -> DistributedQueue | None:
        """Return such a queue if it was used here before."""
        ...

    def forget_distributed(self, peer: PeerId | None, name: str) -> None:
        """Forget a queue that is not distributed any more."""
        ...

    async def ask(self, peer: PeerId, request: AdminRequest[R], *, on_sent: Callable[[], None] | None = None) -> R:
        """Send an administrative request to a member. ``on_sent`` is called when there is a link, and the request
        goes."""
        ...

    async def publish(
        self, peer: PeerId, name: str, messages: Sequence[WireMessage], timeout_s: float | None
    ) -> list[tuple[int, int]]:
        """Publish to a member's queue."""
        ...

    async def publish_sequenced(
        self, peer: PeerId, name: str, messages: Sequence[WireMessage], publisher: tuple[bytes, int]
    ) -> list[tuple[int, int]]:
        """Publish to a member's queue under a producer's own numbers; once, without another try."""
        ...

    async def consume(self, peer: PeerId, name: str, channel: str, options: SubscribeOptions) -> Consumer:
        """Consume from a member's queue."""
        ...

    def active_broker(self) -> "RemoteQueues | None":
        """The queues at the present broker, while that is another node that shares the store; else None."""
        ...

    async def perform_own(self, request: AdminRequest[R]) -> R:
        """Carry out an administrative request of a program of this node."""
        ...


class RealmQueues(Queues):
    """The queues of one member of a realm, this node or another one, also when their partitions are on several."""

    peer: PeerId | None
    _service: MemberQueueService | None

    @abstractmethod
    async def ask_broker(self, request: AdminRequest[R], *, on_sent: Callable[[], None] | None = None) -> R:
        """Ask the node about the queues that it stores itself. ``on_sent`` is called when the request goes to another
        node."""

    @abstractmethod
    async def publish_to_broker(
        self, name: str, messages: Sequence[WireMessage], timeout_s: float | None
    ) -> list[tuple[int, int]]:
        """Publish to a queue that the node stores itself."""

    @abstractmethod
    async def open_subscription(
        self,
        name: str,
        channel: str,
        options: SubscribeOptions,
    ) -> Consumer:
        """Subscribe to a queue that the node stores itself."""

    async def ask(self, request: AdminRequest[R]) -> R:
        request = checked(request)
        if self._service is None or not isinstance(request, SIMPLE_REQUESTS):
            return await self.ask_broker(request)
        return cast(R, await self._ask_partitions(self._service, request))

    async def _ask_partitions(self, service: MemberQueueService, request: SimpleRequest) -> AdminReply:
        """Ask the nodes of the partitions, when the queue is on several."""
        distributed = service.known_distributed(self.peer, request.queue)
        if distributed is not None:
            try:
                return await distributed.simple.ask(request)
            except QueueNotFoundError:
                service.forget_distributed(self.peer, request.queue)  # it was deleted, and may be there anew
        try:
            return await self.ask_broker(request)
        except QueueIsDistributedError:
            distributed = service.distributed(self.peer, request.queue)
        return await distributed.simple.ask(request)

    async def publish_batch(
        self, name: str, messages: Sequence[WireMessage], timeout_s: float | None
    ) -> list[tuple[int, int]]:
        check_name(name)
        check_messages(messages)
        service = self._service
        distributed = None if service is None else service.known_distributed(self.peer, name)
        if service is not None and distributed is not None:
            try:
                return await distributed.publish_batch(messages, timeout_s)
            except QueueNotFoundError:
                service.forget_distributed(self.peer, name)  # it was deleted, and may be there anew
        try:
            return await self.publish_to_broker(name, messages, timeout_s)
        except QueueIsDistributedError:
            if service is None:
                raise
        return await service.distributed(self.peer, name).publish_batch(messages, timeout_s)

    @abstractmethod
    async def publish_sequenced_to_broker(
        self, name: str, messages: Sequence[WireMessage], publisher: tuple[bytes, int]
    ) -> list[tuple[int, int]]:
        """Publish to a queue that the node stores itself."""

    async def publish_sequenced(
        self, name: str, messages: Sequence[WireMessage], publisher: tuple[bytes, int], destination: str = ""
    ) -> list[tuple[int, int]]:
        check_name(name)
        check_messages(messages)
        if not destination:
            return await self.publish_sequenced_to_broker(name, messages, publisher)
        if self._service is None:
            raise ValueError(f"a destination of {name!r}, and queues outside of a realm are on one node")
        return await self._service.distributed(self.peer, name).publish_sequenced(destination, messages, publisher)

    async def destinations(self, name: str, messages: Sequence[WireMessage], *, is_stale: bool = False) -> list[str]:
        service = self._service
        if service is not None:
            try:
                return await service.distributed(self.peer, name).destinations(messages, is_stale=is_stale)
            except QueueNotFoundError:
                service.forget_distributed(self.peer, name)
                await self.ask(DescribeRoute(queue=name, brief=True))  # the queue may be local now
        return await super().destinations(name, messages, is_stale=is_stale)

    async def open_consumer(
        self,
        name: str,
        channel: str,
        options: SubscribeOptions,
    ) -> Consumer:
        consumer: Consumer
        try:
            consumer = await self.open_subscription(name, channel, options)
        except QueueIsDistributedError:
            if self._service is None:
                raise
            consumer = await self._service.distributed(self.peer, name).open_consumer(channel, options)
        if self.flows is not None and isinstance(consumer, ExclusiveConsumer | DistributedConsumer):
            self.flows.add(consumer)
        return consumer

    def is_off_partition(self, name: str, key: str, message_id: str) -> bool:
        distributed = None if self._service is None else self._service.known_distributed(self.peer, name)
        return distributed is not None and distributed.is_off_partition(key, parse_message_id(message_id)[0])


class RemoteQueues(RealmQueues):
    """The queues of another member. Made by ``node.queues.at(peer)``."""

    def __init__(self, service: MemberQueueService, peer: PeerId) -> None:
        self._service: MemberQueueService = service  # pyright: ignore[reportIncompatibleVariableOverride]
        self.peer: PeerId = peer  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def flows(self) -> FlowCounts:
        return self._service.flows

    async def ask_broker(self, request: AdminRequest[R], *, on_sent: Callable[[], None] | None = None) -> R:
        service = self._service
        named = self._named(request)
        if named is None:
            return await service.ask(self.peer, request, on_sent=on_sent)
        return cast(R, await service.receivings.receive(partial(service.ask, self.peer), named))

    def _named(self, request: AdminRequest[AdminReply]) -> ReceiveMessages | None:
        """Return a receive with an id by which it can be ended, when the request has none: it is not asked again
        then."""
        if isinstance(request, ReceiveMessages) and not request.attempt_id:
            return replace(request, attempt_id=self._service.receivings.new_attempt_id())
        return None

    async def publish_to_broker(
        self, name: str, messages: Sequence[WireMessage], timeout_s: float | None
    ) -> list[tuple[int, int]]:
        return await self._service.publish(self.peer, name, messages, timeout_s)

    async def publish_sequenced_to_broker(
        self, name: str, messages: Sequence[WireMessage], publisher: tuple[bytes, int]
    ) -> list[tuple[int, int]]:
        return await self._service.publish_sequenced(self.peer, name, messages, publisher)

    async def open_subscription(
        self,
        name: str,
        channel: str,
        options: SubscribeOptions,
    ) -> Consumer:
        return await self._service.consume(self.peer, name, channel, options)


class LocalQueues(RealmQueues):
    """The queues that this node stores: for its own programs, or for a realm (with its ``service``)."""

    def __init__(
        self,
        ownership: StoreOwnership,
        rights: Rights,
        namespace: str,
        service: MemberQueueService | None = None,
        *,
        as_member: PeerId | None = None,
    ) -> None:
        """``as_member``: publishing and consuming need the rights of that member, not of this node's owner."""
        self._ownership = ownership
        self._rights = rights
        self._namespace = namespace
        self._service = service
        self._as_member = as_member
        self.peer: PeerId | None = None

    @property
    def _engine(self) -> QueueEngine:
        return self._ownership.engine

    @property
    def _active_broker(self) -> "RemoteQueues | None":
        """While this node is on standby, return the same queues at their broker, which this node reaches as a member of
        the realm."""
        return None if self._service is None else self._service.active_broker()

    def _require(self, name: str, right: Right) -> None:
        if self._as_member is not None:
            self._rights.require(RealmId(self._namespace), name, self._as_member, right)

    @property
    def flows(self) -> FlowCounts:
        return self._ownership.flows

    async def ask_broker(self, request: AdminRequest[R], *, on_sent: Callable[[], None] | None = None) -> R:
        other = self._active_broker
        if other is not None:
            return await other.ask_broker(request, on_sent=on_sent)
        right = RIGHTS.get(type(request))
        if right is None:
            raise ValueError(f"{operation_of(request)} is asked between nodes only")
        if isinstance(request, QueueRequest) and right not in (Right.DESCRIBE, Right.CREATE):
            self._require(request.queue, right)
        if self._service is not None:
            return await self._service.perform_own(request)
        with self._ownership.during_term() as engine:
            return await BrokerAdmin(engine, self._rights, self._namespace).perform(request)

    async def publish_to_broker(
        self, name: str, messages: Sequence[WireMessage], timeout_s: float | None
    ) -> list[tuple[int, int]]:
        other = self._active_broker
        if other is not None:
            return await other.publish_to_broker(name, messages, timeout_s)
        self._require(name, Right.PUBLISH)
        return await self._engine.publish(self._namespace, name, new_messages(messages), timeout_s=timeout_s)

    async def publish_sequenced_to_broker(
        self, name: str, messages: Sequence[WireMessage], publisher: tuple[bytes, int]
    ) -> list[tuple[int, int]]:
        other = self._active_broker
        if other is not None:
            return await other.publish_sequenced_to_broker(name, messages, publisher)
        self._require(name, Right.PUBLISH)
        return await self._engine.publish(
            self._namespace, name, new_messages(messages), timeout_s=0.0, publisher=publisher
        )

    async def open_subscription(
        self,
        name: str,
        channel: str,
        options: SubscribeOptions,
    ) -> Consumer:
        other = self._active_broker
        if other is not None:
            return await other.open_subscription(name, channel, options)
        self._require(name, Right.CONSUME)
        subscribe = self._engine.subscribe_exclusive if options.exclusive else self._engine.subscribe
        return await subscribe(self._namespace, name, channel, options)
