"""Arguments, options and output that the commands about queues share."""

import functools
import inspect
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, get_type_hints

import typer

from dep2p.cli.framework.command import Invocation
from dep2p.cli.framework.errors import CliError
from dep2p.cli.framework.render import text_of
from dep2p.cli.framework.resolve import resolve_peer
from dep2p.error_codes import EXIT_USAGE
from dep2p.outside_text import printable

if TYPE_CHECKING:
    from msgspec import Struct

    from dep2p.client import Client
    from dep2p.client.queues.queues import ClientQueues

QueueArgument = Annotated[str, typer.Argument(help="The queue's name.", metavar="QUEUE")]
ChannelArgument = Annotated[str, typer.Argument(help="The channel's name.", metavar="CHANNEL")]
ChannelOption = Annotated[
    str | None,
    typer.Option("--channel", "-c", help="Only messages that this channel has not finished.", metavar="CHANNEL"),
]
ChosenChannelArgument = Annotated[
    str | None, typer.Argument(help="The channel's name; or --all-channels.", metavar="[CHANNEL]")
]
AllChannelsOption = Annotated[bool, typer.Option("--all-channels", help="All channels of the queue.")]
QueueRealmOption = Annotated[
    str | None,
    typer.Option("--realm", help="The queues for the members of this realm; without it, those of this machine only."),
]
QueuePeerOption = Annotated[
    str | None,
    typer.Option(
        "--peer",
        help="A queue that this member keeps, by peer id or abbreviation; with commas: members that share its store.",
        metavar="PEER[,PEER…]",
    ),
]


def reply_fields(reply: "Struct") -> dict[str, object]:
    """Return the fields of a reply as ``--json`` shows them: those of the control API."""
    from dep2p.protocols.queues.wire.admin import reply_fields as fields_of

    return fields_of(reply)


def message_fields(message: "Struct", body: bytes) -> dict[str, object]:
    """Return the fields of a message as ``--json`` shows them: those of the control API, and those of its body."""
    return reply_fields(message) | body_fields(body)


def body_fields(body: bytes) -> dict[str, object]:
    """``body`` in base64, ``encoding``, and ``text`` when it is UTF-8."""
    text = text_of(body)
    encoded = b64encode(body).decode("ascii")
    return {"body": encoded, "encoding": "base64", **({} if text is None else {"text": text})}


@dataclass(frozen=True, slots=True)
class QueueTarget:
    """The broker of a queue, as ``--realm`` and ``--peer`` name it."""

    realm: str | None
    peer: str | None

    async def queues(self, client: "Client") -> "ClientQueues":
        """Return the queues of that broker. Raises :class:`CliError` for an unknown peer."""
        if self.peer is None:
            return client.queues.select(self.realm)
        named = self.peer.split(",")
        if not all(named):  # an empty name would fit every known peer
            raise CliError(f"--peer {self.peer!r} is empty before or behind a comma", "D4004", exit_code=EXIT_USAGE)
        return client.queues.select(self.realm, *[await resolve_peer(client, each) for each in named])


def with_target(function: Callable[..., int | None]) -> Callable[..., int | None]:
    """Give a command that is declared with ``at: QueueTarget`` the options ``--realm`` and ``--peer`` in its place."""
    hints = get_type_hints(function, include_extras=True)
    own = [each for each in inspect.signature(function).parameters.values() if each.name != "at"]
    options = {"realm": QueueRealmOption, "peer": QueuePeerOption}
    parameters = [each.replace(annotation=hints[each.name]) for each in own] + [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=None)
        for name, annotation in options.items()
    ]

    @functools.wraps(function)
    def call(run: Invocation, *, realm: str | None, peer: str | None, **given: object) -> int | None:
        return function(run, at=QueueTarget(realm, peer), **given)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in parameters}
    del call.__wrapped__
    return call


async def nodes_of(client: "Client", nodes: list[str] | None) -> list[str]:
    """Return the full ids of the nodes of ``--node``, or "self". Raises :class:`CliError` for an unknown one."""
    return [each if each == "self" else await resolve_peer(client, each) for each in nodes or ()]


async def peers_of(client: "Client", option: str, who: str) -> "str | list[str]":
    """Return "members" or "owner", or the full ids of peers with commas between them. Raises :class:`CliError`."""
    if who in ("members", "owner"):
        return who
    named = [each.strip() for each in who.split(",")]
    if not all(named):  # an empty name would fit every known peer
        raise CliError(f"{option} {who!r} is empty before or behind a comma", "D4004", exit_code=EXIT_USAGE)
    return [await resolve_peer(client, each) for each in named]


def require_one(channel: str | None, all_channels: bool) -> None:
    """Raises :class:`CliError` unless a channel or all of them are named."""
    if (channel is not None) is all_channels:
        raise CliError("give a CHANNEL or --all-channels", "D1001")


def preview(data: bytes, cells: int = 60) -> str:
    """Return the start of a body on one line, for a table."""
    text = text_of(data[: cells * 4])
    if text is None and len(data) > cells * 4:
        text = text_of(data[: cells * 4 - 3])  # a character may have been cut
    if text is None:
        return f"({len(data)} bytes, binary)"
    line = printable(text.replace("\n", " ").replace("\t", " "))
    return line if len(line) <= cells else line[: cells - 1] + "…"
