"""The thread in which a store's commits run: one for all of them, cheaper to wake than one of a pool."""

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final

import trio

_MEANWHILE_S: Final = 0.002
"""Seconds after which other work goes on when a store does not report that it waits (its server may be away)."""
_WAITS: Final = b"w"
_DONE: Final = b"d"


class WriterThread:
    """Runs one call after the other; started by the first one, and ended by `close`.

    The interpreter's lock decides how: a thread that needs it again after each statement, while the event loop is busy,
    waits each time until that rests. So the loop rests first, and works when the thread only waits for the disk.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._heard_fd = self._notify_fd = -1
        self._is_asked = False
        self._error: BaseException | None = None

    def notify_waiting(self) -> None:
        """Report, in the thread, that the call now only waits for a disk or a server."""
        if self._is_asked:
            self._is_asked = False
            os.write(self._notify_fd, _WAITS)

    async def run(self, work: Callable[[], None], meanwhile: Callable[[], None] | None = None) -> None:
        """Return when ``work`` has ended in the thread; raises what it raises. It must not be cancelled: shield it.

        ``meanwhile`` is called here when ``work`` calls `notify_waiting`, soon if it does not, and in any case once.
        """
        if self._thread is None:
            self._start()
        self._is_asked, self._error = meanwhile is not None, None
        self._jobs.put(work)
        is_done = False
        if meanwhile is not None:
            with trio.move_on_after(_MEANWHILE_S):
                is_done = await self._hear()
            try:
                meanwhile()
            except BaseException:
                while not is_done:
                    is_done = await self._hear()
                raise
        while not is_done:
            is_done = await self._hear()
        if self._error is not None:
            raise self._error

    async def _hear(self) -> bool:
        """Wait for a report of the thread. Returns whether it has ended."""
        await trio.lowlevel.wait_readable(self._heard_fd)
        return _DONE in os.read(self._heard_fd, 16)

    def _start(self) -> None:
        self._heard_fd, self._notify_fd = os.pipe()
        # A daemon: a process that ends without `close` does not wait for a disk that hangs.
        self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while (work := self._jobs.get()) is not None:
            try:
                work()
            except BaseException as error:
                self._error = error
            del work  # the work is not kept in memory until the next one
            os.write(self._notify_fd, _DONE)

    def close(self) -> None:
        """End the thread, which is idle. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.join()
            trio.lowlevel.notify_closing(self._heard_fd)
            os.close(self._heard_fd)
            os.close(self._notify_fd)
