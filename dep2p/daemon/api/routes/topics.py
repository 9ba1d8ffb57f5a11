"""Publish/subscribe: publish one message or a stream of them, read a topic, describe topics."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import unquote

import trio
from starlette.requests import ClientDisconnect, Request
from starlette.routing import Route
from starlette.types import ASGIApp, Message

from dep2p.control_api.calls import PublishCall, PublishedLine
from dep2p.control_api.encoding import ItemSplitter, ItemTooLargeError, LineSplitter
from dep2p.control_api.replies import PublishManyReply, PublishReply, TopicList, TopicPeers, TopicSummary
from dep2p.daemon.api.context import Control
from dep2p.daemon.api.fields import (
    Fields,
    body_piece,
    parse_line,
    payload_of,
    query_fields,
    read_call,
    wrong_field,
)
from dep2p.daemon.api.resources.topics import Reading
from dep2p.daemon.api.routes.delivery import publish_reliably
from dep2p.daemon.api.routing import route
from dep2p.daemon.node_interface import PubSubInterface
from dep2p.daemon.problems import Problem, json_response, problem_response
from dep2p.errors import Dep2pError, MessageTooLargeError, StreamClosedError, TopicNotFoundError
from dep2p.pubsub.types import OnFull, OnNoPeers, TopicStatus
from dep2p.types import RealmId

_ON_NO_PEERS: tuple[OnNoPeers, ...] = ("error", "queue", "ok")
_ON_FULL: tuple[OnFull, ...] = ("drop_oldest", "drop_newest", "pause")
_ITEMS = "application/octet-stream"
_LINES = "application/x-ndjson"
_NO_REALM = "the public network has no realm: give one of the two"
_DETAIL_SEGMENTS = 4  # "", v1, topics, {topic}


def _segments(request: Request) -> list[str]:
    raw: bytes = request.scope.get("raw_path") or request.scope["path"].encode()
    return raw.partition(b"?")[0].decode("latin-1").split("/")


def _topic(control: Control, request: Request, segments: int) -> str:
    parts = _segments(request)
    if len(parts) != segments:
        raise Problem("D1006", "there is no such path; a / in a topic's name is written %2F")
    try:
        topic = unquote(parts[3], errors="strict")
    except UnicodeDecodeError:
        raise Problem("D1005", "the topic is not UTF-8", field="topic") from None
    size = len(topic.encode())
    if not 1 <= size <= control.bounds.topic_bytes_max:
        most = control.bounds.topic_bytes_max
        raise Problem("D1005", f"a topic's name has 1 to {most} bytes, not {size}", field="topic")
    return topic


def _flag(query: Fields, name: str) -> bool:
    text = query.text(name, "0")
    if text not in ("0", "1"):
        raise query.wrong(name, "is neither 0 nor 1")
    return text == "1"


def _place(fields: Fields, public: bool) -> tuple[str | None, bool]:
    realm = fields.optional_text("realm")
    if public and realm is not None:
        raise fields.wrong("public", _NO_REALM)
    return realm, public


async def publish(control: Control, request: Request) -> ASGIApp:
    """Publish one message in JSON, or any number: a body of items, or of JSON lines, streamed and held back."""
    topic = _topic(control, request, _DETAIL_SEGMENTS + 1)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind in (_ITEMS, _LINES):
        return await _publish_many(control, request, topic, kind)
    call = await read_call(request, control.bounds, PublishCall)
    data = payload_of(call, control.config.limits.message_bytes_max)
    if call.public and call.realm is not None:
        raise wrong_field("public", _NO_REALM)
    if call.reliable:
        if call.public:
            raise wrong_field("reliable", "needs a realm: the public network has no acknowledgements")
        return json_response(await publish_reliably(control, topic, data, call), 202)
    for name in ("critical_peers", "wait_for", "wait_s"):
        if getattr(call, name) is not None:
            raise wrong_field(name, "goes with reliable")
    with control.lifecycle.work():
        pubsub = control.node.pubsub(call.realm, public=call.public)
        result = await pubsub.publish(topic, data, wait=True, on_no_peers=call.on_no_peers)
    answer = PublishReply(
        id=result.id.hex(),
        sent_to=tuple(result.sent_to),
        queued=result.queued,
        dropped=tuple(result.dropped),
        local_subscriptions=result.local_subscriptions,
    )
    return json_response(answer, 202)


class _Items:
    """A body of length-prefixed items."""

    def __init__(self, control: Control) -> None:
        self._splitter = ItemSplitter(control.config.limits.message_bytes_max)

    @property
    def is_inside(self) -> bool:
        """Whether a part of a message has come."""
        return self._splitter.is_inside_item

    def feed(self, piece: bytes, last: bool) -> Iterable[bytes]:
        """Take a piece of the body; return the messages that are complete now."""
        try:
            items = self._splitter.feed(piece)
        except ItemTooLargeError as error:
            raise MessageTooLargeError(str(error)) from None
        if self._splitter.aborted:
            raise StreamClosedError("the control client broke off")
        if last and self._splitter.is_inside_item:
            raise Problem("D6003", "the body ended inside an item")
        return items


class _Lines:
    """A body of JSON lines, each with ``data`` and ``encoding``."""

    def __init__(self, control: Control) -> None:
        self._bytes_max = control.config.limits.message_bytes_max
        self._splitter = LineSplitter(control.bounds.json_bytes_max)

    @property
    def is_inside(self) -> bool:
        """Whether a part of a message has come."""
        return self._splitter.is_inside_line

    def feed(self, piece: bytes, last: bool) -> Iterable[bytes]:
        """Take a piece of the body; return the messages that are complete now, each decoded when its turn comes."""
        try:
            lines = self._splitter.feed(piece + b"\n" if last else piece)
        except ValueError as error:
            raise Problem("D1007", str(error)) from None
        return map(self._payload, lines)

    def _payload(self, line: bytes) -> bytes:
        return payload_of(parse_line(line, PublishedLine), self._bytes_max)


@dataclass(slots=True)
class _PublishTally:
    """Counts of the messages in one publish request."""

    messages: int = 0
    bytes: int = 0
    queued: int = 0
    """Messages that wait for a first peer."""
    dropped: int = 0
    """Times that a neighbour did not get a message because it is too slow."""
    peers: int = 0
    """The fewest neighbours that took one of the sent messages."""
    local_subscriptions: int = 0
    """The fewest subscriptions of this node's programs that got one of the messages."""


async def _publish_many(control: Control, request: Request, topic: str, kind: str) -> ASGIApp:
    query = query_fields(request)
    on_no_peers: OnNoPeers = query.choice("on_no_peers", _ON_NO_PEERS)
    realm, public = _place(query, _flag(query, "public"))
    query.finish()
    messages = _Items(control) if kind == _ITEMS else _Lines(control)
    tally = _PublishTally()
    try:
        with control.lifecycle.work():
            pubsub = control.node.pubsub(realm, public=public)
            more = True
            while more:
                piece, more = await _piece(control, request, messages.is_inside)
                for data in messages.feed(piece, not more):
                    await _publish_one(pubsub, topic, data, on_no_peers, tally)
    except Dep2pError as error:
        # The caller must know how far it came: published messages cannot be taken back.
        before = f"; {tally.messages} messages before it were published" if tally.messages else ""
        return problem_response(error, detail=f"{error}{before}", published=tally.messages)
    return json_response(
        PublishManyReply(
            messages=tally.messages,
            bytes=tally.bytes,
            queued=tally.queued,
            dropped=tally.dropped,
            peers=tally.peers,
            local_subscriptions=tally.local_subscriptions,
        ),
        202,
    )


async def _publish_one(
    pubsub: PubSubInterface, topic: str, data: bytes, on_no_peers: OnNoPeers, tally: _PublishTally
) -> None:
    result = await pubsub.publish(topic, data, wait=True, on_no_peers=on_no_peers)
    tally.messages += 1
    tally.bytes += len(data)
    tally.queued += result.queued
    tally.dropped += len(result.dropped)
    local = result.local_subscriptions
    tally.local_subscriptions = local if tally.messages == 1 else min(tally.local_subscriptions, local)
    if not result.queued:
        sent_to = len(result.sent_to)
        tally.peers = sent_to if tally.messages - tally.queued == 1 else min(tally.peers, sent_to)


async def _piece(control: Control, request: Request, is_inside: bool) -> tuple[bytes, bool]:
    """Return the next part of the body, and whether more follow. Between two messages it may take any time."""
    stall_s = control.bounds.body_timeout_s if is_inside else float("inf")
    message: Message = {}
    with trio.move_on_after(stall_s) as stalled:
        message = await request.receive()
    if stalled.cancelled_caught:
        raise Problem("D1009", f"the rest of a message did not arrive within {stall_s:g} s")
    if message.get("type") != "http.request":
        raise ClientDisconnect
    return body_piece(message), bool(message.get("more_body", False))


async def read(control: Control, request: Request) -> ASGIApp:
    """Send the messages of a topic, from now on."""
    if len(_segments(request)) == _DETAIL_SEGMENTS:
        return await look(control, request)  # a topic whose name has that end
    topic = _topic(control, request, _DETAIL_SEGMENTS + 1)
    query = query_fields(request)
    buffer = query.integer_text(
        "buffer", control.bounds.subscription_items_max, low=1, high=control.bounds.topic_buffer_items_max
    )
    on_full: OnFull = query.choice("on_full", _ON_FULL)
    realm, public = _place(query, _flag(query, "public"))
    query.finish()
    return control.topics.read(Reading(topic, realm, public, buffer, on_full))


async def listing(control: Control, _request: Request) -> ASGIApp:
    """List the joined topics."""
    names = {realm.realm_id: realm.name for realm in control.node.realms()}
    return json_response(TopicList(topics=tuple(_summary(status, names) for status in control.node.topics())))


def _summary(status: TopicStatus, realm_names: Mapping[RealmId, str]) -> TopicSummary:
    return TopicSummary(
        topic=status.name,
        realm=None if status.realm_id is None else realm_names.get(status.realm_id, ""),
        realm_id=status.realm_id,
        peers=status.peers,
        mesh=status.mesh,
        subscriptions=status.subscriptions,
        buffered_items=status.buffered_items,
    )


async def look(control: Control, request: Request) -> ASGIApp:
    """Describe a topic, joined or not: its peers, mesh and scores."""
    topic = _topic(control, request, _DETAIL_SEGMENTS)
    query = query_fields(request)
    realm, public = _place(query, _flag(query, "public"))
    query.finish()
    pubsub = control.node.pubsub(realm, public=public)
    peers, mesh, scores = pubsub.peers(topic), pubsub.mesh(topic), pubsub.scores()
    joined = pubsub.has_joined(topic)
    if not joined and not peers:
        raise TopicNotFoundError(f"neither this node nor a neighbour is in the topic {topic[:80]!r}")
    return json_response(
        TopicPeers(
            topic=topic,
            realm_id=pubsub.realm_id,
            joined=joined,
            peers=tuple(peers),
            mesh=tuple(mesh),
            scores={peer: round(scores[peer], 3) for peer in peers if peer in scores},
        )
    )


ROUTES: list[Route] = [
    route("GET", "/v1/topics", listing),
    route("POST", "/v1/topics/{topic}/messages", publish, path_names=("topic",)),
    route("GET", "/v1/topics/{topic}/messages", read, path_names=("topic",)),
    route("GET", "/v1/topics/{topic}", look, path_names=("topic",)),
]
