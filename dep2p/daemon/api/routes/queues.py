"""Durable queues: publish, consume with results, look, administer; here, or at another member."""

from collections.abc import Mapping
from typing import Any, Final, cast

import trio
from starlette.requests import ClientDisconnect, Request
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dep2p.control_api.encoding import ItemSplitter, ItemTooLargeError, encode_line
from dep2p.daemon.api.context import Control
from dep2p.daemon.api.fields import Fields, as_peer, query_fields, read_json
from dep2p.daemon.api.resources.queue_consumers import Consuming
from dep2p.daemon.api.routing import path_text, route
from dep2p.daemon.problems import Problem, json_response, problem_of, problem_response
from dep2p.errors import Dep2pError, MessageTooLargeError, StreamClosedError
from dep2p.protocols.queues.failover_group import NODES_MAX
from dep2p.protocols.queues.filters import Filter
from dep2p.protocols.queues.names import check_name
from dep2p.protocols.queues.wire import Result, Settle, WireMessage
from dep2p.queues.api.queues import Queues
from dep2p.queues.types import Attributes, encode_attributes, message_id, parse_message_id

_ITEMS: Final = "application/octet-stream"
_IN_FLIGHT_MAX: Final = 65_536
_TAGS_MAX: Final = 32
_RESULTS_MAX: Final = 4_096
_COUNT_MAX: Final = 1_000
_RECEIVE_MAX: Final = 32
_RECEIVE_WAIT_MAX_S: Final = 20.0
_HANDLES_MAX: Final = 256
_PARTITIONS_MAX: Final = 1_024
_DELAY_MAX_S: Final = 10 * 365 * 86_400.0
_PRIORITY_MAX: Final = 255
_BATCH_ITEMS: Final = 512
_BATCH_BYTES: Final = 262_144
_KINDS: Final = {
    "finish": Settle.FINISH,
    "requeue": Settle.REQUEUE,
    "touch": Settle.TOUCH,
    "release": Settle.RELEASE,
    "reject": Settle.REJECT,
}


def _place(control: Control, query: Fields) -> Queues:
    realm, peer = query.optional_text("realm"), query.optional_text("peer")
    if peer is None:
        return control.node.queues.place(realm)
    peers = peer.split(",", NODES_MAX)
    if len(peers) > NODES_MAX:
        raise Problem("D1005", f"more than {NODES_MAX} peers: a store is shared by at most so many")
    return control.node.queues.place(realm, *map(as_peer, peers))


async def _whole(control: Control, request: Request) -> tuple[Queues, Fields]:
    """Place and body of a call with a JSON body."""
    query = query_fields(request)
    place = _place(control, query)
    query.finish()
    return place, await read_json(request, control.bounds)


async def _ask(place: Queues, op: str, fields: Mapping[str, object]) -> dict[str, Any]:
    try:
        return await place.ask(op, fields)
    except ValueError as error:
        raise Problem("D1005", str(error)) from None


def _named(request: Request, fields: Fields | None = None) -> dict[str, object]:
    found: dict[str, object] = {"queue": path_text(request, "queue")}
    if fields is not None:
        channel = fields.optional_text("channel")
        if channel is not None:
            found["channel"] = channel
    return found


async def listing(control: Control, request: Request) -> ASGIApp:
    """All queues of a place."""
    query = query_fields(request)
    place = _place(control, query)
    query.finish()
    return json_response(await _ask(place, "list", {}))


async def create(control: Control, request: Request) -> ASGIApp:
    """Make a queue."""
    place, fields = await _whole(control, request)
    wanted: dict[str, object] = {"queue": fields.text("name"), "options": fields.mapping("options")}
    if fields.has("access"):
        wanted["access"] = fields.mapping("access")
    nodes = fields.texts("nodes", items_max=_PARTITIONS_MAX)
    if nodes:
        wanted["nodes"] = nodes
    fields.finish()
    control.lifecycle.require_running()
    return json_response(await _ask(place, "create", wanted), 201)


async def look(control: Control, request: Request) -> ASGIApp:
    """One queue with its channels."""
    query = query_fields(request)
    place = _place(control, query)
    query.finish()
    return json_response(await _ask(place, "info", _named(request)))


async def delete(control: Control, request: Request) -> ASGIApp:
    """Delete a queue."""
    query = query_fields(request)
    place = _place(control, query)
    wanted = _named(request)
    if query.choice("force", ("false", "true")) == "true":
        wanted["force"] = True
    query.finish()
    return json_response(await _ask(place, "delete", wanted))


async def delete_channel(control: Control, request: Request) -> ASGIApp:
    """Delete a channel."""
    query = query_fields(request)
    place = _place(control, query)
    query.finish()
    return json_response(await _ask(place, "delete_channel", _channel(request)))


def _channel(request: Request) -> dict[str, object]:
    return {"queue": path_text(request, "queue"), "channel": path_text(request, "channel")}


async def _act(control: Control, request: Request, op: str) -> ASGIApp:
    place, fields = await _whole(control, request)
    named = _named(request, fields)
    fields.finish()
    return json_response(await _ask(place, op, named))


async def pause(control: Control, request: Request) -> ASGIApp:
    """Deliver nothing."""
    return await _act(control, request, "pause")


async def resume(control: Control, request: Request) -> ASGIApp:
    """Deliver again."""
    return await _act(control, request, "resume")


async def empty(control: Control, request: Request) -> ASGIApp:
    """Drop what waits."""
    return await _act(control, request, "empty")


async def peek(control: Control, request: Request) -> ASGIApp:
    """The oldest messages."""
    query = query_fields(request)
    place = _place(control, query)
    fields = _named(request, query)
    fields["count"] = query.integer_text("count", 10, low=1, high=_COUNT_MAX)
    query.finish()
    return json_response(await _ask(place, "peek", fields))


async def dead(control: Control, request: Request) -> ASGIApp:
    """Dead letters."""
    query = query_fields(request)
    place = _place(control, query)
    fields = _channel(request)
    fields["after"] = query.integer_text("after", 0, low=0, high=10**17)
    fields["count"] = query.integer_text("count", 100, low=1, high=_COUNT_MAX)
    query.finish()
    return json_response(await _ask(place, "dead", fields))


async def _dead(control: Control, request: Request, op: str) -> ASGIApp:
    place, fields = await _whole(control, request)
    wanted = _channel(request)
    if fields.has("ids"):
        wanted["ids"] = fields.integers("ids", items_max=10_000)
    fields.finish()
    return json_response(await _ask(place, op, wanted))


async def replay(control: Control, request: Request) -> ASGIApp:
    """Dead letters again."""
    return await _dead(control, request, "replay")


async def forget(control: Control, request: Request) -> ASGIApp:
    """Dead letters no more."""
    return await _dead(control, request, "forget_dead")


class _ExportLines:
    """Every message of a log as NDJSON."""

    def __init__(self, place: Queues, queue: str) -> None:
        self._place = place
        self._queue = queue

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        last = b""
        try:
            await self._place.info(self._queue)  # what is wrong is told before anything is sent
            headers = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-store")]
            started = True
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            batch: list[bytes] = []
            size = 0
            async for message in self._place.export(self._queue):
                batch.append(encode_line(message))
                size += len(batch[-1])
                if size >= _BATCH_BYTES:
                    await send({"type": "http.response.body", "body": b"".join(batch), "more_body": True})
                    batch, size = [], 0
            last = b"".join(batch)
        except Dep2pError as error:
            if not started:
                await problem_response(error)(scope, receive, send)
                return
            last = encode_line({"error": problem_of(error)})
        await send({"type": "http.response.body", "body": last, "more_body": False})


async def export(control: Control, request: Request) -> ASGIApp:
    """The whole log."""
    query = query_fields(request)
    place = _place(control, query)
    query.finish()
    return _ExportLines(place, path_text(request, "queue"))


# Partitions


async def expand(control: Control, request: Request) -> ASGIApp:
    """More partitions."""
    place, fields = await _whole(control, request)
    wanted = _named(request) | {"partitions": fields.integer("partitions", 0, low=1, high=_PARTITIONS_MAX)}
    nodes = fields.texts("nodes", items_max=_PARTITIONS_MAX)
    if nodes:
        wanted["nodes"] = nodes
    fields.finish()
    return json_response(await _ask(place, "expand", wanted))


async def route_table(control: Control, request: Request) -> ASGIApp:
    """Where keys go."""
    query = query_fields(request)
    place = _place(control, query)
    query.finish()
    return json_response(await _ask(place, "route", _named(request)))


async def consumers(control: Control, request: Request) -> ASGIApp:
    """Who consumes from a channel."""
    query = query_fields(request)
    place = _place(control, query)
    query.finish()
    return json_response(await _ask(place, "consumers", _channel(request)))


async def locks(control: Control, request: Request) -> ASGIApp:
    """Who holds which partition."""
    query = query_fields(request)
    place = _place(control, query)
    query.finish()
    return json_response(await _ask(place, "locks", _channel(request)))


# Receiving by calls


async def receive(control: Control, request: Request) -> ASGIApp:
    """Messages that are the node's for a while; it may wait for them."""
    place, fields = await _whole(control, request)
    wanted = _channel(request) | {
        "count": fields.integer("count", 1, low=1, high=_RECEIVE_MAX),
        "wait_s": fields.number("wait_s", 10.0, low=-1e-9, high=_RECEIVE_WAIT_MAX_S),
        "invisible_s": fields.number("invisible_s", 60.0, high=_DELAY_MAX_S),
        "attempt_id": fields.text("attempt_id", "", bytes_max=64),
        "from_start": fields.boolean("from_start", False),
    }
    fields.finish()
    control.lifecycle.require_running()
    return json_response(await _ask(place, "receive", wanted))


async def acknowledge(control: Control, request: Request) -> ASGIApp:
    """Received messages are done."""
    place, fields = await _whole(control, request)
    wanted = _channel(request) | {"handles": fields.texts("handles", items_max=_HANDLES_MAX)}
    fields.finish()
    return json_response(await _ask(place, "ack", wanted))


async def invisible(control: Control, request: Request) -> ASGIApp:
    """Another time for a received message."""
    place, fields = await _whole(control, request)
    wanted = _channel(request) | {
        "handle": fields.text("handle"),
        "invisible_s": fields.number("invisible_s", 60.0, low=-1e-9, high=_DELAY_MAX_S),
    }
    fields.finish()
    return json_response(await _ask(place, "invisible", wanted))


# Publishing


async def publish(control: Control, request: Request) -> ASGIApp:
    """One message in JSON, or any number as a body of items, streamed and held back."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == _ITEMS:
        return await _publish_many(control, request)
    place, fields = await _whole(control, request)
    body = fields.payload(control.config.limits.message_bytes_max)
    headers = fields.headers()
    key = fields.text("key", "")
    attributes = _encoded(
        Attributes(
            key,
            tuple(fields.texts("tags", items_max=_TAGS_MAX)),
            fields.integer("priority", 0, low=0, high=_PRIORITY_MAX),
            headers or {},
            round(fields.number("defer_s", 0.0, low=-1e-9, high=_DELAY_MAX_S) * 1000),
        )
    )
    fields.finish()
    queue = path_text(request, "queue")
    with control.lifecycle.work():
        points = await _publish(place, queue, [WireMessage(attributes, body)])
    answer: dict[str, object] = {"id": message_id(*points[0])}
    if key and place.is_elsewhere(queue, key, message_id(*points[0])):
        answer["elsewhere"] = True
    return json_response(answer, 201)


def _encoded(attributes: Attributes) -> bytes:
    try:
        return encode_attributes(attributes)
    except (ValueError, TypeError) as error:
        raise Problem("D1005", str(error)) from None


async def _publish(place: Queues, queue: str, messages: list[WireMessage]) -> list[tuple[int, int]]:
    try:
        return await place.publish_batch(queue, messages, None)
    except ValueError as error:
        raise Problem("D1005", str(error)) from None


async def _publish_many(control: Control, request: Request) -> ASGIApp:
    query = query_fields(request)
    place = _place(control, query)
    tags = query.text("tags", "")
    try:
        delay_s = float(query.text("defer_s", "0"))
        if not 0 <= delay_s <= _DELAY_MAX_S:
            raise ValueError
    except ValueError:
        raise query.wrong("defer_s", "is no number of seconds") from None
    attributes = _encoded(
        Attributes(
            query.text("key", ""),
            tuple(tag for tag in tags.split(",") if tag),
            query.integer_text("priority", 0, low=0, high=_PRIORITY_MAX),
            {},
            round(delay_s * 1000),
        )
    )
    query.finish()
    queue = path_text(request, "queue")
    splitter = ItemSplitter(control.config.limits.message_bytes_max)
    count = size = 0
    first = last = ""
    try:
        with control.lifecycle.work():
            more = True
            while more:
                piece, more = await _piece(control, request, splitter.is_inside_item)
                items = _items(splitter, piece, last=not more)
                for start in range(0, len(items), _BATCH_ITEMS):
                    batch = items[start : start + _BATCH_ITEMS]
                    points = await _publish(place, queue, [WireMessage(attributes, body) for body in batch])
                    first = first or message_id(*points[0])
                    last = message_id(*points[-1])
                    count += len(batch)
                    size += sum(map(len, batch))
    except Dep2pError as error:
        # The caller must know how far it came: what was published cannot be taken back.
        before = f"; {count} messages before it were published" if count else ""
        return problem_response(error, detail=f"{error}{before}", published=count)
    return json_response({"messages": count, "bytes": size, "first_id": first, "last_id": last}, 201)


def _items(splitter: ItemSplitter, piece: bytes, *, last: bool) -> list[bytes]:
    try:
        items = splitter.feed(piece)
    except ItemTooLargeError as error:
        raise MessageTooLargeError(str(error)) from None
    if splitter.aborted:
        raise StreamClosedError("the control client broke off")
    if last and splitter.is_inside_item:
        raise Problem("D6003", "the body ended inside an item")
    return items


async def _piece(control: Control, request: Request, is_inside: bool) -> tuple[bytes, bool]:
    """The next part of the body, and whether more follow. Between two messages it may take any time."""
    stall_s = control.bounds.body_timeout_s if is_inside else float("inf")
    message: Message = {}
    with trio.move_on_after(stall_s) as stalled:
        message = await request.receive()
    if stalled.cancelled_caught:
        raise Problem("D1009", f"the rest of a message did not arrive within {stall_s:g} s")
    if message.get("type") != "http.request":
        raise ClientDisconnect
    return cast(bytes, message.get("body", b"")), bool(message.get("more_body", False))


# Consuming


async def consume(control: Control, request: Request) -> ASGIApp:
    """Deliveries to this client, until it hangs up."""
    query = query_fields(request)
    place = _place(control, query)
    in_flight = query.integer_text("max_in_flight", 1, low=1, high=_IN_FLIGHT_MAX)
    from_start, exclusive = query.text("from_start", "0"), query.text("exclusive", "0")
    for name, flag in (("from_start", from_start), ("exclusive", exclusive)):
        if flag not in ("0", "1"):
            raise query.wrong(name, "is neither 0 nor 1")
    count = query.integer_text("count", 0, low=0, high=10**15)
    filter_text = query.text("filter", "")
    query.finish()
    queue, channel = path_text(request, "queue"), path_text(request, "channel")
    try:
        check_name(queue)
        check_name(channel, "channel")
        if filter_text:
            Filter(filter_text)
    except ValueError as error:
        raise Problem("D1005", str(error)) from error
    control.lifecycle.require_running()
    return control.queue_consumers.lines(
        Consuming(
            place,
            queue,
            channel,
            in_flight,
            from_start == "1",
            control.bounds.subscription_bytes_max,
            count,
            filter_text,
            exclusive == "1",
        )
    )


async def results(control: Control, request: Request) -> ASGIApp:
    """What became of deliveries."""
    fields = await read_json(request, control.bounds)
    durable = fields.boolean("durable", False)
    given = fields.objects("results", items_max=_RESULTS_MAX)
    fields.finish()
    wanted = [_result(each) for each in given]
    if not wanted:
        return json_response({"refused": {}, "timeouts_s": {}})
    # A touch tells the time that is left: for that, the answer of the queue is needed.
    needs_answer = durable or any(each.kind == Settle.TOUCH for each in wanted)
    answer = await control.queue_consumers.settle(path_text(request, "consumer"), wanted, durable=needs_answer)
    return json_response(answer)


def _result(value: dict[str, object]) -> Result:
    fields = Fields(value, "field of a result")
    kind = _KINDS[fields.choice("do", tuple(_KINDS))]
    try:
        partition, seq = parse_message_id(fields.text("id"))
    except ValueError as error:
        raise fields.wrong("id", str(error)) from None
    delay_s = fields.number("delay_s", 0.0, low=-1e-9, high=_DELAY_MAX_S)
    reason = fields.text("reason", "")
    fields.finish()
    return Result(kind, partition, seq, min(round(delay_s * 1000), 0xFFFF_FFFF), reason)


_QUEUE: Final = "/v1/queues/{queue}"
_CHANNEL: Final = f"{_QUEUE}/channels/{{channel}}"

ROUTES: list[Route] = [
    route("GET", "/v1/queues", listing),
    route("POST", "/v1/queues", create),
    route("GET", _QUEUE, look),
    route("DELETE", _QUEUE, delete),
    route("POST", f"{_QUEUE}/pause", pause),
    route("POST", f"{_QUEUE}/resume", resume),
    route("POST", f"{_QUEUE}/empty", empty),
    route("POST", f"{_QUEUE}/messages", publish),
    route("GET", f"{_QUEUE}/messages", peek),
    route("GET", f"{_QUEUE}/export", export),
    route("DELETE", _CHANNEL, delete_channel),
    route("POST", f"{_CHANNEL}/consume", consume),
    route("POST", f"{_QUEUE}/expand", expand),
    route("GET", f"{_QUEUE}/route", route_table),
    route("GET", f"{_CHANNEL}/consumers", consumers),
    route("GET", f"{_CHANNEL}/locks", locks),
    route("POST", f"{_CHANNEL}/receive", receive),
    route("POST", f"{_CHANNEL}/ack", acknowledge),
    route("POST", f"{_CHANNEL}/invisible", invisible),
    route("GET", f"{_CHANNEL}/dead", dead),
    route("POST", f"{_CHANNEL}/dead/replay", replay),
    route("POST", f"{_CHANNEL}/dead/remove", forget),
    route("POST", "/v1/queue-consumers/{consumer}/results", results),
]
