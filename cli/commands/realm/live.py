"""``dep2p realm ls|members|invite``: what the daemon knows of the realms it is in."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dep2p.cli.commands.realm import files as realm_secrets
from dep2p.cli.framework.command import Invocation, command, group
from dep2p.cli.framework.errors import CliError
from dep2p.cli.framework.render import printable, short_peer, short_realm, table

if TYPE_CHECKING:
    from dep2p.client.client import Client

RealmArgument = Annotated[
    str | None,
    typer.Argument(help="Name, id or start of the id; may be left out when there is only one.", metavar="[REALM]"),
]


async def only_realm(client: "Client", given: str | None) -> str:
    """The realm that is meant. Raises :class:`CliError` when none is named and there is not exactly one."""
    if given is not None:
        return given
    realms = await client.realms()
    if len(realms) == 1:
        return str(realms[0]["realm_id"])
    if not realms:
        raise CliError("the node is in no realm", "D4003", tries=("dep2p realm new NAME", "dep2p realm join INVITE"))
    names = ", ".join(printable(str(realm["name"])) for realm in realms)
    raise CliError(f"the node is in {len(realms)} realms: say which one", "D4003", cause=names)


def list_realms(run: Invocation) -> None:
    """List the realms that the node is in; without a daemon, those in the data directory."""
    from dep2p.client.client import DaemonUnreachableError

    async def body(client: "Client") -> list[dict[str, Any]]:
        return await client.realms()

    try:
        realms = run.with_client(body)
        running = True
    except DaemonUnreachableError:
        realms = [
            {"name": realm.name, "realm_id": realm.realm_id}
            for _, realm in realm_secrets.stored(run.config().realms_dir)
        ]
        running = False
    if run.json:
        run.emit({"realms": realms, "daemon": running})
        return
    if not running:
        run.say("no daemon is running; these realms are in the data directory")
        damaged = realm_secrets.unreadable(run.config().realms_dir)
        if damaged:
            run.warn(
                f"{len(damaged)} realm files cannot be used: {', '.join(map(str, damaged))}; dep2p doctor says why"
            )
    if not realms:
        run.say("no realm yet: `dep2p realm new NAME`, or `dep2p realm join INVITE`")
        return
    rows = [
        [
            printable(str(realm["name"])),
            short_realm(str(realm["realm_id"])),
            str(realm.get("members_known", "-")),
            str(realm.get("members_up", "-")),
        ]
        for realm in realms
    ]
    run.print(table(["REALM", "ID", "OTHERS", "UP"], rows, right=(2, 3)))


def members(
    run: Invocation,
    realm: RealmArgument = None,
    full: Annotated[bool, typer.Option("--full", help="Print whole peer ids.")] = False,
) -> None:
    """List the members of a realm and whether they are up."""

    async def body(client: "Client") -> tuple[str, str, list[dict[str, Any]]]:
        name = await only_realm(client, realm)
        return name, str((await client.status())["peer_id"]), await client.realm_members(name)

    name, own, found = run.with_client(body)
    if run.json:
        run.emit({"realm": name, "members": found})
        return
    rows: list[list[str]] = []
    for member in found:
        peer = str(member["peer"])
        expires = float(member.get("expires_s") or 0)
        rows.append(
            [
                peer if full else short_peer(peer),
                "self" if peer == own else str(member.get("state", "-")),
                datetime.fromtimestamp(expires, UTC).strftime("%Y-%m-%d %H:%M") if expires else "-",
                printable(" ".join(str(addr).partition("/p2p/")[0] for addr in member.get("addrs") or ())) or "-",
            ]
        )
    run.print(table(["PEER", "STATE", "RECORD UNTIL", "ADDRESSES"], rows))


def invite(
    run: Invocation,
    realm: RealmArgument = None,
    addrs: Annotated[
        list[str] | None,
        typer.Option("--addr", help="Address that the invited dial; may be repeated. By default this node's own."),
    ] = None,
) -> None:
    """Print one line that lets somebody join: it holds the secret and this node's addresses."""

    async def body(client: "Client") -> tuple[str, str]:
        name = await only_realm(client, realm)
        return name, await client.realm_invite(name, addrs or ())

    name, line = run.with_client(body)
    if run.json:
        run.emit({"realm": name, "invite": line})
    else:
        run.print(line)
        run.say("whoever has this line can join: send it the way you would send a password")


def register(app: typer.Typer) -> None:
    """Add the group ``realm``."""
    sub = group(app, "realm", "Make, join and leave realms: the circles of peers that talk to each other.")
    realm_secrets.register(sub)
    command(sub, "ls", examples=[("dep2p realm ls", "name, id, how many other members are known and how many are up")])(
        list_realms
    )
    command(sub, "members", examples=[("dep2p realm members team", "who is up, and where")])(members)
    command(
        sub,
        "invite",
        examples=[("dep2p realm invite team", "one line to paste into `dep2p realm join`")],
        notes="The secret never expires: who has an invite is a member for good. To keep somebody out, make a new "
        "realm.",
    )(invite)
