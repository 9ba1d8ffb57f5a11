"""Requests, notifies and replies."""

import time
from collections.abc import Mapping

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from dep2p.control_api.encoding import encode_payload
from dep2p.daemon.api.context import Control
from dep2p.daemon.api.fields import Fields, as_peer, query_fields, read_json
from dep2p.daemon.api.resources.subscriptions import LinesResponse
from dep2p.daemon.api.routing import path_text, route
from dep2p.daemon.problems import json_response, problem_of
from dep2p.errors import Dep2pError
from dep2p.types import Headers, PeerId

_EVERY_MEMBER = "*"
_ERROR_TEXT_BYTES_MAX = 1_024


def _message(control: Control, fields: Fields) -> tuple[str, str, bytes, Headers | None, str | None]:
    target = fields.text("peer")
    if target != _EVERY_MEMBER:
        target = as_peer(target)
    data = fields.payload(control.config.limits.message_bytes_max)
    return target, fields.name(), data, fields.headers(), fields.optional_text("realm")


def _members_up(control: Control, realm: str | None) -> list[PeerId]:
    own = control.node.peer_id
    return [m.peer for m in control.node.membership(realm).members() if m.state == "up" and m.peer != own]


async def request(control: Control, incoming: Request) -> ASGIApp:
    """Ask one member, or all of them."""
    fields = await read_json(incoming, control.bounds)
    peer, name, data, headers, realm = _message(control, fields)
    timeout_s = fields.number("timeout_s", control.config.limits.request_timeout_s, high=control.bounds.timeout_max_s)
    idempotent = fields.boolean("idempotent", False)
    fields.finish()
    messaging = control.node.messaging(realm)
    started_s = time.perf_counter()
    with control.lifecycle.work():
        if peer == _EVERY_MEMBER:
            results = await messaging.broadcast_request(
                _members_up(control, realm), name, data, timeout_s=timeout_s, idempotent=idempotent, headers=headers
            )
            return json_response({"results": _results(results)})
        answer = await messaging.request(
            PeerId(peer), name, data, timeout_s=timeout_s, idempotent=idempotent, headers=headers
        )
    elapsed_ms = round((time.perf_counter() - started_s) * 1000, 3)
    return json_response({"peer": peer, **encode_payload(answer), "elapsed_ms": elapsed_ms})


async def notify(control: Control, incoming: Request) -> ASGIApp:
    """Tell one member, or all of them."""
    fields = await read_json(incoming, control.bounds)
    peer, name, data, headers, realm = _message(control, fields)
    fields.finish()
    messaging = control.node.messaging(realm)
    with control.lifecycle.work():
        if peer == _EVERY_MEMBER:
            results = await messaging.broadcast_notify(_members_up(control, realm), name, data, headers=headers)
            return json_response({"results": _results(results)}, 202)
        await messaging.notify(PeerId(peer), name, data, headers=headers)
    return json_response({"accepted": True}, 202)


def _results(results: Mapping[PeerId, bytes | Dep2pError | None]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for peer, result in results.items():
        if isinstance(result, Dep2pError):
            rows.append({"peer": peer, "error": problem_of(result)})
        else:
            rows.append({"peer": peer, **({} if result is None else encode_payload(result))})
    return rows


async def listen(control: Control, incoming: Request) -> ASGIApp:
    """Notifies from now on."""
    query = query_fields(incoming)
    name, realm = query.name(), query.optional_text("realm")
    query.finish()
    return LinesResponse(*control.notifies.subscribe(name, realm))


async def reply(control: Control, incoming: Request) -> ASGIApp:
    """Requests from now on, to be answered one by one."""
    fields = await read_json(incoming, control.bounds)
    name, realm = fields.name(), fields.optional_text("realm")
    concurrency = fields.integer("concurrency", 64, low=1, high=control.bounds.replies_concurrency_max)
    fields.finish()
    control.lifecycle.require_running()
    return LinesResponse(*control.replies.subscribe(name, realm, concurrency))


async def answer(control: Control, incoming: Request) -> ASGIApp:
    """The answer of one request, or the text of an error. Taken while draining, too: it ends what is in flight."""
    fields = await read_json(incoming, control.bounds)
    error = None
    data = b""
    if fields.has("error"):
        error = fields.text("error", bytes_max=_ERROR_TEXT_BYTES_MAX)
    else:
        data = fields.payload(control.config.limits.message_bytes_max)
    fields.finish()
    control.replies.answer(path_text(incoming, "id"), data, error)
    return json_response({"accepted": True}, 202)


ROUTES: list[Route] = [
    route("POST", "/v1/requests", request),
    route("POST", "/v1/notifies", notify),
    route("GET", "/v1/notifies", listen),
    route("POST", "/v1/replies", reply),
    route("POST", "/v1/replies/{id}", answer),
]
