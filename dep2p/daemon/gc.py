"""Tuning of the garbage collector. For programs that own their process: the daemon does it."""

import gc
from typing import Final

_YOUNG_OBJECTS: Final = 50_000


def tune_gc() -> None:
    """Make the garbage collector look for cycles less often, and never among the objects that are there now.

    Messages are freed by reference counts; with the default threshold of 700 objects the collector walks those that
    wait (thousands, for a millisecond) again and again: 8 to 15 % of the time under load. Cycles are still found.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, 20, 20)
