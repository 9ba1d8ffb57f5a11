"""Errors as an app expects them: a nursery puts even a single one into a group."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import cast


@contextmanager
def lone_errors() -> Generator[None]:
    """Raise the only exception of a group instead of the group. Several at once stay a group."""
    try:
        yield
    except BaseExceptionGroup as group:
        error = _only(group)
        context = error.__context__
        try:
            raise error
        finally:
            error.__context__ = context  # raising it here has put the group there
            del error  # its traceback holds this frame


def _only(group: BaseExceptionGroup[BaseException]) -> BaseException:
    [first, *others] = group.exceptions
    if others:
        return group
    if isinstance(first, BaseExceptionGroup):
        return _only(cast("BaseExceptionGroup[BaseException]", first))
    return first
