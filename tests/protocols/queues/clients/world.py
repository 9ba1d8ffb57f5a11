"""A push consumer's core beside a broker of a queue, on a virtual clock, with faults from a seed."""

import heapq
from collections import Counter
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any

from dep2p.protocols.queues.clients.process_queue import ProcessQueueEntry
from dep2p.protocols.queues.clients.push_consumer import (
    Arrived,
    CancelHandler,
    Effect,
    Mode,
    Outcome,
    PushCore,
    Renew,
    ResultOutcome,
    SendResult,
    StartHandler,
)
from dep2p.protocols.queues.wire.frames import Settle
from dep2p.protocols.timing.backoff import Backoff

TIMEOUT_S = 60.0
TIMEOUT_MAX_S = 300.0

Point = tuple[int, int]


class Broker:
    """The queue: gives messages in order, takes them back when their time is over, and counts deliveries.

    ``key_queues``: of one key only one message is out at a time, as in an exclusive channel. Without it the consumer's
    own lines must do, and an answer may only be lost together with its connection.
    """

    def __init__(self, *, key_queues: bool) -> None:
        self.key_queues = key_queues
        self.keys: dict[Point, str] = {}
        self.waiting: dict[Point, float] = {}
        """Not before when."""
        self.held: dict[Point, tuple[float, float]] = {}
        """Until when, and from when on."""
        self.attempts: Counter[Point] = Counter()
        self.done: dict[Point, None] = {}
        self.dead: dict[Point, None] = {}

    def publish(self, point: Point, key: str) -> None:
        self.keys[point] = key
        self.waiting[point] = 0.0

    def give(self, items: int, now: float) -> list[Arrived]:
        given: list[Arrived] = []
        busy = {(point[0], self.keys[point]): None for point in self.held if self.keys[point]}
        for point in sorted(self.waiting):
            if len(given) >= items:
                break
            key = self.keys[point]
            if self.waiting[point] > now or (self.key_queues and key and (point[0], key) in busy):
                continue
            del self.waiting[point]
            busy[point[0], key] = None
            self.attempts[point] += 1
            self.held[point] = (now + TIMEOUT_S, now)
            given.append(Arrived(*point, key, 10, self.attempts[point], now + TIMEOUT_S, point))
        return given

    def settle(self, point: Point, fate: Settle, delay_s: float, now: float) -> bool:
        if point not in self.held:
            return False
        del self.held[point]
        if fate is Settle.FINISH:
            self.done[point] = None
        elif fate is Settle.REJECT:
            self.dead[point] = None
        else:
            self.waiting[point] = now + delay_s
            self.attempts[point] -= fate is Settle.RELEASE
        return True

    def touch(self, point: Point, now: float) -> float | None:
        if point not in self.held:
            return None
        first = self.held[point][1]
        self.held[point] = (min(now + TIMEOUT_S, first + TIMEOUT_MAX_S), first)
        return self.held[point][0]

    def expire(self, now: float) -> None:
        for point in [point for point, (until, _first) in self.held.items() if until <= now]:
            del self.held[point]
            self.waiting[point] = 0.0

    def drop_link(self) -> None:
        for point in list(self.held):
            del self.held[point]
            self.waiting[point] = 0.0

    def settled_before(self, point: Point) -> bool:
        """Whether all earlier messages of its key in its partition are done or dead."""
        key = self.keys[point]
        return all(
            other in self.done or other in self.dead
            for other, its in self.keys.items()
            if its == key and other[0] == point[0] and other[1] < point[1]
        )


@dataclass(frozen=True, slots=True)
class PushBounds:
    """Bounds of a push consumer."""

    concurrency: int = 3
    items_max: int = 20
    attempts_max: int = 4


class PushWorld:
    """Performs what the core asks for. Every assertion that must always hold is in here."""

    def __init__(
        self,
        seed: int,
        mode: Mode,
        *,
        key_queues: bool = True,
        keys: int = 3,
        bounds: PushBounds = PushBounds(),
        core: type[PushCore] = PushCore,
    ) -> None:
        self.rng = Random(seed)
        self.now = 100.0
        self.broker = Broker(key_queues=key_queues)
        self.core = core(
            mode,
            concurrency=bounds.concurrency,
            items_max=bounds.items_max,
            bytes_max=10 * bounds.items_max,
            attempts_max=bounds.attempts_max,
            backoff=Backoff(0.5, 8.0),
        )
        self.keys = ["", *(f"k{n}" for n in range(keys))]
        self.faults = True
        self.reads = True
        self.running: dict[ProcessQueueEntry, None] = {}
        self.began: Counter[Point] = Counter()
        self.finished: Counter[Point] = Counter()
        self.failing: dict[str, None] = {}
        """Keys whose handlers always fail."""
        self._events: list[tuple[float, int, Any]] = []
        self._order = count()
        self._seqs: Counter[int] = Counter()

    # What the test does

    def publish(self, number: int = 1, key: str | None = None) -> list[Point]:
        points: list[Point] = []
        for _ in range(number):
            partition = self.rng.randrange(2)
            of = self.rng.choice(self.keys) if key is None else key
            partition = partition if not of else hash_of(of)
            self._seqs[partition] += 1
            points.append((partition, self._seqs[partition]))
            self.broker.publish(points[-1], of)
        self._fill()
        return points

    def cut(self) -> None:
        """The connection is lost, and there again at once."""
        self.broker.drop_link()
        self._do(self.core.lost_all(self.now))
        self._fill()

    def stop(self) -> None:
        self.reads = False
        self._do(self.core.stop(self.now))

    def forget_events(self) -> None:
        """Handlers that run go on forever."""
        self._events.clear()

    def run_for(self, seconds: float) -> None:
        """Until nothing is due in that time."""
        end = self.now + seconds
        while True:
            due = [each for each in (self._next_event(), self.core.next_deadline(), self._next_waiting()) if each]
            if not due or min(due) > end:
                break
            self.now = max(self.now, min(due))
            self._do(self.core.on_time(self.now))
            self.broker.expire(self.now)
            while self._events and self._events[0][0] <= self.now:
                heapq.heappop(self._events)[2]()
            self._fill()
        self.now = end
        self._check()

    def _next_event(self) -> float | None:
        return self._events[0][0] if self._events else None

    def _next_waiting(self) -> float | None:
        later = [at for at in self.broker.waiting.values() if at > self.now]
        later += [until for until, _first in self.broker.held.values()]
        return min(later, default=None)

    def _later(self, seconds: float, call: Any) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), call))

    # The shell

    def _fill(self) -> None:
        while self.reads and self.core.room_items:
            given = self.broker.give(self.core.room_items, self.now)
            if not given:
                break
            self._do(self.core.arrived(given, self.now))
        self._check()

    def _do(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, StartHandler):
                self._start(effect.entry)
            elif isinstance(effect, CancelHandler):
                # It ends soon; some handlers end well all the same.
                self._later(self.rng.choice((0.0, 0.1, 5.0)), lambda entry=effect.entry: self._end(entry, was_cut=True))
            elif isinstance(effect, SendResult):
                self._send(effect)
            else:
                self._renew(effect)

    def _start(self, entry: ProcessQueueEntry) -> None:
        point = (entry.partition, entry.seq)
        key = self.broker.keys[point]
        self.began[point] += 1
        assert point in self.broker.held, f"{point} was begun, and is not held"
        if self.core.is_fifo and key:
            of_key = [each for each in self.running if self.broker.keys[each.partition, each.seq] == key]
            assert not of_key, f"two handlers of the key {key}: {[*of_key, entry]}"
            assert self.broker.settled_before(point), f"{point} was begun before those before it were settled"
        self.running[entry] = None
        took_s = self.rng.choice((0.0, 0.01, 1.0, 40.0, 100.0)) if self.faults else 0.01
        self._later(took_s, lambda: self._end(entry))

    def _end(self, entry: ProcessQueueEntry, *, was_cut: bool = False) -> None:
        if entry not in self.running:
            return
        del self.running[entry]
        point = (entry.partition, entry.seq)
        draw = self.rng.random()
        outcome = Outcome.DONE
        if was_cut and draw < 0.8:
            outcome = Outcome.CANCELLED
        elif self.broker.keys[point] in self.failing or (self.faults and draw < 0.25):
            outcome = Outcome.FAILED
        elif self.faults and draw < 0.28:
            outcome = Outcome.REJECTED
        self.finished[point] += outcome in (Outcome.DONE, Outcome.REJECTED)
        self._do(self.core.handled(entry, outcome, self.now, reason="it failed"))

    def _send(self, send: SendResult) -> None:
        entry = send.entry
        point = (entry.partition, entry.seq)
        if send.fate is Settle.REJECT and entry.attempts < self.core.attempts_max:
            assert self.finished[point], f"{point} became a dead letter at try {entry.attempts}"
        lost_on_its_way = self.faults and send.confirmed and self.rng.random() < 0.1
        held = not lost_on_its_way and self.broker.settle(point, send.fate, entry.delay_s, self.now)
        if not send.confirmed:
            return
        outcome = ResultOutcome.CONFIRMED if held else ResultOutcome.NOT_HELD
        if lost_on_its_way or (self.faults and self.rng.random() < 0.1):
            outcome = ResultOutcome.FAILED
        self._later(
            self.rng.choice((0.0, 0.01, 3.0)) if self.faults else 0.0,
            lambda: self._do(self.core.result_sent(entry, outcome, self.now)),
        )

    def _renew(self, renew: Renew) -> None:
        for entry in renew.entries:
            until = self.broker.touch((entry.partition, entry.seq), self.now)
            if until is None:
                self._do(self.core.lost(entry, self.now))
            elif (
                not self.faults or not self.broker.key_queues or self.rng.random() < 0.9
            ):  # else the answer never comes
                self._do(self.core.renewed(entry, until, self.now))

    # What must hold

    def _check(self) -> None:
        core = self.core
        assert core.running == len(self.running) <= core.concurrency
        assert core.items == sum(len(queue.entries) for queue in core.queues.values()) <= core.items_max
        assert core.bytes == sum(queue.bytes for queue in core.queues.values()) == 10 * core.items
        assert core.running == sum(queue.running for queue in core.queues.values())
        assert core.settling == sum(queue.settling for queue in core.queues.values())

    def check_all_done(self) -> None:
        broker = self.broker
        assert not broker.waiting
        assert not broker.held
        assert set(broker.done) | set(broker.dead) == set(broker.keys)
        assert not self.core.items
        assert self.core.is_idle
        assert all(not queue.key_queues for queue in self.core.queues.values()), "a line was left over"
        if self.core.is_fifo:
            repeated = [point for point, times in self.finished.items() if times > 1]
            assert not repeated, f"handled well more than once: {repeated}"


def hash_of(key: str) -> int:
    """A key's partition."""
    return sum(key.encode()) % 2
