"""A push consumer's core beside a keeper of a queue, on a virtual clock, with faults from a seed."""

import heapq
from collections import Counter
from itertools import count
from random import Random
from typing import Any

from dep2p.protocols.queues.clients.backoff import Backoff
from dep2p.protocols.queues.clients.process_queue import Entry
from dep2p.protocols.queues.clients.push_consumer import (
    Arrived,
    Cancel,
    Effect,
    Mode,
    Outcome,
    PushCore,
    Renew,
    Start,
    Tell,
    Told,
)
from dep2p.protocols.queues.wire import Settle

TIMEOUT_S = 60.0
TIMEOUT_MAX_S = 300.0

Place = tuple[int, int]


class Keeper:
    """The queue: gives messages in order, takes them back when their time is over, and counts deliveries.

    ``lines``: of one key only one message is out at a time, as in an exclusive channel. Without it the consumer's
    own lines must do, and an answer may only be lost together with its connection.
    """

    def __init__(self, *, lines: bool) -> None:
        self.lines = lines
        self.keys: dict[Place, str] = {}
        self.waiting: dict[Place, float] = {}
        """Not before when."""
        self.held: dict[Place, tuple[float, float]] = {}
        """Until when, and from when on."""
        self.attempts: Counter[Place] = Counter()
        self.done: dict[Place, None] = {}
        self.dead: dict[Place, None] = {}

    def publish(self, place: Place, key: str) -> None:
        self.keys[place] = key
        self.waiting[place] = 0.0

    def give(self, items: int, now: float) -> list[Arrived]:
        given: list[Arrived] = []
        busy = {(place[0], self.keys[place]): None for place in self.held if self.keys[place]}
        for place in sorted(self.waiting):
            if len(given) >= items:
                break
            key = self.keys[place]
            if self.waiting[place] > now or (self.lines and key and (place[0], key) in busy):
                continue
            del self.waiting[place]
            busy[place[0], key] = None
            self.attempts[place] += 1
            self.held[place] = (now + TIMEOUT_S, now)
            given.append(Arrived(*place, key, 10, self.attempts[place], now + TIMEOUT_S, place))
        return given

    def settle(self, place: Place, fate: Settle, delay_s: float, now: float) -> bool:
        if place not in self.held:
            return False
        del self.held[place]
        if fate is Settle.FINISH:
            self.done[place] = None
        elif fate is Settle.REJECT:
            self.dead[place] = None
        else:
            self.waiting[place] = now + delay_s
            self.attempts[place] -= fate is Settle.RELEASE
        return True

    def touch(self, place: Place, now: float) -> float | None:
        if place not in self.held:
            return None
        first = self.held[place][1]
        self.held[place] = (min(now + TIMEOUT_S, first + TIMEOUT_MAX_S), first)
        return self.held[place][0]

    def expire(self, now: float) -> None:
        for place in [place for place, (until, _first) in self.held.items() if until <= now]:
            del self.held[place]
            self.waiting[place] = 0.0

    def drop_link(self) -> None:
        for place in list(self.held):
            del self.held[place]
            self.waiting[place] = 0.0

    def settled_before(self, place: Place) -> bool:
        """Whether all earlier messages of its key in its partition are done or dead."""
        key = self.keys[place]
        return all(
            other in self.done or other in self.dead
            for other, its in self.keys.items()
            if its == key and other[0] == place[0] and other[1] < place[1]
        )


class PushWorld:
    """Performs what the core asks for. Every assertion that must always hold is in here."""

    def __init__(
        self,
        seed: int,
        mode: Mode,
        *,
        lines: bool = True,
        keys: int = 3,
        concurrency: int = 3,
        items_max: int = 20,
        attempts_max: int = 4,
        core: type[PushCore] = PushCore,
    ) -> None:
        self.rng = Random(seed)
        self.now = 100.0
        self.keeper = Keeper(lines=lines)
        self.core = core(
            mode,
            concurrency=concurrency,
            items_max=items_max,
            bytes_max=10 * items_max,
            attempts_max=attempts_max,
            backoff=Backoff(0.5, 8.0),
        )
        self.keys = ["", *(f"k{n}" for n in range(keys))]
        self.faults = True
        self.reads = True
        self.running: dict[Entry, None] = {}
        self.began: Counter[Place] = Counter()
        self.finished: Counter[Place] = Counter()
        self.failing: dict[str, None] = {}
        """Keys whose handlers always fail."""
        self._events: list[tuple[float, int, Any]] = []
        self._order = count()
        self._seqs: Counter[int] = Counter()

    # What the test does

    def publish(self, number: int = 1, key: str | None = None) -> list[Place]:
        places: list[Place] = []
        for _ in range(number):
            partition = self.rng.randrange(2)
            of = self.rng.choice(self.keys) if key is None else key
            partition = partition if not of else hash_of(of)
            self._seqs[partition] += 1
            places.append((partition, self._seqs[partition]))
            self.keeper.publish(places[-1], of)
        self._fill()
        return places

    def cut(self) -> None:
        """The connection is lost, and there again at once."""
        self.keeper.drop_link()
        self._do(self.core.lost_all(self.now))
        self._fill()

    def stop(self) -> None:
        self.reads = False
        self._do(self.core.stop(self.now))

    def forget_events(self) -> None:
        """Handlers that run go on for ever."""
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
            self.keeper.expire(self.now)
            while self._events and self._events[0][0] <= self.now:
                heapq.heappop(self._events)[2]()
            self._fill()
        self.now = end
        self._check()

    def _next_event(self) -> float | None:
        return self._events[0][0] if self._events else None

    def _next_waiting(self) -> float | None:
        later = [at for at in self.keeper.waiting.values() if at > self.now]
        later += [until for until, _first in self.keeper.held.values()]
        return min(later, default=None)

    def _later(self, seconds: float, call: Any) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), call))

    # The shell

    def _fill(self) -> None:
        while self.reads and self.core.room_items:
            given = self.keeper.give(self.core.room_items, self.now)
            if not given:
                break
            self._do(self.core.arrived(given, self.now))
        self._check()

    def _do(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Start):
                self._start(effect.entry)
            elif isinstance(effect, Cancel):
                # It ends soon; some handlers end well all the same.
                self._later(self.rng.choice((0.0, 0.1, 5.0)), lambda entry=effect.entry: self._end(entry, was_cut=True))
            elif isinstance(effect, Tell):
                self._tell(effect)
            else:
                self._renew(effect)

    def _start(self, entry: Entry) -> None:
        place = (entry.partition, entry.seq)
        key = self.keeper.keys[place]
        self.began[place] += 1
        assert place in self.keeper.held, f"{place} was begun, and is not held"
        if self.core.is_fifo and key:
            of_key = [each for each in self.running if self.keeper.keys[each.partition, each.seq] == key]
            assert not of_key, f"two handlers of the key {key}: {[*of_key, entry]}"
            assert self.keeper.settled_before(place), f"{place} was begun before those before it were settled"
        self.running[entry] = None
        took_s = self.rng.choice((0.0, 0.01, 1.0, 40.0, 100.0)) if self.faults else 0.01
        self._later(took_s, lambda: self._end(entry))

    def _end(self, entry: Entry, *, was_cut: bool = False) -> None:
        if entry not in self.running:
            return
        del self.running[entry]
        place = (entry.partition, entry.seq)
        draw = self.rng.random()
        outcome = Outcome.DONE
        if was_cut and draw < 0.8:
            outcome = Outcome.CANCELLED
        elif self.keeper.keys[place] in self.failing or (self.faults and draw < 0.25):
            outcome = Outcome.FAILED
        elif self.faults and draw < 0.28:
            outcome = Outcome.REJECTED
        self.finished[place] += outcome in (Outcome.DONE, Outcome.REJECTED)
        self._do(self.core.handled(entry, outcome, self.now, reason="it failed"))

    def _tell(self, tell: Tell) -> None:
        entry = tell.entry
        place = (entry.partition, entry.seq)
        if tell.fate is Settle.REJECT and entry.attempts < self.core.attempts_max:
            assert self.finished[place], f"{place} became a dead letter at try {entry.attempts}"
        lost_on_its_way = self.faults and tell.confirmed and self.rng.random() < 0.1
        held = not lost_on_its_way and self.keeper.settle(place, tell.fate, entry.delay_s, self.now)
        if not tell.confirmed:
            return
        told = Told.CONFIRMED if held else Told.NOT_HELD
        if lost_on_its_way or (self.faults and self.rng.random() < 0.1):
            told = Told.FAILED
        self._later(
            self.rng.choice((0.0, 0.01, 3.0)) if self.faults else 0.0,
            lambda: self._do(self.core.told(entry, told, self.now)),
        )

    def _renew(self, renew: Renew) -> None:
        for entry in renew.entries:
            until = self.keeper.touch((entry.partition, entry.seq), self.now)
            if until is None:
                self._do(self.core.lost(entry, self.now))
            elif not self.faults or not self.keeper.lines or self.rng.random() < 0.9:  # else the answer never comes
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
        keeper = self.keeper
        assert not keeper.waiting
        assert not keeper.held
        assert set(keeper.done) | set(keeper.dead) == set(keeper.keys)
        assert not self.core.items
        assert self.core.is_idle
        assert all(not queue.lines for queue in self.core.queues.values()), "a line was left over"
        if self.core.is_fifo:
            repeated = [place for place, times in self.finished.items() if times > 1]
            assert not repeated, f"handled well more than once: {repeated}"


def hash_of(key: str) -> int:
    """A key's partition."""
    return sum(key.encode()) % 2
