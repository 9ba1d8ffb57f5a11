"""``dep2p realm ls|members|invite``: the daemon's realms and their members."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from dep2p.cli.commands.realm import files as realm_secrets
from dep2p.cli.framework.command import Invocation, command, group
from dep2p.cli.framework.errors import CliError
from dep2p.cli.framework.render import address, short_peer, short_realm, table
from dep2p.outside_text import printable

if TYPE_CHECKING:
    from dep2p.client import Client
    from dep2p.control_api.replies import MemberSummary, RealmSummary

RealmArgument = Annotated[
    str | None,
    typer.Argument(help="Name, id or start of the id; may be left out when there is only one.", metavar="[REALM]"),
]


async def only_realm(client: "Client", given: str | None) -> str:
    """Return the realm that the user means. Raises :class:`CliError` when none is named and there is not exactly
    one."""
    if given is not None:
        return given
    realms = await client.realms()
    if len(realms) == 1:
        return realms[0].realm_id
    if not realms:
        raise CliError("the node is in no realm", "D4003", tries=("dep2p realm new NAME", "dep2p realm join"))
    names = ", ".join(printable(realm.name) for realm in realms)
    raise CliError(f"the node is in {len(realms)} realms: say which one", "D4003", cause=names)


def list_realms(run: Invocation) -> None:
    """List the realms that the node is in; without a daemon, those in the data directory."""
    from dep2p.client import DaemonUnreachableError

    joined: list[RealmSummary] | None = None
    try:
        joined = run.with_client(lambda client: client.realms())
        rows = [
            [printable(realm.name), short_realm(realm.realm_id), str(realm.members_known), str(realm.members_up)]
            for realm in joined
        ]
    except DaemonUnreachableError:
        stored = [realm for _, realm in realm_secrets.stored(run.config().realms_dir)]
        rows = [[printable(realm.name), short_realm(realm.realm_id), "-", "-"] for realm in stored]
        if run.json:
            run.emit({"realms": [{"name": each.name, "realm_id": each.realm_id} for each in stored], "daemon": False})
            return
    if run.json:
        run.emit({"realms": joined, "daemon": True})
        return
    if joined is None:
        run.say("no daemon is running; these realms are in the data directory")
        damaged = realm_secrets.unreadable(run.config().realms_dir)
        if damaged:
            run.warn(
                f"{len(damaged)} realm files cannot be used: {', '.join(map(str, damaged))}; dep2p doctor says why"
            )
    if not rows:
        run.say("no realm yet: `dep2p realm new NAME`, or `dep2p realm join`")
        return
    run.print(table(["REALM", "ID", "OTHERS", "UP"], rows, right=(2, 3)))


def members(
    run: Invocation,
    realm: RealmArgument = None,
    full: Annotated[bool, typer.Option("--full", help="Print whole peer ids.")] = False,
) -> None:
    """List the members of a realm and whether they are up."""

    async def body(client: "Client") -> "tuple[str, str, list[MemberSummary]]":
        name = await only_realm(client, realm)
        return name, (await client.status()).peer_id, await client.realm_members(name)

    name, own, found = run.with_client(body)
    if run.json:
        run.emit({"realm": name, "members": found})
        return
    rows = [
        [
            member.peer if full else short_peer(member.peer),
            "self" if member.peer == own else member.state,
            datetime.fromtimestamp(member.expires_s, UTC).strftime("%Y-%m-%d %H:%M") if member.expires_s else "-",
            printable(", ".join(map(address, member.addrs))) or "-",
        ]
        for member in found
    ]
    run.print(table(["PEER", "STATE", "RECORD UNTIL", "ADDRESSES"], rows))


def invite(
    run: Invocation,
    realm: RealmArgument = None,
    addrs: Annotated[
        list[str] | None,
        typer.Option("--addr", help="Address that the invited dial; may be repeated. By default this node's own."),
    ] = None,
) -> None:
    """Print one line with which a node can join: it holds the secret and this node's addresses."""

    async def body(client: "Client") -> tuple[str, str]:
        name = await only_realm(client, realm)
        return name, await client.realm_invite(name, addrs or ())

    name, line = run.with_client(body)
    if run.json:
        run.emit({"realm": name, "invite": line})
    else:
        run.print(line)
        run.say("this line is enough to join: send it the way you would send a password")


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
        notes="The secret never expires: an invite makes a member for good. To remove a member, make a new realm.",
    )(invite)
