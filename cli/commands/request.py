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
from dep2p.cli.framework.render import headers_json, headers_text, payload, short_peer, table, text_of
from dep2p.cli.framework.resolve import resolve_peer
from dep2p.error_codes import EXIT_FAILED, EXIT_NOT_FOUND, EXIT_OK, EXIT_TIMEOUT
from dep2p.outside_text import one_line, printable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dep2p.client import Client
    from dep2p.errors import Dep2pError
    from dep2p.protocols.messaging.answers import GatherOptions, GatherResult, TopicAnswer
    from dep2p.types import PeerId

AllOption = Annotated[bool, typer.Option("--all", help="Send to every member that is up; then PEER is left out.")]


AnyOption = Annotated[
    bool, typer.Option("--any", help="Ask any member that offers the service NAME; then PEER is left out.")
]


def split_target(words: list[str], everyone: bool) -> tuple[str | None, str, str | None]:
    """``[PEER] NAME [BODY]`` as (peer, name, body); with ``everyone`` there is no PEER. Raises :class:`CliError`."""
    rest = list(words)
    peer = None if everyone or not rest else rest.pop(0)
    if not rest or len(rest) > 2:
        wanted = "NAME [BODY|-]" if everyone else "PEER NAME [BODY|-]"
        if rest:
            raise CliError(f"too many words for {wanted}", "D1001", tries=("quote data that holds spaces",))
        hint = "with --all and --any there is no PEER" if everyone else "with --all for every member, without PEER"
        raise CliError(f"NAME is missing: give {wanted}", "D1001", tries=(hint,))
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


RequestWordsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        help="The peer (an id or abbreviation; left out with --all and --any), the name, and the payload as text or - "
        "for standard input. With --topic only the payload.",
        metavar="PEER NAME [BODY|-]",
    ),
]


def request(
    run: Invocation,
    words: RequestWordsArgument = None,
    file: FileOption = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            "-t",
            help="Seconds to wait for the answer, 30 by default; with --topic for all answers, 2 by default.",
            min=0.001,
            max=86_400,
        ),
    ] = None,
    idempotent: Annotated[
        bool,
        typer.Option("--idempotent", help="Handling it twice does no harm: it may be tried again after a failure."),
    ] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Write the answer's bytes and nothing else.")] = False,
    everyone: AllOption = False,
    anyone: AnyOption = False,
    topic: Annotated[
        str | None,
        typer.Option("--topic", help="Ask the subscribers of this topic; then there is no PEER and no NAME."),
    ] = None,
    quorum: Annotated[
        int | None,
        typer.Option("--quorum", help="With --topic: end when so many have answered.", min=1, max=4_096),
    ] = None,
    group: Annotated[str | None, typer.Option("--group", help="With --any: only offers of this group.")] = None,
    version: Annotated[str | None, typer.Option("--version", help="With --any: only offers of this version.")] = None,
    schema: Annotated[str | None, typer.Option("--schema", help="With --any: only offers of this schema.")] = None,
    headers: HeaderOption = None,
    realm: RealmOption = None,
) -> int:
    """Send a request to a peer and print its answer."""
    if everyone and anyone:
        raise CliError("--all and --any exclude each other", "D1001")
    if not anyone and any(option is not None for option in (group, version, schema)):
        raise CliError("--group, --version and --schema choose among the offers of a service: add --any", "D1001")
    if topic is not None:
        if everyone or anyone or idempotent:
            raise CliError("--topic goes without --all, --any and --idempotent", "D1001")
        if words and len(words) > 1:
            raise CliError("with --topic there is no PEER and no NAME, only [BODY|-]", "D1001")
        content = read_payload(words[0] if words else None, file)
        options: GatherOptions = {"quorum": quorum, "headers": read_headers(headers)}
        if timeout is not None:
            options["timeout_s"] = timeout
        return _gather(run, topic, content, realm, options, raw=raw)
    if quorum is not None:
        raise CliError("--quorum is for the answers to a topic: add --topic", "D1001")
    timeout = 30.0 if timeout is None else timeout
    peer_text, name, data = split_target(words or [], everyone or anyone)
    content = read_payload(data, file)
    app_headers = read_headers(headers)

    async def body(client: "Client") -> int:
        if anyone:
            found = await client.request_any(
                name,
                content,
                realm=realm,
                timeout_s=timeout,
                idempotent=idempotent,
                headers=app_headers,
                group=group,
                version=version,
                schema=schema,
            )
            if run.json:
                run.emit({"name": name} | payload(found))
            else:
                show_payload(run, found, raw=raw)
            return EXIT_OK
        if peer_text is None:
            return _show_results(
                run,
                await client.broadcast_request(
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


def _gather(
    run: Invocation, topic: str, content: bytes, realm: str | None, options: "GatherOptions", *, raw: bool
) -> int:
    async def body(client: "Client") -> int:
        async with client.gather(topic, content, realm=realm, **options) as answers:
            async for answer in answers:
                _show_answer(run, answer, raw=raw)
            result = answers.result()
        return _end_gather(run, result, options.get("quorum"))

    return run.with_client(body)


def _show_answer(run: Invocation, answer: "TopicAnswer", *, raw: bool) -> None:
    peer = str(answer.peer)
    if run.json:
        fields: dict[str, object] = {"peer": peer, "ok": not answer.is_error}
        if answer.headers:
            fields["headers"] = headers_json(dict(answer.headers))
        run.emit(fields | (payload(answer.body) if answer.error is None else {"error": answer.error}))
    elif answer.error is not None:
        run.warn(f"{short_peer(peer)} cannot answer: {one_line(answer.error)}")
    else:
        if not raw:
            run.say(f"from {short_peer(peer)}{headers_text(dict(answer.headers))}")
        show_payload(run, answer.body, raw=raw)


def _end_gather(run: Invocation, result: "GatherResult", quorum: int | None) -> int:
    answered, missing = len(result.answered), [str(peer) for peer in result.missing]
    is_short = not result.has_quorum or not answered
    if run.json:
        run.emit(
            {
                "answered": answered,
                "failed": len(result.failed),
                "missing": missing,
                "has_quorum": result.has_quorum,
                "refused": dict(result.refused),
            }
        )
    else:
        wanted = "" if quorum is None else f" of {quorum}"
        silent = f"; no answer from {', '.join(map(short_peer, missing))}" if missing else ""
        say = run.warn if is_short else run.say
        say(f"{answered}{wanted} answered{silent}")
    return EXIT_TIMEOUT if is_short else EXIT_OK


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
    if not results:
        return EXIT_NOT_FOUND  # as a publish that finds no subscriber
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
            ("dep2p request --any resize --file photo.jpg --raw --idempotent", "any member that offers it"),
            ("dep2p request --topic inventory screws --quorum 3 --timeout 2", "subscribers of a topic; 3 are enough"),
        ],
        notes="With --topic answers are printed as they come; the exit status is that of a timeout when fewer than "
        "--quorum members have answered in time, or none has. "
        "With --all the exit status is 1 when any member failed, and 4 when no other member is up.",
    )(request)
    command(
        app,
        "notify",
        examples=[
            ("dep2p notify f3Qa news 'lunch is ready'", "to one peer"),
            ("dep2p notify --all news - < bulletin.txt", "to every member"),
        ],
        notes="The command ends when the message is on its way; that says nothing about whether a program listens. "
        "With --all the exit status is 4 when no other member is up.",
    )(notify)
