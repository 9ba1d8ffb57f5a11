"""Interfaces between the parts of a queue on several nodes, and of the nodes that store its partitions."""

from collections.abc import Callable, Sequence
from typing import Protocol

import trio

from dep2p.protocols.queues.admin import AdminRequest, R
from dep2p.protocols.queues.ordering.placement import Placement, ShardLocation
from dep2p.protocols.queues.wire.frames import WireMessage
from dep2p.queues.consumer import Consumer
from dep2p.queues.remote.abandoned_receives import Ask, Receivings
from dep2p.queues.types import SubscribeOptions


class Asker(Protocol):
    """The queues of a node, for administration."""

    async def ask(self, request: AdminRequest[R]) -> R:
        """Carry out an administrative request."""
        ...


class MemberQueues(Asker, Protocol):
    """The queues of a node: those that it keeps itself, and those whose partitions are on several nodes."""

    async def ask_broker(self, request: AdminRequest[R], *, on_sent: Callable[[], None] | None = None) -> R:
        """Ask the node about the queues that it stores itself. ``on_sent`` is called when the request goes to another
        node."""
        ...

    async def publish_to_broker(
        self, name: str, messages: Sequence[WireMessage], timeout_s: float | None
    ) -> list[tuple[int, int]]:
        """Publish to a queue that the node stores itself."""
        ...

    async def publish_sequenced(
        self, name: str, messages: Sequence[WireMessage], publisher: tuple[bytes, int], destination: str = ""
    ) -> list[tuple[int, int]]:
        """See `QueueBroker.publish_sequenced`."""
        ...

    async def open_subscription(self, name: str, channel: str, options: SubscribeOptions) -> Consumer:
        """Subscribe to a queue that the node stores itself."""
        ...


class PlacementSource(Protocol):
    """The queue, as its publishers know it."""

    name: str

    async def placement(self, other_than: Placement | None = None) -> Placement:
        """See `DistributedQueue`."""
        ...

    async def ask_controller(self, request: AdminRequest[R]) -> R:
        """Carry out an administrative request at the controller."""
        ...


class ReceiveOwner(Protocol):
    """The simple consumer, as one of its receives uses it."""

    receivings: Receivings
    queue: PlacementSource
    changed: trio.Event

    def at(self, location: ShardLocation) -> Ask:
        """The queues of that node."""
        ...

    def rotated(self, used: Placement) -> list[int]:
        """Return all partitions, each time from another one on."""
        ...

    def failed(self, node: str) -> None:
        """Note that a node did not answer."""
        ...

    def worked(self, node: str) -> None:
        """Note that a node answered."""
        ...

    def check_soon(self) -> None:
        """Refresh the table beside the caller."""
        ...
