"""The parts of a queue engine that other parts use, as interfaces."""

from collections.abc import Callable
from typing import Protocol, TypeVar

from dep2p.protocols.queues.channel import Channel
from dep2p.protocols.queues.queue import Queue
from dep2p.protocols.queues.registry.registry import QueueRegistry
from dep2p.storage.queue_store import QueueStore

T = TypeVar("T")


class EngineCore(Protocol):
    """A registry of queues that is bound to a store and to time."""

    @property
    def store(self) -> QueueStore: ...

    @property
    def registry(self) -> QueueRegistry: ...

    @property
    def now(self) -> Callable[[], float]:
        """The clock of deadlines: trio's."""
        ...

    @property
    def wall_us(self) -> Callable[[], int]:
        """Unix microseconds that never go back in this process."""
        ...

    @property
    def changed(self) -> Callable[[], None]:
        """Say that there may be changes to commit or messages to deliver."""
        ...

    @property
    def when_durable(self) -> Callable[[Callable[[], None]], None]:
        """Call something when all changes until now, except publishes, are durable."""
        ...

    async def flush(self) -> None:
        """Return when all changes until now, except publishes, are durable. Raises StoreError."""
        ...

    async def call(self, function: Callable[..., T], *arguments: object) -> T:
        """Run a function in the store's thread, after the work that is there."""
        ...

    async def loaded(self, namespace: str, name: str) -> Queue:
        """The queue, with its state in memory. Raises QueueNotFoundError."""
        ...


class ReceivingEngine(EngineCore, Protocol):
    """The engine, as receivers use it."""

    @property
    def consumers_max(self) -> int: ...

    async def create_channel(self, namespace: str, name: str, channel: str, *, from_start: bool = False) -> None:
        """Make a channel; durable on return. A channel that is there stays as it is."""
        ...


class ConsumerEngine(EngineCore, Protocol):
    """The engine, as consumers use it."""

    def is_held(self) -> bool:
        """Whether no other node can have the store by now."""
        ...

    def detach(self, channel: Channel, consumer: "AttachedConsumer") -> None:
        """Release the messages of a consumer that is gone."""
        ...


class AttachedConsumer(Protocol):
    """A consumer, as the engine uses it."""

    @property
    def consumer_id(self) -> str: ...

    def detach(self, now: float) -> None:
        """Leave the channel."""
        ...
