"""Turns: the work that strangers cause is done by a few tasks in each pass of the event loop.

Else 448 connections with a thousand cheap frames each would run one after the other, and a member's request waits for
all of them.
"""

import trio

from dep2p.host.resources.turn_groups import TurnGroups

EARLY_WEIGHT_MAX = 32
"""The work of a connection that is early: joining a realm takes about half of it."""
STREAM_WEIGHT = 4
"""Weight of a stream that an unproven peer opens: its task and its negotiation cost as much as four reads."""


class Turns:
    """A queue of tasks of which one group goes on in each pass of the event loop, in the order in which they came.

    ``weight_max``: the weights of one group together; see `TurnGroups`.
    """

    def __init__(self, weight_max: int = 1) -> None:
        self._groups = TurnGroups[trio.lowlevel.Task](weight_max)
        self._is_passing = False
        self._last: trio.lowlevel.Task | None = None  # of the group that goes on: it calls the next group

    @property
    def waiting(self) -> int:
        """How many tasks wait for their turn."""
        return len(self._groups)

    async def next(self, weight: int = 1, *, is_early: bool = False) -> None:
        """Wait for a turn to do work of ``weight``; at least one pass of the event loop.

        ``is_early``: it is among the first that the peer wants; see `TurnGroups`.
        """
        if not self._is_passing:
            self._is_passing = True
            try:
                await trio.lowlevel.checkpoint()
            finally:
                self._call_next()
            return
        task, groups = trio.lowlevel.current_task(), self._groups

        def abort(_raise_cancel: object) -> trio.lowlevel.Abort:
            groups.remove(task)
            return trio.lowlevel.Abort.SUCCEEDED

        groups.add(task, weight, is_early=is_early)
        await trio.lowlevel.wait_task_rescheduled(abort)  # no cancellation comes between its group's turn and this
        if self._last is task:
            self._call_next()

    def _call_next(self) -> None:
        group = self._groups.next_group()
        for task in group:
            trio.lowlevel.reschedule(task)
        self._last = group[-1] if group else None
        self._is_passing = bool(group)
