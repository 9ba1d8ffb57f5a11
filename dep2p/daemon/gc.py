"""Tuning of the garbage collector. For programs that own their process: the daemon does it."""

import gc
from typing import Final

_YOUNG_OBJECTS: Final = 5_000
_YOUNG_ROUNDS: Final = 1
"""Rounds whose survivors wait to be looked through once more: 15,000 objects at most, for which nothing else runs."""
_ALL_ROUNDS: Final = 2_000
"""All objects are looked through after 20 million that survived."""


def tune_gc() -> None:
    """Make the garbage collector look for cycles less often, and never among the objects that are there now.

    Call it once the node is open. Its modules are 130,000 objects, py-libp2p's most of them: looking through them holds
    up all requests for 60 ms, and 100 ms while strangers come and go.
    Messages are freed by reference counts; with the default threshold of 700 objects the collector walks those that
    wait (thousands, for a millisecond) again and again: 8 to 15 % of the time under load. With these it is 1 %, at
    most 4 ms at a time while queues are busy. Cycles are still found.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, _YOUNG_ROUNDS, _ALL_ROUNDS)
