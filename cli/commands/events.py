"""``dep2p events``: events of the node, one JSON object per line."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from dep2p.cli.framework.command import Invocation, command, feed_fields
from dep2p.outside_text import printable

if TYPE_CHECKING:
    from dep2p.client import Client
    from dep2p.client.models import Event


def events(
    run: Invocation,
    types: Annotated[
        list[str] | None, typer.Option("--type", help="Only events of this kind; may be repeated.", metavar="KIND")
    ] = None,
    count: Annotated[int | None, typer.Option("--count", "-n", help="End after so many.", min=1)] = None,
) -> None:
    """Print connections and members that come and go, as JSON, one object per line."""

    async def body(client: "Client") -> None:
        from dep2p.client import FeedInterrupted, FeedResumed
        from dep2p.gossipsub.topic_types import Lagged

        seen = 0
        async with client.events(types or ()) as stream:
            run.say("waiting for events; Ctrl-C ends")
            async for event in stream:
                if isinstance(event, FeedInterrupted | FeedResumed):
                    if not run.json:  # else `run` prints it
                        run.emit(feed_fields(event))
                    continue
                if isinstance(event, Lagged):
                    run.emit({"lagged": event.count})
                    continue
                run.emit(_line(event))
                seen += 1
                if seen == count:
                    return

    run.with_client(body)


def _line(event: "Event") -> dict[str, object]:
    when = datetime.fromtimestamp(event.time_s, UTC).isoformat(timespec="milliseconds")
    fields = {key: printable(value) if isinstance(value, str) else value for key, value in event.fields.items()}
    return {"id": event.id, "kind": event.kind, "time": when, "time_s": event.time_s} | fields


def register(app: typer.Typer) -> None:
    """Add ``events``."""
    command(
        app,
        "events",
        waits=True,
        examples=[
            ("dep2p events", "everything"),
            ("dep2p events --type member_up --count 1", "waits until a member comes up"),
        ],
        notes="Kinds: peer_connected, peer_disconnected, peer_discovered, member_joined, member_up, member_down, "
        "member_left, member_expired.",
    )(events)
