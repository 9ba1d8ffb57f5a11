"""A node without a network, for tests of the control API: its peers do what their request's name says."""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

import trio

from dep2p.control_api.replies import (
    ConnectedPeer,
    MemberSummary,
    PeerSummary,
    RealmSummary,
    TopicPeers,
    TopicSummary,
)
from dep2p.daemon.node_interface import (
    IncomingCall,
    IncomingNotify,
    MessagingInterface,
    NodeInterface,
    StreamInterface,
)
from dep2p.delivery.service import ReliableDelivery
from dep2p.errors import (
    Dep2pError,
    HandlerError,
    MessageTooLargeError,
    NoHandlerError,
    NotInRealmError,
    NotMemberError,
    OverloadedError,
    PeerNotFoundError,
    ProtocolError,
    RateLimitedError,
    RemoteError,
    RequestTimeoutError,
    StreamClosedError,
    TooManyTopicsError,
    TopicNotFoundError,
)
from dep2p.gossipsub.topic_types import OnFull
from dep2p.host.interface import ByteStream, CircuitUse, Direction, HostEvent, PeerConnected
from dep2p.identity import Identity
from dep2p.limits import Limits
from dep2p.messaging.offered_services import OfferedService
from dep2p.node.outbox import Outbox
from dep2p.node.services import RealmServices
from dep2p.node.sessions import Sessions
from dep2p.node.summaries import connected_peer, connection_summary, offered
from dep2p.node.tracer import Tracer, TraceSources
from dep2p.protocols.fairness.ledger import MemberUsage
from dep2p.protocols.realm.statement import ServiceOffer, check_fields
from dep2p.pubsub.subscription import Subscription
from dep2p.realm.credentials import Realm, RealmChoice
from dep2p.realm.interface import MemberEvent
from dep2p.sessions.service import SessionHandlers
from dep2p.types import Headers, PeerId, RealmId, parse_peer_id
from tests.daemon.api.fake_pubsub import FakePubSub, FakeTopic
from tests.daemon.api.fake_queues import FakeQueues

ME = Identity(bytes(32)).peer_id
ANN = Identity(bytes([1]) * 32).peer_id
BOB = Identity(bytes([2]) * 32).peer_id
STRANGER = Identity(bytes([3]) * 32).peer_id
ADDR = f"/ip4/127.0.0.1/tcp/4001/p2p/{ANN}"

FAILURES: dict[str, Dep2pError] = {
    "timeout": RequestTimeoutError("no answer in 0.1 s"),
    "handler": HandlerError("the handler says no"),
    "no-handler": NoHandlerError("nothing answers to that"),
    "too-large": MessageTooLargeError("too large for the peer"),
    "rate": RateLimitedError("slow down", 250),
    "overloaded": OverloadedError("queues are full"),
    "protocol": ProtocolError("nonsense"),
    "remote": RemoteError("something"),
    "closed": StreamClosedError("gone"),
}


@dataclass
class Message:
    """An incoming request or notify."""

    name: str
    body: bytes = b""
    peer: PeerId = ANN
    headers: Headers = field(default_factory=dict[str, object])
    deadline_s: float = float("inf")
    idempotent: bool = False
    is_reliable: bool = False


class FakeConnection:
    """A connection that is only listed."""

    def __init__(self, peer: PeerId, number: int) -> None:
        self.id = number
        self.peer = peer
        self.direction: Direction = "outbound"
        self.remote_addr = f"/ip4/127.0.0.1/tcp/4001/p2p/{peer}"
        self.opened_at_s = trio.current_time()
        self.rtt_s: float | None = 0.0125
        self.is_closed = False
        self.is_superseded = False
        self.is_limited = False
        self.circuit: CircuitUse | None = None
        self.channel_binding = bytes(32)

    async def open_stream(self, protocol: str, *, timeout_s: float = 10.0) -> ByteStream:
        raise StreamClosedError(f"a fake has no {protocol}")

    async def close(self) -> None:
        self.is_closed = True


class FakeStream:
    """One end of a stream of items; ``far`` is the test's end."""

    def __init__(self, name: str, body: bytes = b"", peer: PeerId = ANN, headers: Headers | None = None) -> None:
        self.name, self.body, self.peer = name, body, peer
        self.headers: Headers = headers or {}
        self.to_far, self.sent = trio.open_memory_channel[bytes](4)
        self.from_far, self._incoming = trio.open_memory_channel[bytes](4)
        self.was_reset = False
        self.got_eof = trio.Event()

    async def send(self, item: bytes) -> None:
        if self.was_reset:
            raise StreamClosedError("reset")
        try:
            await self.to_far.send(item)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise StreamClosedError("the peer reset the stream") from None

    async def send_eof(self) -> None:
        await self.to_far.aclose()
        self.got_eof.set()

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        item = await anext(self._incoming)
        if item == b"!reset":
            raise StreamClosedError("the peer reset the stream")
        return item

    def reset(self) -> None:
        self.was_reset = True
        self.to_far.close()
        self.sent.close()
        self.from_far.close()

    async def echo(self) -> None:
        """The far end that sends everything back, then its end."""
        async for item in self.sent:
            await self.from_far.send(item)
        await self.from_far.aclose()


class FakeMessaging:
    """Messaging of one realm."""

    def __init__(self, node: "FakeNode", realm_id: RealmId) -> None:
        self.realm_id = realm_id
        self._node = node
        self.requests: dict[str, Callable[[IncomingCall], Awaitable[bytes]]] = {}
        self.notifies: dict[str, Callable[[IncomingNotify], Awaitable[None]]] = {}
        self.streams: dict[str, Callable[[StreamInterface], Awaitable[None]]] = {}
        self.notified: list[tuple[PeerId, str, bytes, Headers | None]] = []
        self.broadcast_idempotent: list[bool] = []

    def on_request(
        self,
        name: str,
        handler: Callable[[IncomingCall], Awaitable[bytes]],
        *,
        concurrency: int,
        rate_per_s: float,
        service: OfferedService | None,
    ) -> Callable[[], None]:
        self.requests[name] = handler
        return lambda: self.requests.pop(name, None) and None

    def on_notify(
        self, name: str, handler: Callable[[IncomingNotify], Awaitable[None]], *, concurrency: int, rate_per_s: float
    ) -> Callable[[], None]:
        self.notifies[name] = handler
        return lambda: self.notifies.pop(name, None) and None

    def on_stream(
        self, name: str, handler: Callable[[StreamInterface], Awaitable[None]], *, concurrency: int
    ) -> Callable[[], None]:
        self.streams[name] = handler
        return lambda: self.streams.pop(name, None) and None

    async def request(
        self,
        peer: PeerId,
        name: str,
        body: bytes,
        *,
        timeout_s: float | None,
        idempotent: bool,
        headers: Headers | None,
    ) -> bytes:
        """Reverses the body; fails, hangs or errs when the name says so."""
        self._check(peer)
        if name in FAILURES:
            raise FAILURES[name]
        if name == "hang":
            self._node.hanging.set()
            try:
                await trio.sleep_forever()
            finally:
                self._node.hang_cancelled.set()
        if name == "slow":
            self._node.hanging.set()
            await self._node.let_go.wait()
        if name == "bug":
            raise ZeroDivisionError("a secret detail")
        if name == "headers":
            return repr(sorted((headers or {}).items())).encode()
        return body[::-1]

    async def notify(self, peer: PeerId, name: str, body: bytes, *, headers: Headers | None) -> None:
        self._check(peer)
        self.notified.append((peer, name, body, headers))

    def _check(self, peer: PeerId) -> None:
        if peer == STRANGER:
            raise NotMemberError(f"{peer} is not a member")
        if peer not in (ANN, BOB):
            raise PeerNotFoundError(f"no address of {peer} is known")

    @asynccontextmanager
    async def _stream(
        self, peer: PeerId, name: str, body: bytes, headers: Headers | None
    ) -> AsyncGenerator[FakeStream]:
        self._check(peer)
        if name in FAILURES:
            raise FAILURES[name]
        stream = FakeStream(name, body, peer, headers)
        self._node.opened.append(stream)
        async with trio.open_nursery() as nursery:
            if name == "echo":
                nursery.start_soon(stream.echo)
            yield stream
            nursery.cancel_scope.cancel()

    def stream(
        self, peer: PeerId, name: str, body: bytes, *, headers: Headers | None
    ) -> AbstractAsyncContextManager[FakeStream]:
        return self._stream(peer, name, body, headers)

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
    ) -> Mapping[PeerId, bytes | Dep2pError]:
        self.broadcast_idempotent.append(idempotent)
        return {peer: body[::-1] if peer == ANN else FAILURES["timeout"] for peer in peers}

    async def broadcast_notify(
        self, peers: Sequence[PeerId], name: str, body: bytes, *, concurrency: int, headers: Headers | None
    ) -> Mapping[PeerId, Dep2pError | None]:
        return {peer: None if peer == ANN else FAILURES["overloaded"] for peer in peers}


@dataclass
class FakeMember:
    """A member."""

    peer: PeerId
    state: Literal["up", "down", "left"] = "up"
    addrs: tuple[str, ...] = (ADDR,)
    seq: int = 3
    issued_s: float = 1_700_000_000.0
    expires_s: float = 1_800_000_000.0
    last_seen_s: float | None = None
    fields: dict[str, str] = field(default_factory=dict[str, str])
    services: tuple[ServiceOffer, ...] = ()


class FakeMembership:
    """Two members are up, one is down."""

    def __init__(self) -> None:
        self.fields: dict[str, str] = {}

    def member(self, peer: PeerId) -> FakeMember | None:
        return next((each for each in self.members() if each.peer == peer), None)

    def set_fields(self, fields: Mapping[str, str | None]) -> Mapping[str, str]:
        merged = {key: value for key, value in {**self.fields, **fields}.items() if value is not None}
        check_fields(merged)
        self.fields = merged
        return merged

    def members(self) -> list[FakeMember]:
        offer = ServiceOffer("resize", "workers", "1.2")
        ann = FakeMember(ANN, fields={"status": "at lunch\x1b[2J"}, services=(offer,))
        return [FakeMember(ME), ann, FakeMember(BOB), FakeMember(STRANGER, "down")]


def _summary(realm: Realm) -> RealmSummary:
    return RealmSummary(name=realm.name, realm_id=realm.realm_id, members_known=4, members_up=2)


@dataclass
class FakeHost:
    """Connections that are only listed."""

    open: dict[PeerId, FakeConnection] = field(default_factory=dict[PeerId, FakeConnection])

    def connections(self, peer: PeerId | None = None) -> list[FakeConnection]:
        return [each for each in self.open.values() if peer in (None, each.peer)]

    def addrs(self, peer: PeerId) -> list[str]:
        return [f"/ip4/127.0.0.1/tcp/4001/p2p/{peer}"]


class FakeNode:
    """In the realm "team" from the start. ANN and BOB answer, STRANGER is no member, others are not found."""

    def unreached_bootstrap(self) -> tuple[str, ...]:
        return self.unreached

    def __init__(self) -> None:
        self.peer_id = ME
        self.limits = Limits()
        self.host = FakeHost()
        self.unreached: tuple[str, ...] = ()
        self._membership = FakeMembership()
        self._realms: dict[RealmId, tuple[Realm, FakeMessaging]] = {}
        self.pubsubs: dict[RealmId | None, FakePubSub] = {}
        self.topics_max = 100
        self._registered: list[tuple[str | None, Callable[[MessagingInterface], Callable[[], None]]]] = []
        self._host_listeners: list[Callable[[HostEvent], None]] = []
        self._member_listeners: list[Callable[[RealmId, MemberEvent], None]] = []
        self.hanging, self.hang_cancelled, self.let_go = trio.Event(), trio.Event(), trio.Event()
        self.opened: list[FakeStream] = []
        self.drained = 0
        self.sessions = Sessions(self, SessionHandlers(), self.limits)
        """A test that wants sessions puts those of a real node here."""
        self.outbox = Outbox(self)
        self.queues = FakeQueues()
        self.tracer = Tracer(self.peer_id, 1_000, TraceSources(list, list, list, list, list, list))
        self._add(Realm.from_psk(bytes(32), "team"))

    def delivery(self, realm: RealmChoice = None) -> ReliableDelivery:
        raise NotInRealmError("this node has no reliable delivery")

    def services(self, realm: RealmChoice = None) -> RealmServices:
        raise NotInRealmError("this node has no services")

    def all_services(self) -> list[RealmServices]:
        return []

    def _add(self, realm: Realm) -> None:
        messaging = FakeMessaging(self, realm.realm_id)
        self._realms[realm.realm_id] = realm, messaging
        self.pubsubs[realm.realm_id] = FakePubSub(realm.realm_id, ANN, BOB)
        for only, register in self._registered:
            if only is None:
                register(messaging)

    def _pick(self, realm: RealmChoice) -> tuple[Realm, FakeMessaging]:
        found = [each for each in self._realms.values() if realm in (None, each[0], each[0].name, each[0].realm_id)]
        if len(found) != 1:
            raise NotInRealmError(f"this node is not in a realm {realm!r}")
        return found[0]

    def listen_addrs(self) -> list[str]:
        return [f"/ip4/127.0.0.1/tcp/4001/p2p/{ME}"]

    def realms(self) -> list[RealmSummary]:
        return [_summary(realm) for realm, _ in self._realms.values()]

    def peers(self) -> list[PeerSummary]:
        now = trio.current_time()
        return [
            PeerSummary(
                peer=peer,
                connections=(connection_summary(connection, now),),
                addrs=tuple(self.host.addrs(peer)),
                realms=tuple(realm.name for realm, _ in self._realms.values() if peer == ANN),
            )
            for peer, connection in self.host.open.items()
        ]

    def realm(self, realm: RealmChoice = None) -> Realm:
        return self._pick(realm)[0]

    def membership(self, realm: str | None) -> FakeMembership:
        self._pick(realm)
        return self._membership

    def members(self, realm: str | None) -> list[MemberSummary]:
        self._pick(realm)
        return [
            MemberSummary(
                peer=each.peer,
                addrs=tuple(each.addrs),
                state=each.state,
                seq=each.seq,
                issued_s=each.issued_s,
                expires_s=each.expires_s,
                last_seen_s=each.last_seen_s,
                fields=dict(each.fields),
                services=offered(each.services),
            )
            for each in self._membership.members()
        ]

    def messaging(self, realm: str | None = None) -> FakeMessaging:
        return self._pick(realm)[1]

    def pubsub(self, realm: str | None = None, *, public: bool = False) -> FakePubSub:
        if public and None not in self.pubsubs:
            raise NotInRealmError("public pub/sub is off")
        return self.pubsubs[None if public else self._pick(realm)[0].realm_id]

    async def join(self, topic: str, *, realm: str | None, public: bool) -> FakeTopic:
        await trio.lowlevel.checkpoint()
        pubsub = self.pubsub(realm, public=public)
        if not pubsub.has_joined(topic) and len(self.topics()) >= self.topics_max:
            raise TooManyTopicsError(f"this node is in {self.topics_max} topics already")
        pubsub.handles[topic] += 1
        return FakeTopic(pubsub, topic)

    @asynccontextmanager
    async def subscribe(
        self,
        topic: str,
        *,
        realm: str | None,
        buffer_items: int,
        buffer_bytes: int,
        on_full: OnFull,
        group: str | None = None,
    ) -> AsyncGenerator[Subscription, None]:
        pubsub = self.pubsub(realm)
        async with FakeTopic(pubsub, topic).subscribe(
            buffer_items=buffer_items, buffer_bytes=buffer_bytes, on_full=on_full, group=group
        ) as messages:
            yield messages

    def topics(self) -> list[TopicSummary]:
        names: dict[RealmId | None, str] = {realm_id: realm.name for realm_id, (realm, _) in self._realms.items()}
        return [each for realm, pubsub in self.pubsubs.items() for each in pubsub.topics(names.get(realm))]

    def topic_peers(self, topic: str, *, realm: str | None, public: bool) -> TopicPeers:
        pubsub = self.pubsub(realm, public=public)
        peers, joined = pubsub.peers(topic), pubsub.has_joined(topic)
        if not joined and not peers:
            raise TopicNotFoundError("neither this node nor a neighbour is in the topic")
        scores = {peer: score for peer, score in pubsub.scores().items() if peer in peers}
        return TopicPeers(
            topic=topic,
            realm_id=pubsub.realm_id,
            joined=joined,
            peers=tuple(peers),
            mesh=tuple(pubsub.mesh(topic)),
            scores=scores,
        )

    async def join_realm(self, realm: Realm, addrs: Sequence[str] = ()) -> RealmSummary:
        await trio.lowlevel.checkpoint()
        if realm.realm_id not in self._realms:
            self._add(realm)
        return _summary(realm)

    async def leave_realm(self, realm: str) -> None:
        realm_id = self._pick(realm)[0].realm_id
        del self._realms[realm_id]
        for subscription in list(self.pubsubs.pop(realm_id).subscriptions):
            subscription.close()

    def handle(
        self, realm: str | None, register: Callable[[MessagingInterface], Callable[[], None]]
    ) -> Callable[[], None]:
        chosen = [self._pick(realm)] if realm is not None else list(self._realms.values())
        entry = (realm, register)
        self._registered.append(entry)
        undo = [register(messaging) for _, messaging in chosen]

        def unregister() -> None:
            self._registered.remove(entry)
            for each in undo:
                each()

        return unregister

    async def connect(self, addr: str, *, timeout_s: float | None) -> ConnectedPeer:
        head, _, peer = addr.rpartition("/p2p/") if addr.startswith("/") else ("/ip4", "", addr)
        if not head:
            raise ValueError(f"{addr!r} is not a full address")
        if parse_peer_id(peer) not in (ANN, BOB):
            raise PeerNotFoundError(f"{addr}: connection refused")
        connection = FakeConnection(PeerId(peer), len(self.host.open) + 1)
        self.host.open[connection.peer] = connection
        self.tell(PeerConnected(connection))
        return connected_peer(connection, ["team"])

    async def disconnect(self, peer: PeerId) -> bool:
        return self.host.open.pop(peer, None) is not None

    async def ping(self, peer: PeerId, *, timeout_s: float) -> float:
        if peer == BOB:
            raise RequestTimeoutError("no pong")
        if peer != ANN:
            raise PeerNotFoundError(f"no address of {peer} is known")
        return 0.002

    def subscribe_peers(self, on_event: Callable[[HostEvent], None]) -> Callable[[], None]:
        self._host_listeners.append(on_event)
        return lambda: self._host_listeners.remove(on_event)

    def subscribe_members(self, on_event: Callable[[RealmId, MemberEvent], None]) -> Callable[[], None]:
        self._member_listeners.append(on_event)
        return lambda: self._member_listeners.remove(on_event)

    def tell(self, event: HostEvent | MemberEvent) -> None:
        """Let an event happen."""
        if isinstance(event, MemberEvent):
            for on_member in list(self._member_listeners):
                on_member(self.realm("team").realm_id, event)
        else:
            for on_event in list(self._host_listeners):
                on_event(event)

    def counters(self) -> dict[str, int]:
        return {"host_dials": 3, "host_peers_known": 2, "messaging_requests_in": 7, "realm_handshakes": 1}

    def quotas(self) -> list[MemberUsage]:
        return [MemberUsage(BOB, {"queue_consumers": 2}, {"queues": 3, "request_rate": 1})]

    def stats(self) -> dict[str, object]:
        return {"uptime_s": 12.5, "connections": 0, "realms": {"team": {"links": 0}}}

    async def drain(self) -> None:
        self.drained += 1
        await trio.lowlevel.checkpoint()


def as_node_api(node: FakeNode) -> NodeInterface:
    """The type checker's proof that the fake is what the control API needs."""
    return node
