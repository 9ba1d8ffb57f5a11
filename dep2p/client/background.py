"""Tasks of the client that run beside its caller's block."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import anyio.abc

Work = Callable[[Callable[[], None]], Awaitable[None]]
"""A task of the background. It calls its argument when it has started."""


@asynccontextmanager
async def tasks() -> AsyncGenerator[anyio.abc.TaskGroup, None]:
    """Open a task group that raises an error of its block as it is, and cancels its tasks at the block's end."""
    error: Exception | None = None
    async with anyio.create_task_group() as group:
        try:
            yield group
        except Exception as raised:
            error = raised
        group.cancel_scope.cancel()
    if error is not None:
        raise error


class Background:
    """The handlers of a client: each runs until its client's block ends. An error of one ends the block."""

    def __init__(self, group: anyio.abc.TaskGroup) -> None:
        self._group = group
        self._starting: dict[anyio.Event, None] = {}
        self.error: Exception | None = None
        """The error that ended the block."""

    def start(self, work: Work) -> Callable[[], None]:
        """Run ``work`` in the background; return a function that ends it."""
        scope, started = anyio.CancelScope(), anyio.Event()
        self._starting[started] = None

        def has_started() -> None:
            self._starting.pop(started, None)
            started.set()

        async def run() -> None:
            try:
                with scope:
                    await work(has_started)
            except Exception as error:  # raised as it is where the block ends, not in a group
                self.error = self.error or error
                self._group.cancel_scope.cancel()
            finally:
                has_started()

        self._group.start_soon(run)
        return scope.cancel

    async def all_started(self) -> None:
        """Wait until every handler that was added is registered at the daemon."""
        for started in list(self._starting):
            await started.wait()
