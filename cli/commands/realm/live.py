"""``dep2p realm ls|members|invite``: the daemon's realms and their members."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Final

import typer

from dep2p.cli.commands.realm import files as realm_secrets
from dep2p.cli.framework.command import Invocation, command, group
from dep2p.cli.framework.errors import CliError
from dep2p.cli.framework.payloads import RealmOption
from dep2p.cli.framework.render import address, short_peer, short_realm, table
from dep2p.outside_text import one_line, printable
from dep2p.protocols.addresses.dialable import AddressScope, address_scope, widest_scope

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dep2p.client import Client, MemberUpdate
    from dep2p.control_api.replies import RealmSummary

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
        if run.target().config is None:
            raise
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
    watch: Annotated[bool, typer.Option("--watch", help="Then print each change of a member, until Ctrl-C.")] = False,
) -> None:
    """List the members of a realm, whether they are up, and what they say about themselves."""

    async def body(client: "Client") -> None:
        name = await only_realm(client, realm)
        if not watch:
            await _list_members(run, client, name, full=full)
            return
        from dep2p.client import FeedResumed
        from dep2p.gossipsub.topic_types import Lagged

        async with client.watch_members(realm=name) as changes:  # first: no change between the list and the watch
            await _list_members(run, client, name, full=full)
            async for change in changes:
                if not isinstance(change, Lagged):
                    _show_change(run, change, full=full)
                elif isinstance(change, FeedResumed):
                    await _list_members(run, client, name, full=full)
                elif not change.count:
                    pass  # `run` reports it
                elif run.json:
                    run.emit({"lagged": change.count})
                else:
                    run.warn(f"lagged: {change.count} changes were dropped, because this reader was too slow")

    run.with_client(body)


async def _list_members(run: Invocation, client: "Client", realm: str, *, full: bool) -> None:
    own, found = (await client.status()).peer_id, await client.members(realm)
    own_fields = dict(await client.fields(realm=realm))
    if run.json:
        run.emit({"realm": realm, "fields": own_fields, "members": found})
        return
    rows = [[own if full else short_peer(own), "self", "-", said_by(own_fields), "-"]]
    rows += [
        [
            member.peer if full else short_peer(member.peer),
            member.state,
            datetime.fromtimestamp(member.expires_s, UTC).strftime("%Y-%m-%d %H:%M") if member.expires_s else "-",
            said_by(member.fields),
            printable(", ".join(map(address, member.addrs))) or "-",
        ]
        for member in found
        if member.peer != own
    ]
    run.print(table(["PEER", "STATE", "RECORD UNTIL", "SAYS", "ADDRESSES"], rows))


def said_by(fields: "Mapping[str, str]") -> str:
    """Return what a member says about itself as one line without escape sequences."""
    return one_line(" ".join(f"{key}={value}" for key, value in sorted(fields.items()))) or "-"


def _show_change(run: Invocation, change: "MemberUpdate", *, full: bool) -> None:
    if run.json:
        run.emit(change)
        return
    said = said_by(change.fields)
    run.print(
        f"{change.kind:<8} {change.peer if full else short_peer(change.peer)}{'' if said == '-' else f'  {said}'}"
    )


def set_fields(
    run: Invocation,
    pairs: Annotated[
        list[str],
        typer.Argument(help="What to say, as KEY=VALUE; KEY= takes it back.", metavar="KEY=VALUE…"),
    ],
    realm: RealmOption = None,
) -> None:
    """Say things about this node to all members: an app, a version, a load, a status line."""
    fields: dict[str, str | None] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not key or not separator:
            raise CliError(f"{pair!r} is not KEY=VALUE", "D1001", tries=("dep2p realm set status='at lunch'",))
        fields[key] = value or None
    said = run.with_client(lambda client: client.set_fields(fields, realm=realm))
    if run.json:
        run.emit({"fields": dict(said)})
    else:
        run.print(said_by(said))


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
        return name, await client.invite(name, addrs or ())

    name, line = run.with_client(body)
    named = _addrs_of(line)
    reach = widest_scope(named)
    if run.json:
        rows = [{"addr": addr, "reach": _REACHES[address_scope(addr)]} for addr in named]
        run.emit({"realm": name, "invite": line, "reach": _REACHES[reach], "addrs": rows})
        return
    run.print(line)
    run.say("this line is enough to join: send it the way you would send a password")
    for addr in named:
        run.say(f"  {address(addr)}  {_FROM[address_scope(addr)]}")
    if (warning := _WARNINGS.get(reach)) is not None:
        run.warn(warning)


_REACHES: Final = {
    None: "nowhere",
    AddressScope.LOOPBACK: "machine",
    AddressScope.PRIVATE: "network",
    AddressScope.PUBLIC: "anywhere",
}
_FROM: Final = {
    None: "no other node can dial it",
    AddressScope.LOOPBACK: "from this machine only",
    AddressScope.PRIVATE: "from the same network only",
    AddressScope.PUBLIC: "from anywhere, unless a router or firewall is in between",
}
_WARNINGS: Final = {
    None: "it names no address that others can dial: start the node with --listen, or give --addr",
    AddressScope.LOOPBACK: "it works on this machine only: start the node with --listen "
    "/ip4/0.0.0.0/tcp/4001, or give --addr",
    AddressScope.PRIVATE: "it works in this network only. If your router forwards a port: --addr "
    '/ip4/PUBLIC-IP/tcp/PORT/p2p/ID; else a member with a public address invites, and relays (`relay = "server"`)',
}


def _addrs_of(line: str) -> tuple[str, ...]:
    from dep2p.realm.credentials import Realm

    return Realm.from_invite(line).addrs


def register(app: typer.Typer) -> None:
    """Add the group ``realm``."""
    sub = group(app, "realm", "Make, join and leave realms: the circles of peers that talk to each other.")
    realm_secrets.register(sub)
    command(sub, "ls", examples=[("dep2p realm ls", "name, id, how many other members are known and how many are up")])(
        list_realms
    )
    command(
        sub,
        "members",
        waits=True,
        examples=[
            ("dep2p realm members team", "who is up, and where"),
            ("dep2p realm members --watch", "then each change, a line each"),
        ],
        notes="Members write the column SAYS themselves, each about itself; see `dep2p realm set`.",
    )(members)
    command(
        sub,
        "set",
        examples=[
            ("dep2p realm set app=mailer version=1.4", "all members see it within seconds"),
            ("dep2p realm set status=", "takes it back"),
        ],
        notes="At most 16 fields, keys of 32 and values of 256 bytes, 1,024 bytes in all. Other fields stay as they "
        "are. They end with the daemon's process; state belongs in a database.",
    )(set_fields)
    command(
        sub,
        "invite",
        examples=[("dep2p realm invite team", "one line to paste into `dep2p realm join`")],
        notes="The secret never expires: an invite makes a member for good. To remove a member, make a new realm.",
    )(invite)
