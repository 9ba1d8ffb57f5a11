"""What a queue store keeps: plain records and the batch that one atomic, durable step writes.

All policy is in the cores; a store only stores. Numbers are ints: partitions and channels have ids that are given once
and never again (names may be reused). Sequence numbers start at 1 for each partition and are never reused.
"""

from dataclasses import dataclass, field
from typing import NamedTuple


class MessageRow(NamedTuple):
    """A message of a partition's log."""

    partition: int
    seq: int
    meta: bytes
    """All but the body, encoded by the core (:mod:`dep2p.protocols.queues.message`); opaque to the store."""
    body: bytes


class StateRow(NamedTuple):
    """What a channel knows of one message that is not done: only where it differs from 'never handed out'."""

    channel: int
    partition: int
    seq: int
    attempts: int
    due_us: int
    """Deferred until then, Unix microseconds; 0: not deferred."""
    history: bytes
    """Reasons of earlier failures, encoded by the core; may be empty."""


class DeadRow(NamedTuple):
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
    """How far a channel is in a partition."""

    floor: int = 0
    """Every message up to this one is done."""
    handed_out: int = 0
    """Every message after this one was never handed out. What lies between and is not done may have been: after a
    crash its attempts are one more than its state row says."""


@dataclass(slots=True)
class PartitionRecord:
    """What :meth:`QueueStore.load_partition` gives: everything but the messages."""

    last_seq: int = 0
    """The last number that was ever given; also when its message is long gone."""
    trimmed: int = 0
    """Every message up to this one is gone from the log."""
    messages: int = 0
    bytes: int = 0
    """Of the bodies in the log."""
    cursors: dict[int, Cursor] = field(default_factory=dict[int, Cursor])
    """By channel."""
    done: dict[int, list[tuple[int, int]]] = field(default_factory=dict[int, list[tuple[int, int]]])
    """By channel: what is done above the floor, as inclusive ranges in rising order that do not touch."""
    states: dict[int, list[StateRow]] = field(default_factory=dict[int, list[StateRow]])
    """By channel, in the order of seq."""
    last_dead_id: dict[int, int] = field(default_factory=dict[int, int])
    """By channel: the last id that was ever given to a dead letter."""


@dataclass(slots=True)
class CursorChange:
    """What changed for one channel in one partition since the last batch."""

    cursor: Cursor
    done_added: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Inclusive ranges above the floor. The store forgets by itself what the floor has passed: ranges and states."""
    states_set: list[StateRow] = field(default_factory=list[StateRow])
    states_removed: list[int] = field(default_factory=list[int])
    """Seqs that are done above the floor, or back at 'never handed out'."""


@dataclass(slots=True)
class StoreBatch:
    """One atomic step. Applied in the order of the fields; all of it, or nothing and an error.

    A batch may be split by the writer when it fails; the `appends` of one publish stay together.
    """

    definitions: dict[str, bytes | None] = field(default_factory=dict[str, bytes | None])
    """Small values by key (queues, channels, routes, locks, epochs, publishers' windows); None removes."""
    appends: list[MessageRow] = field(default_factory=list[MessageRow])
    """New messages; each partition's in rising order of seq."""
    groups: list[int] = field(default_factory=list[int])
    """How many of `appends` belong to each publish, in their order: those go together or not at all."""
    cursors: dict[tuple[int, int], CursorChange] = field(default_factory=dict[tuple[int, int], CursorChange])
    """By (channel, partition)."""
    dead_added: list[DeadRow] = field(default_factory=list[DeadRow])
    dead_removed: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(channel, id)."""
    trims: dict[int, int] = field(default_factory=dict[int, int])
    """Partition to seq: messages up to it leave the log."""
    partitions_removed: list[int] = field(default_factory=list[int])
    """Everything of them goes."""
    channels_removed: list[int] = field(default_factory=list[int])
    """Cursors, ranges, states and dead letters of them go."""

    @property
    def is_empty(self) -> bool:
        """Nothing to write."""
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
    """What a store tells about itself."""

    bytes_on_disk: int = 0
    commits: int = 0
    fsyncs: int = 0
    rows_written: int = 0
    bodies_compressed: int = 0
    compressed_from_bytes: int = 0
    compressed_to_bytes: int = 0
