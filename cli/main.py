"""The ``dep2p`` command. It imports nothing heavy before a command needs it: ``--help`` answers at once."""

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from dep2p import __version__
from dep2p.cli.framework import completion
from dep2p.cli.framework.command import Invocation, command, root_callback, silence_stdout
from dep2p.cli.framework.errors import ErrorReport, describe, show
from dep2p.cli.framework.usage import PlainGroup, nearest_option
from dep2p.error_codes import EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE
from dep2p.standard_streams import fill_standard_streams

app: typer.Typer = typer.Typer(
    name="dep2p",
    cls=PlainGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=False,
    context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 100},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"dep2p {__version__}")
        raise typer.Exit(EXIT_OK)


def _root(
    run: Invocation,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Talk to your peers, with no server in between: run a node, join a realm, send messages and files.

    `dep2p help COMMAND` shows a manual page. Options below also work after the command.
    """


root_callback(app, _root)


def _register() -> None:
    from dep2p.cli.commands import bench, daemon, events, listen, publish, reply, request, simulate, status, subscribe
    from dep2p.cli.commands import config as configuration
    from dep2p.cli.commands import context as contexts
    from dep2p.cli.commands import errors as error_list
    from dep2p.cli.commands import id as identity
    from dep2p.cli.commands import peer as peers
    from dep2p.cli.commands import send as outbox
    from dep2p.cli.commands import service as services
    from dep2p.cli.commands import session as sessions
    from dep2p.cli.commands import token as tokens
    from dep2p.cli.commands import topic as topics
    from dep2p.cli.commands.doctor import command as doctor
    from dep2p.cli.commands.queue import admin as queue
    from dep2p.cli.commands.realm import live as realms
    from dep2p.cli.commands.stream import send as transfer
    from dep2p.cli.commands.trace import reports as trace
    from dep2p.cli.framework import manual

    for module in (
        daemon,
        identity,
        status,
        doctor,
        peers,
        realms,
        request,
        reply,
        services,
        listen,
        outbox,
        publish,
        subscribe,
        topics,
        queue,
        sessions,
        transfer,
        events,
        bench,
        simulate,
        trace,
        configuration,
        contexts,
        tokens,
        error_list,
        completion,
        manual,
    ):
        module.register(app)


def root_command() -> Any:
    """The whole command tree, as Typer builds it."""
    return typer.main.get_command(app)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    fill_standard_streams()
    args = list(sys.argv[1:] if arguments is None else arguments)
    sys.exit(run(args))


def run(args: list[str]) -> int:
    """Run the command line and return its exit code (see the manual page)."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
    if completion.VARIABLE in os.environ:
        completion.prepare()
    wants_json = "--json" in (args[: args.index("--")] if "--" in args else args)
    try:
        result: Any = root_command().main(args, prog_name="dep2p", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        silence_stdout()
        return EXIT_OK
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except OSError as error:  # a closed output, a full disk
        failure = describe(error)
        silence_stdout()
        show(failure, json=wants_json)
        return failure.exit_code
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        return _usage_error(error, args, json=wants_json)
    return result if isinstance(result, int) else EXIT_OK


def _usage_error(error: Any, args: list[str], *, json: bool) -> int:
    context = error.ctx if hasattr(error, "ctx") else None
    if type(error).__name__ == "NoArgsIsHelpError":
        print(error.format_message(), file=sys.stderr)
        return EXIT_USAGE
    path = context.command_path if context is not None else "dep2p"
    message = " ".join(str(error.format_message()).split())
    message = message[:1].lower() + message[1:]
    tries = [f"{path} --help"]
    nearest = _nearest(error, context)
    message = message.split(". Did you mean")[0].split(" (Possible options")[0].rstrip(".")
    if nearest is not None and not nearest.startswith("-") and type(error).__name__ == "NoSuchOption":
        tries = [f"{path} … {nearest} …   (an argument: its value stands without a name)", *tries]
    elif nearest is not None:
        tries = [f"{path} {nearest}   (did you mean this?)", *tries]
    show(ErrorReport(message, "D1001", EXIT_USAGE, tries=tuple(tries)), json=json)
    return EXIT_USAGE


def _nearest(error: Any, context: Any) -> str | None:
    from difflib import get_close_matches

    name = type(error).__name__
    if context is None:
        return None
    if name == "NoSuchOption":
        return nearest_option(str(error.option_name), context.command.get_params(context))
    if "No such command" in str(error) and hasattr(context.command, "list_commands"):
        known = list(context.command.list_commands(context))
        wrong = str(error).split("'")[1] if "'" in str(error) else ""
    else:
        return None
    found = get_close_matches(wrong, known, n=1, cutoff=0.5)
    return found[0] if found else None


def _shutdown(run: Invocation) -> None:
    """Stop the running daemon: it drains first, so that what is in flight is finished."""
    from dep2p.client import Client

    async def body(client: Client) -> None:
        await client.shutdown()

    run.with_client(body)
    if run.json:
        run.emit({"shutdown": "started"})
    else:
        run.say("the daemon drains and stops")


_register()
command(app, "shutdown", examples=[("dep2p shutdown", "stops the daemon of the default data directory")])(_shutdown)

if __name__ == "__main__":
    main()
