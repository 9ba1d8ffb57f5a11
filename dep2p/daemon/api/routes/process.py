"""Health, metrics, status, configuration, events, drain and shutdown."""

import dataclasses
import os
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

import dep2p
from dep2p.config.values import nearest
from dep2p.control_api.calls import EmptyCall
from dep2p.control_api.replies import (
    Configuration,
    ConfigurationPaths,
    ConnectionCounts,
    DaemonStatus,
    DrainState,
    Health,
    LimitsSummary,
    MemberQuotas,
    Readiness,
    ShutdownState,
    StoreOwnershipSummary,
    parse_reply,
)
from dep2p.daemon.api.context import Control
from dep2p.daemon.api.fields import query_fields, read_call
from dep2p.daemon.api.resources.feeds import EVENT_KINDS
from dep2p.daemon.api.resources.subscriptions import LinesResponse
from dep2p.daemon.api.routes.peers import limited_peers
from dep2p.daemon.api.routing import route
from dep2p.daemon.problems import json_response

_QUOTAS_SHOWN: Final = 16
"""Members whose quotas `status` shows."""
_UNREACHED_SHOWN: Final = 8
_LIMITED_SHOWN: Final = 16
"""Peers over limited relays that `status` shows."""


async def healthz(control: Control, _request: Request) -> ASGIApp:
    """Answer whether the node runs."""
    state = control.lifecycle.state
    alive = state != "stopping"
    listening = bool(control.node.listen_addrs())
    body = Health(status="ok" if alive else "stopping", state=state, listening=listening)
    return json_response(body, 200 if alive else 503)


async def readyz(control: Control, _request: Request) -> ASGIApp:
    """Answer whether the node takes work; if not, the reasons."""
    reasons: list[str] = []
    if control.lifecycle.state != "running":
        reasons.append(f"the daemon is {control.lifecycle.state}")
    if control.config.node.listen and not control.node.listen_addrs():
        reasons.append("the node listens on none of its addresses")
    return json_response(Readiness(ready=not reasons, reasons=tuple(reasons)), 503 if reasons else 200)


async def metrics(control: Control, _request: Request) -> ASGIApp:
    """Return the metrics in Prometheus' text format."""
    from dep2p.daemon.api.metrics.collector import (  # loads prometheus-client only where metrics are scraped
        CONTENT_TYPE,
        render,
    )

    return Response(render(control), media_type=CONTENT_TYPE)


async def status(control: Control, _request: Request) -> ASGIApp:
    """Return the status, for `dep2p status`."""
    node = control.node
    connections = node.host.connections()
    inbound = sum(1 for connection in connections if connection.direction == "inbound")
    peers = dict.fromkeys(connection.peer for connection in connections)
    stats = node.stats()
    return json_response(
        DaemonStatus(
            peer_id=node.peer_id,
            version=dep2p.__version__,
            pid=os.getpid(),
            state=control.lifecycle.state,
            started_at_s=round(control.started_unix_s, 3),
            uptime_s=float(str(stats.get("uptime_s", 0))),
            data_dir=str(control.config.data_dir),
            listen=tuple(node.listen_addrs()),
            peers=len(peers),
            connections=ConnectionCounts(inbound=inbound, outbound=len(connections) - inbound),
            realms=tuple(node.realms()),
            streams=len(control.streams),
            subscriptions=control.subscriptions.by_kind(),
            in_flight=control.lifecycle.in_flight,
            queues=parse_reply(node.queues.ownership.status(), StoreOwnershipSummary),
            nsq=None if control.nsq is None else control.nsq.status(),
            problems=(*control.problems, *node.unreached_bootstrap()[:_UNREACHED_SHOWN]),
            quotas=tuple(
                MemberQuotas(peer=each.peer, held=dict(each.held), refused=dict(each.refused))
                for each in node.quotas()[:_QUOTAS_SHOWN]
            ),
            limited=tuple(limited_peers(connections)[:_LIMITED_SHOWN]),
            messaging=plain(stats.get("realms", {})),
            pubsub=plain(stats.get("pubsub", {})),
            public_pubsub=plain(stats.get("public_pubsub", [])),
            counters=dict(node.counters()),
        )
    )


async def configuration(control: Control, _request: Request) -> ASGIApp:
    """Return the configuration in effect. It names the files of secrets, never their content."""
    config = control.config
    return json_response(
        Configuration(
            values=config.as_dict(),
            origins=dict(config.origins),
            file=None if config.file is None else str(config.file),
            paths=ConfigurationPaths(
                key_file=str(config.key_file), socket=str(config.socket_path), token_file=str(config.token_file)
            ),
        )
    )


async def limits(control: Control, _request: Request) -> ASGIApp:
    """Return every bound of the node and of the control API."""
    node, bounds = dataclasses.asdict(control.node.limits), dataclasses.asdict(control.bounds)
    return json_response(LimitsSummary(node=node, control=bounds))


async def events(control: Control, request: Request) -> ASGIApp:
    """Send events, from now on."""
    query = query_fields(request)
    types, realm = query.text("types", ""), query.optional_text("realm")
    query.finish()
    kinds = [kind.strip() for kind in types.split(",") if kind.strip()]
    for kind in kinds:
        if kind not in EVENT_KINDS:
            raise query.wrong("types", f"there is no event {kind[:80]!r}; {nearest(kind, EVENT_KINDS)}")
    only = None if realm is None else control.node.realm(realm).realm_id
    return LinesResponse(*control.events.subscribe(frozenset(kinds or EVENT_KINDS), only))


async def drain(control: Control, request: Request) -> ASGIApp:
    """Take no new work; answer when all work is done or the drain timeout is over."""
    await read_call(request, control.bounds, EmptyCall)
    if control.lifecycle.state == "running":
        # In a task of its own: it must go on when the caller hangs up.
        control.nursery.start_soon(control.lifecycle.drain)
    await control.lifecycle.drained.wait()
    return json_response(DrainState(state=control.lifecycle.state, in_flight=control.lifecycle.in_flight))


async def shutdown(control: Control, request: Request) -> ASGIApp:
    """Drain and stop; answer at once."""
    await read_call(request, control.bounds, EmptyCall)
    control.lifecycle.stop_requested.set()
    return json_response(ShutdownState(state="stopping"), 202)


def plain(value: object) -> object:
    """Convert dataclasses, mappings and sequences to JSON's types."""
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
