"""What a push consumer keeps of one partition: the messages that are here, in lines that go one after the other. Pure.

RocketMQ's process queue (seed 004). A line is an order key in FIFO mode, and a single message in normal mode; so only
the line of a message that fails waits, not its partition.
"""

from bisect import insort
from collections import deque
from enum import Enum
from typing import Any

from dep2p.protocols.queues.wire import Settle


class Phase(Enum):
    """Where a message is on its way."""

    WAITING = "waiting"
    """For its turn in the line."""
    RUNNING = "running"
    """In the handler."""
    RETRYING = "retrying"
    """The handler has failed; it is tried again after a while."""
    SETTLING = "settling"
    """Its result is on the way to the queue."""
    GONE = "gone"
    """Settled, given back, or lost."""


class Entry:
    """A message that is here."""

    __slots__ = (
        "attempts",
        "check_at",
        "deadline",
        "delay_s",
        "fate",
        "is_telling",
        "item",
        "line",
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
        self, partition: int, seq: int, size: int, attempts: int, now: float, deadline: float, item: Any
    ) -> None:
        self.partition = partition
        self.seq = seq
        self.size = size
        """Bytes it counts for."""
        self.attempts = attempts
        """This try's number: that of its delivery, and one more with each try here."""
        self.deadline = deadline
        """Then it is others', unless it was renewed."""
        self.span_s = deadline - now
        """So long a renewal lasts."""
        self.item = item
        """The shell's."""
        self.phase = Phase.WAITING
        self.line: Line | None = None
        self.fate = Settle.FINISH
        """Its result, while it is settling."""
        self.reason = ""
        self.delay_s = 0.0
        self.settle_tries = 0
        self.is_telling = False
        """Its result is on the way, and the answer has not come."""
        self.check_at = 0.0
        """When its lease is looked at next."""
        self.retry_at = 0.0

    def __repr__(self) -> str:
        return f"<{self.partition}/{self.seq} {self.phase.value} try {self.attempts}>"


class Line:
    """Messages of which one at a time is worked on, by rising number."""

    __slots__ = ("busy", "entries", "is_queued", "key", "queue", "strays")

    def __init__(self, queue: "ProcessQueue", key: str | int) -> None:
        self.queue = queue
        self.key = key
        self.entries: deque[Entry] = deque()
        self.busy: Entry | None = None
        """The one that is not waiting any more."""
        self.strays = 0
        """Handlers that still run although their message was lost: the line waits for them to end."""
        self.is_queued = False
        """In the list of those that can go on."""

    def add(self, entry: Entry) -> None:
        """Mostly at the end; one that came back stands before what came after it."""
        entry.line = self
        if not self.entries or self.entries[-1].seq < entry.seq:
            self.entries.append(entry)
            return
        ordered = list(self.entries)
        insort(ordered, entry, key=lambda each: each.seq)
        self.entries = deque(ordered)

    def remove(self, entry: Entry) -> None:
        """It is gone."""
        if self.busy is entry:
            self.busy = None
        if self.entries[0] is entry:
            self.entries.popleft()
        else:
            self.entries.remove(entry)

    @property
    def next(self) -> Entry | None:
        """What can be worked on now."""
        return self.entries[0] if self.entries and self.busy is None and not self.strays else None


class ProcessQueue:
    """Of one partition."""

    __slots__ = ("bytes", "entries", "is_stopping", "lines", "partition", "running", "settling")

    def __init__(self, partition: int) -> None:
        self.partition = partition
        self.lines: dict[str | int, Line] = {}
        self.entries: dict[int, Entry] = {}
        """By number: what is held."""
        self.bytes = 0
        self.running = 0
        """Handlers, also those whose message was lost."""
        self.settling = 0
        self.is_stopping = False
        """Nothing new begins."""

    @property
    def is_idle(self) -> bool:
        """No handler runs, and no result is on its way."""
        return not self.running and not self.settling

    def line(self, key: str | int) -> Line:
        """The line of a key, made when it is new."""
        found = self.lines.get(key)
        if found is None:
            found = self.lines[key] = Line(self, key)
        return found
