"""The node, as the control API uses it. `dep2p.node.node.Node` is one; tests bring their own."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Literal, Protocol

from dep2p.control_api.replies import (
    ConnectedPeer,
    MemberSummary,
    PeerSummary,
    RealmSummary,
    TopicPeers,
    TopicSummary,
)
from dep2p.delivery.service import ReliableDelivery
from dep2p.errors import Dep2pError
from dep2p.gossipsub.topic_types import Lagged, OnFull, OnNoPeers, PublishResult, TopicMessage
from dep2p.host.interface import Connection, HostEvent
from dep2p.limits import Limits
from dep2p.messaging.offered_services import OfferedService
from dep2p.node.outbox import Outbox
from dep2p.node.services import RealmServices
from dep2p.node.sessions import Sessions
from dep2p.node.tracer import Tracer
from dep2p.protocols.fairness.ledger import MemberUsage
from dep2p.protocols.realm.statement import ServiceOffer
from dep2p.queues.api.queues import Queues
from dep2p.queues.broker.ownership import StoreOwnership
from dep2p.realm.credentials import Realm
from dep2p.realm.interface import MemberEvent
from dep2p.types import Headers, PeerId, RealmId


class MemberInfo(Protocol):
    """The statements of a member about itself."""

    @property
    def state(self) -> Literal["up", "down", "left"]: ...
    @property
    def fields(self) -> Mapping[str, str]: ...
    @property
    def services(self) -> tuple[ServiceOffer, ...]: ...


class MembershipInterface(Protocol):
    """The members of one realm."""

    def member(self, peer: PeerId, /) -> MemberInfo | None: ...
    @property
    def fields(self) -> Mapping[str, str]: ...
    def set_fields(self, fields: Mapping[str, str | None], /) -> Mapping[str, str]: ...


class IncomingMessage(Protocol):
    """A notification for a handler."""

    @property
    def peer(self) -> PeerId: ...
    @property
    def name(self) -> str: ...
    @property
    def body(self) -> bytes: ...
    @property
    def headers(self) -> Mapping[str, object]: ...


class IncomingNotify(IncomingMessage, Protocol):
    """A notify, or a reliable message for a handler of notifies."""

    @property
    def is_reliable(self) -> bool: ...


class IncomingCall(IncomingMessage, Protocol):
    """A request for a handler."""

    @property
    def deadline_s(self) -> float: ...
    @property
    def idempotent(self) -> bool: ...


class StreamInterface(IncomingMessage, Protocol):
    """A two-way stream of items."""

    async def send(self, item: bytes, /) -> None: ...
    async def send_eof(self) -> None: ...
    def __aiter__(self) -> AsyncIterator[bytes]: ...
    def reset(self) -> None: ...


class MessagingInterface(Protocol):
    """The messaging of one realm."""

    @property
    def realm_id(self) -> RealmId: ...

    def on_request(
        self,
        name: str,
        handler: Callable[[IncomingCall], Awaitable[bytes]],
        /,
        *,
        concurrency: int,
        rate_per_s: float,
        service: OfferedService | None,
    ) -> Callable[[], None]: ...
    def on_notify(
        self,
        name: str,
        handler: Callable[[IncomingNotify], Awaitable[None]],
        /,
        *,
        concurrency: int,
        rate_per_s: float,
    ) -> Callable[[], None]: ...
    def on_stream(
        self, name: str, handler: Callable[[StreamInterface], Awaitable[None]], /, *, concurrency: int
    ) -> Callable[[], None]: ...

    async def request(
        self,
        peer: PeerId,
        name: str,
        body: bytes,
        *,
        timeout_s: float | None,
        idempotent: bool,
        headers: Headers | None,
    ) -> bytes: ...
    async def notify(self, peer: PeerId, name: str, body: bytes, *, headers: Headers | None) -> None: ...
    def stream(
        self, peer: PeerId, name: str, body: bytes, *, headers: Headers | None
    ) -> AbstractAsyncContextManager[StreamInterface]: ...
    async def broadcast_request(
        self,
        peers: Sequence[PeerId],
        name: str,
        body: bytes,
        *,
        concurrency: int,
        timeout_s: float | None,
        idempotent: bool,
        headers: Headers | None,
    ) -> Mapping[PeerId, bytes | Dep2pError]: ...
    async def broadcast_notify(
        self, peers: Sequence[PeerId], name: str, body: bytes, *, concurrency: int, headers: Headers | None
    ) -> Mapping[PeerId, Dep2pError | None]: ...


class TopicMessages(Protocol):
    """An open subscription. Iterate over its messages; ``len`` counts those that wait."""

    def __len__(self) -> int: ...
    def __aiter__(self) -> AsyncIterator[TopicMessage | Lagged]: ...
    def close(self) -> None: ...


class TopicInterface(Protocol):
    """A handle of a joined topic."""

    @property
    def name(self) -> str: ...
    @property
    def realm_id(self) -> RealmId | None: ...
    @property
    def is_joined(self) -> bool: ...

    def subscribe(
        self, *, buffer_items: int, buffer_bytes: int, on_full: OnFull, group: str | None
    ) -> AbstractAsyncContextManager[TopicMessages]: ...
    async def publish(self, body: bytes, /, *, wait: bool, on_no_peers: OnNoPeers) -> PublishResult: ...
    async def leave(self) -> None: ...


class PubSubInterface(Protocol):
    """The pub/sub of one realm, or of the public network."""

    @property
    def realm_id(self) -> RealmId | None: ...

    async def publish(
        self,
        topic: str,
        body: bytes,
        /,
        *,
        wait: bool,
        on_no_peers: OnNoPeers,
        origin: object | None = None,
        headers: Mapping[str, object] | None = None,
    ) -> PublishResult: ...
    def has_joined(self, name: str, /) -> bool: ...
    def peers(self, topic: str, /) -> Sequence[PeerId]: ...
    def mesh(self, topic: str, /) -> Sequence[PeerId]: ...
    def scores(self) -> Mapping[PeerId, float]: ...


class QueuesInterface(Protocol):
    """The durable queues that a node can reach."""

    @property
    def ownership(self) -> StoreOwnership: ...

    def of(self) -> Queues: ...
    def select(self, realm: str | None, /, *peers: PeerId) -> Queues: ...
    def distributed_values(self, realm: str, /) -> dict[str, int]: ...


class HostInterface(Protocol):
    """The connections of a node."""

    def connections(self, peer: PeerId | None = None) -> Sequence[Connection]: ...
    def addrs(self, peer: PeerId, /) -> list[str]: ...


class NodeInterface(Protocol):
    """A running node; see :class:`dep2p.node.node.Node` for what each call raises."""

    @property
    def peer_id(self) -> PeerId: ...
    @property
    def limits(self) -> Limits: ...
    @property
    def host(self) -> HostInterface: ...
    def unreached_bootstrap(self) -> tuple[str, ...]: ...
    @property
    def queues(self) -> QueuesInterface: ...

    @property
    def sessions(self) -> Sessions: ...

    @property
    def outbox(self) -> Outbox: ...

    @property
    def tracer(self) -> Tracer: ...

    def listen_addrs(self) -> list[str]: ...
    def realms(self) -> Sequence[RealmSummary]: ...
    def membership(self, realm: str | None, /) -> MembershipInterface: ...
    def members(self, realm: str | None, /) -> Sequence[MemberSummary]: ...
    def peers(self) -> Sequence[PeerSummary]: ...
    def realm(self, realm: str | None, /) -> Realm: ...
    def messaging(self, realm: str | None, /) -> MessagingInterface: ...
    def pubsub(self, realm: str | None, /, *, public: bool) -> PubSubInterface: ...
    def delivery(self, realm: str | None, /) -> ReliableDelivery: ...
    def services(self, realm: str | None, /) -> RealmServices: ...
    async def join(self, topic: str, /, *, realm: str | None, public: bool) -> TopicInterface: ...
    def subscribe(
        self,
        topic: str,
        /,
        *,
        realm: str | None,
        buffer_items: int,
        buffer_bytes: int,
        on_full: OnFull,
        group: str | None,
    ) -> AbstractAsyncContextManager[TopicMessages]: ...
    def topics(self) -> Sequence[TopicSummary]: ...
    def topic_peers(self, topic: str, /, *, realm: str | None, public: bool) -> TopicPeers: ...
    async def join_realm(self, realm: Realm, addrs: Sequence[str], /) -> RealmSummary: ...
    async def leave_realm(self, realm: str, /) -> None: ...
    def handle(
        self, realm: str | None, register: Callable[[MessagingInterface], Callable[[], None]], /
    ) -> Callable[[], None]: ...
    async def connect(self, addr: str, /, *, timeout_s: float | None) -> ConnectedPeer: ...
    async def disconnect(self, peer: PeerId, /) -> bool: ...
    async def ping(self, peer: PeerId, /, *, timeout_s: float) -> float: ...
    def subscribe_peers(self, on_event: Callable[[HostEvent], None], /) -> Callable[[], None]: ...
    def subscribe_members(self, on_event: Callable[[RealmId, MemberEvent], None], /) -> Callable[[], None]: ...
    def counters(self) -> dict[str, int]: ...
    def quotas(self) -> list[MemberUsage]: ...
    def stats(self) -> dict[str, object]: ...
    async def drain(self) -> None: ...
