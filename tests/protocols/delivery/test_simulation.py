"""Reliable delivery under faults, for many seeds. ``DEP2P_SEEDS=10000`` runs as many (see docs/howto/delivery.md)."""

import os

import pytest

from dep2p.protocols.delivery.sender import DeliveryPolicy
from dep2p.protocols.delivery.states import DeliveryState
from tests.protocols.delivery.world import World

SEEDS = int(os.environ.get("DEP2P_SEEDS", "150"))


def _live(seed: int, policy: DeliveryPolicy | None = None, rejecting: float = 0.0) -> World:
    world = World(seed, policy=policy, rejecting=rejecting)
    rng = world.rng
    for _ in range(rng.randrange(20, 120)):
        match rng.randrange(12):
            case 0 | 1 | 2 | 3 | 4:
                for _ in range(rng.randrange(1, 9)):
                    world.send()
            case 5 | 6:
                world.connect()
            case 7:
                world.cut()
            case 8 if rng.random() < 0.5:
                world.crash_sender()
            case 9 if rng.random() < 0.5:
                world.crash_receiver()
            case _:
                world.run_for(rng.choice((0.005, 0.3, 2.0, 7.0)))
    return world


def _check(world: World) -> None:
    for number, times in world.handled.items():
        assert times <= 1 + world.torn.get(number, 0), f"message {number} was handled {times} times"
    for number, state in world.ends.items():
        assert state is not DeliveryState.ACKNOWLEDGED or world.handled.get(number), f"{number} was never handled"
    assert set(world.ends) | set(world.sender.unsettled) == set(world.accepted), "a message has vanished"


@pytest.mark.parametrize("block", range(10))
def test_everything_accepted_is_handled_once_whatever_happens(block: int) -> None:
    retries = 0
    for seed in range(block, SEEDS, 10):
        world = _live(seed)
        world.settle()
        _check(world)
        assert all(world.ends[number] is DeliveryState.ACKNOWLEDGED for number in world.accepted), seed
        retries += world.retries
    assert retries, "these seeds try nothing"


@pytest.mark.parametrize("block", range(10))
def test_what_is_rejected_is_never_called_acknowledged(block: int) -> None:
    for seed in range(block, SEEDS, 10):
        world = _live(seed, rejecting=0.2)
        world.settle()
        _check(world)
        for number, state in world.ends.items():
            assert state is (DeliveryState.FAILED if number in world.unwanted else DeliveryState.ACKNOWLEDGED), (
                seed,
                number,
            )


def test_a_receiver_that_dies_between_handling_and_recording_handles_again_and_only_then() -> None:
    repeated = 0
    for seed in range(40):
        world = World(seed)
        for _ in range(30):
            world.send()
            world.connect()
            world.run_for(0.4)
            world.crash_receiver()
        world.settle()
        _check(world)
        repeated += sum(times > 1 for times in world.handled.values())
    assert repeated


@pytest.mark.parametrize("block", range(10))
def test_with_few_tries_and_a_short_life_the_sender_knows_what_was_not_taken(block: int) -> None:
    ends: dict[DeliveryState, int] = {}
    for seed in range(block, SEEDS, 10):
        world = _live(seed, DeliveryPolicy(age_max_s=20.0, retries_max=0))
        world.settle()
        _check(world)
        assert not world.sender.unsettled
        for state in world.ends.values():
            ends[state] = ends.get(state, 0) + 1
    assert set(ends) == {DeliveryState.ACKNOWLEDGED, DeliveryState.FAILED, DeliveryState.EXPIRED}
