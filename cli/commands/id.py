"""``dep2p id``: the node's peer id and addresses."""

from typing import TYPE_CHECKING, Annotated

import typer

from dep2p.cli.framework.command import Invocation, command
from dep2p.cli.framework.errors import CliError
from dep2p.error_codes import EXIT_NOT_FOUND
from dep2p.outside_text import printable

if TYPE_CHECKING:
    pass


def show_id(
    run: Invocation,
    new: Annotated[bool, typer.Option("--new", help="Make a key when there is none yet.")] = False,
) -> None:
    """Print the node's peer id, and its addresses when the daemon runs."""
    from dep2p.client import DaemonUnreachableError
    from dep2p.identity import Identity

    target = run.target()
    if target.config is None and not new:
        status = run.with_client(lambda client: client.status())
        _show(run, status.peer_id, list(status.listen), True, None)
        return
    key_file = run.config().key_file
    if new:
        identity = Identity.generate()
        if key_file.exists():
            raise CliError(
                f"there is a key already, in {key_file}: an identity is never overwritten",
                "D2001",
                tries=("dep2p id", "another --data-dir for another node"),
            )
        identity.save(key_file)
        _show(run, str(identity.peer_id), [], False, str(key_file))
        return

    try:
        status = run.with_client(lambda client: client.status())
    except DaemonUnreachableError:
        if run.socket is not None:
            raise
        if not key_file.exists():
            raise CliError(
                f"no key file at {key_file}",
                "D2001",
                exit_code=EXIT_NOT_FOUND,
                tries=("dep2p id --new", "dep2p daemon, which makes one"),
            ) from None
        _show(run, str(Identity.load(key_file).peer_id), [], False, str(key_file))
        return
    _show(run, status.peer_id, list(status.listen), True, None)


def _show(run: Invocation, peer_id: str, addrs: list[str], running: bool, key_file: str | None) -> None:
    if run.json:
        fields: dict[str, object] = {"peer_id": peer_id, "addrs": addrs, "daemon": running}
        run.emit(fields if key_file is None else fields | {"key_file": key_file})
        return
    run.print(peer_id)
    for addr in addrs:
        run.print(printable(addr))
    if not running:
        run.say("no daemon is running: the id is from the key file, and there are no addresses")


def register(app: typer.Typer) -> None:
    """Add ``id``."""
    command(
        app,
        "id",
        examples=[
            ("dep2p id", "the peer id on the first line, one address on each further line"),
            ("dep2p id --new", "before the first start, to know the id in advance"),
        ],
    )(show_id)
