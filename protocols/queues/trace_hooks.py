"""What a trace is told of queues. The core calls it where a message changes its state, and knows no more about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from dep2p.protocols.queues.consumer import Held
    from dep2p.protocols.queues.cursor import ChannelPlaces
    from dep2p.protocols.queues.message import Message
    from dep2p.protocols.queues.queue import Queue, Run

OVERDUE: Final = "it was not settled in time"
"""The reason by which a message goes back whose consumer has let its time pass."""


class QueueTrace(Protocol):
    """Set as `QueueBook.trace`; the calls must be cheap, and raise nothing."""

    def published(self, queue: Queue, runs: Sequence[Run]) -> None:
        """Messages are there: they are committed, where the queue is kept at all."""
        ...

    def handed_out(self, channel: ChannelPlaces, partition: int, message: Message, to: str, attempts: int) -> None:
        """A message was assigned to the consumer ``to``."""
        ...

    def settled(self, channel: ChannelPlaces, state: str, partition: int, held: Held, reason: str = "") -> None:
        """A message is out of its consumer's hands: ``finished``, ``requeued``, ``timed_out``, ``released`` or
        ``rejected``."""
        ...

    def ended(self, channel: ChannelPlaces, state: str, partition: int, message: Message, reason: str = "") -> None:
        """A message is done with for a channel: ``dead``, ``dropped`` (without a dead letter) or ``expired``."""
        ...
