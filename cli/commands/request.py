"""``dep2p request`` and ``dep2p notify``: send something to a peer, or to every member."""

from typing import TYPE_CHECKING, Annotated

import typer

from dep2p.cli.framework.command import Invocation, command
from dep2p.cli.framework.errors import CliError, describe
from dep2p.cli.framework.payloads import (
    FileOption,
    HeaderOption,
    RealmOption,
    check_name,
    read_headers,
    read_payload,
    show_payload,
)
from dep2p.cli.framework.render import payload, short_peer, table, text_of
from dep2p.cli.framework.resolve import resolve_peer
from dep2p.error_codes import EXIT_FAILED, EXIT_OK
from dep2p.outside_text import printable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dep2p.client import Client
    from dep2p.errors import Dep2pError
    from dep2p.types import PeerId

AllOption = Annotated[bool, typer.Option("--all", help="Send to every member that is up; then PEER is left out.")]


def split_target(words: list[str], everyone: bool) -> tuple[str | None, str, str | None]:
    """``[PEER] NAME [BODY]`` as (peer, name, body); with ``everyone`` there is no PEER. Raises :class:`CliError`."""
    rest = list(words)
    peer = None if everyone else rest.pop(0)
    if not rest or len(rest) > 2:
        wanted = "NAME [BODY|-]" if everyone else "PEER NAME [BODY|-]"
        if rest:
            raise CliError(f"too many words for {wanted}", "D1001", tries=("quote data that holds spaces",))
        tries = ("with --all there is no PEER",) if everyone else ("with --all for every member, without PEER",)
        raise CliError(f"NAME is missing: give {wanted}", "D1001", tries=tries)
    check_name(rest[0])
    return peer, rest[0], rest[1] if len(rest) == 2 else None


WordsArgument = Annotated[
    list[str],
    typer.Argument(
        help="The peer (an id or abbreviation; left out with --all), the name, and the payload as text or - for "
        "standard input.",
        metavar="PEER NAME [BODY|-]",
    ),
]


def request(
    run: Invocation,
    words: WordsArgument,
    file: FileOption = None,
    timeout: Annotated[
        float, typer.Option("--timeout", "-t", help="Seconds to wait for the answer.", min=0.001, max=86_400)
    ] = 30.0,
    idempotent: Annotated[
        bool,
        typer.Option("--idempotent", help="Handling it twice does no harm: it may be tried again after a failure."),
    ] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Write the answer's bytes and nothing else.")] = False,
    everyone: AllOption = False,
    headers: HeaderOption = None,
    realm: RealmOption = None,
) -> int:
    """Send a request to a peer and print its answer."""
    peer_text, name, data = split_target(words, everyone)
    content = read_payload(data, file)
    app_headers = read_headers(headers)

    async def body(client: "Client") -> int:
        if peer_text is None:
            return _show_results(
                run,
                await client.broadcast(
                    name, content, realm=realm, timeout_s=timeout, idempotent=idempotent, headers=app_headers
                ),
            )
        peer = await resolve_peer(client, peer_text)
        answer = await client.request(
            peer, name, content, realm=realm, timeout_s=timeout, idempotent=idempotent, headers=app_headers
        )
        if run.json:
            run.emit({"peer": peer, "name": name} | payload(answer))
        else:
            show_payload(run, answer, raw=raw)
        return EXIT_OK

    return run.with_client(body)


def _show_results(run: Invocation, results: "Mapping[PeerId, bytes | Dep2pError | None]") -> int:
    failed = 0
    rows: list[list[str]] = []
    shown: list[dict[str, object]] = []
    for peer, result in results.items():
        if isinstance(result, BaseException):
            failed += 1
            failure = describe(result)
            rows.append([short_peer(str(peer)), "failed", f"{failure.message} ({failure.code})"])
            shown.append({"peer": str(peer), "ok": False, "error": failure.problem()})
        else:
            data = None if result is None else bytes(result)  # None: a notify has no answer
            rows.append([short_peer(str(peer)), "ok", "" if data is None else _one_line(data)])
            shown.append({"peer": str(peer), "ok": True} | ({} if data is None else payload(data)))
    if run.json:
        run.emit({"results": shown, "ok": len(results) - failed, "failed": failed})
    elif not results:
        run.say("no other member is up")
    else:
        run.print(table(["PEER", "RESULT", "ANSWER"], rows))
    return EXIT_FAILED if failed else EXIT_OK


def _one_line(data: bytes) -> str:
    text = text_of(data)
    if text is None:
        return f"{len(data)} B of binary data"
    return printable(text.rstrip("\n")).replace("\n", "\\n")


def notify(
    run: Invocation,
    words: WordsArgument,
    file: FileOption = None,
    everyone: AllOption = False,
    headers: HeaderOption = None,
    realm: RealmOption = None,
) -> int:
    """Send a notify: a message without an answer."""
    peer_text, name, data = split_target(words, everyone)
    content = read_payload(data, file)
    fields = read_headers(headers)

    async def body(client: "Client") -> int:
        if peer_text is None:
            return _show_results(run, dict(await client.broadcast_notify(name, content, realm=realm, headers=fields)))
        peer = await resolve_peer(client, peer_text)
        await client.notify(peer, name, content, realm=realm, headers=fields)
        if run.json:
            run.emit({"peer": peer, "name": name, "sent_bytes": len(content)})
        else:
            run.say(f"sent {len(content)} B to {short_peer(peer)}")
        return EXIT_OK

    return run.with_client(body)


def register(app: typer.Typer) -> None:
    """Add ``request`` and ``notify``."""
    command(
        app,
        "request",
        examples=[
            ("dep2p request 12D3KooW…f3Qa greet ann", "prints the answer"),
            ("dep2p request f3Qa resize --file photo.jpg --raw > small.jpg", "bytes in, bytes out"),
            ("echo '{}' | dep2p request f3Qa query - --timeout 5", "payload from a pipe"),
            ("dep2p request --all version", "every member, one line each"),
        ],
        notes="With --all the exit status is 1 when any member failed.",
    )(request)
    command(
        app,
        "notify",
        examples=[
            ("dep2p notify f3Qa news 'lunch is ready'", "to one peer"),
            ("dep2p notify --all news - < bulletin.txt", "to every member"),
        ],
        notes="The command ends when the message is on its way; that says nothing about whether a program listens.",
    )(notify)
