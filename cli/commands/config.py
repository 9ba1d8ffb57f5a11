"""``dep2p config``: the effective configuration, where each value comes from, and whether a file is right."""

from pathlib import Path
from typing import Annotated

import typer

from dep2p.cli.framework.command import Invocation, command, group
from dep2p.cli.framework.render import table

FileOption = Annotated[Path | None, typer.Option("--config", help="Read this file instead of the default one.")]


def show_config(
    run: Invocation,
    file: FileOption = None,
    origin: Annotated[bool, typer.Option("--origin", help="Also say where each value comes from.")] = False,
) -> None:
    """Print the configuration that the daemon would start with, as TOML."""
    config = run.config(file=file)
    if run.json:
        shown: dict[str, object] = {
            "config": config.as_dict(),
            "file": None if config.file is None else str(config.file),
        }
        if origin:
            shown["origins"] = dict(config.origins)
        run.emit(shown)
    else:
        run.print(config.to_toml(origin=origin).rstrip("\n"))


def check_config(
    run: Invocation,
    given: Annotated[
        Path | None, typer.Argument(help="The file; by default the one the daemon reads.", metavar="[FILE]")
    ] = None,
) -> None:
    """Check a configuration file together with the environment. Exit status 2 when something is wrong."""
    config = run.config(file=given)
    where = None if config.file is None else str(config.file)
    if run.json:
        run.emit({"ok": True, "file": where})
    else:
        run.print(f"ok: {where}" if where else "ok: no configuration file, defaults and environment only")


def config_path(run: Invocation) -> None:
    """Print where the configuration file is, or belongs."""
    config = run.config()
    path = config.file or config.data_dir / "config.toml"
    if run.json:
        run.emit({"path": str(path), "exists": path.exists()})
    else:
        run.print(str(path))
        if not path.exists():
            run.say("it does not exist; make it with: dep2p config example > " + str(path))


def example_config(run: Invocation) -> None:
    """Print a file with every key, its meaning and its default."""
    from dep2p.config.loader import example_toml

    text = example_toml()
    if run.json:
        run.emit({"toml": text})
    else:
        run.print(text.rstrip("\n"))


def list_variables(run: Invocation) -> None:
    """List every DEP2P_* variable and what it sets; any other is refused."""
    from dep2p.config.environment import RESERVED, RESERVED_STARTS
    from dep2p.config.loader import setting_variables

    uses = {name: f"[{key.section}] {key.name}" for name, key in setting_variables().items()} | dict(RESERVED)
    uses |= {f"{start}*": "tests and benchmarks" for start in RESERVED_STARTS}
    if run.json:
        run.emit({"variables": uses})
    else:
        run.print(table(["VARIABLE", "USE"], list(uses.items())))


def register(app: typer.Typer) -> None:
    """Add the group ``config``."""
    sub = group(app, "config", "Show, check and explain the configuration.")
    command(
        sub,
        "show",
        examples=[("dep2p config show --origin", "each value with the flag, variable or file that set it")],
        notes="Flags come before DEP2P_* variables, these before the file, this before the defaults.",
    )(show_config)
    command(sub, "check", examples=[("dep2p config check ./config.toml", "before a restart")])(check_config)
    command(sub, "path", examples=[("dep2p config path", "the file that the daemon reads")])(config_path)
    command(sub, "example", examples=[("dep2p config example", "a commented file to start from")])(example_config)
    command(sub, "variables", examples=[("dep2p config variables", "each with the setting or use that it has")])(
        list_variables
    )
