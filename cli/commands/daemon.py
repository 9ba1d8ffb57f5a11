"""``dep2p daemon``: the node, in the foreground."""

from pathlib import Path
from typing import Annotated, Any

import typer

from dep2p.cli.framework.command import Invocation, command
from dep2p.cli.framework.errors import CliError

AddrsOption = list[str] | None


def daemon(
    run: Invocation,
    config_file: Annotated[Path | None, typer.Option("--config", help="Configuration file.", metavar="FILE")] = None,
    listen: Annotated[
        AddrsOption,
        typer.Option("--listen", help="Address to listen on, port 0 for any; may be repeated.", metavar="ADDR"),
    ] = None,
    advertise: Annotated[
        AddrsOption, typer.Option("--advertise", help="Address to tell peers as well; may be repeated.", metavar="ADDR")
    ] = None,
    bootstrap: Annotated[
        AddrsOption,
        typer.Option(
            "--bootstrap", help="Peer to dial at start, ending in /p2p/PEER; may be repeated.", metavar="ADDR"
        ),
    ] = None,
    mdns: Annotated[
        bool | None, typer.Option("--mdns/--no-mdns", help="Find peers on the local network.", show_default=False)
    ] = None,
    log_level: Annotated[
        str | None, typer.Option("--log-level", help="debug, info, warning or error.", metavar="LEVEL")
    ] = None,
    log_format: Annotated[str | None, typer.Option("--log-format", help="text or json.", metavar="FORMAT")] = None,
    trace_json: Annotated[
        Path | None,
        typer.Option(
            "--trace-json", help="Append pub/sub's trace events to this file, as libp2p's JSON tracer.", metavar="FILE"
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="Any configuration key, for example limits.peers_known_max=100.", metavar="KEY=VALUE"
        ),
    ] = None,
) -> int | None:
    """Run the node in the foreground. SIGTERM, SIGHUP or Ctrl-C drains and stops it, a second one stops it at once."""
    flags: dict[str, object] = dict(_setting(text) for text in settings or ())
    given = {
        "node.listen": listen,
        "node.advertise": advertise,
        "node.bootstrap": bootstrap,
        "node.mdns": mdns,
        "pubsub.trace_json": None if trace_json is None else str(trace_json.absolute()),
        "log.level": log_level,
        "log.format": log_format,
    }
    flags |= {key: value for key, value in given.items() if value is not None}
    config = run.config(flags, config_file)

    from dep2p.daemon.process import run_daemon

    return run_daemon(config)


def _setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or "." not in key:
        raise CliError(f"--set {text!r} is not SECTION.KEY=VALUE", "D1001", tries=("dep2p config example",))
    return key.strip(), value


def register(app: typer.Typer) -> None:
    """Add ``daemon``."""
    command(
        app,
        "daemon",
        examples=[
            ("dep2p daemon", "with the data directory ~/.local/share/dep2p"),
            (
                "dep2p daemon --listen /ip4/0.0.0.0/tcp/4001 --mdns",
                "reachable by others, finds those on the local network",
            ),
            ("dep2p --data-dir ./second daemon --listen /ip4/127.0.0.1/tcp/0", "another node on the same machine"),
        ],
        notes="Options come before DEP2P_* variables, these before the configuration file (`dep2p help config show`). "
        "--json is without effect on the log; use --log-format json.",
    )(daemon)
