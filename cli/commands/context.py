"""``dep2p context``: names for daemons, on this machine and on others."""

import getpass
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dep2p.cli.framework.command import Invocation, command, group
from dep2p.cli.framework.errors import CliError
from dep2p.cli.framework.render import table
from dep2p.cli.framework.value_completion import contexts
from dep2p.outside_text import printable

if TYPE_CHECKING:
    from dep2p.config.contexts import Context, ContextsFile

NameArgument = Annotated[str, typer.Argument(help="The context's name.", metavar="NAME", autocompletion=contexts)]
_TOKEN_CHARACTERS_MAX = 4_096


def _file() -> "ContextsFile":
    from dep2p.config.contexts import ContextsFile, contexts_path

    return ContextsFile(contexts_path(os.environ))


def add(
    run: Invocation,
    name: NameArgument,
    dir_: Annotated[str | None, typer.Option("--dir", help="A node here: its data directory.", metavar="DIR")] = None,
    sock: Annotated[str | None, typer.Option("--sock", help="A node here: its control socket.", metavar="PATH")] = None,
    addr: Annotated[
        str | None,
        typer.Option("--addr", help="A node on another machine: its control API over TLS.", metavar="HOST:PORT"),
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(
            "--token",
            help="The token for --addr. Without it the command asks, or reads standard input: other users of this "
            "machine see arguments.",
            metavar="TOKEN",
        ),
    ] = None,
    fingerprint: Annotated[
        str | None,
        typer.Option("--fingerprint", help="SHA-256 of the certificate at --addr, in hex.", metavar="HEX"),
    ] = None,
    ca: Annotated[
        str | None,
        typer.Option(
            "--ca",
            help="In place of --fingerprint: PEM file of the certificate's authority, or system.",
            metavar="FILE",
        ),
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace the context of that name.")] = False,
    select: Annotated[bool, typer.Option("--select", help="Select it as well.")] = False,
) -> None:
    """Give a daemon a name."""
    from dep2p.config.contexts import SYSTEM_CA, Context, check_certificate_rule, check_token, fingerprint_of

    given = {"--dir": dir_, "--sock": sock, "--addr": addr}
    named = [option for option, value in given.items() if value is not None]
    if len(named) != 1:
        raise CliError(
            f"give exactly one of {', '.join(given)}",
            "D1001",
            tries=(f"dep2p context add {printable(name)} --dir DIR", "`dep2p token show` on the other machine"),
        )
    if not given[named[0]]:
        raise CliError(f"{named[0]} is empty", "D1001")
    if addr is None:
        if token is not None or fingerprint is not None or ca is not None:
            raise CliError("--token, --fingerprint and --ca go with --addr", "D1001")
        context = Context(data_dir=_absolute(dir_), socket=_absolute(sock))
    else:
        pinned = "" if fingerprint is None else fingerprint_of(fingerprint, "--fingerprint")
        ca_file = SYSTEM_CA if ca == SYSTEM_CA else _absolute(ca)
        # Checked before the question for the token, so that the user types none in vain.
        check_certificate_rule(addr, pinned, ca_file, "context add")
        token = check_token(_ask() if token is None else token, "--token")
        context = Context(addr=addr, token=token, fingerprint=pinned, ca_file=ca_file)
    file = _file()
    file.add(name, context, replace=replace)
    if select:
        file.select(name)
    if run.json:
        run.emit({"context": name, "selected": select})
    else:
        run.say(f"added {name}: {_place(context)}")
        if not select:
            run.say(f"use it with: dep2p --context {name} status   or   dep2p context select {name}")


def _absolute(path: str | None) -> str:
    return str(Path(path).expanduser().absolute()) if path else ""


def _ask() -> str:
    if sys.stdin.isatty():
        return getpass.getpass("token: ")
    text = sys.stdin.readline(_TOKEN_CHARACTERS_MAX + 2)
    if not text.strip():
        raise CliError("standard input has no token", "D1001", tries=("dep2p token show, on the other machine",))
    return text


def _place(context: "Context") -> str:
    if context.addr:
        return f"https://{printable(context.addr)}"
    return printable(context.data_dir or context.socket)


def select(run: Invocation, name: NameArgument) -> None:
    """Use a context from now on, where neither arguments nor the environment say which daemon; default is none."""
    _file().select(name)
    if run.json:
        run.emit({"selected": name})
    else:
        run.say(f"selected {name}")


def list_contexts(run: Invocation) -> None:
    """List the contexts; * marks the one that commands use now."""
    from dep2p.config.contexts import DEFAULT
    from dep2p.config.environment import CONTEXT

    file = _file()
    contexts = file.contexts()
    current = run.context or os.environ.get(CONTEXT) or file.selected() or DEFAULT
    if run.json:
        rows = [
            {"name": name, "place": _place(context), "tls": context.is_remote} for name, context in contexts.items()
        ]
        run.emit({"contexts": rows, "selected": current})
        return
    lines = [["*" if current == DEFAULT else "", DEFAULT, "the default data directory"]]
    lines += [["*" if name == current else "", name, _place(context)] for name, context in contexts.items()]
    run.print(table(["", "CONTEXT", "DAEMON"], lines))


def remove(run: Invocation, name: NameArgument) -> None:
    """Forget a context, and its token."""
    _file().remove(name)
    if run.json:
        run.emit({"removed": name})
    else:
        run.say(f"removed {name}")


def show(
    run: Invocation,
    name: Annotated[
        str | None,
        typer.Argument(help="By default the one that commands use now.", metavar="[NAME]", autocompletion=contexts),
    ] = None,
    reveal: Annotated[bool, typer.Option("--token", help="Print the token as well.")] = False,
) -> None:
    """Print which daemon a context means, and who chose it."""
    if name is not None:
        run.context = name
        run.socket = run.given_data_dir = None
    target = run.target()
    token = target.token if reveal else "***"
    fields: dict[str, object] = {"origin": target.origin}
    if target.tcp:
        fields |= {"addr": target.tcp, "token": token}
        fields |= {"fingerprint": target.fingerprint} if target.fingerprint else {"ca_file": target.ca_file}
    elif target.config is not None:
        fields |= {"data_dir": str(target.config.data_dir), "socket": str(target.socket)}
    if run.json:
        run.emit(fields)
    else:
        run.print("\n".join(f"{key:12} {printable(str(value))}" for key, value in fields.items()))


def register(app: typer.Typer) -> None:
    """Add the group ``context``."""
    sub = group(app, "context", "Name daemons, here and on other machines, and choose among them.")
    command(
        sub,
        "add",
        examples=[
            ("dep2p context add bob --dir ./bob", "another node on this machine"),
            (
                "dep2p context add home --addr 192.0.2.7:4781 --fingerprint 5f3a…",
                "a node on another machine; asks for the token",
            ),
        ],
        notes="Every command, and Client.open(), takes the daemon from its arguments, else from DEP2P_SOCKET, "
        "DEP2P_DATA_DIR or DEP2P_CONTEXT, else from the selected context, else from the default data directory. The "
        "contexts are in $XDG_CONFIG_HOME/dep2p/contexts.json (~/.config), mode 0600, with their tokens. `dep2p token "
        "show` on the other machine prints what to type here.",
    )(add)
    command(sub, "select", examples=[("dep2p context select home", "for all commands from now on")])(select)
    command(sub, "ls", examples=[("dep2p context ls", "* marks the one in use")])(list_contexts)
    command(sub, "rm", examples=[("dep2p context rm home", "and its token")])(remove)
    command(sub, "show", examples=[("dep2p context show", "the daemon in use, and who chose it")])(show)
