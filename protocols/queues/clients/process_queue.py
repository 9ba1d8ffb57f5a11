"""A push consumer's messages of one partition, in key queues whose messages go one after the other. Pure.

RocketMQ's process queue. A key queue has the messages of one order key in FIFO mode, and a single message in normal
mode. So only the key queue of a message that fails waits, not its partition.
"""

from bisect import insort
from collections import deque
from enum import Enum

from dep2p.protocols.queues.wire.frames import Settle


class Phase(Enum):
    """The phase of a message here."""

    WAITING = "waiting"
    """It waits for its turn in the key queue."""
    RUNNING = "running"
    """The handler works on it."""
    RETRYING = "retrying"
    """The handler has failed; it is tried again after a while."""
    SETTLING = "settling"
    """Its result is on the way to the queue."""
    GONE = "gone"
    """It was settled, released or lost."""


class ProcessQueueEntry:
    """A message that the consumer holds."""

    __slots__ = (
        "attempts",
        "check_at",
        "deadline",
        "delay_s",
        "fate",
        "is_reporting",
        "item",
        "key_queue",
        "partition",
        "phase",
        "reason",
        "retry_at",
        "seq",
        "settle_tries",
        "size",
        "span_s",
    )

    def __init__(
        self, partition: int, seq: int, size: int, attempts: int, now: float, deadline: float, item: object
    ) -> None:
        self.partition: int = partition
        self.seq: int = seq
        self.size: int = size
        """Bytes that it counts for."""
        self.attempts: int = attempts
        """This try's number: that of its delivery, and one more with each try here."""
        self.deadline: float = deadline
        """From then on it is another consumer's, unless it was renewed."""
        self.span_s: float = deadline - now
        """Seconds that a renewal lasts."""
        self.item: object = item
        """The shell's own object."""
        self.phase: Phase = Phase.WAITING
        self.key_queue: KeyQueue | None = None
        self.fate: Settle = Settle.FINISH
        """Its result, while it is settling."""
        self.reason: str = ""
        self.delay_s: float = 0.0
        self.settle_tries: int = 0
        self.is_reporting: bool = False
        """Whether its result is on the way, without an answer so far."""
        self.check_at: float = 0.0
        """The next time to look at its lease."""
        self.retry_at: float = 0.0

    def __repr__(self) -> str:
        return f"<{self.partition}/{self.seq} {self.phase.value} try {self.attempts}>"


class KeyQueue:
    """Messages of one key, by rising number. The consumer works on one at a time."""

    __slots__ = ("busy", "entries", "is_queued", "key", "queue", "strays")

    def __init__(self, queue: "ProcessQueue", key: str | int) -> None:
        self.queue: ProcessQueue = queue
        self.key: str | int = key
        self.entries: deque[ProcessQueueEntry] = deque()
        self.busy: ProcessQueueEntry | None = None
        """The message that is not waiting any more."""
        self.strays: int = 0
        """Handlers that still run although their message was lost: the key queue waits for them to end."""
        self.is_queued: bool = False
        """Whether it is in the list of key queues that can go on."""

    def add(self, entry: ProcessQueueEntry) -> None:
        """Add a message: mostly at the end; a message that came back goes in front of later ones."""
        entry.key_queue = self
        if not self.entries or self.entries[-1].seq < entry.seq:
            self.entries.append(entry)
            return
        ordered = list(self.entries)
        insort(ordered, entry, key=lambda each: each.seq)
        self.entries = deque(ordered)

    def remove(self, entry: ProcessQueueEntry) -> None:
        """Remove a message."""
        if self.busy is entry:
            self.busy = None
        if self.entries[0] is entry:
            self.entries.popleft()
        else:
            self.entries.remove(entry)

    @property
    def next(self) -> ProcessQueueEntry | None:
        """Return the message that the consumer can work on now, or None."""
        return self.entries[0] if self.entries and self.busy is None and not self.strays else None


class ProcessQueue:
    """The messages of one partition."""

    __slots__ = ("bytes", "entries", "is_stopping", "key_queues", "partition", "running", "settling")

    def __init__(self, partition: int) -> None:
        self.partition: int = partition
        self.key_queues: dict[str | int, KeyQueue] = {}
        self.entries: dict[int, ProcessQueueEntry] = {}
        """All messages that are held, by number."""
        self.bytes: int = 0
        self.running: int = 0
        """Running handlers, also those whose message was lost."""
        self.settling: int = 0
        self.is_stopping: bool = False
        """Whether nothing new begins."""

    @property
    def is_idle(self) -> bool:
        """Whether no handler runs, and no result is on its way."""
        return not self.running and not self.settling

    def key_queue(self, key: str | int) -> KeyQueue:
        """Return the key queue of a key, made when it is new."""
        found = self.key_queues.get(key)
        if found is None:
            found = self.key_queues[key] = KeyQueue(self, key)
        return found
