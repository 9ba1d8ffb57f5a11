"""The node: composes host, realms and messaging, owns their tasks, starts and drains them."""

import logging
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Literal, TypeVar, Unpack, overload

import trio

from dep2p.arguments import (
    WrongTypeError,
    check_decorated,
    check_handler,
    check_text,
    checks_arguments,
    unchecked,
)
from dep2p.concurrency.exception_groups import unwrap_single
from dep2p.control_api.replies import (
    ConnectedPeer,
    MemberSummary,
    PeerSummary,
    RealmSummary,
)
from dep2p.delivery.receipts import Receipt
from dep2p.delivery.service import ReliableDelivery
from dep2p.errors import (
    Dep2pError,
    NotInRealmError,
    NotMemberError,
    PeerNotFoundError,
    RequestTimeoutError,
    TooManyTopicsError,
)
from dep2p.gossipsub.params import GossipParams
from dep2p.gossipsub.scoring.params import ScoreParams
from dep2p.gossipsub.topic_types import (
    OnNoPeers,
    PublishResult,
)
from dep2p.host.interface import Host, HostEvent
from dep2p.identity import Identity
from dep2p.limits import HANDLER_CONCURRENCY, NOTIFY_CONCURRENCY, Limits
from dep2p.messaging.offered_services import offered_service
from dep2p.messaging.service import MessageStream, Messaging, NotifyHandler, RequestHandler, StreamHandler
from dep2p.node.host_factory import NetworkOptions, libp2p_host
from dep2p.node.incoming import NodeIncoming
from dep2p.node.joined_realm import Joined, Registration, counters_of
from dep2p.node.members import NodeMembers
from dep2p.node.outbox import Outbox
from dep2p.node.pubsub_networks import PubSubs
from dep2p.node.queues_api import NodeQueues
from dep2p.node.services import NodeServices, OutboxKind, RealmParts, RealmServices
from dep2p.node.sessions import Sessions
from dep2p.node.summaries import (
    connected_peer,
    member_summaries,
    peer_summaries,
    realm_summary,
)
from dep2p.node.topics import NodeTopics
from dep2p.node.tracer import Tracer, make_tracer
from dep2p.node.validation import check_arguments, split_addr
from dep2p.protocols.addresses.dialable import addrs_for_others
from dep2p.protocols.fairness.ledger import MemberUsage
from dep2p.protocols.messaging.incoming import (
    RequestOptions,
    SendOptions,
)
from dep2p.protocols.services.options import ServiceOptions
from dep2p.pubsub.service import PubSub
from dep2p.pubsub.topic import Topic
from dep2p.pubsub.wire_formats import PublicPubSub
from dep2p.queues.settings import QueueSettings
from dep2p.realm.credentials import Realm, RealmChoice
from dep2p.realm.handshake_responder import RealmResponder
from dep2p.realm.interface import MemberEvent
from dep2p.realm.membership import Membership, MembershipOptions
from dep2p.tracing.settings import TraceSettings
from dep2p.types import Headers, PeerId, RealmId, parse_peer_id

_logger = logging.getLogger("dep2p.node")

_KNOWN_ADDR_TTL_S = 7 * 24 * 3600.0
_NODE = "node"
"""The holder of the connection interest in peers that the user named: the node itself, not one of its realms."""

H = TypeVar("H")


@checks_arguments
class Node(NodeMembers, NodeTopics, NodeIncoming):
    """A running node. Made by :meth:`open`; every method is for the trio thread that opened it.

    Messaging methods take ``realm``, which may be left out while the node is in exactly one realm; they raise
    :class:`NotInRealmError` when that is not so, and what :class:`dep2p.messaging.service.Messaging` raises.
    """

    def __init__(
        self,
        host: Host,
        identity: Identity,
        limits: Limits,
        data_dir: Path | None,
        nursery: trio.Nursery,
        pubsubs: PubSubs,
        services: NodeServices,
    ) -> None:
        self.host = host
        self.identity = identity
        self.limits = limits
        self.data_dir = data_dir
        self._bootstrap: dict[PeerId, None] = {}
        self._nursery = nursery
        self._joined: dict[RealmId, Joined] = {}
        self._joining: dict[RealmId, trio.Event] = {}
        self._registrations: list[Registration] = []
        self._member_listeners: dict[object, Callable[[RealmId, MemberEvent], None]] = {}
        self._rng = random.SystemRandom()
        self._responder = RealmResponder(host, identity.peer_id, limits, rng=self._rng)
        self._pubsubs = pubsubs
        self._services = services
        self._only_delivery: ReliableDelivery | None = None
        """The reliable delivery of the only realm, while the node is in just one. Each reliable message goes through
        it."""
        self.sessions: Sessions = Sessions(self, services.session_registry, limits)
        """Ordered sessions: pushes to a client in strict order across reconnects."""
        self.queues: NodeQueues = NodeQueues(self, services)
        """Durable queues. Its own calls reach the queues of this process; see :class:`NodeQueues` for others."""
        self.outbox: Outbox = Outbox(self)
        """Reliable messages that wait, and those that were lost."""
        self.tracer: Tracer = make_tracer(self, services.queue_ownership, limits)
        """Starts and stops the trace of this node."""
        self._draining = False
        self._drained = trio.Event()
        self._is_open = True
        self.started_at_s: float = trio.current_time()

    @classmethod
    @unchecked
    @asynccontextmanager
    async def open(
        cls,
        realm: Realm | None = None,
        *,
        realms: Sequence[Realm] = (),
        data_dir: Path | str | None = None,
        identity: Identity | None = None,
        listen: Sequence[str] = ("/ip4/127.0.0.1/tcp/0",),
        advertise: Sequence[str] = (),
        bootstrap: Sequence[str] = (),
        mdns: bool = False,
        dht: bool = False,
        rendezvous: Sequence[str] = (),
        relay: Literal["off", "client", "server"] = "off",
        limits: Limits | None = None,
        host: Host | None = None,
        pubsub_params: GossipParams | None = None,
        pubsub_scores: ScoreParams | None = None,
        public_pubsub: bool | PublicPubSub = False,
        trace: bool = False,
        trace_json: Path | str | None = None,
        trace_dir: Path | str | None = None,
        trace_settings: TraceSettings | None = None,
        outbox: OutboxKind = "auto",
        queues: QueueSettings | None = None,
    ) -> AsyncGenerator["Node", None]:
        """Start a node; leaving the block drains and stops it.

        ``data_dir`` keeps the identity, peer store and member tables; without it nothing is written and the identity is
        new. ``listen`` are multiaddrs, port 0 for any free port; ``bootstrap`` are addresses ending in ``/p2p/PEER``.
        ``host`` replaces the libp2p host, for tests (:class:`dep2p.testing.MemoryHost`); give its ``identity`` too.

        ``pubsub_params`` and ``pubsub_scores`` replace the router's parameters (made from ``limits``) and its scoring;
        ``public_pubsub`` also speaks libp2p's GossipSub, to all peers. ``trace`` keeps the router's trace events in
        ``pubsub().traces``; ``outbox``: where reliable messages wait, by default on disk when there is a ``data_dir``;
        ``trace_json`` appends them to a file in the form of libp2p's JSON tracer. ``queues``: where they are kept.
        ``trace_dir``: write a trace of everything there, from the start on, as ``trace_settings`` say (docs/howto/
        traces.md); ``node.tracer`` starts and stops one later.

        Raises ListenError, IdentityError, RealmFileError, StoreError, TraceError, or ``ValueError`` for a malformed
        argument; what the block raises comes out of it as it is.
        """
        network = NetworkOptions(
            listen=listen,
            advertise=advertise,
            bootstrap=bootstrap,
            mdns=mdns,
            dht=dht,
            rendezvous=rendezvous,
            relay=relay,
        )
        check_arguments(realm, realms, listen=listen, advertise=advertise, bootstrap=bootstrap, rendezvous=rendezvous)
        limits = limits or Limits()
        directory = None if data_dir is None else Path(data_dir)
        if identity is None:
            identity = Identity.generate() if directory is None else Identity.load_or_create(directory / "node.key")
        bootstrap_peers = [split_addr(addr) for addr in bootstrap]
        async with AsyncExitStack() as stack:
            stack.enter_context(unwrap_single())
            if host is None:
                host = await stack.enter_async_context(libp2p_host(identity, limits, directory, network))
            elif host.peer_id != identity.peer_id:
                raise ValueError(
                    f"the host is {host.peer_id}, the identity {identity.peer_id}: give the host's identity"
                )
            services = NodeServices(host, identity, limits, directory, outbox, queues)
            stack.push_async_callback(services.aclose)
            async with trio.open_nursery() as nursery:
                pubsubs = PubSubs(
                    host, identity, limits, pubsub_params, pubsub_scores, tracing=trace, fairness=services.fairness
                )
                await pubsubs.start(nursery, public_pubsub, None if trace_json is None else Path(trace_json))
                await services.start(nursery)
                node = cls(host, identity, limits, directory, nursery, pubsubs, services)
                node._bootstrap.update(dict.fromkeys(peer for peer, _addr in bootstrap_peers if peer != node.peer_id))
                for peer, addr in bootstrap_peers:
                    node.remember(peer, [addr])
                await nursery.start(node.tracer.run)
                try:
                    if trace_dir is not None:
                        await node.tracer.start(Path(trace_dir), trace_settings or TraceSettings())
                    for joined in ([realm] if realm is not None else []) + list(realms):
                        await node.join_realm(joined)
                    yield node
                    await node.drain()
                    await node.tracer.stop("the node stopped")
                finally:
                    node._is_open = False
                    node._realms_changed()
                    nursery.cancel_scope.cancel()

    # Realms

    @property
    def peer_id(self) -> PeerId:
        """This node's own id."""
        return self.host.peer_id

    def listen_addrs(self) -> list[str]:
        """The addresses where this node listens, each ending in its id."""
        return self.host.listen_addrs()

    def unreached_bootstrap(self) -> tuple[str, ...]:
        """Say of each bootstrap peer that cannot be reached why, human-readable; () when all are connected."""
        failures = ((peer, self.host.dial_failure(peer)) for peer in self._bootstrap)
        return tuple(
            f"the bootstrap peer {peer} cannot be reached: {why}; it is tried again"
            for peer, why in failures
            if why is not None
        )

    def remember(self, peer: PeerId, addrs: Sequence[str]) -> None:
        """Keep addresses of a peer and stay connected to it."""
        if peer == self.peer_id:
            return
        self.host.add_addrs(peer, addrs, ttl_s=_KNOWN_ADDR_TTL_S)
        self.host.keep_connected(peer, _NODE)

    async def join_realm(self, realm: Realm, addrs: Sequence[str] = ()) -> RealmSummary:
        """Join a realm and, in the background, dial ``addrs`` (each ending in ``/p2p/PEER``). Idempotent.

        Raises ValueError for a malformed address, NotInRealmError when the realm limit is reached.
        """
        peers = [split_addr(addr) for addr in (*realm.bootstrap, *addrs)]
        while realm.realm_id in self._joining:
            await self._joining[realm.realm_id].wait()
        if realm.realm_id not in self._joined:
            if len(self._joined) + len(self._joining) >= self.limits.realms_max:
                raise NotInRealmError(
                    f"this node is in {len(self._joined)} realms, the most allowed: leave one, "
                    "or raise realms_max in [limits]"
                )
            done = self._joining[realm.realm_id] = trio.Event()
            try:
                await self._start_realm(realm)
            finally:
                del self._joining[realm.realm_id]
                done.set()
        for peer, addr in peers:
            self.remember(peer, [addr])
        self._joined[realm.realm_id].membership.introduce(peer for peer, _addr in peers)
        return realm_summary(self._joined[realm.realm_id])

    async def _start_realm(self, realm: Realm) -> None:
        records = None if self.data_dir is None else self.data_dir / "members" / f"{realm.realm_id}.cbor"
        options = MembershipOptions(records_path=records, rng=self._rng, responder=self._responder)
        membership = Membership(realm, self.host, self.identity, self.limits, options)
        messaging = Messaging(
            self.host,
            membership,
            realm.realm_id,
            self.limits,
            rng=self._rng,
            fairness=self._services.fairness,
        )
        pubsub = self._pubsubs.of_realm(realm, membership)
        services = self._services.of_realm(RealmParts(realm, membership, messaging, pubsub))
        messaging.offered.announce_by(membership.set_services)
        joined = Joined(realm, membership, messaging, pubsub, services, trio.CancelScope(), trio.Event())
        for registration in self._registrations:
            self._apply(registration, joined)
        self.tracer.attach(pubsub, messaging, services.delivery, services.sessions)
        membership.subscribe(lambda event: self._notify_members(realm.realm_id, event))
        await self._nursery.start(self._run_realm, joined)

    async def _run_realm(
        self, joined: Joined, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        try:
            with joined.scope:
                async with trio.open_nursery() as nursery:
                    await nursery.start(joined.messaging.run)
                    await nursery.start(joined.pubsub.run)
                    for _name, service in joined.services.each():
                        await nursery.start(service.run)
                    await nursery.start(joined.membership.run)
                    self._joined[joined.realm.realm_id] = joined
                    self._realms_changed()
                    task_status.started()
        finally:
            self._joined.pop(joined.realm.realm_id, None)
            self._realms_changed()
            for registration in self._registrations:
                registration.undo.pop(joined.realm.realm_id, None)
            joined.ended.set()

    def _realms_changed(self) -> None:
        joined = list(self._joined.values()) if self._is_open else []
        self._only_delivery = joined[0].services.delivery if len(joined) == 1 else None

    async def leave_realm(self, realm: RealmChoice) -> None:
        """Finish what is in flight, tell the members, and stop serving the realm; cancelled, stop at once.

        Raises NotInRealmError.
        """
        joined = self._pick(realm)
        try:
            for _name, service in joined.services.each():
                await service.drain()
            await joined.pubsub.leave_all()
            await joined.messaging.drain()
            await joined.membership.leave()
        finally:  # a realm that is half left would refuse everything and stay joined
            joined.scope.cancel()
        await joined.ended.wait()

    def realms(self) -> list[RealmSummary]:
        """The joined realms, in the order of joining."""
        return [realm_summary(joined) for joined in self._joined.values()]

    def members(self, realm: RealmChoice = None) -> list[MemberSummary]:
        """List the members that the node knows, with their states, addresses and times. Raises NotInRealmError."""
        return member_summaries(self._pick(realm))

    def invite(self, realm: RealmChoice = None, addrs: Sequence[str] = ()) -> str:
        """Make an invite: a text with the realm's secret and ``addrs``. Raises NotInRealmError.

        When ``addrs`` is empty they are this node's own, without those on loopback when it has others.
        """
        return self._pick(realm).realm.invite(addrs or addrs_for_others(self.listen_addrs()))

    def realm(self, realm: RealmChoice = None) -> Realm:
        """The joined realm that ``realm`` names. Raises NotInRealmError."""
        return self._pick(realm).realm

    def membership(self, realm: RealmChoice = None) -> Membership:
        """A joined realm's members. Raises NotInRealmError."""
        return self._pick(realm).membership

    @unchecked
    def messaging(self, realm: RealmChoice = None) -> Messaging:
        """A joined realm's messaging. Raises NotInRealmError."""
        return self._pick(realm).messaging

    @unchecked
    def delivery(self, realm: RealmChoice = None) -> ReliableDelivery:
        """A joined realm's reliable delivery. Raises NotInRealmError."""
        return self._pick(realm).services.delivery

    @unchecked
    def pubsub(self, realm: RealmChoice = None, *, public: bool = False) -> PubSub:
        """A joined realm's pub/sub, or with ``public`` that of the public network.

        Raises NotInRealmError, also when the node was opened without ``public_pubsub``.
        """
        if type(public) is not bool:
            raise WrongTypeError(f"public must be True or False, not {type(public).__name__}")
        return self._pubsubs.of_public() if public else self._pick(realm).pubsub

    @unchecked
    def services(self, realm: RealmChoice = None) -> RealmServices:
        """Return a joined realm's services beyond messaging and pub/sub. Raises NotInRealmError."""
        return self._pick(realm).services

    def all_services(self) -> list[RealmServices]:
        """The services of each realm, in the order of joining."""
        return [joined.services for joined in self._joined.values()]

    def all_apps(self) -> list[tuple[Messaging, ReliableDelivery | None]]:
        """Messaging and reliable delivery of each realm, in the order of joining."""
        return [(joined.messaging, joined.services.delivery) for joined in self._joined.values()]

    def all_pubsubs(self) -> list[PubSub]:
        """The pub/sub of each realm in the order of joining, then that of the public network."""
        return [*(joined.pubsub for joined in self._joined.values()), *self._pubsubs.public]

    def _pick(self, realm: RealmChoice) -> Joined:
        joined = self._joined
        if realm is None and len(joined) == 1 and self._is_open:  # the usual case, which every message takes
            for only in joined.values():
                return only
        if self._nursery.cancel_scope.cancel_called:
            raise NotInRealmError("this node is closed: its `async with Node.open(…)` block has ended")
        if realm is None:
            if not joined:
                raise NotInRealmError("this node is in no realm: join one first (`dep2p realm join`)")
            names = ", ".join(each.realm.name for each in joined.values())
            raise NotInRealmError(f"this node is in {len(joined)} realms ({names}): say which one")
        if isinstance(realm, Realm):
            found = [joined[realm.realm_id]] if realm.realm_id in joined else []
            realm = realm.name
        else:
            check_text(realm, "the realm")
            found = [
                each
                for each in joined.values()
                if each.realm.name == realm or (len(realm) >= 6 and each.realm.realm_id.startswith(realm))
            ]
        if len(found) == 1:
            return found[0]
        known = ", ".join(each.realm.name for each in joined.values()) or "none"
        if found:
            raise NotInRealmError(f"{realm!r} names {len(found)} realms: give the realm's id")
        raise NotInRealmError(f"this node is not in a realm {realm!r} (joined: {known})")

    # Peers

    def peers(self) -> list[PeerSummary]:
        """List the connected peers, with their connections, addresses and realms."""
        return peer_summaries(self.host, self._joined.values())

    async def connect(self, addr: str, *, timeout_s: float | None = None) -> ConnectedPeer:
        """Dial ``addr`` (a peer id, or an address ending in ``/p2p/PEER``) and prove membership in each joined realm.

        Returns the connection that there is now, and the names of the realms in which the peer is a verified member.
        Raises PeerNotFoundError, or ValueError for a malformed address.
        """
        addrs: list[str] = []
        if addr.startswith("/"):
            peer, full = split_addr(addr)
            addrs = [full]
        else:
            peer = parse_peer_id(addr)
        # The address is not stored before a dial has proved it: identify writes a live peer's addresses.
        connection = await self.host.dial(peer, addrs, timeout_s=timeout_s)
        verified: list[str] = []
        for joined in list(self._joined.values()):
            try:
                connection = await joined.membership.connect(peer, addrs, timeout_s=timeout_s)
                verified.append(joined.realm.name)
            except (NotMemberError, PeerNotFoundError, RequestTimeoutError) as error:
                _logger.info("%s is not verified in realm %r: %s", peer, joined.realm.name, error)
        return connected_peer(connection, verified)

    async def disconnect(self, peer: PeerId) -> bool:
        """Close every connection to the peer and do not dial it again by itself; False when there was none."""
        self.host.forget(peer)
        return await self.host.disconnect(peer)

    async def ping(self, peer: PeerId, *, timeout_s: float = 5.0) -> float:
        """Round-trip seconds. Raises PeerNotFoundError, RequestTimeoutError."""
        return await self.host.ping(peer, timeout_s=timeout_s)

    def subscribe_peers(self, on_event: Callable[[HostEvent], None]) -> Callable[[], None]:
        """Call ``on_event`` for each connection that opens or ends; returns a function that ends it."""
        return self.host.subscribe(on_event)

    def subscribe_members(self, on_event: Callable[[RealmId, MemberEvent], None]) -> Callable[[], None]:
        """Call ``on_event`` for each member event of every realm; returns a function that ends it."""
        key = object()
        self._member_listeners[key] = on_event
        return lambda: self._member_listeners.pop(key, None) and None

    def _notify_members(self, realm_id: RealmId, event: MemberEvent) -> None:
        for on_event in list(self._member_listeners.values()):
            on_event(realm_id, event)

    # Messaging

    @unchecked
    async def request(
        self,
        peer: PeerId,
        name: str,
        body: bytes,
        *,
        timeout_s: float | None = None,
        idempotent: bool = False,
        headers: Headers | None = None,
        realm: RealmChoice = None,
    ) -> bytes:
        """Ask a peer and return its answer. ``timeout_s`` bounds all tries together; see :meth:`Messaging.request`."""
        messaging = self.messaging(realm)
        return await messaging.request(peer, name, body, timeout_s=timeout_s, idempotent=idempotent, headers=headers)

    @unchecked
    async def notify(
        self, peer: PeerId, name: str, body: bytes, *, headers: Headers | None = None, realm: RealmChoice = None
    ) -> None:
        """Send without an answer; see :meth:`Messaging.notify`."""
        await self.messaging(realm).notify(peer, name, body, headers=headers)

    def stream(
        self,
        peer: PeerId,
        name: str,
        body: bytes = b"",
        *,
        headers: Headers | None = None,
        realm: RealmChoice = None,
    ) -> AbstractAsyncContextManager[MessageStream]:
        """Open a two-way stream of items; see :meth:`Messaging.stream`."""
        return self.messaging(realm).stream(peer, name, body, headers=headers)

    async def broadcast_request(
        self,
        name: str,
        body: bytes,
        *,
        peers: Sequence[PeerId] | None = None,
        concurrency: int = 16,
        realm: RealmChoice = None,
        **options: Unpack[RequestOptions],
    ) -> Mapping[PeerId, bytes | Dep2pError]:
        """Ask many peers (every member that is up when ``peers`` is None); a result or an error for each.

        ``options``: those of `request`: ``timeout_s``, ``idempotent``, ``headers``.
        """
        targets = self._targets(realm, peers)
        return await self.messaging(realm).broadcast_request(targets, name, body, concurrency=concurrency, **options)

    async def broadcast_notify(
        self,
        name: str,
        body: bytes,
        *,
        peers: Sequence[PeerId] | None = None,
        concurrency: int = 16,
        headers: Headers | None = None,
        realm: RealmChoice = None,
    ) -> Mapping[PeerId, Dep2pError | None]:
        """Notify many peers (every member that is up when ``peers`` is None); None or an error for each."""
        return await self.messaging(realm).broadcast_notify(
            self._targets(realm, peers), name, body, concurrency=concurrency, headers=headers
        )

    def _targets(self, realm: RealmChoice, peers: Sequence[PeerId] | None) -> list[PeerId]:
        if peers is not None:
            return list(peers)
        return [m.peer for m in self.membership(realm).members() if m.state == "up" and m.peer != self.peer_id]

    @overload
    async def send(
        self,
        peer: PeerId,
        name: str,
        body: bytes,
        *,
        reliable: Literal[True],
        realm: RealmChoice = None,
        **options: Unpack[SendOptions],
    ) -> Receipt: ...

    @overload
    async def send(
        self,
        peer: PeerId,
        name: str,
        body: bytes,
        *,
        reliable: Literal[False] = False,
        realm: RealmChoice = None,
        **options: Unpack[SendOptions],
    ) -> None: ...

    @unchecked
    def send(
        self,
        peer: PeerId,
        name: str,
        body: bytes,
        *,
        reliable: bool = False,
        realm: RealmChoice = None,
        **options: Unpack[SendOptions],
    ) -> Awaitable[Receipt | None]:
        """Send to the handler of notifies ``name``. With ``reliable`` the peer handles it once, or the receipt says why
        not; ``ttl_s`` are the seconds until it expires.

        See :meth:`ReliableDelivery.send`, and :meth:`Messaging.notify` for a message that is not reliable.
        """
        if reliable:
            delivery = (self._only_delivery if realm is None else None) or self.delivery(realm)
            if not options:  # passing on none costs a tenth of `send`
                return delivery.send(peer, name, body)
            return delivery.send(peer, name, body, **options)
        headers, ttl_s = options.pop("headers", None), options.pop("ttl_s", None)
        options.pop("wait", None)
        if options:
            raise TypeError(f"send takes no {', '.join(options)}: its options are headers, wait and ttl_s")
        if ttl_s is not None:
            raise ValueError("ttl_s is for reliable messages: others are sent now or not at all")
        return self.messaging(realm).notify(peer, name, body, headers=headers)

    # Pub/sub

    async def join(self, topic: str, *, realm: RealmChoice = None, public: bool = False) -> Topic:
        """Join a topic of a realm, or of the public network. Joining again gives another handle of the same topic.

        Raises ``ValueError`` (an empty or too long name), TooManyTopicsError (``limits.pubsub_topics_max``),
        NotInRealmError.
        """
        pubsub = self.pubsub(realm, public=public)
        topics_max = pubsub.params.topics_max
        joined = sum(not status.by_pattern for status in self.topics())
        if not pubsub.has_handle(topic) and joined >= topics_max:
            raise TooManyTopicsError(
                f"this node is in {topics_max} topics already: leave one, or raise pubsub_topics_max in [limits]"
            )
        return await pubsub.join(topic)

    @unchecked
    async def publish(
        self,
        topic: str,
        body: bytes,
        *,
        wait: bool = True,
        on_no_peers: OnNoPeers = "error",
        headers: Headers | None = None,
        realm: RealmChoice = None,
        public: bool = False,
    ) -> PublishResult:
        """Publish without joining the topic; see :meth:`Topic.publish`."""
        pubsub = self.pubsub(realm, public=public)
        return await pubsub.publish(topic, body, wait=wait, on_no_peers=on_no_peers, headers=headers)

    # Handlers

    @unchecked
    def on_request(
        self,
        name: str,
        *,
        realm: RealmChoice = None,
        concurrency: int = HANDLER_CONCURRENCY,
        rate_per_s: float = 0.0,
        **service: Unpack[ServiceOptions],
    ) -> Callable[[RequestHandler], RequestHandler]:
        """Decorator: answer requests ``name`` of verified members, in every realm or in the given one.

        With ``group`` it is a service: all members hear that this node offers it, `request_any` may choose this node,
        and further handlers of the same group, ``version``, ``schema`` and ``metadata`` share the requests.
        Raises ``ValueError`` when the name has another handler, or the node offers too much.
        """
        check_decorated(name)
        offered = offered_service(name, service)
        return self._decorator(
            realm,
            lambda m, fn: m.on_request(name, fn, concurrency=concurrency, rate_per_s=rate_per_s, service=offered),
        )

    @unchecked
    def on_notify(
        self, name: str, *, realm: RealmChoice = None, concurrency: int = NOTIFY_CONCURRENCY, rate_per_s: float = 0.0
    ) -> Callable[[NotifyHandler], NotifyHandler]:
        """Decorator: take notifies ``name`` of verified members, in order per peer."""
        check_decorated(name)
        return self._decorator(
            realm, lambda m, fn: m.on_notify(name, fn, concurrency=concurrency, rate_per_s=rate_per_s)
        )

    @unchecked
    def on_stream(
        self, name: str, *, realm: RealmChoice = None, concurrency: int = HANDLER_CONCURRENCY
    ) -> Callable[[StreamHandler], StreamHandler]:
        """Decorator: serve streams ``name`` that verified members open."""
        check_decorated(name)
        return self._decorator(realm, lambda m, fn: m.on_stream(name, fn, concurrency=concurrency))

    def _decorator(
        self, realm: RealmChoice, register: Callable[[Messaging, H], Callable[[], None]]
    ) -> Callable[[H], H]:
        def decorate(function: H) -> H:
            check_handler(function)
            self._add_registration(realm, lambda messaging: register(messaging, function))
            return function

        return decorate

    def handle(self, realm: RealmChoice, register: Callable[[Messaging], Callable[[], None]]) -> Callable[[], None]:
        """Register a handler on every realm joined now or later (or the given one); returns a function that ends it."""
        registration = self._add_registration(realm, register)

        def unregister() -> None:
            if registration in self._registrations:
                self._registrations.remove(registration)
            for undo in registration.undo.values():
                undo()
            registration.undo.clear()

        return unregister

    def _add_registration(
        self, realm: RealmChoice, register: Callable[[Messaging], Callable[[], None]]
    ) -> Registration:
        only = None if realm is None else self._pick(realm).realm.realm_id
        registration = Registration(only, register, {})
        try:
            for joined in self._joined.values():
                self._apply(registration, joined)
        except BaseException:  # register in every realm, or in none
            for undo in registration.undo.values():
                undo()
            raise
        self._registrations.append(registration)
        return registration

    def _apply(self, registration: Registration, joined: Joined) -> None:
        realm_id = joined.realm.realm_id
        if registration.realm_id in (None, realm_id):
            registration.undo[realm_id] = registration.register(joined.messaging)

    # Running it

    @property
    def is_draining(self) -> bool:
        """True from the first call of :meth:`drain` on."""
        return self._draining

    async def drain(self) -> None:
        """Take no new work and wait for work in flight, at most ``limits.drain_timeout_s``; once in its life."""
        if self._draining:
            await self._drained.wait()
            return
        self._draining = True
        try:
            with trio.move_on_after(self.limits.drain_timeout_s):
                async with trio.open_nursery() as nursery:
                    for joined in list(self._joined.values()):
                        for _name, service in joined.services.each():
                            nursery.start_soon(service.drain)
                        nursery.start_soon(joined.messaging.drain)
                    for pubsub in self.all_pubsubs():
                        nursery.start_soon(pubsub.drain)
        finally:
            self._drained.set()

    def counters(self) -> dict[str, int]:
        """Monotonic counts of every part: ``host_…``, ``realm_…``, ``pubsub_…`` and so on, summed over realms."""
        total = counters_of(self.host, self._joined.values())
        traced = {f"trace_{name}": count for name, count in self.tracer.counters().items()}
        refused = {f"quota_refused_{name}": count for name, count in self._services.fairness.ledger.refused.items()}
        return {**total, **self._pubsubs.own_counters(), **traced, **refused}

    def quotas(self) -> list[MemberUsage]:
        """Return what members hold of their quotas and what was refused to them, the most refused first."""
        return self._services.fairness.ledger.usage()

    def stats(self) -> dict[str, object]:
        """Return counts of this moment, human-readable: uptime, connections, realms and their links."""
        return {
            "uptime_s": trio.current_time() - self.started_at_s,
            "connections": len(self.host.connections()),
            "realms": {each.realm.name: each.messaging.stats() for each in self._joined.values()},
            "pubsub": {each.realm.name: each.pubsub.stats() for each in self._joined.values()},
            "public_pubsub": [public.stats() for public in self._pubsubs.public],
            "services": {each.realm.name: each.services.stats() for each in self._joined.values()},
        }
