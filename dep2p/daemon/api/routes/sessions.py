"""Ordered sessions: open one and take its pushes, or serve them."""

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from dep2p.control_api.encoding import encode_payload
from dep2p.daemon.api.context import Control
from dep2p.daemon.api.fields import query_fields, read_json
from dep2p.daemon.api.resources.subscriptions import LinesResponse
from dep2p.daemon.api.routing import path_text, route
from dep2p.daemon.problems import json_response
from dep2p.sessions.server_session import Place

_PLACES: tuple[Place, ...] = ("before", "after")
_TAKE_ITEMS_MAX = 4_096
_TAKE_WAIT_MAX_S = 60.0


async def open_session(control: Control, request: Request) -> ASGIApp:
    """Open a session with a member, or go on with one by its token."""
    fields = await read_json(request, control.bounds)
    peer, name, realm = fields.peer(), fields.name(), fields.optional_text("realm")
    data = fields.payload(control.config.limits.message_bytes_max, required=False)
    token = fields.optional_text("token")
    fields.finish()
    control.lifecycle.require_running()
    session = await control.sessions.open(peer, name, data, token, realm)
    return json_response({"id": session.id, "peer": peer, "name": name, "token": session.token}, 201)


async def listing(control: Control, request: Request) -> ASGIApp:
    """All sessions of the node; with ``serve`` instead: serve a name, and tell what happens."""
    query = query_fields(request)
    if query.has("serve"):
        name, realm = query.name("serve"), query.optional_text("realm")
        query.finish()
        control.lifecycle.require_running()
        return LinesResponse(*control.sessions.serve(name, realm))
    query.finish()
    return json_response({"sessions": control.node.sessions.stats()})


async def take(control: Control, request: Request) -> ASGIApp:
    """Say what is handled, and take what comes next."""
    fields = await read_json(request, control.bounds)
    after = fields.integer("after", 0, low=0, high=2**63)
    items_max = fields.integer("items_max", 256, low=1, high=_TAKE_ITEMS_MAX)
    wait_s = fields.number("wait_s", 30.0, low=-1.0, high=_TAKE_WAIT_MAX_S)
    fields.finish()
    return json_response(await control.sessions.take(path_text(request, "id"), after, items_max, max(0.0, wait_s)))


async def ask(control: Control, request: Request) -> ASGIApp:
    """A request in an open session."""
    fields = await read_json(request, control.bounds)
    timeout_s = fields.number("timeout_s", control.config.limits.request_timeout_s, high=control.bounds.timeout_max_s)
    data = fields.payload(control.config.limits.message_bytes_max, required=False)
    fields.finish()
    with control.lifecycle.work():
        session = control.sessions.opened(path_text(request, "id"))
        answer = await session.request(data, timeout_s=timeout_s, in_order=False)
    return json_response(encode_payload(answer))


async def close(control: Control, request: Request) -> ASGIApp:
    """End an open session, or leave it with a token to go on with."""
    query = query_fields(request)
    keep = query.text("keep", "0")
    query.finish()
    if keep not in ("0", "1"):
        raise query.wrong("keep", "is neither 0 nor 1")
    return json_response({"token": await control.sessions.close(path_text(request, "id"), keep=keep == "1")})


async def push(control: Control, request: Request) -> ASGIApp:
    """Push into a session that is served here, alone or bound to a request."""
    fields = await read_json(request, control.bounds)
    request_id = fields.integer("request_id", 0, low=0, high=2**32 - 1)
    place: Place = fields.choice("place", _PLACES)
    data = fields.payload(control.config.limits.message_bytes_max)
    fields.finish()
    with control.lifecycle.work():
        session = control.node.sessions.find(path_text(request, "id"))
        if request_id:
            await session.bind(request_id, data, place)
            return json_response({"request_id": request_id}, 202)
        return json_response({"seq": await session.push(data)}, 202)


async def push_all(control: Control, request: Request) -> ASGIApp:
    """Push to every session of a name."""
    fields = await read_json(request, control.bounds)
    name = fields.name()
    data = fields.payload(control.config.limits.message_bytes_max)
    fields.finish()
    control.lifecycle.require_running()
    return json_response(control.sessions.push_all(name, data), 202)


async def respond(control: Control, request: Request) -> ASGIApp:
    """Answer a request of a session that is served here."""
    fields = await read_json(request, control.bounds)
    if not fields.has("request_id"):
        raise fields.wrong("request_id", "is missing")
    request_id = fields.integer("request_id", 0, low=1, high=2**32 - 1)
    error = fields.optional_text("error")
    data = fields.payload(control.config.limits.message_bytes_max, required=False)
    fields.finish()
    session = control.node.sessions.find(path_text(request, "id"))
    if error is not None:
        await session.fail(request_id, error)
    else:
        await session.respond(request_id, data)
    return json_response({"request_id": request_id})


async def end(control: Control, request: Request) -> ASGIApp:
    """End a session that is served here: its client gets what is under way, then the end."""
    query_fields(request).finish()
    session = control.node.sessions.find(path_text(request, "id"))
    session.end()
    return json_response({"id": session.id})


ROUTES: list[Route] = [
    route("GET", "/v1/sessions", listing),
    route("POST", "/v1/sessions", open_session),
    route("POST", "/v1/sessions/pushes", push_all),
    route("POST", "/v1/sessions/{id}/take", take),
    route("POST", "/v1/sessions/{id}/requests", ask),
    route("POST", "/v1/sessions/{id}/pushes", push),
    route("POST", "/v1/sessions/{id}/responses", respond),
    route("POST", "/v1/sessions/{id}/end", end),
    route("DELETE", "/v1/sessions/{id}", close),
]
