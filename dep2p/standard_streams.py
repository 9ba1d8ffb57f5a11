"""Standard input, output and error of a program that was started without some of them (``>&-``)."""

import contextlib
import os
import sys
from typing import Final, Literal, TextIO

_MODES: Final = ((0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_WRONLY))
"""Descriptor and how ``/dev/null`` is opened there: reading a closed input and writing a closed output stay errors."""


def fill_standard_streams() -> None:
    """Call first of all in a program. Opens what is closed of the descriptors 0, 1 and 2.

    Else the next file or socket that the program opens would get such a number, and its prints would go there. Input
    and output that were closed raise ``OSError`` (``EBADF``) when they are used; what goes to a closed standard error
    is dropped.
    """
    for descriptor, mode in _MODES:
        try:
            os.fstat(descriptor)
        except OSError:
            with contextlib.suppress(OSError):  # a sandbox without /dev/null
                os.open(os.devnull, mode)  # the lowest free number, which is this one
    # Python leaves None where a descriptor was closed at its start.
    if _is_missing(sys.stdin):
        sys.stdin = _opened(0, "r")
    if _is_missing(sys.stdout):
        sys.stdout = _opened(1, "w")
    if _is_missing(sys.stderr):
        sys.stderr = _opened(2, "w")


def _is_missing(stream: object) -> bool:
    return stream is None


def _opened(descriptor: int, mode: Literal["r", "w"]) -> TextIO:
    return open(descriptor, mode, encoding="utf-8", errors="backslashreplace", closefd=False)
