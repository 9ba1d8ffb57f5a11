"""Peers: list, connect, disconnect, ping."""

from collections.abc import Sequence

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from dep2p.control_api.calls import ConnectPeer, PingPeer
from dep2p.control_api.replies import (
    LimitedPeer,
    PeerDisconnection,
    PeerList,
    PingTimes,
)
from dep2p.daemon.api.context import Control
from dep2p.daemon.api.fields import as_peer, read_call, within, wrong_field
from dep2p.daemon.api.routing import path_text, route
from dep2p.daemon.problems import Problem, json_response
from dep2p.errors import RequestTimeoutError, StreamClosedError
from dep2p.host.interface import Connection
from dep2p.node.summaries import circuit_summary
from dep2p.types import PeerId


async def listing(control: Control, _request: Request) -> ASGIApp:
    """List the connected peers with their connections, known addresses, and the realms in which they are verified."""
    return json_response(PeerList(peers=tuple(control.node.peers())))


def limited_peers(connections: Sequence[Connection]) -> list[LimitedPeer]:
    """Return the peers that are reached over limited relays only, with the circuit of the connection in use."""
    found: dict[PeerId, Connection] = {}
    others: dict[PeerId, None] = {}
    for connection in connections:
        if not connection.is_limited:
            others[connection.peer] = None
        elif connection.peer not in found or not connection.is_superseded:
            found[connection.peer] = connection
    uses = {peer: connection.circuit for peer, connection in found.items() if peer not in others}
    return [LimitedPeer(peer=peer, circuit=circuit_summary(use)) for peer, use in uses.items() if use is not None]


async def connect(control: Control, request: Request) -> ASGIApp:
    """Dial an address or a known peer."""
    call = await read_call(request, control.bounds, ConnectPeer)
    usual_s, most_s = control.config.limits.dial_timeout_s, control.bounds.timeout_max_s
    timeout_s = within("timeout_s", call.timeout_s, default=usual_s, high=most_s)
    if (call.addr is None) == (call.peer is None):
        raise wrong_field("addr", "give either addr or peer")
    target = call.addr if call.addr is not None else as_peer(call.peer or "")
    with control.lifecycle.work():
        try:
            return json_response(await control.node.connect(target, timeout_s=timeout_s))
        except ValueError as error:
            raise Problem("D4004", str(error)) from None


async def disconnect(control: Control, request: Request) -> ASGIApp:
    """Close every connection to a peer."""
    peer = as_peer(path_text(request, "peer"))
    if not await control.node.disconnect(peer):
        raise Problem("D4005", f"there is no connection to {peer}")
    return json_response(PeerDisconnection(peer=peer))


async def ping(control: Control, request: Request) -> ASGIApp:
    """Measure round-trip times, one after the other; null for a ping that got no answer."""
    peer = as_peer(path_text(request, "peer"))
    call = await read_call(request, control.bounds, PingPeer)
    if call.count > control.bounds.ping_count_max:
        raise wrong_field("count", f"is out of range: 1 to {control.bounds.ping_count_max}")
    timeout_s = within("timeout_s", call.timeout_s, default=5.0, high=60.0)
    rtts_ms: list[float | None] = []
    for _ in range(call.count):
        try:
            rtts_ms.append(round(await control.node.ping(peer, timeout_s=timeout_s) * 1000, 3))
        except (RequestTimeoutError, StreamClosedError):
            rtts_ms.append(None)
    return json_response(PingTimes(peer=peer, rtts_ms=tuple(rtts_ms), lost=rtts_ms.count(None)))


ROUTES: list[Route] = [
    route("GET", "/v1/peers", listing),
    route("POST", "/v1/peers", connect),
    route("DELETE", "/v1/peers/{peer}", disconnect),
    route("POST", "/v1/peers/{peer}/ping", ping),
]
