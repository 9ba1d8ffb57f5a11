"""A part of the host that stops unexpectedly ends the host, visibly: there is no half-dead host."""

import logging
from collections.abc import Awaitable, Callable

import trio

from dep2p.concurrency.exception_groups import one_line
from dep2p.errors import HostFailedError
from dep2p.host.scopes import new_scope

logger: logging.Logger = logging.getLogger("dep2p.host")


class Supervisor:
    """Runs the parts that a host cannot do without."""

    def __init__(self) -> None:
        self.failure: HostFailedError | None = None
        self._scope: trio.CancelScope | None = None
        self._parts: dict[str, trio.CancelScope] = {}
        self._stopping = False

    def watch(self, scope: trio.CancelScope) -> None:
        """Cancel ``scope`` when a part fails."""
        self._scope = scope
        if self.failure is not None:
            scope.cancel()

    async def run(self, name: str, part: Callable[[], Awaitable[None]]) -> None:
        """Run a part that must not end before `stop`."""
        error: Exception | None = None
        with new_scope() as self._parts[name]:
            try:
                await part()
            except Exception as raised:
                error = raised
        if self._stopping:
            return
        if error is not None:
            logger.critical("the host's %s failed: the host stops", name, exc_info=error)
        else:
            logger.critical("the host's %s ended by itself: the host stops", name)
        self._fail(name, "it ended by itself" if error is None else one_line(error), error)

    def stop(self) -> None:
        """End all parts; the host is closing."""
        self._stopping = True
        for scope in self._parts.values():
            scope.cancel()

    def _fail(self, name: str, why: str, cause: Exception | None) -> None:
        if self.failure is None:
            self.failure = HostFailedError(f"the host stopped because its {name} failed: {why}")
            self.failure.__cause__ = cause
        if self._scope is not None:
            self._scope.cancel()
