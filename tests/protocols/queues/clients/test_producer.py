"""The producer's core: routes, rotation, retries, lines of keys; alone and under faults."""

import heapq
import os
from collections import Counter, defaultdict
from itertools import count
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dep2p.protocols.queues.clients.destinations import Kind, RouteCache
from dep2p.protocols.queues.clients.producer import (
    UNSETTLED_MAX,
    Dispatch,
    FetchRoute,
    GivenUp,
    KindRefusedError,
    MessageTaken,
    Order,
    PendingMessage,
    ProducerCore,
    ProducerEffect,
    SendFailure,
)
from dep2p.protocols.queues.names import logical_partition
from dep2p.protocols.queues.ordering.route_table import RouteTable
from dep2p.protocols.timing.backoff import Backoff

SEEDS = int(os.environ.get("DEP2P_SEEDS", "40"))


def make(order: Order = "best_effort", candidates: int = 3, attempts_max: int = 3, **options: int) -> ProducerCore:
    core = ProducerCore(order, attempts_max=attempts_max, backoff=Backoff(1.0, 30.0), **options)
    if candidates:
        core.route(RouteTable.first(range(candidates)), 0.0)
    return core


def send(item: Any = None, key: str = "", kind: Kind | None = None) -> PendingMessage:
    return PendingMessage(key, kind or (Kind.ORDERED if key else Kind.NORMAL), 10, item)


def dispatched(effects: list[ProducerEffect]) -> list[Dispatch]:
    return [each for each in effects if isinstance(each, Dispatch)]


BUSY = OSError("busy")


def _number(send: PendingMessage) -> int:
    assert isinstance(send.item, int)
    return send.item


def given_up(effects: list[ProducerEffect]) -> list[Any]:
    return [str(each.error) for each in effects if isinstance(each, GivenUp)]


def test_the_route_is_fetched_once_and_kept() -> None:
    core = make(candidates=0)
    assert core.submit(send(), 0.0) == [FetchRoute()]
    assert core.submit(send(), 0.0) == []
    effects = core.route(RouteTable.first([7, 8]), 1.0)
    assert sorted(each.candidate for each in dispatched(effects)) == [7, 8]
    assert len(dispatched(core.submit(send(), 2.0))) == 1


def test_without_a_route_what_cannot_wait_fails_and_strict_lines_wait() -> None:
    core = make("strict", candidates=0)
    core.submit(send("plain"), 0.0)
    core.submit(send("kept", "k"), 0.0)
    core.submit(send("once", "t", Kind.TRANSACTIONAL), 0.0)
    effects = core.route_failed(OSError("nobody there"), 1.0)
    assert given_up(effects) == ["nobody there", "nobody there"]
    assert core.on_time(2.0) == [FetchRoute()]
    (dispatch,) = dispatched(core.route(RouteTable.first([1]), 3.0))
    assert dispatch.sends[0].item == "kept"


def test_an_older_route_table_is_ignored() -> None:
    cache = RouteCache()
    new = RouteTable.first([1]).expanded([2], {})
    assert cache.take(new)
    assert not cache.take(RouteTable.first([1]))
    assert cache.version == 2
    assert sorted(cache.candidates) == [1, 2]


def test_messages_without_a_key_go_to_each_place_in_turn() -> None:
    core = make(candidates=3)
    targets = [dispatched(core.submit(send(), 0.0))[0].candidate for _ in range(6)]
    assert sorted(Counter(targets).values()) == [2, 2, 2]
    assert targets[:3] == targets[3:]


def test_a_failed_message_goes_to_the_next_place_at_once_and_fails_after_its_last_attempt() -> None:
    core = make(candidates=3, attempts_max=3)
    (dispatch,) = dispatched(core.submit(send(), 0.0))
    seen = [dispatch.candidate]
    for _ in range(2):
        (dispatch,) = dispatched(core.failed(dispatch, SendFailure.RETRY, 0.0, error=OSError("away")))
        seen.append(dispatch.candidate)
    assert sorted(seen) == [0, 1, 2]
    assert given_up(core.failed(dispatch, SendFailure.RETRY, 0.0, error=OSError("away"))) == ["away"]
    assert core.items == 0


def test_with_one_place_the_next_attempt_waits() -> None:
    core = make(candidates=1)
    (dispatch,) = dispatched(core.submit(send(), 0.0))
    assert not core.failed(dispatch, SendFailure.RETRY, 0.0, error=OSError("away"))
    assert core.next_deadline() == 1.0
    assert len(dispatched(core.on_time(1.0))) == 1


def test_a_place_that_failed_is_avoided_for_a_while_and_tried_again() -> None:
    core = make(candidates=2)
    first = next(d for _ in range(2) for d in dispatched(core.submit(send(), 0.0)) if d.candidate == 0)
    core.failed(first, SendFailure.RETRY, 0.0, error=OSError("away"))
    assert {dispatched(core.submit(send(), 0.5))[0].candidate for _ in range(4)} == {1}
    assert {dispatched(core.submit(send(), 1.5))[0].candidate for _ in range(4)} == {0, 1}


def test_26_a_place_that_says_flow_control_gets_nothing_for_as_long_as_it_says() -> None:
    """(26: apache/rocketmq#2542) Other brokers first; when there is none, when the time is over."""
    core = make(candidates=2)
    (dispatch,) = dispatched(core.submit(send(), 0.0))
    busy = dispatch.candidate
    (other,) = dispatched(core.failed(dispatch, SendFailure.FLOW_CONTROL, 0.0, error=BUSY, retry_after_s=5.0))
    assert other.candidate != busy
    assert not dispatched(core.failed(other, SendFailure.FLOW_CONTROL, 0.0, error=BUSY, retry_after_s=9.0))
    assert core.next_deadline() == 5.0
    (again,) = dispatched(core.on_time(5.0))
    assert again.candidate == busy


def test_a_transactional_message_has_one_attempt() -> None:
    core = make(candidates=3)
    (dispatch,) = dispatched(core.submit(send(kind=Kind.TRANSACTIONAL), 0.0))
    assert given_up(core.failed(dispatch, SendFailure.RETRY, 0.0, error=OSError("away"))) == ["away"]
    core = make("strict", candidates=3)
    (dispatch,) = dispatched(core.submit(send(key="k", kind=Kind.TRANSACTIONAL), 0.0))
    assert given_up(core.failed(dispatch, SendFailure.FLOW_CONTROL, 0.0, error=BUSY, retry_after_s=1.0)) == ["busy"]


def test_a_place_that_does_not_take_the_kind_fails_the_message() -> None:
    core = make(candidates=0)
    core.route(RouteTable.first([1]), 0.0, {1: {Kind.ORDERED}})
    (effect,) = core.submit(send(kind=Kind.DELAYED), 0.0)
    assert isinstance(effect, GivenUp) and isinstance(effect.error, KindRefusedError)
    assert len(dispatched(core.submit(send(key="k"), 0.0))) == 1


def test_in_strict_order_a_failed_message_stays_at_the_head_and_goes_to_the_same_place() -> None:
    core = make("strict", candidates=3, attempts_max=1)
    (dispatch,) = dispatched(core.submit(send("a", "k"), 0.0))
    assert not core.submit(send("b", "k"), 0.0)
    now = 0.0
    for _ in range(30):
        assert not dispatched(core.failed(dispatch, SendFailure.RETRY, now, error=OSError("away")))
        assert core.waiting_key_queues == 1
        now += 30.0
        (again,) = dispatched(core.on_time(now))
        assert ([each.item for each in again.sends], again.candidate) == (["a"], dispatch.candidate)
        dispatch = again
    (after,) = dispatched(core.sent(dispatch, ["where"], now))
    assert [each.item for each in after.sends] == ["b"]


def test_in_best_effort_order_a_failed_message_leaves_its_line_after_its_last_attempt() -> None:
    core = make(candidates=1, attempts_max=2)
    (dispatch,) = dispatched(core.submit(send("a", "k"), 0.0))
    core.submit(send("b", "k"), 0.0)
    core.failed(dispatch, SendFailure.RETRY, 0.0, error=OSError("away"))
    (dispatch,) = dispatched(core.on_time(1.0))
    effects = core.failed(dispatch, SendFailure.RETRY, 1.0, error=OSError("away"))
    assert given_up(effects) == ["away"]
    assert core.counts["left_key_queue"] == 1
    assert [each.item for each in dispatched(effects)[0].sends] == ["b"]


def test_in_best_effort_order_a_message_may_go_elsewhere_and_that_is_counted() -> None:
    core = make(candidates=3)
    (dispatch,) = dispatched(core.submit(send("a", "k"), 0.0))
    assert dispatch.candidate == RouteTable.first(range(3)).of(logical_partition("k")).partition
    (again,) = dispatched(core.failed(dispatch, SendFailure.RETRY, 0.0, error=OSError("away")))
    assert again.candidate != dispatch.candidate
    assert core.counts["moved"] == 1


def test_of_a_refused_batch_only_the_bad_message_fails() -> None:
    core = make(candidates=1)
    (first,) = dispatched(core.submit(send(0, "k"), 0.0))
    for item in (1, 2, 3):
        core.submit(send(item, "k"), 0.0)
    (batch,) = dispatched(core.sent(first, [""], 0.0))
    assert [each.item for each in batch.sends] == [1, 2, 3]
    effects = core.failed(batch, SendFailure.REFUSED, 0.0, error=OSError("too large"))
    ends: list[tuple[Any, str]] = []
    while found := dispatched(effects):
        (dispatch,) = found
        (one,) = dispatch.sends
        if one.item == 2:
            effects = core.failed(dispatch, SendFailure.REFUSED, 0.0, error=OSError("too large"))
        else:
            effects = core.sent(dispatch, [""], 0.0)
        ends += [
            (e.send.item, "ok" if isinstance(e, MessageTaken) else "no")
            for e in effects
            if isinstance(e, MessageTaken | GivenUp)
        ]
    assert ends == [(1, "ok"), (2, "no"), (3, "ok")]


def test_a_withdrawn_message_lets_its_line_go_on() -> None:
    core = make("strict", candidates=1)
    waiting = send("a", "k")
    (dispatch,) = dispatched(core.submit(waiting, 0.0))
    core.submit(send("b", "k"), 0.0)
    core.failed(dispatch, SendFailure.RETRY, 0.0, error=OSError("away"))
    (after,) = dispatched(core.withdraw(waiting, 0.1))
    assert [each.item for each in after.sends] == ["b"]
    assert core.withdraw(waiting, 0.2) == []


def test_a_message_that_is_withdrawn_on_its_way_is_not_tried_again() -> None:
    core = make("strict", candidates=1)
    on_its_way = send("a", "k")
    (dispatch,) = dispatched(core.submit(on_its_way, 0.0))
    core.submit(send("b", "k"), 0.0)
    assert not core.withdraw(on_its_way, 0.0)
    assert not core.failed(dispatch, SendFailure.RETRY, 0.0, error=OSError("away"))
    (after,) = dispatched(core.on_time(1.0))
    assert [each.item for each in after.sends] == ["b"]


def test_what_waits_is_bounded() -> None:
    core = make(candidates=0, items_max=2)
    core.submit(send(), 0.0)
    assert core.has_room
    core.submit(send(), 0.0)
    assert not core.has_room
    assert make(candidates=0, bytes_max=1).has_room


def test_only_so_many_strict_messages_may_have_been_taken_at_once() -> None:
    core = make("strict", candidates=1)
    count = 3 * UNSETTLED_MAX
    waiting = [each for item in range(count) for each in dispatched(core.submit(send(item, f"k{item}"), 0.0))]
    now = 0.0
    tried: dict[int, None] = {}
    taken: list[int] = []
    while core.unsettled < UNSETTLED_MAX:
        for dispatch in waiting:
            tried[_number(dispatch.sends[0])] = None
        dispatch = waiting.pop(0)
        waiting += dispatched(
            core.failed(dispatch, SendFailure.RETRY, now, error=OSError("no answer"), may_be_taken=True)
        )
        if not waiting and core.unsettled < UNSETTLED_MAX:
            raise AssertionError("nothing is on its way, although more may be")
    assert len(tried) == UNSETTLED_MAX
    # Those that may have been taken are tried again, and nothing else is, until one of them is settled.
    while len(taken) < count:
        if not waiting:
            at = core.next_deadline()
            assert at is not None
            now = max(now, at)
            waiting += dispatched(core.on_time(now))
            continue
        dispatch = waiting.pop(0)
        tried[_number(dispatch.sends[0])] = None
        taken.append(_number(dispatch.sends[0]))
        assert len(tried) <= UNSETTLED_MAX + len(taken) - 1
        waiting += dispatched(core.sent(dispatch, [""], now))
    assert sorted(taken) == list(range(count))
    assert (core.unsettled, core.items) == (0, 0)


def test_a_withdrawn_message_that_may_have_been_taken_makes_room_for_another_key() -> None:
    core = make("strict", candidates=1, in_flight_max=2 * UNSETTLED_MAX)
    sends = [send(item, f"k{item}") for item in range(UNSETTLED_MAX + 1)]
    waiting = [each for one in sends for each in dispatched(core.submit(one, 0.0))]
    assert len(waiting) == UNSETTLED_MAX
    for dispatch in waiting:
        failed = core.failed(dispatch, SendFailure.RETRY, 0.0, error=OSError("no answer"), may_be_taken=True)
        assert not dispatched(failed)
    (dispatch,) = dispatched(core.withdraw(sends[5], 0.0))
    assert dispatch.sends == [sends[-1]]


@pytest.mark.parametrize("name", ["attempts_max", "in_flight_max", "items_max", "bytes_max"])
def test_bounds_that_make_no_sense_are_refused(name: str) -> None:
    options: dict[str, Any] = {"attempts_max": 1, name: 0}
    with pytest.raises(ValueError, match="at least 1"):
        ProducerCore("strict", backoff=Backoff(1.0, 30.0), **options)


# Under faults


class World:
    """A producer and places that take, refuse, are busy, or are away; on a virtual clock."""

    def __init__(
        self, seed: int, order: Order, *, candidates: int, attempts_max: int, core: type[ProducerCore]
    ) -> None:
        self.rng = Random(seed)
        self.now = 0.0
        self.core = core(order, attempts_max=attempts_max, backoff=Backoff(0.1, 5.0), in_flight_max=4)
        self.candidates = candidates
        self.logs: dict[int, list[tuple[str, int]]] = defaultdict(list)
        self.busy_until: dict[int, float] = defaultdict(float)
        self.faults = True
        self.answers_get_lost = False
        """A batch may be taken although its sender hears of a failure."""
        self.attempts: Counter[int] = Counter()
        self.submitted: dict[int, PendingMessage] = {}
        self.ends: dict[int, str] = {}
        self.withdrawn: dict[int, None] = {}
        self._events: list[tuple[float, int, Any]] = []
        self._order = count()

    def submit(self, number: int = 1) -> None:
        for _ in range(number):
            item = len(self.submitted)
            key = self.rng.choice(("", "a", "b", "c"))
            kind = Kind.TRANSACTIONAL if not key and self.rng.random() < 0.2 else None
            self.submitted[item] = one = send(item, key, kind)
            self._do(self.core.submit(one, self.now))

    def withdraw(self) -> None:
        open_ = [item for item in self.submitted if item not in self.ends]
        if open_:
            item = self.rng.choice(open_)
            self.withdrawn[item] = None
            self._do(self.core.withdraw(self.submitted[item], self.now))

    def run_for(self, seconds: float) -> None:
        end = self.now + seconds
        while True:
            due = [
                at for at in (self._events[0][0] if self._events else None, self.core.next_deadline()) if at is not None
            ]
            if not due or min(due) > end:
                break
            self.now = max(self.now, min(due))
            self._do(self.core.on_time(self.now))
            while self._events and self._events[0][0] <= self.now:
                self._do(heapq.heappop(self._events)[2]())
        self.now = end

    def _later(self, call: Any) -> None:
        heapq.heappush(self._events, (self.now + self.rng.choice((0.0, 0.01, 2.0)), next(self._order), call))

    def _do(self, effects: list[ProducerEffect]) -> None:
        for effect in effects:
            if isinstance(effect, FetchRoute):
                if self.faults and self.rng.random() < 0.4:
                    self._later(lambda: self.core.route_failed(OSError("no route"), self.now))
                else:
                    self._later(lambda: self.core.route(RouteTable.first(range(self.candidates)), self.now))
            elif isinstance(effect, Dispatch):
                self._take(effect)
            else:
                item = _number(effect.send)
                assert item not in self.ends, f"{item} ended twice"
                self.ends[item] = "taken" if isinstance(effect, MessageTaken) else "given up"

    def _take(self, dispatch: Dispatch) -> None:
        candidate, now = dispatch.candidate, self.now
        assert now >= self.busy_until[candidate], "it was told to wait"
        assert len({each.key for each in dispatch.sends}) == 1
        for each in dispatch.sends:
            self.attempts[_number(each)] += 1
        draw = self.rng.random() if self.faults else 1.0
        core = self.core
        if draw < 0.2:
            if self.answers_get_lost and self.rng.random() < 0.5:
                self.logs[candidate] += [(each.key, _number(each)) for each in dispatch.sends]
            self._later(
                lambda: core.failed(
                    dispatch, SendFailure.RETRY, self.now, error=OSError("away"), may_be_taken=self.answers_get_lost
                )
            )
        elif draw < 0.3:

            def busy() -> list[ProducerEffect]:
                self.busy_until[candidate] = max(self.busy_until[candidate], self.now + 3.0)
                return core.failed(dispatch, SendFailure.FLOW_CONTROL, self.now, error=BUSY, retry_after_s=3.0)

            self._later(busy)
        elif draw < 0.34:
            self._later(lambda: core.failed(dispatch, SendFailure.REFUSED, self.now, error=OSError("bad")))
        elif draw < 0.38:
            self._later(lambda: core.failed(dispatch, SendFailure.STALE_ROUTE, self.now, error=OSError("stale")))
        else:
            self.logs[candidate] += [(each.key, _number(each)) for each in dispatch.sends]
            self._later(lambda: core.sent(dispatch, [""] * len(dispatch.sends), self.now))

    def check(self) -> None:
        core = self.core
        assert not core.items
        assert not core.bytes
        assert core.next_deadline() is None
        assert not core.keys
        candidates_of: dict[str, dict[int, None]] = defaultdict(dict)
        for candidate, log in self.logs.items():
            for key in ("a", "b", "c"):
                items = [item for its, item in log if its == key]
                if items:
                    candidates_of[key][candidate] = None
                if self.answers_get_lost:
                    # A repeat directly behind itself is the current message again.
                    items = [item for at, item in enumerate(items) if not at or items[at - 1] != item]
                if core.is_strict or not self.answers_get_lost:
                    assert len(items) == len(set(items)), "taken twice, although every failure was certain"
                if core.is_strict:
                    assert items == sorted(items), f"the order of {key} is not that of submitting"
        if core.is_strict:
            assert all(len(candidates) == 1 for candidates in candidates_of.values()), (
                "a key went to more than one broker"
            )
        for item, one in self.submitted.items():
            if item not in self.withdrawn:
                assert item in self.ends, f"{item} has vanished"
            if one.kind is Kind.TRANSACTIONAL:
                assert self.attempts[item] <= 1
            if not (core.is_strict and one.key):
                assert one.tries <= core.attempts_max


def _live(
    seed: int,
    order: Order,
    candidates: int = 3,
    attempts_max: int = 3,
    core: type[ProducerCore] = ProducerCore,
    *,
    answers_get_lost: bool = False,
) -> World:
    world = World(seed, order, candidates=candidates, attempts_max=attempts_max, core=core)
    world.answers_get_lost = answers_get_lost
    for _ in range(world.rng.randrange(5, 40)):
        match world.rng.randrange(6):
            case 0 | 1 | 2:
                world.submit(world.rng.randrange(1, 10))
            case 3:
                world.withdraw()
            case _:
                world.run_for(world.rng.choice((0.01, 1.0, 10.0)))
    world.faults = False
    world.run_for(1_000.0)
    world.check()
    return world


@pytest.mark.parametrize("order", ["strict", "best_effort"])
def test_every_message_ends_in_order_under_faults(order: Order) -> None:
    for seed in range(5 * SEEDS):
        _live(seed, order)


def test_in_strict_order_only_the_current_message_is_ever_repeated() -> None:
    """Also when a failure is told of a message that was taken."""
    for seed in range(5 * SEEDS):
        _live(seed, "strict", answers_get_lost=True)


@given(
    seed=st.integers(0, 2**32),
    order=st.sampled_from(["strict", "best_effort"]),
    candidates=st.integers(1, 5),
    attempts_max=st.integers(1, 5),
)
@settings(deadline=None, max_examples=100)
def test_with_any_bounds(seed: int, order: Order, candidates: int, attempts_max: int) -> None:
    _live(seed, order, candidates, attempts_max)


class _Wandering(ProducerCore):
    """Strict, but takes any place that is free."""

    def _choose(self, send: PendingMessage, now: float) -> Any:
        self.is_strict = False
        try:
            return super()._choose(send, now)
        finally:
            self.is_strict = True


class _Overtaking(ProducerCore):
    """Does not stay at the head."""

    def _wait(self, queue: Any, until: float) -> None:
        super()._wait(queue, until)
        queue.sends.rotate(-1)


class _Batching(ProducerCore):
    """Sends strict messages of a key together."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._batch_items = 64


def test_strict_batches_would_repeat_more_than_the_current_message() -> None:
    with pytest.raises(AssertionError):
        for seed in range(5 * SEEDS):
            _live(seed, "strict", core=_Batching, answers_get_lost=True)


class _Impatient(ProducerCore):
    """Does not wait when it is told to."""

    def failed(
        self,
        dispatch: Dispatch,
        failure: SendFailure,
        now: float,
        *,
        error: Exception,
        retry_after_s: float = 0.0,
        may_be_taken: bool = False,
    ) -> list[ProducerEffect]:
        return super().failed(dispatch, failure, now, error=error, may_be_taken=may_be_taken)


@pytest.mark.parametrize("broken", [_Wandering, _Overtaking, _Impatient])
def test_without_a_rule_the_simulation_fails(broken: type[ProducerCore]) -> None:
    with pytest.raises(AssertionError):
        for seed in range(5 * SEEDS):
            _live(seed, "strict", core=broken)
