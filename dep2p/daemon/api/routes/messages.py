"""Requests, notifies and replies."""

import time
from collections.abc import Mapping

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from dep2p.control_api.calls import ConfirmNotify, GiveReply, MessageMember, RequestMember, ServeRequests
from dep2p.control_api.replies import AcceptedReply, BroadcastReply, MemberResult, RequestReply
from dep2p.daemon.api.context import Control
from dep2p.daemon.api.fields import (
    Fields,
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
from dep2p.messaging.offered_services import OfferedService, offered_service
from dep2p.protocols.services.options import ServiceOptions
from dep2p.types import PeerId

_EVERY_MEMBER = "*"
_ERROR_TEXT_BYTES_MAX = 1_024
_RATE_MAX = 1e9


def _target(call: MessageMember) -> PeerId | None:
    """Return the member that a call names; None for every member."""
    if call.peer == _EVERY_MEMBER:
        return None
    if call.peers is not None:
        raise wrong_field("peers", f"goes with the peer {_EVERY_MEMBER!r}")
    return as_peer(call.peer)


def _targets(control: Control, call: MessageMember) -> list[PeerId]:
    """Return the peers of a broadcast."""
    if call.peers is not None:
        return list(dict.fromkeys(map(as_peer, call.peers)))
    own = control.node.peer_id
    return [m.peer for m in control.node.members(call.realm) if m.state == "up" and m.peer != own]


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
            results = await messaging.broadcast_request(
                _targets(control, call),
                name,
                data,
                concurrency=call.concurrency,
                timeout_s=timeout_s,
                idempotent=call.idempotent,
                headers=headers,
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
            results = await messaging.broadcast_notify(
                _targets(control, call), name, data, concurrency=call.concurrency, headers=headers
            )
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
    rate_per_s, confirms = _rate(query), query.flag("confirm")
    query.finish()
    return LinesResponse(*control.notifies.subscribe(name, realm, rate_per_s, confirms=confirms))


async def confirm(control: Control, incoming: Request) -> ASGIApp:
    """Take the word that a reliable message was handled, or the text of the error that rejects it; also while
    draining."""
    call = await read_call(incoming, control.bounds, ConfirmNotify)
    if call.error is not None:
        _check_error(call.error)
    control.notifies.confirm(path_text(incoming, "id"), call.error)
    return json_response(AcceptedReply(), 202)


def _check_error(text: str) -> None:
    if len(text.encode()) > _ERROR_TEXT_BYTES_MAX:
        raise wrong_field("error", f"has more than {_ERROR_TEXT_BYTES_MAX} bytes")


def _rate(query: Fields) -> float:
    try:
        rate_per_s = float(query.text("rate_per_s", "0"))
    except ValueError:
        rate_per_s = -1.0
    if not 0 <= rate_per_s <= _RATE_MAX:
        raise query.wrong("rate_per_s", f"is no number from 0 to {_RATE_MAX:g}")
    return rate_per_s


async def reply(control: Control, incoming: Request) -> ASGIApp:
    """Send requests to the client, from now on, which it answers one by one."""
    call = await read_call(incoming, control.bounds, ServeRequests)
    name, most = checked_name(call.name), control.bounds.replies_concurrency_max
    if call.concurrency > most:
        raise wrong_field("concurrency", f"is out of range: 1 to {most}")
    control.lifecycle.require_running()
    service = _service(name, call)
    return LinesResponse(
        *(await control.replies.subscribe(name, call.realm, call.concurrency, call.rate_per_s, service))
    )


def _service(name: str, call: ServeRequests) -> OfferedService | None:
    options: ServiceOptions = {}
    if call.group is not None:
        options["group"] = call.group
    if call.version is not None:
        options["version"] = call.version
    if call.schema is not None:
        options["schema"] = call.schema
    if call.metadata is not None:
        options["metadata"] = call.metadata
    try:
        return offered_service(name, options)
    except ValueError as error:
        raise wrong_field("group", str(error)) from None


async def answer(control: Control, incoming: Request) -> ASGIApp:
    """Take the answer of one request, or the text of an error; also while draining, since that ends work in flight."""
    call = await read_call(incoming, control.bounds, GiveReply)
    data = b""
    if call.error is None:
        data = payload_of(call, control.config.limits.message_bytes_max)
    elif call.data is not None:
        raise wrong_field("data", "an error has none: give one of the two")
    else:
        _check_error(call.error)
    control.replies.answer(path_text(incoming, "id"), data, call.error)
    return json_response(AcceptedReply(), 202)


ROUTES: list[Route] = [
    route("POST", "/v1/requests", request),
    route("POST", "/v1/notifies", notify),
    route("GET", "/v1/notifies", listen),
    route("POST", "/v1/notifies/{id}", confirm),
    route("POST", "/v1/replies", reply),
    route("POST", "/v1/replies/{id}", answer),
]
