"""Running, draining, stopping: whether the daemon takes work, and when all of it is done."""

import logging
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import Literal

import trio

from dep2p.daemon.problems import Problem

_logger = logging.getLogger("dep2p.daemon")


class Lifecycle:
    """The daemon's state. ``drain_node`` stops the node from taking work and waits for what it has in flight."""

    def __init__(self, drain_node: Callable[[], Awaitable[None]], drain_timeout_s: float) -> None:
        self.state: Literal["running", "draining", "stopping"] = "running"
        self.stop_requested: trio.Event = trio.Event()
        """Set by POST /v1/shutdown."""
        self.drained: trio.Event = trio.Event()
        self._drain_node = drain_node
        self._drain_timeout_s = drain_timeout_s
        self._in_flight = 0
        self._idle = trio.Event()

    @property
    def in_flight(self) -> int:
        """The number of control calls and streams at work."""
        return self._in_flight

    def require_running(self) -> None:
        """Raises :class:`Problem` D3006 when the daemon takes no new work."""
        if self.state != "running":
            raise Problem("D3006", "the daemon is draining and takes no new work")

    @contextmanager
    def work(self) -> Generator[None, None, None]:
        """Count a piece of work that a drain waits for. Raises :class:`Problem` D3006 when the daemon takes no new
        work."""
        self.require_running()
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1
            if self._in_flight == 0:
                self._idle.set()

    async def drain(self) -> None:
        """Take no new work and wait for work in flight, at most the drain timeout; later calls wait too."""
        if self.state != "running":
            await self.drained.wait()
            return
        self.state = "draining"
        _logger.info("draining", extra={"in_flight": self._in_flight, "timeout_s": self._drain_timeout_s})
        try:
            with trio.move_on_after(self._drain_timeout_s) as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._drain_node)
                    nursery.start_soon(self._wait_idle)
        finally:
            self.drained.set()
        if scope.cancelled_caught:
            _logger.warning("the drain ended by its timeout", extra={"in_flight": self._in_flight})
        else:
            _logger.info("drained")

    async def _wait_idle(self) -> None:
        while self._in_flight:
            self._idle = trio.Event()
            await self._idle.wait()

    def stop(self) -> None:
        """Note that the process ends next."""
        self.state = "stopping"
        self.drained.set()
