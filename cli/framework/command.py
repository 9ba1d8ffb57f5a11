"""The declaration of commands: the options that all of them share, their manual, and the report of their errors."""

import contextlib
import functools
import inspect
import os
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, Final, ParamSpec, TypeVar, cast, get_type_hints

import typer
from typer.models import ArgumentInfo, OptionInfo

from dep2p.cli.framework.errors import describe, show
from dep2p.cli.framework.usage import PlainCommand, PlainGroup
from dep2p.cli.framework.value_completion import BY_PARAMETER
from dep2p.concurrency.exception_groups import first_error
from dep2p.error_codes import EXIT_OK
from dep2p.outside_text import printable, styled

if TYPE_CHECKING:
    from msgspec import Struct

    from dep2p.client import Client, FeedInterrupted, FeedResumed
    from dep2p.config.loader import Config
    from dep2p.config.target import DaemonTarget

P = ParamSpec("P")
T = TypeVar("T")

_WAITS: Final = (
    "When the daemon goes away, the command says so, waits for it, and goes on when it is back; with --json as lines "
    'whose "event" is "interrupted" or "resumed". --no-reconnect ends it instead.'
)
TERMINATE_S: Final = 5.0
"""From SIGTERM to the end of a command that does not end by itself."""


def _plain(value: object) -> object:
    """Convert a value that JSON does not have."""
    from msgspec import Struct, to_builtins

    if isinstance(value, Struct):
        fields: object = to_builtins(value)
        return fields
    return str(value)


@dataclass(frozen=True, slots=True)
class Manual:
    """Texts of ``dep2p help COMMAND`` beside the options. ``examples``: pairs of a command line and a remark."""

    examples: tuple[tuple[str, str], ...] = ()
    notes: str = ""


MANUALS: Final[dict[Callable[..., Any], Manual]] = {}
"""Manual by the function that Typer calls."""


@dataclass(slots=True)
class Invocation:
    """The shared options of one run, and the ways to write output. Data goes to stdout, messages to stderr."""

    json: bool = False
    quiet: bool = False
    color: bool = False
    reconnect: bool = True
    call_reconnect_s: float = 0.0
    """Seconds for which a command makes calls again that are safe to repeat, while the daemon is away."""
    socket: str | None = None
    """The control socket, when the command line names it."""
    given_data_dir: str | None = None
    context: str | None = None

    def target(self, flags: Mapping[str, object] | None = None, file: Path | None = None) -> "DaemonTarget":
        """The daemon that the command is for. Raises ConfigError."""
        from dep2p.config.target import TargetArguments, find_daemon

        given = TargetArguments(socket=self.socket, data_dir=self.given_data_dir, context=self.context)
        return find_daemon(given, os.environ, flags=flags, config_file=file)

    def config(self, flags: Mapping[str, object] | None = None, file: Path | None = None) -> "Config":
        """The configuration that the daemon has, or would have, here. Raises ConfigError."""
        from dep2p.errors import ConfigError

        target = self.target(flags, file)
        if target.config is None:
            raise ConfigError(
                f"the daemon at {target.tcp} is on another machine ({target.origin}), and this command uses files of a "
                "node here. Name one with --data-dir, or --context default."
            )
        return target.config

    @property
    def data_dir(self) -> Path:
        """The node's data directory, absolute. Raises ConfigError."""
        return self.config().data_dir

    def emit(self, value: "Mapping[str, object] | Struct") -> None:
        """Print one JSON object on one line to stdout, at once."""
        from json import dumps

        self.write(dumps(value, ensure_ascii=False, default=_plain).encode("utf-8", "backslashreplace") + b"\n")

    def print(self, text: str) -> None:
        """Print text to stdout, at once. Control characters become escapes, but for newline, tab and own styles."""
        print(styled(text), flush=True)

    def write(self, data: bytes) -> None:
        """Write bytes to stdout, at once."""
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()

    def say(self, text: str) -> None:
        """Write a message for the user to stderr; not with --quiet."""
        if not self.quiet:
            print(styled(text), file=sys.stderr, flush=True)

    def warn(self, text: str) -> None:
        """Write a warning for the user to stderr, even with --quiet."""
        print(styled(text), file=sys.stderr, flush=True)

    def report_feed(self, change: "FeedInterrupted | FeedResumed") -> None:
        """Report that a subscription lost the daemon, or that it goes on."""
        from dep2p.client import FeedInterrupted

        if self.json:
            self.emit(feed_fields(change))
        elif isinstance(change, FeedInterrupted):
            self.warn(f"interrupted: {printable(change.reason)}; waiting to go on")
        else:
            lost = "; what was sent in between is lost" if change.loses else ""
            self.warn(f"connected again after {change.away_s:.1f} s{lost}")

    def paint(self, text: str, style: str) -> str:
        """``text`` in bold, green, yellow, red or dim when stdout is a terminal that wants colour."""
        codes = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33"}
        return f"\x1b[{codes[style]}m{text}\x1b[0m" if self.color else text

    @contextlib.asynccontextmanager
    async def client(self) -> "AsyncGenerator[Client, None]":
        """A client of the running daemon. Raises DaemonUnreachableError on entry or at the first call."""
        import logging
        import math

        from dep2p.client import Client
        from dep2p.client.opening import transport_for
        from dep2p.client.reconnection.outages import ReconnectBounds

        # This command reports interruptions itself; without a handler Python prints the client's warnings.
        logging.getLogger("dep2p.client").addHandler(logging.NullHandler())
        bounds = ReconnectBounds(math.inf, self.call_reconnect_s) if self.reconnect else ReconnectBounds(0.0, 0.0)
        async with Client.over(transport_for(self.target(), bounds)) as client:
            client.watch_feeds(self.report_feed)
            yield client

    def with_client(self, body: "Callable[[Client], Awaitable[T]]") -> T:
        """Run ``body`` with a connected client and return its result."""

        async def main() -> T:
            async with self.client() as client:
                return await body(client)

        return run_async(main)


def feed_fields(change: "FeedInterrupted | FeedResumed") -> dict[str, object]:
    """Return the JSON line of an interruption or of its end."""
    from dep2p.client import FeedInterrupted

    if isinstance(change, FeedInterrupted):
        return {"event": "interrupted", "feed": change.feed, "reason": change.reason}
    return {"event": "resumed", "feed": change.feed, "away_s": round(change.away_s, 3), "loses": change.loses}


def run_async(main: Callable[[], Awaitable[T]]) -> T:
    """Run an async function to its end on asyncio.

    Ctrl-C cancels it and raises KeyboardInterrupt; SIGTERM cancels it, too, so that nothing it started is left behind,
    and raises ``typer.Exit`` with 143. Where the cancellation changes nothing, since a file or pipe blocks the program,
    the process ends with 143 after TERMINATE_S.
    """
    import asyncio
    import signal
    import threading

    import anyio

    status = 128 + signal.SIGTERM
    ending = threading.Timer(TERMINATE_S, os._exit, [status])
    ending.daemon = True

    async def guarded_main() -> T:
        task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        assert task is not None

        def terminate(*_: object) -> None:
            # Runs also while the loop's own thread waits in a system call, when the loop can take no signal.
            if not ending.is_alive():
                ending.start()
                loop.call_soon_threadsafe(task.cancel)

        with contextlib.suppress(ValueError):  # not the main thread, as in some tests
            before = signal.signal(signal.SIGTERM, terminate)
            stack.callback(signal.signal, signal.SIGTERM, before)
        try:
            return await main()
        except asyncio.CancelledError:
            if ending.is_alive():
                raise typer.Exit(status) from None
            raise

    with contextlib.ExitStack() as stack:
        stack.callback(ending.cancel)
        return anyio.run(guarded_main, backend="asyncio")


def _shared_parameters(*, root: bool, waits: bool) -> list[inspect.Parameter]:
    hidden = not root

    def option(*names: str, help: str, metavar: str | None = None, hide: bool = hidden) -> Any:
        return typer.Option(*names, help=help, metavar=metavar, hidden=hide, show_default=False)

    kinds: dict[str, tuple[Any, Any]] = {
        "shared_data_dir": (
            Annotated[
                str | None,
                option("--data-dir", metavar="DIR", help="The node's data directory (else DEP2P_DATA_DIR)."),
            ],
            None,
        ),
        "shared_socket": (
            Annotated[
                str | None,
                option("--socket", metavar="PATH", help="The daemon's control socket (else DEP2P_SOCKET)."),
            ],
            None,
        ),
        "shared_context": (
            Annotated[
                str | None,
                option("--context", metavar="NAME", help="A daemon of `dep2p context` (else DEP2P_CONTEXT)."),
            ],
            None,
        ),
        "shared_json": (
            Annotated[
                bool, option("--json", help="Print JSON: one object, or one per line where more follow.", hide=False)
            ],
            False,
        ),
        "shared_quiet": (Annotated[bool, option("--quiet", "-q", help="Print data and errors only.")], False),
        "shared_no_color": (
            Annotated[bool, option("--no-color", help="No colours (as with NO_COLOR in the environment).")],
            False,
        ),
        "shared_no_reconnect": (
            Annotated[
                bool,
                option(
                    "--no-reconnect",
                    help="End when the daemon goes away, instead of waiting for it.",
                    hide=not root and not waits,
                ),
            ],
            False,
        ),
    }
    for name, (annotation, _default) in kinds.items():
        _complete_values(name, annotation)
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
        for name, (annotation, default) in kinds.items()
    ]


def _merge(context: typer.Context, given: Mapping[str, Any]) -> Invocation:
    root = context.find_root()
    if not isinstance(root.obj, Invocation):
        root.obj = Invocation()
    run = root.obj
    run.json = run.json or bool(given["shared_json"])
    run.quiet = run.quiet or bool(given["shared_quiet"])
    run.reconnect = run.reconnect and not given["shared_no_reconnect"]
    run.given_data_dir = _filled("--data-dir", given["shared_data_dir"], run.given_data_dir)
    run.socket = _filled("--socket", given["shared_socket"], run.socket)
    run.context = _filled("--context", given["shared_context"], run.context)
    chosen = [name for name, value in (("--data-dir", run.given_data_dir), ("--socket", run.socket)) if value]
    if run.context is not None and chosen:
        raise typer.BadParameter(f"--context and {chosen[0]} each say which daemon is meant: give one of them")
    plain = bool(given["shared_no_color"]) or bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    run.color = sys.stdout.isatty() and not plain if context is root or plain else run.color
    return run


def _filled(option: str, given: str | None, before: str | None) -> str | None:
    """The option's value, or the one before the command. Raises Typer's usage error for an empty one."""
    if given is None:
        return before
    if not given.strip():
        raise typer.BadParameter(f"{option} is empty: leave it out, or give it a value")
    return os.path.expanduser(given)


def _complete_values(name: str, annotation: object) -> None:
    """Let the shell complete the values of a parameter, unless the command says how."""
    complete = BY_PARAMETER.get(name)
    for info in getattr(annotation, "__metadata__", ()):
        if complete is not None and isinstance(info, OptionInfo | ArgumentInfo) and info.autocompletion is None:
            info.autocompletion = complete


def _with_shared(
    function: Callable[..., Any], call: Callable[..., Any], *, root: bool = False, waits: bool = False
) -> Callable[..., Any]:
    """Return ``call`` with the signature of ``function``, Typer's context for its first parameter, and the shared
    options."""
    hints = get_type_hints(function, include_extras=True)
    own = list(inspect.signature(function).parameters.values())[1:]
    for parameter in own:
        _complete_values(parameter.name, hints[parameter.name])
    context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    parameters = (
        [context]
        + [p.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[p.name]) for p in own]
        + _shared_parameters(root=root, waits=waits)
    )

    @functools.wraps(function)
    def wrapper(**kwargs: Any) -> Any:
        ctx = kwargs.pop("context")
        shared = {name: kwargs.pop(name) for name in list(kwargs) if name.startswith("shared_")}
        return call(_merge(ctx, shared), **kwargs)

    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    del wrapper.__wrapped__
    return wrapper


def guarded(run: Invocation, call: Callable[[], Any]) -> None:
    """Run a command and turn its errors into lines on stderr and an exit code. Raises ``typer.Exit``."""
    try:
        result = call()
        sys.stdout.flush()
    except BrokenPipeError:
        silence_stdout()
        raise typer.Exit(EXIT_OK) from None
    except (typer.Exit, typer.Abort, KeyboardInterrupt):
        raise
    except BaseException as error:
        if hasattr(error, "format_message"):  # main() shows Typer's own usage errors
            raise
        cause = first_error(error)
        if isinstance(cause, BrokenPipeError):
            silence_stdout()
            raise typer.Exit(EXIT_OK) from None
        if isinstance(cause, KeyboardInterrupt | SystemExit | typer.Exit):
            raise cause from None
        if os.environ.get("DEP2P_TRACEBACK"):
            from traceback import print_exception

            print_exception(error)
        failure = describe(error)
        if isinstance(cause, OSError):
            silence_stdout()  # what it still holds may be what could not be written
        show(failure, json=run.json)
        raise typer.Exit(failure.exit_code) from None
    if isinstance(result, int) and result:
        raise typer.Exit(result)


def silence_stdout() -> None:
    """Point stdout at nothing, so that the interpreter's last flush cannot fail on a closed pipe."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        return  # stdout is no file here (in a test), so nothing will be flushed to it


def command(
    app: typer.Typer,
    name: str,
    *,
    examples: Sequence[tuple[str, str]] = (),
    notes: str = "",
    hidden: bool = False,
    waits: bool = False,
) -> Callable[[Callable[Concatenate[Invocation, P], int | None]], Callable[Concatenate[Invocation, P], int | None]]:
    """Register a command. It gets the :class:`Invocation` first and may return its exit code.

    ``waits``: it goes on over a restart of the daemon.
    """

    def register(
        function: Callable[Concatenate[Invocation, P], int | None],
    ) -> Callable[Concatenate[Invocation, P], int | None]:
        def call(run: Invocation, **kwargs: Any) -> None:
            guarded(run, lambda: cast(Callable[..., Any], function)(run, **kwargs))

        wrapper = _with_shared(function, call, waits=waits)
        texts = [inspect.cleandoc(notes), _WAITS if waits else ""]
        MANUALS[wrapper] = Manual(tuple(examples), "\n\n".join(text for text in texts if text))
        epilog = None
        if examples:
            epilog = "\b\nExamples:\n" + "\n".join(f"  {line}" for line, _ in examples)
        settings = {"help_option_names": ["--help", "-h"], "max_content_width": 100}
        app.command(name, cls=PlainCommand, epilog=epilog, hidden=hidden, context_settings=settings)(wrapper)
        return function

    return register


def group(app: typer.Typer, name: str, help: str) -> typer.Typer:
    """Add a group of commands, which takes the shared options too."""
    sub = typer.Typer(
        cls=PlainGroup,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        help=help,
        context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 100},
    )

    def remember(run: Invocation) -> None:
        """Take the shared options, and nothing else."""

    sub.callback()(_with_shared(remember, remember))
    app.add_typer(sub, name=name, help=help)
    return sub


def root_callback(app: typer.Typer, function: Callable[..., None]) -> None:
    """Make ``function(run, …)`` the callback of the whole app, with the shared options visible in its help."""
    app.callback()(_with_shared(function, function, root=True))
