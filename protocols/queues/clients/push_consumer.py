"""The push consumer: which message is handed to the handler next, and what becomes of it. Pure.

RocketMQ's flows, with one queue per order key instead of a lock per partition (docs/decisions/0021-client-flows.md):

- normal mode: every message for itself; a failed one goes back to the queue for a later delivery (change-invisible);
- FIFO mode: one message of a key at a time; the next begins when the queue has confirmed the result of the one
  before. A failed one is tried again here, after the back-off; after the last try it becomes a dead letter, which is
  asked for until it is confirmed, and then the key goes on.

Messages that are held are renewed at half of their time. One that is lost (its time over, its connection gone, its
partition another consumer's) ends its handler, and its key queue waits for that. What was handled but not confirmed is
remembered: delivered again it is settled, not handled again.
"""

import heapq
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from enum import Enum
from itertools import count
from typing import Final, Literal, NamedTuple

from dep2p.errors import RejectMessage, RetryMessage
from dep2p.protocols.queues.clients.process_queue import KeyQueue, Phase, ProcessQueue, ProcessQueueEntry
from dep2p.protocols.queues.wire.frames import REASON_BYTES_MAX, Settle
from dep2p.protocols.timing.backoff import Backoff

Mode = Literal["normal", "fifo"]

SETTLE_RETRY_S: Final = 1.0
"""A result that could not be sent is sent again after this, as RocketMQ's clients do."""
RENEW_SHARE: Final = 0.5
"""The share of its time after which a message is renewed."""
_OWED_MAX: Final = 8_192
"""Results that are remembered of messages that were lost before the queue confirmed them; above it the oldest are
forgotten."""


class Arrived(NamedTuple):
    """A delivery."""

    partition: int
    seq: int
    key: str
    size: int
    attempts: int
    deadline: float
    item: object


class StartHandler(NamedTuple):
    """Call the handler."""

    entry: ProcessQueueEntry


class CancelHandler(NamedTuple):
    """End the handler: the message is not this consumer's any more."""

    entry: ProcessQueueEntry


class SendResult(NamedTuple):
    """Send the result (`ProcessQueueEntry.fate`, ``delay_s``, ``reason``) to the queue. If ``confirmed``, wait until it
    is durable and call `PushCore.result_sent`."""

    entry: ProcessQueueEntry
    fate: Settle
    confirmed: bool


class Renew(NamedTuple):
    """Touch these, then call `PushCore.renewed` or `PushCore.lost` for each."""

    entries: list[ProcessQueueEntry]


Effect = StartHandler | CancelHandler | SendResult | Renew


class Outcome(Enum):
    """The end of a handler."""

    DONE = "done"
    FAILED = "failed"
    REJECTED = "rejected"
    """The message can never work."""
    CANCELLED = "cancelled"


class HandlerFailure(NamedTuple):
    """The meaning of a handler's error for its message."""

    outcome: Outcome
    reason: str
    delay_s: float | None
    """Until the next try; None: as the back-off says."""
    was_meant: bool
    """Whether the handler raised it to say so (RejectMessage, RetryMessage); any other error belongs into the log."""


def failure_of(error: BaseException) -> HandlerFailure:
    """Return the meaning of a handler's error. A delay that is no number of seconds counts as none."""
    if isinstance(error, RejectMessage):
        return HandlerFailure(Outcome.REJECTED, _cut(str(error) or "rejected by its handler"), None, True)
    if isinstance(error, RetryMessage):
        reason = _cut(str(error) or "its handler asked for another try")
        return HandlerFailure(Outcome.FAILED, reason, _delay_of(error.delay_s), True)
    return HandlerFailure(Outcome.FAILED, _cut(f"{type(error).__name__}: {error}"), None, False)


def _delay_of(delay_s: object) -> float | None:
    """Return the handler's own value, of any type, as seconds; None when it is no number of seconds."""
    if not isinstance(delay_s, int | float) or isinstance(delay_s, bool):
        return None
    try:
        seconds = float(delay_s)
    except OverflowError:
        return None
    return seconds if 0 <= seconds < math.inf else None


def _cut(text: str) -> str:
    return text.encode("utf-8", "replace")[:REASON_BYTES_MAX].decode("utf-8", "ignore")


class ResultOutcome(Enum):
    """The outcome of sending a result."""

    CONFIRMED = "confirmed"
    NOT_HELD = "not held"
    FAILED = "failed"
    """Not known, or not taken: send it again."""


class PushCore:
    """Events in, effects out; ``now`` is monotonic seconds.

    ``concurrency``: handlers at once. ``items_max`` and ``bytes_max``: of what is held here. ``attempts_max``: tries of
    a message in FIFO mode before it becomes a dead letter; 0: no limit.
    """

    def __init__(
        self,
        mode: Mode,
        *,
        concurrency: int,
        items_max: int,
        bytes_max: int,
        attempts_max: int,
        backoff: Backoff,
    ) -> None:
        if concurrency < 1 or items_max < 1 or bytes_max < 1 or attempts_max < 0:
            raise ValueError("concurrency, items_max and bytes_max are at least 1, and attempts_max at least 0")
        self.mode = mode
        self.is_fifo: bool = mode == "fifo"
        self.concurrency = concurrency
        self.items_max = items_max
        self.bytes_max = bytes_max
        self.attempts_max = attempts_max
        self.backoff = backoff
        self.counts: Counter[str] = Counter()
        self.queues: dict[int, ProcessQueue] = {}
        self.items: int = 0
        self.bytes: int = 0
        self.running: int = 0
        self.settling: int = 0
        self.is_stopping: bool = False
        self._ready: deque[KeyQueue] = deque()
        """Key queues that can go on, each once."""
        self._timers: list[tuple[float, int, bool, ProcessQueueEntry]] = []
        """Heap of (when, order, whether it is about the lease, entry)."""
        self._order = count()
        self._owed: OrderedDict[tuple[int, int], tuple[Settle, str]] = OrderedDict()

    # For the shell

    @property
    def room_items(self) -> int:
        """The number of messages that it can still take; 0 when too many bytes are here."""
        return 0 if self.bytes >= self.bytes_max else max(0, self.items_max - self.items)

    @property
    def is_idle(self) -> bool:
        """Whether no handler runs, and no result is on its way."""
        return not self.running and not self.settling

    def partition_is_idle(self, partition: int) -> bool:
        """Whether that is so for one partition: after `stop_partition` its lock can be released."""
        queue = self.queues.get(partition)
        return queue is None or queue.is_idle

    def next_deadline(self) -> float | None:
        """Return when `on_time` has work to do."""
        timers = self._timers
        while timers and not self._is_valid(timers[0]):
            heapq.heappop(timers)
        return timers[0][0] if timers else None

    # Deliveries

    def arrived(self, deliveries: Iterable[Arrived], now: float) -> list[Effect]:
        """Take messages."""
        effects: list[Effect] = []
        for partition, seq, key, size, attempts, deadline, item in deliveries:
            queue = self.queues.get(partition)
            if queue is None:
                queue = self.queues[partition] = ProcessQueue(partition)
            queue.is_stopping = False
            before = queue.entries.get(seq)
            if before is not None:  # delivered again: the first delivery is over
                self._lose(before, effects)
            entry = ProcessQueueEntry(partition, seq, size, attempts, now, deadline, item)
            queue.entries[seq] = entry
            queue.bytes += size
            self.items += 1
            self.bytes += size
            key_queue = queue.key_queue(key if self.is_fifo and key else seq)
            key_queue.add(entry)
            self._watch(entry, now + entry.span_s * RENEW_SHARE)
            self._offer(key_queue)
            self.counts["arrived"] += 1
        return self._go_on(now, effects)

    # Handlers

    def handled(
        self, entry: ProcessQueueEntry, outcome: Outcome, now: float, *, reason: str = "", delay_s: float | None = None
    ) -> list[Effect]:
        """Take the end of a handler. ``delay_s``: until the next try, instead of the back-off's delay."""
        effects: list[Effect] = []
        key_queue = _key_queue_of(entry)
        self.running -= 1
        key_queue.queue.running -= 1
        self.counts[outcome.value] += 1
        if entry.phase is Phase.GONE:  # lost while it ran
            key_queue.strays -= 1
            if outcome is Outcome.DONE:
                self._owe(entry, Settle.FINISH, "")
            elif outcome is Outcome.REJECTED:
                self._owe(entry, Settle.REJECT, reason)
            if key_queue.entries:
                self._offer(key_queue)
            elif not key_queue.strays:
                key_queue.queue.key_queues.pop(key_queue.key, None)
        elif outcome is Outcome.DONE:
            self._settle(entry, Settle.FINISH, effects)
        elif outcome is Outcome.REJECTED:
            self._settle(entry, Settle.REJECT, effects, reason)
        elif outcome is Outcome.CANCELLED:  # the consumer is closed while it holds the message
            self._remove(entry)
        else:
            self._failed(entry, now, reason, delay_s, effects)
        return self._go_on(now, effects)

    def _failed(
        self, entry: ProcessQueueEntry, now: float, reason: str, delay_s: float | None, effects: list[Effect]
    ) -> None:
        wait_s = self.backoff.after(entry.attempts) if delay_s is None else delay_s
        if not self.is_fifo:
            entry.delay_s = wait_s
            self._settle(entry, Settle.REQUEUE, effects, reason)
        elif self.attempts_max and entry.attempts >= self.attempts_max:
            self.counts["attempts_used_up"] += 1
            self._settle(entry, Settle.REJECT, effects, reason)
        elif self.is_stopping or _key_queue_of(entry).queue.is_stopping:
            self._release([entry], effects)
        else:
            entry.phase = Phase.RETRYING
            self._retry_at(entry, now + wait_s)

    # Results

    def _settle(self, entry: ProcessQueueEntry, fate: Settle, effects: list[Effect], reason: str = "") -> None:
        entry.fate, entry.reason = fate, reason
        if fate is Settle.REJECT:
            self.counts["dead_lettered"] += 1
        effects.append(SendResult(entry, fate, self.is_fifo))
        if not self.is_fifo:
            self._remove(entry)
            return
        entry.phase = Phase.SETTLING
        entry.is_reporting = True
        self.settling += 1
        _key_queue_of(entry).queue.settling += 1

    def result_sent(self, entry: ProcessQueueEntry, outcome: ResultOutcome, now: float) -> list[Effect]:
        """Take the outcome of a result that the broker was to confirm."""
        effects: list[Effect] = []
        entry.is_reporting = False
        if entry.phase is Phase.GONE:
            if outcome is ResultOutcome.CONFIRMED:
                self._owed.pop((entry.partition, entry.seq), None)
        elif outcome is ResultOutcome.CONFIRMED:
            self.counts["confirmed"] += 1
            self._remove(entry)
        elif outcome is ResultOutcome.NOT_HELD:
            self._lose(entry, effects)
        else:
            entry.settle_tries += 1
            self.counts["results_resent"] += 1
            if entry.fate is Settle.REJECT:
                self.counts["dead_letters_resent"] += 1
            self._retry_at(entry, now + SETTLE_RETRY_S)
        return self._go_on(now, effects)

    def _owe(self, entry: ProcessQueueEntry, fate: Settle, reason: str) -> None:
        key = (entry.partition, entry.seq)
        self._owed[key] = (fate, reason)
        self._owed.move_to_end(key)
        if len(self._owed) > _OWED_MAX:
            self._owed.popitem(last=False)
            self.counts["owed_forgotten"] += 1

    # Leases of messages

    def renewed(self, entry: ProcessQueueEntry, deadline: float, now: float) -> list[Effect]:
        """Take the new deadline of a renewed message."""
        effects: list[Effect] = []
        if entry.phase is Phase.GONE:
            return effects
        entry.deadline = deadline
        left_s = deadline - now
        if left_s > entry.span_s * RENEW_SHARE:
            self._watch(entry, now + left_s * RENEW_SHARE)
            return effects
        # It cannot be held for longer at once: release the waiting messages in their order; they come again.
        self._watch(entry, deadline)
        if entry.phase is Phase.WAITING:
            key_queue = _key_queue_of(entry)
            self.counts["released_waiting"] += 1
            self._release([each for each in key_queue.entries if each.seq >= entry.seq], effects)
        return self._go_on(now, effects)

    def lost(self, entry: ProcessQueueEntry, now: float) -> list[Effect]:
        """Take the loss of a message that could not be renewed. When its result is on the way, it may be settled
        already: the answer says so."""
        effects: list[Effect] = []
        if not entry.is_reporting:
            self._lose(entry, effects)
        return self._go_on(now, effects)

    def lost_partition(self, partition: int, now: float) -> list[Effect]:
        """Take the loss of all messages of a partition."""
        effects: list[Effect] = []
        queue = self.queues.get(partition)
        for entry in [] if queue is None else list(queue.entries.values()):
            self._lose_one(entry, effects)
        return self._go_on(now, effects)

    def lost_all(self, now: float) -> list[Effect]:
        """Take the loss of all messages: the connection is gone, and they come to a consumer again."""
        effects: list[Effect] = []
        for queue in self.queues.values():
            for entry in list(queue.entries.values()):
                self._lose_one(entry, effects)
        return self._go_on(now, effects)

    def _lose(self, entry: ProcessQueueEntry, effects: list[Effect]) -> None:
        """Lose one message. Messages behind it in its key queue must not go before it."""
        if entry.phase is Phase.GONE:
            return
        behind = [each for each in _key_queue_of(entry).entries if each.seq > entry.seq and each.phase is Phase.WAITING]
        self._lose_one(entry, effects)
        self._release(behind, effects)

    def _lose_one(self, entry: ProcessQueueEntry, effects: list[Effect]) -> None:
        self.counts["lost"] += 1
        if entry.phase is Phase.SETTLING:
            self._owe(entry, entry.fate, entry.reason)
        elif entry.phase is Phase.RUNNING:
            _key_queue_of(entry).strays += 1
            effects.append(CancelHandler(entry))
        self._remove(entry)

    # The end

    def stop_partition(self, partition: int, now: float) -> list[Effect]:
        """Begin nothing more of a partition, and release messages that were not begun; running handlers may finish."""
        effects: list[Effect] = []
        queue = self.queues.get(partition)
        if queue is not None:
            queue.is_stopping = True
            self._release_open(queue, effects)
        return self._go_on(now, effects)

    def stop(self, now: float) -> list[Effect]:
        """Do the same for all partitions: the consumer ends. Done when `is_idle`."""
        effects: list[Effect] = []
        self.is_stopping = True
        for queue in self.queues.values():
            queue.is_stopping = True
            self._release_open(queue, effects)
        return self._go_on(now, effects)

    def _release_open(self, queue: ProcessQueue, effects: list[Effect]) -> None:
        open_ = [each for each in queue.entries.values() if each.phase in (Phase.WAITING, Phase.RETRYING)]
        self._release(sorted(open_, key=lambda each: each.seq), effects)

    def _release(self, entries: list[ProcessQueueEntry], effects: list[Effect]) -> None:
        """Release messages, the last one first: each goes to the front at the queue, so that their order stays."""
        for entry in reversed(entries):
            self.counts["released"] += 1
            entry.fate, entry.reason, entry.delay_s = Settle.RELEASE, "", 0.0
            effects.append(SendResult(entry, Settle.RELEASE, False))
            self._remove(entry)

    # Time

    def on_time(self, now: float) -> list[Effect]:
        """Run the timers that are due: next tries, results to send again, renewals, leases that are over."""
        effects: list[Effect] = []
        renew: list[ProcessQueueEntry] = []
        timers = self._timers
        while timers and timers[0][0] <= now:
            timer = heapq.heappop(timers)
            if not self._is_valid(timer):
                continue
            _at, _order, is_lease, entry = timer
            if is_lease:
                self._look_at_lease(entry, now, renew, effects)
            elif entry.phase is Phase.SETTLING:
                entry.is_reporting = True
                effects.append(SendResult(entry, entry.fate, True))
            else:
                entry.phase = Phase.WAITING
                entry.attempts += 1
                key_queue = _key_queue_of(entry)
                key_queue.busy = None
                self.counts["tried_again"] += 1
                self._offer(key_queue)
        if renew:
            effects.append(Renew(renew))
        return self._go_on(now, effects)

    def _look_at_lease(
        self, entry: ProcessQueueEntry, now: float, renew: list[ProcessQueueEntry], effects: list[Effect]
    ) -> None:
        if entry.is_reporting:  # perhaps it is settled already: the answer says so
            self._watch(entry, now + entry.span_s * RENEW_SHARE)
        elif entry.deadline <= now:
            self.counts["expired"] += 1
            self._lose(entry, effects)
        elif entry.phase is Phase.WAITING and not self.is_fifo:  # another consumer may be idle
            self.counts["released_waiting"] += 1
            self._release([entry], effects)
        else:
            renew.append(entry)
            self._watch(entry, entry.deadline)

    def _watch(self, entry: ProcessQueueEntry, at: float) -> None:
        entry.check_at = at
        heapq.heappush(self._timers, (at, next(self._order), True, entry))
        if len(self._timers) > 4 * self.items + 64:
            self._timers = [each for each in self._timers if self._is_valid(each)]
            heapq.heapify(self._timers)

    def _retry_at(self, entry: ProcessQueueEntry, at: float) -> None:
        entry.retry_at = at
        heapq.heappush(self._timers, (at, next(self._order), False, entry))

    def _is_valid(self, timer: tuple[float, int, bool, ProcessQueueEntry]) -> bool:
        at, _order, is_lease, entry = timer
        if is_lease:
            return entry.phase is not Phase.GONE and entry.check_at == at
        return entry.phase in (Phase.RETRYING, Phase.SETTLING) and entry.retry_at == at

    # Lines

    def _offer(self, key_queue: KeyQueue) -> None:
        if not key_queue.is_queued and key_queue.next is not None:
            key_queue.is_queued = True
            self._ready.append(key_queue)

    def _go_on(self, now: float, effects: list[Effect]) -> list[Effect]:
        """Begin handlers that can begin."""
        ready = self._ready
        while ready and self.running < self.concurrency and not self.is_stopping:
            key_queue = ready.popleft()
            key_queue.is_queued = False
            entry = key_queue.next
            if entry is None or key_queue.queue.is_stopping:
                continue
            key_queue.busy = entry
            owed = self._owed.pop((entry.partition, entry.seq), None)
            if owed is not None:  # it was handled before
                self.counts["settled_unhandled"] += 1
                self._settle(entry, owed[0], effects, owed[1])
                continue
            entry.phase = Phase.RUNNING
            self.running += 1
            key_queue.queue.running += 1
            effects.append(StartHandler(entry))
        return effects

    def _remove(self, entry: ProcessQueueEntry) -> None:
        key_queue = _key_queue_of(entry)
        queue = key_queue.queue
        if entry.phase is Phase.SETTLING:
            self.settling -= 1
            queue.settling -= 1
        entry.phase = Phase.GONE
        del queue.entries[entry.seq]
        queue.bytes -= entry.size
        self.items -= 1
        self.bytes -= entry.size
        key_queue.remove(entry)
        if key_queue.entries or key_queue.strays:
            self._offer(key_queue)
        else:
            queue.key_queues.pop(key_queue.key, None)


def _key_queue_of(entry: ProcessQueueEntry) -> KeyQueue:
    assert entry.key_queue is not None
    return entry.key_queue
