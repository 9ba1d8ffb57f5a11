"""A thin client of a running daemon, for asyncio and trio programs alike.

The methods are those of :class:`dep2p.node.node.Node`, and so are the exceptions: a request that times out raises
:class:`dep2p.errors.RequestTimeoutError` here as there. What only a daemon can say is a :class:`ControlError`, and when
no daemon answers, a :class:`DaemonUnreachableError`; any call may raise these two.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import quote

import anyio
import anyio.abc
from msgspec import UNSET

from dep2p.arguments import checks_arguments
from dep2p.client.delivery import DeliveryClientApi
from dep2p.client.models import (
    Event,
    EventStream,
    FeedLagged,
    IncomingNotification,
    IncomingRequest,
    line_or_lag,
)
from dep2p.client.queues import QueueClientApi
from dep2p.client.sessions import SessionClientApi
from dep2p.client.streams import ClientStream
from dep2p.client.topics import TopicClientApi
from dep2p.client.traces import TraceClientApi
from dep2p.client.transport import NdjsonLines, Transport
from dep2p.config.loader import control_socket_path, default_data_dir
from dep2p.control_api.calls import (
    ConnectPeer,
    GiveReply,
    InviteToRealm,
    JoinRealm,
    MessageMember,
    OpenStreamCall,
    PingPeer,
    RequestMember,
    ServeRequests,
    base64_text,
)
from dep2p.control_api.encoding import decode_headers, encode_headers, fields_of
from dep2p.control_api.errors import error_from_problem
from dep2p.control_api.replies import (
    AcceptedReply,
    BroadcastReply,
    Configuration,
    ConnectedPeer,
    DaemonStatus,
    DrainState,
    EventLine,
    InviteReply,
    LimitsSummary,
    MemberList,
    MemberResult,
    MemberSummary,
    MessageLine,
    PeerDisconnection,
    PeerList,
    PeerSummary,
    PingTimes,
    Readiness,
    RealmLeft,
    RealmList,
    RealmSummary,
    RequestLine,
    RequestReply,
    ShutdownState,
    StreamLine,
    StreamOpenedReply,
    parse_reply,
)
from dep2p.errors import Dep2pError, RealmFileError
from dep2p.limits import HANDLER_CONCURRENCY
from dep2p.types import Headers, PeerId

_LOOK_TIMEOUT_S = 10.0  # for calls that only read the daemon's memory
_MARGIN_S = 10.0  # how much longer than the daemon the client waits for a call that has a timeout of its own


@checks_arguments
class Client(
    DeliveryClientApi,
    SessionClientApi,
    TopicClientApi,
    QueueClientApi,
    TraceClientApi,
):
    """Calls to one daemon. Made by :meth:`open`; any number of tasks may use it at once.

    ``realm`` arguments take a realm's name, id or a unique start of the id; None stands for the only realm joined.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        socket: Path | str | None = None,
        *,
        data_dir: Path | str | None = None,
        tcp: str | None = None,
        token: str | None = None,
    ) -> AsyncGenerator["Client", None]:
        """A client of the daemon at a Unix ``socket``, of a ``data_dir``, or at loopback ``tcp`` (``HOST:PORT``).

        With none of them, the daemon of ``~/.local/share/dep2p``. ``token`` is the bearer token that ``tcp`` needs.
        No connection is made before the first call. Raises ConfigError when no socket path can be derived.
        """
        if tcp is None and socket is None:
            socket = control_socket_path(default_data_dir({}) if data_dir is None else Path(data_dir))
        transport = Transport(None if tcp is not None or socket is None else Path(socket), tcp, token)
        try:
            yield cls(transport)
        finally:
            await transport.aclose()

    # The daemon

    async def status(self) -> DaemonStatus:
        """Peer id, version, uptime, addresses, peers, realms and more."""
        return await self._transport.ask("GET", "/v1/status", DaemonStatus, timeout_s=_LOOK_TIMEOUT_S)

    async def config(self) -> Configuration:
        """The configuration in effect, and where each value is from."""
        return await self._transport.ask("GET", "/v1/config", Configuration, timeout_s=_LOOK_TIMEOUT_S)

    async def limits(self) -> LimitsSummary:
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

    async def drain(self) -> DrainState:
        """Take no new work from now on. Returns when calls in flight are done, at most after drain_timeout_s."""
        return await self._transport.ask("POST", "/v1/drain", DrainState, timeout_s=600.0)

    async def shutdown(self) -> None:
        """Tell the daemon to drain and stop; returns before it has."""
        await self._transport.ask("POST", "/v1/shutdown", ShutdownState)

    @asynccontextmanager
    async def events(self, types: Iterable[str] = ()) -> AsyncGenerator[AsyncIterator[Event | FeedLagged], None]:
        """Yield the node's events from now on, of the given kinds (all when empty); see :class:`Event`."""
        chosen = ",".join(types)
        async with self._lines("GET", "/v1/events", params={"types": chosen} if chosen else {}) as lines:
            yield EventStream(lines, _event)

    # Peers

    async def peers(self) -> list[PeerSummary]:
        """List the connected peers, with their connections, addresses and realms."""
        return list((await self._transport.ask("GET", "/v1/peers", PeerList, timeout_s=_LOOK_TIMEOUT_S)).peers)

    async def peer_connect(self, addr: str, *, timeout_s: float | None = None) -> ConnectedPeer:
        """Connect to an address that ends in ``/p2p/PEER``, or to a peer id. Raises PeerNotFoundError."""
        is_addr = addr.startswith("/")
        call = ConnectPeer(addr=addr if is_addr else None, peer=None if is_addr else addr, timeout_s=timeout_s)
        return await self._transport.ask("POST", "/v1/peers", ConnectedPeer, call, timeout_s=120.0)

    async def peer_disconnect(self, peer: str) -> None:
        """Close every connection to the peer. Raises ControlError D4005 when there is none."""
        await self._transport.ask("DELETE", f"/v1/peers/{_part(peer)}", PeerDisconnection)

    async def peer_ping(self, peer: str, count: int = 1, timeout_s: float = 5.0) -> list[float | None]:
        """Round-trip seconds of ``count`` pings; None for one that got no answer. Raises PeerNotFoundError."""
        path, call = f"/v1/peers/{_part(peer)}/ping", PingPeer(count=count, timeout_s=timeout_s)
        call_timeout_s = count * (timeout_s + 1.0) + _MARGIN_S
        times = await self._transport.ask("POST", path, PingTimes, call, timeout_s=call_timeout_s)
        return [None if rtt_ms is None else rtt_ms / 1000 for rtt_ms in times.rtts_ms]

    # Realms

    async def realms(self) -> list[RealmSummary]:
        """The joined realms."""
        return list((await self._transport.ask("GET", "/v1/realms", RealmList, timeout_s=_LOOK_TIMEOUT_S)).realms)

    async def realm_join(
        self, *, invite: str | None = None, realm_file: Path | str | bytes | None = None
    ) -> RealmSummary:
        """Join by an invite's text, or by a realm file (its path or content); stays joined over restarts.

        Returns the realm as :meth:`realms` does. Raises RealmFileError, ControlError D2003 or D2004.
        """
        if (invite is None) == (realm_file is None):
            raise ValueError("give either invite or realm_file")
        call = JoinRealm(invite=invite)
        if realm_file is not None:
            content = realm_file if isinstance(realm_file, bytes) else await _read(Path(realm_file))
            call = JoinRealm(realm=base64_text(content))
        return await self._transport.ask("POST", "/v1/realms", RealmSummary, call, timeout_s=120.0)

    async def realm_leave(self, realm: str) -> None:
        """Leave, tell the members, and forget the secret on this node. Raises NotInRealmError."""
        await self._transport.ask("DELETE", f"/v1/realms/{_part(realm)}", RealmLeft)

    async def realm_members(self, realm: str) -> list[MemberSummary]:
        """List the members that the node knows, with their states, addresses and times."""
        path = f"/v1/realms/{_part(realm)}/members"
        return list((await self._transport.ask("GET", path, MemberList, timeout_s=_LOOK_TIMEOUT_S)).members)

    async def realm_invite(self, realm: str, addrs: Sequence[str] = ()) -> str:
        """Make an invite: a text with the realm's secret and ``addrs`` (this node's own when empty). Raises
        NotInRealmError."""
        path, call = f"/v1/realms/{_part(realm)}/invite", InviteToRealm(addrs=tuple(addrs))
        return (await self._transport.ask("POST", path, InviteReply, call)).invite

    # Requests and notifies

    async def request(
        self,
        peer: str,
        name: str,
        body: bytes,
        *,
        realm: str | None = None,
        timeout_s: float = 30.0,
        idempotent: bool = False,
        headers: Headers | None = None,
    ) -> bytes:
        """Ask a member and return its answer; ``timeout_s`` bounds all tries together.

        Raises RequestTimeoutError, HandlerError, NoHandlerError, PeerNotFoundError, NotMemberError, NotInRealmError,
        MessageTooLargeError, RateLimitedError, OverloadedError, StreamClosedError, ProtocolError, RemoteError.
        """
        call = RequestMember(
            peer=peer,
            name=name,
            data=base64_text(body),
            realm=realm,
            headers=_headers(headers),
            timeout_s=timeout_s,
            idempotent=idempotent,
        )
        timeout_s += _MARGIN_S
        return (await self._transport.ask("POST", "/v1/requests", RequestReply, call, timeout_s=timeout_s)).data

    async def broadcast(
        self,
        name: str,
        body: bytes,
        *,
        realm: str | None = None,
        timeout_s: float = 30.0,
        idempotent: bool = False,
        headers: Headers | None = None,
    ) -> dict[PeerId, bytes | Dep2pError]:
        """Ask every member that is up; an answer or an exception (returned, not raised) for each."""
        call = RequestMember(
            peer="*",
            name=name,
            data=base64_text(body),
            realm=realm,
            headers=_headers(headers),
            timeout_s=timeout_s,
            idempotent=idempotent,
        )
        timeout_s += _MARGIN_S
        answer = await self._transport.ask("POST", "/v1/requests", BroadcastReply, call, timeout_s=timeout_s)
        return {each.peer: _error(each) or (b"" if each.data is UNSET else each.data) for each in answer.results}

    async def notify(
        self, peer: str, name: str, body: bytes, *, realm: str | None = None, headers: Headers | None = None
    ) -> None:
        """Send without an answer; returns when the message is on its way. Raises as :meth:`request`."""
        call = MessageMember(peer=peer, name=name, data=base64_text(body), realm=realm, headers=_headers(headers))
        await self._transport.ask("POST", "/v1/notifies", AcceptedReply, call)

    async def broadcast_notify(
        self, name: str, body: bytes, *, realm: str | None = None, headers: Headers | None = None
    ) -> dict[PeerId, Dep2pError | None]:
        """Notify every member that is up; None or an exception for each."""
        call = MessageMember(peer="*", name=name, data=base64_text(body), realm=realm, headers=_headers(headers))
        answer = await self._transport.ask("POST", "/v1/notifies", BroadcastReply, call)
        return {each.peer: _error(each) for each in answer.results}

    @asynccontextmanager
    async def listen(
        self, name: str, *, realm: str | None = None
    ) -> AsyncGenerator[AsyncIterator[IncomingNotification | FeedLagged], None]:
        """Yield notifies ``name`` of every realm (or of ``realm``) from now on. Any number of programs may listen."""
        async with self._lines("GET", "/v1/notifies", params=_params(name=name, realm=realm)) as lines:
            yield EventStream(lines, _notification)

    @asynccontextmanager
    async def reply(
        self, name: str, *, realm: str | None = None, concurrency: int = HANDLER_CONCURRENCY
    ) -> AsyncGenerator[AsyncIterator[IncomingRequest], None]:
        """Answer requests ``name`` while the block runs; at most ``concurrency`` wait for an answer at once.

        Raises ControlError D5012 when another program answers to that name.
        """
        call = ServeRequests(name=name, concurrency=concurrency, realm=realm)

        async def respond(request_id: str, answer: GiveReply) -> None:
            await self._transport.ask("POST", f"/v1/replies/{_part(request_id)}", AcceptedReply, answer)

        def convert(line: dict[str, object]) -> IncomingRequest:
            request = parse_reply(line, RequestLine)
            headers = decode_headers(request.headers)
            return IncomingRequest(
                request.id,
                request.peer,
                request.name,
                request.data,
                headers,
                request.deadline_ms,
                request.realm_id,
                respond,
            )

        async with self._lines("POST", "/v1/replies", body=fields_of(call)) as lines:
            yield EventStream(lines, convert)

    # Streams

    @asynccontextmanager
    async def stream(
        self,
        peer: str,
        name: str,
        body: bytes = b"",
        *,
        realm: str | None = None,
        headers: Headers | None = None,
    ) -> AsyncGenerator[ClientStream, None]:
        """Open a two-way stream of items to a member; ``body`` goes along with the opening.

        Leaving the block sends the rest and the end; leaving it by an error aborts. Raises as :meth:`request`.
        """
        call = OpenStreamCall(peer=peer, name=name, data=base64_text(body), realm=realm, headers=_headers(headers))
        opened = await self._transport.ask("POST", "/v1/streams", StreamOpenedReply, call, timeout_s=120.0)
        async with _tasks() as tasks:
            async with ClientStream(self._transport, tasks, opened) as stream:
                yield stream

    @asynccontextmanager
    async def accept(self, name: str, *, realm: str | None = None) -> AsyncGenerator[AsyncIterator[ClientStream], None]:
        """Yield streams ``name`` that members open to this node; use each as an async context manager.

        Leaving the block ends those that are still open. Raises ControlError D5012 when the name is taken.
        """
        async with _tasks() as tasks:
            opened: list[ClientStream] = []

            def convert(line: dict[str, object]) -> ClientStream:
                stream = ClientStream(self._transport, tasks, parse_reply(line, StreamLine))
                opened[:] = [each for each in opened if not each.is_closed] + [stream]
                return stream

            async with self._lines("GET", "/v1/streams", params=_params(accept=name, realm=realm)) as lines:
                try:
                    yield EventStream(lines, convert)
                finally:
                    for stream in opened:
                        await stream.aclose()

    @asynccontextmanager
    async def _lines(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, object] | None = None,
        params: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[NdjsonLines, None]:
        async with self._transport.opened(method, path, body=body, params=params) as answer:
            yield NdjsonLines(answer)


@asynccontextmanager
async def _tasks() -> AsyncGenerator[anyio.abc.TaskGroup, None]:
    """Open a task group that raises an error of its block as it is, and cancels its tasks at the block's end."""
    error: Exception | None = None
    async with anyio.create_task_group() as group:
        try:
            yield group
        except Exception as raised:
            error = raised
        group.cancel_scope.cancel()
    if error is not None:
        raise error


async def _read(path: Path) -> bytes:
    try:
        return await anyio.Path(path).read_bytes()
    except OSError as error:
        raise RealmFileError(f"cannot read the realm file {path}: {error.strerror or error}") from None


def _part(text: str) -> str:
    return quote(text, safe="")


def _params(**optional: str | None) -> dict[str, str]:
    return {name: value for name, value in optional.items() if value is not None}


def _headers(headers: Headers | None) -> dict[str, object] | None:
    return encode_headers(headers) if headers else None


def _error(result: MemberResult) -> Dep2pError | None:
    return None if result.error is UNSET else error_from_problem(result.error)


def _notification(line: dict[str, object]) -> IncomingNotification | FeedLagged:
    message = line_or_lag(line, MessageLine)
    if isinstance(message, FeedLagged):
        return message
    headers = decode_headers(message.headers)
    return IncomingNotification(message.peer, message.name, message.data, headers, message.realm_id)


def _event(line: dict[str, object]) -> Event | FeedLagged:
    head = line_or_lag(line, EventLine)
    if isinstance(head, FeedLagged):
        return head
    rest = {name: value for name, value in line.items() if name not in EventLine.__struct_fields__}
    return Event(head.id, head.kind, head.time_s, rest)
