"""A partition: an ordered log of which only a window is in memory."""

from array import array
from collections import deque
from collections.abc import Iterable
from typing import Final, NamedTuple

from dep2p.protocols.queues.message import OVERHEAD_BYTES, QueuedMessage
from dep2p.protocols.queues.records import PartitionRecord

PAGE_BYTES: Final = 4_194_304
"""Bytes of messages that one read brings from the store, at most."""
_PAGE_ITEMS: Final = 1_024


class Read(NamedTuple):
    """A request for messages from the store."""

    partition: int
    from_seq: int
    items_max: int
    bytes_max: int


class LogCache:
    """Messages in memory, of all partitions: bounded in bytes, the oldest go first."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes: int = 0
        self.order: deque[tuple[PartitionLog, int]] = deque()
        """Messages by age. Some are gone already: removing them one by one costs more than passing them by."""
        self._gone = 0
        """About the number of those that are gone."""

    def put(self, log: "PartitionLog", message: QueuedMessage) -> None:
        """Keep a message; older ones may go."""
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
        """Drop the oldest messages, while there are too many."""
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
        self.id: int = partition
        self.cache: LogCache = cache
        self.is_pinned: bool = is_pinned
        """Whether the messages are in memory only."""
        self.last_seq: int = record.last_seq
        """The last number that was given, also to messages that are not committed yet."""
        self.visible: int = record.last_seq
        """Everything up to here is committed."""
        self.trimmed: int = record.trimmed
        self.items: int = record.messages
        self.bytes: int = record.bytes
        self.rows: dict[int, QueuedMessage] = {}
        self.holes: int = 0
        """Numbers that stayed unused in this run."""
        self.wanted: int = 0
        """The start of the page that was asked for; 0: none is under way."""
        self.wanted_to: int = 0
        """The value of `visible` at that time."""
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
        """Reserve numbers for new messages; return the first."""
        first = self.last_seq + 1
        self.last_seq += count
        return first

    def add(self, message: QueuedMessage) -> None:
        """Add a message, not visible yet; in the order of numbers."""
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
        """Remove messages that were not committed: their numbers stay unused."""
        for seq in seqs:
            index = seq - self._sizes_from
            if seq > self.trimmed and self._sizes[index] != _GONE:
                self.items -= 1
                self.bytes -= self._sizes[index]
                self._sizes[index] = _GONE
                self.holes += 1
        self.cache.drop(self, seqs)

    def trim(self, up_to: int) -> None:
        """Remove messages up to a number from the log."""
        self.cache.drop(self, range(self.trimmed + 1, up_to + 1))
        for seq in range(self.trimmed + 1, up_to + 1):
            index = seq - self._sizes_from
            if index < 0:
                if self._unknown_items > 0:  # messages of an earlier run: only their sum is known
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

    def want(self, seq: int) -> Read:
        """Ask for the page that begins at a number; until it comes, no other page is asked for."""
        self.wanted = seq
        self.wanted_to = self.visible
        # A page must fit into the cache beside others, or its own end would push its beginning out.
        room = self.cache.bytes_max // 2
        items = max(1, min(_PAGE_ITEMS, room // (2 * OVERHEAD_BYTES)))
        return Read(self.id, seq, items, max(1, min(PAGE_BYTES, room - items * OVERHEAD_BYTES)))

    def is_gone(self, seq: int) -> bool:
        """Whether the number was never used, or its message has left the log."""
        if seq <= self.trimmed:
            return True
        index = seq - self._sizes_from
        return 0 <= index < len(self._sizes) and self._sizes[index] == _GONE


_GONE: Final = (1 << 64) - 1
_SIZES_DROPPED_AT_ONCE: Final = 4_096
_GONE_KEPT: Final = 4_096
