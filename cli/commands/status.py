"""``dep2p status``: the state of the node at a glance."""

import time
from typing import TYPE_CHECKING, Annotated

import typer

from dep2p.cli.framework.command import Invocation, command
from dep2p.cli.framework.render import address, byte_count, duration, left_of, short_peer, short_realm, table
from dep2p.outside_text import printable

if TYPE_CHECKING:
    from dep2p.client import Client, DaemonUnreachableError
    from dep2p.control_api.replies import DaemonStatus, StoreOwnershipSummary


_LOOP_BLOCKED_MS = 100
"""Delay of the event loop that is shown."""


def status(
    run: Invocation,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Again and again until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option("--interval", help="Seconds between, with --watch.", min=0.1)] = 2.0,
    wait: Annotated[
        float, typer.Option("--wait", help="Wait up to so many seconds for a daemon that is starting.", min=0)
    ] = 0.0,
    count: Annotated[int | None, typer.Option("--count", "-n", help="End after so many, with --watch.", min=1)] = None,
) -> None:
    """Show the node, its peers and its realms."""

    async def body(client: "Client") -> None:
        import anyio

        from dep2p.client import DaemonUnreachableError

        shown = 0
        answer: DaemonStatus | DaemonUnreachableError = await _first_answer(client, wait)
        while True:
            if shown:
                answer = await _answer_or_error(client)
            if isinstance(answer, DaemonUnreachableError):
                run.warn(f"{time.strftime('%H:%M:%S')}  {printable(answer.detail)}")
            elif run.json:
                run.emit(answer)
            else:
                if watch and run.color:
                    run.write(b"\x1b[2J\x1b[H")
                run.print(render(answer, run))
            shown += 1
            if not watch or shown == count:
                return
            await anyio.sleep(interval)

    run.with_client(body)


async def _first_answer(client: "Client", wait_s: float) -> "DaemonStatus":
    import anyio

    from dep2p.client import DaemonUnreachableError

    deadline_s = anyio.current_time() + wait_s
    while True:
        try:
            return await client.status()
        except DaemonUnreachableError:
            if anyio.current_time() >= deadline_s:
                raise
        await anyio.sleep(0.1)


async def _answer_or_error(client: "Client") -> "DaemonStatus | DaemonUnreachableError":
    """Return the status, or the error of a daemon that went away and may come back."""
    from dep2p.client import DaemonUnreachableError

    try:
        return await client.status()
    except DaemonUnreachableError as error:
        return error


def render(status: "DaemonStatus", run: Invocation) -> str:
    """The status as text."""
    lines = [
        f"Node      {run.paint(short_peer(status.peer_id), 'bold')}   up {duration(status.uptime_s)}   "
        f"dep2p {status.version}" + ("" if status.state == "running" else f"   {run.paint(status.state, 'yellow')}")
    ]
    lines += [
        f"{'Listen' if number == 0 else '':8}  {printable(address(addr))}"
        for number, addr in enumerate(status.listen or ["nowhere: this node only dials"])
    ]
    lines.append(
        f"Peers     {status.peers} ({status.connections.outbound} out, {status.connections.inbound} in)"
        f"      Realms  {len(status.realms)}      Streams  {status.streams}"
    )
    if status.nsq is not None:
        places = [place for place in (status.nsq.listen, status.nsq.http) if place]
        lines.append(f"NSQ       {', '.join(places)}      Clients  {status.nsq.connections}")
    lines += _broker(status.queues, run)
    lines += [f"{run.paint('Problem', 'red')}   {printable(problem)}" for problem in status.problems]
    lines += [
        f"{run.paint('Problem', 'red')}   realm {printable(realm.name)}: {printable(problem)}"
        for realm in status.realms
        for problem in realm.problems
    ]
    lines += _refused(status, run)
    lines += _unproven(status, run)
    lines += _relay(status, run)
    lines += [
        f"{run.paint('Limited', 'yellow')}   {short_peer(each.peer)} over relay {short_peer(each.circuit.relay)}: "
        f"{left_of(each.circuit.data_left_bytes, each.circuit.time_left_s)}; no pub/sub"
        for each in status.limited
    ]
    if status.realms:
        rows = [
            [printable(realm.name), short_realm(realm.realm_id), str(realm.members_known), str(realm.members_up)]
            for realm in status.realms
        ]
        lines += ["", table(["REALM", "ID", "OTHERS", "UP"], rows, right=(2, 3))]
    else:
        lines += ["", "in no realm yet: dep2p realm new NAME, or dep2p realm join"]
    return "\n".join(lines)


def _refused(status: "DaemonStatus", run: Invocation) -> list[str]:
    """The members that were refused something by their quotas."""
    return [
        f"{run.paint('Refused', 'yellow')}   {short_peer(each.peer)}: "
        + ", ".join(f"{count} {printable(quota.replace('_', ' '))}" for quota, count in each.refused.items())
        for each in status.quotas
        if each.refused
    ]


def _unproven(status: "DaemonStatus", run: Invocation) -> list[str]:
    """The share of peers that no realm has verified, what was ended for its bounds, and a slow event loop."""
    counts = status.counters
    ended = sum(count for name, count in counts.items() if name.startswith("host_resources_ended_"))
    floods = counts.get("host_mux_control_rate_exceeded", 0)
    lines: list[str] = []
    if counts.get("host_connections_unproven", 0) or ended or floods:
        lines.append(
            f"Unproven  {counts.get('host_connections_unproven', 0)} connections hold "
            f"{byte_count(counts.get('host_memory_bytes_unproven', 0))} of "
            f"{byte_count(counts.get('host_memory_bytes', 0))}"
            + (f"; ended: {ended} for memory or number, {floods} for their rate" if ended or floods else "")
        )
    delay_ms = counts.get("host_loop_delay_max_ms", 0)
    if delay_ms >= _LOOP_BLOCKED_MS:
        lines.append(f"{run.paint('Loop', 'yellow')}      blocked for up to {delay_ms} ms in the last minute")
    return lines


def _relay(status: "DaemonStatus", run: Invocation) -> list[str]:
    """The reservations and circuits of a relay, and the relays through which others reach this node."""
    counts = status.counters
    lines: list[str] = []
    if "host_relay_reservations_held" in counts:
        refused = {
            what: sum(count for name, count in counts.items() if name.startswith(f"host_relay_refused_{what}_"))
            for what in ("reservations", "circuits")
        }
        lines.append(
            f"Relay     serves {counts['host_relay_reservations_held']} reservations "
            f"({counts.get('host_relay_reservations_held_members', 0)} of members) and "
            f"{counts.get('host_relay_circuits_held', 0)} circuits "
            f"({counts.get('host_relay_circuits_held_members', 0)} of members)"
            + (f"; refused: {refused['reservations']} and {refused['circuits']}" if any(refused.values()) else "")
        )
    if "host_relay_reserved_held" in counts:
        held = counts["host_relay_reserved_held"]
        failed = counts.get("host_relay_reservation_failed", 0)
        text = f"reservations of this node at {held} relay{'' if held == 1 else 's'}"
        if not held and failed:
            text = run.paint(f"no relay gives this node a reservation; {failed} tries failed: see the log", "yellow")
        lines.append(f"Relay     {text}")
    return lines


def _broker(queues: "StoreOwnershipSummary", run: Invocation) -> list[str]:
    """Return a line with the broker of the queues, where several nodes share their store."""
    if not queues.shared:
        return []
    others = [short_peer(each) for each in queues.nodes if each != queues.owner]
    if queues.role == "owner":
        what = f"this node keeps them (term {queues.term}); standing by: {', '.join(others) or 'none'}"
    elif queues.owner:
        what = f"standing by: {short_peer(queues.owner)} keeps them (term {queues.term})"
    else:
        what = run.paint("no node keeps them just now", "yellow")
    lines = [f"Queues    {what}"]
    if queues.problem:
        lines.append(f"{run.paint('Problem', 'red')}   {printable(queues.problem)}")
    return lines


def register(app: typer.Typer) -> None:
    """Add ``status``."""
    command(
        app,
        "status",
        examples=[
            ("dep2p status", "once"),
            ("dep2p status --watch --interval 1", "every second"),
            ("dep2p status --wait 10 --quiet", "in a script, after starting the daemon"),
        ],
    )(status)
