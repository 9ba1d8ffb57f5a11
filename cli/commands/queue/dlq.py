"""``dep2p queue dlq``: messages whose last attempt has failed."""

import time
from typing import TYPE_CHECKING, Annotated

import typer

from dep2p.cli.commands.queue.options import (
    ChannelArgument,
    QueueArgument,
    QueueTarget,
    message_fields,
    preview,
    with_target,
)
from dep2p.cli.framework.command import Invocation, command, group
from dep2p.cli.framework.errors import CliError
from dep2p.cli.framework.payloads import show_payload
from dep2p.cli.framework.render import byte_count, duration, table
from dep2p.outside_text import printable

if TYPE_CHECKING:
    from dep2p.client import Client
    from dep2p.protocols.queues.admin import DeadLetterInfo

IdsArgument = Annotated[list[int] | None, typer.Argument(help="Ids as `dlq ls` prints them.", metavar="[ID]...", min=1)]
AllOption = Annotated[bool, typer.Option("--all", help="All of the channel.")]


@with_target
def list_dead(
    run: Invocation,
    queue: QueueArgument,
    channel: ChannelArgument,
    count: Annotated[int, typer.Option("--count", "-n", help="How many at most.", min=1, max=1_000)] = 100,
    after: Annotated[int, typer.Option("--after", help="Begin behind this id.", min=0)] = 0,
    *,
    at: QueueTarget,
) -> None:
    """List the dead letters of a channel, oldest first."""

    async def body(client: "Client") -> "list[DeadLetterInfo]":
        queues = await at.queues(client)
        return await queues.dead_letters(queue, channel, after=after, count=count)

    dead_letters = run.with_client(body)
    if run.json:
        for each in dead_letters:
            run.emit(message_fields(each, each.body))
    elif not dead_letters:
        run.say("no dead letters")
    else:
        now_s = time.time()
        rows = [
            [
                str(each.id),
                f"{duration(max(0.0, now_s - each.died_s))} ago",
                str(each.attempts),
                printable((each.reasons or ("-",))[-1]),
                byte_count(len(each.body)),
                preview(each.body, 40),
            ]
            for each in dead_letters
        ]
        run.print(table(["ID", "DIED", "ATTEMPTS", "LAST REASON", "SIZE", "BODY"], rows, right=[0, 2, 4]))
        if len(dead_letters) == count:
            run.say(f"there may be more: --after {dead_letters[-1].id}")


@with_target
def show_dead(
    run: Invocation,
    queue: QueueArgument,
    channel: ChannelArgument,
    dead_id: Annotated[int, typer.Argument(help="The id that `dlq ls` prints.", metavar="ID", min=1)],
    raw: Annotated[bool, typer.Option("--raw", help="Write the body's bytes and nothing else.")] = False,
    *,
    at: QueueTarget,
) -> None:
    """Show one dead letter: what failed, and its body."""

    async def body(client: "Client") -> "list[DeadLetterInfo]":
        queues = await at.queues(client)
        return await queues.dead_letters(queue, channel, after=dead_id - 1, count=1)

    found = run.with_client(body)
    if not found or found[0].id != dead_id:
        raise CliError(
            f"channel {printable(channel)} has no dead letter {dead_id}",
            "D5203",
            tries=(f"dep2p queue dlq ls {printable(queue)} {printable(channel)}",),
        )
    each = found[0]
    if run.json:
        run.emit(message_fields(each, each.body))
        return
    if not raw:
        run.say(f"message     {each.message_id}")
        if each.node:
            run.say(f"partition   {each.partition} at {printable(each.node)}")
        run.say(f"published   {_stamp(each.published_s)}")
        run.say(f"died        {_stamp(each.died_s)} after {each.attempts} attempts")
        for number, reason in enumerate(each.reasons, 1):
            run.say(f"reason {number:<4} {printable(reason)}")
    show_payload(run, each.body, raw=raw)


def _stamp(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))


@with_target
def replay(
    run: Invocation,
    queue: QueueArgument,
    channel: ChannelArgument,
    ids: IdsArgument = None,
    everything: AllOption = False,
    *,
    at: QueueTarget,
) -> None:
    """Give dead letters to the channel again, with fresh attempts."""
    _require_chosen(ids, everything)

    async def body(client: "Client") -> int:
        queues = await at.queues(client)
        if everything:
            return await queues.replay_all(queue, channel)
        return await queues.replay(queue, channel, ids or ())

    _report(run, queue, channel, run.with_client(body), "replayed")


@with_target
def remove(
    run: Invocation,
    queue: QueueArgument,
    channel: ChannelArgument,
    ids: IdsArgument = None,
    everything: AllOption = False,
    *,
    at: QueueTarget,
) -> None:
    """Forget dead letters."""
    _require_chosen(ids, everything)

    async def body(client: "Client") -> int:
        queues = await at.queues(client)
        if everything:
            return await queues.delete_all_dead_letters(queue, channel)
        return await queues.delete_dead_letters(queue, channel, ids or ())

    _report(run, queue, channel, run.with_client(body), "removed")


def _require_chosen(ids: list[int] | None, everything: bool) -> None:
    if bool(ids) == everything:
        raise CliError("give the ids of dead letters, or --all", "D1001")


def _report(run: Invocation, queue: str, channel: str, count: int, what: str) -> None:
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
