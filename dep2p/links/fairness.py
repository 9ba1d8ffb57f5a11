"""How a node serves many members fairly: the task that gives turns, and the ledger of quotas. One for a node."""

import logging
from typing import Final, Protocol

import trio

from dep2p.concurrency.wait_queue import Sleeper, suspend
from dep2p.protocols.fairness.ledger import QuotaLedger
from dep2p.protocols.fairness.turns import UNITS_ALONE, TurnOrder
from dep2p.types import PeerId

logger: logging.Logger = logging.getLogger("dep2p.io")

_PAUSE_OF_ROUND: Final = 1.2
"""Times that the others get of what a round took. More takes it from a member that asks much while one that asks little
is about (`bench hostile`: request-flood and queue-flood)."""
_PAUSE_MAX_S: Final = 0.02
"""After a round that took longer the next one follows as soon: the machine itself was busy then."""


class TurnTaker(Protocol):
    """Something with work that waits for its member's turn."""

    def take_turn(self, units: int) -> bool:
        """Do about ``units`` of work; whether there is more. Waits for nothing."""
        ...


class _WaitingTask:
    """A task that waits for its member's turn."""

    __slots__ = ("_task",)

    def __init__(self, task: trio.lowlevel.Task) -> None:
        self._task = task

    def take_turn(self, units: int) -> bool:
        """Wake it."""
        trio.lowlevel.reschedule(self._task)
        return False


class Fairness:
    """Without `run`, as in a test of one part, each member is served at once."""

    def __init__(self) -> None:
        self.ledger: QuotaLedger = QuotaLedger()
        self.rounds: int = 0
        """Rounds of turns so far."""
        self.turns_waited: int = 0
        """Times that a member's work waited for its turn."""
        self._order: TurnOrder[TurnTaker] = TurnOrder()
        self._sleeper = Sleeper()
        self._is_running = False

    # What is asked for each batch of frames

    def admits(self, member: PeerId, units: int) -> bool:
        """Whether this much work of the member may be done at once; else it must `wait_turn`."""
        if not self._is_running:
            return True
        now = trio.current_time()
        if self._order.note(member, now):
            return self._order.spend(member, units, now)
        return units <= UNITS_ALONE

    def is_shared(self, member: PeerId) -> bool:
        """Whether other members are active, so that more than a little work must wait for a turn."""
        return self._is_running and self._order.is_shared(member, trio.current_time())

    def note(self, member: PeerId) -> None:
        """A member, or a program of this machine, is active in a way that takes no turns."""
        self._order.note(member, trio.current_time())

    def add(self, member: PeerId, taker: TurnTaker) -> None:
        """Give ``taker`` turns until it has no more work."""
        self.turns_waited += 1
        self._order.wait(member, taker)
        self._sleeper.wake()

    async def wait_turn(self, member: PeerId) -> None:
        """Wait for one turn of the member, among others; at least for other tasks."""
        if not self.is_shared(member):
            await trio.lowlevel.checkpoint()
            return
        taker = _WaitingTask(trio.lowlevel.current_task())
        self.add(member, taker)
        await suspend(lambda: self._order.withdraw(member, taker))

    # The task

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Give turns until cancelled; then all that waits gets its turn."""
        self._is_running = True
        task_status.started()
        try:
            while True:
                if not self._order:
                    await self._sleeper.wait()
                    continue
                began = trio.current_time()
                self._one_round(began)
                # The handlers that this round has started run in the next step, their answers leave in the one after.
                await trio.lowlevel.checkpoint()
                await trio.lowlevel.checkpoint()
                now = trio.current_time()
                if self._order.slows_others(now) and now > began:
                    await trio.sleep(min((now - began) * _PAUSE_OF_ROUND, _PAUSE_MAX_S))
        finally:
            self._is_running = False
            while self._order:
                self._one_round(trio.current_time())

    def _one_round(self, now: float) -> None:
        self.rounds += 1
        for member, taker, units in self._order.next_round(now):
            try:
                if taker.take_turn(units):
                    self._order.wait(member, taker)
            except Exception:  # of one member: the others get their turns
                logger.exception("a turn of %s failed", member)
