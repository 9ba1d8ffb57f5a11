"""``dep2p queue receive``, ``ack`` and ``invisible``: receive and acknowledge messages by separate commands."""

import secrets
from typing import TYPE_CHECKING, Annotated, Final

import typer

from dep2p.cli.commands.queue.options import (
    ChannelArgument,
    QueueArgument,
    QueueTarget,
    message_fields,
    with_target,
)
from dep2p.cli.framework.command import Invocation, command
from dep2p.cli.framework.payloads import show_payload
from dep2p.cli.framework.quantities import parse_seconds
from dep2p.cli.framework.render import byte_count, duration
from dep2p.error_codes import EXIT_FAILED, EXIT_OK
from dep2p.errors import NotInFlightError
from dep2p.outside_text import printable

if TYPE_CHECKING:
    from dep2p.client import Client
    from dep2p.protocols.queues.admin import ReceivedMessage

_AWAY_S: Final = 30.0
"""Seconds for which `receive` waits for a daemon that goes away meanwhile."""
HandlesArgument = Annotated[list[str], typer.Argument(help="Handles as `receive` prints them.", metavar="HANDLE...")]
HandleArgument = Annotated[str, typer.Argument(help="As `receive` prints it.", metavar="HANDLE")]
TimeArgument = Annotated[str, typer.Argument(help="From now on, like 30, 10m or 2h; 0: at once.", metavar="TIME")]


@with_target
def receive(
    run: Invocation,
    queue: QueueArgument,
    channel: ChannelArgument,
    count: Annotated[int, typer.Option("--count", "-n", help="How many at most.", min=1, max=32)] = 1,
    wait: Annotated[str, typer.Option("--wait", help="For a message, at most 20 s.", metavar="TIME")] = "10",
    invisible: Annotated[
        str, typer.Option("--invisible", help="Other consumers do not get them for so long.", metavar="TIME")
    ] = "60",
    from_start: Annotated[
        bool, typer.Option("--from-start", help="A new channel gets the messages that are there already, too.")
    ] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Write the messages' bytes and nothing else.")] = False,
    *,
    at: QueueTarget,
) -> int:
    """Receive messages, each with a handle to acknowledge it by."""
    wait_s, invisible_s = parse_seconds(wait, "--wait"), parse_seconds(invisible, "--invisible")

    async def body(client: "Client") -> list["ReceivedMessage"]:
        consumer = (await at.queues(client)).simple_consumer(queue, channel)
        # With an attempt id, the call may be made again when its answer is lost.
        attempt_id = secrets.token_hex(8) if run.reconnect else ""
        return await consumer.receive(
            count, wait_s=wait_s, invisible_s=invisible_s, attempt_id=attempt_id, from_start=from_start
        )

    run.call_reconnect_s = _AWAY_S
    messages = run.with_client(body)
    for message in messages:
        if run.json:
            run.emit(message_fields(message, message.body))
            continue
        notes = [f"attempt {message.attempts}"] if message.attempts > 1 else []
        notes += [f"key {printable(message.key)}"] if message.key else []
        left = duration(message.invisible_s)
        run.say("  ".join([message.handle, byte_count(len(message.body)), *notes, f"yours for {left}"]))
        show_payload(run, message.body, raw=raw, nul=False)
    if not messages:
        run.say("nothing came")
    return EXIT_OK if messages else EXIT_FAILED


@with_target
def ack(
    run: Invocation,
    queue: QueueArgument,
    channel: ChannelArgument,
    handles: HandlesArgument,
    *,
    at: QueueTarget,
) -> int:
    """Acknowledge received messages: they are done, on disk."""

    async def body(client: "Client") -> tuple[str, ...]:
        try:
            await (await at.queues(client)).simple_consumer(queue, channel).ack(*handles)
        except NotInFlightError as error:
            return error.handles
        return ()

    refused = run.with_client(body)
    if run.json:
        run.emit({"acknowledged": len(handles) - len(refused), "refused": refused})
    for handle in refused:
        run.warn(f"{printable(handle)} is not held any more: its time was over, or it is done")
    return EXIT_FAILED if refused else EXIT_OK


@with_target
def invisible(
    run: Invocation,
    queue: QueueArgument,
    channel: ChannelArgument,
    handle: HandleArgument,
    time: TimeArgument,
    *,
    at: QueueTarget,
) -> None:
    """Change for how long a received message is hidden from other consumers."""
    seconds = parse_seconds(time, "TIME")

    async def body(client: "Client") -> float:
        return await (await at.queues(client)).simple_consumer(queue, channel).change_invisible(handle, seconds)

    left_s = run.with_client(body)
    if run.json:
        run.emit({"handle": handle, "invisible_s": left_s})
    elif left_s:
        run.say(f"yours for {duration(left_s)}")
    else:
        run.say("others may have it now")


def register_receive(queue: typer.Typer) -> None:
    """Add the three commands to the ``queue`` group."""
    command(
        queue,
        "receive",
        examples=[
            ("dep2p queue receive jobs workers", "one message, or exit status 1 after 10 s"),
            ("dep2p queue receive jobs workers -n 10 --invisible 10m --json", "ten, for ten minutes"),
        ],
        notes="A received message is hidden from other consumers for its invisible time, also when this command dies. "
        "Then it is delivered again, and after the queue's max_attempts becomes a dead letter. When the "
        "daemon restarts meanwhile, the command asks it again, for up to 30 s; not with --no-reconnect.",
    )(receive)
    command(queue, "ack", examples=[("dep2p queue ack jobs workers 0000010000000001-1", "")])(ack)
    command(
        queue,
        "invisible",
        examples=[
            ("dep2p queue invisible jobs workers 0000010000000001-1 10m", "ten more minutes"),
            ("dep2p queue invisible jobs workers 0000010000000001-1 0", "give it back"),
        ],
    )(invisible)
