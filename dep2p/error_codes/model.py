"""One row of the table of D-codes (`dep2p.error_codes`), and the command line's exit codes."""

from dataclasses import dataclass
from typing import Final

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_UNREACHABLE: Final = 3
EXIT_NOT_FOUND: Final = 4
EXIT_TIMEOUT: Final = 5
EXIT_REFUSED: Final = 6
EXIT_INTERRUPTED: Final = 130


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """One row of the table."""

    code: str
    title: str
    """Half a sentence, the same each time the code appears."""
    explanation: str
    """The meaning of the error, and its possible causes."""
    what_to_try: str
    """The next step, a command where there is one."""
    http_status: int
    """Status of the control API's answer; 500 where the code never crosses it."""
    exit_code: int
    """Exit code of the command line."""
