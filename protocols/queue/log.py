"""A partition: an ordered log of which only a window is in memory."""

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from dep2p.protocols.queue.message import OVERHEAD_BYTES, Message
from dep2p.protocols.queue.records import PartitionRecord


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
        self._order: OrderedDict[tuple[int, int], PartitionLog] = OrderedDict()

    def put(self, log: "PartitionLog", message: Message) -> None:
        """Keep a message; others may go."""
        seq = message[0]
        rows = log.rows
        if seq in rows:
            return
        rows[seq] = message
        self._order[(log.id, seq)] = log
        self.bytes += len(message[7]) + OVERHEAD_BYTES
        while self.bytes > self.bytes_max and len(self._order) > 1:
            (_partition, seq), old = self._order.popitem(last=False)
            if old.is_pinned:  # nowhere else: an ephemeral queue is bounded by its own options
                continue
            self._forget(old, seq)

    def drop(self, log: "PartitionLog", seq: int) -> None:
        """Forget a message."""
        if seq in log.rows:
            self._order.pop((log.id, seq), None)
            self._forget(log, seq)

    def _forget(self, log: "PartitionLog", seq: int) -> None:
        message = log.rows.pop(seq, None)
        if message is not None:
            self.bytes -= len(message.body) + OVERHEAD_BYTES


class PartitionLog:
    """One partition of a queue."""

    __slots__ = (
        "_sizes",
        "_sizes_from",
        "_unknown_bytes",
        "_unknown_items",
        "bytes",
        "cache",
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
        self.wanted = 0
        """From where a page was asked for; 0: nothing is under way."""
        self.wanted_to = 0
        """What was visible then."""
        self._unknown_items = record.messages
        self._unknown_bytes = record.bytes
        self._sizes = array("Q")
        self._sizes_from = record.last_seq + 1

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
        self.cache.put(self, message)

    def take_back(self, seqs: Iterable[int]) -> None:
        """These were not committed: their numbers stay unused."""
        for seq in seqs:
            index = seq - self._sizes_from
            if seq > self.trimmed and self._sizes[index] != _GONE:
                self.items -= 1
                self.bytes -= self._sizes[index]
                self._sizes[index] = _GONE
            self.cache.drop(self, seq)

    def trim(self, up_to: int) -> None:
        """Messages up to a number leave the log."""
        for seq in range(self.trimmed + 1, up_to + 1):
            self.cache.drop(self, seq)
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


_GONE = (1 << 64) - 1
_SIZES_DROPPED_AT_ONCE = 4_096
