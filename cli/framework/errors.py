"""Reports of errors: the error, its cause, the next step and the code. The command line has no other way."""

import errno
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TextIO

from dep2p.concurrency.exception_groups import first_error
from dep2p.control_api.errors import ControlError, code_of
from dep2p.error_codes import (
    ERRORS,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_NOT_FOUND,
    EXIT_OK,
    EXIT_REFUSED,
    EXIT_TIMEOUT,
    EXIT_UNREACHABLE,
    EXIT_USAGE,
)
from dep2p.errors import Dep2pError
from dep2p.outside_text import printable, styled

EXIT_MEANINGS: Final = {
    EXIT_OK: "done",
    EXIT_FAILED: "failed",
    EXIT_USAGE: "wrong use: unknown command or option, bad value, bad configuration",
    EXIT_UNREACHABLE: "the daemon cannot be reached",
    EXIT_NOT_FOUND: "no such peer, realm, handler, file or code",
    EXIT_TIMEOUT: "timed out, or the other side did not acknowledge",
    EXIT_REFUSED: "refused by the other side, or not allowed",
    EXIT_INTERRUPTED: "interrupted (Ctrl-C)",
}


class CliError(Dep2pError):
    """An error for the user of the command line.

    ``code`` is one of :mod:`dep2p.error_codes`, whose exit code and next step hold unless others are given.
    """

    def __init__(
        self, message: str, code: str, *, exit_code: int | None = None, cause: str = "", tries: Sequence[str] = ()
    ) -> None:
        super().__init__(message)
        self.code = code
        self.exit_code = exit_code
        self.cause = cause
        self.tries: tuple[str, ...] = tuple(tries)


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """An error, ready to be shown."""

    message: str
    code: str
    exit_code: int
    cause: str = ""
    tries: tuple[str, ...] = ()
    status: int = 0

    def text(self) -> str:
        """The lines ``error:``, ``cause:``, ``try:`` and ``code:``; those without content are left out."""
        lines = [f"error: {printable(self.message)}"]
        if self.cause:
            lines.append(f"  cause: {printable(self.cause)}")
        if self.tries:
            lines.append("  try:   " + printable("   or   ".join(self.tries)))
        lines.append(f"  code:  {self.code} (dep2p errors show {self.code})")
        return "\n".join(lines)

    def problem(self) -> dict[str, object]:
        """The same report as an RFC 9457 problem, with ``code``, ``try`` and ``exit_code``."""
        problem: dict[str, object] = {
            "type": f"urn:dep2p:error:{self.code}",
            "title": ERRORS[self.code].title if self.code in ERRORS else self.message,
        }
        if self.status:
            problem["status"] = self.status
        problem["detail"] = self.message
        if self.cause:
            problem["cause"] = self.cause
        if self.tries:
            problem["try"] = list(self.tries)
        return problem | {"code": self.code, "exit_code": self.exit_code}


def describe(error: BaseException) -> ErrorReport:
    """Turn any exception into a report for the user."""
    error = first_error(error)
    if isinstance(error, CliError):
        return _failure(str(error), error.code, error.tries, cause=error.cause, exit_code=error.exit_code)
    if isinstance(error, ControlError):
        tries = (error.hint,) if error.hint else ()
        detail, _, cause = error.detail.partition(": ") if error.code == "D3001" else (error.detail, "", "")
        return _failure(detail, error.code, tries, cause=cause, status=error.status)
    if isinstance(error, Dep2pError):
        return _failure(str(error) or type(error).__name__, code_of(error))
    if isinstance(error, OSError) and error.errno == errno.EBADF and not error.filename:
        return _failure("standard input or output is closed", "D6006", ("give it a file, a pipe or /dev/null",))
    if isinstance(error, OSError):
        exit_code = EXIT_NOT_FOUND if isinstance(error, FileNotFoundError) else EXIT_FAILED
        where = f"{error.filename}: " if error.filename else ""
        return _failure(f"{where}{error.strerror or error}", "D6006", exit_code=exit_code)
    return _failure(
        f"internal error: {type(error).__name__}: {error}",
        "D9001",
        ("report it with the command and this text",),
        cause="a bug in dep2p; with DEP2P_TRACEBACK=1 in the environment it shows where",
    )


def _failure(
    message: str,
    code: str,
    tries: Sequence[str] = (),
    *,
    cause: str = "",
    exit_code: int | None = None,
    status: int = 0,
) -> ErrorReport:
    row = ERRORS.get(code)
    if row is not None:
        tries = tries or (row.what_to_try,)
        exit_code = row.exit_code if exit_code is None else exit_code
    return ErrorReport(message, code, EXIT_FAILED if exit_code is None else exit_code, cause, tuple(tries), status)


def show(failure: ErrorReport, *, json: bool, stream: TextIO | None = None) -> None:
    """Print a failure to stderr: four lines, or one JSON problem."""
    target = sys.stderr if stream is None else stream
    if json:
        from json import dumps

        text = dumps(failure.problem(), ensure_ascii=False)
    else:
        text = failure.text()
    try:
        print(styled(text), file=target, flush=True)
    except OSError:
        return  # stderr is closed: the exit code is the only report
