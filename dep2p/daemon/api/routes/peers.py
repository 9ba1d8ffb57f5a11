"""Peers: list, connect, disconnect, ping."""

import trio
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from dep2p.daemon.api.context import Control
from dep2p.daemon.api.fields import as_peer, read_json
from dep2p.daemon.api.routing import path_text, route
from dep2p.daemon.problems import Problem, json_response
from dep2p.errors import RequestTimeoutError, StreamClosedError
from dep2p.host.interface import Connection


async def listing(control: Control, _request: Request) -> ASGIApp:
    """Connected peers with their connections, known addresses, and the realms in which they are verified."""
    node = control.node
    now = trio.current_time()
    memberships = [(realm.name, node.membership(realm.realm_id)) for realm in node.realms()]
    by_peer: dict[str, list[Connection]] = {}
    for connection in node.host.connections():
        by_peer.setdefault(connection.peer, []).append(connection)
    peers: list[dict[str, object]] = []
    for connections in by_peer.values():
        peer = connections[0].peer
        peers.append(
            {
                "peer": peer,
                "connections": [
                    {
                        "id": connection.id,
                        "direction": connection.direction,
                        "addr": connection.remote_addr,
                        "age_s": round(now - connection.opened_at_s, 3),
                        "rtt_ms": None if connection.rtt_s is None else round(connection.rtt_s * 1000, 3),
                    }
                    for connection in connections
                ],
                "addrs": node.host.addrs(peer),
                "realms": [name for name, members in memberships if any(map(members.is_verified, connections))],
            }
        )
    return json_response({"peers": peers})


async def connect(control: Control, request: Request) -> ASGIApp:
    """Dial an address or a known peer."""
    fields = await read_json(request, control.bounds)
    timeout_s = fields.number("timeout_s", control.config.limits.dial_timeout_s, high=control.bounds.timeout_max_s)
    if fields.has("addr") == fields.has("peer"):
        raise fields.wrong("addr", "give either addr or peer")
    target = fields.text("addr") if fields.has("addr") else str(fields.peer())
    fields.finish()
    with control.lifecycle.work():
        try:
            connection, realms = await control.node.connect(target, timeout_s=timeout_s)
        except ValueError as error:
            raise Problem("D4004", str(error)) from None
    return json_response(
        {
            "peer": connection.peer,
            "addr": connection.remote_addr,
            "direction": connection.direction,
            "realms": realms,
        }
    )


async def disconnect(control: Control, request: Request) -> ASGIApp:
    """Close every connection to a peer."""
    peer = as_peer(path_text(request, "peer"))
    if not await control.node.disconnect(peer):
        raise Problem("D4005", f"there is no connection to {peer}")
    return json_response({"peer": peer, "disconnected": True})


async def ping(control: Control, request: Request) -> ASGIApp:
    """Round-trip times, one after the other; null for a ping that got no answer."""
    peer = as_peer(path_text(request, "peer"))
    fields = await read_json(request, control.bounds)
    count = fields.integer("count", 1, low=1, high=control.bounds.ping_count_max)
    timeout_s = fields.number("timeout_s", 5.0, high=60.0)
    fields.finish()
    rtts_ms: list[float | None] = []
    for _ in range(count):
        try:
            rtts_ms.append(round(await control.node.ping(peer, timeout_s=timeout_s) * 1000, 3))
        except (RequestTimeoutError, StreamClosedError):
            rtts_ms.append(None)
    return json_response({"peer": peer, "rtts_ms": rtts_ms, "lost": rtts_ms.count(None)})


ROUTES: list[Route] = [
    route("GET", "/v1/peers", listing),
    route("POST", "/v1/peers", connect),
    route("DELETE", "/v1/peers/{peer}", disconnect),
    route("POST", "/v1/peers/{peer}/ping", ping),
]
