"""The push consumer's core: lines, retries, renewals, what is lost and what is owed; alone and under faults."""

import os
from random import Random
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dep2p.errors import RejectMessage, RetryMessage
from dep2p.protocols.queues.clients.process_queue import KeyQueue, Phase, ProcessQueue, ProcessQueueEntry
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
    failure_of,
)
from dep2p.protocols.queues.wire.frames import Settle
from dep2p.protocols.timing.backoff import Backoff
from tests.protocols.queues.clients.world import PushBounds, PushWorld

SEEDS = int(os.environ.get("DEP2P_SEEDS", "40"))
MODES: tuple[Mode, ...] = get_args(Mode)


def make(mode: Mode = "fifo", **options: int) -> PushCore:
    given_ = {"concurrency": 4, "items_max": 100, "bytes_max": 1_000, "attempts_max": 3, **options}
    return PushCore(mode, backoff=Backoff(1.0, 30.0), **given_)


def arrivals(*keys: str, first: int = 1, partition: int = 1, deadline: float = 60.0, size: int = 1) -> list[Arrived]:
    return [Arrived(partition, first + n, key, size, 1, deadline, None) for n, key in enumerate(keys)]


def started(effects: list[Effect]) -> list[ProcessQueueEntry]:
    return [effect.entry for effect in effects if isinstance(effect, StartHandler)]


def outcome(effects: list[Effect]) -> list[tuple[int, Settle, bool]]:
    return [(effect.entry.seq, effect.fate, effect.confirmed) for effect in effects if isinstance(effect, SendResult)]


def test_of_a_key_the_next_begins_when_the_result_of_the_one_before_is_confirmed() -> None:
    core = make()
    first, other = started(core.arrived(arrivals("a", "a", "b"), 0.0))
    assert (first.seq, other.seq) == (1, 3)
    effects = core.handled(first, Outcome.DONE, 1.0)
    assert outcome(effects) == [(1, Settle.FINISH, True)]
    assert not started(effects)
    assert [entry.seq for entry in started(core.result_sent(first, ResultOutcome.CONFIRMED, 2.0))] == [2]


def test_a_result_that_is_not_taken_is_told_until_it_is() -> None:
    core = make()
    (entry,) = started(core.arrived(arrivals("a", "a"), 0.0))
    core.handled(entry, Outcome.DONE, 0.0)
    now = 0.0
    for _ in range(20):
        assert not core.result_sent(entry, ResultOutcome.FAILED, now)
        core.renewed(entry, now + 60.0, now)
        now += 1.0
        assert outcome(core.on_time(now)) == [(1, Settle.FINISH, True)]
    assert [each.seq for each in started(core.result_sent(entry, ResultOutcome.CONFIRMED, now))] == [2]


def test_a_message_whose_result_is_on_its_way_is_neither_renewed_nor_given_up() -> None:
    """A broker that takes long to confirm has perhaps settled it: the next one of the key waits for the answer."""
    core = make()
    (entry,) = started(core.arrived(arrivals("a", "a"), 0.0))
    core.handled(entry, Outcome.DONE, 0.0)
    assert not core.lost(entry, 0.0)  # the answer to a renewal that was on its way, too
    for now in range(30, 330, 30):
        effects = core.on_time(now)
        assert not started(effects)
        for renewed in [one for each in effects if isinstance(each, Renew) for one in each.entries]:
            assert renewed is not entry
            core.renewed(renewed, now + 60.0, now)
    assert [each.seq for each in started(core.result_sent(entry, ResultOutcome.CONFIRMED, 300.0))] == [2]


def test_a_failed_message_is_tried_again_here_and_then_becomes_a_dead_letter_until_that_is_taken() -> None:
    core = make(attempts_max=3)
    (entry,) = started(core.arrived(arrivals("a", "a"), 0.0))
    assert not core.handled(entry, Outcome.FAILED, 0.0, reason="no")
    assert core.next_deadline() == 1.0
    assert started(core.on_time(1.0)) == [entry]
    assert not core.handled(entry, Outcome.FAILED, 1.0, reason="no")
    assert started(core.on_time(3.0)) == [entry]
    assert entry.attempts == 3
    assert outcome(core.handled(entry, Outcome.FAILED, 3.0, reason="no")) == [(1, Settle.REJECT, True)]
    assert not core.result_sent(entry, ResultOutcome.FAILED, 3.0)
    assert outcome(core.on_time(4.0)) == [(1, Settle.REJECT, True)]
    assert [each.seq for each in started(core.result_sent(entry, ResultOutcome.CONFIRMED, 4.0))] == [2]


def test_without_a_limit_a_message_is_tried_for_ever() -> None:
    core = make(attempts_max=0)
    (entry,) = started(core.arrived(arrivals("a"), 0.0))
    now = 0.0
    for tries in range(1, 50):
        assert not outcome(core.handled(entry, Outcome.FAILED, now))
        now += 30.0 if tries > 5 else 2.0 ** (tries - 1)
        core.renewed(entry, now + 60.0, now)
        assert started(core.on_time(now)) == [entry]


def test_messages_without_a_key_do_not_wait_for_each_other() -> None:
    assert len(started(make(concurrency=3).arrived(arrivals("", "", "", ""), 0.0))) == 3


def test_in_normal_mode_a_failed_message_goes_back_with_a_delay_and_holds_up_nobody() -> None:
    core = make("normal", concurrency=1)
    (entry,) = started(core.arrived(arrivals("a", "a"), 0.0))
    effects = core.handled(entry, Outcome.FAILED, 0.0, reason="no", delay_s=7.0)
    assert outcome(effects) == [(1, Settle.REQUEUE, False)]
    assert (entry.delay_s, entry.reason) == (7.0, "no")
    assert [each.seq for each in started(effects)] == [2]


def test_what_is_held_is_renewed_at_half_of_its_time() -> None:
    core = make()
    first, _other = started(core.arrived(arrivals("a", "a", "b"), 0.0))
    (renew,) = core.on_time(30.0)
    assert isinstance(renew, Renew)
    assert [entry.seq for entry in renew.entries] == [1, 2, 3]  # the one that waits behind the first as well
    for entry in renew.entries:
        assert not core.renewed(entry, 90.0, 30.0)
    assert core.next_deadline() == 60.0
    assert first.deadline == 90.0


def test_in_normal_mode_what_waits_for_half_of_its_time_goes_back_untried() -> None:
    core = make("normal", concurrency=1)
    core.arrived(arrivals("", "", ""), 0.0)
    effects = core.on_time(30.0)
    assert [(seq, fate) for seq, fate, _ in outcome(effects)] == [(2, Settle.RELEASE), (3, Settle.RELEASE)]
    assert core.counts["released_waiting"] == 2
    assert core.items == 1


def test_a_message_whose_time_is_over_ends_its_handler_and_its_line_waits_for_that() -> None:
    core = make()
    (entry,) = started(core.arrived(arrivals("a"), 0.0))
    core.on_time(30.0)  # the answer to the renewal never comes
    assert core.on_time(60.0) == [CancelHandler(entry)]
    again = core.arrived(arrivals("a", deadline=120.0), 60.0)
    assert not again  # the handler of its first delivery still runs
    assert [each.seq for each in started(core.handled(entry, Outcome.CANCELLED, 61.0))] == [1]


def test_what_was_handled_but_not_confirmed_is_settled_and_not_handled_again() -> None:
    core = make()
    (entry,) = started(core.arrived(arrivals("a"), 0.0))
    core.handled(entry, Outcome.DONE, 0.0)
    core.lost_all(0.0)
    assert core.is_idle
    effects = core.arrived(arrivals("a", "a"), 1.0)
    assert outcome(effects) == [(1, Settle.FINISH, True)]
    assert not started(effects)
    assert core.counts["settled_unhandled"] == 1


def test_a_handler_that_ends_well_after_its_message_was_lost_is_not_called_again() -> None:
    core = make()
    (entry,) = started(core.arrived(arrivals("a"), 0.0))
    assert core.lost_all(0.0) == [CancelHandler(entry)]
    core.handled(entry, Outcome.DONE, 0.5)
    assert outcome(core.arrived(arrivals("a"), 1.0)) == [(1, Settle.FINISH, True)]


def test_when_one_is_lost_alone_those_behind_it_go_back_in_their_order() -> None:
    core = make()
    (entry,) = started(core.arrived(arrivals("a", "a", "a"), 0.0))
    effects = core.lost(entry, 0.0)
    assert [(seq, fate) for seq, fate, _ in outcome(effects)] == [(3, Settle.RELEASE), (2, Settle.RELEASE)]
    assert not core.items


def test_a_partition_that_is_handed_over_gives_back_what_was_not_begun_and_ends_what_was() -> None:
    core = make(concurrency=2)
    mine, other = started([*core.arrived(arrivals("a", "a", "b"), 0.0)])
    core.arrived(arrivals("z", partition=2), 0.0)
    effects = core.stop_partition(1, 0.0)
    assert [seq for seq, _, _ in outcome(effects)] == [2]
    assert not core.partition_is_idle(1)
    effects = core.handled(other, Outcome.FAILED, 1.0)  # no further try here
    assert (3, Settle.RELEASE, False) in outcome(effects)
    assert [entry.partition for entry in started(effects)] == [2]
    core.handled(mine, Outcome.DONE, 1.0)
    assert not core.partition_is_idle(1)  # the result is on its way
    core.result_sent(mine, ResultOutcome.CONFIRMED, 1.0)
    assert core.partition_is_idle(1)


def test_a_consumer_that_stops_begins_nothing_and_is_idle_when_its_results_are_confirmed() -> None:
    core = make()
    (entry,) = started(core.arrived(arrivals("a", "a"), 0.0))
    assert [seq for seq, _, _ in outcome(core.stop(0.0))] == [2]
    assert not core.is_idle
    core.handled(entry, Outcome.DONE, 0.0)
    assert not started(core.result_sent(entry, ResultOutcome.CONFIRMED, 0.0))
    assert core.is_idle


def test_no_more_is_taken_than_there_is_room_for() -> None:
    core = make(items_max=5, bytes_max=10)
    assert core.room_items == 5
    core.arrived(arrivals("a", "b", size=4), 0.0)
    assert core.room_items == 3
    core.arrived(arrivals("c", first=3, size=4), 0.0)
    assert core.room_items == 0  # of bytes


@pytest.mark.parametrize(
    ("name", "value"), [("concurrency", 0), ("items_max", 0), ("bytes_max", 0), ("attempts_max", -1)]
)
def test_bounds_that_make_no_sense_are_refused(name: str, value: int) -> None:
    options: dict[str, Any] = {"concurrency": 1, "items_max": 1, "bytes_max": 1, "attempts_max": 1, name: value}
    with pytest.raises(ValueError, match="at least"):
        PushCore("fifo", backoff=Backoff(1.0, 30.0), **options)


def test_a_backoff_grows_up_to_its_longest() -> None:
    backoff = Backoff(0.1, 30.0)
    assert [round(backoff.after(tries), 3) for tries in (1, 2, 3)] == [0.1, 0.2, 0.4]
    assert backoff.after(10_000) == 30.0
    for wrong in ((-1.0, 1.0, 2.0), (2.0, 1.0, 2.0), (1.0, 2.0, 0.5)):
        with pytest.raises(ValueError, match="back-off"):
            Backoff(*wrong)


# Under faults


def _live(world: PushWorld) -> None:
    rng = world.rng
    for _ in range(rng.randrange(10, 60)):
        match rng.randrange(8):
            case 0 | 1 | 2:
                world.publish(rng.randrange(1, 12))
            case 3:
                world.cut()
            case _:
                world.run_for(rng.choice((0.005, 1.0, 20.0, 70.0, 400.0)))
    world.faults = False
    world.run_for(20_000.0)
    world.check_all_done()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("key_queues", [True, False])
def test_everything_is_handled_in_order_under_faults(mode: Mode, key_queues: bool) -> None:
    for seed in range(SEEDS):
        _live(PushWorld(seed, mode, key_queues=key_queues))


@given(
    seed=st.integers(0, 2**32),
    mode=st.sampled_from(MODES),
    keys=st.integers(0, 6),
    concurrency=st.integers(1, 8),
    items_max=st.integers(1, 40),
    attempts_max=st.integers(1, 5),
)
@settings(deadline=None, max_examples=60)
def test_with_any_bounds(seed: int, mode: Mode, keys: int, concurrency: int, items_max: int, attempts_max: int) -> None:
    _live(PushWorld(seed, mode, keys=keys, bounds=PushBounds(concurrency, items_max, attempts_max)))


def test_a_key_that_always_fails_holds_up_no_other_key() -> None:
    """Those behind it wait; all others are done at the time at which they would be done without it."""
    for seed in range(20):
        world = PushWorld(seed, "fifo", bounds=PushBounds(attempts_max=0, items_max=200))
        world.faults = False
        world.failing["k0"] = None
        world.publish(20, key="k0")
        others = [point for key in ("k1", "k2", "") for point in world.publish(10, key=key)]
        world.run_for(2.0)
        assert all(point in world.broker.done for point in others)
        assert not any(world.broker.keys[point] == "k0" for point in world.broker.done)
        world.failing.clear()
        world.run_for(600.0)
        world.check_all_done()


def test_a_consumer_that_stops_gives_everything_back() -> None:
    for seed in range(SEEDS):
        world = PushWorld(seed, "fifo")
        world.publish(40)
        world.run_for(world.rng.choice((0.0, 0.5, 30.0)))
        world.stop()
        world.faults = False
        world.run_for(200.0)
        assert world.core.is_idle
        assert not world.core.items
        assert not world.broker.held


# Tests of the tests: a core without one of its rules does not pass


class _Hasty(PushCore):
    """Does not wait for the confirmation."""

    def _settle(self, entry: ProcessQueueEntry, fate: Settle, effects: list[Effect], reason: str = "") -> None:
        entry.fate, entry.reason = fate, reason
        effects.append(SendResult(entry, fate, True))
        self._remove(entry)


class _Forgetful(PushCore):
    """Does not remember what it owes."""

    def _owe(self, entry: ProcessQueueEntry, fate: Settle, reason: str) -> None:
        pass


class _Careless(PushCore):
    """Lets a line go on while the handler of a lost message still runs."""

    def _lose_one(self, entry: ProcessQueueEntry, effects: list[Effect]) -> None:
        super()._lose_one(entry, effects)
        assert entry.key_queue is not None
        entry.key_queue.strays = 0


class _Pushy(PushCore):
    """Goes on behind a message that was lost."""

    def _lose(self, entry: ProcessQueueEntry, effects: list[Effect]) -> None:
        if entry.phase is not Phase.GONE:
            self._lose_one(entry, effects)


class _Lazy(PushCore):
    """Renews nothing."""

    def _look_at_lease(
        self, entry: ProcessQueueEntry, now: float, renew: list[ProcessQueueEntry], effects: list[Effect]
    ) -> None:
        if entry.deadline <= now:
            self._lose(entry, effects)
        else:
            self._watch(entry, entry.deadline)


@pytest.mark.parametrize("broken", [_Hasty, _Forgetful, _Careless, _Pushy])
def test_without_a_rule_the_simulation_fails(broken: type[PushCore]) -> None:
    with pytest.raises(AssertionError):
        for seed in range(SEEDS):
            _live(PushWorld(seed, "fifo", key_queues=False, core=broken))


def test_without_renewal_a_long_handler_loses_its_message() -> None:
    def lost(core: type[PushCore]) -> int:
        world = PushWorld(1, "fifo", core=core)
        world.faults = False
        world.publish(1, key="k0")
        (entry,) = world.running
        world.forget_events()  # its handler takes long
        world.run_for(250.0)
        assert entry in world.running or core is _Lazy
        return world.core.counts["lost"]

    assert lost(PushCore) == 0
    assert lost(_Lazy) > 0


def test_a_line_keeps_the_order_of_numbers_whatever_comes_first() -> None:
    rng = Random(1)
    key_queue = KeyQueue(ProcessQueue(1), "k")
    entries = [ProcessQueueEntry(1, seq, 1, 1, 0.0, 60.0, None) for seq in range(50)]
    rng.shuffle(entries)
    for entry in entries:
        key_queue.add(entry)
    assert [entry.seq for entry in key_queue.entries] == list(range(50))


def test_an_error_of_a_handler_says_what_becomes_of_its_message() -> None:
    assert failure_of(RejectMessage("bad")) == (Outcome.REJECTED, "bad", None, True)
    assert failure_of(RetryMessage("later", delay_s=7)) == (Outcome.FAILED, "later", 7, True)
    assert type(failure_of(RetryMessage("later", delay_s=7)).delay_s) is float
    assert failure_of(ValueError("x")) == (Outcome.FAILED, "ValueError: x", None, False)
    assert len(failure_of(ValueError("\udc80é" * 1_000)).reason.encode()) <= 200


@pytest.mark.parametrize("delay_s", [float("nan"), float("inf"), -1, "soon", True, 10**400])
def test_a_delay_that_is_no_number_of_seconds_counts_as_none(delay_s: Any) -> None:
    assert failure_of(RetryMessage(delay_s=delay_s)).delay_s is None
