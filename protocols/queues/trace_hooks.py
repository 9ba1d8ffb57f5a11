"""The interface between queues and a trace. The core calls it where a message changes its state."""

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from dep2p.protocols.queues.consumer import HeldMessage
from dep2p.protocols.queues.message import QueuedMessage
from dep2p.protocols.queues.partition_log import PartitionLog
from dep2p.protocols.queues.records import Run

OVERDUE: Final = "it was not settled in time"
"""The reason of a message that goes back because its consumer has let its time pass."""


class NamedQueue(Protocol):
    """The names of a queue."""

    namespace: str
    name: str


class TracedQueue(NamedQueue, Protocol):
    """A queue, as a trace reads it."""

    @property
    def logs(self) -> Mapping[int, PartitionLog]: ...


class TracedChannel(Protocol):
    """A channel, as a trace reads it."""

    name: str

    @property
    def queue(self) -> NamedQueue: ...


class QueueTrace(Protocol):
    """Set as `QueueRegistry.trace`; the calls must be cheap, and raise nothing."""

    def published(self, queue: TracedQueue, runs: Sequence[Run]) -> None:
        """Messages of a publish are there; they are committed, unless the queue is ephemeral."""
        ...

    def delivered(self, channel: TracedChannel, partition: int, message: QueuedMessage, to: str, attempts: int) -> None:
        """A message was assigned to the consumer ``to``."""
        ...

    def settled(self, channel: TracedChannel, state: str, partition: int, held: HeldMessage, reason: str = "") -> None:
        """A message has left its consumer: ``finished``, ``requeued``, ``timed_out``, ``released`` or ``rejected``."""
        ...

    def ended(
        self, channel: TracedChannel, state: str, partition: int, message: QueuedMessage, reason: str = ""
    ) -> None:
        """A channel is done with a message: ``dead``, ``dropped`` (without a dead letter) or ``expired``."""
        ...
