"""``dep2p errors``: the meaning of each code, and the next step."""

from typing import Annotated

import typer

from dep2p.cli.framework.command import Invocation, command, group
from dep2p.cli.framework.errors import CliError
from dep2p.cli.framework.render import table
from dep2p.error_codes import ERRORS, EXIT_NOT_FOUND, ErrorInfo, error_info


def _as_json(info: ErrorInfo) -> dict[str, object]:
    return {
        "code": info.code,
        "title": info.title,
        "explanation": info.explanation,
        "try": info.what_to_try,
        "http_status": info.http_status,
        "exit_code": info.exit_code,
    }


def show_error(
    run: Invocation, code: Annotated[str, typer.Argument(help="A code such as D3001.", metavar="CODE")]
) -> None:
    """Explain an error code and say what to try."""
    try:
        info = error_info(code)
    except KeyError:
        raise CliError(
            f"there is no error code {code!r}", "D1001", exit_code=EXIT_NOT_FOUND, tries=("dep2p errors ls",)
        ) from None
    if run.json:
        run.emit(_as_json(info))
        return
    run.print(f"{run.paint(info.code, 'bold')}  {info.title}\n\n{info.explanation}\n\nTry: {info.what_to_try}")
    run.print(f"Exit code {info.exit_code}, HTTP status {info.http_status}")


def list_errors(run: Invocation) -> None:
    """List every error code."""
    if run.json:
        run.emit({"errors": [_as_json(info) for info in ERRORS.values()]})
        return
    run.print(table(["CODE", "EXIT", "TITLE"], [[i.code, str(i.exit_code), i.title] for i in ERRORS.values()]))


def register(app: typer.Typer) -> None:
    """Add the group ``errors``."""
    sub = group(app, "errors", "Explain error codes.")
    command(sub, "show", examples=[("dep2p errors show D3001", "why the daemon cannot be reached")])(show_error)
    command(sub, "ls", examples=[("dep2p errors ls", "all codes with their titles")])(list_errors)
