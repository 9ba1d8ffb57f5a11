"""A thin client of a running daemon, for asyncio and trio programs alike.

The methods are those of :class:`dep2p.node.node.Node`, and so are the exceptions: a request that times out raises
:class:`dep2p.errors.RequestTimeoutError` here as there. What only a daemon can say is a :class:`ControlError`, and when
no daemon answers, a :class:`DaemonUnreachableError`; any call may raise these two. What a node answers at once, a
client asks its daemon for: ``node.realms()`` is ``await client.realms()``.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, Unpack, overload
from urllib.parse import quote

from msgspec import UNSET

from dep2p.arguments import check_decorated, check_handler, checks_arguments
from dep2p.client.background import Background, tasks
from dep2p.client.delivery import FULL_TIMEOUT_S, ClientOutbox, ClientReceipt, ClientTopicPublish
from dep2p.client.gathers import GatherClientApi
from dep2p.client.members import MemberClientApi
from dep2p.client.messages import ClientStreamHandler, Incoming, NotifyHandler, RequestHandler
from dep2p.client.models import Event, FeedInterrupted, FeedResumed, NoticingEventStream, line_or_lag, realm_text
from dep2p.client.opening import transport_to
from dep2p.client.queues.queues import ClientQueues
from dep2p.client.reconnection.feeds import FeedCall, opened_feed
from dep2p.client.reconnection.outages import ReconnectOptions, reconnect_bounds
from dep2p.client.services import ServiceClientApi
from dep2p.client.sessions.sessions import ClientSessions
from dep2p.client.streams import ClientStream
from dep2p.client.topics import ClientSubscription, ClientTopic, TopicPlace, publish, publish_from, publish_reliably
from dep2p.client.traces import ClientTracer
from dep2p.client.transport import Transport
from dep2p.config.target import TargetArguments
from dep2p.control_api.calls import (
    ConnectPeer,
    InviteToRealm,
    JoinRealm,
    MessageMember,
    OpenStreamCall,
    PingPeer,
    RequestMember,
    SendReliably,
    base64_text,
)
from dep2p.control_api.encoding import encode_headers
from dep2p.control_api.errors import ControlError, error_from_problem
from dep2p.control_api.replies import (
    AcceptedReply,
    BroadcastReply,
    Configuration,
    ConnectedPeer,
    DaemonStatus,
    DeliveryReceipt,
    DrainState,
    EventLine,
    InviteReply,
    LimitsSummary,
    MemberList,
    MemberResult,
    MemberSummary,
    PeerDisconnection,
    PeerList,
    PeerSummary,
    PingTimes,
    Readiness,
    RealmLeft,
    RealmList,
    RealmSummary,
    RequestReply,
    ShutdownState,
    StreamOpenedReply,
    TopicList,
    TopicPeers,
    TopicSummary,
)
from dep2p.errors import Dep2pError, NotInRealmError, RequestTimeoutError
from dep2p.gossipsub.topic_types import (
    BUFFER_BYTES,
    BUFFER_ITEMS,
    Acknowledgement,
    Lagged,
    OnFull,
    OnNoPeers,
    PublishedMany,
    PublishResult,
    WaitFor,
)
from dep2p.limits import HANDLER_CONCURRENCY, NOTIFY_CONCURRENCY
from dep2p.protocols.messaging.incoming import IncomingRequest, Notification, RequestOptions, SendOptions
from dep2p.protocols.services.options import ServiceOptions
from dep2p.types import Headers, PeerId

if TYPE_CHECKING:
    from dep2p.realm.credentials import Realm, RealmChoice

_LOOK_TIMEOUT_S: Final = 10.0  # for calls that only read the daemon's memory
_MARGIN_S: Final = 10.0  # how much longer than the daemon the client waits for a call that has a timeout of its own
_LONGEST_S: Final = 3_600.0  # for a call whose time the daemon chooses
_EVERYONE: Final = "*"
_NOT_CONNECTED: Final = "D4005"


@checks_arguments
class Client(MemberClientApi, ServiceClientApi, GatherClientApi):
    """Calls to one daemon. Made by :meth:`open`; any number of tasks may use it at once.

    ``realm`` may be left out while the daemon is in exactly one realm; it is a `Realm`, its name, its id or a unique
    start of the id.
    """

    def __init__(self, transport: Transport, background: Background) -> None:
        self._transport = transport
        self._background = background
        self._incoming = Incoming(transport, background)
        self.queues: ClientQueues = ClientQueues(transport)
        """Durable queues. Its own calls reach the queues of this machine's programs; see :class:`ClientQueues` for
        others."""
        self.sessions: ClientSessions = ClientSessions(transport, background)
        """Ordered sessions: pushes to a client in strict order across reconnects."""
        self.outbox: ClientOutbox = ClientOutbox(transport)
        """Reliable messages that wait, and those that were lost."""
        self.tracer: ClientTracer = ClientTracer(transport)
        """Starts and stops the trace of the daemon."""

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        socket: Path | str | None = None,
        *,
        data_dir: Path | str | None = None,
        tcp: str | None = None,
        token: str | None = None,
        fingerprint: str | None = None,
        ca_file: Path | str | None = None,
        context: str | None = None,
        **reconnect: Unpack[ReconnectOptions],
    ) -> AsyncGenerator["Client", None]:
        """A client of one daemon. The first of these that says which one decides:

        1. the arguments: its Unix ``socket``, its ``data_dir``, ``tcp`` (``HOST:PORT``) or the ``context`` of that name
           (`dep2p context`);
        2. the environment: ``DEP2P_SOCKET``, ``DEP2P_DATA_DIR`` or ``DEP2P_CONTEXT``, as for the command line;
        3. the selected context;
        4. the default data directory, ``~/.local/share/dep2p``.

        ``tcp`` beyond loopback is TLS: ``token`` is the daemon's bearer token, and ``fingerprint`` (SHA-256 in hex) or
        ``ca_file`` (PEM, or ``"system"``) says by what its certificate is known. No connection is made before the first
        call, which raises ControlError D1011 for another certificate.

        When the daemon restarts, or the connection is cut, subscriptions, handlers, consumers and sessions wait for it
        for ``reconnect_s`` seconds (without an end by default; 0: they end at once with DaemonUnreachableError), and
        go on. Within ``call_reconnect_s`` seconds (0 by default), other calls are made again if that is safe: those
        that the daemon certainly did not carry out, and those that only read. An address where no daemon was reached
        yet is an error at once. docs/howto/restarts.md has the rest.

        Raises ConfigError for values that contradict each other or cannot be used; it says where each is from;
        ValueError for negative seconds. An error of a handler's registration (:meth:`on_request`) ends the block and
        comes out of it.
        """
        bounds = reconnect_bounds(**reconnect)
        transport = transport_to(
            TargetArguments(
                socket=socket,
                data_dir=data_dir,
                tcp=tcp,
                token=token,
                fingerprint=fingerprint,
                ca_file=ca_file,
                context=context,
            ),
            bounds,
        )
        async with cls.over(transport) as client:
            yield client

    @classmethod
    @asynccontextmanager
    async def over(cls, transport: Transport) -> AsyncGenerator["Client", None]:
        """A client over a transport, which is closed at the block's end. Programs use :meth:`open`."""
        try:
            async with tasks() as group:
                background = Background(group)
                yield cls(transport, background)
        finally:
            await transport.aclose()
        if background.error is not None:
            raise background.error

    def watch_feeds(self, callback: Callable[[FeedInterrupted | FeedResumed], None]) -> Callable[[], None]:
        """Call ``callback`` when a subscription, handler, consumer or session of this client loses the daemon, and
        when it goes on. Returns the function that ends it."""
        callbacks = self._transport.watch.callbacks
        callbacks.append(callback)

        def end() -> None:
            if callback in callbacks:
                callbacks.remove(callback)

        return end

    # The daemon

    async def status(self) -> DaemonStatus:
        """Peer id, version, uptime, addresses, peers, realms and more."""
        return await self._transport.ask("GET", "/v1/status", DaemonStatus, timeout_s=_LOOK_TIMEOUT_S)

    async def config(self) -> Configuration:
        """The configuration in effect, and where each value is from."""
        return await self._transport.ask("GET", "/v1/config", Configuration, timeout_s=_LOOK_TIMEOUT_S)

    async def bounds(self) -> LimitsSummary:
        """Every bound of the node and of the control API, by name."""
        return await self._transport.ask("GET", "/v1/limits", LimitsSummary, timeout_s=_LOOK_TIMEOUT_S)

    async def metrics(self) -> str:
        """The metrics in Prometheus' text format."""
        return (await self._transport.raw("GET", "/metrics", timeout_s=_LOOK_TIMEOUT_S))[1].decode("utf-8")

    async def healthy(self) -> bool:
        """Whether the node inside the daemon runs."""
        return (await self._transport.raw("GET", "/healthz", timeout_s=_LOOK_TIMEOUT_S, accept_statuses=(503,)))[
            0
        ] == 200

    async def ready(self) -> tuple[bool, list[str]]:
        """Whether the node takes work, and if not, the reasons."""
        status, content = await self._transport.raw("GET", "/readyz", timeout_s=_LOOK_TIMEOUT_S, accept_statuses=(503,))
        return status == 200, list(self._transport.reply(status, content, Readiness).reasons)

    async def drain(self) -> None:
        """Take no new work from now on. Returns when calls in flight are done, at most after drain_timeout_s."""
        await self._transport.ask("POST", "/v1/drain", DrainState, timeout_s=600.0)

    async def shutdown(self) -> None:
        """Tell the daemon to drain and stop; returns before it has."""
        await self._transport.ask("POST", "/v1/shutdown", ShutdownState)

    @asynccontextmanager
    async def events(self, types: Iterable[str] = ()) -> AsyncGenerator[AsyncIterator[Event | Lagged], None]:
        """Yield the node's events from now on, of the given kinds (all when empty); see :class:`Event`."""
        chosen = ",".join(types)
        params = {"types": chosen} if chosen else {}
        feed = FeedCall("GET", "/v1/events", "events of the node", loses=True, params=params)
        async with opened_feed(self._transport, feed) as lines:
            yield NoticingEventStream(lines, _event)

    # Peers

    async def peer_id(self) -> PeerId:
        """The daemon's own id."""
        return (await self.status()).peer_id

    async def listen_addrs(self) -> list[str]:
        """The addresses under which others can dial the daemon, each ending in its id."""
        return list((await self.status()).listen)

    async def peers(self) -> list[PeerSummary]:
        """List the connected peers, with their connections, addresses and realms."""
        return list((await self._transport.ask("GET", "/v1/peers", PeerList, timeout_s=_LOOK_TIMEOUT_S)).peers)

    async def connect(self, addr: str, *, timeout_s: float | None = None) -> ConnectedPeer:
        """Dial ``addr`` (a peer id, or an address ending in ``/p2p/PEER``) and prove membership in each joined realm.

        Returns the connection that there is now, and the names of the realms in which the peer is a verified member.
        Raises PeerNotFoundError, or ``ControlError`` D4004 for a malformed address.
        """
        is_addr = addr.startswith("/")
        call = ConnectPeer(addr=addr if is_addr else None, peer=None if is_addr else addr, timeout_s=timeout_s)
        return await self._transport.ask("POST", "/v1/peers", ConnectedPeer, call, timeout_s=_longer(timeout_s))

    async def disconnect(self, peer: PeerId) -> bool:
        """Close every connection to the peer and do not dial it again by itself; False when there was none."""
        try:
            await self._transport.ask("DELETE", f"/v1/peers/{_part(peer)}", PeerDisconnection)
        except ControlError as error:
            if error.code != _NOT_CONNECTED:
                raise
            return False
        return True

    async def ping(self, peer: PeerId, *, timeout_s: float = 5.0) -> float:
        """Round-trip seconds. Raises PeerNotFoundError, RequestTimeoutError."""
        path, call = f"/v1/peers/{_part(peer)}/ping", PingPeer(timeout_s=timeout_s)
        (rtt_ms,) = (await self._transport.ask("POST", path, PingTimes, call, timeout_s=_longer(timeout_s))).rtts_ms
        if rtt_ms is None:
            raise RequestTimeoutError(f"no answer of {peer} to a ping within {timeout_s:g} s")
        return rtt_ms / 1000

    # Realms

    async def realms(self) -> list[RealmSummary]:
        """The joined realms, in the order of joining."""
        return list((await self._transport.ask("GET", "/v1/realms", RealmList, timeout_s=_LOOK_TIMEOUT_S)).realms)

    async def join_realm(self, realm: "Realm", addrs: Sequence[str] = ()) -> RealmSummary:
        """Join a realm and, in the background, dial ``addrs`` (each ending in ``/p2p/PEER``). Idempotent; the daemon
        stays in it over restarts. ``Realm.from_invite(text).realm`` is the realm of an invite.

        Raises RealmFileError for a malformed address, ControlError D2003 (another realm has the name) or D2004 (the
        realm limit is reached).
        """
        content = realm.to_file_bytes()
        call = JoinRealm(realm=base64_text(content), addrs=tuple(addrs))
        return await self._transport.ask("POST", "/v1/realms", RealmSummary, call, timeout_s=120.0)

    async def leave_realm(self, realm: "RealmChoice") -> None:
        """Leave, tell the members, and forget the secret on this node. Raises NotInRealmError."""
        await self._transport.ask("DELETE", await self._realm_path(realm), RealmLeft)

    async def members(self, realm: "RealmChoice" = None) -> list[MemberSummary]:
        """List the members that the node knows, with their states, addresses and times. Raises NotInRealmError."""
        path = f"{await self._realm_path(realm)}/members"
        return list((await self._transport.ask("GET", path, MemberList, timeout_s=_LOOK_TIMEOUT_S)).members)

    async def invite(self, realm: "RealmChoice" = None, addrs: Sequence[str] = ()) -> str:
        """Make an invite: a text with the realm's secret and ``addrs`` (this node's own when empty). Raises
        NotInRealmError."""
        path, call = f"{await self._realm_path(realm)}/invite", InviteToRealm(addrs=tuple(addrs))
        return (await self._transport.ask("POST", path, InviteReply, call)).invite

    async def _realm_path(self, realm: "RealmChoice") -> str:
        """Return the path of a realm, of the only one when none is named. Raises NotInRealmError."""
        text = realm_text(realm)
        if text is None:
            joined = await self.realms()
            if not joined:
                raise NotInRealmError("this node is in no realm: join one first (`dep2p realm join`)")
            if len(joined) > 1:
                names = ", ".join(each.name for each in joined)
                raise NotInRealmError(f"this node is in {len(joined)} realms ({names}): say which one")
            text = joined[0].realm_id
        return f"/v1/realms/{_part(text)}"

    # Messaging

    async def request(
        self,
        peer: PeerId,
        name: str,
        body: bytes,
        *,
        timeout_s: float | None = None,
        idempotent: bool = False,
        headers: Headers | None = None,
        realm: "RealmChoice" = None,
    ) -> bytes:
        """Ask a member and return its answer; ``timeout_s`` bounds all tries together (the daemon's
        ``request_timeout_s`` by default).

        Raises RequestTimeoutError, HandlerError, NoHandlerError, PeerNotFoundError, NotMemberError, NotInRealmError,
        MessageTooLargeError, RateLimitedError, OverloadedError, StreamClosedError, ProtocolError, RemoteError.
        """
        call = RequestMember(
            peer=peer,
            name=name,
            data=base64_text(body),
            realm=realm_text(realm),
            headers=_headers(headers),
            timeout_s=timeout_s,
            idempotent=idempotent,
        )
        answer = await self._transport.ask(
            "POST", "/v1/requests", RequestReply, call, timeout_s=_longer(timeout_s), repeatable=idempotent
        )
        return answer.data

    async def notify(
        self,
        peer: PeerId,
        name: str,
        body: bytes,
        *,
        headers: Headers | None = None,
        realm: "RealmChoice" = None,
    ) -> None:
        """Send without an answer; returns when the message is on its way. Raises as :meth:`request`."""
        call = MessageMember(
            peer=peer, name=name, data=base64_text(body), realm=realm_text(realm), headers=_headers(headers)
        )
        await self._transport.ask("POST", "/v1/notifies", AcceptedReply, call)

    def stream(
        self,
        peer: PeerId,
        name: str,
        body: bytes = b"",
        *,
        headers: Headers | None = None,
        realm: "RealmChoice" = None,
    ) -> AbstractAsyncContextManager[ClientStream]:
        """Open a two-way stream of items to a member; ``body`` goes along with the opening.

        Leaving the block sends the rest and the end; leaving it by an error aborts. Raises as :meth:`request`.
        """
        return self._stream(
            OpenStreamCall(
                peer=peer, name=name, data=base64_text(body), realm=realm_text(realm), headers=_headers(headers)
            )
        )

    @asynccontextmanager
    async def _stream(self, call: OpenStreamCall) -> AsyncGenerator[ClientStream, None]:
        opened = await self._transport.ask("POST", "/v1/streams", StreamOpenedReply, call, timeout_s=120.0)
        async with tasks() as group, ClientStream(self._transport, group, opened) as stream:
            yield stream

    async def broadcast_request(
        self,
        name: str,
        body: bytes,
        *,
        peers: Sequence[PeerId] | None = None,
        concurrency: int = 16,
        realm: "RealmChoice" = None,
        **options: Unpack[RequestOptions],
    ) -> Mapping[PeerId, bytes | Dep2pError]:
        """Ask many peers (every member that is up when ``peers`` is None); a result or an error for each.

        ``options``: those of `request`: ``timeout_s``, ``idempotent``, ``headers``.
        """
        timeout_s, headers = options.get("timeout_s"), options.get("headers")
        call = RequestMember(
            peer=_EVERYONE,
            peers=None if peers is None else tuple(peers),
            concurrency=concurrency,
            name=name,
            data=base64_text(body),
            realm=realm_text(realm),
            headers=_headers(headers),
            timeout_s=timeout_s,
            idempotent=options.get("idempotent", False),
        )
        answer = await self._transport.ask("POST", "/v1/requests", BroadcastReply, call, timeout_s=_LONGEST_S)
        return {each.peer: _error(each) or (b"" if each.data is UNSET else each.data) for each in answer.results}

    async def broadcast_notify(
        self,
        name: str,
        body: bytes,
        *,
        peers: Sequence[PeerId] | None = None,
        concurrency: int = 16,
        headers: Headers | None = None,
        realm: "RealmChoice" = None,
    ) -> Mapping[PeerId, Dep2pError | None]:
        """Notify many peers (every member that is up when ``peers`` is None); None or an error for each."""
        call = MessageMember(
            peer=_EVERYONE,
            peers=None if peers is None else tuple(peers),
            concurrency=concurrency,
            name=name,
            data=base64_text(body),
            realm=realm_text(realm),
            headers=_headers(headers),
        )
        answer = await self._transport.ask("POST", "/v1/notifies", BroadcastReply, call, timeout_s=_LONGEST_S)
        return {each.peer: _error(each) for each in answer.results}

    @overload
    async def send(
        self,
        peer: PeerId,
        name: str,
        body: bytes,
        *,
        reliable: Literal[True],
        realm: "RealmChoice" = None,
        **options: Unpack[SendOptions],
    ) -> ClientReceipt: ...

    @overload
    async def send(
        self,
        peer: PeerId,
        name: str,
        body: bytes,
        *,
        reliable: Literal[False] = False,
        realm: "RealmChoice" = None,
        **options: Unpack[SendOptions],
    ) -> None: ...

    async def send(
        self,
        peer: PeerId,
        name: str,
        body: bytes,
        *,
        reliable: bool = False,
        realm: "RealmChoice" = None,
        **options: Unpack[SendOptions],
    ) -> ClientReceipt | None:
        """Send to the handler of notifies ``name``. With ``reliable`` the peer handles it once, or the receipt says why
        not; ``ttl_s`` are the seconds until it expires.

        A reliable message is in the daemon's outbox, on disk by default, when this returns. Raises
        DeliveryQueueFullError (only with ``wait`` False), MessageTooLargeError, NotInRealmError, StoreError; what is
        not reliable as :meth:`notify`.
        """
        if unknown := options.keys() - SendOptions.__annotations__.keys():
            raise TypeError(f"send takes no {', '.join(sorted(unknown))}: its options are headers, wait and ttl_s")
        headers, ttl_s = options.get("headers"), options.get("ttl_s")
        if not reliable:
            if ttl_s is not None:
                raise ValueError("ttl_s is for reliable messages: others are sent now or not at all")
            await self.notify(peer, name, body, headers=headers, realm=realm)
            return None
        call = SendReliably(
            peer=peer,
            name=name,
            data=base64_text(body),
            headers=_headers(headers),
            realm=realm_text(realm),
            when_full="wait" if options.get("wait", True) else "error",
            ttl_s=ttl_s,
        )
        accepted = await self._transport.ask("POST", "/v1/deliveries", DeliveryReceipt, call, timeout_s=FULL_TIMEOUT_S)
        return ClientReceipt(self._transport, accepted, name)

    # Pub/sub

    async def join(self, topic: str, *, realm: "RealmChoice" = None, public: bool = False) -> ClientTopic:
        """Join a topic of a realm, or of the public network. Joining again gives another handle of the same topic.

        Raises TooManyTopicsError (``limits.pubsub_topics_max``), NotInRealmError, ``ControlError`` D1005 (an empty or
        too long name).
        """
        place = TopicPlace(topic=topic, realm=realm_text(realm), public=public)
        return await ClientTopic.join(self._transport, self._background, place)

    async def publish(
        self,
        topic: str,
        body: bytes,
        *,
        wait: bool = True,
        on_no_peers: OnNoPeers = "error",
        headers: Headers | None = None,
        realm: "RealmChoice" = None,
        public: bool = False,
    ) -> PublishResult:
        """Publish without joining the topic; see :meth:`ClientTopic.publish`."""
        place = TopicPlace(topic=topic, realm=realm_text(realm), public=public)
        return await publish(self._transport, place, body, wait=wait, on_no_peers=on_no_peers, headers=headers)

    async def publish_from(
        self,
        topic: str,
        messages: AsyncIterator[bytes],
        *,
        on_no_peers: OnNoPeers = "error",
        headers: Headers | None = None,
        realm: "RealmChoice" = None,
        public: bool = False,
    ) -> PublishedMany:
        """Publish messages in order, each as soon as ``messages`` gives it and as fast as they are taken.

        Raises as :meth:`publish`; messages before the one that failed are published then. What ``messages`` raises
        ends the call, too.
        """
        place = TopicPlace(topic=topic, realm=realm_text(realm), public=public)
        return await publish_from(self._transport, place, messages, on_no_peers, headers)

    async def publish_reliably(
        self,
        topic: str,
        body: bytes,
        *,
        critical_peers: Sequence[PeerId] | None = None,
        wait_for: WaitFor = "all",
        ttl_s: float | None = None,
        headers: Headers | None = None,
        realm: "RealmChoice" = None,
    ) -> ClientTopicPublish:
        """Publish without joining the topic; see :meth:`ClientTopic.publish` with ``reliable``."""
        place = TopicPlace(topic=topic, realm=realm_text(realm), public=False)
        by = Acknowledgement(critical_peers, wait_for, ttl_s)
        return await publish_reliably(self._transport, place, body, by, wait=True, headers=headers)

    def subscribe(
        self,
        topic: str,
        *,
        buffer_items: int = BUFFER_ITEMS,
        buffer_bytes: int = BUFFER_BYTES,
        on_full: OnFull = "drop_oldest",
        group: str | None = None,
        realm: "RealmChoice" = None,
        public: bool = False,
    ) -> AbstractAsyncContextManager[ClientSubscription]:
        """Join a topic and read it while the block runs; see :meth:`ClientTopic.subscribe`. Raises NotInRealmError,
        TooManyTopicsError.

        Of a pattern (``sensors.*.temp``, ``sensors.>``), in a realm, those of every topic that matches, also of topics
        that come later; a :class:`MatchedTopicsFull` item says that more match than the node may be in.
        """
        place = TopicPlace(topic=topic, realm=realm_text(realm), public=public)
        return ClientSubscription(self._transport, place, buffer_items, buffer_bytes, on_full, group)

    async def topics(self) -> list[TopicSummary]:
        """The joined topics, in counts: those of all realms, then those of the public network."""
        return list((await self._transport.ask("GET", "/v1/topics", TopicList, timeout_s=_LOOK_TIMEOUT_S)).topics)

    async def topic_peers(self, topic: str, *, realm: "RealmChoice" = None, public: bool = False) -> TopicPeers:
        """The neighbours that are in a topic, those in the mesh, and their scores.

        Raises TopicNotFoundError when neither this node nor a neighbour is in it.
        """
        place = TopicPlace(topic=topic, realm=realm_text(realm), public=public)
        return await self._transport.ask("GET", place.path, TopicPeers, params=place.params, timeout_s=_LOOK_TIMEOUT_S)

    # Handlers

    def on_request(
        self,
        name: str,
        *,
        realm: "RealmChoice" = None,
        concurrency: int = HANDLER_CONCURRENCY,
        rate_per_s: float = 0.0,
        **service: Unpack[ServiceOptions],
    ) -> Callable[[RequestHandler], RequestHandler]:
        """Decorator: answer requests ``name`` of verified members, in every realm or in the given one.

        With ``group`` it is a service: all members hear of it, :meth:`request_any` may choose it, and programs of one
        daemon that give the same group, ``version``, ``schema`` and ``metadata`` share the requests.

        Handlers are registered in the background and run until the client's block ends; ``await
        client.handlers_ready()`` returns when all are registered. When the daemon refuses one (``ControlError`` D5012:
        another program answers to the name), the block ends by its error.
        """
        check_decorated(name)
        text = realm_text(realm)

        def decorate(handler: RequestHandler) -> RequestHandler:
            check_handler(handler)
            self._incoming.on_request(name, handler, text, concurrency, rate_per_s, service)
            return handler

        return decorate

    def on_notify(
        self,
        name: str,
        *,
        realm: "RealmChoice" = None,
        concurrency: int = NOTIFY_CONCURRENCY,
        rate_per_s: float = 0.0,
    ) -> Callable[[NotifyHandler], NotifyHandler]:
        """Decorator: take notifies ``name`` of verified members, in order per peer. Other programs of the daemon may
        take them, too. See :meth:`on_request`.

        A reliable message is acknowledged when the handler has returned. An error of it rejects the message; of a
        HandlerError the sender gets the text.
        """
        check_decorated(name)
        text = realm_text(realm)

        def decorate(handler: NotifyHandler) -> NotifyHandler:
            check_handler(handler)
            self._incoming.on_notify(name, handler, text, concurrency, rate_per_s)
            return handler

        return decorate

    def on_stream(
        self, name: str, *, realm: "RealmChoice" = None, concurrency: int = HANDLER_CONCURRENCY
    ) -> Callable[[ClientStreamHandler], ClientStreamHandler]:
        """Decorator: serve streams ``name`` that verified members open. See :meth:`on_request`."""
        check_decorated(name)
        text = realm_text(realm)

        def decorate(handler: ClientStreamHandler) -> ClientStreamHandler:
            check_handler(handler)
            self._incoming.on_stream(name, handler, text, concurrency)
            return handler

        return decorate

    async def handlers_ready(self) -> None:
        """Return when every handler that was added is registered: what members send from now on reaches it."""
        await self._background.all_started()

    def reply(
        self,
        name: str,
        *,
        realm: "RealmChoice" = None,
        concurrency: int = HANDLER_CONCURRENCY,
        rate_per_s: float = 0.0,
        **service: Unpack[ServiceOptions],
    ) -> AbstractAsyncContextManager[AsyncIterator[IncomingRequest]]:
        """Answer requests ``name`` while the block runs; at most ``concurrency`` wait for an answer at once.

        With ``group`` it is a service: all members hear of it, :meth:`request_any` may choose it, and programs of one
        daemon that give the same group, ``version``, ``schema`` and ``metadata`` share the requests.

        Raises ControlError D5012 when another program answers to that name, and is not of this group.
        """
        return self._incoming.reply(name, realm_text(realm), concurrency, rate_per_s, service)

    def listen(
        self, name: str, *, realm: "RealmChoice" = None, rate_per_s: float = 0.0
    ) -> AbstractAsyncContextManager[AsyncIterator[Notification | Lagged]]:
        """Yield notifies ``name`` of every realm (or of ``realm``) from now on. Any number of programs may listen.

        A reliable message counts as handled when the loop asks for the next one, or leaves the block without an error.
        One that a killed program had in hand comes again, to this program's next run or to another program.
        """
        return self._incoming.listen(name, realm_text(realm), rate_per_s)

    def accept(
        self, name: str, *, realm: "RealmChoice" = None
    ) -> AbstractAsyncContextManager[AsyncIterator[ClientStream]]:
        """Yield streams ``name`` that members open to this node; use each as an async context manager.

        Leaving the block ends those that are still open. Raises ControlError D5012 when the name is taken.
        """
        return self._incoming.accept(name, realm_text(realm))


def _longer(timeout_s: float | None) -> float:
    """Return the seconds to wait for a call that the daemon ends after ``timeout_s``, or after its own time."""
    return _LONGEST_S if timeout_s is None else timeout_s + _MARGIN_S


def _part(text: str) -> str:
    return quote(text, safe="")


def _headers(headers: Mapping[str, object] | None) -> dict[str, object] | None:
    return encode_headers(dict(headers)) if headers else None


def _error(result: MemberResult) -> Dep2pError | None:
    return None if result.error is UNSET else error_from_problem(result.error)


def _event(line: dict[str, object]) -> Event | Lagged:
    head = line_or_lag(line, EventLine)
    if isinstance(head, Lagged):
        return head
    rest = {name: value for name, value in line.items() if name not in EventLine.__struct_fields__}
    return Event(head.id, head.kind, head.time_s, rest)
