"""Order by key under everything that can go wrong, from seeds; and that the simulation sees what each part is for.

``DEP2P_ORDER_SEEDS=3000`` runs more of them.
"""

import os
from collections.abc import Callable

import pytest

from dep2p.protocols.queues.exclusive_channel import ExclusiveChannel
from dep2p.protocols.queues.ordering.consumer_group import Group, Lease
from dep2p.protocols.queues.ordering.group_member import MemberCore, MemberState
from dep2p.protocols.queues.ordering.key_queues import KeyQueues
from dep2p.protocols.queues.ordering.route_table import Route
from dep2p.protocols.queues.registry.registry import QueueRegistry
from tests.protocols.queues.ordering.world import OrderBrokenError, Plan, World

SEEDS = int(os.environ.get("DEP2P_ORDER_SEEDS", "24"))
BLOCKS = 4
_MUTANT_SEEDS = 200
"""A mutant is found earlier; each has its own chance per seed."""


@pytest.mark.parametrize("block", range(BLOCKS))
def test_strict_order_holds_whatever_happens(block: int) -> None:
    """Loss, crashes, pauses beyond the lease, restarts of the broker, two expansions: exact order, repeats only of the
    current message, never two consumers inside a partition, and in the end everything is done."""
    happened = 0
    for seed in range(block, SEEDS, BLOCKS):
        world = World(seed).run()
        happened += sum(world.counts.values())
        assert world.order.reorderings == 0
    assert happened > SEEDS // BLOCKS * 10, "nothing went wrong: these runs show nothing"


@pytest.mark.parametrize("block", range(2))
def test_best_effort_order_is_lost_only_by_messages_that_failed(block: int) -> None:
    reorderings = 0
    for seed in range(block, SEEDS, 2):
        world = World(seed, Plan(order="best_effort")).run()
        reorderings += world.order.reorderings
    assert reorderings, "no message came back later than the next of its key: the plan shows nothing"


def test_without_faults_nothing_is_repeated_or_refused() -> None:
    for seed in range(5):
        world = World(seed, Plan(faults=False, max_attempts=1)).run()
        assert (world.order.repeats, world.counts["refused"]) == (0, 0)


def _gives(value: object) -> Callable[..., object]:
    def stand_in(*_arguments: object) -> object:
        return value

    return stand_in


def _first_broken(plan: Plan) -> str:
    for seed in range(_MUTANT_SEEDS):
        try:
            World(seed, plan).run()
        except OrderBrokenError as error:
            return str(error)
    return ""


def test_mutant_without_the_fencing_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result that comes too late counts for whoever holds the partition now: the next message begins early."""
    monkeypatch.setattr(ExclusiveChannel, "_is_fenced", _gives(False))
    assert "is in work" in _first_broken(Plan())


def test_mutant_without_the_drain_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Route, "is_readable", _gives(True))
    assert "is done" in _first_broken(Plan())


def test_mutant_without_the_scope_of_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer that wakes after its lease goes on."""

    def epoch_of(self: MemberCore, partition: int, now: float) -> int:
        hold = self.holds.get(partition)
        return hold.epoch if hold is not None and hold.state is MemberState.HELD else 0

    monkeypatch.setattr(MemberCore, "epoch_of", epoch_of)
    monkeypatch.setattr(MemberCore, "on_deadline", _gives(None))
    assert "two consumers" in _first_broken(Plan())


def test_mutant_whose_broker_does_not_wait_for_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dep2p.protocols.queues.ordering.consumer_group._DRIFT", 0.5)
    assert "two consumers" in _first_broken(Plan())


def test_mutant_that_hands_over_before_its_handlers_have_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """Release the lock, then drain: the order of QMQ's text, not of its code."""
    on_lease = MemberCore.on_lease

    def early(self: MemberCore, lease: Lease, now: float) -> None:
        for partition, hold in self.holds.items():
            if partition not in dict(lease.assigned):
                hold.open = 0
        on_lease(self, lease, now)

    monkeypatch.setattr(MemberCore, "on_lease", early)
    assert "two consumers" in _first_broken(Plan())


def test_mutant_that_tells_of_a_grant_before_it_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash takes the grant back, and the partition is given to another one under the same epoch.

    No message is out of order by that alone: deliveries are delivered when they are stored, behind the grant.
    """
    plan = Plan(messages=40, expansions=(), slow_commits=1.0, crash_when_told=0.05, faults=False)
    for seed in range(20):
        assert World(seed, plan).run().order.reorderings == 0

    def when_committed(_self: QueueRegistry, call: Callable[[], None]) -> None:
        call()

    monkeypatch.setattr(QueueRegistry, "when_committed", when_committed)
    assert "under the epoch" in _first_broken(plan)


def test_mutant_without_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KeyQueues, "join", _gives(True))
    assert "is in work" in _first_broken(Plan(faults=False))


def test_mutant_that_forgets_leases_at_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that takes every partition for free when it starts: its consumers still work."""
    monkeypatch.setattr(Group, "restore", _gives(None))
    assert _first_broken(Plan())
