"""``dep2p subscribe``: print the messages of a topic as they come, or keep each in a file."""

import contextlib
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from dep2p.cli.commands.publish import PublicOption
from dep2p.cli.framework.command import Invocation, command
from dep2p.cli.framework.errors import CliError
from dep2p.cli.framework.payloads import RealmOption, show_payload
from dep2p.cli.framework.render import byte_count, headers_json, headers_text, payload, short_peer
from dep2p.outside_text import file_name, printable

if TYPE_CHECKING:
    from dep2p.client import Client
    from dep2p.gossipsub.topic_types import OnFull, TopicMessage

_POLICIES: Final[dict[str, "OnFull"]] = {"drop-oldest": "drop_oldest", "drop-newest": "drop_newest", "pause": "pause"}
_ID_DIGITS_MAX: Final = 32


def subscribe(
    run: Invocation,
    topic: Annotated[
        str, typer.Argument(help="The topic's name, or a pattern: sensors.*.temp, 'sensors.>'.", metavar="TOPIC")
    ],
    count: Annotated[int | None, typer.Option("--count", "-n", help="End after so many.", min=1)] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Write the messages' bytes and nothing else.")] = False,
    nul: Annotated[bool, typer.Option("-0", "--null", help="End each message with a NUL byte.")] = False,
    dump: Annotated[
        Path | None,
        typer.Option("--dump", help="Write each message to a new file in this directory.", metavar="DIR"),
    ] = None,
    on_full: Annotated[
        str,
        typer.Option(
            "--on-full",
            help="When this command reads too slowly: drop-oldest, drop-newest, or pause, which holds back the "
            "node's neighbours.",
            metavar="POLICY",
        ),
    ] = "drop-oldest",
    buffer: Annotated[
        int,
        typer.Option("--buffer", help="Messages that wait in the daemon for this command.", min=1, max=65_536),
    ] = 1_024,
    group: Annotated[
        str | None,
        typer.Option(
            "--group",
            help="Share the messages with all subscribers of this group, on every member: each goes to one of them.",
            metavar="NAME",
        ),
    ] = None,
    realm: RealmOption = None,
    public: PublicOption = False,
) -> None:
    """Print the messages of a topic as they come."""
    if raw + nul + (dump is not None) > 1:
        raise CliError("--raw, -0 and --dump exclude each other", "D1001")
    policy = _POLICIES.get(on_full.replace("_", "-"))
    if policy is None:
        raise CliError(f"--on-full {on_full!r} is none of {', '.join(_POLICIES)}", "D1001")
    if dump is not None:
        dump.mkdir(parents=True, exist_ok=True)

    async def body(client: "Client") -> None:
        seen = 0
        from dep2p.gossipsub.topic_types import Lagged, MatchedTopicsFull

        async with client.subscribe(
            topic, on_full=policy, group=group, realm=realm, public=public, buffer_items=buffer
        ) as messages:
            run.say(f"waiting for messages of {topic!r}; Ctrl-C ends")
            async for message in messages:
                if isinstance(message, MatchedTopicsFull):
                    _report_full(run, message.topics, message.topics_max)
                    continue
                if isinstance(message, Lagged):
                    if message.count:  # `run` reports interruptions
                        _report_gap(run, message.count)
                    continue
                seen += 1
                _show(run, message, seen, dump, raw=raw, nul=nul)
                if seen == count:
                    return

    run.with_client(body)


def _report_full(run: Invocation, topics: int, topics_max: int) -> None:
    if run.json:
        run.emit({"topics_not_joined": topics, "topics_max": topics_max})
    else:
        run.warn(
            f"{topics} more topics match and are not joined: the node is in at most {topics_max} for patterns "
            "(pubsub_matched_topics_max in [limits])"
        )


def _report_gap(run: Invocation, lagged: int) -> None:
    if run.json:
        run.emit({"lagged": lagged})
    else:
        run.warn(f"lagged: {lagged} messages were dropped, because this reader was too slow")


def _show(run: Invocation, message: "TopicMessage", number: int, dump: Path | None, *, raw: bool, nul: bool) -> None:
    sender = None if message.sender is None else str(message.sender)
    file = None if dump is None else write_new(dump, f"{number:06}-{message.id.hex()[:_ID_DIGITS_MAX]}", message.body)
    if run.json:
        fields: dict[str, object] = {
            "topic": message.topic,
            "sender": sender,
            "seqno": message.seqno,
            "id": message.id.hex(),
            "received_from": message.received_from,
            "received_at_s": message.received_at_s,
        }
        if message.headers:
            fields["headers"] = headers_json(message.headers)
        if message.wants_answer:
            fields["wants_answer"] = True
        run.emit(fields | (payload(message.body) if file is None else {"file": str(file), "bytes": len(message.body)}))
    elif file is not None:
        run.print(printable(str(file)))
    else:
        if not raw and not nul:
            author = "" if sender is None else f" from {short_peer(sender)}"
            headers = headers_text(message.headers)
            asks = "  wants an answer" if message.wants_answer else ""
            run.say(f"[#{number}] {printable(message.topic)}{author}  {byte_count(len(message.body))}{headers}{asks}")
        show_payload(run, message.body, raw=raw, nul=nul)


def write_new(directory: Path, stem: str, data: bytes) -> Path:
    """Write a whole file at once, under a name that did not exist. Raises :class:`CliError`."""
    stem = file_name(stem)
    partial = directory / f".{stem}.{secrets.token_hex(4)}.part"
    try:
        try:
            with partial.open("xb") as opened:
                opened.write(data)
            attempt = 0
            while True:
                path = directory / (f"{stem}.msg" if attempt == 0 else f"{stem}-{attempt}.msg")
                try:
                    os.link(partial, path)  # unlike a rename, it never replaces another file
                except FileExistsError:
                    attempt += 1
                else:
                    return path
        finally:
            with contextlib.suppress(FileNotFoundError):
                partial.unlink()
    except OSError as error:
        raise CliError(f"cannot write into {directory}: {error.strerror or error}", "D6006") from None


def register(app: typer.Typer) -> None:
    """Add ``subscribe``."""
    command(
        app,
        "subscribe",
        waits=True,
        examples=[
            ("dep2p subscribe chat", "each message on a line of its own; who wrote it on stderr"),
            ("dep2p subscribe 'sensors.*.temp'", "every topic that matches: * is one token between dots"),
            ("dep2p subscribe 'sensors.>' --json", "> is the rest: sensors.hall, sensors.hall.temp and so on"),
            ("dep2p subscribe jobs --group workers", "each message goes to one subscriber of the group"),
            ("dep2p subscribe chat --json | jq -r .text", "one JSON object per line"),
            ("dep2p subscribe jobs -0 | xargs -0 -n1 ./run-job", "messages that hold line ends"),
            ("dep2p subscribe photos --dump inbox", "one new file per message; prints its name"),
            ("dep2p subscribe done --count 1 --raw", "waits for one"),
        ],
        notes="Quote a pattern: a shell reads * and > itself. Its topics are joined when they appear, with their first "
        "message. Messages come from now on, each once. When the command reads too "
        "slowly, a bounded number waits (--buffer, and 8 MiB); more is dropped as --on-full says, and the command says "
        "how many. The daemon leaves a topic without readers after a minute.",
    )(subscribe)
