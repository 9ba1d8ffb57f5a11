"""A thin client of a running daemon, for asyncio and trio programs alike.

The verbs are those of :class:`dep2p.node.node.Node`, and so are the exceptions: a request that times out raises
:class:`dep2p.errors.RequestTimeoutError` here as there. What only a daemon can say is a :class:`ControlError`, and when
no daemon answers, a :class:`DaemonUnreachableError`; any call may raise these two.
"""

import base64
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import anyio
import anyio.abc

from dep2p.client.client_queue_order import QueueOrderCalls
from dep2p.client.client_queue_receive import QueueReceiveCalls, ReceivedQueueMessage
from dep2p.client.delivery import DeliveryCalls, DeliveryStatus, ReliablyPublished, Sent
from dep2p.client.errors import ControlError, DaemonUnreachableError, code_of, error_from_problem
from dep2p.client.models import (
    Event,
    IncomingRequest,
    Lagged,
    Notice,
    Published,
    PublishedMany,
    Subscription,
    TopicMessage,
)
from dep2p.client.queues import QueueCalls, QueueConsumer, QueueDelivery, QueuedMany
from dep2p.client.sessions import OpenedSession, SessionCalls, SessionEvent, SessionPush
from dep2p.client.streams import ClientStream
from dep2p.client.topics import TopicCalls
from dep2p.client.traces import TraceCalls
from dep2p.client.transport import NdjsonLines, Transport
from dep2p.config.loader import control_socket_path, default_data_dir
from dep2p.control_api.encoding import decode_headers, decode_payload, encode_headers, encode_payload
from dep2p.errors import Dep2pError, RealmFileError
from dep2p.types import Headers, PeerId, RealmId

__all__ = [
    "Client",
    "ClientStream",
    "ControlError",
    "DaemonUnreachableError",
    "DeliveryStatus",
    "Event",
    "IncomingRequest",
    "Lagged",
    "Notice",
    "OpenedSession",
    "Published",
    "PublishedMany",
    "QueueConsumer",
    "QueueDelivery",
    "QueuedMany",
    "ReceivedQueueMessage",
    "ReliablyPublished",
    "Sent",
    "SessionEvent",
    "SessionPush",
    "TopicMessage",
    "code_of",
]

_LOOK_TIMEOUT_S = 10.0  # for calls that only read what the daemon has in memory
_MARGIN_S = 10.0  # how much longer than the daemon the client waits for a call that has a timeout of its own


class Client(DeliveryCalls, SessionCalls, TopicCalls, QueueCalls, QueueReceiveCalls, QueueOrderCalls, TraceCalls):
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
        transport = Transport(None if tcp is not None else Path(cast(Path, socket)), tcp, token)
        try:
            yield cls(transport)
        finally:
            await transport.aclose()

    # The daemon

    async def status(self) -> dict[str, Any]:
        """Peer id, version, uptime, addresses, peers and realms; the fields are in docs/reference/control-api.md."""
        return await self._transport.call("GET", "/v1/status", timeout_s=_LOOK_TIMEOUT_S)

    async def config(self) -> dict[str, Any]:
        """``{"values": {section: {key: value}}, "origins": {"section.key": origin}, "file": path or null}``."""
        return await self._transport.call("GET", "/v1/config", timeout_s=_LOOK_TIMEOUT_S)

    async def limits(self) -> dict[str, Any]:
        """``{"node": {name: value}, "control": {name: value}}``."""
        return await self._transport.call("GET", "/v1/limits", timeout_s=_LOOK_TIMEOUT_S)

    async def metrics(self) -> str:
        """The metrics in Prometheus' text format."""
        return (await self._transport.raw("GET", "/metrics", timeout_s=_LOOK_TIMEOUT_S))[1].decode("utf-8")

    async def healthy(self) -> bool:
        """Whether the node inside the daemon runs."""
        return (await self._transport.raw("GET", "/healthz", timeout_s=_LOOK_TIMEOUT_S, accept_statuses=(503,)))[
            0
        ] == 200

    async def ready(self) -> tuple[bool, list[str]]:
        """Whether it takes work, and if not, the reasons."""
        status, content = await self._transport.raw("GET", "/readyz", timeout_s=_LOOK_TIMEOUT_S, accept_statuses=(503,))
        answer = cast(dict[str, Any], json.loads(content))
        return status == 200, [str(reason) for reason in answer.get("reasons", ())]

    async def drain(self) -> dict[str, Any]:
        """Take no new work from now on; returns when what was in flight is done, at most after drain_timeout_s."""
        return await self._transport.call("POST", "/v1/drain", timeout_s=600.0)

    async def shutdown(self) -> None:
        """Tell the daemon to drain and stop; returns before it has."""
        await self._transport.call("POST", "/v1/shutdown")

    @asynccontextmanager
    async def events(self, types: Iterable[str] = ()) -> AsyncGenerator[AsyncIterator[Event | Lagged], None]:
        """What happens from now on, of the given kinds (all when empty); see :class:`Event`."""
        chosen = ",".join(types)
        async with self._lines("GET", "/v1/events", params={"types": chosen} if chosen else {}) as lines:
            yield Subscription(lines, _event)

    # Peers

    async def peers(self) -> list[dict[str, Any]]:
        """Connected peers: ``peer``, ``connections`` (id, direction, addr, age_s, rtt_ms), ``addrs``, ``realms``."""
        return cast(
            list[dict[str, Any]], (await self._transport.call("GET", "/v1/peers", timeout_s=_LOOK_TIMEOUT_S))["peers"]
        )

    async def peer_connect(self, addr: str, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Connect to an address that ends in ``/p2p/PEER``, or to a peer id.

        Returns ``peer``, ``addr``, ``direction`` and ``realms`` (names in which it is a verified member).
        Raises PeerNotFoundError.
        """
        body: dict[str, object] = {"addr" if addr.startswith("/") else "peer": addr}
        return await self._transport.call("POST", "/v1/peers", _with(body, timeout_s=timeout_s), timeout_s=120.0)

    async def peer_disconnect(self, peer: str) -> None:
        """Close every connection to the peer. Raises ControlError D4005 when there is none."""
        await self._transport.call("DELETE", f"/v1/peers/{_part(peer)}")

    async def peer_ping(self, peer: str, count: int = 1, timeout_s: float = 5.0) -> list[float | None]:
        """Round-trip seconds of ``count`` pings; None for one that got no answer. Raises PeerNotFoundError."""
        answer = await self._transport.call(
            "POST",
            f"/v1/peers/{_part(peer)}/ping",
            {"count": count, "timeout_s": timeout_s},
            timeout_s=count * (timeout_s + 1.0) + _MARGIN_S,
        )
        return [None if rtt is None else float(rtt) / 1000 for rtt in answer["rtts_ms"]]

    # Realms

    async def realms(self) -> list[dict[str, Any]]:
        """Joined realms: ``name``, ``realm_id``, ``members_known``, ``members_up``."""
        return cast(
            list[dict[str, Any]], (await self._transport.call("GET", "/v1/realms", timeout_s=_LOOK_TIMEOUT_S))["realms"]
        )

    async def realm_join(
        self, *, invite: str | None = None, realm_file: Path | str | bytes | None = None
    ) -> dict[str, Any]:
        """Join by an invite's text, or by a realm file (its path or content); stays joined over restarts.

        Returns the realm as :meth:`realms` does. Raises RealmFileError, ControlError D2003 or D2004.
        """
        if (invite is None) == (realm_file is None):
            raise ValueError("give either invite or realm_file")
        if invite is not None:
            body: dict[str, object] = {"invite": invite}
        else:
            content = realm_file if isinstance(realm_file, bytes) else await _read(Path(cast(str, realm_file)))
            body = {"realm": base64.b64encode(content).decode("ascii")}
        return await self._transport.call("POST", "/v1/realms", body, timeout_s=120.0)

    async def realm_leave(self, realm: str) -> None:
        """Leave, tell the members, and forget the secret on this node. Raises NotInRealmError."""
        await self._transport.call("DELETE", f"/v1/realms/{_part(realm)}")

    async def realm_members(self, realm: str) -> list[dict[str, Any]]:
        """``peer``, ``addrs``, ``state`` (up, down, left), ``seq``, ``issued_s``, ``expires_s``, ``last_seen_s``."""
        answer = await self._transport.call("GET", f"/v1/realms/{_part(realm)}/members", timeout_s=_LOOK_TIMEOUT_S)
        return cast(list[dict[str, Any]], answer["members"])

    async def realm_invite(self, realm: str, addrs: Sequence[str] = ()) -> str:
        """A text with the realm's secret and ``addrs`` (this node's own when empty). Raises NotInRealmError."""
        body: dict[str, object] = {"addrs": list(addrs)} if addrs else {}
        return str((await self._transport.call("POST", f"/v1/realms/{_part(realm)}/invite", body))["invite"])

    # Requests and notifies

    async def request(
        self,
        peer: str,
        name: str,
        data: bytes,
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
        body = _message(peer, name, data, realm, headers) | {"timeout_s": timeout_s, "idempotent": idempotent}
        answer = await self._transport.call("POST", "/v1/requests", body, timeout_s=timeout_s + _MARGIN_S)
        return _payload(answer)

    async def broadcast(
        self,
        name: str,
        data: bytes,
        *,
        realm: str | None = None,
        timeout_s: float = 30.0,
        idempotent: bool = False,
        headers: Headers | None = None,
    ) -> dict[PeerId, bytes | Dep2pError]:
        """Ask every member that is up; an answer or an exception (returned, not raised) for each."""
        body = _message("*", name, data, realm, headers) | {"timeout_s": timeout_s, "idempotent": idempotent}
        answer = await self._transport.call("POST", "/v1/requests", body, timeout_s=timeout_s + _MARGIN_S)
        return {
            PeerId(str(result["peer"])): error_from_problem(result["error"]) if "error" in result else _payload(result)
            for result in cast(list[dict[str, Any]], answer["results"])
        }

    async def notify(
        self, peer: str, name: str, data: bytes, *, realm: str | None = None, headers: Headers | None = None
    ) -> None:
        """Send without an answer; returns when the message is on its way. Raises as :meth:`request`."""
        await self._transport.call("POST", "/v1/notifies", _message(peer, name, data, realm, headers))

    async def broadcast_notify(
        self, name: str, data: bytes, *, realm: str | None = None, headers: Headers | None = None
    ) -> dict[PeerId, Dep2pError | None]:
        """Notify every member that is up; None or an exception for each."""
        answer = await self._transport.call("POST", "/v1/notifies", _message("*", name, data, realm, headers))
        return {
            PeerId(str(result["peer"])): error_from_problem(result["error"]) if "error" in result else None
            for result in cast(list[dict[str, Any]], answer["results"])
        }

    @asynccontextmanager
    async def listen(
        self, name: str, *, realm: str | None = None
    ) -> AsyncGenerator[AsyncIterator[Notice | Lagged], None]:
        """Notifies ``name`` of every realm (or of ``realm``) from now on; any number of programs may listen."""
        async with self._lines("GET", "/v1/notifies", params=_params(name=name, realm=realm)) as lines:
            yield Subscription(lines, _notice)

    @asynccontextmanager
    async def reply(
        self, name: str, *, realm: str | None = None, concurrency: int = 64
    ) -> AsyncGenerator[AsyncIterator[IncomingRequest], None]:
        """Answer requests ``name`` while the block runs; at most ``concurrency`` wait for an answer at once.

        Raises ControlError D5012 when another program answers to that name.
        """
        body = _with({"name": name, "concurrency": concurrency}, realm=realm)

        async def respond(request_id: str, answer: dict[str, object]) -> None:
            await self._transport.call("POST", f"/v1/replies/{_part(request_id)}", answer)

        def convert(line: dict[str, object]) -> IncomingRequest:
            fields = cast(dict[str, Any], line)
            return IncomingRequest(
                str(fields["id"]),
                PeerId(str(fields["peer"])),
                str(fields["name"]),
                _payload(fields),
                decode_headers(fields.get("headers") or {}),
                int(fields["deadline_ms"]),
                RealmId(str(fields["realm_id"])),
                respond,
            )

        async with self._lines("POST", "/v1/replies", body=body) as lines:
            yield Subscription(lines, convert)

    # Streams

    @asynccontextmanager
    async def stream(
        self,
        peer: str,
        name: str,
        data: bytes = b"",
        *,
        realm: str | None = None,
        headers: Headers | None = None,
    ) -> AsyncGenerator[ClientStream, None]:
        """Open a two-way stream of items to a member; ``data`` goes along with the opening.

        Leaving the block sends the rest and the end; leaving it by an error aborts. Raises as :meth:`request`.
        """
        answer = await self._transport.call(
            "POST", "/v1/streams", _message(peer, name, data, realm, headers), timeout_s=120.0
        )
        async with _tasks() as tasks:
            stream = ClientStream(
                self._transport,
                tasks,
                str(answer["id"]),
                PeerId(str(answer["peer"])),
                name,
                RealmId(str(answer["realm_id"])),
            )
            async with stream:
                yield stream

    @asynccontextmanager
    async def accept(self, name: str, *, realm: str | None = None) -> AsyncGenerator[AsyncIterator[ClientStream], None]:
        """Streams ``name`` that members open to this node; use each as an async context manager.

        Leaving the block ends those that are still open. Raises ControlError D5012 when the name is taken.
        """
        async with _tasks() as tasks:
            opened: list[ClientStream] = []

            def convert(line: dict[str, object]) -> ClientStream:
                fields = cast(dict[str, Any], line)
                stream = ClientStream(
                    self._transport,
                    tasks,
                    str(fields["id"]),
                    PeerId(str(fields["peer"])),
                    str(fields["name"]),
                    RealmId(str(fields["realm_id"])),
                    _payload(fields),
                    decode_headers(fields.get("headers") or {}),
                )
                opened[:] = [each for each in opened if not each.is_closed] + [stream]
                return stream

            async with self._lines("GET", "/v1/streams", params=_params(accept=name, realm=realm)) as lines:
                try:
                    yield Subscription(lines, convert)
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
    """A task group that lets an error of the block out as it is, and ends its tasks with the block."""
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


def _with(body: dict[str, object], **optional: object) -> dict[str, object]:
    return body | {name: value for name, value in optional.items() if value is not None}


def _params(**optional: str | None) -> dict[str, str]:
    return {name: value for name, value in optional.items() if value is not None}


def _message(peer: str, name: str, data: bytes, realm: str | None, headers: Headers | None) -> dict[str, object]:
    body = _with({"peer": peer, "name": name, **encode_payload(data)}, realm=realm)
    return body | {"headers": encode_headers(headers)} if headers else body


def _payload(fields: Mapping[str, Any]) -> bytes:
    return decode_payload(str(fields["data"]), str(fields["encoding"]))


def _notice(line: dict[str, object]) -> Notice | Lagged:
    fields = cast(dict[str, Any], line)
    if "lagged" in fields:
        return Lagged(int(fields["lagged"]))
    return Notice(
        PeerId(str(fields["peer"])),
        str(fields["name"]),
        _payload(fields),
        decode_headers(fields.get("headers") or {}),
        RealmId(str(fields["realm_id"])),
    )


def _event(line: dict[str, object]) -> Event | Lagged:
    fields = dict(line)
    if "lagged" in fields:
        return Lagged(int(cast(int, fields["lagged"])))
    number, kind, time_s = fields.pop("id"), fields.pop("kind"), fields.pop("time_s")
    return Event(int(cast(int, number)), str(kind), float(cast(float, time_s)), fields)
