"""The settings of push consumers and producers, of a node and of a client."""

from dataclasses import dataclass, field
from typing import TypedDict

from dep2p.protocols.queues.clients.producer import Order
from dep2p.protocols.queues.clients.push_consumer import Mode
from dep2p.protocols.timing.backoff import Backoff


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerSettings:
    """How a push consumer works. Times in seconds. Raises ``ValueError``."""

    mode: Mode = "normal"
    """``fifo``: of an order key one message at a time, in the order of publishing, however many consumers there are:
    each has partitions of its own (an exclusive channel)."""
    concurrency: int = 16
    """Handlers at once."""
    cache_items: int = 0
    """Messages that are held here at most, in handlers and waiting for one; 0: 16 for each handler, at most 4,096. What
    is held when the connection is lost has had an attempt."""
    cache_bytes: int = 67_108_864
    """Bytes of their bodies at which no more are taken."""
    max_attempts: int | None = None
    """Tries of a message before it becomes a dead letter, in FIFO mode; None: the queue's. In normal mode the queue
    counts."""
    retry: Backoff = field(default_factory=lambda: Backoff(1.0, 30.0))
    """Delays between the tries of a message."""
    drain_timeout_s: float = 10.0
    """When the block of the consumer ends, running handlers may finish for so long; then they are cancelled."""
    from_start: bool = False
    filter: str = ""

    def __post_init__(self) -> None:
        if self.mode not in ("normal", "fifo"):
            raise ValueError(f"the mode {self.mode!r} is not known: normal and fifo are")
        if not 1 <= self.concurrency <= 10_000:
            raise ValueError(f"a concurrency of {self.concurrency}: it is 1 to 10,000")
        if not 0 <= self.cache_items <= 65_536:
            raise ValueError(f"cache_items is {self.cache_items}: it is 1 to 65,536, or 0")
        if not 1 <= self.cache_bytes <= 268_435_456:
            raise ValueError(f"cache_bytes is {self.cache_bytes}: it is 1 to 268,435,456")
        if self.max_attempts is not None and self.max_attempts < 0:
            raise ValueError(f"max_attempts is {self.max_attempts}: it is 0 (no limit) or more")
        if self.mode == "normal" and self.max_attempts is not None:
            raise ValueError("max_attempts of a consumer is for FIFO mode: in normal mode it is an option of the queue")
        if self.drain_timeout_s < 0:
            raise ValueError(f"drain_timeout_s is {self.drain_timeout_s}: it cannot be negative")

    @property
    def items_max(self) -> int:
        """The messages that it holds at most: ``cache_items``, or its default."""
        return self.cache_items or min(4_096, 16 * self.concurrency)


class ConsumerOptions(TypedDict, total=False):
    """The settings of :class:`ConsumerSettings` besides ``mode``, as keyword arguments."""

    concurrency: int
    cache_items: int
    cache_bytes: int
    max_attempts: int | None
    retry: Backoff
    drain_timeout_s: float
    from_start: bool
    filter: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerSettings:
    """How a producer works. Times in seconds. Raises ``ValueError``."""

    order: Order = "best_effort"
    """``strict``: a message with an order key that fails stays at the head of its key's queue and is sent again to the
    same broker until it is taken. ``best_effort``: it may go to another broker, and after ``max_attempts`` it fails and
    its key queue goes on."""
    max_attempts: int = 3
    """Tries of a message that is not in a strict key queue."""
    send_timeout_s: float = 10.0
    """The longest time of one try of such a message."""
    retry: Backoff = field(default_factory=lambda: Backoff(0.05, 5.0))
    """Delays between tries at the same broker."""
    items_max: int = 10_000
    """Messages that wait here at most; `Producer.send` waits for room then."""
    bytes_max: int = 67_108_864
    close_timeout_s: float = 10.0
    """When the block of the producer ends, brokers may take waiting messages for so long; then they fail."""

    def __post_init__(self) -> None:
        if self.order not in ("strict", "best_effort"):
            raise ValueError(f"the order {self.order!r} is not known: strict and best_effort are")
        if not 1 <= self.max_attempts <= 1_000:
            raise ValueError(f"max_attempts is {self.max_attempts}: it is 1 to 1,000")
        if not self.send_timeout_s > 0:
            raise ValueError(f"send_timeout_s is {self.send_timeout_s}: it is more than 0")
        if not 1 <= self.items_max <= 1_000_000:
            raise ValueError(f"items_max is {self.items_max}: it is 1 to 1,000,000")
        if not 1 <= self.bytes_max <= 1 << 32:
            raise ValueError(f"bytes_max is {self.bytes_max}: it is 1 to 4 GiB")
        if not self.close_timeout_s >= 0:
            raise ValueError(f"close_timeout_s is {self.close_timeout_s}: it cannot be negative")


class ProducerOptions(TypedDict, total=False):
    """The settings of :class:`ProducerSettings` besides ``order``, as keyword arguments."""

    max_attempts: int
    send_timeout_s: float
    retry: Backoff
    items_max: int
    bytes_max: int
    close_timeout_s: float
