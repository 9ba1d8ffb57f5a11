"""The push consumer: which message is handed to the handler next, and what becomes of it. Pure.

Seed 004's flows, with one line per order key instead of a lock per partition (docs/decisions/0021-client-flows.md):

- normal mode: every message for itself; a failed one goes back to the queue for a later delivery (change-invisible);
- FIFO mode: one message of a key at a time; the next begins when the queue has confirmed the result of the one
  before. A failed one is tried again here, after the back-off; after the last try it becomes a dead letter, which is
  asked for until it is confirmed, and then the key goes on.

Messages that are held are renewed at half of their time. One that is lost (its time over, its connection gone, its
partition another consumer's) ends its handler, and its line waits for that. What was handled but not confirmed is
remembered: delivered again it is settled, not handled again.
"""

import heapq
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from enum import Enum
from itertools import count
from typing import Any, Final, Literal, NamedTuple

from dep2p.protocols.queues.clients.backoff import Backoff
from dep2p.protocols.queues.clients.process_queue import Entry, Line, Phase, ProcessQueue
from dep2p.protocols.queues.wire import Settle

Mode = Literal["normal", "fifo"]

SETTLE_RETRY_S: Final = 1.0
"""After that a result that could not be told is told again, as RocketMQ's clients do."""
RENEW_SHARE: Final = 0.5
"""Of its time, after which a message is renewed."""
_OWED_MAX: Final = 8_192
"""Results remembered of messages that were lost before the queue confirmed them; more: the oldest are forgotten."""


class Arrived(NamedTuple):
    """A delivery."""

    partition: int
    seq: int
    key: str
    size: int
    attempts: int
    deadline: float
    item: Any


class Start(NamedTuple):
    """Call the handler."""

    entry: Entry


class Cancel(NamedTuple):
    """End the handler: the message is not this consumer's any more."""

    entry: Entry


class Tell(NamedTuple):
    """Say the result (`Entry.fate`, ``delay_s``, ``reason``) to the queue; if ``confirmed``, wait until it is durable
    and say to the core what came of it (`PushCore.told`)."""

    entry: Entry
    fate: Settle
    confirmed: bool


class Renew(NamedTuple):
    """Touch these; `PushCore.renewed` or `PushCore.lost` for each."""

    entries: list[Entry]


Effect = Start | Cancel | Tell | Renew


class Outcome(Enum):
    """How a handler ended."""

    DONE = "done"
    FAILED = "failed"
    REJECTED = "rejected"
    """It can never work."""
    CANCELLED = "cancelled"


class Told(Enum):
    """What came of a result."""

    CONFIRMED = "confirmed"
    NOT_HELD = "not held"
    FAILED = "failed"
    """Not known, or not taken: say it again."""


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
        self.is_fifo = mode == "fifo"
        self.concurrency = concurrency
        self.items_max = items_max
        self.bytes_max = bytes_max
        self.attempts_max = attempts_max
        self.backoff = backoff
        self.counts: Counter[str] = Counter()
        self.queues: dict[int, ProcessQueue] = {}
        self.items = 0
        self.bytes = 0
        self.running = 0
        self.settling = 0
        self.is_stopping = False
        self._ready: deque[Line] = deque()
        """Lines that can go on, each once."""
        self._timers: list[tuple[float, int, bool, Entry]] = []
        """Heap of (when, order, whether it is about the lease, entry)."""
        self._order = count()
        self._owed: OrderedDict[tuple[int, int], tuple[Settle, str]] = OrderedDict()

    # What the shell asks

    @property
    def room_items(self) -> int:
        """How many more messages are taken; 0 when too many bytes are here."""
        return 0 if self.bytes >= self.bytes_max else max(0, self.items_max - self.items)

    @property
    def is_idle(self) -> bool:
        """No handler runs, and no result is on its way."""
        return not self.running and not self.settling

    def partition_is_idle(self, partition: int) -> bool:
        """The same of one partition: after `stop_partition` its lock can be released."""
        queue = self.queues.get(partition)
        return queue is None or queue.is_idle

    def next_deadline(self) -> float | None:
        """When `on_time` has something to do."""
        timers = self._timers
        while timers and not self._is_valid(timers[0]):
            heapq.heappop(timers)
        return timers[0][0] if timers else None

    # Deliveries

    def arrived(self, deliveries: Iterable[Arrived], now: float) -> list[Effect]:
        """Messages have come."""
        effects: list[Effect] = []
        for partition, seq, key, size, attempts, deadline, item in deliveries:
            queue = self.queues.get(partition)
            if queue is None:
                queue = self.queues[partition] = ProcessQueue(partition)
            queue.is_stopping = False
            before = queue.entries.get(seq)
            if before is not None:  # delivered again: the first delivery is over
                self._lose(before, effects)
            entry = Entry(partition, seq, size, attempts, now, deadline, item)
            queue.entries[seq] = entry
            queue.bytes += size
            self.items += 1
            self.bytes += size
            line = queue.line(key if self.is_fifo and key else seq)
            line.add(entry)
            self._watch(entry, now + entry.span_s * RENEW_SHARE)
            self._offer(line)
            self.counts["arrived"] += 1
        return self._go_on(now, effects)

    # Handlers

    def handled(
        self, entry: Entry, outcome: Outcome, now: float, *, reason: str = "", delay_s: float | None = None
    ) -> list[Effect]:
        """A handler has ended. ``delay_s``: until the next try, instead of what the back-off says."""
        effects: list[Effect] = []
        line = _line_of(entry)
        self.running -= 1
        line.queue.running -= 1
        self.counts[outcome.value] += 1
        if entry.phase is Phase.GONE:  # lost while it ran
            line.strays -= 1
            if outcome is Outcome.DONE:
                self._owe(entry, Settle.FINISH, "")
            elif outcome is Outcome.REJECTED:
                self._owe(entry, Settle.REJECT, reason)
            if line.entries:
                self._offer(line)
            elif not line.strays:
                line.queue.lines.pop(line.key, None)
        elif outcome is Outcome.DONE:
            self._settle(entry, Settle.FINISH, effects)
        elif outcome is Outcome.REJECTED:
            self._settle(entry, Settle.REJECT, effects, reason)
        elif outcome is Outcome.CANCELLED:  # the consumer is closed with it in its hands
            self._remove(entry)
        else:
            self._failed(entry, now, reason, delay_s, effects)
        return self._go_on(now, effects)

    def _failed(self, entry: Entry, now: float, reason: str, delay_s: float | None, effects: list[Effect]) -> None:
        wait_s = self.backoff.after(entry.attempts) if delay_s is None else delay_s
        if not self.is_fifo:
            entry.delay_s = wait_s
            self._settle(entry, Settle.REQUEUE, effects, reason)
        elif self.attempts_max and entry.attempts >= self.attempts_max:
            self.counts["attempts_used_up"] += 1
            self._settle(entry, Settle.REJECT, effects, reason)
        elif self.is_stopping or _line_of(entry).queue.is_stopping:
            self._give_back([entry], effects)
        else:
            entry.phase = Phase.RETRYING
            self._retry_at(entry, now + wait_s)

    # Results

    def _settle(self, entry: Entry, fate: Settle, effects: list[Effect], reason: str = "") -> None:
        entry.fate, entry.reason = fate, reason
        if fate is Settle.REJECT:
            self.counts["dead_lettered"] += 1
        effects.append(Tell(entry, fate, self.is_fifo))
        if not self.is_fifo:
            self._remove(entry)
            return
        entry.phase = Phase.SETTLING
        entry.is_telling = True
        self.settling += 1
        _line_of(entry).queue.settling += 1

    def told(self, entry: Entry, told: Told, now: float) -> list[Effect]:
        """What came of a result that was to be confirmed."""
        effects: list[Effect] = []
        entry.is_telling = False
        if entry.phase is Phase.GONE:
            if told is Told.CONFIRMED:
                self._owed.pop((entry.partition, entry.seq), None)
        elif told is Told.CONFIRMED:
            self.counts["confirmed"] += 1
            self._remove(entry)
        elif told is Told.NOT_HELD:
            self._lose(entry, effects)
        else:
            entry.settle_tries += 1
            self.counts["results_told_again"] += 1
            if entry.fate is Settle.REJECT:
                self.counts["dead_letters_told_again"] += 1
            self._retry_at(entry, now + SETTLE_RETRY_S)
        return self._go_on(now, effects)

    def _owe(self, entry: Entry, fate: Settle, reason: str) -> None:
        key = (entry.partition, entry.seq)
        self._owed[key] = (fate, reason)
        self._owed.move_to_end(key)
        if len(self._owed) > _OWED_MAX:
            self._owed.popitem(last=False)
            self.counts["owed_forgotten"] += 1

    # Leases of messages

    def renewed(self, entry: Entry, deadline: float, now: float) -> list[Effect]:
        """It is held until ``deadline`` now."""
        effects: list[Effect] = []
        if entry.phase is Phase.GONE:
            return effects
        entry.deadline = deadline
        left_s = deadline - now
        if left_s > entry.span_s * RENEW_SHARE:
            self._watch(entry, now + left_s * RENEW_SHARE)
            return effects
        # It cannot be held for longer in one go: what waits is given back in its order, and comes again.
        self._watch(entry, deadline)
        if entry.phase is Phase.WAITING:
            line = _line_of(entry)
            self.counts["released_waiting"] += 1
            self._give_back([each for each in line.entries if each.seq >= entry.seq], effects)
        return self._go_on(now, effects)

    def lost(self, entry: Entry, now: float) -> list[Effect]:
        """It could not be renewed: it is not held here any more. One whose result is on its way may be settled already:
        the answer says so."""
        effects: list[Effect] = []
        if not entry.is_telling:
            self._lose(entry, effects)
        return self._go_on(now, effects)

    def lost_partition(self, partition: int, now: float) -> list[Effect]:
        """Nothing of the partition is held any more."""
        effects: list[Effect] = []
        queue = self.queues.get(partition)
        for entry in [] if queue is None else list(queue.entries.values()):
            self._lose_one(entry, effects)
        return self._go_on(now, effects)

    def lost_all(self, now: float) -> list[Effect]:
        """The connection is gone: what was held comes again, here or elsewhere."""
        effects: list[Effect] = []
        for queue in self.queues.values():
            for entry in list(queue.entries.values()):
                self._lose_one(entry, effects)
        return self._go_on(now, effects)

    def _lose(self, entry: Entry, effects: list[Effect]) -> None:
        """This one alone: what is behind it in its line must not go before it."""
        if entry.phase is Phase.GONE:
            return
        behind = [each for each in _line_of(entry).entries if each.seq > entry.seq and each.phase is Phase.WAITING]
        self._lose_one(entry, effects)
        self._give_back(behind, effects)

    def _lose_one(self, entry: Entry, effects: list[Effect]) -> None:
        self.counts["lost"] += 1
        if entry.phase is Phase.SETTLING:
            self._owe(entry, entry.fate, entry.reason)
        elif entry.phase is Phase.RUNNING:
            _line_of(entry).strays += 1
            effects.append(Cancel(entry))
        self._remove(entry)

    # The end

    def stop_partition(self, partition: int, now: float) -> list[Effect]:
        """Begin nothing more of it, and give back what was not begun; handlers that run may finish."""
        effects: list[Effect] = []
        queue = self.queues.get(partition)
        if queue is not None:
            queue.is_stopping = True
            self._give_back_open(queue, effects)
        return self._go_on(now, effects)

    def stop(self, now: float) -> list[Effect]:
        """The same of all partitions: the consumer ends. Done when `is_idle`."""
        effects: list[Effect] = []
        self.is_stopping = True
        for queue in self.queues.values():
            queue.is_stopping = True
            self._give_back_open(queue, effects)
        return self._go_on(now, effects)

    def _give_back_open(self, queue: ProcessQueue, effects: list[Effect]) -> None:
        open_ = [each for each in queue.entries.values() if each.phase in (Phase.WAITING, Phase.RETRYING)]
        self._give_back(sorted(open_, key=lambda each: each.seq), effects)

    def _give_back(self, entries: list[Entry], effects: list[Effect]) -> None:
        """The last one first: each goes to the front there, so that their order stays."""
        for entry in reversed(entries):
            self.counts["released"] += 1
            entry.fate, entry.reason, entry.delay_s = Settle.RELEASE, "", 0.0
            effects.append(Tell(entry, Settle.RELEASE, False))
            self._remove(entry)

    # Time

    def on_time(self, now: float) -> list[Effect]:
        """What is due: next tries, results to be told again, renewals, leases that are over."""
        effects: list[Effect] = []
        renew: list[Entry] = []
        timers = self._timers
        while timers and timers[0][0] <= now:
            timer = heapq.heappop(timers)
            if not self._is_valid(timer):
                continue
            _at, _order, is_lease, entry = timer
            if is_lease:
                self._look_at_lease(entry, now, renew, effects)
            elif entry.phase is Phase.SETTLING:
                entry.is_telling = True
                effects.append(Tell(entry, entry.fate, True))
            else:
                entry.phase = Phase.WAITING
                entry.attempts += 1
                line = _line_of(entry)
                line.busy = None
                self.counts["tried_again"] += 1
                self._offer(line)
        if renew:
            effects.append(Renew(renew))
        return self._go_on(now, effects)

    def _look_at_lease(self, entry: Entry, now: float, renew: list[Entry], effects: list[Effect]) -> None:
        if entry.is_telling:  # perhaps it is settled already: the answer says so
            self._watch(entry, now + entry.span_s * RENEW_SHARE)
        elif entry.deadline <= now:
            self.counts["expired"] += 1
            self._lose(entry, effects)
        elif entry.phase is Phase.WAITING and not self.is_fifo:  # others may have a hand free
            self.counts["released_waiting"] += 1
            self._give_back([entry], effects)
        else:
            renew.append(entry)
            self._watch(entry, entry.deadline)

    def _watch(self, entry: Entry, at: float) -> None:
        entry.check_at = at
        heapq.heappush(self._timers, (at, next(self._order), True, entry))
        if len(self._timers) > 4 * self.items + 64:
            self._timers = [each for each in self._timers if self._is_valid(each)]
            heapq.heapify(self._timers)

    def _retry_at(self, entry: Entry, at: float) -> None:
        entry.retry_at = at
        heapq.heappush(self._timers, (at, next(self._order), False, entry))

    def _is_valid(self, timer: tuple[float, int, bool, Entry]) -> bool:
        at, _order, is_lease, entry = timer
        if is_lease:
            return entry.phase is not Phase.GONE and entry.check_at == at
        return entry.phase in (Phase.RETRYING, Phase.SETTLING) and entry.retry_at == at

    # Lines

    def _offer(self, line: Line) -> None:
        if not line.is_queued and line.next is not None:
            line.is_queued = True
            self._ready.append(line)

    def _go_on(self, now: float, effects: list[Effect]) -> list[Effect]:
        """Begin what can begin."""
        ready = self._ready
        while ready and self.running < self.concurrency and not self.is_stopping:
            line = ready.popleft()
            line.is_queued = False
            entry = line.next
            if entry is None or line.queue.is_stopping:
                continue
            line.busy = entry
            owed = self._owed.pop((entry.partition, entry.seq), None)
            if owed is not None:  # it was handled before
                self.counts["settled_unhandled"] += 1
                self._settle(entry, owed[0], effects, owed[1])
                continue
            entry.phase = Phase.RUNNING
            self.running += 1
            line.queue.running += 1
            effects.append(Start(entry))
        return effects

    def _remove(self, entry: Entry) -> None:
        line = _line_of(entry)
        queue = line.queue
        if entry.phase is Phase.SETTLING:
            self.settling -= 1
            queue.settling -= 1
        entry.phase = Phase.GONE
        del queue.entries[entry.seq]
        queue.bytes -= entry.size
        self.items -= 1
        self.bytes -= entry.size
        line.remove(entry)
        if line.entries or line.strays:
            self._offer(line)
        else:
            queue.lines.pop(line.key, None)


def _line_of(entry: Entry) -> Line:
    assert entry.line is not None
    return entry.line
