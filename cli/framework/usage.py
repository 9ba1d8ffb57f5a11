"""Usage lines and options, as we declare them, without Typer's type names."""

from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches
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
"""The name of an option's value when its declaration gives none."""

_WIDENS: Final = frozenset({"all", "any", "force", "yes", "overwrite", "allow"})
"""First words of options that make a command do more: to everything, over what is there, without asking."""
_SIMILARITY_MIN: Final = 0.65
_OWN_SIMILARITY_MIN: Final = 0.7
_OWN_LENGTH_DIFFERENCE_MAX: Final = 2


def widens(option: str) -> bool:
    """Whether ``--all-channels`` and its like: no hint offers such an option unless the user meant it."""
    return option.removeprefix("--").split("-")[0] in _WIDENS


def nearest_option(wrong: str, parameters: Iterable[Any]) -> str | None:
    """The option that an unknown one may stand for, or the argument: with it a command never does more than was typed.

    >>> from types import SimpleNamespace
    >>> channels = SimpleNamespace(param_type_name="option", opts=["--all-channels"])
    >>> nearest_option("--all-chanels", [channels]), nearest_option("--chanels", [channels])
    ('--all-channels', None)
    """
    typed = wrong.lstrip("-").lower()
    names: dict[str, str] = {}
    for parameter in parameters:
        if parameter.param_type_name == "argument":
            shown = argument_name(parameter)
            names.setdefault(shown.strip("[].").lower(), shown)
        else:
            names |= {option[2:]: option for option in parameter.opts if option.startswith("--")}
    for name in get_close_matches(typed, list(names), n=len(names) or 1, cutoff=_SIMILARITY_MIN):
        if not widens(names[name]) or _is_misspelling(typed, name):
            return names[name]
    return None


def _is_misspelling(wrong: str, option: str) -> bool:
    """Whether the option itself was meant: one letter or two are wrong, or the word that widens is there."""
    if wrong.split("-")[0] == option.split("-")[0]:
        return True
    is_alike = SequenceMatcher(None, wrong, option).ratio() >= _OWN_SIMILARITY_MIN
    return is_alike and abs(len(wrong) - len(option)) <= _OWN_LENGTH_DIFFERENCE_MAX


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
    """The part of a usage line behind the command's name."""
    if hasattr(command, "commands"):
        return ["[OPTIONS]", "COMMAND [ARGS]..."]
    return [
        "[OPTIONS]",
        *(argument_name(p) for p in command.get_params(context) if p.param_type_name == "argument" and not p.hidden),
    ]


class PlainCommand(typer.core.TyperCommand):
    """A command whose help has our names."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The part of the usage line behind the command's name."""
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
