"""The records of a queue store, and the batch that one atomic, durable step writes.

All policy is in the cores; a store only stores. Numbers are ints: partitions and channels have ids that are given once
and never again (names may be reused). Sequence numbers start at 1 for each partition and are never reused.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class MessageRow(NamedTuple):
    """A message of a partition's log."""

    partition: int
    seq: int
    meta: bytes
    """All fields but the body, encoded by the core (:mod:`dep2p.protocols.queues.message`); opaque to the store."""
    body: bytes


class StateRow(NamedTuple):
    """The state of one unfinished message in a channel. Messages that were never delivered have no row."""

    channel: int
    partition: int
    seq: int
    attempts: int
    due_us: int
    """Deferred until then, Unix microseconds; 0: not deferred."""
    history: bytes
    """Reasons of earlier failures, encoded by the core; may be empty."""


class DeadLetterRow(NamedTuple):
    """A dead letter: a copy, so that the log may be trimmed."""

    channel: int
    id: int
    """Given by the core, rising and never reused per channel."""
    partition: int
    seq: int
    died_us: int
    attempts: int
    meta: bytes
    body: bytes
    history: bytes


@dataclass(slots=True)
class Cursor:
    """The position of a channel in a partition."""

    ack_floor: int = 0
    """Every message up to this one is done."""
    delivered_up_to: int = 0
    """Messages after this one were never delivered. Messages between the two that are not done may have been: after a
    crash each has one attempt more than its state row says."""


@dataclass(slots=True)
class PartitionRecord:
    """The result of :meth:`QueueStore.load_partition`: everything but the messages."""

    last_seq: int = 0
    """The last number that was ever given, also when its message is long gone."""
    trimmed: int = 0
    """Every message up to this one is gone from the log."""
    messages: int = 0
    bytes: int = 0
    """Bytes of the bodies in the log."""
    cursors: dict[int, Cursor] = field(default_factory=dict[int, Cursor])
    """By channel."""
    done: dict[int, list[tuple[int, int]]] = field(default_factory=dict[int, list[tuple[int, int]]])
    """By channel the finished numbers above the ack floor, as inclusive ranges in rising order that do not touch."""
    states: dict[int, list[StateRow]] = field(default_factory=dict[int, list[StateRow]])
    """By channel, in the order of seq."""
    last_dead_id: dict[int, int] = field(default_factory=dict[int, int])
    """By channel the last id that was ever given to a dead letter."""


class Run(NamedTuple):
    """Messages of one publish with numbers in a row."""

    partition: int
    first_seq: int
    items: int


@dataclass(slots=True)
class CursorChange:
    """The changes of one channel in one partition since the last batch."""

    cursor: Cursor
    done_added: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Inclusive ranges above the ack floor. The store removes ranges and states below the ack floor by itself."""
    states_set: list[StateRow] = field(default_factory=list[StateRow])
    states_removed: list[int] = field(default_factory=list[int])
    """Seqs that are done above the ack floor, or back at 'never delivered'."""

    def prepend(self, earlier: "CursorChange") -> None:
        """Put an earlier change, whose commit has failed, in front of this one."""
        self.done_added[:0] = [(seq, seq) for low, high in earlier.done_added for seq in range(low, high + 1)]
        self.states_set[:0] = earlier.states_set
        self.states_removed[:0] = earlier.states_removed


@dataclass(slots=True)
class StoreBatch:
    """One atomic step. Applied in the order of the fields; all of it, or nothing and an error.

    A batch may be split by the writer when it fails; the `appends` of one publish stay together.
    """

    definitions: dict[str, bytes | None] = field(default_factory=dict[str, bytes | None])
    """Small values by key (queues, channels, routes, locks, epochs, publishers' windows); None removes one."""
    appends: list[MessageRow] = field(default_factory=list[MessageRow])
    """New messages; each partition's in rising order of seq."""
    groups: list[int] = field(default_factory=list[int])
    """How many of `appends` belong to each publish, in their order: they are written together or not at all."""
    cursors: dict[tuple[int, int], CursorChange] = field(default_factory=dict[tuple[int, int], CursorChange])
    """By (channel, partition)."""
    dead_added: list[DeadLetterRow] = field(default_factory=list[DeadLetterRow])
    dead_removed: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(channel, id)."""
    trims: dict[int, int] = field(default_factory=dict[int, int])
    """Partition to seq: messages up to it leave the log."""
    partitions_removed: list[int] = field(default_factory=list[int])
    """Partitions that are removed with everything in them."""
    channels_removed: list[int] = field(default_factory=list[int])
    """Channels whose cursors, ranges, states and dead letters are removed."""

    def part(self, positions: Sequence[int]) -> "StoreBatch":
        """Return a batch with the appends of the publishes at these positions, and nothing else."""
        starts = [0, *itertools.accumulate(self.groups)]
        part = StoreBatch(groups=[self.groups[position] for position in positions])
        for position in positions:
            part.appends += self.appends[starts[position] : starts[position + 1]]
        return part

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to write."""
        return not (
            self.definitions
            or self.appends
            or self.cursors
            or self.dead_added
            or self.dead_removed
            or self.trims
            or self.partitions_removed
            or self.channels_removed
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStatistics:
    """Counters and sizes that a store reports."""

    bytes_on_disk: int = 0
    commits: int = 0
    fsyncs: int = 0
    rows_written: int = 0
    bodies_compressed: int = 0
    compressed_from_bytes: int = 0
    compressed_to_bytes: int = 0
