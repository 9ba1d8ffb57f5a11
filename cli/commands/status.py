"""``dep2p status``: the node at a glance."""

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dep2p.cli.framework.command import Invocation, command
from dep2p.cli.framework.render import duration, printable, short_peer, short_realm, table

if TYPE_CHECKING:
    from dep2p.client.client import Client, DaemonUnreachableError


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

        from dep2p.client.client import DaemonUnreachableError

        shown = 0
        answer: dict[str, Any] | DaemonUnreachableError = await _first_answer(client, wait)
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


async def _first_answer(client: "Client", wait_s: float) -> dict[str, Any]:
    import anyio

    from dep2p.client.client import DaemonUnreachableError

    deadline_s = anyio.current_time() + wait_s
    while True:
        try:
            return await client.status()
        except DaemonUnreachableError:
            if anyio.current_time() >= deadline_s:
                raise
        await anyio.sleep(0.1)


async def _answer_or_error(client: "Client") -> "dict[str, Any] | DaemonUnreachableError":
    """Who watches wants to see a daemon go and come back."""
    from dep2p.client.client import DaemonUnreachableError

    try:
        return await client.status()
    except DaemonUnreachableError as error:
        return error


def render(fields: dict[str, Any], run: Invocation) -> str:
    """The status as text."""
    connections: dict[str, Any] = fields.get("connections") or {}
    realms: list[dict[str, Any]] = fields.get("realms") or []
    state = str(fields.get("state", "running"))
    lines = [
        f"Node      {run.paint(short_peer(str(fields['peer_id'])), 'bold')}   "
        f"up {duration(float(fields.get('uptime_s', 0)))}   dep2p {fields.get('version', '?')}"
        + ("" if state == "running" else f"   {run.paint(state, 'yellow')}")
    ]
    lines += [
        f"{'Listen' if number == 0 else '':8}  {printable(str(addr).partition('/p2p/')[0])}"
        for number, addr in enumerate(fields.get("listen") or ["nowhere: this node only dials"])
    ]
    lines.append(
        f"Peers     {fields.get('peers', 0)} ({connections.get('outbound', 0)} out, {connections.get('inbound', 0)} in)"
        f"      Realms  {len(realms)}      Streams  {fields.get('streams', 0)}"
    )
    nsq: dict[str, Any] = fields.get("nsq") or {}
    if nsq:
        places = [str(nsq.get(each)) for each in ("listen", "http") if nsq.get(each)]
        lines.append(f"NSQ       {', '.join(places)}      Clients  {nsq.get('connections', 0)}")
    lines += _keeper(fields.get("queues") or {}, run)
    lines += [f"{run.paint('Problem', 'red')}   {printable(str(problem))}" for problem in fields.get("problems") or ()]
    if realms:
        rows = [
            [
                printable(str(realm["name"])),
                short_realm(str(realm["realm_id"])),
                str(realm.get("members_known", 0)),
                str(realm.get("members_up", 0)),
            ]
            for realm in realms
        ]
        lines += ["", table(["REALM", "ID", "OTHERS", "UP"], rows, right=(2, 3))]
    else:
        lines += ["", "in no realm yet: dep2p realm new NAME, or dep2p realm join INVITE"]
    return "\n".join(lines)


def _keeper(queues: dict[str, Any], run: Invocation) -> list[str]:
    """Who keeps the queues, where several nodes share their store."""
    if not queues.get("shared"):
        return []
    others = [short_peer(str(each)) for each in queues.get("nodes") or () if each != queues.get("owner")]
    if queues.get("role") == "owner":
        what = f"this node keeps them (term {queues.get('term')}); standing by: {', '.join(others) or 'none'}"
    elif queues.get("owner"):
        what = f"standing by: {short_peer(str(queues['owner']))} keeps them (term {queues.get('term')})"
    else:
        what = run.paint("no node keeps them just now", "yellow")
    lines = [f"Queues    {what}"]
    if queues.get("problem"):
        lines.append(f"{run.paint('Problem', 'red')}   {printable(str(queues['problem']))}")
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
