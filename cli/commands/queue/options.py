"""What the commands about queues have in common."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from dep2p.cli.framework.errors import CliError
from dep2p.cli.framework.render import printable, text_of
from dep2p.cli.framework.resolve import resolve_peer
from dep2p.error_codes import EXIT_USAGE

if TYPE_CHECKING:
    from dep2p.client.client import Client

QueueArgument = Annotated[str, typer.Argument(help="The queue's name.", metavar="QUEUE")]
ChannelArgument = Annotated[str, typer.Argument(help="The channel's name.", metavar="CHANNEL")]
ChannelOption = Annotated[str | None, typer.Option("--channel", "-c", help="Only this channel.", metavar="CHANNEL")]
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


async def place(client: "Client", realm: str | None, peer: str | None) -> dict[str, Any]:
    """The arguments that say where a queue is. Raises :class:`CliError` for a peer that nobody knows."""
    if peer is None:
        return {"realm": realm, "peer": None}
    named = peer.split(",")
    if not all(named):  # nothing would fit whatever peer is known
        raise CliError(f"--peer {peer!r} names nobody before or behind a comma", "D4004", exit_code=EXIT_USAGE)
    return {"realm": realm, "peer": ",".join([await resolve_peer(client, each) for each in named])}


async def nodes_of(client: "Client", nodes: list[str] | None) -> list[str]:
    """Full ids of the nodes of ``--node``, or "home". Raises :class:`CliError` for one that nobody knows."""
    return [each if each == "home" else await resolve_peer(client, each) for each in nodes or ()]


def parse_seconds(text: str, option: str) -> float:
    """``90``, ``1.5``, ``500ms``, ``2m``, ``1h``, ``7d`` as seconds. Raises :class:`CliError`."""
    units = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}
    number = text.rstrip("smhd")
    unit = text[len(number) :] or "s"
    try:
        seconds = float(number) * units[unit]
        if not 0 <= seconds <= 10 * 365 * 86_400:
            raise ValueError
    except (ValueError, KeyError):
        raise CliError(f"{option} {text!r} is no time: write it like 30, 500ms, 10m, 2h or 7d", "D1001") from None
    return seconds


def parse_bytes(text: str, option: str) -> int:
    """``65536``, ``64k``, ``10M``, ``2G`` as bytes (powers of 1024). Raises :class:`CliError`."""
    units = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
    plain = text.lower().removesuffix("ib").removesuffix("b")
    number = plain.rstrip("kmgt")
    try:
        size = int(float(number) * units[plain[len(number) :]])
        if size < 0:
            raise ValueError
    except (ValueError, KeyError, OverflowError):
        raise CliError(f"{option} {text!r} is no size: write it like 65536, 64k, 10M or 2G", "D1001") from None
    return size


def preview(data: bytes, cells: int = 60) -> str:
    """The start of a body on one line, for a table."""
    text = text_of(data[: cells * 4])
    if text is None and len(data) > cells * 4:
        text = text_of(data[: cells * 4 - 3])  # a character may have been cut
    if text is None:
        return f"({len(data)} bytes, binary)"
    line = printable(text.replace("\n", " ").replace("\t", " "))
    return line if len(line) <= cells else line[: cells - 1] + "…"
