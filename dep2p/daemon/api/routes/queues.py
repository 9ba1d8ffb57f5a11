"""Durable queues: publish, consume with results, describe, administer; here, or at another member."""

from collections.abc import Mapping
from typing import Final, Literal, Unpack

import trio
from msgspec import convert
from starlette.requests import ClientDisconnect, Request
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dep2p.control_api.encoding import ItemSplitter, ItemTooLargeError, decode_headers, decode_payload, encode_line
from dep2p.control_api.queues import (
    DELAY_MAX_S,
    IN_FLIGHT_MAX,
    PRIORITY_MAX,
    BatchMessage,
    Do,
    FindDestinations,
    MessageResult,
    NewQueueBatch,
    NewQueueMessage,
    NewQueueMessages,
    PublishedBatch,
    PublishedMessage,
    PublishedMessages,
    QueueDestinations,
    QueuedMany,
    SettledMessages,
    SettleMessages,
)
from dep2p.control_api.structs import FieldError
from dep2p.daemon.api.context import Control
from dep2p.daemon.api.fields import Fields, as_peer, field_problem, query_fields, read_json
from dep2p.daemon.api.resources.queue_consumers import Consuming
from dep2p.daemon.api.routing import path_text, route
from dep2p.daemon.problems import Problem, json_response, problem_of, problem_response
from dep2p.errors import Dep2pError, MessageTooLargeError, StreamClosedError
from dep2p.protocols.queues import admin
from dep2p.protocols.queues.admin import AdminReply, AdminRequest, operation_of
from dep2p.protocols.queues.attributes import encode_options
from dep2p.protocols.queues.failover_group import NODES_MAX
from dep2p.protocols.queues.filters import Filter
from dep2p.protocols.queues.names import check_name, message_id, parse_message_id
from dep2p.protocols.queues.options import MessageOptions
from dep2p.protocols.queues.wire.admin import parse_request, reply_fields
from dep2p.protocols.queues.wire.frames import DeliveryResult, Settle, WireMessage
from dep2p.queues.api.queues import Queues
from dep2p.queues.types import SubscribeOptions

_ITEMS: Final = "application/octet-stream"
_BATCH_ITEMS: Final = 512
_BATCH_BYTES: Final = 262_144
_KINDS: Final[dict[Do, Settle]] = {
    "finish": Settle.FINISH,
    "requeue": Settle.REQUEUE,
    "touch": Settle.TOUCH,
    "release": Settle.RELEASE,
    "reject": Settle.REJECT,
}


def _queues(control: Control, query: Fields) -> Queues:
    realm, peer = query.optional_text("realm"), query.optional_text("peer")
    if peer is None:
        return control.node.queues.of() if realm == "" else control.node.queues.select(realm)
    peers = peer.split(",", NODES_MAX)
    if len(peers) > NODES_MAX:
        raise Problem("D1005", f"more than {NODES_MAX} peers: a store is shared by at most so many")
    return control.node.queues.select(realm or None, *map(as_peer, peers))


async def _whole(control: Control, request: Request) -> tuple[Queues, Fields]:
    """Return the queues and the body of a call with a JSON body."""
    query = query_fields(request)
    queues = _queues(control, query)
    query.finish()
    return queues, await read_json(request, control.bounds)


def _query_alone(request: Request) -> Fields:
    """Return the query of a call that takes no body. Raises :class:`Problem` for a body, whose fields would be
    ignored."""
    if request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers:
        raise Problem("D1005", "this call takes no body: its fields are query parameters")
    return query_fields(request)


async def _ask(queues: Queues, request: AdminRequest[AdminReply], status: int = 200) -> ASGIApp:
    try:
        return json_response(reply_fields(await queues.ask(request)), status)
    except ValueError as error:
        raise Problem("D1005", str(error)) from None


def _request(kind: type[AdminRequest[AdminReply]], fields: Mapping[str, object]) -> AdminRequest[AdminReply]:
    """Make a request, whose struct checks the fields. Raises :class:`Problem`."""
    try:
        return parse_request({"op": operation_of(kind), **fields})
    except FieldError as error:
        raise field_problem(error) from None


def _queue(request: Request) -> dict[str, object]:
    return {"queue": path_text(request, "queue")}


def _channel(request: Request) -> dict[str, object]:
    return {"queue": path_text(request, "queue"), "channel": path_text(request, "channel")}


def _named_nodes(fields: Mapping[str, object]) -> dict[str, object]:
    """Convert ``nodes`` to the names in requests between nodes; the struct refuses anything but a list."""
    nodes = fields.get("nodes")
    if not isinstance(nodes, list):
        return dict(fields)
    return {**fields, "nodes": ["home" if each == "self" else each for each in convert(nodes, list[object])]}


async def _look(control: Control, request: Request, wanted: AdminRequest[AdminReply]) -> ASGIApp:
    """Answer a request without fields of its own."""
    query = _query_alone(request)
    queues = _queues(control, query)
    query.finish()
    return await _ask(queues, wanted)


async def listing(control: Control, request: Request) -> ASGIApp:
    """List all queues of a broker."""
    return await _look(control, request, admin.ListQueues())


async def create(control: Control, request: Request) -> ASGIApp:
    """Make a queue."""
    queues, fields = await _whole(control, request)
    name = fields.text("name")
    given = fields.given("options", "access", "nodes")
    fields.finish()
    wanted = _request(admin.CreateQueue, {"queue": name, **_named_nodes(given)})
    control.lifecycle.require_running()
    return await _ask(queues, wanted, 201)


async def describe(control: Control, request: Request) -> ASGIApp:
    """Describe one queue with its channels."""
    return await _look(control, request, admin.DescribeQueue(queue=path_text(request, "queue")))


async def delete(control: Control, request: Request) -> ASGIApp:
    """Delete a queue."""
    query = _query_alone(request)
    queues = _queues(control, query)
    force = query.choice("force", ("false", "true")) == "true"
    query.finish()
    return await _ask(queues, admin.DeleteQueue(queue=path_text(request, "queue"), force=force))


async def create_channel(control: Control, request: Request) -> ASGIApp:
    """Make a channel."""
    control.lifecycle.require_running()
    return await _act(control, request, admin.CreateChannel, _channel(request), "from_start", "filter", "exclusive")


async def delete_channel(control: Control, request: Request) -> ASGIApp:
    """Delete a channel."""
    return await _look(control, request, _request(admin.DeleteChannel, _channel(request)))


async def _act(
    control: Control,
    request: Request,
    kind: type[AdminRequest[AdminReply]],
    path_fields: Mapping[str, object],
    *names: str,
) -> ASGIApp:
    """Carry out a request whose body has the fields ``names``."""
    queues, fields = await _whole(control, request)
    given = fields.given(*names)
    fields.finish()
    return await _ask(queues, _request(kind, {**path_fields, **_named_nodes(given)}))


async def pause(control: Control, request: Request) -> ASGIApp:
    """Pause delivery."""
    return await _act(control, request, admin.PauseQueue, _queue(request), "channel", "all_channels")


async def resume(control: Control, request: Request) -> ASGIApp:
    """Resume delivery."""
    return await _act(control, request, admin.ResumeQueue, _queue(request), "channel", "all_channels")


async def empty(control: Control, request: Request) -> ASGIApp:
    """Drop the messages that wait."""
    return await _act(control, request, admin.EmptyQueue, _queue(request), "channel", "all_channels")


async def peek(control: Control, request: Request) -> ASGIApp:
    """List the oldest messages."""
    query = _query_alone(request)
    queues = _queues(control, query)
    channel = query.optional_text("channel")
    count = query.integer_text("count", 10, low=1, high=admin.COUNT_MAX)
    query.finish()
    return await _ask(queues, admin.PeekMessages(queue=path_text(request, "queue"), channel=channel, count=count))


async def dead_letters(control: Control, request: Request) -> ASGIApp:
    """List dead letters."""
    query = _query_alone(request)
    queues = _queues(control, query)
    after = query.integer_text("after", 0, low=0, high=10**17)
    count = query.integer_text("count", 100, low=1, high=admin.COUNT_MAX)
    query.finish()
    queue, channel = path_text(request, "queue"), path_text(request, "channel")
    return await _ask(queues, admin.ListDeadLetters(queue=queue, channel=channel, after=after, count=count))


async def replay(control: Control, request: Request) -> ASGIApp:
    """Give dead letters to their channel again."""
    return await _act(control, request, admin.ReplayDeadLetters, _channel(request), "ids", "all")


async def delete_dead_letters(control: Control, request: Request) -> ASGIApp:
    """Drop dead letters."""
    return await _act(control, request, admin.DeleteDeadLetters, _channel(request), "ids", "all")


class _ExportLines:
    """Every message of a log as NDJSON."""

    def __init__(self, queues: Queues, queue: str) -> None:
        self._queues = queues
        self._queue = queue

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        last = b""
        try:
            await self._queues.info(self._queue)  # a refusal comes before any line is sent
            headers = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-store")]
            started = True
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            batch: list[bytes] = []
            size = 0
            async with self._queues.export(self._queue) as messages:
                async for message in messages:
                    batch.append(encode_line(reply_fields(message)))
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
    """Send the whole log."""
    query = _query_alone(request)
    queues = _queues(control, query)
    query.finish()
    return _ExportLines(queues, path_text(request, "queue"))


# Partitions


async def expand(control: Control, request: Request) -> ASGIApp:
    """Add partitions."""
    return await _act(control, request, admin.ExpandQueue, _queue(request), "partitions", "nodes")


async def route_table(control: Control, request: Request) -> ASGIApp:
    """Return the route table."""
    return await _look(control, request, admin.DescribeRoute(queue=path_text(request, "queue")))


async def consumers(control: Control, request: Request) -> ASGIApp:
    """List the consumers of a channel."""
    return await _look(control, request, _request(admin.ListConsumers, _channel(request)))


async def locks(control: Control, request: Request) -> ASGIApp:
    """List the holders of partitions."""
    return await _look(control, request, _request(admin.ListLocks, _channel(request)))


# Receiving by calls


async def receive(control: Control, request: Request) -> ASGIApp:
    """Give messages to the client for a while; it may wait for them."""
    queues, fields = await _whole(control, request)
    given = fields.given("count", "wait_s", "invisible_s", "attempt_id", "from_start")
    fields.finish()
    wanted = _request(admin.ReceiveMessages, {"count": 1, **_channel(request), **given})
    control.lifecycle.require_running()
    return await _ask(queues, wanted)


async def acknowledge(control: Control, request: Request) -> ASGIApp:
    """Acknowledge received messages."""
    return await _act(control, request, admin.AckMessages, _channel(request), "handles")


async def invisible(control: Control, request: Request) -> ASGIApp:
    """Change the time after which a received message is delivered again."""
    return await _act(control, request, admin.ChangeInvisible, _channel(request), "handle", "invisible_s")


# Publishing


async def publish(control: Control, request: Request) -> ASGIApp:
    """Publish one message in JSON, or any number as a body of items, streamed and held back."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == _ITEMS:
        return await _publish_many(control, request)
    queues, fields = await _whole(control, request)
    message = fields.struct(NewQueueMessage, "a message")
    wire_message = WireMessage(_attributes(message), _body(message, control.config.limits.message_bytes_max))
    queue = path_text(request, "queue")
    with control.lifecycle.work():
        ((partition, seq),) = await _publish(queues, queue, [wire_message], message.timeout_s)
    new_id = message_id(partition, seq)
    off_partition = bool(message.key) and queues.is_off_partition(queue, message.key, new_id)
    return json_response(reply_fields(PublishedMessage(id=new_id, off_partition=off_partition)), 201)


async def publish_batch(control: Control, request: Request) -> ASGIApp:
    """Publish some messages, all or none."""
    queues, fields = await _whole(control, request)
    given = fields.struct(NewQueueMessages, "messages")
    attributes = _attributes(given)
    bytes_max = control.config.limits.message_bytes_max
    messages = [WireMessage(attributes, _decoded_body(body, given.encoding, bytes_max)) for body in given.bodies]
    with control.lifecycle.work():
        points = await _publish(queues, path_text(request, "queue"), messages, given.timeout_s)
    return json_response(reply_fields(PublishedMessages(ids=tuple(message_id(*point) for point in points))), 201)


async def publish_own(control: Control, request: Request) -> ASGIApp:
    """Publish messages with attributes of their own, all or none; under a publisher's number once."""
    queues, fields = await _whole(control, request)
    batch = fields.struct(NewQueueBatch, "messages")
    if (batch.publisher is None) != (batch.number is None):
        raise Problem("D1005", "publisher and number go together", field="number")
    if batch.publisher is None and batch.destination:
        raise Problem("D1005", "a destination needs a publisher and a number", field="destination")
    bytes_max = control.config.limits.message_bytes_max
    messages = [
        WireMessage(_attributes(each), _decoded_body(each.body, each.encoding, bytes_max)) for each in batch.messages
    ]
    queue = path_text(request, "queue")
    with control.lifecycle.work():
        if batch.publisher is None or batch.number is None:
            points = await _publish(queues, queue, messages, batch.timeout_s)
        else:
            publisher = (bytes.fromhex(batch.publisher), batch.number)
            try:
                points = await queues.publish_sequenced(queue, messages, publisher, batch.destination)
            except ValueError as error:
                raise Problem("D1005", str(error)) from None
    ids = [message_id(*point) for point in points]
    off = [
        each
        for each, message in zip(ids, batch.messages, strict=True)
        if message.key and queues.is_off_partition(queue, message.key, each)
    ]
    return json_response(reply_fields(PublishedBatch(ids=tuple(ids), off_partition=tuple(off))), 201)


async def destinations(control: Control, request: Request) -> ASGIApp:
    """Return the destinations of messages with these keys."""
    queues, fields = await _whole(control, request)
    wanted = fields.struct(FindDestinations, "keys")
    messages = [WireMessage(_encoded(key=key), b"") for key in wanted.keys]
    found = await queues.destinations(path_text(request, "queue"), messages, is_stale=wanted.is_stale)
    return json_response(reply_fields(QueueDestinations(destinations=tuple(found))))


def _attributes(message: NewQueueMessage | NewQueueMessages | BatchMessage) -> bytes:
    try:
        headers = decode_headers(message.headers)
    except ValueError as error:
        raise Problem("D1005", f"a message: the field 'headers': {error}", field="headers") from None
    return _encoded(
        key=message.key, tags=message.tags, priority=message.priority, delay_s=message.delay_s, headers=headers
    )


def _body(message: NewQueueMessage, bytes_max: int) -> bytes:
    return _decoded_body(message.body, message.encoding, bytes_max)


def _decoded_body(text: str, encoding: Literal["base64", "utf-8"], bytes_max: int) -> bytes:
    try:
        body = decode_payload(text, encoding)
    except ValueError as error:
        raise Problem("D1005", f"a message: the field 'body': {error}", field="body") from None
    if len(body) > bytes_max:
        raise MessageTooLargeError(f"the body has {len(body)} bytes; the most is {bytes_max}")
    return body


def _encoded(**options: Unpack[MessageOptions]) -> bytes:
    try:
        return encode_options(**options)
    except (ValueError, TypeError) as error:
        raise Problem("D1005", str(error)) from None


async def _publish(
    queues: Queues, queue: str, messages: list[WireMessage], timeout_s: float | None = None
) -> list[tuple[int, int]]:
    try:
        return await queues.publish_batch(queue, messages, timeout_s)
    except ValueError as error:
        raise Problem("D1005", str(error)) from None


async def _publish_many(control: Control, request: Request) -> ASGIApp:
    query = query_fields(request)
    queues = _queues(control, query)
    tags = query.text("tags", "")
    try:
        delay_s = float(query.text("delay_s", "0"))
        if not 0 <= delay_s <= DELAY_MAX_S:
            raise ValueError
    except ValueError:
        raise query.wrong("delay_s", f"is no number of seconds from 0 to {DELAY_MAX_S:g}") from None
    attributes = _encoded(
        key=query.text("key", ""),
        tags=[tag for tag in tags.split(",") if tag],
        priority=query.integer_text("priority", 0, low=0, high=PRIORITY_MAX),
        delay_s=delay_s,
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
                    points = await _publish(queues, queue, [WireMessage(attributes, body) for body in batch])
                    first = first or message_id(*points[0])
                    last = message_id(*points[-1])
                    count += len(batch)
                    size += sum(map(len, batch))
    except Dep2pError as error:
        # The caller must know how far it came: published messages cannot be taken back.
        before = f"; {count} messages before it were published" if count else ""
        return problem_response(error, detail=f"{error}{before}", published=count)
    many = QueuedMany(messages=count, bytes=size, first_id=first, last_id=last)
    return json_response(reply_fields(many), 201)


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
    """Return the next part of the body, and whether more follow. Between two messages it may take any time."""
    stall_s = control.bounds.body_timeout_s if is_inside else float("inf")
    message: Message = {}
    with trio.move_on_after(stall_s) as stalled:
        message = await request.receive()
    if stalled.cancelled_caught:
        raise Problem("D1009", f"the rest of a message did not arrive within {stall_s:g} s")
    if message.get("type") != "http.request":
        raise ClientDisconnect
    body: bytes = message.get("body", b"")
    return body, bool(message.get("more_body", False))


# Consuming


async def consume(control: Control, request: Request) -> ASGIApp:
    """Send deliveries to this client, until it hangs up."""
    query = _query_alone(request)
    queues = _queues(control, query)
    in_flight = query.integer_text("max_in_flight", 1, low=1, high=IN_FLIGHT_MAX)
    from_start, exclusive = query.text("from_start", "0"), query.text("exclusive", "0")
    losses = query.text("losses", "0")
    for name, flag in (("from_start", from_start), ("exclusive", exclusive), ("losses", losses)):
        if flag not in ("0", "1"):
            raise query.wrong(name, "is neither 0 nor 1")
    count = query.integer_text("count", 0, low=0, high=10**15)
    most = control.bounds.subscription_bytes_max
    bytes_max = query.integer_text("bytes_max", most, low=1, high=2**53)
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
            queues,
            queue,
            channel,
            SubscribeOptions(
                max_in_flight=in_flight,
                bytes_max=min(bytes_max, most),
                from_start=from_start == "1",
                filter=filter_text,
                exclusive=exclusive == "1",
            ),
            count,
            gives_losses=losses == "1",
        )
    )


async def results(control: Control, request: Request) -> ASGIApp:
    """Take results of deliveries."""
    given = (await read_json(request, control.bounds)).struct(SettleMessages, "results")
    wanted = [_result(each) for each in given.results]
    if given.max_in_flight is not None:
        control.queue_consumers.find(path_text(request, "consumer")).set_ready(given.max_in_flight)
    if not wanted:
        return json_response(reply_fields(SettledMessages(refused={}, timeouts_s={})))
    # The reply to a touch has the time that is left, which only the queue knows.
    needs_answer = given.durable or any(each.kind == Settle.TOUCH for each in wanted)
    settled = await control.queue_consumers.settle(path_text(request, "consumer"), wanted, durable=needs_answer)
    return json_response(reply_fields(settled))


def _result(result: MessageResult) -> DeliveryResult:
    try:
        partition, seq = parse_message_id(result.id)
    except ValueError as error:
        raise Problem("D1005", f"results: the field 'id': {error}", field="id") from None
    delay_ms = min(round(result.delay_s * 1000), 0xFFFF_FFFF)
    return DeliveryResult(_KINDS[result.do], partition, seq, delay_ms, result.reason)


_QUEUE: Final = "/v1/queues/{queue}"
_CHANNEL: Final = f"{_QUEUE}/channels/{{channel}}"

ROUTES: list[Route] = [
    route("GET", "/v1/queues", listing),
    route("POST", "/v1/queues", create),
    route("GET", _QUEUE, describe),
    route("DELETE", _QUEUE, delete),
    route("POST", f"{_QUEUE}/pause", pause),
    route("POST", f"{_QUEUE}/resume", resume),
    route("POST", f"{_QUEUE}/empty", empty),
    route("POST", f"{_QUEUE}/messages", publish),
    route("POST", f"{_QUEUE}/batches", publish_batch),
    route("POST", f"{_QUEUE}/publishes", publish_own),
    route("POST", f"{_QUEUE}/destinations", destinations),
    route("GET", f"{_QUEUE}/messages", peek),
    route("GET", f"{_QUEUE}/export", export),
    route("POST", _CHANNEL, create_channel),
    route("DELETE", _CHANNEL, delete_channel),
    route("POST", f"{_CHANNEL}/consume", consume),
    route("POST", f"{_QUEUE}/expand", expand),
    route("GET", f"{_QUEUE}/route", route_table),
    route("GET", f"{_CHANNEL}/consumers", consumers),
    route("GET", f"{_CHANNEL}/locks", locks),
    route("POST", f"{_CHANNEL}/receive", receive),
    route("POST", f"{_CHANNEL}/ack", acknowledge),
    route("POST", f"{_CHANNEL}/invisible", invisible),
    route("GET", f"{_CHANNEL}/dead-letters", dead_letters),
    route("POST", f"{_CHANNEL}/dead-letters/replay", replay),
    route("POST", f"{_CHANNEL}/dead-letters/delete", delete_dead_letters),
    route("POST", "/v1/queue-consumers/{consumer}/results", results),
]
