"""Keeps the failure of one item's task from ending the tasks of others in the same nursery."""

import logging
from collections.abc import Awaitable, Callable

logger: logging.Logger = logging.getLogger("dep2p.internal")


async def run_contained(
    run: Callable[[], Awaitable[object]], what: str, on_error: Callable[[Exception], object] | None = None
) -> None:
    """Run a task of one link, session or message. Its unexpected exception is logged and given to ``on_error``.

    A nursery cancels all its tasks when one raises. Start tasks of single owners by this function, so that a fault
    which only this owner's data meets ends this owner's task. ``what`` names the task in the log.
    """
    try:
        await run()
    except Exception as error:
        logger.exception("%s failed by an internal error and was ended; all others go on", what)
        if on_error is not None:
            on_error(error)
