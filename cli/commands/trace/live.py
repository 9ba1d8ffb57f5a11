"""``dep2p trace start``, ``stop``, ``status`` of the running daemon, and ``salvage`` of files that killed daemons
left."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dep2p.cli.framework.command import Invocation, command
from dep2p.cli.framework.errors import CliError
from dep2p.cli.framework.render import byte_count, duration
from dep2p.outside_text import printable

if TYPE_CHECKING:
    from dep2p.client import Client
    from dep2p.client.traces import TraceOptions
    from dep2p.control_api.replies import TraceState


def start(
    run: Invocation,
    directory: Annotated[
        Path | None, typer.Argument(help="Where the files go; by default as [trace] says.", metavar="[DIR]")
    ] = None,
    rpcs: Annotated[
        bool | None, typer.Option("--rpcs/--no-rpcs", help="With an event for each RPC, most of the bytes.")
    ] = None,
    sample: Annotated[
        float | None,
        typer.Option("--sample", help="Share of the messages that are traced, the same ones everywhere.", max=1),
    ] = None,
    roll: Annotated[
        float | None, typer.Option("--roll", help="Seconds after which a file is complete.", min=1, metavar="SECONDS")
    ] = None,
    snapshot: Annotated[
        float | None, typer.Option("--snapshot", help="Seconds between snapshots; 0: none.", min=0, metavar="SECONDS")
    ] = None,
) -> None:
    """Begin to trace in the running daemon."""
    settings: TraceOptions = {}
    if rpcs is not None:
        settings["rpcs"] = rpcs
    if sample is not None:
        settings["sample"] = sample
    if roll is not None:
        settings["roll_s"] = roll
    if snapshot is not None:
        settings["snapshot_s"] = snapshot

    async def body(client: "Client") -> None:
        status = await client.tracer.start(directory, **settings)
        if run.json:
            run.emit(status)
            return
        run.say(f"tracing to {status.directory}")
        run.say(f"a file appears every {duration(status.settings.roll_s)}, and with: dep2p trace stop")

    run.with_client(body)


def stop(run: Invocation) -> None:
    """End the trace of the running daemon; its last file is complete then."""

    async def body(client: "Client") -> None:
        before = await client.tracer.status()
        status = await client.tracer.stop()
        if run.json:
            run.emit(status)
        elif not before.is_on:
            run.say("the daemon was not tracing")
        else:
            _say_counts(run, status)
            run.say(f"next: dep2p trace analyze {status.directory} --out report")

    run.with_client(body)


def status(run: Invocation) -> None:
    """Show the state of the running daemon's trace."""

    async def body(client: "Client") -> None:
        found = await client.tracer.status()
        if run.json:
            run.emit(found)
        elif found.directory is None:
            run.print("not tracing; begin with: dep2p trace start")
        else:
            run.print(f"{'tracing to' if found.is_on else 'not tracing; last to'} {found.directory}")
            _say_counts(run, found)
            if found.growing:
                run.print(f"growing: {Path(found.growing).name}")
            if found.error:
                run.warn(f"the last write failed: {printable(found.error)}; events are lost until it works")

    run.with_client(body)


def _say_counts(run: Invocation, found: "TraceState") -> None:
    lost = "".join(f", {count:,} dropped ({reason})" for reason, count in sorted(found.dropped.items()))
    removed = f", {found.files_removed:,} old files removed" if found.files_removed else ""
    size = byte_count(found.bytes)
    run.print(f"{found.events:,} events, {size}, complete files: {found.files:,}{lost}{removed}")


def salvage(
    run: Invocation,
    places: Annotated[list[Path], typer.Argument(help="Trace directories.", metavar="DIR…")],
) -> None:
    """Complete the files of nodes that were killed; a node does it for its own at its next start."""
    from dep2p.traces.salvage import salvage as salvage_in

    finished: list[str] = []
    busy = cut_bytes = emptied = 0
    for place in places:
        if not place.is_dir():
            raise CliError(f"no such directory: {place}", "D7001")
        found = salvage_in(place)
        finished += map(str, found.finished)
        busy, cut_bytes, emptied = busy + found.busy, cut_bytes + found.cut_bytes, emptied + len(found.emptied)
    if run.json:
        run.emit({"finished": finished, "removed_empty": emptied, "cut_bytes": cut_bytes, "busy": busy})
        return
    for path in finished:
        run.print(path)
    notes = [
        f"completed: {len(finished):,}",
        *([f"without a whole frame, removed: {emptied:,}"] if emptied else []),
        *([f"bytes of torn frames, cut off: {cut_bytes:,}"] if cut_bytes else []),
        *([f"still being written, left alone: {busy:,}"] if busy else []),
    ]
    run.say(", ".join(notes))


def register_live(sub: typer.Typer) -> None:
    """Add these commands to the group ``trace``."""
    command(
        sub,
        "start",
        examples=[
            ("dep2p trace start", "to the daemon's own directory"),
            ("dep2p trace start /var/tmp/traces --roll 60", "several daemons may share a directory"),
        ],
        notes="""
        Until `dep2p trace stop` or the daemon's end; `enabled = true` in [trace] traces from each start on. The files
        of a killed daemon are completed by its next trace, or by `dep2p trace salvage DIR`.
        """,
    )(start)
    command(sub, "stop", examples=[("dep2p trace stop", "then analyze the directory that it names")])(stop)
    command(sub, "status", examples=[("dep2p trace status", "where it goes, how much there is")])(status)
    command(sub, "salvage", examples=[("dep2p trace salvage traces", "when nodes were killed")])(salvage)
