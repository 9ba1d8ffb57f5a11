"""``dep2p queue``: durable queues, whose messages stay until a consumer has finished them."""

import contextlib
import os
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from dep2p.cli.commands.queue.consume import consume
from dep2p.cli.commands.queue.dlq import register_dead_letters
from dep2p.cli.commands.queue.options import (
    AllChannelsOption,
    ChannelArgument,
    ChannelOption,
    ChosenChannelArgument,
    QueueArgument,
    QueueTarget,
    message_fields,
    nodes_of,
    peers_of,
    preview,
    reply_fields,
    require_one,
    with_target,
)
from dep2p.cli.commands.queue.partitions import register_order
from dep2p.cli.commands.queue.put import put
from dep2p.cli.commands.queue.receive import register_receive
from dep2p.cli.framework.command import Invocation, command, group
from dep2p.cli.framework.errors import CliError
from dep2p.cli.framework.progress import Progress
from dep2p.cli.framework.quantities import parse_bytes, parse_seconds
from dep2p.cli.framework.render import byte_count, duration, table
from dep2p.outside_text import printable

if TYPE_CHECKING:
    from dep2p.client import Client
    from dep2p.protocols.queues.admin import (
        MessageInfo,
        OptionValue,
        PendingDeletion,
        QueueAccess,
        QueueInfo,
        QueueSummary,
    )
    from dep2p.protocols.queues.options import QueueOptions


@with_target
def create(
    run: Invocation,
    queue: QueueArgument,
    max_attempts: Annotated[
        int | None, typer.Option("--max-attempts", help="Deliveries before it is a dead letter; 0: no limit.", min=0)
    ] = None,
    msg_timeout: Annotated[
        str | None,
        typer.Option("--msg-timeout", help="A consumer has a message so long, like 30 or 5m.", metavar="TIME"),
    ] = None,
    ttl: Annotated[
        str | None, typer.Option("--ttl", help="Older messages are dropped, like 12h or 7d.", metavar="TIME")
    ] = None,
    max_messages: Annotated[
        int | None, typer.Option("--max-messages", help="Messages that it may hold; then publishers wait.", min=1)
    ] = None,
    max_bytes: Annotated[
        str | None, typer.Option("--max-bytes", help="Bytes that it may hold, like 500M.", metavar="SIZE")
    ] = None,
    partitions: Annotated[int | None, typer.Option("--partitions", help="Parts for messages with keys.", min=1)] = None,
    order: Annotated[
        str | None,
        typer.Option(
            "--order",
            help="The order of a key after a failure: strict (it waits) or best_effort (it goes on).",
            metavar="ORDER",
        ),
    ] = None,
    node: Annotated[
        list[str] | None,
        typer.Option(
            "--node", help="Where partitions are: a member, or self; again for more, in turn.", metavar="PEER"
        ),
    ] = None,
    no_dead_letters: Annotated[
        bool, typer.Option("--no-dead-letters", help="Drop a message after its last attempt.")
    ] = False,
    publish: Annotated[
        str | None,
        typer.Option(
            "--publish", help="The peers that may publish: members, owner, or peers with commas.", metavar="WHO"
        ),
    ] = None,
    consume: Annotated[
        str | None, typer.Option("--consume", help="The peers that may consume, in the same way.", metavar="WHO")
    ] = None,
    administer: Annotated[
        str | None, typer.Option("--administer", help="The peers that may administer, in the same way.", metavar="WHO")
    ] = None,
    *,
    at: QueueTarget,
) -> None:
    """Make a queue. One that exists with the same options is left as it is."""
    options: dict[str, OptionValue] = {}
    if max_attempts is not None:
        options["max_attempts"] = max_attempts
    if msg_timeout is not None:
        options["msg_timeout_s"] = parse_seconds(msg_timeout, "--msg-timeout")
    if ttl is not None:
        options["ttl_s"] = parse_seconds(ttl, "--ttl")
    if max_messages is not None:
        options["items_max"] = max_messages
    if max_bytes is not None:
        options["bytes_max"] = parse_bytes(max_bytes, "--max-bytes")
    if partitions is not None:
        options["partitions"] = partitions
    if order is not None:
        options["order"] = order
    if no_dead_letters:
        options["dead_letters"] = False
    given = (("publish", publish), ("consume", consume), ("administer", administer))

    async def body(client: "Client") -> "QueueInfo":
        access = {name: await peers_of(client, f"--{name}", who) for name, who in given if who is not None}
        queues = await at.queues(client)
        nodes = await nodes_of(client, node)
        return await (await queues.create(queue, options, access=access or None, nodes=nodes)).info()

    found = run.with_client(body)
    if run.json:
        run.emit(reply_fields(found))
    else:
        run.say(f"the queue {printable(queue)} is there")


@with_target
def list_queues(run: Invocation, *, at: QueueTarget) -> None:
    """List the queues and count their messages."""

    async def body(client: "Client") -> "list[QueueSummary]":
        return await (await at.queues(client)).listing()

    queues = run.with_client(body)
    if run.json:
        run.emit({"queues": [reply_fields(each) for each in queues]})
    elif not queues:
        run.say("no queues here; `dep2p queue create NAME` makes one")
    else:
        rows = [
            [
                printable(each.name),
                f"{each.messages:,}",
                byte_count(each.bytes),
                *(
                    f"{number:,}"
                    for number in (each.in_flight, each.deferred, each.dead, each.channel_count, each.consumers)
                ),
                "paused" if each.is_paused else "",
            ]
            for each in queues
        ]
        heads = ["QUEUE", "MESSAGES", "SIZE", "IN FLIGHT", "DEFERRED", "DEAD", "CHANNELS", "CONSUMERS", ""]
        run.print(table(heads, rows, right=[1, 2, 3, 4, 5, 6, 7]))


@with_target
def info(run: Invocation, queue: QueueArgument, *, at: QueueTarget) -> None:
    """Show a queue: options, channels, consumers."""

    async def body(client: "Client") -> "QueueInfo":
        return await (await at.queues(client)).info(queue)

    found = run.with_client(body)
    if run.json:
        run.emit(reply_fields(found))
        return
    run.print(
        f"queue       {printable(found.name)}{' (paused)' if found.is_paused else ''}\n"
        f"messages    {found.messages:,} ({byte_count(found.bytes)})\n"
        f"options     {_options(found.options)}\n"
        f"access      {_access(found.access)}"
    )
    if not found.channels:
        run.say("no channel yet: the first one gets all messages; `dep2p queue consume QUEUE CHANNEL` makes one")
        return
    names = ("ready", "in_flight", "deferred", "dead", "consumers", "finished", "requeued", "timed_out")
    rows = [
        [
            printable(channel.name),
            *(f"{getattr(channel, name):,}" for name in names),
            "paused" if channel.is_paused else "",
        ]
        for channel in found.channels
    ]
    heads = ["CHANNEL", *(name.replace("_", " ").upper() for name in names), ""]
    run.print("\n" + table(heads, rows, right=list(range(1, 9))))


def _options(options: "QueueOptions") -> str:
    names = ("partitions", "max_attempts", "msg_timeout_s", "ttl_s", "items_max", "bytes_max", "dead_letters")
    return printable(", ".join(f"{name}={getattr(options, name)}" for name in names))


def _access(access: "QueueAccess") -> str:
    rights = (("publish", access.publish), ("consume", access.consume), ("administer", access.administer))
    return printable(", ".join(f"{name}: {who if isinstance(who, str) else ' '.join(who)}" for name, who in rights))


@with_target
def peek(
    run: Invocation,
    queue: QueueArgument,
    channel: ChannelOption = None,
    count: Annotated[int, typer.Option("--count", "-n", help="How many.", min=1, max=1_000)] = 10,
    *,
    at: QueueTarget,
) -> None:
    """Show the oldest messages without taking them."""

    async def body(client: "Client") -> "list[MessageInfo]":
        return await (await at.queues(client)).peek(queue, channel, count=count)

    messages = run.with_client(body)
    if run.json:
        for message in messages:
            run.emit(message_fields(message, message.body))
    elif not messages:
        run.say("nothing is there")
    else:
        now_s = time.time()
        rows = [
            [
                message.id,
                f"{duration(max(0.0, now_s - message.published_s))} ago",
                _notes(message, now_s),
                byte_count(len(message.body)),
                preview(message.body),
            ]
            for message in messages
        ]
        run.print(table(["ID", "PUBLISHED", "NOTES", "SIZE", "BODY"], rows, right=[3]))


def _notes(message: "MessageInfo", now_s: float) -> str:
    notes: list[str] = []
    if message.key:
        notes.append(f"key={message.key}")
    if message.tags:
        notes.append("tags=" + ",".join(message.tags))
    if message.priority:
        notes.append(f"priority={message.priority}")
    if message.due_s > now_s:
        notes.append(f"due in {duration(message.due_s - now_s)}")
    if message.state:
        notes.append(message.state)
    if message.node:
        notes.append(f"partition={message.partition} at {message.node}")
    return printable(" ".join(notes)) or "-"


@with_target
def pause(
    run: Invocation,
    queue: QueueArgument,
    channel: ChosenChannelArgument = None,
    all_channels: AllChannelsOption = False,
    *,
    at: QueueTarget,
) -> None:
    """Deliver nothing until `resume`, also over restarts. Messages are still taken, and none is lost."""
    require_one(channel, all_channels)

    async def body(client: "Client") -> None:
        queues = await at.queues(client)
        if channel is None:
            await queues.pause_all(queue)
        else:
            await queues.pause(queue, channel)

    run.with_client(body)
    _done(run, queue, channel, "paused")


@with_target
def resume(
    run: Invocation,
    queue: QueueArgument,
    channel: ChosenChannelArgument = None,
    all_channels: AllChannelsOption = False,
    *,
    at: QueueTarget,
) -> None:
    """Deliver again."""
    require_one(channel, all_channels)

    async def body(client: "Client") -> None:
        queues = await at.queues(client)
        if channel is None:
            await queues.resume_all(queue)
        else:
            await queues.resume(queue, channel)

    run.with_client(body)
    _done(run, queue, channel, "resumed")


def _done(run: Invocation, queue: str, channel: str | None, what: str) -> None:
    if run.json:
        run.emit({"queue": queue, "channel": channel, what: True})
    else:
        run.say(f"{what} {_named(queue, channel)}")


def _named(queue: str, channel: str | None) -> str:
    return printable(queue) + ("" if channel is None else f", channel {printable(channel)}")


YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def ask(run: Invocation, question: str, *, yes: bool) -> None:
    """Ask the user. Raises :class:`CliError` unless the user agrees; without a terminal, ``--yes`` is needed."""
    if yes:
        return
    if run.json or not sys.stdin.isatty():
        raise CliError(f"this cannot be undone: {question}", "D1001", tries=("say so with --yes",))
    if not typer.confirm(question, err=True):
        raise typer.Abort


@with_target
def empty(
    run: Invocation,
    queue: QueueArgument,
    channel: ChosenChannelArgument = None,
    all_channels: AllChannelsOption = False,
    yes: YesOption = False,
    *,
    at: QueueTarget,
) -> None:
    """Drop every message that waits, in one channel or in all."""
    require_one(channel, all_channels)
    ask(run, f"drop all messages that wait in {_named(queue, channel)}?", yes=yes)

    async def body(client: "Client") -> int:
        queues = await at.queues(client)
        if channel is None:
            return await queues.empty_all(queue)
        return await queues.empty(queue, channel)

    dropped = run.with_client(body)
    if run.json:
        run.emit({"queue": queue, "channel": channel, "messages": dropped})
    else:
        run.say(f"dropped {dropped:,} messages from {_named(queue, channel)}")


@with_target
def remove(
    run: Invocation,
    queue: QueueArgument,
    yes: YesOption = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="A queue on several members, without those that are away."),
    ] = False,
    *,
    at: QueueTarget,
) -> None:
    """Delete a queue with all that is in it."""
    ask(run, f"delete {_named(queue, None)} with all messages and dead letters?", yes=yes)

    async def body(client: "Client") -> "list[PendingDeletion]":
        return await (await at.queues(client)).delete(queue, force=force)

    for each in run.with_client(body):
        run.warn(f"the part {printable(each.shard)} at {each.node} is deleted when that node is back")
    _done(run, queue, None, "deleted")


@with_target
def remove_channel(
    run: Invocation, queue: QueueArgument, channel: ChannelArgument, yes: YesOption = False, *, at: QueueTarget
) -> None:
    """Delete a channel of a queue with its dead letters."""
    ask(run, f"delete {_named(queue, channel)} with its dead letters?", yes=yes)

    async def body(client: "Client") -> None:
        await (await at.queues(client)).delete_channel(queue, channel)

    run.with_client(body)
    _done(run, queue, channel, "deleted")


@with_target
def export(
    run: Invocation,
    queue: QueueArgument,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write into this new file.", metavar="FILE")
    ] = None,
    *,
    at: QueueTarget,
) -> None:
    """Write every message of the queue's log as a line of JSON, oldest first."""

    async def body(client: "Client") -> int:
        queues = await at.queues(client)
        total = (await queues.info(queue)).messages
        progress = Progress("export", total, shown=not run.quiet and output is not None, unit="messages")
        seen = 0
        try:
            with _sink(output) as sink:
                async with queues.export(queue) as messages:
                    async for message in messages:
                        _write(run, sink, message)
                        seen += 1
                        progress.add(1)
        finally:
            progress.clear()
        return seen

    seen = run.with_client(body)
    if output is not None:
        if run.json:
            run.emit({"queue": queue, "file": str(output), "messages": seen})
        else:
            run.say(f"exported {seen:,} messages to {printable(str(output))}")


@contextlib.contextmanager
def _sink(output: Path | None) -> Generator[BinaryIO | None]:
    if output is None:
        yield None
        return
    partial = output.with_name(f".{output.name}.{os.getpid()}.part")
    try:
        if output.exists():
            raise CliError(f"{output} exists: export writes a new file", "D6006", tries=("name another file",))
        with partial.open("xb") as opened:
            yield opened
        partial.rename(output)
    except OSError as error:
        raise CliError(f"cannot write {output}: {error.strerror or error}", "D6006") from None
    finally:
        partial.unlink(missing_ok=True)


def _write(run: Invocation, sink: BinaryIO | None, message: "MessageInfo") -> None:
    if sink is None:
        run.emit(message_fields(message, message.body))
    else:
        from json import dumps

        sink.write(dumps(message_fields(message, message.body), ensure_ascii=False).encode() + b"\n")


def register(app: typer.Typer) -> None:
    """Add the ``queue`` group."""
    queue = group(app, "queue", "Durable queues: messages stay until a consumer has finished them.")
    command(
        queue,
        "create",
        examples=[
            ("dep2p queue create jobs", "for the programs of this machine"),
            ("dep2p queue create jobs --realm team", "members of the realm may publish and consume, too"),
            ("dep2p queue create jobs --realm team --consume owner", "members publish; only this node consumes"),
            ("dep2p queue create orders --partitions 4 --order strict", "messages of a key in order, whatever fails"),
            (
                "dep2p queue create orders --realm team --partitions 4 --node f3Qa --node a8Tz",
                "two partitions on each of two members",
            ),
            ("dep2p queue create mail --max-attempts 5 --msg-timeout 2m --ttl 7d", ""),
        ],
        notes="A queue keeps its messages on the disk of one node. Without --realm only programs of that machine reach "
        "it. What the options mean, and who may do what, is in docs/howto/queues.md.",
    )(create)
    command(queue, "ls", examples=[("dep2p queue ls", ""), ("dep2p queue ls --realm team --peer f3Qa", "a member's")])(
        list_queues
    )
    command(queue, "info", examples=[("dep2p queue info jobs", "with a line per channel")])(info)
    command(
        queue,
        "put",
        examples=[
            ("dep2p queue put jobs 'resize a.jpg' 'resize b.jpg'", "two messages"),
            ("dep2p queue put jobs --lines < jobs.txt", "each line is a message"),
            ("dep2p queue put jobs 'job {{n}}' --count 1000", "a thousand"),
            ("dep2p queue put jobs report --delay 10m --tag night --priority 5", ""),
            ("dep2p queue put jobs hello --realm team --peer f3Qa", "into a queue that a member keeps"),
        ],
        notes="When the command has ended well, the messages are on disk and survive a crash of the daemon. When the "
        "queue is full, it waits for room.",
    )(put)
    command(
        queue,
        "consume",
        waits=True,
        examples=[
            ("dep2p queue consume jobs workers", "each message on a line of its own, finished as it is printed"),
            (
                "dep2p queue consume jobs workers --exec ./work.sh",
                "exit status 0 finishes a message, others requeue it",
            ),
            ("dep2p queue consume jobs workers --exec ./work.sh --jobs 4", "four at a time"),
            ("dep2p queue consume jobs audit --from-start --count 100 --json", "a channel of its own, from the start"),
            (
                "dep2p queue consume orders billing --fifo --exec ./bill.sh --jobs 8",
                "each key in order, eight keys at a time",
            ),
        ],
        notes="Each channel gets every message of the queue; the consumers of one channel share its messages. A new "
        "channel starts with the messages from now on (--from-start: with all that are there); the first channel of a "
        "queue always gets all. --exec runs the command once for each message, with the body on its standard input "
        "and DEP2P_MESSAGE_ID, DEP2P_QUEUE, DEP2P_CHANNEL, DEP2P_ATTEMPTS, DEP2P_KEY, DEP2P_TAGS, DEP2P_PRIORITY and "
        "DEP2P_PUBLISHED in its environment. While it runs the message stays its own. When it fails, the message comes "
        "back after --requeue-delay, and after the queue's max_attempts becomes a dead letter. When this command or "
        "the daemon dies, messages that were not finished are delivered again. With --fifo, any number of these "
        "commands keep the messages of each key in order: every partition of the queue belongs to one of them at a "
        "time. In a queue of strict order a message that failed comes before the next one of its key.",
    )(consume)
    register_receive(queue)
    register_order(queue)
    command(queue, "peek", examples=[("dep2p queue peek jobs --channel workers", "what it has not done yet")])(peek)
    command(
        queue,
        "pause",
        examples=[("dep2p queue pause jobs workers", ""), ("dep2p queue pause jobs --all-channels", "")],
    )(pause)
    command(
        queue,
        "resume",
        examples=[("dep2p queue resume jobs workers", ""), ("dep2p queue resume jobs --all-channels", "")],
    )(resume)
    command(
        queue,
        "empty",
        examples=[
            ("dep2p queue empty jobs workers", "of one channel; messages in flight go, too"),
            ("dep2p queue empty jobs --all-channels --yes", "the whole queue"),
        ],
    )(empty)
    command(queue, "rm", examples=[("dep2p queue rm jobs --yes", "")])(remove)
    command(queue, "rm-channel", examples=[("dep2p queue rm-channel jobs audit", "the queue stays")])(remove_channel)
    command(queue, "export", examples=[("dep2p queue export jobs -o jobs.ndjson", "the queue stays as it is")])(export)
    register_dead_letters(queue)
