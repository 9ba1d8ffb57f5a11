"""``dep2p publish``: send messages to a topic, one or a stream of them."""

import os
import secrets
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from dep2p.cli.commands.send import ReliableOption, TtlOption, WaitOption, parse_ttl
from dep2p.cli.framework.command import Invocation, command
from dep2p.cli.framework.errors import CliError
from dep2p.cli.framework.payloads import PAYLOAD_BYTES_MAX, HeaderOption, RealmOption, read_headers, read_payload
from dep2p.cli.framework.render import byte_count, duration, short_peer
from dep2p.cli.framework.resolve import resolve_peer
from dep2p.error_codes import EXIT_FAILED, EXIT_OK
from dep2p.outside_text import printable

if TYPE_CHECKING:
    from dep2p.client import Client
    from dep2p.gossipsub.topic_types import OnNoPeers

_READ_BYTES: Final = 65_536
_ON_NO_PEERS: Final[dict[str, "OnNoPeers"]] = {"error": "error", "queue": "queue", "ok": "ok"}
_NOT_ENDED: Final = ("created", "sending", "delivered", "retrying")
"""States of a reliable message that has not ended; an ended one shows its reason."""

TopicArgument = Annotated[str, typer.Argument(help="The topic's name.", metavar="TOPIC")]
PublicOption = Annotated[
    bool, typer.Option("--public", help="On libp2p's public network, when the daemon speaks it, instead of a realm.")
]


def publish(
    run: Invocation,
    topic: TopicArgument,
    data: Annotated[
        str | None,
        typer.Argument(help="The message as text; - reads standard input as one message.", metavar="[BODY|-]"),
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
            help="Publish BODY so many times, with {{n}} (1, 2, …), {{time}} and {{random}} in it replaced.",
            min=1,
        ),
    ] = None,
    interval: Annotated[
        float, typer.Option("--interval", "-i", help="Seconds between two messages.", min=0.0, max=86_400.0)
    ] = 0.0,
    on_no_peers: Annotated[
        str,
        typer.Option(
            "--on-no-peers",
            help="While no peer is subscribed: error; queue, to wait 30 s for a first one; or ok.",
            metavar="WHAT",
        ),
    ] = "error",
    header: HeaderOption = None,
    reliable: ReliableOption = False,
    critical: Annotated[
        list[str] | None,
        typer.Option(
            "--critical",
            help="With --reliable: a peer whose app must have handled the message; may be repeated. By default who is "
            "subscribed.",
            metavar="PEER",
        ),
    ] = None,
    any_: Annotated[bool, typer.Option("--any", help="With --reliable: one critical peer is enough.")] = False,
    timeout: WaitOption = 30.0,
    ttl: TtlOption = None,
    realm: RealmOption = None,
    public: PublicOption = False,
) -> int:
    """Publish messages to a topic; every subscriber in the realm gets them."""
    policy = _ON_NO_PEERS.get(on_no_peers)
    if policy is None:
        raise CliError(f"--on-no-peers {on_no_peers!r} is none of {', '.join(_ON_NO_PEERS)}", "D1001")
    given = [data is not None and not (lines and data == "-"), bool(files), lines]
    if sum(given) > 1:
        raise CliError("BODY, --file and --lines exclude each other", "D1001")
    if not any(given) and count is None and data is None:
        raise CliError(
            "nothing to publish: give BODY ('' is an empty message), - or --lines for standard input, or --file",
            "D1001",
            tries=("dep2p publish TOPIC 'hello'", "… | dep2p publish TOPIC --lines"),
        )
    if count is not None and (data is None or data == "-"):
        raise CliError(
            "--count needs BODY to repeat", "D1001", tries=("dep2p publish TOPIC 'message {{n}}' --count 5",)
        )
    headers = read_headers(header)
    ttl_s = parse_ttl(ttl, reliable=reliable)
    if reliable:
        if lines or count is not None or len(files or ()) > 1 or public:
            raise CliError("--reliable takes one message, in a realm", "D1001")
        content = read_payload(data, files[0] if files else None)
        wanted = _Critical(critical or [], "any" if any_ else "all", timeout, ttl_s, realm, headers)
        return run.with_client(lambda client: _reliably(run, client, topic, content, wanted))
    if critical or any_:
        raise CliError("--critical and --any go with --reliable", "D1001")
    place = _Place(realm, public, policy, headers)
    if lines or count is not None or len(files or ()) > 1:
        source = _PublishSource(data or "", files or (), lines, count, interval)
        return run.with_client(lambda client: _many(run, client, topic, source, place))
    content = read_payload(data, files[0] if files else None)
    return run.with_client(lambda client: _one(run, client, topic, content, place))


async def _one(run: Invocation, client: "Client", topic: str, content: bytes, place: "_Place") -> int:
    result = await client.publish(
        topic,
        content,
        realm=place.realm,
        public=place.public,
        on_no_peers=place.on_no_peers,
        headers=place.headers,
    )
    if run.json:
        run.emit(
            {
                "topic": topic,
                "id": result.id.hex(),
                "sent_to": list(result.sent_to),
                "queued": result.queued,
                "dropped": list(result.dropped),
                "local_subscriptions": result.local_subscriptions,
            }
        )
    elif result.queued:
        run.say(f"queued {byte_count(len(content))}: no peer is subscribed to {printable(topic)} yet")
    else:
        reached = _reached(len(result.sent_to), result.local_subscriptions)
        run.say(f"published {byte_count(len(content))} to {reached}")
    return _exit_code(run, len(result.dropped), len(result.sent_to) + result.local_subscriptions)


@dataclass(frozen=True, slots=True)
class _Place:
    """The network of a topic, what to do while it has no peers, and the headers of what is published."""

    realm: str | None
    public: bool
    on_no_peers: "OnNoPeers"
    headers: dict[str, object] | None


@dataclass(frozen=True, slots=True)
class _Critical:
    """The critical peers of a reliable publish."""

    peers: list[str]
    wait_for: Literal["all", "any"]
    wait_s: float
    ttl_s: float | None
    realm: str | None
    headers: dict[str, object] | None


async def _reliably(run: Invocation, client: "Client", topic: str, content: bytes, wanted: _Critical) -> int:
    from anyio import move_on_after

    peers = [await resolve_peer(client, peer) for peer in wanted.peers] or None
    done = await client.publish_reliably(
        topic,
        content,
        critical_peers=peers,
        wait_for=wanted.wait_for,
        ttl_s=wanted.ttl_s,
        headers=wanted.headers,
        realm=wanted.realm,
    )
    with move_on_after(wanted.wait_s):
        await done.wait()
    enough = bool(done.acknowledged_by) if wanted.wait_for == "any" else not done.missing
    if not wanted.wait_s:  # like `send`, it ends when the message is accepted
        enough = enough or all(why in _NOT_ENDED for why in done.missing.values())
    if run.json:
        run.emit(
            {
                "topic": topic,
                "id": done.result.id.hex(),
                "sent_to": list(done.result.sent_to),
                "acknowledged_by": list(done.acknowledged_by),
                "missing": {str(peer): why for peer, why in done.missing.items()},
            }
        )
    else:
        by = ", ".join(short_peer(peer) for peer in done.acknowledged_by) or (
            "no peer" if wanted.wait_s else "no peer yet"
        )
        run.say(f"published {byte_count(len(content))}; acknowledged by {by}")
        for peer, why in done.missing.items():
            goes_on = "; the daemon goes on trying" if why in _NOT_ENDED else ""
            run.warn(f"{short_peer(peer)}: {why}{goes_on}")
    return EXIT_OK if enough else EXIT_FAILED


async def _many(run: Invocation, client: "Client", topic: str, source: "_PublishSource", place: "_Place") -> int:
    started_s = time.monotonic()
    async with aclosing(source.messages()) as messages:
        result = await client.publish_from(
            topic,
            messages,
            realm=place.realm,
            public=place.public,
            on_no_peers=place.on_no_peers,
            headers=place.headers,
        )
    elapsed_s = time.monotonic() - started_s
    if run.json:
        run.emit(
            {
                "topic": topic,
                "messages": result.messages,
                "bytes": result.bytes,
                "queued": result.queued,
                "dropped": result.dropped,
                "peers": result.peers,
                "local_subscriptions": result.local_subscriptions,
                "elapsed_s": round(elapsed_s, 3),
            }
        )
    else:
        waiting = f", {result.queued} queued until a peer subscribes" if result.queued else ""
        each = _reached(result.peers, result.local_subscriptions)
        reached = f", each to {each} at least" if result.messages > result.queued else ""
        run.say(
            f"published {result.messages} messages ({byte_count(result.bytes)}) in {duration(elapsed_s)}"
            f"{reached}{waiting}"
        )
    return _exit_code(run, result.dropped, result.peers + result.local_subscriptions)


def _reached(peers: int, local_subscriptions: int) -> str:
    neighbours = "1 neighbour" if peers == 1 else f"{peers} neighbours"
    if not local_subscriptions:
        return neighbours
    local = "1 subscription" if local_subscriptions == 1 else f"{local_subscriptions} subscriptions"
    return f"{neighbours} and {local} of this node" if peers else f"{local} of this node"


def _exit_code(run: Invocation, dropped: int, peers: int) -> int:
    if not dropped:
        return EXIT_OK
    if not run.json:
        run.warn(f"dropped {dropped} times: a neighbour is too slow to be waited for; others may bring it the message")
    return EXIT_OK if peers else EXIT_FAILED


class _PublishSource:
    """The source of many messages."""

    def __init__(self, template: str, files: Sequence[Path], lines: bool, count: int | None, interval_s: float) -> None:
        self._template = template
        self._files = files
        self._lines = lines
        self._count = count
        self._interval_s = interval_s

    async def messages(self) -> AsyncGenerator[bytes, None]:
        """Yield the messages, each at its time. Raises :class:`CliError` for a file that cannot be read."""
        from anyio import sleep

        first = True
        async with aclosing(self._all()) as messages:
            async for message in messages:
                if not first and self._interval_s:
                    await sleep(self._interval_s)
                first = False
                yield message

    async def _all(self) -> AsyncGenerator[bytes, None]:
        if self._lines:
            async with aclosing(stdin_lines()) as lines:
                async for line in lines:
                    yield line
        elif self._count is not None:
            for number in range(1, self._count + 1):
                yield fill(self._template, number)
        else:
            for file in self._files:
                yield read_payload(None, file)


def fill(template: str, number: int) -> bytes:
    """The template's text with ``{{n}}``, ``{{time}}`` (UTC) and ``{{random}}`` (16 hex digits) replaced."""
    if "{{" in template:
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        template = template.replace("{{n}}", str(number)).replace("{{time}}", now)
        while "{{random}}" in template:
            template = template.replace("{{random}}", secrets.token_hex(8), 1)
    return os.fsencode(template)


async def stdin_lines() -> AsyncGenerator[bytes, None]:
    """Yield lines of standard input as they come, without their ends. Raises :class:`CliError` for one that is too
    long."""
    rest = bytearray()
    while piece := await _read_stdin():
        rest += piece
        *lines, rest = rest.split(b"\n")
        for line in lines:
            yield bytes(line)
        if len(rest) > PAYLOAD_BYTES_MAX:
            raise CliError(f"a line is over {byte_count(PAYLOAD_BYTES_MAX)}", "D5004")
    if rest:
        yield bytes(rest)


async def _read_stdin() -> bytes:
    from anyio import wait_readable

    stream = sys.stdin.buffer
    try:
        descriptor = stream.fileno()
        await wait_readable(descriptor)
    except OSError:  # a regular file is always readable, and a closed input has no file
        return stream.read(_READ_BYTES)
    return os.read(descriptor, _READ_BYTES)


def register(app: typer.Typer) -> None:
    """Add ``publish``."""
    command(
        app,
        "publish",
        examples=[
            ("dep2p publish chat 'hello everyone'", "one message"),
            ("tail -f app.log | dep2p publish logs --lines", "each line is a message, sent as it comes"),
            ("dep2p publish photos --file a.jpg --file b.jpg", "files, each one message"),
            ("dep2p publish ticks 'tick {{n}} at {{time}}' --count 10 --interval 1", "ten messages, one a second"),
            ("dep2p publish orders 'sold' --header trace=42 --header kind=sale", "headers, which subscribers get too"),
            ("dep2p publish orders 'sold' --reliable --critical bob", "waits until bob's app has handled it"),
            ("dep2p publish chat hi --on-no-peers queue", "waits up to 30 s for a first subscriber"),
        ],
        notes="The command ends when the messages are in the bounded queues of the neighbours that carry them on, and "
        "waits while these are full. While neither a peer nor a program of this node is subscribed nothing is sent "
        "and the exit status is 4. Subscribers "
        "get each message once; a message reaches every peer that is subscribed and connected at the time.",
    )(publish)
