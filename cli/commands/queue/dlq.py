"""``dep2p queue dlq``: messages whose last attempt has failed."""

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dep2p.cli.commands.queue.options import (
    ChannelArgument,
    QueueArgument,
    QueuePeerOption,
    QueueRealmOption,
    place,
    preview,
)
from dep2p.cli.framework.command import Invocation, command, group
from dep2p.cli.framework.errors import CliError
from dep2p.cli.framework.payloads import show_payload
from dep2p.cli.framework.render import byte_count, duration, payload, printable, table
from dep2p.control_api.encoding import decode_payload

if TYPE_CHECKING:
    from dep2p.client.client import Client

IdsArgument = Annotated[list[int] | None, typer.Argument(help="Ids as `dlq ls` prints them.", metavar="[ID]...", min=1)]
AllOption = Annotated[bool, typer.Option("--all", help="All of the channel.")]


def list_dead(
    run: Invocation,
    queue: QueueArgument,
    channel: ChannelArgument,
    count: Annotated[int, typer.Option("--count", "-n", help="How many at most.", min=1, max=1_000)] = 100,
    after: Annotated[int, typer.Option("--after", help="Begin behind this id.", min=0)] = 0,
    realm: QueueRealmOption = None,
    peer: QueuePeerOption = None,
) -> None:
    """List the dead letters of a channel, oldest first."""

    async def body(client: "Client") -> list[dict[str, Any]]:
        where = await place(client, realm, peer)
        return await client.queue_dead(queue, channel, after=after, count=count, **where)

    dead = run.with_client(body)
    if run.json:
        for each in dead:
            run.emit(each | payload(_body(each)))
    elif not dead:
        run.say("no dead letters")
    else:
        now_s = time.time()
        rows = [
            [
                str(each["id"]),
                f"{duration(max(0.0, now_s - float(each['died_s'])))} ago",
                str(each["attempts"]),
                printable(str((each["reasons"] or ["-"])[-1])),
                byte_count(len(_body(each))),
                preview(_body(each), 40),
            ]
            for each in dead
        ]
        run.print(table(["ID", "DIED", "ATTEMPTS", "LAST REASON", "SIZE", "BODY"], rows, right=[0, 2, 4]))
        if len(dead) == count:
            run.say(f"there may be more: --after {dead[-1]['id']}")


def _body(dead: dict[str, Any]) -> bytes:
    return decode_payload(str(dead["data"]), str(dead["encoding"]))


def show_dead(
    run: Invocation,
    queue: QueueArgument,
    channel: ChannelArgument,
    dead_id: Annotated[int, typer.Argument(help="The id that `dlq ls` prints.", metavar="ID", min=1)],
    raw: Annotated[bool, typer.Option("--raw", help="Write the body's bytes and nothing else.")] = False,
    realm: QueueRealmOption = None,
    peer: QueuePeerOption = None,
) -> None:
    """Show one dead letter: what failed, and its body."""

    async def body(client: "Client") -> list[dict[str, Any]]:
        where = await place(client, realm, peer)
        return await client.queue_dead(queue, channel, after=dead_id - 1, count=1, **where)

    found = run.with_client(body)
    if not found or int(found[0]["id"]) != dead_id:
        raise CliError(
            f"channel {printable(channel)} has no dead letter {dead_id}",
            "D5203",
            tries=(f"dep2p queue dlq ls {printable(queue)} {printable(channel)}",),
        )
    each = found[0]
    if run.json:
        run.emit(each | payload(_body(each)))
        return
    if not raw:
        run.say(f"message     {each['message_id']}")
        if each.get("node"):
            run.say(f"partition   {each['partition']} at {printable(str(each['node']))}")
        run.say(f"published   {_stamp(float(each['published_s']))}")
        run.say(f"died        {_stamp(float(each['died_s']))} after {each['attempts']} attempts")
        for number, reason in enumerate(each["reasons"], 1):
            run.say(f"reason {number:<4} {printable(str(reason))}")
    show_payload(run, _body(each), raw=raw)


def _stamp(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))


def replay(
    run: Invocation,
    queue: QueueArgument,
    channel: ChannelArgument,
    ids: IdsArgument = None,
    everything: AllOption = False,
    realm: QueueRealmOption = None,
    peer: QueuePeerOption = None,
) -> None:
    """Give dead letters to the channel again, with fresh attempts."""
    chosen = _chosen(ids, everything)

    async def body(client: "Client") -> int:
        return await client.queue_dead_replay(queue, channel, chosen, **await place(client, realm, peer))

    _told(run, queue, channel, run.with_client(body), "replayed")


def remove(
    run: Invocation,
    queue: QueueArgument,
    channel: ChannelArgument,
    ids: IdsArgument = None,
    everything: AllOption = False,
    realm: QueueRealmOption = None,
    peer: QueuePeerOption = None,
) -> None:
    """Forget dead letters."""
    chosen = _chosen(ids, everything)

    async def body(client: "Client") -> int:
        return await client.queue_dead_remove(queue, channel, chosen, **await place(client, realm, peer))

    _told(run, queue, channel, run.with_client(body), "removed")


def _chosen(ids: list[int] | None, everything: bool) -> list[int] | None:
    if bool(ids) == everything:
        raise CliError("give the ids of dead letters, or --all", "D1001")
    return ids or None


def _told(run: Invocation, queue: str, channel: str, count: int, what: str) -> None:
    if run.json:
        run.emit({"queue": queue, "channel": channel, what: count})
    else:
        run.say(f"{what} {count:,} dead letters")


def register_dead_letters(queue: typer.Typer) -> None:
    """Add ``queue dlq``."""
    dlq = group(queue, "dlq", "Dead letters: messages whose last attempt has failed.")
    command(dlq, "ls", examples=[("dep2p queue dlq ls jobs workers", "with the last reason of each")])(list_dead)
    command(
        dlq,
        "show",
        examples=[("dep2p queue dlq show jobs workers 3", "why it failed each time, and its body")],
    )(show_dead)
    command(
        dlq,
        "replay",
        examples=[
            ("dep2p queue dlq replay jobs workers 3 4", ""),
            ("dep2p queue dlq replay jobs workers --all", "when the cause is mended"),
        ],
    )(replay)
    command(dlq, "rm", examples=[("dep2p queue dlq rm jobs workers --all", "for good")])(remove)
