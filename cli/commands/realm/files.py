"""``dep2p realm new|show|join|leave``: the realm files of a data directory, also for a running daemon."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dep2p.cli.framework.command import Invocation, command
from dep2p.cli.framework.errors import CliError
from dep2p.cli.framework.payloads import cannot_read
from dep2p.cli.framework.render import short_realm, table
from dep2p.cli.framework.value_completion import realms
from dep2p.error_codes import EXIT_NOT_FOUND, EXIT_OK, EXIT_USAGE
from dep2p.errors import RealmFileError
from dep2p.outside_text import file_name, printable

if TYPE_CHECKING:
    from dep2p.client import Client
    from dep2p.control_api.replies import RealmSummary
    from dep2p.realm.credentials import Realm

_INVITE_CHARACTERS_MAX = 65_536
_FIRST_MEMBER_S = 5.0
_LOOK_AGAIN_S = 0.1


def realm_file_name(name: str) -> str:
    """Return the file of a realm, named as the daemon names it: a name that is no plain ASCII word becomes a digest."""
    return f"{file_name(name)}.realm"


def stored(directory: Path) -> list[tuple[Path, "Realm"]]:
    """The realm files of a directory that can be read, by name."""
    from dep2p.realm.credentials import Realm

    found: list[tuple[Path, Realm]] = []
    for path in sorted(directory.glob("*.realm")):
        try:
            found.append((path, Realm.from_psk_file(path)))
        except RealmFileError:
            continue  # `dep2p doctor` reports it
    return found


def unreadable(directory: Path) -> list[Path]:
    """The realm files of a directory that cannot be read or understood."""
    readable = [path for path, _ in stored(directory)]
    return [path for path in sorted(directory.glob("*.realm")) if path not in readable]


def find_stored(directory: Path, wanted: str | None) -> tuple[Path, "Realm"]:
    """Return the realm file for a name, an id or the start of an id; None means the only one. Raises
    :class:`CliError`."""
    everything = stored(directory)
    fitting = [
        (path, realm)
        for path, realm in everything
        if wanted is None or realm.name == wanted or (len(wanted) >= 6 and realm.realm_id.startswith(wanted))
    ]
    if len(fitting) == 1:
        return fitting[0]
    names = ", ".join(printable(realm.name) for _, realm in everything)
    if not everything:
        raise CliError(f"there is no realm in {directory}", "D4003", tries=("dep2p realm new NAME", "dep2p realm join"))
    if not fitting:
        raise CliError(f"there is no realm {wanted!r} here", "D4003", cause=f"there is: {names}")
    raise CliError("more than one realm fits: write its id", "D4003", exit_code=EXIT_USAGE, cause=names)


def _keep(run: Invocation, realm: "Realm") -> tuple[Path, bool]:
    """Write the realm's file into the data directory; return its path, and whether it was there before.

    Raises :class:`CliError` when another realm has the name, or the file cannot be written.
    """
    directory = run.config().realms_dir
    for path, other in stored(directory):
        if other.realm_id == realm.realm_id:
            _save(realm, path)
            return path, True
        if other.name == realm.name:
            raise CliError(
                f"another realm is called {realm.name!r} here ({short_realm(other.realm_id)})",
                "D2003",
                tries=(f"dep2p realm leave {short_realm(other.realm_id).rstrip('…')}", "choose another name"),
            )
    path = directory / realm_file_name(realm.name)
    _save(realm, path)
    return path, False


def _save(realm: "Realm", path: Path) -> None:
    try:
        realm.save(path)
    except RealmFileError as error:
        if isinstance(error.__cause__, OSError):
            raise CliError(str(error), "D6006", tries=("dep2p doctor",)) from error
        raise


def _notify_daemon(run: Invocation, realm: "Realm", *, is_new: bool = False) -> "RealmSummary | None":
    """Let a running daemon join; return what it knows of the realm then, or None when none runs.

    When the realm names peers to dial, wait some seconds for a first member, or for the errors of all.
    """
    from dep2p.client import DaemonUnreachableError

    async def body(client: "Client") -> "RealmSummary":
        from anyio import move_on_after, sleep

        found = await client.join_realm(realm)
        if is_new:
            return found  # it has no members yet
        if not realm.bootstrap:
            return await _with_unreached(client, found)
        dialed = {addr.rpartition("/p2p/")[2] for addr in realm.bootstrap} - {(await client.status()).peer_id}
        with move_on_after(_FIRST_MEMBER_S):
            while not found.members_up and len(found.problems) < len(dialed):
                await sleep(_LOOK_AGAIN_S)
                found = next((each for each in await client.realms() if each.realm_id == realm.realm_id), found)
        return await _with_unreached(client, found)

    try:
        return run.with_client(body)
    except DaemonUnreachableError:
        return None


async def _with_unreached(client: "Client", found: "RealmSummary") -> "RealmSummary":
    """While no member is up, add the daemon's problems, such as a bootstrap peer that cannot be reached."""
    from msgspec.structs import replace

    if found.members_up:
        return found
    return replace(found, problems=(*found.problems, *(await client.status()).problems))


def _report(run: Invocation, realm: "Realm", path: Path, joined: "RealmSummary | None", verb: str) -> None:
    if run.json:
        said = {} if joined is None else {"members_up": joined.members_up, "problems": list(joined.problems)}
        fields = {"name": realm.name, "realm_id": realm.realm_id, "file": str(path), "daemon": joined is not None}
        run.emit({**fields, **said})
        return
    run.print(f"{verb} {printable(realm.name)} ({realm.realm_id})")
    if joined is not None:
        run.say("the running daemon has joined it")
        if not joined.members_up and (realm.bootstrap or joined.problems):
            for problem in joined.problems or ("no member has answered yet",):
                run.warn(printable(problem))
            run.say("the daemon goes on trying; look again with: dep2p status")
    else:
        run.say("no daemon is running; it joins when it starts: dep2p daemon")


def _read_passphrase(passphrase_file: Path | None) -> str:
    if passphrase_file is None:
        if sys.stdin.isatty():
            from getpass import getpass

            first = getpass("passphrase: ")
            if getpass("once more: ") != first:
                raise CliError("the two passphrases differ", "D1001")
            return first
        return sys.stdin.readline().rstrip("\r\n")
    try:
        return passphrase_file.read_text("utf-8").rstrip("\r\n")
    except UnicodeDecodeError:
        raise CliError(f"{passphrase_file} is not text in UTF-8", "D6006") from None
    except OSError as error:
        raise cannot_read(passphrase_file, error) from None


def new(
    run: Invocation,
    name: Annotated[str, typer.Argument(help="A human-readable name.", metavar="NAME")],
    passphrase: Annotated[
        bool,
        typer.Option(
            "--passphrase", help="Derive the secret from a passphrase (asked for, or the first line of standard input)."
        ),
    ] = False,
    passphrase_file: Annotated[
        Path | None, typer.Option("--passphrase-file", help="Read the passphrase from this file.", metavar="FILE")
    ] = None,
) -> None:
    """Make a realm and join it. Its secret is random unless a passphrase is given."""
    from dep2p.realm.credentials import Realm

    has_passphrase = passphrase or passphrase_file is not None
    if has_passphrase:
        text = _read_passphrase(passphrase_file)
        realm = Realm.from_passphrase(text, name)
    else:
        directory = run.config().realms_dir
        if any(other.name == name for _, other in stored(directory)):
            raise CliError(
                f"there is a realm {name!r} here already",
                "D2003",
                tries=(f"dep2p realm show {shlex.quote(name)}", "another name"),
            )
        realm = Realm.generate(name)
    path, _ = _keep(run, realm)
    _report(run, realm, path, _notify_daemon(run, realm, is_new=not has_passphrase), "made realm")
    if not run.json:
        run.say(f"invite others with: dep2p realm invite {shlex.quote(name)}")


def show(
    run: Invocation,
    name: Annotated[
        str | None,
        typer.Argument(
            help="Name, id or start of the id; may be left out when there is only one.", autocompletion=realms
        ),
    ] = None,
    secret: Annotated[bool, typer.Option("--secret", help="Also print the secret (base64).")] = False,
) -> None:
    """Show a realm of the data directory; its secret only with --secret."""
    import base64

    path, realm = find_stored(run.config().realms_dir, name)
    fields: dict[str, object] = {
        "name": realm.name,
        "realm_id": realm.realm_id,
        "file": str(path),
        "bootstrap": list(realm.bootstrap),
    }
    if secret:
        fields["psk"] = base64.b64encode(realm.psk).decode("ascii")
    if run.json:
        run.emit(fields)
        return
    rows = [
        ["Realm", printable(realm.name)],
        ["Id", realm.realm_id],
        ["File", str(path)],
        ["Bootstrap", printable(", ".join(realm.bootstrap)) or "-"],
        ["Secret", str(fields.get("psk", "(not shown; --secret prints it)"))],
    ]
    run.print(table(["", ""], rows).lstrip("\n"))


def join(
    run: Invocation,
    invite: Annotated[
        str | None,
        typer.Argument(
            help="The invite's line; without it, or with -, it is read from standard input.", metavar="[INVITE|-]"
        ),
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="Read an invite or a realm file from here.", metavar="FILE")
    ] = None,
    passphrase: Annotated[
        bool, typer.Option("--passphrase", help="Join by a passphrase; needs --realm-name, and dials no peer.")
    ] = False,
    realm_name: Annotated[
        str | None, typer.Option("--realm-name", help="The realm's name, with --passphrase.", metavar="NAME")
    ] = None,
) -> int:
    """Join a realm by an invite, a realm file or a passphrase."""
    from dep2p.realm.credentials import Realm

    if sum((invite is not None, file is not None, passphrase)) > 1:
        raise CliError("INVITE, --file and --passphrase exclude each other", "D1001")
    if passphrase:
        if realm_name is None:
            raise CliError("--passphrase needs --realm-name: the name is part of the secret", "D1001")
        realm: Realm = Realm.from_passphrase(_read_passphrase(None), realm_name)
    else:
        realm = _from_text(_read_invite(invite, file))
    path, known = _keep(run, realm)
    _report(run, realm, path, _notify_daemon(run, realm), "in this realm already:" if known else "joined realm")
    if passphrase and not run.json:
        run.say("other words or another name would be another realm: its members show the same id, or you are alone")
        run.say("this dials no peer; to find members: dep2p peer connect ADDR, or --bootstrap or --mdns of the daemon")
    return EXIT_OK


def _read_invite(invite: str | None, file: Path | None) -> str:
    if invite is not None and invite != "-":
        return invite
    if file is not None and str(file) != "-":
        try:
            with file.open("rb") as opened:
                data = opened.read(_INVITE_CHARACTERS_MAX + 1)
        except OSError as error:
            raise cannot_read(file, error) from None
    else:
        if invite is None and file is None and sys.stdin.isatty():
            from getpass import getpass

            return getpass("invite (it is not shown): ")
        data = sys.stdin.buffer.read(_INVITE_CHARACTERS_MAX + 1)
    if len(data) > _INVITE_CHARACTERS_MAX:
        raise CliError(f"over {_INVITE_CHARACTERS_MAX} bytes: this is neither an invite nor a realm file", "D2002")
    return data.decode("utf-8", "replace")


def _from_text(text: str) -> "Realm":
    from dep2p.realm.credentials import Realm

    if text.lstrip().startswith("{"):
        return Realm.from_file_bytes(text.encode("utf-8"))
    return Realm.from_invite(text).realm


def leave(
    run: Invocation,
    name: Annotated[str, typer.Argument(help="Name, id or start of the id.", metavar="REALM", autocompletion=realms)],
) -> None:
    """Leave a realm: tell its members and remove its secret from the data directory."""
    from dep2p.client import DaemonUnreachableError

    async def body(client: "Client") -> None:
        await client.leave_realm(name)

    running = True
    try:
        run.with_client(body)
    except DaemonUnreachableError:
        running = False
    directory = run.config().realms_dir
    if running:
        left = [path for path, realm in stored(directory) if realm.name == name]
    else:
        left = [find_stored(directory, name)[0]]
    for path in left:
        _remove(path)
    if run.json:
        run.emit({"realm": name, "left": True, "daemon": running})
    else:
        run.say(
            f"left {printable(name)}" + ("" if running else "; no daemon was running, so its members were not notified")
        )


def _remove(path: Path) -> None:
    """Delete a realm file, and what killed writers of it left."""
    from dep2p.realm.credentials import remove_leftovers

    try:
        path.unlink(missing_ok=True)  # the daemon may have removed it already
        remove_leftovers(path.parent, path.name)
    except OSError as error:
        raise CliError(f"cannot remove {path}: {error.strerror}", "D2002", exit_code=EXIT_NOT_FOUND) from None


def register(sub: typer.Typer) -> None:
    """Add the commands that work without a daemon to the group ``realm``."""
    command(
        sub,
        "new",
        examples=[
            ("dep2p realm new team", "a random secret"),
            (
                "dep2p realm new team --passphrase-file words.txt",
                "the same words and name give the same realm elsewhere",
            ),
        ],
    )(new)
    command(
        sub,
        "join",
        examples=[
            ("dep2p realm join", "asks for the line that `dep2p realm invite` printed"),
            ("dep2p realm join - < invite.txt", "an argument would be visible to other users, and in the history"),
            ("dep2p realm join --file team.realm", "a copy of a realm file"),
        ],
    )(join)
    command(sub, "show", examples=[("dep2p realm show team", "id, file and addresses, not the secret")])(show)
    command(sub, "leave", examples=[("dep2p realm leave team", "members learn of it at once")])(leave)
