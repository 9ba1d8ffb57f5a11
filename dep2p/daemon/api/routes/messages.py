"""Requests, notifies and replies."""

import time
from collections.abc import Mapping

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from dep2p.control_api.calls import GiveReply, MessageMember, RequestMember, ServeRequests
from dep2p.control_api.replies import AcceptedReply, BroadcastReply, MemberResult, RequestReply
from dep2p.daemon.api.context import Control
from dep2p.daemon.api.fields import (
    as_peer,
    checked_name,
    headers_of,
    payload_of,
    query_fields,
    read_call,
    within,
    wrong_field,
)
from dep2p.daemon.api.resources.subscriptions import LinesResponse
from dep2p.daemon.api.routing import path_text, route
from dep2p.daemon.problems import json_response, problem_of
from dep2p.errors import Dep2pError
from dep2p.types import PeerId

_EVERY_MEMBER = "*"
_ERROR_TEXT_BYTES_MAX = 1_024


def _target(call: MessageMember) -> PeerId | None:
    """Return the member that a call names; None for every member."""
    return None if call.peer == _EVERY_MEMBER else as_peer(call.peer)


def _members_up(control: Control, realm: str | None) -> list[PeerId]:
    own = control.node.peer_id
    return [m.peer for m in control.node.membership(realm).members() if m.state == "up" and m.peer != own]


async def request(control: Control, incoming: Request) -> ASGIApp:
    """Ask one member, or all of them."""
    call = await read_call(incoming, control.bounds, RequestMember)
    peer, name, headers = _target(call), checked_name(call.name), headers_of(call.headers)
    data = payload_of(call, control.config.limits.message_bytes_max)
    usual_s, most_s = control.config.limits.request_timeout_s, control.bounds.timeout_max_s
    timeout_s = within("timeout_s", call.timeout_s, default=usual_s, high=most_s)
    messaging = control.node.messaging(call.realm)
    started_s = time.perf_counter()
    with control.lifecycle.work():
        if peer is None:
            members = _members_up(control, call.realm)
            results = await messaging.broadcast_request(
                members, name, data, timeout_s=timeout_s, idempotent=call.idempotent, headers=headers
            )
            return json_response(_broadcast(results))
        answer = await messaging.request(
            peer, name, data, timeout_s=timeout_s, idempotent=call.idempotent, headers=headers
        )
    elapsed_ms = round((time.perf_counter() - started_s) * 1000, 3)
    return json_response(RequestReply(peer=peer, data=answer, elapsed_ms=elapsed_ms))


async def notify(control: Control, incoming: Request) -> ASGIApp:
    """Send to one member, or to all of them, without an answer."""
    call = await read_call(incoming, control.bounds, MessageMember)
    peer, name, headers = _target(call), checked_name(call.name), headers_of(call.headers)
    data = payload_of(call, control.config.limits.message_bytes_max)
    messaging = control.node.messaging(call.realm)
    with control.lifecycle.work():
        if peer is None:
            results = await messaging.broadcast_notify(_members_up(control, call.realm), name, data, headers=headers)
            return json_response(_broadcast(results), 202)
        await messaging.notify(peer, name, data, headers=headers)
    return json_response(AcceptedReply(), 202)


def _broadcast(results: Mapping[PeerId, bytes | Dep2pError | None]) -> BroadcastReply:
    rows: list[MemberResult] = []
    for peer, result in results.items():
        if isinstance(result, Dep2pError):
            rows.append(MemberResult(peer=peer, error=problem_of(result)))
        elif result is None:
            rows.append(MemberResult(peer=peer))
        else:
            rows.append(MemberResult(peer=peer, data=result, encoding="base64"))
    return BroadcastReply(results=tuple(rows))


async def listen(control: Control, incoming: Request) -> ASGIApp:
    """Send notifies to the client, from now on."""
    query = query_fields(incoming)
    name, realm = query.name(), query.optional_text("realm")
    query.finish()
    return LinesResponse(*control.notifies.subscribe(name, realm))


async def reply(control: Control, incoming: Request) -> ASGIApp:
    """Send requests to the client, from now on, which it answers one by one."""
    call = await read_call(incoming, control.bounds, ServeRequests)
    name, most = checked_name(call.name), control.bounds.replies_concurrency_max
    if call.concurrency > most:
        raise wrong_field("concurrency", f"is out of range: 1 to {most}")
    control.lifecycle.require_running()
    return LinesResponse(*(await control.replies.subscribe(name, call.realm, call.concurrency)))


async def answer(control: Control, incoming: Request) -> ASGIApp:
    """Take the answer of one request, or the text of an error; also while draining, since that ends work in flight."""
    call = await read_call(incoming, control.bounds, GiveReply)
    data = b""
    if call.error is None:
        data = payload_of(call, control.config.limits.message_bytes_max)
    elif call.data is not None:
        raise wrong_field("data", "an error has none: give one of the two")
    elif len(call.error.encode()) > _ERROR_TEXT_BYTES_MAX:
        raise wrong_field("error", f"has more than {_ERROR_TEXT_BYTES_MAX} bytes")
    control.replies.answer(path_text(incoming, "id"), data, call.error)
    return json_response(AcceptedReply(), 202)


ROUTES: list[Route] = [
    route("POST", "/v1/requests", request),
    route("POST", "/v1/notifies", notify),
    route("GET", "/v1/notifies", listen),
    route("POST", "/v1/replies", reply),
    route("POST", "/v1/replies/{id}", answer),
]
