"""A partition: an ordered log of which only a window is in memory."""

from array import array
from collections import deque
from collections.abc import Iterable
from typing import Final, NamedTuple

from dep2p.protocols.queues.message import OVERHEAD_BYTES, Message
from dep2p.protocols.queues.records import PartitionRecord


class Read(NamedTuple):
    """Messages that are wanted from the store."""

    partition: int
    from_seq: int
    items_max: int
    bytes_max: int


class LogCache:
    """Messages in memory, of all partitions: bounded in bytes, the oldest go first."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes = 0
        self.order: deque[tuple[PartitionLog, int]] = deque()
        """By age, with some that are gone already: taking them out one by one costs more than passing them by."""
        self._gone = 0
        """About how many these are."""

    def put(self, log: "PartitionLog", message: Message) -> None:
        """Keep a message; others may go."""
        seq = message[0]
        rows = log.rows
        if seq in rows:
            return
        rows[seq] = message
        self.order.append((log, seq))
        self.bytes += len(message[7]) + OVERHEAD_BYTES
        if self.bytes > self.bytes_max:
            self.make_room()

    def make_room(self) -> None:
        """The oldest go, while there are too many."""
        order = self.order
        while self.bytes > self.bytes_max and len(order) > 1:
            log, seq = order.popleft()
            if log.is_pinned:  # nowhere else: an ephemeral queue is bounded by its own options
                continue
            message = log.rows.pop(seq, None)
            if message is not None:
                self.bytes -= len(message.body) + OVERHEAD_BYTES

    def drop(self, log: "PartitionLog", seqs: Iterable[int]) -> None:
        """Forget messages whose numbers never come back."""
        rows = log.rows
        for seq in seqs:
            message = rows.pop(seq, None)
            if message is not None:
                self.bytes -= len(message[7]) + OVERHEAD_BYTES
                self._gone += 1
        if self._gone > _GONE_KEPT + len(self.order) // 2:
            self.order = deque([each for each in self.order if each[1] in each[0].rows])
            self._gone = 0


class PartitionLog:
    """One partition of a queue."""

    __slots__ = (
        "_sizes",
        "_sizes_from",
        "_unknown_bytes",
        "_unknown_items",
        "bytes",
        "cache",
        "holes",
        "id",
        "is_pinned",
        "items",
        "last_seq",
        "rows",
        "trimmed",
        "visible",
        "wanted",
        "wanted_to",
    )

    def __init__(self, partition: int, record: PartitionRecord, cache: LogCache, *, is_pinned: bool) -> None:
        self.id = partition
        self.cache = cache
        self.is_pinned = is_pinned
        """The messages are in memory only."""
        self.last_seq = record.last_seq
        """The last number that was given; also to messages that are not committed yet."""
        self.visible = record.last_seq
        """Everything up to here is committed."""
        self.trimmed = record.trimmed
        self.items = record.messages
        self.bytes = record.bytes
        self.rows: dict[int, Message] = {}
        self.holes = 0
        """How many numbers stayed unused in this run."""
        self.wanted = 0
        """From where a page was asked for; 0: nothing is under way."""
        self.wanted_to = 0
        """What was visible then."""
        self._unknown_items = record.messages
        self._unknown_bytes = record.bytes
        self._sizes = array("Q")
        self._sizes_from = record.last_seq + 1

    @property
    def last_used(self) -> int:
        """The last number that a message has, or may get by a commit that is under way."""
        seq = self.last_seq
        while seq > self.visible and self.is_gone(seq):
            seq -= 1
        return seq

    def reserve(self, count: int) -> int:
        """Numbers for new messages: the first of them."""
        first = self.last_seq + 1
        self.last_seq += count
        return first

    def add(self, message: Message) -> None:
        """A new message, not visible yet; in the order of their numbers."""
        size = len(message[7])
        self._sizes.append(size)
        self.items += 1
        self.bytes += size
        seq = message[0]
        self.rows[seq] = message
        cache = self.cache
        cache.order.append((self, seq))
        cache.bytes += size + OVERHEAD_BYTES
        if cache.bytes > cache.bytes_max:
            cache.make_room()

    def take_back(self, seqs: range) -> None:
        """These were not committed: their numbers stay unused."""
        for seq in seqs:
            index = seq - self._sizes_from
            if seq > self.trimmed and self._sizes[index] != _GONE:
                self.items -= 1
                self.bytes -= self._sizes[index]
                self._sizes[index] = _GONE
                self.holes += 1
        self.cache.drop(self, seqs)

    def trim(self, up_to: int) -> None:
        """Messages up to a number leave the log."""
        self.cache.drop(self, range(self.trimmed + 1, up_to + 1))
        for seq in range(self.trimmed + 1, up_to + 1):
            index = seq - self._sizes_from
            if index < 0:
                if self._unknown_items > 0:  # of an earlier run: only their sum is known
                    size = self._unknown_bytes // self._unknown_items
                    self._unknown_items -= 1
                    self._unknown_bytes -= size
                    self.items -= 1
                    self.bytes -= size
            elif self._sizes[index] != _GONE:
                self.items -= 1
                self.bytes -= self._sizes[index]
        self.trimmed = max(self.trimmed, up_to)
        done = self.trimmed + 1 - self._sizes_from
        if done > _SIZES_DROPPED_AT_ONCE:
            del self._sizes[:done]
            self._sizes_from += done

    def is_gone(self, seq: int) -> bool:
        """Whether the number was never used, or its message has left the log."""
        if seq <= self.trimmed:
            return True
        index = seq - self._sizes_from
        return 0 <= index < len(self._sizes) and self._sizes[index] == _GONE


_GONE: Final = (1 << 64) - 1
_SIZES_DROPPED_AT_ONCE: Final = 4_096
_GONE_KEPT: Final = 4_096
