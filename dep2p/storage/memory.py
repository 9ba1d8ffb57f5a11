"""A queue store in memory: the reference for the others, and the store of a node without a data directory."""

import bisect

from dep2p.protocols.queues.range_set import as_ranges
from dep2p.protocols.queues.records import (
    Cursor,
    CursorChange,
    DeadLetterRow,
    MessageRow,
    PartitionRecord,
    StateRow,
    StoreBatch,
    StoreStatistics,
)
from dep2p.storage.queue_store import no_wait
from dep2p.storage.sequence_check import check_numbers


class _Partition:
    def __init__(self) -> None:
        self.last_seq = 0
        self.trimmed = 0
        self.seqs: list[int] = []
        self.rows: dict[int, MessageRow] = {}
        self.bytes = 0


class _CursorState:
    def __init__(self) -> None:
        self.cursor = Cursor()
        self.done: dict[int, None] = {}
        self.states: dict[int, StateRow] = {}


class MemoryStore:
    """A store that does not outlive the process. Its bounds are those of the queues (`QueueOptions.items_max`,
    ``bytes_max``)."""

    is_durable = False
    location = "memory"

    def __init__(self) -> None:
        self._definitions: dict[str, bytes] = {}
        self._partitions: dict[int, _Partition] = {}
        self._cursors: dict[tuple[int, int], _CursorState] = {}
        self._dead: dict[int, dict[int, DeadLetterRow]] = {}
        self._last_dead: dict[int, int] = {}
        self._commits = 0
        self._rows = 0
        self.on_wait = no_wait

    def open(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""

    def load(self) -> dict[str, bytes]:
        """All definitions."""
        return dict(self._definitions)

    def load_partition(self, partition: int) -> PartitionRecord:
        """All of a partition but its messages."""
        kept = self._partitions.get(partition) or _Partition()
        record = PartitionRecord(kept.last_seq, kept.trimmed, len(kept.rows), kept.bytes)
        for (channel, of), cursor_state in self._cursors.items():
            if of == partition:
                record.cursors[channel] = Cursor(cursor_state.cursor.ack_floor, cursor_state.cursor.delivered_up_to)
                record.done[channel] = as_ranges(sorted(cursor_state.done))
                record.states[channel] = [cursor_state.states[seq] for seq in sorted(cursor_state.states)]
                record.last_dead_id[channel] = self._last_dead.get(channel, 0)
        return record

    def scan(self, partition: int, from_seq: int, *, items_max: int, bytes_max: int) -> list[MessageRow]:
        """Messages from ``from_seq`` on."""
        kept = self._partitions.get(partition)
        found: list[MessageRow] = []
        if kept is None:
            return found
        size = 0
        for seq in kept.seqs[bisect.bisect_left(kept.seqs, from_seq) :]:
            row = kept.rows.get(seq)
            if row is None:
                continue
            size += len(row.body)
            if found and (len(found) >= items_max or size > bytes_max):
                break
            found.append(row)
        return found

    def get(self, partition: int, seqs: list[int]) -> list[MessageRow]:
        """These messages."""
        kept = self._partitions.get(partition)
        return [] if kept is None else [kept.rows[seq] for seq in sorted(seqs) if seq in kept.rows]

    def scan_dead_letters(self, channel: int, after_id: int, *, items_max: int) -> list[DeadLetterRow]:
        """Dead letters behind an id."""
        letters = self._dead.get(channel, {})
        return [letters[each] for each in sorted(letters) if each > after_id][:items_max]

    def count_dead_letters(self, channel: int) -> int:
        """How many dead letters there are."""
        return len(self._dead.get(channel, ()))

    def check(self, batch: StoreBatch) -> None:
        """Raises what `commit` would raise."""
        there = self._partitions
        check_numbers(batch.appends, {p: there[p].last_seq for p, *_ in batch.appends if p in there})

    def commit(self, batch: StoreBatch) -> None:
        """Take all of it."""
        self.check(batch)  # before any change
        self._commits += 1
        for key, value in batch.definitions.items():
            if value is None:
                self._definitions.pop(key, None)
            else:
                self._definitions[key] = value
        for row in batch.appends:
            kept = self._partitions.setdefault(row.partition, _Partition())
            kept.last_seq = row.seq
            kept.seqs.append(row.seq)
            kept.rows[row.seq] = row
            kept.bytes += len(row.body)
        self._rows += len(batch.appends)
        for (channel, partition), change in batch.cursors.items():
            self._move(self._cursors.setdefault((channel, partition), _CursorState()), change)
        for letter in batch.dead_added:
            self._dead.setdefault(letter.channel, {})[letter.id] = letter
            self._last_dead[letter.channel] = max(self._last_dead.get(letter.channel, 0), letter.id)
        for channel, dead_id in batch.dead_removed:
            self._dead.get(channel, {}).pop(dead_id, None)
        for partition, up_to in batch.trims.items():
            self._trim(self._partitions.setdefault(partition, _Partition()), up_to)
        for partition in batch.partitions_removed:
            self._partitions.pop(partition, None)
            for cursor_key in [each for each in self._cursors if each[1] == partition]:
                del self._cursors[cursor_key]
        for channel in batch.channels_removed:
            self._dead.pop(channel, None)
            self._last_dead.pop(channel, None)
            for cursor_key in [each for each in self._cursors if each[0] == channel]:
                del self._cursors[cursor_key]

    def _move(self, cursor_state: _CursorState, change: CursorChange) -> None:
        cursor_state.cursor = Cursor(change.cursor.ack_floor, change.cursor.delivered_up_to)
        for low, high in change.done_added:
            cursor_state.done.update(dict.fromkeys(range(low, high + 1)))
        for seq in change.states_removed:
            cursor_state.states.pop(seq, None)
        for state in change.states_set:
            cursor_state.states[state.seq] = state
        ack_floor = change.cursor.ack_floor
        for seq in [each for each in cursor_state.done if each <= ack_floor]:
            del cursor_state.done[seq]
        for seq in [each for each in cursor_state.states if each <= ack_floor]:
            del cursor_state.states[seq]

    def _trim(self, kept: _Partition, up_to: int) -> None:
        cut = bisect.bisect_right(kept.seqs, up_to)
        for seq in kept.seqs[:cut]:
            kept.bytes -= len(kept.rows.pop(seq).body)
        del kept.seqs[:cut]
        kept.trimmed = max(kept.trimmed, up_to)
        kept.last_seq = max(kept.last_seq, up_to)

    def tidy_in_s(self) -> float | None:
        """Never."""
        return None

    def tidy(self) -> None:
        """Nothing to do."""

    def statistics(self) -> StoreStatistics:
        """Counts since it was made."""
        return StoreStatistics(commits=self._commits, rows_written=self._rows)
