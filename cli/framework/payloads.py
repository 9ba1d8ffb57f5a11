"""Payloads: their source (argument, file, standard input), and how the command line shows them."""

import os
import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from dep2p.cli.framework.command import Invocation
from dep2p.cli.framework.errors import CliError
from dep2p.cli.framework.render import byte_count, text_of
from dep2p.error_codes import EXIT_NOT_FOUND
from dep2p.outside_text import printable

PAYLOAD_BYTES_MAX: Final = 64 * 1024 * 1024
"""Bytes read from a file or a pipe at most: far above any message limit, far below the memory."""

RealmOption = Annotated[
    str | None, typer.Option("--realm", help="The realm, by name or id; needed when the node is in several.")
]
DataArgument = Annotated[
    str | None, typer.Argument(help="The payload as text; - reads it from standard input.", metavar="[BODY|-]")
]
FileOption = Annotated[Path | None, typer.Option("--file", "-f", help="Read the payload from this file.")]
HeaderOption = Annotated[
    list[str] | None, typer.Option("--header", "-H", help="A header KEY=VALUE; may be repeated.", metavar="KEY=VALUE")
]


def check_name(name: str) -> None:
    """Check the name of a request, notify or stream. Raises :class:`CliError`."""
    if not name.isprintable() or not 1 <= len(name.encode("utf-8", "surrogateescape")) <= 255:
        raise CliError(f"{name[:80]!r} is no name: a name has 1 to 255 bytes, all printable", "D1001")


def cannot_read(path: Path, error: OSError) -> CliError:
    """Return the error for a user's file that cannot be read; exit 4 when there is none."""
    missing = isinstance(error, FileNotFoundError)
    tries = ("check the path",) if missing else ()
    exit_code = EXIT_NOT_FOUND if missing else None
    return CliError(f"cannot read {path}: {error.strerror}", "D6006", exit_code=exit_code, tries=tries)


def read_payload(data: str | None, file: Path | None) -> bytes:
    """Read the payload; empty when none is given. Raises :class:`CliError`."""
    if data is not None and file is not None:
        raise CliError("BODY and --file exclude each other", "D1001")
    if file is not None and str(file) != "-":
        try:
            with file.open("rb") as opened:
                content = opened.read(PAYLOAD_BYTES_MAX + 1)
        except OSError as error:
            raise cannot_read(file, error) from None
    elif file is not None or data == "-":
        content = sys.stdin.buffer.read(PAYLOAD_BYTES_MAX + 1)
    else:
        content = b"" if data is None else os.fsencode(data)
    if len(content) > PAYLOAD_BYTES_MAX:
        raise CliError(
            f"the payload is over {byte_count(PAYLOAD_BYTES_MAX)}", "D5004", tries=("dep2p stream send PEER FILE",)
        )
    return content


def read_headers(given: list[str] | None) -> dict[str, object] | None:
    """Parse ``KEY=VALUE`` texts as headers. Raises :class:`CliError`."""
    headers: dict[str, object] = {}
    for text in given or ():
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise CliError(f"--header {text!r} is not KEY=VALUE", "D1001")
        headers[key] = value
    return headers or None


def show_payload(run: Invocation, data: bytes, *, raw: bool = False, nul: bool = False) -> None:
    """Write a payload to stdout.

    ``raw``: the bytes and nothing else; ``nul``: the bytes and a NUL. Otherwise text gets a line end and, on a
    terminal, its control characters are shown as escapes; a terminal gets no binary data.
    """
    if raw or nul:
        run.write(data + b"\0" if nul else data)
        return
    text = text_of(data)
    if not sys.stdout.isatty():
        run.write(data if data.endswith(b"\n") or text is None else data + b"\n")
    elif text is None:
        run.say(f"{byte_count(len(data))} of binary data; --raw writes it, --json shows it in base64")
    else:
        run.print(printable(text.removesuffix("\n")))
