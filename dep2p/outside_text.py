"""The one place that makes text from outside safe for terminals, logs, file names and environments.

Peers choose their names, keys, topics and error texts; files and programs hold texts, too. Such a text may have escape
sequences that drive a terminal, line ends that forge log lines, path separators, and NUL, which ends a C string.
`tests/test_outside_text.py` finds uses that go around this module.
"""

import hashlib
import re
from collections.abc import Mapping
from typing import Final

_PLAIN_FILE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_COLOUR: Final = re.compile(r"(\x1b\[(?:0|1|2|31|32|33)m)")
"""The styles of the command line's own output."""
_VARIABLE_BYTES_MAX: Final = 100_000
"""Linux takes 131,072 bytes for a variable with its name; more, and no program can be started."""


def printable(text: str) -> str:
    """For a terminal: control and invisible characters become escapes; newline and tab stay."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in "\n\t" else _escaped(char) for char in text)


def one_line(text: str) -> str:
    """For a log line or a cell of a table: as `printable`, with newline and tab as escapes too."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escaped(char) for char in text)


def styled(text: str) -> str:
    """For a terminal, of text that has styles of our own: as `printable`; the styles stay."""
    if text.isprintable():
        return text
    return "".join(part if number % 2 else printable(part) for number, part in enumerate(_COLOUR.split(text)))


def styled_line(text: str) -> str:
    """For a cell of a table, of text that has styles of our own: as `one_line`; the styles stay."""
    if text.isprintable():
        return text
    return "".join(part if number % 2 else one_line(part) for number, part in enumerate(_COLOUR.split(text)))


def sendable(text: str, bytes_max: int) -> str:
    """For a text field of a message: half of a surrogate pair, as in names of files, becomes its escape; what is over
    ``bytes_max`` bytes of UTF-8 is cut off."""
    return text.encode("utf-8", "backslashreplace")[:bytes_max].decode("utf-8", "ignore")


def file_name(text: str) -> str:
    """For one component of a path: a plain ASCII word of up to 64 characters stays; all else becomes a digest.

    The result never leaves its directory, is never hidden, and differs for different texts.
    """
    if _PLAIN_FILE_NAME.fullmatch(text):
        return text
    return "x-" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def environment(own: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """For a child process: ``own`` environment, and the ``given`` variables with values from outside.

    NUL, which no variable can hold, becomes the escape ``\\x00``, half of a surrogate pair its escape. A value of more
    than 100,000 bytes is cut.
    """
    return {**own, **{name: _variable(value) for name, value in given.items()}}


def _variable(value: str) -> str:
    encoded = value.replace("\0", "\\x00").encode("utf-8", "backslashreplace")
    return encoded[:_VARIABLE_BYTES_MAX].decode("utf-8", "ignore")


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")
