"""Publish/subscribe: publish one message or a stream of them, read a topic, describe topics."""

from collections.abc import Iterable
from urllib.parse import unquote

import trio
from starlette.requests import ClientDisconnect, Request
from starlette.routing import Route
from starlette.types import ASGIApp, Message

from dep2p.control_api.calls import PublishCall, PublishedLine
from dep2p.control_api.encoding import ItemSplitter, ItemTooLargeError, LineSplitter
from dep2p.control_api.gathers import AnswerCall, AnswerOutcomeReply, GatherCall
from dep2p.control_api.replies import PublishManyReply, PublishReply, TopicList
from dep2p.daemon.api.context import Control
from dep2p.daemon.api.fields import (
    Fields,
    as_peer,
    body_piece,
    json_object,
    parse_line,
    payload_of,
    query_fields,
    read_call,
    topic_headers,
    within,
    wrong_field,
)
from dep2p.daemon.api.resources.gathers import GatherLines
from dep2p.daemon.api.resources.topics import Reading
from dep2p.daemon.api.routes.delivery import publish_reliably
from dep2p.daemon.api.routing import route
from dep2p.daemon.problems import Problem, json_response, problem_response
from dep2p.errors import Dep2pError, MessageTooLargeError, StreamClosedError
from dep2p.gossipsub.headers import MessageHeaders, ReplyWanted
from dep2p.gossipsub.patterns import has_wildcard
from dep2p.gossipsub.topic_types import OnFull, OnNoPeers
from dep2p.protocols.messaging.answers import (
    GATHER_TIMEOUT_S,
    GATHER_TIMEOUT_S_MAX,
    OWN_PREFIX,
    QUORUM_MAX,
    GatherOptions,
)
from dep2p.protocols.realm.statement import TopicGroup, check_group
from dep2p.pubsub.publish_all import PublishTally

_Item = tuple[bytes, MessageHeaders | None]
_ON_NO_PEERS: tuple[OnNoPeers, ...] = ("error", "queue", "ok")
_ON_FULL: tuple[OnFull, ...] = ("drop_oldest", "drop_newest", "pause")
_ITEMS = "application/octet-stream"
_LINES = "application/x-ndjson"
_NO_REALM = "the public network has no realm: give one of the two"
_HANDLE_BYTES_MAX = 64
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
    headers = topic_headers(call.headers, control.config.limits)
    if call.public and call.realm is not None:
        raise wrong_field("public", _NO_REALM)
    _check_no_pattern(topic, call.public)
    if call.reliable:
        if call.public:
            raise wrong_field("reliable", "needs a realm: the public network has no acknowledgements")
        return json_response(await publish_reliably(control, topic, data, call), 202)
    for name in ("critical_peers", "wait_for", "wait_s", "ttl_s"):
        if getattr(call, name) is not None:
            raise wrong_field(name, "goes with reliable")
    with control.lifecycle.work():
        pubsub = control.node.pubsub(call.realm, public=call.public)
        origin = control.topics.handle(call.handle)
        result = await pubsub.publish(
            topic, data, wait=call.wait, on_no_peers=call.on_no_peers, origin=origin, headers=headers
        )
    answer = PublishReply(
        id=result.id.hex(),
        sent_to=tuple(result.sent_to),
        queued=result.queued,
        dropped=tuple(result.dropped),
        local_subscriptions=result.local_subscriptions,
        seqno=result.seqno,
    )
    return json_response(answer, 202)


class _Items:
    """A body of length-prefixed items, which all have the headers of the query."""

    def __init__(self, control: Control, headers: MessageHeaders | None) -> None:
        self._headers = headers
        self._splitter = ItemSplitter(control.config.limits.message_bytes_max)

    @property
    def is_inside(self) -> bool:
        """Whether a part of a message has come."""
        return self._splitter.is_inside_item

    def feed(self, piece: bytes, last: bool) -> Iterable[_Item]:
        """Take a piece of the body; return the messages that are complete now."""
        try:
            items = self._splitter.feed(piece)
        except ItemTooLargeError as error:
            raise MessageTooLargeError(str(error)) from None
        if self._splitter.aborted:
            raise StreamClosedError("the control client broke off")
        if last and self._splitter.is_inside_item:
            raise Problem("D6003", "the body ended inside an item")
        return [(item, self._headers) for item in items]


class _Lines:
    """A body of JSON lines, each with ``data``, ``encoding`` and perhaps ``headers`` in place of those of the query."""

    def __init__(self, control: Control, headers: MessageHeaders | None) -> None:
        self._headers = headers
        self._limits = control.config.limits
        self._splitter = LineSplitter(control.bounds.json_bytes_max)

    @property
    def is_inside(self) -> bool:
        """Whether a part of a message has come."""
        return self._splitter.is_inside_line

    def feed(self, piece: bytes, last: bool) -> Iterable[_Item]:
        """Take a piece of the body; return the messages that are complete now, each decoded when its turn comes."""
        try:
            lines = self._splitter.feed(piece + b"\n" if last else piece)
        except ValueError as error:
            raise Problem("D1007", str(error)) from None
        return map(self._message, lines)

    def _message(self, line: bytes) -> _Item:
        call = parse_line(line, PublishedLine)
        headers = self._headers if call.headers is None else topic_headers(call.headers, self._limits)
        return payload_of(call, self._limits.message_bytes_max), headers


async def _publish_many(control: Control, request: Request, topic: str, kind: str) -> ASGIApp:
    query = query_fields(request)
    on_no_peers: OnNoPeers = query.choice("on_no_peers", _ON_NO_PEERS)
    realm, public = _place(query, query.flag("public"))
    headers = _query_headers(control, query)
    query.finish()
    _check_no_pattern(topic, public)
    messages = _Items(control, headers) if kind == _ITEMS else _Lines(control, headers)
    tally = PublishTally()
    try:
        with control.lifecycle.work():
            pubsub = control.node.pubsub(realm, public=public)
            more = True
            while more:
                piece, more = await _piece(control, request, messages.is_inside)
                for data, each in messages.feed(piece, not more):
                    result = await pubsub.publish(topic, data, wait=True, on_no_peers=on_no_peers, headers=each)
                    tally.add(data, result)
    except Dep2pError as error:
        # The caller must know how far it came: published messages cannot be taken back.
        before = f"; {tally.messages} messages before it were published" if tally.messages else ""
        return problem_response(error, detail=f"{error}{before}", published=tally.messages)
    total = tally.total()
    return json_response(
        PublishManyReply(
            messages=total.messages,
            bytes=total.bytes,
            queued=total.queued,
            dropped=total.dropped,
            peers=total.peers,
            local_subscriptions=total.local_subscriptions,
        ),
        202,
    )


def _check_no_pattern(topic: str, public: bool) -> None:
    """Refuse to publish to a pattern. On the public network names are as they are."""
    if has_wildcard(topic) and not public:
        why = f"{topic[:80]!r} is a pattern, not a topic: only subscriptions have patterns"
        raise Problem("D1005", why, field="topic")


def _query_headers(control: Control, query: Fields) -> MessageHeaders | None:
    text = query.optional_text("headers")
    if text is None:
        return None
    return topic_headers(json_object(text.encode(), "the query parameter 'headers'"), control.config.limits)


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
    most_bytes = control.bounds.subscription_bytes_max
    buffer_bytes = query.integer_text("buffer_bytes", most_bytes, low=1, high=2**53)
    on_full: OnFull = query.choice("on_full", _ON_FULL)
    group = query.optional_text("group")
    handle = query.text("handle", "", bytes_max=_HANDLE_BYTES_MAX) or None
    realm, public = _place(query, query.flag("public"))
    query.finish()
    _check_group(topic, group, public)
    buffer_bytes = min(buffer_bytes, most_bytes)
    return control.topics.read(Reading(topic, realm, public, buffer, buffer_bytes, on_full, group, handle))


def _check_group(topic: str, group: str | None, public: bool) -> None:
    if group is None:
        return
    if public:
        raise Problem("D1005", "groups need a realm: the public network has none", field="group")
    try:
        check_group(TopicGroup(topic, group))
    except ValueError as error:
        raise Problem("D1005", str(error), field="group") from None


async def hold(control: Control, request: Request) -> ASGIApp:
    """Join a topic for a client's handle, and stay in it while the connection is there."""
    topic = _topic(control, request, _DETAIL_SEGMENTS + 1)
    query = query_fields(request)
    handle = query.text("handle", bytes_max=_HANDLE_BYTES_MAX)
    if not handle:
        raise query.wrong("handle", "is empty")
    realm, public = _place(query, query.flag("public"))
    query.finish()
    control.lifecycle.require_running()
    return control.topics.hold(topic, realm, public, handle)


async def gather(control: Control, request: Request) -> ASGIApp:
    """Ask the subscribers of a topic, and send their answers as they come."""
    topic = _topic(control, request, _DETAIL_SEGMENTS + 1)
    call = await read_call(request, control.bounds, GatherCall)
    data = payload_of(call, control.config.limits.message_bytes_max)
    _check_no_pattern(topic, public=False)
    if call.quorum is not None and not 1 <= call.quorum <= QUORUM_MAX:
        raise wrong_field("quorum", f"is {call.quorum}: it is a whole number from 1 to {QUORUM_MAX}")
    options: GatherOptions = {
        "quorum": call.quorum,
        "timeout_s": within("timeout_s", call.timeout_s, default=GATHER_TIMEOUT_S, high=GATHER_TIMEOUT_S_MAX),
        "headers": topic_headers(call.headers, control.config.limits),
    }
    gathers = control.node.services(call.realm).gathers
    return GatherLines(control.subscriptions, gathers, topic, data, options)


async def answer(control: Control, request: Request) -> ASGIApp:
    """Send an answer to the author of a message of a topic."""
    call = await read_call(request, control.bounds, AnswerCall)
    author, data = as_peer(call.author), payload_of(call, control.config.limits.message_bytes_max)
    headers = topic_headers(call.headers, control.config.limits)
    for name in headers or ():
        if name.startswith(OWN_PREFIX):
            raise wrong_field("headers", f"names that begin with {OWN_PREFIX!r} are dep2p's own")
    if call.error is not None and data:
        raise wrong_field("error", "an answer is either data or an error")
    try:
        token = bytes.fromhex(call.token)
    except ValueError:
        raise wrong_field("token", "is not 32 characters in hex, as in reply_token") from None
    within_s = within("within_s", call.within_s, default=0.0, high=GATHER_TIMEOUT_S_MAX)
    gathers = control.node.services(call.realm).gathers
    with control.lifecycle.work():
        wanted = ReplyWanted(token, trio.current_time() + within_s)
        outcome = await gathers.answer(author, wanted, data, headers, call.error)
    return json_response(AnswerOutcomeReply(outcome=outcome))


async def listing(control: Control, _request: Request) -> ASGIApp:
    """List the joined topics."""
    return json_response(TopicList(topics=tuple(control.node.topics())))


async def look(control: Control, request: Request) -> ASGIApp:
    """Describe a topic, joined or not: its peers, mesh and scores."""
    topic = _topic(control, request, _DETAIL_SEGMENTS)
    query = query_fields(request)
    realm, public = _place(query, query.flag("public"))
    query.finish()
    return json_response(control.node.topic_peers(topic, realm=realm, public=public))


ROUTES: list[Route] = [
    route("GET", "/v1/topics", listing),
    route("POST", "/v1/topics/{topic}/messages", publish, path_names=("topic",)),
    route("GET", "/v1/topics/{topic}/messages", read, path_names=("topic",)),
    route("GET", "/v1/topics/{topic}/handle", hold, path_names=("topic",)),
    route("POST", "/v1/topics/{topic}/gathers", gather, path_names=("topic",)),
    route("POST", "/v1/answers", answer),
    route("GET", "/v1/topics/{topic}", look, path_names=("topic",)),
]
