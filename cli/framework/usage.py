"""How usage lines and options are written: as we declare them, without Typer's type names."""

from typing import Any, Final

import typer.core

_VALUES: Final = {
    "count": "N",
    "concurrency": "N",
    "megabytes": "N",
    "size": "BYTES",
    "timeout": "SECONDS",
    "interval": "SECONDS",
    "wait": "SECONDS",
    "program": "COMMAND",
}
"""What an option's value is called when its declaration does not say."""


def argument_name(parameter: Any) -> str:
    """``PEER``, ``[FILE]``, ``FILE...``: the metavar as declared, else the name in capitals."""
    name = str(parameter.metavar or parameter.name.upper())
    return name if parameter.required or name.startswith("[") else f"[{name}]"


def option_name(parameter: Any) -> str:
    """``-t, --timeout SECONDS``."""
    names = ", ".join([*sorted(parameter.opts, key=len), *parameter.secondary_opts])
    if parameter.is_flag or parameter.name == "help":
        return names
    name = parameter.name.removeprefix("shared_")
    return f"{names} {parameter.metavar or _VALUES.get(name, name.upper())}"


def records(command: Any, context: Any, kind: str) -> list[tuple[str, str]]:
    """(name, explanation) of each visible ``argument`` or ``option`` of a command."""
    found: list[tuple[str, str]] = []
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context) if parameter.param_type_name == kind else None
        if record is not None:
            name = argument_name(parameter) if kind == "argument" else option_name(parameter)
            found.append((name, str(record[1]).replace("[required]", "").rstrip()))
    return found


def usage_pieces(command: Any, context: Any) -> list[str]:
    """What follows the command's name."""
    if hasattr(command, "commands"):
        return ["[OPTIONS]", "COMMAND [ARGS]..."]
    return [
        "[OPTIONS]",
        *(argument_name(p) for p in command.get_params(context) if p.param_type_name == "argument" and not p.hidden),
    ]


class PlainCommand(typer.core.TyperCommand):
    """A command whose help has our names."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """What follows the command's name in the usage line."""
        return usage_pieces(self, ctx)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Arguments and options as definition lists."""
        _write_lists(self, ctx, formatter)


class PlainGroup(typer.core.TyperGroup):
    """A group whose help has our names, and its commands in the order of registration."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Options, then commands."""
        _write_lists(self, ctx, formatter)
        self.format_commands(ctx, formatter)


def _write_lists(command: Any, context: Any, formatter: Any) -> None:
    for kind, heading in (("argument", "Arguments"), ("option", "Options")):
        rows = records(command, context, kind)
        if rows:
            with formatter.section(heading):
                formatter.write_dl(rows)
