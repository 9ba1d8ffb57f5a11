"""The sender's handle of a reliable message: its state, and a way to wait for its end."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Self

import trio

from dep2p.concurrency.wait_queue import WaitQueue
from dep2p.errors import DeliveryFailedError
from dep2p.gossipsub.topic_types import Lagged, PublishResult, WaitFor
from dep2p.protocols.delivery.sender import Outgoing
from dep2p.protocols.delivery.states import (
    ENDS,
    DeliveryState,
    DeliveryStatus,
    acknowledged_by,
    missing,
    raise_unless_acknowledged,
)
from dep2p.types import PeerId

_STATUSES_MAX: Final = 65_536
_LEFT: Final = WaitQueue()
"""In place of waiting tasks: the node has stopped, and keeps the message for its next run."""


class Receipt(Outgoing, eq=False, kw_only=True):
    """A message that was accepted for one receiver. `wait` for its end, or look at `state`."""

    peer: PeerId
    name: str
    topic: str = ""
    """The topic of the message; empty for a direct one."""
    waiting: WaitQueue | None = None
    """Tasks that wait for its end."""

    @property
    def id(self) -> str:
        """The message's name in `dep2p outbox ls`: the receiver's id and the message's number for it."""
        return f"{self.peer}:{self.number}"

    @property
    def has_ended(self) -> bool:
        """Whether it is acknowledged, failed or expired."""
        return self.state in ENDS

    def ended(self) -> None:
        """Wake waiting tasks at the end. Called by the service."""
        if self.waiting is not None:
            self.waiting.wake_all()
            self.waiting = None

    def left(self) -> None:
        """Wake waiting tasks when the service stops and keeps the message. Called by the service."""
        waiting, self.waiting = self.waiting, _LEFT
        if waiting is not None:
            waiting.wake_all()

    async def until_ended(self) -> DeliveryState:
        """Wait for the end and return the state; never raises for a message that failed.

        When the node stops and keeps the message, returns its state of that time.
        """
        if self.state in ENDS or self.waiting is _LEFT:
            await trio.lowlevel.checkpoint()
            return self.state
        if self.waiting is None:
            self.waiting = WaitQueue()
        await self.waiting.wait()
        return self.state

    async def wait(self) -> None:
        """Return when the receiver's handler took the message.

        Raises DeliveryFailedError (rejected, tries used up, dropped), DeliveryExpiredError, or StreamClosedError when
        the node stops and keeps the message for its next run. Giving up the wait does not give up the message.
        """
        state = await self.until_ended()
        raise_unless_acknowledged(state, self.peer, self.reason, may_have_been_taken=self.may_have_been_taken)


class TopicPublish:
    """A reliable publish: the result of pub/sub, and the receipt of each critical peer."""

    def __init__(self, result: PublishResult, receipts: Sequence[Receipt], wait_for: WaitFor) -> None:
        self.result = result
        self.receipts: tuple[Receipt, ...] = tuple(receipts)
        self.wait_for: WaitFor = wait_for

    @property
    def acknowledged_by(self) -> tuple[PeerId, ...]:
        """The critical peers whose app has handled it so far."""
        return acknowledged_by(self.receipts)

    @property
    def missing(self) -> dict[PeerId, str]:
        """The critical peers that have not handled it, each with its state or the reason of its failure."""
        return missing(self.receipts)

    async def wait(self) -> None:
        """Wait until all (or any) critical peers have handled it. Raises DeliveryFailedError when that is not possible
        any more.

        With "all", the first one that fails ends the wait; the others are still tried.
        """
        if self.wait_for == "any":
            await self._wait_for_any()
            return
        failed: list[Receipt] = []
        async with trio.open_nursery() as nursery:

            async def one(receipt: Receipt) -> None:
                if await receipt.until_ended() is not DeliveryState.ACKNOWLEDGED:
                    failed.append(receipt)
                    nursery.cancel_scope.cancel()

            for receipt in self.receipts:
                nursery.start_soon(one, receipt)
        if failed:
            first = failed[0]
            raise_unless_acknowledged(
                first.state, first.peer, first.reason, may_have_been_taken=first.may_have_been_taken
            )

    async def _wait_for_any(self) -> None:
        async with trio.open_nursery() as nursery:

            async def one(receipt: Receipt) -> None:
                if await receipt.until_ended() is DeliveryState.ACKNOWLEDGED:
                    nursery.cancel_scope.cancel()

            for receipt in self.receipts:
                nursery.start_soon(one, receipt)
        if not self.acknowledged_by:
            reasons = "; ".join(f"{peer}: {why}" for peer, why in self.missing.items())
            raise DeliveryFailedError(f"none of the critical peers has acknowledged the message: {reasons}")


class Statuses:
    """All changes of state in their order: ``async with service.statuses() as statuses: async for …``."""

    def __init__(self, watchers: dict["Statuses", None], on_change: Callable[[], None]) -> None:
        self._watchers = watchers
        self._on_change = on_change
        self._items: deque[DeliveryStatus | Lagged] = deque()
        self._lot = trio.lowlevel.ParkingLot()

    async def __aenter__(self) -> Self:
        self.open()
        await trio.lowlevel.checkpoint()
        return self

    def open(self) -> None:
        """Start: changes from now on come."""
        self._watchers[self] = None
        self._on_change()

    def end(self) -> None:
        """End the reading: no more changes come."""
        self.close()
        self._on_change()

    async def __aexit__(self, *_exc: object) -> None:
        self.end()
        await trio.lowlevel.cancel_shielded_checkpoint()

    def close(self) -> None:
        """Stop taking changes; earlier ones can still be read."""
        self._watchers.pop(self, None)
        self._lot.unpark_all()

    def put(self, status: DeliveryStatus) -> None:
        """Add a change. Called by the service."""
        if len(self._items) < _STATUSES_MAX:
            self._items.append(status)
        elif isinstance(last := self._items[-1], Lagged):
            self._items[-1] = Lagged(last.count + 1)
        else:
            self._items[-1] = Lagged(2)
        self._lot.unpark()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> DeliveryStatus | Lagged:
        await trio.lowlevel.checkpoint()
        while not self._items:
            if self not in self._watchers:
                raise StopAsyncIteration
            await self._lot.park()
        return self._items.popleft()
