"""``dep2p send`` and ``dep2p outbox``: reliable messages, and those that wait."""

from typing import TYPE_CHECKING, Annotated

import typer

from dep2p.cli.framework.command import Invocation, command, group
from dep2p.cli.framework.errors import CliError
from dep2p.cli.framework.payloads import FileOption, HeaderOption, RealmOption, check_name, read_headers, read_payload
from dep2p.cli.framework.quantities import parse_seconds
from dep2p.cli.framework.render import byte_count, duration, short_peer, table
from dep2p.cli.framework.resolve import resolve_peer
from dep2p.error_codes import EXIT_FAILED, EXIT_OK
from dep2p.outside_text import printable

if TYPE_CHECKING:
    from dep2p.client import Client

ReliableOption = Annotated[
    bool, typer.Option("--reliable", help="Keep it until the handler there has taken it, across restarts.")
]
WaitOption = Annotated[
    float,
    typer.Option(
        "--timeout",
        "-t",
        help="Seconds to wait for the acknowledgement of a reliable message; the daemon goes on trying. 0: accepted is "
        "enough.",
        min=0.0,
        max=86_400.0,
    ),
]
TtlOption = Annotated[
    str | None,
    typer.Option(
        "--ttl",
        help="A reliable message expires after this, like 30s, 12h or 7d, at most 30d; 5m by default "
        "(delivery_age_max_s).",
        metavar="TIME",
    ),
]
FailedOption = Annotated[bool, typer.Option("--failed", help="Those that failed or expired, with the reason.")]
AllOption = Annotated[bool, typer.Option("--all", help="All messages.")]


def parse_ttl(ttl: str | None, *, reliable: bool) -> float | None:
    """Return ``--ttl`` in seconds. Raises :class:`CliError` for one out of range, or without ``--reliable``."""
    if ttl is None:
        return None
    if not reliable:
        cause = "--ttl is for reliable messages: others are sent now or not at all"
        raise CliError(cause, "D1001", tries=("the same with --reliable",))
    ttl_s = parse_seconds(ttl, "--ttl")
    if not 0.001 <= ttl_s <= 30 * 86_400:
        raise CliError(f"--ttl {printable(ttl)!r} is out of range: from 1ms to 30d", "D1001")
    return ttl_s


def send(
    run: Invocation,
    peer: Annotated[str, typer.Argument(help="A member's peer id, or the end of it.", metavar="PEER")],
    name: Annotated[str, typer.Argument(help="The name of the notifies that the peer listens to.", metavar="NAME")],
    data: Annotated[
        str | None, typer.Argument(help="The message as text; - reads standard input.", metavar="[BODY|-]")
    ] = None,
    file: FileOption = None,
    reliable: ReliableOption = False,
    timeout: WaitOption = 30.0,
    ttl: TtlOption = None,
    headers: HeaderOption = None,
    realm: RealmOption = None,
) -> int:
    """Send a message to a peer; --reliable: it is taken once, or this says why not and whether it may have been."""
    check_name(name)
    content = read_payload(data, file)
    fields = read_headers(headers)
    ttl_s = parse_ttl(ttl, reliable=reliable)

    async def body(client: "Client") -> int:
        from anyio import move_on_after

        target = await resolve_peer(client, peer)
        if not reliable:
            await client.notify(target, name, content, realm=realm, headers=fields)
            if run.json:
                run.emit({"peer": target, "name": name, "sent": True})
            else:
                run.say(f"sent {byte_count(len(content))} to {short_peer(target)}")
            return EXIT_OK
        sent = await client.send(target, name, content, reliable=True, realm=realm, headers=fields, ttl_s=ttl_s)
        with move_on_after(timeout):
            await sent.wait()
        if run.json:
            run.emit({"id": sent.id, "peer": sent.peer, "name": name, "state": sent.state, "tries": sent.tries})
        elif sent.state == "acknowledged":
            run.say(f"{short_peer(target)} has taken {byte_count(len(content))}")
        else:
            run.say(f"{short_peer(target)} has not acknowledged yet ({sent.state}): the daemon goes on trying")
            run.say("see what waits: dep2p outbox ls")
        return EXIT_OK

    return run.with_client(body)


def ls(run: Invocation, failed: FailedOption = False, realm: RealmOption = None) -> None:
    """List the reliable messages that wait for their acknowledgement, or those that were lost."""

    async def body(client: "Client") -> None:
        found = await client.outbox.listing(failed=failed, realm=realm)
        if run.json:
            run.emit(found)
            return
        if found.lost and not failed:
            run.warn(f"{_messages(found.lost)} failed or expired: dep2p outbox ls --failed")
        if not found.items:
            run.say("nothing was lost" if failed else "nothing waits")
            return
        rows = [
            [
                f"{short_peer(item.peer)}:{item.id.rpartition(':')[2]}",
                printable(item.topic or item.name),
                item.state,
                byte_count(item.size_bytes),
                str(item.tries),
                duration(item.age_s),
                printable(item.last_error)[: 200 if failed else 60],
            ]
            for item in found.items
        ]
        if failed:
            # Tries are those of a message that waits.
            rows = [
                [*row[:4], row[5], "maybe" if item.may_have_been_taken else "no", row[6]]
                for row, item in zip(rows, found.items, strict=True)
            ]
            run.print(table(["ID", "NAME", "STATE", "SIZE", "AGE", "TAKEN", "REASON"], rows))
            if any(item.may_have_been_taken for item in found.items):
                run.say("TAKEN maybe: it was sent and not acknowledged; sent again, its handler may get it twice")
            run.say("send them again: dep2p outbox replay --all")
        else:
            run.print(table(["ID", "NAME", "STATE", "SIZE", "TRIES", "AGE", "LAST ERROR"], rows))
        if not found.is_durable:
            run.say("these are in memory only: they end with the daemon")

    run.with_client(body)


def flush(
    run: Invocation,
    timeout: Annotated[float, typer.Option("--timeout", "-t", help="Seconds to wait.", min=0.0, max=86_400.0)] = 30.0,
    realm: RealmOption = None,
) -> int:
    """Try every receiver again now, and wait until nothing is left."""

    async def body(client: "Client") -> int:
        left = await client.outbox.flush(timeout_s=timeout, realm=realm)
        if run.json:
            run.emit({"left": left})
        elif left:
            run.warn(f"{_messages(left)} still wait: dep2p outbox ls")
        else:
            run.say("nothing waits")
        return EXIT_FAILED if left else EXIT_OK

    return run.with_client(body)


def drop(
    run: Invocation,
    ids: Annotated[
        list[str] | None, typer.Argument(help="Ids as in `dep2p outbox ls`, whole or abbreviated.", metavar="[ID…]")
    ] = None,
    peer: Annotated[str | None, typer.Option("--peer", help="All messages for this peer.", metavar="PEER")] = None,
    everything: AllOption = False,
    failed: Annotated[
        bool, typer.Option("--failed", help="Forget messages that failed or expired, and leave those that wait.")
    ] = False,
    realm: RealmOption = None,
) -> int:
    """Give up messages: they end as failed, and are not delivered."""
    _check_choice(ids, peer, everything)

    async def body(client: "Client") -> int:
        dropped = 0
        give_up = client.outbox.forget_lost if failed else client.outbox.drop
        if everything:
            dropped = await give_up(realm=realm)
        elif peer is not None:
            dropped = await give_up(peer=await resolve_peer(client, peer), realm=realm)
        else:
            listed = [item.id for item in (await client.outbox.listing(failed=failed, realm=realm)).items]
            for found in dict.fromkeys([_find(given, listed, lost=failed) for given in ids or ()]):
                dropped += await give_up(found, realm=realm)
        if run.json:
            run.emit({"dropped": dropped})
        elif dropped:
            run.say(f"dropped {_messages(dropped)}")
        else:
            run.say("nothing was lost" if failed else "nothing waits")
        return EXIT_OK if dropped else EXIT_FAILED

    return run.with_client(body)


def replay(
    run: Invocation,
    ids: Annotated[
        list[str] | None,
        typer.Argument(help="Ids as in `dep2p outbox ls --failed`, whole or abbreviated.", metavar="[ID…]"),
    ] = None,
    peer: Annotated[str | None, typer.Option("--peer", help="All messages for this peer.", metavar="PEER")] = None,
    everything: AllOption = False,
    realm: RealmOption = None,
) -> int:
    """Send messages again that failed or expired: each is a new message."""
    _check_choice(ids, peer, everything)

    async def body(client: "Client") -> int:
        replayed = 0
        if everything:
            replayed = await client.outbox.replay(realm=realm)
        elif peer is not None:
            replayed = await client.outbox.replay(peer=await resolve_peer(client, peer), realm=realm)
        else:
            lost = [item.id for item in (await client.outbox.listing(failed=True, realm=realm)).items]
            for found in dict.fromkeys([_find(given, lost, lost=True) for given in ids or ()]):
                replayed += await client.outbox.replay(found, realm=realm)
        if run.json:
            run.emit({"replayed": replayed})
        elif replayed:
            run.say(f"accepted {_messages(replayed)} again: dep2p outbox ls")
        else:
            run.say("nothing was lost")
        return EXIT_OK if replayed else EXIT_FAILED

    return run.with_client(body)


def _check_choice(ids: list[str] | None, peer: str | None, everything: bool) -> None:
    if sum((bool(ids), peer is not None, everything)) != 1:
        raise CliError("give ids, --peer PEER or --all: one of the three", "D1001", tries=("dep2p outbox ls",))


def _messages(count: int) -> str:
    return f"{count} {'message' if count == 1 else 'messages'}"


def _find(given: str, ids: list[str], *, lost: bool) -> str:
    """Return the whole id: ``12D3KooW…abcd:7``, ``abcd:7`` and ``7`` stand for an id with that end and that whole
    number.

    Raises :class:`CliError`.
    """
    peer, _colon, number = given.rpartition("…")[2].rpartition(":")
    found = [each for each in ids if each.endswith(f":{number}") and each.rpartition(":")[0].endswith(peer)]
    if len(found) != 1:
        listing = "dep2p outbox ls --failed" if lost else "dep2p outbox ls"
        fits = "several ids" if found else f"no id of a message that {'was lost' if lost else 'waits'}"
        text = f"{printable(given)!r} is the end of {fits}: give PEER:NUMBER, or more of it, as `{listing}` shows it"
        raise CliError(text, "D1001", tries=(listing,))
    return found[0]


def register(app: typer.Typer) -> None:
    """Add ``send`` and ``outbox``."""
    command(
        app,
        "send",
        examples=[
            ("dep2p send bob orders '{\"id\": 7}' --reliable", "waits until bob's handler has taken it"),
            ("dep2p send bob orders --file big.json --reliable --timeout 0", "accepted is enough: on disk, sent later"),
        ],
        notes="The handler is that of notifies of this name (`dep2p listen NAME`, node.on_notify). A reliable message "
        "is kept in the outbox of the daemon, on disk, until the receiver's handler has returned; at most 5 minutes, "
        "or --ttl. One that fails or expires is in `dep2p outbox ls --failed`. "
        "It comes once, also when a connection is lost or either daemon is killed; docs/howto/delivery.md says what "
        "exactly is promised. Without --reliable this is `dep2p notify`.",
    )(send)
    box = group(app, "outbox", "Reliable messages that wait for their acknowledgement.")
    command(
        box,
        "ls",
        examples=[
            ("dep2p outbox ls", "the waiting messages, their receivers and errors"),
            ("dep2p outbox ls --failed", "those that failed or expired, each with its reason"),
        ],
    )(ls)
    command(box, "flush", examples=[("dep2p outbox flush --timeout 60", "tries every peer again now")])(flush)
    command(
        box,
        "replay",
        examples=[
            ("dep2p outbox replay 12D3KooW…abcd:7", "one message that failed or expired"),
            ("dep2p outbox replay --peer bob", "all for one peer"),
        ],
        notes="A message that failed or expired is kept with its reason, at most 1,000 of them and 16 MiB.",
    )(replay)
    command(
        box,
        "drop",
        examples=[
            ("dep2p outbox drop 12D3KooW…abcd:7", "one message"),
            ("dep2p outbox drop --peer bob", "all for one peer"),
            ("dep2p outbox drop --all", "all"),
        ],
    )(drop)
