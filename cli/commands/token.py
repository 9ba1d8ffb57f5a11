"""``dep2p token``: what a program on another machine needs to reach this daemon."""

import ipaddress
import os
import secrets
import socket
from typing import Annotated

import typer

from dep2p.cli.framework.command import Invocation, command, group
from dep2p.cli.framework.errors import CliError
from dep2p.error_codes import EXIT_NOT_FOUND

_UNSPECIFIED_PEER = "192.0.2.1"  # of no machine (RFC 5737): nothing is sent, the kernel only picks an own address


def show(
    run: Invocation,
    name: Annotated[str, typer.Option("--name", help="The context's name in the printed command.")] = "home",
) -> None:
    """Print the command that adds this daemon as a context on another machine, and the token that it asks for."""
    from dep2p.config.contexts import certificate_fingerprint

    config = run.config()
    if not config.control.tls:
        raise CliError(
            "the daemon does not listen for other machines",
            "D1003",
            cause="[control] tls is empty",
            tries=('[control] tls = "0.0.0.0:4781" in ' + str(config.data_dir / "config.toml") + ", then restart it",),
        )
    cert_file, _ = config.tls_files
    if not cert_file.exists() or not config.token_file.exists():
        raise CliError(
            "there is no certificate or token yet",
            "D1003",
            exit_code=EXIT_NOT_FOUND,
            tries=("dep2p daemon, which makes both at its start",),
        )
    fingerprint = certificate_fingerprint(cert_file)
    token = config.token_file.read_text("ascii").strip()
    addr = _address(config.control.tls)
    if run.json:
        run.emit({"addr": addr, "fingerprint": fingerprint, "token": token})
        return
    run.print(f"dep2p context add {name} --addr {addr} --fingerprint {fingerprint}")
    run.print(token)
    run.say("run the first line on the other machine; it asks for the token, the second line.")
    run.say("who has the token commands this node: send it as you would a password. `dep2p token new` ends it.")


def _address(listening: str) -> str:
    """An address at which others may reach the listener; the listener's own where that names one."""
    host, _, port = listening.rpartition(":")
    address = ipaddress.ip_address(host.strip("[]"))
    if not address.is_unspecified:
        return listening
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((_UNSPECIFIED_PEER, 9))
            return f"{probe.getsockname()[0]}:{port}"
        except OSError:  # no network
            return f"{socket.gethostname()}:{port}"


def new(run: Invocation) -> None:
    """Replace the token; programs with the old one are refused from the daemon's next start on."""
    path = run.config().token_file
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    if run.json:
        run.emit({"token_file": str(path)})
    else:
        run.say(f"a new token is in {path}; it is in use when the daemon has restarted. dep2p token show prints it.")


def register(app: typer.Typer) -> None:
    """Add the group ``token``."""
    sub = group(app, "token", "Let programs on other machines use this daemon.")
    command(
        sub,
        "show",
        examples=[("dep2p token show", "what to type on the other machine, and the token to paste there")],
        notes="The daemon listens for other machines when [control] tls names an address, with TLS 1.3 and a "
        "certificate that it makes at its first start. docs/howto/remote.md has the whole walk.",
    )(show)
    command(sub, "new", examples=[("dep2p token new", "then restart the daemon")])(new)
