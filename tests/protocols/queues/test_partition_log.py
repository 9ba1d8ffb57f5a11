"""Messages in memory: bounded, the oldest go first, and what is gone leaves nothing behind."""

from dep2p.protocols.queues.message import OVERHEAD_BYTES, QueuedMessage
from dep2p.protocols.queues.partition_log import LogCache, PartitionLog
from dep2p.protocols.queues.records import PartitionRecord

SIZE = 100


def _add(log: PartitionLog, count: int) -> None:
    for _ in range(count):
        log.add(QueuedMessage(log.reserve(1), 1, 0, 0, 0, 0, b"", bytes(SIZE)))


def test_a_queue_that_is_consumed_for_ever_keeps_no_trace_of_what_has_left() -> None:
    cache = LogCache(1 << 40)
    log = PartitionLog(1, PartitionRecord(), cache, is_pinned=False)
    most = 0
    for _ in range(2_000):
        _add(log, 64)
        log.trim(log.last_seq - 10)
        most = max(most, len(cache.order))
    assert most < 15_000
    assert list(log.rows) == list(range(log.last_seq - 9, log.last_seq + 1))
    assert cache.bytes == 10 * (SIZE + OVERHEAD_BYTES)


def test_the_oldest_leave_first_whatever_was_dropped_between_them() -> None:
    cache = LogCache(100 * (SIZE + OVERHEAD_BYTES))
    first, second = (PartitionLog(n, PartitionRecord(), cache, is_pinned=False) for n in (1, 2))
    _add(first, 50)
    _add(second, 40)
    first.trim(20)
    second.take_back(range(1, 11))
    assert len(first.rows) + len(second.rows) == 60
    _add(second, 50)
    assert list(first.rows) == list(range(31, 51))
    assert list(second.rows) == list(range(11, 91))
    assert cache.bytes == cache.bytes_max


def test_messages_of_an_ephemeral_queue_stay_and_others_make_room() -> None:
    cache = LogCache(10 * (SIZE + OVERHEAD_BYTES))
    pinned = PartitionLog(1, PartitionRecord(), cache, is_pinned=True)
    other = PartitionLog(2, PartitionRecord(), cache, is_pinned=False)
    _add(pinned, 5)
    _add(other, 20)
    assert len(pinned.rows) == 5
    assert list(other.rows) == list(range(16, 21))


def test_a_message_that_was_read_again_is_new() -> None:
    """Its old place must not push it out at once."""
    cache = LogCache(10 * (SIZE + OVERHEAD_BYTES))
    log = PartitionLog(1, PartitionRecord(), cache, is_pinned=False)
    _add(log, 11)
    assert 1 not in log.rows
    again = QueuedMessage(1, 1, 0, 0, 0, 0, b"", bytes(SIZE))
    cache.put(log, again)
    assert log.rows[1] is again
    _add(log, 9)
    assert 1 in log.rows
    _add(log, 1)
    assert 1 not in log.rows
