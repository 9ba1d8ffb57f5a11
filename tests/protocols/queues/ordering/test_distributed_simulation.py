"""Order by key with partitions on several nodes, from seeds; and that each part of the design is needed.

``DEP2P_ORDER_SEEDS=3000`` runs more of them.
"""

import os
from collections.abc import Callable

import pytest

from dep2p.protocols.queues.exclusive_channel import ExclusiveChannel
from dep2p.protocols.queues.ordering.placement import Served
from dep2p.protocols.queues.ordering.route_table import Route
from dep2p.protocols.queues.queue import Queue
from tests.protocols.queues.ordering.distributed_world import DistributedPlan, DistributedWorld, Node, Process
from tests.protocols.queues.ordering.world import OrderBrokenError

SEEDS = int(os.environ.get("DEP2P_ORDER_SEEDS", "24"))
BLOCKS = 4
_MUTANT_SEEDS = 80


@pytest.mark.parametrize("block", range(BLOCKS))
def test_strict_order_holds_while_nodes_and_the_controller_fail(block: int) -> None:
    """Nodes, controller and consumers crash, freeze and come back, two expansions add nodes, publishers have old
    tables: exact order, repeats of the current message only, nothing is lost, nothing goes elsewhere.
    """
    happened = moved = 0
    for seed in range(block, SEEDS, BLOCKS):
        world = DistributedWorld(seed).run()
        happened += world.counts["node"] + world.counts["home"]
        moved += world.counts["moved"]
        assert (world.order.reorderings, world.counts["elsewhere"]) == (0, 0)
    assert happened > SEEDS // BLOCKS
    assert moved, "no publisher had an old table"


@pytest.mark.parametrize("block", range(BLOCKS))
def test_best_effort_order_is_lost_only_by_what_failed_or_went_elsewhere(block: int) -> None:
    elsewhere = reorderings = 0
    for seed in range(block, SEEDS, BLOCKS):
        world = DistributedWorld(seed, DistributedPlan(order="best_effort")).run()
        elsewhere += world.counts["elsewhere"]
        reorderings += world.order.reorderings
    assert elsewhere, "no node was away when a message came: the plan shows nothing"
    assert reorderings


def test_without_faults_nothing_is_repeated_or_goes_elsewhere() -> None:
    for order in ("strict", "best_effort"):
        for seed in range(4):
            world = DistributedWorld(seed, DistributedPlan(order=order, faults=False, max_attempts=1)).run()
            assert (world.order.repeats, world.counts["refused"], world.counts["elsewhere"]) == (0, 0, 0)


def _first_broken(plan: DistributedPlan | None = None) -> str:
    for seed in range(_MUTANT_SEEDS):
        try:
            DistributedWorld(seed, plan).run()
        except OrderBrokenError as error:
            return str(error)
    return ""


def test_mutant_whose_shards_take_what_they_have_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Publishers with an old table get behind the barrier."""

    def takes(self: Served, logical: int, *, is_strict: bool) -> bool:
        del logical, is_strict
        return True

    monkeypatch.setattr(Served, "takes", takes)
    assert "is done" in _first_broken()


def test_mutant_without_the_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_readable(self: Route, partition: int, ack_floor: object) -> bool:
        del partition, ack_floor
        return True

    monkeypatch.setattr(Route, "is_readable", is_readable)
    assert "is done" in _first_broken()


def test_mutant_that_believes_ack_floors_that_are_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages that are done in an old partition come again after a crash, behind their successors in the new one."""
    plan = DistributedPlan(messages=300, crash_when_asked=0.2, faults=False)
    for seed in range(8):
        DistributedWorld(seed, plan).run()
    when_stored = Node.when_stored

    def early(self: Node, call: Callable[[], None]) -> None:
        if getattr(call, "__qualname__", "").startswith("DistributedWorld._ask_ack_floor"):
            call()
        else:
            when_stored(self, call)

    monkeypatch.setattr(Node, "when_stored", early)
    assert _first_broken(plan)


def test_mutant_without_the_fencing_check_of_the_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_fenced(self: ExclusiveChannel, partition: int, epoch: int) -> bool:
        del partition, epoch
        return False

    monkeypatch.setattr(ExclusiveChannel, "_is_fenced", is_fenced)
    assert "is in work" in _first_broken()


def test_mutant_that_leaves_a_shard_before_its_handlers_have_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """The home's word alone would not do: the shard's lock is given up too early."""
    follow = Process.follow

    def early(self: Process) -> None:
        wanted = self.controller.core.assigned
        for partition, member in self.shards.items():
            if partition not in wanted and member.is_running:
                member.leave()
                member.is_dead = False  # its handlers go on
        follow(self)

    monkeypatch.setattr(Process, "follow", early)
    assert "two consumers" in _first_broken()


def test_mutant_that_forgets_its_range_at_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    def require_served(self: Queue, messages: object) -> None:
        del messages

    monkeypatch.setattr(Queue, "_require_served", require_served)
    assert "is done" in _first_broken()
