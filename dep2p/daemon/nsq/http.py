"""nsqd's HTTP API: paths, parameters, texts and statuses as nsqd's http.go."""

import logging
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Final
from urllib.parse import parse_qs

import msgspec
import trio
from msgspec import Struct
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dep2p.daemon.bounds import BODY_BYTES_PER_S_MIN
from dep2p.daemon.http.host_header import is_loopback_host
from dep2p.daemon.nsq.context import NsqContext
from dep2p.daemon.nsq.stats import as_text, health_of, stats_of
from dep2p.errors import (
    ChannelNotFoundError,
    Dep2pError,
    MessageTooLargeError,
    NotInRealmError,
    NotOwnerError,
    QueueFullError,
    QueueNotFoundError,
)
from dep2p.protocols.nsq.commands import split_mpub
from dep2p.protocols.nsq.errors import NsqError
from dep2p.protocols.nsq.identify import VERSION
from dep2p.protocols.queues.message import NewMessage
from dep2p.protocols.queues.names import check_name

_logger = logging.getLogger("dep2p.nsq")
_HEADERS: Final = {"X-NSQ-Content-Type": "nsq; version=1.0"}
_FALSE: Final = ("0", "false")
_BODY_TIMEOUT_S: Final = 30.0
_SPACE_TIMEOUT_S: Final = 30.0
_FIELDS_MAX: Final = 32

Query = Mapping[str, list[str]]


class _Refused(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class NsqHttp:
    """The ASGI application.

    A web page must not be able to reach it through its reader's browser, so it refuses requests with an Origin, or with
    a Host that is not loopback.
    """

    def __init__(self, server: NsqContext) -> None:
        self._server = server
        self._topics_rate = server.quotas.topics_rate()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request = Request(scope, receive)
        path = scope["path"]
        try:
            answer = await self._answer(request, path)
        except ClientDisconnect:
            return
        except Exception as error:
            answer = self._refusal(error, path)
        finally:
            self._server.quotas.memory.hold(request, 0)
        self._server.counts[f"http_{answer.status_code}"] += 1
        _logger.debug("answered", extra={"path": path[:200], "status": answer.status_code})
        await answer(scope, receive, send)

    async def _answer(self, request: Request, path: str) -> Response:
        _check_sender(request)
        found = _ROUTES.get(path)
        if found is None:
            raise _Refused(404, "NOT_FOUND")
        method, action = found
        if request.method != method:
            raise _Refused(405, "METHOD_NOT_ALLOWED")
        return await action(self, request, _query(request))

    def _refusal(self, error: Exception, path: str) -> Response:
        status, text = 500, "INTERNAL_ERROR"
        if isinstance(error, _Refused):
            status, text = error.status, str(error)
        elif isinstance(error, QueueNotFoundError):
            status, text = 404, "TOPIC_NOT_FOUND"
        elif isinstance(error, ChannelNotFoundError):
            status, text = 404, "CHANNEL_NOT_FOUND"
        elif isinstance(error, MessageTooLargeError):
            status, text = 413, "MSG_TOO_BIG"
        elif isinstance(error, QueueFullError):
            status, text = 503, "TOPIC_FULL"
        elif isinstance(error, NotInRealmError):
            status, text = 503, "REALM_NOT_JOINED"
        elif isinstance(error, NotOwnerError):
            status, text = 503, "NOT_OWNER"
        elif isinstance(error, Dep2pError):
            status, text = 503, "STORE_FAILED"
            _logger.warning("nsqd's HTTP API: %s failed: %s", path[:200], error)
        else:
            _logger.error("nsqd's HTTP API: %s failed", path[:200], exc_info=error)
        return _json({"message": text}, status)

    # Publishing

    async def pub(self, request: Request, query: Query) -> Response:
        """POST /pub."""
        limits = self._server.limits
        body = await self._body(request, limits.message_bytes_max, "MSG_TOO_BIG")
        if not body:
            raise _Refused(400, "MSG_EMPTY")
        topic = _topic(query)
        delay_ms = 0
        if "defer" in query:
            text = query["defer"][0]
            if not text.isdecimal() or len(text) > 19 or int(text) > limits.defer_max_ms:
                raise _Refused(400, "INVALID_DEFER")
            delay_ms = int(text)
        return await self._publish(topic, [NewMessage(body, delay_s=delay_ms / 1000)])

    async def mpub(self, request: Request, query: Query) -> Response:
        """POST /mpub: a message on each line, or with binary=true as in MPUB."""
        limits = self._server.limits
        topic = _topic(query)
        is_binary = "binary" in query and query["binary"][0] not in _FALSE
        body = await self._body(request, limits.body_bytes_max, "BODY_TOO_BIG")
        if is_binary:
            try:
                bodies = split_mpub(body, limits)
            except NsqError as error:
                raise _Refused(413, error.nsq_code[2:]) from None
        else:
            if body.count(b"\n") >= limits.mpub_items_max:
                raise _Refused(413, "TOO_MANY_MESSAGES")
            bodies = tuple(line for line in body.split(b"\n") if line)
            if any(len(line) > limits.message_bytes_max for line in bodies):
                raise _Refused(413, "MSG_TOO_BIG")
        if not bodies:
            await self._server.topic(self._server.namespace(), topic, self._topics_rate)
            return _plain("OK")
        return await self._publish(topic, [NewMessage(each) for each in bodies])

    async def _publish(self, topic: str, messages: list[NewMessage]) -> Response:
        server = self._server
        namespace = server.namespace()
        await server.topic(namespace, topic, self._topics_rate)
        publishes = server.quotas.publishes  # all of HTTP has one share
        await publishes.wait(self, len(messages))
        publishes.add(self, len(messages))
        try:
            await server.engine.publish(namespace, topic, messages, timeout_s=_SPACE_TIMEOUT_S)
        finally:
            publishes.add(self, -len(messages))
        server.counts["published"] += len(messages)
        return _plain("OK")

    async def _body(self, request: Request, most: int, too_big: str) -> bytes:
        """Read the body; its bytes count until the request is answered."""
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length) > most:
            raise _Refused(413, too_big)
        memory = self._server.quotas.memory
        pieces: list[bytes] = []
        size = 0
        with trio.move_on_after(_BODY_TIMEOUT_S) as scope:
            async for piece in request.stream():
                size += len(piece)
                if size > most:
                    raise _Refused(413, too_big)
                if not memory.has_share(request, len(piece)):
                    self._server.counts["memory_refused"] += 1
                    raise _Refused(503, "OUT_OF_MEMORY")
                memory.hold(request, size)
                pieces.append(piece)
                scope.deadline += len(piece) / BODY_BYTES_PER_S_MIN
        if scope.cancelled_caught:
            raise _Refused(408, "BODY_TIMEOUT")
        return b"".join(pieces)

    # Topics and channels

    async def topic_create(self, _request: Request, query: Query) -> Response:
        """POST /topic/create."""
        await self._server.topic(self._server.namespace(), _topic(query), self._topics_rate)
        return _plain("")

    async def topic_delete(self, _request: Request, query: Query) -> Response:
        """POST /topic/delete."""
        await self._server.engine.delete_queue(self._server.namespace(), _existing(query))
        return _plain("")

    async def topic_empty(self, _request: Request, query: Query) -> Response:
        """POST /topic/empty: drop messages that no channel has got yet; channels keep theirs."""
        namespace, topic = self._server.namespace(), _topic(query)
        queue = await self._server.engine.loaded(namespace, topic)
        if not queue.channels:
            await self._server.engine.empty(namespace, topic)
        return _plain("")

    async def topic_pause(self, _request: Request, query: Query) -> Response:
        """POST /topic/pause."""
        await self._server.engine.pause(self._server.namespace(), _existing(query))
        return _plain("")

    async def topic_unpause(self, _request: Request, query: Query) -> Response:
        """POST /topic/unpause."""
        await self._server.engine.resume(self._server.namespace(), _existing(query))
        return _plain("")

    async def channel_create(self, _request: Request, query: Query) -> Response:
        """POST /channel/create."""
        await self._server.engine.create_channel(self._server.namespace(), *_topic_and_channel(query))
        return _plain("")

    async def channel_delete(self, _request: Request, query: Query) -> Response:
        """POST /channel/delete."""
        await self._server.engine.delete_channel(self._server.namespace(), *_topic_and_channel(query))
        return _plain("")

    async def channel_empty(self, _request: Request, query: Query) -> Response:
        """POST /channel/empty."""
        await self._server.engine.empty(self._server.namespace(), *_topic_and_channel(query))
        return _plain("")

    async def channel_pause(self, _request: Request, query: Query) -> Response:
        """POST /channel/pause."""
        await self._server.engine.pause(self._server.namespace(), *_topic_and_channel(query))
        return _plain("")

    async def channel_unpause(self, _request: Request, query: Query) -> Response:
        """POST /channel/unpause."""
        await self._server.engine.resume(self._server.namespace(), *_topic_and_channel(query))
        return _plain("")

    # Describing

    async def ping(self, _request: Request, _query: Query) -> Response:
        """GET /ping."""
        health = health_of(self._server.engine)
        return _plain(health, 200 if health == "OK" else 500)

    async def info(self, _request: Request, _query: Query) -> Response:
        """GET /info."""
        server, limits = self._server, self._server.limits
        return _json(
            {
                "version": VERSION,
                "broadcast_address": "127.0.0.1",
                "hostname": socket.gethostname(),
                "http_port": _port(server.http_address),
                "tcp_port": _port(server.tcp_address),
                "start_time": int(server.started_unix_s),
                "max_heartbeat_interval": limits.heartbeat_max_ms * 1_000_000,
                "max_output_buffer_size": limits.output_buffer_max_bytes,
                "max_output_buffer_timeout": limits.output_buffer_timeout_max_ms * 1_000_000,
                "max_deflate_level": 0,
                "topology_zone": "",
                "topology_region": "",
            }
        )

    async def stats(self, _request: Request, query: Query) -> Response:
        """GET /stats."""
        include_clients = _first(query, "include_clients") not in _FALSE
        stats = await stats_of(
            self._server, _first(query, "topic"), _first(query, "channel"), include_clients=include_clients
        )
        if _first(query, "format") == "json":
            return _json(stats)
        return _plain(as_text(stats, time.time()))


def _json(fields: Mapping[str, object] | Struct, status: int = 200) -> Response:
    body = msgspec.json.encode(fields)
    return Response(body, status, {**_HEADERS, "Content-Type": "application/json; charset=utf-8"})


def _plain(text: str, status: int = 200) -> Response:
    return Response(text, status, _HEADERS, media_type="text/plain; charset=utf-8")


def _check_sender(request: Request) -> None:
    if not is_loopback_host(request.headers.get("host", "")) or "origin" in request.headers:
        raise _Refused(403, "LOOPBACK_ONLY")


def _query(request: Request) -> Query:
    try:
        raw = bytes(request.scope["query_string"]).decode("ascii")
        return parse_qs(raw, keep_blank_values=True, max_num_fields=_FIELDS_MAX, errors="strict")
    except ValueError:
        raise _Refused(400, "INVALID_REQUEST") from None


def _first(query: Query, name: str) -> str:
    return query[name][0] if name in query else ""


def _existing(query: Query) -> str:
    if "topic" not in query:
        raise _Refused(400, "MISSING_ARG_TOPIC")
    return query["topic"][0]


def _topic(query: Query) -> str:
    topic = _existing(query)
    try:
        check_name(topic)
    except ValueError:
        raise _Refused(400, "INVALID_TOPIC") from None
    return topic


def _topic_and_channel(query: Query) -> tuple[str, str]:
    if "topic" not in query:
        raise _Refused(400, "MISSING_ARG_TOPIC")
    topic = query["topic"][0]
    try:
        check_name(topic)
    except ValueError:
        raise _Refused(400, "INVALID_ARG_TOPIC") from None
    if "channel" not in query:
        raise _Refused(400, "MISSING_ARG_CHANNEL")
    channel = query["channel"][0]
    try:
        check_name(channel, "channel")
    except ValueError:
        raise _Refused(400, "INVALID_ARG_CHANNEL") from None
    return topic, channel


def _port(address: str) -> int:
    return int(address.rpartition(":")[2]) if address else -1


_Action = Callable[[NsqHttp, Request, Query], Awaitable[Response]]
_ROUTES: Final[dict[str, tuple[str, _Action]]] = {
    "/ping": ("GET", NsqHttp.ping),
    "/info": ("GET", NsqHttp.info),
    "/stats": ("GET", NsqHttp.stats),
    "/pub": ("POST", NsqHttp.pub),
    "/mpub": ("POST", NsqHttp.mpub),
    "/topic/create": ("POST", NsqHttp.topic_create),
    "/topic/delete": ("POST", NsqHttp.topic_delete),
    "/topic/empty": ("POST", NsqHttp.topic_empty),
    "/topic/pause": ("POST", NsqHttp.topic_pause),
    "/topic/unpause": ("POST", NsqHttp.topic_unpause),
    "/channel/create": ("POST", NsqHttp.channel_create),
    "/channel/delete": ("POST", NsqHttp.channel_delete),
    "/channel/empty": ("POST", NsqHttp.channel_empty),
    "/channel/pause": ("POST", NsqHttp.channel_pause),
    "/channel/unpause": ("POST", NsqHttp.channel_unpause),
}
