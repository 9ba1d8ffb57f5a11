"""The queues of the members of a realm: this node's own and another's, each also with partitions on several nodes."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from dep2p.errors import QueueNotFoundError, QueuePlacedError
from dep2p.protocols.queues.wire import WireMessage
from dep2p.queues.access import Right, Rights
from dep2p.queues.api.queues import Queues
from dep2p.queues.broker.admin import RIGHTS, perform
from dep2p.queues.broker.engine import QueueEngine
from dep2p.queues.broker.ownership import Keeping
from dep2p.queues.client_metrics import FlowCounts
from dep2p.queues.consumer import Consumer
from dep2p.queues.distributed.consumer import PlacedConsumer
from dep2p.queues.distributed.simple_consumer import SIMPLE_OPS
from dep2p.queues.ordered_consumer import ExclusiveConsumer
from dep2p.queues.types import new_messages, parse_message_id
from dep2p.types import PeerId, RealmId

if TYPE_CHECKING:
    from dep2p.queues.service.service import QueueService


class RealmQueues(Queues):
    """The queues of one member of a realm, this node or another one, also when their partitions are on several."""

    peer: PeerId | None
    _service: "QueueService | None"

    @abstractmethod
    async def ask_plain(
        self, op: str, fields: Mapping[str, object], *, on_sent: Callable[[], None] | None = None
    ) -> dict[str, Any]:
        """Of the queues there themselves. ``on_sent`` is called when it goes to another node."""

    @abstractmethod
    async def publish_plain(
        self, name: str, messages: Sequence[WireMessage], timeout_s: float | None
    ) -> list[tuple[int, int]]:
        """To that queue itself."""

    @abstractmethod
    async def open_subscription(
        self,
        name: str,
        channel: str,
        *,
        max_in_flight: int,
        from_start: bool,
        bytes_max: int | None,
        filter_text: str,
        exclusive: bool,
        of_placed: bool,
    ) -> Consumer:
        """Of that queue itself."""

    async def ask(self, op: str, fields: Mapping[str, object]) -> dict[str, Any]:
        name = fields.get("queue")
        service = self._service
        if service is None or op not in SIMPLE_OPS or not isinstance(name, str):
            return await self.ask_plain(op, fields)
        placed = service.known_placed(self.peer, name)
        if placed is not None:
            try:
                return await placed.simple.ask(op, fields)
            except QueueNotFoundError:
                service.forget_placed(self.peer, name)  # it was deleted, and may be there anew
        try:
            return await self.ask_plain(op, fields)
        except QueuePlacedError:
            placed = service.placed(self.peer, name)
        return await placed.simple.ask(op, fields)

    async def publish_batch(
        self, name: str, messages: Sequence[WireMessage], timeout_s: float | None
    ) -> list[tuple[int, int]]:
        service = self._service
        placed = None if service is None else service.known_placed(self.peer, name)
        if service is not None and placed is not None:
            try:
                return await placed.publish_batch(messages, timeout_s)
            except QueueNotFoundError:
                service.forget_placed(self.peer, name)  # it was deleted, and may be there anew
        try:
            return await self.publish_plain(name, messages, timeout_s)
        except QueuePlacedError:
            if service is None:
                raise
        return await service.placed(self.peer, name).publish_batch(messages, timeout_s)

    @abstractmethod
    async def publish_numbered_plain(
        self, name: str, messages: Sequence[WireMessage], publisher: tuple[bytes, int]
    ) -> list[tuple[int, int]]:
        """To that queue itself."""

    async def publish_numbered(
        self, name: str, messages: Sequence[WireMessage], publisher: tuple[bytes, int], destination: str = ""
    ) -> list[tuple[int, int]]:
        if not destination:
            return await self.publish_numbered_plain(name, messages, publisher)
        if self._service is None:
            raise ValueError(f"a destination of {name!r}, and queues outside of a realm are on one node")
        return await self._service.placed(self.peer, name).publish_numbered(destination, messages, publisher)

    async def destinations(self, name: str, messages: Sequence[WireMessage], *, is_stale: bool = False) -> list[str]:
        service = self._service
        if service is not None:
            try:
                return await service.placed(self.peer, name).destinations(messages, is_stale=is_stale)
            except QueueNotFoundError:
                service.forget_placed(self.peer, name)
                await self.ask("route", {"queue": name, "brief": True})  # it may be there as a plain one
        return await super().destinations(name, messages, is_stale=is_stale)

    async def open_consumer(
        self,
        name: str,
        channel: str,
        *,
        max_in_flight: int,
        from_start: bool,
        bytes_max: int | None,
        filter_text: str,
        exclusive: bool = False,
    ) -> Consumer:
        consumer: Consumer
        try:
            consumer = await self.open_subscription(
                name,
                channel,
                max_in_flight=max_in_flight,
                from_start=from_start,
                bytes_max=bytes_max,
                filter_text=filter_text,
                exclusive=exclusive,
                of_placed=False,
            )
        except QueuePlacedError:
            if self._service is None:
                raise
            consumer = await self._service.placed(self.peer, name).open_consumer(
                channel,
                max_in_flight=max_in_flight,
                from_start=from_start,
                bytes_max=bytes_max,
                filter_text=filter_text,
                exclusive=exclusive,
            )
        if self.flows is not None and isinstance(consumer, ExclusiveConsumer | PlacedConsumer):
            self.flows.add(consumer)
        return consumer

    def is_elsewhere(self, name: str, order_key: str, message_id: str) -> bool:
        placed = None if self._service is None else self._service.known_placed(self.peer, name)
        return placed is not None and placed.is_elsewhere(order_key, parse_message_id(message_id)[0])


class RemoteQueues(RealmQueues):
    """The queues of another member. Made by ``node.queues.at(peer)``."""

    def __init__(self, service: "QueueService", peer: PeerId) -> None:
        self._service: QueueService = service  # pyright: ignore[reportIncompatibleVariableOverride]
        self.peer: PeerId = peer  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def flows(self) -> FlowCounts:
        return self._service.flows

    async def ask_plain(
        self, op: str, fields: Mapping[str, object], *, on_sent: Callable[[], None] | None = None
    ) -> dict[str, Any]:
        service = self._service
        if op != "receive" or fields.get("attempt_id"):  # with an id of its own, it may be asked again
            return await service.ask(self.peer, op, fields, on_sent=on_sent)
        named = {**fields, "attempt_id": service.receivings.new_attempt_id()}
        return await service.receivings.receive(partial(service.ask, self.peer), named)

    async def publish_plain(
        self, name: str, messages: Sequence[WireMessage], timeout_s: float | None
    ) -> list[tuple[int, int]]:
        return await self._service.publish(self.peer, name, messages, timeout_s)

    async def publish_numbered_plain(
        self, name: str, messages: Sequence[WireMessage], publisher: tuple[bytes, int]
    ) -> list[tuple[int, int]]:
        return await self._service.publish_numbered(self.peer, name, messages, publisher)

    async def open_subscription(
        self,
        name: str,
        channel: str,
        *,
        max_in_flight: int,
        from_start: bool,
        bytes_max: int | None,
        filter_text: str,
        exclusive: bool,
        of_placed: bool,
    ) -> Consumer:
        return await self._service.consume(
            self.peer,
            name,
            channel,
            max_in_flight=max_in_flight,
            from_start=from_start,
            bytes_max=bytes_max,
            filter_text=filter_text,
            exclusive=exclusive,
            of_placed=of_placed,
        )


class LocalQueues(RealmQueues):
    """The queues that this node keeps: for its own programs, or for a realm (with its ``service``)."""

    def __init__(
        self,
        keeping: Keeping,
        rights: Rights,
        namespace: str,
        service: "QueueService | None" = None,
        *,
        as_member: PeerId | None = None,
    ) -> None:
        """``as_member``: what it publishes and consumes needs the rights of that member, not of this node's owner."""
        self._keeping = keeping
        self._rights = rights
        self._namespace = namespace
        self._service = service
        self._as_member = as_member
        self.peer = None

    @property
    def _engine(self) -> QueueEngine:
        return self._keeping.engine

    @property
    def _elsewhere(self) -> "RemoteQueues | None":
        """While this node stands by: the same queues at their owner, which it reaches as a member of the realm."""
        return None if self._service is None else self._service.elsewhere()

    def _require(self, name: str, right: Right) -> None:
        if self._as_member is not None:
            self._rights.require(RealmId(self._namespace), name, self._as_member, right)

    @property
    def flows(self) -> FlowCounts:
        return self._keeping.flows

    async def ask_plain(
        self, op: str, fields: Mapping[str, object], *, on_sent: Callable[[], None] | None = None
    ) -> dict[str, Any]:
        right = RIGHTS.get(op)
        if right is None:
            raise ValueError(f"no operation {op!r} on queues")
        other = self._elsewhere
        if other is not None:
            return await other.ask_plain(op, fields, on_sent=on_sent)
        if right not in (Right.LOOK, Right.CREATE):
            self._require(str(fields.get("queue")), right)
        if self._service is not None:
            return await self._service.perform_own(op, fields)
        with self._keeping.term() as engine:
            return await perform(engine, self._rights, self._namespace, op, fields)

    async def publish_plain(
        self, name: str, messages: Sequence[WireMessage], timeout_s: float | None
    ) -> list[tuple[int, int]]:
        other = self._elsewhere
        if other is not None:
            return await other.publish_plain(name, messages, timeout_s)
        self._require(name, Right.PUBLISH)
        return await self._engine.publish(self._namespace, name, new_messages(messages), timeout_s=timeout_s)

    async def publish_numbered_plain(
        self, name: str, messages: Sequence[WireMessage], publisher: tuple[bytes, int]
    ) -> list[tuple[int, int]]:
        other = self._elsewhere
        if other is not None:
            return await other.publish_numbered_plain(name, messages, publisher)
        self._require(name, Right.PUBLISH)
        return await self._engine.publish(
            self._namespace, name, new_messages(messages), timeout_s=0.0, publisher=publisher
        )

    async def open_subscription(
        self,
        name: str,
        channel: str,
        *,
        max_in_flight: int,
        from_start: bool,
        bytes_max: int | None,
        filter_text: str,
        exclusive: bool,
        of_placed: bool,
    ) -> Consumer:
        other = self._elsewhere
        if other is not None:
            return await other.open_subscription(
                name,
                channel,
                max_in_flight=max_in_flight,
                from_start=from_start,
                bytes_max=bytes_max,
                filter_text=filter_text,
                exclusive=exclusive,
                of_placed=of_placed,
            )
        self._require(name, Right.CONSUME)
        if exclusive:
            return await self._engine.subscribe_exclusive(
                self._namespace,
                name,
                channel,
                max_in_flight=max_in_flight,
                bytes_max=bytes_max,
                from_start=from_start,
                filter_text=filter_text,
                of_placed=of_placed,
            )
        return await self._engine.subscribe(
            self._namespace,
            name,
            channel,
            max_in_flight=max_in_flight,
            bytes_max=bytes_max,
            from_start=from_start,
            filter_text=filter_text,
            of_placed=of_placed,
        )
