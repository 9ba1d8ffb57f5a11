"""Health, metrics, status, configuration, events, drain and shutdown."""

import dataclasses
import os

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

import dep2p
from dep2p.config.values import nearest
from dep2p.daemon.api.context import Control
from dep2p.daemon.api.fields import query_fields, read_json
from dep2p.daemon.api.resources.feeds import EVENT_KINDS
from dep2p.daemon.api.resources.subscriptions import LinesResponse
from dep2p.daemon.api.routing import route
from dep2p.daemon.problems import json_response


async def healthz(control: Control, _request: Request) -> ASGIApp:
    """The process answers and its node runs."""
    state = control.lifecycle.state
    alive = state != "stopping"
    body = {"status": "ok" if alive else "stopping", "state": state, "listening": bool(control.node.listen_addrs())}
    return json_response(body, 200 if alive else 503)


async def readyz(control: Control, _request: Request) -> ASGIApp:
    """It takes work; if not, the reasons."""
    reasons: list[str] = []
    if control.lifecycle.state != "running":
        reasons.append(f"the daemon is {control.lifecycle.state}")
    if control.config.node.listen and not control.node.listen_addrs():
        reasons.append("the node listens on none of its addresses")
    return json_response({"ready": not reasons, "reasons": reasons}, 503 if reasons else 200)


async def metrics(control: Control, _request: Request) -> ASGIApp:
    """Prometheus' text format."""
    from dep2p.daemon.api.metrics.collector import (  # prometheus-client is loaded only where it is scraped
        CONTENT_TYPE,
        render,
    )

    return Response(render(control), media_type=CONTENT_TYPE)


async def status(control: Control, _request: Request) -> ASGIApp:
    """What `dep2p status` shows."""
    node = control.node
    connections = node.host.connections()
    inbound = sum(1 for connection in connections if connection.direction == "inbound")
    peers = dict.fromkeys(connection.peer for connection in connections)
    stats = node.stats()
    return json_response(
        {
            "peer_id": node.peer_id,
            "version": dep2p.__version__,
            "pid": os.getpid(),
            "state": control.lifecycle.state,
            "started_at_s": round(control.started_unix_s, 3),
            "uptime_s": stats.get("uptime_s", 0),
            "data_dir": str(control.config.data_dir),
            "listen": node.listen_addrs(),
            "peers": len(peers),
            "connections": {"inbound": inbound, "outbound": len(connections) - inbound},
            "realms": [realm_fields(realm) for realm in node.realms()],
            "streams": len(control.streams),
            "subscriptions": control.subscriptions.by_kind(),
            "in_flight": control.lifecycle.in_flight,
            "queues": node.queues.keeping.status(),
            "nsq": None if control.nsq is None else control.nsq.status(),
            "problems": control.problems,
            "messaging": plain(stats.get("realms", {})),
            "pubsub": plain(stats.get("pubsub", {})),
            "public_pubsub": plain(stats.get("public_pubsub", [])),
            "counters": node.counters(),
        }
    )


async def configuration(control: Control, _request: Request) -> ASGIApp:
    """The configuration in effect. It names the files of secrets, never their content."""
    config = control.config
    return json_response(
        {
            "values": config.as_dict(),
            "origins": dict(config.origins),
            "file": None if config.file is None else str(config.file),
            "paths": {
                "key_file": str(config.key_file),
                "socket": str(config.socket_path),
                "token_file": str(config.token_file),
            },
        }
    )


async def limits(control: Control, _request: Request) -> ASGIApp:
    """Every bound of the node and of the control API."""
    return json_response(
        {"node": dataclasses.asdict(control.node.limits), "control": dataclasses.asdict(control.bounds)}
    )


async def events(control: Control, request: Request) -> ASGIApp:
    """Events from now on."""
    query = query_fields(request)
    types = query.text("types", "")
    query.finish()
    kinds = [kind.strip() for kind in types.split(",") if kind.strip()]
    for kind in kinds:
        if kind not in EVENT_KINDS:
            raise query.wrong("types", f"there is no event {kind[:80]!r}; {nearest(kind, EVENT_KINDS)}")
    return LinesResponse(*control.events.subscribe(frozenset(kinds or EVENT_KINDS)))


async def drain(control: Control, request: Request) -> ASGIApp:
    """Take no new work; answers when all is done or the drain timeout is over."""
    (await read_json(request, control.bounds)).finish()
    if control.lifecycle.state == "running":
        # Not in this call's task: it must go on when the caller hangs up.
        control.nursery.start_soon(control.lifecycle.drain)
    await control.lifecycle.drained.wait()
    return json_response({"state": control.lifecycle.state, "in_flight": control.lifecycle.in_flight})


async def shutdown(control: Control, request: Request) -> ASGIApp:
    """Drain and stop; answers at once."""
    (await read_json(request, control.bounds)).finish()
    control.lifecycle.stop_requested.set()
    return json_response({"state": "stopping"}, 202)


def realm_fields(realm: object) -> dict[str, object]:
    """A joined realm in JSON."""
    return {name: getattr(realm, name) for name in ("name", "realm_id", "members_known", "members_up")}


def plain(value: object) -> object:
    """Dataclasses, mappings and sequences as JSON takes them."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


ROUTES: list[Route] = [
    route("GET", "/healthz", healthz),
    route("GET", "/readyz", readyz),
    route("GET", "/metrics", metrics),
    route("GET", "/v1/status", status),
    route("GET", "/v1/config", configuration),
    route("GET", "/v1/limits", limits),
    route("GET", "/v1/events", events),
    route("POST", "/v1/drain", drain),
    route("POST", "/v1/shutdown", shutdown),
]
