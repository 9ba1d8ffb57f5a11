"""Tasks that run request handlers one after the other: waking an idle one costs a fraction of spawning another."""

import contextvars
import logging
from typing import Final, Protocol

import trio
from outcome import Value

from dep2p.concurrency.wait_queue import suspend

logger: logging.Logger = logging.getLogger("dep2p.io")

_IDLE_MAX: Final = 128


class Work(Protocol):
    """Work to run in a worker."""

    scope: trio.CancelScope | None
    """Set while it runs: cancel it to stop the work. The scope outlives the work, so never keep it."""

    async def run(self) -> None:
        """Do the work. It must handle its own exceptions; only cancellation leaves it."""
        ...


class Workers:
    """A pool without an upper bound: the caller of `start` bounds the work."""

    def __init__(self) -> None:
        self._idle: list[trio.lowlevel.Task] = []
        self._nursery: trio.Nursery | None = None
        self._context = contextvars.Context()
        self.spawned: int = 0

    def serve_in(self, nursery: trio.Nursery) -> None:
        """Set the nursery of the worker tasks."""
        self._nursery = nursery
        self._context = contextvars.copy_context()

    def start(self, work: Work) -> None:
        """Run ``work`` in a task of its own for that time, with a fresh copy of the context."""
        if self._idle:
            task = self._idle.pop()
            task.context = self._context.copy()
            trio.lowlevel.reschedule(task, Value(work))
        elif self._nursery is not None:
            self.spawned += 1
            self._context.run(self._nursery.start_soon, self._serve, work)

    async def _serve(self, work: Work) -> None:
        box = [work]  # emptied when the work begins: an idle worker keeps no request in memory
        del work
        while box:
            try:
                await self._serve_in_one_scope(box)
            except Exception:  # a handler's own nursery failed while it was cancelled
                logger.exception("a cancelled handler failed")
                await self._next(box)

    async def _serve_in_one_scope(self, box: list[Work]) -> None:
        """Run works until one is cancelled or the worker is not needed any more. One scope serves many works."""
        with trio.CancelScope() as scope:
            while box:
                await self._run(box.pop(), scope)
                if scope.cancel_called:
                    break
                await self._next(box)
                if not box:
                    return
        await self._next(box)

    async def _run(self, work: Work, scope: trio.CancelScope) -> None:
        work.scope = scope
        try:
            await work.run()
        finally:
            work.scope = None

    async def _next(self, box: list[Work]) -> None:
        """Wait for work and put it into ``box``; nothing when there are idle workers enough."""
        if len(self._idle) >= _IDLE_MAX:
            return
        task = trio.lowlevel.current_task()
        self._idle.append(task)
        work: Work = await suspend(lambda: self._idle.remove(task))
        box.append(work)
