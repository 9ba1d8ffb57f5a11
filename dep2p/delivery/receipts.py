"""What a sender of a reliable message holds: its state, and its end to wait for."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Self

import trio
from outcome import Value

from dep2p.errors import DeliveryExpiredError, DeliveryFailedError, StreamClosedError
from dep2p.protocols.delivery.sender import Outgoing
from dep2p.protocols.delivery.states import ENDS, State
from dep2p.types import PeerId

_STATUSES_MAX: Final = 65_536
_LEFT: Final[list[trio.lowlevel.Task]] = []
"""Instead of those who wait: the node has stopped, and keeps the message for its next run."""


class Receipt(Outgoing, eq=False, kw_only=True):
    """A message that was accepted for one receiver. `wait` for its end, or look at `state`."""

    peer: PeerId
    name: str
    topic: str = ""
    """Of a message for a topic; empty for a direct one."""
    waiting: list[trio.lowlevel.Task] | None = None
    """Who waits for its end."""

    @property
    def id(self) -> str:
        """Names the message in `dep2p outbox ls`: the receiver's id and the message's number for it."""
        return f"{self.peer}:{self.number}"

    @property
    def has_ended(self) -> bool:
        """Acknowledged, failed or expired."""
        return self.state in ENDS

    def ended(self) -> None:
        """For the service: wake who waits."""
        if self.waiting is not None:
            waiting, self.waiting = self.waiting, None
            for task in waiting:
                trio.lowlevel.reschedule(task, Value(None))

    def left(self) -> None:
        """For the service, when it stops and the message is kept: wake who waits."""
        waiting, self.waiting = self.waiting, _LEFT
        for task in waiting or ():
            trio.lowlevel.reschedule(task, Value(None))

    async def until_ended(self) -> State:
        """Wait for the end and give it; never raises for what became of the message.

        When the node stops and keeps the message, gives the state that it has then.
        """
        if self.state in ENDS or self.waiting is _LEFT:
            await trio.lowlevel.checkpoint()
            return self.state
        task = trio.lowlevel.current_task()
        if self.waiting is None:
            self.waiting = []
        self.waiting.append(task)

        def abort(_raise_cancel: object) -> trio.lowlevel.Abort:
            if self.waiting is not None:
                self.waiting.remove(task)
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)
        return self.state

    async def wait(self) -> None:
        """Return when the receiver's handler took the message.

        Raises DeliveryFailedError (rejected, tries used up, dropped), DeliveryExpiredError, or StreamClosedError when
        the node stops and keeps the message for its next run. Giving up the wait does not give up the message.
        """
        raise_unless_acknowledged(await self.until_ended(), self.peer, self.reason)


def raise_unless_acknowledged(state: State, peer: str, reason: str) -> None:
    """The end of a message as an error, unless it is the good one."""
    if state is State.EXPIRED:
        raise DeliveryExpiredError(f"{peer} did not acknowledge the message: {reason}")
    if state not in ENDS:
        raise StreamClosedError("this node has stopped: the message is kept in its outbox, and sent when it runs again")
    if state is not State.ACKNOWLEDGED:
        raise DeliveryFailedError(f"{peer} did not take the message: {reason or state}")


@dataclass(frozen=True, slots=True)
class Status:
    """A message changed its state."""

    id: str
    peer: PeerId
    name: str
    state: State
    tries: int
    reason: str


@dataclass(frozen=True, slots=True)
class StatusesMissed:
    """So many changes were dropped here, because nobody read them."""

    count: int


class Statuses:
    """All changes of state in their order: ``async with service.statuses() as statuses: async for …``."""

    def __init__(self, watchers: dict["Statuses", None], on_change: Callable[[], None]) -> None:
        self._watchers = watchers
        self._on_change = on_change
        self._items: deque[Status | StatusesMissed] = deque()
        self._lot = trio.lowlevel.ParkingLot()

    async def __aenter__(self) -> Self:
        self.open()
        await trio.lowlevel.checkpoint()
        return self

    def open(self) -> None:
        """What happens from now on comes."""
        self._watchers[self] = None
        self._on_change()

    def end(self) -> None:
        """Nothing more comes."""
        self.close()
        self._on_change()

    async def __aexit__(self, *_exc: object) -> None:
        self.end()
        await trio.lowlevel.cancel_shielded_checkpoint()

    def close(self) -> None:
        """Nothing more comes; what has come can still be read."""
        self._watchers.pop(self, None)
        self._lot.unpark_all()

    def put(self, status: Status) -> None:
        """For the service."""
        if len(self._items) < _STATUSES_MAX:
            self._items.append(status)
        elif isinstance(last := self._items[-1], StatusesMissed):
            self._items[-1] = StatusesMissed(last.count + 1)
        else:
            self._items[-1] = StatusesMissed(2)
        self._lot.unpark()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Status | StatusesMissed:
        await trio.lowlevel.checkpoint()
        while not self._items:
            if self not in self._watchers:
                raise StopAsyncIteration
            await self._lot.park()
        return self._items.popleft()
