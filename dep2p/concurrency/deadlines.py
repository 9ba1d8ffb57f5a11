"""Runs pure cores on trio: deadlines, and the generic loop for a core in the shape of docs/ARCHITECTURE.md."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import trio

Event_contra = TypeVar("Event_contra", contravariant=True)
Effect_co = TypeVar("Effect_co", covariant=True)
Event = TypeVar("Event")
Effect = TypeVar("Effect")

_NEVER = float("inf")


class Core(Protocol[Event_contra, Effect_co]):
    """A protocol without I/O, clock or randomness of its own."""

    def handle(self, event: Event_contra, now: float) -> Sequence[Effect_co]:
        """Take one event in; ``now`` in seconds."""
        ...

    def next_deadline(self) -> float | None:
        """When `on_deadline` is to be called; None for never."""
        ...

    def on_deadline(self, now: float) -> Sequence[Effect_co]:
        """The time has come."""
        ...


class DeadlineTimer:
    """One task that calls ``on_time(now)`` at the earliest wanted time.

    ``on_time`` must not raise; it returns the next time that is wanted, or None. Asking for a later time than one
    already wanted costs a comparison, so that a request per call may do it.
    """

    def __init__(self, on_time: Callable[[float], float | None]) -> None:
        self._on_time = on_time
        self._scope: trio.CancelScope | None = None
        self.at = _NEVER
        """The time waited for."""

    def want(self, at: float) -> None:
        """Call ``on_time`` at ``at`` (trio time) at the latest."""
        if at < self.at:
            self.at = at
            if self._scope is not None:
                self._scope.deadline = at

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            with trio.CancelScope(deadline=self.at) as self._scope:
                await trio.sleep_forever()
            self._scope = None
            self.at = _NEVER
            following = self._on_time(trio.current_time())
            if following is not None:
                self.want(following)


async def drive(
    core: Core[Event, Effect],
    events: trio.MemoryReceiveChannel[Event],
    perform: Callable[[Effect], None],
) -> None:
    """Feed ``core`` from ``events`` until that channel is closed, and ``perform`` every effect, in order.

    ``perform`` is synchronous: what has to wait belongs behind a bounded buffer. Deadlines that are due come before
    the next event.
    """
    while True:
        deadline = core.next_deadline()
        now = trio.current_time()
        if deadline is not None and deadline <= now:
            for effect in core.on_deadline(now):
                perform(effect)
            await trio.lowlevel.checkpoint()
            continue
        with trio.CancelScope(deadline=_NEVER if deadline is None else deadline):
            try:
                event = await events.receive()
            except trio.EndOfChannel:
                return
            for effect in core.handle(event, trio.current_time()):
                perform(effect)
