"""The interface of a broker to producers, consumers and relays: this node's own queues, or another member's."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from dep2p.protocols.queues.admin import AdminRequest, R
from dep2p.protocols.queues.wire.frames import WireMessage
from dep2p.queues.client_metrics import FlowCounts
from dep2p.queues.consumer import Consumer
from dep2p.queues.types import SubscribeOptions


class QueueBroker(ABC):
    """A broker of queues."""

    @property
    def flows(self) -> FlowCounts | None:
        """The counts of the producers and consumers of this broker."""
        return None

    @abstractmethod
    async def ask(self, request: AdminRequest[R]) -> R:
        """An administrative request, and its reply: see `dep2p.protocols.queues.admin`.

        Raises ``ValueError`` for a field that has not the type or the bounds that it is declared with.
        """

    @abstractmethod
    async def publish_batch(
        self, name: str, messages: Sequence[WireMessage], timeout_s: float | None
    ) -> list[tuple[int, int]]:
        """Publish all or none; returns the ids when all are durable.

        Only messages of several order keys may be on several nodes: QueuePartlyPublishedError says which are taken.
        """

    @abstractmethod
    async def publish_sequenced(
        self, name: str, messages: Sequence[WireMessage], publisher: tuple[bytes, int], destination: str = ""
    ) -> list[tuple[int, int]]:
        """Publish all or none, as a publisher (16 bytes) whose first message has that number.

        The last 64 numbers of a publisher are remembered on disk: one that comes again is not taken again, and gives
        the ids of the first time. Numbers rise. Raises what `publish` raises; ProtocolError or ``ValueError`` for a
        number that is older than what is remembered.

        A queue on several nodes needs the messages' ``destination`` (`destinations`); a number that comes again must go
        to the same one. Raises QueueIsDistributedError without it, and PartitionMovedError when a key has moved from
        there: nothing was taken then, and new destinations under new numbers are right.
        """

    async def destinations(self, name: str, messages: Sequence[WireMessage], *, is_stale: bool = False) -> list[str]:
        """Return the destination of each message, for `publish_sequenced`: a text that may be kept; "" for a queue that
        is on one node.

        ``is_stale``: the broker refused the destinations that this returned before. Raises
        QueueNotFoundError, and what a request raises.
        """
        del name, is_stale
        return [""] * len(messages)

    @abstractmethod
    async def open_consumer(
        self,
        name: str,
        channel: str,
        options: SubscribeOptions,
    ) -> Consumer:
        """Open a consumer; the caller closes it."""

    def is_off_partition(self, name: str, key: str, message_id: str) -> bool:
        """Whether a message is in another partition than its key's, whose node was away (best-effort order only)."""
        del name, key, message_id
        return False
