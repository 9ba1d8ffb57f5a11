"""``dep2p help``: a manual page for every command, from the declarations of its options."""

import textwrap
from collections.abc import Iterator
from typing import Annotated, Any, Final

import typer

from dep2p.cli.framework.command import MANUALS, Invocation, Manual, command
from dep2p.cli.framework.errors import EXIT_MEANINGS, CliError
from dep2p.cli.framework.usage import records, usage_pieces

_WIDTH: Final = 100
_INDENT: Final = " " * 7


def find(root: Any, words: list[str]) -> tuple[list[str], Any]:
    """Return the command that the words name. Raises :class:`CliError` with the nearest one."""
    from difflib import get_close_matches

    path: list[str] = []
    found = root
    for word in words:
        known = dict(getattr(found, "commands", {}))
        if word not in known:
            near = get_close_matches(word, list(known), n=1, cutoff=0.5)
            tries = (" ".join(["dep2p help", *path, near[0]]),) if near else (" ".join(["dep2p help", *path]),)
            raise CliError(f"there is no command {' '.join(['dep2p', *path, word])!r}", "D1001", tries=tries)
        found = known[word]
        path.append(word)
    return path, found


def walk(found: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every visible command with its path, groups before their commands."""
    yield path, found
    for name, sub in getattr(found, "commands", {}).items():
        if not sub.hidden:
            yield from walk(sub, (*path, name))


def manual_of(found: Any) -> Manual:
    """Notes and examples of a command."""
    callback = getattr(found, "callback", None)
    while callback is not None:
        if callback in MANUALS:
            return MANUALS[callback]
        callback = getattr(callback, "__wrapped__", None)
    return Manual()


def sections(path: list[str], found: Any) -> list[tuple[str, list[str]]]:
    """The manual page as (heading, paragraphs); a paragraph that starts with two spaces is kept as it is."""
    name = " ".join(["dep2p", *path])
    context = typer.Context(found, info_name=name)
    help_text = (found.help or "").strip()
    first, _, rest = help_text.partition("\n")
    manual = manual_of(found)
    described = [" ".join(part.split()) for part in [*rest.strip().split("\n\n"), *manual.notes.split("\n\n")]]
    page = [
        ("NAME", [f"{name} - {first.rstrip('.')}"]),
        ("SYNOPSIS", [" ".join([name, *usage_pieces(found, context)])]),
        ("DESCRIPTION", [part for part in described if part]),
        ("COMMANDS", _commands(found)),
        ("ARGUMENTS", [f"  {name}\n      {text}" for name, text in records(found, context, "argument")]),
        ("OPTIONS", [f"  {name}\n      {' '.join(text.split())}" for name, text in records(found, context, "option")]),
    ]
    if not hasattr(found, "commands"):
        page.append(("EXIT STATUS", [f"  {code:<4}{meaning}" for code, meaning in EXIT_MEANINGS.items()]))
    page.append(("EXAMPLES", [f"  {line}\n      {remark}" for line, remark in manual.examples]))
    return [(heading, body) for heading, body in page if body]


def _commands(found: Any) -> list[str]:
    subs = {name: sub for name, sub in getattr(found, "commands", {}).items() if not sub.hidden}
    width = max(map(len, subs), default=0)
    return [f"  {name:<{width}}  {sub.get_short_help_str(80)}" for name, sub in subs.items()]


def page_text(path: list[str], found: Any) -> str:
    """The manual page as text of at most 100 columns."""
    lines: list[str] = []
    for heading, paragraphs in sections(path, found):
        lines.append(heading)
        for number, paragraph in enumerate(paragraphs):
            if paragraph.startswith("  "):
                for line in paragraph.splitlines():
                    left = _INDENT + line[: len(line) - len(line.lstrip())].removeprefix("  ")
                    keep = heading == "EXAMPLES" and not line.startswith("      ")
                    lines += [left + line.strip()] if keep else _wrapped(line.strip(), left)
            else:
                if number and heading == "DESCRIPTION":
                    lines.append("")
                lines += _wrapped(paragraph, _INDENT)
        lines.append("")
    return "\n".join(lines).rstrip("\n")


def _wrapped(text: str, left: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=left, subsequent_indent=left, break_long_words=False, break_on_hyphens=False
    )


def register(app: typer.Typer) -> None:
    """Add ``help``, which shows the pages of all commands of ``app``."""

    def help_page(
        run: Invocation,
        words: Annotated[
            list[str] | None, typer.Argument(help="The command, for example: realm join.", metavar="COMMAND")
        ] = None,
    ) -> None:
        """Show the manual page of a command."""
        path, found = find(typer.main.get_command(app), words or [])
        if run.json:
            page: dict[str, object] = {
                heading.lower().replace(" ", "_"): body for heading, body in sections(path, found)
            }
            run.emit({"command": " ".join(["dep2p", *path])} | page)
        else:
            run.print(page_text(path, found))

    command(
        app,
        "help",
        examples=[("dep2p help stream send", "one command"), ("dep2p help", "all of them")],
    )(help_page)
