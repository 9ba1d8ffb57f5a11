"""``dep2p queue put``: publish messages, each durable before the command says so."""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypedDict

import typer

from dep2p.cli.commands.publish import fill, stdin_lines
from dep2p.cli.commands.queue.options import QueueArgument, QueueTarget, with_target
from dep2p.cli.framework.command import Invocation
from dep2p.cli.framework.errors import CliError
from dep2p.cli.framework.payloads import read_payload
from dep2p.cli.framework.progress import Progress
from dep2p.cli.framework.quantities import parse_seconds
from dep2p.cli.framework.render import byte_count, duration
from dep2p.outside_text import printable

if TYPE_CHECKING:
    from dep2p.client import Client


class PutOptions(TypedDict):
    """The options of all messages of one command."""

    key: str
    tags: tuple[str, ...]
    priority: int
    delay_s: float


@with_target
def put(
    run: Invocation,
    queue: QueueArgument,
    bodies: Annotated[
        list[str] | None,
        typer.Argument(
            help="Messages as text, each argument one; - reads standard input as one message.", metavar="[BODY|-]..."
        ),
    ] = None,
    files: Annotated[
        list[Path] | None,
        typer.Option("--file", "-f", help="A file as one message; may be repeated.", metavar="FILE"),
    ] = None,
    lines: Annotated[bool, typer.Option("--lines", help="Each line of standard input is a message.")] = False,
    count: Annotated[
        int | None,
        typer.Option(
            "--count",
            "-n",
            help="Put BODY so many times, with {{n}} (1, 2, …), {{time}} and {{random}} in it replaced.",
            min=1,
        ),
    ] = None,
    delay: Annotated[
        str, typer.Option("--delay", help="Deliver it after this time, like 30, 10m or 2h.", metavar="TIME")
    ] = "0",
    key: Annotated[
        str, typer.Option("--key", help="Messages of one key go to one partition, in order.", metavar="KEY")
    ] = "",
    tags: Annotated[
        list[str] | None, typer.Option("--tag", help="A tag for channels that filter; may be repeated.", metavar="TAG")
    ] = None,
    priority: Annotated[int, typer.Option("--priority", help="Higher is delivered first.", min=0, max=9)] = 0,
    *,
    at: QueueTarget,
) -> None:
    """Put messages into a queue. The command ends when they are on the disk of the node that keeps it."""
    if sum((bool(bodies), bool(files), lines)) > 1:
        raise CliError("BODY, --file and --lines exclude each other", "D1001")
    if count is not None and (not bodies or len(bodies) != 1 or bodies[0] == "-"):
        raise CliError(
            "--count needs one BODY to repeat", "D1001", tries=("dep2p queue put QUEUE 'job {{n}}' --count 5",)
        )
    if not bodies and not files and not lines:
        raise CliError(
            "there is nothing to put: give BODY, --file or --lines",
            "D1001",
            tries=("dep2p queue put QUEUE 'a message'", "dep2p queue put QUEUE - < FILE"),
        )
    options: PutOptions = {
        "key": key,
        "tags": tuple(tags or ()),
        "priority": priority,
        "delay_s": parse_seconds(delay, "--delay"),
    }
    if not lines and count is None and len(bodies or files or ()) == 1:
        content = read_payload(bodies[0] if bodies else None, files[0] if files else None)
        return run.with_client(lambda client: _one(run, client, queue, content, options, at))
    source = _PutSource(bodies or (), files or (), lines, count, Progress("put", 0, shown=False))
    return run.with_client(lambda client: _many(run, client, queue, source, options, at))


async def _one(
    run: Invocation,
    client: "Client",
    queue: str,
    content: bytes,
    options: PutOptions,
    at: QueueTarget,
) -> None:
    queues = await at.queues(client)
    message_id = await queues.publish(queue, content, **options)
    if run.json:
        run.emit({"queue": queue, "id": message_id, "bytes": len(content)})
    else:
        run.say(f"put {byte_count(len(content))} into {printable(queue)} as {message_id}")


async def _many(
    run: Invocation,
    client: "Client",
    queue: str,
    source: "_PutSource",
    options: PutOptions,
    at: QueueTarget,
) -> None:
    started_s = time.monotonic()
    queues = await at.queues(client)
    source.start(shown=not run.quiet and not run.json)
    try:
        async with aclosing(source.messages()) as messages:
            result = await queues.publish_from(queue, messages, **options)
    finally:
        source.progress.clear()
    elapsed_s = time.monotonic() - started_s
    if run.json:
        run.emit(
            {
                "queue": queue,
                "messages": result.messages,
                "bytes": result.bytes,
                "first_id": result.first_id,
                "last_id": result.last_id,
                "elapsed_s": round(elapsed_s, 3),
            }
        )
    else:
        rate = result.messages / max(elapsed_s, 1e-6)
        run.say(
            f"put {result.messages} messages ({byte_count(result.bytes)}) into {printable(queue)} "
            f"in {duration(elapsed_s)}, {rate:,.0f} a second"
        )


class _PutSource:
    """The source of many messages."""

    def __init__(
        self, texts: Sequence[str], files: Sequence[Path], lines: bool, count: int | None, progress: Progress
    ) -> None:
        self._texts = texts
        self._files = files
        self._lines = lines
        self._count = count
        self.progress = progress

    def start(self, *, shown: bool) -> None:
        """Start the progress display, where the size is known."""
        if not self._lines:
            total = self._count or len(self._texts) or len(self._files)
            self.progress = Progress("put", total, shown=shown, unit="messages")

    async def messages(self) -> AsyncGenerator[bytes, None]:
        """Yield the messages. Raises :class:`CliError` for a file that cannot be read."""
        async with aclosing(self._all()) as messages:
            async for message in messages:
                yield message
                self.progress.add(1)

    async def _all(self) -> AsyncGenerator[bytes, None]:
        if self._lines:
            async with aclosing(stdin_lines()) as lines:
                async for line in lines:
                    yield line
        elif self._count is not None:
            for number in range(1, self._count + 1):
                yield fill(self._texts[0], number)
        else:
            for text in self._texts:
                yield read_payload(text, None)
            for file in self._files:
                yield read_payload(None, file)
