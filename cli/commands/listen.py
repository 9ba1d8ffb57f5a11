"""``dep2p listen``: print notifies as they come."""

from typing import TYPE_CHECKING, Annotated

import typer

from dep2p.cli.framework.command import Invocation, command
from dep2p.cli.framework.errors import CliError
from dep2p.cli.framework.payloads import RealmOption, check_name, show_payload
from dep2p.cli.framework.render import byte_count, headers_json, headers_text, payload, short_peer
from dep2p.outside_text import printable

if TYPE_CHECKING:
    from dep2p.client import Client
    from dep2p.protocols.messaging.incoming import Notification


def listen(
    run: Invocation,
    name: Annotated[str, typer.Argument(help="The name that the sender uses.", metavar="NAME")],
    count: Annotated[int | None, typer.Option("--count", "-n", help="End after so many.", min=1)] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Write the payloads' bytes and nothing else.")] = False,
    nul: Annotated[bool, typer.Option("-0", "--null", help="End each payload with a NUL byte.")] = False,
    realm: RealmOption = None,
) -> None:
    """Print the notifies that members send under a name."""
    if raw and nul:
        raise CliError("--raw and -0 exclude each other", "D1001")
    check_name(name)

    async def body(client: "Client") -> None:
        from dep2p.gossipsub.topic_types import Lagged

        seen = 0
        async with client.listen(name, realm=realm) as notifications:
            run.say(f"waiting for notifies {name!r}; Ctrl-C ends")
            async for notification in notifications:
                if isinstance(notification, Lagged):
                    if not notification.count:
                        continue  # `run` reports it
                    if run.json:
                        run.emit({"lagged": notification.count})
                    else:
                        run.warn(
                            f"lagged: {notification.count} notifies were dropped, because this reader was too slow"
                        )
                    continue
                seen += 1
                _show(run, notification, seen, raw=raw, nul=nul)
                if seen == count:
                    return

    run.with_client(body)


def _show(run: Invocation, notification: "Notification", number: int, *, raw: bool, nul: bool) -> None:
    data = bytes(notification.body)
    if run.json:
        fields: dict[str, object] = {"peer": str(notification.peer), "name": str(notification.name)} | payload(data)
        fields["received_at_s"] = notification.received_at_s
        if notification.headers:
            fields["headers"] = headers_json(notification.headers)
        run.emit(fields)
        return
    if not raw and not nul:
        run.say(
            f"[#{number}] {printable(str(notification.name))} from {short_peer(str(notification.peer))}"
            f"  {byte_count(len(data))}{headers_text(notification.headers)}"
        )
    show_payload(run, data, raw=raw, nul=nul)


def register(app: typer.Typer) -> None:
    """Add ``listen``."""
    command(
        app,
        "listen",
        waits=True,
        examples=[
            ("dep2p listen news", "each payload on a line of its own; who sent it on stderr"),
            ("dep2p listen news --json | jq -r .text", "one JSON object per line"),
            ("dep2p listen jobs -0 | xargs -0 -n1 ./run-job", "payloads that hold line ends"),
            ("dep2p listen done --count 1 --raw", "waits for one"),
        ],
        notes="Notifies are not kept: one that comes while no program listens is gone. When this command reads too "
        "slowly the daemon drops the oldest, and the command says how many.",
    )(listen)
