"""Connections by which the daemon knows that a program is there, opened again after a restart of the daemon."""

import logging
from collections.abc import Callable

import anyio

from dep2p.client.background import Background
from dep2p.client.reconnection.feeds import FeedCall, FeedTransport, opened_feed
from dep2p.errors import Dep2pError
from dep2p.outside_text import one_line

_logger = logging.getLogger("dep2p.client")


class HeldConnection:
    """A feed whose first line is its answer, and whose further lines say nothing. It runs in the background."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        """The error after which it is not opened again; None while it is held."""
        self._answer: dict[str, object] | None = None
        self._end: Callable[[], None] = lambda: None
        self._closed = anyio.Event()

    @property
    def is_held(self) -> bool:
        """Whether the daemon knows the program, or will after its restart."""
        return not self._closed.is_set()

    async def open(self, transport: FeedTransport, background: Background, call: FeedCall) -> dict[str, object]:
        """Open it, and return the daemon's answer. Raises what the call raises."""
        opened = anyio.Event()

        async def run(has_started: Callable[[], None]) -> None:
            try:
                async with opened_feed(transport, call) as feed:
                    while True:
                        line = await feed.next_line()
                        if isinstance(line, dict) and self._answer is None:
                            self._answer = line
                            opened.set()
                            has_started()
            except (Dep2pError, ValueError) as error:
                self.error = error
                if self._answer is not None:  # before that, the error is the caller's
                    _logger.warning("%s ends: %s", one_line(call.name), one_line(str(error)))
            finally:
                self._closed.set()
                opened.set()

        self._end = background.start(run)
        try:
            await opened.wait()
        except BaseException:
            self._end()
            raise
        if self._answer is None:
            raise self.error or RuntimeError("the client has ended")
        return self._answer

    async def aclose(self) -> None:
        """Close the connection. Idempotent."""
        self._end()
        with anyio.CancelScope(shield=True):
            await self._closed.wait()
