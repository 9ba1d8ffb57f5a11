"""Tuning of the garbage collector. For programs that own their process: the daemon does it."""

import gc
from typing import Final

import trio

_YOUNG_OBJECTS: Final = 20_000
"""Objects that are looked through when so many more were made than freed, in between the steps."""
_YOUNG_ROUNDS: Final = 10
_ALL_ROUNDS: Final = 1_000
STEP_S: Final = 0.05
"""Between two steps. An idle node's take microseconds; those of a node that strangers flood take 5 ms."""
SURVIVORS_STEPS: Final = 1_200
"""Steps after which their survivors are looked through once more: a minute."""


def tune_gc() -> None:
    """Make the garbage collector look for cycles less often, and never among the objects that are there now.

    Call it once the node is open. Its modules are 130,000 objects, py-libp2p's most of them: looking through them holds
    up all requests for 60 ms, and 100 ms while strangers come and go.
    Messages are freed by reference counts; with the default threshold of 700 objects the collector walks those that
    wait (thousands, for a millisecond) again and again: 8 to 15 % of the time under load. Cycles are still found.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, _YOUNG_ROUNDS, _ALL_ROUNDS)


async def collect_in_steps() -> None:
    """Look through young objects every `STEP_S` until cancelled, so that they never become many.

    The collector begins by itself when more objects were made than freed, whatever their age. Where old ones end as
    fast as new ones come, as under a flood of connections, the young become 50,000 before that, and then nothing else
    runs for 40 ms.
    """
    step = 0
    while True:
        await trio.sleep(STEP_S)
        step += 1
        gc.collect(0 if step % SURVIVORS_STEPS else 1)
