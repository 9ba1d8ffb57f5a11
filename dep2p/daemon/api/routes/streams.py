"""Streams: open, accept, send items, receive items, close."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import msgspec
import trio
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dep2p.control_api.calls import OpenStreamCall
from dep2p.control_api.encoding import ITEM_ABORT, LENGTH_BYTES, ItemSplitter, ItemTooLargeError, encode_item
from dep2p.control_api.replies import StreamClosed, StreamItems, StreamOpenedReply
from dep2p.daemon.api.context import Control
from dep2p.daemon.api.fields import as_peer, body_piece, checked_name, headers_of, payload_of, query_fields, read_call
from dep2p.daemon.api.resources.streams import ControlStream
from dep2p.daemon.api.resources.subscriptions import LinesResponse
from dep2p.daemon.api.routing import path_text, route
from dep2p.daemon.problems import Problem, json_response, problem_of
from dep2p.errors import Dep2pError, StreamClosedError


async def open_stream(control: Control, request: Request) -> ASGIApp:
    """Open a stream to a member."""
    call = await read_call(request, control.bounds, OpenStreamCall)
    peer, name, headers = as_peer(call.peer), checked_name(call.name), headers_of(call.headers)
    data = payload_of(call, control.config.limits.message_bytes_max)
    entry = await control.streams.open(peer, name, data, headers, call.realm)
    return json_response(StreamOpenedReply(id=entry.id, peer=peer, name=name, realm_id=entry.realm_id), 201)


async def accept(control: Control, request: Request) -> ASGIApp:
    """Send the streams that members open, from now on."""
    query = query_fields(request)
    name, realm = query.name("accept"), query.optional_text("realm")
    query.finish()
    control.lifecycle.require_running()
    return LinesResponse(*(await control.streams.accept(name, realm)))


@asynccontextmanager
async def _attached(control: Control, entry: ControlStream, direction: str) -> AsyncGenerator[None, None]:
    """Attach for the block. Leaving it by a failure ends the stream, since items on their way are lost."""
    scope = control.streams.attach(entry, direction)
    try:
        with scope:
            yield
    except Dep2pError as error:
        entry.abort(error)
        raise
    except BaseException:
        entry.leave(StreamClosedError("the control client went away"))
        raise
    finally:
        control.streams.detach(entry, direction)
    if entry.error is not None and direction not in entry.ended:
        raise entry.error


async def send_items(control: Control, request: Request) -> ASGIApp:
    """Send items from the body, as fast as the peer takes them."""
    entry = control.streams.get(path_text(request, "id"))
    query = query_fields(request)
    eof = query.text("eof", "0")
    query.finish()
    if eof not in ("0", "1"):
        raise query.wrong("eof", "is neither 0 nor 1")
    items = size = 0
    async with _attached(control, entry, "send"):
        splitter = ItemSplitter(control.config.limits.stream_item_bytes_max)
        more = True
        while more:
            stall_s = control.bounds.body_timeout_s if splitter.is_inside_item else float("inf")
            message: Message = {}
            with trio.move_on_after(stall_s) as stalled:
                message = await request.receive()
            if stalled.cancelled_caught:
                raise Problem("D1009", f"the rest of an item did not arrive within {stall_s:g} s")
            if message.get("type") != "http.request":
                raise StreamClosedError("the control client went away")
            try:
                complete = splitter.feed(body_piece(message))
            except ItemTooLargeError as error:
                raise Problem("D6004", str(error)) from None
            if splitter.aborted:
                raise StreamClosedError("the control client aborted the stream")
            for item in complete:
                await entry.stream.send(item)
                size += len(item)
            items += len(complete)
            more = bool(message.get("more_body", False))
        if splitter.is_inside_item:
            raise Problem("D6003", "the body ended inside an item")
        if eof == "1":
            await entry.stream.send_eof()
            entry.end_direction("send")
    return json_response(StreamItems(items=items, bytes=size))


class _ItemsResponse:
    """The peer's items until its end; a failure is the last item, after the length ITEM_ABORT."""

    def __init__(self, control: Control, entry: ControlStream) -> None:
        self._control = control
        self._entry = entry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        entry = self._entry
        headers = [(b"content-type", b"application/octet-stream"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        last = b""
        try:
            async with _attached(self._control, entry, "receive"):
                async for item in entry.stream:
                    await send({"type": "http.response.body", "body": encode_item(item), "more_body": True})
                entry.end_direction("receive")
        except Dep2pError as error:
            last = ITEM_ABORT.to_bytes(LENGTH_BYTES, "big") + encode_item(msgspec.json.encode(problem_of(error)))
        await send({"type": "http.response.body", "body": last, "more_body": False})


async def receive_items(control: Control, request: Request) -> ASGIApp:
    """Send the peer's items to the client, as fast as it takes them."""
    entry = control.streams.get(path_text(request, "id"))
    query_fields(request).finish()
    if "receive" in entry.scopes or "receive" in entry.ended:
        control.streams.attach(entry, "receive")  # raises while a proper answer is still possible
    return _ItemsResponse(control, entry)


async def close(control: Control, request: Request) -> ASGIApp:
    """End a stream now. A whole upload still arrives; a partial one is reset."""
    entry = control.streams.get(path_text(request, "id"))
    entry.leave(StreamClosedError("the control client closed the stream"))
    return json_response(StreamClosed(id=entry.id))


ROUTES: list[Route] = [
    route("POST", "/v1/streams", open_stream),
    route("GET", "/v1/streams", accept),
    route("POST", "/v1/streams/{id}/items", send_items),
    route("GET", "/v1/streams/{id}/items", receive_items),
    route("DELETE", "/v1/streams/{id}", close),
]
