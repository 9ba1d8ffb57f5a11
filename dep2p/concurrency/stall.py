"""A step that may take any time while something moves."""

from collections.abc import Awaitable, Callable

import trio


async def run_while_moving(
    step: Callable[[], Awaitable[object]], progress: Callable[[], int], timeout_s: float, *, least: int = 1
) -> bool:
    """Run ``step`` until it returns, or until ``progress()`` rises by less than ``least`` in ``timeout_s``; return
    whether it returned.

    ``step`` is cancelled and called again while something moves, so it has to go on where it stopped.
    """
    while True:
        seen = progress()
        with trio.move_on_after(timeout_s):
            await step()
            return True
        if progress() - seen < least:
            return False
