"""``dep2p queue consume``: print messages, or run a command for each, whose exit status is the message's result."""

import os
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

import typer

from dep2p.cli.commands.queue.options import (
    ChannelArgument,
    QueueArgument,
    QueueTarget,
    body_fields,
    with_target,
)
from dep2p.cli.framework.command import Invocation
from dep2p.cli.framework.errors import CliError
from dep2p.cli.framework.payloads import show_payload
from dep2p.cli.framework.quantities import parse_seconds
from dep2p.cli.framework.render import byte_count, headers_json
from dep2p.error_codes import EXIT_FAILED, EXIT_OK
from dep2p.errors import NotInFlightError
from dep2p.outside_text import environment, printable

if TYPE_CHECKING:
    from anyio.abc import Process

    from dep2p.client import Client
    from dep2p.client.queues.consumer import ClientMessages, ClientQueueMessage

_TOUCH_SHARE: Final = 0.4
"""The share of a message's time after which a message still in work is touched."""
_NOT_FOUND: Final = 127
_NOT_EXECUTABLE: Final = 126


@dataclass(slots=True)
class _Plan:
    queue: str
    channel: str
    count: int | None
    raw: bool
    nul: bool
    execute: list[str] | None
    jobs: int
    requeue_delay_s: float
    reject_status: int | None
    in_flight: int
    from_start: bool


@dataclass(slots=True)
class _ConsumeTally:
    seen: int = 0
    finished: int = 0
    requeued: int = 0
    rejected: int = 0
    lost: int = 0
    """Messages whose time was over before their result."""


@with_target
def consume(
    run: Invocation,
    queue: QueueArgument,
    channel: ChannelArgument,
    count: Annotated[int | None, typer.Option("--count", "-n", help="End after so many.", min=1)] = None,
    execute: Annotated[
        str | None,
        typer.Option("--exec", "-x", help="Run this for each message, with its body as standard input.", metavar="CMD"),
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", "-j", help="Commands that run at once.", min=1, max=1_000)] = 1,
    requeue_delay: Annotated[
        str, typer.Option("--requeue-delay", help="A failed message comes back after this.", metavar="TIME")
    ] = "1",
    reject_status: Annotated[
        int | None,
        typer.Option(
            "--reject-status",
            help="With this exit status a message becomes a dead letter at once.",
            metavar="N",
            min=1,
            max=255,
        ),
    ] = None,
    max_in_flight: Annotated[
        int | None, typer.Option("--max-in-flight", help="Messages fetched ahead at once.", min=1, max=10_000)
    ] = None,
    from_start: Annotated[
        bool, typer.Option("--from-start", help="A new channel gets the messages that are there already, too.")
    ] = False,
    filter_text: Annotated[
        str,
        typer.Option(
            "--filter", help="A new channel gets only these: 'tag in (a, b) and header.size != 3'.", metavar="FILTER"
        ),
    ] = "",
    fifo: Annotated[
        bool,
        typer.Option("--fifo", help="Messages of one key in order, one at a time; the channel is made exclusive."),
    ] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Write the messages' bytes and nothing else.")] = False,
    nul: Annotated[bool, typer.Option("-0", "--null", help="End each message with a NUL byte.")] = False,
    *,
    at: QueueTarget,
) -> int:
    """Take messages from a channel: print each and finish it, or run a command that decides."""
    if raw and nul:
        raise CliError("--raw and -0 exclude each other", "D1001")
    command = None if execute is None else _split(execute)
    if command is None and (reject_status is not None or jobs > 1):
        raise CliError("--jobs and --reject-status belong to --exec", "D1001")
    ahead = max_in_flight or (jobs if command is not None else 64)
    if count is not None:
        ahead = min(ahead, count)
    delay_s = parse_seconds(requeue_delay, "--requeue-delay")
    plan = _Plan(queue, channel, count, raw, nul, command, jobs, delay_s, reject_status, ahead, from_start)

    async def body(client: "Client") -> _ConsumeTally:
        queues = await at.queues(client)
        tally = _ConsumeTally()
        async with queues.consume(
            queue,
            channel,
            max_in_flight=plan.in_flight,
            from_start=from_start,
            count=count,
            filter=filter_text,
            exclusive=fifo,
        ) as consumer:
            run.say(f"waiting for messages of {printable(queue)}, channel {printable(channel)}; Ctrl-C ends")
            if plan.execute is None:
                await _print_all(run, plan, consumer, tally)
            else:
                await _execute_all(run, plan, consumer, tally)
        return tally

    tally = run.with_client(body)
    if plan.execute is not None and count is not None:
        text = f"{tally.finished} finished, {tally.requeued} requeued, {tally.rejected} rejected"
        run.say(text + (f", {tally.lost} too late" if tally.lost else ""))
    return EXIT_OK if tally.finished == tally.seen else EXIT_FAILED


def _split(text: str) -> list[str]:
    try:
        command = shlex.split(text)
    except ValueError as error:
        raise CliError(f"--exec {text!r}: {error}", "D1001") from None
    if not command:
        raise CliError("--exec needs a command", "D1001")
    return command


async def _print_all(run: Invocation, plan: _Plan, consumer: "ClientMessages", tally: _ConsumeTally) -> None:
    from anyio import create_task_group

    async with create_task_group() as finishing:
        async for message in consumer:
            tally.seen += 1
            _show(run, plan, message)
            # Not awaited here: the command prints the next messages meanwhile, and several results go in one call.
            finishing.start_soon(_finish, run, message, tally)
            if tally.seen == plan.count:
                break


async def _finish(run: Invocation, message: "ClientQueueMessage", tally: _ConsumeTally) -> None:
    try:
        await message.finish(durable=True)
        tally.finished += 1
    except NotInFlightError as error:
        tally.lost += 1
        run.warn(f"{message.id}: {error}")


def _show(run: Invocation, plan: _Plan, message: "ClientQueueMessage") -> None:
    if run.json:
        run.emit(_fields(message) | body_fields(message.body))
        return
    if not plan.raw and not plan.nul:
        notes = [f"attempt {message.attempts}"] if message.attempts > 1 else []
        notes += [f"key {printable(message.key)}"] if message.key else []
        notes += [f"tags {printable(','.join(message.tags))}"] if message.tags else []
        run.say("  ".join([f"[{message.id}]", byte_count(len(message.body)), *notes]))
    show_payload(run, message.body, raw=plan.raw, nul=plan.nul)


def _fields(message: "ClientQueueMessage") -> dict[str, object]:
    return {
        "id": message.id,
        "queue": message.queue,
        "channel": message.channel,
        "attempts": message.attempts,
        "published_s": message.published_s,
        "key": message.key,
        "tags": list(message.tags),
        "priority": message.priority,
        "headers": headers_json(message.headers),
    }


async def _execute_all(run: Invocation, plan: _Plan, consumer: "ClientMessages", tally: _ConsumeTally) -> None:
    from anyio import Semaphore, create_task_group

    slots = Semaphore(plan.jobs)
    async with create_task_group() as running:
        async for message in consumer:
            tally.seen += 1
            await slots.acquire()
            running.start_soon(_execute, run, plan, message, tally, slots.release)
            if tally.seen == plan.count:
                break


async def _execute(
    run: Invocation, plan: _Plan, message: "ClientQueueMessage", tally: _ConsumeTally, release: Callable[[], None]
) -> None:
    from anyio import create_task_group

    status = 1
    try:
        async with create_task_group() as touching:
            touching.start_soon(_touch, message)
            status = await _run_command(plan.execute or [], message)
            touching.cancel_scope.cancel()
        await _decide(run, plan, message, status, tally)
    except* NotInFlightError as errors:
        tally.lost += 1
        run.warn(f"{message.id}: {errors.exceptions[0]}")
    finally:
        release()


async def _decide(
    run: Invocation, plan: _Plan, message: "ClientQueueMessage", status: int, tally: _ConsumeTally
) -> None:
    fate = "finished"
    if status == 0:
        await message.finish(durable=True)
        tally.finished += 1
    elif status == plan.reject_status:
        await message.reject(f"exit status {status}")
        tally.rejected += 1
        fate = "rejected"
    else:
        await message.requeue(plan.requeue_delay_s, f"exit status {status}")
        tally.requeued += 1
        fate = "requeued"
    if run.json:
        run.emit({"id": message.id, "attempts": message.attempts, "exit_status": status, "result": fate})
    elif status:
        run.warn(f"{message.id}: exit status {status} at attempt {message.attempts}: {fate}")


async def _touch(message: "ClientQueueMessage") -> None:
    from anyio import current_time, sleep

    until = message.deadline_s
    while True:
        await sleep(max(0.1, (until - current_time()) * _TOUCH_SHARE))
        until = await message.touch()


async def _run_command(command: list[str], message: "ClientQueueMessage") -> int:
    """Run the command once; return its exit status, or 128 + the number of a signal that ended it. Raises
    :class:`CliError`."""
    from anyio import CancelScope, open_process

    variables = {
        "DEP2P_MESSAGE_ID": message.id,
        "DEP2P_QUEUE": message.queue,
        "DEP2P_CHANNEL": message.channel,
        "DEP2P_ATTEMPTS": str(message.attempts),
        "DEP2P_KEY": message.key,
        "DEP2P_TAGS": ",".join(message.tags),
        "DEP2P_PRIORITY": str(message.priority),
        "DEP2P_PUBLISHED": f"{message.published_s:.6f}",
    }
    try:
        process = await open_process(
            command, stdin=subprocess.PIPE, stdout=None, stderr=None, env=environment(os.environ, variables)
        )
    except OSError as error:
        status = _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE
        raise CliError(
            f"cannot run {command[0]!r}: {error.strerror or error}",
            "D6006",
            exit_code=status,
            tries=("give the path of a program: --exec ./work.sh",),
        ) from None
    status = 1
    try:
        await _feed(process, message.body)
        status = await process.wait()
    except BaseException:
        # Ctrl-C, or the message is lost: the command must not run on.
        with CancelScope(shield=True):
            process.terminate()
            await process.wait()
        raise
    return status if status >= 0 else 128 - status


async def _feed(process: "Process", body: bytes) -> None:
    from anyio import BrokenResourceError, ClosedResourceError

    assert process.stdin is not None
    try:
        if body:
            await process.stdin.send(body)
    except (BrokenResourceError, ClosedResourceError, BrokenPipeError, ConnectionResetError):
        pass  # the command need not read all of its input
    try:
        await process.stdin.aclose()
    except (BrokenResourceError, ClosedResourceError, BrokenPipeError, ConnectionResetError):
        return
