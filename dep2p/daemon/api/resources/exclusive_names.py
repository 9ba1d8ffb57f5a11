"""Names that one program at a time may have, and the moment that a name needs to become free."""

from collections.abc import Callable
from functools import partial
from typing import Final

import trio

from dep2p.daemon.problems import Problem

RELEASE_WAIT_S: Final = 2.0
"""A program that closes its connection and opens another one is ahead of this daemon, which learns of the end only when
it reads the old connection. So a name that is taken is waited for this long before it is refused."""


class ExclusiveNames:
    """Gives each name to one program at a time.

    ``activity`` completes the refusal: "a program <activity> '<name>' already".
    """

    def __init__(self, activity: str) -> None:
        self._activity = activity
        self._released: dict[str, trio.Event] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._released

    def __len__(self) -> int:
        return len(self._released)

    async def claim(self, name: str) -> Callable[[], bool]:
        """Take ``name`` and return the function that frees it. Only its first call does, and returns true.

        Raises :class:`Problem` D5012 when another program still has the name after :data:`RELEASE_WAIT_S`.
        """
        with trio.move_on_after(RELEASE_WAIT_S):
            while (released := self._released.get(name)) is not None:
                await released.wait()
        if name in self._released:
            raise Problem("D5012", f"a program {self._activity} {name!r} already")
        mine = self._released[name] = trio.Event()
        return partial(self._free, name, mine)

    def _free(self, name: str, mine: trio.Event) -> bool:
        if self._released.get(name) is not mine:
            return False
        del self._released[name]
        mine.set()
        return True
