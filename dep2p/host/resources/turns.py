"""Turns: work that strangers cause is done by one task in each pass of the event loop.

Else 448 connections with a thousand cheap frames each would run one after the other, and a member's request waits for
all of them.
"""

import trio


class Turns:
    """A queue of tasks of which one goes on in each pass of the event loop, in the order in which they came."""

    def __init__(self) -> None:
        self._waiting = trio.lowlevel.ParkingLot()
        self._is_passing = False

    @property
    def waiting(self) -> int:
        """How many tasks wait for their turn."""
        return len(self._waiting)

    async def next(self) -> None:
        """Wait for a turn; at least one pass of the event loop."""
        if self._is_passing:
            await self._waiting.park()  # the task that unparks this one hands its turn on
        self._is_passing = True
        try:
            await trio.lowlevel.checkpoint()
        finally:
            if self._waiting:
                self._waiting.unpark()
            else:
                self._is_passing = False
