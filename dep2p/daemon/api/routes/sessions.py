"""Ordered sessions: open one and take its pushes, or serve them."""

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from dep2p.control_api.calls import (
    AskSession,
    EndSession,
    OpenSessionCall,
    PushToSession,
    PushToSessions,
    RespondInSession,
    TakePushes,
)
from dep2p.control_api.replies import (
    PayloadReply,
    PushReply,
    ResponseReply,
    SessionEnded,
    SessionList,
    SessionOpened,
    SessionTokenReply,
)
from dep2p.daemon.api.context import Control
from dep2p.daemon.api.fields import as_peer, checked_name, payload_of, query_fields, read_call, within
from dep2p.daemon.api.resources.subscriptions import LinesResponse
from dep2p.daemon.api.routing import path_text, route
from dep2p.daemon.problems import json_response

_TAKE_WAIT_MAX_S = 60.0


async def open_session(control: Control, request: Request) -> ASGIApp:
    """Open a session with a member, or go on with one by its token."""
    call = await read_call(request, control.bounds, OpenSessionCall)
    peer, name = as_peer(call.peer), checked_name(call.name)
    data = payload_of(call, control.config.limits.message_bytes_max)
    control.lifecycle.require_running()
    most_s = control.bounds.timeout_max_s
    timeout_s = None if call.timeout_s is None else within("timeout_s", call.timeout_s, default=0.0, high=most_s)
    session = await control.sessions.open(peer, name, data, call.token, call.realm, timeout_s=timeout_s)
    return json_response(SessionOpened(id=session.id, peer=peer, name=name, token=session.token), 201)


async def listing(control: Control, request: Request) -> ASGIApp:
    """List all sessions of the node. With ``serve``, serve a name instead, and send the sessions' events."""
    query = query_fields(request)
    if query.has("serve"):
        name, realm = query.name("serve"), query.optional_text("realm")
        query.finish()
        control.lifecycle.require_running()
        return LinesResponse(*(await control.sessions.serve(name, realm)))
    query.finish()
    return json_response(SessionList(sessions=tuple(control.node.sessions.stats())))


async def take(control: Control, request: Request) -> ASGIApp:
    """Take the report of handled pushes, and return the next ones."""
    call = await read_call(request, control.bounds, TakePushes)
    wait_s = within("wait_s", max(0.0, call.wait_s), default=30.0, high=_TAKE_WAIT_MAX_S, may_be_zero=True)
    return json_response(await control.sessions.take(path_text(request, "id"), call.after, call.items_max, wait_s))


async def ask(control: Control, request: Request) -> ASGIApp:
    """Send a request in an open session."""
    call = await read_call(request, control.bounds, AskSession)
    usual_s, most_s = control.config.limits.request_timeout_s, control.bounds.timeout_max_s
    timeout_s = within("timeout_s", call.timeout_s, default=usual_s, high=most_s)
    data = payload_of(call, control.config.limits.message_bytes_max)
    with control.lifecycle.work():
        session = control.sessions.opened(path_text(request, "id"))
        answer = await session.request(data, timeout_s=timeout_s, in_order=False)
    return json_response(PayloadReply(data=answer))


async def close(control: Control, request: Request) -> ASGIApp:
    """End an open session, or leave it with a token to go on with."""
    query = query_fields(request)
    keep = query.text("keep", "0")
    query.finish()
    if keep not in ("0", "1"):
        raise query.wrong("keep", "is neither 0 nor 1")
    token = await control.sessions.close(path_text(request, "id"), keep=keep == "1")
    return json_response(SessionTokenReply(token=token))


async def push(control: Control, request: Request) -> ASGIApp:
    """Push into a session that is served here, alone or bound to a request."""
    call = await read_call(request, control.bounds, PushToSession)
    data = payload_of(call, control.config.limits.message_bytes_max)
    with control.lifecycle.work():
        session = control.node.sessions.find(path_text(request, "id"))
        if call.request_id:
            await session.bind(call.request_id, data, call.place)
            return json_response(PushReply(request_id=call.request_id), 202)
        seq = await session.push(data) if call.wait else session.push_nowait(data)
        return json_response(PushReply(seq=seq), 202)


async def push_all(control: Control, request: Request) -> ASGIApp:
    """Push to every session of a name."""
    call = await read_call(request, control.bounds, PushToSessions)
    name, data = checked_name(call.name), payload_of(call, control.config.limits.message_bytes_max)
    control.lifecycle.require_running()
    return json_response(control.sessions.push_all(name, data), 202)


async def respond(control: Control, request: Request) -> ASGIApp:
    """Answer a request of a session that is served here."""
    call = await read_call(request, control.bounds, RespondInSession)
    data = payload_of(call, control.config.limits.message_bytes_max)
    session = control.node.sessions.find(path_text(request, "id"))
    if call.error is not None:
        await session.fail(call.request_id, call.error)
    else:
        await session.respond(call.request_id, data)
    return json_response(ResponseReply(request_id=call.request_id))


async def end(control: Control, request: Request) -> ASGIApp:
    """End a session that is served here: its client gets the pushes under way, then the end."""
    call = await read_call(request, control.bounds, EndSession)
    session = control.node.sessions.find(path_text(request, "id"))
    session.end(call.reason)
    return json_response(SessionEnded(id=session.id))


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
