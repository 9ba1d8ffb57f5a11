"""``dep2p peer``: the peers that the node is connected to."""

from typing import TYPE_CHECKING, Annotated

import typer

from dep2p.cli.framework.command import Invocation, command, group
from dep2p.cli.framework.errors import CliError
from dep2p.cli.framework.render import duration, left_of, short_peer, table
from dep2p.cli.framework.resolve import refuse_self, resolve_peer
from dep2p.error_codes import EXIT_OK, EXIT_TIMEOUT
from dep2p.errors import RequestTimeoutError
from dep2p.outside_text import printable

if TYPE_CHECKING:
    from dep2p.client import Client
    from dep2p.control_api.replies import CircuitSummary, ConnectedPeer, PeerSummary

PeerArgument = Annotated[str, typer.Argument(help="Peer id, or an abbreviation of a known one.", metavar="PEER")]


def list_peers(
    run: Invocation, full: Annotated[bool, typer.Option("--full", help="Print whole peer ids.")] = False
) -> None:
    """List connected peers."""

    peers = run.with_client(lambda client: client.peers())
    if run.json:
        run.emit({"peers": peers})
    elif not peers:
        run.say("not connected to any peer; `dep2p realm join` or `dep2p peer connect ADDR`")
    else:
        run.print(
            table(
                ["PEER", "DIRECTION", "ADDRESS", "PATH", "RTT", "AGE", "REALMS"],
                [r for p in peers for r in _rows(p, full)],
            )
        )


def _rows(peer: "PeerSummary", full: bool) -> list[list[str]]:
    name = peer.peer if full else short_peer(peer.peer)
    realms = ", ".join(map(printable, peer.realms)) or "-"
    rows = [
        [
            name,
            each.direction,
            printable(each.addr.partition("/p2p-circuit")[0].partition("/p2p/")[0] or "-"),
            _path(each.circuit),
            "-" if each.rtt_ms is None else duration(each.rtt_ms / 1000),
            duration(each.age_s),
            realms,
        ]
        for each in peer.connections
    ]
    return rows or [[name, "-", "-", "-", "-", "-", realms]]


def _path(circuit: "CircuitSummary | None") -> str:
    if circuit is None:
        return "direct"
    relay = f"relay {short_peer(circuit.relay)}"
    return f"limited {relay}: {left_of(circuit.data_left_bytes, circuit.time_left_s)}" if circuit.limited else relay


def connect(
    run: Invocation,
    addr: Annotated[
        str,
        typer.Argument(
            help="An address that ends in /p2p/PEER, as `dep2p id` prints; or a known peer.", metavar="ADDR"
        ),
    ],
    timeout: Annotated[float, typer.Option("--timeout", "-t", help="Seconds to wait.", min=0.1, max=100)] = 10.0,
) -> None:
    """Connect to a peer."""

    async def body(client: "Client") -> "ConnectedPeer":
        if not addr.startswith("/") and (":" in addr or "." in addr.replace("...", "")):
            raise CliError(
                f"{addr!r} is not an address",
                "D4004",
                tries=("write it like /ip4/192.0.2.7/tcp/4001/p2p/12D3KooW…, as `dep2p id` prints it there",),
            )
        target = addr if addr.startswith("/") else await resolve_peer(client, addr)
        await refuse_self(client, target.rpartition("/p2p/")[2])
        return await client.connect(target, timeout_s=timeout)

    found = run.with_client(body)
    if run.json:
        run.emit(found)
        return
    realms = ", ".join(map(printable, found.realms))
    known = f"member of {realms}" if realms else "in no realm of this node"
    run.print(f"connected to {found.peer} at {printable(found.addr or '?')}, {known}")


def ping(
    run: Invocation,
    peer_text: PeerArgument,
    count: Annotated[int, typer.Option("--count", "-n", help="How many pings.", min=1, max=1000)] = 4,
    timeout: Annotated[float, typer.Option("--timeout", "-t", help="Seconds to wait for each.", min=0.1, max=60)] = 5.0,
) -> int:
    """Measure round trips. Exit status 5 when no answer came."""

    async def body(client: "Client") -> tuple[str, list[float | None]]:
        peer = await resolve_peer(client, peer_text)
        await refuse_self(client, peer)
        found: list[float | None] = []
        for number in range(1, count + 1):
            try:
                rtt_s: float | None = await client.ping(peer, timeout_s=timeout)
            except RequestTimeoutError:
                rtt_s = None
            found.append(rtt_s)
            if not run.json:
                outcome = f"no answer in {timeout:g} s" if rtt_s is None else f"time={rtt_s * 1000:.2f} ms"
                run.print(f"{short_peer(peer)} seq={number} {outcome}")
        return peer, found

    peer, rtts = run.with_client(body)
    answered = sorted(rtt for rtt in rtts if rtt is not None)
    if run.json:
        run.emit(
            {
                "peer": peer,
                "sent": len(rtts),
                "answered": len(answered),
                "rtts_ms": [None if rtt is None else rtt * 1000 for rtt in rtts],
            }
        )
    elif answered:
        middle = answered[len(answered) // 2]
        run.print(
            f"{len(answered)} of {len(rtts)} answered, min/median/max "
            f"{answered[0] * 1000:.2f}/{middle * 1000:.2f}/{answered[-1] * 1000:.2f} ms"
        )
    return EXIT_OK if answered else EXIT_TIMEOUT


def disconnect(run: Invocation, peer_text: PeerArgument) -> None:
    """Close every connection to a peer and do not dial it again by itself."""

    async def body(client: "Client") -> str:
        peer = await resolve_peer(client, peer_text)
        if not await client.disconnect(peer):
            raise CliError(f"there is no connection to {peer}", "D4005", tries=("dep2p peer ls",))
        return peer

    peer = run.with_client(body)
    if run.json:
        run.emit({"peer": peer, "disconnected": True})
    else:
        run.say(f"disconnected from {short_peer(peer)}")


def register(app: typer.Typer) -> None:
    """Add the group ``peer``."""
    sub = group(app, "peer", "See and change which peers the node is connected to.")
    command(sub, "ls", examples=[("dep2p peer ls", "a line per connection")])(list_peers)
    command(
        sub,
        "connect",
        examples=[("dep2p peer connect /ip4/192.0.2.7/tcp/4001/p2p/12D3KooW…", "an address from `dep2p id`")],
    )(connect)
    command(sub, "ping", examples=[("dep2p peer ping f3Qa --count 3", "three round trips")])(ping)
    command(sub, "disconnect", examples=[("dep2p peer disconnect f3Qa", "until either side connects again")])(
        disconnect
    )
