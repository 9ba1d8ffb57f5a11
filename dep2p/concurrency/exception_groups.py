"""Exception groups: a nursery puts even a single error into a group; apps expect the error itself.

Trio is imported only where a nursery is opened: the command line uses the rest without it.
"""

from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, TypeVar, cast, overload

if TYPE_CHECKING:
    import trio

E = TypeVar("E", bound=BaseException)


@contextmanager
def unwrap_single() -> Generator[None]:
    """Raise the only exception of a group instead of the group. Several at once stay a group."""
    try:
        yield
    except BaseExceptionGroup as group:
        error = _single_leaf(group)
        context = error.__context__
        try:
            raise error
        finally:
            error.__context__ = context  # raising it here has put the group there
            del error  # its traceback holds this frame


@asynccontextmanager
async def open_nursery_unwrapped() -> "AsyncGenerator[trio.Nursery]":
    """A nursery that raises a single error as it is, instead of a group of one."""
    import trio

    with unwrap_single():
        async with trio.open_nursery() as nursery:
            yield nursery


@overload
def leaves(error: BaseExceptionGroup[E]) -> list[E]: ...


@overload
def leaves(error: E) -> list[E]: ...


def leaves(error: BaseException) -> Sequence[BaseException]:
    """The errors inside a group and its groups, in their order; the error itself if it is no group."""
    group = _as_group(error)
    return [error] if group is None else [leaf for part in group.exceptions for leaf in leaves(part)]


@overload
def first_error(error: BaseExceptionGroup[E]) -> E: ...


@overload
def first_error(error: E) -> E: ...


def first_error(error: BaseException) -> BaseException:
    """The first error inside a group and its groups, or the error itself if it is no group."""
    return leaves(error)[0]


def one_line(error: BaseException) -> str:
    """An exception in one line of a log, without the groups of one around it."""
    return repr(_single_leaf(error))


def _single_leaf(error: BaseException) -> BaseException:
    group = _as_group(error)
    return error if group is None or len(group.exceptions) > 1 else _single_leaf(next(iter(group.exceptions)))


def _as_group(error: BaseException) -> BaseExceptionGroup[BaseException] | None:
    return cast("BaseExceptionGroup[BaseException]", error) if isinstance(error, BaseExceptionGroup) else None
